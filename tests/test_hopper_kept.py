"""ds kept in memory by the Hopper backward: how much of it, whose heads, which tiles of it, and the barriers of the dq kernel."""

import dataclasses
import itertools
import random
import types

import pytest
import torch
from test_hopper_backward import KeysProgram, Program
from test_hopper_walk import WARPS

from tilewise.arch import Runtime
from tilewise.backends.walk import order, queries_of_consumer, queries_of_program
from tilewise.bodies import allowed, tile_range
from tilewise.configs.hopper_backward import (
    DKDV,
    KEEPS,
    KEPT,
    MOST_COPIES,
    KeptConfig,
    heads_kept,
    padded_rows,
    shared_memory,
)
from tilewise.problem import Problem
from tilewise.spec import Spec
from tilewise.testing.compile_hopper_backward import words

ROWS = 64
LENGTHS = {"short": 1024, "medium": 4096, "long": 16384}


def _problem(head_dim=64, seqlen_q=64, seqlen_k=64, batch=1, heads_kv=1, group=1, upper=None, lower=None, align="bottom_right"):
    text = f"batch={batch} heads={heads_kv * group}/{heads_kv} seqlen={seqlen_q}x{seqlen_k} head_dim={words(head_dim)} arch=sm_90"
    spec = Spec(upper=upper, lower=lower, align=align, deterministic=True)
    return dataclasses.replace(Problem.parse(text, software=Runtime((3, 9))), spec=spec)


def _draw_sizes(rng, **options):
    """Any sizes, and any mask."""
    seqlen_q, seqlen_k = (int(2 ** rng.uniform(0, 17)) for _ in range(2))
    sizes = {
        "head_dim": rng.choice(list(DKDV)),
        "seqlen_q": seqlen_q,
        "seqlen_k": rng.choice([seqlen_q, seqlen_k]),
        "batch": rng.randrange(1, 10),
        "heads_kv": rng.randrange(1, 13),
        "group": rng.choice([1, 1, 2, 3, 8]),
        "upper": rng.choice([None, 0, rng.randrange(-500, 500)]),
        "lower": rng.choice([None, None, None, 100]),
        "align": rng.choice(["bottom_right", "top_left"]),
    }
    return _problem(**{**sizes, **options})


