"""Tables and a picture of a finished run, made from its JSON document alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PASS_NAMES", "Results", "failures", "point_table", "render", "summary_table", "title", "write_picture"]

Point = tuple[str, int, bool, int, str]  # pass, head_dim, causal, seqlen_k, case
PASS_NAMES = {"fwd": "forward", "bwd": "backward"}
_COLORS = {
    "seed": "#8c8c8c",
    "flex": "#12b5a6",
    "flash": "#e9c46a",
    "cudnn": "#76b900",
    "efficient": "#f4a261",
    "math": "#b08968",
    "sdpa": "#4d7c0f",
    "fa3": "#1d6fb8",
    "fa4": "#7b4fa3",
}
_OURS_COLOR = "#d1495b"


def _geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


class Results:
    """The document, by point and provider. ``ours`` is the provider that the others are compared with."""

    def __init__(self, document: dict[str, Any]):
        self.header: dict[str, Any] = document["header"]
        self.rows: list[dict[str, Any]] = document["rows"]
        self.providers = list(dict.fromkeys([*self.header.get("providers", {}), *(r["provider"] for r in self.rows)]))
        mine = [p for p in self.providers if self.is_ours(p)]
        self.ours = "tilewise" if "tilewise" in mine else mine[0] if mine else None
        self.ms: dict[Point, dict[str, float | None]] = {}
        self.speed: dict[Point, dict[str, float | None]] = {}
        fastest = max((row["tflops"] for row in self.rows if row["tflops"] is not None), default=1.0)
        self.unit, self.factor = ("TFLOP/s", 1.0) if fastest >= 1 else ("GFLOP/s", 1e3)
        for row in self.rows:
            point = (row["pass"], row["head_dim"], row["causal"], row["seqlen_k"], row["case"])
            self.ms.setdefault(point, {})[row["provider"]] = row["ms"]
            self.speed.setdefault(point, {})[row["provider"]] = None if row["tflops"] is None else row["tflops"] * self.factor

    @staticmethod
    def is_ours(provider: str) -> bool:
        return provider == "tilewise" or provider.startswith("tilewise-")

    @property
    def peers(self) -> list[str]:
        return [p for p in self.providers if not self.is_ours(p)]

    @property
    def passes(self) -> list[str]:
        return list(dict.fromkeys(point[0] for point in self.ms))

    def points(self, pass_: str | None = None) -> list[Point]:
        return [p for p in self.ms if pass_ is None or p[0] == pass_]

    def best_peer(self, point: Point) -> str | None:
        """The fastest other provider at a point."""
        timed = {p: ms for p in self.peers if (ms := self.ms[point].get(p)) is not None}
        return min(timed, key=lambda p: timed[p]) if timed else None

    def ratio(self, point: Point, peer: str | None) -> float | None:
        """Our speed beside a peer's: above 1 we are faster. None where either has no time."""
        if peer is None or self.ours is None:
            return None
        ours, theirs = self.ms[point].get(self.ours), self.ms[point].get(peer)
        return theirs / ours if ours and theirs else None

    def ratios(self, pass_: str, peer: str) -> list[float]:
        return [r for point in self.points(pass_) if (r := self.ratio(point, peer)) is not None]

    def best_ratios(self, pass_: str) -> list[float]:
        return [r for point in self.points(pass_) if (r := self.ratio(point, self.best_peer(point))) is not None]

    def errors(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["error"] is not None]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def point_table(results: Results) -> list[list[str]]:
    """One line a point: the speed of every provider, the best peer, and our speed beside it, beside the seed and beside flex."""
    versus = [p for p in ("seed", "flex") if p in results.peers and results.ours]
    head = ["pass", "D", "causal", "N", *results.providers, "best peer"]
    head += [f"{results.ours} / best peer", *(f"{results.ours} / {p}" for p in versus)] if results.ours else []
    lines = [head]
    for pass_ in results.passes:
        lines += _pass_lines(results, pass_, versus)
    return lines


def _pass_lines(results: Results, pass_: str, versus: list[str]) -> list[list[str]]:
    """The points of one pass, and under them the geometric means of our relative speed."""
    lines = []
    for point in results.points(pass_):
        _, head_dim, causal, seqlen, _ = point
        best = results.best_peer(point)
        line = [pass_, str(head_dim), "yes" if causal else "no", str(seqlen)]
        line += [_figure(results.speed[point].get(p)) for p in results.providers]
        line.append(best or "")
        if results.ours:
            line += [_times(results.ratio(point, best)), *(_times(results.ratio(point, p)) for p in versus)]
        lines.append(line)
    if results.ours:
        blanks = [""] * (len(results.providers) + 1)
        means = [_geometric_mean(results.best_ratios(pass_)), *(_geometric_mean(results.ratios(pass_, p)) for p in versus)]
        if any(m is not None for m in means):
            lines.append([pass_, "", "", "geometric mean", *blanks, *map(_times, means)])
    return lines


