"""Tile sizes of the ``triton`` backend: what is legal, and that every lookup is."""

import ast
from pathlib import Path

import pytest

import tilewise
from tilewise import configs
from tilewise.arch import ARCHS, Runtime
from tilewise.capabilities import CAPABILITIES, refuse
from tilewise.configs import Config
from tilewise.configs.wide import units_kept
from tilewise.problem import Problem

ODD = "dtype=float16 heads=5/1 seqlen=127x256 head_dim=100/3 mask=upper:0,lower:1,align:top_left arch=sm_90"


def problem(text, triton):
    return Problem.parse(text, software=Runtime(triton))


@pytest.mark.parametrize("triton", [(3, 6), (3, 7)])
def test_an_old_assembler_gets_no_products_of_warpgroups_with_cut_columns(triton):
    odd = problem(f"{ODD} layout=strided", triton)
    for name in (*configs.PASSES, "dbias"):
        config = configs.lookup(odd, name)
        rows = config.block_n if name in configs.KEYS_RESIDENT else config.block_m
        assert rows < 64  # warpgroups multiply 64 rows at least
        assert configs.illegal(odd, name, config) is None
    assert "gets products of 64 rows wrong" in configs.illegal(odd, "fwd", Config(64, 64, 4, 2))


@pytest.mark.parametrize(
    "text, triton",
    [
        (f"{ODD} layout=strided", (3, 8)),
        (ODD, (3, 6)),
        (f"{ODD} layout=strided".replace("sm_90", "sm_100"), (3, 6)),
        (f"{ODD} layout=strided".replace("100/3", "128/16"), (3, 6)),
    ],
    ids=["a newer assembler", "tiles by descriptor", "another processor", "whole columns"],
)
def test_others_keep_their_configs(text, triton):
    assert configs.illegal(problem(text, triton), "fwd", Config(64, 64, 4, 2)) is None


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dims", ["320/16", "16/320", "512/512", "257/300"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942"])
def test_programs_that_share_columns_have_sixteen_each(arch, dims, dtype):
    """A descriptor copies 16 bytes at least, and a product takes 16 columns."""
    wide = problem(f"dtype={dtype} heads=2/1 seqlen=40x70 head_dim={dims} mask=causal arch={arch} grad=qkv jvp=qkv", (3, 9))
    for name in (*configs.PASSES, "dbias", "jvp"):
        config = configs.lookup(wide, name)
        columns = wide.head_dim_v if name in ("fwd", "dv") else wide.head_dim
        assert config.split == 1 or configs.padded(columns) // config.split >= 16
        assert config.split == 1 or name not in ("dbias", "jvp")


@pytest.mark.parametrize("arch", sorted(ARCHS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dims", [72, 128, 256, 320, 512])
def test_kept_weights_grow_with_the_length_and_not_with_its_square(arch, dtype, dims):
    for length in (4096, 65536, 262144):
        p = Problem.parse(f"dtype={dtype} batch=1 heads=1 seqlen={length} head_dim={dims} grad=qkv arch={arch}")
        taken = units_kept(p) * length**2 * p.itemsize * 2
        assert taken <= max(12 * 4 * length * dims, 2**28 * 3 // 2)


def test_gradients_that_no_kernel_can_keep_are_refused():
    """Float32 heads beyond 256 columns need kernels that keep weights where shared memory is small, and not one head fits."""
    triton = next(c for c in CAPABILITIES if c.backend == "triton")
    for length, refused in ((4096, False), (65536, True)):
        p = problem(f"dtype=float32 batch=1 heads=1 seqlen={length} head_dim=320 grad=qkv arch=sm_89", (3, 9))
        assert ["gradients of so long sequences" in str(r) for r in refuse(triton, p)] == [True] * refused


def test_a_mask_of_ids_has_tiles_of_its_own():
    alone, beside = ("causal,segment", "row"), ("causal,segment,softcap:30.0", "causal,dense,segment")
    for words, own in [*((words, True) for words in alone), *((words, False) for words in beside)]:
        p = problem(f"heads=16 seqlen=16384 head_dim=128 mask={words} grad=qkv arch=sm_90", (3, 9))
        assert [configs.lookup(p, name) == Config(64, 64, 4, 2) for name in ("fwd", "dq")] == [own, own]


def test_no_kernel_compares_a_tuple_that_may_hold_a_none_with_none():
    """Triton 3.6 raises there, and for the length of one; a pointer, or a tuple of pointers, may be compared."""
    found = []
    for path in (Path(tilewise.__file__).parent / "backends" / "triton").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or not any("jit" in ast.unparse(d) for d in function.decorator_list):
                continue
            for node in ast.walk(function):
                left = None
                if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "None":
                    left = node.left
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "len":
                    left = node.args[0]
                if left is not None and ast.unparse(left) in ("mask", "tensors", "strides", "score", "tangents"):
                    found.append(f"{path.name}: {ast.unparse(node)}")
    assert not found
