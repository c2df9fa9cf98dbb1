"""Every config of the ``hopper`` backend's backward kernels compiles for sm_90a within its budget; no GPU is needed."""

import pytest
from compiling import CHOICE, EVERY, reports_of

pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")

from tilewise.arch import ARCHS
from tilewise.configs.hopper_backward import ADDING, DKDV, DQ, KEEPS, KEPT
from tilewise.testing.compile_hopper import loops, main_loop
from tilewise.testing.compile_hopper_backward import IN_FULL, MASKS, words

# (instructions of the longest loop without a mask, bytes of spills of the kernel) that Triton 3.9.0 made, by kernel, head_dim and
# place in DKDV, DQ, KEPT or ADDING; "keeps" is dkdv that writes ds as well, "kept" is dq of that, "adds" makes all gradients. The
# loop of dq, and that of dkdv at 96 and 192/128, holds the mask that free tiles branch around. No call takes "keeps" at
# head_dim 64 with an upper bound.
BUDGETS = {
    ("dkdv", 64, 0): {"full": (340, 0), "tail": (333, 0), "causal": (334, 140), "window": (332, 0)},
    ("dkdv", 64, 1): {"full": (339, 0), "causal": (332, 0)},
    ("dkdv", 64, 2): {"full": (595, 0), "causal": (591, 0)},
    ("dkdv", 128, 0): {"full": (375, 0), "tail": (374, 0), "causal": (375, 0), "window": (376, 0)},
    ("dkdv", 128, 1): {"full": (376, 0), "causal": (383, 0)},
    ("dkdv", 256, 0): {"full": (281, 0), "tail": (281, 0), "causal": (281, 0), "window": (281, 0)},
    ("dkdv", 256, 1): {"full": (281, 0), "causal": (281, 0)},
    ("dq", 64, 0): {"full": (237, 0), "tail": (304, 0), "causal": (368, 0), "window": (433, 0)},
    ("dq", 64, 1): {"full": (255, 0), "causal": (388, 0)},
    ("dq", 64, 2): {"full": (392, 0), "causal": (651, 0)},
    ("dq", 128, 0): {"full": (434, 0), "tail": (565, 0), "causal": (693, 0), "window": (826, 0)},
    ("dq", 128, 1): {"full": (317, 0), "causal": (458, 0)},
    ("dq", 128, 2): {"full": (279, 0), "causal": (411, 0)},
    ("dq", 256, 0): {"full": (355, 0), "tail": (418, 0), "causal": (483, 0), "window": (734, 64)},
    ("dq", 256, 1): {"full": (352, 0), "causal": (423, 140)},
    ("keeps", 64, 0): {"full": (379, 0), "causal": (375, 200)},
    ("keeps", 128, 0): {"full": (411, 0), "causal": (418, 0)},
    ("keeps", 256, 0): {"full": (324, 0), "causal": (325, 0)},
    ("kept", 64, 0): {"full": (52, 0), "causal": (52, 0)},
    ("kept", 128, 0): {"full": (54, 0), "causal": (61, 0)},
    ("kept", 128, 1): {"full": (54, 0), "causal": (54, 0)},
    ("kept", 256, 0): {"full": (54, 0), "causal": (55, 0)},
    ("adds", 64, 0): {"full": (632, 0), "tail": (626, 0), "causal": (379, 0)},
    ("adds", 128, 0): {"full": (426, 168), "tail": (408, 192), "causal": (434, 204)},
    ("dkdv", 96, 0): {"full": (439, 32), "tail": (476, 32), "causal": (555, 0), "window": (651, 0)},
    ("dkdv", 96, 1): {"full": (435, 32), "causal": (552, 0)},
    ("dkdv", (192, 128), 0): {"full": (424, 20), "tail": (468, 72), "causal": (529, 76), "window": (643, 136)},
    ("dkdv", (192, 128), 1): {"full": (289, 0), "causal": (289, 0)},
    ("dkdv", 192, 0): {"full": (318, 0), "tail": (302, 0), "causal": (318, 0), "window": (319, 16)},
    ("dkdv", 192, 1): {"full": (295, 0), "causal": (298, 0)},
    ("dq", 96, 0): {"full": (555, 0), "tail": (632, 0), "causal": (760, 0), "window": (890, 0)},
    ("dq", 96, 1): {"full": (313, 16), "causal": (438, 0)},
    ("dq", (192, 128), 0): {"full": (323, 0), "tail": (390, 0), "causal": (455, 0), "window": (520, 0)},
    ("dq", (192, 128), 1): {"full": (398, 0), "causal": (535, 72)},
    ("dq", 192, 0): {"full": (374, 8), "tail": (449, 0), "causal": (513, 0), "window": (571, 0)},
    ("keeps", 96, 0): {"full": (545, 0), "causal": (627, 316)},
    ("keeps", (192, 128), 0): {"full": (492, 332), "causal": (610, 528)},
    ("keeps", 192, 0): {"full": (345, 0), "causal": (347, 0)},
    ("kept", 96, 0): {"full": (87, 0), "causal": (88, 0)},
    ("kept", 96, 1): {"full": (80, 0), "causal": (81, 0)},
    ("kept", (192, 128), 0): {"full": (66, 0), "causal": (67, 0)},
    ("kept", 192, 0): {"full": (66, 0), "causal": (66, 0)},
}
TABLES = {"dkdv": DKDV, "dq": DQ, "keeps": DKDV, "kept": KEPT, "adds": ADDING}
SLACK = 1.03
SPILL_SLACK = 1.1
# Accesses to spilled registers in the loops of free tiles: one for each tile of keys where dq of 64 x 256 leaves no register; at
# 192/128 dk and dv leave 80 registers of 240, and these loops have the mask in them.
FREE_SPILLS = {("dq", 256, 0, "window"): 1, ("dq", 256, 1, "causal"): 1}
FREE_SPILLS |= {("dkdv", (192, 128), 0, "window"): 3}
FREE_SPILLS |= {("keeps", (192, 128), 0, "full"): 14, ("keeps", (192, 128), 0, "causal"): 30, ("keeps", 96, 0, "causal"): 22}