def summary_table(results: Results) -> list[list[str]]:
    """One line a pass and peer: our speed beside the peer's over all points that both ran."""
    lines = [["pass", "peer", "points", "faster", "slower", "lowest", "geometric mean", "highest"]]
    for pass_ in results.passes:
        versus: list[tuple[str, list[float]]] = [("the best of all peers", results.best_ratios(pass_))]
        versus += [(p, results.ratios(pass_, p)) for p in results.peers]
        for name, ratios in versus:
            if not ratios:
                continue
            faster = sum(r > 1 for r in ratios)
            spread = (min(ratios), _geometric_mean(ratios), max(ratios))
            counts = map(str, (len(ratios), faster, sum(r < 1 for r in ratios)))
            lines.append([PASS_NAMES.get(pass_, pass_), name, *counts, *map(_times, spread)])
    return lines


def failures(results: Results) -> list[str]:
    """What could not be timed: a line for each provider, pass and error."""
    groups: dict[tuple[str, str, str], int] = {}
    for row in results.errors():
        key = (row["provider"], str(PASS_NAMES.get(row["pass"], row["pass"])), row["error"])
        groups[key] = groups.get(key, 0) + 1
    return [f"{provider}, {pass_}, {count} point{'s' * (count > 1)}: {error}" for (provider, pass_, error), count in groups.items()]


def render(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is its head, as Markdown with aligned columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    out.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(out)


def title(header: dict[str, Any]) -> str:
    """What was measured on: card, versions, date, commit."""
    parts = [str(header.get("device") or "unknown device")]
    versions = (("PyTorch", "torch"), ("Triton", "triton"), ("ptxas", "ptxas"), ("CUDA", "cuda"))
    parts += [f"{name} {header[key]}" for name, key in versions if header.get(key)]
    if header.get("driver"):
        parts.append(f"driver {header['driver']}")
    if header.get("date"):
        parts.append(str(header["date"])[:10])
    if header.get("commit"):
        parts.append(f"commit {str(header['commit'])[:10]}")
    return ", ".join(parts)


def write_picture(results: Results, path: Path, passes: Sequence[str] = ()) -> None:
    """Speed against length, one panel for each pass (all of them, or those named), mask and head_dim."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dims = sorted({p[1] for p in results.ms})
    bands = [(pass_, causal) for pass_ in passes or results.passes for causal in sorted({p[2] for p in results.points(pass_)})]
    figure = Figure(figsize=(11.0, 1.1 + 2.3 * max(1, len(bands))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(bands)), max(1, len(dims)), sharey="row", sharex=True, squeeze=False)
    handles: dict[str, Any] = {}
    for i, (pass_, causal) in enumerate(bands):
        for j, head_dim in enumerate(dims):
            ax = axes[i][j]
            points = sorted((p for p in results.points(pass_) if p[1] == head_dim and p[2] == causal), key=lambda p: p[3])
            for provider in [*results.peers, *(p for p in results.providers if results.is_ours(p))]:
                xy = [(p[3], value) for p in points if (value := results.speed[p].get(provider)) is not None]
                if xy:
                    handles.setdefault(provider, ax.plot(*zip(*xy, strict=True), **_line(provider))[0])
            ax.set_xscale("log", base=2)
            ax.set_xticks(sorted({p[3] for p in results.ms}))
            ax.xaxis.set_major_formatter(_length)
            ax.minorticks_off()
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
            if i == 0:
                ax.set_title(f"head_dim {head_dim}", fontsize=10)
            if i == len(bands) - 1:
                ax.set_xlabel("sequence length")
            if j == 0:
                ax.set_ylabel(f"{PASS_NAMES.get(pass_, pass_)}, {'causal' if causal else 'full'}\n{results.unit}")
    for ax in axes[:, 0]:
        ax.set_ylim(bottom=0)  # after every panel of the row, whose scale it shares
    figure.suptitle(title(results.header), fontsize=10)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)), frameon=False)
    figure.savefig(path, dpi=130)


def _line(provider: str) -> dict[str, Any]:
    if Results.is_ours(provider):
        style = "-" if provider == "tilewise" else "--"
        return {"color": _OURS_COLOR, "linewidth": 2.6, "marker": "o", "markersize": 5, "linestyle": style, "zorder": 5}
    return {"color": _COLORS.get(provider, "#555555"), "linewidth": 1.3, "marker": "o", "markersize": 3}


_length: Callable[[float, int], str] = lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"  # noqa: E731
