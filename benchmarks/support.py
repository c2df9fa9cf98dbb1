"""Make the README's support table from the capability table.

    python benchmarks/support.py            # rewrites README.md
    python benchmarks/support.py --check    # exit status 1 if README.md is not up to date

The text between ``<!-- support:begin -->`` and ``<!-- support:end -->`` is replaced; nothing in it is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tilewise import CAPABILITIES, Capability
from tilewise.capabilities import dims_text
from tilewise.problem import GRADIENTS

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
README = Path(__file__).resolve().parents[1] / "README.md"
_KINDS = {"cuda": "NVIDIA", "hip": "AMD", "*": "any"}
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def _devices(row: Capability) -> str:
    text = ", ".join(_KINDS.get(kind, kind) for kind in row.kinds)
    if row.archs is not None:
        text += f" {', '.join(row.archs)}"
    elif row.min_compute_capability:
        text = text.replace("NVIDIA", f"NVIDIA sm_{row.min_compute_capability} or newer")
    return text + (", CPU by interpreter" if row.interpretable else "")


def _head_dims(row: Capability) -> str:
    if row.head_dims is not None:
        return dims_text(row.head_dims)
    return "any" if row.max_head_dim is None else f"1 to {row.max_head_dim}"


def _gradients(row: Capability) -> str:
    if not row.gradients:
        return "none: forward only"
    text = ", ".join(f"d{GRADIENTS[letter]}" for letter in row.gradients)
    text += f" (of bounds only at {dims_text(row.plain_gradients)})" if row.plain_gradients else ""
    return text + (f" (none at {dims_text(row.forward_only)})" if row.forward_only else "")


def _terms(row: Capability) -> str:
    bias = "bias" if row.bulk_bias is None else f"bias (alone, at {', '.join(map(str, row.bulk_bias))})"
    return ", ".join(("causal", "window", *(bias if term == "bias" else term for term in row.terms)))


def _cells(row: Capability) -> tuple[str, ...]:
    return (
        f"`{row.backend}`",
        _devices(row),
        ", ".join(_SHORT.get(name, name) for name in row.dtypes),
        _head_dims(row),
        _gradients(row),
        "yes" if row.jvp else "no",
        _terms(row),
        ", ".join(("o", "lse", *row.returns)),
        "16-byte aligned rows" if row.bulk_only else "any strides",
        "not needed" if row.triton is None else f"{'.'.join(map(str, row.triton))} or newer",
        "yes" if row.always_deterministic else "if asked to be",
        "quadratic" if row.quadratic else "linear",
        "yes" if row.auto else "when named",
    )


HEADER = (
    *("backend", "devices", "dtypes", "head_dim", "gradients", "jvp", "masks and scores", "outputs", "layout"),
    *("Triton", "deterministic", "memory", "`auto` takes it"),
)


def table() -> str:
    """The support table in Markdown, in the order in which ``backend="auto"`` asks."""
    rows = [HEADER, tuple("---" for _ in HEADER), *(_cells(row) for row in CAPABILITIES)]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([*lines, "", *(f"- `{row.backend}`: {row.summary}." for row in CAPABILITIES)])


def updated(text: str) -> str:
    """``text`` with the table of this version between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and after it {END}, once each")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    return f"{before}\n{table()}\n{after}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=Path, default=README, help="default: the repository's README.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the table is not up to date")
    args = parser.parse_args(argv)
    try:
        text = args.readme.read_text()
        new = updated(text)
    except (OSError, ValueError) as error:
        print(f"support.py: error: {args.readme}: {error}", file=sys.stderr)
        return 2
    if args.check:
        if new != text:
            print(f"{args.readme} is not up to date: run  python benchmarks/support.py", file=sys.stderr)
        return int(new != text)
    args.readme.write_text(new)
    print(f"wrote {args.readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
