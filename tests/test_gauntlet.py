"""Every gauntlet entry, forward and backward, on every backend that takes this machine's tensors."""

import pytest
import torch

from tilewise.testing import gauntlet
from tilewise.testing.calls import OUTPUTS, fit
from tilewise.testing.check import accepted
from tilewise.testing.gauntlet import GAUNTLET
from tilewise.testing.tolerance import raise_if_failed

# An interpreted kernel is slow, so the triton backend gets the two dtypes whose code paths differ.
DTYPES = {"triton": (torch.float32, torch.float16), "torch": (torch.float32, torch.float16, torch.bfloat16, torch.float64)}
ANYWHERE = [entry for entry in GAUNTLET if not entry.gpu_gib]
RUNS = [
    pytest.param(entry, c.backend, dtype, id=f"{c.backend}-{str(dtype)[6:]}-{entry.name}")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    for c in accepted("cpu", dtype)
    if dtype in DTYPES.get(c.backend, (torch.float32,))
    for entry in ANYWHERE
    if not entry.returns or entry.returns in c.returns
    if entry.precision is None or dtype != torch.float32 or "cpu" in c.tf32_kinds
]


@pytest.mark.parametrize("entry, backend, dtype", RUNS)
def test_gauntlet(entry, backend, dtype):
    results = gauntlet.run(entry, backend, "cpu", dtype)
    extra = {"bias": "dbias", "alibi": "dslopes", "sink": "dsink"}
    outputs = {*OUTPUTS, *(name for term, name in extra.items() if term in entry.terms), *entry.returns.split()}
    assert {r.output for r in results} == outputs
    raise_if_failed(results)


@pytest.mark.parametrize("entry", [entry for entry in GAUNTLET if entry.gpu_gib], ids=lambda e: e.name)
def test_gauntlet_on_a_gpu(entry):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    free, _ = torch.cuda.mem_get_info()
    if free < entry.gpu_gib * 2**30:
        pytest.skip(f"{entry.gpu_gib} GiB of GPU memory are not free")
    for c in accepted("cuda", torch.bfloat16):
        call = fit(entry.build("cuda", torch.bfloat16), c.backend)
        if call is not None:
            raise_if_failed(gauntlet.run_call(call, c.backend, entry.name))


def test_every_backend_runs_here():
    assert {c.backend for c in accepted("cpu", torch.float32)} == {"triton", "torch", "reference"}


def test_names_are_unique_and_found():
    assert len({e.name for e in GAUNTLET}) == len(GAUNTLET)
    assert all(gauntlet.entry(e.name) is e and e.kills for e in GAUNTLET)


def test_same_seed_gives_the_same_call():
    first, again, other = (gauntlet.entry("gqa").build(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_spikes_are_where_they_should_be(dtype):
    """The constructed scores have the property that the entry is there for."""
    for name in ("overflow_spike", "late_spike", "very_low"):
        call = gauntlet.entry(name).build(dtype=dtype)
        s2 = (call.q.double() @ call.k.double().transpose(-1, -2)) * call.scale / torch.log(torch.tensor(2.0, dtype=torch.float64))
        if name == "overflow_spike":
            assert (s2[:, :, ::2, 0] - s2[:, :, ::2, 32:].amax(-1)).min() > 127
        elif name == "late_spike":
            assert s2[..., :-1].amax(-1).lt(s2[..., -1]).float().mean() > 0.9
        else:
            assert s2.max() < -128


def test_layouts_are_what_they_say():
    strided = gauntlet.entry("strided").build()
    assert not strided.q.is_contiguous()
    assert strided.q.stride(-1) == 1
    assert gauntlet.entry("strided_last").build().k.stride(-1) == 2
    assert gauntlet.entry("misaligned").build(dtype=torch.float16).q.data_ptr() % 16
    assert gauntlet.entry("expanded").build().k.stride(0) == 0


def _broken(change):
    """The oracle in the dtype of its inputs, after ``change`` spoiled the arguments or the outputs."""
    import tilewise

    def backend(q, k, v, *, spec, sm_scale, precision):
        (q, k, v, spec, sm_scale), after = change(q, k, v, spec, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
        o, lse = tilewise.reference(q, k, v, spec, sm_scale)
        o, lse = after(o, lse)
        return o.to(q.dtype), lse.float()

    return backend


def _same(o, lse):
    return o, lse


FAULTS = {
    "scale lost": (lambda q, k, v, spec, scale: ((q, k, v, spec, q.shape[-1] ** -0.5), _same), "odd_scale"),
    "no scale": (lambda q, k, v, spec, scale: ((q, k, v, spec, 1.0), _same), "ragged_full"),
    "scale without sign": (lambda q, k, v, spec, scale: ((q, k, v, spec, abs(scale)), _same), "negative_scale"),
    "corner": (lambda q, k, v, spec, scale: ((q, k, v, type(spec)(spec.upper, spec.lower), scale), _same), "ragged_causal_tl"),
    "window counts self": (
        lambda q, k, v, spec, scale: ((q, k, v, type(spec)(spec.upper, spec.lower - 1, spec.align), scale), _same),
        "thin_window",
    ),
    "lse in base two": (lambda q, k, v, spec, scale: ((q, k, v, spec, scale), lambda o, lse: (o, lse * 1.4426950408889634)), "gqa"),
    "dlse ignored": (lambda q, k, v, spec, scale: ((q, k, v, spec, scale), lambda o, lse: (o, lse.detach() + 0 * lse)), "lse_loss"),
    "empty window is full": (lambda q, k, v, spec, scale: ((q, k, v, type(spec)(), scale), _same), "empty_window"),
    "last key lost": (lambda q, k, v, spec, scale: ((q, k[:, :, :-1], v[:, :, :-1], spec, scale), _same), "late_spike"),
    "a padded key that scores 0": (
        lambda q, k, v, spec, scale: ((q, *(torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v)), spec, scale), _same),
        "very_low",
    ),
    "heads interleaved": (
        lambda q, k, v, spec, scale: ((q, *(t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v)), spec, scale), _same),
        "gqa",
    ),
    "detached v": (lambda q, k, v, spec, scale: ((q, k, v.detach(), spec, scale), _same), "mqa"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_gauntlet_kills(fault):
    change, name = FAULTS[fault]
    results = gauntlet.run(gauntlet.entry(name), _broken(change))
    assert any(not r.ok for r in results)


def test_gauntlet_passes_an_honest_stand_in():
    honest = _broken(lambda q, k, v, spec, scale: ((q, k, v, spec, scale), _same))
    for name in sorted({name for _, name in FAULTS.values()}):
        raise_if_failed(gauntlet.run(gauntlet.entry(name), honest))
