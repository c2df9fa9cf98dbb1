"""Score steps, sinks and masks that come as tensors compile for sm_90a within their budgets; no GPU is needed."""

import pytest
from compiling import EVERY

pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")

from tilewise.arch import ARCHS
from tilewise.configs.hopper import lookup
from tilewise.configs.hopper_backward import lookup_dkdv, lookup_dq
from tilewise.testing.compile_hopper_terms import TERMS, problems

# (instructions of the longest main loop, with what free tiles branch around, bytes of spills, accesses to spilled registers in the
# loop) that Triton 3.9.0 made, by kernel and head_dim and the name of the terms.
BUDGETS: dict[tuple[str, int], dict[str, tuple[int, int, int]]] = {
    ("fwd", 64): {
        "sink": (306, 0, 0), "softcap": (839, 0, 0), "alibi": (333, 0, 0), "both_sides": (366, 0, 0), "segment": (527, 0, 0),
        "row": (505, 0, 0), "capped_alibi": (1093, 0, 0),
    },
    ("fwd", 128): {
        "sink": (588, 0, 0), "softcap": (1624, 0, 0), "alibi": (636, 0, 0), "both_sides": (677, 0, 0), "segment": (574, 0, 0),
        "row": (555, 0, 0), "capped_alibi": (1145, 0, 0),
    },
    ("fwd", 256): {
        "sink": (387, 104, 0), "softcap": (920, 0, 0), "alibi": (414, 0, 0), "both_sides": (540, 0, 0), "segment": (703, 272, 5),
        "row": (685, 384, 7), "capped_alibi": (1285, 364, 8),
    },
    ("dkdv", 64): {
        "softcap": (462, 0, 0), "alibi": (360, 0, 0), "both_sides": (443, 0, 0), "segment": (339, 288, 0), "row": (339, 368, 0),
        "capped_alibi": (579, 0, 0),
    },
    ("dkdv", 128): {
        "softcap": (504, 128, 0), "alibi": (422, 0, 0), "both_sides": (476, 0, 0), "segment": (382, 96, 0),
        "row": (394, 436, 0), "capped_alibi": (621, 180, 0),
    },
    ("dkdv", 256): {
        "softcap": (423, 252, 0), "alibi": (282, 36, 0), "both_sides": (357, 0, 0), "segment": (282, 36, 0),
        "row": (282, 224, 0), "capped_alibi": (560, 636, 13),
    },
    ("dq", 64): {
        "softcap": (496, 0, 0), "alibi": (663, 0, 0), "both_sides": (586, 0, 0), "segment": (473, 0, 0), "row": (450, 0, 0),
        "capped_alibi": (705, 0, 0),
    },
    ("dq", 128): {
        "softcap": (539, 0, 0), "alibi": (709, 0, 0), "both_sides": (628, 0, 0), "segment": (515, 0, 0), "row": (495, 0, 0),
        "capped_alibi": (747, 0, 0),
    },
    ("dq", 256): {
        "softcap": (641, 528, 60), "alibi": (497, 28, 0), "both_sides": (457, 0, 0), "segment": (611, 392, 44),
        "row": (583, 144, 14), "capped_alibi": (910, 1152, 176),
    },
}
SLACK = 1.03
SPILL_SLACK = 1.1
# What is compiled here: every kernel takes seconds. ``python -m tilewise.testing.compile_hopper_terms`` reports on all, and the
# budgets have them. Every term is compiled at head_dim 128; at 64 and 256, where is another kernel for dk and dv, as many as have
# all configs that calls with terms get.
CHOSEN = {64: ("softcap", "both_sides", "segment"), 128: tuple(TERMS), 256: ("sink", "alibi", "segment")}
if not EVERY:
    CHOSEN[256] = ("sink", "segment")
PARTS = [(128, CHOSEN[128][:4]), (128, CHOSEN[128][4:]), (64, CHOSEN[64]), (256, CHOSEN[256])]
MODULE = "tilewise.testing.compile_hopper_terms"
COMMANDS = {(dim, names): ("-m", MODULE, str(dim), "--terms", ",".join(names)) for dim, names in PARTS}


def complaints(report):
    """What is wrong with a kernel: nothing, if it may ship."""
    wrong = []
    loop, spill, inside = BUDGETS[report["kernel"], report["head_dim"]].get(report["mask"], (0, 0, 0))
    found = report["loop"] if report["kernel"] == "fwd" else max(report["free_loops"], default=0)
    accesses = report["loop_spills"] if report["kernel"] == "fwd" else report["free_spills"]
    if report["shared"] > min(report.get("predicted", 1 << 30), ARCHS["sm_90"].shared_memory):
        wrong.append(f"{report['shared']} bytes of shared memory, {report.get('predicted')} predicted")
    if not 0 <= report["spill"] <= SPILL_SLACK * spill:
        wrong.append(f"{report['spill']} bytes of spills")
    if accesses > inside:
        wrong.append(f"{accesses} accesses to spilled registers in the main loop")
    if report["serialized"]:
        wrong.append("matrix products are serialized")
    if not 0 < found <= SLACK * loop:
        wrong.append(f"a main loop of {found} instructions")
    return wrong


def test_every_kernel_compiles_within_its_budget(reports):
    wrong = {str(report): complaints(report) for report in reports if complaints(report)}
    assert not wrong, "\n".join(f"{report}: {what}" for report, what in wrong.items())


def test_every_kernel_was_compiled(reports):
    seen = {(r["kernel"], r["head_dim"], r["mask"]) for r in reports}
    wanted = {(kernel, dim, name) for kernel in ("fwd", "dkdv", "dq") for dim, names in CHOSEN.items() for name in names}
    assert seen == {(kernel, dim, name) for kernel, dim, name in wanted if kernel == "fwd" or name != "sink"}


def test_a_kernel_beyond_its_budget_is_caught(reports):
    report = next(r for r in reports if r["kernel"] == "fwd" and r["mask"] == "softcap")
    assert complaints({**report, "loop": 2 * report["loop"]})
    assert complaints({**report, "loop_spills": 100})
    assert complaints({**report, "serialized": True})


def test_no_config_of_a_call_with_terms_is_left_out():
    wanted, found = set(), set()
    for name, problem in problems([(dim, dim) for dim in CHOSEN]):
        kernels = {("fwd", problem.head_dim, lookup(problem))}
        if name != "sink":
            kernels |= {(kernel.__name__, problem.head_dim, kernel(problem)) for kernel in (lookup_dkdv, lookup_dq)}
        wanted |= kernels
        found |= kernels if name in CHOSEN[problem.head_dim] else set()
    assert found == wanted
