"""The Backend protocol: what the learner asks of whatever holds the weights, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from rlvr.losses.tokens import Denominators
from rlvr.policy import Policy
from rlvr.rollout.engine import Bucket


class Backend(Protocol):
    """Owns the optimizer. One optimizer step is: zero, backward for every micro-batch, step."""

    policy: Policy

    def zero(self) -> None:
        """Forget all gradients: every trainable parameter has a gradient of zero afterwards."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro-batch's share of the loss."""
        ...

    def step(self, lr: float, max_norm: float) -> float:
        """Clip the gradients to `max_norm` and take a step; the norm before clipping, over all ranks.

        A norm that is not finite changes no weight and no optimizer state.
        """
        ...

    def total(self, denominators: Mapping[str, Denominators]) -> dict[str, Denominators]:
        """Denominators summed over all ranks."""
        ...

    def named_weights(self) -> Iterator[Bucket]:
        """The weights as an engine needs them: Hugging Face names, adapters merged, a tied LM head included, in buckets."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write Hugging Face files that from_pretrained loads: the whole model, or the adapter where one is trained."""
        ...

    def save_merged(self, folder: Path) -> None:
        """Write the plain model with the adapter merged into it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Weights that train and optimizer state: tensors, numbers, strings, lists and dicts only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        ...
