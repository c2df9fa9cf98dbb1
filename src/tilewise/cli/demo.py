"""``tilewise demo``: train a small model on real text with two attentions, then measure one long sequence, then draw both."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..arch import arch_of
from ..errors import InvalidInput
from ..problem import Problem
from ..select import choose
from . import longseq, training
from .longseq import Case

__all__ = ["add_parser", "run"]

_TRAINING_SECONDS = 30.0
_NAMES = {"tilewise": "tilewise", "materialised": "materialised scores"}
_say = functools.partial(print, flush=True)  # in order with the progress bars, also in a log file

_DESCRIPTION = """\
Show on real input that tilewise computes the same attention as PyTorch, in linear memory.

  1. Takes real text: CPython's own documentation topics, which ship with the interpreter.
  2. Trains a small causal byte-level transformer on it twice from the same seed, once with tilewise and once with PyTorch's
     math attention: the two loss curves fall together.
  3. Runs one long sequence forward and backward beside materialised scores: time, peak memory, errors against float64.
  4. Writes one picture of it all.

On a CPU with two cores it takes about two minutes. On a GPU it takes larger sizes.
"""
_EXAMPLES = """\
examples:
  tilewise demo
  tilewise demo --quick                     everything in miniature, in a few seconds
  tilewise demo --seqlen 32768 --steps 100  a longer sequence, a shorter training
  tilewise demo --device cpu --out /tmp/picture.png
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train on real text beside PyTorch's attention, measure one long sequence, draw a picture",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = "training steps (default: 400 on a CPU, 1000 on a GPU, fewer where they would take long)"
    parser.add_argument("--steps", type=_at_least(1), metavar="N", help=steps)
    parser.add_argument(
        "--seqlen", type=_at_least(256), metavar="N", help="tokens of the long sequence (default: 8192 on a CPU, 32768 on a GPU)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output/tilewise-demo.png"), metavar="FILE", help="the picture (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="tilewise's backend (default: auto)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, batches and inputs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a short sequence, to see that everything runs")
    parser.set_defaults(func=run)


