"""The faults of dropout, as values (see ``mutant_list``)."""

from __future__ import annotations

from .mutant_list import BWD, FWD, TILES, Mutant

__all__ = ["DROP_MUTANTS"]

DROP = "backends/triton/drop.py"

DROP_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "dropout_of_the_tile_of_keys",
        "every tile of keys has the same mask",
        DROP,
        "tl.cast(start_n, tl.int32) + (keys & ~8)",
        "keys & ~8",
        ("dropout",),
    ),
    Mutant(
        "dropout_of_the_tile_of_queries",
        "every tile of queries has the same mask",
        DROP,
        "tl.cast(start_m, tl.int32) + (rows & ~8)",
        "rows & ~8",
        ("dropout",),
    ),
    Mutant(
        "dropout_words_swapped",
        "the words of one counter go to other keys",
        DROP,
        "low = tl.where((keys & 8) == 0, w0, w1)",
        "low = tl.where((keys & 8) == 0, w1, w0)",
        ("dropout",),
    ),
    Mutant(
        "dropout_of_the_key_head",
        "the query heads of a group share a mask",
        FWD,
        "kept(of_batch, head, start_m",
        "kept(of_batch, head_kv, start_m",
        ("dropout",),
    ),
    Mutant(
        "dropout_same_for_batches",
        "all batches share a mask",
        DROP,
        "== 0, batch, tl.load",
        "== 0, batch * 0, tl.load",
        ("dropout",),
    ),
    Mutant("dropout_unscaled", "o lacks 1 / (1 - p)", FWD, "acc *= drop[4]", "acc *= 1.0", ("dropout",)),
    Mutant("dropout_unscaled_in_dv", "dv lacks 1 / (1 - p)", BWD, "dv *= drop[4]", "dv *= 1.0", ("dropout",)),
    Mutant(
        "dropout_lost_in_dv",
        "dropped weights pass gradients to v",
        BWD,
        "p_t = tl.where(signed_t < 0.0, 0.0, signed_t)",
        "p_t = tl.abs(signed_t)",
        ("dropout",),
    ),
    Mutant(
        "dropout_lost_in_dk",
        "the mask is not applied to dp",
        BWD,
        "dp_t = tl.where(signed_t < 0.0, 0.0, dp_t * drop[4])",
        "dp_t = dp_t * 1.0",
        ("dropout",),
    ),
    Mutant(
        "dropout_unscaled_in_dk",
        "dp lacks 1 / (1 - p)",
        BWD,
        "dp_t = tl.where(signed_t < 0.0, 0.0, dp_t * drop[4])",
        "dp_t = tl.where(signed_t < 0.0, 0.0, dp_t)",
        ("dropout",),
    ),
    Mutant(
        "dropout_on_ds",
        "the mask is applied to ds, which takes delta from dropped weights",
        BWD,
        "dp_t = tl.where(signed_t < 0.0, 0.0, dp_t * drop[4])\n                p_t = tl.abs(signed_t)",
        "p_t = p_t * drop[4]",
        ("dropout",),
    ),
    Mutant(
        "dropout_lost_in_dq",
        "the mask is not applied to dp",
        BWD,
        "dp = tl.where(kept(of_batch, head, start_m, start_n, dp.shape[0], BLOCK_N, False), dp * drop[4], 0.0)",
        "dp = dp * 1.0",
        ("dropout",),
    ),
    Mutant(
        "dropout_lost_in_dbias",
        "the mask is not applied to dp",
        "backends/triton/dbias.py",
        "dp = tl.where(keep, dp * drop[4], 0.0)",
        "dp = dp * 1.0",
        ("dropout_scores",),
    ),
    Mutant(
        "torch_dropout_before_the_sum",
        "lse and the weights feel what is dropped",
        TILES,
        "        l_i.mul_(alpha).add_(p.sum(-1, keepdim=True))\n        dropped = work.dropped(p, at, keys)\n",
        "        dropped = work.dropped(p, at, keys)\n"
        "        l_i.mul_(alpha).add_((p if dropped is None else p.masked_fill(dropped, 0.0)).sum(-1, keepdim=True))\n",
        ("dropout",),
        backend="torch",
    ),
    Mutant(
        "torch_dropout_unscaled_in_dp",
        "dp lacks 1 / (1 - p)",
        TILES,
        "dp.masked_fill_(dropped, 0.0).mul_(work.keep_scale)",
        "dp.masked_fill_(dropped, 0.0)",
        ("dropout",),
        backend="torch",
    ),
    Mutant(
        "torch_dropout_of_the_wrong_head",
        "the members of a group are counted before the group",
        TILES,
        "each[:, None] * self.problem.group + members",
        "each[:, None] + self.problem.heads_kv * members",
        ("dropout",),
        backend="torch",
    ),
)
