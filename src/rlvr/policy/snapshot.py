"""The reference: a snapshot of the policy's trainable weights, put in place for a forward pass by swapping tensors.

A snapshot of what trains is enough: everything else is the same in both. So one model object serves policy and reference,
with LoRA the reference costs only the adapter, and it is the weights at the start of the stage, not of a path (N2). Of
weights that DeepSpeed ZeRO-3 has partitioned each rank keeps and swaps its own part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rlvr.policy.model import Policy


class Snapshot:
    """The trainable weights of `policy` as they are now."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.weights = {name: _kept(p).detach().clone() for name, p in policy.trainable().items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the policy's model computes with the snapshot's weights. Not for two threads at once."""
        parameters = self.policy.trainable()
        self._swap(parameters)
        try:
            yield
        finally:
            self._swap(parameters)

    def follow(self, mix: float) -> None:
        """Become mix x the policy as it is now + (1 - mix) x this snapshot."""
        with torch.no_grad():
            for name, parameter in self.policy.trainable().items():
                self.weights[name].lerp_(_kept(parameter).detach().to(self.weights[name].dtype), mix)

    def _swap(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        _release(parameters)
        for name, parameter in parameters.items():
            kept = _kept(parameter)
            kept.data, self.weights[name] = self.weights[name], kept.data


def _kept(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank keeps of a parameter: its part where it is partitioned, else all of it."""
    return getattr(parameter, "ds_tensor", parameter)


def _release(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Where weights are partitioned, let go of those that are whole for the moment."""
    partitioned: Any = next((p for p in parameters.values() if hasattr(p, "ds_tensor")), None)
    if partitioned is not None:
        partitioned._z3_optimizer.empty_partition_cache()
