"""Triton's interpreter, with less to do around each operation.

An interpreted operation takes numpy some microseconds and Triton's language ten times as many, for types, shapes and constants that
were the same in the operation before. ``quicken`` keeps them, and leaves out what has no effect. Numbers and errors stay the same:

- a launch searches ``triton.language`` once for what it must replace, and not again in each function that its kernel calls;
- types and shapes of blocks, and the type in which two operands meet, are made once;
- a scalar beside a block is a view of one number, not a block of equal ones;
- sums of integers are not made once more in 64 bits for an assertion that the interpreter never looks at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["as_it_is", "quicken"]

_replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, name, what Triton has there, what stands there)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """``make(what Triton has there)`` in its place."""
    before = owner.__dict__[name]
    _replaced.append((owner, name, before, make(before)))


class _Once:
    """``_patch_lang`` of the interpreter, for as long as the scope that a launch opened is open."""

    def __init__(self, patch: Any, languages: tuple[Any, ...]):
        self.patch, self.languages = patch, languages
        self.scope: Any = None
        self.patched: tuple[bool, ...] = ()
        self.seen: dict[int, tuple[Any, tuple[bool, ...]]] = {}  # by module: its names (held, so that no other takes its id)

    def _wanted(self, names: dict[str, Any]) -> tuple[bool, ...]:
        """Which languages a module sees."""
        if id(names) not in self.seen:
            self.seen[id(names)] = names, tuple(any(value is each for value in names.values()) for each in self.languages)
        return self.seen[id(names)][1]

    def __call__(self, fn: Any) -> Any:
        wanted = self._wanted(fn.__globals__)
        if self.scope is not None and all(there or not asked for there, asked in zip(self.patched, wanted, strict=True)):
            return self.scope
        scope = self.patch(fn)
        if self.scope is not None:
            self.patched = tuple(a or b for a, b in zip(self.patched, wanted, strict=True))
        else:
            self.scope, self.patched = scope, wanted
            restore = scope.restore

            def close() -> None:
                self.scope = None
                restore()

            scope.restore = close
        return scope


class _Kept:
    """``_get_np_dtype`` of the interpreter, kept by the name of an element's type."""

    def __init__(self, find: Any):
        self.find = find
        self.found: dict[str, Any] = {}

    def __call__(self, dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in self.found:
            self.found[name] = self.find(dtype)
        return self.found[name]


def _quicken_types(core: Any) -> None:
    """Types are made and compared quickly, and a tensor takes its shape from its type."""
    dtype, block_type, constexpr, of_tuple = core.dtype, core.block_type, core.constexpr, core.tuple
    as_they_are = frozenset((int, float, bool, str, type(None), core.tensor, dtype, block_type, core.pointer_type))
    parts: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    of_scalars = of_tuple([]), constexpr(1)

    def unwrapped(plain: Any) -> Any:
        def unwrap(o: Any) -> Any:
            kind = type(o)
            if kind in as_they_are:
                return o
            return o.value if kind is constexpr else plain(o)

        return unwrap

    def made_block(plain: Any) -> Any:
        def make(self: Any, element_ty: Any, shape: Any) -> None:
            values = shape.values if type(shape) is of_tuple else shape
            key = (element_ty.name, *values)
            if key not in parts:
                plain(self, element_ty, shape)
                of_tensors = of_tuple([constexpr(size) for size in self.shape]), constexpr(self.numel)
                parts[key] = self.shape, self.numel, self.name, of_tensors
            self.element_ty = element_ty
            self.shape, self.numel, self.name, self.of_tensors = parts[key]

        return make

    def lowered(plain: Any) -> Any:
        def lower(self: Any, builder: Any) -> Any:
            # The interpreter's builder has the language's own types.
            return self if type(self.element_ty) is dtype and not self.element_ty.is_fp8() else plain(self, builder)

        return lower

    def equal(plain: Any) -> Any:
        def same(self: Any, other: Any) -> bool:
            return self is other or (self.name == other.name if type(other) is dtype else plain(self, other))

        return same

    def made_tensor(plain: Any) -> Any:
        def make(self: Any, handle: Any, type: Any) -> None:
            self.handle, self.type = handle, type
            if type.is_block():
                self.dtype = type.element_ty
                try:
                    self.shape, self.numel = type.of_tensors
                except AttributeError:  # a type from the time before
                    plain(self, handle, type)
            else:
                self.dtype = type.scalar
                self.shape, self.numel = of_scalars

        return make

    _replace(core, "_unwrap_if_constexpr", unwrapped)
    _replace(block_type, "__init__", made_block)
    _replace(block_type, "to_ir", lowered)
    _replace(dtype, "__eq__", equal)
    _replace(core.tensor, "__init__", made_tensor)


def _quicken_operations(core: Any, semantic: Any) -> None:
    """Operands that already meet are taken as they are."""
    scalar_type, tensor = core.dtype, core.tensor
    numbers = frozenset((int, float, bool))
    met: dict[tuple[Any, ...], Any] = {}
    constants: dict[tuple[Any, ...], Any] = {}
    divided_in_float32 = frozenset(scalar_type.FP_TYPES) - {"fp32", "fp64"}

    def meeting(plain: Any) -> Any:
        def meet(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
            key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
            if key not in met:
                met[key] = plain(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
            return met[key]

        return meet

    def checking(plain: Any) -> Any:
        def check(
            self: Any,
            lhs: Any,
            rhs: Any,
            allow_lhs_ptr: bool = False,
            allow_rhs_ptr: bool = False,
            arithmetic_check: bool = True,
            div_or_mod: bool = False,
        ) -> Any:
            if arithmetic_check and type(lhs) is tensor and type(lhs.dtype) is scalar_type:
                a = lhs.dtype
                if type(rhs) is tensor:
                    if a == rhs.dtype and not (div_or_mod and a.name in divided_in_float32):
                        return self.broadcast_impl_value(lhs, rhs)
                elif type(rhs) in numbers:
                    common = self.computation_type_impl(a, False, self.to_tensor_type(rhs), True, div_or_mod)
                    rhs = self._cast_to_computation_type(rhs, common)
                    return self.broadcast_impl_value(self.cast(lhs, common), rhs)
            return plain(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

        return check

    def keeping(plain: Any) -> Any:
        def constant(self: Any, value: Any, dtype: Any) -> Any:
            if type(value) not in numbers or type(dtype) is not scalar_type:
                return plain(self, value, dtype)
            key = dtype.name, type(value), value or repr(value)  # zeros have signs
            if key not in constants:
                if len(constants) > 10_000:
                    constants.clear()
                constants[key] = plain(self, value, dtype)
            return constants[key]

        return constant

    def spread(self: Any, scalar: Any, block: Any) -> Any:
        kind = block.with_element_ty(scalar.dtype)
        return tensor(self.builder.create_splat(kind, scalar.handle), kind)

    def broadcasting(plain: Any) -> Any:
        def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
            a, b = lhs.type, rhs.type
            if a is b:
                return lhs, rhs
            if a.is_block():
                if not b.is_block():
                    return lhs, spread(self, rhs, a)
                return (lhs, rhs) if a.shape.values == b.shape.values else plain(self, lhs, rhs)
            return (spread(self, lhs, b), rhs) if b.is_block() else (lhs, rhs)

        return broadcast

    def bringing(plain: Any) -> Any:
        def bring(self: Any, value: Any, dtype: Any) -> Any:
            return self.cast(value, dtype) if type(value) is tensor else plain(self, value, dtype)

        return bring

    def casting(plain: Any) -> Any:
        def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
            return input if input.dtype is dst_ty else plain(self, input, dst_ty, fp_downcast_rounding)

        return cast

    _replace(semantic, "computation_type_impl", meeting)
    _replace(semantic, "binary_op_type_checking_impl", checking)
    _replace(semantic, "broadcast_impl_value", broadcasting)
    _replace(semantic, "scalar_constant", keeping)
    _replace(semantic, "_cast_to_computation_type", bringing)
    _replace(semantic, "cast", casting)


def _quicken_builder(interpreter: Any, core: Any) -> None:
    """What numpy is called with, and what holds its results."""
    import numpy as np

    scalar_type, builder, handle = core.dtype, interpreter.InterpreterBuilder, interpreter.TensorHandle
    names = (*scalar_type.SINT_TYPES, *scalar_type.UINT_TYPES, *scalar_type.FP_TYPES)
    bits = {name: max(8, scalar_type(name).primitive_bitwidth) for name in names}
    boolean = np.dtype(np.bool_)

    def holding(plain: Any) -> Any:
        def hold(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
            attr = {} if attr is None else attr
            if type(dtype) is not scalar_type or data.itemsize * 8 > bits.get(dtype.name, 0):
                plain(self, data, dtype, attr)
            else:
                self.data, self.dtype, self.attr = data, dtype, attr

        return hold

    def operating(plain: Any) -> Any:
        def operate(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            a, b, scalar = lhs.data, rhs.data, lhs.dtype.scalar
            if (a.dtype is boolean and b.dtype is boolean) or type(scalar) is not scalar_type:
                return plain(self, lhs, rhs, op)
            made = op(a, b)
            if made.itemsize * 8 > bits[scalar.name]:
                made = made.astype(interpreter._get_np_dtype(scalar))
            return handle(made, scalar)

        return operate

    def converting(plain: Any) -> Any:
        def convert(self: Any, src: Any, dst_type: Any) -> Any:
            name, scalar = src.dtype.scalar.name, dst_type.scalar
            if "bf16" in (name, scalar.name):
                return plain(self, src, dst_type)
            return handle(src.data.astype(interpreter._get_np_dtype(scalar)), scalar)

        return convert

    def splatting(plain: Any) -> Any:
        def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
            if arg.data.size != 1:
                return plain(self, ret_ty, arg)
            data = arg.data.astype(interpreter._get_np_dtype(arg.dtype), copy=False)
            sizes = ret_ty.shape.values
            return handle(np.ndarray(sizes, data.dtype, data, 0, (0,) * len(sizes)), arg.dtype.scalar)

        return splat

    def pointing(plain: Any) -> Any:
        def point(self: Any, offsets: Any) -> Any:
            itemsize = self.base.dtype.element_ty.primitive_bitwidth // 8
            if len(offsets) != self.ndim or (offsets[-1].data * itemsize) % 16:
                return plain(self, offsets)  # it says what is wrong
            ones = (1,) * self.ndim
            pointers, inside = self.base.data.reshape(ones), np.ones(ones, bool)
            # Each sum is as large as what was added so far, not as the block.
            for dim, size in enumerate(self.block_shape):
                at = (offsets[dim].data + np.arange(size)).reshape((*ones[:dim], size, *ones[dim + 1 :]))
                pointers = pointers + (itemsize * at * self.strides[dim].data).astype(np.uint64)
                inside = inside & (at >= 0) & (at < self.shape[dim].data)
            return handle(pointers, self.base.dtype.scalar), handle(inside, core.int1)

        return point

    def patching(plain: Any) -> Any:
        checked = core.builtin(lambda: None).__code__

        def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
            # Triton's wrapper only looks whether there is a ``_semantic``.
            inner = member.__wrapped__ if getattr(member, "__code__", None) is checked else member
            semantic = interpreter.interpreter_semantic

            def interpreted(*args: Any, **kwargs: Any) -> Any:
                kwargs["_semantic"] = semantic
                return inner(*args, **kwargs)

            scope.set_attr(obj, name, interpreted)

        return patch

    _replace(handle, "__init__", holding)
    _replace(builder, "binary_op", operating)
    _replace(builder, "cast_impl", converting)
    _replace(builder, "create_splat", splatting)
    _replace(interpreter.TensorDescHandle, "materialize_pointers", pointing)
    _replace(interpreter, "_patch_attr", patching)


def quicken() -> bool:
    """Do so in this process from now on, as far as this version of Triton works as the last one that was read (3.9).

    False where there is no Triton, none that interprets, or one that works otherwise in all.
    """
    try:
        import triton
        from triton.language import core
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
    except ImportError:
        return False
    if not triton.knobs.runtime.interpret:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    if _replaced:
        return True
    if not all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_lang", "_get_np_dtype")):
        return False
    _replace(interpreter, "_patch_lang", lambda plain: _Once(plain, (interpreter.tl, interpreter.tl.core)))
    _replace(interpreter, "_get_np_dtype", _Kept)
    for_every_version = len(_replaced)
    try:
        _quicken_types(core)
        _quicken_operations(core, TritonSemantic)
        _quicken_builder(interpreter, core)
        options = interpreter.interpreter_builder.options
        if not options.debug:
            # device_assert does nothing then, so no overflow would be seen.
            _replaced.append((options, "sanitize_overflow", options.sanitize_overflow, False))
    except (AttributeError, KeyError):
        del _replaced[for_every_version:]
    _put(1)
    return True


def _put(which: int) -> None:
    """0: what Triton has; 1: what stands in its place."""
    for owner, name, *values in _replaced:
        value = values[which]
        if isinstance(owner, type) or hasattr(owner, "__file__"):
            setattr(owner, name, value)
        else:
            object.__setattr__(owner, name, value)  # a frozen dataclass


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """The interpreter as Triton has it, for as long as the context is open."""
    _put(0)
    try:
        yield
    finally:
        _put(1)
