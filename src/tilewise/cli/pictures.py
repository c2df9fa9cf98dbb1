"""The picture that the demo draws: loss curves and memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..tile_map import figure_of, save

__all__ = ["MemoryLine", "demo_picture"]

# Two hues that stay apart for every kind of colour vision, and greys for what frames them.
_TILES, _DENSE, _GREY = "#0072b2", "#d55e00", "#666666"


@dataclass(frozen=True)
class MemoryLine:
    """Measured peak memory of one provider: (seqlen, bytes) points."""

    name: str
    points: list[tuple[int, int]]


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
    figure, (left, right) = figure_of(12, 4.8, 2)
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
    save(figure, path)
