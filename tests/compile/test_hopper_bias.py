"""The Hopper kernels with an additive bias compile for sm_90a within their budgets; no GPU is needed."""

import pytest
from compiling import CHOICE, EVERY

pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")

from tilewise.arch import ARCHS
from tilewise.configs.hopper_bias import FWD
from tilewise.testing.compile_hopper_bias import KERNELS, MASKS

# (instructions of the longest of the consumers' loops, with what free tiles branch around; bytes of spills; accesses to spilled
# registers in these loops) that Triton 3.9.0 made, by kernel, head_dim and mask.
BUDGETS = {
    ("fwd", 64, "full"): (384, 232, 0),
    ("dkdv", 64, "full"): (467, 72, 0),
    ("dq", 64, "full"): (638, 0, 0),
    ("dbias", 64, "full"): (587, 72, 0),
    ("shared", 64, "full"): (883, 144, 5),
    ("fwd", 64, "causal"): (582, 776, 3),
    ("dkdv", 64, "causal"): (477, 860, 0),
    ("dq", 64, "causal"): (898, 0, 0),
    ("dbias", 64, "causal"): (811, 196, 3),
    ("shared", 64, "causal"): (1143, 188, 8),
    ("fwd", 128, "full"): (676, 0, 0),
    ("dkdv", 128, "full"): (516, 192, 12),
    ("dq", 128, "full"): (398, 0, 0),
    ("dbias", 128, "full"): (377, 0, 0),
    ("fwd", 128, "causal"): (942, 180, 0),
    ("dkdv", 128, "causal"): (511, 356, 0),
    ("dq", 128, "causal"): (532, 0, 0),
    ("dbias", 128, "causal"): (478, 0, 0),
}
SLACK = 1.03
SPILL_SLACK = 1.1
COMMANDS = {head_dim: ("-m", "tilewise.testing.compile_hopper_bias", str(head_dim), *CHOICE) for head_dim in FWD}


def complaints(report):
    """What is wrong with a kernel: nothing, if it may ship."""
    wrong = []
    loop, spill, inside = BUDGETS[report["kernel"], report["head_dim"], report["mask"]]
    consumers = report["config"][1 if report["kernel"] == "dkdv" else 0] // 64
    if report["shared"] > min(report["predicted"], ARCHS["sm_90"].shared_memory):
        wrong.append(f"{report['shared']} bytes of shared memory, {report['predicted']} predicted")
    if not 0 <= report["spill"] <= SPILL_SLACK * spill:
        wrong.append(f"{report['spill']} bytes of spills")
    if report["loop_spills"] > inside:
        wrong.append(f"{report['loop_spills']} accesses to spilled registers in the loops")
    if report["serialized"]:
        wrong.append("matrix products are serialized")
    if len(report["loops"]) != consumers or not max(report["loops"]) <= SLACK * loop:
        wrong.append(f"loops of {report['loops']} instructions")
    return wrong


def test_every_kernel_compiles_within_its_budget(reports):
    wrong = {str(report): complaints(report) for report in reports if complaints(report)}
    assert not wrong, "\n".join(f"{report}: {what}" for report, what in wrong.items())


def test_every_kernel_was_compiled(reports):
    seen = {(r["kernel"], r["head_dim"], r["mask"]) for r in reports}
    wanted = {(kernel, dim, mask) for kernel, table in KERNELS.items() for dim in table for mask in MASKS}
    assert wanted == set(BUDGETS)
    # The kernel with a causal mask has in it what that without has.
    assert seen == {(kernel, dim, mask) for kernel, dim, mask in wanted if EVERY or mask == "causal" or dim == min(FWD)}


def test_a_kernel_beyond_its_budget_is_caught(reports):
    report = next(r for r in reports if r["kernel"] == "dq")
    assert complaints({**report, "loops": [2 * n for n in report["loops"]]})
    assert complaints({**report, "loop_spills": 100})
    assert complaints({**report, "spill": 1000})
    assert complaints({**report, "serialized": True})
