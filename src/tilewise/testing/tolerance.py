"""The one comparison: every test, and ``tilewise check``, holds every backend to this bound and to no other.

The oracle takes the very inputs that the backend got (drawn in the tested dtype), widened to float64, and is never rounded back.
An output is right if

- its shape and dtype are right and it holds no NaN and no infinity that the oracle does not have;
- rows that see no key are exactly ``o = 0``, ``lse = -inf``, ``dq = 0``, and keys that nobody sees have exactly ``dk = dv = 0``;
- its largest error is at most ``2 * plain + rounding``, and so is the RMS error of every head.

``plain`` is the error that plain PyTorch makes with the dense formula in the same dtype (for lse, in the dtype of lse).
``rounding`` bounds what a different but equally careful order of operations may add. A score of reduction length L is uncertain
by ``(1 + sqrt(L) / 4) eps_acc / 2`` of its size, a probability by that and by ``eps_in / 2`` (it may be rounded to the input
dtype), and these are carried through the formula: independent errors add up as the root of the sum of their squares, those that
all keys of a row share as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..errors import AttentionError
from ..reference import mask_of, reference
from .calls import OUTPUTS, Call

__all__ = ["Mismatch", "Result", "Yardstick", "compare", "raise_if_failed", "round_to_tf32"]

EPS_TF32 = 2.0**-10


class Mismatch(AttentionError, AssertionError):
    """An output differs from the oracle by more than the bound."""


@dataclass(frozen=True)
class Result:
    """The verdict on one output: ``error`` and ``bound`` are the largest absolute ones, ``where`` explains a failure."""

    name: str
    output: str
    error: float
    bound: float
    ok: bool
    where: str = ""

    @property
    def used(self) -> float:
        """The share of the bound that the error uses; infinite for a failure, so that the worst result has the largest."""
        if not self.ok:
            return float("inf")
        return self.error / self.bound if self.bound else 0.0

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"FAILED: {self.where}"
        return f"{self.name} {self.output}: error {self.error:.2e}, bound {self.bound:.2e}, {verdict}"

    def raise_if_failed(self) -> None:
        if not self.ok:
            raise Mismatch(str(self))


def raise_if_failed(results: list[Result]) -> None:
    """Raise one ``Mismatch`` that lists every failed result."""
    failed = [r for r in results if not r.ok]
    if failed:
        raise Mismatch("\n".join(map(str, failed)))


def round_to_tf32(t: torch.Tensor) -> torch.Tensor:
    """float32 rounded to the 10 bits of mantissa that a TF32 product reads (to nearest, ties to even)."""
    bits = t.detach().contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return rounded.view(torch.float32).view(t.shape)


class _Tf32Product(torch.autograd.Function):
    """A matrix product whose operands are rounded to TF32, in both directions."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return round_to_tf32(a) @ round_to_tf32(b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = round_to_tf32(grad)
        return grad @ round_to_tf32(b).transpose(-1, -2), round_to_tf32(a).transpose(-1, -2) @ grad


@contextlib.contextmanager
def _full_precision_products() -> Iterator[None]:
    """Products in float32 are products in float32, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _repeat(t: torch.Tensor, heads: int) -> torch.Tensor:
    return t if t.shape[1] == heads or not t.shape[1] else t.repeat_interleave(heads // t.shape[1], dim=1)


def _fold(t: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum query heads into the key heads that they share."""
    return t if t.shape[1] == heads or not heads else t.unflatten(1, (heads, -1)).sum(2)


def _rss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The root of the sum of squares that a product sums: how independent errors of its terms add up."""
    return (a.square() @ b.square()).sqrt()


def _gradients(call: Call, o: torch.Tensor, lse: torch.Tensor, leaves: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """dq, dk, dv of ``o`` and ``lse`` under the call's gradients; rows with ``lse = -inf`` pass nothing back."""
    loss = o.new_zeros((), dtype=lse.dtype)
    if call.do is not None:
        loss = loss + (o.to(lse.dtype) * call.do.to(lse.dtype)).sum()
    if call.dlse is not None:
        loss = loss + torch.where(lse == float("-inf"), 0.0, lse * call.dlse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for n, t, g in zip(("dq", "dk", "dv"), leaves, grads, strict=True)}


def oracle(call: Call) -> dict[str, torch.Tensor]:
    """The float64 answer: o, lse and, where the call has a gradient, dq, dk, dv."""
    leaves = [t.detach().double().requires_grad_() for t in (call.q, call.k, call.v)]
    with torch.enable_grad():
        o, lse = reference(leaves[0], leaves[1], leaves[2], call.spec, call.scale)
        out = {"o": o.detach(), "lse": lse.detach()}
        if call.has_gradient:
            out.update(_gradients(call, o, lse, leaves))
    return out


