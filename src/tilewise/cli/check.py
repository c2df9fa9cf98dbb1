"""``tilewise check``: every backend of this machine against float64, as a table with the errors beside the bound."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InvalidInput

__all__ = ["add_parser", "run"]

_HELP = "hold every backend of this machine against float64"
_DESCRIPTION = """\
Hold the backends against a float64 oracle, forward and backward: the gauntlet (inputs with names, each there to kill
named faults), inputs that broke other libraries, and random problems. On a GPU also offsets beyond 2^31 elements, grids
beyond 65,535, CUDA graphs, a busy and a second device, as far as memory and hardware allow; what is left out is said.

Each line shows the output that comes nearest to its bound, or that failed. The bound is twice the error of plain PyTorch
in the same dtype, and a term for the rounding of another order of operations.
"""
_EXAMPLES = """\
examples:
  tilewise check                          every backend that takes this machine's device
  tilewise check --quick                  two dtypes, small inputs: about a minute
  tilewise check --jobs 16                the whole of it in 16 processes: kernels compile side by side
  tilewise check --backend triton --random 1000 --seed 7
  tilewise check --quick --repeats 200    200 repeats under load, o, lse, dq, dk and dv equal bit for bit
  TRITON_INTERPRET=1 tilewise check --device cpu --backend triton     Triton's kernels, interpreted on the CPU

