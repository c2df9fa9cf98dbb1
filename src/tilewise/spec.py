"""``Spec``: what is computed, as a value. It knows positions, bounds and names; never shapes, dtypes, devices or tile sizes.

A mask is a conjunction of terms, and bounds combine by ``min`` and ``max``, so the canonical mask has at most one of each:

======== ================================== ===========================
field    meaning in positions               built by
======== ================================== ===========================
upper    ``kv_pos <= q_pos + upper``        ``causal()``, ``window(right=...)``
lower    ``kv_pos >= q_pos - lower``        ``window(left=...)``
segment  ``segment_q == segment_k``         ``segments(...)``
row      ``row_start <= kv_pos < row_end``  ``row_intervals(...)``
dense    the element itself                 ``dense(...)``
======== ================================== ===========================

Before the mask, an ordered tuple of steps changes the scores (``score``); ``sink`` adds to the softmax's denominator and
``dropout`` drops weights after it (``terms.py`` builds all of these).

Key ``j`` has position ``j``; query ``i`` has position ``i + seqlen_k - seqlen_q`` (``align="bottom_right"``) or ``i``
(``align="top_left"``). A spec has one canonical string, which names the tensors that it needs but does not hold them:
``Spec.parse(str(spec)) == spec.form``.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .checks import CHECKS, FN_STEP, check_bound, check_flag, check_score, got
from .conjunction import joined
from .errors import InvalidInput

__all__ = [
    "ALIGNMENTS",
    "FN_SLOTS",
    "NO_TENSORS",
    "RETURNS",
    "SLOTS",
    "STEPS",
    "TERMS",
    "Spec",
    "Tensors",
    "causal",
    "full",
    "spec_of",
    "window",
]

ALIGNMENTS = ("bottom_right", "top_left")
STEPS = ("softcap", "alibi", "bias", "fn")  # what a score step can be
TERMS = (*STEPS, "sink", "segment", "row", "dense", "dropout")  # all that a backend may lack
RETURNS = ("max_logit", "weights", "column_sums")  # what a call may want besides o and lse
_FLAGS = ("sink", "segment", "row", "dense")


class Tensors(NamedTuple):
    """The tensors that a spec may name, in the order in which they cross the operators; ``None``: not named."""

    bias: Any = None
    slopes: Any = None
    sink: Any = None
    segment_q: Any = None
    segment_k: Any = None
    row_start: Any = None
    row_end: Any = None
    dense: Any = None
    seed: Any = None
    plan: Any = None
    fn0: Any = None
    fn1: Any = None
    fn2: Any = None
    fn3: Any = None


NO_TENSORS = Tensors()
SLOTS = Tensors._fields
FN_SLOTS = ("fn0", "fn1", "fn2", "fn3")  # the tensors of a score function, in the order in which it takes them
_SLOTS_OF = {
    "alibi": ("slopes",),
    "bias": ("bias",),
    "sink": ("sink",),
    "segment": ("segment_q", "segment_k"),
    "row": ("row_start", "row_end"),
    "dense": ("dense",),
    "dropout": ("seed",),
}


_ADVICE = {
    "softcap": "Two caps in a row have no single one that equals them.",
    "alibi": "Add the slopes and give one tensor.",
    "bias": "Add the biases and give one tensor.",
    "fn": "Write one function that does both, in the order that you mean.",
    "sink": "Give one logit a head: torch.logaddexp(first, second).",
    "dropout": "Give one probability: 1 - (1 - first) * (1 - second).",
}


def _of_both(slot: str, first: Any, second: Any) -> Any:
    """The tensor in this slot of two specs that are combined. A plan was made for one of them."""
    if slot == "plan":
        return None
    if first is None or second is None:
        return second if first is None else first
    return joined(slot, first, second)


def _number(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InvalidInput(f"mask {text!r}: {name} needs a number, got {value!r}.") from None
    return CHECKS[name](number)


@dataclass(frozen=True, eq=False)
class Spec:
    """What one attention computes, in canonical form. Combine specs with ``&``.

    A key is seen if every part lets it through; score steps apply in the order in which they are combined. Two interval masks, two
    dense masks or two segments (of int32 ids) become one, whose tensors are made there and then: the maximum of the starts and the
    minimum of the ends, ``first & second``, pairs of ids. Any other term can be there once.

    Args:
        upper: int or None: a key is seen only if ``kv_pos <= q_pos + upper``. ``None``: no such bound. Default ``None``.
        lower: int or None: a key is seen only if ``kv_pos >= q_pos - lower``. ``None``: no such bound. Default ``None``.
        align: ``"bottom_right"`` (the last query sits on the last key; the default) or ``"top_left"`` (the first query sits
            on the first key). It has no meaning where no bound and no ALiBi uses positions, and is then always
            ``"bottom_right"``.
        score: the score steps in their order: ``"softcap:30.0"``, ``"alibi"``, ``"bias"`` and ``"fn:NAME/TENSORS@HASH"`` (a
            function of the user's own, ``score_fn``), at most one of each.
        sink, segment, row, dense: does the spec have this term?
        dropout: the probability with which a weight is dropped, as ``"0.1"``; ``""`` for none.
        plan: which tables of tiles ``tilewise.plan`` made for the mask's tensors, and for which call; ``""`` for none. It changes
            no result. A spec that is combined with another loses it.
        returns: what is wanted besides ``o`` and ``lse`` (a name out of ``RETURNS``), as the public functions set it; ``""`` for
            nothing. A spec that is combined with another loses it.
        deterministic: must the gradients have the same bits on every run (True), need they not (False), or as
            ``torch.use_deterministic_algorithms`` says when they are computed (``None``)? ``attention`` sets it. A spec that is
            combined with another loses it.
        tensors: the tensors that the terms name, by reference. Two specs are equal if they hold the very same tensors.

    Raises:
        InvalidInput: a bound that is no int, an unknown alignment, or terms that cannot be combined.
    """

    upper: int | None = None
    lower: int | None = None
    align: str = "bottom_right"
    score: tuple[str, ...] = ()
    sink: bool = False
    segment: bool = False
    row: bool = False
    dense: bool = False
    dropout: str = ""
    tensors: Tensors = dataclasses.field(default=NO_TENSORS, repr=False)
    plan: str = ""
    versions: tuple[Any, ...] = dataclasses.field(default=(), repr=False)
    returns: str = ""
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        check_bound("upper", self.upper)
        check_bound("lower", self.lower)
        if self.score != ():
            check_score(self.score)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        check_flag("deterministic", self.deterministic, or_none=True)
        for name in ("dropout", "plan", "returns"):
            if not isinstance(getattr(self, name), str):
                raise InvalidInput(f"{name} must be a string, got {got(getattr(self, name))}.")
        if self.dropout:
            _number(f"dropout:{self.dropout}", "dropout", self.dropout)
        if not isinstance(self.tensors, Tensors):
            raise InvalidInput(f"tensors must be a tilewise.spec.Tensors, got {got(self.tensors)}.")
        if self.returns and self.returns not in RETURNS:
            raise InvalidInput(f"returns is {self.returns!r}, expected '' or one of {', '.join(map(repr, RETURNS))}.")
        if self.align not in ALIGNMENTS:
            raise InvalidInput(f"align is {self.align!r}, expected one of {', '.join(map(repr, ALIGNMENTS))}.")
        if not self.has_positions:
            object.__setattr__(self, "align", "bottom_right")

    def _value(self) -> tuple[object, ...]:
        terms = (self.sink, self.segment, self.row, self.dense, self.dropout, self.plan, self.returns, self.deterministic)
        return (self.upper, self.lower, self.align, self.score, *terms, *(None if t is None else id(t) for t in self.tensors))

    def __eq__(self, other: object) -> bool:
        return self._value() == other._value() if isinstance(other, Spec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._value())

    @property
    def has_positions(self) -> bool:
        """Does any term depend on the position of a query, and so on the alignment?"""
        placed = any(name in ("alibi", "fn") for name in self.steps)
        return self.upper is not None or self.lower is not None or placed

    @property
    def form(self) -> Spec:
        """The spec without its tensors: what its string says."""
        return dataclasses.replace(self, tensors=NO_TENSORS, versions=())

    @property
    def softcap(self) -> float | None:
        """The cap of the softcap step; ``None`` without one."""
        return next((float(step[8:]) for step in self.score if step.startswith("softcap:")), None)

    @property
    def function(self) -> str | None:
        """The step that is a function of the user's own, whole; ``None`` without one."""
        return next((step for step in self.score if step.startswith("fn:")), None)

    @property
    def natural(self) -> bool:
        """May scores be so large that they must stay natural, because times log2(e) they would overflow?"""
        return any(name in ("bias", "fn") for name in self.steps)

    @property
    def p_dropout(self) -> float:
        """The probability with which a weight is dropped."""
        return float(self.dropout or 0.0)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the score steps, in their order."""
        return tuple(step.partition(":")[0] for step in self.score)

    @property
    def terms(self) -> tuple[str, ...]:
        """The names (out of ``TERMS``) of everything besides bounds."""
        flags = tuple(name for name in _FLAGS if getattr(self, name))
        return (*self.steps, *flags, *(("dropout",) if self.dropout else ()))

    @property
    def slots(self) -> tuple[str, ...]:
        """The names (out of ``SLOTS``) of the tensors that the terms need."""
        named = tuple(slot for term in self.terms for slot in _SLOTS_OF.get(term, ()))
        if self.function is not None:
            named += FN_SLOTS[: int(self.function.partition("@")[0].rpartition("/")[2])]
        return (*named, "plan") if self.plan else named

    def __and__(self, other: Spec) -> Spec:
        if not isinstance(other, Spec):
            return NotImplemented
        placed = [s for s in (self, other) if s.has_positions]
        if len({s.align for s in placed}) > 1:
            raise InvalidInput(
                f"cannot combine a mask aligned {self.align!r} with one aligned {other.align!r}: "
                "their positions differ. Build both with the same align."
            )
        twice = [name for name in self.terms if name in other.terms and name in _ADVICE]
        if twice:
            raise InvalidInput(f"cannot combine two specs that both have {twice[0]}: a spec has at most one. {_ADVICE[twice[0]]}")
        least = [b for b in (self.upper, other.upper) if b is not None]
        widest = [b for b in (self.lower, other.lower) if b is not None]
        return Spec(
            min(least, default=None),
            min(widest, default=None),
            placed[0].align if placed else "bottom_right",
            (*self.score, *other.score),
            self.sink or other.sink,
            self.segment or other.segment,
            self.row or other.row,
            self.dense or other.dense,
            self.dropout or other.dropout,
            Tensors(*(_of_both(slot, a, b) for slot, a, b in zip(SLOTS, self.tensors, other.tensors, strict=True))),
        )

    def __str__(self) -> str:
        # index() makes a plain int of a size that torch.compile traces as a symbol.
        bounds = (("upper", self.upper), ("lower", self.lower))
        parts = [f"{name}:{operator.index(value)}" for name, value in bounds if value is not None]
        if self.has_positions:
            parts.append(f"align:{self.align}")
        parts += self.score
        parts += [name for name in _FLAGS if getattr(self, name)]
        if self.dropout:
            parts.append(f"dropout:{self.dropout}")
        if self.plan:
            parts.append(f"plan:{self.plan}")
        if self.returns:
            parts.append(f"returns:{self.returns}")
        if self.deterministic is not None:
            parts.append(f"deterministic:{'yes' if self.deterministic else 'no'}")
        return ",".join(parts) if parts else "full"

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Spec:
        """The spec that ``str`` made this text from, without tensors. Also reads ``causal`` (for ``upper:0``)."""
        fields: dict[str, Any] = {}
        score: list[str] = []
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            if name in fields or any(step.partition(":")[0] == name for step in score):
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
            elif name in ("align", "plan", "returns"):
                fields[name] = value
            elif name == "deterministic" and value in ("yes", "no"):
                fields[name] = value == "yes"
            elif name == "softcap":
                score.append(f"softcap:{_number(text, name, value)!r}")
            elif name == "fn" and FN_STEP.fullmatch(value):
                score.append(f"fn:{value}")
            elif name in ("alibi", "bias") and not value:
                score.append(name)
            elif name in _FLAGS and not value:
                fields[name] = True
            elif name == "dropout":
                p = _number(text, name, value)
                fields[name] = repr(p) if p else ""
            else:
                raise InvalidInput(
                    f"mask {text!r}: unknown term {part.strip()!r}. "
                    "Expected 'full', 'causal', or 'upper:INT', 'lower:INT', 'align:NAME', 'softcap:NUMBER', 'alibi', 'bias', "
                    "'fn:NAME/TENSORS@HASH', 'sink', 'segment', 'row', 'dense' and 'dropout:NUMBER' joined by commas."
                )
        return Spec(**fields, score=tuple(score))

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
        if check_bound(f"window's {name}", value) is not None and value is not None and value < -1:
            raise InvalidInput(
                f"window's {name} is {value}, expected None (unbounded) or an int of at least -1 "
                "(0 keeps self only on that side, -1 drops self too). For bounds past self use spec=Spec(upper=..., lower=...)."
            )
    return Spec(upper=right, lower=left, align=align)


def spec_of(causal_flag: bool, window_pair: tuple[int | None, int | None] | None, align: str | None) -> Spec:
    """The spec of the keyword arguments ``causal``, ``window`` and ``align`` of the public functions."""
    check_flag("causal", causal_flag)
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
