"""The proof that the gauntlet can fail: faults put into the shipped kernels, each of which some input must notice.

A mutant is a change of source text (``mutant_list.MUTANTS`` and its neighbours). For each, the package is copied, the copy is
changed, and a process of its own runs gauntlet entries on it, the kernels in Triton's interpreter, until an output is wrong.
``python -m tilewise.testing.mutants`` prints which entry kills which mutant.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..api import attention
from ..errors import AttentionError
from ..merge import merge
from ..spec import Spec
from .gauntlet import GAUNTLET, entry
from .mutant_columns import COLUMN_MUTANTS
from .mutant_drop import DROP_MUTANTS
from .mutant_functions import FUNCTION_MUTANTS
from .mutant_halves import HALVES_MUTANTS
from .mutant_list import MUTANTS as KERNEL_MUTANTS
from .mutant_list import Mutant
from .mutant_outputs import OUTPUT_MUTANTS
from .mutant_scores import SCORE_MUTANTS
from .mutant_second import SECOND_MUTANTS
from .mutant_tangents import TANGENT_MUTANTS
from .mutant_terms import TERM_MUTANTS
from .mutant_torch import TORCH_MUTANTS
from .mutant_wide import WIDE_MUTANTS
from .second import SECOND_ENTRIES
from .tangents import JVP_ENTRIES

__all__ = ["MUTANTS", "Mutant", "Proof", "StaleMutant", "Verdict", "mutate", "prove", "split_and_merge"]

MUTANTS: tuple[Mutant, ...] = (
    *(*KERNEL_MUTANTS, *TORCH_MUTANTS, *SCORE_MUTANTS, *TERM_MUTANTS, *OUTPUT_MUTANTS, *DROP_MUTANTS),
    *(*FUNCTION_MUTANTS, *TANGENT_MUTANTS, *WIDE_MUTANTS, *COLUMN_MUTANTS, *HALVES_MUTANTS, *SECOND_MUTANTS),
)
PACKAGE = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("_mutant_worker.py")


class StaleMutant(AttentionError, ValueError):
    """The source no longer holds the text that a mutant changes: the list must follow the code."""


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: the entry that killed it and the wrong output, or None where it survived."""

    mutant: Mutant
    entry: str | None
    output: str | None = None
    why: str = ""

    @property
    def killed(self) -> bool:
        return self.entry is not None

    @property
    def as_expected(self) -> bool:
        return self.killed == (self.mutant.equivalent is None)

    def __str__(self) -> str:
        if self.mutant.equivalent and not self.killed:
            return f"{self.mutant.name:<32} equivalent: {self.mutant.equivalent}"
        if not self.killed:
            return f"{self.mutant.name:<32} SURVIVED"
        note = "  NOT EQUIVALENT" if self.mutant.equivalent else ""
        return f"{self.mutant.name:<32} {self.mutant.backend:<10} {self.entry:<22} {self.output}{note}"


@dataclass(frozen=True)
class Proof:
    """The verdicts, and what the unchanged copy got wrong (must be nothing)."""

    verdicts: tuple[Verdict, ...]
    unmutated: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.unmutated and all(v.as_expected for v in self.verdicts)

    def __str__(self) -> str:
        killed = sum(v.killed for v in self.verdicts)
        equivalent = sum(v.mutant.equivalent is not None for v in self.verdicts)
        head = f"{'mutant':<32} {'backend':<10} {'killed by':<22} output"
        foot = f"{len(self.verdicts)} mutants: {killed} killed, {equivalent} known as equivalent"
        return "\n".join([head, *map(str, self.verdicts), foot, *(f"unmutated copy fails: {text}" for text in self.unmutated)])