def plain(call: Call) -> dict[str, torch.Tensor]:
    """The dense formula as plain PyTorch computes it in the inputs' dtype (with TF32 products for ``precision="tf32"``)."""
    heads = call.q.shape[1]
    product = cast(Callable[..., torch.Tensor], _Tf32Product.apply) if call.precision == "tf32" else torch.matmul
    ok = mask_of(call.spec, call.q.shape[2], call.k.shape[2], call.q.device)
    empty = ~ok.any(-1)

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        s = product(q, _repeat(k, heads).transpose(-1, -2))
        return (s * call.scale).masked_fill(~ok, float("-inf")).masked_fill(empty[..., None], 0.0)

    leaves = [t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v)]
    q, k, v = leaves
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.enable_grad(), _full_precision_products():
        s = scores(q, k)
        p = torch.softmax(s, dim=-1).masked_fill(empty[..., None], 0.0)
        o = product(p, _repeat(v, heads))
        lse = torch.logsumexp(s.to(wide), dim=-1).masked_fill(empty, float("-inf"))
        out = {"o": o.detach()}
        if call.has_gradient:
            out.update(_gradients(call, o, lse, leaves))
        with torch.no_grad():
            out["lse"] = torch.logsumexp(scores(q.to(wide), k.to(wide)), dim=-1).masked_fill(empty, float("-inf"))
    return out


