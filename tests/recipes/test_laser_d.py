"""LASER-D: the target length of each class of difficulty, chosen as the authors choose it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Verdict
from rlvr.rewards import RewardContext, bind, build_terms, score

CANDIDATES = range(4096, 16384 + 1024, 1024)
LEAST = {"hard": 1, "medium": 2, "easy": 5}
"""int(8 / 3) and int(16 / 3) of groups of 8"""


@pytest.fixture
def terms():
    config = find_paper("laser-002-343").config
    return bind(build_terms(config.rewards), RewardContext(config, []))


@pytest.fixture
def batch_of(make_rollout):
    """`batch_of([[(right, length), ...], ...])`"""

    def make(groups):
        rollouts = []
        for g, members in enumerate(groups):
            for m, (right, length) in enumerate(members):
                rollout = make_rollout([9] + [1] * length, prompt=1, group=f"g{g}", member=m)
                rollout.verdicts["math"] = Verdict.from_score(float(right))
                rollouts.append(rollout)
        return Batch(rollouts)

    return make


def group(right, lengths, wrong=5000):
    """A group of 8 whose first `right` members are right, of these lengths."""
    return [(m < right, lengths[m % len(lengths)] if m < right else wrong) for m in range(8)]


def target_of(lengths, least):
    for candidate in CANDIDATES:
        if math.floor(least * sum(n <= candidate for n in lengths) / len(lengths)) >= 1:
            return candidate
    return 16384


def test_the_targets_are_the_authors(terms, batch_of):
    groups = {
        "hard": [group(1, [9000], wrong=14000), group(2, [12000, 13000], wrong=9000)],
        "medium": [group(4, [6000, 7000, 8000, 9000], wrong=7500)],
        "easy": [group(8, [3000, 5000, 6000, 7000])],
    }
    piece = next(term.function for term in terms if term.name == "adaptive_length_target")
    assert piece.targets() == [16384] * 3
    score(batch_of([members for same in groups.values() for members in same]), terms)
    piece.observe({})
    expected = [target_of([n for members in same for _, n in members], LEAST[name]) for name, same in groups.items()]
    assert piece.targets() == expected == [14336, 8192, 4096]


def test_no_target_falls_below_the_bound_however_short_answers_become(terms, batch_of):
    """Without the bound a target that is measured on the policy that it shortens can only shrink."""
    piece = next(term.function for term in terms if term.name == "adaptive_length_target")
    for length in (3000, 1000, 100, 10):
        score(batch_of([group(right, [length], wrong=length) for right in (8, 4, 1)]), terms)
        piece.observe({})
    assert piece.targets() == [4096] * 3


def test_right_answers_within_the_target_of_their_class_have_the_bonus(terms, batch_of):
    piece = next(term.function for term in terms if term.name == "adaptive_length_target")
    score(batch_of([group(8, [3000])]), terms)
    piece.observe({})
    batch = batch_of([group(6, [4096, 4097]), group(1, [15000])])
    score(batch, terms)
    np.testing.assert_array_equal(batch.columns["reward"][:8], [1.5, 1, 1.5, 1, 1.5, 1, 0, 0])
    # Nothing is known of hard prompts yet: every length is within their target.
    np.testing.assert_array_equal(batch.columns["reward"][8:], [1.5, *[0] * 7])
