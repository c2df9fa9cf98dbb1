"""Every argument is accepted with a meaning or refused by its name: no value of another type is taken for one that it resembles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import cli, problem
from tilewise.arch import Runtime
from tilewise.configs import hopper_backward

Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 3)
SEGMENTS = tw.segments(torch.zeros(5).int(), torch.zeros(6).int())
# Of no type that a flag or a name has, though some count as true or false, or equal True.
STRANGE = ["yes", 1, 0, 1.0, math.nan, np.bool_(True), np.int64(1), torch.tensor(True), [True], (), {}, b"x"]
FLAGS = ("sink", "segment", "row", "dense")


@pytest.mark.parametrize("value", [*STRANGE, None], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_a_spec_is_true_or_false(name, value):
    with pytest.raises(tw.InvalidInput, match=rf"^{name} must be True or False, got .* of type {type(value).__name__}\.$"):
        tw.Spec(**{name: value})


@pytest.mark.parametrize("value", STRANGE, ids=repr)
@pytest.mark.parametrize(
    "function",
    [
        tw.Spec,
        lambda **more: tw.attention(Q, K, V, **more),
        lambda **more: tw.explain(Q, K, V, **more),
    ],
    ids=["Spec", "attention", "explain"],
)
def test_deterministic_is_true_false_or_none(function, value):
    with pytest.raises(tw.InvalidInput, match=r"^deterministic must be True, False or None, got .* of type "):
        function(deterministic=value)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_backward_of_a_plan_is_true_false_or_none(value):
    with pytest.raises(tw.InvalidInput, match=r"^backward must be True, False or None, got "):
        tw.plan(Q, K, SEGMENTS, backward=value)
    assert tw.plan(Q, K, SEGMENTS, backward=False).plan


@pytest.mark.parametrize("value", [v for v in STRANGE if not isinstance(v, str)], ids=repr)
def test_a_backend_is_a_name(value):
    for function in (lambda: tw.plan(Q, K, SEGMENTS, backend=value), lambda: tw.attention(Q, K, V, backend=value)):
        with pytest.raises(tw.InvalidInput, match=r"^backend must be a name, got "):
            function()


SPECS = [
    ({"score": "alibi"}, r"score must be a tuple of names of steps, got 'alibi' of type str"),
    ({"score": None}, r"score must be a tuple of names of steps, got None"),
    ({"score": (1,)}, r"score has 1, expected 'softcap:NUMBER', 'alibi', 'bias' or 'fn:NAME/TENSORS@HASH'"),
    ({"score": ("alibi:1",)}, r"score has 'alibi:1', expected"),
    ({"score": ("softcap",)}, r"score has 'softcap', expected"),
    ({"score": ("softcap:many",)}, r"score has 'softcap:many', expected"),
    ({"score": ("softcap:-1",)}, r"softcap's cap is -1\.0, expected a finite number above 0"),
    ({"score": ("bias", "softcap:2.0", "bias")}, r"score names 'bias' twice"),
    ({"dropout": 0.1}, r"dropout must be a string, got 0\.1 of type float"),
    ({"dropout": "0.1x"}, r"dropout needs a number, got '0\.1x'"),
    ({"dropout": "1.5"}, r"dropout's p is 1\.5, expected"),
    ({"plan": True}, r"plan must be a string, got True of type bool"),
    ({"returns": 0}, r"returns must be a string, got 0 of type int"),
    ({"returns": "o"}, r"returns is 'o', expected '' or one of"),
    ({"tensors": (None,)}, r"tensors must be a tilewise\.spec\.Tensors, got \(None,\) of type tuple"),
    ({"upper": True}, r"upper must be an int or None, got True of type bool"),
    ({"lower": np.int64(3)}, r"lower must be an int or None, got .* of type int64"),
    ({"align": None}, r"align is None, expected one of"),
]


@pytest.mark.parametrize("fields, message", SPECS, ids=[str(fields) for fields, _ in SPECS])
def test_bad_fields_of_a_spec(fields, message):
    with pytest.raises(tw.InvalidInput, match=message):
        tw.Spec(**fields)


def test_legal_fields_of_a_spec():
    spec = tw.Spec(3, score=("softcap:2.0", "alibi"), sink=True, dropout="0.1", returns="max_logit", deterministic=False)
    assert tw.Spec.parse(str(spec)) == spec


LENGTHS = ["5", 2.0, math.nan, True, -1, np.int64(5), torch.tensor(5), [5], None]


@pytest.mark.parametrize("value", LENGTHS, ids=repr)
def test_lengths_of_named_masks_are_ints(value):
    for make in (lambda **n: tw.prefix_lm(1, **n), lambda **n: tw.chunked(2, **n)):
        with pytest.raises(tw.InvalidInput, match=r"^seqlen_q must be an int of at least 0, got "):
            make(seqlen_q=value)
        if value is not None:
            with pytest.raises(tw.InvalidInput, match=r"^seqlen_k must be an int of at least 0, got "):
                make(seqlen_q=5, seqlen_k=value)


def test_lengths_of_documents_are_tensors():
    with pytest.raises(tw.InvalidInput, match=r"^lengths_k must be a tensor of int32 or int64 of shape \(documents,\), got list"):
        tw.documents(torch.tensor([3, 2]), [3, 2])


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "0.1", np.float32(0.5), torch.tensor(0.5), [1.0]], ids=repr)
def test_the_scale_of_the_oracle_is_that_of_attention(value):
    with pytest.raises(tw.InvalidInput, match=r"^sm_scale "):
        tw.reference(Q, K, V, sm_scale=value)


@pytest.mark.parametrize("value", ["causal", 0, True, {}], ids=repr)
def test_the_spec_of_the_oracle_is_a_spec(value):
    with pytest.raises(tw.InvalidInput, match=r"^spec must be a tilewise\.Spec or None, got "):
        tw.reference(Q, K, V, value)


PICTURES = [
    ({"picture": 1}, r"picture must be the name of a file or None, got 1 of type int"),
    ({"picture": "a.png", "tiles": 16}, r"tiles is 16, expected two ints of at least 1"),
    ({"picture": "a.png", "tiles": (16, 0)}, r"tiles is \(16, 0\), expected"),
    ({"picture": "a.png", "tiles": (16.0, 16)}, r"tiles is \(16\.0, 16\), expected"),
    ({"picture": "a.png", "at": None}, r"at is None, expected two ints of at least 0: \(batch, head\)"),
    ({"picture": "a.png", "at": (True, 0)}, r"at is \(True, 0\), expected"),
    ({"picture": "a.png", "at": (0, -1)}, r"at is \(0, -1\), expected"),
    ({"picture": "a.png", "at": (0, 4)}, r"at is \(0, 4\), expected \(batch, head\) below \(2, 4\)"),
    ({"tiles": (16, 16)}, r"tiles and at say what picture draws, and there is none"),
    ({"at": (1, 0)}, r"tiles and at say what picture draws, and there is none"),
]


@pytest.mark.parametrize("arguments, message", PICTURES, ids=[str(a) for a, _ in PICTURES])
def test_bad_pictures(arguments, message):
    with pytest.raises(tw.InvalidInput, match=message):
        tw.explain(Q, K, V, **arguments)


# ``deterministic`` of explain


@pytest.mark.parametrize("mode, word", [(None, ""), (True, ",deterministic:yes"), (False, ",deterministic:no")])
def test_explain_takes_what_attention_takes(mode, word):
    first = tw.explain(Q, K, V, causal=True, deterministic=mode).splitlines()[0]
    assert f"mask=upper:0,align:bottom_right{word} " in first
    assert tw.Problem.parse(first).spec.deterministic is mode


def explained(capsys, *words: str) -> str:
    assert cli.main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_explain_on_the_command_line_takes_it_too(capsys, monkeypatch):
    """The table shows the kernels of the backward pass that such a call gets, where it makes a difference."""
    words = "heads=64 seqlen=4096 head_dim=64 grad=qkv arch=sm_90"
    assert "mask=deterministic:yes " in explained(capsys, words, "--deterministic", "yes")
    monkeypatch.setattr(problem, "runtime", lambda: Runtime((3, 9), interpret=False))
    monkeypatch.setattr(hopper_backward, "adds", lambda *_: True)
    for more, adds in (((), True), (("--deterministic", "no"), True), (("--deterministic", "yes"), False)):
        assert ("dq added up in memory" in explained(capsys, words, *more)) is adds
    assert "dq added up" not in explained(capsys, f"{words} mask=deterministic:yes")


def test_explain_refuses_two_answers(capsys):
    words = "seqlen=16 head_dim=16 mask=deterministic:no"
    assert cli.main(["explain", words, "--deterministic", "yes"]) == 2
    assert "--deterministic is yes, and the mask deterministic:no says otherwise" in capsys.readouterr().err
