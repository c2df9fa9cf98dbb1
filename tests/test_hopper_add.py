"""The Hopper backward that adds dq up in memory: a model of its barriers, when it is taken, the argument that allows it."""

import dataclasses
import random

import pytest
import torch
from test_hopper_backward import ROWS, KeysProgram, Program, Slots, _draw
from test_hopper_walk import WARPS, Barrier

import tilewise as tw
from tilewise.arch import Runtime
from tilewise.configs.hopper_backward import ADDING, ADDS, AddingConfig, illegal, lookup_adding, shared_memory
from tilewise.problem import Problem
from tilewise.spec import Spec
from tilewise.testing.large import adding

CONFIGS = [(*place, config) for place, configs in ADDING.items() for config in configs]
SLOTS = 8  # for what is written down of turns (``turns.py``)
SMALL = AddingConfig(64, 128, 3, 2, 216, 72, False)  # more steps, so more that can go wrong


class Records:
    """What is written down of each turn in a few slots, with one barrier each: ``turns.py``."""

    def __init__(self, slots):
        self.slots, self.barriers, self.found = slots, [Barrier(1) for _ in range(slots)], [None] * slots

    def write(self, turn, what):
        self.found[turn % self.slots] = turn, what
        self.barriers[turn % self.slots].arrive()

    def arrived(self, turn):
        yield lambda: self.barriers[turn % self.slots].done((turn // self.slots) & 1)

    def read(self, turn):
        """What there is to know of this turn: a tile of keys, or None."""
        number, what = self.found[turn % self.slots]
        if number != turn:
            raise RuntimeError(f"the record of turn {turn} holds that of turn {number}")
        return what


class Adding(Program):
    """``bwd_add.py``: consumers of 64 keys each, and an adder that feeds them as well, for one tile of keys after another."""

    def __init__(self, problem, config, tiles, fault="", records=SLOTS):
        super().__init__(problem, config, 0, fault)
        self.turns, self.records = [KeysProgram(problem, config, tile) for tile in tiles], Records(records)
        self.keys, self.values = Slots(1, 1, 1), Slots(1, 1, 1)
        count = config.block_n // ROWS * WARPS
        self.left = Barrier(count)

    def processes(self):
        consumers = self.config.block_n // ROWS
        fills = WARPS if self.fault == "publishes for one consumer" else consumers * WARPS
        self.q = self.ring(self.config.stages, 1, consumers * WARPS)
        self.do = self.ring(self.config.stages, 1, consumers * WARPS)
        self.ds = self.ring(self.config.ds_slots, fills, WARPS, parts=consumers * WARPS)
        # One warp of the adder in the place of all: they meet before each copy.
        return [self.adder(), *(self.warp(c, w) for c in range(consumers) for w in range(WARPS))]

    def steps(self, turn):
        work = self.turns[turn]
        return [(turn, member, m_block) for member in range(self.p.group) for m_block in range(work.lo, work.hi)]

    def tell(self, turn):
        self.records.write(turn, turn if turn < len(self.turns) else None)

    def feed(self, fed):
        """The next tile of queries, if there is one; behind the last of a turn the next turn is told."""
        if fed < len(self.every):
            for ring in (self.do, self.q):
                yield from ring.fill(fed, self.every[fed], self.copies)
            turn = self.every[fed][0]
            if self.every[fed] == self.steps(turn)[-1]:
                self.tell(turn + 1)

    def load(self, ring, turn):
        ring.tags[0] = ["in flight"]
        self.copies.append(lambda: (ring.tags.__setitem__(0, [turn]), ring.full[0].arrive()))

    def adder(self):
        self.every = [step for turn in range(len(self.turns)) for step in self.steps(turn)]
        self.tell(0)
        step = 0
        ahead = self.config.stages - 1
        for turn in range(len(self.turns)):
            self.load(self.keys, turn)
            if self.fault != "loads values before they are left":
                yield lambda turn=turn: self.left.done((turn & 1) ^ 1)
            self.load(self.values, turn)
            if turn == 0:
                for fed in range(ahead):
                    yield from self.feed(fed)
            yield from self.keys.arrived(turn)
            for here in self.steps(turn):
                yield from self.ds.arrived(step)
                yield from self.feed(step + ahead)
                self.keys.check(0, turn)
                yield from self.ds.read(step, here)
                self.keys.check(0, turn)
                for _ in range(WARPS):
                    self.ds.release(step)
                self.attended.append(("adder", *here))
                step += 1

    def put(self, step, c, w, tag):
        if self.fault != "does not wait for the adder":
            yield self.ds.vacant(step)
        slot = step % self.ds.slots
        self.ds.tags[slot][c * WARPS + w] = tag
        yield lambda: True
        self.ds.full[slot].arrive()

    def warp(self, c, w):
        step, turn = 0, 0
        yield from self.records.arrived(turn)
        while self.records.read(turn) is not None:
            step = yield from self.differentiate(turn, step, c, w)
            turn += 1
            yield from self.records.arrived(turn)

    def differentiate(self, turn, step, c, w):
        work = self.turns[turn]
        yield from self.keys.arrived(turn)
        yield from self.values.arrived(turn)
        own_lo, _, _, own_hi = work.own(c)
        for member in range(self.p.group):
            for m_block in range(work.lo, own_lo):
                yield from self.pass_over(step, c, w, (turn, member, m_block))
                step += 1
            self.keys.check(0, turn)
            yield from self.q.arrived(step)
            yield from self.q.read(step, (turn, member, own_lo))
            s = member, own_lo
            for m_block in range(own_lo, own_hi):
                here = turn, member, m_block
                if s != here[1:]:
                    raise RuntimeError(f"scores of {s} are taken for those of {here}")
                self.q.check(step, here)  # lse2
                yield from self.do.arrived(step)
                self.values.check(0, turn)
                yield from self.do.read(step, here)
                self.do.release(step)
                s = None  # made from a slot that may be being refilled
                if self.config.early:
                    yield from self.put(step, c, w, here)
                if m_block + 1 < own_hi:
                    yield from self.q.arrived(step + 1)
                    yield from self.q.read(step + 1, (turn, member, m_block + 1))
                    self.keys.check(0, turn)
                    s = member, m_block + 1
                if not self.config.early:
                    yield from self.put(step, c, w, here)
                yield from self.q.read(step, here)
                self.q.release(step)
                step += 1
                self.attended.append((c, *here))
            for m_block in range(own_hi, work.hi):
                yield from self.pass_over(step, c, w, (turn, member, m_block))
                step += 1
        yield lambda: True  # dv and dk on their way
        self.records.read(turn)
        self.values.check(0, turn)
        if self.fault != "never leaves the values":
            self.left.arrive()
        return step

    def pass_over(self, step, c, w, here):
        for ring in (self.q, self.do):
            yield from ring.arrived(step)
            ring.release(step)
        if self.fault != "hands nothing over for what it does not see":
            yield from self.put(step, c, w, here)
        self.attended.append((c, *here))

    def expected(self):
        return [("adder", *tile) for tile in self.every] + [
            (c, *tile) for c in range(self.config.block_n // ROWS) for tile in self.every for _ in range(WARPS)
        ]


def _launch(problem, config, rng, **options):
    problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, lower=None))
    tiles = [rng.randrange(-(-problem.seqlen_k // config.block_n)) for _ in range(rng.choice([1, 2, 3, 7]))]
    program = Adding(problem, config, tiles, **options)
    program.run(rng)
    assert sorted(program.attended, key=str) == sorted(program.expected(), key=str)


@pytest.mark.parametrize("head_dim, bounded, config", [*CONFIGS, (64, True, SMALL)], ids=lambda x: str(x).replace("Config", ""))
def test_every_tile_is_added_without_deadlock(head_dim, bounded, config):
    rng = random.Random(head_dim)
    for _ in range(25):
        _launch(_draw(rng, head_dim), config, rng)


FAULTS = ["+", "-", "does not wait for the adder", "publishes for one consumer", "hands nothing over for what it does not see"]
FAULTS += ["loads values before they are left", "never leaves the values"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_can_fail(fault):
    rng = random.Random(0)

    def launches():
        for _ in range(60):
            _launch(_draw(rng), SMALL, rng, fault=fault)

    with pytest.raises(RuntimeError, match=r"deadlock|holds|taken|phase"):
        launches()


@pytest.mark.parametrize("stages", [3, 4])
def test_as_many_records_as_slots_of_queries_are_too_few(stages):
    """Where every turn has one step, a record would be overwritten that a consumer has yet to read."""
    rng = random.Random(0)
    short = Problem.parse("heads=1 seqlen=50x1000 head_dim=64 arch=sm_90", software=Runtime((3, 9)))
    config = dataclasses.replace(SMALL, block_m=128, stages=stages)

    def launches(records):
        for _ in range(200):
            _launch(short, config, rng, records=records)

    launches(stages + 1)
    with pytest.raises(RuntimeError, match="holds that of turn"):
        launches(stages)


def test_two_slots_are_too_few():
    """The tile that the consumers wait for would be fed after the ds that they have yet to hand on."""
    rng = random.Random(0)
    two = dataclasses.replace(SMALL, stages=2)
    assert "at least 3" in illegal(_problem(), two)

    def launches():
        for _ in range(60):
            _launch(_draw(rng), two, rng)

    with pytest.raises(RuntimeError, match="deadlock"):
        launches()


@pytest.mark.parametrize("head_dim, bounded, config", CONFIGS, ids=lambda x: str(x).replace("Config", ""))
def test_every_config_is_legal(head_dim, bounded, config):
    problem = _problem(head_dim=head_dim)
    assert illegal(problem, config) is None
    assert "block_n" in illegal(problem, dataclasses.replace(config, block_n=96))
    assert "shared memory" in illegal(problem, dataclasses.replace(config, ds_slots=20))
    assert "stages is 8" in illegal(problem, dataclasses.replace(config, stages=8))
    more = dataclasses.replace(config, ds_slots=config.ds_slots + 1)
    assert shared_memory(problem, more) - shared_memory(problem, config) == config.block_m * config.block_n * 2


# When it is taken.

LENGTHS = {"short": 1024, "medium": 4096, "long": 16384}


def _problem(head_dim=64, length=1024, heads=32, deterministic=None, words="", **bounds):
    text = f"heads={heads} seqlen={length} head_dim={head_dim} arch=sm_90 grad=qkv {words}"
    return dataclasses.replace(Problem.parse(text, software=Runtime((3, 9))), spec=Spec(deterministic=deterministic, **bounds))


def test_the_table_says_at_which_lengths():
    assert set(ADDS) == set(ADDING)
    for (head_dim, bounded), classes in ADDS.items():
        assert set(classes) <= set(LENGTHS)
        for name, length in LENGTHS.items():
            problem = _problem(head_dim, length, upper=0 if bounded else None)
            assert (lookup_adding(problem) is not None) == (name in classes)


@pytest.mark.parametrize("bounded", [False, True])
def test_an_empty_class_switches_it_off(monkeypatch, bounded):
    problems = [_problem(64, n, deterministic=False, upper=0 if bounded else None) for n in LENGTHS.values()]
    for classes in (("short", "medium", "long"), ()):
        monkeypatch.setitem(ADDS, (64, bounded), classes)
        monkeypatch.setitem(ADDS, (64, not bounded), ("short", "medium", "long")[len(classes) :])
        assert [lookup_adding(p) is not None for p in problems] == [bool(classes)] * len(problems)


def _in_two_programs(*place):
    return [dataclasses.replace(config, programs=2) for config in ADDING[place]]


def test_lower_bounds_terms_and_other_head_dims_stay_with_the_other_kernels():
    capped = Problem.parse("heads=32 seqlen=4096 head_dim=64 mask=softcap:30.0 arch=sm_90", software=Runtime((3, 9)))
    others = [_problem(256), _problem(96), _problem(lower=300), _problem(upper=0, lower=300), capped]
    with adding():
        assert all(lookup_adding(p) is None for p in others)
        assert lookup_adding(_problem(128, words="dtype=float16", upper=0)) in _in_two_programs(128, True)
        assert lookup_adding(_problem(upper=2000)) is lookup_adding(_problem())  # a bound that no pair reaches
        assert lookup_adding(_problem(upper=0)) in _in_two_programs(64, True)


def test_groups_add_at_head_dim_64_alone():
    """At 128 they were faster without."""
    for head_dim, added in ((64, True), (128, False)):
        assert (lookup_adding(_problem(head_dim, heads="32/8", length=4096, upper=0)) is not None) is added
        assert lookup_adding(_problem(head_dim, heads=32, length=4096, upper=0)) is not None


def test_programs_that_do_not_fill_the_device_stay_with_the_other_kernels(monkeypatch):
    monkeypatch.setitem(ADDS, (64, False), ("short",))
    assert lookup_adding(_problem(length=1024, heads=16)) is None
    assert lookup_adding(_problem(length=1024, heads=17)) is not None
    with adding():
        assert lookup_adding(_problem(length=64, heads=1)) is not None
    assert lookup_adding(_problem(length=64, heads=1)) is None
    assert lookup_adding(_problem(length=4096)) is None


def _kernels(monkeypatch, problem, wanted=("dq", "dk", "dv")):
    """The names of the kernels that a backward pass launches."""
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends import launching
    from tilewise.backends.hopper import bwd_launch

    found = []
    monkeypatch.setattr(launching.Plan, "run", lambda plan, *tensors: found.append(plan.kernel.__name__))
    p = problem
    q = torch.empty((p.batch, p.heads_q, p.seqlen_q, p.head_dim), dtype=torch.bfloat16, device="meta")
    k = torch.empty((p.batch, p.heads_kv, p.seqlen_k, p.head_dim), dtype=torch.bfloat16, device="meta")
    lse = torch.empty(q.shape[:3], device="meta")
    outputs = (q if "dq" in wanted else None, *(k if name in wanted else None for name in ("dk", "dv")))
    bwd_launch.backward(p, q, None, q, k, k, q, lse, *outputs)
    return found


FAST = ["_zeroing_rows_kernel", "_dkdvdq_kernel", "_gather_kernel"]


@pytest.mark.parametrize("head_dim, bounded", ADDING)
@pytest.mark.parametrize("asked, switched_on, fast", [(None, 0, 1), (None, 1, 0), (False, 0, 1), (False, 1, 1), (True, 0, 0)])
def test_the_mode_decides(monkeypatch, head_dim, bounded, asked, switched_on, fast):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: bool(switched_on))
    with adding():
        found = _kernels(monkeypatch, _problem(head_dim, deterministic=asked, upper=0 if bounded else None))
    assert (found == FAST) == bool(fast)
    assert fast or "_dkdvdq_kernel" not in found


def test_a_gradient_that_nobody_wants_is_not_made(monkeypatch):
    for wanted in (("dq", "dk"), ("dk", "dv"), ("dq",)):
        assert "_dkdvdq_kernel" not in _kernels(monkeypatch, _problem(deterministic=False), wanted)


# The kernels before and after it, in the interpreter.


def _small(seqlen=100, heads=3, batch=2):
    text = f"dtype=float16 batch={batch} heads={heads} seqlen={seqlen} head_dim=64 sm_scale=0.37 arch=sm_90 grad=qkv"
    return Problem.parse(text, software=Runtime((3, 9)))


def test_rows_are_read_and_sums_set_to_zero():
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends.hopper.bwd_add_launch import adding_plans

    p = _small()
    padded = 128
    o, do = (torch.randn(p.batch, p.heads_q, p.seqlen_q, 64).half() for _ in range(2))
    lse, dlse = torch.randn(2, p.batch, p.heads_q, p.seqlen_q)
    lse[1, 2, 7] = float("-inf")
    lse2, minus_delta = torch.full((2, p.batch * p.heads_q, padded), float("nan"))
    sums = torch.full((p.batch * p.heads_q * padded * 64 + 8,), float("nan"))
    adding_plans(p, ADDING[64, False][0], True)[0].launch(o, do, dlse, lse, lse2, minus_delta, sums).run()
    assert (sums[:-7] == 0).all()  # and the counter behind them
    assert sums[-7:].isnan().all()
    seen = ~lse.isneginf()
    delta = (o.double() * do.double()).sum(-1) - dlse
    inside = minus_delta.view(p.batch, p.heads_q, padded)
    assert torch.allclose(inside[..., : p.seqlen_q], torch.where(seen, -delta, 0.0).float(), atol=1e-4)
    assert (inside[..., p.seqlen_q :] == 0).all()
    found = lse2.view(p.batch, p.heads_q, padded)
    wanted = torch.where(seen, lse.double() / torch.log(torch.tensor(2.0, dtype=torch.float64)), float("inf"))
    assert torch.allclose(found[..., : p.seqlen_q], wanted.float())
    assert (found[..., p.seqlen_q :] == float("inf")).all()


def test_sums_are_put_in_their_places():
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends.hopper.bwd_add_launch import adding_plans

    p = _small()
    padded = 128
    whole = torch.randn(p.batch * p.heads_q, padded, 64)
    sums = torch.empty(p.batch * p.heads_q, padded * 64)
    # Thread t of a warpgroup holds rows 16 (t // 32) + t % 32 // 4 and 8 below, columns 2 (t % 4) and the next, of every 8 columns.
    t = torch.arange(128)
    for tile in range(padded // 64):
        for eight in range(8):
            for i in range(4):
                row = 64 * tile + 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2)
                at = tile * 4096 + eight * 512 + 4 * t + i
                sums[:, at] = whole[:, row, 8 * eight + 2 * (t % 4) + i % 2]
    dq = torch.full((p.batch, p.seqlen_q + 1, p.heads_q, 64), float("nan"), dtype=torch.float16).transpose(1, 2)
    adding_plans(p, ADDING[64, False][0], False)[2].launch(dq[:, :, : p.seqlen_q], sums).run()
    wanted = whole.view(p.batch, p.heads_q, padded, 64)[:, :, : p.seqlen_q] * 0.37
    assert torch.allclose(dq[:, :, : p.seqlen_q].float(), wanted, atol=2e-3)
    assert dq[:, :, p.seqlen_q :].isnan().all()


# The argument.


def _qkv():
    return [torch.randn(1, 2, 40, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def _spec_seen(monkeypatch, **arguments):
    """The spec of the problem that the backward pass gets."""
    from tilewise.backends import torch_tiles

    seen = []
    backward = torch_tiles.backward

    def record(problem, *rest):
        seen.append(problem.spec)
        return backward(problem, *rest)

    monkeypatch.setattr(torch_tiles, "backward", record)
    tw.attention(*_qkv(), backend="torch", **arguments).sum().backward()
    return seen[0]


@pytest.mark.parametrize("mode", [None, True, False])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (3, 0)}, {"spec": tw.causal() & tw.softcap(2.0)}])
def test_the_backward_pass_is_told(monkeypatch, mode, mask):
    spec = _spec_seen(monkeypatch, deterministic=mode, **mask)
    assert spec.deterministic is mode
    wanted = mask.get("spec") or tw.spec.spec_of(mask.get("causal", False), mask.get("window"), None)
    assert dataclasses.replace(spec, deterministic=None) == wanted
    assert Spec.parse(str(spec)) == spec


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_backends_that_are_always_deterministic_take_every_mode(backend):
    qkv = _qkv()
    found = []
    for mode in (None, True, False):
        o = tw.attention(*qkv, causal=True, backend=backend, deterministic=mode)
        found.append(torch.autograd.grad(o.square().sum(), qkv))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(tw.InvalidInput, match="deterministic must be True, False or None, got 1 of type int"):
        tw.attention(*_qkv(), deterministic=1)
    with pytest.raises(tw.InvalidInput, match="argument of attention"):
        tw.attention(*_qkv(), spec=Spec(deterministic=False))
    with pytest.raises(tw.InvalidInput, match="deterministic"):
        Spec.parse("causal,deterministic:perhaps")


# What a launch is told.


def _gradients(**problem):
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends.hopper.bwd_add_launch import adding_plans

    return adding_plans(_problem(**problem), ADDING[64, False][0], False)[1]


def test_as_many_programs_as_multiprocessors_share_the_tiles():
    assert _gradients(length=4096, heads=32).grid == (132,)
    assert _gradients(length=1000, heads=3).grid == (24,)


def test_heads_that_are_worked_on_together_fit_the_cache_with_their_sums():
    """Of each query, bytes of itself, of its gradient and of the float32 sums of dq."""
    from tilewise.backends.hopper.common import L2_BUDGET

    together = _gradients(length=4096, heads=64).numbers[-1]
    assert 1 < together < 64
    assert together * 4096 * 64 * (2 + 2 + 4) <= L2_BUDGET < 2 * together * 4096 * 64 * (2 + 2 + 4)
