"""The Hopper kernels with an additive bias, run as Python on the CPU (``gluon_on_cpu.py``): numbers, not speed. That which makes
the numbers of the rows is one of Triton's, and runs in its interpreter.

    python bias_on_cpu.py 64 128     a line of JSON for each comparison with float64
"""

import dataclasses
import json
import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import gluon_on_cpu
import torch

CASES = [  # batch, heads, key heads, queries, keys; mask; dtype; dims of the bias; what is in it
    ((2, 2, 1, 150, 200), "full", "bfloat16", "1hqk", "normal"),
    ((2, 2, 2, 200, 136), "causal", "float16", "bhqk", "hidden"),
    ((4, 2, 1, 200, 136), "causal", "bfloat16", "1hqk", "hidden"),
    ((2, 2, 1, 130, 257), "upper:20,lower:90", "bfloat16", "b1qk", "hidden"),
    ((3, 2, 2, 70, 300), "full", "bfloat16", "11qk", "lowest"),
    ((1, 2, 1, 300, 130), "causal", "bfloat16", "1hqk", "far"),
    ((1, 1, 1, 1, 1), "full", "float16", "1hqk", "normal"),
]
LIMITS = {"bfloat16": 1e-2, "float16": 1.5e-3}


def bias_of(dims, shape, dtype, kind, generator):
    """``hidden``: a fifth of the keys, all of one row, and the first tile of keys of others; ``lowest``: rows of the lowest finite
    value, beside single ones; ``far``: rows around several large negative numbers."""
    batch, heads, _, queries, keys = shape
    sizes = {"b": batch, "h": heads, "q": queries, "k": keys, "1": 1}
    bias = torch.randn([sizes[d] for d in dims], generator=generator) * 2
    dtype = getattr(torch, dtype)
    if kind == "hidden":
        bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.2, -math.inf)
        bias[..., 5 % queries, :] = -math.inf
        bias[..., queries // 2 :, -140:] = -math.inf
    elif kind == "lowest":
        bias[..., 3, :] = torch.finfo(dtype).min
        bias[..., 4, 7:] = torch.finfo(dtype).min
        bias[..., 5, :] = -math.inf
        bias[..., 5, 9:20] = torch.finfo(dtype).min
    elif kind == "far":
        for row, base in enumerate((-1e4, -1e6, -1.2e8, -1e9, -1e10, -1e20, 1e4, 1e9)):
            bias[..., row, :] = base
    return padded(bias.to(dtype))


def padded(t):
    """The same with rows that a bulk copy can reach: they begin at multiples of 16 bytes."""
    width = -(-t.shape[-1] // 8) * 8
    whole = t.new_full((*t.shape[:-1], width), math.nan)
    whole[..., : t.shape[-1]] = t
    return whole[..., : t.shape[-1]]


def compare(head_dim, case, configs):
    """The relative error of each output and gradient that these configs give: of the forward pass, dk and dv, dq, dbias, and dq
    with dbias. That of lse is the largest of any row, a hundredfold."""
    from tilewise.arch import ARCHS
    from tilewise.backends import hopper
    from tilewise.backends.hopper import bias_launch
    from tilewise.configs.hopper_backward import padded_rows
    from tilewise.configs.hopper_bias import FWD, members
    from tilewise.problem import Problem
    from tilewise.reference import backward, reference
    from tilewise.spec import Spec, Tensors
    from tilewise.terms import bias as biased

    shape, mask, dtype, dims, kind = case
    batch, heads_q, heads_kv, queries, keys = shape
    generator = torch.Generator().manual_seed(1)
    sizes = [(heads_q, queries), (heads_kv, keys), (heads_kv, keys), (heads_q, queries)]
    q, k, v, do = (torch.randn((batch, *n, head_dim), generator=generator).to(getattr(torch, dtype)) for n in sizes)
    dlse = torch.randn((batch, heads_q, queries), generator=generator)
    bias = bias_of(dims, shape, dtype, kind, generator)
    spec = Spec.parse(mask) & biased(bias)
    tensors = Tensors(bias=bias)
    problem = dataclasses.replace(Problem.bind(q, k, v, spec, None, tensors=tensors), grad="qkvb", arch=ARCHS["sm_90"])
    o64, lse64 = reference(q, k, v, spec)
    truth = {"o": o64, "lse": lse64}
    truth |= {name: torch.empty_like(t, dtype=torch.float64) for name, t in (("dq", q), ("dk", k), ("dv", v), ("db", bias))}
    grads = Tensors(bias=truth["db"])
    backward(problem, do, dlse.double(), q, k, v, o64, lse64, truth["dq"], truth["dk"], truth["dv"], tensors, None, grads)

    made = {name: torch.full(t.shape, math.nan, dtype=torch.float32 if name == "lse" else q.dtype) for name, t in truth.items()}
    made["db"] = padded(made["db"])
    rows = torch.full((batch, heads_q, queries, 2), math.nan)
    counter = torch.zeros(2, dtype=torch.int32)
    bias_launch.fwd_plan(problem, configs[0]).launch(q, k, v, made["o"], bias, made["lse"], rows, counter).run()
    of_rows = torch.full((3, batch * heads_q, padded_rows(problem)), math.nan)
    bias_launch.rows_plan(problem, True).launch(made["o"], do, dlse, rows, *of_rows).run()
    inputs = (q, k, v, do)
    bias_launch.dkdv_plan(problem, configs[1], True, True).launch(k, v, q, do, bias, *of_rows, made["dk"], made["dv"]).run()
    bias_launch.dq_plan(problem, configs[2]).launch(*inputs, bias, made["dq"], *of_rows).run()
    bias_launch.dbias_plan(problem, configs[3]).launch(*inputs, bias, *of_rows, made["db"]).run()
    if configs[4] is not None and members(problem) > 1:
        made |= {name: padded(torch.full_like(made[name[:2]], math.nan)) for name in ("dq shared", "db shared")}
        bias_launch.shared_plan(problem, configs[4]).launch(*inputs, bias, made["dq shared"], made["db shared"], *of_rows).run()
    if configs[0] == FWD[head_dim][0]:  # what a call does, with the configs that are taken
        fresh = {name: torch.full_like(t, math.nan).contiguous() for name, t in made.items()}
        rows.fill_(math.nan)
        hopper.forward(problem, q, k, v, fresh["o"], fresh["lse"], tensors, rows)
        outputs = [fresh[name] for name in ("o", "lse", "dq", "dk", "dv")]
        hopper.backward(problem, do, dlse, q, k, v, *outputs, tensors, rows, Tensors(bias=fresh["db"]))
        made |= {f"{name} of a call": fresh[name] for name in ("o", "lse", "dq", "dk", "dv", "db")}
    found = {}
    for name, t in made.items():
        want = truth[name.split()[0]]
        if not torch.equal(t.double().isneginf(), want.isneginf()):
            found[name] = math.inf
            continue
        want, t = want.masked_fill(want.isneginf(), 0.0), t.double().masked_fill(want.isneginf(), 0.0)
        if name.startswith("lse"):
            error = ((t - want).abs() / (1 + want.abs())).max() * 100
        else:
            error = (t - want).norm() / want.norm().clamp_min(1e-6)
        found[name] = error.item() if error == error else math.inf
    return found


def compare_all(arguments, cases=None, most=100, until_wrong=False):
    """Every config of these head dims, or as many of each table as ``most``, after ``install``; ``until_wrong``: up to the first
    that is."""
    torch.set_num_threads(1)
    from tilewise.configs.hopper_bias import DBIAS, DKDV, DQ, FWD, SHARED

    for dims in arguments:
        tables = [table[int(dims)] for table in (FWD, DKDV, DQ, DBIAS)] + [SHARED.get(int(dims), (None,))]
        for i in range(min(most, max(map(len, tables)))):
            configs = [table[i % len(table)] for table in tables]
            for case in cases or CASES:
                found = compare(int(dims), case, configs)
                ok = all(error < LIMITS[case[2]] for error in found.values())
                words = {"dims": dims, "case": case, "configs": list(map(str, configs)), "errors": found}
                print(json.dumps({**words, "ok": ok}), flush=True)
                if until_wrong and not ok:
                    return


if __name__ == "__main__":
    gluon_on_cpu.install()
    compare_all(sys.argv[1:])
