"""``tilewise tune``: measure configs on this card and keep the faster ones as records of the user's own."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..arch import Runtime, arch_of, runtime
from ..backends import forget
from ..configs import records
from ..errors import InvalidInput
from ..problem import Problem
from ..select import choose
from ._bench.cases import GRIDS
from ._tune.candidates import NAMES, candidates, flop, kernels, picked, short
from ._tune.compile import compile_ahead, jobs_of
from ._tune.work import LEAST_GAIN, REST, ROUNDS, Timer, Tuning, best_of, small_calls, tune_kernel
from .bench import _bar
from .explain import pairs

__all__ = ["add_parser", "run", "tune"]

_DESCRIPTION = f"""\
Measure configs (tile sizes, warps, stages, forms of a kernel) on this machine's GPU, and keep what is faster.

Every candidate is first held against float64 on small problems of the same kind, whole tiles and ragged ones, with every
allocation filled with NaN; one that is wrong is reported and never timed. The others are timed in turn, each after the same
rest: the best of {ROUNDS} medians of Triton's do_bench. Where the best is at least {LEAST_GAIN:.0%} faster than the present choice,
it is written to a file of your own, which every later call of tilewise asks before the records that ship with it:

  $TILEWISE_CONFIG_DIR/ARCH.json, or ~/.config/tilewise/ARCH.json (with $XDG_CONFIG_HOME in the place of ~/.config)

A record serves a class of problems: dtype, head_dim, kind of mask and whether the length is below 2,048, below 8,192 or
beyond. So tune the problem that you run most. `tilewise explain` says where a config comes from; delete the file to go back.
"""


def _epilog() -> str:
    grids = "\n".join(f"  {name:<10} {grid.about}" for name, grid in GRIDS.items() if grid.device == "cuda")
    return f"""\
grids:
{grids}

examples:
  tilewise tune --problem "batch=4 heads=32/8 seqlen=4096 head_dim=128 mask=causal"
  tilewise tune --grid fa3 --backend triton --budget 1800
  tilewise tune --dry-run --problem "seqlen=4096 head_dim=128 mask=causal arch=sm_80"

