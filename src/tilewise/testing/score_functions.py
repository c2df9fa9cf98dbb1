"""Score functions for tests and ``tilewise check``, and ``check_score_fn``, which holds a function of your own to its twin."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from ..arch import runtime
from ..errors import BackendRefused, InvalidInput
from ..functions import ScoreFunction, check_fresh, function_of, score_fn
from ..spec import FN_SLOTS, Spec
from .tolerance import Mismatch

__all__ = ["EXAMPLES", "check_score_fn", "example"]

_CAP, _REACH, _STEP = 3.0, 40, 1e-5


def _rational_cap(score, batch, head, q_pos, kv_pos):
    return _CAP * score / (_CAP + score.abs())


def _relative(score, batch, head, q_pos, kv_pos, table):
    return score + table[head, (kv_pos - q_pos).clamp(-_REACH, _REACH) + _REACH]


def _tempered(score, batch, head, q_pos, kv_pos, scales, offsets):
    return score * scales[head] + offsets[batch, kv_pos]


def _rooted(score, batch, head, q_pos, kv_pos):
    return score * (q_pos - kv_pos + 1).to(score.dtype).sqrt() * 0.25


def _sparse(score, batch, head, q_pos, kv_pos):
    far = (kv_pos - q_pos + 1000) % 3 == 0
    return torch.where(far | (q_pos % 8 == 5), float("-inf"), score - 0.01 * (q_pos - kv_pos).abs())


def _drawn(name: str, batch: int, heads: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if name == "relative":
        return {"table": torch.randn(heads, 2 * _REACH + 1, generator=generator)}
    if name == "tempered":
        offsets = torch.randn(batch, 256, generator=generator)
        return {"scales": torch.rand(heads, generator=generator) * 2 - 0.5, "offsets": offsets}
    return {}


# The twin, and the name of the derivative or 1.0.
EXAMPLES: dict[str, tuple[Any, str | float]] = {
    "rational_cap": (_rational_cap, "rational_cap_slope"),
    "relative": (_relative, 1.0),
    "tempered": (_tempered, "tempered_slope"),
    "rooted": (_rooted, "rooted_slope"),
    "sparse": (_sparse, 1.0),
}


def example(name: str, batch: int, heads: int, generator: torch.Generator | None = None) -> Spec:
    """The step of one of ``EXAMPLES``, with tensors for keys up to 256; without a Triton function where there is no Triton."""
    twin, slope = EXAMPLES[name]
    tensors = _drawn(name, batch, heads, generator or torch.Generator().manual_seed(0))
    if importlib.util.find_spec("triton") is None:
        return score_fn(None, twin=twin, tensors=tensors, name=name)
    from ..backends.triton import examples

    derivative = getattr(examples, slope) if isinstance(slope, str) else slope
    return score_fn(getattr(examples, name), twin=twin, derivative=derivative, tensors=tensors)


def check_score_fn(
    spec: Spec,
    *,
    batch: int = 2,
    heads: int = 2,
    seqlen_q: int = 37,
    seqlen_k: int = 53,
    scores: tuple[float, float] = (-10.0, 10.0),
    rtol: float = 1e-4,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> None:
    """Hold a score function, its twin and its derivative against one another, and the derivative to finite differences.

    Scores are drawn evenly between the two numbers ``scores``, for every pair of a call of these sizes. The Triton function runs on
    tiles as in the kernels, in both orders of their dims, in float32; the twin runs in float64. Numbers may differ by
    ``rtol (1 + |twin|)``; ``-inf`` must be in the same places. Where the twin has a kink, or hides the key, the derivative may be
    anything.

    Args:
        spec: what ``tilewise.score_fn`` gave, alone or in a spec with other terms (which play no part).
        batch, heads, seqlen_q, seqlen_k: of the call; the function's tensors must be right for them.
        device: where. Default: that of the function's tensors; without any a GPU if there is one, or else the CPU.

    Raises:
        Mismatch: two of them disagree; the message says where.
        InvalidInput: the spec has no function, or an argument of the twin came back in another shape.
        BackendRefused: the Triton function cannot run on this device: on a CPU it needs TRITON_INTERPRET=1.
    """
    if spec.function is None:
        raise InvalidInput(f"the spec has no score function: {spec}.")
    check_fresh(spec)
    function = function_of(spec)
    tensors = [getattr(spec.tensors, slot) for slot in FN_SLOTS if slot in spec.slots]
    default = tensors[0].device if tensors else "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(default if device is None else device)
    shape = (batch, heads, seqlen_q, seqlen_k)
    generator = torch.Generator().manual_seed(seed)
    s = (torch.rand(shape, generator=generator) * (scores[1] - scores[0]) + scores[0]).to(where)
    places = [torch.arange(n, device=where).view([-1 if dim == at else 1 for dim in range(4)]) for at, n in enumerate(shape)]
    places[2] = places[2] + spec.q_start(seqlen_q, seqlen_k)
    against = _Against(function, s, places, tensors, rtol)
    against.check_twin()
    if function.fn is not None:
        if where.type == "cpu" and not runtime().interpret:
            raise BackendRefused(
                f"score function {function.name!r} cannot run on a CPU outside Triton's interpreter: set TRITON_INTERPRET=1 before "
                "Triton is imported, or check it on a GPU."
            )
        against.check_fn(spec)


class _Against:
    """One function at one set of scores and places."""

    def __init__(
        self, function: ScoreFunction, s: torch.Tensor, places: list[torch.Tensor], tensors: list[torch.Tensor], rtol: float
    ):
        self.function, self.s, self.places, self.tensors, self.rtol = function, s, places, tensors, rtol
        self.wide = s.double()
        self.want = self._twin(self.wide)
        step = _STEP * (1 + self.wide.abs())
        above, below = self._twin(self.wide + step), self._twin(self.wide - step)
        self.difference = (above - below) / (2 * step)
        shown = torch.stack([self.want, above, below]).isfinite().all(0)
        kink = ((above - self.want) / step - (self.want - below) / step).abs() > 1e-2 * (1 + self.difference.abs())
        self.smooth = shown & ~kink

    def _twin(self, s: torch.Tensor) -> torch.Tensor:
        return self.function.scores(s, *self.places, *self.tensors)

    def _hold(
        self, what: str, got: torch.Tensor, than: str, want: torch.Tensor, where: torch.Tensor | None = None
    ) -> None:
        """Raise Mismatch where ``got`` is not ``want``."""
        got, want = got.double(), want.double()
        same = (got == want) | ((got - want).abs() <= self.rtol * (1 + want.abs()))
        wrong = ~same if where is None else ~same & where
        if bool(wrong.any()):
            at = tuple(int(i) for i in torch.unravel_index(wrong.flatten().to(torch.uint8).argmax(), wrong.shape))
            b, h, q, k = (int(p.flatten()[i]) for p, i in zip(self.places, at, strict=True))
            raise Mismatch(
                f"score function {self.function.name!r}: {what} is {float(got[at]):.9g} and {than} {float(want[at]):.9g} at score "
                f"{float(self.s[at]):.9g}, batch {b}, head {h}, q_pos {q}, kv_pos {k} ({int(wrong.sum())} of {wrong.numel()})."
            )

    def check_twin(self) -> None:
        """The twin: no NaN, elementwise, and with the derivative that it is said to have."""
        if bool(self.want.isnan().any()):
            self._hold("the twin", self.want, "should be", torch.zeros_like(self.want), self.want.isnan())
        alone = self.function.scores(
            self.wide[:, :, 1::2, ::3], *self.places[:2], self.places[2][:, :, 1::2], self.places[3][..., ::3], *self.tensors
        )
        part = self.want.clone()
        part[:, :, 1::2, ::3] = alone
        self._hold("the twin on some of the pairs", part, "on all of them", self.want)
        slopes = self.function.slopes(self.wide, *self.places, *self.tensors)
        slopes = torch.ones_like(self.wide) if slopes is None else slopes
        named = "twin_derivative" if self.function.twin_derivative else "autograd"
        named = "derivative=1.0" if self.function.constant_slope else named
        self._hold(named, slopes, "the finite difference of the twin is", self.difference, self.smooth)

    def check_fn(self, spec: Spec) -> None:
        """The Triton function and its derivative, on tiles in both orders of their dims."""
        from ..backends.triton.functions import apply

        for keys_first in (False, True):
            order = "[keys, queries]" if keys_first else "[queries, keys]"
            out, slopes = apply(spec, self.s, keys_first)
            self._hold(f"fn on tiles {order}", out, "the twin", self.want)
            if slopes is not None:
                what = f"derivative on tiles {order}"
                self._hold(what, slopes, "the finite difference of the twin is", self.difference, self.smooth)
