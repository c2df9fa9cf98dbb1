"""Compilers start as soon as the tests that wait for them are known."""

import compiling
import pytest


def pytest_collection_finish(session):
    if not session.config.option.collectonly:
        asking = [item for item in session.items if "reports" in getattr(item, "fixturenames", ())]
        compiling.put_in_line([module.COMMANDS for module in dict.fromkeys(item.module for item in asking)])


def pytest_sessionfinish():
    compiling.give_up()


@pytest.fixture(scope="module")
def reports(request):
    """What the module's commands printed."""
    return [report for command in request.module.COMMANDS.values() for report in compiling.reports_of(*command)]
