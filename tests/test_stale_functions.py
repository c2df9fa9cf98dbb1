"""Edited score functions never meet what was made for their older selves: in one process, and across some with a warm cache."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from small_calls import close, draw

import tilewise as tw
from tilewise import ops
from tilewise.arch import ARCHS, Runtime
from tilewise.backends import launching
from tilewise.testing import compile_only

SOURCE = '''
import torch
import triton
import triton.language as tl
import tilewise as tw

FACTOR = tl.constexpr({factor})
OFFSET = 0.5

@triton.jit
def helper(score):
    return score * {helper}

@triton.jit
def scaled(score, batch, head, q_pos, kv_pos):
    return helper(score) * FACTOR + {body}

@triton.jit
def slope(score, batch, head, q_pos, kv_pos):
    return score * 0.0 + {slope}

def twin(score, batch, head, q_pos, kv_pos):
    return score * 2.0 + {twin}

def spec():
    return tw.score_fn(scaled, twin=twin, derivative=slope)
'''
PLAIN = {"factor": "2.0", "helper": "1.0", "body": "0.0", "slope": "2.0", "twin": "0.0"}
EDITS = {
    "body": {"body": "kv_pos * 0.5"},
    "callee": {"helper": "3.0"},
    "global": {"factor": "5.0"},
    "derivative": {"slope": "2.5"},
    "twin": {"twin": "1.0"},
    "all": {"body": "kv_pos * 0.5", "twin": "kv_pos * 0.5"},
}
Q, K, V = draw(1, 2, 5, 16, seed=1), draw(1, 2, 7, 16, seed=2), draw(1, 2, 7, 16, seed=3)


def written(folder, edit=None, name="scores"):
    path = folder / f"{name}.py"
    path.write_text(SOURCE.format(**PLAIN | (EDITS[edit] if edit else {})))
    return path


def loaded(path):
    """The module, its source read anew: bytecode and lines that Python keeps go by size and time, which edits here may share."""
    linecache.clearcache()
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(path.read_text(), path, "exec"), vars(module))
    return module


@pytest.mark.parametrize("edit", EDITS)  # each of one thing: what the twin says plays no part here
def test_an_edit_is_another_step(tmp_path, edit):
    first, again = loaded(written(tmp_path)), loaded(written(tmp_path))
    assert str(first.spec()) == str(again.spec())
    edited = loaded(written(tmp_path, edit))
    assert str(edited.spec()) != str(first.spec())
    assert str(first.spec()).partition("@")[0] == str(edited.spec()).partition("@")[0]


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_one_process_runs_both_versions(tmp_path, backend):
    old = loaded(written(tmp_path)).spec()
    before = tw.attention(Q, K, V, spec=old, backend=backend)
    new = loaded(written(tmp_path, "all")).spec()
    after = tw.attention(Q, K, V, spec=new, backend=backend)
    close(before, tw.reference(Q, K, V, old)[0])
    close(after, tw.reference(Q, K, V, new)[0])
    assert (before - after).abs().max() > 1e-2
    close(tw.attention(Q, K, V, spec=old, backend=backend), before, 0.0)


def test_what_is_kept_has_keys_of_its_own(tmp_path):
    old, new = loaded(written(tmp_path)).spec(), loaded(written(tmp_path, "callee")).spec()
    ops._bound.clear()
    for spec in (old, new, old):
        tw.attention(Q, K, V, spec=spec, backend="torch")
    assert len(ops._bound) == 2
    problems = [
        tw.Problem.parse(f"seqlen=64 head_dim=64 heads=2 mask={spec}", ARCHS["sm_90"], Runtime((3, 9))) for spec in (old, new, old)
    ]
    keys = [_key(problem) for problem in problems]
    assert keys[0] == keys[2]
    assert keys[0] != keys[1]


def _key(problem):
    """The key under which a kept launch of the forward pass would be found."""
    from tilewise.backends import triton as backend
    from tilewise.configs import lookup

    plan = backend._fwd(problem, lookup(problem, "fwd"))
    tensors = compile_only._tensors(problem)
    given = [tensors[name] for name in ("q", "k", "v", "o", "lse")]
    return launching.Plan._key(plan, (0, *((t.dtype, t.stride(), 0) for t in given)))


@pytest.mark.parametrize("name, value", [("FACTOR", 3.0), ("helper", None)])
def test_a_change_behind_a_spec_is_refused(tmp_path, name, value):
    module = loaded(written(tmp_path))
    spec = module.spec()
    tw.attention(Q, K, V, spec=spec)
    other = loaded(written(tmp_path, "callee", "others"))
    setattr(module, name, other.helper if value is None else type(module.FACTOR)(value))
    with pytest.raises(tw.InvalidInput, match=f"score function 'scaled' uses {name}, which has changed since"):
        tw.attention(Q, K, V, spec=spec)
    again = module.spec()
    assert str(again) != str(spec)
    tw.attention(Q, K, V, spec=again)


def test_a_global_that_no_function_reads_may_change(tmp_path):
    module = loaded(written(tmp_path))
    spec = module.spec()
    module.OFFSET = 7.0
    tw.attention(Q, K, V, spec=spec)


def test_closures_count():
    def spec(offset):
        return tw.score_fn(None, twin=lambda score, *_: score + offset, name="closed")

    assert str(spec(1.0)) == str(spec(1.0))
    assert str(spec(1.0)) != str(spec(2.0))
    table = torch.ones(3)
    assert str(spec(table)) == str(spec(table))


CHILD = """
import hashlib, importlib.util, json, sys
from tilewise.arch import ARCHS
from tilewise.problem import Problem
from tilewise.testing import compile_only

compile_only.use_target("sm_90")
found = importlib.util.spec_from_file_location("scores", sys.argv[1])
module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
problem = Problem.parse(f"seqlen=64 head_dim=64 heads=2 grad=qkv mask={module.spec()}", ARCHS["sm_90"])
out = {}
for name, (_, launch) in compile_only.launches_of(problem).items():
    if name != "delta":
        compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
        lines = compiled.asm["ptx"].partition(".section")[0].splitlines()
        code = "\\n".join(line for line in lines if not line.lstrip().startswith((".loc", ".file", "//")))
        out[name] = [compiled.hash, hashlib.sha256(code.encode()).hexdigest()]
print(json.dumps(out))
"""


def compiled(path: Path, cache: Path) -> dict[str, list[str]]:
    """By pass, the key in the disk cache and a hash of the code, from a fresh process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-B", "-c", CHILD, str(path)], env=environment, text=True, capture_output=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_warm_disk_cache_never_serves_an_older_version(tmp_path):
    """Compiled for a GPU that is not there, by a fresh process after each edit of the file."""
    cache = tmp_path / "cache"
    cache.mkdir()
    first = compiled(written(tmp_path), cache)
    kept = sorted(p.name for p in cache.iterdir())
    assert compiled(written(tmp_path), cache) == first
    assert sorted(p.name for p in cache.iterdir()) == kept, "the same source was compiled twice"
    for edit in ("body", "callee", "global", "derivative"):
        now = compiled(written(tmp_path, edit), cache)
        assert set(now) == {"fwd", "dq", "dkdv"}
        for name, (key, code) in now.items():
            assert key != first[name][0], (edit, name)
            # The forward pass has no use for a derivative.
            assert (code == first[name][1]) == (edit == "derivative" and name == "fwd"), (edit, name)
