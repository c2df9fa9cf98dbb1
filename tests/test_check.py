"""``tilewise check``: its work, rows, table and exit status; the judging of inputs too large for a dense oracle."""

import contextlib
import dataclasses
import io
import json
import os
import random
import time

import pytest
import torch

from tilewise import InvalidInput, full, reference
from tilewise.arch import ARCHS, Runtime
from tilewise.backends import module_of
from tilewise.capabilities import CAPABILITIES, refuse
from tilewise.cli import main
from tilewise.spec import Spec
from tilewise.testing import cases, check, large
from tilewise.testing.calls import evaluate, fit, random_call
from tilewise.testing.cases import CASES
from tilewise.testing.check import REFUSED, Job
from tilewise.testing.large import Large
from tilewise.testing.pool import in_processes
from tilewise.testing.tolerance import Result, raise_if_failed

QUICK = ["check", "--quick", "--backend", "reference", "--random", "2"]


def test_jobs_cover_every_backend_that_accepts():
    work = check.jobs(device="cpu", quick=True)
    assert {job.backend for job in work} == {"triton", "torch", "reference"}
    assert {job.dtype for job in work if job.backend == "torch"} == {"float32", "float16", "bfloat16"}
    assert not any(job.gib for job in work)


def test_same_seed_gives_the_same_random_problems():
    made = [[check.random_problem(random.Random(seed), True) for _ in range(3)] for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_random_problems_keep_to_a_list_of_head_dims():
    rng = random.Random(0)
    shapes = [check.random_problem(rng, False, ((64, 64), (192, 128)))[0] for _ in range(40)]
    assert {shape[5:] for shape in shapes} == {(64, 64), (192, 128)}


def test_unknown_backend_is_named():
    with pytest.raises(InvalidInput, match="backend is 'flash', expected one of"):
        check.jobs(["flash"], "cpu")


def test_rows_show_the_worst_output_of_each_pass():
    results = [Result("x", "o", 1.0, 2.0, True), Result("x", "lse", 1.9, 2.0, True), Result("x", "dk", 0.0, 0.0, True)]
    rows = Job("torch", "float32", "name", lambda: results).rows(torch.device("cpu"))
    assert [(r.pass_, r.output, r.name) for r in rows] == [("forward", "lse", "name"), ("backward", "dk", "name")]
    results.append(Result("x", "o", 0.1, 2.0, False, "here"))
    row = Job("torch", "float32", "name", lambda: results).rows(torch.device("cpu"))[0]
    assert (row.output, row.ok, row.where) == ("o", False, "here")


def test_a_crash_is_a_failed_row():
    def crash():
        raise ZeroDivisionError("oh")

    (row,) = Job("torch", "float32", "name", crash).rows(torch.device("cpu"))
    assert not row.ok
    assert row.where == "ZeroDivisionError: oh"


def test_a_refused_input_is_said():
    (row,) = Job("torch", "float32", "name", list).rows(torch.device("cpu"))
    assert row.skipped == REFUSED


def test_fit_takes_what_the_table_allows():
    call = random_call((1, 1, 1, 4, 4, 513, 16))
    assert fit(call, "torch") is call
    assert fit(call, "triton") is None


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """What the command prints, and the file that it writes."""
    path, printed = tmp_path_factory.mktemp("check") / "rows.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*QUICK, "--json", str(path)]) == 0
    return printed.getvalue(), json.loads(path.read_text())


def test_command_passes_and_writes_json(in_one_process):
    out, content = in_one_process
    assert "thin_window" in out
    assert "case 10 unused slots hold NaN" in out
    assert content["header"]["arch"] == "cpu"
    row = content["rows"][0]
    assert (row["backend"], row["name"], row["pass"], row["ok"]) == ("reference", "ragged_full", "forward", True)
    assert {"dtype", "error", "bound", "seconds"} <= set(row)


def test_command_fails_on_a_broken_backend(monkeypatch, capsys):
    def forward(problem, q, k, v, o, lse):
        o64, lse64 = reference(q, k, v, full(), problem.sm_scale)
        o.copy_(o64)
        lse.copy_(lse64)

    monkeypatch.setattr(module_of("reference"), "forward", forward)
    assert main([*QUICK, "--failures"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "float32 ragged_causal_br forward" in out
    assert "ragged_full" not in out


def trouble():
    """Jobs that pass, raise, end their process, and never end."""
    work = {"passes": lambda: [], "raises": lambda: 1 // 0, "ends": lambda: os._exit(7), "hangs": lambda: time.sleep(600)}
    made = [Job("torch", "float32", name, run, 1 if name == "passes" else 0) for name, run in work.items()]
    return [*made, *(Job("torch", "float32", f"also {i}", lambda: [Result("x", "o", 0.0, 1.0, True)]) for i in range(4))]


def test_processes_outlive_a_crash_and_a_hang():
    rows = {job.name: made for job, made in in_processes(trouble, torch.device("cpu"), 2, 2.0)}
    assert set(rows) == {job.name for job in trouble()}
    assert rows["passes"][0].skipped == REFUSED
    assert "ZeroDivisionError" in rows["raises"][0].where
    assert rows["ends"][0].where == "its process ended with status 7"
    assert "not done after 2 s" in rows["hangs"][0].where
    assert [rows[f"also {i}"][0].output for i in range(4)] == ["o"] * 4


def test_command_in_processes_gives_the_rows_of_one(tmp_path, capsys, in_one_process):
    path = tmp_path / "rows.json"
    assert main([*QUICK, "--jobs", "2", "--json", str(path)]) == 0
    contents = in_one_process[1], json.loads(path.read_text())
    one, two = (sorted((r["name"], r["dtype"], r["pass"], r["error"]) for r in content["rows"]) for content in contents)
    assert one == two
    assert "reference  float32   thin_window" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--backend", "flash"], "backend is 'flash'"),
        (["--device", "gpu"], "--device is 'gpu'"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--json", "/no/such/folder/x.json"], "--json is"),
        (["--dtype", "single"], "--dtype is 'single', expected one of float32, float16, bfloat16, float64"),
        (["--only", "no such input"], "--only is 'no such input', which no input's name contains"),
    ],
)
def test_command_rejects_bad_arguments(arguments, text, capsys):
    assert main(["check", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_command_says_why_nothing_can_be_checked(capsys):
    gpu_only = next(c.backend for c in CAPABILITIES if not c.interpretable and "*" not in c.kinds)
    assert main(["check", "--backend", gpu_only, "--device", "cpu"]) == 1
    assert f"{gpu_only} refuses: the tensors are on cpu" in capsys.readouterr().out


def test_command_runs_only_what_is_named(capsys):
    assert main([*QUICK, "--only", "thin_window"]) == 0
    out = capsys.readouterr().out
    assert "thin_window_causal " in out
    assert "ragged_full" not in out
    assert "case " not in out


def test_command_runs_only_the_dtype_that_is_named(capsys):
    assert main([*QUICK, "--only", "thin_window", "--dtype", "float16"]) == 0
    out = capsys.readouterr().out
    assert "float16   thin_window" in out
    assert "float32" not in out


def test_a_backend_that_takes_a_bias_in_bulk_only_gets_such():
    """None of them is refused for the bias itself, but where there is one query or one key, or none."""
    hopper = next(c for c in CAPABILITIES if c.backend == "hopper")
    halves = [torch.float16, torch.bfloat16]
    kinds, refused = set(), 0
    work = check._bias_jobs(hopper, (64, 128), halves, torch.device("cpu"), 0, 40)
    for job in work:
        call = job.run.args[0]()
        assert call.q.dtype == call.spec.tensors.bias.dtype
        kinds.add((call.q.shape[-1], call.q.dtype, job.name.split("bias:")[1]))
        problem = dataclasses.replace(call.problem, arch=ARCHS["sm_90"], runtime=Runtime((3, 9)))
        reasons = [reason for reason in refuse(hopper, problem) if "bias" in str(reason)]
        refused += bool(reasons)
        assert not reasons or min(call.q.shape[2], call.k.shape[2]) < 2
    assert kinds == {(dim, dtype, words[5:]) for dim in (64, 128) for dtype in halves for words in check._BIASES}
    assert refused < len(work) / 8


def test_no_named_input_has_one_dtype_alone_at_both_head_dims():
    hopper = next(c for c in CAPABILITIES if c.backend == "hopper")
    work = check._bias_jobs(hopper, (64, 128), [torch.float16, torch.bfloat16], torch.device("cpu"), 0, 0)
    found: dict[str, set[str]] = {}
    for job in work:
        found.setdefault(job.name.split(" D=")[0], set()).add(job.dtype)
    assert all(len(dtypes) == 2 for dtypes in found.values())


def test_what_the_adding_kernel_cannot_do_is_not_run_in_its_name():
    call = random_call((1, 2, 1, 70, 90, 64, 64))
    assert check._run_adding(lambda: call, "torch", "here")
    assert check._run_adding(lambda: call.replace(spec=Spec(lower=20)), "torch", "here") == []
    assert check._run_adding(lambda: random_call((1, 2, 1, 70, 90, 32, 32)), "torch", "here") == []


def test_jobs_with_a_bias_judge_its_gradient():
    bulk = dataclasses.replace(next(c for c in CAPABILITIES if c.backend == "torch"), bulk_bias=(16,))
    work = check._bias_jobs(bulk, (16,), [torch.float32], torch.device("cpu"), 0, 0)
    job = next(job for job in work if job.name.startswith("thin_window D=16"))
    assert {result.output for result in job.run()} >= {"o", "dq", "dbias"}
    assert all(result.ok for result in job.run())


@pytest.mark.parametrize("always", [True, False])
def test_gradients_are_held_to_equal_bits_where_they_are_promised(monkeypatch, always):
    """A backend's default may add gradients in any order; o and lse have the same bits in any mode."""
    seen, spoilt = [], []

    def record(call, backend):
        seen.append(call.deterministic)
        got = evaluate(call, backend)
        for name, mode in spoilt:
            if mode is call.deterministic:
                got[name][..., 0] += len(seen)
        return got

    known = dataclasses.replace(next(c for c in CAPABILITIES if c.backend == "torch"), always_deterministic=always)
    monkeypatch.setattr(cases, "capability", lambda backend: known)
    monkeypatch.setattr(cases, "evaluate", record)
    case = next(case for case in CASES if case.number == 26)
    assert all(r.ok for r in cases.run_case(case, "torch", "cpu", case.dtypes[0], True))
    assert (True in seen) is not always
    assert None in seen
    for fault in [("lse", None), ("dq", None)] if always else [("lse", None), ("lse", True), ("dq", True)]:
        spoilt[:] = [fault]
        assert [r for r in cases.run_case(case, "torch", "cpu", case.dtypes[0], True) if r.output == "repeat"]


SMALL = (
    Large("batch", 0, large._whole("batch", (9, 3, 40, 50, 16), full())),
    Large("rows", 0, large._long_rows("rows", 1200, 16)),
    Large("far", 0, large._far_do("far", 900, 2, 16, 70, 30)),
)


@pytest.mark.parametrize("item", SMALL, ids=lambda item: item.name)
def test_parts_of_large_inputs_are_judged_right(item):
    results = item.run("torch", "cpu")
    assert [r.output for r in results] == ["o", "lse", "dq", "dk", "dv"]
    raise_if_failed(results)


@pytest.mark.parametrize("item", SMALL, ids=lambda item: item.name)
@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_parts_of_large_inputs_can_fail(item, name, monkeypatch):
    def spoiled(call, backend):
        got = evaluate(call, backend)
        got[name][-1, -1, -1] += 1.0
        return got

    monkeypatch.setattr(large, "evaluate", spoiled)
    assert {r.output for r in item.run("torch", "cpu") if not r.ok} == {name}


def test_a_large_bias_is_judged_whole(monkeypatch):
    run = large._biased("bias", (2, 3, 40, 50, 16), "1hqk", full())
    results = run("torch", "cpu")
    assert [r.output for r in results] == ["o", "lse", "dq", "dk", "dv", "dbias"]
    raise_if_failed(results)

    def spoiled(call, backend):
        got = evaluate(call, backend)
        got["dbias"][..., 0, 0] += 1.0
        return got

    monkeypatch.setattr(large, "evaluate", spoiled)
    assert {r.output for r in run("torch", "cpu") if not r.ok} == {"dbias"}


def test_every_config_is_put_back(monkeypatch):
    from tilewise import configs

    before, seen = configs.lookup, []
    wanted = configs.Config(16, 16, 4, 1)
    with large._forced({"dq": wanted}):
        problem = random_call((1, 1, 1, 8, 8, 16, 16)).problem
        seen = [configs.lookup(problem, "dq"), configs.lookup(problem, "fwd")]
    assert seen == [wanted, before(problem, "fwd")]
    assert configs.lookup is before


def test_a_thousand_random_problems_are_drawn_from_the_seed():
    work = [check.jobs(["torch"], "cpu", quick=True, seed=seed, randoms=1000) for seed in (3, 3, 4)]
    names = [[job.name for job in jobs if job.name.startswith("random ")] for jobs in work]
    assert len(names[0]) == 1000
    assert names[0] == names[1] != names[2]


def test_repeats_are_counted_and_compared_bit_for_bit(monkeypatch):
    names = [job.name for job in check.jobs(["torch"], "cpu", quick=True, repeats=3)]
    assert [n for n in names if "busy" in n] == [f"3 repeats on a busy device, D {dim}" for dim in (64, 128, 256)]
    assert not [job for job in check.jobs(["torch"], "cpu", quick=True) if "busy" in job.name]
    calls = []

    def counted(call, backend):
        got = evaluate(call, backend)
        calls.append(backend)
        if len(calls) == 4:
            got["dq"] = torch.where(got["dq"] == 0, -got["dq"], got["dq"])  # the same numbers, other bits
        return got

    monkeypatch.setattr(large, "evaluate", counted)
    shape = (1, 2, 1, 30, 20, 16, 16)  # the first rows see no key: their dq is 0
    assert all(r.ok for r in large.busy("x", shape, 2, "torch", "cpu"))
    assert len(calls) == 3
    calls.clear()
    (result,) = large.busy("x", shape, 5, "torch", "cpu")
    assert result.where == "dq differ in repeat 2"
