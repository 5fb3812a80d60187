"""TEMPO: credit where a group's responses part (arXiv 2509.18314; fatebreaker/tempo@0a1c273).

verl/trainer/ppo/core_algos.py, compute_tempo_outcome_advantage: (r - group mean + branch mean - ancestor mean) / (std +
1e-6), std that of torch, with n - 1. train_math_tempo.sh and verl/trainer/config/ppo_trainer.yaml: clip 0.2 and 0.28,
clip_ratio_c 3, the mean over tokens, neither KL nor entropy.
"""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hand_written_steps import BEFORE, ENGINE, MOVED, Response, clipped_gradient, policy_gradient

from rlvr.records import Task

TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
# (text, right)
RESPONSES = [
    ("Step 1: add. The answer is \\boxed{4}", True),
    ("\\boxed{4}", True),
    ("5? No. $\\boxed{4}$", True),
    ("so " * 200 + "\\boxed{4}", True),
    ("2 + 2 is \\boxed{4.0}", True),
    ("Step 1: add. The answer is \\boxed{5}", False),
    ("\\boxed{}", False),
    ("2 + 2 makes 4", False),
    ("4? No. \\boxed{5}", False),
    ("", False),
]
RIGHT, WRONG = RESPONSES[0][0], RESPONSES[5][0]


@pytest.fixture
def step(recipe_step):
    return recipe_step("tempo", [TASK])


def of_the_authors(rewards, responses):
    """For each response and token, by the loop over the responses that begin alike."""
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-6
    result = []
    for reward, ids in zip(rewards, responses, strict=True):
        ancestors = list(range(len(rewards)))
        of_tokens = []
        for place, token in enumerate(ids):
            branch = [k for k in ancestors if len(responses[k]) > place and responses[k][place] == token]
            change = statistics.fmean(rewards[k] for k in branch) - statistics.fmean(rewards[k] for k in ancestors)
            of_tokens.append((reward - mean + change) / spread)
            ancestors = branch
        result.append(of_tokens)
    return result


def batch_of(step, rewards, responses):
    texts = [RIGHT if reward else WRONG for reward in rewards]
    return step.score([[Response(text, tuple(ids)) for text, ids in zip(texts, responses, strict=True)]])


def advantages(batch):
    return [values[1:].tolist() for values in batch.token_columns["advantage"]]


def test_ten_responses(step):
    assert step.rewards([text for text, _ in RESPONSES]) == [float(right) for _, right in RESPONSES]


def test_the_branch_that_decides_has_the_credit(step):
    """Of seven responses all begin with 0; of the three that go on with 1 all are right, of the four with 2 one is. The
    shares of right ones are 4/7 before the branch, and 1 and 1/4 after it; the shared token adds nothing."""
    responses = [(0, 1), (0, 1), (0, 1), (0, 2, 3), (0, 2, 0), (0, 2, 1), (0, 2, 2)]
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    got = advantages(batch_of(step, rewards, responses))
    spread = statistics.stdev(rewards) + 1e-6
    mean = 4 / 7
    assert got[0] == pytest.approx([(1 - mean) / spread, (1 - mean + 1 - mean) / spread])
    saved = [1 - mean, 1 - mean + (1 / 4 - mean), 1 - mean + (1 - 1 / 4)]
    lost = [-mean, -mean + (1 / 4 - mean), -mean + (0 - 1 / 4)]
    np.testing.assert_allclose(got[3], np.asarray(saved) / spread)
    np.testing.assert_allclose(got[4], np.asarray(lost) / spread)
    assert got[0][1] > got[0][0] > got[3][1] > 0


@pytest.mark.parametrize("seed", range(4))
def test_seven_responses_equal_a_loop(step, seed):
    rng = np.random.default_rng(seed)
    responses = [rng.integers(0, 2, rng.integers(1, 7)).tolist() for _ in range(7)]
    rewards = [1.0, 0.0, *(float(r) for r in rng.integers(0, 2, 5))]
    got = advantages(batch_of(step, rewards, responses))
    for own, expected in zip(got, of_the_authors(rewards, responses), strict=True):
        assert own == pytest.approx(expected, rel=1e-9)


IDS = [(0, 1, 2, 3), (0, 1, 0), (0, 2, 1), (3, 2, 1), (1,), (2, 0, 3), (3,)]
REWARDS = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_gradient_of_the_first_update(step):
    """Token by token, whatever the engine's log-probs are."""
    got = step.gradient(batch_of(step, REWARDS, IDS), MOVED, engine=ENGINE)
    singles = [
        (a, (token,))
        for values, ids in zip(of_the_authors(REWARDS, IDS), IDS, strict=True)
        for a, token in zip(values, ids, strict=True)
    ]
    expected = policy_gradient(*zip(*singles, strict=True), MOVED, "tokens")
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_gradient_of_a_later_update(step):
    """The clip is 0.2 below and 0.28 above, 3 for tokens of a negative advantage."""
    got = step.gradient(batch_of(step, REWARDS, IDS), MOVED, old=BEFORE, engine=ENGINE)
    authors = of_the_authors(REWARDS, IDS)
    expected = clipped_gradient(authors, IDS, MOVED, BEFORE, "tokens", clip=(0.2, 0.28), cap=3.0)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    without = clipped_gradient(authors, IDS, MOVED, BEFORE, "tokens", clip=(0.2, 0.28))
    assert np.abs(expected - without).max() > 0.1
