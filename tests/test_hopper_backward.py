"""The walk of the Hopper backward kernels over tiles, held to every pair of a query and a key, and a model of their barriers.

The model runs the feeder and every warp of every consumer of one program as processes that stop at waits, in random order, over
barriers with the counts and parities of the kernels. It walks by the very bodies that they compile (``tilewise.backends.walk``). A
deadlock shows, and so does a slot that is refilled while somebody reads it.
"""

import dataclasses
import itertools
import random

import pytest
import torch
from test_hopper_walk import WARPS, Barrier

from tilewise.arch import Runtime
from tilewise.backends.walk import queries_of_consumer, queries_of_program, tiles_of_consumer, tiles_of_program
from tilewise.bodies import allowed
from tilewise.configs.hopper_backward import DKDV, DQ, KeysConfig, QueriesConfig, illegal, in_chunks, padded_rows
from tilewise.problem import Problem
from tilewise.spec import Spec
from tilewise.testing.compile_hopper_backward import words

ROWS = 64
CONFIGS = [(d, config) for table in (DKDV, DQ) for d, configs in table.items() for config in configs]


def _draw(rng, head_dim=64, longest=450):
    bound = lambda: rng.choice([0, rng.randrange(-70, 200), rng.randrange(-300, 300)])  # noqa: E731
    kind = rng.choice(["full", "upper", "lower", "both"])
    mask = Spec(
        upper=bound() if kind in ("upper", "both") else None,
        lower=bound() if kind in ("lower", "both") else None,
        align=rng.choice(["bottom_right", "top_left"]),
    )
    seqlen_q, seqlen_k = (rng.choice([rng.randrange(1, longest), 64 * rng.randrange(1, longest // 64)]) for _ in range(2))
    heads_kv = rng.choice([1, 2])
    text = f"heads={heads_kv * rng.choice([1, 2, 3])}/{heads_kv} seqlen={seqlen_q}x{seqlen_k} head_dim={words(head_dim)} arch=sm_90"
    return dataclasses.replace(Problem.parse(text, software=Runtime((3, 9))), spec=mask)


def _check_walk(p, block_m, block_n, of_program=queries_of_program, of_consumer=queries_of_consumer):
    """Hold the tiles of queries that each program and consumer visits to every pair of a query and a key."""
    upper, lower, has_upper, has_lower = p.bounds
    has_tail = p.seqlen_k % block_n != 0
    q_pad = padded_rows(p)
    queries = p.q_start + torch.arange(q_pad)
    keys = torch.arange(-(-p.seqlen_k // block_n) * block_n)
    seen = allowed(queries[:, None], keys[None, :], p.seqlen_k, upper, lower, has_upper, has_lower).expand(q_pad, len(keys))
    for start in range(0, p.seqlen_k, block_n):
        walk = (q_pad, p.q_start, upper, lower, block_m, has_upper, has_lower)
        lo, hi = of_program(start, min(start + block_n, p.seqlen_k), *walk)
        assert 0 <= lo < hi <= q_pad // block_m
        for key in range(start, start + block_n, ROWS):
            own_lo, free_lo, free_hi, own_hi = of_consumer(key, key + ROWS, lo, hi, p.seqlen_k, *walk)
            assert lo <= own_lo <= free_lo <= free_hi <= own_hi <= hi
            assert own_lo < own_hi
            passed, visited = (own_lo - lo) + (hi - own_hi), (free_lo - own_lo) + (free_hi - free_lo) + (own_hi - free_hi)
            assert passed + visited == hi - lo
            # The kernel has these loops only.
            assert has_upper or free_lo == own_lo
            assert has_lower or has_tail or free_hi == own_hi
            if block_n == ROWS:  # the groups of the form for head_dim 256 walk the program's tiles, masked by the consumer's ranges
                assert (own_lo, own_hi) == (lo, hi)
            for tile in range(q_pad // block_m):
                pairs = seen[tile * block_m : (tile + 1) * block_m, key : key + ROWS]
                if pairs[: max(0, p.seqlen_q - tile * block_m)].any():
                    assert own_lo <= tile < own_hi
                if free_lo <= tile < free_hi:
                    assert pairs.all()


@pytest.mark.parametrize("block_m, block_n", list(itertools.product((64, 128), (64, 128, 192))))
def test_visited_queries_hold_every_visible_pair(block_m, block_n):
    rng = random.Random(block_m + block_n)
    for _ in range(120):
        _check_walk(_draw(rng), block_m, block_n)


def _forgets_the_tail(key_lo, key_hi, lo, hi, seqlen_k, *walk):
    return queries_of_consumer(key_lo, key_hi, lo, hi, max(seqlen_k, key_hi), *walk)


def _swaps_nothing(key_lo, key_hi, q_pad, q_start, upper, lower, block, has_upper, has_lower):
    return queries_of_program(key_lo, key_hi, q_pad, q_start, lower, upper, block, has_lower, has_upper)


def _ends_a_tile_early(*arguments):
    own_lo, free_lo, free_hi, own_hi = queries_of_consumer(*arguments)
    return own_lo, min(free_lo, own_hi - 1), min(free_hi, own_hi - 1), max(own_hi - 1, own_lo + 1)


@pytest.mark.parametrize(
    "fault", [{"of_consumer": _forgets_the_tail}, {"of_program": _swaps_nothing}, {"of_consumer": _ends_a_tile_early}]
)
def test_a_wrong_walk_is_found(fault):
    rng = random.Random(0)

    def check():
        for _ in range(60):
            _check_walk(_draw(rng), 64, 128, **fault)

    with pytest.raises(AssertionError):
        check()


def test_keys_that_no_query_sees_get_the_last_tile_of_queries():
    walk = (128, 0, 0, 0, 64, True, False)  # 64 queries in two tiles, causal: the keys from 64 on see none
    assert queries_of_program(448, 512, *walk) == (1, 2)
    assert queries_of_consumer(448, 512, 1, 2, 512, *walk) == (1, 2, 2, 2)


class Slots:
    """Slots of shared memory with their barriers; ``parts`` of a slot are written one by one (by a warp each), or all by a copy."""

    def __init__(self, slots, fills, releases, parts=1):
        self.slots, self.parts, self.fills = slots, parts, [0] * slots
        self.full = [Barrier(fills) for _ in range(slots)]
        self.empty = [Barrier(releases) for _ in range(slots)]
        self.tags = [[None] * parts for _ in range(slots)]

    def vacant(self, step):
        slot, parity = step % self.slots, ((step // self.slots) & 1) ^ 1
        return lambda: self.empty[slot].done(parity)

    def fill(self, step, tag, copies):
        """The feeder: a copy starts once the slot is empty, and lands when it likes."""
        yield self.vacant(step)
        slot = step % self.slots
        self.tags[slot] = ["in flight"]
        self.fills[slot] += 1
        copies.append(lambda: (self.tags.__setitem__(slot, [tag]), self.full[slot].arrive()))

    def arrived(self, step):
        slot, parity = step % self.slots, (step // self.slots) & 1
        yield lambda: self.full[slot].done(parity)

    def check(self, step, tag):
        found = self.tags[step % self.slots]
        if found != [tag] * self.parts:
            raise RuntimeError(f"step {step} holds {found}, expected {tag}")

    def read(self, step, tag):
        """A read that takes a while: it is right if the slot holds the tile before and after it."""
        self.check(step, tag)
        yield lambda: True
        self.check(step, tag)

    def release(self, step):
        self.empty[step % self.slots].arrive()

    def settled(self):
        """Has every arrival completed a phase, and every fill been released?"""
        barriers = [*self.full, *self.empty]
        phases = [barrier.phase for barrier in self.full], [barrier.phase for barrier in self.empty]
        return all(b.pending == b.count for b in barriers) and phases[0] == phases[1]


class Program:
    """One program of a launch. Subclasses say which processes it has; ``fault`` names what is wrong with it."""

    def __init__(self, problem, config, number, fault="", need_dk=True, need_dv=True):
        self.p, self.config, self.number, self.fault = problem, config, number, fault
        self.need_dk, self.need_dv = need_dk, need_dv
        self.copies, self.rings, self.attended = [], [], []

    def ring(self, slots, fills, releases, parts=1):
        self.rings.append(Slots(slots, fills, releases + self.fault.count("+") - self.fault.count("-"), parts))
        return self.rings[-1]

    def resident(self, ring):
        """The feeder: rows that stay for the whole program."""
        ring.tags[0] = ["in flight"]
        self.copies.append(lambda: (ring.tags.__setitem__(0, ["resident"]), ring.full[0].arrive()))

    def run(self, rng):
        live = [[process, next(process, None)] for process in self.processes()]
        live = [entry for entry in live if entry[1] is not None]
        while live or self.copies:
            ready = [entry for entry in live if entry[1]()]
            if not ready and not self.copies:
                raise RuntimeError(f"deadlock: {len(live)} processes wait for one another")
            if self.copies and (not ready or rng.random() < 0.3):
                self.copies.pop(rng.randrange(len(self.copies)))()
                continue
            entry = rng.choice(ready)
            entry[1] = next(entry[0], None)
            if entry[1] is None:
                live.remove(entry)
        if not all(ring.settled() for ring in self.rings):
            raise RuntimeError("a barrier was left in the middle of a phase, or a slot was never released")


class KeysProgram(Program):
    """dk and dv: what the two forms share."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        p, c = self.p, self.config
        upper, lower, has_upper, has_lower = p.bounds
        self.start = self.number * c.block_n
        self.walk = (padded_rows(p), p.q_start, upper, lower, c.block_m, has_upper, has_lower)
        self.lo, self.hi = queries_of_program(self.start, min(self.start + c.block_n, p.seqlen_k), *self.walk)
        self.keys, self.values = Slots(1, 1, 1), Slots(1, 1, 1)  # never released: not among the rings

    def own(self, consumer):
        key = self.start + consumer * ROWS
        return queries_of_consumer(key, key + ROWS, self.lo, self.hi, self.p.seqlen_k, *self.walk)

    def feeder(self):
        self.resident(self.keys)
        self.resident(self.values)
        step = 0
        for member in range(self.p.group):
            for m_block in range(self.lo, self.hi):
                for ring in (self.do, self.q):
                    yield from ring.fill(step, (member, m_block), self.copies)
                step += 1


class Dkdv(KeysProgram):
    """``bwd.py``: consumers of 64 keys each."""

    def processes(self):
        consumers = self.config.block_n // ROWS
        self.q = self.ring(self.config.stages, 1, consumers * WARPS)
        self.do = self.ring(self.config.stages, 1, consumers * WARPS)
        return [self.feeder(), *(self.warp(c) for c in range(consumers) for _ in range(WARPS))]

    def passed(self, step, member, tiles):
        for m_block in tiles:
            for ring in (self.q, self.do):
                yield from ring.arrived(step)
                ring.check(step, (member, m_block))
                ring.release(step)
            step += 1

    def warp(self, c):
        own_lo, _, _, own_hi = self.own(c)
        step = 0
        yield from self.keys.arrived(0)
        yield from self.values.arrived(0)
        for member in range(self.p.group):
            if self.fault != "passes nothing over":
                yield from self.passed(step, member, range(self.lo, own_lo))
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
                if self.fault == "releases queries before dk":
                    self.q.release(step)
                if self.need_dk and not self.need_dv:
                    yield from self.q.read(step, here)
                self.do.check(step, here)
                self.do.release(step)
                s = None  # made from a slot that may be being refilled
                if m_block + 1 < own_hi or self.fault == "always waits":
                    yield from self.q.arrived(step + 1)
                    yield from self.q.read(step + 1, (member, m_block + 1))
                    s = member, m_block + 1
                if self.need_dk:
                    yield from self.q.read(step, here)
                if self.fault != "releases queries before dk":
                    self.q.release(step)
                step += 1
                self.attended.append((c, *here))
            yield from self.passed(step, member, range(own_hi, self.hi))
            step += self.hi - own_hi

    def expected(self):
        return [
            (c, member, m_block)
            for c in range(self.config.block_n // ROWS)
            for member in range(self.p.group)
            for m_block in range(self.own(c)[0], self.own(c)[3])
        ]


class DkdvPair(KeysProgram):
    """``bwd_pair.py``: one group makes p and dv, the other dk."""

    def processes(self):
        readers = 2 * WARPS if self.need_dk or self.fault == "counts a group that is idle" else WARPS
        self.q = self.ring(self.config.stages, 1, readers)
        self.do = self.ring(self.config.stages, 1, readers)
        self.handed = self.ring(self.config.p_slots, WARPS, WARPS, parts=WARPS)
        self.finished = 0
        groups = [group(w) for group in (self.value_warp, self.key_warp) for w in range(WARPS)]
        return [self.feeder(), *groups]

    def value_warp(self, w):
        lo, hi = self.lo, self.hi
        step = 0
        yield from self.keys.arrived(0)
        for member in range(self.p.group):
            yield from self.q.arrived(step)
            yield from self.q.read(step, (member, lo))
            s = member, lo
            for m_block in range(lo, hi):
                here = member, m_block
                if s != here:
                    raise RuntimeError(f"scores of {s} are taken for those of {here}")
                self.q.check(step, here)  # lse2
                self.q.release(step)
                yield from self.do.arrived(step)
                if self.need_dv:
                    yield from self.do.read(step, here)
                s = None  # made from a slot that may be being refilled
                if m_block + 1 < hi:
                    yield from self.q.arrived(step + 1)
                    yield from self.q.read(step + 1, (member, m_block + 1))
                    s = member, m_block + 1
                if self.need_dk:
                    if self.fault != "does not wait for the reader of p":
                        yield self.handed.vacant(step)
                    slot = step % self.handed.slots
                    self.handed.tags[slot][w] = here
                    yield lambda: True
                    self.handed.full[slot].arrive()
                if self.need_dv:
                    yield from self.do.read(step, here)
                self.do.release(step)
                step += 1
                self.attended.append(("value", *here))
        self.keys.check(0, "resident")
        yield lambda: True

    def key_warp(self, w):
        if not self.need_dk:
            return
        tiles = [(member, m_block) for member in range(self.p.group) for m_block in range(self.lo, self.hi)]
        yield from self.values.arrived(0)
        yield from self.do.arrived(0)
        yield from self.do.read(0, tiles[0])
        dp = tiles[0]
        self.do.release(0)
        for step, here in enumerate(tiles):
            if dp != here:
                raise RuntimeError(f"dp of {dp} is taken for that of {here}")
            yield from self.handed.arrived(step)
            yield from self.handed.read(step, here)
            self.handed.release(step)
            yield from self.q.arrived(step)
            dp = None  # made from a slot that may be being refilled
            if step + 1 < len(tiles):
                yield from self.do.arrived(step + 1)
                yield from self.do.read(step + 1, tiles[step + 1])
                dp = tiles[step + 1]
            yield from self.q.read(step, here)
            self.q.release(step)
            if step + 1 < len(tiles):
                self.do.check(step + 1, dp)
                self.do.release(step + 1)
            self.attended.append(("key", *here))
        self.finished += 1
        yield lambda: self.finished == WARPS  # the warpgroup meets before it writes
        self.q.tags[0] = ["dk"]  # it goes to memory through the first slot of queries, which both groups have read

    def expected(self):
        groups = ["value", "key"] if self.need_dk else ["value"]
        return list(itertools.product(groups, range(self.p.group), range(self.lo, self.hi)))


class Dq(Program):
    """``bwd_dq.py``: consumers of 64 queries each; a producer walks the keys from the last tile on."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        p, c = self.p, self.config
        upper, lower, has_upper, has_lower = p.bounds
        self.start = self.number * c.block_m
        self.walk = (p.seqlen_k, upper, lower, c.block_n, has_upper, has_lower)
        end = min(self.start + c.block_m, p.seqlen_q)
        self.lo, self.hi = tiles_of_program(p.q_start + self.start, p.q_start + end, *self.walk)

    def own(self, consumer):
        row = self.start + consumer * ROWS
        at = self.p.q_start
        return tiles_of_consumer(at + row, at + min(row + ROWS, self.p.seqlen_q), self.lo, self.hi, *self.walk)

    def processes(self):
        consumers = self.config.block_m // ROWS
        self.held = [Slots(1, 1, 1) for _ in range(consumers)]
        self.k = self.ring(self.config.k_stages, 1, consumers * WARPS)
        self.v = self.ring(self.config.v_stages, 1, consumers * WARPS)
        return [self.producer(), *(self.warp(c) for c in range(consumers) for _ in range(WARPS))]

    def producer(self):
        for held in self.held:
            self.resident(held)
        for step in range(self.hi - self.lo):
            for ring in (self.k, self.v):
                yield from ring.fill(step, self.hi - 1 - step, self.copies)

    def passed(self, step, count):
        for here in range(step, step + count):
            for ring in (self.k, self.v):
                yield from ring.arrived(here)
                ring.check(here, self.hi - 1 - here)
                ring.release(here)

    def products(self, step):
        """s and dp of this step; the values are released, the keys are not."""
        tile = self.hi - 1 - step
        yield from self.k.arrived(step)
        yield from self.k.read(step, tile)
        yield from self.v.arrived(step)
        yield from self.v.read(step, tile)
        self.v.release(step)

    def added(self, step, c):
        """dq of this step."""
        tile = self.hi - 1 - step
        if self.fault == "releases keys before dq":
            self.k.release(step)
        yield from self.k.arrived(step)
        yield from self.k.read(step, tile)
        if self.fault != "releases keys before dq":
            self.k.release(step)
        self.attended.append((c, tile))

    def warp(self, c):
        own_lo, _, _, own_hi = self.own(c)
        yield from self.held[c].arrived(0)
        step = self.hi - own_hi
        if self.fault != "passes nothing over":
            yield from self.passed(0, step)
        count = own_hi - own_lo
        if self.config.overlap:
            yield from self.products(step)
            for _ in range(1, count):
                yield from self.products(step + 1)
                yield from self.added(step, c)
                step += 1
            yield from self.added(step, c)
            step += 1
        else:
            for _ in range(count):
                yield from self.products(step)
                yield from self.added(step, c)
                step += 1
        yield from self.passed(step, own_lo - self.lo)
        self.held[c].check(0, "resident")
        yield lambda: True

    def expected(self):
        owns = [self.own(c) for c in range(self.config.block_m // ROWS)]
        return [(c, tile) for c, own in enumerate(owns) for tile in range(own[0], own[3])]


def _program(config):
    if isinstance(config, QueriesConfig):
        return Dq
    return DkdvPair if config.p_slots else Dkdv


def _launch(problem, config, rng, **options):
    """Run one program of a launch, and hold what each warp attended to the walk."""
    keys = isinstance(config, KeysConfig)
    tiles = -(-problem.seqlen_k // config.block_n) if keys else -(-problem.seqlen_q // config.block_m)
    program = _program(config)(problem, config, rng.randrange(tiles), **options)
    program.run(rng)
    assert sorted(program.attended) == sorted(program.expected() * WARPS)


@pytest.mark.parametrize("head_dim, config", CONFIGS, ids=lambda x: str(x).replace("Config", ""))
def test_every_tile_is_attended_without_deadlock(head_dim, config):
    rng = random.Random(str(head_dim))
    needs = [(True, True), (True, False), (False, True)] if isinstance(config, KeysConfig) else [(True, True)]
    for need_dk, need_dv in needs:
        for _ in range(8):
            _launch(_draw(rng, head_dim), config, rng, need_dk=need_dk, need_dv=need_dv)


def _config(kind):
    if kind is Dq:
        return DQ[64][0]
    return DKDV[256][0] if kind is DkdvPair else DKDV[64][0]


FAULTS = [(kind, sign) for kind in (Dkdv, DkdvPair, Dq) for sign in "+-"]  # an arrival too many or too few completes a phase
FAULTS += [(Dkdv, "passes nothing over"), (Dkdv, "releases queries before dk"), (Dkdv, "always waits")]
FAULTS += [(DkdvPair, "counts a group that is idle"), (DkdvPair, "does not wait for the reader of p")]
FAULTS += [(Dq, "passes nothing over"), (Dq, "releases keys before dq")]


@pytest.mark.parametrize("kind, fault", FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_the_model_can_fail(kind, fault):
    rng = random.Random(0)
    config = _config(kind)
    if fault == "does not wait for the reader of p":  # two slots of queries allow no more than two of p to be in use
        config = dataclasses.replace(config, p_slots=1)
    need_dk = fault != "counts a group that is idle"

    def launches():
        for _ in range(30):
            _launch(_draw(rng, 256 if kind is DkdvPair else 64), config, rng, fault=fault, need_dk=need_dk)

    with pytest.raises(RuntimeError, match=r"deadlock|holds|taken|phase"):
        launches()


@pytest.mark.parametrize("head_dim, config", CONFIGS, ids=lambda x: str(x).replace("Config", ""))
def test_every_config_is_legal(head_dim, config):
    problem = Problem.parse(f"seqlen=64 head_dim={words(head_dim)} arch=sm_90", software=Runtime((3, 9)))
    assert illegal(problem, config) is None
    too_wide = dataclasses.replace(config, block_n=96)
    assert "block_n" in illegal(problem, too_wide)
    hungry = {"stages": 30} if isinstance(config, KeysConfig) else {"k_stages": 30}
    assert "shared memory" in illegal(problem, dataclasses.replace(config, **hungry))
    if in_chunks(problem):
        assert "block_m" in illegal(problem, dataclasses.replace(config, block_m=192))
