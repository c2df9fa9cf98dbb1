"""The documents: generated parts are up to date, examples run, and what they point to exists."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PACKAGE = ROOT / "src" / "tilewise"
KERNELS = [PACKAGE / "bodies.py", *(PACKAGE / "backends" / "triton" / f"{name}.py" for name in ("parts", "fwd", "bwd"))]
# A file that a page names in backquotes: a path or a bare name, with a suffix that files here have.
NAMED = re.compile(r"`([\w./-]+\.(?:py|md|json|toml|png))`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def squeezed(text: str) -> str:
    return " ".join(text.split())


def broken_links(page: Path, text: str) -> list[str]:
    targets = [t for t in LINK.findall(text) if not re.match(r"[a-z]+:|#", t)]
    return [t for t in targets if not (page.parent / t.split("#")[0]).exists()]


def missing_files(text: str) -> list[str]:
    """Named files that are at no place in the repository; a path is tried below the root and below the package."""
    homes = [ROOT, PACKAGE, PACKAGE / "backends"]
    tops = ("src", "tests", "benchmarks", "docs")
    names = {p.name for top in tops for p in (ROOT / top).rglob("*")} | {p.name for p in ROOT.iterdir()}
    found = NAMED.findall(text)
    return [n for n in found if not (n in names if "/" not in n else any((home / n).exists() for home in homes))]


def test_support_table_is_up_to_date():
    support = load(ROOT / "benchmarks" / "support.py")
    assert support.updated(README.read_text()) == README.read_text(), "run: python benchmarks/support.py"
    assert support.main(["--check"]) == 0


def test_support_table_that_is_old_is_found(tmp_path, capsys):
    support = load(ROOT / "benchmarks" / "support.py")
    page = tmp_path / "README.md"
    page.write_text(f"before\n{support.BEGIN}\nold\n{support.END}\nafter\n")
    assert support.main(["--check", "--readme", str(page)]) == 1
    assert "old" in page.read_text()
    assert support.main(["--readme", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert all(f"`{row.backend}`" in text for row in support.CAPABILITIES)
    page.write_text("no markers")
    assert support.main(["--readme", str(page)]) == 2
    assert "support:begin" in capsys.readouterr().err


def test_readme_has_one_place_for_measured_figures():
    text = README.read_text()
    assert text.count("<!-- bench:begin -->") == 1
    assert text.index("<!-- bench:begin -->") < text.index("<!-- bench:end -->")


def test_readme_example_runs():
    examples = blocks(README.read_text(), "python")
    assert len(examples) == 1
    assert len(examples[0].splitlines()) <= 10
    # As a user runs it: in a process of its own, without Triton's interpreter.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", examples[0]], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("torch.Size([2, 8, 1024, 64]) torch.Size([2, 8, 1024]) torch.Size([2, 8, 1024, 64])\n")
    assert "'auto' takes it" in run.stdout


OUTPUTS = blocks((ROOT / "docs" / "outputs.md").read_text(), "python")


@pytest.mark.parametrize("at", range(len(OUTPUTS)))
def test_examples_of_outputs_run(at):
    exec(compile(OUTPUTS[at], f"docs/outputs.md, example {at + 1}", "exec"), {})


SCORES = blocks((ROOT / "docs" / "scores.md").read_text(), "python")


@pytest.mark.parametrize("at", range(len(SCORES)))
def test_examples_of_score_steps_run(at):
    assert len(SCORES) >= 5
    exec(compile(SCORES[at], f"docs/scores.md, example {at + 1}", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_point_to_files(page):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found():
    assert broken_links(README, "[a](nowhere.md#x) [b](LICENSE) [c](https://example.org) [d](#here)") == ["nowhere.md#x"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page):
    assert missing_files(page.read_text()) == []


def test_a_missing_file_is_found():
    assert missing_files("`nowhere.py` `bodies.py` `triton/fwd.py` `triton/nowhere.py`") == ["nowhere.py", "triton/nowhere.py"]


def test_quoted_kernel_lines_are_real():
    """Every line of the blocks marked ``py`` in the walk is a line of a kernel's file; comments that the walk adds are dropped."""
    real = {squeezed(line) for path in KERNELS for line in path.read_text().splitlines()}
    quoted = [line for block in blocks((ROOT / "docs" / "how-it-works.md").read_text(), "py") for line in block.splitlines()]
    assert len(quoted) > 40
    assert [line for line in quoted if line.strip() not in ("", "...") and squeezed(line) not in real] == []


def test_table_of_faults_names_mutants_and_what_kills_them():
    from tilewise.testing.gauntlet import GAUNTLET
    from tilewise.testing.mutant_list import MUTANTS

    text = (ROOT / "docs" / "how-it-works.md").read_text()
    faults = text[text.index("<!-- faults:begin -->") : text.index("<!-- faults:end -->")]
    rows = [line.split("|") for line in faults.splitlines() if line.startswith("|")][2:]
    mutants = {m.name: m for m in MUTANTS}
    assert len(rows) >= 10
    for _, fault, mutant, killer, _ in rows:
        known = mutants[mutant.strip(" `")]
        assert known.equivalent is None, fault
        assert killer.strip(" `") in known.killers, fault
        assert killer.strip(" `") in {e.name for e in GAUNTLET}, fault
    seed = [line.split("|")[3] for line in text[text.index("<!-- faults:end -->") :].splitlines() if line.startswith("|")][2:]
    assert len(seed) >= 5
    assert {name for cell in seed for name in re.findall(r"`(\w+)`", cell)} <= {e.name for e in GAUNTLET}


def test_pictures_are_small_and_all_shown():
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.png"))
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < 150_000, picture.name
        assert f"pictures/{picture.name}" in text


def test_draw_writes_the_pictures_that_are_committed(tmp_path):
    pytest.importorskip("matplotlib")
    draw = load(ROOT / "docs" / "draw.py")
    assert draw.main(["--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.glob("*.png")} == {p.name for p in (ROOT / "docs" / "pictures").glob("*.png")}


@pytest.mark.parametrize("page", ["masks.md", "dropout.md", "derivatives.md"])
def test_examples_of_the_page_run(page, tmp_path):
    pytest.importorskip("matplotlib")
    examples = blocks((ROOT / "docs" / page).read_text(), "python")
    assert examples
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for example in examples:
        command = [sys.executable, "-c", example]
        run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stderr
