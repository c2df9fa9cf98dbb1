"""Everything that tilewise raises, and the reason that a backend gives when it refuses a problem."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AttentionError", "BackendBroken", "BackendRefused", "InvalidInput", "Reason"]


@dataclass(frozen=True)
class Reason:
    """One reason why a backend cannot take a problem: a stable ``code`` for programs and a sentence for people."""

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


class AttentionError(Exception):
    """Base of every error that tilewise raises on purpose."""


class InvalidInput(AttentionError, ValueError):
    """The call has no meaning on any backend. The message names the argument, what came, what is expected, what to do."""


class BackendRefused(AttentionError, NotImplementedError):
    """The call is meaningful but the requested backend (or every backend) refuses it; ``reasons`` lists all the reasons."""

    def __init__(self, message: str, reasons: tuple[Reason, ...] = ()):
        super().__init__(message)
        self.reasons = reasons


class BackendBroken(AttentionError, RuntimeError):
    """A backend that accepted the problem failed while it worked: a bug in tilewise, Triton or the driver."""
