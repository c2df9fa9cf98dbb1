"""What single arguments must be. A check raises InvalidInput with the name, what came and what is expected."""

from __future__ import annotations

import re
from typing import Any

import torch

from .errors import InvalidInput

__all__ = [
    "CHECKS",
    "FN_STEP",
    "check_backend",
    "check_bound",
    "check_cap",
    "check_dropout",
    "check_flag",
    "check_length",
    "check_score",
]

# A score function's step says its name, how many tensors it takes and the hash of its source: "fn:relative/1@0f3c...".
FN_STEP = re.compile(r"[A-Za-z_]\w*/([0-4])@[0-9a-f]{16}")


def got(value: object) -> str:
    """How a message calls a value of a wrong type."""
    return f"{value!r} of type {type(value).__name__}"


def check_flag(name: str, value: Any, or_none: bool = False) -> Any:
    """True or False, and None where that has a meaning."""
    if value is True or value is False or (or_none and value is None):
        return value
    words = "True, False or None" if or_none else "True or False"
    raise InvalidInput(f"{name} must be {words}, got {got(value)}.")


def check_backend(name: Any) -> str:
    if not isinstance(name, str):
        raise InvalidInput(f"backend must be a name, got {got(name)}.")
    return name


def check_bound(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name} must be an int or None, got {got(value)}.")
    if abs(value) >= 2**30:
        raise InvalidInput(f"{name} is {value}, but bounds lie strictly between -2**30 and 2**30: use None for 'unbounded'.")
    return value


def check_length(name: str, value: Any) -> Any:
    """A number of queries or keys; a size that torch.compile traces as a symbol is one."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < 0:
        raise InvalidInput(f"{name} must be an int of at least 0, got {got(value)}.")
    return value


def check_cap(cap: object) -> float:
    """The cap as a float. Raises InvalidInput unless it is a finite number above 0."""
    if isinstance(cap, bool) or not isinstance(cap, int | float):
        raise InvalidInput(f"softcap's cap must be a number, got {got(cap)}.")
    if not 0.0 < cap < float("inf"):
        raise InvalidInput(f"softcap's cap is {cap}, expected a finite number above 0 (no softcap at all is 'no cap').")
    return float(cap)


def check_dropout(p: object) -> float:
    """The probability as a float. Raises InvalidInput unless ``0 <= p <= 1``."""
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise InvalidInput(f"dropout's p must be a number, got {got(p)}.")
    if not 0.0 <= p <= 1.0:
        raise InvalidInput(f"dropout's p is {p}, expected the probability that a weight is dropped: from 0 to 1.")
    return float(p)


CHECKS = {"softcap": check_cap, "dropout": check_dropout}


def check_score(score: Any) -> None:
    """The steps of a spec, as its string names them."""
    if not isinstance(score, tuple):
        raise InvalidInput(f"score must be a tuple of names of steps, got {got(score)}.")
    names = []
    for step in score:
        name, _, value = step.partition(":") if isinstance(step, str) else ("", "", "")
        # Whole functions' steps are matched where they are parsed: torch.compile does not trace regular expressions.
        known = step in ("alibi", "bias") or (name == "softcap" and _is_number(value)) or (name == "fn" and "/" in value)
        if not known:
            raise InvalidInput(f"score has {step!r}, expected 'softcap:NUMBER', 'alibi', 'bias' or 'fn:NAME/TENSORS@HASH'.")
        if name == "softcap":
            check_cap(float(value))
        if name in names:
            raise InvalidInput(f"score names {name!r} twice: a spec has at most one of each step.")
        names.append(name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
