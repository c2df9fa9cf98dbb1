"""The picture of a mask: its tiles, and its elements where they can be seen. Needs matplotlib."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .backends import module_of
from .errors import InvalidInput
from .plan import EMPTY, FREE, MASKED, MaskTensors, TilePlan, tile_kinds
from .problem import Problem
from .reference import mask_of
from .select import choose
from .spec import Spec

__all__ = ["TileMap", "draw", "draw_call", "figure_of", "save"]

_COLOURS = {EMPTY: "#f2f2f2", MASKED: "#f0b070", FREE: "#7fb3d5"}
_NAMES = {EMPTY: "empty: never visited", MASKED: "masked: visited with the mask", FREE: "free: visited without the mask"}
# A mask is drawn element by element only while a reader could still see an element.
SMALL = 128
SUFFIXES = (".png", ".svg", ".pdf")


class TileMap(NamedTuple):
    """One head: ``kinds`` (m_blocks, n_blocks) of its tiles, and ``mask`` (seqlen_q, seqlen_k) of its elements, if to be drawn."""

    kinds: torch.Tensor
    mask: torch.Tensor | None
    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int

    def counts(self) -> dict[int, int]:
        return {kind: int((self.kinds == kind).sum()) for kind in (EMPTY, MASKED, FREE)}


def figure_of(width: float, height: float, columns: int) -> tuple[Any, Any]:
    """A figure and its axes, in this package's style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), dpi=150, layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def save(figure: Any, path: Path) -> None:
    """Write the figure, making the folder if need be, and forget it."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def draw(path: Path, tiles: TileMap, title: str) -> None:
    """The tiles of one head: which are empty, masked and free; for a small problem also which elements the mask lets through.

    Raises:
        InvalidInput: the name of the file has none of the known suffixes.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidInput(f"picture is {str(path)!r}, expected a name that ends in {', '.join(SUFFIXES)}.")
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    t = tiles
    m_blocks, n_blocks = t.kinds.shape
    aspect = min(3.0, max(0.4, t.seqlen_q / max(1, t.seqlen_k)))
    figure, (axis,) = figure_of(7.2, min(12.0, 7.0 * aspect + 1.6), 1)
    extent = (0, n_blocks * t.block_n, m_blocks * t.block_m, 0)
    palette = ListedColormap([_COLOURS[EMPTY], _COLOURS[MASKED], _COLOURS[FREE]])
    axis.imshow(t.kinds.numpy(), cmap=palette, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
    if t.mask is not None:
        rows, columns = t.mask.nonzero(as_tuple=True)
        side = 2.2 * 72 / max(t.seqlen_q, t.seqlen_k)
        axis.scatter(columns + 0.5, rows + 0.5, s=min(40.0, side**2), marker="s", color="#1a1a1a", alpha=0.55, linewidths=0)
    if max(m_blocks, n_blocks) <= 64:
        axis.set_xticks([n * t.block_n for n in range(n_blocks + 1)], minor=True)
        axis.set_yticks([m * t.block_m for m in range(m_blocks + 1)], minor=True)
        axis.grid(which="minor", color="white", linewidth=1.2)
        axis.tick_params(which="minor", length=0)
    axis.set(xlim=(0, t.seqlen_k), ylim=(t.seqlen_q, 0), xlabel="key", ylabel="query", aspect="equal")
    axis.set_title(title, fontsize=10)
    counts = t.counts()
    patches = [Patch(color=_COLOURS[kind], label=f"{counts[kind]:,} {_NAMES[kind]}") for kind in (EMPTY, MASKED, FREE)]
    if t.mask is not None:
        patches.append(Patch(color="#7a7a7a", label="a key that the query sees"))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save(figure, path)


def check_places(tiles: object, at: object) -> None:
    """Raises InvalidInput unless ``tiles`` is None or two ints of at least 1, and ``at`` two ints of at least 0."""

    def pair(value: object, least: int) -> bool:
        return isinstance(value, tuple | list) and len(value) == 2 and all(type(n) is int and n >= least for n in value)

    if tiles is not None and not pair(tiles, 1):
        raise InvalidInput(f"tiles is {tiles!r}, expected two ints of at least 1: (queries, keys).")
    if not pair(at, 0):
        raise InvalidInput(f"at is {at!r}, expected two ints of at least 0: (batch, head).")


def draw_call(path: Path, problem: Problem, spec: Spec, tiles: tuple[int, int] | None, at: tuple[int, int]) -> str:
    """Draw the mask of one head of a call whose spec holds its tensors, and say how many tiles of each kind there are.

    ``tiles`` is ``(queries, keys)``; None: those of the forward pass of the backend that the call would get.
    """
    p = problem
    if p.is_empty:
        raise InvalidInput(f"picture needs a query and a key, and one of the extents is 0. Problem: {p}")
    if at[0] >= p.batch or at[1] >= p.heads_q:
        raise InvalidInput(f"at is {at}, expected (batch, head) below ({p.batch}, {p.heads_q}).")
    block_m, block_n = module_of(choose(p).backend).geometries(p)[0][:2] if tiles is None else tiles
    given = MaskTensors.of(spec.tensors)
    kinds = TilePlan(p, block_m, block_n).tiles() if given is None else _of_head(tile_kinds(p, given, block_m, block_n), at)
    device = next((t.device for t in given or () if t is not None), torch.device("cpu"))
    mask = None
    if max(p.seqlen_q, p.seqlen_k) <= SMALL:
        mask = mask_of(spec, p.seqlen_q, p.seqlen_k, device)
        mask = mask if mask.dim() == 2 else _of_head(mask, at)
    drawn = TileMap(kinds.cpu(), None if mask is None else mask.cpu(), p.seqlen_q, p.seqlen_k, block_m, block_n)
    form = str(dataclasses.replace(spec.form, plan=""))
    here = f"tiles of {block_m} x {block_n}, batch {at[0]}, head {at[1]}"
    draw(path, drawn, f"mask {form}\n{p.seqlen_q:,} queries x {p.seqlen_k:,} keys, {here}")
    empty, masked, free = drawn.counts().values()
    return f"  {here}: {empty:,} empty, {masked:,} masked, {free:,} free: {path}"


def _of_head(t: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
    """What one batch and head see of a tensor (batch or 1, heads or 1, ...)."""
    return t[min(at[0], t.shape[0] - 1), min(at[1], t.shape[1] - 1)]
