"""RL-PLUS: the external answer as a member of the group that advantages are centred on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.advantages.group import AdvantageValues
from rlvr.components import Modifier
from rlvr.records import Batch
from rlvr.registry import register


@register("modifier", "external_member")
@dataclass(frozen=True)
class ExternalMember(Modifier):
    """Centre each group's rewards on their mean with one more of 1, that of the task's demonstration.

    RL-PLUS (Dong et al. 2025, arXiv 2508.00222): the authors' script has `adv_estimator: grpo`, whose mean is over all
    rows of a prompt, the external answer among them (YihongDong/RL-PLUS, commit eb4aa4d, rl_plus/verl/verl/trainer/ppo/
    core_algos.py, `compute_grpo_outcome_advantage`). So sampled responses that are all wrong are pushed away from. For
    the advantage `group` with the baseline mean and the scale none, and rewards within [0, 1]. Groups of tasks without
    a demonstration, and undecided rollouts, stay as they are.
    """

    per_response = True

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
        assert isinstance(advantage, np.ndarray), "one advantage per response is needed (`per_response`)"
        reward = batch.column("reward")
        result = advantage.copy()
        for group in batch.groups():
            on = group.index[np.isfinite(reward[group.index])]
            if len(on) and group.rollouts[0].task.demonstration:
                # [B_g]: the mean of n rewards and a 1 is above that of the n by (1 - mean) / (n + 1).
                result[on] -= (1.0 - reward[on].mean()) / (len(on) + 1)
        return result
