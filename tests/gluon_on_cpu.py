"""The Gluon kernels of the Hopper backward pass, run as Python on the CPU: numbers, not speed.

``install`` puts small modules in the place of ``triton.experimental.gluon`` before the kernels are imported: it needs a process of
its own. The partitions of a program are threads, which meet at barriers with the counts and bytes of the kernels; shared memory
begins as NaN; a copy reads zeros past the end of a tensor and writes nothing there. Products and copies are done at once: what may
still be under way is the matter of ``test_hopper_backward.py``. Layouts of registers mean nothing here, those of shared memory are
boxes of as many columns as their swizzle spans.

    python gluon_on_cpu.py 192/128 192     a line of JSON for each comparison with float64
"""

import dataclasses
import inspect
import json
import math
import sys
import threading
import types

import torch

CHANGED = threading.Condition()  # some barrier has moved on, or a partition has failed
FAILURES = []
PROGRAM = [0]
PARTITION = threading.local()  # .warps of it
GRID = [1]


class Tensor(torch.Tensor):
    """A tensor of a kernel, whose ``type`` says what kernels ask of it."""

    @property
    def type(self):
        return types.SimpleNamespace(layout=None, shape=list(self.shape), with_element_ty=lambda dtype: None)


def _tensor(x):
    return x.as_subclass(Tensor)


class Number(int):
    """A number of a kernel: an int that can be cast."""

    def to(self, dtype):
        return self


def _number_operation(name):
    operation = getattr(int, name)

    def run(self, *others):
        result = operation(self, *others)
        return result if result is NotImplemented else Number(result)

    return run


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "radd", "rsub", "rmul", "rfloordiv", "rmod", "neg"):
    setattr(Number, f"__{_name}__", _number_operation(f"__{_name}__"))


class Barrier:
    """A phase ends when all arrivals have come and all bytes that were expected."""

    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count):
        self.count = self.pending = count

    def move(self, arrivals, expected=0):
        with CHANGED:
            for _ in range(max(1, arrivals)):
                self.pending -= min(arrivals, 1)
                self.bytes += expected
                if self.pending < 0:
                    raise RuntimeError("an arrival too many")
                if self.pending == 0 and self.bytes == 0:
                    self.phase += 1
                    self.pending = self.count
                    CHANGED.notify_all()

    def wait(self, parity):
        with CHANGED:
            while self.phase & 1 == parity:
                if FAILURES or not CHANGED.wait(timeout=60):
                    raise RuntimeError("deadlock, or another partition has failed")


class Barriers:
    def __init__(self, count):
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i):
        return self.barriers[i]


class Memory:
    """Shared memory as it lies: [..., boxes, rows, columns of a box]; ``view`` is another shape of the same numbers."""

    def __init__(self, boxes, dtype, view=None, turned=False):
        self.boxes, self.dtype, self.view, self.turned = boxes, dtype, view, turned

    def logical(self):
        x = self.boxes.movedim(-3, -2).flatten(-2)
        x = x if self.view is None else x.reshape(self.view)
        return x.transpose(-1, -2) if self.turned else x

    @property
    def type(self):
        *lead, boxes, rows, columns = self.boxes.shape
        shape = [*lead, rows, boxes * columns] if self.view is None else list(self.view)
        if self.turned:
            shape[-2:] = shape[:-3:-1]
        return types.SimpleNamespace(shape=shape, dtype=self.dtype)

    def index(self, i):
        return Memory(self.boxes[i], self.dtype)

    def permute(self, order):
        return Memory(self.boxes, self.dtype, self.view, not self.turned)

    def reshape(self, shape):
        return Memory(self.boxes, self.dtype, shape)

    def reinterpret(self, dtype, shape, layout):
        if layout.bases:
            return Memory(layout.read(self.boxes.flatten()[: math.prod(shape)], shape)[None], dtype)
        return Memory(self.boxes.flatten()[: math.prod(shape)].view(_boxes(shape, layout)), dtype)

    def slice(self, start, size, dim):
        if dim == 0 and self.view is None and not self.turned:
            return Memory(self.boxes.narrow(-2, start, size), self.dtype)
        return Memory(self.logical().narrow(dim, start, size)[None], self.dtype)

    def store(self, x):
        if x.dtype != self.dtype:
            raise TypeError(f"a store of {x.dtype} to memory of {self.dtype}")
        lead, (boxes, rows, columns) = self.boxes.shape[:-3], self.boxes.shape[-3:]
        self.boxes.copy_(x.as_subclass(torch.Tensor).reshape(*lead, rows, boxes, columns).movedim(-2, -3))

    def load(self, layout=None):
        return _tensor(self.logical().clone())


