"""THE table of what each backend can do, and ``refuse``: the reasons why one cannot take a problem.

Tests draw their matrix from this table and the README prints it, so a claim here is a claim that is proven.
"""

from __future__ import annotations

from dataclasses import dataclass

from .configs.wide import units_kept
from .errors import Reason
from .functions import find
from .problem import GRADIENTS, Problem

__all__ = ["CAPABILITIES", "Capability", "dims_text", "refuse"]

HALF = ("float16", "bfloat16")
SCORES = ("softcap", "alibi", "bias", "fn", "sink")
MASKS = ("segment", "row", "dense")


@dataclass(frozen=True)
class Capability:
    """One backend's row.

    ``auto`` says whether ``backend="auto"`` may pick it; ``quadratic`` whether its memory grows with the score matrix.
    ``archs`` and ``head_dims`` list what it takes (``None``: any within the other limits), the latter as pairs of head_dim and
    head_dim_v; ``forward_only`` are pairs without a gradient, ``plain_gradients`` those with gradients of specs without terms only.
    ``bulk_only`` asks for tensors that a copy engine can read by descriptor; ``gradients`` are the inputs that it can differentiate
    (letters of ``problem.GRADIENTS``), ``terms`` what it takes of a spec besides bounds (out of ``spec.TERMS``), ``bulk_bias`` the
    head dims at which it copies a bias in bulk, and takes no other (``None``: it reads any bias, at any size), ``returns`` what it
    can return besides o and lse (out of ``spec.RETURNS``); ``jvp`` says whether it has forward-mode derivatives;
    ``always_deterministic`` whether gradients have the same bits on every run even where a call does not ask for it.
    """

    backend: str
    summary: str
    kinds: tuple[str, ...]  # of processor; "*" is any
    dtypes: tuple[str, ...]
    max_head_dim: int | None
    tf32_kinds: tuple[str, ...] = ()
    triton: tuple[int, int] | None = None
    interpretable: bool = False
    min_compute_capability: int = 0
    always_deterministic: bool = True
    archs: tuple[str, ...] | None = None
    head_dims: tuple[tuple[int, int], ...] | None = None
    forward_only: tuple[tuple[int, int], ...] = ()
    plain_gradients: tuple[tuple[int, int], ...] = ()
    bulk_only: bool = False
    gradients: str = "qkv"
    jvp: bool = False
    terms: tuple[str, ...] = ()
    bulk_bias: tuple[int, ...] | None = None
    auto: bool = True
    quadratic: bool = False
    returns: tuple[str, ...] = ()


# In the order in which "auto" asks.
CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        "hopper",
        "Gluon kernels for sm_90: a producer warp that copies in bulk, warpgroups that compute",
        kinds=("cuda",),
        dtypes=HALF,
        max_head_dim=256,
        triton=(3, 9),
        archs=("sm_90",),
        head_dims=((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
        plain_gradients=((96, 96), (192, 128), (192, 192)),
        bulk_only=True,
        gradients="qkvbs",
        always_deterministic=False,
        terms=("softcap", "alibi", "bias", "sink", "segment", "row"),
        bulk_bias=(64, 128),
    ),
    Capability(
        "triton",
        "portable Triton kernels: tensor descriptors where the processor copies by descriptor, pointers elsewhere",
        kinds=("cuda", "hip"),
        dtypes=(*HALF, "float32"),
        max_head_dim=512,
        tf32_kinds=("cuda", "cpu"),
        triton=(3, 6),
        interpretable=True,
        min_compute_capability=80,
        gradients="qkvbas",
        jvp=True,
        terms=(*SCORES, *MASKS, "dropout"),
        returns=("max_logit", "column_sums"),
    ),
    Capability(
        "torch",
        "tiles in plain PyTorch: any device, linear memory",
        kinds=("*",),
        dtypes=(*HALF, "float32", "float64"),
        max_head_dim=None,
        gradients="qkvbas",
        jvp=True,
        terms=(*SCORES, *MASKS, "dropout"),
        returns=("max_logit", "weights", "column_sums"),
    ),
    Capability(
        "reference",
        "the float64 oracle: the whole score matrix at once, for tests",
        kinds=("*",),
        dtypes=(*HALF, "float32", "float64"),
        max_head_dim=None,
        gradients="qkvbas",
        jvp=True,
        terms=(*SCORES, *MASKS, "dropout"),
        returns=("max_logit", "weights", "column_sums"),
        auto=False,
        quadratic=True,
    ),
)


