"""Kept launches: which launches share a compiled kernel, what a kept one hands over, and when the ordinary road is taken."""

import gc
import itertools
import pathlib
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from tilewise.arch import Runtime, ptxas_name, ptxas_version, runtime
from tilewise.backends import launching
from tilewise.backends.launching import Again, Plan, class_of

pytest.importorskip("triton", reason="kept launches are launches of Triton kernels")


class Compiled:
    """A compiled kernel; its launcher notes what it is given."""

    def __init__(self, kernel, number):
        self.function, self.packed_metadata, self.metadata = number, (4, 1, 0), SimpleNamespace()
        self.run = lambda *args: kernel.launches.append(("kept", args))


class Kernel:
    """A Triton function whose every ordinary launch compiles anew. ``length`` is not specialised."""

    def __init__(self, make=Compiled):
        names = ("x", "y", "x_strides", "y_strides", "number", "length", "BLOCK")
        self.params = [SimpleNamespace(name=n, do_not_specialize=n == "length") for n in names]
        self.pre_run_hooks = []
        self.launches = []
        self.make = make

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append(("ordinary", args))
            return self.make(self, len(self.launches))

        return launch

    @property
    def roads(self):
        return [road for road, _ in self.launches]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """CPU tensors pass for tensors of a CUDA device, which the test may change."""
    now = SimpleNamespace(current=0, tensors=0, entered=[])

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            now.entered.append(self.index)
            self.before, now.current = now.current, self.index

        def __exit__(self, *_):
            now.current = self.before

    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: now.tensors)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(launching, "_current_device", lambda: now.current)
    monkeypatch.setattr(launching, "_current_stream", lambda index: 70 + index)
    monkeypatch.setattr(launching, "runtime", lambda: Runtime((3, 9)))
    monkeypatch.setattr(launching, "_compiled", {})
    return now


def plan_of(kernel, number=48, length=48, block=16, grid=(5, 2)):
    return Plan(kernel, grid, (None, None), (number, length), {"BLOCK": block, "num_warps": 4})


def pair(offset=0, dtype=torch.float32, columns=16):
    """Two tensors (3, columns); the first begins ``offset`` elements after an address that is a multiple of 16."""
    x = torch.zeros(4 * columns + offset, dtype=dtype)[offset:].as_strided((3, columns), (columns, 1))
    return x, torch.zeros(3, columns, dtype=dtype)


def test_second_launch_is_kept_and_hands_over_the_addresses():
    kernel = Kernel()
    plan, (x, y) = plan_of(kernel), pair()
    plan.run(x, y)
    plan.run(x, y)
    other, _ = pair()
    plan.run(other, y)
    assert kernel.roads == ["ordinary", "kept", "kept"]
    assert kernel.launches[0][1] == (x, y, (16, 1), (16, 1), 48, 48)
    for (_, args), first in zip(kernel.launches[1:], (x, other), strict=True):
        grid, stream, function, metadata, hooks, rest = args[:3], args[3], args[4], args[5], args[6:9], args[9:]
        assert (grid, stream, function, metadata, hooks) == ((5, 2, 1), 70, 1, (4, 1, 0), (None, None, None))
        assert rest == (first.data_ptr(), y.data_ptr(), (16, 1), (16, 1), 48, 48, 16)


@pytest.mark.parametrize(
    "change",
    [
        {"number": 1},
        {"number": 50},
        {"number": 2**40},
        {"length": 2**40},
        {"block": 32},
        {"tensors": {"offset": 1}},
        {"tensors": {"dtype": torch.float16}},
        {"tensors": {"columns": 18}},
        {"device": 1},
    ],
    ids=str,
)
def test_another_compiled_kernel_after(change, device):
    kernel = Kernel()
    change = dict(change)
    plan_of(kernel).run(*pair())
    device.current = device.tensors = change.pop("device", 0)
    tensors = pair(**change.pop("tensors", {}))
    plan = plan_of(kernel, **change)
    plan.run(*tensors)
    plan.run(*tensors)
    assert kernel.roads == ["ordinary", "ordinary", "kept"]
    assert kernel.launches[2][1][4] == 2  # the kernel that the second launch compiled


