"""Every Triton kernel compiles for every architecture that it claims, within a budget, on a machine without a GPU.

Processes compile the launches of real calls, each for one architecture. Budgets are what was measured with Triton 3.9, and a little
room: a kernel that outgrows one has become slower, and whoever raises a budget says why in the commit.
"""

import pytest
from compiling import EVERY

from tilewise.arch import ARCHS
from tilewise.configs.wide import forward_units
from tilewise.problem import Problem
from tilewise.testing.compile_only import launches_of

CAUSAL_64 = "heads=4 seqlen=4096 head_dim=64 mask=causal jvp=qkv"
WINDOW_128 = "heads=4/2 seqlen=4096 head_dim=128 mask=upper:100,lower:1000 jvp=qkv"
CAUSAL_256 = "heads=4 seqlen=4000 head_dim=256 mask=causal jvp=qkv"
ODD = "heads=4 seqlen=1000 head_dim=72/40 dtype=float16 jvp=qkv"
SINGLE_64 = "heads=4 seqlen=1000 head_dim=64 dtype=float32 mask=causal jvp=qkv"
DOCUMENTS_128 = "heads=4 seqlen=4096 head_dim=128 mask=causal,segment jvp=qkv"
DENSE_64 = "heads=4 seqlen=4096 head_dim=64 mask=row,dense jvp=qkv"
DENSE_128 = "heads=4 seqlen=4096 head_dim=128 mask=dense dense=bool:11qk grad=qkv"
SCORES_128 = "heads=16 seqlen=16384 head_dim=128 mask=causal,softcap:30.0,alibi,sink grad=qkvas jvp=qkvas"
BIAS_64 = "batch=2 heads=4 seqlen=4096 head_dim=64 mask=bias grad=qkvb jvp=qkvb"
SHARED_64 = "batch=4 heads=4 seqlen=4096 head_dim=64 mask=bias bias=bfloat16:1hqk grad=qkvb"
DROPOUT_128 = "heads=4 seqlen=4096 head_dim=128 mask=causal,dropout:0.1 grad=qkv jvp=qkv"
WIDE_512 = "heads=4 seqlen=4096 head_dim=512 mask=causal grad=qkv"
LONG_512 = "heads=1 seqlen=65536 head_dim=512 mask=causal grad=qkv"  # too long for weights to be kept
TERMS_512 = "heads=4 seqlen=4096 head_dim=512 mask=causal,softcap:30.0,bias,segment grad=qkvb"
SINGLE_128 = "heads=4 seqlen=4096 head_dim=128 dtype=float32 grad=qkv"
HALVES_TERMS_128 = "heads=4/2 seqlen=4096 head_dim=128 dtype=float32 mask=causal,softcap:30.0,segment grad=qkv"
HALVES_64 = "heads=4 seqlen=4096 head_dim=64 dtype=float32 mask=causal"
TF32_128 = "heads=4 seqlen=4096 head_dim=128 dtype=float32 mask=causal,segment precision=tf32 grad=qkv"
SINGLE_256 = "heads=4 seqlen=4096 head_dim=256 dtype=float32 mask=causal"
SINGLE_512 = "heads=4 seqlen=4096 head_dim=512 dtype=float32 mask=causal grad=qkv"
SINGLE_STRIDED = "heads=4 seqlen=1000 head_dim=128 dtype=float32 layout=strided"
SUMS_128 = "heads=4/2 seqlen=4096 head_dim=128 mask=causal,segment,returns:column_sums"
SUMS_64 = "heads=4 seqlen=4000 head_dim=64 mask=softcap:30.0,bias,returns:column_sums"
TILES_72 = "heads=4 seqlen=4096 head_dim=72 mask=causal"  # columns in two tiles
TILES_160 = "heads=4 seqlen=4096 head_dim=160 mask=causal"
LARGEST_64 = "heads=4 seqlen=4096 head_dim=64 mask=causal,sink,returns:max_logit"

PROBLEMS = {
    "sm_80": (CAUSAL_64, WINDOW_128, ODD, SCORES_128, BIAS_64, DROPOUT_128, SUMS_128, WIDE_512, LONG_512, SINGLE_512),
    "sm_90": (
        *(CAUSAL_64, WINDOW_128, CAUSAL_256, ODD, SINGLE_64, DOCUMENTS_128, DENSE_64, SCORES_128, BIAS_64, DROPOUT_128),
        *(SUMS_128, SUMS_64, LARGEST_64, WIDE_512, LONG_512, TERMS_512, SINGLE_128, SINGLE_512, DENSE_128, SHARED_64),
        *(HALVES_TERMS_128, HALVES_64, TF32_128, SINGLE_256),
        *(TILES_72, TILES_160),
    ),
    "sm_100": (CAUSAL_64, WINDOW_128, SCORES_128, BIAS_64, WIDE_512),
    "sm_120": (CAUSAL_64, ODD, SCORES_128, BIAS_64, WIDE_512, LONG_512, SINGLE_512),
    "gfx942": (
        *(CAUSAL_64, WINDOW_128, DOCUMENTS_128, SCORES_128, BIAS_64, DROPOUT_128),
        *(SUMS_128, WIDE_512, LONG_512, SINGLE_512),
    ),
}

