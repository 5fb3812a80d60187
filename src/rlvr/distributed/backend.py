"""The Backend protocol: what the learner asks of whatever holds the weights, gradients and optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from rlvr.core.component import CONTRACTS, Component, declared
from rlvr.core.specs import SpecLike
from rlvr.policy import Policy
from rlvr.rollout.engine import Bucket

if TYPE_CHECKING:
    from rlvr.distributed.world import World


class BackendFactory(Component):
    """The options of a backend, which open it. A subclass is a dataclass whose fields are the options."""

    @declared
    def partitions(self) -> bool:
        """True where a rank alone does not have all weights, so that no rank can compute or sample with them by
        itself."""
        return False

    @abstractmethod
    def open(self, policy: Policy, optimizer: SpecLike, world: World | None = None) -> Backend:
        """Return the backend for `policy`, with a fresh optimizer."""


CONTRACTS["backend"] = (BackendFactory,)


class Backend(Protocol):
    """Owns the optimizer. One optimizer step is: zero, backward for every micro-batch, step.

    With several ranks every method is called on every rank, in the same order; losses are each rank's share of one sum.
    """

    policy: Policy
    # True for ZeRO 2 and 3, whose backward passes reduce gradients as they go: a rank that makes one pass less would
    # leave the others waiting in the collective.
    lockstep: bool
    """True if forward and backward passes are collective, so that every rank has to make the same number of them
    between other collectives."""
    saves_copies: bool
    """True if `saved_tensors` gives copies in host memory, not the tensors in use."""

    def zero(self) -> None:
        """Forget all gradients, those of passes that no step followed included: every trainable parameter's is zero
        then."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro-batch's share of the loss."""

    def step(self, lr: float, max_norm: float) -> float:
        """Sum the gradients over ranks, clip them to `max_norm` and take a step; the norm before clipping, the same on
        every rank.

        A norm that is not finite changes no weight and no optimizer state.
        """

    def release(self) -> None:
        """Give back the device memory that only updates need: gradients, what torch's allocator keeps for later and,
        with `offload_during_rollout`, what only the optimizer reads. `zero` and `step` take it again."""

    def named_weights(self) -> Iterator[Bucket]:
        """The weights as an engine needs them: Hugging Face names, adapters merged, a tied LM head included, in
        buckets.

        To be gone through to the end on every rank.
        """

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's share of what a checkpoint holds of the backend: `weights/PARAMETER` and
        `optimizer/KEY/PARAMETER`, whole tensors (of no dimension: counts), each from one rank."""

    def load_tensors(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take back what the ranks of any backend gave, however many they were; `saved` has all of it and may read
        lazily.

        CheckpointError names what does not fit.
        """
