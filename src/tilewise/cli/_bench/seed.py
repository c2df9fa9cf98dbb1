"""A plain Triton attention, as a good tutorial would write it: the floor that a library has to leave behind.

Forward only, tensor descriptors on the host, base-two exponential, the free part without a mask and the diagonal part with one,
and a search over tile sizes, warps and stages for each case.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# (kernels are Triton's language, not Python's types)

from __future__ import annotations

import concurrent.futures
import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .cases import Case
from .providers import Tunable

__all__ = ["CONFIGS", "Seed"]

Config = tuple[int, int, int, int]
LOG2_E = 1.4426950408889634
# (BLOCK_M, BLOCK_N, num_stages, num_warps)
CONFIGS: list[Config] = [c for c in itertools.product((64, 128), (64, 128), (2, 3, 4), (4, 8)) if c[0] == 128 or c[3] == 4]
_fastest: dict[Case, Config] = {}  # one search for each case of a process


@triton.jit
def _visit(
    acc, l_i, m_i, q, desc_k, desc_v, base, first, last, offs_m, qk_scale2,
    DIAGONAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    for n in tl.range(first, last, BLOCK_N):
        s2 = tl.dot(q, desc_k.load([base + n, 0]).T)
        if DIAGONAL:
            s2 = tl.where(offs_m[:, None] >= n + offs_n[None, :], s2 * qk_scale2, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s2, 1))
            p = tl.exp2(s2 - m_new[:, None])
        else:
            m_new = tl.maximum(m_i, tl.max(s2, 1) * qk_scale2)
            p = tl.exp2(s2 * qk_scale2 - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = desc_v.load([base + n, 0])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def _seed_kernel(
    desc_q, desc_k, desc_v, desc_o, lse_ptr, qk_scale2, seqlen,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0) * BLOCK_M
    base = tl.program_id(1) * seqlen
    offs_m = m0 + tl.arange(0, BLOCK_M)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    q = desc_q.load([base + m0, 0])
    if CAUSAL:
        acc, l_i, m_i = _visit(acc, l_i, m_i, q, desc_k, desc_v, base, 0, m0, offs_m, qk_scale2, False, BLOCK_N)
        acc, l_i, m_i = _visit(acc, l_i, m_i, q, desc_k, desc_v, base, m0, m0 + BLOCK_M, offs_m, qk_scale2, True, BLOCK_N)
    else:
        acc, l_i, m_i = _visit(acc, l_i, m_i, q, desc_k, desc_v, base, 0, seqlen, offs_m, qk_scale2, False, BLOCK_N)
    tl.store(lse_ptr + base + offs_m, m_i + tl.log2(l_i))
    desc_o.store([base + m0, 0], (acc / l_i[:, None]).to(DTYPE))


class Seed(Tunable):
    """The kernel on one case."""

    def __init__(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        square = (case.heads_q, case.seqlen_q, case.head_dim) == (case.heads_kv, case.seqlen_k, case.head_dim_v)
        if not square or case.seqlen_q % 128 or case.head_dim not in (16, 32, 64, 128, 256):
            raise NotImplementedError("the seed kernel wants one length, a multiple of 128, and head_dim a power of two")
        self.case, self.inputs = case, (q, k, v)
        self.configs = [c for c in CONFIGS if not case.causal or c[0] >= c[1]]

    def _launch(self, config: Config, warmup: bool = False) -> torch.Tensor:
        block_m, block_n, num_stages, num_warps = config
        case, (q, k, v) = self.case, self.inputs
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
        rows = case.batch * case.heads_q * case.seqlen_q
        blocks = zip((q, k, v, o), (block_m, block_n, block_n, block_m), strict=True)
        descs = [TensorDescriptor(t, [rows, case.head_dim], [case.head_dim, 1], [b, case.head_dim]) for t, b in blocks]
        args = (*descs, lse, case.head_dim**-0.5 * LOG2_E, case.seqlen_q, case.head_dim, case.causal, block_m, block_n)
        options = {"DTYPE": getattr(tl, case.dtype), "num_stages": num_stages, "num_warps": num_warps, "enable_fp_fusion": True}
        grid = (case.seqlen_q // block_m, case.batch * case.heads_q)
        if warmup:
            _seed_kernel.warmup(*args, grid=grid, **options)
        else:
            _seed_kernel[grid](*args, **options)
        return o

    def compile(self) -> None:
        """Compile every config, several at a time."""
        if not hasattr(triton, "AsyncCompileMode"):
            for config in self.configs:
                self._launch(config, warmup=True)
            return
        with concurrent.futures.ThreadPoolExecutor(8) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in self.configs:
                self._launch(config, warmup=True)

    def tune(self) -> None:
        """Time every config that fits the device and keep the fastest."""
        if self.case in _fastest:
            return
        times = {config: self._time(config) for config in self.configs}
        best = min(times, key=lambda c: times[c])
        if times[best] == float("inf"):
            raise NotImplementedError("no config of the seed kernel fits this device")
        _fastest[self.case] = best

    def _time(self, config: Config) -> float:
        try:
            median: Any = triton.testing.do_bench(lambda: self._launch(config), warmup=5, rep=20, return_mode="median")
        except triton.OutOfResources:
            return float("inf")
        return median

    def __call__(self) -> torch.Tensor:
        return self._launch(_fastest[self.case])
