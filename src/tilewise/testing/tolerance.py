"""The one comparison: every test, and ``tilewise check``, holds every backend to this bound and to no other.

The oracle takes the very inputs that the backend got (drawn in the tested dtype), widened to float64, and is never rounded back.
An output is right if

- its shape and dtype are right and it holds no NaN and no infinity that the oracle does not have;
- rows that see no key are exactly ``o = 0``, ``lse = -inf``, ``dq = 0``, keys that nobody sees have exactly ``dk = dv = 0``, and so
  has a bias that no visible score holds;
- its largest error is at most ``2 * plain + rounding``, and so is the RMS error of every head.

``plain`` is the error that plain PyTorch makes with the dense formula in the same dtype (for lse, in the dtype of lse).
``rounding`` bounds what a different but equally careful order of operations may add. A score of reduction length L is uncertain
by ``(1 + sqrt(L) / 4) eps_acc / 2`` of its size, a probability by that and by ``eps_in / 2`` (it may be rounded to the input
dtype), and these are carried through the formula: independent errors add up as the root of the sum of their squares, those that
all keys of a row share as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..arch import arch_of
from ..errors import AttentionError
from ..functions import function_of
from ..operands import full_rank
from ..reference import distance_of, factor_of, mask_of, places_of, reference, scored, softmax_of
from ..spec import RETURNS
from .calls import OUTPUTS, TRAINED, Call, leaves_of, spec_with
from .extras import expected_of, rounding_of, silent_of

__all__ = ["Mismatch", "Result", "Yardstick", "compare", "raise_if_failed", "round_to_tf32"]

TILE_ROWS = 64  # of queries, in the tile from whose border a kernel counts the distances of ALiBi
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


def _gradients(call: Call, o: torch.Tensor, lse: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of ``o`` and ``lse`` under the call's gradients; rows with ``lse = -inf`` pass nothing back."""
    loss = o.new_zeros((), dtype=lse.dtype)
    if call.do is not None:
        loss = loss + (o.to(lse.dtype) * call.do.to(lse.dtype)).sum()
    if call.dlse is not None:
        loss = loss + torch.where(lse == float("-inf"), 0.0, lse * call.dlse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)}


def oracle(call: Call) -> dict[str, torch.Tensor]:
    """The float64 answer: o, lse and, where the call has a gradient, those of all inputs."""
    leaves = leaves_of(call, torch.float64)
    with torch.enable_grad():
        o, lse = reference(leaves["dq"], leaves["dk"], leaves["dv"], spec_with(call.spec, leaves), call.scale)
        out = {"o": o.detach(), "lse": lse.detach(), **expected_of(call, lse.detach())}
        if call.has_gradient:
            out.update(_gradients(call, o, lse, leaves))
    return out


def plain(call: Call) -> dict[str, torch.Tensor]:
    """The dense formula as plain PyTorch computes it in the inputs' dtype (with TF32 products for ``precision="tf32"``)."""
    heads = call.q.shape[1]
    product = cast(Callable[..., torch.Tensor], _Tf32Product.apply) if call.precision == "tf32" else torch.matmul
    ok = mask_of(call.spec, call.q.shape[2], call.k.shape[2], call.q.device)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves_of(call).items()}
    q, k, v = leaves["dq"], leaves["dk"], leaves["dv"]
    tensors = spec_with(call.spec, leaves).tensors
    sink = None if tensors.sink is None else full_rank("sink", tensors.sink)

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        s = product(q, _repeat(k, heads).transpose(-1, -2))
        return scored(s * call.scale, call.spec, tensors).masked_fill(~ok, float("-inf"))

    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.enable_grad(), _full_precision_products():
        s = scores(q, k)
        p, _ = softmax_of(s, sink)
        if call.spec.dropout:
            p = (p.to(wide) * torch.as_tensor(factor_of(call.spec, tensors, q, k)).to(wide)).to(p.dtype)
        o = product(p, _repeat(v, heads))
        _, lse = softmax_of(s.to(wide), sink)
        out = {"o": o.detach()}
        if call.has_gradient:
            out.update(_gradients(call, o, lse, leaves))
        with torch.no_grad():
            _, out["lse"] = softmax_of(scores(q.to(wide), k.to(wide)), sink)
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
    s = (q @ k.transpose(-1, -2)) * call.scale
    size = abs(call.scale) * _rss(q, k.transpose(-1, -2))
    # Terms of one sign drift: D equal ones have |s| / size = sqrt(D), and their partial sums err by a multiple of D.
    drift = s.abs() * (s / torch.where(size == 0, 1.0, size)).square() / 8
    score = score_unit * (1 + s.abs() + size + drift)
    s, score, slopes, _ = _through_steps(call, s, score, score_unit)
    slope, slope_error = slopes[0]
    ok = ok & (s != float("-inf"))
    s, score = torch.where(ok, s, 0.0), torch.where(ok, score, 0.0)
    sink = call.spec.tensors.sink
    p, _ = softmax_of(torch.where(ok, s, float("-inf")), None if sink is None else full_rank("sink", sink).double())
    # What all keys of a row share: it does not average out over them.
    row = (p * score).sum(-1, keepdim=True) + score_unit * _size(lse)
    p_error = p * (score + row + eps_in / 2) + floor * ok
    factor = factor_of(call.spec, call.spec.tensors, call.q, call.k)
    used_error = p_error * factor
    out = {"o": _rss(used_error, v) + row * expected["o"].abs(), "lse": (score_unit + row)[..., 0]}
    extras = rounding_of(call, score, p, row, expected)
    if call.has_gradient:
        do = torch.zeros_like(expected["o"]) if call.do is None else call.do.double()
        dlse = torch.zeros_like(row) if call.dlse is None else call.dlse.double()[..., None]
        dp = (do @ v.transpose(-1, -2)) * factor
        dp_size = _rss(do, v.transpose(-1, -2)) * factor + dp.abs()
        delta_size = (do * expected["o"]).square().sum(-1, keepdim=True).sqrt() + dlse.abs()
        delta_size = delta_size + (do * expected["o"]).sum(-1, keepdim=True).abs()
        ds_error = p_error * (dp_size + delta_size) + floor * ok
        ds = p * (dp - ((do * expected["o"]).sum(-1, keepdim=True) - dlse))
        sharing = (eps_in / 2 + row) * delta_size
        out.update(_tensor_rounding(call, expected, ds_error, sharing * p, slopes, ds))
        ds_error = ds_error * slope.abs() + ds.abs() * slope_error
        shared = sharing * ((p * slope) @ k).abs() + row * expected["dq"].abs()
        out["dq"] = abs(call.scale) * (_rss(ds_error, k) + shared)
        out["dk"] = _fold((abs(call.scale) * _rss(ds_error.transpose(-1, -2), q)).square(), heads_kv).sqrt()
        out["dv"] = _fold(_rss(used_error.transpose(-1, -2), do).square(), heads_kv).sqrt()
    for name, term in out.items():
        if name != "lse":
            out[name] = term + eps_in / 2 * expected[name].abs()
    return {**out, **extras}


