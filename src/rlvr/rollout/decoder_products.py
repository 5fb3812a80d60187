"""Products and norms of a decoding step, over weights that were taken once, and feed-forward parts.

Linear modules of one input are one product (`rlvr.rollout.joined_weights`). Weights that are kept in another type than
is computed in are cast when they are taken, those of feed-forward modules that are called as they are, too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig

from rlvr.policy.adapters import LowRank
from rlvr.policy.foreign import foreign
from rlvr.policy.model import PLAIN
from rlvr.rollout.decoder_parts import FeedForwardParts, NormPart
from rlvr.rollout.joined_weights import NarrowProducts, by_group, in_place, lora_parts, narrow_products

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def _taken_apart(module: Any) -> tuple[Any, list[LowRank]]:
    """The module to multiply with, and the low-rank products that are added to it."""
    if type(module) is nn.Linear or hooked(module):
        return module, []
    return lora_parts(module)


def _plain(bases: Sequence[Any]) -> bool:
    return all(type(base) is nn.Linear and not hooked(base) for base in bases)


def by_parts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True where several small operations are quicker than torch's fused one.

    Measured on a CPU in float32 only (docs/performance.md, The embedded engine). On a GPU each operation is a launch.
    """
    return device.type == "cpu" and dtype == torch.float32


