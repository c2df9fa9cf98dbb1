"""Backends x problems, generated from the capability table: what it accepts must match, what it refuses must say why."""

import dataclasses
import itertools

import pytest
import torch

from tilewise import CAPABILITIES, BackendRefused, attention
from tilewise.arch import ARCHS, Arch, Runtime
from tilewise.capabilities import refuse
from tilewise.problem import DTYPES, PRECISIONS, Problem
from tilewise.select import choose
from tilewise.spec import Spec, causal, full, window
from tilewise.testing.calls import evaluate, random_call
from tilewise.testing.tolerance import Yardstick, raise_if_failed

LIMITS = sorted({c.max_head_dim for c in CAPABILITIES if c.max_head_dim is not None})
# On both sides of every limit in the table, for either head_dim.
HEAD_DIMS = [(16, 16), *itertools.chain.from_iterable(((n, 16), (16, n), (n + 1, 16), (16, n + 1)) for n in LIMITS), (600, 600)]
MASKS = (full(), causal(), window(9, 4, "top_left"))


def _calls():
    for dtype, (head_dim, head_dim_v) in itertools.product(DTYPES, HEAD_DIMS):
        for precision in (None, *PRECISIONS) if dtype == "float32" else (None,):
            if precision is None or head_dim == head_dim_v:
                yield dtype, head_dim, head_dim_v, precision


CALLS = list(_calls())


@pytest.mark.parametrize("backend", [c.backend for c in CAPABILITIES])
@pytest.mark.parametrize("dtype, head_dim, head_dim_v, precision", CALLS)
def test_accepted_matches_and_refused_says_why(backend, dtype, head_dim, head_dim_v, precision):
    capability = next(c for c in CAPABILITIES if c.backend == backend)
    spec = MASKS[CALLS.index((dtype, head_dim, head_dim_v, precision)) % len(MASKS)]
    shape = (1, 2, 1, 19, 35, head_dim, head_dim_v)
    call = random_call(shape, dtype=getattr(torch, dtype), spec=spec, precision=precision, dlse=True)
    reasons = refuse(capability, call.problem)
    if reasons:
        with pytest.raises(BackendRefused) as caught:
            evaluate(call, backend)
        assert list(caught.value.reasons) == reasons
        assert all(str(reason) in str(caught.value) for reason in reasons)
    else:
        raise_if_failed(Yardstick(call).judge(evaluate(call, backend), backend))


NEW = Runtime((3, 9))
SOFTWARE = {"none": Runtime(None), "old": Runtime((3, 5)), "new": NEW, "interpreted": Runtime((3, 9), True)}
PROBLEM = Problem.parse("seqlen=64 head_dim=64", ARCHS["sm_90"], NEW)
OLD = Arch("sm_75", "cuda", 65_536)


def test_every_backend_takes_something_and_every_limit_refuses_something():
    """What this machine cannot run is in the table all the same: over all processors, each row has both verdicts."""
    for c in CAPABILITIES:
        size = c.head_dims[0][0] if c.head_dims else 16
        problem = dataclasses.replace(PROBLEM, dtype=c.dtypes[0], head_dim=size, head_dim_v=size, grad=c.gradients)
        archs = [a for a in ARCHS.values() if not refuse(c, dataclasses.replace(problem, arch=a))]
        assert archs, c.backend
        problem = dataclasses.replace(problem, arch=archs[0])
        if c.max_head_dim is not None:
            over = dataclasses.replace(problem, head_dim=c.max_head_dim + 1, head_dim_v=c.max_head_dim + 1)
            assert "head_dim" in {r.code for r in refuse(c, over)}
        for dtype in set(DTYPES) - set(c.dtypes):
            assert "dtype" in {r.code for r in refuse(c, dataclasses.replace(problem, dtype=dtype))}
        for letter in set("qkv") - set(c.gradients):
            assert "gradient" in {r.code for r in refuse(c, dataclasses.replace(problem, grad=letter))}
        if c.bulk_only:
            assert "layout" in {r.code for r in refuse(c, dataclasses.replace(problem, bulk=False))}
        if c.head_dims is not None:
            assert "head_dim" in {r.code for r in refuse(c, dataclasses.replace(problem, head_dim_v=size * 2))}
        for head_dim, head_dim_v in c.forward_only:
            other = dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)
            assert [r.code for r in refuse(c, other)] == ["gradient"]
            assert not refuse(c, dataclasses.replace(other, grad=""))
        for head_dim, head_dim_v in c.plain_gradients:
            other = dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim_v, grad="qkv")
            capped = dataclasses.replace(other, spec=Spec(score=("softcap:3.0",)))
            assert not refuse(c, other)
            assert [r.code for r in refuse(c, capped)] == ["gradient"]
            assert not refuse(c, dataclasses.replace(capped, grad=""))


