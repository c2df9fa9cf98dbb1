"""Make the README's figures from a result of ``tilewise bench``: its table, its wins and losses, and the pictures.

    python benchmarks/tables.py benchmarks/results/fa3-h200.json --readme README.md

replaces the text between ``<!-- bench:begin -->`` and ``<!-- bench:end -->`` and writes the pictures to docs/performance. Nothing
is written by hand, so the README cannot say more than the file does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tilewise.cli._bench.report import PASS_NAMES, Results, failures, point_table, render, summary_table, title, write_picture

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def sentence(results: Results, pass_: str) -> str:
    """Wins and losses of one pass against the best of all peers, point by point."""
    name = PASS_NAMES[pass_].capitalize()
    ratios = results.best_ratios(pass_)
    points = results.points(pass_)
    if not ratios:
        return f"- **{name}**: no point of {len(points)} has both our time and a peer's."
    wins, losses = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} times its speed"
    missing = f"; {len(points) - len(ratios)} points without a comparison" if len(ratios) < len(points) else ""
    return f"- **{name}**, {len(ratios)} points: faster than the best peer at {wins}, slower at {losses} ({spread}){missing}."


def block(results: Results, source: str, pictures: dict[str, str]) -> str:
    """The text between the markers."""
    header = results.header
    rounds = f"{header['rounds']} round{'s' * (header['rounds'] > 1)}"
    lines = [
        f"Measured on {title(header)}; `{source}` has every row, with clock and power. The providers were timed in turn, each in a",
        f"process of its own, after {header['rest_s']:g} s of rest; medians over {rounds}.",
        "",
        *(sentence(results, pass_) for pass_ in results.passes),
        "",
        f"Providers: {versions(results)}.",
        "",
        f"Speed of {results.ours} beside each peer (above 1: {results.ours} is faster), over all points that both ran:",
        "",
        render(summary_table(results)),
        "",
        *(f"![{PASS_NAMES[pass_]}: {results.unit} against sequence length]({path})\n" for pass_, path in pictures.items()),
        f"<details><summary>Every point, in {results.unit}</summary>",
        "",
        render(point_table(results)),
        "",
    ]
    failed = failures(results)
    if failed:
        lines += ["Not timed:", "", *(f"- {line}" for line in failed), ""]
    if header.get("absent"):
        lines += [f"Not installed: {', '.join(header['absent'])}.", ""]
    if header.get("left_out"):
        lines += [f"Left out when the time was up: {len(header['left_out'])} measurements.", ""]
    return "\n".join([*lines, "</details>"])


def versions(results: Results) -> str:
    """The version of every provider, and the Triton that it used."""
    facts = results.header.get("providers", {})
    parts = []
    for name in results.providers:
        known = facts.get(name, {})
        triton = f"Triton {known['triton']}" if known.get("triton") else ""
        parts.append(f"{name} ({', '.join(filter(None, (known.get('version'), triton)))})" if known else name)
    return ", ".join(parts)


def replace(text: str, new: str) -> str:
    """``text`` with ``new`` between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and after it {END}, once each")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    return f"{before}\n{new}\n{after}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a JSON file that tilewise bench --out wrote")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="default: README.md")
    parser.add_argument("--pictures", type=Path, default=Path("docs/performance"), help="folder (default: docs/performance)")
    args = parser.parse_args(argv)
    try:
        results = Results(json.loads(args.results.read_text()))
        text = args.readme.read_text()
        replace(text, "")  # before any file is written
    except (OSError, ValueError, KeyError) as error:
        print(f"tables.py: error: {error}", file=sys.stderr)
        return 2
    if results.ours is None or not results.rows:
        print(f"tables.py: error: {args.results} has no row of tilewise: nothing to compare", file=sys.stderr)
        return 2
    args.pictures.mkdir(parents=True, exist_ok=True)
    home = args.readme.resolve().parent
    pictures = {}
    for pass_ in results.passes:
        path = args.pictures / f"{args.results.stem}-{pass_}.png"
        write_picture(results, path, (pass_,))
        pictures[pass_] = Path(os.path.relpath(path.resolve(), home)).as_posix()
        print(f"wrote {path}")
    source = Path(os.path.relpath(args.results.resolve(), home)).as_posix()
    args.readme.write_text(replace(text, block(results, source, pictures)))
    print(f"wrote {args.readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
