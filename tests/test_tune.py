"""``tilewise tune``: the loop itself on one tiny problem in the interpreter with a clock of its own, and the command line."""

from __future__ import annotations

import json

import pytest
import torch

from tilewise import InvalidInput, Problem, backends, configs
from tilewise.backends import module_of
from tilewise.cli import main
from tilewise.cli import tune as command
from tilewise.cli._tune import candidates as space
from tilewise.cli._tune import work
from tilewise.cli._tune.candidates import candidates, flop, kernels, picked, short
from tilewise.configs import Config, hopper, hopper_backward, records

TINY = "dtype=float32 heads=2/1 seqlen=48 head_dim=16 mask=causal grad=qkv arch=cpu"
SM90 = "batch=4 heads=16 seqlen=4096 head_dim=128 mask=causal arch=sm_90"
GOOD, BAD, SLOW, NOW = Config(32, 32, 4, 1), Config(32, 16, 4, 1), Config(64, 16, 4, 1), Config(64, 32, 4, 1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CONFIG_DIR", str(tmp_path))
    backends.forget()
    yield tmp_path
    monkeypatch.undo()
    backends.forget()


@pytest.fixture
def few(monkeypatch):
    """Few candidates: one that is faster, one that is wrong, one that is slow, one that is not legal."""
    rows = [(c.block_m, c.block_n, c.num_warps, c.num_stages) for c in (GOOD, BAD, SLOW)] + [(16, 32, 4, 1)]
    monkeypatch.setattr(space, "SPACE", dict.fromkeys(space.SPACE, rows))
    monkeypatch.setattr(space, "WIDE_SPACE", [])


class Clock:
    """A timer: it runs what it times, and knows how long each config takes."""

    def __init__(self, problem: Problem, kernel: str, times: dict[Config, list[float]]):
        self.problem, self.kernel, self.times = problem, kernel, times
        self.order: list[Config] = []

    def __call__(self, run) -> float:
        run()
        config = configs.lookup(self.problem, self.kernel)
        self.order.append(config)
        return self.times[config].pop(0)


def break_forward(monkeypatch, wrong: Config) -> None:
    module = module_of("triton")
    real = module.forward

    def forward(problem, q, k, v, o, lse):
        real(problem, q, k, v, o, lse)
        if configs.lookup(problem, "fwd") == wrong:
            o[..., -1, :] += 0.01

    monkeypatch.setattr(module, "forward", forward)


def tuned(monkeypatch, times: dict[Config, list[float]], **more):
    problem = Problem.parse(TINY)
    clock = Clock(problem, "fwd", times)
    done = command.tune([(problem, "triton", "fwd")], "cpu", timer=clock, rest=0, **more)
    return problem, clock, done


def test_the_loop_checks_first_times_in_turn_and_writes_what_pays(folder, few, monkeypatch, capsys):
    break_forward(monkeypatch, BAD)
    times = {NOW: [4.0, 3.0], GOOD: [2.5, 2.6], SLOW: [9.0, 8.0]}
    problem, clock, done = tuned(monkeypatch, times)
    (result,) = done
    assert clock.order == [NOW, GOOD, SLOW] * 2  # BAD, the fastest for all one knows, is never timed
    assert {m.config: m.ms for m in result.measured} == {NOW: 3.0, GOOD: 2.5, SLOW: 8.0, BAD: float("inf")}
    wrong = next(m for m in result.measured if m.config == BAD)
    assert "error 1.0" in wrong.wrong
    assert result.illegal == 1
    assert result.best.config == GOOD
    assert result.gain == pytest.approx(0.2)
    assert result.pays

    path = records.user_file("cpu")
    assert command.finish(done, [1], path, command.header("cpu", "cpu")) == 1
    out = capsys.readouterr().out
    assert "32x32 w4 s1" in out
    assert "+20.0%  record" in out
    assert "1 gave a wrong result, not timed:\n  triton forward 32x16 w4 s1: 64x64 o: error" in out
    assert configs.lookup(problem, "fwd") == GOOD  # in this very process
    assert str(path) in configs.origin(problem, "fwd")
    content = json.loads(path.read_text())
    assert {"arch": "cpu", "torch": torch.__version__, "format": records.FORMAT}.items() <= content.items()
    (row,) = content["records"]
    assert (row["config"], row["ms"], row["gain"], row["problem"]) == ([32, 32, 4, 1], 2.5, 0.2, str(problem))


def test_nothing_is_written_below_two_per_cent(folder, few, monkeypatch, capsys):
    times = {NOW: [1.0, 1.0], GOOD: [0.985, 0.985], BAD: [2.0, 2.0], SLOW: [2.0, 2.0]}
    _, _, done = tuned(monkeypatch, times)
    assert done[0].best.config == GOOD
    assert command.finish(done, [1], records.user_file("cpu"), command.header("cpu", "cpu")) == 0
    assert "Nothing was at least 2% faster" in capsys.readouterr().out
    assert not list(folder.iterdir())


def test_a_present_choice_that_is_wrong_is_replaced(folder, few, monkeypatch):
    break_forward(monkeypatch, NOW)
    _, clock, done = tuned(monkeypatch, {GOOD: [5.0, 5.0], BAD: [6.0, 6.0], SLOW: [7.0, 7.0]})
    assert NOW not in clock.order
    assert done[0].pays
    assert command.rows_of(done, "2026-01-02")[0]["config"] == [32, 32, 4, 1]


def test_a_candidate_that_fails_is_one_line(folder, few, monkeypatch, capsys):
    module = module_of("triton")
    real = module.forward

    def forward(problem, *tensors):
        if configs.lookup(problem, "fwd") == BAD:
            raise RuntimeError("ptxas fatal\nmore")
        real(problem, *tensors)

    monkeypatch.setattr(module, "forward", forward)
    _, clock, done = tuned(monkeypatch, {NOW: [1.0, 1.0], GOOD: [1.0, 1.0], SLOW: [1.0, 1.0]})
    assert BAD not in clock.order
    assert "ptxas fatal" in next(m.failed for m in done[0].measured if m.config == BAD)
    assert command.finish(done, [1], records.user_file("cpu"), command.header("cpu", "cpu")) == 0
    assert "1 did not run here, not timed:\n  triton forward 32x16 w4 s1: BackendBroken" in capsys.readouterr().out


def test_backward_kernels_are_run_alone(folder, few, monkeypatch):
    problem = Problem.parse(TINY)
    seen = []
    module = module_of("triton")
    real = module.backward

    def backward(problem, *tensors):
        seen.append(tuple(t is not None for t in tensors[-3:]))
        real(problem, *tensors)

    monkeypatch.setattr(module, "backward", backward)
    monkeypatch.setattr(space, "SPACE", {name: [(32, 32, 4, 1)] for name in space.SPACE})

    def timer(run) -> float:
        seen.clear()
        run()
        return 1.0

    for kernel, wanted in (("dkdv", (False, True, True)), ("dq", (True, False, False))):
        done = command.tune([(problem, "triton", kernel)], "cpu", timer=timer, rest=0)
        assert seen == [wanted]
        assert not any(m.wrong for m in done[0].measured)


def test_the_budget_leaves_the_rest_out(folder, few, monkeypatch, capsys):
    problem = Problem.parse(TINY)
    jobs = [(problem, "triton", kernel) for kernel in ("fwd", "dq")]
    done = command.tune(jobs, "cpu", budget=-1.0, timer=lambda run: 1.0, rest=0)
    assert done == []
    _, _, done = tuned(monkeypatch, {NOW: [1.0, 1.0], GOOD: [0.5, 0.5], BAD: [1.0, 1.0], SLOW: [1.0, 1.0]})
    command.finish(done, jobs, folder / "x.json", command.header("cpu", "cpu"))
    assert "Out of time: 1 of 2 kernels were not looked at" in capsys.readouterr().out


def test_a_kernel_that_ran_out_of_time_keeps_what_it_has(folder, few):
    problem = Problem.parse(TINY)
    checks = [work.Yardstick(call) for call in work.small_calls(problem, "cpu")]
    result = work.tune_kernel(problem, "triton", "fwd", "cpu", checks, {}, lambda run: 1.0, until=0.0, rest=0)
    assert not result.complete
    assert [m.config for m in result.measured] == [NOW]
    assert result.present.ms == 1.0


def test_small_calls_are_whole_and_ragged_and_keep_the_kind():
    words = "dtype=bfloat16 heads=32/4 seqlen=16384 head_dim=64/32 mask=upper:0,lower:4095 grad=qkv arch=cpu sm_scale=0.5"
    problem = Problem.parse(words)
    calls = work.small_calls(problem, "cpu")
    assert [(c.q.shape[2], c.k.shape[2]) for c in calls] == [(64, 64), (40, 72)]
    for call in calls:
        assert call.problem.bounds[2:] == (True, True)
        assert (call.problem.group, call.problem.dtype, call.scale) == (8, "bfloat16", 0.5)
        assert (call.q.shape[3], call.v.shape[3]) == (64, 32)


def test_candidates_begin_with_the_present_choice_and_know_the_law():
    problem = Problem.parse(SM90 + " grad=qkv", software=command.Runtime((3, 9)))
    assert kernels(problem, "triton", ("fwd", "bwd")) == ["fwd", "dkdv", "dq"]
    assert kernels(problem, "hopper", ("fwd", "bwd")) == ["fwd", "bwd"]
    assert kernels(problem, "hopper", ("bwd",)) == ["bwd"]
    wide = Problem.parse("seqlen=64 head_dim=256 arch=sm_90 grad=qkv")
    assert kernels(wide, "triton", ("bwd",)) == ["dk", "dv", "dq"]
    for backend in ("triton", "hopper"):
        for kernel in kernels(problem, backend, ("fwd", "bwd")):
            found = candidates(problem, backend, kernel)
            assert found[0].config == picked(problem, backend, kernel)[0]
            assert found[0].why is None
            assert len({c.config for c in found}) == len(found)
            assert len({short(c.config) for c in found}) == len(found)
    forms = {c.config: c.why for c in candidates(problem, "hopper", "fwd")}
    assert set(forms) == set(hopper.CHOICES[128, 128])
    half = Problem.parse("dtype=float16 " + SM90, software=command.Runtime((3, 9)))
    assert all("exponents" in (c.why or "") for c in candidates(half, "hopper", "fwd") if c.config.guarded)
    band = Problem.parse(SM90.replace("causal", "upper:0,lower:100"), software=command.Runtime((3, 9)))
    assert all("lower bound" in (c.why or "") for c in candidates(band, "hopper", "bwd") if c.config.kept)
    count = len(hopper_backward.DKDV[128]) * (len(hopper_backward.DQ[128]) + len(hopper_backward.KEPT[128]))
    assert len(candidates(problem, "hopper", "bwd")) == count


def test_flop_of_parts_make_up_the_kernels():
    problem = Problem.parse("batch=2 heads=3 seqlen=8 head_dim=32/16 arch=cpu")
    assert flop(problem, "fwd", 64) == 4 * 2 * 3 * 64 * 24
    assert flop(problem, "dkdv", 64) == flop(problem, "dk", 64) + flop(problem, "dv", 64) - 2 * 6 * 64 * 32


def test_every_hopper_record_of_a_tuning_is_read_back(folder):
    problem = Problem.parse(SM90 + " grad=qkv", software=command.Runtime((3, 9)))
    for kernel in ("fwd", "bwd"):
        for c in candidates(problem, "hopper", kernel):
            row = {**records.fields(problem, "hopper", kernel), "config": records.encode(c.config)}
            records.write(records.user_file("sm_90"), command.header("sm_90", "cpu"), [row])
            backends.forget()
            assert picked(problem, "hopper", kernel) == (c.config, picked(problem, "hopper", kernel)[1])
            assert "user record" in picked(problem, "hopper", kernel)[1]


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["tune"]) == 2
    captured = capsys.readouterr()
    assert "needs" in captured.err or "finds none" in captured.err
    assert "--dry-run" in captured.err
    assert captured.out == ""


