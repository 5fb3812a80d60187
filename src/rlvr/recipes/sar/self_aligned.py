"""Self-aligned reward: how much the prompt helps to predict the response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.components import Continuation, Encode, RewardTerm
from rlvr.records import Batch
from rlvr.registry import register


@register("reward", "self_aligned")
@dataclass(frozen=True)
class SelfAligned(RewardTerm):
    """The share by which the prompt lowers the response's perplexity: (ppl(a) - ppl(a | q)) / ppl(a), in [-1, 1].

    SAR (Han et al. 2025, arXiv 2509.05489; github amazon-science/
    Self-Aligned-Reward-Towards_Effective_and_Efficient_Reasoners, commit 08892d0, verl/utils/reward_score/
    efficiency_reward.py), to be added to the verdict: concise responses to this very
    question score high. Without the prompt the response follows the text `before`. Undecided for a response without
    tokens.
    """

    before: str = ""
    """Text that stands in the place of the prompt for ppl(a), as the model's template writes a prompt without a
    question; empty: the end-of-text token."""

    def asks(self, batch: Batch, encode: Encode) -> list[Continuation]:
        """Each response after the prompt, and after the text `before`."""
        wanted = []
        # Of no text it is the end-of-text token: a context is needed, and the model has seen texts begin after it.
        start = encode(self.before)
        for i, rollout in enumerate(batch.rollouts):
            written = np.flatnonzero(rollout.sampled)
            if len(written):
                target = rollout.token_ids[written].tolist()
                context = rollout.token_ids[: written[0]].tolist()
                wanted += [Continuation(i, context, target), Continuation(-1 - i, start, target)]
        return wanted

    def __call__(self, batch: Batch, scored: Sequence[tuple[Continuation, np.ndarray]] = ()) -> np.ndarray:
        nats = {c.rollout: -float(logprobs.mean()) for c, logprobs in scored}
        differences = [nats[i] - nats[-1 - i] if i in nats else np.nan for i in range(len(batch))]
        # ppl(a | q) / ppl(a) = exp(nats with the prompt - nats without it). Bounded at 50, since exp overflows at 710
        # and everything above 2 is cut to -1 anyway.
        return np.clip(1 - np.exp(np.minimum(differences, 50.0)), -1.0, 1.0)
