"""The import chain, and what importing the package does not do."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(tilewise.__file__).parent
# Each layer may import from itself and from the layers before it.
LAYERS = (
    ("errors", "arch"),
    ("checks", "conjunction", "spec", "terms", "masks", "bodies", "functions"),
    ("operands", "problem", "keep", "plain"),
    ("plan", "capabilities", "configs"),
    ("reference", "backends"),
    ("select",),
    ("batching", "ops", "ops_jvp", "ops_second"),
    ("tile_map", "api", "merge", "cache", "second_pass"),
    ("parallel", "integrations", "cli", "testing"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ENTRY = {"__init__", "__main__"}  # the package's own door: may import anything
LEVEL["__init__"] = len(LAYERS) - 1  # and the outermost layer may come in by it, as users do


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def imports_of(name: str, tree: ast.AST) -> set[str]:
    """Dotted names below the package that a module imports, wherever in its text the import stands."""
    path = MODULES[name]
    package = list(path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] or "__init__" for alias in node.names if alias.name.split(".")[0] == "tilewise"}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] if node.level > 1 else package
                base = [*base, *(node.module.split(".") if node.module else [])]
            elif node.module and node.module.split(".")[0] == "tilewise":
                base = node.module.split(".")[1:]
            else:
                continue
            for alias in node.names:
                target = ".".join([*base, alias.name])
                found.add(target if target in MODULES else ".".join(base) or "__init__")
    return found


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
EDGES = sorted((name, target) for name, tree in TREES.items() if name not in ENTRY for target in imports_of(name, tree))


def test_every_module_has_a_layer():
    assert {name.split(".")[0] for name in MODULES} - ENTRY <= set(LEVEL)


def test_the_parser_sees_imports():
    assert ("ops", "select") in EDGES
    assert ("plan", "bodies") in EDGES
    assert any(name.startswith("backends.") and target == "problem" for name, target in EDGES)


def test_imports_point_one_way():
    wrong = [
        f"{name} imports {target}"
        for name, target in EDGES
        if target.split(".")[0] != name.split(".")[0] and LEVEL.get(target.split(".")[0], 99) > LEVEL[name.split(".")[0]]
    ]
    assert not wrong


def test_no_cycles_between_modules_of_one_layer():
    tops = {(a.split(".")[0], b.split(".")[0]) for a, b in EDGES}
    assert not [(a, b) for a, b in tops if a != b and (b, a) in tops]
    assert not [name for name, target in EDGES if target == "__init__" and LEVEL[name.split(".")[0]] < len(LAYERS) - 1]


def test_backends_do_not_import_one_another():
    def backend(name: str) -> str | None:
        parts = name.split(".")
        is_package = len(parts) > 1 and (ROOT / "backends" / parts[1]).is_dir()
        is_backend = len(parts) > 1 and (is_package or parts[1] == "torch_tiles")
        return parts[1] if parts[0] == "backends" and is_backend else None

    assert {backend(name) for name in MODULES} >= {"triton", "torch_tiles"}
    assert not [(a, b) for a, b in EDGES if backend(a) and backend(b) and backend(a) != backend(b)]


def test_layers_know_only_what_they_may():
    heavy = ("torch", "triton", "numpy", "os")
    for name in ("spec", "bodies", "errors", "capabilities"):
        names = {
            alias.split(".")[0]
            for node in ast.walk(TREES[name])
            for alias in ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
            + ([node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
        }
        assert not names & set(heavy), name


def test_triton_is_imported_at_the_top_of_its_own_backends_only():
    for name, tree in TREES.items():
        kernels = name.startswith("backends.") and name != "backends.torch_tiles"
        if kernels or name.startswith(("testing", "cli")):
            continue
        for node in tree.body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not any(n.split(".")[0] == "triton" for n in names), name


def test_library_reads_one_environment_variable_of_its_own():
    """Where the user's records lie; where such folders are is the platform's variable."""
    found = set()
    for name, path in MODULES.items():
        if name.split(".")[0] not in ("cli", "testing"):
            text = path.read_text()
            read = set(re.findall(r"os\.environ\.get\(\"(\w+)\"\)", text))
            assert text.count("environ") == len(read), name
            assert "getenv" not in text, name
            found |= {(name, variable) for variable in read}
    assert found == {("configs.records", "TILEWISE_CONFIG_DIR"), ("configs.records", "XDG_CONFIG_HOME")}


def test_no_assert_in_the_source():
    assert not [name for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def run(code: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

{how}
import torch
import tilewise as tw
q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
o = tw.attention(q, k, v, causal=True)
assert torch.allclose(o.double(), tw.reference(q, k, v, tw.causal())[0], atol=1e-5)
o.sum().backward()
text = tw.explain(q, k, v)
assert "triton: Triton is not installed" in text, text
assert tw.Problem.bind(q, k, v, tw.causal()).runtime.triton is None
try:
    tw.attention(q, k, v, backend="triton")
except tw.BackendRefused as refusal:
    assert [reason.code for reason in refusal.reasons] == ["device", "triton"]
    print("refused")
"""


@pytest.mark.parametrize("how", ["sys.meta_path.insert(0, Block())", 'sys.modules["triton"] = None'])
def test_attention_runs_where_triton_cannot_be_imported(tmp_path, how):
    assert run(BLOCKED.format(how=how), tmp_path) == "refused"


QUIET = """
import os, sys, threading
import torch
before = (set(sys.modules), torch.get_num_threads(), threading.active_count(), torch.get_default_dtype(), dict(os.environ))
flags = (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(), torch.initial_seed(), torch.is_grad_enabled())
class Watched(type(os.environ)):
    def __getitem__(self, key):
        if sys._getframe(1).f_globals.get("__name__", "").startswith("tilewise"):
            raise SystemExit(f"read {key}")
        return super().__getitem__(key)
os.environ.__class__ = Watched
import tilewise
assert "triton" not in set(sys.modules) - before[0], "triton was imported"
assert "numpy" in before[0] or "numpy" not in sys.modules
assert "matplotlib" not in sys.modules and "tqdm" not in set(sys.modules) - before[0]
after = (torch.get_num_threads(), threading.active_count(), torch.get_default_dtype(), dict(os.environ))
assert after == before[1:], (before[1:], after)
now = (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(), torch.initial_seed(), torch.is_grad_enabled())
assert now == flags
assert not torch.cuda.is_initialized()
assert not os.listdir("."), "a file was written"
print("quiet")
"""


def test_importing_has_no_side_effect(tmp_path):
    assert run(QUIET, tmp_path) == "quiet"


def test_public_names_exist_and_are_documented():
    for name in tilewise.__all__:
        value = getattr(tilewise, name)
        assert name == "CAPABILITIES" or value.__doc__, name