def _bytes(problem, heads):
    """Of a ds of this many heads of keys."""
    return heads * problem.group * -(-problem.seqlen_k // 64) * 64 * padded_rows(problem) * problem.itemsize


def _most(problem):
    return MOST_COPIES * 4 * problem.batch * problem.heads_q * padded_rows(problem) * problem.head_dim


def test_the_heads_kept_divide_all_and_fit_their_memory():
    rng = random.Random(0)
    kept = 0
    for _ in range(4000):
        p = _draw_sizes(rng)
        heads = heads_kept(p)
        everything = p.batch * p.heads_kv
        assert 0 <= heads <= everything
        if p.bounds[3]:
            assert heads == 0
        if heads:
            kept += 1
            assert everything % heads == 0
            assert _bytes(p, heads) <= _most(p)
            more = [n for n in range(heads + 1, everything + 1) if everything % n == 0]
            assert not more or _bytes(p, more[0]) > _most(p)
    assert kept > 400


@pytest.mark.parametrize("head_dim, group", list(itertools.product(DKDV, (1, 4))))
def test_memory_grows_with_the_length_and_not_with_its_square(head_dim, group, monkeypatch):
    """The bound of twice the length is twice the bound, whatever of it is used. Here ds is kept at every length."""
    monkeypatch.setitem(KEEPS, (head_dim, False), tuple(LENGTHS))
    found = []
    for power in range(7, 20):
        p = _problem(head_dim, 2**power, 2**power, batch=8, heads_kv=8, group=group)
        twice = dataclasses.replace(p, seqlen_q=2 * p.seqlen_q, seqlen_k=2 * p.seqlen_k)
        assert _most(twice) == 2 * _most(p)
        found.append(_bytes(p, heads_kept(p)))
        assert found[-1] <= 2**power * MOST_COPIES * 4 * p.batch * p.heads_q * p.head_dim
    # Once it is full, doubling the length gives no more than twice the bytes, until not even one head fits.
    full = next(i for i, n in enumerate(found) if 2 * n > 2 ** (7 + i) * MOST_COPIES * 4 * 64 * group * p.head_dim)
    assert all(b <= 2 * a for a, b in itertools.pairwise(found[full:]))
    assert found[-1] == 0


def test_the_table_knows_every_head_dim_and_mask():
    assert set(KEPT) == set(DKDV)
    assert set(KEEPS) == set(itertools.product(DKDV, (False, True)))
    for (head_dim, has_upper), classes in KEEPS.items():
        assert set(classes) <= set(LENGTHS)
        for name, length in LENGTHS.items():
            p = _problem(head_dim, length, length, batch=32, heads_kv=16, upper=0 if has_upper else None)
            assert (heads_kept(p) > 0) == (name in classes)


@pytest.mark.parametrize("head_dim, config", [(d, c) for d, configs in KEPT.items() for c in configs])
def test_every_config_fits(head_dim, config):
    p = _problem(head_dim)
    assert config.block_m in (128, 256)
    assert config.stages > 1  # a consumer waits for a tile before it releases the one before
    assert shared_memory(p, config) <= p.arch.shared_memory
    assert shared_memory(p, dataclasses.replace(config, stages=9)) > p.arch.shared_memory


# Chunks of heads: the launches of a call, recorded instead of run.


def _launches(monkeypatch, p, wanted=("dq", "dk", "dv"), heads=heads_kept):
    """``(name of the kernel, its numbers and constants by name, grid, tensors)`` of each launch."""
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends import launching
    from tilewise.backends.hopper import bwd_launch

    found = []

    def record(plan, *tensors):
        names = plan.kernel.arg_names[len(tensors) :]
        numbers = dict(zip(names, plan.numbers, strict=False))
        assert not set(numbers) & set(plan.options)
        found.append((plan.kernel.__name__, types.SimpleNamespace(**numbers, **plan.options), plan.grid, tensors))

    monkeypatch.setattr(launching.Plan, "run", record)
    monkeypatch.setattr(bwd_launch, "heads_kept", heads)
    q = torch.empty((p.batch, p.heads_q, p.seqlen_q, p.head_dim), dtype=torch.bfloat16, device="meta")
    k = torch.empty((p.batch, p.heads_kv, p.seqlen_k, p.head_dim), dtype=torch.bfloat16, device="meta")
    lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), device="meta")
    v = torch.empty((p.batch, p.heads_kv, p.seqlen_k, p.head_dim_v), dtype=torch.bfloat16, device="meta")
    do = torch.empty((p.batch, p.heads_q, p.seqlen_q, p.head_dim_v), dtype=torch.bfloat16, device="meta")
    gradients = {"dq": q, "dk": k, "dv": v}
    bwd_launch._call.cache_clear()  # the plans of a call are remembered
    bwd_launch.backward(p, do, None, q, k, v, do, lse, *(t if name in wanted else None for name, t in gradients.items()))
    bwd_launch._call.cache_clear()
    return found


