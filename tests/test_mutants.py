"""The tests can fail: every fault put into the shipped kernels is noticed by some entry of the gauntlet."""

import dataclasses

import pytest

from tilewise.testing import mutants
from tilewise.testing.gauntlet import entry
from tilewise.testing.mutants import MUTANTS, StaleMutant, Verdict, mutate


def source(mutant):
    return (mutants.PACKAGE / mutant.file).read_text(encoding="utf-8")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_fits_the_source(mutant):
    text = source(mutant)
    changed = mutate(mutant, text)
    assert changed != text
    compile(changed, mutant.file, "exec")
    assert mutant.breaks
    assert mutant.killers
    assert all(entry(name).gpu_gib == 0 for name in mutant.killers)


def test_stale_mutant_is_refused():
    mutant = MUTANTS[0]
    with pytest.raises(StaleMutant, match=rf"{mutant.name}.*occurs 0 times in {mutant.file}, expected 1"):
        mutate(mutant, "nothing of the kind")
    with pytest.raises(StaleMutant, match=r"occurs 1 times .* expected 2"):
        mutate(dataclasses.replace(mutant, count=2), source(mutant))


def test_names_are_unique():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def test_verdicts_say_what_is_wrong():
    fault, harmless = (next(m for m in MUTANTS if (m.equivalent is None) is faulty) for faulty in (True, False))
    assert Verdict(fault, "gqa", "dk").as_expected
    assert Verdict(harmless, None).as_expected
    assert not Verdict(fault, None).as_expected
    assert "SURVIVED" in str(Verdict(fault, None))
    assert not Verdict(harmless, "gqa", "dk").as_expected
    assert "NOT EQUIVALENT" in str(Verdict(harmless, "gqa", "dk"))


def test_every_mutant_is_killed(capsys):
    proof = mutants.prove()
    with capsys.disabled():
        print(f"\n{proof}")
    assert proof.unmutated == ()
    assert [str(v) for v in proof.verdicts if not v.as_expected] == []