exit status: 0 done, 1 a candidate gave a wrong result, 2 bad arguments or no GPU
"""


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")
    return value


def _passes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not names or set(names) - {"fwd", "bwd"}:
        raise argparse.ArgumentTypeError(f"expected fwd, bwd or fwd,bwd, got {text!r}")
    return names


def add_parser(subparsers: Any) -> None:
    """Add the ``tune`` command."""
    parser = subparsers.add_parser(
        "tune",
        help="measure configs on this GPU and keep the faster ones for later calls",
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--problem",
        action="append",
        metavar="PROBLEM",
        help="name=value words as `tilewise explain` reads them; may be given again (default: the grid small)",
    )
    parser.add_argument("--grid", choices=[n for n, g in GRIDS.items() if g.device == "cuda"], help="the problems of this grid")
    parser.add_argument(
        "--backend",
        choices=("auto", "triton", "hopper"),
        default="auto",
        help="whose configs (default: of the backend that auto takes)",
    )
    both = ("fwd", "bwd")
    parser.add_argument("--passes", type=_passes, default=both, metavar="LIST", help="fwd, bwd or fwd,bwd (default: both)")
    help_ = "begin nothing new after so long (default 900)"
    parser.add_argument("--budget", type=_seconds, default=900.0, metavar="SECONDS", help=help_)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the records to FILE instead of your own folder")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the candidates, legal or not, of the device named by arch=...; needs no GPU"
    )
    parser.set_defaults(func=run)


def _problems(args: argparse.Namespace, dry: bool) -> list[Problem]:
    """The problems of the command line, with the gradients that ``--passes`` asks for."""
    texts = list(args.problem or [])
    if args.grid or not texts:
        texts += [str(case) for case in GRIDS[args.grid or "small"].cases()]
    software = runtime()
    if dry and (software.triton is None or software.interpret):
        software = Runtime((3, 9))  # a device that is not there would have the newest
    out = []
    for text in texts:
        gradients = "" if "bwd" not in args.passes or "grad=" in text else " grad=qkv"
        problem = Problem.parse(text + gradients, software=software)
        if "bwd" in args.passes and problem.grad != "qkv":
            raise InvalidInput(f"problem {text!r}: grad is {problem.grad!r}, expected qkv or no such word for the backward pass.")
        if problem.is_empty:
            raise InvalidInput(f"problem {text!r}: an extent is zero, expected something to time.")
        if problem.operands:
            words = ", ".join(o.slot for o in problem.operands)
            raise InvalidInput(f"problem {text!r}: its mask names tensors ({words}), which no record tells apart: leave them out.")
        if not problem.bulk and problem.head_dim * problem.itemsize % 16 == 0:
            raise InvalidInput(f"problem {text!r}: layout=strided is given, but a record serves every layout: leave the word out.")
        out.append(problem)
    return out


def _work(problems: list[Problem], args: argparse.Namespace) -> list[tuple[Problem, str, str]]:
    """(problem, backend, kernel) of all that is to be tuned."""
    out = []
    for problem in problems:
        backend = choose(problem, args.backend).backend
        if backend not in ("hopper", "triton"):
            raise InvalidInput(
                f"problem {str(problem)!r}: 'auto' takes backend {backend!r}, which has nothing to tune. Expected a problem for "
                "'triton' or 'hopper'; `tilewise explain` says why they refuse."
            )
        out += [(problem, backend, kernel) for kernel in kernels(problem, backend, args.passes)]
    return list(dict.fromkeys(out))


def _list(problem: Problem, backend: str, kernel: str) -> None:
    """Print every candidate of one kernel, those that are not legal by reason."""
    found = candidates(problem, backend, kernel)
    legal = [c for c in found if c.why is None]
    now, origin = picked(problem, backend, kernel)
    print(f"\n  {NAMES[kernel]} ({backend}): {len(found)} candidates, {len(legal)} legal")
    print(f"    at present  {short(now)}   ({origin})")

    def show(title: str, items: list[Any]) -> None:
        text = title + ", ".join(short(c.config) for c in items)
        print(textwrap.fill(text, 118, initial_indent="    ", subsequent_indent=" " * 16))

    show("legal       ", legal)
    reasons: dict[str, list[Any]] = {}
    for c in found:
        if c.why is not None:
            reasons.setdefault(re.sub(r"\d+", "#", c.why), []).append(c)
    for group in reasons.values():
        print(f"    {len(group)} not legal, the first because {group[0].why}")
        show("            ", group)


def header(arch: str, device: torch.device | str) -> dict[str, Any]:
    """On what, with what and when: the header of a file of records."""
    software = runtime()
    return {
        "format": records.FORMAT,
        "arch": arch,
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else arch,
        "torch": torch.__version__,
        "triton": None if software.triton is None else _triton_version(),
        "cuda": torch.version.cuda,
        "tilewise": __version__,
        "date": datetime.date.today().isoformat(),
    }


def _triton_version() -> str:
    import triton

    return triton.__version__


def tune(
    work: list[tuple[Problem, str, str]],
    device: torch.device | str,
    budget: float = float("inf"),
    timer: Timer = best_of,
    rest: float = REST,
) -> list[Tuning]:
    """Check and time every candidate of these kernels; what the budget leaves no time for is left out of the list."""
    from ..testing.tolerance import Yardstick

    until = time.monotonic() + budget
    done: list[Tuning] = []
    judged: dict[tuple[Any, ...], tuple[str, str]] = {}
    checks: dict[Problem, list[Any]] = {}
    with closing(_bar()) as bar:
        for problem, backend, kernel in work:
            if time.monotonic() > until:
                break
            legal = sum(c.why is None for c in candidates(problem, backend, kernel))
            where = f"N {problem.seqlen_k} D {problem.head_dim}"
            step = bar.step
            if problem not in checks:
                checks = {problem: [Yardstick(call) for call in small_calls(problem, device)]}
                names = [k for p, b, k in work if (p, b) == (problem, "triton")]
                # The two ragged calls share their kernels.
                jobs = jobs_of([problem, *(c.call.problem for c in checks[problem][:2])], names) if names else []
                if jobs and torch.device(device).type == "cuda":
                    bar.phase(f"compile, {where}", len(jobs))
                    compile_ahead(jobs, problem.arch.name, step, until)
            bar.phase(f"{NAMES[kernel]}, {where}", legal * (1 + ROUNDS))
            done.append(tune_kernel(problem, backend, kernel, device, checks[problem], judged, timer, step, until, rest))
    return done


def rows_of(done: list[Tuning], date: str) -> list[dict[str, Any]]:
    """The records that pay. Of two problems of one class the first counts."""
    out: dict[tuple[Any, ...], dict[str, Any]] = {}
    for t in done:
        words = records.fields(t.problem, t.backend, t.kernel)
        if t.pays:
            notes = {"date": date, "problem": str(t.problem), "ms": round(t.best.ms, 5), "gain": round(min(t.gain, 99.0), 4)}
            out.setdefault(tuple(words.items()), {**words, "config": records.encode(t.best.config), **notes})
    return list(out.values())


def table(done: list[Tuning]) -> str:
    """The best config of every kernel beside the present choice."""
    width = max([24, *(len(short(m.config)) for t in done for m in (t.best, t.present))])
    seen = {t.problem: pairs(t.problem) for t in done}
    lines, last = [], None
    columns = f"{'ms':>9} {'TFLOP/s':>8}"
    head = f"  {'kernel':<10} {'best':<{width}} {columns}   {'at present':<{width}} {columns} {'gain':>7}"
    for t in done:
        if t.problem != last:
            lines += ["", str(t.problem), head]
            last = t.problem
        if t.best.ms == float("inf"):
            lines.append(f"  {NAMES[t.kernel]:<10} nothing could be timed")
            continue
        work = flop(t.problem, t.kernel, seen[t.problem])

        def shown(m: Any, work: float = work) -> str:
            if m.ms == float("inf"):
                return f"{short(m.config):<{width}} {'-':>9} {'-':>8}"
            return f"{short(m.config):<{width}} {m.ms:9.4f} {work / m.ms / 1e9:8.1f}"

        gain = f"{t.gain:+.1%}" if t.gain != float("inf") else "wrong"
        partly = "" if t.complete else "  (out of time: some were not tried)"
        verdict = "record" if t.pays else "kept"
        lines.append(f"  {NAMES[t.kernel]:<10} {shown(t.best)}   {shown(t.present)} {gain:>7}  {verdict}{partly}")
    return "\n".join(lines)


def _target(args: argparse.Namespace, arch: str) -> Path:
    """Where the records go; raises if that cannot be."""
    path = args.out or records.user_file(arch)
    if path.exists():
        records.read(path, arch)
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if path.is_dir() or not os.access(there, os.W_OK):
        what = f"{str(path)!r} cannot be written, expected a file in a folder of yours"
        raise InvalidInput(f"{what}: set --out or TILEWISE_CONFIG_DIR.")
    return path


def finish(done: list[Tuning], work: list[Any], path: Path, head: dict[str, Any]) -> int:
    """Print the table and write the records."""
    wrong = [(t, m) for t in done for m in t.measured if m.wrong]
    failed = [(t, m) for t in done for m in t.measured if m.failed]
    print(table(done))
    for found, title in ((wrong, "gave a wrong result, not timed"), (failed, "did not run here, not timed")):
        if found:
            print(f"\n{len(found)} {title}:")
        for t, m in found:
            print(f"  {t.backend} {NAMES[t.kernel]} {short(m.config)}: {m.wrong or m.failed}\n    {t.problem}")
    if len(done) < len(work):
        print(f"\nOut of time: {len(work) - len(done)} of {len(work)} kernels were not looked at. Give more with --budget.")
    rows = rows_of(done, head["date"])
    if rows:
        old = records.write(path, head, rows)
        forget()
        print(f"\n{len(rows)} records written: {path}")
        if old is not None:
            print(f"The file that was there is of another device or other software: it is kept as {old}, and no longer read.")
    else:
        print(f"\nNothing was at least {LEAST_GAIN:.0%} faster than the present choice: no record is written.")
    return 1 if wrong else 0


def run(args: argparse.Namespace) -> int:
    """Run ``tilewise tune``."""
    if not args.dry_run and not torch.cuda.is_available():
        print(
            "tilewise: error: tune measures on a GPU, and PyTorch finds none here. Run it where torch.cuda.is_available() is True, "
            "or list the candidates with --dry-run and arch=sm_90 (say) in the problem.",
            file=sys.stderr,
        )
        return 2
    problems = _problems(args, args.dry_run)
    work = _work(problems, args)
    if args.dry_run:
        last = None
        for problem, backend, kernel in work:
            if problem != last:
                print(f"{'' if last is None else chr(10)}{problem}")
                last = problem
            _list(problem, backend, kernel)
        print(f"\nRecords would be written to {args.out or records.user_file(problems[0].arch.name)}")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    here = arch_of(device)
    foreign = [p for p in problems if p.arch != here]
    if foreign:
        what = f"problem {str(foreign[0])!r}: arch is not {here.name}, this machine's"
        raise InvalidInput(f"{what}: leave the word arch=... out, or give --dry-run.")
    path = _target(args, here.name)
    print(f"tilewise {__version__} on {torch.cuda.get_device_name(device)} ({here.name}); records go to {path}", flush=True)
    done = tune(work, device, args.budget)
    return finish(done, work, path, header(here.name, device))