def _check_chunks(p, found):
    """Hold the launches to: every tile of every head once, and dq of a head from the ds of that head."""
    (rows, *_), *pairs = found
    assert rows == "_rows_kernel"
    assert [name for name, *_ in pairs[1::2]] == ["_dq_kept_kernel"] * (len(pairs) // 2)
    keys, queries = [], []
    ds = pairs[0][3][-1]
    assert ds.numel() * ds.element_size() <= _most(p)
    heads, rest = divmod(ds.shape[0], -(-p.seqlen_k // 64))
    assert (rest, ds.shape[2]) == (0, 64)
    assert ds.shape[1] >= p.seqlen_q
    for (_, n, grid, tensors), (_, m, kept_grid, kept_tensors) in zip(pairs[::2], pairs[1::2], strict=True):
        assert n.KEEPS
        assert n.NEED_DK
        assert tensors[-1] is ds
        assert kept_tensors[0] is ds
        holds = {}
        for index in range(grid[0]):
            head, n_block = order(index, n.n_blocks, n.heads_total, n.heads_together, n.LONGEST)
            batch, head_kv = divmod(head + n.head_first, n.heads_kv)
            keys.append((batch, head_kv, n_block))
            for member in range(n.group):
                place = (batch * n.heads_kv + head_kv - n.head_first) * n.group + member
                holds[place] = batch, head_kv * n.group + member
        assert set(holds) <= set(range(heads))
        for index in range(kept_grid[0]):
            head, m_block = order(index, m.m_blocks, m.heads_total, m.heads_together, m.LONGEST)
            batch, head_q = divmod(m.head_first + head, m.heads_q)
            assert holds[head] == (batch, head_q)
            queries.append((batch, head_q, m_block))
    n_blocks, m_blocks = pairs[0][1].n_blocks, pairs[1][1].m_blocks
    assert sorted(keys) == list(itertools.product(range(p.batch), range(p.heads_kv), range(n_blocks)))
    assert sorted(queries) == list(itertools.product(range(p.batch), range(p.heads_q), range(m_blocks)))
    return len(pairs) // 2


def test_the_chunks_cover_every_head_once(monkeypatch):
    rng = random.Random(0)
    chunks = set()
    for _ in range(400):
        length = int(2 ** rng.uniform(6, 14))
        sizes = {"batch": rng.randrange(1, 4), "heads_kv": rng.randrange(1, 7), "group": rng.randrange(1, 4)}
        p = _draw_sizes(rng, seqlen_q=length, seqlen_k=length, lower=None, **sizes)
        if heads_kept(p):
            chunks.add(_check_chunks(p, _launches(monkeypatch, p)))
    assert len(chunks) > 4


def test_a_chunk_that_does_not_divide_is_found(monkeypatch):
    p = _problem(128, 4096, 4096, batch=2, heads_kv=8, group=2)
    assert heads_kept(p) == 8
    assert _check_chunks(p, _launches(monkeypatch, p)) == 2
    with pytest.raises((AssertionError, KeyError)):
        _check_chunks(p, _launches(monkeypatch, p, heads=lambda _: 3))


def test_ds_is_kept_only_for_who_asks_for_dq_and_dk(monkeypatch):
    p = _problem(128, 1024, 1024, heads_kv=2)
    seen = {wanted: [name for name, *_ in _launches(monkeypatch, p, wanted)][1:] for wanted in ("dq", ("dk", "dv"), ("dq", "dv"))}
    assert seen == {"dq": ["_dq_kernel"], ("dk", "dv"): ["_dkdv_kernel"], ("dq", "dv"): ["_dkdv_kernel", "_dq_kernel"]}
    keeps, kept = _launches(monkeypatch, p, ("dq", "dk"))[1:]
    assert (keeps[0], kept[0]) == ("_dkdv_kernel", "_dq_kept_kernel")
    assert keeps[1].KEEPS
    assert not keeps[1].NEED_DV
    names = [name for name, *_ in _launches(monkeypatch, dataclasses.replace(p, spec=Spec(upper=0, lower=100)))]
    assert names == ["_rows_kernel", "_dkdv_kernel", "_dq_kernel"]


# Tiles of ds, 64 keys by 64 queries: those that are read were written.


def _draw(rng, head_dim=64, longest=600):
    """A small problem without a lower bound."""
    sizes = [rng.choice([rng.randrange(1, longest), 64 * rng.randrange(1, longest // 64)]) for _ in range(2)]
    upper = rng.choice([None, 0, rng.randrange(-70, 200), rng.randrange(-longest, longest)])
    group = rng.choice([1, 2, 3])
    return _problem(head_dim, *sizes, group=group, upper=upper, align=rng.choice(["bottom_right", "top_left"]))


def _sees(p, row, rows):
    """``Kept.tiles``: how many tiles of 64 keys these queries see."""
    upper, _, has_upper, _ = p.bounds
    last = p.q_start + min(row + rows, p.seqlen_q)
    return tile_range(p.q_start + row, last, p.seqlen_k, upper, 0, ROWS, has_upper, False)[3]


def _own(p, start, consumer, block_m, sees=_sees):
    """``(own, total)``: the tiles that a consumer of a program multiplies, and those that the program streams."""
    total = sees(p, start, block_m)
    return min(sees(p, start + consumer * ROWS, ROWS), total), total


def _written(p, block_m, block_n, of_consumer=queries_of_consumer):
    """The tiles (of keys, of queries) that the keys kernel writes."""
    upper, lower, has_upper, has_lower = p.bounds
    walk = (padded_rows(p), p.q_start, upper, lower, block_m, has_upper, has_lower)
    for start in range(0, p.seqlen_k, block_n):
        lo, hi = queries_of_program(start, min(start + block_n, p.seqlen_k), *walk)
        for key in range(start, start + block_n, ROWS):
            own_lo, _, _, own_hi = of_consumer(key, key + ROWS, lo, hi, p.seqlen_k, *walk)
            yield from itertools.product([key // ROWS], range(own_lo * block_m // ROWS, own_hi * block_m // ROWS))


def _read(p, block_m, sees=_sees):
    """The tiles (of keys, of queries) from which the dq kernel makes rows that are there."""
    for start in range(0, p.seqlen_q, block_m):
        for consumer in range(block_m // ROWS):
            if start + consumer * ROWS < p.seqlen_q:
                own, _ = _own(p, start, consumer, block_m, sees)
                yield from itertools.product(range(own), [start // ROWS + consumer])


def _check_tiles(p, block_m, block_n, kept_block_m, of_consumer=queries_of_consumer, sees=_sees):
    written, read = set(_written(p, block_m, block_n, of_consumer)), set(_read(p, kept_block_m, sees))
    assert read <= written
    upper, lower, has_upper, has_lower = p.bounds
    queries, keys = (torch.arange(-(-n // ROWS) * ROWS) for n in (p.seqlen_q, p.seqlen_k))
    seen = allowed(p.q_start + queries[:, None], keys[None, :], p.seqlen_k, upper, lower, has_upper, has_lower)
    seen = (seen & (queries < p.seqlen_q)[:, None]).unflatten(1, (-1, ROWS)).unflatten(0, (-1, ROWS)).any(3).any(1)
    assert {(key, query) for query, key in seen.nonzero().tolist()} <= read
    # Whatever is in memory beyond the keys would be multiplied by zeros, and 0 times NaN is NaN.
    assert all(key * ROWS < p.seqlen_k for key, _ in read)


@pytest.mark.parametrize("block_m, block_n, kept_block_m", list(itertools.product((64, 128), (64, 128, 192), (128, 256))))
def test_tiles_that_are_read_were_written(block_m, block_n, kept_block_m):
    rng = random.Random(block_m + block_n + kept_block_m)
    for _ in range(60):
        _check_tiles(_draw(rng), block_m, block_n, kept_block_m)


def _begins_a_tile_late(*arguments):
    own_lo, free_lo, free_hi, own_hi = queries_of_consumer(*arguments)
    return min(own_lo + 1, own_hi - 1), free_lo, free_hi, own_hi


def _reads_on(p, row, rows):
    return min(_sees(p, row, rows) + 1, -(-p.seqlen_k // ROWS))


def _forgets_the_corner(p, row, rows):
    return _sees(dataclasses.replace(p, spec=dataclasses.replace(p.spec, align="top_left")), row, rows)


@pytest.mark.parametrize("fault", [{"of_consumer": _begins_a_tile_late}, {"sees": _reads_on}, {"sees": _forgets_the_corner}])
def test_a_tile_that_was_not_written_is_found(fault):
    rng = random.Random(0)

    def check():
        for _ in range(60):
            _check_tiles(_draw(rng), 64, 128, 256, **fault)

    with pytest.raises(AssertionError):
        check()


def test_the_kernel_counts_the_same_tiles():
    """The body of ``Kept.tiles`` itself, run as Python."""
    pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")
    from tilewise.backends.hopper import bwd_kept

    tiles = types.FunctionType(bwd_kept.Kept.tiles.fn.__code__, {"tile_range": tile_range, "ROWS": ROWS})
    rng = random.Random(0)
    for _ in range(200):
        p = _draw(rng)
        upper, _, has_upper, _ = p.bounds
        seen = types.SimpleNamespace(q_start=p.q_start, seqlen_q=p.seqlen_q, seqlen_k=p.seqlen_k, upper=upper, HAS_UPPER=has_upper)
        for row, rows in itertools.product(range(0, p.seqlen_q + ROWS, ROWS), (ROWS, 128, 256)):
            assert tiles(seen, row, rows) == _sees(p, row, rows)


# Barriers.


class Kept(Program):
    """``bwd_kept.py``: consumers of 64 queries each, and a producer, over one ring of ds and keys."""

    def processes(self):
        consumers = self.config.block_m // ROWS
        self.start = self.number * self.config.block_m
        self.slots = self.ring(self.config.stages, 1, consumers * WARPS)
        return [self.producer(), *(self.warp(c) for c in range(consumers) for _ in range(WARPS))]

    def producer(self):
        for step in range(_sees(self.p, self.start, self.config.block_m)):
            yield from self.slots.fill(step, step, self.copies)

    def warp(self, c):
        own, total = _own(self.p, self.start, c, self.config.block_m)
        for step in range(own):
            yield from self.slots.arrived(step)
            self.slots.check(step, step)
            self.attended.append((c, step))
            if self.fault == "releases what it multiplies":
                self.slots.release(step)
            yield lambda: True
            if step > 0:  # one product may still run: that of this step
                self.slots.check(step - 1, step - 1)
                if self.fault != "releases what it multiplies":
                    self.slots.release(step - 1)
        if self.fault != "releases what it multiplies":
            first = {"forgets the last": own, "keeps what it does not see": total}.get(self.fault, max(own - 1, 0))
        else:
            first = own
        for step in range(first, total):
            yield from self.slots.arrived(step)
            self.slots.check(step, step)
            self.slots.release(step)

    def expected(self):
        consumers = range(self.config.block_m // ROWS)
        return [(c, step) for c in consumers for step in range(_own(self.p, self.start, c, self.config.block_m)[0])]


def _launch(p, config, rng, fault=""):
    program = Kept(p, config, rng.randrange(-(-p.seqlen_q // config.block_m)), fault=fault)
    program.run(rng)
    assert sorted(program.attended) == sorted(program.expected() * WARPS)


@pytest.mark.parametrize("config", [KeptConfig(m, n, 0, 0) for m in (128, 256) for n in (2, 3, 4, 5)], ids=str)
def test_every_tile_of_ds_is_multiplied_without_deadlock(config):
    rng = random.Random(config.stages)
    for _ in range(25):
        _launch(_draw(rng), config, rng)


FAULTS = ["+", "-", "forgets the last", "keeps what it does not see", "releases what it multiplies"]


@pytest.mark.parametrize("block_m, fault", list(itertools.product((128, 256), FAULTS)))
def test_a_fault_of_the_barriers_is_found(block_m, fault):
    rng = random.Random(0)

    def launches():
        for _ in range(40):
            _launch(_draw(rng), KeptConfig(block_m, 3, 0, 0), rng, fault)

    with pytest.raises(RuntimeError, match=r"deadlock|holds|phase"):
        launches()


def test_one_slot_is_a_deadlock():
    rng = random.Random(0)
    with pytest.raises(RuntimeError, match="deadlock"):
        _launch(_problem(64, 128, 128), KeptConfig(128, 1, 0, 0), rng)


# The slots through which the consumers of the keys kernel hand ds to the storer.


class Keeping(KeysProgram):
    """``ds_tiles.py`` beside any kernel over keys: who makes ds puts it into its own two slots, and the storer empties them."""

    def processes(self):
        self.makers = 1 if self.config.p_slots else self.config.block_n // ROWS
        releases = 2 if self.fault == "waits for two" else 1
        self.slots = [self.ring(2, WARPS, releases, parts=WARPS) for _ in range(self.makers)]
        return [self.storer(), *(self.warp(c, w) for c in range(self.makers) for w in range(WARPS))]

    def range_of(self, c):
        own_lo, _, _, own_hi = self.own(c)
        return (self.lo, self.hi) if self.makers == 1 else (own_lo, own_hi)

    def storer(self):
        for member in range(self.p.group):
            for m_block in range(self.lo, self.hi):
                for c in range(self.makers):
                    own_lo, own_hi = self.range_of(c)
                    if own_lo <= m_block < own_hi:
                        count = member * (own_hi - own_lo) + m_block - own_lo
                        yield from self.slots[c].arrived(count)
                        if self.fault == "releases what it copies":
                            self.slots[c].release(count)
                        yield from self.slots[c].read(count, (member, m_block))
                        if self.fault != "releases what it copies":
                            self.slots[c].release(count)
                        self.attended.append((c, member, m_block))

    def warp(self, c, w):
        own_lo, own_hi = self.range_of(c)
        for member in range(self.p.group):
            before = member * (own_hi - own_lo) - own_lo
            if self.fault == "forgets its first tile":
                before += own_lo
            for m_block in range(own_lo, own_hi):
                count = before + m_block
                yield self.slots[c].vacant(count)
                self.slots[c].tags[count % 2][w] = member, m_block
                yield lambda: True
                self.slots[c].full[count % 2].arrive()

    def expected(self):
        every = [(c, range(*self.range_of(c))) for c in range(self.makers)]
        return [(c, member, m_block) for c, own in every for member in range(self.p.group) for m_block in own]


def _hand_over(p, config, rng, fault=""):
    program = Keeping(p, config, rng.randrange(-(-p.seqlen_k // config.block_n)), fault=fault)
    program.run(rng)
    assert sorted(program.attended) == sorted(program.expected())


@pytest.mark.parametrize("head_dim, config", [(d, c) for d, configs in DKDV.items() for c in configs], ids=str)
def test_every_tile_of_ds_is_stored_without_deadlock(head_dim, config):
    rng = random.Random(config.block_n)
    for _ in range(25):
        _hand_over(_draw(rng, head_dim), config, rng)


@pytest.mark.parametrize("fault", ["+", "-", "waits for two", "releases what it copies", "forgets its first tile"])
def test_a_fault_of_the_slots_is_found(fault):
    rng = random.Random(0)

    def launches():
        for _ in range(60):
            _hand_over(_draw(rng, 128), DKDV[128][0], rng, fault)

    with pytest.raises(RuntimeError, match=r"deadlock|holds|phase"):
        launches()


def test_few_divisors_do_not_make_launches_of_single_heads():
    assert heads_kept(_problem(128, 4096, 4096, batch=16, heads_kv=1)) > 1
    assert heads_kept(_problem(128, 4096, 4096, batch=13, heads_kv=1)) == 0
