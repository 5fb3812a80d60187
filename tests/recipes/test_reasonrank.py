"""ReasonRank: the multi-view ranking reward of responses, computed by its three definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import BEFORE, ENGINE, MOVED, Response, clipped_gradient, k3_gradient, of_the_group

from reward_helpers import make_batch, reward_of
from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task
from rlvr.rewards import build_terms, score

REFERENCE = ["c", "a", "d", "b"]
RELEVANT = {"c", "d"}


def reward(order):
    """ranking.py of the authors: binary NDCG@10 + 0.2 recall@10 + 0.1 RBO with p = 1."""
    gain = sum(1 / math.log2(place + 2) for place, one in enumerate(order[:10]) if one in RELEVANT)
    ideal = sum(1 / math.log2(place + 2) for place in range(len(RELEVANT)))
    found = len(RELEVANT & set(order[:10])) / len(RELEVANT)
    overlaps = [len(set(order[:depth]) & set(REFERENCE[:depth])) / depth for depth in range(1, len(REFERENCE) + 1)]
    return gain / ideal + 0.2 * found + 0.1 * sum(overlaps) / len(overlaps)


def formed(*order):
    return f"<think> so </think> <answer> {' > '.join(f'[{one}]' for one in order)} </answer>"


RESPONSES = [
    (formed("c", "a", "d", "b"), reward("cadb")),
    (formed("c", "d", "a", "b"), reward("cdab")),
    (formed("a", "b", "c", "d"), reward("abcd")),
    (formed("b", "a", "d", "c"), reward("badc")),
    (formed("d", "c", "b", "a"), reward("dcba")),
    # A list that leaves passages out has 0, whatever stands in it.
    (formed("c", "d"), 0.0),
    (formed("c"), 0.0),
    ("<think> so </think> <answer> none of them </answer>", 0.0),
    # Without the form: -1, the best ranking or not.
    ("[c] > [a] > [d] > [b]", -1.0),
    ("", -1.0),
]


def test_ten_responses(make_rollout):
    paper = find_paper("reasonrank")
    verifier = registry.build("verifier", paper.config.verifier)
    grades = {one: int(one in RELEVANT) for one in "abcd"}
    task = Task("t", "p", grades, info={"ranking": REFERENCE})
    assert verifier.check_task(task) is None
    rollouts = []
    for member, (text, _) in enumerate(RESPONSES):
        rollout = make_rollout([9, 1], prompt=1, member=member, text=text, task=task)
        rollout.verdicts["ranking"] = verifier.verify(task, text)
        rollouts.append(rollout)
    batch = Batch(rollouts)
    score(batch, build_terms(paper.config.rewards))
    np.testing.assert_allclose(batch.column("reward"), [value for _, value in RESPONSES], atol=1e-9)


def test_the_reference_order_is_best_only_by_its_overlap():
    """NDCG prefers the two relevant passages first; the overlap with the reference is worth less than that."""
    assert reward("cdab") > reward("cadb") > reward("acdb") > reward("abcd")
    assert reward("cdab") < 1.3 == pytest.approx(1 + 0.2 + 0.1)


@pytest.mark.parametrize("place", [1, 6, 10, 11])
def test_ten_places_count(recipe_step, place):
    """Of twelve passages one is relevant: NDCG@10 and recall@10 see it down to the tenth place."""
    names = list("abcdefghijkl")
    order = [*names[1:place], "a", *names[place:]]
    task = Task("t", "p", {one: int(one == "a") for one in names}, info={"ranking": names})
    overlaps = [len(set(order[:depth]) & set(names[:depth])) / depth for depth in range(1, 13)]
    seen = 1 / math.log2(place + 1) + 0.2 if place <= 10 else 0.0
    got = recipe_step("reasonrank", [task]).rewards([formed(*order)])
    assert got == pytest.approx([seen + 0.1 * sum(overlaps) / 12])


@pytest.mark.parametrize("moved", [False, True])
def test_gradient_of_a_step(recipe_step, moved):
    """GRPO with torch's deviation, 0.2 on both sides and a dual clip of 3, KL 0.001;
    a mean over tokens of micro-batches of one response (ppo_micro_batch_size_per_gpu of train_grpo.sh) is that of each
    response; nothing of the engine's log-probs."""
    task = Task("t", "p", {one: int(one in RELEVANT) for one in "abcd"}, info={"ranking": REFERENCE})
    ids = [(0, 1, 2, 3), (1,), (2, 1), (0, 0, 3), (3, 2), (0,), (2,), (1, 1), (3,), (2, 0, 3, 1)]
    step = recipe_step("reasonrank", [task])
    batch = step.score([[Response(text, own) for (text, _), own in zip(RESPONSES, ids, strict=True)]])
    advantages = of_the_group([value for _, value in RESPONSES], 1e-6, unbiased=True)
    got = step.gradient(batch, MOVED, old=BEFORE if moved else None, reference=BEFORE, engine=ENGINE)
    before = BEFORE if moved else MOVED
    policy = clipped_gradient(advantages, ids, MOVED, before, "sequences", cap=3.0)
    np.testing.assert_allclose(got, policy + 0.001 * k3_gradient(ids, MOVED, BEFORE), rtol=1e-6)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_the_overlap_of_rankings():
    """Given b, a, c and p 1/2: depths weigh 1, 1/2, 1/4 of 7/4."""
    task = {"g": Task(id="g", prompt="?", answer={"a": 1, "b": 2, "c": 0}, info={})}
    answers = ["[b] > [a] > [c]", "a, b, c", "c", None, "b b a"]
    batch = make_batch([0.5] * 5 + [None], answers=[*answers, None], groups=["g"] * 6, tasks=task)
    expected = [
        1,
        (0 + 1 / 2 + 1 / 4) / 1.75,
        (1 / 4) * (1 / 3) / 1.75,
        0,
        (1 + 1 / 2 + 1 / 4 * 2 / 3) / 1.75,
        math.nan,
    ]
    close(reward_of(batch, {"name": "rank_overlap", "p": 0.5}), expected)
    given = {"g": Task(id="g", prompt="?", info={"order": ["c", "a"]})}
    close(
        reward_of(make_batch([0.5], answers=["c"], tasks=given), {"name": "rank_overlap", "p": 0.5, "given": "order"}),
        [5 / 6],
    )
