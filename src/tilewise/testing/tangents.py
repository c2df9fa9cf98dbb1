"""Forward mode under test: tangents for a ``Call``, what a backend makes of them, and what is right.

``JvpYardstick`` judges ``o``, ``lse`` and their derivatives ``t_o`` and ``t_lse`` by the rule of ``tolerance``: the oracle is
PyTorch's own forward mode through the dense formula in float64, ``plain`` that in the dtype of the inputs. The rounding term
carries the errors of weights and of the tangents of scores through ``t_o = sum p (ts v + tv) - t_lse o``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from ..api import attention
from ..capabilities import refuse
from ..operands import full_rank
from ..problem import GRADIENTS, Problem, Tangents
from ..reference import distance_of, factor_of, mask_of, reference, scored, softmax_of
from ..select import capability
from ..spec import Spec
from .calls import Call
from .gauntlet import GAUNTLET, Entry
from .poison import poison
from .tolerance import EPS_TF32, Result, Yardstick, _repeat, _rms, _rounding, _rss, _silent, _through_steps, plain

__all__ = ["JVP_ENTRIES", "JVP_OUTPUTS", "JvpYardstick", "draw_tangents", "evaluate_jvp", "jvp_problem", "run_jvp"]

JVP_OUTPUTS = ("o", "lse", "t_o", "t_lse")
_NAMES = tuple(GRADIENTS.values())
_CHOSEN = (
    "ragged_full ragged_causal_br ragged_causal_tl thin_window tile_edge_free empty_rows empty_tail empty_window "
    "overflow_spike overflowed_keys late_spike very_low odd_scale negative_scale zero_scale gqa mqa odd_head_dims one_query "
    "one_key zero_len_k zero_len_q strided strided_last misaligned poison softcap softcap_bias bias_softcap alibi_both_sides "
    "bias_broadcast bias_of_batches lowest_bias sink own_function own_positions own_tensors own_between own_mask own_hidden "
    "dropout dropout_scores dropout_documents dropout_all documents_full unsorted_ids row_intervals dense_tiles dense_ragged "
    "all_terms"
)
JVP_ENTRIES: tuple[Entry, ...] = tuple(e for e in GAUNTLET if e.name in _CHOSEN.split())  # that forward mode runs, too


def _moving(call: Call) -> dict[str, torch.Tensor]:
    """All that may have a tangent, by name."""
    named = zip(_NAMES, (call.q, call.k, call.v, *call.spec.tensors[:3]), strict=True)
    return {name: t.detach() for name, t in named if t is not None}


def draw_tangents(call: Call, seed: int = 0, letters: str = "".join(GRADIENTS)) -> Tangents:
    """Normal tangents, drawn on the CPU, for those of these ``letters`` that the call has."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for letter, name in GRADIENTS.items():
        t = _moving(call).get(name)
        if t is not None and letter in letters:
            out[name] = torch.randn(t.shape, generator=generator).to(t.dtype).to(t.device)
    return Tangents(**out)


def jvp_problem(call: Call, tangents: Tangents) -> Problem:
    """The problem that ``attention`` would bind for these tangents."""
    also = tuple(t for t in tangents[:3] if t is not None)
    return Problem.bind(call.q, call.k, call.v, call.spec, call.sm_scale, call.precision, "", also, jvp=tangents.letters)


