"""Bad input: each message names the argument, what came and what is expected; a refusal lists every reason."""

from __future__ import annotations

import dataclasses
import warnings
from fractions import Fraction

import pytest
import torch

import tilewise as tw
from tilewise.arch import ARCHS, Arch, Runtime
from tilewise.select import choose

Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 3)


def sparse() -> torch.Tensor:
    return torch.ones(2, 4, 5, 8).to_sparse()


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(4, 5, 8), torch.zeros(4, 3, 8)], layout=layout)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)


TENSORS = {
    "list": (lambda: ([[1.0]], K, V), r"q must be a torch\.Tensor of shape \(batch, heads, seqlen, head_dim\), got list"),
    "numpy": (lambda: (Q, K.numpy(), V), r"k must be a torch\.Tensor of shape .*, got ndarray"),
    "none": (lambda: (Q, K, None), r"v must be a torch\.Tensor of shape .*, got NoneType"),
    "rank_3": (lambda: (Q[0], K, V), r"q has 3 dims, expected 4: \(batch, heads, seqlen, head_dim\)\. Got shape \(4, 5, 8\)\. Add"),
    "rank_5": (lambda: (Q, K[None], V), r"k has 5 dims, expected 4.*Got shape \(1, 2, 2, 6, 8\)\.$"),
    "rank_0": (lambda: (Q, K, V.sum()), r"v has 0 dims, expected 4.*Got shape \(\)\. Add the missing dims with unsqueeze"),
    "int": (lambda: (Q.int(), K.int(), V.int()), r"q has dtype int32, expected one of float16, bfloat16, .*: cast it"),
    "bool": (lambda: (Q, K.bool(), V), r"k has dtype bool, expected one of"),
    "complex": (lambda: (Q, K, V.cfloat()), r"v has dtype complex64, expected one of"),
    "float8": (lambda: (Q.to(torch.float8_e4m3fn), K, V), r"q has dtype float8_e4m3fn, expected one of"),
    "mixed": (lambda: (Q, K, V.half()), r"v has dtype float16 but q has float32: .*share one dtype.*v\.to\(q\.dtype\).*autocast"),
    "meta_k": (lambda: (Q, K.to("meta"), V), r"k is on meta but q is on cpu: move it with k\.to\(q\.device\)"),
    "meta_q": (lambda: (Q.to("meta"), K, V), r"k is on cpu but q is on meta: move it"),
    "sparse": (lambda: (sparse(), K, V), r"q has layout torch\.sparse_coo, expected a dense .* call q\.to_dense\(\)"),
    "csr": (lambda: (Q, K, V[0, 0].to_sparse_csr()), r"v has layout torch\.sparse_csr, expected a dense"),
    "nested": (lambda: (nested(torch.strided), K, V), r"q is a nested tensor, expected a dense one.*to_padded_tensor"),
    "jagged": (lambda: (Q, nested(torch.jagged), V), r"k is a nested tensor"),
    "quantized": (lambda: (quantized(), K, V), r"q is quantized \(torch\.qint8\), expected one of .*q\.dequantize\(\)"),
    "batch": (lambda: (Q, K[:1], V), r"one batch size: use expand\(\).*k \(1, 2, 6, 8\)"),
    "kv_heads": (lambda: (Q, K, V[:, :1]), r"k has 2 heads but v has 1: they must be equal\. Got q"),
    "heads_3_over_2": (
        lambda: (Q[:, :3], K, V),
        r"k has 2 heads but q has 3: heads_q must be a multiple of heads_kv\. Got q \(2, 3, 5, 8\), k \(2, 2, 6, 8\)",
    ),
    "heads_33_over_2": (lambda: (torch.zeros(2, 33, 5, 8), K, V), r"k has 2 heads but q has 33: heads_q must be a multiple"),
    "heads_2_over_4": (lambda: (Q[:, :1], K, V), r"k has 2 heads but q has 1: heads_q must be a multiple"),
    "no_kv_heads": (lambda: (Q, K[:, :0], V[:, :0]), r"k has 0 heads but q has 4"),
    "no_q_heads": (lambda: (Q[:, :0], K, V), r"k has 2 heads but q has 0"),
    "lengths_5_and_6": (lambda: (Q, K[:, :, :5], V), r"k has length 5 but v has 6: they must be equal\. Got q .*k \(2, 2, 5, 8\)"),
    "head_dim": (lambda: (Q, K[..., :7], V), r"q has head_dim 8 but k has 7: they must be equal\. Got q"),
    "head_dim_0": (lambda: (Q[..., :0], K[..., :0], V), r"head_dim of q and k is 0, expected at least 1\. Got q"),
    "head_dim_v_0": (lambda: (Q, K, V[..., :0]), r"head_dim of v is 0, expected at least 1\. Got q"),
    "too_long": (lambda: (Q[:, :, :1].expand(2, 4, 2**30, 8), K, V), r"q has length 1073741824, expected less than 2\*\*30"),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("function", [tw.attention, tw.explain])
def test_bad_tensors(function, name):
    make, message = TENSORS[name]
    with pytest.raises(tw.InvalidInput, match=message) as caught:
        function(*make())
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, tw.AttentionError)


