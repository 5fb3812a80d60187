"""The reference: a snapshot of the policy's trainable weights, put in place for a forward pass by swapping tensors.

A snapshot of what trains is enough: everything else is the same in both. So one model object serves policy and
reference, with LoRA the reference costs only the adapter, and it is the weights at the start of the stage, not of a
path (N2). Of weights that DeepSpeed ZeRO-3 has partitioned each rank keeps and swaps its own part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rlvr.policy.model import Policy


class Snapshot:
    """The trainable weights of `policy` as they are now.

    `follows`: it is going to follow the policy, and is kept in float32. In bfloat16, which DeepSpeed computes in, a
    small share of a small difference rounds to nothing: with a mix of 0.01 no weight would ever move.
    """

    def __init__(self, policy: Policy, follows: bool = False) -> None:
        self.policy = policy
        self.follows = follows
        self.weights = {
            # copy=True: a snapshot that shares memory with the parameter would move with it.
            name: _kept(p).detach().to(torch.float32 if follows else p.dtype, copy=True)
            for name, p in policy.trainable().items()
        }

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the policy's model computes with the snapshot's weights. Not for two threads at once.

        What is written to the parameters inside is kept in the snapshot, rounded to the type that the model computes
        in.
        """
        parameters = self.policy.trainable()
        # Whole copies that ZeRO-3 gathered would go on computing with the old weights after the swap.
        _release(parameters)
        # Swapping `.data` moves no memory, and optimizer and hooks keep their parameter objects.
        own = {name: _kept(parameter).data for name, parameter in parameters.items()}
        # the same tensor where the types are the same, else a rounded copy
        lent = {name: self.weights[name].to(tensor.dtype) for name, tensor in own.items()}
        _put(parameters, lent)
        try:
            yield
        finally:
            _release(parameters)
            _put(parameters, own)

    def follow(self, mix: float) -> None:
        """Become mix x the policy as it is now + (1 - mix) x this snapshot."""
        with torch.no_grad():
            for name, parameter in self.policy.trainable().items():
                # w_ref += mix (w - w_ref), in the snapshot's type.
                self.weights[name].lerp_(_kept(parameter).detach().to(self.weights[name].dtype), mix)


def _put(parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    """Let each parameter compute with a tensor."""
    for name, parameter in parameters.items():
        _kept(parameter).data = tensors[name]


def _kept(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's tensor of a parameter: its part where it is partitioned, else all of it."""
    return getattr(parameter, "ds_tensor", parameter)


def _release(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Free the gathered copies of partitioned weights."""
    partitioned: Any = next((p for p in parameters.values() if hasattr(p, "ds_tensor")), None)
    if partitioned is not None:
        partitioned._z3_optimizer.empty_partition_cache()