def dims_text(pairs: tuple[tuple[int, int], ...]) -> str:
    """Pairs of head_dim and head_dim_v in words: "64, 192/128" (one number where both are the same)."""
    return ", ".join(str(a) if a == b else f"{a}/{b}" for a, b in pairs)


def _crowded(c: Capability, p: Problem) -> str:
    """What takes more shared memory than a small processor has: kernels that hold whole rows of wide float32 heads."""
    wide = p.dtype == "float32" and max(p.head_dim, p.head_dim_v) > 256
    if c.triton is None or not wide or p.arch.kind != "cuda" or not 0 < p.arch.shared_memory < 164_000:
        return ""
    if p.jvp:
        return "a forward-mode derivative"
    if "a" in p.grad:
        return "a gradient of slopes"
    kept = [term for term in ("dropout", "fn") if term in p.spec.terms and set(p.grad) - set("vs")]
    if kept:
        return f"{kept[0]} and gradients"
    return "gradients of so long sequences" if set(p.grad) - set("vs") and not units_kept(p) else ""


def _bulk_bias(c: Capability, p: Problem) -> list[Reason]:
    """Why a bias cannot be copied in bulk beside the tiles of this problem."""
    bias = p.operand("bias")
    if c.bulk_bias is None or bias is None:
        return []
    reasons = []
    beside = [term for term in p.spec.terms if term != "bias"]
    if beside:
        reasons.append(Reason("term", f"the spec has a bias beside {', '.join(beside)}, it takes a bias beside bounds only"))
    if p.head_dim not in c.bulk_bias or p.head_dim_v != p.head_dim:
        reasons.append(Reason("term", f"the spec has a bias, which it takes at head_dim {', '.join(map(str, c.bulk_bias))}"))
    lacking = [word for letter, word in (("q", "query"), ("k", "key")) if not bias.has(letter)]
    if lacking:
        text = f"the bias has a single {' and a single '.join(lacking)}, it takes one with an element for each of several"
        reasons.append(Reason("term", text))
    if bias.dtype != p.dtype:
        reasons.append(Reason("dtype", f"the bias is {bias.dtype} and q {p.dtype}, it takes one of the same dtype"))
    if not bias.bulk:
        text = "the bias has a base or strides that are 0 or no multiples of 16 bytes, or a last dim that is not contiguous"
        reasons.append(Reason("layout", text))
    return reasons