@pytest.mark.parametrize("name", ["int", "float8", "complex", "none", "sparse", "heads_3_over_2"])
def test_bad_tensors_under_autocast(name):
    make, message = TENSORS[name]
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(tw.InvalidInput, match=message):
        tw.attention(*make())


@pytest.mark.parametrize("name", ["int", "mixed", "meta_k", "heads_3_over_2", "head_dim_0"])
def test_bad_tensors_reach_the_operator_too(name):
    make, message = TENSORS[name]
    with pytest.raises(tw.InvalidInput, match=message):
        torch.ops.tilewise.attention_forward(*make(), "full", None, None, "auto", "")


def test_no_heads_at_all_is_legal():
    assert tw.attention(Q[:, :0], K[:, :0], V[:, :0]).shape == (2, 0, 5, 3)


CORNERS = r"expected one of 'bottom_right', 'top_left'"
PAIR = r"window must be a pair \(left, right\) of ints or None, got "
ARGUMENTS = [
    ({"align": "center"}, r"align is 'center', " + CORNERS),
    ({"align": 3}, r"align is 3, " + CORNERS),
    ({"align": ["top_left"]}, r"align is \['top_left'\], " + CORNERS),
    ({"causal": 1}, r"causal must be True or False, got 1 of type int"),
    ({"causal": None}, r"causal must be True or False, got None of type NoneType"),
    ({"window": (-2, 0)}, r"window's left is -2, expected None \(unbounded\) or an int of at least -1"),
    ({"window": (-1, -3)}, r"window's right is -3, expected None"),
    ({"window": (3.0, 0)}, r"window's left must be an int or None, got 3\.0 of type float"),
    ({"window": (3, True)}, r"window's right must be an int or None, got True of type bool"),
    ({"window": (torch.tensor(3), 0)}, r"window's left must be an int or None, got tensor\(3\) of type Tensor"),
    ({"window": ([1], 0)}, r"window's left must be an int or None, got \[1\] of type list"),
    ({"window": (0, 2**31)}, r"window's right is 2147483648, but bounds lie strictly between"),
    ({"window": 4}, PAIR + r"4\. window=\(1023, 0\) keeps"),
    ({"window": (4,)}, PAIR + r"\(4,\)"),
    ({"window": (1, 2, 3)}, PAIR + r"\(1, 2, 3\)"),
    ({"window": "12"}, PAIR + r"'12'"),
    ({"sm_scale": float("nan")}, r"sm_scale is nan, expected a finite number"),
    ({"sm_scale": float("-inf")}, r"sm_scale is -inf, expected a finite number"),
    ({"sm_scale": 10**400}, r"sm_scale is 10+, expected a finite number"),
    ({"sm_scale": -1e39}, r"sm_scale is -1e\+39, expected at most 2\^127"),
    ({"sm_scale": True}, r"sm_scale must be a number or None \(for head_dim \*\* -0\.5\), got True of type bool"),
    ({"sm_scale": "0.1"}, r"sm_scale must be a number or None .*, got '0\.1' of type str"),
    ({"sm_scale": torch.tensor(0.1)}, r"sm_scale must be a number .* of type Tensor.*multiply q by it instead"),
    ({"sm_scale": Fraction(1, 3)}, r"sm_scale must be a number .* of type Fraction"),
    ({"precision": "fp8"}, r"precision is 'fp8', expected None, 'ieee' or 'tf32'"),
    ({"precision": 32}, r"precision is 32, expected None, 'ieee' or 'tf32'"),
    ({"spec": "causal"}, r"spec must be a tilewise\.Spec or None, got str: build one with tilewise\.causal\(\)"),
    ({"spec": tw.causal(), "causal": True}, r"spec and causal are both given.*drop one of them"),
    ({"spec": tw.full(), "window": (1, 0), "align": "top_left"}, r"spec and window and align are both given"),
]


