"""Dropout on the weights: one mask for all backends, tiles and batches, forward and backward, and where its seeds come from."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from small_calls import BACKEND, close, draw, qkv
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.backends import forget, torch_tiles
from tilewise.configs import Config, lookup, records
from tilewise.keep import philox
from tilewise.select import choose, table
from tilewise.testing.calls import random_call
from tilewise.testing.gauntlet import entry

BACKENDS = [c.backend for c in tw.CAPABILITIES if "dropout" in c.terms]
SEED = torch.tensor(20261130)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


# The rule.

# Known answers of philox4x32 with 7 rounds: counter, key, words.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def numbers(text):
    return [int(word, 16) for word in text.split()]


def signed(low, high):
    bits = high << 32 | low
    return torch.tensor(bits - 2**64 if bits >= 2**63 else bits)


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_the_generator_gives_the_known_answers(counter, key, words):
    got = philox(signed(*numbers(key)), *(torch.tensor(n) for n in numbers(counter)))
    assert [int(word) for word in got] == numbers(words)


def plain_rule(seed, p, b, h, i, j):
    """Is the weight kept? In Python's own integers."""
    c, k = [i & ~8, j & ~8, h, b], [seed % 2**32, seed // 2**32 % 2**32]
    for _ in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[2 * (i >> 3 & 1) + (j >> 3 & 1)] < (1 - p) * 2**32


@pytest.mark.parametrize("seed", [0, 20261130, -5, 2**62 + 12345])
def test_the_mask_is_that_of_the_rule(seed):
    q, k = torch.empty(2, 3, 21, 4), torch.empty(2, 3, 35, 4)
    mask = tw.dropout_mask(q, k, tw.dropout(0.3, torch.tensor(seed)))
    assert mask.shape == (2, 3, 21, 35)
    for at in itertools.product((0, 1), (0, 2), (0, 7, 8, 15, 16, 20), (0, 5, 8, 31, 34)):
        assert bool(mask[at]) == plain_rule(seed, 0.3, *at), at


def seen_weights(backend, spec, shape=(2, 4, 2, 70, 139)):
    """What each weight is multiplied by, as the forward pass and the pass of dv see it: v and do are unit matrices."""
    batch, heads, heads_kv, n, m = shape
    q, k = draw(batch, heads, n, 16, seed=1), draw(batch, heads_kv, m, 16, seed=2)
    v = torch.eye(m).expand(batch, heads_kv, m, m).clone().requires_grad_()
    o = tw.attention(q, k, v, spec=spec, backend=backend)
    weights = torch.softmax(q @ k.repeat_interleave(heads // heads_kv, 1).mT / 4, -1)
    (dv,) = torch.autograd.grad(o, v, torch.eye(n, m).expand(o.shape))
    return o.detach() / weights, dv, weights


@pytest.mark.parametrize("p", [0.2, 0.75])
def test_every_backend_has_the_mask_that_can_be_asked_for(backend, p):
    q, k = torch.empty(2, 4, 70, 16), torch.empty(2, 2, 139, 16)
    spec = tw.dropout(p, SEED)
    mask = tw.dropout_mask(q, k, spec)
    factor, dv, weights = seen_weights(backend, spec)
    assert torch.equal(factor != 0, mask)
    close(factor, mask / (1 - p), 1e-4)
    # dv of the unit matrix: column d of key j is the weight of query d on it, summed over the group.
    used = (weights * mask / (1 - p)).unflatten(1, (2, 2)).sum(2).mT
    close(dv[..., :70], used, 1e-4)


@pytest.fixture
def fresh_lookups():
    forget()
    yield
    forget()


@pytest.mark.parametrize("tiles", [(16, 32), (64, 16), (128, 64)])
def test_the_mask_does_not_depend_on_tiles(monkeypatch, fresh_lookups, tiles):
    q, k = torch.empty(2, 4, 70, 16), torch.empty(2, 2, 139, 16)
    spec = tw.dropout(0.4, SEED)
    mask = tw.dropout_mask(q, k, spec)
    monkeypatch.setattr(torch_tiles, "BLOCK_M", tiles[0] + 3)
    monkeypatch.setattr(torch_tiles, "BLOCK_N", tiles[1] + 5)
    assert torch.equal(seen_weights("torch", spec)[0] != 0, mask)
    config = Config(*tiles, 4, 2)
    with records.trying("triton", "fwd", config), records.trying("triton", "dkdv", config):
        problem = random_call((2, 4, 2, 70, 139, 16, 139), spec=spec).problem
        assert lookup(problem, "fwd") == lookup(problem, "dkdv") == config
        factor, dv, weights = seen_weights("triton", spec)
    assert torch.equal(factor != 0, mask)
    close(dv[..., :70], (weights * mask / 0.6).unflatten(1, (2, 2)).sum(2).mT, 1e-4)


def test_the_mask_does_not_depend_on_batch_size_or_lengths(backend):
    spec = tw.dropout(0.5, SEED)
    whole = seen_weights(backend, spec)[0] != 0
    part = seen_weights(backend, spec, (1, 2, 2, 33, 50))[0] != 0
    assert torch.equal(part, whole[:1, :2, :33, :50])


def test_rows_of_the_mask():
    q, k = torch.empty(2, 3, 60, 4), torch.empty(2, 3, 35, 4)
    spec = tw.causal() & tw.dropout(0.3, SEED.view(1))
    whole = tw.dropout_mask(q, k, spec)
    for rows in (slice(3, 41, 2), slice(-7, None), slice(50, 10), torch.tensor([59, 8, 8, 0]), torch.tensor([-1])):
        assert torch.equal(tw.dropout_mask(q, k, spec, rows=rows), whole[:, :, rows])
    assert tw.dropout_mask(q, k, tw.causal()).all()
    assert not tw.dropout_mask(q, k, tw.dropout(1.0, SEED)).any()


# Statistics: bounds that a fair coin breaks once in 10^7 times.


def fair(hits, total, p):
    return abs(int(hits) - total * p) <= 5.4 * math.sqrt(total * p * (1 - p)) + 1


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_weights_are_kept_as_often_as_they_should(p):
    q = torch.empty(3, 4, 256, 4)
    mask = tw.dropout_mask(q, q, tw.dropout(p, SEED))
    assert fair(mask.sum(), mask.numel(), 1 - p)
    for part in (*mask.flatten(0, 1), *mask.movedim(2, 0)[:64], *mask.movedim(3, 0)[:64]):
        assert fair(part.sum(), part.numel(), 1 - p)


def test_heads_batches_rows_keys_and_seeds_are_independent():
    q, p = torch.empty(2, 4, 256, 4), 0.5
    mask = tw.dropout_mask(q, q, tw.dropout(p, SEED))
    other = tw.dropout_mask(q, q, tw.dropout(p, SEED + 1))
    pairs = [(mask, other), (mask[0], mask[1]), *((mask[:, a], mask[:, b]) for a, b in itertools.combinations(range(4), 2))]
    pairs.append((mask, mask.mT))
    for step in (1, 2, 4, 8, 16, 32, 128):
        pairs += [(mask[:, :, step:], mask[:, :, :-step]), (mask[..., step:], mask[..., :-step])]
    for a, b in pairs:
        assert fair((a == b).sum(), a.numel(), 0.5)


# Values.


def dense(q, k, v, keep, p, spec, sink=None):
    """The formula, in the words of PyTorch."""
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    s = s.masked_fill(torch.ones(s.shape[-2:]).tril(s.shape[-1] - s.shape[-2]) == 0, -math.inf)
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
    weights = torch.nan_to_num(torch.softmax(s, -1))[..., : k.shape[2]]
    return torch.where(keep, weights / (1 - p), 0.0) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1), torch.logsumexp(s, -1)


def test_o_and_gradients_equal_the_dense_formula(backend):
    p, sink = 0.35, draw(4, seed=7).requires_grad_()
    inputs = qkv("qkv", n=40, m=70)
    spec = tw.causal() & tw.sink(sink) & tw.dropout(p, SEED)
    keep = tw.dropout_mask(*inputs[:2], spec)
    do, dlse = draw(2, 4, 40, 6, seed=8), draw(2, 4, 40, seed=9)

    def gradients(o, lse):
        return torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), [*inputs, sink])

    want_o, want_lse = dense(*inputs, keep, p, spec, sink)
    o, lse = tw.attention(*inputs, spec=spec, return_lse=True, backend=backend)
    close(o, want_o)
    close(lse, want_lse)
    for a, b in zip(gradients(o, lse), gradients(want_o, want_lse), strict=True):
        close(a, b, 1e-4)