# What the choice that covers leaves out: kernels in other sizes, or on another architecture, of those above that it has; bounds and
# ids of documents at head_dim 128 where SCORES_128 and SUMS_128 compile them beside others. What stands behind a problem is
# compiled all the same: kernels in configs that no other problem of the architecture has.
REPEATED = {
    "sm_80": {CAUSAL_64: ("fwd", "jvp"), LONG_512: ("dq", "dk", "dv")},
    "sm_90": {HALVES_64: ("fwd",), TILES_160: ("fwd", "dq", "dkdv")},
    "sm_100": {CAUSAL_64: ("jvp",), WINDOW_128: ("jvp",)},
    "sm_120": {CAUSAL_64: ("fwd", "jvp"), LONG_512: ("dq", "dk", "dv")},
    "gfx942": {CAUSAL_64: ("dkdv", "jvp"), DOCUMENTS_128: (), LONG_512: ("dq", "dk", "dv")},
}
CHOSEN = PROBLEMS if EVERY else {arch: tuple(p for p in each if p not in REPEATED[arch]) for arch, each in PROBLEMS.items()}
PARTLY = {arch: {} if EVERY else {p: names for p, names in REPEATED[arch].items() if names} for arch in PROBLEMS}

PROCESSES = {"sm_100": 1, "sm_120": 1, "sm_90": 4, "sm_80": 2, "gfx942": 2}  # what one of them does is less and less
TEXTS = {arch: (*CHOSEN[arch], *(f"only={','.join(names)} {p}" for p, names in PARTLY[arch].items())) for arch in PROBLEMS}
PARTS = [(arch, TEXTS[arch][i::count]) for arch, count in PROCESSES.items() for i in range(count)]
COMMANDS = {part: ("-m", "tilewise.testing.compile_only", part[0], *part[1]) for part in PARTS}

# Bytes of spill that are known and accepted; every kernel that is not listed must have none.
SPILL = {
    ("sm_80", CAUSAL_64, "fwd"): 32,  # 255 registers, outside the loop
    ("sm_80", CAUSAL_64, "dq"): 192,
    ("sm_80", CAUSAL_64, "dkdv"): 128,
    ("sm_80", WINDOW_128, "dkdv"): 768,
    ("sm_90", WINDOW_128, "fwd"): 320,  # three loops, of which the masked two hold positions besides
    ("sm_90", WINDOW_128, "dkdv"): 896,
    ("sm_90", CAUSAL_256, "dk"): 256,
    ("sm_90", SINGLE_64, "dq"): 640,  # float32 operands take registers twice over for their three products
    ("sm_90", SINGLE_64, "dkdv"): 2816,
    ("sm_90", HALVES_64, "dq"): 640,
    ("sm_90", HALVES_64, "dkdv"): 2816,
    ("sm_100", WINDOW_128, "dkdv"): 128,
    ("sm_120", CAUSAL_64, "dkdv"): 448,
    ("gfx942", DOCUMENTS_128, "fwd"): 384,
    ("gfx942", DOCUMENTS_128, "dkdv"): 128,
    ("sm_120", ODD, "dq"): 960,
    ("sm_120", ODD, "dkdv"): 1408,  # two tiles of columns by pointers, as on sm_80: not timed there
    ("sm_80", ODD, "dq"): 16,
    ("sm_80", ODD, "dkdv"): 680,
    ("sm_80", BIAS_64, "dbias"): 192,
    ("sm_80", BIAS_64, "fwd"): 80,  # the unit of each row besides its pivot, for one instruction less for each weight
    ("sm_90", DENSE_128, "fwd"): 256,  # two loops, one of which reads bits; two programs share a processor
    ("sm_90", SHARED_64, "dq_bias"): 512,  # dq of four sequences
    ("sm_90", SCORES_128, "dkdv"): 512,
    ("sm_100", BIAS_64, "fwd"): 64,
    ("sm_80", SCORES_128, "fwd"): 32,  # 255 registers
    ("sm_120", SCORES_128, "dq"): 2560,  # 128 columns in 64 rows, and what a softcap and distances need besides
    ("sm_120", SCORES_128, "dkdv"): 2688,
    ("sm_120", BIAS_64, "dbias"): 192,
    ("sm_120", BIAS_64, "dkdv"): 768,
    ("gfx942", SCORES_128, "dkdv"): 1024,
    ("sm_80", DROPOUT_128, "fwd"): 64,
    ("sm_90", DROPOUT_128, "dkdv"): 384,  # the words that decide on weights
    ("gfx942", DROPOUT_128, "fwd"): 64,
    ("gfx942", DROPOUT_128, "dkdv"): 512,
    ("gfx942", CAUSAL_64, "fwd"): 64,
    ("gfx942", CAUSAL_64, "dq"): 64,
    ("gfx942", WINDOW_128, "fwd"): 192,
    ("sm_80", SINGLE_512, "fwd"): 23000,  # 512 columns of float32 queries in registers, three times over
    ("sm_90", SINGLE_512, "fwd"): 768,
    ("sm_120", WIDE_512, "delta"): 64,
    ("sm_120", LONG_512, "delta"): 64,
    ("sm_120", SINGLE_512, "fwd"): 4200,
    ("sm_90", TILES_72, "dkdv"): 256,  # faster with them than without: 0.76 ms to 0.82
    ("sm_90", LONG_512, "dk"): 3400,  # addresses inside two resident tiles of 64 x 512
    ("sm_90", LONG_512, "dq"): 1750,
    ("gfx942", WINDOW_128, "dkdv"): 640,
}

