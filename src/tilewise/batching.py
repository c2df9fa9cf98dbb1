"""The batching rules of the operators: under ``torch.func.vmap`` the mapped dim is folded into the batch.

Dropout counts the entries of the folded batch, so that examples have masks of their own. Where a seed is mapped, or only the
backward pass, or where randomness is "same", an example has the masks of the call alone: its seeds go with their numbers then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .errors import BackendRefused, InvalidInput
from .functions import function_of, names_function
from .operands import DIMS, full_rank
from .spec import FN_SLOTS, SLOTS, Spec

__all__ = ["backward_rule", "forward_rule", "is_mapped", "jvp_rule", "second_pass_rule", "second_rule"]

_PLAN = SLOTS.index("plan")


def is_mapped(t: torch.Tensor | None) -> bool:
    """Is this a tensor that a functorch transform has wrapped, which has no memory of its own to point at?"""
    if t is None or torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return functorch.is_functorch_wrapped_tensor(t)


def _folded(t: torch.Tensor | None, dim: int | None, size: int) -> torch.Tensor | None:
    """The batched dim of ``t`` (``None``: it is the same for all) folded into its first dim."""
    if t is None:
        return None
    batched = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    return batched.flatten(0, 1)


def _sample(t: torch.Tensor, dim: int | None) -> torch.Tensor:
    """One sample of a tensor that may be batched."""
    return t if dim is None else t.select(dim, 0)


def _folded_operand(slot: str, t: torch.Tensor | None, dim: int | None, size: int, batch: int, apart: bool) -> Any:
    """A tensor of the spec for the folded batch. One that no sample has to itself, and that all batches share, stays as it is."""
    if t is None or "b" not in DIMS[slot]:
        return t
    full = full_rank(slot, _sample(t, dim))
    if dim is None and full.shape[0] == 1 and not apart:
        return full
    if dim is None:
        return full.expand(size, batch, *full.shape[1:]).flatten(0, 1)
    moved = t.movedim(dim, 0)
    moved = moved.reshape(size, *(1,) * (len(DIMS[slot]) - moved.dim() + 1), *moved.shape[1:])
    return moved.expand(size, batch, *moved.shape[2:]).flatten(0, 1)


def _without_plan(spec: str, operands: list[Any]) -> tuple[str, list[Any]]:
    """A spec's plan was made for the batch of one sample, and changes no result: the folded call goes without it."""
    if not operands or operands[_PLAN] is None:
        return spec, operands
    operands[_PLAN] = None
    return str(dataclasses.replace(Spec.parse(spec), plan="")), operands


def _dims(in_dims: Sequence[Any], count: int) -> list[int | None]:
    return [*in_dims, *(None,) * (count - len(in_dims))]


def _check_function(spec: str, dims: Sequence[Any]) -> None:
    """Refuse what folding would change of a score function: the index of the batch, or tensors that each sample has to itself."""
    if not names_function(spec):
        return
    function = function_of(Spec.parse(spec))
    if function.uses_batch:
        raise BackendRefused(
            f"score function {function.name!r} reads its argument batch, which vmap would change: it folds the mapped dim into the "
            "batch. Call attention on the batch of all samples instead."
        )
    own = [slot for slot, dim in zip(SLOTS, dims, strict=False) if slot in FN_SLOTS and dim is not None]
    if own:
        name = function.tensors[FN_SLOTS.index(own[0])]
        raise BackendRefused(
            f"vmap maps over tensor {name!r} of score function {function.name!r}, which cannot have one for each sample: give the "
            "whole tensor, unmapped, or attend to the samples one by one."
        )