@pytest.mark.parametrize("arguments, message", ARGUMENTS, ids=[f"{'-'.join(a)}-{i}" for i, (a, _) in enumerate(ARGUMENTS)])
@pytest.mark.parametrize("function", [tw.attention, tw.explain])
def test_bad_arguments(function, arguments, message):
    # A legal twin first: True == 1 and 3.0 == 3 must not be taken for one another by a cache.
    tw.attention(Q, K, V, causal=True, window=(3, 1))
    with pytest.raises(tw.InvalidInput, match=message):
        function(Q, K, V, **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"backend": "cudnn"}, r"backend is 'cudnn', expected one of 'auto', .*'torch', 'reference'"),
        ({"backend": ""}, r"backend is '', expected one of 'auto'"),
        ({"backend": None}, r"backend must be a name, got None of type NoneType"),
        ({"return_lse": 1}, r"return_lse must be True or False, got 1 of type int"),
    ],
)
def test_bad_arguments_of_attention_alone(arguments, message):
    with pytest.raises(tw.InvalidInput, match=message):
        tw.attention(Q, K, V, **arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precision_of_other_dtypes_is_refused(dtype, precision):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(tw.InvalidInput, match=f"precision is '{precision}' but the inputs are {name}: .*Leave it at None"):
        tw.attention(Q.to(dtype), K.to(dtype), V.to(dtype), precision=precision)


def test_meta_tensors_give_meta_results():
    o, lse = tw.attention(*(t.to("meta") for t in (Q, K, V)), return_lse=True)
    assert (o.device.type, o.shape, lse.shape) == ("meta", (2, 4, 5, 3), (2, 4, 5))


# Refusals. The architecture and the software are given, so that these read the same on every machine.

PLAIN = Runtime((3, 9), interpret=False)


def problem(text: str, runtime: Runtime = PLAIN, arch: Arch | None = None) -> tw.Problem:
    made = tw.Problem.parse(text, software=runtime)
    return made if arch is None else dataclasses.replace(made, arch=arch)


def codes(refusal: tw.BackendRefused) -> list[str]:
    return [reason.code for reason in refusal.reasons]


def test_a_refusal_lists_every_reason():
    asked = problem("seqlen=64 head_dim=600/570 dtype=float64 arch=cpu", Runtime(None))
    with pytest.raises(tw.BackendRefused) as caught:
        choose(asked, "triton")
    assert codes(caught.value) == ["device", "triton", "dtype", "head_dim", "head_dim"]
    text = str(caught.value)
    for part in (
        "backend 'triton' refuses: the tensors are on cpu (cpu), it needs cuda or hip",
        "TRITON_INTERPRET=1",
        "Triton is not installed, it needs 3.6 or newer",
        "the dtype is float64, it takes float16, bfloat16, float32",
        "head_dim is 600, it takes up to 512",
        "head_dim_v is 570, it takes up to 512",
        "Accepted by: 'torch', 'reference'.",
        f"Problem: {asked}",
    ):
        assert part in text
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    "text, runtime, code, message",
    [
        ("seqlen=64 head_dim=64 arch=cpu", PLAIN, "device", "it needs cuda or hip; on a CPU it runs only in Triton's interpreter"),
        ("seqlen=64 head_dim=64 arch=sm_90", Runtime((3, 4)), "triton", "Triton 3.4 is installed, it needs 3.6 or newer"),
        ("seqlen=64 head_dim=64 arch=sm_90", Runtime((3, 9), True), "interpreter", "TRITON_INTERPRET=1 .* unset it"),
        ("seqlen=64 head_dim=64 arch=sm_90 dtype=float64", PLAIN, "dtype", "the dtype is float64, it takes"),
        ("seqlen=64 head_dim=513/512 arch=sm_90", PLAIN, "head_dim", "head_dim is 513, it takes up to 512"),
        ("seqlen=64 head_dim=64/1024 arch=gfx942", PLAIN, "head_dim", "head_dim_v is 1024, it takes up to 512"),
        ("seqlen=64 head_dim=64 arch=gfx942 dtype=float32 precision=tf32", PLAIN, "precision", "no meaning for it on gfx942"),
    ],
)
def test_each_reason_of_triton(text, runtime, code, message):
    with pytest.raises(tw.BackendRefused, match=message) as caught:
        choose(problem(text, runtime), "triton")
    assert codes(caught.value) == [code]


