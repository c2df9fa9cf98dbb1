"""``tilewise bench``: forward and backward beside the peers that import, each in a process of its own."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import InvalidInput
from ..problem import DTYPES
from ._bench import report, sampler
from ._bench.cases import GRIDS, PASSES, Case
from ._bench.providers import PROVIDERS, default_names, find
from ._bench.runner import Progress, Run, Settings

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Time attention, forward and backward, beside the peers that can be imported here.

Every provider works in a process of its own. First all of them compile and are checked: sampled rows of o, dq, dk and dv
beside float64, and a wrong answer gets an error instead of a time. Then they are timed in turn, one at a time, each after the
same rest, because a card that is limited by its power slows down under load. A crash, a hang or a lack of memory of one
provider is one row with an error. The JSON file is rewritten after every row, so a run that is killed keeps what it has.
"""


def _epilog() -> str:
    grids = "\n".join(f"  {name:<10} {grid.about}" for name, grid in GRIDS.items())
    providers = "\n".join(f"  {p.name:<10} {p.about}{'' if len(p.passes) > 1 else ' (forward only)'}" for p in PROVIDERS)
    return f"""\
grids:
{grids}

providers:
{providers}
  tilewise-BACKEND        one backend of tilewise by name, e.g. tilewise-torch
  NAME=MODULE:FUNCTION    yours: FUNCTION(q, k, v, causal) -> o on (batch, heads, seqlen, head_dim)

a row of the JSON file:
  ms is the median of Triton's do_bench (of wall-clock calls on a CPU) and over rounds of their median; backward alone is timed,
  as torch.autograd.grad on a kept graph. tflops counts 4 batch heads seqlen^2 head_dim, half when causal, 2.5 times for
  backward; gbps counts each input and output once; peak_mb is what one call adds to its inputs (on a GPU); mhz and watts are
  medians of samples taken while it was timed; triton is the version that this provider used.

examples:
  tilewise bench --grid fa3 --out results.json --picture results.png
  tilewise bench --grid fa3 --providers tilewise,seed,flex --pass fwd --dims 128 --rounds 3
  tilewise bench --grid fa3 --env tilewise:PYTHONPATH=/opt/triton39 --env fa3:PYTHONPATH=/opt/fa3
  tilewise bench --grid cpu --lens 1024

exit status: 0 done (peers may have errors), 1 nothing was timed or tilewise itself has an error, 2 bad arguments
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``bench`` subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="time forward and backward beside the peers that import here",
        description=_DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--grid", choices=tuple(GRIDS), help="which cases (default: fa3 with a GPU, else cpu)")
    add("--pass", dest="passes", metavar="PASS,...", default="fwd,bwd", help="fwd, bwd or both (default: fwd,bwd)")
    add("--dims", metavar="D,...", default="", help="head_dims, instead of the grid's")
    add("--lens", metavar="N,...", default="", help="sequence lengths, instead of the grid's")
    add("--dtype", choices=DTYPES, default="", help="instead of the grid's")
    add("--providers", metavar="NAME,...", default="", help="who is timed (default: all that import)")
    add("--rounds", type=int, default=1, metavar="R", help="turns for each case; the median counts (default: %(default)s)")
    add("--rest", type=float, default=0.2, metavar="S", help="seconds of rest before each measurement (default: %(default)s)")
    add("--budget", type=float, metavar="S", help="stop after this many seconds and say what was left out")
    add("--timeout", type=float, default=60.0, metavar="S", help="the longest that one measurement may take (default: %(default)s)")
    add(
        "--prepare-timeout",
        type=float,
        default=150.0,
        metavar="S",
        help="the longest that compiling one case may take (default: %(default)s)",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME:VAR=VALUE",
        help="an environment variable for one provider's process; PYTHONPATH goes before the one that is set, "
        "e.g. flex:PYTHONPATH=/opt/triton36 for a peer that needs another Triton. May be repeated",
    )
    add("--out", type=Path, metavar="FILE", help="write the JSON file here")
    add("--picture", type=Path, metavar="FILE", help="draw TFLOP/s against length (PNG)")
    add("--commit", help="the commit that is measured, where the sources are not in a git checkout")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; returns the exit status."""
    cases, settings = _read(args)
    for path in (args.out, args.picture):
        if path is not None and not path.resolve().parent.is_dir():
            raise InvalidInput(f"the folder of {str(path)!r} does not exist: make it first, or name another file.")
    if args.picture is not None:
        import matplotlib  # noqa: F401  (say at once that it is missing, not after the run)
    progress = _bar()
    names = ", ".join(find(name).name for name in settings.providers)
    print(f"{len(cases)} cases, {'+'.join(settings.passes)}, on {settings.device}: {names}", flush=True)
    document = Run(cases, settings, _header(args, settings), args.out, progress).go()
    progress.close()
    return _conclude(document, args)


