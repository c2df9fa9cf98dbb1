"""Facts about processors and about the software that is installed, as values: nothing here looks at tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["ARCHS", "OTHER_KINDS", "Arch", "Runtime", "arch_named", "arch_of", "ptxas_name", "ptxas_version", "runtime"]


@dataclass(frozen=True)
class Arch:
    """One processor architecture.

    ``shared_memory`` is the largest number of bytes that one program may hold in shared memory (0: no such memory),
    ``bulk_copy`` says whether it has an engine that copies whole tiles by descriptor (TMA).
    """

    name: str
    kind: str  # "cpu", "cuda" or "hip"
    shared_memory: int = 0
    warp_size: int = 32
    bulk_copy: bool = False
    multiprocessors: int = 1

    @property
    def compute_capability(self) -> int:
        return int(self.name[3:]) if self.kind == "cuda" else 0


ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        Arch("cpu", "cpu"),
        Arch("sm_80", "cuda", 166_912, 32, False, 108),
        Arch("sm_86", "cuda", 101_376, 32, False, 84),
        Arch("sm_89", "cuda", 101_376, 32, False, 128),
        Arch("sm_90", "cuda", 232_448, 32, True, 132),
        Arch("sm_100", "cuda", 232_448, 32, True, 148),
        Arch("sm_103", "cuda", 232_448, 32, True, 148),
        Arch("sm_120", "cuda", 101_376, 32, True, 170),
        Arch("gfx942", "hip", 65_536, 64, False, 304),
        Arch("gfx950", "hip", 163_840, 64, False, 256),
    )
}


OTHER_KINDS = ("meta", "mps", "xpu")  # of device, without facts that tilewise needs


@functools.lru_cache(maxsize=64)
def _arch_of(kind: str, index: int) -> Arch:
    if kind != "cuda":
        return ARCHS["cpu"] if kind == "cpu" else Arch(kind, kind)
    props = torch.cuda.get_device_properties(index)
    gcn = getattr(props, "gcnArchName", "")
    if torch.version.hip and gcn:
        name = gcn.split(":")[0]
        known = ARCHS.get(name, Arch(name, "hip", 65_536, props.warp_size))
        return Arch(name, "hip", known.shared_memory, known.warp_size, False, props.multi_processor_count)
    capability = props.major * 10 + props.minor
    shared = getattr(props, "shared_memory_per_block_optin", 101_376)
    return Arch(f"sm_{capability}", "cuda", shared, 32, capability >= 90, props.multi_processor_count)


def arch_of(device: torch.device) -> Arch:
    """The architecture of a torch device (cached for each device)."""
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return _arch_of(device.type, index)


def arch_named(name: str) -> Arch | None:
    """The architecture of this name: the one of this machine's device, a known one, or another kind of device; else None."""
    if torch.cuda.is_available():
        local = arch_of(torch.device("cuda"))
        if local.name == name:
            return local
    return ARCHS.get(name) or (Arch(name, name) if name in OTHER_KINDS else None)


@dataclass(frozen=True)
class Runtime:
    """The software beneath tilewise: Triton's version (``None``: not installed) and whether it interprets kernels."""

    triton: tuple[int, int] | None
    interpret: bool = False


@functools.lru_cache(maxsize=1)
def runtime() -> Runtime:
    """What is installed here. Imports Triton if it is there (once)."""
    try:
        import triton
    except ImportError:
        return Runtime(None)
    major, minor = (int(x) for x in triton.__version__.split("+")[0].split(".")[:2])
    knobs = getattr(triton, "knobs", None)  # older versions, which every backend refuses, have none
    return Runtime((major, minor), knobs is not None and bool(knobs.runtime.interpret))


def ptxas_name(compute_capability: int, triton: tuple[int, ...]) -> str:
    """Which of the two assemblers in its package this version of Triton uses for a GPU."""
    return "ptxas-blackwell" if compute_capability >= (90 if triton >= (3, 9) else 100) else "ptxas"


def ptxas_version(device: torch.device) -> str | None:
    """The version of the assembler by which Triton compiles for this device: it makes as much of a kernel's speed as Triton does.

    None without an NVIDIA GPU, or where it does not say.
    """
    software, capability = runtime(), arch_of(device).compute_capability
    if software.triton is None or device.type != "cuda" or not capability:
        return None
    try:
        import triton

        tool = getattr(triton.knobs.nvidia, ptxas_name(capability, software.triton).replace("-", "_"))  # pyright: ignore[reportAttributeAccessIssue]
        return str(tool.version)
    except (AttributeError, OSError, RuntimeError):
        return None