def _rounding(call: Call, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rounding term of every element of every output (see the top of this file)."""
    heads, heads_kv = call.q.shape[1], call.k.shape[1]
    info = torch.finfo(call.q.dtype)
    eps_in = EPS_TF32 if call.precision == "tf32" else info.eps
    eps_acc = torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).eps
    if call.q.dtype == torch.float64:
        eps_in, eps_acc = 2 * eps_in, 2 * eps_acc  # the oracle rounds as much as the backend does
    # Below this an element of the dtype may be flushed to zero (float16 keeps its subnormals).
    floor = info.smallest_normal * (info.eps if call.q.dtype == torch.float16 else 1.0)
    length = max(call.q.shape[2], call.k.shape[2], call.q.shape[3], call.v.shape[3])
    score_unit = eps_acc / 2 * (1 + length**0.5 / 4) + (eps_in / 2 if call.precision == "tf32" else 0.0)

    ok = mask_of(call.spec, call.q.shape[2], call.k.shape[2], call.q.device)
    q, k, v = call.q.double(), _repeat(call.k.double(), heads), _repeat(call.v.double(), heads)
    lse = torch.where(expected["lse"] == float("-inf"), 0.0, expected["lse"])[..., None]
    s = torch.where(ok, (q @ k.transpose(-1, -2)) * call.scale, 0.0)
    p = torch.where(ok, torch.exp(s - lse), 0.0)
    size = abs(call.scale) * _rss(q, k.transpose(-1, -2))
    # Terms of one sign drift: D equal ones have |s| / size = sqrt(D), and their partial sums err by a multiple of D.
    drift = s.abs() * (s / torch.where(size == 0, 1.0, size)).square() / 8
    score = score_unit * (1 + s.abs() + size + drift)
    # What all keys of a row share: it does not average out over them.
    row = (p * score).sum(-1, keepdim=True) + score_unit * lse.abs()
    p_error = p * (score + row + eps_in / 2) + floor * ok
    out = {"o": _rss(p_error, v) + row * expected["o"].abs(), "lse": (score_unit + row)[..., 0]}
    if call.has_gradient:
        do = torch.zeros_like(expected["o"]) if call.do is None else call.do.double()
        dlse = torch.zeros_like(row) if call.dlse is None else call.dlse.double()[..., None]
        dp_size = _rss(do, v.transpose(-1, -2)) + (do @ v.transpose(-1, -2)).abs()
        delta_size = (do * expected["o"]).square().sum(-1, keepdim=True).sqrt() + dlse.abs()
        delta_size = delta_size + (do * expected["o"]).sum(-1, keepdim=True).abs()
        ds_error = p_error * (dp_size + delta_size) + floor * ok
        shared = (eps_in / 2 + row) * delta_size * (p @ k).abs() + row * expected["dq"].abs()
        out["dq"] = abs(call.scale) * (_rss(ds_error, k) + shared)
        out["dk"] = _fold((abs(call.scale) * _rss(ds_error.transpose(-1, -2), q)).square(), heads_kv).sqrt()
        out["dv"] = _fold(_rss(p_error.transpose(-1, -2), do).square(), heads_kv).sqrt()
    for name, term in out.items():
        if name != "lse":
            out[name] = term + eps_in / 2 * expected[name].abs()
    return out


def _rms(t: torch.Tensor) -> torch.Tensor:
    """Root of the mean square of every (batch, head)."""
    return t.flatten(2).square().mean(-1).sqrt()


def _at(t: torch.Tensor, index: int) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(index), t.shape))


class Yardstick:
    """What is right for one call, and how far an answer may be from it. Made once, it judges any number of backends."""

    def __init__(self, call: Call):
        self.call = call
        self.expected = oracle(call)
        rounding = {} if self._nothing else _rounding(call, self.expected)
        simple = {} if self._nothing else plain(call)
        self.bound: dict[str, float] = {}
        self.rms_bound: dict[str, torch.Tensor] = {}
        for name, want in self.expected.items():
            if self._nothing or want.numel() == 0:
                self.bound[name], self.rms_bound[name] = 0.0, want.new_zeros(want.shape[:2])
                continue
            error = torch.nan_to_num((simple[name].double() - want).abs(), 0.0, 0.0, 0.0)
            self.bound[name] = float(2 * error.max() + rounding[name].max())
            self.rms_bound[name] = 2 * _rms(error) + _rms(rounding[name])
        ok = mask_of(call.spec, call.q.shape[2], call.k.shape[2], call.q.device)
        if ok.dim() == 2:
            ok = ok[None, None]
        keys = ok.any(-2)
        if ok.shape[1] > 1:
            keys = keys.unflatten(1, (call.k.shape[1], -1)).any(2)
        # (batch or 1, heads or 1, seqlen, 1)
        self._silent = {"q": ~ok.any(-1, keepdim=True), "k": ~keys[..., None]}

    @property
    def _nothing(self) -> bool:
        """No score exists: every output is exactly known."""
        return 0 in (self.call.q.shape[0], self.call.q.shape[1], self.call.q.shape[2], self.call.k.shape[2])

    def judge(self, got: dict[str, torch.Tensor], name: str = "call") -> list[Result]:
        """One result for every output that the call has; an output that is missing has failed."""
        return [self._judge(name, output, got.get(output)) for output in OUTPUTS if output in self.expected]

    def _judge(self, name: str, output: str, got: torch.Tensor | None) -> Result:
        want, bound = self.expected[output], self.bound[output]

        def fail(why: str, error: float = float("inf")) -> Result:
            return Result(name, output, error, bound, False, why)

        q = self.call.q
        dtype = torch.promote_types(q.dtype, torch.float32) if output == "lse" else q.dtype
        if got is None:
            return fail(f"{output} is missing")
        if got.shape != want.shape or got.dtype != dtype:
            return fail(f"{output} is {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {dtype}")
        if want.numel() == 0:
            return Result(name, output, 0.0, bound, True)
        value = got.double()

        def spot(bad: torch.Tensor) -> str:
            index = _at(bad, int(bad.flatten().to(torch.uint8).argmax()))
            return f"{output}{list(index)} is {float(value[index]):.6g}, expected {float(want[index]):.6g}"

        if bool(value.isnan().any()):
            return fail(f"NaN: {spot(value.isnan())}")
        differ = value.isinf() & (value != want) | want.isinf() & (value != want)
        if bool(differ.any()):
            return fail(f"infinity in the wrong place: {spot(differ)}")
        silent = self._silent["k" if output in ("dk", "dv") else "q"]
        if output != "lse" and bool(silent.any()):
            loud = (value != 0) & silent
            if bool(loud.any()):
                return fail(f"not exactly 0 where nothing is seen: {spot(loud)}", float(value[loud].abs().max()))
        difference = torch.where(want.isinf(), 0.0, value - want).abs()
        worst = int(difference.flatten().argmax())
        index = _at(difference, worst)
        error = float(difference[index])
        text = f"{output}{list(index)} is {float(value[index]):.9g}, expected {float(want[index]):.9g}"
        if error > bound:
            return fail(f"{text}: error {error:.2e} exceeds {bound:.2e}", error)
        rms = _rms(difference)
        excess = rms - self.rms_bound[output]
        if bool((excess > 0).any()):
            head = _at(excess, int(excess.flatten().argmax()))
            limit = float(self.rms_bound[output][head])
            why = f"RMS error of (batch, head) {list(head)} is {float(rms[head]):.2e}, bound {limit:.2e}"
            return fail(f"{why}; worst element: {text}", error)
        return Result(name, output, error, bound, True)


def compare(call: Call, got: dict[str, torch.Tensor], name: str = "call") -> list[Result]:
    """Judge one answer to one call: ``Yardstick(call).judge(got, name)``."""
    return Yardstick(call).judge(got, name)