def split_and_merge(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, spec: Spec, sm_scale: float | None, precision: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the two halves of the keys, merged: a backend for ``calls.evaluate``."""
    start, half, parts = spec.q_start(q.shape[2], k.shape[2]), k.shape[2] // 2, []
    for first, keys in ((0, slice(0, half)), (half, slice(half, None))):
        upper = None if spec.upper is None else spec.upper + start - first
        lower = None if spec.lower is None else spec.lower - start + first
        part = Spec(upper=upper, lower=lower, align="top_left")
        parts += attention(
            q, k[:, :, keys], v[:, :, keys], spec=part, sm_scale=sm_scale, precision=precision, return_lse=True, backend="torch"
        )
    return merge(*parts)


def mutate(mutant: Mutant, text: str) -> str:
    """The source with the fault in it."""
    found = text.count(mutant.old)
    if found != mutant.count:
        raise StaleMutant(
            f"mutant {mutant.name!r}: {mutant.old!r} occurs {found} times in {mutant.file}, expected {mutant.count}. "
            "The source has changed: change the mutant with it."
        )
    return text.replace(mutant.old, mutant.new)


def _copy(root: Path, mutant: Mutant | None) -> str:
    """A copy of the package below ``root``, with the fault of ``mutant``."""
    shutil.copytree(PACKAGE, root / "tilewise", ignore=shutil.ignore_patterns("__pycache__", "cli", "docs"))
    if mutant is not None:
        path = root / "tilewise" / mutant.file
        path.write_text(mutate(mutant, path.read_text(encoding="utf-8")), encoding="utf-8")
    return str(root)


def _run(folder: Path, tasks: list[dict[str, Any]], jobs: int) -> dict[str, dict[str, Any]]:
    """The answers of the worker, by the id of the task."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    wanted = json.dumps({"folder": str(folder), "jobs": jobs, "tasks": tasks})
    # -I: the folder of the worker, whose modules are parts of tilewise, is not on the path.
    done = subprocess.run(
        [sys.executable, "-I", str(WORKER)], input=wanted, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    for answer in answers.values():
        if "broken" in answer and not answer["id"].startswith("mutant"):
            raise AttentionError(f"the copy of tilewise does not run:\n{answer['broken']}")
    return answers


def _runs(mutant: Mutant) -> list[list[str]]:
    """The entries that should kill it first, then all others; for an equivalent mutant only those that come nearest."""
    # Halves of the keys have bounds of their own, but no tensors.
    runs = [e.name for e in GAUNTLET if not e.gpu_gib and (mutant.backend != "merge" or not (e.returns or e.build().spec.terms))]
    if mutant.backend != "triton":
        runs = [name for name in runs if entry(name).precision is None]
    derivative = {"jvp": JVP_ENTRIES, "second": SECOND_ENTRIES}.get(mutant.backend.rpartition(" ")[0])
    if derivative is not None:
        runs = [e.name for e in derivative]
    rest = [] if mutant.equivalent else [name for name in runs if name not in mutant.killers]
    return [[mutant.backend, name] for name in (*mutant.killers, *rest)]


def _verdict(mutant: Mutant, answer: dict[str, Any]) -> Verdict:
    if "broken" in answer:
        raise AttentionError(f"mutant {mutant.name!r} does not even import, which proves nothing:\n{answer['broken']}")
    if "died" in answer:
        return Verdict(mutant, mutant.killers[0], "crash", f"status {answer['died']}")
    failed = answer["failed"]
    if not failed:
        return Verdict(mutant, None)
    outputs = " ".join(output for _, _, output, _ in failed)
    return Verdict(mutant, failed[0][1], outputs, failed[0][3])


def prove(mutants: Sequence[Mutant] = MUTANTS, jobs: int = 2) -> Proof:
    """Run every mutant, and the unchanged package on every entry that a mutant names.

    Raises:
        StaleMutant: a mutant does not fit the source any more.
    """
    with tempfile.TemporaryDirectory(prefix="tilewise-mutants-") as name:
        folder = Path(name)
        plain = _copy(folder / "plain", None)
        _run(folder, [{"id": "yardsticks", "root": plain, "runs": None, "stop": False}], 1)
        used = sorted({(m.backend, killer) for m in mutants for killer in m.killers})
        tasks = [
            {"id": f"plain {i}", "root": plain, "runs": [list(run) for run in used[i : i + 6]], "stop": False}
            for i in range(0, len(used), 6)
        ]
        for i, mutant in enumerate(mutants):
            tasks.append({"id": f"mutant {i}", "root": _copy(folder / str(i), mutant), "runs": _runs(mutant), "stop": True})
        answers = _run(folder, tasks, jobs)
    wrong = []
    for task in tasks:
        answer = answers[task["id"]]
        if task["root"] == plain:
            wrong += [" ".join(failure) for failure in answer.get("failed", [["", "", "", f"died: {answer}"]])]
    verdicts = tuple(_verdict(mutant, answers[f"mutant {i}"]) for i, mutant in enumerate(mutants))
    return Proof(verdicts, tuple(wrong))


def main() -> int:
    """Print the table; 1 if a mutant lives that should not."""
    proof = prove()
    print(proof)
    return 0 if proof.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