def test_lse_is_unaffected(backend):
    q, k, v = qkv()
    _, lse = tw.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    _, dropped = tw.attention(q, k, v, spec=tw.causal() & tw.dropout(0.7, SEED), return_lse=True, backend=backend)
    assert torch.equal(lse, dropped)


def test_zero_is_the_plain_call_and_one_gives_zeros(backend):
    assert tw.dropout(0.0) == tw.full()
    assert tw.dropout(0, SEED) & tw.causal() == tw.causal()
    assert str(tw.Spec.parse("causal,dropout:0")) == str(tw.causal())
    q, k, v = qkv("qkv")
    o = tw.attention(q, k, v, spec=tw.dropout(1.0), backend=backend)
    assert (o == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_finite_differences_of_the_oracle():
    q, k, v = (t.detach().double().requires_grad_() for t in qkv(n=3, m=5))
    bias = draw(3, 5, dtype=torch.float64).requires_grad_()
    sink = draw(4, dtype=torch.float64).requires_grad_()

    def f(q, k, v, bias, sink):
        return tw.reference(q, k, v, tw.softcap(2.0) & tw.bias(bias) & tw.sink(sink) & tw.dropout(0.4, SEED))

    assert torch.autograd.gradcheck(f, (q, k, v, bias, sink))


def test_only_what_is_asked_for(backend):
    want = [None] * 3
    for names in ("qkv", "q", "k", "v"):
        inputs = qkv(names)
        tw.attention(*inputs, spec=tw.dropout(0.5, SEED), backend=backend).square().sum().backward()
        for i, (name, t) in enumerate(zip("qkv", inputs, strict=True)):
            assert (t.grad is not None) == (name in names)
            if names == "qkv":
                want[i] = t.grad
            elif name in names:
                close(t.grad, want[i])


# Seeds.


def test_the_default_generator_gives_the_seeds(backend):
    q, k, v = qkv()

    def call():
        return tw.attention(q, k, v, spec=tw.dropout(0.5), backend=backend)

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first)
    assert torch.equal(call(), second)
    assert not torch.equal(first, second)