def test_old_gpu_is_named():
    old = Arch("sm_75", "cuda", 65_536)
    with pytest.raises(tw.BackendRefused, match="the device is sm_75, it needs sm_80 or newer") as caught:
        choose(problem("seqlen=64 head_dim=64", arch=old), "triton")
    assert codes(caught.value) == ["arch"]


def test_auto_lists_the_reasons_of_every_backend_when_all_refuse(monkeypatch):
    from tilewise import select

    rows = tuple(dataclasses.replace(row, max_head_dim=256) for row in tw.CAPABILITIES)
    monkeypatch.setattr(select, "CAPABILITIES", rows)
    for cached in (select.table, select._choose):
        cached.cache_clear()
    asked = problem("seqlen=64 head_dim=600 arch=sm_90 sm_scale=0.123")
    with pytest.raises(tw.BackendRefused, match="No backend accepts this problem") as caught:
        choose(asked)
    for row in rows:
        assert (f"backend {row.backend!r} refuses" in str(caught.value)) == row.auto
    for cached in (select.table, select._choose):
        cached.cache_clear()


def test_a_named_backend_never_falls_back():
    with pytest.raises(tw.BackendRefused):
        choose(problem("seqlen=64 head_dim=600 arch=sm_90"), "triton")
    assert choose(problem("seqlen=64 head_dim=600 arch=sm_90")).backend == "torch"
    q = torch.zeros(1, 1, 4, 600)
    with pytest.raises(tw.BackendRefused, match=r"head_dim is 600.*\nAccepted by: 'torch', 'reference'"):
        tw.attention(q, q, q, backend="triton")


def test_auto_never_takes_the_oracle():
    assert choose(problem("seqlen=64 head_dim=64 arch=cpu")).backend == "torch"
    assert choose(problem("seqlen=64 head_dim=64 arch=meta")).backend == "torch"


def test_explain_prints_every_backend_and_reason():
    text = tw.explain(Q, K, V, causal=True)
    head, *lines = text.splitlines()
    assert tw.Problem.parse(head) == tw.Problem.bind(Q, K, V, tw.causal())
    for row in tw.CAPABILITIES:
        assert any(line.split()[0] == row.backend for line in lines)
    assert text.count("'auto' takes it") == 1
    assert "heads=4/2 seqlen=5x6 head_dim=8/3 mask=upper:0,align:bottom_right" in head
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.explain(Q, K, V).startswith("dtype=bfloat16")


# Problem strings


