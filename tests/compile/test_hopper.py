"""What the ``hopper`` backend picks by its own rule compiles for sm_90a within its budget; no GPU is needed.

Compilation runs in processes of their own: Triton's interpreter, which the other tests use, cannot be switched off in this one.
"""

import pytest
from compiling import CHOICE, EVERY, reports_of

pytest.importorskip("triton", minversion="3.9", reason="Gluon for Hopper needs Triton 3.9")

from tilewise.arch import ARCHS
from tilewise.configs.hopper import CHOICES, FORMS, PICKED, HopperConfig
from tilewise.testing.compile_hopper import IN_FULL, MASKS, main_loop

# Instructions of the main loop, by (head_dim, head_dim_v, block_n, overlap): what Triton 3.9.0 made, with the mask that free tiles
# branch around; first of careful kernels, then of hasty ones, which have no maximum and no rescaling. In the order of MASKS.
LOOPS = {
    (64, 64, 64, False): ((270, 337, 410, 535, 432), (178, 246, 309, 443, 340)),
    (64, 64, 64, True): ((280, 348, 412, 483, 443), (188, 256, 320, 387, 352)),
    (64, 64, 128, True): ((436, 567, 695, 826, 756), (311, 443, 571, 701, 634)),
    (64, 64, 128, False): ((424, 0, 684, 0, 0), (300, 433, 560, 693, 624)),
    (96, 96, 128, True): ((587, 718, 847, 973, 906), (440, 572, 703, 830, 762)),
    (96, 96, 64, True): ((378, 447, 509, 576, 539), (264, 333, 396, 463, 428)),
    (128, 128, 128, True): ((496, 616, 742, 872, 805), (328, 472, 588, 716, 652)),
    (128, 128, 64, True): ((326, 410, 456, 522, 483), (200, 282, 337, 398, 367)),
    (192, 128, 128, True): ((518, 651, 774, 904, 836), (360, 499, 620, 749, 684)),
    (192, 128, 64, True): ((366, 0, 492, 0, 0), (238, 0, 369, 0, 0)),
    (192, 192, 64, True): ((469, 536, 605, 656, 635), (299, 376, 437, 500, 469)),
    (256, 256, 64, True): ((449, 513, 578, 650, 609), (257, 321, 387, 452, 417)),
}
SLACK = 1.03
# Bytes of spills, outside the main loop (which has none), by (head_dim, head_dim_v, block_m, overlap, dynamic, hasty): four
# consumers have 112 registers each, and the tile counter's loop keeps what it needs for the next tile. Everything else has 0, and
# so has the mask "full".
SPILLS = {
    (64, 64, 256, False, True, False): 600,
    (64, 64, 256, False, False, False): 292,
    (64, 64, 192, False, True, False): 120,
    (96, 96, 128, True, False, False): 20,
    (128, 128, 128, True, True, True): 40,
    (192, 128, 128, True, True, False): 60,
    (192, 128, 128, True, True, True): 60,
    (192, 192, 128, True, True, False): 200,
    (192, 192, 128, True, True, True): 200,
    (256, 256, 128, True, True, False): 300,
}

CROWDED = """
import json, os, sys
from dataclasses import asdict
from tilewise.configs.hopper import HopperConfig
from tilewise.problem import Problem
from tilewise.testing.compile_hopper import compile_forward, use_target
use_target("sm_90")
problem = Problem.parse("seqlen=1024 head_dim=64 arch=sm_90")
print(json.dumps(asdict(compile_forward(problem, HopperConfig(128, 256, 2, 1, True, False), "full", "careful"))))
sys.stdout.flush()
os._exit(0)
"""
PAIRS = sorted(CHOICES, key=lambda pair: pair != IN_FULL)
COMMANDS = {pair: ("-m", "tilewise.testing.compile_hopper", f"{pair[0]}/{pair[1]}", *CHOICE) for pair in PAIRS}


def _pair(report):
    return report["head_dim"], report["head_dim_v"]


def complaints(report):
    """What is wrong with a kernel: nothing, if it may ship."""
    wrong = []
    config = HopperConfig(*report["config"])
    dynamic, hasty = config.dynamic or report["form"] == "redo", report["form"] == "hasty"
    spills = SPILLS.get((*_pair(report), config.block_m, config.overlap, dynamic, hasty), 0)
    loops = LOOPS.get((*_pair(report), config.block_n, config.overlap), ((0,) * len(MASKS),) * 2)
    loop = loops[hasty][list(MASKS).index(report["mask"])]
    if report["shared"] > ARCHS["sm_90"].shared_memory:
        wrong.append(f"{report['shared']} bytes of shared memory")
    if not 0 <= report["spill"] <= (0 if report["mask"] == "full" else spills):
        wrong.append(f"{report['spill']} bytes of spills")
    if report["loop_spills"]:
        wrong.append(f"{report['loop_spills']} spills in the main loop")
    if report["serialized"]:
        wrong.append("matrix products are serialized")
    if report["matrix_waits"] != 2:
        wrong.append(f"{report['matrix_waits']} waits for matrix products in the main loop")
    if not 0 < report["loop"] <= SLACK * loop:
        wrong.append(f"a main loop of {report['loop']} instructions")
    return wrong


def test_every_config_compiles_within_its_budget(reports):
    wrong = {str(report): complaints(report) for report in reports if complaints(report)}
    assert not wrong, "\n".join(f"{report}: {what}" for report, what in wrong.items())


@pytest.mark.parametrize("pair", CHOICES)
def test_every_picked_choice_was_compiled(reports, pair):
    """The others are candidates of ``tilewise tune``; ``compile_hopper --every`` compiles them too.

    The choice that covers has every form of every config under a causal mask, whose kernel has free and masked tiles, and only at
    ``IN_FULL`` the first config of a form under each mask and in both dtypes: what these change is the same at all head dims.
    """
    seen = {(r["mask"], r["form"], r["dtype"], HopperConfig(*r["config"])) for r in reports if _pair(r) == pair}
    picked = CHOICES[pair][: PICKED[pair]]
    assert {found[3] for found in seen} == set(picked)
    for config in picked:
        forms = FORMS[config.guarded]
        first = config == next(c for c in picked if c.guarded == config.guarded)
        wanted = {("causal", form, "bfloat16", config) for form in (forms if EVERY or first else forms[:1])}
        if EVERY or (first and pair == IN_FULL):
            wanted |= {(mask, forms[0], "bfloat16", config) for mask in MASKS}
            wanted |= set() if config.guarded else {("causal", "careful", "float16", config)}
        assert wanted == {found for found in seen if found[3] == config}


def test_a_config_with_too_many_accumulators_is_caught():
    (report,) = reports_of("-c", CROWDED)
    assert any("spill" in wrong or "serialized" in wrong for wrong in complaints(report)), report


def test_the_main_loop_is_the_shortest_that_holds_the_products():
    sass = """
.L_x_1:
        /*0010*/ MOV R1, R2 ;
.L_x_2:
        /*0020*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
.L_x_3:
        /*0030*/ @!P0 BRA `(.L_x_3) ;
        /*0040*/ HGMMA.64x64x16.F32 R24, gdesc[UR8], R24 ;
        /*0050*/ @P1 BRA `(.L_x_2) ;
        /*0060*/ BRA `(.L_x_1) ;
"""
    assert len(main_loop(sass, 2)) == 4
    assert main_loop(sass, 3) == []