def _size(s: torch.Tensor) -> torch.Tensor:
    """What the rounding of a score grows with. Beside 1e30 a score is lost: all that is added to it leaves it as it is."""
    return torch.where(s.abs() > 1e30, 0.0, s.abs())


def _through_steps(
    call: Call, s: torch.Tensor, error: torch.Tensor, unit: float
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Scores and their errors after the spec's steps; derivatives with their errors, of the steps from each on (at the end: 1), and
    of each alone."""
    own = []
    for step in call.spec.score:
        one = dataclasses.replace(call.spec, score=(step,))
        before, s = s, scored(s, one, call.spec.tensors)
        slope, slope_error = torch.ones_like(s), torch.zeros_like(s)
        if one.softcap is not None:
            slope = 1 - (s / one.softcap).square()
            # The second derivative carries the error of the score; what enters tanh is rounded, too.
            error = error + unit * before.abs().clamp(max=2 * one.softcap)
            slope_error = 2 * (s / one.softcap).abs() * slope * error / one.softcap + unit
        elif one.function is not None:
            function, places = function_of(one), places_of(one, before, call.spec.tensors)
            found = function.slopes(before, *places)
            if found is not None:
                near = [function.slopes(before + e, *places) for e in (error, -error)]
                slope = found
                slope_error = sum((n - found).abs() for n in near if n is not None) + unit * found.abs()
        error = error * slope.abs() + unit * _size(s)
        if step == "alibi" and call.q.dtype in (torch.float16, torch.bfloat16) and arch_of(call.q.device).name == "sm_90":
            # The kernels of that processor count distances from the border of a tile, which then cancels, not from the query.
            slopes_of_heads = call.spec.tensors.slopes.double().abs()[..., None, None]
            error = error + torch.finfo(torch.float32).eps / 2 * TILE_ROWS * slopes_of_heads
        own.append((slope, slope_error))
    slopes = [(torch.ones_like(s), torch.zeros_like(s))]
    for slope, slope_error in reversed(own):
        after, after_error = slopes[0]
        slopes.insert(0, (slope * after, slope.abs() * after_error + slope_error * after.abs()))
    return s, error, slopes, own


def _tensor_rounding(
    call: Call,
    expected: dict[str, torch.Tensor],
    error: torch.Tensor,
    shared: torch.Tensor,
    slopes: list[tuple[torch.Tensor, torch.Tensor]],
    ds: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The rounding terms of dbias, dslopes and dsink: ``error`` of ds is independent, ``shared`` is of the row."""
    tensors, steps, out = call.spec.tensors, call.spec.steps, {}
    distances = distance_of(call.spec, call.q.shape[2], call.k.shape[2], call.q.device).double()
    for step, name, weight in (("bias", "bias", 1.0), ("alibi", "slopes", distances)):
        t = getattr(tensors, name)
        if t is None or name in call.fixed:
            continue
        slope, slope_error = slopes[steps.index(step) + 1]
        own = (error * slope.abs() + ds.abs() * slope_error) * weight
        rows = shared * slope.abs() * weight
        size = full_rank(name, t).shape
        if name == "slopes":
            own, rows = own.square().sum((-1, -2)).sqrt(), rows.sum(-1).square().sum(-1).sqrt()
        total = own.square().sum_to_size(size).sqrt() + rows.sum_to_size(size)
        out[f"d{name}"] = (total + torch.finfo(t.dtype).eps / 2 * full_rank(name, expected[f"d{name}"]).abs()).view(t.shape)
    if tensors.sink is not None and "sink" not in call.fixed:
        weight = torch.exp(full_rank("sink", tensors.sink).double()[..., None] - expected["lse"])
        weight = torch.where(expected["lse"] == float("-inf"), 0.0, weight)
        # ``shared`` sums to the error of delta times the weight of the keys.
        do = torch.zeros_like(expected["o"]) if call.do is None else call.do.double()
        delta = (do * expected["o"]).square().sum(-1).sqrt() + (do * expected["o"]).sum(-1).abs()
        if call.dlse is not None:
            delta = delta + call.dlse.double().abs()
        eps = torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).eps
        unit = torch.finfo(call.q.dtype).eps / 2 + eps * (2 + expected["lse"].abs().nan_to_num(posinf=0.0))
        size = full_rank("sink", tensors.sink).shape
        total = (weight * delta * unit).sum(-1).sum_to_size(size) + torch.finfo(tensors.sink.dtype).eps * full_rank(
            "sink", expected["dsink"]
        ).abs()
        out["dsink"] = total.view(tensors.sink.shape)
    return out