@functools.cache
def sums_in_float32(device: str, dtype: torch.dtype) -> bool:
    """Return True where torch multiplies matrices of `dtype` into float32: on a GPU (torch.bmm's `out_dtype`)."""
    one = torch.ones(1, 8, 8, device=device, dtype=dtype)
    try:
        torch.bmm(one, one, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # of a device, a type or a version of torch that has it not
        return False
    return True


def scores(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Float32 [R, shared, groups, slots] = `scale` x queries [R, shared, groups, D] x keys [R, shared, slots, D]."""
    turned = keys.transpose(-1, -2)
    if q.dtype == torch.float32 or not sums_in_float32(q.device.type, q.dtype):
        return (q.float() * scale) @ turned.float()
    # The keys of the cache are read as they are: no copy of them in float32.
    product = torch.bmm(q.flatten(0, 1), turned.flatten(0, 1), out_dtype=torch.float32)
    return product.mul_(scale).view(*q.shape[:-1], -1)


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
        self._added: list[NarrowProducts | None] = []
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
            self._added = [narrow_products([own], [len(own[0].up)], self._dtype) if own else None for own in terms]
            return
        # nn.Linear holds [out, in]; torch.mm and addmm take [in, out]
        self._weight = joined.t()
        if any(base.bias is not None for base in bases):
            zeros = [base.weight.new_zeros(len(base.weight)) for base in bases]
            biases = [zero if base.bias is None else base.bias for base, zero in zip(bases, zeros, strict=True)]
            self._bias = torch.cat([bias.detach().to(self._dtype) for bias in biases])
        if any(terms):
            self._added = [narrow_products(terms, [len(base.weight) for base in bases], self._dtype)]

    def _joined(self, copies: bool) -> torch.Tensor | None:
        """The weights [out, in] of all bases in one tensor; None where they have to stay apart."""
        weights = [base.weight for base in self._bases]
        if len(weights) == 1 or self._casts(self._bases):
            # Cast first: no joined copy in the old type exists beside the new one.
            parts = [weight.detach().to(self._dtype) for weight in weights]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        # On a CPU in float32 those of small models are joined, and copied.
        if not by_parts(weights[0].device, self._dtype) and (whole := in_place(weights)) is not None:
            return whole
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
            self._weight = by_group(self._weight, shared, groups)
            self._added = [
                None if added is None else (by_group(added[0], shared, groups), added[1]) for added in self._added
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
        # The residual is added by the product itself. In place: out of place torch copies a `base` of two dimensions to
        # its result first (addmm_out_cuda_impl, aten/src/ATen/native/cuda/Blas.cpp).
        base.addmm_(x, self._weight)
        return self._adapted(base if self._bias is None else base.add_(self._bias), x)

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


# RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467): y = w x / sqrt(mean(x^2) + e). With H channels that is y =
# (sqrt(H) w) x / sqrt(|x|^2 + H e), which is a norm, hypot, a division and a product; sqrt(H) w and sqrt(H e) are
# computed once for the weights.
class Norm:
    """A norm, computed here where it is an RMS norm. Its output is in `dtype`."""

    def __init__(self, part: NormPart, dtype: torch.dtype) -> None:
        self.module = part.module
        self._dtype = dtype
        self._epsilon = part.epsilon
        self._offset = part.offset
        self._parts = False
        self._weight: torch.Tensor | None = None
        """The weight in the type that is computed in; sqrt(H) x weight where the norm is computed by parts."""
        self._bound = torch.empty(0)
        """sqrt(H x epsilon)"""

    def refresh(self, taken: torch.dtype) -> None:
        """Take the weight as it is now; inputs are in `taken`."""
        self._weight = None
        if self._epsilon is None or hooked(self.module):
            return
        weight = self.module.weight.detach()
        if self._offset:
            # Rounded to bfloat16, 1 + w would be wrong in the same way for every token.
            weight = weight.float() + self._offset
            taken = torch.float32
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
        x = x.to(self._weight.dtype)
        return nn.functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon).to(self._dtype)


class FeedForward(Protocol):
    """The feed-forward part of a block, [N, H] -> [N, H]."""

    @property
    def copied(self) -> int:
        """Weights that are copied where copies are allowed."""
        ...

    def refresh(self, copies: bool) -> None:
        """Take the weights as they are now; `copies` as for `MatrixProduct.refresh`."""
        ...

    def release(self) -> None:
        """Hold no copies of weights until the next `refresh`."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The part's output."""
        ...

    def onto(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`base`, which may be changed, + the part's output."""
        ...


class GatedFeedForward:
    """W_down (act(W_gate x) * W_up x)"""

    def __init__(self, parts: FeedForwardParts, dtype: torch.dtype, autocast: Autocast) -> None:
        self._activation = parts.activation
        self.gates = MatrixProduct(parts.gates, dtype, autocast)
        self.down = MatrixProduct([parts.down], dtype, autocast)

    @property
    def copied(self) -> int:
        return self.gates.copied

    def refresh(self, copies: bool) -> None:
        self.gates.refresh(copies)
        self.down.refresh(copies)

    def release(self) -> None:
        self.gates.release()
        self.down.release()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._inner(x))

    def onto(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.down.onto(base, self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gates.halves(x)
        inner: torch.Tensor = self._activation(gate) * up
        return inner


class CalledFeedForward:
    """A module of any form, such as a mixture of experts, called as it is: with weights that were cast once, where they
    are kept in another type than is computed in and nothing is attached to them."""

    copied = 0

    def __init__(self, module: Any, dtype: torch.dtype, autocast: Autocast) -> None:
        self.module = module
        self._dtype = dtype
        self._autocast = autocast
        self._called: Any = module

    def refresh(self, copies: bool) -> None:
        self.release()
        if any(weight.dtype != self._dtype for weight in self.module.parameters()) and _castable(self.module):
            self._called = _cast(self.module, self._dtype)

    def release(self) -> None:
        self._called = self.module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Mixtures take [rows, tokens, H], and some return the router's scores, too.
        with self._autocast():
            output = self._called(x[None])
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return states.view(x.shape).to(self._dtype)

    def onto(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return base.add_(self(x))


def feed_forward(parts: FeedForwardParts, dtype: torch.dtype, autocast: Autocast) -> FeedForward:
    """The feed-forward part of a block."""
    if parts.gates:
        return GatedFeedForward(parts, dtype, autocast)
    return CalledFeedForward(parts.module, dtype, autocast)


def _castable(module: Any) -> bool:
    """True for a module of plain weights, without adapters and hooks."""
    plain = all(type(weight) in PLAIN for weight in module.parameters())
    return plain and not any(hooked(m) or foreign(m, "base_layer") is not None for m in module.modules())


def _cast(module: Any, dtype: torch.dtype) -> Any:
    """A copy of a module whose weights are cast, as if it had been loaded in `dtype`; its buffers are copies."""
    # deepcopy takes what is in `memo` in place of a copy: no weight is copied in its own type.
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, PretrainedConfig):
                memo[id(value)] = value
        for weight in part.parameters(recurse=False):
            memo[id(weight)] = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    return copy.deepcopy(module, memo)


def hooked(module: Any) -> bool:
    """Return True if something else than the module's own class runs when it is called."""
    # `forward` in the instance's own attributes: accelerate and some patches replace the method of one module.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
