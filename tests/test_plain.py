"""Plain calls skip the dispatcher: which calls those are, that others are seen by whoever waits for them, what a call costs."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise import ops
from tilewise.arch import ARCHS, Runtime
from tilewise.plain import is_plain


def qkv(grad=False, shape=(1, 2, 16, 16)):
    return tuple(torch.randn(shape, requires_grad=grad) for _ in range(3))


class Own(torch.Tensor):
    pass


class Modes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu")])
@pytest.mark.parametrize("grad", [False, True])
def test_plain_in(context, grad):
    with context():
        assert is_plain(*qkv(grad))


def test_parameters_and_inference_tensors_are_plain():
    with torch.inference_mode():
        made_there = torch.randn(1, 2, 16, 16)
    q, k, _ = qkv()
    assert is_plain(torch.nn.Parameter(q), k.transpose(1, 2), made_there)


UNUSUAL = {
    "no tensor": lambda t: [1.0],
    "subclass": lambda t: t.as_subclass(Own),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8),
    "negated view": lambda t: torch._neg_view(t),
    "zero": lambda t: torch._efficientzerotensor(t.shape),
    "nested": lambda t: torch.nested.as_nested_tensor([t, t]),
}


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("what", UNUSUAL)
@pytest.mark.filterwarnings("ignore")
def test_not_plain(what, index):
    tensors = list(qkv())
    tensors[index] = UNUSUAL[what](tensors[index])
    assert not is_plain(*tensors)


def test_a_view_that_negates_is_read_negated():
    q, k, v = qkv()
    want = tw.attention(-q, k, -v)
    torch.testing.assert_close(tw.attention(torch._neg_view(q), k, torch._neg_view(v)), want)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mode", [Modes, Functions])
def test_modes_see_the_operator(mode, grad):
    with mode() as m:
        tw.attention(*qkv(grad), backend="torch")
    assert any("tilewise" in name and "attention_forward" in name for name in m.seen), m.seen


@pytest.mark.parametrize("grad", [False, True])
def test_profiler_sees_the_operator(grad):
    tensors = qkv(grad)
    with torch.autograd.profiler.profile() as seen:
        tw.attention(*tensors)
    assert "tilewise::attention_forward" in {event.name for event in seen.function_events}
    assert is_plain(*tensors)


def test_tracing_records_the_operator():
    tensors = qkv()
    traced = torch.jit.trace(lambda *t: tw.attention(*t), tensors, check_trace=False)
    assert "tilewise::attention_forward" in str(traced.graph)


def test_fake_mode_and_transforms_are_not_plain():
    from torch._subclasses import FakeTensorMode

    tensors, seen = qkv(), []
    with FakeTensorMode():
        seen.append(is_plain(*qkv()))
        assert type(tw.attention(*qkv())).__name__ == "FakeTensor"
    stacked = [torch.stack([t, t]) for t in tensors]
    torch.vmap(lambda *t: (seen.append(is_plain(*t)), tw.attention(*t))[1])(*stacked)
    torch.func.grad(lambda q: (seen.append(is_plain(q, *tensors[1:])), tw.attention(q, *tensors[1:]).sum())[1])(tensors[0])
    with torch.autograd.forward_ad.dual_level():
        seen.append(is_plain(*tensors))
    assert seen == [False] * 4
    assert is_plain(*tensors)


@pytest.mark.parametrize("grad", [False, True])
def test_plain_and_dispatched_calls_agree(grad, monkeypatch):
    tensors = qkv(grad)

    def outcome():
        o, lse = tw.attention(*tensors, causal=True, return_lse=True)
        seen = [o.detach().clone(), lse.detach().clone()]
        return (seen + list(torch.autograd.grad(o.sum() + lse.sum(), tensors))) if grad else seen

    plain = outcome()
    for name in ("is_unwatched", "is_plain"):
        monkeypatch.setattr(f"tilewise.api.{name}", lambda *_: False)
    monkeypatch.setattr("tilewise.api.attention_plain", None)
    assert all(torch.equal(a, b) for a, b in zip(plain, outcome(), strict=True))


def test_autocast_reaches_plain_calls():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.attention(q, k, v).dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["heads outside", "heads inside", "one query", "padded", "expanded"])
@pytest.mark.parametrize("head_dim_v", [16, 24])
def test_later_calls_lay_out_their_outputs_like_the_first(layout, head_dim_v):
    def make(columns):
        if layout == "heads inside":
            return torch.randn(2, 8, 3, columns).transpose(1, 2)
        if layout == "padded":
            return torch.randn(2, 3, 8, columns + 5)[..., :columns]
        if layout == "expanded":
            return torch.randn(1, 1, 8, columns).expand(2, 3, 8, columns)
        return torch.randn(2, 3, 1 if layout == "one query" else 8, columns)

    q, k, v = make(16), make(16), make(head_dim_v)
    first, second = (tw.attention(q, k, v, return_lse=True) for _ in range(2))
    for a, b, empty in zip(first, second, ops._empty_outputs(q, v), strict=True):
        assert a.stride() == b.stride() == empty.stride()
        assert a.dtype == b.dtype == empty.dtype
        assert a.data_ptr() != b.data_ptr()


# What a call costs the host, counted in calls of functions: as good as a clock, and the same on every machine.

CALLS = {False: 60, True: 64}


@pytest.fixture
def launches(monkeypatch):
    """A device of which the kernels are never run: every launch of the forward kernel is noted instead."""
    pytest.importorskip("triton", reason="kept launches are launches of Triton kernels")
    from tilewise.backends import launching, triton

    class Compiled:
        function, packed_metadata, metadata = 1, (4, 1, 0), None

        def run(self, *args):
            noted.append(args)

    class Kernel:
        params = [SimpleNamespace(name=n) for n in triton.fwd._fwd_kernel.arg_names]  # noqa: RUF012
        pre_run_hooks = ()

        def __getitem__(self, grid):
            return lambda *args, **options: Compiled()

    noted = []
    software = Runtime((3, 9))
    monkeypatch.setattr("tilewise.problem.arch_of", lambda device: ARCHS["sm_90"])
    monkeypatch.setattr("tilewise.problem.runtime", lambda: software)
    monkeypatch.setattr(launching, "runtime", lambda: software)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_current_device", lambda: 0)
    monkeypatch.setattr(launching, "_current_stream", lambda device: 0)
    monkeypatch.setattr(launching, "_direct", lambda *_: None)
    for name in ("_bound", "_before", "_problems"):
        monkeypatch.setattr(ops, name, {})
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(triton.fwd, "_fwd_kernel", Kernel())
    triton._fwd_plan.cache_clear()
    yield noted
    triton._fwd_plan.cache_clear()


@pytest.mark.parametrize("spec", [tw.full() & tw.softcap(20.0), tw.causal() & tw.window(9) & tw.softcap(3.0)], ids=str)
def test_a_softcap_launches_what_was_kept(launches, spec):
    tensors = [torch.randn(1, 8, 128, 64, dtype=torch.bfloat16) for _ in range(3)]
    for _ in range(3):
        tw.attention(*tensors, spec=spec, backend="triton")
    assert len(launches) == 2


@pytest.mark.parametrize("spec", [None, tw.causal(), tw.causal() & tw.softcap(20.0)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_specs_without_tensors_skip_the_dispatcher(spec, grad, monkeypatch):
    monkeypatch.setattr("tilewise.api.attention_op", None)
    o, lse = tw.attention(*qkv(grad), spec=spec, return_lse=True)
    assert (o.requires_grad, lse.requires_grad) == (grad, grad)


@pytest.mark.parametrize("grad", [False, True])
def test_calls_of_functions_in_one_attention(launches, grad):
    tensors = [torch.randn(1, 8, 128, 64, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]
    for _ in range(3):
        tw.attention(*tensors, backend="triton")
    before, names = len(launches), []

    def note(frame, event, arg):
        if event in ("call", "c_call"):
            names.append(arg.__name__ if event == "c_call" else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        tw.attention(*tensors, backend="triton")
    finally:
        sys.setprofile(None)
    assert len(launches) == before + 1
    assert 20 < len(names) <= CALLS[grad], (len(names), names)
