"""LASER-D: the target length of each class of difficulty, chosen as the authors choose it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rlvr.components import Monitoring
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Verdict
from rlvr.rewards import RewardContext, bind, build_terms, score, show_monitored

CANDIDATES = range(4096, 16384 + 1024, 1024)
LEAST = {"hard": 1, "medium": 2, "easy": 5}
"""int(8 / 3) and int(16 / 3) of groups of 8"""


@pytest.fixture
def terms():
    config = find_paper("laser-002-343").config
    return bind(build_terms(config.rewards), RewardContext(config, []))


@pytest.fixture
def piece(terms):
    return next(term.function for term in terms if term.name == "adaptive_length_target")


@pytest.fixture
def batch_of(make_rollout):
    """`batch_of([[(right, length), ...], ...])`: responses with a box after the thinking."""

    def make(groups):
        rollouts = []
        for g, members in enumerate(groups):
            for m, (right, length) in enumerate(members):
                rollout = make_rollout([9] + [1] * length, prompt=1, group=f"g{g}", member=m)
                rollout.text = "so </think> \\boxed{2}"
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


MEASURED = {
    "hard": [group(1, [9000], wrong=14000), group(2, [12000, 13000], wrong=9000)],
    "medium": [group(4, [6000, 7000, 8000, 9000], wrong=7500)],
    "easy": [group(8, [3000, 5000, 6000, 7000])],
}


def measure(terms, piece, batch):
    show_monitored(batch, terms, piece.monitoring)


def test_the_targets_are_the_authors(terms, piece, batch_of):
    assert piece.targets() == [16384] * 3
    measure(terms, piece, batch_of([members for same in MEASURED.values() for members in same]))
    expected = [target_of([n for members in same for _, n in members], LEAST[name]) for name, same in MEASURED.items()]
    assert piece.targets() == expected == [14336, 8192, 4096]


def test_targets_follow_the_monitoring_set_alone_each_time_anew(terms, piece, batch_of):
    """Answers that train do not move them, or they would follow the policy that they shorten at every step."""
    assert piece.monitoring == Monitoring(every=20, tasks=500, samples=8)
    measure(terms, piece, batch_of(MEASURED["easy"]))
    assert piece.targets() == [16384, 16384, 4096]
    score(batch_of([group(4, [100], wrong=100), group(1, [100], wrong=100)]), terms)
    piece.observe({})
    assert piece.targets() == [16384, 16384, 4096]
    measure(terms, piece, batch_of(MEASURED["medium"]))
    assert piece.targets() == [16384, 8192, 16384]


def test_a_resumed_run_has_the_measured_targets(terms, piece, batch_of):
    measure(terms, piece, batch_of([members for same in MEASURED.values() for members in same]))
    config = find_paper("laser-002-343").config
    other = bind(build_terms(config.rewards), RewardContext(config, []))[-1].function
    other.load_state_dict(json.loads(json.dumps(piece.state_dict())))
    assert other.targets() == piece.targets() != [16384] * 3


def test_no_target_falls_below_the_bound_however_short_answers_become(terms, piece, batch_of):
    for length in (3000, 1000, 100, 10):
        measure(terms, piece, batch_of([group(right, [length], wrong=length) for right in (8, 4, 1)]))
    assert piece.targets() == [4096] * 3


def test_right_answers_within_the_target_of_their_class_have_the_bonus(terms, piece, batch_of):
    measure(terms, piece, batch_of([group(8, [3000])]))
    batch = batch_of([group(6, [4096, 4097]), group(1, [15000])])
    score(batch, terms)
    np.testing.assert_array_equal(batch.columns["reward"][:8], [1.5, 1, 1.5, 1, 1.5, 1, -0.5, -0.5])
    # Nothing is known of hard prompts yet: every length is within their target.
    np.testing.assert_array_equal(batch.columns["reward"][8:], [1.5, *[-0.5] * 7])


TEXTS = [
    # (text, right, the authors' reward without the bonus)
    ("so </think> it is \\boxed{\\frac{1}{2}}.", True, 1.0),
    ("so </think> it is \\boxed{3}.", False, -0.5),
    ("so </think> it is 1/2.", True, -1.0),
    ("so it is \\boxed{\\frac{1}{2}}", True, -1.0),
    ("so \\boxed{1/2} </think> it is 1/2", True, -1.0),
    ("so </think> it is \\boxed{1/2", False, -1.0),
    ("so </think> and so </think> \\boxed{1/2}", True, -1.0),
    ("", False, -1.0),
]


def test_a_wrong_answer_costs_a_half_and_one_without_a_box_a_whole(terms, batch_of):
    batch = batch_of([[(right, 5000) for _, right, _ in TEXTS]])
    for rollout, (text, _, _) in zip(batch.rollouts, TEXTS, strict=True):
        rollout.text = text
    score(batch, terms)
    np.testing.assert_array_equal(batch.columns["reward/correctness"], [reward for _, _, reward in TEXTS])
    # One of eight is right in its form: a hard prompt, with the bonus.
    np.testing.assert_array_equal(batch.columns["reward"], [1.5, *(reward for _, _, reward in TEXTS[1:])])
