"""What the ``hopper`` backend takes and refuses, and which configs are legal. Nothing here needs a GPU or Triton."""

import dataclasses
import random

import pytest

from tilewise import BackendRefused
from tilewise.arch import ARCHS, Runtime
from tilewise.backends.walk import tiles_of_consumer, tiles_of_program
from tilewise.bodies import allowed
from tilewise.capabilities import CAPABILITIES, refuse
from tilewise.configs.hopper import CHOICES, PICKED, HopperConfig, columns, illegal, lookup, packs, shared_memory, suits_guard
from tilewise.problem import Problem
from tilewise.select import choose
from tilewise.spec import Spec

ROW = next(row for row in CAPABILITIES if row.backend == "hopper")


def _problem(text, triton=(3, 9)):
    return Problem.parse(text, software=Runtime(triton))


def _words(pair):
    return f"{pair[0]}/{pair[1]}"


def test_the_table_and_the_configs_name_the_same_sizes():
    assert set(ROW.head_dims) == set(CHOICES)


@pytest.mark.parametrize("size, width", [(64, 64), (96, 32), (128, 128), (192, 64), (256, 256)])
def test_a_chunk_is_the_widest_power_of_two_that_divides(size, width):
    assert columns(size) == width


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", ["64", "96", "128", "192/128", "192", "256"])
@pytest.mark.parametrize("mask", ["full", "causal", "upper:3,lower:5"])
def test_it_takes(dtype, head_dim, mask):
    assert not refuse(ROW, _problem(f"dtype={dtype} seqlen=7x300 heads=8/2 head_dim={head_dim} mask={mask} arch=sm_90"))


@pytest.mark.parametrize("grad", ["", "q", "k", "v", "kv", "qkv"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_auto_takes_it_for_training_too(head_dim, grad):
    words = f" grad={grad}" if grad else ""
    problem = _problem(f"seqlen=300 heads=8/2 head_dim={head_dim} mask=causal arch=sm_90{words}")
    assert problem.grad == grad
    assert ROW.gradients == "qkvbs"
    assert not ROW.always_deterministic
    assert choose(problem).backend == "hopper"
    assert choose(problem, "hopper").backend == "hopper"


@pytest.mark.parametrize(
    "text, code",
    [
        ("seqlen=64 head_dim=64 arch=sm_80", "arch"),
        ("seqlen=64 head_dim=64 arch=sm_100", "arch"),
        ("seqlen=64 head_dim=64 arch=cpu", "device"),
        ("seqlen=64 head_dim=64 arch=sm_90 dtype=float32", "dtype"),
        ("seqlen=64 head_dim=80 arch=sm_90", "head_dim"),
        ("seqlen=64 head_dim=128/64 arch=sm_90", "head_dim"),
        ("seqlen=64 head_dim=128/192 arch=sm_90", "head_dim"),
        ("seqlen=64 head_dim=192/128 arch=sm_90 grad=k mask=softcap:3", "gradient"),
        ("seqlen=64 head_dim=64 arch=sm_90 layout=strided", "layout"),
    ],
)
def test_it_refuses_for_one_reason(text, code):
    assert [reason.code for reason in refuse(ROW, _problem(text))] == [code]


@pytest.mark.parametrize("triton", [None, (3, 6), (3, 8)])
def test_it_refuses_an_older_triton(triton):
    assert [reason.code for reason in refuse(ROW, _problem("seqlen=64 head_dim=64 arch=sm_90", triton))] == ["triton"]


def test_a_refusal_by_name_says_why_and_auto_goes_elsewhere():
    problem = _problem("seqlen=64 head_dim=40 arch=sm_90 grad=qkv")
    with pytest.raises(BackendRefused, match="head_dim is 40 and head_dim_v 40, it takes 64, 96, 128, 192/128, 192, 256"):
        choose(problem, "hopper")
    assert choose(problem).backend == "triton"


@pytest.mark.parametrize("pair", CHOICES)
def test_every_choice_is_legal(pair):
    problem = _problem(f"seqlen=64 head_dim={_words(pair)} arch=sm_90")
    assert [illegal(problem, config) for config in CHOICES[pair]] == [None] * len(CHOICES[pair])


@pytest.mark.parametrize("pair", CHOICES)
@pytest.mark.parametrize(
    "text, dynamic, guarded",
    [
        ("heads=4 seqlen=512", False, False),
        ("batch=16 heads=16 seqlen=256", True, False),
        ("batch=16 heads=16 seqlen=1024", True, True),
        ("batch=16 heads=16 seqlen=1024 mask=causal", True, True),
        ("batch=16 heads=16 seqlen=1024 dtype=float16", True, False),
        ("batch=16 heads=16 seqlen=1024x1030 mask=causal", True, False),
        ("heads=16 seqlen=16384 mask=upper:-1,lower:20", True, False),
    ],
)
def test_lookup_takes_few_tiles_one_by_one_and_guards_long_calls(pair, text, dynamic, guarded):
    words = text if "dtype" in text else text + " dtype=bfloat16"
    problem = _problem(f"{words} head_dim={_words(pair)} arch=sm_90")
    config = lookup(problem)
    if pair == (256, 256) and "mask" not in text:
        guarded = False  # measured: guarding pays only from 8,192 keys on
    assert (config.dynamic, config.guarded) == (dynamic, guarded)
    assert illegal(problem, config) is None


def test_lookup_is_legal_and_among_the_first_choices():
    rng = random.Random(0)
    for _ in range(300):
        pair, dtype = rng.choice(list(CHOICES)), rng.choice(["float16", "bfloat16"])
        seqlens = f"{rng.randrange(1, 9000)}x{rng.randrange(1, 9000)}"
        shape = f"batch={rng.choice([1, 3, 64])} heads={rng.choice([1, 6, 32])} seqlen={seqlens}"
        mask = rng.choice(["full", "causal", "upper:64,lower:100"])
        problem = _problem(f"{shape} head_dim={_words(pair)} dtype={dtype} mask={mask} arch=sm_90")
        assert lookup(problem) in CHOICES[pair][: PICKED[pair]]
        assert illegal(problem, lookup(problem)) is None


def test_a_guarded_config_needs_the_exponents_of_bfloat16():
    guarded = next(config for config in CHOICES[64, 64] if config.guarded)
    assert "exponents" in illegal(_problem("seqlen=64 head_dim=64 arch=sm_90 dtype=float16"), guarded)


def _first_tile_serves_all(problem, block_n):
    """Does each row of every consumer see a key in the first tile of keys that its consumer visits? By looking at every pair."""
    upper, lower, has_upper, has_lower = problem.bounds
    walk = (problem.seqlen_k, upper, lower, block_n, has_upper, has_lower)
    for start in range(0, problem.seqlen_q, 64):
        rows = range(problem.q_start + start, problem.q_start + min(start + 64, problem.seqlen_q))
        lo, hi = tiles_of_program(rows[0], rows[-1] + 1, *walk)
        _, _, _, own_hi = tiles_of_consumer(rows[0], rows[-1] + 1, lo, hi, *walk)
        keys = range((own_hi - 1) * block_n, own_hi * block_n)
        if not all(any(allowed(row, key, *walk[:3], has_upper, has_lower) for key in keys) for row in rows):
            return False
    return True


def test_a_guard_is_advised_where_the_first_tile_serves_every_row():
    rng = random.Random(1)
    advised = 0
    for _ in range(200):
        upper, lower = rng.choice([None, 0, 64, -64, rng.randrange(-70, 200)]), rng.choice([None, 0, 100, rng.randrange(-70, 200)])
        seqlen_q = rng.randrange(1, 300)
        seqlen_k = rng.choice([seqlen_q, seqlen_q + 64, rng.randrange(1, 300)])
        problem = dataclasses.replace(
            _problem(f"seqlen={seqlen_q}x{seqlen_k} head_dim=64 arch=sm_90"), spec=Spec(upper=upper, lower=lower)
        )
        if suits_guard(problem):
            advised += 1
            assert all(_first_tile_serves_all(problem, block_n) for block_n in (64, 128)), problem
    assert advised > 40
    ragged = _problem("seqlen=64x100 head_dim=64 arch=sm_90 mask=causal")
    assert not suits_guard(ragged)
    assert not _first_tile_serves_all(ragged, 64)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"block_m": 96}, "block_m"),
        ({"resident": 3}, "resident"),
        ({"block_n": 80}, "block_n"),
        ({"q_slots": 4}, "q_slots"),
        ({"stages": 4}, "shared memory"),
    ],
)
def test_an_illegal_config_is_named(change, word):
    problem = _problem("seqlen=64 head_dim=256 arch=sm_90")
    assert word in illegal(problem, dataclasses.replace(CHOICES[256, 256][0], **change))


