"""``Call``: the tensors and arguments of one attention, and what a backend makes of them, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..api import attention
from ..capabilities import refuse
from ..errors import InvalidInput
from ..operands import DIMS, full_rank
from ..problem import GRADIENTS, Problem, grad_letters
from ..second_pass import attention_weights, column_sums
from ..select import capability
from ..spec import SLOTS, Spec, Tensors

__all__ = ["OUTPUTS", "TRAINED", "Call", "chosen_rows", "evaluate", "fit", "leaves_of", "random_call", "spec_with"]

OUTPUTS = ("o", "lse", "dq", "dk", "dv")
TRAINED = ("bias", "slopes", "sink")  # tensors of a spec that get a gradient: "dbias", "dslopes", "dsink" are further outputs


@dataclass(frozen=True, eq=False)
class Call:
    """One attention and the gradients that flow back into it.

    ``do`` is the gradient of o and ``dlse`` that of lse; ``None`` means that the loss does not use that output. With both
    ``None`` only the forward pass is run. ``returns`` names what is wanted besides o and lse (out of ``spec.RETURNS``),
    ``fixed`` the tensors of the spec (out of ``TRAINED``) whose gradient nobody wants, ``deterministic`` what ``attention`` is
    told.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: Spec = Spec()
    sm_scale: float | None = None
    do: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    precision: str | None = None
    returns: str = ""
    fixed: tuple[str, ...] = ()
    deterministic: bool | None = None

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
        trained = (getattr(self.spec.tensors, name) is not None and name not in self.fixed for name in TRAINED)
        grad = grad_letters(True, True, True, *trained) if self.has_gradient else ""
        spec = dataclasses.replace(self.spec, returns=self.returns, deterministic=self.deterministic)
        return Problem.bind(self.q, self.k, self.v, spec, self.sm_scale, self.precision, grad, also)

    def replace(self, **changes: object) -> Call:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def part(self, batch: slice, heads: slice) -> Call:
        """The same attention over some batches and key heads (with their query heads): slices with a step of 1, no negatives.

        Not with dropout, whose mask depends on the number of the batch entry and on the head, nor with a score function, which may.
        """
        if self.spec.function is not None:
            raise InvalidInput("a call with a score function has no parts: the function would see other batches and heads.")
        if self.spec.dropout:
            raise InvalidInput("a part of a call with dropout has other masks than the whole: take the spec's dropout away first.")
        group = self.q.shape[1] // self.k.shape[1]
        first, last, _ = heads.indices(self.k.shape[1])
        rows = slice(first * group, last * group)
        at = {"b": batch, "h": rows}

        def cut(slot: str, t: torch.Tensor | None) -> torch.Tensor | None:
            if t is None:
                return None
            t = full_rank(slot, t)
            return t[tuple(slice(None) if n == 1 else at.get(x, slice(None)) for x, n in zip(DIMS[slot], t.shape, strict=True))]

        parts = Tensors(*(cut(slot, t) for slot, t in zip(SLOTS, self.spec.tensors, strict=True)))
        return self.replace(
            spec=dataclasses.replace(self.spec, tensors=parts),
            q=self.q[batch, rows],
            k=self.k[batch, heads],
            v=self.v[batch, heads],
            do=None if self.do is None else self.do[batch, rows],
            dlse=None if self.dlse is None else self.dlse[batch, rows],
        )


def evaluate(call: Call, backend: str | Callable[..., tuple[torch.Tensor, torch.Tensor]] = "auto") -> dict[str, torch.Tensor]:
    """``o`` and ``lse``, what the call ``returns`` besides, and every gradient where it has one, as a backend computes them.

    Args:
        call: what to compute.
        backend: a name that ``tilewise.attention`` takes, or a function of your own with the signature
            ``(q, k, v, *, spec, sm_scale, precision) -> (o, lse)`` that autograd can go through (for calls that return no more).
    """
    leaves = leaves_of(call)
    q, k, v = leaves["dq"], leaves["dk"], leaves["dv"]
    arguments = {"spec": spec_with(call.spec, leaves), "sm_scale": call.sm_scale, "precision": call.precision}
    more: dict[str, torch.Tensor] = {}
    mode = call.deterministic
    if callable(backend):
        o, lse = backend(q, k, v, **arguments)
    elif call.returns == "max_logit":
        wanted = {"return_lse": True, "return_max_logit": True}
        o, lse, more["max_logit"] = attention(q, k, v, backend=backend, deterministic=mode, **wanted, **arguments)
    else:
        o, lse = attention(q, k, v, return_lse=True, backend=backend, deterministic=mode, **arguments)
    if isinstance(backend, str) and call.returns in ("weights", "column_sums"):
        with torch.no_grad():
            if call.returns == "weights":
                more["weights"] = attention_weights(q, k, lse, rows=chosen_rows(call), backend=backend, **arguments)
            else:
                more["column_sums"] = column_sums(q, k, lse, backend=backend, **arguments)
    out = {"o": o.detach(), "lse": lse.detach(), **more}
    if call.has_gradient:
        used = [(t, g) for t, g in ((o, call.do), (lse, call.dlse)) if g is not None]
        grads = torch.autograd.grad([t for t, _ in used], list(leaves.values()), [g for _, g in used], allow_unused=True)
        out.update({n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)})
    return out


def chosen_rows(call: Call) -> torch.Tensor:
    """The queries whose weights a call wants: every third, from the last, so neither ascending nor evenly placed in tiles."""
    return torch.arange(call.q.shape[2] - 1, -1, -3, device=call.q.device)


def leaves_of(call: Call, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """All that may get a gradient, by the name of that gradient, as leaves; ``dtype`` changes their dtype."""
    trained = (name for name in TRAINED if name not in call.fixed)
    named = {"dq": call.q, "dk": call.k, "dv": call.v, **{f"d{name}": getattr(call.spec.tensors, name) for name in trained}}
    there = {name: t.detach() for name, t in named.items() if t is not None}
    return {name: (t if dtype is None else t.to(dtype)).requires_grad_(call.has_gradient) for name, t in there.items()}


def spec_with(spec: Spec, leaves: dict[str, torch.Tensor]) -> Spec:
    """The spec with these leaves in place of its own tensors."""
    mine = {name: leaves[f"d{name}"] for name in TRAINED if f"d{name}" in leaves}
    return dataclasses.replace(spec, tensors=spec.tensors._replace(**mine))


def fit(call: Call, backend: str) -> Call | None:
    """The part of a call that the capability table lets a backend take: all of it, all but gradients of the spec's tensors that it
    does not have, its forward pass, or nothing."""
    row = capability(backend)
    lacking = tuple(name for letter, name in GRADIENTS.items() if name in TRAINED and letter not in row.gradients)
    parts = (call, call.replace(fixed=lacking), call.replace(do=None, dlse=None))
    return next((c for c in parts if not refuse(row, c.problem)), None)


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
