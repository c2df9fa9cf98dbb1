"""The pictures that the command line draws: the demo's curves, and the tile map of a problem."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan import EMPTY, FREE, MASKED, TilePlan
from ..reference import mask_of

__all__ = ["MemoryLine", "demo_picture", "tile_map"]

# Two hues that stay apart for every kind of colour vision, and greys for what frames them.
_TILES, _DENSE, _GREY = "#0072b2", "#d55e00", "#666666"
_COLOURS = {EMPTY: "#f2f2f2", MASKED: "#f0b070", FREE: "#7fb3d5"}
_NAMES = {EMPTY: "empty: never visited", MASKED: "masked: visited with the mask", FREE: "free: visited without the mask"}
# A mask is drawn element by element only while a reader could still see an element.
_SMALL = 128


@dataclass(frozen=True)
class MemoryLine:
    """Measured peak memory of one provider: (seqlen, bytes) points."""

    name: str
    points: list[tuple[int, int]]


def _figure(width: float, height: float, columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), dpi=150, layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def human_bytes(size: float) -> str:
    """``12.3 MB``: powers of 1,000, three digits."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB" if size < 1000 else f"{size:,.0f} GB"


def demo_picture(
    path: Path, losses: dict[str, list[float]], largest_difference: float, lines: list[MemoryLine], device: str
) -> None:
    """Left the loss curves (in bits a byte), right the peak memory against the sequence length."""
    figure, (left, right) = _figure(12, 4.8, 2)
    bit = 0.6931471805599453
    (name_a, a), (name_b, b) = losses.items()
    steps = range(1, len(a) + 1)
    left.plot(steps, [x / bit for x in a], color=_TILES, linewidth=3.5, alpha=0.45, label=name_a)
    left.plot(steps, [x / bit for x in b], color=_DENSE, linewidth=0.9, label=name_b)
    left.set(xlabel="training step", ylabel="training loss (bits per byte)", xlim=(1, max(2, len(a))))
    left.set_title("Same seed, two attentions: the loss curves fall together", fontsize=11)
    left.grid(alpha=0.25)
    gap = f"largest difference {largest_difference / bit:.1e} bits"
    left.legend(frameon=False, loc="upper right", title=gap, alignment="right")

    for line, colour, marker, growth in zip(lines, (_TILES, _DENSE), "os", (1, 2), strict=True):
        if not line.points:
            continue
        lengths, sizes = zip(*line.points, strict=True)
        right.plot(lengths, sizes, color=colour, marker=marker, linewidth=2, label=line.name)
        last, size = lengths[-1], sizes[-1]
        right.annotate(
            human_bytes(size), (last, size), xytext=(0, 8), textcoords="offset points", ha="center", color=colour, fontsize=9
        )
        slope = [size * (n / last) ** growth for n in lengths]
        right.plot(lengths, slope, color=_GREY, linewidth=1, linestyle=":" if growth == 1 else "--",
                   label=f"proportional to {'the length' if growth == 1 else 'its square'}")  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    ticks = sorted({n for line in lines for n, _ in line.points})
    right.set_xticks(ticks, [f"{n:,}" for n in ticks])
    right.yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    right.minorticks_off()
    right.margins(y=0.12)
    right.set(xlabel="sequence length", ylabel="peak memory beyond the inputs")
    right.set_title("Forward and backward on one sequence: linear beside quadratic", fontsize=11)
    right.grid(alpha=0.25)
    right.legend(frameon=False, loc="upper left", fontsize=9)
    figure.text(0.995, 0.005, f"measured on {device}", ha="right", va="bottom", fontsize=7, color=_GREY)
    _save(figure, path)


def tile_map(path: Path, plan: TilePlan, title: str) -> None:
    """The tiles of one head: which are empty, masked and free; for a small problem also which elements the mask lets through."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    p = plan.problem
    elements = max(p.seqlen_q, p.seqlen_k) <= _SMALL
    aspect = min(3.0, max(0.4, p.seqlen_q / max(1, p.seqlen_k)))
    figure, (axis,) = _figure(7.2, min(12.0, 7.0 * aspect + 1.6), 1)
    extent = (0, plan.n_blocks * plan.block_n, plan.m_blocks * plan.block_m, 0)
    palette = ListedColormap([_COLOURS[EMPTY], _COLOURS[MASKED], _COLOURS[FREE]])
    axis.imshow(plan.tiles().numpy(), cmap=palette, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
    if elements:
        rows, columns = mask_of(p.spec, p.seqlen_q, p.seqlen_k).nonzero(as_tuple=True)
        side = 2.2 * 72 / max(p.seqlen_q, p.seqlen_k)
        axis.scatter(columns + 0.5, rows + 0.5, s=min(40.0, side**2), marker="s", color="#1a1a1a", alpha=0.55, linewidths=0)
    if max(plan.m_blocks, plan.n_blocks) <= 64:
        axis.set_xticks([n * plan.block_n for n in range(plan.n_blocks + 1)], minor=True)
        axis.set_yticks([m * plan.block_m for m in range(plan.m_blocks + 1)], minor=True)
        axis.grid(which="minor", color="white", linewidth=1.2)
        axis.tick_params(which="minor", length=0)
    axis.set(xlim=(0, p.seqlen_k), ylim=(p.seqlen_q, 0), xlabel="key", ylabel="query", aspect="equal")
    axis.set_title(title, fontsize=10)
    counts = dict(zip((EMPTY, MASKED, FREE), plan.counts(), strict=True))
    patches = [Patch(color=_COLOURS[kind], label=f"{counts[kind]:,} {_NAMES[kind]}") for kind in (EMPTY, MASKED, FREE)]
    if elements:
        patches.append(Patch(color="#7a7a7a", label="a key that the query sees"))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    _save(figure, path)