CROWDED = """
import json, os, sys
from dataclasses import asdict
from tilewise.configs.hopper_backward import KeysConfig
from tilewise.problem import Problem
from tilewise.testing.compile_hopper_backward import compile_backward, use_target
use_target("sm_90")
problem = Problem.parse("seqlen=1152 head_dim=128 arch=sm_90")
print(json.dumps(asdict(compile_backward(problem, KeysConfig(64, 192, 2, 160, 32), "full"))))
sys.stdout.flush()
os._exit(0)
"""
DIMS = sorted(DKDV, key=lambda dims: dims != IN_FULL)
COMMANDS = {dims: ("-m", "tilewise.testing.compile_hopper_backward", words(dims), *CHOICE) for dims in DIMS}


def _dims(report):
    """The key of a report's head dims in the tables of configs."""
    pair = report["head_dim"], report["head_dim_v"]
    return pair if pair[0] != pair[1] else pair[0]


def _table_key(report):
    """The key of a report's config in its table: that of "adds" knows whether there is an upper bound."""
    return (_dims(report), report["mask"] == "causal") if report["kernel"] == "adds" else _dims(report)


def _place(report):
    """Place of a report's config among the configs of its head dims; the first's if it is none of them."""
    table = TABLES[report["kernel"]][_table_key(report)]
    configs = [list(vars(config).values()) for config in table]
    return configs.index(report["config"]) if report["config"] in configs else 0


def complaints(report):
    """What is wrong with a kernel: nothing, if it may ship."""
    wrong = []
    key = report["kernel"], _dims(report), _place(report)
    loop, spill = BUDGETS[key].get(report["mask"], (0, 0))
    if report["shared"] > min(report["predicted"], ARCHS["sm_90"].shared_memory):
        wrong.append(f"{report['shared']} bytes of shared memory, {report['predicted']} predicted")
    if not 0 <= report["spill"] <= SPILL_SLACK * spill:
        wrong.append(f"{report['spill']} bytes of spills")
    if report["free_spills"] > FREE_SPILLS.get((*key, report["mask"]), 0):
        wrong.append(f"{report['free_spills']} accesses to spilled registers in the loops of free tiles")
    if report["serialized"]:
        wrong.append("matrix products are serialized")
    if report["kernel"] == "kept":
        groups = report["config"][0] // 64
    else:
        groups = 2 if report["head_dim"] > 64 or 128 in report["config"][:2] else 3
    if len(report["free_loops"]) != groups or max(report["free_loops"]) > SLACK * loop:
        wrong.append(f"loops of {report['free_loops']} instructions")
    return wrong


def test_every_config_compiles_within_its_budget(reports):
    wrong = {str(report): complaints(report) for report in reports if complaints(report)}
    assert not wrong, "\n".join(f"{report}: {what}" for report, what in wrong.items())


@pytest.mark.parametrize("name, table", TABLES.items())
def test_every_config_was_compiled(reports, name, table):
    seen = {(_dims(r), r["mask"], _place(r)) for r in reports if r["kernel"] == name and r["dtype"] == "bfloat16"}
    wanted = {(d, mask, place) for d, configs in table.items() for place in range(len(configs)) for mask in ("full", "causal")}
    if name == "adds":  # a table by upper bounds
        wanted = {(d, "causal" if b else "full", place) for (d, b), configs in table.items() for place in range(len(configs))}
        wanted |= {(d, "tail", 0) for d, _ in table}
    if name in ("dkdv", "dq"):  # the others know no lower bound
        wanted |= {(d, mask, 0) for d in table for mask in MASKS}
        in_float16 = {_dims(r) for r in reports if r["kernel"] == name and r["dtype"] == "float16"}
        assert in_float16 == (set(table) if EVERY else {IN_FULL})
    if name == "keeps":  # what the launches take
        wanted = {(d, mask, place) for d, mask, place in wanted if place == 0}
    if not EVERY and name != "adds":  # the default configs, under a causal mask, whose kernel has in it what that without has
        by_rule = {d for d, _ in KEEPS if any(KEEPS[d, bounded] for bounded in (False, True))}
        of_kept = name in ("keeps", "kept")
        wanted = {(d, mask, place) for d, mask, place in wanted if not place and (d in by_rule or not of_kept)}
        wanted = {(d, mask, place) for d, mask, place in wanted if mask == "causal" or (d == IN_FULL and not of_kept)}
    assert seen == wanted


def test_a_config_with_too_many_accumulators_is_caught():
    (report,) = reports_of("-c", CROWDED)
    assert any("spill" in wrong or "serialized" in wrong for wrong in complaints(report)), report


def test_each_innermost_loop_is_found_once():
    sass = """
.L_x_1:
        /*0010*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0020*/ @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/ MOV R1, R2 ;
.L_x_3:
        /*0040*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0050*/ MOV R1, R2 ;
        /*0060*/ @P1 BRA `(.L_x_3) ;
        /*0070*/ @P2 BRA `(.L_x_2) ;
"""
    assert [len(body) for body in loops(sass, 1)] == [2, 3]
    assert len(main_loop(sass, 1)) == 2
