"""PEAR: the reward of each kind of response, from entropies that are written by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Verdict
from rlvr.rewards import RewardContext, bind, build_terms, score

NAN = math.nan
# (tokens, the entropy at each in nats, right, 1 - max(0, mean of the thinking - mean of the answer) or 0)
CASES = {
    "sure thinking": (["a", "b", "</think>", "c"], [0.2, 0.4, 9.0, 0.1], True, 1 - (0.3 - 0.1)),
    "unsure thinking": (["a", "b", "</think>", "c"], [0.9, 1.1, 0.0, 0.1], True, 1 - (1.0 - 0.1)),
    "as unsure an answer": (["a", "</think>", "b", "c"], [0.5, 0.0, 0.4, 0.8], True, 1.0),
    "a penalty above 1": (["a", "</think>", "b"], [2.5, 0.0, 0.5], True, 1 - 2.0),
    "the closing text in two tokens": (["a", "</thi", "nk>", "b"], [0.5, 7.0, 7.0, 0.25], True, 1 - 0.25),
    "no end of the thinking": (["a", "b"], [0.2, 0.4], True, 1 - 0.3),
    "nothing after it": (["a", "</think>"], [0.5, 9.0], True, 1 - 0.5),
    "wrong": (["a", "</think>", "b"], [0.0, 0.0, 0.9], False, 0.0),
    "wrong and unsure": (["a", "</think>", "b"], [2.0, 0.0, 0.1], False, 0.0),
}


@pytest.fixture
def rewards(make_rollout):
    """`rewards([(tokens, entropies, right, ...), ...])`: those of the recipe."""
    config = find_paper("pear").config
    terms = bind(build_terms(config.rewards), RewardContext(config, []))

    def make(cases):
        rollouts = []
        entropies = []
        for member, (tokens, values, right, *_) in enumerate(cases):
            rollout = make_rollout([9] + [1] * len(tokens), prompt=1, group="g", member=member)
            rollout.text = "".join(tokens)
            rollout.char_ends = np.asarray([-1, *np.cumsum([len(token) for token in tokens])])
            rollout.verdicts["math"] = Verdict.from_score(float(right))
            rollouts.append(rollout)
            entropies.append(np.asarray([NAN, *values], dtype=np.float32))
        batch = Batch(rollouts, {}, {"entropy/current": entropies})
        return score(batch, terms).columns["reward"]

    return make


@pytest.mark.parametrize("case", CASES)
def test_the_reward_of_a_response(rewards, case):
    (reward,) = rewards([CASES[case]])
    assert reward == pytest.approx(CASES[case][3], abs=1e-6)


def test_of_two_right_answers_the_one_of_surer_thinking_is_worth_more(rewards):
    """Whatever the closing token's own entropy is."""
    first, second, wrong = rewards([CASES["sure thinking"], CASES["unsure thinking"], CASES["wrong"]])
    assert first > second > wrong


def test_an_undecided_response_has_no_reward(rewards):
    tokens, entropies, _, _ = CASES["sure thinking"]
    (reward,) = rewards([(tokens, entropies, NAN)])
    assert np.isnan(reward)
