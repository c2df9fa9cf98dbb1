"""The Hopper backward that adds dq up in memory: a model of its barriers, configs, when it is taken."""

import dataclasses
import random

import pytest
from test_hopper_backward import ROWS, KeysProgram, _draw
from test_hopper_walk import WARPS

from tilewise.configs.hopper_backward import ADDING

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
                if self.fault != "hands zeros on first":
                    ring.release(step)
            if self.fault != "hands no zeros on":
                yield from self.put(step, c, w, (member, m_block))
            if self.fault == "hands zeros on first":
                self.q.release(step)
                self.do.release(step)
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
