"""The policy's certainty of its own response, as a reward: no label is read.

`self_certainty` and `entropy` are from one forward pass of the policy as it is before the update (`needs`), and
undecided where the response has no token of the kind that is averaged; `likelihood` is under the policy that
sampled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.needs import Need
from rlvr.core.splitters import tokens_of
from rlvr.records import Batch, Rollout
from rlvr.registry import register


@register("reward", "self_certainty")
@dataclass(frozen=True)
class SelfCertainty(RewardTerm):
    """The mean over the response's tokens of KL(uniform || policy) = logsumexp - mean logit - log V, at least 0.

    The reward of Intuitor (Zhao et al. 2025, arXiv 2505.19590, eq. 2). The - log V, the same for every token, is left
    out: a response's value is that KL plus a constant.
    """

    within: str | None = None
    """A regular expression: the mean is over the tokens of the first part of the text that it matches, or of its first
    group; null: over all. A response without such a part is worth 0."""

    needs: ClassVar = frozenset({Need("logsumexp"), Need("mean_logit")})

    def __post_init__(self) -> None:
        if self.within is not None:
            try:
                re.compile(self.within)
            except re.error as error:
                raise ValueError(f"within={self.within!r} is no regular expression: {error}") from error

    @property
    def reads_characters(self) -> bool:
        """True where a part is looked for."""
        return self.within is not None

    def __call__(self, batch: Batch) -> np.ndarray:
        total = batch.tokens("logsumexp/current")
        mean = batch.tokens("mean_logit/current")
        # With logits z over V tokens: KL(U || p) = -log V - (1/V) sum_v log p_v = logsumexp(z) - mean(z) - log V.
        # Columns are [T_b] for each rollout b, NaN where nothing was sampled.
        values = [a - b for a, b in zip(total, mean, strict=True)]
        if self.within is None:
            return np.asarray([mean_of_finite(own) for own in values], dtype=np.float64)
        return np.asarray(
            [self._of_part(rollout, own) for rollout, own in zip(batch.rollouts, values, strict=True)], dtype=np.float64
        )

    def _of_part(self, rollout: Rollout, values: np.ndarray) -> float:
        match = re.search(self.within or "", rollout.text)
        span = None if match is None else match.span(1 if match.re.groups else 0)
        # A group that took no part has the span (-1, -1), and an empty part has no token.
        if span is None or span[1] <= span[0]:
            return 0.0
        ((start, end),) = tokens_of(rollout, [span])
        return mean_of_finite(values[start:end])


@register("reward", "entropy")
@dataclass(frozen=True)
class MeanEntropy(RewardTerm):
    """The mean entropy of the next-token distribution over the response's tokens, in nats.

    With a negative weight it pays for being sure (EM-RL, Agarwal et al. 2025, arXiv 2505.15134), with a positive one
    for exploring; as a control it says how far such a reward goes without labels.
    """

    needs: ClassVar = frozenset({Need("entropy")})

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([mean_of_finite(values) for values in batch.tokens("entropy/current")], dtype=np.float64)


def thinking_tokens(rollout: Rollout, closing: str) -> np.ndarray:
    """bool [T]: the sampled tokens up to and including the first `closing` in the text; all of them where there is
    none."""
    start = rollout.text.find(closing)
    if start < 0:
        end = len(rollout.text)
    else:
        end = start + len(closing)
    if rollout.char_ends is None:
        # Without character ends every sampled token counts as thinking.
        ends = np.full(len(rollout), -1)
    else:
        ends = rollout.char_ends
    thinking: np.ndarray = rollout.sampled & (ends <= end)
    return thinking


def mean_of_finite(values: np.ndarray) -> float:
    """The mean of the finite values; NaN where there is none."""
    finite = values[np.isfinite(values)]
    if len(finite):
        return float(finite.mean(dtype=np.float64))
    return float("nan")


@register("reward", "likelihood")
@dataclass(frozen=True)
class SampledLikelihood(RewardTerm):
    """The log-prob of the sampled tokens under the distribution that sampled them, in nats, at most 0.

    As `evaluation.scorer` it chooses the most likely of several responses. Undecided where a log-prob is unknown. The
    engine's log-probs are those of a truncated distribution where `top_p`, `top_k` or `min_p` is set: in training the
    term is refused with `algorithm.truncated_sampling`, in an evaluation it ranks by them.
    """

    mean: bool = True
    """The mean over the tokens; false: their sum."""

    reads_behaviour_logprobs = True

    def __call__(self, batch: Batch, *_: Any, **given: Any) -> np.ndarray:
        return np.asarray([self._of(rollout) for rollout in batch.rollouts], dtype=np.float64)

    def _of(self, rollout: Rollout) -> float:
        values = rollout.behaviour_logprobs[rollout.sampled].astype(np.float64)
        if not len(values):
            return float("nan")
        return float(values.mean() if self.mean else values.sum())