SPILL |= {
    ("sm_90", DROPOUT_128, "jvp"): 256,
    ("sm_90", DOCUMENTS_128, "jvp"): 16,
    ("gfx942", DROPOUT_128, "jvp"): 256,
    ("sm_90", SINGLE_64, "jvp"): 2816,
    ("sm_120", CAUSAL_64, "jvp"): 128,
    ("sm_120", SCORES_128, "jvp"): 512,
    ("gfx942", DOCUMENTS_128, "jvp"): 64,
    ("gfx942", CAUSAL_64, "jvp"): 128,
    ("gfx942", WINDOW_128, "jvp"): 128,
    ("gfx942", SCORES_128, "jvp"): 64,
}

# Instructions of the longest loop with a product, on the architecture that the configs were measured on.
LOOP = {
    (CAUSAL_64, "fwd"): 490,
    (CAUSAL_64, "dq"): 420,
    (CAUSAL_64, "dkdv"): 910,
    (WINDOW_128, "fwd"): 1100,
    (WINDOW_128, "dq"): 520,
    (WINDOW_128, "dkdv"): 810,
    (CAUSAL_256, "fwd"): 650,
    (CAUSAL_256, "dq"): 425,
    (CAUSAL_256, "dv"): 590,  # 4,000 queries are ragged: scores of those past the end are set to 0 in the masked loop
    (CAUSAL_256, "dk"): 705,
    (DOCUMENTS_128, "fwd"): 680,  # ids are compared in the masked loop
    (DOCUMENTS_128, "dq"): 580,
    (DOCUMENTS_128, "dkdv"): 710,
    (SCORES_128, "fwd"): 1680,
    (SCORES_128, "dq"): 1010,
    (SCORES_128, "dkdv"): 1200,
    (BIAS_64, "fwd"): 450,
    (BIAS_64, "dq"): 420,
    (BIAS_64, "dkdv"): 710,
    (BIAS_64, "dbias"): 550,
    (DROPOUT_128, "fwd"): 890,  # four weights share the words of one counter: else these were twice as long
    (DROPOUT_128, "dq"): 780,
    (DROPOUT_128, "dkdv"): 1410,
    (DENSE_64, "fwd"): 600,
    (DENSE_64, "dq"): 550,
    (DENSE_64, "dkdv"): 720,
    (CAUSAL_64, "jvp"): 940,
    (WINDOW_128, "jvp"): 1140,
    (CAUSAL_256, "jvp"): 950,
    (SCORES_128, "jvp"): 1050,
    (BIAS_64, "jvp"): 560,
    (DOCUMENTS_128, "jvp"): 1160,
    (DENSE_64, "jvp"): 1080,
    (DENSE_128, "fwd"): 820,
    (DENSE_128, "dq"): 410,
    (DENSE_128, "dkdv"): 570,
    (SHARED_64, "fwd"): 445,
    (SHARED_64, "dq_bias"): 1260,
    (SHARED_64, "dkdv"): 410,
    (BIAS_64, "dq_bias"): 590,
    (SUMS_128, "columns"): 340,
    (SUMS_64, "columns"): 850,
    (LARGEST_64, "fwd"): 490,
    (WIDE_512, "tile_weights"): 100,
    (WIDE_512, "values"): 260,
    (TILES_72, "fwd"): 940,
    (TILES_72, "dq"): 780,
    (TILES_72, "dkdv"): 1070,
    (TILES_160, "fwd"): 640,
    (TILES_160, "dq"): 400,
    (TILES_160, "dkdv"): 505,
    (WIDE_512, "weights"): 100,
    (WIDE_512, "dv"): 90,
    (WIDE_512, "dk"): 90,
    (WIDE_512, "dq"): 90,
    (LONG_512, "dv"): 490,
    (SINGLE_128, "fwd"): 1150,  # three products for one
    (SINGLE_128, "weights"): 260,
    (SINGLE_128, "dv"): 230,
    (SINGLE_128, "dk"): 230,
    (SINGLE_128, "dq"): 230,
    (SINGLE_256, "fwd"): 1150,
    (SINGLE_512, "fwd"): 1460,
    (HALVES_TERMS_128, "fwd"): 2010,
    (TF32_128, "fwd"): 1490,
    (TF32_128, "weights"): 100,
    (TF32_128, "dv"): 200,
    (TF32_128, "dq"): 200,
}


