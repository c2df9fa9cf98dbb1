"""Triton's kernels run in its interpreter on CPU tensors, so that every test runs on every machine."""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("Triton was imported before the tests could ask for its interpreter: run them with TRITON_INTERPRET=1.")
# Before anything imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Records of whoever runs the tests are not theirs to be tested with: this folder is not there.
os.environ["TILEWISE_CONFIG_DIR"] = os.path.join(os.path.dirname(__file__), "no-records")

import pytest

from tilewise.testing.interpreter import quicken

quicken()

# What takes longest, which is begun first, and files whose tests share what is made once in a process.
LONGEST = "test_every_mutant_is_killed"
TOGETHER = ("test_bench.py", "test_check.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name != LONGEST)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is installed
def pytest_xdist_make_scheduler(config, log):
    """Tests go to processes one by one, but a file of ``TOGETHER`` as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Scheduling(config, log)
