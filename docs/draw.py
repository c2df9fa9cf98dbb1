"""Draw the pictures of how-it-works.md.

    python docs/draw.py             # writes docs/pictures/*.png

The tile maps come from the planner that the kernels share and the curves from the formula: no picture holds a number of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

import tilewise
from tilewise.plan import EMPTY, FREE, MASKED, TilePlan
from tilewise.reference import mask_of

PICTURES = Path(__file__).resolve().parent / "pictures"
# Two hues that stay apart for every kind of colour vision, and greys.
BLUE, ORANGE, GREY, DARK = "#0072b2", "#d55e00", "#999999", "#333333"
COLOURS = {EMPTY: "#f2f2f2", MASKED: "#f0b070", FREE: "#7fb3d5"}


def _plan(mask: str, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> TilePlan:
    return TilePlan(tilewise.Problem.parse(f"seqlen={seqlen_q}x{seqlen_k} head_dim=16 mask={mask} arch=cpu"), block_m, block_n)


def _tile_map(axis: Any, plan: TilePlan, title: str) -> None:
    """Tiles as squares, and a dot on every pair that is seen."""
    p = plan.problem
    for m, row in enumerate(plan.tiles().tolist()):
        for n, kind in enumerate(row):
            corner = (n * plan.block_n - 0.5, m * plan.block_m - 0.5)
            axis.add_patch(Rectangle(corner, plan.block_n, plan.block_m, facecolor=COLOURS[kind], edgecolor="white", linewidth=2))
    seen = mask_of(p.spec, p.seqlen_q, p.seqlen_k).nonzero()
    axis.scatter(seen[:, 1], seen[:, 0], s=4, color=DARK, linewidths=0)
    axis.set_xlim(-0.5, plan.n_blocks * plan.block_n - 0.5)
    axis.set_ylim(plan.m_blocks * plan.block_m - 0.5, -0.5)
    axis.set_aspect("equal")
    axis.set_xticks([n * plan.block_n for n in range(plan.n_blocks)])
    axis.set_yticks([m * plan.block_m for m in range(plan.m_blocks)])
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("key")
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def tiles() -> Any:
    """Three masks on tiles of 8 x 8."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
    _tile_map(axes[0], _plan("full", 40, 37, 8, 8), "no mask, 37 keys: the last tile\nreaches past the end")
    _tile_map(axes[1], _plan("causal", 40, 40, 8, 8), "causal: the diagonal is masked,\nbelow it all is free")
    _tile_map(axes[2], _plan("upper:0,lower:17", 40, 40, 8, 8), "window (17, 0): masked edge,\nfree middle, masked edge")
    axes[0].set_ylabel("query")
    names = {EMPTY: "empty: never visited", MASKED: "masked: visited with the mask", FREE: "free: visited without it"}
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=name) for kind, name in names.items()],
        loc="outside lower center", ncols=3, frameon=False,
    )  # fmt: skip
    return figure


def live() -> Any:
    """What one program holds while K and V stream past its tile of queries."""
    figure, axis = plt.subplots(figsize=(9, 5.2), layout="constrained")

    def box(x: float, y: float, w: float, h: float, text: str, colour: str, **style: Any) -> None:
        axis.add_patch(Rectangle((x, y), w, h, facecolor=colour, **{"edgecolor": "white", "linewidth": 1.5, **style}))
        axis.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=9, color=DARK)

    ghost = {"edgecolor": GREY, "linestyle": "--", "linewidth": 1.2}
    axis.add_patch(Rectangle((3, 0), 8, 6, facecolor="none", **ghost))
    axis.text(7, 0.9, "the score matrix, seqlen_q x seqlen_k:\nnever exists", ha="center", va="center", fontsize=10, color=GREY)
    box(0.2, 2, 2, 1.5, "q_tile\n[BLOCK_M, D]\nstays", "#7fb3d5")
    for n in range(8):
        now = n == 4
        box(3 + n, 6.9, 1, 1.3, "K" if not now else "k_tile", "#f0b070" if now else "#f2f2f2")
        box(3 + n, 8.3, 1, 1.3, "V" if not now else "v_tile", "#f0b070" if now else "#f2f2f2")
        if n < 4:
            box(3 + n, 2, 1, 1.5, "gone", "#f2f2f2")
    box(7, 2, 1, 1.5, "qk, p\nnow", "#f0b070", edgecolor=ORANGE)
    box(11.7, 2, 2, 1.5, "acc\n[BLOCK_M, D_v]", "#7fb3d5")
    box(13.9, 2, 0.7, 1.5, "m_i", "#7fb3d5")
    box(14.7, 2, 0.7, 1.5, "l_i", "#7fb3d5")
    axis.add_patch(FancyArrowPatch((8.1, 6.5), (10.9, 6.5), arrowstyle="->", mutation_scale=14, color=ORANGE))
    axis.text(9.5, 6.25, "next tiles", ha="center", va="top", fontsize=9, color=ORANGE)
    axis.text(7, 9.8, "K and V in memory: one tile of each is on the chip (a few more are on their way)", ha="center", fontsize=9)
    axis.text(13.55, 1.7, "one row each for every query;\nthey survive the loop", ha="center", va="top", fontsize=9)
    axis.set_xlim(0, 15.6)
    axis.set_ylim(-0.2, 10.2)
    axis.axis("off")
    return figure


def _online(scores: list[float], values: list[float], block: int, repair_acc: bool, repair_l: bool) -> list[float]:
    """The output after every tile of one row, with or without the multiplications by alpha."""
    m, total, acc, out = -math.inf, 0.0, 0.0, []
    for first in range(0, len(scores), block):
        tile, held = scores[first : first + block], values[first : first + block]
        m_new = max(m, *tile)
        alpha = 2 ** (m - m_new)
        p = [2 ** (s - m_new) for s in tile]
        total = total * (alpha if repair_l else 1) + sum(p)
        acc = acc * (alpha if repair_acc else 1) + sum(w * x for w, x in zip(p, held, strict=True))
        m = m_new
        out.append(acc / total)
    return out