@pytest.mark.parametrize("change", [{"number": 64}, {"length": 1}, {"length": 50}, {"grid": (1,)}], ids=str)
def test_same_compiled_kernel_after(change):
    kernel = Kernel()
    plan_of(kernel).run(*pair())
    plan_of(kernel, **change).run(*pair())
    assert kernel.roads == ["ordinary", "kept"]


def test_strides_of_one_class_share_a_kernel_and_are_handed_over():
    kernel = Kernel()
    plan = plan_of(kernel)
    plan.run(*pair(columns=32))
    plan.run(*pair(columns=48))
    plan.run(*pair(columns=32))
    assert kernel.roads == ["ordinary", "kept", "kept"]
    assert [args[11] for _, args in kernel.launches[1:]] == [(48, 1), (32, 1)]


def test_none_and_tuples_among_the_numbers_are_handed_over():
    kernel, tensors = Kernel(), pair()
    caps = [((2.0, 0.5), None), ((4.0, 0.25), None), (None, None)]
    for cap in caps:
        plan_of(kernel, number=cap, length=None).run(*tensors)
    assert kernel.roads == ["ordinary", "kept", "ordinary"]
    assert kernel.launches[1][1][13:] == (caps[1], None, 16)


def test_tensors_of_another_device_run_under_a_guard(device):
    kernel = Kernel()
    plan, tensors = plan_of(kernel), pair()
    device.tensors = 1
    plan.run(*tensors)
    plan.run(*tensors)
    assert device.entered == [1, 1]
    assert device.current == 0
    assert kernel.launches[1][1][3] == 71  # the stream of that device


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_takes_the_ordinary_road(hook):
    import triton

    kernel = Kernel()
    plan, tensors = plan_of(kernel), pair()
    chain = getattr(triton.knobs.runtime, hook)
    plan.run(*tensors)
    plan.run(*tensors)
    chain.add(print)
    try:
        plan.run(*tensors)
    finally:
        chain.remove(print)
    plan.run(*tensors)
    assert kernel.roads == ["ordinary", "kept", "ordinary", "kept"]


def test_a_hook_of_the_kernel_takes_the_ordinary_road():
    kernel = Kernel()
    plan, tensors = plan_of(kernel), pair()
    plan.run(*tensors)
    kernel.pre_run_hooks.append(print)
    plan.run(*tensors)
    assert kernel.roads == ["ordinary", "ordinary"]


@pytest.mark.parametrize("software", [Runtime((3, 10)), Runtime((4, 0)), Runtime((3, 5)), Runtime((3, 9), True)], ids=str)
def test_the_ordinary_road_for(software, monkeypatch):
    monkeypatch.setattr(launching, "runtime", lambda: software)
    kernel = Kernel()
    plan, tensors = plan_of(kernel), pair()
    for _ in range(3):
        plan.run(*tensors)
    assert kernel.roads == ["ordinary"] * 3


def test_the_ordinary_road_for_cpu_tensors(device):
    device.tensors = -1
    kernel = Kernel()
    for _ in range(3):
        plan_of(kernel).run(*pair())
    assert kernel.roads == ["ordinary"] * 3


def test_the_ordinary_road_where_nothing_was_compiled():
    kernel = Kernel(lambda *_: None)
    plan, tensors = plan_of(kernel), pair()
    plan.run(*tensors)
    plan.run(*tensors)
    assert kernel.roads == ["ordinary", "ordinary"]


def test_the_ordinary_road_where_a_constant_is_left_to_its_default():
    kernel = Kernel()
    kernel.params.append(SimpleNamespace(name="DEFAULTED", do_not_specialize=False))
    plan, tensors = plan_of(kernel), pair()
    plan.run(*tensors)
    plan.run(*tensors)
    assert kernel.roads == ["ordinary", "ordinary"]


# The launcher of Triton 3.7 and newer, as far as the direct road uses it. ``wrap_handle_tensordesc`` is found in the module of its
# class, as in Triton.


class CudaLauncher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl, arg_annotations, kernel_signature = False, True, "annotations", b"signature"

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, *args):
        self.kernel.launches.append(("kept", args))


TMA_DTYPE_DEVICE_TO_HOST = {10: 9}


def wrap_handle_tensordesc(launcher, signature, metas):
    def inner(values):
        assert len(signature) == len(values)
        assert len(metas) == 2
        return launcher([x for v in values for x in (["map", *v.shape, *v.strides] if hasattr(v, "strides") else [v])])

    return inner


