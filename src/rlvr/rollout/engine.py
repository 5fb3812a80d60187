"""The Engine protocol: token ids in, token ids and behaviour log-probs out, as futures.

Invariants: an engine knows no task, group or verifier; what it samples depends on the request's seed and the weights, not
on what else is in the batch, up to rounding (N7); log-probs are those of the distribution that was sampled from (N3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rlvr.records import Attachment, StopReason

Bucket = list[tuple[str, torch.Tensor]]
"""Named weights that are sent together."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy, with log-probs at temperature 1."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay in it."""
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    model: str = "policy"
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What was sampled, end token included: N tokens."""

    token_ids: np.ndarray
    """int64 [N]"""
    logprobs: np.ndarray
    """float32 [N]"""
    versions: np.ndarray
    """int32 [N], the weights that sampled each token"""
    stop: StopReason
    text: str
    """The completion decoded without special tokens."""
    seconds: float
    """From the request to the last token."""


class Engine(Protocol):
    """Samples completions with weights of a known version."""

    version: int
    """The version of the weights that it serves."""
    shares_weights: bool
    """Whether it computes with the trainer's own tensors, so that publishing moves nothing."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Requests made together are batched; equal prompts are prefilled once."""
        ...

    def publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> None:
        """Take new weights; `weights()` streams them in buckets and is not called when memory is shared.

        Only while no request is open.
        """
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...