def _folded_seed(t: torch.Tensor | None, dim: int | None, size: int, batch: int, alone: bool) -> torch.Tensor | None:
    """Seeds for the folded batch: (size * batch, 3) of seed, number of the entry, and how many there are; or the one seed of all.

    ``alone``: an example has the masks that it would have outside of vmap.
    """
    if t is None:
        return None
    one = full_rank("seed", _sample(t, dim))
    counted = one.shape[1] > 1
    if dim is None and not alone and not counted:
        return one
    seeds = one[None] if dim is None else t.movedim(dim, 0).reshape(size, *one.shape)
    seeds = seeds.expand(size, batch, one.shape[1])
    if counted:
        own, number, count = seeds.unbind(-1)
    else:
        own, number = seeds[..., 0], torch.arange(batch, device=t.device).expand(size, batch)
        count = torch.full_like(number, batch)
    if dim is None and not alone:
        number, count = number + count * torch.arange(size, device=t.device)[:, None], count * size
    return torch.stack((own, number, count), -1).flatten(0, 1)


def _operands(args: Sequence[Any], dims: Sequence[Any], size: int, batch: int, grad: str, alone: bool) -> list[Any]:
    """The tensors of the spec, folded. Empty if the call names none."""
    if all(t is None for t in args):
        return []
    letters: dict[str, str] = {"bias": "b", "slopes": "a", "sink": "s"}
    folded = zip(SLOTS, args, dims, strict=True)
    return [
        _folded_seed(t, dim, size, batch, alone)
        if slot == "seed"
        else _folded_operand(slot, t, dim, size, batch, letters.get(slot, "-") in grad)
        for slot, t, dim in folded
    ]


