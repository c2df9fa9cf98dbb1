"""Score steps and sinks on tiles of plain PyTorch: what a spec does to a tile of scores, and the gradients of its tensors.

Scores of a tile are in base two (``s log2(e)``), or natural where the spec has a bias or a function of the user's own: times
log2(e) the lowest finite value would overflow to -inf, and a row of it would be taken for an empty one.
"""

from __future__ import annotations

import math

import torch

from ..bodies import alibi, softcap_slope
from ..functions import function_of
from ..problem import Problem
from ..spec import FN_SLOTS, Tensors

__all__ = ["At", "TileScores"]

_LOG2E = math.log2(math.e)
At = tuple[slice, slice, slice, slice]  # batches, key heads, query heads of each key head, queries


class TileScores:
    """The score steps of one call. Tiles are (batches * key heads, group * queries, keys)."""

    def __init__(self, problem: Problem, tensors: Tensors, dtype: torch.dtype, natural: bool = False):
        self.problem, self.dtype = problem, dtype
        self.steps = problem.spec.steps
        self.natural = natural or problem.spec.natural
        self.unit = 1.0 if self.natural else _LOG2E
        self.cap = (problem.spec.softcap or 0.0) * self.unit
        self.bias = self._grouped(tensors.bias)
        self.slopes = None if tensors.slopes is None else self._grouped(tensors.slopes.to(dtype) * self.unit)
        self.sink = None if tensors.sink is None else self._grouped(tensors.sink.to(dtype))
        self.function = function_of(problem.spec) if problem.spec.function is not None else None
        self.given = tuple(getattr(tensors, slot) for slot in FN_SLOTS if slot in problem.spec.slots)
        self.positions: torch.Tensor | None = None  # of the queries, where they do not follow one another

    def _grouped(self, t: torch.Tensor | None) -> torch.Tensor | None:
        """(batch or 1, heads_q or 1, ...) as (batch or 1, heads_kv or 1, group or 1, ...): a view."""
        if t is None:
            return None
        return t[:, :, None] if t.shape[1] == 1 else t.unflatten(1, (self.problem.heads_kv, self.problem.group))

    @staticmethod
    def _part(t: torch.Tensor, at: tuple[slice, ...]) -> torch.Tensor:
        """The part of ``t`` at these slices (a view); a dim of size 1 stands for all."""
        return t[tuple(slice(None) if size == 1 else s for size, s in zip(t.shape, at, strict=True))]

    @staticmethod
    def _sizes(at: tuple[slice, ...]) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in at)

    def _distance(self, queries: slice, keys: slice, device: torch.device) -> torch.Tensor:
        start = self.problem.q_start
        if self.positions is None:
            q_pos = torch.arange(queries.start + start, queries.stop + start, device=device, dtype=self.dtype)[:, None]
        else:
            q_pos = self.positions[queries].to(self.dtype)[:, None]
        return (q_pos - torch.arange(keys.start, keys.stop, device=device, dtype=self.dtype)).abs_()

    def _places(self, at: At, keys: slice, device: torch.device) -> tuple[torch.Tensor | None, ...]:
        """What a score function takes beside the scores: indices and positions that broadcast to a tile, and its tensors."""
        batch, heads, group, queries = at
        numbers = [torch.arange(part.start, part.stop, device=device) for part in (batch, heads, group, queries, keys)]
        b, h, g, q, k = (n.view([-1 if dim == place else 1 for dim in range(5)]) for place, n in enumerate(numbers))
        q_pos = q + self.problem.q_start if self.positions is None else self.positions[queries][:, None]
        return b, h * self.problem.group + g, q_pos, k, *self.given

    def apply(self, s: torch.Tensor, at: At, keys: slice, backward: bool = False) -> list[torch.Tensor | None]:
        """Change the scores in place. Returns the derivative of each step, in their order, if ``backward``; ``None``: it is 1."""
        slopes: list[torch.Tensor | None] = []
        for step in self.steps:
            tile = s.view(*self._sizes((*at, keys)))
            slope = None
            if step == "softcap":
                s.div_(self.cap).tanh_()
                slope = softcap_slope(s) if backward else None
                s.mul_(self.cap)
            elif step == "alibi" and self.slopes is not None:
                by = self._part(self.slopes, at[:3])[..., None, None]
                tile.copy_(alibi(tile, by, self._distance(at[3], keys, s.device)))
            elif step == "fn" and self.function is not None:
                places = self._places(at, keys, s.device)
                slope = self.function.slopes(tile, *places) if backward else None
                slope = slope if slope is None else slope.reshape(s.shape)
                tile.copy_(self.function.scores(tile, *places))
            elif self.bias is not None:
                tile.add_(self._part(self.bias, (*at, keys)))
            slopes.append(slope)
        return slopes

    def before(self, ds: torch.Tensor, slopes: list[torch.Tensor | None], step: str = "") -> torch.Tensor:
        """The gradient of the scores as ``step`` left them (by default: as the first one found them), from that after all."""
        first = self.steps.index(step) + 1 if step else 0
        for name, slope in zip(self.steps[first:], slopes[first:], strict=True):
            if slope is not None and name == "fn":
                # Where a key has no weight the derivative may be anything.
                ds = torch.where(ds == 0, 0.0, ds * slope)
            elif slope is not None:
                ds = ds * slope
        return ds

    def weights(self, s: torch.Tensor, pivot: torch.Tensor, log_l: torch.Tensor | None = None) -> torch.Tensor:
        """``exp(s - pivot)`` in place, whatever the unit of both, divided by ``2 ** log_l`` if that is given."""
        s.sub_(pivot)
        if self.natural:
            s.mul_(_LOG2E)
        if log_l is not None:
            s.sub_(log_l)
        return s.exp2_()

    def sink_at(self, at: At, like: torch.Tensor) -> torch.Tensor:
        """The sinks of a tile's rows (heads, rows, 1), natural."""
        if self.sink is None:
            return torch.full_like(like, float("-inf"))
        part = self._part(self.sink, at[:3])[..., None]
        return part.expand(*self._sizes(at)).reshape(like.shape)