@pytest.mark.parametrize(
    "text",
    [
        "seqlen=5 head_dim=8",
        "dtype=float32 batch=2 heads=32/8 seqlen=100x4096 head_dim=128/64 mask=causal precision=tf32 grad=qv arch=sm_90",
        "seqlen=100x4096 head_dim=128 sm_scale=-0.37 arch=sm_120",
        "seqlen=0x7 head_dim=1/256 heads=0/0 batch=0 mask=upper:3,lower:-1,align:top_left layout=strided arch=gfx942",
        "seqlen=9 head_dim=3 sm_scale=1e-300 grad=kvq arch=cpu",
        *(f"seqlen=9 head_dim=3 arch={name}" for name in (*ARCHS, "mps", "xpu", "meta")),
    ],
)
def test_problem_string_round_trips(text):
    first = tw.Problem.parse(text)
    assert tw.Problem.parse(str(first)) == first
    own = dataclasses.replace(first.arch, multiprocessors=7)
    known = dataclasses.replace(first, arch=own, runtime=Runtime((3, 7)))
    assert tw.Problem.parse(str(known), own, known.runtime) == known


def test_problem_string_of_an_error_parses_back():
    q = torch.zeros(1, 4, 3, 600, requires_grad=True)
    with pytest.raises(tw.BackendRefused) as caught:
        tw.attention(q, q, q, window=(2, 0), sm_scale=0.1, backend="triton")
    line = str(caught.value).splitlines()[-1].removeprefix("Problem: ")
    assert tw.Problem.parse(line) == tw.Problem.bind(q, q, q, tw.window(2, 0), 0.1, grad="qkv")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"the word seqlen=\.\.\. is missing"),
        ("seqlen=5", r"the word head_dim=\.\.\. is missing"),
        ("seqlen=5 head_dim=8 causal", r"expected words like name=value, got 'causal'"),
        ("seqlen=5 seqlen=6 head_dim=8", r"'seqlen' is given twice"),
        ("seqlen=5 head_dim=8 color=red", r"unknown word 'color'\. Known: arch, batch, bias, dense, dtype"),
        ("seqlen=axb head_dim=8", r"seqlen is 'axb', expected an int or two joined by 'x'"),
        ("seqlen=-5 head_dim=8", r"seqlen is '-5', expected an int"),
        ("seqlen=5 head_dim=8/8/8", r"head_dim is '8/8/8', expected an int or two joined by '/'"),
        ("seqlen=5 head_dim=0", r"head_dim of q and k is 0, expected at least 1"),
        ("seqlen=5 head_dim=8 heads=3/2", r"k has 2 heads but q has 3: .*Got heads=3/2"),
        ("seqlen=5 head_dim=8 dtype=int8", r"dtype is 'int8', expected one of float16"),
        ("seqlen=5 head_dim=8 precision=tf32", r"precision is 'tf32' but the inputs are bfloat16"),
        ("seqlen=5 head_dim=8 grad=x", r"grad is 'x', expected letters out of 'qkvbas'"),
        ("seqlen=5 head_dim=8 layout=loose", r"layout is 'loose', expected 'bulk' or 'strided'"),
        ("seqlen=5 head_dim=8 arch=z80", r"arch is 'z80', expected one of cpu, gfx942"),
        ("seqlen=5 head_dim=8 sm_scale=big", r"sm_scale is 'big', expected a number"),
        ("seqlen=5 head_dim=8 sm_scale=nan", r"sm_scale is nan, expected a finite number"),
        ("seqlen=5 head_dim=8 mask=diagonal", r"mask 'diagonal': unknown term"),
        ("seqlen=5 head_dim=8 batch=1/2", r"batch is '1/2', expected one int"),
        ("seqlen=1073741824x5 head_dim=8", r"q has length 1073741824, expected less than 2\*\*30"),
    ],
)
def test_bad_problem_strings(text, message):
    with pytest.raises(tw.InvalidInput, match=message):
        tw.Problem.parse(text)
