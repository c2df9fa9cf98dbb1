"""``Call``: the tensors and arguments of one attention, and what a backend makes of them, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..api import attention
from ..capabilities import refuse
from ..problem import Problem
from ..select import capability
from ..spec import Spec

__all__ = ["OUTPUTS", "Call", "evaluate", "fit", "random_call"]

OUTPUTS = ("o", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class Call:
    """One attention and the gradients that flow back into it.

    ``do`` is the gradient of o and ``dlse`` that of lse; ``None`` means that the loss does not use that output. With both
    ``None`` only the forward pass is run.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: Spec = Spec()
    sm_scale: float | None = None
    do: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    precision: str | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.sm_scale is None else self.sm_scale

    @property
    def has_gradient(self) -> bool:
        return self.do is not None or self.dlse is not None

    @property
    def problem(self) -> Problem:
        """The problem that ``attention`` would bind, with all gradients wanted."""
        also = tuple(t for t in (self.do,) if t is not None)
        grad = "qkv" if self.has_gradient else ""
        return Problem.bind(self.q, self.k, self.v, self.spec, self.sm_scale, self.precision, grad, also)

    def replace(self, **changes: object) -> Call:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def part(self, batch: slice, heads: slice) -> Call:
        """The same attention over some batches and key heads (with their query heads): slices with a step of 1, no negatives."""
        group = self.q.shape[1] // self.k.shape[1]
        first, last, _ = heads.indices(self.k.shape[1])
        rows = slice(first * group, last * group)
        return self.replace(
            q=self.q[batch, rows],
            k=self.k[batch, heads],
            v=self.v[batch, heads],
            do=None if self.do is None else self.do[batch, rows],
            dlse=None if self.dlse is None else self.dlse[batch, rows],
        )


def evaluate(call: Call, backend: str | Callable[..., tuple[torch.Tensor, torch.Tensor]] = "auto") -> dict[str, torch.Tensor]:
    """``o`` and ``lse``, and ``dq``, ``dk``, ``dv`` where the call has a gradient, as a backend computes them.

    Args:
        call: what to compute.
        backend: a name that ``tilewise.attention`` takes, or a function of your own with the signature
            ``(q, k, v, *, spec, sm_scale, precision) -> (o, lse)`` that autograd can go through.
    """
    q, k, v = (t.detach().requires_grad_(call.has_gradient) for t in (call.q, call.k, call.v))
    arguments = {"spec": call.spec, "sm_scale": call.sm_scale, "precision": call.precision}
    if callable(backend):
        o, lse = backend(q, k, v, **arguments)
    else:
        o, lse = attention(q, k, v, return_lse=True, backend=backend, **arguments)
    out = {"o": o.detach(), "lse": lse.detach()}
    if call.has_gradient:
        used = [(t, g) for t, g in ((o, call.do), (lse, call.dlse)) if g is not None]
        grads = torch.autograd.grad([t for t, _ in used], (q, k, v), [g for _, g in used], allow_unused=True)
        pairs = zip(("dq", "dk", "dv"), (q, k, v), grads, strict=True)
        out.update({name: torch.zeros_like(t) if g is None else g for name, t, g in pairs})
    return out


def fit(call: Call, backend: str) -> Call | None:
    """The part of a call that the capability table lets a backend take: all of it, its forward pass, or nothing."""
    row = capability(backend)
    forward = call.replace(do=None, dlse=None)
    return next((c for c in (call, forward) if not refuse(row, c.problem)), None)


def random_call(
    shape: tuple[int, int, int, int, int, int, int],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spec: Spec | None = None,
    sm_scale: float | None = None,
    dlse: bool = False,
    precision: str | None = None,
    amplitude: float = 1.0,
) -> Call:
    """A call with normal entries, drawn on the CPU in float32 and rounded to the dtype, so that every device sees the same numbers.

    ``shape`` is ``(batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v)``.
    """
    batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * scale).to(dtype).to(device)

    q = draw(batch, heads_q, seqlen_q, head_dim, scale=amplitude)
    k = draw(batch, heads_kv, seqlen_k, head_dim, scale=amplitude)
    v = draw(batch, heads_kv, seqlen_k, head_dim_v, scale=amplitude)
    do = draw(batch, heads_q, seqlen_q, head_dim_v)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    gradient = draw(batch, heads_q, seqlen_q).to(lse_dtype) if dlse else None
    return Call(q, k, v, spec or Spec(), sm_scale, do, gradient, precision)
