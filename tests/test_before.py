"""Calls like one that was made before: which they are, that none is taken for another, and what they launch."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from small_calls import qkv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise import backends, ops
from tilewise.arch import ARCHS, Runtime
from tilewise.plain import quick_empty

ARGUMENTS = ("full", None, None, "auto")


class Own(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def nothing_before(monkeypatch):
    for name in ("_bound", "_before", "_problems"):
        monkeypatch.setattr(ops, name, {})


@pytest.fixture
def found(monkeypatch):
    """Notes, for each look among the calls before, whether there was one like it."""
    seen = []
    look = ops.attention_before

    def noted(*args):
        out = look(*args)
        seen.append(out is not None)
        return out

    monkeypatch.setattr("tilewise.api.attention_before", noted)
    return seen


def oracle(q, k, v, **options):
    return tw.attention(q.double(), k.double(), v.double(), backend="reference", **options)


def shifted(t):
    """The same numbers one element further, which is no multiple of 16 bytes."""
    room = torch.zeros(t.numel() + 33, dtype=t.dtype, device=t.device)
    first = (-room.data_ptr() % 64) // t.element_size() + 1
    return room[first : first + t.numel()].view(t.shape).copy_(t)


def in_inference(t):
    with torch.inference_mode():
        return t.clone()


OTHERS = {
    "shape": lambda t: torch.randn(2, t.shape[1], t.shape[2], t.shape[3]).repeat(2, 1, 1, 1)[:3],
    "strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda t: t.double(),
    "requires_grad": lambda t: t.clone().requires_grad_(),
    "address": shifted,
    "parameter": torch.nn.Parameter,
    "subclass": lambda t: t.as_subclass(Own),
    "negated view": lambda t: torch._neg_view(t),
    "zeros that are known": lambda t: torch._efficientzerotensor(t.shape),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: t[0, 0].to_sparse_csr(),
    "nested": lambda t: torch.nested.as_nested_tensor([t, t]),  # whose strides, asked for in C++, end the process
    "jagged": lambda t: torch.nested.as_nested_tensor([t[0], t[1]], layout=torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8),
    "opaque": lambda t: t.to_mkldnn(),
    "functional": torch._to_functional_tensor,
    "complex": lambda t: t.to(torch.complex64),
    "inference": in_inference,
    "list": lambda t: t.tolist(),
    "none": lambda t: None,
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_of_another_kind_is_no_call_before(what, place):
    tensors = [torch.randn(2, 2, 16, 16) for _ in range(3)]
    for _ in range(2):
        tw.attention(*tensors)
    assert ops.attention_before(*[t.clone() for t in tensors], *ARGUMENTS) is not None
    tensors[place] = OTHERS[what](tensors[place])
    assert ops.attention_before(*tensors, *ARGUMENTS) is None


def test_an_aligned_tensor_is_none_of_the_kind_of_one_that_was_not():
    q, k, v = (torch.randn(2, 2, 16, 16) for _ in range(3))
    for _ in range(2):
        tw.attention(q, shifted(k), v)
    assert ops.attention_before(q, k, v, *ARGUMENTS) is None
    assert not ops._before


def test_a_tensor_of_another_number_of_dims_is_no_call_before():
    q, k, v = (torch.randn(2, 2, 16, 16) for _ in range(3))
    tw.attention(q, k, v)
    assert ops.attention_before(q[0], k, v, *ARGUMENTS) is None


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (3, 0)}, {"sm_scale": 0.5}, {"precision": "tf32"}, {"backend": "torch"}, {"deterministic": True}],
)
def test_other_arguments_are_no_call_before(options, found):
    tensors = qkv()
    with contextlib.suppress(tw.BackendRefused):
        for each in ({}, options):
            tw.attention(*tensors, **each)
    assert found == [False, False]


@pytest.mark.parametrize("spec", [tw.causal(), tw.causal() & tw.softcap(20.0)], ids=str)
def test_specs_without_tensors_are_looked_for_too(spec, found):
    tensors = qkv()
    first, second = (tw.attention(*tensors, spec=spec) for _ in range(2))
    assert torch.equal(first, second)
    assert found == [False, True]
    tw.attention(*tensors, spec=spec, return_max_logit=True)
    tw.attention(*tensors, spec=spec & tw.sink(torch.randn(4)))
    assert found == [False, True]


@pytest.mark.parametrize(
    "name, valid, equal", [("causal", True, 1), ("sm_scale", 1.0, True), ("return_lse", True, 1), ("deterministic", False, 0)]
)
def test_an_argument_that_equals_a_valid_one_is_refused_after_it(name, valid, equal):
    for _ in range(2):
        tw.attention(*qkv(), **{name: valid})
    with pytest.raises(tw.InvalidInput, match=name):
        tw.attention(*qkv(), **{name: equal})


class Modes(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


WATCHERS = {
    "dispatch mode": Modes,
    "function mode": Functions,
    "device mode": lambda: torch.device("cpu"),
    "profiler": torch.autograd.profiler.profile,
    "forward mode": torch.autograd.forward_ad.dual_level,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("grad", ["", "qkv"])
@pytest.mark.parametrize("watcher", WATCHERS)
def test_watched_calls_are_not_looked_for(watcher, grad, found):
    tensors = qkv(grad)
    for _ in range(2):
        tw.attention(*tensors)
    assert found == [False, True]
    known = dict(ops._before)
    with WATCHERS[watcher]():
        o = tw.attention(*tensors)
        tw.attention(*tensors)
    assert found == [False, True]
    if watcher == "autocast":
        assert ops._before == known
    assert o.dtype == (torch.bfloat16 if watcher == "autocast" else torch.float32)
    tw.attention(*tensors)
    assert found == [False, True, True]


def test_transforms_are_not_looked_for(found):
    q, k, v = qkv()
    for _ in range(2):
        want = tw.attention(q, k, v)
    del found[:]
    both = torch.vmap(lambda q: tw.attention(q, k, v))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(both[0], want)
    torch.testing.assert_close(both[1], tw.attention(2 * q, k, v))
    assert found == [True]
    by_func = torch.func.grad(lambda q: tw.attention(q, k, v).sum())(q)
    leaf = q.clone().requires_grad_()
    tw.attention(leaf, k, v).sum().backward()
    torch.testing.assert_close(by_func, leaf.grad)


def test_fake_tensors_and_graphs_are_not_looked_for(found):
    from torch._subclasses import FakeTensorMode

    q, k, v = qkv()
    for _ in range(2):
        want = tw.attention(q, k, v)
    del found[:]
    with FakeTensorMode() as mode:
        assert type(tw.attention(*map(mode.from_tensor, (q, k, v)))).__name__ == "FakeTensor"
    compiled = torch.compile(lambda q, k, v: tw.attention(q, k, v) + 1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), want + 1)
    assert found == []


@pytest.mark.parametrize("outer, inner", [(torch.no_grad, torch.enable_grad), (torch.enable_grad, torch.no_grad)])
def test_whether_gradients_are_recorded_is_asked_anew(outer, inner):
    tensors = qkv("qk")
    for context in (outer, outer, inner, inner, outer):
        with context():
            assert tw.attention(*tensors).requires_grad is (context is torch.enable_grad)


def test_inference_mode_and_calls_outside_have_checks_of_their_own(found):
    tensors = qkv()
    with torch.no_grad():
        for context in (contextlib.nullcontext, torch.inference_mode) * 2:
            with context():
                first, second = (tw.attention(*tensors) for _ in range(2))
                assert torch.equal(first, second)
                assert second.is_inference() is (context is torch.inference_mode)
    assert found == [False, True] * 4


@pytest.mark.parametrize("grad", ["", "q", "kv", "qkv"])
def test_gradients_are_those_of_the_first_call(grad, found):
    tensors = qkv(grad)
    leaves = [t for t in tensors if t.requires_grad]
    outcomes = []
    for _ in range(2):
        o, lse = tw.attention(*tensors, causal=True, return_lse=True)
        outcomes.append([o, lse, *(torch.autograd.grad(o.sum() + lse[lse.isfinite()].sum(), leaves) if leaves else ())])
    assert found == [False, True]
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    torch.testing.assert_close(outcomes[1][0].double(), oracle(*tensors, causal=True), rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_those_of_the_first_call(found):
    q, k, v = qkv("q")
    outcomes = []
    for attend in (tw.attention, tw.attention, oracle):
        (dq,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        outcomes.append(torch.autograd.grad(dq.square().sum(), q)[0])
    assert found[:2] == [False, True]
    assert torch.equal(*outcomes[:2])
    torch.testing.assert_close(outcomes[1].double(), outcomes[2].double(), rtol=1e-4, atol=1e-4)


def test_one_tensor_in_two_places_is_attention_all_the_same(found):
    a, b, c = (torch.randn(1, 2, 16, 16) for _ in range(3))
    calls = ((a, a, a), (a, b, c), (a, b, b), (b, a, b), (b, b, a), (a, a, a), (a, b, c))
    for tensors in calls:
        torch.testing.assert_close(tw.attention(*tensors).double(), oracle(*tensors), rtol=1e-5, atol=1e-5)
    assert found[::2] == [False] * 6 + [True]


def test_few_kinds_are_tried_and_the_last_one_first(found):
    kinds = [tuple(torch.randn(1, 2, n, 8) for _ in range(3)) for n in range(1, 12)]
    for tensors in kinds:
        tw.attention(*tensors)
    (tried,) = ops._before.values()
    assert [bound.problem.seqlen_q for bound in tried] == [11, 10, 9, 8, 7, 6, 5, 4]
    tw.attention(*kinds[4])
    tw.attention(*kinds[0])
    assert found[-2:] == [True, False]
    (tried,) = ops._before.values()
    assert [bound.problem.seqlen_q for bound in tried] == [1, 11, 10, 9, 8, 7, 6, 5]
    assert len(ops._bound) == 11


def test_what_is_known_of_calls_before_is_bounded_and_forgotten(monkeypatch):
    monkeypatch.setattr(ops, "_MOST_BOUND", 3)
    tensors = qkv()
    for scale in range(1, 9):
        tw.attention(*tensors, sm_scale=float(scale))
        assert len(ops._before) <= 3
    backends.forget()
    assert not ops._before
    assert not ops._bound
    assert not ops._problems


@pytest.mark.parametrize("lacking", ["TensorGuards", "_empty_strided_cpu"])
def test_a_pytorch_without_its_private_parts_takes_the_longer_way(monkeypatch, lacking):
    guards = torch._C._dynamo.guards
    parts = {name: getattr(guards, name) for name in ("TensorGuards", "_empty_strided_cpu") if name != lacking}
    monkeypatch.setattr(torch._C._dynamo, "guards", SimpleNamespace(**parts))
    q, k, v = (torch.randn(1, 1, 8, 8, requires_grad=True) for _ in range(3))
    want = oracle(q, k, v)
    for _ in range(3):
        torch.testing.assert_close(tw.attention(q, k, v), want.float())
    assert bool(ops._before) is (lacking != "TensorGuards")


def test_equal_problems_are_one_object():
    """Tables find an object that they hold without comparing fields."""
    q, k, v = qkv()
    problems = [ops._bind(*tensors, *ARGUMENTS, "").problem for tensors in ((q, k, v), (q, OTHERS["strides"](k), v))]
    assert problems[0] is problems[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quick_memory_is_like_that_of_pytorch(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    size, stride = (2, 3, 5, 7), (120, 35, 7, 1)
    make = quick_empty(torch.device(device))
    assert make is not None
    for context in (contextlib.nullcontext, torch.inference_mode):
        with context():
            ours = make(size, stride, torch.bfloat16)
            theirs = torch.empty_strided(size, stride, dtype=torch.bfloat16, device=device)
            for told in (lambda t: (t.shape, t.stride(), t.dtype, t.device, t.is_inference()), torch._C._dispatch_keys):
                assert str(told(ours)) == str(told(theirs))


# Launches that are repeated. CPU tensors pass for tensors of an H200, whose kernels are never run.


@pytest.fixture
def h200(monkeypatch):
    pytest.importorskip("triton", reason="kept launches are launches of Triton kernels")
    from tilewise.backends import hopper, launching, triton

    now = SimpleNamespace(launches=[], device=0, stream=7, kernels=[])

    class Compiled:
        function, packed_metadata, metadata = 1, (4, 1, 0), None

        def run(self, *args):
            now.launches.append(("kept", args))

    class Kernel:
        def __init__(self, names):
            self.params = [SimpleNamespace(name=n, do_not_specialize=False) for n in names]
            self.pre_run_hooks = []
            now.kernels.append(self)

        def __getitem__(self, grid):
            return lambda *args, **options: (now.launches.append(("ordinary", args)), Compiled())[1]

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, now.device = now.device, self.index

        def __exit__(self, *_):
            now.device = self.before

    software = Runtime((3, 9))
    monkeypatch.setattr("tilewise.problem.arch_of", lambda device: ARCHS["sm_90"])
    monkeypatch.setattr("tilewise.problem.runtime", lambda: software)
    monkeypatch.setattr(launching, "runtime", lambda: software)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_current_device", lambda: now.device)
    monkeypatch.setattr(launching, "_current_stream", lambda device: now.stream)
    monkeypatch.setattr(launching, "_direct", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    for module in (triton.fwd, hopper.fwd):
        monkeypatch.setattr(module, "_fwd_kernel", Kernel(module._fwd_kernel.arg_names))
    caches = [v for m in (triton, hopper) for v in vars(m).values() if hasattr(v, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield now
    for cache in caches:
        cache.cache_clear()


def half(shape=(1, 8, 128, 64), grad=False):
    return [torch.randn(shape, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def repeated(h200, monkeypatch, backend, grad=False, **options):
    """Calls until the launch is one that is repeated; from then on nothing else may launch."""
    for _ in range(3):
        tw.attention(*half(grad=grad), backend=backend, **options)
    assert [road for road, _ in h200.launches] == ["ordinary", "kept", "kept"]
    monkeypatch.setattr(ops, "_run", lambda *_: pytest.fail("it was launched as for the first time"))
    del h200.launches[:]


def addresses_of(args):
    """Those of a kept launch: of q, k, v, o and lse."""
    return [a if isinstance(a, int) else a.base.data_ptr() for a in args[9:14]]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_call_like_one_before_repeats_its_launch(h200, monkeypatch, backend, grad):
    repeated(h200, monkeypatch, backend, grad)
    for stream in (7, 8):
        h200.stream = stream
        q, k, v = half(grad=grad)
        o, lse = tw.attention(q, k, v, backend=backend, return_lse=True)
        assert o.requires_grad is grad
        ((_, args),) = h200.launches
        assert args[3] == stream
        want = [t.data_ptr() for t in (q, k, v, o, lse)]
        assert addresses_of(args) == want
        if backend == "hopper":
            assert args[14] == lse.data_ptr()  # the kernel without a counter
        assert (o.shape, o.dtype, o.stride()) == (q.shape, q.dtype, q.stride())
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        del h200.launches[:]


def test_a_packed_group_repeats_its_launch(h200, monkeypatch):
    """q and o are views in the descriptors, at the addresses of q and o."""
    for n in range(4):
        q, k, v = (torch.empty(8, heads, length, 128, dtype=torch.bfloat16) for heads, length in ((32, 2), (4, 8192), (4, 8192)))
        if n == 3:
            monkeypatch.setattr(ops, "_run", None)
        o, lse = tw.attention(q, k, v, causal=True, backend="hopper", return_lse=True)
    road, args = h200.launches[-1]
    assert road == "kept"
    assert addresses_of(args) == [t.data_ptr() for t in (q, k, v, o, lse)]
    assert args[9].shape[-2:] == [8, 128]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_that_are_made_anew_are_not_repeated(h200, dtype):
    for _ in range(4):
        tensors = [t.to(dtype) for t in half()]
        tw.attention(*tensors, backend="triton")
    (bound,) = ops._bound.values()
    assert (bound.kept is None) is (dtype == torch.float32)


def test_a_counter_is_not_repeated(h200, monkeypatch):
    from tilewise.backends import hopper

    monkeypatch.setattr(hopper, "_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    for _ in range(4):
        tw.attention(*half((4, 32, 512, 64)), backend="hopper")
    (bound,) = ops._bound.values()
    assert bound.kept is None


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_launch_that_names_tensors_of_a_spec_is_not_returned(h200, monkeypatch, backend):
    returned = []
    run = ops._run
    monkeypatch.setattr(ops, "_run", lambda *args: returned.append(run(*args)))
    for spec in (tw.causal(), tw.causal() & tw.sink(torch.randn(8))):
        for _ in range(3):
            tw.attention(*half(), spec=spec, backend=backend)
    assert [kept is None for kept in returned] == [True, False, False, True, True, True]


def test_another_current_device_is_entered(h200):
    for _ in range(3):
        tw.attention(*half(), backend="hopper")
    (bound,) = ops._bound.values()
    assert bound.kept.stream() == 7
    h200.device = 1
    assert bound.kept.stream() is None
    tw.attention(*half(), backend="hopper")
    assert len(h200.launches) == 4
    assert h200.device == 1


def test_a_hook_is_served(h200):
    for _ in range(3):
        tw.attention(*half(), backend="hopper")
    for kernel in h200.kernels:
        kernel.pre_run_hooks.append(print)
    tw.attention(*half(), backend="hopper")
    assert [road for road, _ in h200.launches] == ["ordinary", "kept", "kept", "ordinary"]


def test_deterministic_mode_fills_the_memory(h200):
    for _ in range(3):
        tw.attention(*half(), backend="hopper")
    torch.use_deterministic_algorithms(True)
    try:
        o, lse = tw.attention(*half(), backend="hopper", return_lse=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert o.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("which", [0, 1])
def test_outputs_off_their_alignment_are_not_handed_to_a_kept_launch(h200, which):
    for _ in range(3):
        tw.attention(*half(), backend="hopper")
    (bound,) = ops._bound.values()
    made = []

    def empty(size, stride, dtype):
        t = torch.empty_strided(size, stride, dtype=dtype)
        made.append(shifted(t) if len(made) == which else t)
        return made[-1]

    bound.empty = empty
    given = tw.attention(*half(), backend="hopper", return_lse=True)
    assert addresses_of(h200.launches[-1][1])[3:5] == [t.data_ptr() for t in given]
    assert all(t.data_ptr() % 16 == 0 for t in given)


def test_configs_that_are_forgotten_take_their_launches_along(h200):
    for _ in range(3):
        tw.attention(*half(), backend="hopper")
    (old,) = ops._bound.values()
    backends.forget()
    tw.attention(*half(), backend="hopper")
    (new,) = ops._bound.values()
    assert new is not old


def test_a_launch_that_fails_says_what_it_was_for(h200):
    for _ in range(3):
        tw.attention(*half(), backend="hopper")
    (bound,) = ops._bound.values()

    def fail(*_):
        raise ValueError("no such stream")

    bound.kept.launch = fail
    with pytest.raises(tw.BackendBroken, match=r"'hopper' accepted .* forward pass: ValueError: no such stream\nProblem: dtype="):
        tw.attention(*half(), backend="hopper")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("grad", [False, True])
def test_repeated_calls_agree_with_the_oracle_on_a_gpu(grad):
    shapes = ((1, 8, 128, 64), (2, 4, 100, 64), (1, 2, 1, 128), (4, 16, 1024, 64))
    for turn in range(12):
        shape = shapes[turn % len(shapes)] if turn >= 4 else shapes[0]
        tensors = [torch.randn(shape, device="cuda").bfloat16().requires_grad_(grad) for _ in range(3)]
        with torch.cuda.stream(torch.cuda.Stream()) if turn % 3 == 2 else contextlib.nullcontext():
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            o, lse = tw.attention(*tensors, causal=turn % 2 == 1, return_lse=True)
        torch.cuda.synchronize()
        want_o, want_lse = oracle(*tensors, causal=turn % 2 == 1, return_lse=True)
        torch.testing.assert_close(o.double(), want_o.double(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), want_lse.double(), rtol=1e-2, atol=1e-2)
        assert o.requires_grad is grad