def alpha() -> Any:
    """One row, eight tiles, scores that rise: the output so far."""
    block, count = 4, 8
    scores = [0.35 * j + 1.5 * math.sin(2.1 * j) for j in range(block * count)]
    values = [math.cos(0.4 * j) for j in range(block * count)]
    weights = [[2**s for s in scores[: (t + 1) * block]] for t in range(count)]
    truth = [sum(w * x for w, x in zip(row, values, strict=False)) / sum(row) for row in weights]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    at = range(1, count + 1)
    highest = [max(scores[: t * block]) for t in at]
    left.plot([(j + 0.5) / block + 0.5 for j in range(len(scores))], scores, "o", ms=3, color=GREY, label="scores (base two)")
    left.step([0.5, *[t + 0.5 for t in at]], [highest[0], *highest], where="pre", color=BLUE, label="m_i, the running maximum")
    left.set_ylabel("score")
    right.plot(at, truth, "o", ms=9, mfc="none", color=DARK, label="softmax of the keys so far")
    right.plot(at, _online(scores, values, block, True, True), "-", color=BLUE, label="acc / l_i, both multiplied by alpha")
    right.plot(at, _online(scores, values, block, False, True), "--", color=ORANGE, label="acc not multiplied by alpha")
    right.plot(at, _online(scores, values, block, True, False), ":", color=GREY, label="l_i not multiplied by alpha")
    right.set_ylabel("output of the row")
    for axis in (left, right):
        axis.set_xlabel("key tile")
        axis.set_xticks(list(at))
        axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def sentinel() -> Any:
    """A tile in which a row sees no key: what its eight lanes become."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", sharey=True)
    lanes = range(8)
    cases = (
        ("fill -1e6, pivot = maximum", [2 ** (-1e6 - -1e6)] * 8, ORANGE, "exp2(-1e6 - -1e6) = 1:\nl_i = 8, o = the mean of v"),
        ("fill -inf, pivot = maximum", [math.nan] * 8, ORANGE, "-inf - -inf = NaN:\nall later sums of the row are NaN"),
        ("fill -inf, pivot = 0", [0.0] * 8, BLUE, "exp2(-inf - 0) = 0:\nl_i = 0, o = 0, lse = -inf"),
    )
    for axis, (title, p, colour, says) in zip(axes, cases, strict=True):
        axis.bar(lanes, [0 if math.isnan(x) else x for x in p], color=colour, width=0.7)
        if any(map(math.isnan, p)):
            for lane in lanes:
                axis.text(lane, 0.06, "NaN", ha="center", fontsize=8, color=colour)
        axis.set_title(title, fontsize=10)
        axis.text(3.5, 1.35, says, ha="center", va="center", fontsize=9)
        axis.set_ylim(0, 1.6)
        axis.set_xticks(list(lanes))
        axis.set_xlabel("lane of the tile (all masked)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("p")
    return figure


def memory() -> Any:
    """Bytes by formula: the scores of one head beside what tiles add to the inputs."""
    lengths = [2**n for n in range(9, 18)]
    head_dim = 128
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    mib = 2**20
    axis.loglog(lengths, [4 * n * n / mib for n in lengths], "o-", color=ORANGE, base=2)
    axis.loglog(lengths, [(2 * head_dim + 4) * n / mib for n in lengths], "o-", color=BLUE, base=2)
    axis.text(lengths[3], 4 * lengths[3] ** 2 / mib * 4, "float32 scores\n(quadratic)", color=ORANGE, ha="right", fontsize=9)
    axis.text(lengths[5], (2 * head_dim + 4) * lengths[5] / mib / 4, "o and lse (linear)", color=BLUE, fontsize=9)
    axis.set_xlabel("seqlen (queries = keys)")
    axis.set_ylabel("MiB for one head of head_dim 128, bfloat16")
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45, fontsize=8)
    ticks = [2.0**n for n in range(-3, 18, 3)]
    axis.set_yticks(ticks, [f"{t:g}" if t < 1000 else f"{t:,.0f}" for t in ticks], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.2)
    return figure


def backward() -> Any:
    """The same causal plan, walked by rows for dq and by columns for dk and dv."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.4), layout="constrained")
    plan = _plan("causal", 32, 32, 8, 8)
    _tile_map(axes[0], plan, "dq: a tile of queries stays,\nkeys stream past (keys_of)")
    _tile_map(axes[1], plan, "dk, dv: a tile of keys stays,\nqueries stream past (queries_of)")
    axes[0].set_ylabel("query")
    row, column = 2, 1
    lo, _, _, hi = plan.keys_of(row)
    axes[0].add_patch(Rectangle((lo * 8 - 0.3, row * 8 - 0.3), (hi - lo) * 8 - 0.4, 7.6, fill=False, ec=ORANGE, lw=2.5))
    lo, _, _, hi = plan.queries_of(column)
    axes[1].add_patch(Rectangle((column * 8 - 0.3, lo * 8 - 0.3), 7.6, (hi - lo) * 8 - 0.4, fill=False, ec=ORANGE, lw=2.5))
    return figure


DRAWINGS: tuple[Callable[[], Any], ...] = (live, memory, alpha, sentinel, tiles, backward)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="FOLDER", help="default: docs/pictures")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for drawing in DRAWINGS:
        figure = drawing()
        path = args.out / f"{drawing.__name__}.png"
        # Without a version inside, the same picture is the same file.
        figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
        print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
