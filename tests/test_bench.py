"""tilewise bench: real workers with providers that crash, hang and answer wrong; the schedule with workers made of thin air."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise.cli import main
from tilewise.cli._bench import report, runner
from tilewise.cli._bench.cases import GRIDS, Case
from tilewise.cli._bench.pool import Worker, WorkerLost
from tilewise.cli._bench.providers import find
from tilewise.cli._bench.runner import Progress, Run, Settings
from tilewise.cli._bench.sampler import Sampler
from tilewise.cli._bench.truth import TOLERANCE, error_of, truth
from tilewise.cli._bench.worker import median_ms
from tilewise.errors import InvalidInput
from tilewise.problem import Problem

ROOT = Path(__file__).resolve().parents[1]
ROW_KEYS = {
    *("case", "pass", "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "causal"),
    *("provider", "ms", "tflops", "gbps", "peak_mb", "mhz", "watts", "error", "triton"),
}

FAKES = """
import os, signal, subprocess, sys, time
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

__version__ = "7.7"

def right(q, k, v, causal):
    return sdpa(q, k, v, is_causal=causal)

def noisy(q, k, v, causal):
    print("a library says hello")
    os.write(1, b"{not json}\\n")
    subprocess.run([sys.executable, "-c", "print('and so does its child')"])
    return right(q, k, v, causal)

def wrong(q, k, v, causal):
    return right(q, k, v, causal) * 1.2

def wrong_gradient(q, k, v, causal):
    o = right(q, k, v, causal)
    return o.detach() + 0.8 * (o - o.detach())

def without_gradient(q, k, v, causal):
    return right(q, k, v, causal).detach()

def raising(q, k, v, causal):
    raise RuntimeError("no such kernel")

def crashing(q, k, v, causal):
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def hanging(q, k, v, causal):
    if not causal and not q.requires_grad:
        time.sleep(1000)
    return right(q, k, v, causal)
