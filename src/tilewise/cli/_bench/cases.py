"""What is timed: a ``Case`` is one attention, a ``Grid`` makes a list of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GRIDS", "PASSES", "Case", "Grid"]

PASSES = ("fwd", "bwd")
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Case:
    """One attention. ``str(case)`` is a problem string, which ``tilewise explain`` reads."""

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool

    def __str__(self) -> str:
        return (
            f"dtype={self.dtype} batch={self.batch} heads={self.heads_q}/{self.heads_kv} seqlen={self.seqlen_q}x{self.seqlen_k}"
            f" head_dim={self.head_dim}/{self.head_dim_v} mask={'causal' if self.causal else 'full'}"
        )

    def flops(self, pass_: str) -> float:
        """Products counted as the FlashAttention papers do: half when causal, 2.5 times forward for backward."""
        forward = 2 * self.batch * self.heads_q * self.seqlen_q * self.seqlen_k * (self.head_dim + self.head_dim_v)
        return forward * (0.5 if self.causal else 1.0) * (2.5 if pass_ == "bwd" else 1.0)

    def bytes(self, pass_: str) -> int:
        """The least traffic: every input read once and every output written once (lse and delta left out)."""
        q = self.batch * self.heads_q * self.seqlen_q * self.head_dim
        o = self.batch * self.heads_q * self.seqlen_q * self.head_dim_v
        kv = self.batch * self.heads_kv * self.seqlen_k * (self.head_dim + self.head_dim_v)
        elements = q + kv + o if pass_ == "fwd" else 2 * (q + kv + o)
        return elements * _ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Grid:
    """Cases with a fixed number of tokens and a fixed hidden size: heads = hidden / head_dim, batch = tokens / seqlen."""

    about: str
    device: str
    dtype: str
    tokens: int
    hidden: int
    dims: tuple[int, ...]
    lens: tuple[int, ...]

    def cases(self, dims: tuple[int, ...] = (), lens: tuple[int, ...] = (), dtype: str = "") -> list[Case]:
        """The cases, without a causal mask and with one; ``dims``, ``lens`` and ``dtype`` stand in for the grid's own."""
        out = []
        for head_dim in dims or self.dims:
            heads = max(1, self.hidden // head_dim)
            for causal in (False, True):
                for seqlen in lens or self.lens:
                    batch = max(1, self.tokens // seqlen)
                    out.append(Case(dtype or self.dtype, batch, heads, heads, seqlen, seqlen, head_dim, head_dim, causal))
        return out


GRIDS: dict[str, Grid] = {
    "fa3": Grid(
        "the grid of the FlashAttention-3 paper: 16,384 tokens, hidden size 2,048",
        device="cuda",
        dtype="bfloat16",
        tokens=16384,
        hidden=2048,
        dims=(64, 128, 256),
        lens=(1024, 4096, 16384),
    ),
    "small": Grid(
        "a quick look on a GPU: 8,192 tokens, hidden size 1,024",
        device="cuda",
        dtype="bfloat16",
        tokens=8192,
        hidden=1024,
        dims=(64, 128),
        lens=(1024, 4096),
    ),
    "cpu": Grid(
        "float32 on the CPU: one sequence, hidden size 512",
        device="cpu",
        dtype="float32",
        tokens=1024,
        hidden=512,
        dims=(64,),
        lens=(1024, 4096),
    ),
}
