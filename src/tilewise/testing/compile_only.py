"""Compile kernels for a GPU that is not there, and read from the result what the compiler made of them.

Everything goes through the launches of the backend itself: the same arguments, specialisation and options as on a real device. A
driver that only knows a target stands in for the real one, so use this in a process of its own, with TRITON_INTERPRET unset:

    python -m tilewise.testing.compile_only sm_90 "heads=16 seqlen=4096 head_dim=128 mask=causal"

prints one JSON line for each kernel. Problem strings are those of ``Problem.parse``; the architecture is added to them. A word
``only=fwd,dq`` before them names the kernels that are compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from ..arch import ARCHS, ptxas_name
from ..configs import KEYS_RESIDENT, PASSES, Config, lookup, shared_config, splits_dkdv
from ..configs.halves import halves_of
from ..configs.wide import Walk, WideConfig, config_of, forward_units, units_kept
from ..errors import BackendBroken
from ..plan import WORD, BlockTable, Masked, MaskTensors
from ..problem import GRADIENTS, Problem, Tangents
from ..spec import Tensors

__all__ = ["Report", "compile_problem", "compiled_of", "launches_of", "use_target"]


@dataclass(frozen=True)
class Report:
    """What the compiler made of one kernel. ``spill`` counts bytes of spill stores and loads, ``loop`` instructions of the
    longest loop that holds a matrix product (0: not read), ``None`` marks what the target's tools do not tell."""

    arch: str
    kernel: str
    config: Config | Walk
    shared: int
    registers: int | None
    spill: int | None
    matrix_instructions: int
    bulk_loads: int
    serialized: bool
    loop: int


class _TargetOnly:
    """A Triton driver that knows a target and nothing else."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def use_target(arch: str) -> None:
    """Make Triton compile for ``arch`` (a name in ``tilewise.arch.ARCHS``) in this process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    if triton.knobs.runtime.interpret:  # pyright: ignore[reportAttributeAccessIssue]
        raise BackendBroken("TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled. Unset it.")
    facts = ARCHS[arch]
    target = GPUTarget("cuda", facts.compute_capability, 32) if facts.kind == "cuda" else GPUTarget("hip", arch, facts.warp_size)
    driver.set_active(_TargetOnly(target))  # pyright: ignore[reportArgumentType]


def _tensors(problem: Problem) -> dict[str, torch.Tensor]:
    """Storage-less stand-ins of the right shapes and dtypes: strides are what the allocator of a real call would give."""
    p = problem
    dtype = getattr(torch, p.dtype)
    pad = 0 if p.bulk else 1

    def make(heads: int, seqlen: int, size: int) -> torch.Tensor:
        row = size + pad
        return torch.empty_strided((p.batch, heads, seqlen, size), (heads * seqlen * row, seqlen * row, row, 1), dtype=dtype)

    rows = torch.empty((p.batch, p.heads_q, p.seqlen_q), dtype=torch.float32)
    q = make(p.heads_q, p.seqlen_q, p.head_dim)
    k, v = make(p.heads_kv, p.seqlen_k, p.head_dim), make(p.heads_kv, p.seqlen_k, p.head_dim_v)
    o = make(p.heads_q, p.seqlen_q, p.head_dim_v)
    kept = torch.empty((p.batch, p.heads_q, p.seqlen_q, 2), dtype=torch.float32) if p.keeps_rows else rows
    return {"q": q, "k": k, "v": v, "o": o, "do": o, "lse": rows, "delta": rows, "dq": q, "dk": k, "dv": v, "pivots": kept}


