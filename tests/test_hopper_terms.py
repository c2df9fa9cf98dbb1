"""What the ``hopper`` backend does with score steps, sinks and masks that come as tensors. Nothing here needs a GPU."""

import math
import struct

import pytest
import torch

from tilewise.arch import Runtime
from tilewise.capabilities import CAPABILITIES, refuse
from tilewise.configs.hopper import CHOICES, LISTED, PICKED, illegal, lookup, packs, shared_memory, softcap_bounds, suits_guard
from tilewise.configs.hopper_backward import DKDV, DQ, heads_kept, in_chunks, lookup_dkdv, lookup_dq
from tilewise.configs.hopper_backward import illegal as illegal_part
from tilewise.problem import Problem
from tilewise.select import choose
from tilewise.testing.calls import fit, random_call
from tilewise.testing.large import HASTY
from tilewise.testing.terms import draw_terms

ROW = next(row for row in CAPABILITIES if row.backend == "hopper")
LOG2_E = math.log2(math.e)
LONG = "batch=16 heads=16/8 seqlen=1024 head_dim=128 dtype=bfloat16 arch=sm_90"


def _problem(text):
    return Problem.parse(text, software=Runtime((3, 9)))


# What it takes


@pytest.mark.parametrize(
    "mask", ["softcap:30", "alibi", "sink", "segment", "row", "segment,row,alibi,softcap:3,sink,upper:0,lower:50"]
)
@pytest.mark.parametrize("grad", ["", "q", "kv", "qkv"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_takes_terms_forward_and_backward(mask, grad, head_dim):
    words = f" grad={grad}" if grad else ""
    assert choose(_problem(f"seqlen=300 heads=8/2 head_dim={head_dim} mask={mask} arch=sm_90{words}")).backend == "hopper"


def test_the_gradient_of_a_sink_is_its_own_and_that_of_slopes_goes_to_triton():
    assert choose(_problem("seqlen=300 head_dim=64 mask=sink arch=sm_90 grad=qkvs")).backend == "hopper"
    slopes = _problem("seqlen=300 head_dim=64 mask=alibi arch=sm_90 grad=qkva")
    assert [reason.text for reason in refuse(ROW, slopes)] == ["a gradient of slopes is asked for, it has q, k, v, bias, sink"]
    assert choose(slopes).backend == "triton"


@pytest.mark.parametrize("mask", ["dense", "dropout:0.1", "causal,softcap:30,bias bias=bfloat16:1hqk"])
def test_it_refuses_what_it_lacks_by_name(mask):
    problem = _problem(f"seqlen=64 head_dim=64 mask={mask} arch=sm_90")
    assert [reason.code for reason in refuse(ROW, problem)] == ["term"]
    assert choose(problem).backend == "triton"


@pytest.mark.parametrize("words", ["alibi", "alibi softcap:3 sink"])
def test_a_call_is_fitted_by_leaving_slopes_alone(words, monkeypatch):
    shape = (1, 2, 1, 20, 30, 64, 64)
    call = random_call(shape, dtype=torch.bfloat16, spec=draw_terms(words, shape))
    monkeypatch.setattr("tilewise.testing.calls.refuse", lambda row, p: ["no"] if set(p.grad) - set(ROW.gradients) else [])
    part = fit(call, "hopper")
    assert part.fixed == ("slopes",)
    assert part.has_gradient
    assert "a" not in part.problem.grad


# Configs


@pytest.mark.parametrize("pair", CHOICES)
@pytest.mark.parametrize(
    "mask", ["causal,segment", "row", "causal,alibi", "softcap:50.0", "softcap:90.0", "sink", "softcap:3,alibi"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_config_that_is_picked_is_legal(pair, mask, dtype):
    problem = _problem(f"batch=16 heads=16/8 seqlen=1024 head_dim={pair[0]}/{pair[1]} dtype={dtype} mask={mask} arch=sm_90")
    config = lookup(problem)
    assert config in (*CHOICES[pair][: PICKED[pair]], *LISTED.values())
    assert illegal(problem, config) is None
    if not in_chunks(problem):
        assert illegal_part(problem, lookup_dkdv(problem)) is None
        assert illegal_part(problem, lookup_dq(problem)) is None
        assert lookup_dkdv(problem) in DKDV[pair[0]]
        assert lookup_dq(problem) in DQ[pair[0]]


def test_a_list_of_tiles_is_walked_carefully_by_each_head_alone():
    for mask in ("segment", "row", "segment,softcap:30"):
        problem = _problem(f"{LONG} mask={mask}")
        assert not lookup(problem).guarded
        few = _problem(f"batch=64 heads=32/8 seqlen=20x4000 head_dim=128 arch=sm_90 mask={mask}")
        assert packs(few, lookup(few)) == 1
        assert heads_kept(_problem(f"{LONG} mask={mask} grad=qkv")) == 0
    long = "batch=8 heads=16 seqlen=4096 head_dim=128 arch=sm_90 grad=qkv mask="
    assert heads_kept(_problem(f"{long}causal")) > heads_kept(_problem(f"{long}causal,alibi")) == 0
    few = "batch=64 heads=32/8 seqlen=20x4000 head_dim=128 arch=sm_90 mask="
    assert [packs(_problem(few + mask), lookup(_problem(few + mask))) for mask in ("sink", "softcap:30", "alibi")] == [4, 4, 1]


def test_a_softcap_that_bounds_the_scores_may_be_guarded_whatever_the_first_tile_holds():
    ragged = "batch=16 heads=16 seqlen=1024x1030 head_dim=128 dtype=bfloat16 arch=sm_90 mask=causal"
    assert not suits_guard(_problem(ragged))
    assert suits_guard(_problem(f"{ragged},softcap:50"))
    assert lookup(_problem(f"{ragged},softcap:50")).guarded
    for other in (",softcap:51", ",softcap:50,alibi", ",sink", ",alibi"):
        assert not softcap_bounds(_problem(ragged + other))
        assert not suits_guard(_problem(ragged + other))
    straight = f"{LONG} mask="
    assert [suits_guard(_problem(straight + m)) for m in ("causal,alibi", "alibi", "upper:64,alibi", "alibi,softcap:9")] == [
        *(True, False, False, True)
    ]
    # The largest sum of a row: 2^30 keys of 2^(50 log2(e)) each.
    assert 50 * LOG2_E + 30 < 103


def test_a_ramp_needs_memory_beside_each_tile_of_keys():
    plain, ramp = _problem(LONG), _problem(f"{LONG} mask=causal,alibi")
    config = lookup(ramp)
    assert shared_memory(ramp, config) - shared_memory(plain, config) == config.block_n * 16 * 2


def test_only_hasty_kernels_add_alibi_to_the_exponents():
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends import hopper

    problem = _problem(f"{LONG} mask=causal,alibi")
    hasty, redo = (hopper._fwd(problem, lookup(problem), form).options for form in ("hasty", "redo"))
    assert (hasty["LEAN"], hasty["RAMP"]) == (True, False)
    assert (redo["LEAN"], redo["RAMP"]) == (False, True)
    for mask in ("causal", "alibi", "causal,softcap:50,alibi"):
        problem = _problem(f"{LONG} mask={mask}")
        assert not hopper._fwd(problem, lookup(problem), "hasty").options["LEAN"]


@pytest.mark.parametrize("batch, heads, length, head_dim", HASTY)
def test_long_calls_of_the_check_reach_the_hasty_kernels(batch, heads, length, head_dim):
    for mask in ("causal,softcap:12", "causal,alibi"):
        problem = _problem(f"batch={batch} heads={heads} seqlen={length} head_dim={head_dim} mask={mask} arch=sm_90")
        assert lookup(problem).guarded


# Numbers of the kernels


@pytest.fixture(scope="module")
def common():
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends.hopper import common

    return common


@pytest.mark.parametrize("cap, scale", [(50.0, 0.088), (2.0, 1.0), (30.0, -0.3), (1e-3, 5.0), (1e30, 0.1), (5.0, 0.0)])
def test_all_forms_of_a_softcap_are_right(common, cap, scale):
    """The arithmetic of ``terms.capped`` in float32, in the reach of each polynomial and beyond."""
    from tilewise.backends.hopper import terms

    def series(words, x, c, factor):
        coefficients = [struct.unpack(">f", bytes.fromhex(word.removeprefix("0f")))[0] for word in words]
        y, total = x.square(), torch.zeros_like(x)
        for n in reversed(range(len(coefficients))):
            total = total * y + factor * c ** (2 * n) * coefficients[n]
        return total * x

    c, top, factor, reach, inverse = (torch.tensor(x) for x in common.cap_numbers(cap * LOG2_E, scale * LOG2_E))
    u = torch.linspace(-3.0, 3.0, 4001, dtype=torch.float64) * min(abs(cap / scale) if scale else 1.0, 1e4)
    want, x = cap * LOG2_E * torch.tanh(u * scale / cap), u.float()
    near, middle = x.abs() <= reach / 2, x.abs() <= reach
    far = 1.0 / (1.0 + torch.exp2(x * c * 2 * LOG2_E)) * (-2 * top) + top
    got = torch.where(near, series(terms.NEAR, x, c, factor), torch.where(middle, series(terms.MIDDLE, x, c, factor), far)).double()
    if scale and cap < 1e20:
        assert 0 < int(near.sum()) < int(middle.sum()) < len(u)
    error = (got - want).abs()
    assert bool((error <= torch.where(middle, 1e-6 * want.abs() + 1e-30, 4e-7 * cap * LOG2_E)).all())
    assert math.isclose(float(c) * cap, scale, rel_tol=1e-6, abs_tol=1e-30)
    assert math.isclose(float(inverse) * float(top), 1.0, rel_tol=1e-6)


def test_a_cap_out_of_proportion_takes_exp2_alone(common):
    assert common.cap_numbers(1e-20, 1.0)[3] < 0
    assert all(math.isfinite(x) and abs(x) <= 1e38 for x in common.cap_numbers(1e-38, 1e30))


@pytest.mark.parametrize(
    "mask, ramp",
    [
        ("causal,alibi", True),
        ("upper:-5,alibi", True),
        ("upper:0,lower:100,alibi,sink,segment", True),
        ("alibi", False),  # keys on both sides
        ("upper:1,alibi", False),
        ("causal,softcap:3,alibi", False),
        ("causal,alibi,softcap:3", False),
        ("causal,alibi sm_scale=-0.1", False),
        ("causal,alibi sm_scale=0.0", False),
        ("causal,alibi sm_scale=1e-9", False),
        ("causal,softcap:3", False),
    ],
)
def test_alibi_is_a_ramp_where_no_key_lies_right_of_its_query(common, mask, ramp):
    assert common.term_options(_problem(f"seqlen=300 head_dim=64 mask={mask} arch=sm_90"))["RAMP"] == ramp


def test_a_plain_call_has_no_arguments_of_terms(common):
    from tilewise.spec import NO_TENSORS

    problem = _problem("seqlen=300 head_dim=64 mask=causal arch=sm_90")
    assert common.term_numbers(problem, NO_TENSORS) == (None,) * 4
    assert common.term_options(problem) == {"STEPS": (), "RAMP": False, "HAS_SINK": False, "LISTED": False}


@pytest.mark.parametrize("slope", [2.0**-8, 0.7317, 2.5])
def test_alibi_in_the_exponents_keeps_the_sums(slope):
    """The arithmetic of ``hasty.leaning`` in float32 over the tiles of 64 rows, and the reference that two rows share."""
    rows, block, tiles = 64, 128, 4
    torch.manual_seed(1)
    first_row = block * (tiles - 1)
    scores = torch.randn(rows, block * tiles) * 16
    slope2, scale2 = torch.tensor(slope * LOG2_E), torch.tensor(0.0884 * LOG2_E)
    i, j = torch.arange(first_row, first_row + rows)[:, None], torch.arange(block * tiles)[None, :]
    seen = j <= i
    want = torch.logsumexp((scores.double() * 0.0884 + slope * (j - i)).masked_fill(~seen, -math.inf), 1)

    def leaning(n, pivot):
        column = torch.arange(block)
        even = (slope2.double() * (n * block - first_row + column // 2 * 2) - pivot.double()[:, None]).float()  # fused
        number = torch.where(column % 2 == 0, even, even + slope2)
        return (scores[:, n * block : (n + 1) * block].double() * scale2.double() + number.double()).float()

    def hide(x, n):
        return torch.where(seen[:, n * block : (n + 1) * block], x, -math.inf)

    top = hide(leaning(tiles - 1, torch.zeros(rows)), tiles - 1).amax(1).view(4, 2, 8)
    pivot = top.amax(1, keepdim=True).expand_as(top).reshape(rows)
    sums = sum(torch.exp2(hide(leaning(n, pivot), n)).double().sum(1) for n in range(tiles))
    top = (pivot.double() - slope2.double() * torch.arange(rows)).float()  # fused, too
    lse = (top + torch.log2(sums).float()).double() / LOG2_E
    assert bool((sums > 2.0**-32).all())  # no row raises the flag
    error = (lse - want).abs()
    assert float(error.max()) < 4e-6
    assert float(error.square().mean().sqrt()) < 1e-6


def test_a_product_of_three_parts_adds_alibi():
    """The algebra of the ramp, forward and with keys first: products of bfloat16 numbers, sums in float32."""

    def thirds(x):
        high = x.bfloat16().float()
        middle = (x - high).bfloat16().float()
        return high, middle, (x - high - middle).bfloat16().float()

    slope2, scale2 = torch.tensor(0.7317 * LOG2_E), torch.tensor(0.0884 * LOG2_E)
    ratio, block, rows, first_row, first_key = slope2 / scale2, 128, 64, 640, 512
    place = torch.arange(block, dtype=torch.float32) % 32 - 16
    added = sum(part * place for part in thirds(ratio)) * scale2
    shift = slope2 * (first_key + 16 - first_row) + slope2 * 32 * (torch.arange(block) // 32)
    lacks = slope2 * torch.arange(rows, dtype=torch.float32)
    i, j = torch.arange(first_row, first_row + rows)[:, None], torch.arange(first_key, first_key + block)[None, :]
    want = slope2.double() * (j - i)
    assert float(((added[None, :] + shift) - lacks[:, None] - want).abs().max()) < 3e-5

    key = torch.arange(rows, dtype=torch.float32) - rows // 2
    query = torch.arange(64, dtype=torch.float32) - 32
    product = sum(thirds(ratio * key))[:, None] - sum(part * query for part in thirds(ratio))[None, :]
    shift = slope2 * (first_key + rows // 2 - first_row - 32)
    want = slope2.double() * (torch.arange(first_key, first_key + rows)[:, None] - torch.arange(first_row, first_row + 64)[None, :])
    assert float((product * scale2 + shift - want).abs().max()) < 3e-5
