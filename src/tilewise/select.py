"""Which backend takes a problem, chosen once for the forward and the backward pass together."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .capabilities import CAPABILITIES, Capability, refuse
from .errors import BackendRefused, InvalidInput, Reason
from .problem import Problem

__all__ = ["Choice", "choose", "table"]


@dataclass(frozen=True)
class Choice:
    """The chosen backend, and what every backend before and after it said."""

    backend: str
    verdicts: tuple[tuple[str, tuple[Reason, ...]], ...]


def capability(name: str) -> Capability:
    for row in CAPABILITIES:
        if row.backend == name:
            return row
    names = ", ".join(repr(n) for n in ("auto", *(row.backend for row in CAPABILITIES)))
    raise InvalidInput(f"backend is {name!r}, expected one of {names}.")


@functools.lru_cache(maxsize=4096)
def table(key: Problem) -> tuple[tuple[str, tuple[Reason, ...]], ...]:
    """Every backend with its reasons against a problem (none: it accepts), in the order in which ``auto`` asks."""
    return tuple((row.backend, tuple(refuse(row, key))) for row in CAPABILITIES)


@functools.lru_cache(maxsize=4096)
def _choose(key: Problem, backend: str) -> Choice:
    verdicts = table(key)
    wanted = [capability(backend)] if backend != "auto" else [row for row in CAPABILITIES if row.auto]
    reasons_of = dict(verdicts)
    for row in wanted:
        if not reasons_of[row.backend]:
            return Choice(row.backend, verdicts)
    lines = [f"backend {row.backend!r} refuses: " + "; ".join(map(str, reasons_of[row.backend])) + "." for row in wanted]
    others = [name for name, reasons in verdicts if not reasons]
    advice = f"Accepted by: {', '.join(map(repr, others))}." if others else "No backend accepts this problem."
    reasons = tuple(reason for row in wanted for reason in reasons_of[row.backend])
    raise BackendRefused("\n".join([*lines, advice]), reasons)


def choose(problem: Problem, backend: str = "auto") -> Choice:
    """The backend for this problem: the one that is named, or the first that accepts. A named one never falls back.

    Raises:
        InvalidInput: no backend has this name.
        BackendRefused: the named backend (or, for ``auto``, every one) refuses; all reasons are listed.
    """
    try:
        return _choose(problem.key, backend)
    except BackendRefused as refusal:
        raise BackendRefused(f"{refusal}\nProblem: {problem}", refusal.reasons) from None
