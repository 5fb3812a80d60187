"""The reference: a snapshot of the policy's trainable weights, put in place for a forward pass by swapping tensors.

A snapshot of what trains is enough: everything else is the same in both. So one model object serves policy and reference,
with LoRA the reference costs only the adapter, and it is the weights at the start of the stage, not of a path (N2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from rlvr.errors import CheckpointError
from rlvr.policy.model import Policy


class Snapshot:
    """The trainable weights of `policy` as they are now."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.weights = {name: p.detach().clone() for name, p in policy.trainable().items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the policy's model computes with the snapshot's weights. Not for two threads at once."""
        parameters = self.policy.trainable()
        self._swap(parameters)
        try:
            yield
        finally:
            self._swap(parameters)

    def _swap(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            parameter.data, self.weights[name] = self.weights[name], parameter.data

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.weights)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        if state.keys() != self.weights.keys():
            different = sorted(state.keys() ^ self.weights.keys())
            raise CheckpointError(f"the saved reference has other tensors than the policy: {', '.join(different[:5])}")
        for name, tensor in self.weights.items():
            tensor.copy_(state[name])
