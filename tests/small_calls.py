"""Small inputs and comparisons that the tests of the operators share."""

from __future__ import annotations

import torch

import tilewise as tw

FORWARD = torch.ops.tilewise.attention_forward
BACKWARD = torch.ops.tilewise.attention_backward
BACKEND = "torch"


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(grad: str = "", dtype: torch.dtype = torch.float32, n: int = 9, m: int = 11) -> list[torch.Tensor]:
    shapes = ((2, 4, n, 8), (2, 2, m, 8), (2, 2, m, 6))
    tensors = [draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    return [t.requires_grad_(name in grad) for name, t in zip("qkv", tensors, strict=True)]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return tw.attention(q, k, v, causal=True, backend=BACKEND)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tw.attention(q, k, v, causal=True, backend=BACKEND, return_lse=True)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tw.reference(q, k, v, tw.causal())


def oracle_gradients(q, k, v, spec, loss):
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(loss(*tw.reference(*leaves, spec)), leaves)


def close(a: torch.Tensor, b: torch.Tensor, tol: float = 2e-5) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=tol, atol=tol)
