"""The linear layers and norms of a decoding step in as few calls as they allow.

A step of a small model costs calls, not arithmetic. So plain linear layers of one input are one product, over a copy of
their weights where the model is small; a plain RMS norm is four operations; anything else (an adapter, a hook, a quantised
layer) is called as it is.

Invariant: `refresh` reads what the modules hold at that moment; until the next one, copied weights stay as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Product:
    """Linear modules of one input, their outputs side by side."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)
        self._weight: torch.Tensor | None = None
        """[in, out]"""
        self._bias: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Numbers that are copied to make them one."""
        return sum(m.weight.numel() for m in self.modules) if len(self.modules) > 1 and self._plain else 0

    @property
    def _plain(self) -> bool:
        return all(type(m) is nn.Linear and not _hooked(m) for m in self.modules)

    def refresh(self, copies: bool) -> None:
        """Take the weights as they are now; several only with leave to copy them."""
        self._weight = self._bias = None
        if not self._plain or (len(self.modules) > 1 and not copies):
            return
        weights, biases = [m.weight.detach() for m in self.modules], [m.bias for m in self.modules]
        self._weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).t()
        if any(b is not None for b in biases):
            there = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
            self._bias = there[0] if len(there) == 1 else torch.cat(there)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, out] of [R, in]."""
        if self._weight is None:
            parts = [module(x) for module in self.modules]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def onto(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`base` + the product."""
        if self._weight is None:
            return base + self(x)
        sums = torch.addmm(base, x, self._weight)
        return sums if self._bias is None else sums.add_(self._bias)


class Norm:
    """A norm, computed here where the module was tried and found to be a plain RMS norm."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._epsilon = rms_epsilon(module)
        self._weight: torch.Tensor | None = None
        """sqrt(H) x weight"""
        self._bound = torch.empty(0)
        """sqrt(H x epsilon)"""

    def refresh(self) -> None:
        """Take the weight as it is now."""
        self._weight = None
        if self._epsilon is not None and not _hooked(self.module):
            weight = self.module.weight.detach()
            self._weight, self._bound = (
                weight * len(weight) ** 0.5,
                weight.new_tensor(len(weight) * self._epsilon).sqrt(),
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] of [..., H]."""
        if self._weight is None:
            normed: torch.Tensor = self.module(x)
            return normed
        return _rms(x, self._weight, self._bound)


def rms_epsilon(module: Any) -> float | None:
    """The epsilon of a module that is x / sqrt(mean(x^2) + epsilon) x weight; None where it is something else."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    trial, weight = copy.deepcopy(module), module.weight
    generator = torch.Generator(weight.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=weight.device, dtype=weight.dtype)

    with torch.no_grad():
        trial.weight.copy_(normal(*weight.shape))
        sizes = weight.new_tensor([1e-3, 0.1, 1.0, 10.0])[:, None]  # epsilon shows in small ones
        x = sizes * normal(4, *weight.shape)
        bound = weight.new_tensor(len(weight) * epsilon).sqrt()
        ours = _rms(x, trial.weight * len(weight) ** 0.5, bound)
        return epsilon if torch.allclose(trial(x), ours, rtol=1e-5, atol=1e-6) else None


def _rms(x: torch.Tensor, weight: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|^2 + bound^2) x weight: four operations, of which torch's own rms_norm makes more."""
    return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(bound)).mul_(weight)


def _hooked(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
