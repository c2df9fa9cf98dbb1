"""Two masks of one kind as one: what ``&`` makes of two specs that both have intervals, ids or a dense mask.

Only methods of the tensors are called, and none that waits for a device. A dim along which a tensor is expanded (stride 0) stays
one element, so that the result is no larger than it must be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import InvalidInput

__all__ = ["JOINED", "joined"]

_INT32 = 2**32 - 1


def _narrow(t: Any) -> Any:
    for dim, stride in enumerate(t.stride()):
        if stride == 0 and t.shape[dim] > 1:
            t = t.narrow(dim, 0, 1)
    return t


def _pairs(first: Any, second: Any) -> Any:
    """One int64 for each pair of int32 ids: the first in its upper half, the second in its lower."""
    for t in (first, second):
        if str(t.dtype) != "torch.int32":
            raise InvalidInput(
                f"cannot combine two specs that both have segments where ids are {t.dtype}: a pair of int32 ids fits into 64 bits. "
                "Give ids.int(), or number the pairs of ids and give one tensor a side."
            )
    return (first.long() << 32) | (second.long() & _INT32)


def _both(first: Any, second: Any) -> Any:
    for t in (first, second):
        if str(t.dtype) != "torch.bool":
            raise InvalidInput(f"cannot combine two specs that both have dense where one is {t.dtype}, expected bool.")
    return first.logical_and(second)


# By slot: how two tensors become one.
JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "segment_q": _pairs,
    "segment_k": _pairs,
    "row_start": lambda a, b: a.maximum(b),
    "row_end": lambda a, b: a.minimum(b),
    "dense": _both,
}


def joined(slot: str, first: Any, second: Any) -> Any:
    """The tensor of both masks in this slot.

    Raises:
        InvalidInput: they do not broadcast together, or are on two devices.
    """
    try:
        return JOINED[slot](_narrow(first), _narrow(second))
    except (AttributeError, RuntimeError) as error:
        given = (f"{tuple(getattr(t, 'shape', ()))} on {getattr(t, 'device', type(t).__name__)}" for t in (first, second))
        raise InvalidInput(f"cannot combine two specs that both have {slot}: got {' and '.join(given)} ({error}).") from None