class TileGradients:
    """Sums of the gradients of bias, slopes and sink, in the dtype of the work; ``finish`` writes them out."""

    def __init__(self, scores: TileScores, grads: Tensors):
        self.scores, self.grads = scores, grads
        self._sums: dict[str, torch.Tensor] = {}
        for name in ("bias", "slopes", "sink"):
            out = getattr(grads, name)
            if out is not None:
                fits = out.dtype == scores.dtype
                self._sums[name] = out.zero_() if fits else torch.zeros(out.shape, dtype=scores.dtype, device=out.device)

    @property
    def of_scores(self) -> bool:
        """Does any of them need the gradient of the scores?"""
        return "bias" in self._sums or "slopes" in self._sums

    def _sum(self, name: str) -> torch.Tensor | None:
        return self.scores._grouped(self._sums.get(name))

    def add(self, ds: torch.Tensor, slopes: list[torch.Tensor | None], at: At, keys: slice) -> None:
        """``ds``: the gradient of a tile's scores after all steps. ``slopes``: the derivatives of the steps."""
        sizes = self.scores._sizes((*at, keys))
        total = self._sum("bias")
        if total is not None:
            part = self.scores._part(total, (*at, keys))
            part.add_(self.scores.before(ds, slopes, "bias").view(sizes).sum_to_size(part.shape))
        total = self._sum("slopes")
        if total is not None:
            part = self.scores._part(total, at[:3])
            distance = self.scores._distance(at[3], keys, ds.device)
            weighed = self.scores.before(ds, slopes, "alibi").view(sizes) * distance
            part.sub_(weighed.sum((-1, -2)).sum_to_size(part.shape))

    def add_sink(self, sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, at: At) -> None:
        """The sink's weight is ``exp(sink - lse)`` and its value is 0. ``delta`` is 0 for a row without any logit."""
        total = self._sum("sink")
        if total is not None:
            weight = torch.exp(sink - torch.where(lse == float("-inf"), 0.0, lse))
            part = self.scores._part(total, at[:3])
            part.sub_((weight * delta).view(self.scores._sizes(at)).sum(-1).sum_to_size(part.shape))

    def finish(self) -> None:
        for name, total in self._sums.items():
            out = getattr(self.grads, name)
            if out.dtype != total.dtype:
                out.copy_(total)