"""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fakes")
    (folder / "fakes.py").write_text(FAKES)
    (folder / "other" / "triton").mkdir(parents=True)
    (folder / "other" / "triton" / "__init__.py").write_text('__version__ = "99.1"\n')
    return folder


@pytest.fixture(scope="module")
def document(fakes: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run on the CPU with every kind of trouble beside two providers that work."""
    folder = tmp_path_factory.mktemp("run")
    troubles = ("right", "noisy", "wrong", "wrong_gradient", "without_gradient", "raising", "crashing", "hanging")
    names = ["tilewise", "math", *(f"{t}=fakes:{t}" for t in troubles), "absent=no_such_module:f"]
    argv = ["bench", "--grid", "cpu", "--dims", "32", "--lens", "64", "--dtype", "float32", "--rest", "0", "--rounds", "2"]
    argv += ["--timeout", "10", "--prepare-timeout", "10", "--providers", ",".join(names)]
    argv += ["--env", "tilewise:TRITON_INTERPRET=0"]  # the CPU's own backend, not interpreted kernels
    for trouble in (*troubles, "absent"):
        other = f":{fakes / 'other'}" if trouble == "right" else ""
        argv += ["--env", f"{trouble}:PYTHONPATH={fakes}{other}"]
    argv += ["--out", str(folder / "out.json"), "--picture", str(folder / "out.png"), "--commit", "abc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        status = main(argv)
    document = json.loads((folder / "out.json").read_text())
    return {"status": status, "picture": folder / "out.png", "files": sorted(p.name for p in folder.iterdir()), **document}


def rows_of(document: dict[str, Any], provider: str, pass_: str) -> list[dict[str, Any]]:
    return [r for r in document["rows"] if r["provider"] == provider and r["pass"] == pass_]


@pytest.mark.parametrize("provider", ["tilewise", "math", "right", "noisy"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_provider_that_works_has_times_whatever_the_others_do(document, provider, pass_):
    rows = rows_of(document, provider, pass_)
    assert len(rows) == 2  # full and causal
    for row in rows:
        assert row["error"] is None
        assert set(row) >= ROW_KEYS
        assert row["ms"] > 0
        assert len(row["samples_ms"]) == 2
        assert min(row["samples_ms"]) <= row["ms"] <= max(row["samples_ms"])
        assert row["max_error"] < TOLERANCE["float32"]
        half, times = (0.5 if row["causal"] else 1.0), (2.5 if pass_ == "bwd" else 1.0)
        flops = 4 * row["batch"] * row["heads_q"] * 64 * 64 * 32 * half * times
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9)
        assert Problem.parse(row["case"]).seqlen_k == 64


@pytest.mark.parametrize(
    "provider, pass_, words",
    [
        ("wrong", "fwd", "wrong o"),
        ("wrong", "bwd", "wrong d"),
        ("wrong_gradient", "bwd", "wrong d"),
        ("without_gradient", "bwd", "no backward pass"),
        ("raising", "fwd", "RuntimeError: no such kernel"),
        ("crashing", "fwd", "SIGSEGV): about to die"),
        ("crashing", "bwd", "SIGSEGV"),
    ],
)
def test_trouble_of_one_provider_is_a_row_with_its_error(document, provider, pass_, words):
    rows = rows_of(document, provider, pass_)
    assert len(rows) == 2
    for row in rows:
        assert row["ms"] is None
        assert row["tflops"] is None
    assert words in rows[0]["error"]


def test_a_provider_that_keeps_crashing_is_given_up(document):
    assert "given up after 3" in rows_of(document, "crashing", "bwd")[1]["error"]


def test_a_provider_that_hangs_once_is_started_again(document):
    errors = [row["error"] for pass_ in ("fwd", "bwd") for row in rows_of(document, "hanging", pass_)]
    assert errors == ["no answer within 10 s", None, None, None]


def test_a_wrong_gradient_does_not_spoil_the_forward_pass(document):
    assert all(row["error"] is None for row in rows_of(document, "wrong_gradient", "fwd"))


def test_header_says_who_took_part_with_which_versions(document):
    header = document["header"]
    assert header["torch"] == torch.__version__
    assert header["commit"] == "abc"
    assert header["date"].startswith("20")
    assert header["device"]
    assert header["left_out"] == []
    assert list(header["absent"]) == ["absent"]
    assert "no_such_module" in header["absent"]["absent"]
    assert header["providers"]["right"]["version"] == "7.7"


def test_env_gives_one_provider_another_triton(document):
    assert {row["triton"] for row in rows_of(document, "right", "fwd")} == {"99.1"}
    assert "99.1" not in {row["triton"] for row in document["rows"] if row["provider"] != "right"}


def test_picture_is_written_and_no_partial_file_stays(document):
    assert document["picture"].read_bytes().startswith(b"\x89PNG")
    assert document["files"] == ["out.json", "out.png"]


def test_peers_in_trouble_do_not_fail_the_command(document):
    assert document["status"] == 0


def test_command_prints_table_and_names_the_absent(fakes, capsys):
    argv = ["bench", "--grid", "cpu", "--dims", "16", "--lens", "32", "--pass", "fwd", "--rest", "0", "--rounds", "1"]
    status = main([*argv, "--providers", "tilewise-reference,gone=no_such_module:f"])
    out = capsys.readouterr().out
    assert status == 0
    assert "gone is not here: ModuleNotFoundError" in out
    assert "| fwd  | 16 | yes    | 32 " in out


def test_a_worker_leaves_when_its_parent_is_gone_even_while_it_hangs(fakes, tmp_path):
    worker = Worker("hanging=fakes:hanging", "cpu", {"PYTHONPATH": str(fakes)}, tmp_path / "log")
    case = vars(Case("float32", 1, 1, 1, 8, 8, 8, 8, False))
    worker.start()
    process = worker._process
    try:
        assert "error" not in worker.hello(60)
        process.stdin.write(json.dumps({"op": "prepare", "case": case, "pass": "fwd"}) + "\n")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        worker.kill()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--pass", "sideways"], "--pass is 'sideways'"),
        (["--dims", "64,x"], "--dims is '64,x'"),
        (["--lens", "0"], "--lens is '0'"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--rest", "nan"], "--rest is nan"),
        (["--providers", "fa9"], "provider is 'fa9'"),
        (["--providers", "tilewise-nothing"], "tilewise-torch"),
        (["--providers", "mine=module"], "NAME=MODULE:FUNCTION"),
        (["--providers", "math,math"], "named twice"),
        (["--providers", "flex"], "does not run on cpu"),
        (["--env", "math:PYTHONPATH"], "NAME:VAR=VALUE"),
        (["--env", "fa3:A=1"], "'fa3' is not part of this run"),
        (["--out", "/no/such/folder/x.json"], "does not exist"),
    ],
)
def test_bad_arguments_say_what_is_wrong(options, words, capsys):
    assert main(["bench", "--grid", "cpu", *options]) == 2
    assert words in capsys.readouterr().err


# The schedule, with workers that only keep a diary.


class Diary:
    """Stands for every worker: answers at once and writes down who was asked what, and when."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, int, bool]] = []
        self.busy = 0
        self.overlap = False
        self.replies: dict[str, list[Any]] = {}
        self.delay = 0.0
        self.on_measure: Any = None

    def make(self, name: str, device: str, env: dict[str, str], log: Path) -> DiaryWorker:
        log.write_text("")
        return DiaryWorker(self, name, env)


class DiaryWorker:
    def __init__(self, diary: Diary, name: str, env: dict[str, str]):
        self.diary, self.name, self.env, self.running, self.starts = diary, name, env, False, 0

    def start(self) -> None:
        self.running, self.starts = True, self.starts + 1

    def hello(self, timeout: float) -> dict[str, Any]:
        return {"version": "1", "triton": "3.9", "torch": "2", "cuda": None, "device": "card", "uuid": None}

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        diary = self.diary
        if message["op"] == "measure":
            diary.busy += 1
            diary.overlap |= diary.busy > 1
            time.sleep(diary.delay)
            diary.busy -= 1
            if diary.on_measure is not None:
                diary.on_measure()
        diary.asked.append((message["op"], self.name, message["pass"], message["case"]["seqlen_q"], message["case"]["causal"]))
        replies = diary.replies.get(f"{message['op']} {self.name}", [])
        reply = replies.pop(0) if replies else {"ms": 1.0, "peak_mb": None, "began": 0.0, "ended": 0.0, "max_error": 0.0}
        if isinstance(reply, Exception):
            raise reply
        return reply

    def kill(self) -> None:
        self.running = False


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Diary:
    diary = Diary()
    monkeypatch.setattr(runner, "Worker", diary.make)
    return diary


def run_of(diary: Diary, out: Path | None = None, cases: list[Case] | None = None, **options: Any) -> Run:
    settings = Settings(**{"providers": ("tilewise", "sdpa", "math"), "passes": ("fwd",), "device": "cpu", **options})
    cases = cases or GRIDS["cpu"].cases(lens=(64,))[:1]
    return Run(cases, settings, {"device": "here"}, out, Progress())


def timed(diary: Diary) -> list[str]:
    return [name for op, name, *_ in diary.asked if op == "measure"]


def test_turns_rotate_and_never_overlap(diary):
    diary.delay = 0.002
    run_of(diary, rounds=3).go()
    a, b, c = "tilewise", "sdpa", "math"
    assert timed(diary) == [a, b, c, b, c, a, c, a, b]
    assert not diary.overlap


def test_everything_is_prepared_before_anything_is_timed(diary):
    run_of(diary, cases=GRIDS["cpu"].cases(lens=(64, 128)), passes=("fwd", "bwd")).go()
    ops = [op for op, *_ in diary.asked]
    assert ops == ["prepare"] * 16 + ["measure"] * 24  # math has nothing to compile


def test_a_row_holds_the_median_over_rounds(diary):
    measured = {"peak_mb": None, "began": 0.0, "ended": 0.0, "max_error": 0.0}
    diary.replies["measure sdpa"] = [{**measured, "ms": ms} for ms in (5.0, 1.0, 2.0)]
    rows = {r["provider"]: r for r in run_of(diary, rounds=3).go()["rows"]}
    assert rows["sdpa"]["ms"] == 2.0
    assert rows["sdpa"]["samples_ms"] == [5.0, 1.0, 2.0]


def test_json_is_whole_after_every_row(diary, tmp_path):
    out, seen = tmp_path / "out.json", []
    diary.on_measure = lambda: seen.append(len(json.loads(out.read_text())["rows"]))
    run_of(diary, out).go()
    assert seen == [0, 1, 2]
    assert len(json.loads(out.read_text())["rows"]) == 3


def test_budget_stops_and_names_what_was_left_out(diary):
    diary.delay = 0.3
    document = run_of(diary, rounds=4, budget=1.5).go()
    left_out = document["header"]["left_out"]
    assert 1 <= len(timed(diary)) < 12
    assert len(timed(diary)) + len(left_out) == 12
    assert any(line.startswith("sdpa fwd D 64, N 64, full (round 4)") for line in left_out)


def test_out_of_memory_while_others_prepare_is_tried_again(diary):
    diary.replies["prepare sdpa"] = [{"error": "out of memory", "memory": True}]
    rows = {r["provider"]: r for r in run_of(diary).go()["rows"]}
    assert rows["sdpa"]["error"] is None


def test_any_other_error_of_the_preparation_is_final(diary):
    diary.replies["prepare sdpa"] = [{"error": "wrong o"}]
    rows = {r["provider"]: r for r in run_of(diary, rounds=2).go()["rows"]}
    assert rows["sdpa"]["error"] == "wrong o"
    assert "sdpa" not in timed(diary)


def test_a_lost_worker_is_started_again_for_the_next_case(diary):
    diary.replies["measure sdpa"] = [WorkerLost("the process ended (SIGSEGV)", late=False)]
    run = run_of(diary, cases=GRIDS["cpu"].cases(lens=(64,)))
    document = run.go()
    errors = [row["error"] for row in document["rows"] if row["provider"] == "sdpa"]
    assert errors == ["the process ended (SIGSEGV)", None]
    assert next(s.worker.starts for s in run._states if s.provider.name == "sdpa") == 2


def test_a_device_that_broke_costs_the_worker_its_process(diary):
    diary.replies["measure sdpa"] = [{"error": "illegal memory access", "broken": True}]
    run = run_of(diary, cases=GRIDS["cpu"].cases(lens=(64,)))
    errors = [row["error"] for row in run.go()["rows"] if row["provider"] == "sdpa"]
    assert errors == ["illegal memory access", None]
    assert next(s.worker.starts for s in run._states if s.provider.name == "sdpa") == 2


def test_forward_only_provider_has_no_backward_rows(diary):
    document = run_of(diary, providers=("tilewise", "seed"), passes=("fwd", "bwd")).go()
    assert [(r["provider"], r["pass"]) for r in document["rows"]] == [("tilewise", "fwd"), ("seed", "fwd"), ("tilewise", "bwd")]


# The parts.


def test_fa3_grid_is_the_grid_of_the_paper():
    cases = GRIDS["fa3"].cases()
    assert len(cases) == len(set(cases)) == 18
    assert {c.batch * c.seqlen_q for c in cases} == {16384}
    assert {c.heads_q * c.head_dim for c in cases} == {2048}
    assert {c.dtype for c in cases} == {"bfloat16"}
    assert {(c.head_dim, c.seqlen_k, c.causal) for c in cases} == {
        (d, n, causal) for d in (64, 128, 256) for n in (1024, 4096, 16384) for causal in (False, True)
    }


@pytest.mark.parametrize("causal", [False, True])
def test_truth_agrees_with_autograd_in_float64(causal):
    case = Case("float64", 2, 4, 2, 48, 48, 16, 16, causal)
    g = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(2, h, 48, 16, generator=g, dtype=torch.float64) for h in (4, 2, 2, 4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    s = (q @ k.repeat_interleave(2, 1).mT) / 4
    if causal:
        s = s.masked_fill(torch.ones(48, 48, dtype=torch.bool).triu(1), -math.inf)
    o = torch.softmax(s, -1) @ v.repeat_interleave(2, 1)
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do, retain_graph=True), strict=True)) | {"o": o}
    expected = truth(case, q, k, v) | truth(case, q, k, v, do)
    assert set(expected) == set(got)
    for name, (rows, values) in expected.items():
        assert error_of(got[name], rows, values) < 1e-12
        assert error_of(got[name] * 1.1, rows, values) > TOLERANCE["bfloat16"]
        holed = got[name].detach().clone()
        holed[-1, -1, rows[3]] = math.nan
        assert math.isnan(error_of(holed, rows, values))


def test_seed_kernel_is_right_in_the_interpreter():
    code = """
import torch
from tilewise.cli._bench.cases import Case
from tilewise.cli._bench.seed import Seed
from tilewise.cli._bench.truth import error_of, truth
torch.manual_seed(0)
for causal in (False, True):
    case = Case("float16", 1, 2, 2, 256, 256, 32, 32, causal)
    q, k, v = (torch.randn(1, 2, 256, 32).half() for _ in range(3))
    for config in ((64, 64, 2, 4), (128, 64, 2, 4), (128, 128, 2, 8)):
        seed = Seed(case, q, k, v)
        if not config in seed.configs: raise SystemExit(f"{config} is not searched")
        print(error_of(seed._launch(config), *truth(case, q, k, v)["o"]))
print(len(Seed(case, q, k, v).configs))
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    *errors, configs = map(float, done.stdout.split())
    assert len(errors) == 6
    assert max(errors) < 2e-3
    assert configs == 15  # of 18: no tile of more keys than queries when causal


def test_cpu_timer_measures_the_call():
    ms = median_ms(lambda: time.sleep(0.02), torch.device("cpu"), 0, 60)
    assert 19 < ms < 200


def test_sampler_takes_medians_between_two_times():
    sampler = Sampler("GPU-0")
    for now, line in (
        (1.0, "1980, 300.5"),
        (2.0, "1500, 690"),
        (3.0, "1600, [N/A]"),
        (4.0, "1700, 700"),
        (9.0, "100, 1"),
        (3.5, "?"),
    ):
        sampler.add(now, line)
    assert sampler.between(2.0, 4.0) == (1600.0, 695.0)
    assert sampler.between(5.0, 6.0) == (None, None)


def test_a_custom_provider_is_named_before_the_equals_sign():
    assert find("mine=my.module:attend").name == "mine"
    with pytest.raises(InvalidInput, match="expected one of"):
        find("unknown")


# The report and the README.


def made_up() -> dict[str, Any]:
    """A document in which tilewise is 2 times as fast as flex, and half as fast as fa4 except at one point."""
    rows = []
    for pass_ in ("fwd", "bwd"):
        for i, case in enumerate(GRIDS["fa3"].cases()):
            speeds = {"tilewise": 400.0, "flex": 200.0, "fa4": 800.0 if i else 300.0, "math": None}
            for provider, tflops in speeds.items():
                ms = None if tflops is None else case.flops(pass_) / tflops / 1e9
                row = {"case": str(case), "pass": pass_, **vars(case), "provider": provider, "ms": ms, "tflops": tflops}
                rows.append({**row, "error": "out of memory" if tflops is None else None})
    facts = {"version": "1.2", "triton": "3.9.0"}
    header = {"device": "NVIDIA H200", "torch": "2.11", "triton": "3.9.0", "cuda": "13.0", "date": "2026-01-02T03:04:05+00:00"}
    header |= {"commit": "0123456789abcdef", "rest_s": 0.2, "rounds": 3, "absent": {"fa3": "no"}, "left_out": ["x"]}
    return {"header": {**header, "providers": dict.fromkeys(("tilewise", "flex", "fa4", "math"), facts)}, "rows": rows}


def test_ratios_count_wins_and_losses_against_the_best_peer():
    results = report.Results(made_up())
    best = results.best_ratios("fwd")
    assert sum(r > 1 for r in best) == 1
    assert sorted(best)[:17] == pytest.approx([0.5] * 17)
    assert results.ratios("bwd", "flex") == pytest.approx([2.0] * 18)
    assert results.ratios("bwd", "math") == []
    table = report.render(report.point_table(results))
    assert table.count("\n") == 1 + 36 + 2
    means = [line.split("|")[-2].strip() for line in table.splitlines() if "geometric mean" in line]
    assert means == ["2.00", "2.00"]


@pytest.fixture
def tables() -> Any:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_made_from_the_results(tables, tmp_path):
    (tmp_path / "h200.json").write_text(json.dumps(made_up()))
    readme, pictures = tmp_path / "README.md", tmp_path / "docs" / "performance"
    readme.write_text(f"before\n{tables.BEGIN}\nold figures\n{tables.END}\nafter\n")
    argv = [str(tmp_path / "h200.json"), "--readme", str(readme), "--pictures", str(pictures)]
    assert tables.main(argv) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old figures" not in text
    for words in ("NVIDIA H200", "PyTorch 2.11", "Triton 3.9.0", "2026-01-02", "0123456789", "medians over 3 rounds"):
        assert words in text
    assert "**Forward**, 18 points: faster than the best peer at 1, slower at 17 (0.50 to 1.33 times its speed)" in text
    assert "- math, backward, 18 points: out of memory" in text
    assert "Not installed: fa3" in text
    for pass_ in ("fwd", "bwd"):
        assert f"](docs/performance/h200-{pass_}.png)" in text
        assert (pictures / f"h200-{pass_}.png").read_bytes().startswith(b"\x89PNG")
    assert tables.main(argv) == 0
    assert readme.read_text() == text


def test_readme_without_markers_is_left_alone(tables, tmp_path, capsys):
    (tmp_path / "h200.json").write_text(json.dumps(made_up()))
    (tmp_path / "README.md").write_text("no markers\n")
    argv = [str(tmp_path / "h200.json"), "--readme", str(tmp_path / "README.md"), "--pictures", str(tmp_path / "p")]
    assert tables.main(argv) == 2
    assert tables.BEGIN in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "no markers\n"
    assert not (tmp_path / "p").exists()
