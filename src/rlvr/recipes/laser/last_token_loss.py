"""LaSeR's loss: the log-prob of one token after a response is fitted to the response's reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from rlvr.components import SequenceLoss
from rlvr.core.needs import Need
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average
from rlvr.records import Batch, Origin
from rlvr.registry import register


@register("auxiliary", "last_token")
@dataclass(frozen=True)
class LastTokenReward(SequenceLoss):
    """(beta (log pi(token | prompt, response) - constant) - reward)^2, `token` being one that never follows a response.

    LaSeR (Yang et al. 2025, arXiv 2510.14943), as in RUCBM/LaSeR, commit 48996f7, verl/verl/workers/actor/dp_actor.py
    (`internal_reward_ratio`, `internal_reward_loss`), verl/verl/trainer/ppo/ray_trainer.py (class weights) and
    scripts/run_eval_math.sh (token and constant). The stage puts the token after every response that ended by itself;
    it is not sampled and trains nothing else. A mean over those responses. The reward term `last_token` reads the
    score.
    """

    token: str
    """A token of the tokenizer that no response is followed by, such as <|vision_start|> of Qwen2.5."""
    beta: float = 0.1
    """Scale from log-prob to reward, above 0."""
    constant: float = -23.0
    """The reference's mean log-prob of the token there, below 0; -23 is Qwen2.5's."""
    balanced: bool = True
    """Weigh right (a reward of at least 0.5) and wrong responses of the step so that both count the same: n / (2
    n_class)."""

    average: ClassVar[Average] = "sequences"
    needs = frozenset({Need("logprobs", grad=True)})

    def __post_init__(self) -> None:
        if not self.beta > 0 or not self.constant < 0:
            raise ValueError(f"beta={self.beta} must be above 0 and constant={self.constant} below 0")

    @property
    def appends(self) -> str:
        """The token that the stage puts after responses, with the origin HINT."""
        return self.token

    def weights(self, batch: Batch) -> list[np.ndarray]:
        """1 at the token that was put after a response whose reward is a number; float32 [T_b] each."""
        marks = [np.zeros(len(r), dtype=np.float32) for r in batch.rollouts]
        for rollout, mark, reward in zip(batch.rollouts, marks, batch.column("reward"), strict=True):
            # rlvr.stages.grpo.appended puts the token there with origin HINT, and not after a truncated response.
            if len(rollout) and rollout.origin[-1] == Origin.HINT and np.isfinite(reward):
                mark[-1] = 1.0
        return marks

    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """See SequenceLoss; a response's log-probs are those of the one token."""
        count = len(sequences.reward)
        reward = sequences.reward
        # [S]: score = beta (log pi(z | x, y) - c), with c in place of log pi_reference(z | x, y), which hardly varies.
        loss = (self.beta * (sequences.logprobs - self.constant) - reward).square()
        right = reward >= 0.5
        if self.balanced and 0 < int(right.sum()) < count:
            # n / (2 n_class), so that each class weighs one half of the step.
            loss = loss * count / 2 / torch.where(right, right.sum(), (~right).sum())
        return loss / max(1, count)