class CompiledForTiles(Compiled):
    def __init__(self, kernel, number):
        super().__init__(kernel, number)
        self.run = CudaLauncher(kernel)
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 8], "fp4_padded": False}
        self.metadata = SimpleNamespace(tensordesc_meta=[meta, meta])
        self.src = SimpleNamespace(signature=dict.fromkeys("xynlB"))


class CompiledForPointers(CompiledForTiles):
    def __init__(self, kernel, number):
        super().__init__(kernel, number)
        self.metadata = SimpleNamespace(tensordesc_meta=None)


@pytest.fixture
def direct(monkeypatch):
    """A kernel that reads x and y by descriptors, and its plan."""
    import triton

    kernel = Kernel(CompiledForTiles)
    kernel.params = [p for p in kernel.params if not p.name.endswith("strides")]
    utils = SimpleNamespace(
        launch=lambda *args: kernel.launches.append(("direct", args)),
        fill_tma_descriptor_tiled=lambda address, *rest: ("map", address, rest),
    )
    active = SimpleNamespace(utils=utils, get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", active, raising=False)
    return kernel, Plan(
        kernel, (7,), ((1, 8), (1, 8)), (48, 48), {"BLOCK": 16}, lambda t, shape, strides, block: (t, shape, strides, block)
    )


def test_direct_road_fills_in_descriptors(direct):
    kernel, plan = direct
    x, y = pair(columns=24)[0], pair()[0][:1]
    plan.run(x, y)
    plan.run(x, y)
    assert kernel.roads == ["ordinary", "direct"]
    assert kernel.launches[0][1] == ((x, [3, 24], [24, 1], [1, 8]), (y, [1, 16], [16, 1], [1, 8]), 48, 48)
    args = kernel.launches[1][1]
    assert args[:15] == (7, 1, 1, 70, 1, False, True, (4, 1, 0), *[None] * 5, "annotations", b"signature")
    rest = (3, 2, 9, [1, 8])
    maps = [("map", x.data_ptr(), (*rest, [3, 24], [24, 1], 0)), ("map", y.data_ptr(), (*rest, [1, 16], [16, 1], 0))]
    assert args[15] == [maps[0], 3, 24, 24, 1, maps[1], 1, 16, 16, 1, 48, 48, 16]


@pytest.mark.parametrize("surprise", ["scratch", "meta", "count", "expansion", "version"])
def test_direct_road_is_left_at_a_surprise(direct, surprise, monkeypatch):
    kernel, plan = direct
    x, y = pair()

    def surprising(*args):
        compiled = CompiledForTiles(*args)
        if surprise == "scratch":
            compiled.run.global_scratch_size = 128
        elif surprise == "meta":
            compiled.metadata.tensordesc_meta = [{**m, "novelty": 1} for m in compiled.metadata.tensordesc_meta]
        elif surprise == "count":
            compiled.metadata.tensordesc_meta.pop()
        return compiled

    kernel.make = surprising
    if surprise == "expansion":
        monkeypatch.setattr(
            sys.modules[__name__], "wrap_handle_tensordesc", lambda launcher, *_: lambda values: launcher([*values, 0, 0, 0])
        )
    elif surprise == "version":
        monkeypatch.setattr(launching, "runtime", lambda: Runtime((3, 6)))
    plan.run(x, y)
    plan.run(x, y)
    assert kernel.roads == ["ordinary", "kept"]
    tiles = kernel.launches[1][1][9:11]
    assert [(t.base.data_ptr(), t.shape, t.strides, t.padding) for t in tiles] == [
        (t.data_ptr(), [3, 16], [16, 1], "zero") for t in (x, y)
    ]


@pytest.mark.parametrize("descriptors", [False, True])
def test_nothing_holds_the_tensors(direct, descriptors):
    kernel, plan = direct if descriptors else (None, plan_of(Kernel(CompiledForPointers)))
    tensors = pair()
    plan.run(*tensors)
    plan.run(*tensors)
    if descriptors:
        kernel.launches.clear()
    else:
        plan.kernel.launches.clear()
    watched = [weakref.ref(t) for t in tensors]
    del tensors
    gc.collect()
    assert [w() for w in watched] == [None, None]


def test_a_tensor_may_stand_for_two_of_the_kernels():
    kernel = Kernel()
    names = ("x", "y", "z", "x_strides", "y_strides", "number", "length", "BLOCK")
    kernel.params = [SimpleNamespace(name=n, do_not_specialize=n == "length") for n in names]

    def made(length):
        return Plan(kernel, (5,), (None, None), (48, length), {"BLOCK": 16}, order=(0, 1, 1))

    x, y = pair()
    plan = made(48)
    for _ in range(2):
        plan.run(x, y)
    (ordinary, args), (kept, given) = kernel.launches
    assert (ordinary, kept) == ("ordinary", "kept")
    assert args == (x, y, y, (16, 1), (16, 1), 48, 48)
    assert given[9:] == (x.data_ptr(), y.data_ptr(), y.data_ptr(), (16, 1), (16, 1), 48, 48, 16)
    made(50).run(x, y)  # the length is still the one that is not specialised
    assert kernel.roads == ["ordinary", "kept", "kept"]


def test_a_kept_launch_holds_its_compiled_kernel():
    """Triton unloads one that nobody holds."""
    kernel = Kernel()
    plan, tensors = plan_of(kernel), pair()
    plan.run(*tensors)
    (compiled,) = [weakref.ref(compiled) for compiled, _ in launching._compiled.values()]
    kept = plan.run(*tensors)
    launching._compiled.clear()
    plan._kept.clear()
    gc.collect()
    assert compiled() is not None
    del kept
    gc.collect()
    assert compiled() is None


NUMBERS = [0, 1, 2, 15, 16, 17, 32, 48, 2**31 - 1, 2**31, 2**31 + 16, 2**63 - 1, 2**63, 2**63 + 16, -1, -16, -(2**31), -(2**31) - 1]
NUMBERS += [1.0, 16.0, 0.5, True, False, None, (1, 16), (1, 32), (16, 16), (2, 16)]
NUMBERS += [(None, None), (None, 16), ((2.0, 0.5), None), ((4.0, 0.25), None), ((2.0, 1), None), ((2.0, 2), None)]


@pytest.mark.skipif(runtime().triton not in launching.KNOWN, reason="needs a version of Triton that was read")
@pytest.mark.parametrize("specialised", [True, False])
def test_numbers_of_one_class_are_one_to_triton(specialised):
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    for a, b in itertools.combinations(NUMBERS, 2):
        if class_of(a, specialised) == class_of(b, specialised):
            seen = [native_specialize_impl(BaseBackend, x, False, specialised, specialised) for x in (a, b)]
            assert seen[0] == seen[1], (a, b)
    assert class_of(32, specialised) == class_of(48, specialised)
    assert (class_of(32, specialised) == class_of(33, specialised)) is not specialised


@pytest.mark.parametrize("triton", [(3, 6), (3, 9)])
def test_a_tensor_that_is_described_twice_has_one_address(direct, triton, monkeypatch):
    monkeypatch.setattr(launching, "runtime", lambda: Runtime(triton))
    kernel, plan = direct
    plan = Plan(kernel, (7,), ((1, 8),), (Again(0, (1, 4)), 48), {"BLOCK": 16}, plan.descriptor)
    (x, y), (x_new, y_new) = pair(), pair()
    for tensors in ((x, y), (x, y), (x_new, y_new)):
        plan.run(*tensors)
    first, *_, last = kernel.launches
    shape, strides = list(x.shape), list(x.stride())
    assert first[1][:3] == ((x, shape, strides, [1, 8]), y, (x, shape, strides, [1, 4]))
    assert last[0] == ("direct" if triton == (3, 9) else "kept")
    if triton == (3, 9):
        addresses = [v[1] for v in last[1][15] if isinstance(v, tuple)]
    else:
        addresses = [v.base.data_ptr() for v in last[1] if hasattr(v, "base")]
    assert addresses == [x_new.data_ptr()] * 2


def test_the_assembler_is_the_one_that_triton_takes():
    """Kernels are judged by the code of the assembler that users get: since 3.9 the newer one makes Hopper's, too."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    import triton

    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    for capability in (80, 90, 100, 120):
        assert pathlib.Path(compiler.get_ptxas(capability).path).name == ptxas_name(capability, version)
    assert ptxas_version(torch.device("cpu")) is None
