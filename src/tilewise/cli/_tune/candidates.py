"""Which configs may be tried for a problem, and why the others may not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ... import configs
from ...configs import Config, hopper, hopper_backward, splits_dkdv
from ...configs.hopper_backward import BackwardConfig
from ...configs.wide import NARROW, units_kept
from ...problem import Problem

__all__ = ["NAMES", "SPACE", "Candidate", "candidates", "flop", "kernels", "picked", "short"]

# (block_m, block_n, num_warps, num_stages) of the Triton kernels, by pass.
SPACE = {
    "fwd": [(m, n, w, s) for m in (64, 128, 256) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3, 4) if n <= m],
    "dkdv": [(m, n, w, s) for m in (16, 32, 64, 128) for n in (64, 128) for w in (4, 8) for s in (1, 2, 3)],
    "dk": [(m, n, w, s) for m in (16, 32, 64) for n in (64, 128) for w in (4, 8) for s in (1, 2)],
    "dv": [(m, n, w, s) for m in (16, 32, 64, 128) for n in (64, 128) for w in (4, 8) for s in (1, 2, 3)],
    "dq": [(m, n, w, s) for m in (64, 128) for n in (16, 32, 64, 128) for w in (4, 8) for s in (1, 2, 3) if n <= m],
}
# Also for float32 inputs, whose operands take more room.
WIDE_SPACE = [(m, n, w, s) for m in (16, 32, 64) for n in (16, 32) for w in (4, 8) for s in (1, 2)]
# Beyond 256 columns, with the columns of the result shared by as many programs.
SPLIT_SPACE = [(m, n, w, s, c) for m in (32, 64, 128) for n in (16, 32, 64) for w in (4, 8) for s in (1, 2) for c in (1, 2, 4)]
NAMES = {"fwd": "forward", "dkdv": "dk and dv", "dk": "dk", "dv": "dv", "dq": "dq", "bwd": "backward"}


@dataclass(frozen=True)
class Candidate:
    """One config of one kernel, and why it may not run the problem (None: it may)."""

    config: Any
    why: str | None


def kernels(problem: Problem, backend: str, passes: tuple[str, ...]) -> list[str]:
    """The names of what is tuned apart: "fwd", and the backward kernels, which ``hopper`` tunes as one ("bwd")."""
    out = ["fwd"] if "fwd" in passes else []
    if "bwd" in passes:
        if backend == "hopper":
            out.append("bwd")
        else:
            kept = units_kept(problem) > 0  # by kernels of their own, which have no configs
            out += [] if kept else [*(["dk", "dv"] if splits_dkdv(problem) else ["dkdv"]), "dq"]
    return out


def picked(problem: Problem, backend: str, kernel: str) -> tuple[Any, str]:
    """The config that a call takes at present, and where it comes from."""
    p = problem
    if backend == "triton":
        return configs.lookup(p, kernel), configs.origin(p, kernel)
    if kernel == "fwd":
        return hopper.lookup(p), hopper.origin(p)
    keys = hopper_backward.lookup_dkdv(p)
    if hopper_backward.heads_kept(p):
        return BackwardConfig(keys, kept=hopper_backward.lookup_kept(p)), hopper_backward.origin(p)
    return BackwardConfig(keys, queries=hopper_backward.lookup_dq(p)), hopper_backward.origin(p)


def _every(problem: Problem, backend: str, kernel: str) -> list[Any]:
    p = problem
    if backend == "triton":
        rows = SPACE[kernel] + (WIDE_SPACE if p.itemsize > 2 else [])
        if max(p.head_dim, p.head_dim_v) > NARROW:
            turned = kernel in configs.KEYS_RESIDENT
            rows = rows + [(n, m, *rest) if turned else (m, n, *rest) for m, n, *rest in SPLIT_SPACE]
        return [Config(*row) for row in dict.fromkeys(rows)]
    if kernel == "fwd":
        return list(hopper.CHOICES[p.head_dim, p.head_dim_v])
    dims = hopper_backward.dims_of(p)
    dkdv = hopper_backward.DKDV[dims]
    again = [BackwardConfig(keys, queries=each) for keys in dkdv for each in hopper_backward.DQ[dims]]
    return again + [BackwardConfig(keys, kept=each) for keys in dkdv for each in hopper_backward.KEPT[dims]]


def _why(problem: Problem, backend: str, kernel: str, config: Any) -> str | None:
    if backend == "triton":
        return configs.illegal(problem, kernel, config)
    if kernel == "bwd":
        return hopper_backward.illegal_backward(problem, config)
    why = hopper.illegal(problem, config)
    if why is None and config.guarded and not hopper.suits_guard(problem):
        return "it is guarded, and some rows see no key of their first tile: the call would be done twice"
    return why


def candidates(problem: Problem, backend: str, kernel: str) -> list[Candidate]:
    """Every config there is, the present one first."""
    now = picked(problem, backend, kernel)[0]
    return [Candidate(c, _why(problem, backend, kernel, c)) for c in dict.fromkeys([now, *_every(problem, backend, kernel)])]


def short(config: Any) -> str:
    """A config in few letters."""
    if isinstance(config, Config):
        parts = f" split {config.split}" if config.split > 1 else ""
        return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}{parts}"
    if isinstance(config, BackwardConfig):
        parts = (("", config.keys), (" dq ", config.queries), (" kept ", config.kept))
        return "".join(name + short(part) for name, part in parts if part is not None)
    words = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    size = "x".join(str(words.pop(n)) for n in ("block_m", "block_n") if n in words)
    slots = "/".join(str(words.pop(n)) for n in ("stages", "k_stages", "v_stages", "q_slots", "p_slots") if n in words)
    resident = words.pop("resident", 1)
    flags = [n for n, v in words.items() if v is True] + ([f"resident {resident}"] if resident > 1 else [])
    return " ".join([size, f"s{slots}", *flags])


def flop(problem: Problem, kernel: str, pairs: int) -> float:
    """Products of one kernel on the pairs that the mask lets through, two FLOP a multiply-add."""
    p = problem
    d, dv = p.head_dim, p.head_dim_v
    columns = {"fwd": d + dv, "dkdv": 2 * d + 2 * dv, "dk": 2 * d + dv, "dv": d + dv, "dq": 2 * d + dv, "bwd": 3 * d + 2 * dv}
    return 2.0 * pairs * p.batch * p.heads_q * columns[kernel]