exit status: 0 every input passed, 1 one failed, 2 bad arguments
"""


_COLUMNS = f"{'dtype':<9} {'input':<70} {'pass':<9} {'output':<6} {'error':>9} {'bound':>9}  seconds"


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {value}")
    return value


def add_parser(subparsers: Any) -> None:
    """Add the ``check`` command."""
    parser = subparsers.add_parser(
        "check",
        help=_HELP,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="check this backend only; may be given again (default: all that accept)"
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    parser.add_argument("--only", default="", metavar="TEXT", help="the inputs whose name contains TEXT: one that failed, say")
    parser.add_argument("--dtype", default="", metavar="NAME", help="the inputs of this dtype: float32, bfloat16, ...")
    parser.add_argument("--quick", action="store_true", help="two dtypes, small inputs, few random problems, nothing large")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all inputs (default 0); a failure repeats with it")
    parser.add_argument(
        "--random", "--randoms", type=_count, metavar="N", help="random problems for each backend (default: by its speed)"
    )
    parser.add_argument(
        "--repeats",
        type=_count,
        metavar="N",
        help="repeats of one problem while a second stream keeps the GPU busy, without one differing bit (default 30; 0: none)",
    )
    parser.add_argument("--configs", action="store_true", help="also every legal config of the backward kernels (GPU; minutes)")
    parser.add_argument(
        "--failures", action="store_true", help="print the lines that failed or were skipped, and the summary, only"
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        default=1,
        metavar="N",
        help="work in N processes (default 1: this one); a crash or a hang then costs one input. Lines come as inputs are done",
    )
    parser.add_argument(
        "--limit", type=_count, default=300, metavar="S", help="with --jobs: seconds that one input may take (default 300)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every line to FILE")
    parser.set_defaults(func=run)


def _device(name: str | None) -> Any:
    import torch

    from ..testing.check import default_device

    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"--device is {name!r}, which cannot be used here: {reason}") from None
    return device


def _line(row: Any) -> str:
    if row.skipped:
        return f"{row.dtype:<9} {row.name:<70} skipped: {row.skipped}"
    if row.error == float("inf"):
        numbers = f"{'-':>9} {'-':>9}"
    else:
        numbers = f"{row.error:9.2e} {row.bound:9.2e}"
    verdict = "ok" if row.ok else f"FAILED\n{'':10}{row.where}"
    return f"{row.dtype:<9} {row.name:<70} {row.pass_:<9} {row.output:<6} {numbers}  {row.seconds:7.2f}  {verdict}"


class _Progress:
    """A line on stderr that is rewritten in place; nothing where stderr is no terminal."""

    def __init__(self, total: int):
        self.total = total
        self.shown = sys.stderr.isatty()
        self.width = 0

    def show(self, done: int, text: str) -> None:
        if self.shown:
            filled = 20 * done // max(self.total, 1)
            line = f"[{'#' * filled}{'.' * (20 - filled)}] {done}/{self.total} {text}"[:110]
            print(f"\r{line:<{self.width}}", end="", file=sys.stderr, flush=True)
            self.width = len(line)

    def clear(self) -> None:
        if self.shown and self.width:
            print("\r" + " " * self.width + "\r", end="", file=sys.stderr, flush=True)
            self.width = 0


def _summary(backend: str, rows: list[Any]) -> str:
    counted = [r for r in rows if not r.skipped]
    failed = sum(not r.ok for r in counted)
    nearest = max((r.error / r.bound for r in counted if r.ok and r.bound), default=0.0)
    skipped = len(rows) - len(counted)
    seconds = sum({(r.name, r.dtype): r.seconds for r in counted}.values())
    text = f"{backend:<10} {len(counted) - failed} of {len(counted)} passed"
    text += f", {failed} FAILED" if failed else ""
    text += f", {skipped} skipped" if skipped else ""
    return f"{text}; the nearest of those that passed used {nearest:.0%} of its bound; {seconds:.0f} s"


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON whole or not at all."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)


def _finite(row: Any) -> dict[str, Any]:
    """A row for JSON, which has no infinity."""
    fields = dataclasses.asdict(row)
    fields["pass"] = fields.pop("pass_")
    return {k: None if v == float("inf") else v for k, v in fields.items()}


def _header(device: Any, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from .. import __version__
    from ..arch import arch_of, ptxas_version, runtime

    software = runtime()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "tilewise": __version__,
        "torch": torch.__version__,
        "triton": None if software.triton is None else ".".join(map(str, software.triton)),
        "ptxas": ptxas_version(device),
        "interpreted": software.interpret,
        "device": name,
        "arch": arch_of(device).name,
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "seed": args.seed,
        "quick": args.quick,
    }


def _left_out(device: Any, names: list[str], wanted: list[str] | None) -> list[tuple[str, str]]:
    """The backends that take nothing on this device, each with its reasons."""
    import torch

    from ..capabilities import CAPABILITIES, refuse
    from ..testing.calls import Call

    out = []
    for c in CAPABILITIES:
        if c.backend not in names and (not wanted or c.backend in wanted):
            size = c.head_dims[0][0] if c.head_dims else 16
            tensor = torch.empty(1, 1, 1, size, device=device, dtype=getattr(torch, c.dtypes[0]))
            out.append((c.backend, "; ".join(map(str, refuse(c, Call(tensor, tensor, tensor).problem)))))
    return out


def _in_turn(work: list[Any], device: Any, progress: _Progress) -> Iterator[tuple[Any, list[Any]]]:
    """Every job with its rows, in order, with a heading for each backend."""
    backend = ""
    for done, job in enumerate(work):
        if job.backend != backend:
            backend = job.backend
            progress.clear()
            print(f"\n{backend}\n{_COLUMNS}", flush=True)
        progress.show(done, f"{job.backend} {job.dtype} {job.name}")
        yield job, job.rows(device)


def _at_once(build: Any, device: Any, args: argparse.Namespace, progress: _Progress) -> Iterator[tuple[Any, list[Any]]]:
    """Every job with its rows, as processes have done them."""
    from ..testing.pool import in_processes

    print(f"\n{'backend':<10} {_COLUMNS}", flush=True)
    for done, (job, rows) in enumerate(in_processes(build, device, args.jobs, args.limit), 1):
        progress.show(done, f"{job.backend} {job.dtype} {job.name}")
        yield job, rows


def _checked(made: Iterable[tuple[Any, list[Any]]], progress: _Progress, hidden: set[str] | None, named: bool) -> list[Any]:
    """All rows; those that are not hidden are printed, with their backend if ``named``."""
    rows: list[Any] = []
    for _, some in made:
        rows += some
        progress.clear()
        for row in some:
            if hidden is None or not row.ok or (row.skipped and row.skipped not in hidden):
                print(f"{row.backend:<10} {_line(row)}" if named else _line(row), flush=True)
    return rows


def run(args: argparse.Namespace) -> int:
    """Run ``tilewise check``; 0 if everything passed, 1 if not."""
    from ..testing.check import DTYPES, REFUSED, jobs

    device = _device(args.device)
    if args.json and (Path(args.json).is_dir() or not os.access(Path(args.json).resolve().parent, os.W_OK)):
        raise InvalidInput(f"--json is {args.json!r}, which cannot be written: expected a file name in a folder that is there.")
    if args.jobs < 1 or args.limit < 1:
        raise InvalidInput(f"--jobs is {args.jobs} and --limit is {args.limit}: expected 1 or more of each.")
    if args.dtype and args.dtype not in (known := [str(dtype).removeprefix("torch.") for dtype in DTYPES]):
        raise InvalidInput(f"--dtype is {args.dtype!r}, expected one of {', '.join(known)}.")
    every = partial(jobs, args.backend, device, args.quick, args.seed, args.random, args.configs, args.repeats)
    build = partial(every, only=args.only, dtype=args.dtype)
    work = build()
    header = _header(device, args)
    triton = header["triton"] or "not installed"
    print(f"tilewise {header['tilewise']}, torch {header['torch']}, triton {triton}, on {header['device']} ({header['arch']})")
    if not work and args.only and every(dtype=args.dtype):
        raise InvalidInput(f"--only is {args.only!r}, which no input's name contains: expected a part of a name as lines show it.")
    if not work:
        print("Nothing to check here:")
        for name, reason in _left_out(device, [], args.backend):
            print(f"  {name} refuses: {reason}")
        return 1
    names = list(dict.fromkeys(job.backend for job in work))
    print(f"{len(work)} inputs on {', '.join(names)}; seed {args.seed}")
    for name, reason in _left_out(device, names, args.backend):
        print(f"not checked: {name}: {reason}")
    progress = _Progress(len(work))
    hidden = {REFUSED} if args.failures else None
    start = time.monotonic()
    if args.jobs == 1:
        rows = _checked(_in_turn(work, device, progress), progress, hidden, False)
    else:
        rows = _checked(_at_once(build, device, args, progress), progress, hidden, True)
    print(f"\nsummary, after {time.monotonic() - start:.0f} s")
    for name in names:
        print(_summary(name, [r for r in rows if r.backend == name]))
    failed = [r for r in rows if not r.ok]
    if failed:
        print(f"\n{len(failed)} FAILED:")
        for row in failed:
            print(f"  {row.backend} {row.dtype} {row.name} {row.pass_}: {row.where}")
    if args.json:
        _write(Path(args.json), {"header": header, "rows": [_finite(r) for r in rows]})
        print(f"\nwritten: {args.json}")
    return 1 if failed else 0