def _at_least(least: int) -> Any:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small, expected at least {least}")
        return value

    return integer


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The sizes of one demo."""

    model: training.Size
    case: Case
    generated: int
    may_shorten: bool


def _plan(args: argparse.Namespace) -> _Plan:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("--device is cuda, but PyTorch sees no CUDA device here: leave --device out, or use --device cpu.")
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if args.quick:
        model, seqlen, generated = training.Size(20, 8, 64, 1, 64, 4, 2), 1024, 32
    elif device == "cuda":
        model, seqlen, generated = training.Size(1000, 32, 256, 4, 256, 8, 2), 32768, 240
    else:
        model, seqlen, generated = training.Size(400, 16, 128, 2, 128, 4, 2), 8192, 240
    model = dataclasses.replace(model, steps=args.steps or model.steps)
    heads, head_dim, dtype = ((2, 1), 64, "float32") if device == "cpu" else ((4, 1), 128, "bfloat16")
    case = Case(args.seqlen or seqlen, *heads, head_dim, dtype, device, args.seed, args.backend)
    return _Plan(model, case, generated, args.steps is None and not args.quick)


def run(args: argparse.Namespace) -> int:
    import matplotlib  # noqa: F401  a missing package is better said now than after a minute
    import tqdm  # noqa: F401

    from . import pictures

    began = time.perf_counter()
    plan = _plan(args)
    case = plan.case
    problem = Problem.parse(
        f"dtype={case.dtype} heads={case.heads_q}/{case.heads_kv} seqlen={case.seqlen} head_dim={case.head_dim} "
        "mask=causal grad=qkv",
        arch_of(torch.device(case.device)),
    )
    backend = choose(problem, args.backend).backend
    if case.device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"a CPU, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    _say(f"tilewise demo on {where}; torch {torch.__version__}, tilewise backend {backend!r}")
    curves = _train_twice(plan, args.seed)
    largest = max(abs(a - b) for a, b in zip(*(c.losses for c in curves.values()), strict=True))
    lines = _long_sequence(case, problem)
    pictures.demo_picture(args.out, {name: c.losses for name, c in curves.items()}, largest, lines, where)
    _say(f"\nPicture: {args.out}\nDone in {time.perf_counter() - began:.0f} s.")
    return 0


def _bar(total: int, what: str, unit: str) -> Any:
    from tqdm import tqdm

    # A terminal is repainted five times a second; a log file gets a line now and then.
    interval = 0.2 if sys.stderr.isatty() else 10
    return tqdm(total=total, desc=f"   {what:<22}", unit=unit, mininterval=interval, file=sys.stderr, dynamic_ncols=True)


def _affordable(size: training.Size, text: torch.Tensor, attend: training.Attention, seed: int, device: str) -> training.Size:
    """Fewer steps where the machine is slow: one training should take at most ``_TRAINING_SECONDS``, and 40 steps show a curve."""
    trial = training.train(text, dataclasses.replace(size, steps=8), attend, seed, device, lambda _: None)
    steps = int(_TRAINING_SECONDS / trial.seconds * 8)
    if steps >= size.steps:
        return size
    size = dataclasses.replace(size, steps=max(40, steps // 10 * 10))
    _say(f"   (a step takes {trial.seconds / 8:.2f} s here: {size.steps} steps, so that the demo stays short; --steps N overrules)")
    return size


def _train_twice(plan: _Plan, seed: int) -> dict[str, training.Curve]:
    text = training.corpus()
    size, device = plan.model, plan.case.device
    attentions = {"tilewise": training.tilewise_attention(plan.case.backend), "PyTorch math": training.math_attention()}
    _say(f"\n1. Text: CPython's documentation topics, {len(text):,} bytes; the last tenth is held out.")
    if plan.may_shorten:
        size = _affordable(size, text, attentions["tilewise"], seed, device)
    _say(
        f"2. Training a causal byte transformer twice from seed {seed} ({size.layers} layers, width {size.width}, "
        f"{size.heads_q} query and {size.heads_kv} key heads, {size.steps} steps of {size.batch} x {size.context} bytes):"
    )
    curves: dict[str, training.Curve] = {}
    for name, attend in attentions.items():
        with _bar(size.steps, name, "step") as bar:

            def on_step(loss: float, bar: Any = bar) -> None:
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()

            curves[name] = training.train(text, size, attend, seed, device, on_step)
    bit = math.log(2)
    _say(f"   {'':<22}{'first loss':>12}{'final loss':>12}{'held-out':>12}{'bits per byte':>15}{'seconds':>9}")
    for name, c in curves.items():
        numbers = f"{c.losses[0]:>12.4f}{c.losses[-1]:>12.4f}{c.held_out:>12.4f}{c.held_out / bit:>15.3f}{c.seconds:>9.1f}"
        _say(f"   {name:<22}{numbers}")
    gaps = [abs(a - b) for a, b in zip(*(c.losses for c in curves.values()), strict=True)]
    at = max(range(len(gaps)), key=gaps.__getitem__)
    _say(f"   Largest difference of the two curves: {gaps[at]:.1e} (step {at + 1}); at the first step: {gaps[0]:.1e}.")
    sample = training.generate(curves["tilewise"].model, attentions["tilewise"], "The ", plan.generated, seed, device)
    _say("   What the tilewise model writes after 'The ':")
    _say("\n".join(f"     | {line}" for line in sample.splitlines()))
    return curves


def _long_sequence(case: Case, problem: Problem) -> list[Any]:
    from .pictures import MemoryLine, human_bytes

    _say(f"\n3. One sequence of {case.seqlen:,} tokens, causal, forward and backward:\n   {problem}")
    free = longseq.free_bytes(case.device)
    lengths = [n for n in (case.seqlen // 16, case.seqlen // 8, case.seqlen // 4, case.seqlen // 2, case.seqlen) if n >= 64]
    cases = [dataclasses.replace(case, seqlen=n) for n in lengths]
    fits = {c.seqlen: longseq.dense_bytes(c) < 0.8 * free for c in cases}
    providers = longseq.PROVIDERS if fits[case.seqlen] else longseq.PROVIDERS[:1]
    if len(providers) == 1:
        need, there = human_bytes(longseq.dense_bytes(case)), human_bytes(free)
        _say(f"   Materialised scores would need about {need}, and {there} are free: they run on shorter sequences only.")

    runs = [(p, case, False) for p in providers]
    runs += [(p, c, True) for p in longseq.PROVIDERS for c in cases if p == "tilewise" or fits[c.seqlen]]
    beyond = dataclasses.replace(case, seqlen=2 * case.seqlen)  # where only tiles go
    runs.append(("tilewise", beyond, True))
    peaks: dict[tuple[str, int, bool], int] = {}
    with _bar(len(runs), "peak memory", "run") as bar:
        for (provider, c, backward), size in zip(runs, longseq.memory(runs), strict=True):
            peaks[provider, c.seqlen, backward] = size
            bar.update()
    seconds: dict[str, tuple[float, float]] = {}
    with _bar(2 * len(providers), "time", "run") as bar:
        for provider in providers:
            longseq.run_once(provider, cases[0], backward=True)
            bar.update()
            seconds[provider] = longseq.run_once(provider, case, backward=True)
            bar.update()
    chunk = max(16, min(case.seqlen, 2**22 // (case.seqlen * case.heads_q)))
    with _bar(math.ceil(case.seqlen / chunk), "float64 oracle", "chunk") as bar:
        worst = longseq.errors(case, providers, lambda: bar.update() and None, chunk)

    _say(f"   Peak memory beyond the inputs, as {longseq.how_measured(case.device)} shows it:")
    _say(f"   {'':<22}{'forward':>12}{'+ backward':>12}{'forward':>12}{'backward':>12}")
    for provider in providers:
        memory = [human_bytes(peaks[provider, case.seqlen, backward]) for backward in (False, True)]
        times = [f"{s * 1e3:,.0f} ms" if s >= 0.01 else f"{s * 1e3:.2f} ms" for s in seconds[provider]]
        _say(f"   {_NAMES[provider]:<22}{memory[0]:>12}{memory[1]:>12}{times[0]:>12}{times[1]:>12}")
    _say(f"   Largest absolute error against float64:\n   {'':<22}" + "".join(f"{n:>10}" for n in ("o", "lse", "dq", "dk", "dv")))
    for provider in providers:
        found = [f"{worst[provider][n]:.1e}" if n in worst[provider] else "-" for n in ("o", "lse", "dq", "dk", "dv")]
        _say(f"   {_NAMES[provider]:<22}" + "".join(f"{e:>10}" for e in found))
    labels = {"tilewise": "tilewise (fixed tiles + linear)", "materialised": "materialised scores"}
    points = {p: [(n, peaks[p, n, True]) for n in (*lengths, beyond.seqlen) if (p, n, True) in peaks] for p in longseq.PROVIDERS}
    return [MemoryLine(labels[p], points[p]) for p in longseq.PROVIDERS]