WITHOUT_PRODUCTS = ("delta", "halve")  # they read by pointers, too


def faults(report: dict) -> list[str]:
    """What is wrong with one compiled kernel."""
    arch, problem, kernel = report["arch"], report["problem"], report["kernel"]
    found = []
    if report["shared"] > ARCHS[arch].shared_memory:
        found.append(f"shared memory {report['shared']} > {ARCHS[arch].shared_memory}")
    spill = SPILL.get((arch, problem, kernel), 0)
    if report["spill"] > spill:
        found.append(f"spill {report['spill']} > {spill}")
    if arch == "sm_90":
        loop = LOOP.get((problem, kernel))
        if loop is not None and not 0 < report["loop"] <= loop:
            found.append(f"loop {report['loop']} > {loop} (or not found)")
    if kernel in WITHOUT_PRODUCTS:
        return found
    if not report["matrix_instructions"]:
        found.append("no matrix instruction")
    by_pointers = kernel == "dq" and problem == LONG_512  # a tile that is read in two widths
    if arch == "sm_90" and not by_pointers and not report["bulk_loads"]:
        found.append("no bulk copy")
    return found


@pytest.mark.parametrize("arch", PROBLEMS)
def test_kernels_compile_within_budget(reports, arch):
    rows = [r for r in reports if r["arch"] == arch]
    kernels = {(r["problem"], r["kernel"]) for r in rows}
    assert {(p, name) for p, names in PARTLY[arch].items() for name in names} <= kernels
    for problem in CHOSEN[arch]:
        forward = ("tile_weights", "values") if forward_units(Problem.parse(f"{problem} arch={arch}")) else ("fwd",)
        names = ("columns",) if "column_sums" in problem else (*forward, "delta", "dq")
        assert {(problem, name) for name in names} <= kernels
        assert ("jvp=" in problem) is ((problem, "jvp") in kernels)
    wrong = [f"{r['problem']} {r['kernel']} {r['config']}: {fault}" for r in rows for fault in faults(r)]
    assert not wrong, "\n".join(wrong)


def _kernels(arch, problem):
    """Each kernel of a problem that multiplies, with what its config belongs to."""
    p = Problem.parse(f"{problem} arch={arch}")
    found = {name: (name, p.dtype, p.head_dim, p.head_dim_v, config) for name, (config, _) in launches_of(p).items()}
    return {name: kernel for name, kernel in found.items() if name not in WITHOUT_PRODUCTS}


@pytest.mark.parametrize("arch", PROBLEMS)
def test_no_config_is_left_out(arch):
    wanted = {kernel for problem in PROBLEMS[arch] for kernel in _kernels(arch, problem).values()}
    found = {kernel for problem in PROBLEMS[arch] if problem not in REPEATED[arch] for kernel in _kernels(arch, problem).values()}
    found |= {_kernels(arch, problem)[name] for problem, names in REPEATED[arch].items() for name in names}
    assert wanted == found


def test_gate_can_fail(reports):
    good = next(r for r in reports if r["arch"] == "sm_90" and r["kernel"] == "fwd")
    assert not faults(good)
    assert faults({**good, "shared": 232_449})
    assert faults({**good, "spill": 10_000})
    assert faults({**good, "loop": 5_000})
    assert faults({**good, "loop": 0})
    assert faults({**good, "matrix_instructions": 0})
    assert faults({**good, "bulk_loads": 0})
