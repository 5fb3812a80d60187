"""Weights of linear layers that have one input, as one product takes them, and what LoRA adds to it.

Weights that do not train become views of one tensor, so that nothing is there twice. Those that train stay where they
are, since an optimizer may own their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlvr.policy.adapters import LowRank, lora_terms

NarrowProducts = tuple[torch.Tensor, torch.Tensor]
"""The matrices [in, r] and [r, out] of an adapter, r of all its terms."""


def lora_parts(layer: Any) -> tuple[Any, list[LowRank]]:
    """The base of a LoRA layer and the products that are added to it; another layer itself, and nothing."""
    terms = lora_terms(layer)
    return (layer, []) if terms is None else (layer.base_layer, terms)


def narrow_products(terms: Sequence[Sequence[LowRank]], sizes: Sequence[int], dtype: torch.dtype) -> NarrowProducts:
    """One pair of matrices for layers with outputs of `sizes` side by side: the second has a block for each term."""
    every = [term for own in terms for term in own]
    down = torch.cat([term.down.detach().to(dtype) for term in every]).t()
    up = down.new_zeros(down.shape[1], sum(sizes))
    rank = column = 0
    for own, size in zip(terms, sizes, strict=True):
        for term in own:
            width = len(term.down)
            up[rank : rank + width, column : column + size] = (term.up.detach() * term.scaling).t()
            rank += width
        column += size
    return down, up


def by_group(weight: torch.Tensor, shared: int, groups: int) -> torch.Tensor:
    """A weight [shared x groups x D, out] for inputs [groups, shared, D]."""
    return weight.unflatten(0, (shared, groups, -1)).transpose(0, 1).flatten(0, 2)


def in_place(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The weights [out, in] as one tensor of which they are, or become, views; None where they have to stay apart."""
    if (whole := _side_by_side(weights)) is not None:
        return whole
    return _moved(weights) if all(map(_movable, weights)) else None


def _side_by_side(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The weights [out, in] as one tensor where they lie one after the other in one storage; else None."""
    first = weights[0].detach()
    place = first.storage_offset()
    for weight in weights:
        # `_cdata` names the storage; `data_ptr` is not there for tensors without contents.
        same = weight.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same or weight.storage_offset() != place or not weight.is_contiguous():
            return None
        place += weight.numel()
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride(), first.storage_offset())


def _movable(weight: torch.Tensor) -> bool:
    """True for a weight that does not train and has a storage of its own."""
    return not weight.requires_grad and weight.untyped_storage().nbytes() == weight.nbytes


def _moved(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weights [out, in] in one tensor, of which they become views."""
    # Tensors that are made in inference mode cannot be used by a pass with gradients, which these weights are for, too.
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
            weight.data = part
        return whole
