"""The user's records: what a file may hold, which config a problem gets, and what a file that cannot be used is answered with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import InvalidInput, Problem, backends, configs
from tilewise.arch import Runtime
from tilewise.cli import main
from tilewise.configs import Config, hopper, hopper_backward, records
from tilewise.configs.hopper_backward import BackwardConfig

SM90 = "heads=16 batch=4 seqlen=4096 head_dim=128 mask=causal grad=qkv arch=sm_90"
SHIPPED = Path(configs.__file__).parent / "data" / "sm_90.json"
HEADER = {
    "format": records.FORMAT,
    "arch": "sm_90",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.9.0",
    "cuda": "13.0",
    "tilewise": "0.1.0",
    "date": "2026-01-02",
}
ROW = {"pass": "fwd", "itemsize": 2, "head_dim": 128, "bounded": True, "length": "medium", "config": [64, 32, 4, 2]}


def problem_of(text: str = SM90) -> Problem:
    return Problem.parse(text, software=Runtime((3, 9)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CONFIG_DIR", str(tmp_path))
    backends.forget()
    yield tmp_path
    monkeypatch.undo()
    backends.forget()


def put(folder: Path, *rows: dict, **header: object) -> Path:
    path = folder / "sm_90.json"
    path.write_text(json.dumps({**HEADER, **header, "records": list(rows)}))
    backends.forget()
    return path


def hopper_row(config: object, pass_: str = "fwd", text: str = SM90) -> dict:
    return {**records.fields(problem_of(text), "hopper", pass_), "config": records.encode(config)}


def test_shipped_file_has_the_format_of_a_user_file():
    header, rows = records.read(SHIPPED, "sm_90")
    assert header["device"]
    assert len(rows) == len(json.loads(SHIPPED.read_text())["records"]) > 50


def test_folder_is_the_variable_or_the_platforms(monkeypatch):
    monkeypatch.setenv("TILEWISE_CONFIG_DIR", "/a")
    assert records.folder() == Path("/a")
    monkeypatch.delenv("TILEWISE_CONFIG_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/b")
    assert records.user_file("sm_90") == Path("/b/tilewise/sm_90.json")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert records.folder() == Path("/home/me/.config/tilewise")


def test_precedence_is_user_then_shipped_then_rule(folder):
    problem, other = problem_of(), problem_of(SM90.replace("sm_90", "sm_80"))
    shipped = configs.lookup(problem, "fwd")
    assert configs.origin(problem, "fwd").startswith("shipped record, NVIDIA H200")
    assert configs.origin(other, "fwd") == records.BUILT_IN
    path = put(folder, ROW)
    assert configs.lookup(problem, "fwd") == Config(64, 32, 4, 2) != shipped
    assert configs.origin(problem, "fwd") == f"user record {path} of 2026-01-02"
    assert configs.origin(problem, "dq").startswith("shipped record")
    assert configs.origin(other, "fwd") == records.BUILT_IN
    put(folder, {**ROW, "date": "2026-03-04"})
    assert configs.origin(problem, "fwd").endswith("of 2026-03-04")


def test_a_record_that_is_legal_for_its_class_only_leaves_others_to_the_rule(folder):
    put(folder, {**ROW, "bounded": False, "config": [64, 128, 4, 2]})
    plain = problem_of(SM90.replace("causal", "full"))
    assert configs.lookup(plain, "fwd") == Config(64, 128, 4, 2)
    assert configs.origin(problem_of(), "fwd").startswith("shipped record")


def test_hopper_forward_takes_the_users_record(folder):
    problem = problem_of()
    rule = hopper.lookup(problem)
    assert hopper.origin(problem) == records.BUILT_IN
    other = next(c for c in hopper.CHOICES[128, 128] if c != rule and not c.guarded)
    path = put(folder, hopper_row(other))
    assert hopper.lookup(problem) == other
    assert str(path) in hopper.origin(problem)
    few, half = problem_of(SM90.replace("batch=4 ", "").replace("16", "1")), problem_of("dtype=float16 " + SM90)
    for each in (few, half, problem_of(SM90.replace("4096", "16384")), problem_of(SM90.replace("causal", "upper:0,lower:9"))):
        assert hopper.origin(each) == records.BUILT_IN


def test_a_guarded_record_serves_only_what_suits_it(folder):
    guarded = next(c for c in hopper.CHOICES[128, 128] if c.guarded)
    put(folder, hopper_row(guarded))
    assert hopper.lookup(problem_of()) == guarded
    uneven = problem_of(SM90.replace("4096", "4096x4100"))
    assert not hopper.suits_guard(uneven)
    assert not hopper.lookup(uneven).guarded


@pytest.mark.parametrize("kept", [False, True])
def test_hopper_backward_takes_the_users_record(folder, kept):
    # Built in, ds is kept at head_dim 128 and not at 64.
    dim = 64 if kept else 128
    text = SM90.replace("4096", "16384").replace("head_dim=128", f"head_dim={dim}")
    problem = problem_of(text)
    keys, queries = hopper_backward.DKDV[dim][1], hopper_backward.DQ[dim][2]
    config = BackwardConfig(keys, kept=hopper_backward.KEPT[dim][0]) if kept else BackwardConfig(keys, queries)
    assert hopper_backward.origin(problem) == records.BUILT_IN
    assert bool(hopper_backward.heads_kept(problem)) is not kept
    put(folder, hopper_row(config, "bwd", text))
    assert hopper_backward.lookup_dkdv(problem) == keys
    assert "user record" in hopper_backward.origin(problem)
    if kept:
        assert hopper_backward.lookup_kept(problem) == config.kept
        assert hopper_backward.heads_kept(problem) > 0
    else:
        assert hopper_backward.lookup_dq(problem) == queries
        assert not hopper_backward.heads_kept(problem)


def test_the_file_is_read_once_and_at_the_first_lookup(folder, monkeypatch):
    put(folder, ROW)
    seen = []
    real = records.read
    monkeypatch.setattr(records, "read", lambda *a: seen.append(a) or real(*a))
    for text in (SM90, SM90.replace("4096", "1024")):
        for pass_ in ("fwd", "dq"):
            configs.lookup(problem_of(text), pass_)
    assert len(seen) == 1


def test_forget_reaches_the_caches_of_the_backends(folder):
    from tilewise.backends import hopper as backend

    problem = problem_of()
    before = backend._picked(problem)[0][0].options["BLOCK_N"]
    keys = backend.bwd_launch._call(problem, True, True, True, False).chunks[0][0].options["STAGES"]
    other = next(c for c in hopper.CHOICES[128, 128] if c.block_n != before and not c.guarded)
    way = BackwardConfig(next(c for c in hopper_backward.DKDV[128] if c.stages != keys), hopper_backward.DQ[128][0])
    put(folder, hopper_row(other), hopper_row(way, "bwd"))
    assert backend._picked(problem)[0][0].options["BLOCK_N"] == other.block_n
    assert backend.bwd_launch._call(problem, True, True, True, False).chunks[0][0].options["STAGES"] == way.keys.stages


def test_written_records_are_read_back_and_seen(folder):
    guarded, way = hopper.CHOICES[128, 128][2], BackwardConfig(hopper_backward.DKDV[128][1], kept=hopper_backward.KEPT[128][1])
    rows = [ROW, hopper_row(guarded), hopper_row(way, "bwd")]
    path = records.user_file("sm_90")
    assert records.write(path, HEADER, rows) is None
    backends.forget()
    header, found = records.read(path, "sm_90")
    assert header == HEADER
    assert [config for _, config, _ in found] == [Config(64, 32, 4, 2), guarded, way]
    assert [row for _, _, row in found] == rows
    assert configs.lookup(problem_of(), "fwd") == Config(64, 32, 4, 2)
    assert hopper.lookup(problem_of()) == guarded


def test_writing_keeps_other_records_of_the_same_card_and_software(folder):
    path = records.user_file("sm_90")
    records.write(path, HEADER, [ROW, {**ROW, "length": "long"}])
    new = {**ROW, "config": [128, 64, 8, 2]}
    assert records.write(path, {**HEADER, "date": "2026-05-06"}, [new]) is None
    header, found = records.read(path)
    assert header["date"] == "2026-05-06"
    assert [(row["length"], config.block_m) for _, config, row in found] == [("medium", 128), ("long", 64)]


def test_records_of_other_software_are_put_aside(folder):
    path = records.user_file("sm_90")
    records.write(path, HEADER, [ROW])
    old = records.write(path, {**HEADER, "triton": "3.10.0"}, [{**ROW, "length": "long"}])
    assert old == path.with_name("sm_90.json.old")
    assert [row["length"] for _, _, row in records.read(path)[1]] == ["long"]
    assert [row["length"] for _, _, row in records.read(old)[1]] == ["medium"]


def test_a_write_that_fails_leaves_the_old_file_whole(folder, monkeypatch):
    path = records.user_file("sm_90")
    records.write(path, HEADER, [ROW])
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        records.write(path, HEADER, [{**ROW, "length": "long"}])
    assert path.read_text() == before
    assert os.listdir(folder) == ["sm_90.json"]


def test_an_illegal_record_is_never_written(folder):
    with pytest.raises(ValueError, match="not legal"):
        records.write(records.user_file("sm_90"), HEADER, [{**ROW, "config": [48, 32, 4, 2]}])
    assert os.listdir(folder) == []


WRONG = [
    ("{", "it is not JSON"),
    ("[]", "holds no list 'records'"),
    ({"records": 3}, "holds no list 'records'"),
    ({"format": "2.0"}, "its format is '2.0', expected '1.0'"),
    ({"format": None}, "its format is None, expected '1.0'"),
    ({"arch": "sm_80"}, "it is for arch 'sm_80', expected 'sm_90'"),
    ({"colour": 1}, "the word 'colour' is unknown"),
    ([7], "record 0: it is 7"),
    ([{**ROW, "pass": "bwd"}], "record 0: pass is 'bwd', expected fwd"),
    ([{**ROW, "bounded": 1}], "record 0: bounded is 1, expected False, True"),
    ([{**ROW, "itemsize": True}], "record 0: itemsize is True, expected 2, 4"),
    ([{**ROW, "length": "huge"}], "record 0: length is 'huge', expected short, medium, long"),
    ([{**ROW, "colour": 1}], "record 0: the word 'colour' is unknown"),
    ([{k: v for k, v in ROW.items() if k != "length"}], "record 0: the word 'length' is missing"),
    ([{**ROW, "backend": "flash"}], "record 0: backend is 'flash', expected triton or hopper"),
    ([{**ROW, "config": [64, 32]}], r"record 0: config is \[64, 32\], expected \[block_m"),
    ([{**ROW, "config": [64, 32, 4, 0]}], "record 0: config is"),
    ([{**ROW, "config": [48, 32, 4, 2]}], "is not legal: block_m is 48"),
    ([{**ROW, "config": [64, 128, 4, 2]}], "is not legal: block_m 64 < block_n 128"),
    ([{**ROW, "config": [256, 256, 4, 4]}], "is not legal: it needs .* bytes of shared memory"),
    ([ROW, ROW], "record 1: a record before it is for the same problems"),
    ([{**hopper_row(hopper.CHOICES[128, 128][0]), "tiles": "some"}], "tiles is 'some', expected few, many"),
    ([{**hopper_row(hopper.CHOICES[128, 128][0]), "config": {"block_m": 1}}], "config lacks the word 'block_n'"),
    ([{**hopper_row(hopper.CHOICES[128, 128][0]), "config": [1]}], r"config is \[1\], expected \{block_m"),
    ([hopper_row(hopper.HopperConfig(96, 64, 2, 1, True, True))], "not legal: block_m is 96"),
    ([{**hopper_row(hopper.CHOICES[128, 128][2]), "dtype": "float16"}], "not legal: it is guarded and the dtype is float16"),
    ([{**hopper_row(hopper.CHOICES[128, 128][0]), "head_dim_v": 64}], "no fwd at head_dim 128/64 on sm_90"),
    ([{**hopper_row(hopper.CHOICES[128, 128][0], "bwd")}], "expected {keys, queries} or {keys, kept}"),
    (
        [{**hopper_row(BackwardConfig(hopper_backward.DKDV[128][0], kept=hopper_backward.KEPT[128][0]), "bwd"), "mask": "band"}],
        "not legal: ds is kept in memory and there is a lower bound",
    ),
]


@pytest.mark.parametrize("content, text", WRONG, ids=[text[:40] for _, text in WRONG])
def test_a_file_that_cannot_be_used_is_named_with_what_to_do(folder, content, text):
    path = folder / "sm_90.json"
    if isinstance(content, list):
        content = {"records": content}
    path.write_text(content if isinstance(content, str) else json.dumps({**HEADER, "records": [], **content}))
    for _ in range(2):  # not only the first time
        with pytest.raises(InvalidInput, match=text) as error:
            configs.lookup(problem_of(), "fwd")
    message = str(error.value)
    assert str(path) in message
    assert "expected" in message or "not legal" in message or "no fwd" in message
    assert "Correct or delete the file" in message
    with pytest.raises(InvalidInput, match=text):
        hopper.lookup(problem_of())


def test_a_folder_in_the_place_of_the_file_is_said(folder):
    (folder / "sm_90.json").mkdir()
    with pytest.raises(InvalidInput, match="it cannot be read"):
        configs.lookup(problem_of(), "fwd")


def test_attention_itself_says_what_is_wrong_with_the_file(folder):
    (folder / "cpu.json").write_text("{")
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(InvalidInput, match=r"cpu\.json"):
        tilewise.attention(q, q, q, backend="triton")
    (folder / "cpu.json").unlink()
    tilewise.attention(q, q, q, backend="triton")


def test_attention_is_right_with_a_record(folder):
    key = {"pass": "fwd", "itemsize": 4, "head_dim": 16, "bounded": True, "length": "short"}
    head = {**HEADER, "arch": "cpu"}
    records.write(folder / "cpu.json", head, [{**key, "config": [16, 16, 4, 1]}])
    backends.forget()
    q = torch.randn(1, 1, 40, 16)
    o = tilewise.attention(q, q, q, causal=True, backend="triton")
    assert configs.lookup(Problem.bind(q, q, q, tilewise.causal()), "fwd") == Config(16, 16, 4, 1)
    assert torch.allclose(o.double(), tilewise.reference(q, q, q, tilewise.causal())[0], atol=1e-5)


def test_importing_reads_no_records(folder):
    (folder / "cpu.json").write_text("{")
    code = "import tilewise, tilewise.cli, tilewise.configs.hopper; print('quiet')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "quiet", done.stderr


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_explain_says_where_a_config_comes_from(folder, backend, capsys, monkeypatch):
    monkeypatch.setattr("tilewise.problem.runtime", lambda: Runtime((3, 9)))

    def line() -> list[str]:
        assert main(["explain", SM90, "--backend", backend, "--deterministic", "yes"]) == 0
        return [x for x in capsys.readouterr().out.splitlines() if x.startswith("Config of")]

    assert line() == [
        "Config of forward, backward dk, dv, backward dq: "
        + ("built-in rule." if backend == "hopper" else "shipped record, NVIDIA H200, 2026-11-30.")
    ]
    other = next(c for c in hopper.CHOICES[128, 128] if not c.guarded and c.block_n == 64)
    path = put(folder, ROW, hopper_row(other))
    assert line()[0] == f"Config of forward: user record {path} of 2026-01-02."
    assert line()[1].startswith("Config of backward dk, dv, backward dq: ")
