"""Fill memory with NaN before anybody writes to it, so that what is never written is seen."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

__all__ = ["poison"]


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Within it, memory that ``torch.empty``, ``new_empty`` and ``empty_like`` return is NaN (integers: their largest value).

    It reaches into operators too, on every device: PyTorch itself fills the memory, in its deterministic mode. That mode and the
    fill are put back as they were; operations that have no deterministic form go on working.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