def _halves(problem: Problem, t: torch.Tensor, pass_: str) -> torch.Tensor:
    """A stand-in of the halves of a tensor, as ``halves_launch`` allocates them; the tensor itself where it is taken whole."""
    count = halves_of(problem, pass_)
    if not count:
        return t
    batch, heads, rows, size = t.shape
    width = -(-size // 8) * 8
    strides = (heads * count * rows * width, rows * width, width, 1)
    return torch.empty_strided((batch, heads * count, rows, size), strides, dtype=torch.float16)


def _units(problem: Problem, pass_: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Stand-ins of the units of their rows; none where operands are taken whole."""
    return tuple(torch.empty(t.shape[:3], dtype=torch.float32) for t in tensors) if halves_of(problem, pass_) else ()


def _operands(problem: Problem) -> Tensors:
    """Stand-ins of the tensors that the spec names."""
    p = problem
    sizes = {"b": p.batch, "h": p.heads_q, "q": p.seqlen_q, "k": p.seqlen_k, "1": 1}
    made = {o.slot: torch.empty([sizes[d] for d in o.dims], dtype=getattr(torch, o.dtype)) for o in p.operands}
    return Tensors(**made)


def _table(problem: Problem, tensors: Tensors, block_m: int, block_n: int, transposed: bool) -> BlockTable | None:
    """A table that nobody reads; None where the mask has only bounds."""
    if MaskTensors.of(tensors) is None:
        return None
    m_blocks, n_blocks = -(-problem.seqlen_q // block_m), -(-problem.seqlen_k // block_n)
    rows, width = (n_blocks, m_blocks) if transposed else (m_blocks, n_blocks)
    return BlockTable(*(torch.empty(problem.batch, problem.heads_q, rows, size, dtype=torch.int32) for size in (2, width)))


def _masked(problem: Problem, tensors: Tensors, pass_: str, config: Config) -> Masked | None:
    """The mask of a pass with a table that nobody reads."""
    own, table = MaskTensors.of(tensors), _table(problem, tensors, config.block_m, config.block_n, pass_ in KEYS_RESIDENT)
    if own is not None and own.dense is not None and config.block_n % WORD == 0:
        own = own._replace(dense=torch.empty((*own.dense.shape[:3], -(-own.dense.shape[3] // WORD)), dtype=torch.int32))
    return None if own is None or table is None else Masked(own, table)


def launches_of(problem: Problem, configs: dict[str, Config] | None = None) -> dict[str, Any]:
    """The launches of forward and backward for this problem, by pass; ``configs`` overrides what ``lookup`` says.

    Those of a problem that returns sums of weights are of the kernel that makes these ("columns"), and no others.
    """
    from ..backends import triton as backend
    from ..backends.triton.columns import launch_column_sums

    t, tensors = _tensors(problem), _operands(problem)
    chosen = {name: (configs or {}).get(name) or lookup(problem, name) for name in PASSES}

    def keys_resident(name: str, dk: torch.Tensor | None, dv: torch.Tensor | None) -> tuple[Config, Any]:
        given = (t["q"], t["k"], t["v"], t["do"], t["pivots"], t["delta"], dk, dv)
        return chosen[name], backend.launch_dkdv(problem, chosen[name], *given, masks[name], tensors)

    masks = {name: _masked(problem, tensors, name, config) for name, config in chosen.items()}
    if problem.spec.returns == "column_sums":
        given = (t["q"], t["k"], t["lse"], t["lse"], masks["dv"], tensors)
        return {"columns": (chosen["dv"], launch_column_sums(problem, chosen["dv"], *given))}
    maxima = t["lse"] if problem.spec.returns == "max_logit" else None
    forward = (t["q"], t["k"], t["v"], t["o"], t["lse"])
    units = _units(problem, "fwd", t["q"], t["k"], t["v"])
    q, k, v = (_halves(problem, t[name], "fwd") for name in "qkv")
    backward = (t["q"], t["k"], t["v"], t["do"], t["pivots"], t["delta"])
    kept = t["pivots"] if problem.keeps_rows else None
    by_row = t["lse"] if "a" in problem.grad else None
    launches = {
        "fwd": (
            chosen["fwd"],
            backend.launch_fwd(problem, chosen["fwd"], q, k, v, t["o"], t["lse"], masks["fwd"], tensors, kept, maxima, units),
        ),
        "delta": (Config(16, 16, 4, 1), backend.launch_delta(problem, t["o"], t["do"], t["lse"], t["lse"], t["delta"])),
        "dq": (
            chosen["dq"],
            backend.launch_dq(problem, chosen["dq"], *backward, t["dq"], masks["dq"], tensors, by_row),
        ),
    }
    if "b" in problem.grad and tensors.bias is not None:
        config = (configs or {}).get("dbias") or lookup(problem, "dbias")
        dbias = torch.empty_like(tensors.bias)
        shared = (configs or {}).get("dq_bias") or shared_config(problem)
        if shared is not None:
            launches["dq_bias"] = shared, backend.launch_dq_bias(problem, shared, *backward, t["dq"], dbias, tensors)
        launches["dbias"] = config, backend.launch_dbias(problem, config, *backward, dbias, tensors, MaskTensors.of(tensors))
    if problem.jvp:
        launches["jvp"] = _launch_jvp(problem, (configs or {}).get("jvp"), forward, tensors, kept)
    if forward_units(problem):
        launches = wide_forward_of(problem, config_of(problem)) | {name: launches[name] for name in launches if name != "fwd"}
    launches |= _launch_copies(problem, t)
    if units_kept(problem):
        return {name: launches[name] for name in launches if name != "dq"} | wide_launches_of(problem, config_of(problem))
    if splits_dkdv(problem):
        return launches | {"dv": keys_resident("dv", None, t["dv"]), "dk": keys_resident("dk", t["dk"], None)}
    return launches | {"dkdv": keys_resident("dkdv", t["dk"], t["dv"])}


def _launch_copies(problem: Problem, t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The launches of the kernels that bring float32 operands into another form, as values."""
    from ..backends.triton import halves_launch

    found: dict[str, Any] = {}
    for pass_ in ("fwd", "weights"):
        for units in _units(problem, pass_, t["q"]):
            made, count = _halves(problem, t["q"], pass_), halves_of(problem, pass_)
            found["halve"] = Config(16, 16, 8, 3), halves_launch.launch_halve(t["q"], made, units, count)
    return found


def _launch_jvp(
    whole: Problem, config: Config | None, forward: tuple[torch.Tensor, ...], tensors: Tensors, kept: torch.Tensor | None
) -> tuple[Config, Any]:
    """The (first) launch of the forward-mode kernel, along tangents that look like what they are tangents of."""
    from ..backends.triton.jvp_launch import launch_jvp, parts_of

    problem, cut = parts_of(whole)[0]
    config = config or lookup(problem, "jvp")
    q, k, v, o, lse = forward
    v, o = v[..., cut], o[..., cut]
    named = zip(GRADIENTS, (q, k, v, *tensors[:3]), strict=True)
    tangents = Tangents(*(t if letter in problem.jvp else None for letter, t in named))
    mask = _masked(problem, tensors, "jvp", config)
    return config, launch_jvp(problem, config, q, k, v, o, lse, o, lse, tangents, mask, tensors, kept)


def wide_launches_of(problem: Problem, config: WideConfig) -> dict[str, Any]:
    """The launches of a backward pass that keeps its weights."""
    from ..backends.triton import wide_launch

    p, tile = problem, config.weights
    t, tensors = _tensors(p), _operands(p)
    sides = [_masked(p, tensors, name, tile) for name in ("dq", "dk")]
    dtype = torch.float16 if halves_of(p, "weights") else t["q"].dtype
    kept = wide_launch.keep(p, config, units_kept(p), "vkq", dtype, torch.device("cpu"))
    given = tuple(_halves(p, t[name], "weights") for name in ("q", "k", "v", "do"))
    units = _units(p, "weights", *(t[name] for name in ("q", "k", "v", "do")))
    weights = wide_launch.launch_weights(p, config, 0, (*given, t["pivots"], t["delta"]), kept, sides[0], tensors, units)
    q, k, _, do = given
    found: dict[str, Any] = {"weights": (tile, weights)}
    rows = {"dv": (do, 1.0, config.keys, sides[1]), "dk": (q, p.sm_scale, config.keys, sides[1])}
    rows["dq"] = k, p.sm_scale, config.queries, sides[0]
    for i, (name, (row, scale, walk, mask)) in enumerate(rows.items()):
        what = (p, config, walk, 0, kept.tensors[i], row, t[name], scale, name != "dq", mask, kept.units[i : i + 1])
        found[name] = walk, wide_launch.launch_columns(*what)
    return found


def wide_forward_of(problem: Problem, config: WideConfig) -> dict[str, Any]:
    """The launches of a forward pass that keeps its weights."""
    from ..backends.triton import wide_launch

    p, tile = problem, config.weights
    t, tensors = _tensors(p), _operands(p)
    mask = _masked(p, tensors, "fwd", tile)
    m_blocks, n_blocks = -(-p.seqlen_q // tile.block_m), -(-p.seqlen_k // tile.block_n)
    heads, rows, keys = forward_units(p) * p.group, m_blocks * tile.block_m, n_blocks * tile.block_n
    kept = torch.empty_strided((1, heads, rows, keys), (heads * rows * keys, rows * keys, keys, 1), dtype=t["q"].dtype)
    by_tile = torch.empty((heads, n_blocks, rows), dtype=torch.float32)
    of_rows = t["pivots"] if p.keeps_rows else None
    made = wide_launch.launch_tile_weights(p, config, 0, t["q"], t["k"], kept, by_tile, by_tile, mask, tensors)
    given = (kept, t["v"], t["o"], t["lse"], by_tile, by_tile)
    done = wide_launch.launch_values(p, config, 0, *given, mask, tensors, of_rows)
    return {"tile_weights": (tile, made), "values": (config.values, done)}


EVERY_KERNEL = (
    *("delta", "dbias", "dq_bias", "columns", "jvp", "weights", "tile_weights", "values", "halve"),
    *PASSES,
)


def compile_problem(
    problem: Problem,
    passes: tuple[str, ...] = EVERY_KERNEL,
    configs: dict[str, Config] | None = None,
) -> list[Report]:
    """Compile the kernels of a problem for ``problem.arch`` (after ``use_target``) and report on each."""
    reports = []
    for name, (config, launch) in launches_of(problem, configs).items():
        if name in passes:
            reports.append(_report(problem.arch.name, name, config, launch))
    return reports


def _tool(name: str) -> str:
    import triton

    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)


def _report(arch: str, kernel: str, config: Config | Walk, launch: Any) -> Report:
    compiled, log, sass = compiled_of(launch, arch)
    shared = compiled.metadata.shared
    if ARCHS[arch].kind == "hip":
        text = compiled.asm["amdgcn"]

        def number(field: str) -> int:
            found = re.search(rf"\.{field}:\s*(\d+)", text)
            return int(found.group(1)) if found else 0

        spill = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
        return Report(arch, kernel, config, shared, number("vgpr_count"), spill, len(re.findall("v_mfma", text)), 0, False, 0)
    used = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return Report(
        arch,
        kernel,
        config,
        shared,
        int(used.group(1)) if used else None,
        sum(map(int, spills.groups())) if spills else None,
        len(re.findall(r"\b(?:HGMMA|HMMA|UTCHMMA|UTCQMMA|QGMMA)\b", sass)),
        len(re.findall(r"\bUTMALDG\b", sass)),
        "serialized" in log,
        _loop_length(sass),
    )


def compiled_of(launch: Any, arch: str) -> tuple[Any, str, str]:
    """``(the compiled kernel, ptxas's own account of it, its disassembly)`` of a launch; the last two are empty for AMD.

    Triton prints the account where it is told to, but not of a kernel that it has on disk: that is assembled once more.
    """
    import triton

    told = io.StringIO()
    knobs = triton.knobs.nvidia  # pyright: ignore[reportAttributeAccessIssue]
    with knobs.scope(), contextlib.redirect_stdout(told):
        knobs.dump_ptxas_log = True
        compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    if ARCHS[arch].kind == "hip":
        return compiled, "", ""
    if compiled.hash in _accounts:
        return compiled, *_accounts[compiled.hash]
    _accounts[compiled.hash] = _account(compiled, arch, told.getvalue())
    return compiled, *_accounts[compiled.hash]


_accounts: dict[str, tuple[str, str]] = {}  # of this process, by hash: problems share kernels


def _account(compiled: Any, arch: str, told: str) -> tuple[str, str]:
    """What ptxas said of a compiled kernel, and its disassembly; ``told``: what Triton printed."""
    if "Used" not in told:
        return _assemble(compiled, arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "k.cubin")
        with open(cubin, "wb") as file:
            file.write(compiled.asm["cubin"])
        return told, _listing(cubin)


def _listing(cubin: str) -> str:
    return subprocess.run([_tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=False).stdout


def _assemble(compiled: Any, arch: str) -> tuple[str, str]:
    """ptxas's own account of a compiled kernel, and its disassembly."""
    import triton

    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    capability = ARCHS[arch].compute_capability
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = os.path.join(folder, "k.ptx"), os.path.join(folder, "k.cubin")
        with open(ptx, "w") as file:
            file.write(compiled.asm["ptx"])
        command = [_tool(ptxas_name(capability, version)), "-v", f"--gpu-name=sm_{capability}{suffix}", ptx, "-o", cubin]
        if version >= (3, 7):
            command.insert(2, "--regAllocOptLevel=2")
        assembled = subprocess.run(command, capture_output=True, text=True, check=False)
        if assembled.returncode:
            raise BackendBroken(f"ptxas failed for {arch}: {assembled.stderr[:400]}")
        return assembled.stderr, _listing(cubin)


def _loop_length(sass: str) -> int:
    """Instructions in the longest innermost loop (backward branch without another inside) that holds a matrix product."""
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_[\w.]+):", line)
        if label:
            labels[label.group(1)] = len(lines)
            continue
        code = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if code:
            lines.append((code.group(1), line))
    loops = []
    for at, (code, _) in enumerate(lines):
        target = re.search(r"\bBRA\b.*`\((\.L_[\w.]+)\)", code)
        if target and labels.get(target.group(1), at + 1) <= at:
            loops.append((labels[target.group(1)], at))
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    lengths = [b - a + 1 for a, b in inner if any(re.search(r"MMA\b", code) for code, _ in lines[a : b + 1])]
    return max(lengths, default=0)


def main(arguments: list[str]) -> int:
    """``ARCH PROBLEM...``: compile every kernel of each problem; one JSON line each."""
    if len(arguments) < 2 or arguments[0] not in ARCHS:
        known = ", ".join(sorted(ARCHS))
        print(f"usage: python -m tilewise.testing.compile_only ARCH PROBLEM...  (ARCH: {known})", file=sys.stderr)
        return 2
    arch, *texts = arguments
    use_target(arch)
    for given in texts:
        chosen, text = re.fullmatch(r"(?:only=(\S+) )?(.*)", given).groups()  # pyright: ignore[reportOptionalMemberAccess]
        for report in compile_problem(Problem.parse(f"{text} arch={arch}"), tuple(chosen.split(",")) if chosen else EVERY_KERNEL):
            print(json.dumps({"problem": text, **dataclasses.asdict(report)}), flush=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # past the compiler's own complaints at exit
