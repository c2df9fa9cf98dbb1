"""Stand-ins for the tensors of a spec, so that a plan of launches can be kept without them.

A ``Hole`` is all of a tensor but its address. Whoever makes the arguments of a kernel out of tensors makes them out of holes too:
strides become numbers, and the holes stay in the tuples where the tensors would stand. Each run names the tensors anew, in the
order of their places. What was made of holes is kept by their ``layout_of``, so that another dtype, shape or stride makes another
plan; the address, and whether it is a multiple of 16, is looked at in each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..plan import BlockTable, Masked, MaskTensors, Place
from ..spec import SLOTS, Tensors

__all__ = ["Hole", "Layout", "addressed", "filled", "has_holes", "holes_of", "layout_of", "mask_of", "table_of_holes", "there"]

Layout = tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None, ...]
_SPEC = len(SLOTS)
_PLAN = SLOTS.index("plan")


class Hole:
    """The tensor at ``place``, from ``offset`` bytes after its first element on, as what reads its metadata sees it."""

    __slots__ = ("dtype", "offset", "place", "shape", "strides")

    def __init__(self, place: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0):
        self.place, self.dtype, self.shape, self.strides, self.offset = place, dtype, shape, strides, offset

    def dim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def view(self, dtype: torch.dtype) -> Hole:
        """The same with elements of another dtype of the same size."""
        return Hole(self.place, dtype, self.shape, self.strides, self.offset)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor itself: a view that begins where the hole begins."""
        t = t if t.dtype == self.dtype else t.view(self.dtype)
        return t[self.offset // t.element_size() :] if self.offset else t


def layout_of(tensors: Sequence[torch.Tensor | None]) -> Layout:
    """What ``holes_of`` is told of these tensors."""
    return tuple([None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors])


def holes_of(layout: Layout) -> list[Any]:
    """A hole for each tensor of a layout, placed in their order; ``None`` stays."""
    places = iter(range(len(layout)))
    return [None if each is None else Hole(next(places), *each) for each in layout]


def there(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors that a run names for the holes of their layout."""
    return [t for t in tensors if t is not None]


def table_of_holes(packed: Hole, place: Place) -> BlockTable:
    """The table at ``place`` of a packed tensor: where it begins, and the shape of its lists."""
    size = packed.dtype.itemsize
    counts = Hole(packed.place, packed.dtype, (*place.shape[:3], 2), (), place.at * size)
    lists = Hole(packed.place, packed.dtype, place.shape, (), (place.at + 2 * place.rows) * size)
    return BlockTable(counts, lists)  # type: ignore[arg-type]


def mask_of(holes: Sequence[Any], place: Place | None) -> tuple[Tensors, Masked | None]:
    """The tensors of a spec among the holes, which begin with those of all slots, and its mask with the table at ``place``."""
    own = Tensors(*holes[:_SPEC])
    tensors = own._replace(plan=None)
    if place is None:
        return tensors, None
    return tensors, Masked(MaskTensors.of(tensors) or MaskTensors(), table_of_holes(holes[_PLAN], place))


def has_holes(value: Any) -> bool:
    """Is this, or anything in these tuples, a hole?"""
    return any(map(has_holes, value)) if isinstance(value, tuple) else isinstance(value, Hole)


def filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The same with tensors in place of holes."""
    if isinstance(value, tuple):
        return tuple([filled(v, tensors) for v in value])
    return value.of(tensors[value.place]) if isinstance(value, Hole) else value


def addressed(value: Any, addresses: Sequence[int]) -> Any:
    """The same with addresses in place of holes."""
    if isinstance(value, tuple):
        return tuple([addressed(v, addresses) for v in value])
    return addresses[value.place] + value.offset if isinstance(value, Hole) else value
