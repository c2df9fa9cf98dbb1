"""The walk of the Hopper kernels over tiles, and a model of its barriers in which a deadlock or a lost tile shows.

The model runs the producer and every warp of every consumer as processes that stop at waits, in random order, over barriers with
the counts and parities of the kernel. It uses the very bodies that the kernel compiles (``tilewise.backends.walk``).
"""

import itertools
import random

import pytest

from tilewise.backends.walk import order, tiles_of_consumer, tiles_of_program
from tilewise.spec import Spec

ROWS, WARPS, TICKETS = 64, 4, 4


class Barrier:
    """An mbarrier: a phase is complete after ``count`` arrivals; then the next one begins."""

    def __init__(self, count):
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self):
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase + 1

    def done(self, parity):
        return (self.phase & 1) != parity


class Ring:
    def __init__(self, slots, releases):
        self.slots = slots
        self.full = [Barrier(1) for _ in range(slots)]
        self.empty = [Barrier(releases) for _ in range(slots)]
        self.tags = [None] * slots

    def fill(self, step, tag, copies):
        slot = step % self.slots
        parity = ((step // self.slots) & 1) ^ 1
        yield lambda: self.empty[slot].done(parity)
        self.tags[slot] = "in flight"
        copies.append((self, slot, tag))

    def take(self, step, tag):
        slot = step % self.slots
        parity = (step // self.slots) & 1
        yield lambda: self.full[slot].done(parity)
        self.check(step, tag)

    def check(self, step, tag):
        if self.tags[step % self.slots] != tag:
            raise RuntimeError(f"step {step} holds {self.tags[step % self.slots]}, expected {tag}")

    def release(self, step, tag):
        self.check(step, tag)
        self.empty[step % self.slots].arrive()


class Launch:
    """One program of a launch, or all of them on one counter (``dynamic``)."""

    def __init__(
        self, mask, seqlen_q, seqlen_k, heads, consumers, block_n, stages, q_slots, overlap, dynamic, programs, fault="", pack=1
    ):
        self.mask, self.seqlen_q, self.seqlen_k, self.heads = mask, seqlen_q, seqlen_k, heads
        self.consumers, self.block_n, self.overlap, self.dynamic, self.fault = consumers, block_n, overlap, dynamic, fault
        self.stages, self.q_slots = stages, q_slots
        self.block_m = consumers * ROWS
        self.pack, self.rows = pack, seqlen_q * pack  # ``pack`` heads with a key head in common are worked on as one
        self.m_blocks = -(-self.rows // self.block_m)
        self.total = self.m_blocks * heads
        self.programs = min(programs, self.total) if dynamic else self.total
        self.counter = 0
        self.attended = []

    def locate(self, index):
        head, m = order(index, self.m_blocks, self.heads, self.heads, "last" if self.mask.upper is not None else "any")
        start = m * self.block_m
        at = self.mask.q_start(self.seqlen_q, self.seqlen_k)
        upper, lower = self.mask.upper, self.mask.lower
        bounds = (self.seqlen_k, upper or 0, lower or 0, self.block_n, upper is not None, lower is not None)
        lo, hi = tiles_of_program(*self.positions(at, start, self.block_m), *bounds)
        return head, start, lo, hi, at, bounds

    def positions(self, at, start, count):
        """The positions of ``count`` rows from ``start`` on, as a range: row r is query r // pack."""
        return at + start // self.pack, at + (min(start + count, self.rows) - 1) // self.pack + 1

    def processes(self, program):
        q = Ring(self.q_slots * self.consumers, 1)
        k = Ring(self.stages, self.consumers * WARPS)
        v = Ring(self.stages, self.consumers * WARPS)
        issued = [Barrier(1) for _ in range(TICKETS)]
        tickets = [None] * TICKETS
        copies = []
        groups = [Barrier(WARPS) for _ in range(self.consumers)]
        yield copies, self.producer(program, q, k, v, issued, tickets, copies)
        for c in range(self.consumers):
            for _ in range(WARPS):
                yield copies, self.warp(program, c, q, k, v, issued, tickets, groups[c])

    def producer(self, program, q, k, v, issued, tickets, copies):
        step, turn, index = 0, 0, program
        while index < self.total:
            here = index
            _, _, lo, hi, _, _ = self.locate(index)
            for c in range(self.consumers):
                yield from q.fill(turn * self.consumers + c, (here, c), copies)
            count = hi - lo
            for j in range(count):
                yield from k.fill(step, (here, hi - 1 - j), copies)
                yield from v.fill(step, (here, hi - 1 - j), copies)
                step += 1
                if self.dynamic and j == max(count - 3, 0):
                    index = self.counter + self.programs
                    self.counter = 0 if self.counter == self.total - 1 and self.fault != "leaves the counter" else self.counter + 1
                    tickets[turn % TICKETS] = index
                    issued[turn % TICKETS].arrive()
            if not self.dynamic:
                break
            turn += 1

    def warp(self, program, c, q, k, v, issued, tickets, group):
        step, turn, index = 0, 0, program

        def passed(count, top):
            nonlocal step
            for j in range(count):
                for ring in (k, v):
                    yield from ring.take(step, (index, top - j))
                    ring.release(step, (index, top - j))
                step += 1

        while index < self.total:
            head, start, lo, hi, at, bounds = self.locate(index)
            row = start + c * ROWS
            own_lo, free_lo, free_hi, own_hi = tiles_of_consumer(*self.positions(at, row, ROWS), lo, hi, *bounds)
            q_step = turn * self.consumers + c
            yield from q.take(q_step, (index, c))
            if self.fault != "skips without releasing":
                yield from passed(hi - own_hi, hi - 1)
            else:
                step += hi - own_hi
            visited = list(range(own_hi - 1, own_lo - 1, -1))
            if self.overlap:
                yield from k.take(step, (index, visited[0]))
                k.release(step, (index, visited[0]))
                for before, n in itertools.pairwise(visited):
                    yield from k.take(step + 1, (index, n))
                    yield from v.take(step, (index, before))
                    k.release(step + 1, (index, n))
                    v.release(step, (index, before))
                    step += 1
                yield from v.take(step, (index, visited[-1]))
                v.release(step, (index, visited[-1]))
                step += 1
            else:
                for n in visited:
                    yield from k.take(step, (index, n))
                    k.release(step, (index, n))
                    yield from v.take(step, (index, n))
                    v.release(step, (index, n))
                    step += 1
            if self.fault != "forgets the left edge":
                yield from passed(own_lo - lo, own_lo - 1)
            q.check(q_step, (index, c))
            self.attended.append((head, row, tuple(visited), free_lo, free_hi))
            phase = group.phase
            group.arrive()
            if group.phase > phase:  # the last warp of the group
                q.release(q_step, (index, c))
            yield lambda at_phase=phase: group.phase > at_phase
            if not self.dynamic:
                break
            parity = (turn // TICKETS) & 1
            slot = turn % TICKETS
            yield lambda b=issued[slot], p=parity: b.done(p)
            index = tickets[slot]
            turn += 1

    def run(self, rng):
        live = []  # [copies, process, what it waits for]
        for program in range(self.programs):
            live += [[copies, process, next(process, None)] for copies, process in self.processes(program)]
        live = [entry for entry in live if entry[2] is not None]
        while live:
            ready = [entry for entry in live if entry[2]()]
            flying = [entry[0] for entry in live if entry[0]]
            if not ready and not flying:
                raise RuntimeError(f"deadlock: {len(live)} processes wait for one another")
            if flying and (not ready or rng.random() < 0.5):
                copies = rng.choice(flying)
                ring, slot, tag = copies.pop(rng.randrange(len(copies)))
                ring.tags[slot] = tag
                ring.full[slot].arrive()
                continue
            entry = rng.choice(ready)
            entry[2] = next(entry[1], None)
            if entry[2] is None:
                live.remove(entry)


def _draw(rng):
    upper = rng.choice([None, 0, 0, rng.randrange(-70, 300)])
    lower = rng.choice([None, None, rng.randrange(-70, 300)])
    mask = Spec(upper=upper, lower=lower, align=rng.choice(["bottom_right", "top_left"]))
    return mask, rng.randrange(1, 700), rng.randrange(1, 700)


SHAPES = {  # consumers, block_n, stages, q_slots, overlap
    64: (4, 64, 4, 2, False),
    128: (2, 128, 2, 2, True),
    256: (2, 64, 2, 1, True),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("head_dim", SHAPES)
def test_every_tile_is_attended_once_without_deadlock(head_dim, dynamic):
    rng = random.Random(head_dim + dynamic)
    for _ in range(12):
        mask, seqlen_q, seqlen_k = _draw(rng)
        heads = rng.randrange(1, 4)
        launch = Launch(mask, seqlen_q, seqlen_k, heads, *SHAPES[head_dim], dynamic, rng.randrange(1, 4))
        padded = launch.m_blocks * launch.block_m
        for _ in range(1 + dynamic):  # the second launch finds the counter as the first left it
            launch.attended.clear()
            launch.run(rng)
            assert launch.counter == 0
            rows = [(head, row) for head, row, *_ in launch.attended]
            assert sorted(rows) == sorted([(h, r) for h in range(heads) for r in range(0, padded, ROWS)] * WARPS)


@pytest.mark.parametrize("pack", [1, 2, 8, 64])
@pytest.mark.parametrize("head_dim", SHAPES)
def test_visited_tiles_hold_every_visible_pair(head_dim, pack):
    rng = random.Random(head_dim)
    for _ in range(60 if pack == 1 else 15):
        mask, seqlen_q, seqlen_k = _draw(rng)
        seqlen_q = -(-seqlen_q // pack)
        launch = Launch(mask, seqlen_q, seqlen_k, 1, *SHAPES[head_dim], False, 1, pack=pack)
        block, shift = launch.block_n, mask.q_start(seqlen_q, seqlen_k)
        for index in range(launch.total):
            _, start, lo, hi, at, bounds = launch.locate(index)
            for row in range(start, start + launch.block_m, ROWS):
                queries = {r // pack for r in range(row, min(row + ROWS, launch.rows))}
                own_lo, free_lo, free_hi, own_hi = tiles_of_consumer(*launch.positions(at, row, ROWS), lo, hi, *bounds)
                assert lo <= own_lo < own_hi <= hi
                for tile in range(-(-seqlen_k // block)):
                    keys = range(tile * block, tile * block + block)
                    seen = [_sees(mask, r + shift, key, seqlen_k) for r in queries for key in (keys[0], keys[-1])]
                    some = any(_sees(mask, r + shift, key, seqlen_k) for r in queries for key in keys)
                    if some:
                        assert own_lo <= tile < own_hi
                    if own_lo <= tile < own_hi and free_lo <= tile < free_hi:
                        assert all(seen)


def _sees(mask, q_pos, key, seqlen_k):
    below = mask.upper is None or key <= q_pos + mask.upper
    above = mask.lower is None or key >= q_pos - mask.lower
    return key < seqlen_k and below and above


@pytest.mark.parametrize("fault", ["skips without releasing", "forgets the left edge"])
def test_the_model_can_deadlock(fault):
    mask = Spec(upper=100, lower=100, align="top_left")
    launch = Launch(mask, 600, 700, 1, *SHAPES[64], True, 1, fault)
    with pytest.raises(RuntimeError, match=r"deadlock|holds"):
        launch.run(random.Random(0))


def test_the_model_sees_a_counter_that_is_not_put_back():
    launch = Launch(Spec(), 600, 700, 2, *SHAPES[64], True, 2, "leaves the counter")
    launch.run(random.Random(0))
    assert launch.counter == launch.total


def test_rows_without_keys_visit_one_tile_past_the_end():
    lo, hi = tiles_of_program(-300, -172, 100, 0, 0, 64, True, False)
    assert (lo, hi) == (2, 3)
    assert tiles_of_consumer(-300, -236, lo, hi, 100, 0, 0, 64, True, False) == (2, 0, 0, 3)