class Layout:
    def __init__(self, *words, **named):
        self.swizzle = words[0] if words and isinstance(words[0], int) else 0
        self.bases = words[0] if words and isinstance(words[0], list) else []  # where each bit of an offset leads

    def read(self, numbers, shape):
        """The tensor of this shape whose numbers lie like this."""
        offsets = torch.arange(len(numbers))
        row, column = (sum((offsets >> bit & 1) * base[dim] for bit, base in enumerate(self.bases)) for dim in (0, 1))
        out = torch.full(shape, math.nan, dtype=numbers.dtype)
        out[row, column] = numbers
        return out


def _boxes(shape, layout):
    columns = min(shape[-1], layout.swizzle // 2) if layout.swizzle > 1 else shape[-1]
    return (*shape[:-2], shape[-1] // columns, shape[-2], columns)


def _allocate(dtype, shape, layout, value=None):
    if dtype == torch.int64:
        return Barriers(shape[0])
    if dtype == torch.int32:
        return Memory(torch.zeros(shape[0], 1, 1, shape[1], dtype=dtype), dtype)
    return Memory(torch.full(_boxes(shape, layout), math.nan, dtype=dtype), dtype)


class Descriptor:
    def __init__(self, base, shape, strides, block, layout):
        if any(stride * base.element_size() % 16 for stride in strides[:-1]) or strides[-1] != 1:
            raise ValueError(f"a descriptor with the strides {strides}")
        self.base, self.block, self.layout, self.dtype = base, block, layout, base.dtype
        self.block_type = types.SimpleNamespace(shape=block, nbytes=math.prod(block) * base.element_size())

    def overlap(self, place):
        """Of the block at this place and the tensor, as indices of both."""
        ends = [(p, max(min(p + b, n), p)) for p, b, n in zip(place, self.block, self.base.shape, strict=True)]
        return tuple(slice(p, e) for p, e in ends), tuple(slice(0, e - p) for p, e in ends)


def _copy_in(desc, place, barrier, memory):
    here, there = desc.overlap(place)
    block = torch.zeros(desc.block, dtype=desc.dtype)
    block[there] = desc.base[here]
    if memory.type.shape != list(desc.block):
        raise ValueError(f"a copy of {desc.block} into {memory.type.shape}")
    memory.store(block)
    barrier.move(0, -desc.block_type.nbytes)


def _copy_out(desc, place, memory):
    here, there = desc.overlap(place)
    desc.base[here] = memory.logical().reshape(desc.block)[there]


def _multiply(a, b, acc, use_acc=True, is_async=False):
    left, right = (x.logical() if isinstance(x, Memory) else x.as_subclass(torch.Tensor) for x in (a, b))
    product = left.float() @ right.float()
    return _tensor(acc.as_subclass(torch.Tensor) + product if use_acc else product)


def _wait_for_products(pending=0, deps=()):
    return deps[0] if len(deps) == 1 else tuple(deps)


def _add(x, pointer):
    """Add an accumulator in the order in which its threads hold it, 8 columns at a time."""
    lanes = x.as_subclass(torch.Tensor).reshape(4, 2, 8, -1, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten()
    pointer.numbers[pointer.offset : pointer.offset + lanes.numel()] += lanes


def _put(x, memory, apart):
    """Write a tile as ``stmatrix`` does: 8 x 8 blocks of 128 bytes, those of a warp next to one another."""
    start = memory.boxes.storage_offset()
    for i, part in enumerate(x.as_subclass(torch.Tensor).split(64, 1)):
        blocks = part.reshape(4, 2, 8, 8, 8).permute(0, 3, 1, 2, 4).flatten()  # warp, eight queries, eight of sixteen keys
        memory.boxes.as_strided((4096,), (1,), start + i * apart // 2).copy_(blocks)


def _assembly(text, constraints="", args=(), result_types=(), is_pure=False):
    """What the assembly of the kernels does, by what stands in it."""
    name = getattr(text, "__name__", text)
    if name.startswith("_pack_"):
        p16 = args[0].to(torch.bfloat16 if name.endswith("bf16") else torch.float16)
        return p16, p16
    if name.startswith("_product_"):
        return (args[0].float() * args[1]).to(args[0].dtype)
    if name == "_add_text":
        return _add(*args)
    if name in ("_put_in_a_row", "_put_apart"):
        return _put(*args, 8192 if name == "_put_in_a_row" else 16384)
    if name == "_tanh_text":
        return torch.tanh(args[0])
    if name == "_rescale_text":
        return args[0] * args[1][:, None]
    if text.startswith("//"):
        return None
    if text == "mov.u32 $0, 0;":
        return Number(0)
    if "try_wait" in text:
        return args[0].wait(args[1])
    if "atom.global" in text:
        return _take(*args) if len(args) == 4 else _issue(*args)
    if "st.shared" in text:
        return _issue(None, *args[1:]) if "%ctaid.x" in text else _tell(*args)
    if "mbarrier.arrive" in text:
        return args[0].move(PARTITION.warps)
    if "%ctaid.x" in text:
        return Number(PROGRAM[0])
    if "ld.shared" in text:
        return Number(args[0].boxes.flatten()[int(text.split("+")[-1].strip(" ];")) // 4 if "+" in text else 0].item())
    raise NotImplementedError(text)


def _take(counter, last, ticket, issued):
    """The number of the next tile, for this program and its ticket; whoever takes the last puts the counter back."""
    taken = int(counter.numbers[counter.offset])
    counter.numbers[counter.offset] = 0 if taken == last else taken + 1
    ticket.boxes.fill_(taken + GRID[0])
    issued.move(1)
    return Number(taken + GRID[0])


def _issue(counter, ticket, issued):
    """The next tile of keys for this program; without a counter its first."""
    place = PROGRAM[0]
    if counter is not None:
        place = int(counter.numbers[counter.offset]) + GRID[0]
        counter.numbers[counter.offset] += 1
    ticket.boxes.fill_(place)
    issued.move(1)


def _tell(record, told, *words):
    record.boxes.flatten()[: len(words)] = torch.tensor([int(word) for word in words], dtype=torch.int32)
    told.move(1)


def _fma(x, y, z):
    return (x.double() * y.double() + z.double()).float()


def _specialize(partitions, warps, registers):
    def run(function, arguments, count):
        PARTITION.warps = count
        try:
            function(*arguments)
        except BaseException as error:
            with CHANGED:
                FAILURES.append(error)
                CHANGED.notify_all()

    counts = (4, *warps)
    threads = [threading.Thread(target=run, args=(*each, n)) for each, n in zip(partitions, counts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if FAILURES:
        raise FAILURES[0]


class Pointer:
    def __init__(self, numbers, offset=0):
        self.numbers, self.offset = numbers, offset

    def __add__(self, more):
        return Pointer(self.numbers, self.offset + more)


def _load(pointer, mask, other=0):
    inside = mask.as_subclass(torch.Tensor)
    found = pointer.numbers[torch.where(inside, pointer.offset.as_subclass(torch.Tensor), 0)]
    return _tensor(torch.where(inside, found, other))


def _store(pointer, values, mask):
    inside = mask.as_subclass(torch.Tensor)
    at = pointer.offset.as_subclass(torch.Tensor).expand(inside.shape)[inside]
    pointer.numbers[at] = values.as_subclass(torch.Tensor).to(pointer.numbers.dtype)[inside]


class Kernel:
    """A function of the kernel language; with a grid, a launch."""

    def __init__(self, function, do_not_specialize=()):
        self.function, self.__name__ = function, function.__name__
        self.arg_names = list(inspect.signature(function).parameters)

    def __call__(self, *arguments, **options):
        return self.function(*arguments, **options)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self.function, instance)

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            options = {name: value for name, value in options.items() if name in self.arg_names}
            kinds = {int: Number, torch.Tensor: lambda x: Pointer(x.flatten())}
            arguments = [kinds.get(type(x), lambda x: x)(x) for x in arguments]
            GRID[0] = grid[0]
            for PROGRAM[0] in range(grid[0]):
                self.function(*arguments, **options)

        return launch


def _jit(function=None, **options):
    return Kernel(function) if function is not None else lambda given: Kernel(given, **options)


def _aggregate(kind):
    names = list(kind.__annotations__)

    def init(self, *values):
        self.__dict__.update(zip(names, values, strict=True))

    kind.__init__ = init
    return kind


def install():
    """Put what the kernels import in its place."""
    from triton.runtime import jit

    jit.mangle_type(0)  # the package itself stays, and finds its own classes once

    language, hopper = types.ModuleType("language"), types.ModuleType("hopper")
    layouts = ("NVMMADistributedLayout", "NVMMASharedLayout", "SharedLinearLayout", "SliceLayout", "DotOperandLayout")
    for name in (*layouts, "tensor", "distributed_type"):
        setattr(language, name, type(name, (Layout,), {}))
    vars(language).update(
        shared_memory_descriptor=Memory, constexpr=lambda value: value, allocate_shared_memory=_allocate, load=_load,
        int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16,
        zeros=lambda shape, dtype, layout: _tensor(torch.zeros([int(n) for n in shape], dtype=dtype)),
        arange=lambda first, last, layout: _tensor(torch.arange(first, last)),
        where=lambda condition, x, y: _tensor(torch.where(condition.as_subclass(torch.Tensor), x, y)),
        exp2=torch.exp2, convert_layout=lambda x, layout, assert_trivial=False: x, static_range=range,
        static_assert=lambda condition, text="": None, program_id=lambda axis: Number(PROGRAM[0]),
        num_programs=lambda axis: GRID[0], store=_store, fma=_fma, abs=torch.abs, log2=torch.log2,
        zeros_like=lambda x: _tensor(torch.zeros_like(x)), SwizzledSharedLayout=Layout,
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        inline_asm=_assembly, warp_specialize=_specialize,
        inline_asm_elementwise=lambda text, constraints, args, dtype, **_: (args[0].float() * args[1]).to(dtype),
    )  # fmt: skip
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=Layout, init=lambda barrier, count: barrier.init(count), wait=lambda barrier, parity: barrier.wait(parity),
        expect=lambda barrier, nbytes: barrier.move(1, nbytes), arrive=lambda barrier, count: barrier.move(count),
    )  # fmt: skip
    tma = types.SimpleNamespace(
        async_load=_copy_in, async_store=_copy_out, store_wait=lambda pending: None, tensor_descriptor=Descriptor
    )
    vars(hopper).update(
        fence_async_shared=lambda: None, mbarrier=mbarrier, tma=tma, warpgroup_mma=_multiply, warpgroup_mma_wait=_wait_for_products,
        TensorDescriptor=Descriptor,
    )  # fmt: skip
    gluon = types.ModuleType("gluon")
    vars(gluon).update(jit=_jit, aggregate=_aggregate, constexpr_function=lambda function: function, language=language)
    root = "triton.experimental"
    found = {f"{root}.gluon": gluon, f"{root}.gluon.language": language}
    found |= {f"{root}.gluon.language.nvidia.hopper": hopper, f"{root}.gluon.nvidia.hopper": hopper}
    for name in (root, f"{root}.gluon.language.nvidia", f"{root}.gluon.nvidia"):
        found[name] = types.ModuleType(name)
    sys.modules.update(found)


CASES = [  # batch, heads, key heads, queries, keys; mask; dtype
    ((1, 2, 1, 150, 200), "causal", "bfloat16"),
    ((2, 1, 1, 128, 128), "full", "float16"),
    ((1, 2, 2, 200, 100), "causal", "bfloat16"),
    ((1, 1, 1, 300, 300), "upper:20,lower:90", "bfloat16"),
    ((1, 2, 1, 130, 257), "upper:0,align:top_left", "float16"),
    ((1, 1, 1, 1, 1), "causal", "bfloat16"),
]
ADDED = [((1, 4, 2, 150, 200), "full", "bfloat16"), ((1, 1, 1, 1, 70), "full", "bfloat16"), ((1, 2, 1, 400, 64), "full", "float16")]
TERMS = [  # not in the kernels whose tiles come in parts
    ((1, 2, 1, 150, 200), "causal,softcap:3.0", "bfloat16"),
    ((1, 1, 1, 300, 300), "upper:20,lower:90,softcap:2.0", "bfloat16"),
    ((1, 2, 1, 130, 257), "softcap:50.0", "bfloat16"),
]
LIMITS = {"bfloat16": 8e-3, "float16": 1.2e-3}


def errors(dims, shape, mask, dtype, config, programs=3):
    """The relative error of each gradient that this way of making them (a ``BackwardConfig``) gives."""
    from tilewise.arch import ARCHS
    from tilewise.backends.hopper import bwd_launch
    from tilewise.backends.hopper.bwd_add_launch import adding_plans
    from tilewise.configs.hopper_backward import AddingConfig, padded_rows
    from tilewise.problem import Problem
    from tilewise.reference import reference
    from tilewise.spec import Spec

    (batch, heads_q, heads_kv, queries, keys), spec = shape, Spec.parse(mask)
    generator = torch.Generator().manual_seed(1)
    sizes = [(heads_q, queries, dims[0]), (heads_kv, keys, dims[0]), (heads_kv, keys, dims[1]), (heads_q, queries, dims[1])]
    q, k, v, do = (torch.randn((batch, *size), generator=generator).to(getattr(torch, dtype)) for size in sizes)
    dlse = torch.randn((batch, heads_q, queries), generator=generator).double()
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    o, lse = reference(*wide, spec)
    seen = ~lse.isneginf()
    loss = (o * do.double()).sum() + (torch.where(seen, lse, 0.0) * dlse).sum()
    truth = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(loss, wide), strict=True))
    problem = dataclasses.replace(Problem.bind(q, k, v, spec, None), grad="qkv", arch=ARCHS["sm_90"])
    rows = batch * heads_q, padded_rows(problem)
    lse2, minus_delta = torch.full(rows, math.inf), torch.zeros(rows)
    minus = dlse - (do.double() * o.detach()).sum(-1)
    for numbers, values, other in ((lse2, lse.detach() / math.log(2), math.inf), (minus_delta, minus, 0.0)):
        numbers.view(batch, heads_q, -1)[..., :queries] = torch.where(seen, values, other).float()
    made = {name: torch.full_like(t, math.nan) for name, t in (("dq", q), ("dk", k), ("dv", v))}
    inputs, numbers = (q, k, v, do), (lse2, minus_delta)
    if isinstance(config, AddingConfig):
        sums = torch.zeros(rows[0] * rows[1] * dims[0] + 1)
        config = dataclasses.replace(config, programs=programs)  # so that one works on several tiles
        adding_plans(problem, config, False)[1].launch(k, v, q, do, *numbers, made["dk"], made["dv"], sums).run()
        lanes = sums[:-1].view(*rows[:1], -1, dims[0] // 8, 4, 8, 4, 2, 2).permute(0, 1, 3, 6, 4, 2, 5, 7)
        made["dq"] = lanes.reshape(batch, heads_q, rows[1], dims[0])[:, :, :queries] * problem.sm_scale
    elif config.kept is None:
        bwd_launch.launch_dkdv(problem, config.keys, *inputs, *numbers, made["dk"], made["dv"]).run()
        bwd_launch.launch_dq(problem, config.queries, *inputs, *numbers, made["dq"]).run()
        for name in ("dk", "dv"):  # the other is not asked for
            alone = torch.full_like(made[name], math.nan)
            given = (alone, None) if name == "dk" else (None, alone)
            bwd_launch.launch_dkdv(problem, config.keys, *inputs, *numbers, *given).run()
            made[f"{name} alone"], truth[f"{name} alone"] = alone, truth[name]
    else:
        ds = torch.full(bwd_launch.ds_shape(problem, rows[0]), math.nan, dtype=q.dtype)
        bwd_launch.launch_dkdv(problem, config.keys, *inputs, *numbers, made["dk"], made["dv"], ds).run()
        bwd_launch.launch_dq_kept(problem, config.kept, ds, k, made["dq"]).run()
    return {name: ((t.double() - truth[name]).norm() / truth[name].norm().clamp_min(1e-9)).item() for name, t in made.items()}


def compare_all(arguments):
    """Every config of these head dims, after ``install``."""
    torch.set_num_threads(1)
    from tilewise.configs.hopper_backward import ADDING, DKDV, DQ, KEPT, BackwardConfig, in_chunks
    from tilewise.problem import Problem
    from tilewise.spec import Spec

    for dims in arguments:
        pair = tuple(int(size) for size in (dims.split("/") * 2)[:2])
        place = pair if pair[0] != pair[1] else pair[0]
        keys, queries, kept = DKDV[place], DQ[place], KEPT[place]
        ways = [BackwardConfig(keys[i % len(keys)], queries[i % len(queries)]) for i in range(max(len(keys), len(queries)))]
        keeps = [BackwardConfig(keys[i % len(keys)], kept=kept[i % len(kept)]) for i in range(max(len(keys), len(kept)))]
        adds = {bounded: list(ADDING.get((place, bounded), ())) for bounded in (False, True)}
        terms = [] if in_chunks(Problem.parse(f"seqlen=64 head_dim={dims}")) else TERMS
        for shape, mask, dtype in CASES + terms + ADDED * bool(adds[False]):
            spec = Spec.parse(mask)
            added = [] if spec.lower is not None or spec.terms else adds[spec.upper is not None]
            for way in ways + (keeps if "lower" not in mask else []) + added:
                found = errors(pair, shape, mask, dtype, way)
                ok = all(error < LIMITS[dtype] for error in found.values())
                words = {"dims": dims, "shape": shape, "mask": mask, "way": str(way), "errors": found}
                print(json.dumps({**words, "ok": ok}), flush=True)


if __name__ == "__main__":
    install()
    compare_all(sys.argv[1:])
