"""The command line, called in this process on tiny sizes."""

from __future__ import annotations

import builtins
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewise import Problem, Spec
from tilewise.cli import COMMANDS, longseq, main
from tilewise.cli.explain import PEAKS, pairs, work
from tilewise.reference import mask_of


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def explained(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: tilewise {command}" in out
    assert f"tilewise {command} " in out.split("examples:")[1]


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n    {command} " in out for command in COMMANDS)


def test_version_names_the_software(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "tilewise", "explain", "seqlen=8"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tilewise: error: problem 'seqlen=8': the word head_dim=... is missing." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        ("seqlen=8 head_dim=4 mask=casual", "unknown term 'casual'"),
        ("seqlen=8 head_dim=4 heads=3/2", "heads_q must be a multiple of heads_kv"),
        ("seqlen head_dim=4", "expected words like name=value, got 'seqlen'"),
        ("seqlen=8 head_dim=4 arch=sm_12345", "arch is 'sm_12345'"),
    ],
)
def test_bad_problem_gives_status_2(words, message, capsys):
    assert main(["explain", words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [["explain", "seqlen=8 head_dim=4", "--tiles", "8"], ["demo", "--steps", "0"], ["paint"], []])
def test_bad_arguments_give_status_2(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


def test_explain_counts_tiles_of_a_hand_computed_problem(capsys):
    # 24 queries on 40 keys, bottom right: query i sees keys 0 to 16 + i. Tiles of 8 x 8: rows of tiles see 2 free and 1 masked,
    # 3 and 1, 4 and 1; the 3 others of 15 are empty. Pairs: 17 + 18 + ... + 40 = 684.
    out = explained(capsys, "dtype=float32 seqlen=24x40 head_dim=16 mask=causal grad=qkv arch=cpu", "--tiles", "8x8")
    assert "684 of 960 seen (71.2%)" in out
    row = next(line for line in out.splitlines() if line.startswith("  forward") and "8x8" in line)
    assert row.split()[1:5] == ["8x8", "3", "3", "9"]
    # Forward: 2 * 684 * (16 + 16). Backward: five products. Bytes: q and o 24 * 16 * 4, k and v 40 * 16 * 4, lse 24 * 4.
    assert f"{2 * 684 * 32:,} FLOP" in out
    assert f"{2 * 684 * 80:,} FLOP" in out
    assert f"{2 * 1536 + 2 * 2560 + 96:,} bytes" in out
    assert f"{3 * 1536 + 2 * 2560 + 96 + 1536 + 2 * 2560:,} bytes" in out


def test_explain_reads_back_the_line_it_prints(capsys):
    words = "dtype=float16 heads=6/2 seqlen=100x300 head_dim=40/24 mask=lower:9 grad=k arch=cpu"
    first = explained(capsys, *words.split())
    line = first.splitlines()[0]
    assert explained(capsys, line) == first
    assert str(Problem.parse(line)) == line


def test_explain_roofline_states_its_peaks(capsys):
    out = explained(capsys, "heads=16 batch=2 seqlen=4096 head_dim=128 arch=sm_90")
    assert "H100 SXM: 989 TFLOPS" in out
    assert "H200 SXM: 989 TFLOPS (dense bfloat16, float32 accumulation), 4,800 GB/s" in out
    flop = 4 * 2 * 16 * 4096**2 * 128
    assert f"{flop / 989.4e12 * 1e6:,.2f} us   bound by compute" in out
    # One query on many keys moves more than it computes: the cards differ in it.
    out = explained(capsys, "heads=16 seqlen=1x65536 head_dim=128 arch=sm_90")
    moved = 2 * 16 * (65536 + 1) * 128 * 2 + 16 * 4
    assert f"{moved / 3350e9 * 1e6:,.2f} us   bound by memory" in out
    assert f"{moved / 4800e9 * 1e6:,.2f} us   bound by memory" in out


def test_explain_shows_refusals(capsys):
    assert main(["explain", "dtype=float64 seqlen=64 head_dim=16 arch=sm_90", "--backend", "triton"]) == 1
    out = capsys.readouterr().out
    assert "dtype: the dtype is float64" in out
    assert "backend 'triton' refuses" in out


@pytest.mark.parametrize("arch", sorted(PEAKS))
def test_explain_on_every_architecture_with_peaks(arch, capsys):
    out = explained(capsys, f"dtype=float16 seqlen=512 head_dim=64 mask=causal grad=qkv arch={arch}")
    assert "Roofline time" in out
    assert out.count("bound by") == 2 * len(PEAKS[arch])


@pytest.mark.parametrize("words", ["seqlen=24x40", "seqlen=40x24", "seqlen=0x7", "seqlen=7x0", "seqlen=1"])
@pytest.mark.parametrize("mask", ["full", "causal", "causal,align:top_left", "lower:3", "upper:-2,lower:5", "upper:-1,lower:-1"])
def test_pairs_equal_the_mask(words, mask):
    problem = Problem.parse(f"{words} head_dim=8 mask={mask} arch=cpu")
    assert pairs(problem) == int(mask_of(Spec.parse(mask), problem.seqlen_q, problem.seqlen_k).sum())


def test_work_counts_only_gradients_asked_for():
    def flop(grad: str) -> int:
        return work(Problem.parse(f"seqlen=8 head_dim=32/16 grad={grad} arch=cpu"))[1].flop

    assert flop("qkv") == 2 * 64 * (3 * 32 + 2 * 16)
    assert flop("v") == 2 * 64 * (32 + 16)
    assert flop("q") == 2 * 64 * (32 + 16 + 32)
    assert len(work(Problem.parse("seqlen=8 head_dim=32 arch=cpu"))) == 1


@pytest.mark.parametrize("words", ["seqlen=24x40 head_dim=16 mask=causal", "seqlen=3000x1000 head_dim=64 mask=lower:200"])
def test_explain_draws_a_picture(words, tmp_path, capsys):
    picture = tmp_path / "new" / "tiles.png"
    explained(capsys, words, "--tiles", "8x8", "--picture", str(picture))
    width, height = png_size(picture)
    assert width > 600
    assert height > 400


@pytest.mark.parametrize("words, name", [("seqlen=0 head_dim=8", "a.png"), ("seqlen=9 head_dim=8", "a.docx")])
def test_explain_refuses_a_picture_it_cannot_draw(words, name, tmp_path, capsys):
    assert main(["explain", words + " arch=cpu", "--picture", str(tmp_path / name)]) == 2
    assert "--picture" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_missing_package_says_what_to_install(monkeypatch, tmp_path, capsys):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["demo", "--quick", "--device", "cpu", "--out", str(tmp_path / "d.png")]) == 1
    captured = capsys.readouterr()
    assert "needs matplotlib" in captured.err
    assert "pip install 'tilewise[demo]'" in captured.err


def test_demo_quick_end_to_end(tmp_path, capsys):
    picture = tmp_path / "out" / "demo.png"
    sizes = ["--quick", "--steps", "6", "--seqlen", "512", "--device", "cpu", "--backend", "torch"]
    assert main(["demo", *sizes, "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    assert png_size(picture) == (1800, 720)
    assert str(picture) in out
    # Two runs from one seed: the same first loss, and curves that stay together.
    losses = [line.split() for line in out.splitlines() if line.startswith(("   tilewise   ", "   PyTorch math"))][:2]
    assert losses[0][1] == losses[1][2]
    assert abs(float(losses[0][2]) - float(losses[1][3])) < 1e-3
    errors = next(line.split() for line in reversed(out.splitlines()) if line.startswith("   tilewise   "))
    assert len(errors) == 6
    assert all(0 <= float(e) < 1e-4 for e in errors[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_demo_quick_on_a_gpu(tmp_path):
    assert main(["demo", "--quick", "--device", "cuda", "--out", str(tmp_path / "demo.png")]) == 0


def test_chunked_oracle_sees_an_error(monkeypatch):
    case = longseq.Case(96, 2, 1, 16, "float32", "cpu", 0, "torch")
    good = longseq.errors(case, ("tilewise", "materialised"), lambda: None, chunk=40)
    assert set(good["tilewise"]) == {"o", "lse", "dq", "dk", "dv"}
    assert all(e < 1e-5 for found in good.values() for e in found.values())
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(longseq, "_materialised", lambda q, k, v: sdpa(q, k, v, enable_gqa=True))  # forgets the mask
    bad = longseq.errors(case, ("materialised",), lambda: None, chunk=40)
    assert all(e > 1e-2 for e in bad["materialised"].values())


@pytest.mark.parametrize("measure", [longseq._peak_resident, longseq._peak_allocated])
def test_peak_memory_counts_what_lives_together(measure):
    if measure is longseq._peak_resident and not longseq._CLEAR.exists():
        pytest.skip("needs Linux's /proc")

    def call() -> None:
        a = torch.ones(20 * 2**20)  # more than the allocator of the C library may keep for later
        b = a + 1
        del a
        b + 1

    assert measure(call) == pytest.approx(160 * 2**20, rel=0.1)


def test_memory_of_tiles_is_linear_and_of_scores_quadratic():
    cases = [longseq.Case(n, 2, 1, 16, "float32", "cpu", 0, "torch") for n in (1024, 2048)]
    small, large, dense_small, dense_large = longseq.memory(
        [(provider, case, True) for provider in longseq.PROVIDERS for case in cases]
    )
    assert dense_large > 3.5 * dense_small
    assert large < 2.2 * small
    assert large < dense_large / 5