def _rms(t: torch.Tensor) -> torch.Tensor:
    """Root of the mean square of every (batch, head); of the whole where there are not both."""
    if t.dim() < 3:
        t = t.reshape(1, 1, -1)
    return t.flatten(2).square().mean(-1).sqrt()


def _at(t: torch.Tensor, index: int) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(index), t.shape))


def _products(call: Call) -> torch.Tensor:
    """The scores before the first step, in float64."""
    q, k = call.q.double(), _repeat(call.k.double(), call.q.shape[1])
    return (q @ k.transpose(-1, -2)) * call.scale


def _silent(call: Call) -> dict[str, torch.Tensor]:
    """By output, where it must be exactly 0: rows that see nothing, keys that nobody sees, biases of hidden scores."""
    heads, heads_kv = call.q.shape[1], call.k.shape[1]
    ok = mask_of(call.spec, call.q.shape[2], call.k.shape[2], call.q.device)
    ok = ok.expand(call.q.shape[0], heads, *ok.shape[-2:])
    bias = call.spec.tensors.bias
    if call.spec.function is not None:
        s = scored(_products(call), call.spec, call.spec.tensors)
        ok = ok & (s != float("-inf"))
    steps = call.spec.steps
    if bias is not None and not (call.spec.softcap and steps.index("softcap") > steps.index("bias")):
        ok = ok & (full_rank("bias", bias) != float("-inf"))
    rows, keys = ~ok.any(-1), _fold(ok.any(-2).double()[..., None], heads_kv)[..., 0] == 0
    out = {"o": rows[..., None], "dq": rows[..., None], "dk": keys[..., None], "dv": keys[..., None]}
    out.update(silent_of(call, ok))
    if bias is not None and "bias" not in call.fixed:
        out["dbias"] = (ok.double().sum_to_size(full_rank("bias", bias).shape) == 0).view(bias.shape)
    return out


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
                self.bound[name], self.rms_bound[name] = 0.0, torch.zeros_like(_rms(want))
                continue
            error = torch.nan_to_num((simple.get(name, want).double() - want).abs(), 0.0, 0.0, 0.0)
            self.bound[name] = float(2 * error.max() + rounding[name].max())
            self.rms_bound[name] = 2 * _rms(error) + _rms(rounding[name])
        self._silent = _silent(call)

    @property
    def _nothing(self) -> bool:
        """No score exists: every output is exactly known."""
        return 0 in (self.call.q.shape[0], self.call.q.shape[1], self.call.q.shape[2], self.call.k.shape[2])

    def judge(self, got: dict[str, torch.Tensor], name: str = "call") -> list[Result]:
        """One result for every output that the call has; an output that is missing has failed."""
        outputs = (*OUTPUTS, *(f"d{tensor}" for tensor in TRAINED), *RETURNS)
        return [self._judge(name, output, got.get(output)) for output in outputs if output in self.expected]

    def _judge(self, name: str, output: str, got: torch.Tensor | None) -> Result:
        want, bound = self.expected[output], self.bound[output]

        def fail(why: str, error: float = float("inf")) -> Result:
            return Result(name, output, error, bound, False, why)

        q = self.call.q
        wide = output.endswith("lse") or output in RETURNS
        dtype = torch.promote_types(q.dtype, torch.float32) if wide else q.dtype
        if output[1:] in TRAINED:
            dtype = getattr(self.call.spec.tensors, output[1:]).dtype
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
        silent = self._silent.get(output)
        if silent is not None and bool(silent.any()):
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