def _unfolded(t: torch.Tensor, size: int) -> tuple[torch.Tensor, int | None]:
    """An output that nobody asked for has one dim and no elements: it has no batch to unfold."""
    return (t.unflatten(0, (size, t.shape[0] // size)), 0) if t.dim() > 1 else (t, None)


def forward_rule(op: Any) -> Any:
    """Arguments: q, k, v, five that are no tensors, the tensors of the spec."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size, dims = info.batch_size, _dims(in_dims, 8 + len(SLOTS))
        args = (*args, *(None,) * (8 + len(SLOTS) - len(args)))
        batch = _sample(args[0], dims[0]).shape[0]
        _check_function(args[3], dims[8:])
        folded = (_folded(t, dim, size) for t, dim in zip(args[:3], dims[:3], strict=True))
        alone = info.randomness == "same"
        spec, operands = _without_plan(args[3], _operands(args[8:], dims[8:], size, batch, "", alone))
        outputs = op(*folded, spec, *args[4:8], *operands)
        return tuple(zip(*(_unfolded(t, size) for t in outputs), strict=True))

    return rule


def jvp_rule(op: Any) -> Any:
    """Arguments: q, k, v, five that are no tensors, the tangents of q, k, v, bias, slopes and sink, the tensors of the spec."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size, count = info.batch_size, 14 + len(SLOTS)
        dims, args = _dims(in_dims, count), (*args, *(None,) * (count - len(args)))
        batch = _sample(args[0], dims[0]).shape[0]
        q, k, v, tq, tk, tv = (_folded(args[i], dims[i], size) for i in (0, 1, 2, 8, 9, 10))
        of_terms = zip(SLOTS, args[11:14], dims[11:14], strict=False)
        moved = [_folded_operand(slot, t, dim, size, batch, False) for slot, t, dim in of_terms]
        _check_function(args[3], dims[14:])
        # If no input is mapped but tangents are, the masks are those of the call alone.
        alone = info.randomness == "same" or all(dim is None for dim in (*dims[:3], *dims[14:]))
        spec, operands = _without_plan(args[3], _operands(args[14:], dims[14:], size, batch, "", alone))
        outputs = op(q, k, v, spec, *args[4:8], tq, tk, tv, *moved, *operands)
        results = [_unfolded(t, size) for t in outputs]
        return tuple(zip(*results, strict=True))

    return rule


def _of_terms(
    given: Sequence[Any], dims: Sequence[Any], outputs: Sequence[torch.Tensor], grad: str, size: int, batch: int
) -> list[tuple[torch.Tensor, int | None]]:
    """The gradients of bias, slopes and sink, each sample with its own."""
    results: list[tuple[torch.Tensor, int | None]] = []
    for letter, slot, t, dim, g in zip("bas", SLOTS, given, dims, outputs, strict=False):
        if letter not in grad:
            results.append((g, None))
            continue
        own = _sample(t, dim)
        g = g.unflatten(0, (size, batch))
        if full_rank(slot, own).shape[0] == 1:
            g = g.sum(1, keepdim=True)
        results.append((g.reshape(size, *own.shape), 0))
    return results


def backward_rule(op: Any) -> Any:
    """Arguments: do, dlse, q, k, v, o, lse, five that are no tensors, rows, the tensors of the spec."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size, dims = info.batch_size, _dims(in_dims, 13 + len(SLOTS))
        args = (*args, *(None,) * (13 + len(SLOTS) - len(args)))
        batch, grad = _sample(args[2], dims[2]).shape[0], args[11]
        folded = [_folded(t, dim, size) for t, dim in zip(args[:7], dims[:7], strict=True)]
        rows = args[12] if args[12] is None or args[12].dim() == 1 else _folded(args[12], dims[12], size)
        # Kernels count on numbers of rows one after the other, and a batch of 1 is folded without a copy.
        folded[6], rows = (t if t is None else t.contiguous() for t in (folded[6], rows))
        _check_function(args[7], dims[13:])
        # If o is not mapped, the forward pass was not: its masks are those of the call alone.
        alone = info.randomness == "same" or dims[5] is None
        spec, operands = _without_plan(args[7], _operands(args[13:], dims[13:], size, batch, grad, alone))
        outputs = op(*folded, spec, *args[8:12], *((rows, *operands) if operands or names_function(spec) else ()))
        results = [_unfolded(t, size) for t in outputs[:3]]
        results += _of_terms(args[13:], dims[13:], outputs[3:], grad, size, batch)
        return tuple(zip(*results, strict=True))

    return rule


def second_rule(op: Any) -> Any:
    """Arguments: do, dlse, q, k, v, five that are no tensors, six tangents, the tensors of the spec."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size, count = info.batch_size, 16 + len(SLOTS)
        dims, args = _dims(in_dims, count), (*args, *(None,) * (count - len(args)))
        batch, grad = _sample(args[2], dims[2]).shape[0], args[9]
        _check_function(args[5], dims[16:])
        do, dlse, q, k, v, *moved = (_folded(args[i], dims[i], size) for i in (*range(5), 10, 11, 12))
        of_terms = zip(SLOTS, args[13:16], dims[13:16], strict=False)
        moved += [_folded_operand(slot, t, dim, size, batch, False) for slot, t, dim in of_terms]
        # If no input is mapped, the forward pass was not: its masks are those of the call alone.
        alone = info.randomness == "same" or all(dim is None for dim in (*dims[2:5], *dims[16:]))
        spec, operands = _without_plan(args[5], _operands(args[16:], dims[16:], size, batch, grad, alone))
        outputs = op(do, dlse, q, k, v, spec, *args[6:10], *moved, *operands)
        results = [_unfolded(t, size) for t in outputs[:5]]
        results += _of_terms(args[16:], dims[16:], outputs[5:], grad, size, batch)
        return tuple(zip(*results, strict=True))

    return rule


def second_pass_rule(op: Any) -> Any:
    """Arguments: q, k, lse, rows, five that are no tensors, the tensors of the spec."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size, dims = info.batch_size, _dims(in_dims, 9 + len(SLOTS))
        args = (*args, *(None,) * (9 + len(SLOTS) - len(args)))
        if dims[3] is not None:
            raise InvalidInput("rows differ from sample to sample under vmap: choose the same queries for all.")
        batch = _sample(args[0], dims[0]).shape[0]
        _check_function(args[4], dims[9:])
        q, k, lse = (_folded(t, dim, size) for t, dim in zip(args[:3], dims[:3], strict=True))
        spec, operands = _without_plan(args[4], _operands(args[9:], dims[9:], size, batch, "", True))
        lse = None if lse is None else lse.contiguous()
        return _unfolded(op(q, k, lse, args[3], spec, *args[5:9], *operands), size)

    return rule