@pytest.mark.parametrize(
    "text, pack",
    [
        ("batch=64 heads=32/8 seqlen=20x4000", 4),
        ("batch=64 heads=32/4 seqlen=1x4000", 8),
        ("batch=64 heads=32/8 seqlen=1024", 1),  # whole tiles either way
        ("batch=1 heads=32/8 seqlen=20x4000", 1),  # fewer programs than multiprocessors either way
        ("batch=64 heads=24/8 seqlen=20x4000", 1),  # three heads do not share 64 rows evenly
        ("batch=64 heads=8/8 seqlen=20x4000", 1),
    ],
)
def test_heads_of_a_group_are_packed_where_that_saves_tiles(text, pack):
    problem = _problem(f"{text} head_dim=128 arch=sm_90")
    assert packs(problem, CHOICES[128, 128][1]) == pack


def test_shared_memory_counts_queries_and_stages():
    config = HopperConfig(128, 64, 2, 1, True, False)
    problem = _problem("seqlen=64 head_dim=256 arch=sm_90")
    assert shared_memory(problem, config) == (128 + 2 * 2 * 64) * 256 * 2 + 1024 <= ARCHS["sm_90"].shared_memory
    problem = _problem("seqlen=64 head_dim=192/128 arch=sm_90")
    assert shared_memory(problem, config) == (128 * 192 + 2 * 64 * (192 + 128)) * 2 + 1024


@pytest.mark.parametrize("head_dim, dynamic", [(64, True), (128, False), (192, False), (256, False)])
def test_a_long_careful_causal_call_takes_a_program_a_tile_where_that_was_faster(head_dim, dynamic):
    problem = _problem(f"heads=16 seqlen=16384 head_dim={head_dim} dtype=float16 mask=causal arch=sm_90")
    assert lookup(problem).dynamic == dynamic


def test_a_counter_is_kept_only_in_the_common_pool():
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends.hopper import in_common_pool

    common = {"address": 1024, "total_size": 512, "segment_pool_id": (0, 0)}
    private = {"address": 4096, "total_size": 512, "segment_pool_id": (0, 1)}
    unknown = {"address": 8192, "total_size": 512}
    segments = [common, private, unknown]
    assert [in_common_pool(address, segments) for address in (1024, 1535)] == [True, True]
    assert not any(in_common_pool(address, segments) for address in (1536, 4096, 8192, 0))
