"""Make docs/performance/features.md from a result of ``benchmarks/features.py``.

    python benchmarks/features_table.py benchmarks/results/features-h200.json

Every case and pass is a line: our fastest backend beside the fastest of the peers. Nothing in the table is written by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

OURS = ("hopper", "triton", "auto")
ROOT = Path(__file__).resolve().parents[1]
STEPS = ("softcap", "sink", "alibi", "own cap", "own table")  # at the shape of the plain case
BEGIN, END = "<!-- features:begin -->", "<!-- features:end -->"


def shape(row: dict[str, Any]) -> str:
    heads = f"{row['heads']}" if row["heads"] == row["heads_kv"] else f"{row['heads']}/{row['heads_kv']}"
    dims = f"{row['head_dim']}" if row["head_dim"] == row["head_dim_v"] else f"{row['head_dim']}/{row['head_dim_v']}"
    return f"{row['batch']} x {heads} x {row['seqlen']} x {dims}, {row['dtype']}{', causal' if row['causal'] else ''}"


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table, a line for each case and pass."""
    out = [
        "| case | pass | batch x heads x length x head_dim | ours, ms | TFLOP/s | of plain | fastest peer, ms | times its speed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    timed = [row for row in rows if row["ms"]]
    plain = {(row["pass"], row["provider"]): row["ms"] for row in timed if row["case"] == "plain"}
    for case, pass_ in dict.fromkeys((row["case"], row["pass"]) for row in rows):
        here = [row for row in timed if (row["case"], row["pass"]) == (case, pass_)]
        ours = sorted((row for row in here if row["provider"] in OURS), key=lambda row: row["ms"])
        peers = sorted((row for row in here if row["provider"] not in OURS), key=lambda row: row["ms"])
        any_row = next(row for row in rows if (row["case"], row["pass"]) == (case, pass_))
        best = f"{ours[0]['ms']:.3f} ({ours[0]['provider']}) | {ours[0]['tflops']:.0f}" if ours else "- | -"
        same = plain.get((pass_, ours[0]["provider"])) if ours and case in STEPS else None
        share = f"{same / ours[0]['ms']:.2f}" if same else ""
        peer = f"{peers[0]['ms']:.3f} ({peers[0]['provider']})" if peers else "none timed"
        ratio = f"{peers[0]['ms'] / ours[0]['ms']:.2f}" if ours and peers else ""
        out.append(f"| {case} | {pass_} | {shape(any_row)} | {best} | {share} | {peer} | {ratio} |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance" / "features.md")
    args = parser.parse_args()
    content = json.loads(args.result.read_text())
    head = content["header"]
    runs = head.get("runs", {"only": head})
    where = "; ".join(f"{run['date'][:10]}, commit {run['commit'][:7]}" for run in runs.values())
    source = f"{head['device']}, torch {head['torch']}, CUDA {head['cuda']}; {where}; from `{args.result}`."
    table = [source, "", *lines(content["rows"])]
    text = args.page.read_text()
    before, rest = text.split(BEGIN)
    args.page.write_text(f"{before}{BEGIN}\n{chr(10).join(table)}\n{END}{rest.split(END)[1]}")
    print(f"wrote {args.page}")


if __name__ == "__main__":
    main()
