"""The scorer of best-of-k evaluation: a reward term, evaluated without any stage of training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.config import AlgorithmConfig, Config
from rlvr.data import History
from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.records import Rollout, Task
from rlvr.rewards import RewardContext, walk
from rlvr.stages.grpo.scoring import Scoring


class Chooser:
    """The scorer that `config.evaluation.scorer` names: rollouts -> one score each, NaN where it is undecided.

    `apart` says that the policy's weights lie in parts on several ranks: ConfigError then for a term that needs a
    forward pass, which only rank 0 would take.
    """

    def __init__(self, config: Config, policy: Policy, tasks: Sequence[Task], apart: bool = False) -> None:
        scorer = config.evaluation.scorer
        assert scorer is not None
        # The default algorithm: selectors and modifiers of the run must not be built, or refused, for an evaluation.
        update = {"rewards": [scorer], "algorithm": AlgorithmConfig()}
        alone = config.model_copy(update=update)
        self._policy = policy
        self._scoring = Scoring(alone)
        self._scoring.bind(tasks, RewardContext(alone, tasks))
        terms = [term.function for term in walk(self._scoring.terms)]
        if apart and any(term.needs_policy for term in terms):
            raise ConfigError(
                f"evaluation.scorer: {scorer.written!r} needs a forward pass of the policy, whose weights lie in "
                "parts on the ranks: evaluate a checkpoint with python -m rlvr.evaluate, or choose another scorer"
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        # No history, and a peek: an evaluation leaves no trace in the memory of a reward.
        return self._scoring.score(rollouts, self._policy, History(), (0, 1), peek=True).column("reward")


def chooser(config: Config, policy: Policy, tasks: Sequence[Task], apart: bool = False) -> Chooser | None:
    """The scorer of an evaluation under `config`, where it has one."""
    if config.evaluation.scorer is None:
        return None
    return Chooser(config, policy, tasks, apart)