def test_dry_run_lists_candidates_and_why_the_others_are_not_legal(folder, capsys):
    assert main(["tune", "--dry-run", "--backend", "triton", "--problem", SM90.replace("sm_90", "sm_80")]) == 0
    out = capsys.readouterr().out
    assert "forward (triton): 48 candidates, 30 legal" in out
    assert "at present  128x64 w8 s3   (built-in rule)" in out
    assert "18 not legal, the first because it needs 180224 bytes of shared memory, sm_80 has 166912" in out
    assert "dk and dv (triton)" in out
    assert out.rstrip().endswith(str(folder / "sm_80.json"))
    assert not list(folder.iterdir())


def test_dry_run_takes_the_backend_of_the_device_and_one_pass(folder, capsys):
    assert main(["tune", "--dry-run", "--passes", "fwd", "--problem", SM90, "--problem", SM90.replace("=128", "=96")]) == 0
    out = capsys.readouterr().out
    assert f"forward (hopper): {len(hopper.CHOICES[128, 128])} candidates" in out
    assert f"forward (hopper): {len(hopper.CHOICES[96, 96])} candidates" in out
    assert "backward" not in out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--problem", "seqlen=8"], "head_dim=... is missing"),
        (["--problem", SM90 + " grad=q"], "grad is 'q', expected qkv"),
        (["--problem", SM90 + " layout=strided"], "layout=strided"),
        (["--problem", SM90.replace("causal", "causal,bias")], "its mask names tensors (bias)"),
        (["--problem", SM90.replace("4096", "0")], "an extent is zero"),
        (["--problem", "seqlen=64 head_dim=600 arch=sm_90"], "'auto' takes backend 'torch', which has nothing to tune"),
        (["--problem", SM90.replace("=128", "=80"), "--backend", "hopper"], "backend 'hopper' refuses"),
    ],
)
def test_bad_problems_give_status_2(folder, arguments, text, capsys):
    assert main(["tune", "--dry-run", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--passes all", "--budget 0", "--budget soon", "--grid cpu", "--backend torch"])
def test_bad_arguments_give_status_2(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["tune", *words.split()])
    assert exit_.value.code == 2


def test_a_target_that_cannot_be_used_is_refused_before_any_work(folder, tmp_path):
    args = command.argparse.Namespace(out=None)
    assert command._target(args, "sm_90") == folder / "sm_90.json"
    (folder / "sm_90.json").write_text("{")
    with pytest.raises(InvalidInput, match="not JSON"):
        command._target(args, "sm_90")
    with pytest.raises(InvalidInput, match="cannot be"):
        command._target(command.argparse.Namespace(out=tmp_path), "sm_90")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_problem_on_the_gpu(folder, tmp_path, capsys):
    out = tmp_path / "out" / "records.json"
    problem = "batch=2 heads=8 seqlen=1024 head_dim=64 mask=causal"
    assert main(["tune", "--problem", problem, "--passes", "fwd", "--budget", "60", "--out", str(out)]) == 0
    assert "TFLOP/s" in capsys.readouterr().out


def test_kernels_are_compiled_ahead_in_processes_without_a_gpu(few, tmp_path, monkeypatch):
    from tilewise.cli._tune import compile as ahead

    problems = [Problem.parse(f"seqlen={n} head_dim=16 mask=causal grad=qkv arch=sm_80") for n in (64, 80)]
    jobs = ahead.jobs_of(problems, ["fwd", "dq"])
    assert len(jobs) == len(set(jobs)) == 2 * sum(
        c.why is None for kernel in ("fwd", "dq") for c in candidates(problems[0], "triton", kernel)
    )
    assert ahead.compile_ahead(jobs, "sm_80") == 0  # here kernels are interpreted
    monkeypatch.setattr(ahead, "runtime", lambda: command.Runtime((3, 9)))
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    steps = []
    bad = ("seqlen=64 head_dim=16 arch=sm_80", "fwd", (48, 16, 4, 1))
    assert ahead.compile_ahead([jobs[0], bad], "sm_80", steps.append, workers=1) == 1
    assert len(steps) == 2
    assert list(tmp_path.rglob("*.cubin"))
    assert ahead.compile_ahead(jobs[:1], "sm_80", until=0.0) == 0


def test_rows_that_cannot_be_copied_in_bulk_are_known_beforehand(folder):
    args = command.argparse.Namespace(problem=["seqlen=64 head_dim=100 arch=sm_90", SM90], grid=None, passes=("fwd",))
    assert [p.bulk for p in command._problems(args, True)] == [False, True]


def test_backward_passes_on_hopper_are_timed_deterministic(monkeypatch):
    """A record chooses their kernels; where dq may be added up in memory none of them would run."""
    seen = []

    class Module:
        forward = staticmethod(lambda bound, *rest: None)
        backward = staticmethod(lambda bound, *rest: seen.append(bound.spec.deterministic))

    monkeypatch.setattr(work, "module_of", lambda backend: Module)
    for backend in ("hopper", "triton"):
        work._timed(Problem.parse("dtype=float16 heads=2 seqlen=64 head_dim=64 grad=qkv arch=cpu"), "bwd", backend, "cpu")[1]()
    assert seen == [True, None]
