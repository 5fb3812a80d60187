"""Kernel launches, bytes and FLOPs of a program, counted by dispatch on tensors without contents.

A launch is an operation of torch that computes: views, allocations and reads of shapes are none. Bytes are those of an
operation's tensor arguments and results, each once, as if nothing stayed in a cache; of tensors that are looked up in,
those of what is found. FLOPs are those of torch.utils.flop_counter: matrix products and attention, two for a
multiplication and an addition, attention without the saving of causal masks. A Triton kernel is not dispatched: who
replaces its launch says what it reads and writes (`Counts.kernel`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ALLOCATIONS = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "alias",
    "lift_fresh",
)
LOOK_UPS = ("embedding", "gather", "index_select", "index", "embedding_dense_backward", "scatter_add_", "index_put_")
"""Operations that read or write a part of a tensor: as many bytes as the smallest tensor that has the part's size."""


@dataclass
class Counts:
    """What was counted."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0

    def kernel(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count a kernel that is not dispatched, and that reads or writes these tensors once each."""
        self.launches += 1
        self.bytes += sum(map(stored, tensors))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.launches - other.launches, self.bytes - other.bytes, self.flops - other.flops)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.launches + other.launches, self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> Counts:
        return Counts(times * self.launches, times * self.bytes, times * self.flops)


class Counting(TorchDispatchMode):
    """Count the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        packet = function.overloadpacket
        name = packet.__name__
        if function.is_view or name in ALLOCATIONS or function.namespace != "aten":
            return made
        results = tensors_in(made)
        if not results:
            return made
        self.counts.launches += 1
        self.counts.bytes += moved(name, tensors_in((args, kwargs)), results)
        self.counts.flops += self.flops_of(packet, args, kwargs, made)
        return made

    def flops_of(self, packet: Any, args: Any, kwargs: Any, made: Any) -> int:
        """FLOPs of an operation that gave `made`."""
        name = packet.__name__
        if packet in flop_registry:
            # A type of the result, which products may have after their tensors, is none of the formula's.
            first = [a for a in args if isinstance(a, torch.Tensor)] if name.endswith("mm") else args
            return int(flop_registry[packet](*first, **kwargs, out_val=made))
        return grouped_flops(*args[:2]) if name == "_grouped_mm" else 0


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments, each once."""
    found = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
    return list(found.values())


def stored(tensor: torch.Tensor) -> int:
    """Bytes of the numbers that a tensor stores; an expanded one stores each once."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else min(size, 1)
    return numbers * tensor.element_size()


def moved(name: str, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> int:
    """Bytes that an operation reads and writes."""
    indices = [t for t in arguments if t.dtype == torch.int64]
    values = [t for t in (*arguments, *results) if t.dtype != torch.int64]
    if name in LOOK_UPS and values:
        # What is found is the smaller of table and result; it is read and written.
        return 2 * min(map(stored, values)) + sum(map(stored, indices))
    # An operation in place reads and writes its first argument, which is its result, too.
    return sum(map(stored, arguments)) + sum(map(stored, results))


def grouped_flops(one: torch.Tensor, other: torch.Tensor) -> int:
    """FLOPs of a product of tokens and the weights of their experts (torch's counter has none for it).

    [T, K] x [E, K, N]: each token with one expert; [K, T] x [T, N]: the gradient of the weights.
    """
    return 2 * one.shape[0] * one.shape[1] * other.shape[-1]
