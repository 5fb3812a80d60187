"""Matrix products and norms of a decoding step, over weights that were taken once.

Linear modules that have one input are one product, where their weights can be laid side by side. Weights that are cast
are copied anyway. Weights of the right type become views of one tensor where they do not train, so that nothing is
there twice; those that train stay where they are, since an optimizer may own their place, and are copied if that is
allowed. A LoRA layer is its base layer and two narrow products, whose matrices are cast once. An adapter of another
kind, a hook or a quantised layer is called as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rlvr.policy.adapters import LowRank, lora_terms
from rlvr.rollout.decoder_parts import NormPart

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def by_parts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True where several small operations are quicker than torch's fused one.

    Measured on a CPU in float32 only (docs/performance.md, The embedded engine). On a GPU each operation is a launch.
    """
    return device.type == "cpu" and dtype == torch.float32


class MatrixProduct:
    """Linear modules of one input, their outputs side by side, in `dtype`."""

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype, autocast: Autocast) -> None:
        self.modules = list(modules)
        self._dtype = dtype
        self._autocast = autocast
        self._bases: list[Any] = []
        """The modules themselves; of LoRA layers those below."""
        self._weight: torch.Tensor | None = None
        """[in, out] of all bases; None: they are called."""
        self._bias: torch.Tensor | None = None
        self._added: list[_Added | None] = []
        """Of each base that is called, or one of them all."""

    @property
    def copied(self) -> int:
        """Numbers that are copied to make them one, beside those that have to be cast."""
        bases = [base for base, _ in map(_taken_apart, self.modules)]
        if len(bases) > 1 and _plain(bases) and not self._casts(bases):
            return sum(base.weight.numel() for base in bases)
        return 0

    def _casts(self, bases: Sequence[Any]) -> bool:
        return any(base.weight.dtype != self._dtype for base in bases)

    def refresh(self, copies: bool) -> None:
        """Take the weights as they are now; `copies`: whether weights that train may be copied though they need no
        cast."""
        self.release()
        bases, terms = zip(*map(_taken_apart, self.modules), strict=True)
        self._bases = list(bases)
        joined = self._joined(copies) if _plain(bases) else None
        if joined is None:
            self._added = [_added([own], [len(own[0].up)], self._dtype) if own else None for own in terms]
            return
        # nn.Linear holds [out, in]; torch.mm and addmm take [in, out]
        self._weight = joined.t()
        if any(base.bias is not None for base in bases):
            zeros = [base.weight.new_zeros(len(base.weight)) for base in bases]
            biases = [zero if base.bias is None else base.bias for base, zero in zip(bases, zeros, strict=True)]
            self._bias = torch.cat([bias.detach().to(self._dtype) for bias in biases])
        if any(terms):
            self._added = [_added(terms, [len(base.weight) for base in bases], self._dtype)]

    def _joined(self, copies: bool) -> torch.Tensor | None:
        """The weights [out, in] of all bases in one tensor; None where they have to stay apart."""
        weights = [base.weight for base in self._bases]
        if len(weights) == 1 or self._casts(self._bases):
            # Cast first: no joined copy in the old type exists beside the new one.
            parts = [weight.detach().to(self._dtype) for weight in weights]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if (whole := _side_by_side(weights)) is not None:
            return whole
        if not by_parts(weights[0].device, self._dtype) and all(map(_movable, weights)):
            return _moved(weights)
        return torch.cat([weight.detach() for weight in weights]) if copies else None

    def release(self) -> None:
        """Hold no weights until the next `refresh`."""
        self._weight = self._bias = None
        self._added = []

    def take_by_group(self, shared: int, groups: int) -> bool:
        """Take inputs [groups, shared, D] in place of [shared, groups, D], where that saves a copy of the inputs."""
        if self._weight is None or by_parts(self._weight.device, self._dtype):
            return False
        if groups > 1:
            self._weight = _by_group(self._weight, shared, groups)
            self._added = [
                None if added is None else (_by_group(added[0], shared, groups), added[1]) for added in self._added
            ]
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out] of [N, in]."""
        if self._weight is None:
            parts = self._called(x)
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self._bias is None:
            return self._adapted(torch.mm(x, self._weight), x)
        return self._adapted(torch.addmm(self._bias, x, self._weight), x)

    def halves(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """The two halves of the product, each [N, out / 2]."""
        if self._weight is None and len(self.modules) == 2:
            return self._called(x)
        return self(x).chunk(2, -1)

    def onto(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`base` + the product, in the type of `base`, which may be changed."""
        if self._weight is None or base.dtype != self._dtype:
            return base.add_(self(x))
        # The residual is added by the product itself: one operation and one tensor less.
        sums = torch.addmm(base, x, self._weight)
        return self._adapted(sums if self._bias is None else sums.add_(self._bias), x)

    def _called(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The output of each base, with what its adapter adds."""
        with self._autocast():
            parts = [base(x).to(self._dtype) for base in self._bases]
        return [
            part if added is None else torch.addmm(part, torch.mm(x, added[0]), added[1])
            for part, added in zip(parts, self._added, strict=True)
        ]

    def _adapted(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The joined product, which is changed, with what the adapters add."""
        for added in self._added:
            if added is not None:
                product.addmm_(torch.mm(x, added[0]), added[1])
        return product


_Added = tuple[torch.Tensor, torch.Tensor]
"""The narrow matrices [in, r] and [r, out] of an adapter, r of all its terms."""


def _taken_apart(module: Any) -> tuple[Any, list[LowRank]]:
    """The module to multiply with, and the low-rank products that are added to it."""
    terms = None if hooked(module) else lora_terms(module)
    return (module, []) if terms is None else (module.base_layer, terms)


def _plain(bases: Sequence[Any]) -> bool:
    return all(type(base) is nn.Linear and not hooked(base) for base in bases)


def _added(terms: Sequence[Sequence[LowRank]], sizes: Sequence[int], dtype: torch.dtype) -> _Added:
    """One pair of matrices for modules with outputs of `sizes` side by side: the second has a block for each term."""
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


def _by_group(weight: torch.Tensor, shared: int, groups: int) -> torch.Tensor:
    """A weight [shared x groups x D, out] for inputs [groups, shared, D]."""
    return weight.unflatten(0, (shared, groups, -1)).transpose(0, 1).flatten(0, 2)


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


# RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467): y = w x / sqrt(mean(x^2) + e). With H channels that is y =
# (sqrt(H) w) x / sqrt(|x|^2 + H e), which is a norm, hypot, a division and a product; sqrt(H) w and sqrt(H e) are
# computed once for the weights.
class Norm:
    """A norm, computed here where it is a plain RMS norm. Its output is in `dtype`."""

    def __init__(self, part: NormPart, dtype: torch.dtype) -> None:
        self.module = part.module
        self._dtype = dtype
        self._epsilon = part.epsilon
        self._parts = False
        self._weight: torch.Tensor | None = None
        """The weight in the type of the input; sqrt(H) x weight where the norm is computed by parts."""
        self._bound = torch.empty(0)
        """sqrt(H x epsilon)"""

    def refresh(self, taken: torch.dtype) -> None:
        """Take the weight as it is now; inputs are in `taken`."""
        self._weight = None
        if self._epsilon is None or hooked(self.module):
            return
        weight = self.module.weight.detach()
        self._parts = by_parts(weight.device, self._dtype)
        if not self._parts:
            self._weight = weight.to(taken)
            return
        self._weight = weight * len(weight) ** 0.5
        self._bound = weight.new_tensor(len(weight) * self._epsilon).sqrt()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] of [..., H]."""
        if self._weight is None:
            normed: torch.Tensor = self.module(x)
            return normed.to(self._dtype)
        if self._parts:
            # four operations, of which torch's own rms_norm makes more on a CPU
            return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._bound)).mul_(self._weight)
        return nn.functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon).to(self._dtype)


def hooked(module: Any) -> bool:
    """Return True if something else than the module's own class runs when it is called."""
    # `forward` in the instance's own attributes: accelerate and some patches replace the method of one module.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
