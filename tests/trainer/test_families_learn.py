"""One learning curve for each family of pieces on the bandit task, against the same run without training.

The curves of estimators and losses are those of the presets in test_trainer.py. Here the piece carries the learning, or
is in its way: a penalty, a bonus, a selection must not stop it.
"""

from __future__ import annotations

import numpy as np
import pytest

from small_run import overlaid

FAMILIES = {
    "advantages": {"advantage": {"name": "group", "baseline": "leave_one_out", "scale": "batch_std"}},
    "advantages by token": {"advantage": "optimal_token"},
    "modifiers": {"modifiers": ["whiten", {"name": "signs", "negative": 0.5}]},
    "losses": {"loss": "trajectory_balance"},
    "the average over groups": {"loss": {"name": "reinforce", "average": "groups"}},
    "kl in the loss": {"kl": {"coef": 0.05}},
    "kl in the reward, by turn": {
        "kl": {"coef": 0.02, "where": "reward", "scale": {"by": "turn", "factors": {1: 0.5}}}
    },
    "entropy": {
        "entropy": {"metric": "entropy", "target": 0.5, "initial": 0.0, "delta": -0.002, "idle": True, "maximum": 0.02}
    },
    "auxiliary: likelihood": {"loss_coef": 0.0, "auxiliary": ["likelihood"]},
    "auxiliary: preferences": {"loss_coef": 0.0, "auxiliary": [{"name": "dpo", "beta": 0.5}]},
    "selection": {"select": [{"name": "best_worst", "best": 2, "worst": 2}]},
    "token selectors": {"token_select": [{"name": "top_entropy", "share": 0.5}]},
}
REWARDS = {
    "rewards: a gate": [{"name": "gate", "term": "verdict", "by": "length", "at_least": 0.01, "otherwise": -1}],
    "rewards: bounded": [
        {"name": "bounded", "term": "verdict", "squash": "tanh"},
        {"name": "repetition", "weight": 0.01},
    ],
}
BANDIT = {
    "run": {"steps": 60},
    "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 3, "ignore_eos": True},
    "checkpoint": {"every": 0},
    "logging": {"rollouts": 0},
}
IN_GATE = ("losses", "rewards: a gate")


def score(trainer, steps):
    """The mean score of the verifier over these last steps."""
    return float(np.mean([row["reward/verdict"] for row in trainer.metrics[-steps:]]))


def cases():
    for name in (*FAMILIES, *REWARDS):
        for seed in range(3):
            slow = seed > 0 or name not in IN_GATE
            yield pytest.param(name, seed, marks=[pytest.mark.slow] if slow else [], id=f"{name}-{seed}")


@pytest.mark.gate
@pytest.mark.parametrize(("name", "seed"), cases())
def test_a_family_learns(make_trainer, name, seed):
    piece = {"algorithm": FAMILIES[name]} if name in FAMILIES else {"rewards": REWARDS[name]}
    over = overlaid(overlaid(BANDIT, piece), {"run": {"seed": seed}})
    trained = make_trainer(over, "trained")
    trained.train()
    untouched = make_trainer(overlaid(over, {"run": {"steps": 12}, "optim": {"lr": 1e-12}}), "untouched")
    untouched.train()
    assert score(untouched, 12) < 0.6
    assert score(trained, 5) > score(untouched, 12) + 0.25