# Kernels that keep nothing hold whole rows of such heads, which a small processor has no room for.
WIDE_AND_SMALL = {"head_dim": 300, "head_dim_v": 300, "dtype": "float32", "arch": ARCHS["sm_86"], "grad": "qkv"}


def _codes(backend, **changes):
    capability = next(c for c in CAPABILITIES if c.backend == backend)
    return [reason.code for reason in refuse(capability, dataclasses.replace(PROBLEM, **changes))]


@pytest.mark.parametrize(
    "changes, codes",
    [
        ({}, []),
        ({"arch": ARCHS["gfx942"]}, []),
        ({"arch": ARCHS["sm_80"]}, []),
        ({"arch": OLD}, ["arch"]),
        ({"arch": ARCHS["cpu"]}, ["device"]),
        ({"arch": ARCHS["cpu"], "runtime": SOFTWARE["interpreted"]}, []),
        ({"arch": Arch("xpu", "xpu")}, ["device"]),
        ({"runtime": SOFTWARE["none"]}, ["triton"]),
        ({"runtime": SOFTWARE["old"]}, ["triton"]),
        ({"runtime": SOFTWARE["interpreted"]}, ["interpreter"]),
        ({"dtype": "float64"}, ["dtype"]),
        ({"head_dim": 513}, ["head_dim"]),
        ({"head_dim": 513, "head_dim_v": 600, "dtype": "float64"}, ["dtype", "head_dim", "head_dim"]),
        ({"dtype": "float32", "precision": "tf32"}, []),
        ({**WIDE_AND_SMALL, "spec": Spec(dropout="0.1")}, ["shared_memory"]),
        ({**WIDE_AND_SMALL, "jvp": "qkv"}, ["shared_memory"]),
        ({**WIDE_AND_SMALL, "grad": "qkva"}, ["shared_memory"]),
        ({**WIDE_AND_SMALL, "spec": Spec(dropout="0.1"), "grad": ""}, []),
        ({**WIDE_AND_SMALL, "spec": Spec(dropout="0.1"), "dtype": "float16"}, []),
        (WIDE_AND_SMALL, []),
        ({"dtype": "float32", "precision": "tf32", "arch": ARCHS["gfx942"]}, ["precision"]),
        ({"arch": ARCHS["cpu"], "runtime": SOFTWARE["none"], "dtype": "float64"}, ["device", "triton", "dtype"]),
    ],
)
def test_triton_lists_all_its_reasons(changes, codes):
    assert _codes("triton", **changes) == codes


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("arch", [*ARCHS.values(), OLD])
@pytest.mark.parametrize("software", SOFTWARE.values(), ids=SOFTWARE)
def test_backends_without_triton_run_anywhere(backend, arch, software):
    for dtype in DTYPES:
        assert _codes(backend, arch=arch, runtime=software, dtype=dtype, head_dim=1000) == []
    assert _codes(backend, dtype="float32", precision="tf32") == ["precision"]


def test_auto_takes_the_first_that_accepts_and_never_the_oracle():
    for arch, software, dtype in itertools.product([*ARCHS.values(), OLD], SOFTWARE.values(), DTYPES):
        problem = dataclasses.replace(PROBLEM, arch=arch, runtime=software, dtype=dtype)
        first = next(c.backend for c in CAPABILITIES if c.auto and not refuse(c, problem))
        assert choose(problem).backend == first
        assert first != "reference"


def test_a_named_backend_never_falls_back():
    q = torch.zeros(1, 1, 2, 600)
    assert attention(q, q, q).shape == q.shape
    with pytest.raises(BackendRefused, match="head_dim is 600, it takes up to 512") as caught:
        attention(q, q, q, backend="triton")
    assert "Accepted by: 'torch', 'reference'" in str(caught.value)
