"""The plain backend: one process, the whole model and optimizer on one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from rlvr import registry
from rlvr.distributed.weights import buckets, named_weights
from rlvr.errors import CheckpointError
from rlvr.losses.tokens import Denominators
from rlvr.policy import Policy
from rlvr.registry import register
from rlvr.rollout.engine import Bucket


@register("backend", "plain")
@dataclass(frozen=True)
class PlainOptions:
    """Options of the plain backend: none."""

    def open(self, policy: Policy, optimizer: str | dict[str, Any]) -> PlainBackend:
        """The backend for `policy`."""
        return PlainBackend(policy, optimizer)


class PlainBackend:
    """See rlvr.distributed.backend.Backend."""

    def __init__(self, policy: Policy, optimizer: str | dict[str, Any] = "adamw") -> None:
        self.policy = policy
        self.parameters = policy.trainable()
        self.optimizer = registry.build("optimizer", optimizer)(self.parameters.values())

    def zero(self) -> None:
        """Zero gradients, not absent ones, so that a step whose rollouts were all skipped still moves by its momentum."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`."""
        loss.backward()

    def step(self, lr: float, max_norm: float) -> float:
        """Clip and step; see the protocol."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return norm

    def total(self, denominators: Mapping[str, Denominators]) -> dict[str, Denominators]:
        """One rank has everything."""
        return dict(denominators)

    def named_weights(self) -> Iterator[Bucket]:
        """See the protocol."""
        return buckets(named_weights(self.policy))

    def save_model(self, folder: Path) -> None:
        """Hugging Face files: the whole model, or the adapter where one is trained; tokenizer beside it."""
        transformers_logging.disable_progress_bar()
        self.policy.model.save_pretrained(folder)
        self.policy.tokenizer.save_pretrained(folder)

    def save_merged(self, folder: Path) -> None:
        """Hugging Face files of the plain model with the adapter merged into it."""
        self.policy.causal_lm.save_pretrained(folder, state_dict=dict(named_weights(self.policy)))
        self.policy.tokenizer.save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        weights = {name: p.detach() for name, p in self.parameters.items()}
        return {"weights": weights, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back weights and optimizer. CheckpointError names tensors that differ."""
        saved = state["weights"]
        wrong = sorted(saved.keys() ^ self.parameters.keys()) or [
            name for name, p in self.parameters.items() if saved[name].shape != p.shape
        ]
        if wrong:
            raise CheckpointError(f"the checkpoint is of another model: {', '.join(wrong[:5])} differ")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(saved[name])
        self.optimizer.load_state_dict(state["optimizer"])
