"""The Engine protocol: token ids in, token ids and behaviour log-probs out, as futures.

Invariants: an engine knows no task, group or verifier; what it samples depends on the request's seed and the weights,
not on what else is in the batch, up to rounding (N7); log-probs are those of the distribution that was sampled from
(N3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
import torch

from rlvr.core.component import CONTRACTS, Component, declared
from rlvr.records import StopReason

if TYPE_CHECKING:
    from rlvr.policy import Policy

Bucket = list[tuple[str, torch.Tensor]]
"""Named weights that are sent together."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. temperature 0 is greedy, with log-probs at temperature 1."""

    max_new_tokens: int
    # Values that truncate nothing (top_p 1, top_k 0, min_p 0) are the defaults because training refuses others unless
    # asked: the log-probs of a truncated distribution are not those that the trainer computes.
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
    # None and the empty mapping differ: the probe sends an empty one to get log-probs of the plain distribution.
    constraint: Mapping[str, Any] | None = None
    """The constraint on the completion, as vLLM's structured outputs take it: `{"regex": ...}`, `{"json": schema}`,
    `{"choice": [...]}`, `{"grammar": ...}`. Its log-probs are those of the constrained distribution. None: what the
    engine's options say; empty: nothing, whatever they say."""
    alternatives: int = 0
    """Likeliest first tokens whose log-probs are wanted, at most 20, which is as many as vLLM gives."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion, end token included: N tokens."""

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
    first_tokens: Mapping[int, float] = field(default_factory=dict)
    """Token id -> log-prob of as many likeliest first tokens as the request asked for, at the temperature sampled at (1
    where that is 0); vLLM adds the sampled one."""


# finish: responses end on the weights that they began with. continue: they go on with the new ones, and one response
# has several versions (prime-rl calls it in-flight weight updates, AReaL interruptible rollout).
InFlight = Literal["finish", "continue"]


@dataclass(frozen=True)
class Published:
    """Bytes and seconds of a publish."""

    bytes: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The metrics of the step."""
        speed = 0.0
        if self.seconds:
            # Decimal gigabytes, as links and buses are rated.
            speed = self.bytes / 1e9 / self.seconds
        return {"publish/bytes": self.bytes, "publish/seconds": self.seconds, "publish/gb_per_second": speed}


class EngineFactory(Component):
    """The options of an engine, which open it. A subclass is a dataclass whose fields are the options."""

    @declared
    def per_rank(self) -> bool:
        """True where every rank has an engine, beside its policy; False where rank 0 has one that samples for all."""
        return True

    def for_run(self, longest: int | None, partitions: bool, heartbeat_timeout: float | None) -> Self:
        """Return the options with what they leave open set for a run.

        `longest`: the longest sequence in tokens that is sampled, None where it is not known. `partitions`: the weights
        lie in parts on several ranks, so that an engine cannot compute with the trainer's own, and no rank can write an
        adapter alone. `heartbeat_timeout`: `distributed.heartbeat_timeout`, in seconds.
        """
        return self

    @abstractmethod
    def open(self, policy: Policy, in_flight: InFlight | None = None) -> Engine:
        """Return the engine for `policy`; `in_flight` says what becomes of open requests when weights are published.

        ConfigError where it cannot start.
        """


CONTRACTS["engine"] = (EngineFactory,)


class Engine(Protocol):
    """Samples completions with weights of a known version."""

    @property
    def version(self) -> int:
        """The version of the weights that it serves."""

    @property
    def shares_weights(self) -> bool:
        """Return True if it computes with the trainer's own tensors, so that publishing moves nothing."""

    @property
    def context(self) -> int:
        """Longest sequence in tokens, prompt and response together, that it can sample; at most the policy's own."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Requests made together are batched; equal prompts are prefilled once."""

    def publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> Published | None:
        """Take new weights; `weights()` streams them in buckets and is not called when memory is shared: None then.

        Until `release`, `weights` may be called again from another thread, for a server that had to be restarted, and a
        publish of the same version need not take them again.

        Called from another thread than `generate`. Requests are open only where the engine was opened with an
        `in_flight`: they finish on the old weights first (`finish`), or go on with the new ones (`continue`).
        """

    def release(self) -> None:
        """The trainer is about to change its weights: the `weights` of the last publish are not called any more, and
        device memory that only sampling needs is given back until the next publish where no request is open."""

    def mismatched_weights(self, weights: Callable[[], Iterable[Bucket]]) -> list[str]:
        """Names of the tensors that the engine holds otherwise than `weights`, as far as it can tell."""

    def close(self) -> None:
        """Give back what the engine holds."""
