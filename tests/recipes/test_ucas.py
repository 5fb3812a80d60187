"""UCAS: both stages of the shaping at the recipe's own setting, by a loop over responses and tokens."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hand_written_steps import BEFORE, ENGINE, MOVED, Response, clipped_gradient

from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task

RIGHT, WRONG, PENALTY = 0.25, 0.35, 0.05
"""beta_positive, beta_negative and the factor of the logits in compute_ucas_advantage."""


@pytest.fixture
def shaped(make_rollout):
    """`shaped(groups)`: the recipe's advantages of groups of (reward, [(logsumexp - mean logit, logit) of each
    token])."""

    def make(groups):
        rollouts, rewards, statistic = [], [], {"logprobs": [], "logsumexp": [], "mean_logit": []}
        for g, members in enumerate(groups):
            for m, (reward, tokens) in enumerate(members):
                rollouts.append(make_rollout([9] + [1] * len(tokens), prompt=1, group=f"g{g}", member=m))
                rewards.append(reward)
                sure, logit = (np.asarray([np.nan, *column]) for column in zip(*tokens, strict=True))
                # Any logsumexp above the logit will do: only the two differences matter.
                statistic["logsumexp"].append(0 * logit + 20.0)
                statistic["logprobs"].append(logit - 20.0)
                statistic["mean_logit"].append(20.0 - sure)
        batch = Batch(rollouts, {"reward": np.asarray(rewards, dtype=np.float64)})
        for name, columns in statistic.items():
            batch.token_columns[f"{name}/current"] = columns
        algorithm = find_paper("ucas").config.algorithm
        (spec,) = algorithm.modifiers
        before = registry.build("advantage", algorithm.advantage)(batch)
        return [values[1:] for values in registry.build("modifier", spec)(batch, before)]

    return make


def score(value, values):
    spread = statistics.stdev(values)
    return (value - statistics.fmean(values)) / (spread + 1e-6) if spread > 0 else 0.0


def of_the_authors(groups):
    """The two stages as the authors' code has them."""
    logits = [logit for members in groups for _, tokens in members for _, logit in tokens]
    result = []
    for members in groups:
        sums = [math.fsum(sure for sure, _ in tokens) for _, tokens in members]
        rewards = [reward for reward, _ in members]
        for (reward, tokens), total in zip(members, sums, strict=True):
            advantage, z = score(reward, rewards), score(total, sums)
            first = advantage * (math.exp(-RIGHT * z) if advantage > 0 else math.exp(WRONG * z))
            row = []
            for _, logit in tokens:
                raw = first - PENALTY * (logit - min(logits)) / (max(logits) - min(logits) + 1e-6)
                row.append(max(raw, 0.0) if first > 0 else raw)
            result.append(row)
    return result


@pytest.mark.parametrize("seed", range(4))
def test_both_stages_equal_a_loop(shaped, seed):
    rng = np.random.default_rng(seed)
    groups = [
        [
            (float(rng.integers(2)), [(float(rng.normal(5, 2)), float(rng.normal(3, 4))) for _ in range(n)])
            for n in rng.integers(1, 7, 16)
        ]
        for _ in range(3)
    ]
    for got, expected in zip(shaped(groups), of_the_authors(groups), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_an_unsure_right_answer_gains_and_a_sure_wrong_one_loses(shaped):
    """Two right and two wrong answers, one of each sure, all tokens of one logit but for one of logit 0."""
    sure, unsure = [(9.0, 8.0)], [(1.0, 8.0)]
    sure_right, unsure_right, sure_wrong, unsure_wrong, _ = shaped(
        [[(1.0, sure), (1.0, unsure), (0.0, sure), (0.0, unsure)], [(0.0, [(1.0, 0.0)])]]
    )
    assert unsure_right[0] > sure_right[0] > 0
    assert sure_wrong[0] < unsure_wrong[0] < 0
    # The first stage alone, without the penalty that all of them pay. z is the same for right and wrong, so the
    # asymmetry of the two strengths shows in the ratios.
    z = 2 * (4.0 / statistics.stdev([9.0, 1.0, 9.0, 1.0]))
    assert (unsure_right[0] + PENALTY) / (sure_right[0] + PENALTY) == pytest.approx(math.exp(RIGHT * z), rel=1e-5)
    assert (sure_wrong[0] + PENALTY) / (unsure_wrong[0] + PENALTY) == pytest.approx(math.exp(WRONG * z), rel=1e-5)


def test_the_penalty_turns_no_right_answer_into_a_wrong_one(shaped):
    """Of 16 answers 15 are right: their advantage is small, and a very sure one's smaller than the penalty."""
    members = [(1.0, [(5.0, 0.0)]) for _ in range(14)] + [(1.0, [(500.0, 10.0)]), (0.0, [(5.0, 0.0)])]
    got = shaped([members])
    assert got[14][0] >= 0
    assert of_the_authors([members])[14][0] == pytest.approx(got[14][0], abs=1e-9)
    # A group without a spread of rewards pays the penalty all the same.
    equal = shaped([[(1.0, [(5.0, 10.0)]), (1.0, [(5.0, 0.0)])]])
    assert [values[0] for values in equal] == pytest.approx([-PENALTY, 0.0], abs=1e-6)


@pytest.mark.parametrize("moved", [False, True])
def test_gradient_of_a_step(recipe_step, moved):
    """The shaped advantages of tokens weigh the clipped ratio to the policy before the update: 0.2 on both sides and a
    dual clip of 3, the mean over tokens (verl/trainer/config/ppo_trainer.yaml); nothing of the engine's log-probs. The
    certainties are those of the lent policy."""
    task = Task(id="t", prompt="What is 2 + 2?", answer="4")
    texts = ["It is \\boxed{4}.", "It is \\boxed{5}."]
    ids = [(0, 1, 2, 3), (1,), (0, 1, 2), (2, 1, 0), (3, 3), (0, 2)]
    step = recipe_step("ucas", [task])
    batch = step.score([[Response(texts[n % 2], own) for n, own in enumerate(ids)]])
    shaped = [values[1:] for values in batch.token_columns["advantage"]]
    assert all((values > 0).all() == (n % 2 == 0) for n, values in enumerate(shaped))
    got = step.gradient(batch, MOVED, old=BEFORE if moved else None, engine=ENGINE)
    expected = clipped_gradient(shaped, ids, MOVED, BEFORE if moved else MOVED, "tokens", cap=3.0)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
