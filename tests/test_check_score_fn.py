"""``check_score_fn``: it passes what is right and finds what is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

import tilewise as tw
from tilewise.arch import Runtime
from tilewise.testing import score_functions
from tilewise.testing.score_functions import EXAMPLES, check_score_fn, example
from tilewise.testing.tolerance import Mismatch


@triton.jit
def squared(score, batch, head, q_pos, kv_pos):
    return score * score * 0.1 + head


@triton.jit
def squared_slope(score, batch, head, q_pos, kv_pos):
    return score * 0.2


def squared_twin(score, batch, head, q_pos, kv_pos):
    return score * score * 0.1 + head


def of(fn=squared, twin=squared_twin, derivative=squared_slope, **more):
    return tw.score_fn(fn, twin=twin, derivative=derivative, **more)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "rooted"])
def test_examples_are_right(name):
    check_score_fn(example(name, 3, 4), batch=3, heads=4)


def test_terms_beside_the_function_play_no_part():
    check_score_fn(of() & tw.causal() & tw.softcap(2.0))


@triton.jit
def by_lanes(score, batch, head, q_pos, kv_pos):
    """Right only where queries are the rows of the tile."""
    return score + (tl.arange(0, score.shape[0]) % 4)[:, None]


@triton.jit
def hides_more(score, batch, head, q_pos, kv_pos):
    return tl.where(kv_pos == 3, -float("inf"), score)


WRONG = {
    "fn": (
        lambda: of(twin=lambda s, b, h, q, k: s * s * 0.1, name="f"),
        r"fn on tiles .* is .* and the twin .* at score .*, head 1,",
    ),
    "derivative": (
        lambda: of(derivative=1.0),
        r"derivative=1\.0 is 1 and the finite difference of the twin is .* at score",
    ),
    "triton derivative": (lambda: of(derivative=squared), r"derivative on tiles \[queries, keys\] is .* the finite difference"),
    "twin derivative": (lambda: of(twin_derivative=lambda s, *_: s), r"twin_derivative is .* and the finite difference"),
    "detached twin": (
        lambda: of(twin=lambda s, b, h, q, k: s.detach().square() * 0.1 + h, name="f"),
        "autograd is 0 and the finite",
    ),
    "order of dims": (
        lambda: of(by_lanes, twin=lambda s, b, h, q, k: s + (q - 16) % 16 % 4, derivative=1.0, name="f"),
        r"fn on tiles \[keys, queries\] is",
    ),
    "hidden keys": (lambda: of(hides_more, twin=lambda s, *_: s, derivative=1.0, name="f"), r"is -inf and the twin .*kv_pos 3 "),
    "not elementwise": (
        lambda: of(twin=lambda s, b, h, q, k: s - s.mean(-1, keepdim=True), name="f"),
        "the twin on some of the pairs is .* and on all of them",
    ),
    "nan": (lambda: of(twin=lambda s, b, h, q, k: s * s.log(), name="f"), "the twin is nan"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_finds(case):
    make, match = WRONG[case]
    with pytest.raises(Mismatch, match=match):
        check_score_fn(make())


def test_kinks_are_no_mistakes():
    spec = tw.score_fn(None, twin=lambda s, *_: torch.where(s < 2.0, s, 2.0 + 0.1 * (s - 2.0)).clamp(min=-3.0), name="kinked")
    check_score_fn(spec)


def test_it_says_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(score_functions, "runtime", lambda: Runtime((3, 9)))
    with pytest.raises(tw.BackendRefused, match="cannot run on a CPU outside Triton's interpreter"):
        check_score_fn(of())
    check_score_fn(tw.score_fn(None, twin=squared_twin))


def test_it_wants_a_function_that_is_known():
    with pytest.raises(tw.InvalidInput, match="has no score function"):
        check_score_fn(tw.causal())
    unknown = dataclasses.replace(of(), score=("fn:f/0@0123456789abcdef",))
    with pytest.raises(tw.InvalidInput, match="has not registered"):
        check_score_fn(unknown)
