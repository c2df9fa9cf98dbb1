"""A small causal byte-level transformer on real text, trained with an attention that the caller passes in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import tilewise

__all__ = ["Attention", "Curve", "Size", "corpus", "generate", "math_attention", "tilewise_attention", "train"]

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of its training."""

    steps: int
    batch: int
    context: int
    layers: int
    width: int
    heads_q: int
    heads_kv: int
    learning_rate: float = 3e-3


@dataclass
class Curve:
    """One training run: the loss of each step (nats a byte), the loss on held-out text, and the wall time."""

    model: nn.Module
    losses: list[float]
    held_out: float
    seconds: float


def corpus() -> torch.Tensor:
    """CPython's own documentation topics (about 700 KB, shipped with every interpreter) as a uint8 tensor."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def tilewise_attention(backend: str) -> Attention:
    return lambda q, k, v: tilewise.attention(q, k, v, causal=True, backend=backend)


def math_attention() -> Attention:
    """PyTorch's own attention, held to the backend that writes the formula out with matrix products and a softmax."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: turn pairs of columns by an angle that grows with the position (Su et al. 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    frequency = 1000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


class _Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.heads_q, self.heads_kv = size.heads_q, size.heads_kv
        self.head_dim = size.width // size.heads_q
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, (size.heads_q + 2 * size.heads_kv) * self.head_dim, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor, attend: Attention) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.heads_q, self.heads_kv, self.heads_kv], dim=1)
        x = x + self.out(attend(_rotate(q), _rotate(k), v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ByteTransformer(nn.Module):
    """Predicts the next byte from the bytes before it."""

    def __init__(self, size: Size):
        super().__init__()
        self.context = size.context
        self.byte = nn.Embedding(256, size.width)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.06)

    def forward(self, x: torch.Tensor, attend: Attention) -> torch.Tensor:
        h = self.byte(x)
        for block in self.blocks:
            h = block(h, attend)
        return self.norm(h) @ self.byte.weight.T


def _batch(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def train(
    text: torch.Tensor, size: Size, attend: Attention, seed: int, device: str, on_step: Callable[[float], None]
) -> Curve:
    """Train from ``seed``: the same seed gives the same weights and the same batches, whatever the attention.

    ``on_step`` receives the loss of each step. The last tenth of the text is held out.
    """
    torch.manual_seed(seed)
    model = ByteTransformer(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    split = len(text) * 9 // 10
    warmup = max(1, size.steps // 20)
    losses = []
    began = time.perf_counter()
    for step in range(size.steps):
        fraction = (step + 1) / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (size.steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * max(fraction, 0.05)
        starts = torch.randint(0, split - size.context - 1, (size.batch,), generator=generator)
        x, y = (t.to(device) for t in _batch(text, starts, size.context))
        loss = F.cross_entropy(model(x, attend).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        on_step(losses[-1])
    seconds = time.perf_counter() - began
    starts = torch.linspace(split, len(text) - size.context - 2, 4 * size.batch).long()
    with torch.no_grad():
        x, y = (t.to(device) for t in _batch(text, starts, size.context))
        held_out = F.cross_entropy(model(x, attend).flatten(0, 1), y.flatten()).item()
    return Curve(model, losses, held_out, seconds)


@torch.no_grad()
def generate(model: nn.Module, attend: Attention, prompt: str, length: int, seed: int, device: str) -> str:
    """``length`` bytes sampled after ``prompt`` (temperature 0.7), as text."""
    generator = torch.Generator().manual_seed(seed)
    context = int(model.context)  # type: ignore[arg-type]
    out = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([out[-context:]], device=device), attend)[0, -1]
        p = torch.softmax(logits.float().cpu() / 0.7, dim=-1)
        out.append(int(torch.multinomial(p, 1, generator=generator)))
    return bytes(out).decode(errors="replace")
