"""The Hopper backward that adds dq up in memory: a model of its barriers, configs, when it is taken."""

import dataclasses
import random

import pytest
import torch
from test_hopper_backward import ROWS, KeysProgram, _draw
from test_hopper_walk import WARPS

import tilewise as tw
from tilewise.arch import Runtime
from tilewise.configs.hopper_backward import ADDING, ADDS, illegal, lookup_adding, shared_memory
from tilewise.problem import Problem
from tilewise.spec import Spec

CONFIGS = [(d, config) for d, configs in ADDING.items() for config in configs]


class Adding(KeysProgram):
    """``bwd_add.py``: consumers of 64 keys each, and an adder that feeds them as well."""

    def processes(self):
        consumers = self.config.block_n // ROWS
        self.q = self.ring(self.config.stages, 1, consumers * WARPS)
        self.do = self.ring(self.config.stages, 1, consumers * WARPS)
        self.ds = self.ring(self.config.ds_slots, consumers * WARPS, WARPS, parts=consumers * WARPS)
        self.out = []
        self.tiles = [(member, m_block) for member in range(self.p.group) for m_block in range(self.lo, self.hi)]
        return [*(self.adder(w) for w in range(WARPS)), *(self.warp(c, w) for c in range(consumers) for w in range(WARPS))]

    def fill(self, w, step):
        """Warp 0 feeds; the others wait as it does, since the warpgroup meets before a copy."""
        for ring in (self.do, self.q):
            if w == 0:
                yield from ring.fill(step, self.tiles[step], self.copies)

    def adder(self, w):
        c = self.config
        if w == 0:
            self.resident(self.keys)
            self.resident(self.values)
        ahead = c.stages - 1 if c.early else c.stages
        for fed in range(min(ahead, len(self.tiles))):
            yield from self.fill(w, fed)
        yield from self.keys.arrived(0)
        for step, here in enumerate(self.tiles):
            yield from self.ds.arrived(step)
            if c.early and step + ahead < len(self.tiles):
                yield from self.fill(w, step + ahead)
            yield from self.ds.read(step, here)
            self.ds.release(step)
            self.attended.append(("adder", *here))
            if not c.early and step + ahead < len(self.tiles):
                yield from self.fill(w, step + ahead)

    def put(self, step, c, w, tag):
        if self.fault != "does not wait for the adder":
            yield self.ds.vacant(step)
        slot = step % self.ds.slots
        self.ds.tags[slot][c * WARPS + w] = tag
        yield lambda: True
        self.ds.full[slot].arrive()

    def passed(self, step, c, w, member, tiles):
        for m_block in tiles:
            for ring in (self.q, self.do):
                yield from ring.arrived(step)
                ring.check(step, (member, m_block))
                ring.release(step)
            if self.fault != "hands no zeros on":
                yield from self.put(step, c, w, (member, m_block))
            step += 1

    def warp(self, c, w):
        own_lo, _, _, own_hi = self.own(c)
        step = 0
        yield from self.keys.arrived(0)
        yield from self.values.arrived(0)
        for member in range(self.p.group):
            yield from self.passed(step, c, w, member, range(self.lo, own_lo))
            step += own_lo - self.lo
            yield from self.q.arrived(step)
            yield from self.q.read(step, (member, own_lo))
            s = member, own_lo
            for m_block in range(own_lo, own_hi):
                here = member, m_block
                if s != here:
                    raise RuntimeError(f"scores of {s} are taken for those of {here}")
                self.q.check(step, here)  # lse2
                yield from self.do.arrived(step)
                yield from self.do.read(step, here)
                self.do.release(step)
                s = None  # made from a slot that may be being refilled
                if m_block + 1 < own_hi:
                    yield from self.q.arrived(step + 1)
                    yield from self.q.read(step + 1, (member, m_block + 1))
                    s = member, m_block + 1
                yield from self.put(step, c, w, here)
                yield from self.q.read(step, here)
                self.q.release(step)
                step += 1
                self.attended.append((c, *here))
            yield from self.passed(step, c, w, member, range(own_hi, self.hi))
            step += self.hi - own_hi

    def expected(self):
        found = [("adder", *tile) for tile in self.tiles]
        for c in range(self.config.block_n // ROWS):
            own_lo, _, _, own_hi = self.own(c)
            found += [(c, member, m_block) for member in range(self.p.group) for m_block in range(own_lo, own_hi)]
        return found


def _launch(problem, config, rng, **options):
    program = Adding(problem, config, rng.randrange(-(-problem.seqlen_k // config.block_n)), **options)
    program.run(rng)
    assert sorted(program.attended, key=str) == sorted(program.expected() * WARPS, key=str)


@pytest.mark.parametrize("head_dim, config", CONFIGS, ids=lambda x: str(x).replace("Config", ""))
def test_every_tile_is_added_without_deadlock(head_dim, config):
    rng = random.Random(head_dim)
    for _ in range(25):
        _launch(_draw(rng, head_dim), config, rng)


FAULTS = ["+", "-", "does not wait for the adder", "hands no zeros on"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_can_fail(fault):
    rng = random.Random(0)

    def launches():
        for _ in range(60):
            _launch(_draw(rng), ADDING[64][0], rng, fault=fault)

    with pytest.raises(RuntimeError, match=r"deadlock|holds|taken|phase"):
        launches()


def test_feeding_early_needs_a_slot_more():
    """With two slots the tile that the consumers wait for would be fed after the ds that they have yet to hand on."""
    rng = random.Random(0)

    def launches():
        for _ in range(60):
            _launch(_draw(rng), dataclasses.replace(ADDING[64][0], stages=2, early=True), rng)

    with pytest.raises(RuntimeError, match="deadlock"):
        launches()


def test_feeding_early_with_two_slots_is_refused():
    early = dataclasses.replace(ADDING[64][0], stages=2, early=True)
    assert "need two" in illegal(_problem(), early)


@pytest.mark.parametrize("head_dim, config", CONFIGS, ids=lambda x: str(x).replace("Config", ""))
def test_every_config_is_legal(head_dim, config):
    problem = _problem(head_dim=head_dim)
    assert illegal(problem, config) is None
    assert "block_n" in illegal(problem, dataclasses.replace(config, block_n=96))
    assert "shared memory" in illegal(problem, dataclasses.replace(config, stages=20))
    assert shared_memory(problem, dataclasses.replace(config, bulk=config.bulk + 1)) == (
        shared_memory(problem, config) + 64 * config.width * 4
    )


# When it is taken.

MASKS = {"full": Spec(), "causal": Spec(upper=0), "band": Spec(upper=0, lower=300)}
LENGTHS = {"short": 1024, "medium": 4096, "long": 16384}


def _problem(head_dim=64, mask="full", length=1024, deterministic=None, words=""):
    text = f"seqlen={length} head_dim={head_dim} arch=sm_90 grad=qkv {words}"
    spec = dataclasses.replace(MASKS[mask], deterministic=deterministic)
    return dataclasses.replace(Problem.parse(text, software=Runtime((3, 9))), spec=spec)


def test_the_table_knows_every_head_dim_and_mask():
    assert set(ADDS) == {(d, mask) for d in ADDING for mask in MASKS}
    for (head_dim, mask), classes in ADDS.items():
        assert set(classes) <= set(LENGTHS)
        for name, length in LENGTHS.items():
            assert (lookup_adding(_problem(head_dim, mask, length)) is not None) == (name in classes)


def test_terms_and_other_head_dims_stay_with_the_other_kernels():
    assert lookup_adding(_problem(256)) is None
    capped = Problem.parse("seqlen=4096 head_dim=128 mask=softcap:30.0 arch=sm_90", software=Runtime((3, 9)))
    assert lookup_adding(capped) is None


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


@pytest.mark.parametrize("head_dim", ADDING)
@pytest.mark.parametrize("asked, switched_on, fast", [(None, 0, 1), (None, 1, 0), (False, 0, 1), (False, 1, 1), (True, 0, 0)])
def test_the_mode_decides(monkeypatch, head_dim, asked, switched_on, fast):
    monkeypatch.setitem(ADDS, (head_dim, "causal"), tuple(LENGTHS))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: bool(switched_on))
    found = _kernels(monkeypatch, _problem(head_dim, "causal", deterministic=asked))
    assert (found == FAST) == bool(fast)
    assert fast or "_dkdvdq_kernel" not in found


def test_a_gradient_that_nobody_wants_is_not_made(monkeypatch):
    monkeypatch.setitem(ADDS, (64, "full"), tuple(LENGTHS))
    for wanted in (("dq", "dk"), ("dk", "dv"), ("dq",)):
        assert "_dkdvdq_kernel" not in _kernels(monkeypatch, _problem(deterministic=False), wanted)


def test_where_the_table_says_so_the_other_kernels_are_taken(monkeypatch):
    monkeypatch.setitem(ADDS, (64, "full"), ())
    assert "_dkdvdq_kernel" not in _kernels(monkeypatch, _problem(deterministic=False))


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
