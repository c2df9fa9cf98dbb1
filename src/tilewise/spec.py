"""``Spec``: what is computed, as a value. It knows positions and bounds; never shapes, dtypes, devices or tile sizes.

A mask is a conjunction of terms, and bounds combine by ``min`` and ``max``, so the canonical mask has at most one of each:

======== ============================= ===========================
field    meaning in positions          built by
======== ============================= ===========================
upper    ``kv_pos <= q_pos + upper``   ``causal()``, ``window(right=...)``
lower    ``kv_pos >= q_pos - lower``   ``window(left=...)``
======== ============================= ===========================

Key ``j`` has position ``j``; query ``i`` has position ``i + seqlen_k - seqlen_q`` (``align="bottom_right"``) or ``i``
(``align="top_left"``). A spec has one canonical string, and ``Spec.parse(str(spec)) == spec``.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from .errors import InvalidInput

__all__ = ["ALIGNMENTS", "Spec", "causal", "full", "spec_of", "window"]

ALIGNMENTS = ("bottom_right", "top_left")


def _bound(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name} must be an int or None, got {value!r} of type {type(value).__name__}.")
    if abs(value) >= 2**30:
        raise InvalidInput(f"{name} is {value}, but bounds lie strictly between -2**30 and 2**30: use None for 'unbounded'.")
    return value


@dataclass(frozen=True)
class Spec:
    """The mask of one attention, in canonical form. Combine specs with ``&``: a key is seen if every part lets it through.

    Args:
        upper: int or None: a key is seen only if ``kv_pos <= q_pos + upper``. ``None``: no such bound. Default ``None``.
        lower: int or None: a key is seen only if ``kv_pos >= q_pos - lower``. ``None``: no such bound. Default ``None``.
        align: ``"bottom_right"`` (the last query sits on the last key; the default) or ``"top_left"`` (the first query sits
            on the first key). It has no meaning without a bound, and is then always ``"bottom_right"``.

    Raises:
        InvalidInput: a bound that is no int, or an unknown alignment.
    """

    upper: int | None = None
    lower: int | None = None
    align: str = "bottom_right"

    def __post_init__(self) -> None:
        _bound("upper", self.upper)
        _bound("lower", self.lower)
        if self.align not in ALIGNMENTS:
            raise InvalidInput(f"align is {self.align!r}, expected one of {', '.join(map(repr, ALIGNMENTS))}.")
        if self.upper is None and self.lower is None:
            object.__setattr__(self, "align", "bottom_right")

    def __and__(self, other: Spec) -> Spec:
        if not isinstance(other, Spec):
            return NotImplemented
        bounded = [s for s in (self, other) if s.upper is not None or s.lower is not None]
        if len({s.align for s in bounded}) > 1:
            raise InvalidInput(
                f"cannot combine a mask aligned {self.align!r} with one aligned {other.align!r}: "
                "their positions differ. Build both with the same align."
            )
        least = [b for b in (self.upper, other.upper) if b is not None]
        widest = [b for b in (self.lower, other.lower) if b is not None]
        return Spec(min(least, default=None), min(widest, default=None), bounded[0].align if bounded else "bottom_right")

    def __str__(self) -> str:
        # index() makes a plain int of a size that torch.compile traces as a symbol.
        bounds = (("upper", self.upper), ("lower", self.lower))
        parts = [f"{name}:{operator.index(value)}" for name, value in bounds if value is not None]
        if not parts:
            return "full"
        return ",".join([*parts, f"align:{self.align}"])

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Spec:
        """The spec that ``str`` made this text from. Also reads ``causal`` (for ``upper:0``)."""
        fields: dict[str, object] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            if name in fields:
                raise InvalidInput(f"mask {text!r} names {name!r} twice.")
            if name == "full" and not value:
                continue
            if name == "causal" and not value:
                fields["upper"] = 0
            elif name in ("upper", "lower"):
                try:
                    fields[name] = int(value)
                except ValueError:
                    raise InvalidInput(f"mask {text!r}: {name} needs an int, got {value!r}.") from None
            elif name == "align":
                fields["align"] = value
            else:
                raise InvalidInput(
                    f"mask {text!r}: unknown term {part.strip()!r}. "
                    "Expected 'full', 'causal', or 'upper:INT', 'lower:INT' and 'align:NAME' joined by commas."
                )
        return Spec(**fields)  # type: ignore[arg-type]

    def q_start(self, seqlen_q: int, seqlen_k: int) -> int:
        """The position of query row 0, where key 0 has position 0."""
        return seqlen_k - seqlen_q if self.align == "bottom_right" else 0


def full() -> Spec:
    """Every query sees every key."""
    return Spec()


def causal(align: str = "bottom_right") -> Spec:
    """A query sees the keys up to and including its own position: ``kv_pos <= q_pos``."""
    return Spec(upper=0, align=align)


def window(left: int | None = None, right: int | None = None, align: str = "bottom_right") -> Spec:
    """A query sees ``left`` keys before its position, ``right`` keys after it, and the key at it.

    ``None`` is unbounded. 0 keeps nothing beyond self on that side. -1 also drops self, so ``window(-1, 0)`` sees nothing (a
    legal result: rows of zeros) and ``window(right=-1)`` is strictly causal. This differs from flash-attn, where -1 means
    unbounded.
    """
    for name, value in (("left", left), ("right", right)):
        if _bound(f"window's {name}", value) is not None and value is not None and value < -1:
            raise InvalidInput(
                f"window's {name} is {value}, expected None (unbounded) or an int of at least -1 "
                "(0 keeps self only on that side, -1 drops self too). For bounds past self use spec=Spec(upper=..., lower=...)."
            )
    return Spec(upper=right, lower=left, align=align)


def spec_of(causal_flag: bool, window_pair: tuple[int | None, int | None] | None, align: str | None) -> Spec:
    """The spec of the keyword arguments ``causal``, ``window`` and ``align`` of the public functions."""
    if not isinstance(causal_flag, bool):
        raise InvalidInput(f"causal must be True or False, got {causal_flag!r} of type {type(causal_flag).__name__}.")
    corner = "bottom_right" if align is None else align
    if not isinstance(corner, str) or corner not in ALIGNMENTS:
        raise InvalidInput(f"align is {corner!r}, expected one of {', '.join(map(repr, ALIGNMENTS))}.")
    if window_pair is None:
        return Spec(upper=0, align=corner) if causal_flag else Spec()
    if not isinstance(window_pair, tuple | list) or len(window_pair) != 2:
        raise InvalidInput(
            f"window must be a pair (left, right) of ints or None, got {window_pair!r}. "
            "window=(1023, 0) keeps 1,023 keys before self, and self."
        )
    spec = window(*window_pair, align=corner)
    return spec & causal(corner) if causal_flag else spec