def _along(
    f: Callable[..., tuple[torch.Tensor, ...]], call: Call, tangents: Tangents, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """``f(q, k, v, spec)`` and its derivatives along the tangents, by dual tensors: o, lse, t_o and t_lse."""

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t if dtype is None else t.to(dtype)

    with forward_ad.dual_level():
        given = dict(zip(_NAMES, tangents, strict=True))
        duals = {name: cast(t) for name, t in _moving(call).items()}
        duals |= {name: forward_ad.make_dual(duals[name], cast(t)) for name, t in given.items() if t is not None}
        q, k, v = (duals.pop(name) for name in "qkv")
        spec = dataclasses.replace(call.spec, tensors=call.spec.tensors._replace(**duals))
        pairs = [forward_ad.unpack_dual(t) for t in f(q, k, v, spec)]
    values = [pair.primal for pair in pairs]
    moved = [torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent for pair in pairs]
    out: dict[str, torch.Tensor] = dict(zip(JVP_OUTPUTS, (*values, *moved), strict=True))
    return out


def evaluate_jvp(call: Call, tangents: Tangents, backend: str) -> dict[str, torch.Tensor]:
    """``o``, ``lse``, ``t_o`` and ``t_lse`` as a backend computes them."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
        scale, precision = call.sm_scale, call.precision
        return attention(q, k, v, spec=spec, sm_scale=scale, precision=precision, return_lse=True, backend=backend)

    return _along(run, call, tangents)


def _plain_tangents(call: Call, tangents: Tangents, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The dense formula in this dtype under PyTorch's own forward mode."""
    heads = call.q.shape[1]
    ok = mask_of(call.spec, call.q.shape[2], call.k.shape[2], call.q.device)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
        sink = None if spec.tensors.sink is None else full_rank("sink", spec.tensors.sink)
        s = scored(q @ _repeat(k, heads).mT * call.scale, spec, spec.tensors).masked_fill(~ok, float("-inf"))
        p, lse = softmax_of(s, sink)
        if spec.dropout:
            p = p * torch.as_tensor(factor_of(spec, spec.tensors, q, k)).to(p.dtype)
        return p @ _repeat(v, heads), lse

    return _along(dense, call, tangents, dtype)


def _tangent_rounding(call: Call, tangents: Tangents, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rounding terms of t_o and t_lse."""
    heads, spec, scale = call.q.shape[1], call.spec, abs(call.scale)
    eps_in = EPS_TF32 if call.precision == "tf32" else torch.finfo(call.q.dtype).eps
    eps_acc = torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).eps
    if call.q.dtype == torch.float64:
        eps_in, eps_acc = 2 * eps_in, 2 * eps_acc
    length = max(call.q.shape[2], call.k.shape[2], call.q.shape[3], call.v.shape[3])
    unit = eps_acc / 2 * (1 + length**0.5 / 4) + (eps_in / 2 if call.precision == "tf32" else 0.0)
    q, k, v = call.q.double(), _repeat(call.k.double(), heads), _repeat(call.v.double(), heads)
    tq, tk, tv = (torch.zeros(()).double() if t is None else t.double() for t in tangents[:3])
    tq, tk, tv = tq.expand_as(q), *(_repeat(t.expand_as(own), heads) for t, own in ((tk, call.k), (tv, call.v)))
    s, ts = q @ k.mT * call.scale, (tq @ k.mT + q @ tk.mT) * call.scale
    size, moved_size = scale * _rss(q, k.mT), scale * (_rss(tq, k.mT) + _rss(q, tk.mT))
    error = unit * (1 + s.abs() * 2 + size)
    t_error = unit * (1 + ts.abs() * 2 + moved_size * 2)
    s, error, _, steps = _through_steps(call, s, error, unit)
    for step, (slope, slope_error) in zip(spec.score, steps, strict=True):
        name = step.partition(":")[0]
        if name in ("softcap", "fn"):
            t_error, ts = t_error * slope.abs() + ts.abs() * slope_error, ts * slope
        elif name == "alibi" and tangents.slopes is not None:
            by = full_rank("slopes", tangents.slopes).double()[..., None, None]
            ts = ts - by * distance_of(spec, s.shape[2], s.shape[3], s.device)
        elif name == "bias" and tangents.bias is not None:
            ts = ts + full_rank("bias", tangents.bias).double()
        t_error = t_error + unit * ts.abs()
    ok = mask_of(spec, s.shape[2], s.shape[3], s.device).expand(s.shape) & (s != float("-inf"))
    sink = None if spec.tensors.sink is None else full_rank("sink", spec.tensors.sink).double()
    p, lse = softmax_of(torch.where(ok, s, float("-inf")), sink)
    error, ts, t_error = (torch.where(ok, t, 0.0) for t in (error, ts, t_error))
    row = (p * error).sum(-1, keepdim=True) + unit * torch.where(lse.abs() > 1e30, 0.0, lse.abs())[..., None]
    o, t_lse = expected["o"], expected["t_lse"][..., None]
    own = p * (error + row)
    of_lse = (own * ts).square().sum(-1, keepdim=True).sqrt() + (p * t_error).square().sum(-1, keepdim=True).sqrt()
    of_lse = of_lse + (row + unit) * (t_lse.abs() + (p * ts).square().sum(-1, keepdim=True).sqrt())
    if tangents.sink is not None and sink is not None:
        weight = torch.exp(sink[..., None] - torch.where(lse == float("-inf"), 0.0, lse))
        moved = weight * full_rank("sink", tangents.sink)[..., None].abs()
        of_lse = of_lse + (row[..., 0] + unit * (2 + lse.abs()) * moved)[..., None]
    factor = torch.as_tensor(factor_of(spec, spec.tensors, call.q, call.k)) if spec.dropout else 1.0
    weights = (own + p * eps_in / 2) * factor
    of_o = _rss(weights * ts.abs(), v) + _rss(weights, tv) + _rss(p * factor * t_error, v)
    of_o = of_o + (row + unit) * (expected["t_o"] + t_lse * o).abs()
    of_o = of_o + of_lse * o.abs() + t_lse.abs() * (_rss(weights, v) + row * o.abs()) + eps_in / 2 * expected["t_o"].abs()
    return {"t_o": of_o, "t_lse": of_lse[..., 0]}


class JvpYardstick(Yardstick):
    """What is right for one call along some tangents, and how far an answer may be from it."""

    def __init__(self, call: Call, tangents: Tangents):
        self.call = call = call.replace(do=None, dlse=None)
        self.tangents = tangents
        wide = torch.promote_types(call.q.dtype, torch.float32)
        self.expected = _along(lambda q, k, v, spec: reference(q, k, v, spec, call.scale), call, tangents, torch.float64)
        self.bound, self.rms_bound = {}, {}
        rounding, simple = {}, {}
        if not self._nothing:
            rounding = _rounding(call, self.expected) | _tangent_rounding(call, tangents, self.expected)
            simple = plain(call) | {"t_o": _plain_tangents(call, tangents, call.q.dtype)["t_o"]}
            simple["t_lse"] = _plain_tangents(call, tangents, wide)["t_lse"]
        for name, want in self.expected.items():
            if self._nothing or want.numel() == 0:
                self.bound[name], self.rms_bound[name] = 0.0, torch.zeros_like(_rms(want))
                continue
            error = torch.nan_to_num((simple[name].double() - want).abs(), 0.0, 0.0, 0.0)
            self.bound[name] = float(2 * error.max() + rounding[name].max())
            self.rms_bound[name] = 2 * _rms(error) + _rms(rounding[name])
        rows = _silent(call)["o"]
        self._silent = {"o": rows, "t_o": rows} | ({"t_lse": rows[..., 0]} if tangents.sink is None else {})

    def judge(self, got: dict[str, torch.Tensor], name: str = "call") -> list[Result]:
        return [self._judge(name, output, got.get(output)) for output in JVP_OUTPUTS]


def run_jvp(call: Call, backend: str, name: str, seed: int = 0) -> list[Result]:
    """Judge one backend along tangents of everything, with every allocation poisoned. Nothing if the table refuses it."""
    tangents = draw_tangents(call, seed)
    if refuse(capability(backend), jvp_problem(call, tangents)):
        return []
    with poison():
        got = evaluate_jvp(call, tangents, backend)
    return JvpYardstick(call, tangents).judge(got, name)