def _conclude(document: dict[str, Any], args: argparse.Namespace) -> int:
    results = report.Results(document)
    header = document["header"]
    for name, why in header["absent"].items():
        print(f"{name} is not here: {why}")
    for line in report.failures(results):
        print(f"not timed: {line}")
    if header["left_out"]:
        print(f"the budget of {args.budget:g} s ended; left out: {len(header['left_out'])} measurements")
        print("  " + "\n  ".join(header["left_out"]))
    if results.rows:
        print(f"\n{results.unit} on {report.title(header)}\n")
        print(report.render(report.point_table(results)))
        if results.ours and results.peers:
            print(f"\nspeed of {results.ours} beside each peer (above 1: {results.ours} is faster)\n")
            print(report.render(report.summary_table(results)))
    if args.out is not None:
        print(f"\nwrote {args.out}")
    if args.picture is not None and results.rows:
        report.write_picture(results, args.picture)
        print(f"wrote {args.picture}")
    ours_failed = any(report.Results.is_ours(row["provider"]) for row in results.errors())
    return int(ours_failed or all(row["ms"] is None for row in results.rows))


def _read(args: argparse.Namespace) -> tuple[list[Case], Settings]:
    grid_name = args.grid or ("fa3" if torch.cuda.is_available() else "cpu")
    grid = GRIDS[grid_name]
    if grid.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"grid {grid_name!r} needs a GPU and PyTorch sees none: use --grid cpu.")
    passes = tuple(dict.fromkeys(filter(None, args.passes.split(","))))
    if not passes or set(passes) - set(PASSES):
        raise InvalidInput(f"--pass is {args.passes!r}, expected fwd, bwd or fwd,bwd.")
    for name, least in (("rounds", 1), ("rest", 0), ("timeout", 1), ("prepare-timeout", 1), ("budget", 1)):
        value = getattr(args, name.replace("-", "_"))
        if value is not None and not least <= value < float("inf"):
            raise InvalidInput(f"--{name} is {value}, expected a number of at least {least}.")
    names = [n for n in args.providers.split(",") if n] or default_names(grid.device)
    known = [find(n) for n in names]
    labels = [p.name for p in known]
    for provider in known:
        if labels.count(provider.name) > 1:
            raise InvalidInput(f"provider {provider.name!r} is named twice.")
        if grid.device not in provider.devices:
            raise InvalidInput(f"provider {provider.name!r} does not run on {grid.device}, where grid {grid_name!r} does.")
    cases = grid.cases(_numbers("dims", args.dims), _numbers("lens", args.lens), args.dtype)
    settings = Settings(
        providers=tuple(names),
        passes=passes,
        device=grid.device,
        rounds=args.rounds,
        rest=args.rest,
        timeout=args.timeout,
        prepare_timeout=args.prepare_timeout,
        budget=args.budget,
        env=_environments(args.env, labels),
    )
    return cases, settings


def _numbers(name: str, text: str) -> tuple[int, ...]:
    words = [w for w in text.split(",") if w]
    if not all(w.isdecimal() and int(w) > 0 for w in words):
        raise InvalidInput(f"--{name} is {text!r}, expected positive integers joined by commas.")
    return tuple(dict.fromkeys(int(w) for w in words))


def _environments(options: list[str], providers: list[str]) -> dict[str, dict[str, str]]:
    out: dict[str, dict[str, str]] = {}
    for option in options:
        provider, colon, assignment = option.partition(":")
        variable, equals, value = assignment.partition("=")
        if not colon or not equals or not variable:
            raise InvalidInput(f"--env is {option!r}, expected NAME:VAR=VALUE, e.g. tilewise:PYTHONPATH=/opt/triton39.")
        if provider not in providers:
            raise InvalidInput(f"--env {option!r}: provider {provider!r} is not part of this run: {', '.join(providers)}.")
        out.setdefault(provider, {})[variable] = value
    return out


def _header(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    return {
        "tilewise": __version__,
        "commit": args.commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": _processor() if settings.device == "cpu" else None,
        "torch": torch.__version__,
        "triton": None,
        "cuda": torch.version.cuda,
        "driver": sampler.driver_version() if settings.device == "cuda" else None,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "rounds": settings.rounds,
        "rest_s": settings.rest,
        "env": settings.env,
    }


def _processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, marked if files differ; None outside of one."""
    here = Path(__file__).resolve().parent
    try:
        where = ["git", "-C", str(here)]
        head = subprocess.run([*where, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        tracked = subprocess.run([*where, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        changed = subprocess.run([*where, "status", "--porcelain", "-uno", "--", str(here.parent)], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode or tracked.returncode:
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


class _Bar(Progress):
    """A tqdm bar for each phase."""

    def __init__(self, tqdm: Any):
        self._tqdm, self._bar = tqdm, None
        self._lock = threading.Lock()

    def phase(self, title: str, total: int) -> None:
        self.close()
        quiet = not sys.stderr.isatty()
        self._bar = self._tqdm(total=total, desc=title, unit="step", dynamic_ncols=True, mininterval=10 if quiet else 0.1)

    def step(self, text: str) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.set_postfix_str(text[:80], refresh=False)
                self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Lines(Progress):
    """Where tqdm is not installed: a line for each step."""

    def __init__(self) -> None:
        self._title, self._done, self._total = "", 0, 0
        self._lock = threading.Lock()

    def phase(self, title: str, total: int) -> None:
        self._title, self._done, self._total = title, 0, total

    def step(self, text: str) -> None:
        with self._lock:
            self._done += 1
            print(f"{self._title} {self._done}/{self._total}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""


def _bar() -> _Bar | _Lines:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return _Lines()
    return _Bar(tqdm)
