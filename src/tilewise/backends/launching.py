"""What the backends that launch kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Launch", "broadcast_strides"]


def broadcast_strides(t: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor that broadcasts where its size is 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))


@dataclass(frozen=True)
class Launch:
    """One kernel launch as a value, which may run any number of times. ``counter``: a tensor that must be 0 before each."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    counter: Any = None

    def run(self) -> None:
        if self.counter is not None:
            self.counter.zero_()
        self.kernel[self.grid](*self.args, **self.options)