def refuse(capability: Capability, problem: Problem) -> list[Reason]:
    """Every reason why this backend cannot take this problem; an empty list means that it can, forward and backward."""
    p, c = problem, capability
    reasons: list[Reason] = []

    def no(code: str, text: str) -> None:
        reasons.append(Reason(code, text))

    interpreted = c.interpretable and p.runtime.interpret and p.arch.kind == "cpu"
    if "*" not in c.kinds and p.arch.kind not in c.kinds and not interpreted:
        hint = "; on a CPU it runs only in Triton's interpreter (TRITON_INTERPRET=1)" if c.interpretable else ""
        no("device", f"the tensors are on {p.arch.name} ({p.arch.kind}), it needs {' or '.join(c.kinds)}{hint}")
    if p.arch.kind == "cuda" and p.arch.compute_capability < c.min_compute_capability:
        no("arch", f"the device is {p.arch.name}, it needs sm_{c.min_compute_capability} or newer")
    if c.archs is not None and p.arch.kind in c.kinds and p.arch.name not in c.archs:
        no("arch", f"the device is {p.arch.name}, it needs {' or '.join(c.archs)}")
    if c.triton is not None:
        need = ".".join(map(str, c.triton))
        if p.runtime.triton is None:
            no("triton", f"Triton is not installed, it needs {need} or newer")
        elif p.runtime.triton < c.triton:
            no("triton", f"Triton {'.'.join(map(str, p.runtime.triton))} is installed, it needs {need} or newer")
        elif p.runtime.interpret and p.arch.kind != "cpu":
            no("interpreter", "TRITON_INTERPRET=1 runs kernels on the CPU, but the tensors are on a GPU: unset it")
    if p.dtype not in c.dtypes:
        no("dtype", f"the dtype is {p.dtype}, it takes {', '.join(c.dtypes)}")
    if c.max_head_dim is not None:
        for name, size in (("head_dim", p.head_dim), ("head_dim_v", p.head_dim_v)):
            if size > c.max_head_dim:
                no("head_dim", f"{name} is {size}, it takes up to {c.max_head_dim}")
    crowded = _crowded(c, p)
    if crowded:
        text = f"float32 heads of more than 256 columns with {crowded} need 160 KB of shared memory"
        no("shared_memory", f"{text}, {p.arch.name} has {p.arch.shared_memory // 1024}")
    pair = p.head_dim, p.head_dim_v
    if c.head_dims is not None and pair not in c.head_dims:
        no("head_dim", f"head_dim is {p.head_dim} and head_dim_v {p.head_dim_v}, it takes {dims_text(c.head_dims)}")
    if c.bulk_only and not p.bulk:
        no("layout", "a tensor has a base or strides that are not multiples of 16 bytes, or a last dim that is not contiguous")
    lacking = [term for term in p.spec.terms if term not in c.terms]
    if lacking:
        have = f"bounds, {', '.join(c.terms)}" if c.terms else "bounds only"
        no("term", f"the spec has {', '.join(lacking)}, it takes {have}")
    reasons += _bulk_bias(c, p)
    if p.spec.function is not None and "fn" in c.terms:
        function = find(p.spec.function)
        if function is None:
            no("function", f"this process has not registered the score function {p.spec.function}: use tilewise.score_fn")
        elif function.fn is None and c.triton is not None:
            no("function", f"score function {function.name!r} has no Triton function: give tilewise.score_fn an fn")
        elif not function.differentiable and (set(p.grad) - set("vs") or set(p.jvp) - set("vs")):
            text = f"score function {function.name!r} has no derivative: give tilewise.score_fn one, or 1.0 where it is that"
            no("gradient", text)
    if p.spec.returns and p.spec.returns not in c.returns:
        no("returns", f"the call wants {p.spec.returns}, it returns {', '.join(('o', 'lse', *c.returns))}")
    if p.jvp:
        if not c.jvp:
            no("jvp", "a forward-mode derivative is asked for, it has none")
        elif p.spec.returns:
            no("jvp", f"the call wants {p.spec.returns}, of which it has no forward-mode derivative")
    missing = [GRADIENTS[letter] for letter in p.grad if letter not in c.gradients or pair in c.forward_only]
    if missing:
        have = ", ".join(GRADIENTS[letter] for letter in c.gradients) or "none"
        if pair in c.forward_only:
            have = f"none at head_dim {dims_text((pair,))}"
        no("gradient", f"a gradient of {', '.join(missing)} is asked for, it has {have}")
    elif p.grad and p.spec.terms and pair in c.plain_gradients:
        text = f"a gradient is asked for and the spec has {', '.join(p.spec.terms)}"
        no("gradient", f"{text}, at head_dim {dims_text((pair,))} it has gradients of bounds only")
    if p.precision == "tf32" and p.arch.kind not in c.tf32_kinds:
        no("precision", f"precision='tf32' has no meaning for it on {p.arch.name}: leave precision at None")
    return reasons