def test_a_generator_of_ones_own(backend):
    q, k, v = qkv()
    outputs = []
    for _ in range(2):
        spec = tw.causal() & tw.dropout(0.5, torch.Generator().manual_seed(3))
        before = torch.get_rng_state()
        outputs.append([tw.attention(q, k, v, spec=spec, backend=backend) for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0], outputs[0][1])


def test_what_draws_nothing():
    q, k, v = qkv()
    ids = torch.tensor([0] * 5 + [1] * 6)
    spec = tw.segments(ids[:9], ids) & tw.dropout(0.5)
    before = torch.get_rng_state()
    assert "seed=int64:11" in tw.explain(q, k, v, spec=spec)
    planned = tw.plan(q, k, spec)
    tw.attention(q, k, v, spec=tw.dropout(0.0))
    tw.attention(q, k, v, spec=tw.dropout(0.5, SEED))
    assert torch.equal(torch.get_rng_state(), before)
    outputs = []
    for s in (spec, planned):
        torch.manual_seed(1)
        outputs.append(tw.attention(q, k, v, spec=s))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_under_checkpointing_agrees(backend, reentrant):
    def f(q, k, v):
        return tw.attention(q, k, v, spec=tw.causal() & tw.dropout(0.5), backend=backend).sin()

    gradients = []
    for run in (f, lambda *t: checkpoint(f, *t, use_reentrant=reentrant)):
        inputs = qkv("qkv")
        torch.manual_seed(5)
        out = run(*inputs)
        out.square().sum().backward()
        gradients.append([out, *(t.grad for t in inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_seed_that_changed_before_the_backward_pass_is_noticed():
    q, k, v = qkv("q")
    seed = SEED.clone()
    o = tw.attention(q, k, v, spec=tw.dropout(0.5, seed))
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("seeded", [False, True])
def test_compiled(seeded):
    torch._dynamo.reset()
    q, k, _ = qkv("qk")
    v = torch.eye(11).expand(2, 2, 11, 11).clone().requires_grad_()

    def f(q, k, v, seed):
        return tw.attention(q, k, v, spec=tw.causal() & tw.dropout(0.5, seed), backend=BACKEND)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    seed = SEED if seeded else None
    torch.manual_seed(2)
    o = compiled(q, k, v, seed)
    torch.manual_seed(2)
    want = f(q, k, v, seed)
    assert torch.equal(o, want)
    got, expected = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (o, want))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    if not seeded:
        assert not torch.equal(compiled(q, k, v, None), o)


# vmap.


def by_seed(q, k, v, seed, backend=BACKEND):
    return tw.attention(q, k, v, spec=tw.dropout(0.4, seed), backend=backend)


def examples():
    return [draw(3, 2, heads, n, 8, seed=i) for i, (heads, n) in enumerate(((4, 9), (2, 11), (2, 11)))]


def test_vmap_counts_the_folded_batch():
    q, k, v = examples()
    flat = by_seed(*(t.flatten(0, 1) for t in (q, k, v)), SEED).unflatten(0, (3, 2))
    close(torch.vmap(by_seed, in_dims=(0, 0, 0, None))(q, k, v, SEED), flat)
    twice = torch.vmap(torch.vmap(by_seed, in_dims=(0, 0, 0, None)), in_dims=(0, 0, 0, None))
    close(twice(q[None], k[None], v[None], SEED)[0], flat)
    same = torch.vmap(by_seed, in_dims=(0, 0, 0, None), randomness="same")(q, k, v, SEED)
    close(same, torch.stack([by_seed(*t, SEED) for t in zip(q, k, v, strict=True)]))


def test_vmap_over_seeds_is_the_loop(backend):
    def f(q, k, v, seed):
        return by_seed(q, k, v, seed, backend)

    q, k, v = examples()
    seeds = torch.tensor([4, 9, 4])
    close(torch.vmap(f)(q, k, v, seeds), torch.stack([f(*t) for t in zip(q, k, v, seeds, strict=True)]))
    got = torch.vmap(f, in_dims=(None, None, None, 0))(q[0], k[0], v[0], seeds)
    close(got, torch.stack([f(q[0], k[0], v[0], seed) for seed in seeds]))
    gradient = torch.func.grad(lambda *t: f(*t).square().sum(), argnums=(0, 1, 2))
    for i, grads in enumerate(zip(*torch.vmap(gradient)(q, k, v, seeds), strict=True)):
        for a, b in zip(grads, gradient(q[i], k[i], v[i], seeds[i]), strict=True):
            close(a, b)


def test_gradients_of_each_example_have_the_masks_of_its_forward_pass():
    q, k, v = examples()
    gradient = torch.func.grad(lambda *t: by_seed(*t).square().sum(), argnums=(0, 1, 2))
    leaves = [t.flatten(0, 1).requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(by_seed(*leaves, SEED).square().sum(), leaves)
    for a, b in zip(torch.vmap(gradient, in_dims=(0, 0, 0, None))(q, k, v, SEED), want, strict=True):
        close(a.flatten(0, 1), b)


def test_a_mapped_backward_pass_alone_has_the_masks_of_the_call():
    q, k, v = (t[0] for t in examples())

    def f(v):
        return by_seed(q, k, v, SEED).sum(-1)[:, 0].flatten()

    v = v.clone().requires_grad_()
    want = torch.stack([torch.autograd.grad(f(v)[i], v)[0] for i in range(18)])
    close(torch.func.jacrev(f)(v), want)
    close(torch.autograd.grad(f(v), v, torch.eye(18), is_grads_batched=True)[0], want)


def test_a_jacobian_of_each_example():
    q, k, v = examples()

    def f(q, v):
        return by_seed(q, k[0], v, SEED).sum(-1)[:, 0].flatten()

    got = torch.vmap(lambda q, v: torch.func.jacrev(f, argnums=1)(q, v))(q, v)
    leaf = v.clone().requires_grad_()
    out = by_seed(q.flatten(0, 1), k[0].repeat(3, 1, 1, 1), leaf.flatten(0, 1), SEED)
    out = out.unflatten(0, (3, 2)).sum(-1)[:, :, 0].flatten(1)
    for i, j in itertools.product(range(3), (0, 17)):
        close(got[i, j], torch.autograd.grad(out[i, j], leaf, retain_graph=True)[0][i])


def test_vmap_and_seeds_that_are_drawn():
    q, k, v = (t[0] for t in examples())

    def f(x):
        return tw.attention(q * x, k, v, spec=tw.dropout(0.5), backend=BACKEND)

    ones = torch.ones(3)
    first, second, _ = torch.vmap(f, randomness="different")(ones)
    assert not torch.equal(first, second)
    first, second, _ = torch.vmap(f, randomness="same")(ones)
    assert torch.equal(first, second)
    with pytest.raises(tw.InvalidInput, match="give vmap randomness='different'"):
        torch.vmap(f)(ones)


# Who takes it, and errors.


def test_hopper_refuses_and_auto_takes_triton():
    software = tw.Problem.parse("seqlen=64 head_dim=64").runtime.__class__((3, 9))
    plain = tw.Problem.parse("heads=2 seqlen=64 head_dim=64 mask=causal arch=sm_90", software=software)
    problem = tw.Problem.parse("heads=2 seqlen=64 head_dim=64 mask=causal,dropout:0.1 arch=sm_90", software=software)
    assert choose(plain, "auto").backend == "hopper"
    assert choose(problem, "auto").backend == "triton"
    reasons = dict(table(problem.key))
    assert "the spec has dropout" in " ".join(r.text for r in reasons["hopper"])
    assert [name for name, why in reasons.items() if not why] == ["triton", "torch", "reference"]


def test_a_spec_with_dropout_reads_back():
    spec = tw.causal() & tw.dropout(0.1, SEED)
    assert str(spec) == "upper:0,align:bottom_right,dropout:0.1"
    assert tw.Spec.parse(str(spec)) == spec.form
    problem = random_call((1, 2, 1, 5, 6, 8, 8), spec=spec).problem
    assert tw.Problem.parse(str(problem)) == problem
    assert entry("dropout").build().spec.terms == ("dropout",)


SPECS = {
    "p -0.1": (lambda: tw.dropout(-0.1), r"p is -0.1, expected the probability .* from 0 to 1"),
    "p 1.5": (lambda: tw.dropout(1.5), r"p is 1.5"),
    "p nan": (lambda: tw.dropout(math.nan), r"p is nan"),
    "p text": (lambda: tw.dropout("0.1"), r"p must be a number, got '0.1' of type str"),
    "p True": (lambda: tw.dropout(True), r"p must be a number, got True"),
    "string": (lambda: tw.Spec.parse("dropout:2"), r"p is 2.0"),
    "string without": (lambda: tw.Spec.parse("dropout"), r"dropout needs a number"),
    "two": (lambda: tw.dropout(0.1) & tw.dropout(0.2), r"both have dropout.*1 - \(1 - first\)"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_that_is_wrong(name):
    make, match = SPECS[name]
    with pytest.raises(tw.InvalidInput, match=match):
        make()


CALLS = {
    "an int": (7, r"seed must be an int64 tensor of one element, a torch.Generator or None, got int: .*torch.tensor"),
    "two seeds": (torch.tensor([1, 2]), r"seed has shape \(2,\), expected one element"),
    "numbers of a folded batch": (torch.tensor([[1, 0, 2]]), r"seed has shape \(1, 3\), expected one element"),
    "int32": (torch.tensor(1, dtype=torch.int32), r"seed has dtype int32, expected one of int64"),
    "another device": (torch.empty((), dtype=torch.int64, device="meta"), r"seed is on meta but q is on cpu"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_seed_that_is_wrong(name):
    seed, match = CALLS[name]
    with pytest.raises(tw.InvalidInput, match=match):
        tw.attention(*qkv(), spec=tw.dropout(0.1, seed))


def test_a_mask_that_cannot_be_shown():
    q, k, _ = qkv()
    with pytest.raises(tw.InvalidInput, match="every call draws a seed of its own"):
        tw.dropout_mask(q, k, tw.dropout(0.1))
    with pytest.raises(tw.InvalidInput, match=r"spec must be a tilewise.Spec, got float"):
        tw.dropout_mask(q, k, 0.1)  # type: ignore[arg-type]
    spec = tw.dropout(0.1, SEED)
    with pytest.raises(tw.InvalidInput, match=r"rows must be a slice, an int64 tensor or None, got int"):
        tw.dropout_mask(q, k, spec, rows=3)  # type: ignore[arg-type]
    with pytest.raises(tw.InvalidInput, match=r"rows is torch.float32 of shape"):
        tw.dropout_mask(q, k, spec, rows=torch.tensor([0.5]))
    with pytest.raises(tw.InvalidInput, match="step of at least 1"):
        tw.dropout_mask(q, k, spec, rows=slice(None, None, -1))


def test_a_part_of_a_call_is_refused():
    with pytest.raises(tw.InvalidInput, match="a part of a call with dropout"):
        entry("dropout").build().part(slice(0, 1), slice(0, 1))


# On a GPU.


def test_on_a_gpu_nothing_waits_and_graphs_draw_anew():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.float16)
    spec = tw.causal() & tw.dropout(0.5)
    tw.attention(q, q, q, spec=spec)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tw.attention(q, q, q, spec=spec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tw.attention(q, q, q, spec=spec)
    graph.replay()
    first = o.clone()
    graph.replay()
    assert not torch.equal(first, o)
    seed = torch.tensor(11, device="cuda")
    on_gpu = tw.dropout_mask(q, q, tw.dropout(0.5, seed))
    assert torch.equal(on_gpu.cpu(), tw.dropout_mask(q.cpu(), q.cpu(), tw.dropout(0.5, seed.cpu())))
