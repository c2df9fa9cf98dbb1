"""Every pair of values of any two features meets in some call, held against the oracle: forward and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilewise as tw
from tilewise.capabilities import refuse
from tilewise.select import capability
from tilewise.testing.calls import evaluate, random_call
from tilewise.testing.terms import draw_terms
from tilewise.testing.tolerance import Yardstick, raise_if_failed

FEATURES = {
    "bounds": ("full", "causal", "window", "top_left"),
    "mask": ("", "segment", "row", "dense", "segment row dense"),
    "first": ("", "softcap:2", "alibi", "bias:b1qk"),
    "second": ("", "softcap:2", "alibi:bh", "bias:1hqk", "bias:b11k:-inf", "bias:k"),
    "sink": ("", "sink", "sink:bh"),
    "dropout": ("", "dropout:0.4"),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "dtype": (torch.float32, torch.float16),
    "loss": ("o", "lse", "o+lse"),
    "scale": (None, -0.3),
}
BOUNDS = {"full": tw.full(), "causal": tw.causal(), "window": tw.window(20, 3), "top_left": tw.causal("top_left")}


def legal(case: dict) -> bool:
    """A spec has each step once, and positions have one corner."""
    kinds = [case[name].partition(":")[0] for name in ("first", "second") if case.get(name)]
    return len(set(kinds)) == len(kinds) and not ("alibi" in kinds and case.get("bounds") == "top_left")


def pairwise() -> list[dict]:
    """Cases that hold every legal pair, found greedily: each takes, feature by feature, what covers the most missing pairs."""
    names = list(FEATURES)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(FEATURES[a], FEATURES[b])
        if legal({a: x, b: y})
    }
    cases = []
    while missing:
        (a, x), (b, y) = min(missing, key=str)
        case = {a: x, b: y}
        for name in names:
            if name in case:
                continue
            options = [value for value in FEATURES[name] if legal({**case, name: value})]

            def gain(value, name=name, case=case, missing=missing):
                pairs = (tuple(sorted([(name, value), item], key=lambda p: names.index(p[0]))) for item in case.items())
                return sum(pair in missing for pair in pairs)

            case[name] = max(options, key=gain)
        ordered = [(name, case[name]) for name in names]
        missing -= set(itertools.combinations(ordered, 2))
        cases.append(dict(ordered))
    return cases


CASES = pairwise()


def build(case: dict, seed: int):
    heads_q, heads_kv = case["heads"]
    shape = (2, heads_q, heads_kv, 37, 70, 16, 16)
    words = " ".join(case[name] for name in ("first", "second", "sink", "mask", "dropout") if case[name])
    spec = draw_terms(words, shape, seed=seed) & BOUNDS[case["bounds"]]
    call = random_call(shape, dtype=case["dtype"], seed=seed, spec=spec, sm_scale=case["scale"], dlse="lse" in case["loss"])
    return call.replace(do=None) if case["loss"] == "lse" else call


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("at", range(len(CASES)))
def test_pairs_of_features(at, backend):
    call = build(CASES[at], at)
    if refuse(capability(backend), call.problem):
        pytest.fail(f"{backend} refuses {call.problem}")
    raise_if_failed(Yardstick(call).judge(evaluate(call, backend), f"{backend} {CASES[at]}"))


def test_every_pair_is_there():
    for a, b in itertools.combinations(FEATURES, 2):
        for x, y in itertools.product(FEATURES[a], FEATURES[b]):
            if legal({a: x, b: y}):
                assert any(case[a] == x and case[b] == y for case in CASES), (a, x, b, y)
