"""The assembly of the score steps, read word by word and run on numbers: a small machine for the PTX that these kernels hold."""

import math
import re
import struct

import numpy as np
import pytest

pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")

from tilewise.backends.hopper import common, hasty, parts, terms

LOG2_E = math.log2(math.e)


def _number(word):
    if word.startswith("0f"):
        return np.float32(struct.unpack(">f", bytes.fromhex(word[2:]))[0])
    return int(word, 16) if word.startswith("0x") else np.float32(word)


def _bits(x):
    return struct.unpack("<i", struct.pack("<f", x))[0] if isinstance(x, np.float32) else x


def _float(x):
    return x if isinstance(x, np.float32) else np.float32(struct.unpack("<f", struct.pack("<i", x))[0])


ARITHMETIC = {
    "mul": lambda a, b: a * b, "add": lambda a, b: a + b, "neg": lambda a: -a, "abs": abs, "max": max, "mov": lambda a: a,
    "fma": lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c)),
    "ex2": np.exp2, "rcp": lambda a: np.float32(1) / a, "tanh": np.tanh,
}  # fmt: skip
COMPARISONS = {
    "gt": lambda a, b: a > b, "lt": lambda a, b: a < b, "ge": lambda a, b: a >= b, "num": lambda a, b: a == a and b == b,
}  # fmt: skip


def run(text, registers):
    """The registers after the text, for one thread that is a warp of its own."""
    statements = [s for s in re.split(r"[;{}\n]\s*|(?<=:)\s+", text) if s.strip()]
    labels = {s.strip()[:-1]: n for n, s in enumerate(statements) if s.strip().endswith(":")}
    at = 0
    while at < len(statements):
        words = statements[at].replace(",", " ").split()
        at += 1
        if words[0].startswith(".reg") or words[0].endswith(":"):
            continue
        if words[0].startswith("@"):
            predicate = words.pop(0)[1:]
            if registers[predicate.lstrip("!")] == predicate.startswith("!"):
                continue
        name, *kinds = words[0].split(".")
        target, *values = words[1:]
        if name == "bra":
            at = labels[target]
            continue
        if name == "st":
            registers["stored"] = True
            continue
        read = [registers[v] if v in registers else _number(v) for v in values]
        if name == "vote":
            registers[target] = read[0]
        elif name == "setp":
            registers[target] = bool(COMPARISONS[kinds[0]](*(_float(x) for x in read[:2]))) and all(read[2:])
        elif kinds[0] in ("s32", "b32"):
            registers[target] = ARITHMETIC[name](*(_bits(x) for x in read))
        else:
            registers[target] = np.float32(ARITHMETIC[name](*(_float(x) for x in read)))
    return registers


def _names(letter, count):
    return tuple(f"{letter}{n}" for n in range(count))


def _given(**values):
    return {f"{name}{n}": np.float32(x) for name, given in values.items() for n, x in enumerate(np.atleast_1d(given))}


@pytest.mark.parametrize("exp2", [False, True])
@pytest.mark.parametrize("largest", [1 / 5, 1 / 3, 0.9, 4.0])  # of the cap: each series, and exp2
@pytest.mark.parametrize("cap, scale", [(50.0, 0.088), (2.0, -0.7)])
def test_capped(cap, scale, largest, exp2):
    rng = np.random.default_rng(0)
    s = np.append(rng.uniform(-1, 1, 7), -1.0) * largest * abs(cap / scale)
    numbers = common.cap_numbers(cap * LOG2_E, scale * LOG2_E)
    out, names = _names("o", 8), _names("s", 8)
    made = terms._exp2_capped_text if exp2 else terms._capped_text
    text = made((out,), (names, ("in0",), ("in1",), ("in2",), ("in3",)))
    found = run(text, _given(s=s, **{"in": numbers[:4]}))
    want = cap * LOG2_E * np.tanh(s.astype(np.float32).astype(float) * scale / cap)
    got = np.array([found[o] for o in out], float)
    error = np.abs((np.log2(got) if exp2 else got) - want)
    assert np.all(error <= 1e-6 * np.abs(want) + 5e-7 * cap * (largest > 0.5) + 2e-7 * exp2)


@pytest.mark.parametrize("quad", range(4))
def test_leaning(quad):
    s = np.random.default_rng(2).normal(size=32).astype(np.float32)
    slope, scale, pivot, first = 0.37, 0.125, 2.5, -300
    inputs = (_names("s", 32), ("p0", "p1"), ("f0",), ("k0",), ("q0",))
    registers = _given(s=s, p=[pivot, pivot], f=first + 2 * quad, k=slope, q=scale)
    run(hasty._leaning_text((_names("o", 32),), inputs), registers)
    column = np.array([n // 4 * 8 + 2 * quad + n % 2 for n in range(32)])
    want = s * scale + slope * (first + column) - pivot
    np.testing.assert_allclose([registers[f"o{n}"] for n in range(32)], want, rtol=1e-6)


@pytest.mark.parametrize("lean", [False, True])
def test_doubt(lean):
    for sums, bad in (((1.0, 2.0), False), ((2.0**-40, 1.0), lean), ((1.0, 2.0**-40), lean), ((1.0, 2.0**120), True)):
        assert _doubts(sums, [1.0] * 8, lean) == bad
    assert _doubts((1.0, 2.0**20), [1.0, 1.0, 1.0, math.inf] * 2, lean)
    assert not _doubts((1.0, 1.0), [math.inf] * 8, lean)  # as the careful form would have it
    assert _doubts((math.nan, 1.0), [math.nan, math.nan, 1.0, 1.0] * 2, lean)


def _doubts(sums, o, lean):
    made = parts._lean_doubt_text if lean else parts._doubt_text
    return "stored" in run(made((), (_names("o", 8), ("l0", "l1"), ("counter",))), _given(o=o, l=sums))
