"""What the backends that launch kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Launch"]


@dataclass(frozen=True)
class Launch:
    """One kernel launch as a value, which may run any number of times."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)
