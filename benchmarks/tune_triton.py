"""Measure tile sizes of the Triton kernels on this GPU and write the winners as records for src/tilewise/configs/data.

    python benchmarks/tune_triton.py --records src/tilewise/configs/data/sm_90.json --log benchmarks/results/tune-h200.json

Every candidate is compiled first (in parallel, without the GPU's help), then checked against float64 on one head with its outputs
filled with NaN, and only then timed: median of ``triton.testing.do_bench`` on 16,384 tokens and a hidden size of 2,048. Candidates
that spill much or are not legal are left out. The log holds every measurement.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import pathlib
import random
import time

import torch

from tilewise.cli._tune.candidates import SPACE
from tilewise.configs import PASSES, Config, illegal, length_class, lookup, splits_dkdv
from tilewise.configs.records import FORMAT
from tilewise.problem import Problem
from tilewise.reference import reference

LENGTHS = (1024, 4096, 16384)


def problem_of(head_dim: int, length: int, causal: bool, dtype: str, small: bool = False) -> Problem:
    batch, heads = (1, 1) if small else (16384 // length, 2048 // head_dim)
    mask = "causal" if causal else "full"
    return Problem.parse(f"dtype={dtype} batch={batch} heads={heads} seqlen={length} head_dim={head_dim} mask={mask} grad=qkv")


def compile_one(job: tuple[str, str, Config]) -> tuple[int, bool]:
    """Compile one candidate into the disk cache; (shared memory, worked)."""
    text, pass_, config = job
    from tilewise.testing.compile_only import launches_of

    try:
        _, launch = launches_of(Problem.parse(text), {pass_: config})[pass_]
        compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
        return compiled.metadata.shared, True
    except Exception as error:
        print("does not compile:", pass_, config, str(error)[:100], flush=True)
        return 0, False


class Case:
    """The tensors of one problem, and a launch of any of its passes with any config."""

    def __init__(self, problem: Problem):
        p = self.problem = problem
        dtype = getattr(torch, p.dtype)
        make = lambda h, n, d: torch.randn((p.batch, h, n, d), device="cuda").to(dtype)  # noqa: E731
        self.q, self.k = make(p.heads_q, p.seqlen_q, p.head_dim), make(p.heads_kv, p.seqlen_k, p.head_dim)
        self.v, self.do = make(p.heads_kv, p.seqlen_k, p.head_dim_v), make(p.heads_q, p.seqlen_q, p.head_dim_v)
        self.o, self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (self.do, self.q, self.k, self.v))
        self.lse = torch.empty((p.batch, p.heads_q, p.seqlen_q), device="cuda")
        self.delta = torch.empty_like(self.lse)

    def launch(self, pass_: str, config: Config):
        from tilewise.backends import triton as backend

        if pass_ == "fwd":
            return backend.launch_fwd(self.problem, config, self.q, self.k, self.v, self.o, self.lse)
        args = (self.problem, config, self.q, self.k, self.v, self.do, self.lse, self.delta)
        if pass_ == "dq":
            return backend.launch_dq(*args, self.dq)
        return backend.launch_dkdv(*args, None if pass_ == "dv" else self.dk, None if pass_ == "dk" else self.dv)

    def prepare_backward(self) -> None:
        from tilewise.backends import triton as backend

        self.launch("fwd", lookup(self.problem, "fwd")).run()
        backend.launch_delta(self.problem, self.o, self.do, None, self.lse, self.delta).run()

    def outputs(self, pass_: str) -> list[torch.Tensor]:
        return {"fwd": [self.o, self.lse], "dkdv": [self.dk, self.dv], "dk": [self.dk], "dv": [self.dv], "dq": [self.dq]}[pass_]

    def truth(self) -> dict[str, list[torch.Tensor]]:
        leaves = [t.double().requires_grad_() for t in (self.q, self.k, self.v)]
        o, lse = reference(*leaves, self.problem.spec)
        dq, dk, dv = torch.autograd.grad(o, leaves, self.do.double())
        return {"fwd": [o.detach(), lse.detach()], "dkdv": [dk, dv], "dk": [dk], "dv": [dv], "dq": [dq]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", help="JSON list of [pass, head_dim, block_m, block_n, num_warps(, num_stages)], the only ones")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which the rest is left out")
    args = parser.parse_args()
    started = time.time()
    only = {tuple(x) for x in json.loads(pathlib.Path(args.only).read_text())} if args.only else None
    cases = [
        (d, n, c, p)
        for d in map(int, args.dims.split(","))
        for p in args.passes.split(",")
        if p in ("fwd", "dq") or (p in ("dk", "dv")) == splits_dkdv(problem_of(d, 1024, False, args.dtype))
        for c in (False, True)
        for n in LENGTHS
    ]

    def candidates(head_dim: int, pass_: str, problem: Problem) -> list[Config]:
        rows = [x for x in SPACE[pass_] if only is None or {(pass_, head_dim, *x), (pass_, head_dim, *x[:3])} & only]
        found = [Config(*x) for x in rows if illegal(problem, pass_, Config(*x)) is None]
        return found or [lookup(problem, pass_)]

    jobs = []
    for head_dim, length, causal, pass_ in cases:
        small = problem_of(head_dim, 1024, causal, args.dtype, small=True)
        for problem in (small, problem_of(head_dim, length, causal, args.dtype)):
            jobs += [(str(problem), pass_, config) for config in candidates(head_dim, pass_, problem)]
    jobs = list(dict.fromkeys(jobs))
    # One compiled kernel serves all lengths, so most jobs are found in the cache: compile one job of each kind first.
    first = {}
    for job in jobs:
        problem = Problem.parse(job[0])
        first.setdefault((problem.head_dim, str(problem.spec), problem.batch == 1, job[1], job[2]), job)
    with concurrent.futures.ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        done = dict(zip(first, pool.map(compile_one, first.values(), chunksize=2), strict=True))
    print(f"compiled {len(done)} kernels in {time.time() - started:.0f} s", flush=True)

    from triton.testing import do_bench

    log, records, right = [], [], {}
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for head_dim, length, causal, pass_ in cases:
        if time.time() - started > args.budget:
            print("budget spent before", head_dim, length, causal, pass_, flush=True)
            break
        problem = problem_of(head_dim, length, causal, args.dtype)
        case, best = Case(problem), None
        if pass_ != "fwd":
            case.prepare_backward()
        rows = candidates(head_dim, pass_, problem)
        random.Random(0).shuffle(rows)
        small_case = truth = None
        for config in rows:
            shared, fine = done.get((head_dim, str(problem.spec), problem.batch == 1, pass_, config), (0, True))
            key = (head_dim, causal, pass_, config)
            if not fine or shared > limit:
                continue
            if key not in right:
                if small_case is None:
                    torch.manual_seed(head_dim)
                    small_case = Case(problem_of(head_dim, 1024, causal, args.dtype, small=True))
                    small_case.prepare_backward()
                    truth = small_case.truth()
                for t in small_case.outputs(pass_):
                    t.fill_(float("nan"))
                try:
                    small_case.launch(pass_, config).run()
                    errors = [
                        ((a.double() - b).norm() / b.norm()).item()
                        for a, b in zip(small_case.outputs(pass_), truth[pass_], strict=True)
                    ]
                except Exception as error:
                    errors = [float("inf")]
                    print("does not run:", pass_, config, str(error)[:100], flush=True)
                right[key] = max(errors) < 8e-3
                if not right[key]:
                    print("WRONG", head_dim, causal, pass_, config, errors, flush=True)
                    wrong = {"pass": pass_, "head_dim": head_dim, "causal": causal, "config": dataclasses.astuple(config)}
                    log.append({**wrong, "wrong": errors})
            if not right[key]:
                continue
            ms = do_bench(case.launch(pass_, config).run, warmup=8, rep=30, return_mode="median")
            products = {"fwd": 2, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}[pass_]
            flop = products * 2 * problem.batch * problem.heads_q * length * length * head_dim * (0.5 if causal else 1)
            row = {"pass": pass_, "head_dim": head_dim, "seqlen": length, "causal": causal, "config": dataclasses.astuple(config)}
            log.append({**row, "ms": ms, "tflops": flop / ms / 1e9})
            if best is None or ms < best[0]:
                best = (ms, config, flop / ms / 1e9)
        if best:
            record = {"pass": pass_, "itemsize": problem.itemsize, "head_dim": head_dim, "bounded": causal}
            records.append({**record, "length": length_class(problem, pass_), "config": dataclasses.astuple(best[1])})
            where = f"{pass_:4} D {head_dim:3} N {length:5} causal {causal:d}"
            print(f"{where}: {best[0]:.3f} ms {best[2]:.0f} TFLOP/s {best[1]}", flush=True)
        import triton

        header = {
            "format": FORMAT,
            "arch": problem.arch.name,
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "date": datetime.date.today().isoformat(),
        }
        lines = ",\n    ".join(json.dumps(r) for r in records)
        head = json.dumps(header)[1:-1]
        pathlib.Path(args.records).write_text(f'{{{head},\n  "records": [\n    {lines}\n  ]\n}}\n')
        pathlib.Path(args.log).write_text(json.dumps({**header, "rows": log}))


if __name__ == "__main__":
    main()
