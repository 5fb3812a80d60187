"""Advantage-leftover-lunch: offline policy gradient on responses whose advantage is known and positive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from rlvr.components import SequenceLoss
from rlvr.core.needs import REFERENCE, Need
from rlvr.core.schedules import Scalar, refuse_above, refuse_below
from rlvr.core.seeding import seed_of
from rlvr.data.samplers import Sampler
from rlvr.errors import DataError
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average
from rlvr.registry import register


@register("auxiliary", "leftover_lunch")
@dataclass(frozen=True)
class LeftoverLunch(SequenceLoss):
    """-max(0, A) r log pi(y), r = pi(y) / pi_reference(y) clipped to [1 - clip, 1 + clip], without a gradient.

    A-LoL (Baheti et al. 2023, arXiv 2305.14718), as `a_lol` in abaheti95/LoL-RL, commit 9f8d816,
    lolrl_qlora_llama_hh.py: the whole response is one action, log pi(y) is the sum over its tokens, and the advantage A
    is read as the reward, so that an sft stage takes it from each task's `label`. A mean over responses.
    """

    clip: Scalar = 0.9
    """Largest distance of the ratio from 1, above 0 and at most 1."""

    average: ClassVar[Average] = "sequences"
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", REFERENCE)})

    def __post_init__(self) -> None:
        refuse_below("clip", self.clip, 0, above=True)
        refuse_above("clip", self.clip, 1)

    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """See SequenceLoss."""
        clip = float(self.clip)
        # [S]. e^20 is far beyond the clip, and no overflow.
        log_ratio = (sequences.logprobs - sequences.reference).detach().clamp(-20.0, 20.0)
        ratio = log_ratio.exp().clamp(1 - clip, 1 + clip)
        advantage = sequences.reward.clamp_min(0.0)
        return -advantage * ratio * sequences.logprobs / max(1, len(ratio))


class ByLabel(Sampler):
    """Draws tasks with replacement, each as often as its positive `label` says; others never.

    The strategy `good_priority` of lolrl_qlora_llama_hh.py. An epoch is as many draws as there are tasks.
    """

    def order(self, epoch: int, size: int) -> np.ndarray:
        labels = [float(self.pool.at(number).info.get("label", 0.0)) for number in range(size)]
        weight = np.maximum(np.asarray(labels, dtype=np.float64), 0.0)
        if not weight.sum() > 0:
            raise DataError("the sampler ByLabel draws tasks with a `label` above 0, and none has one")
        generator = np.random.default_rng(seed_of(self.seed, "by label", epoch))
        return generator.choice(size, size=size, p=weight / weight.sum())
