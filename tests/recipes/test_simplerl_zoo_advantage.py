"""SimpleRL-Zoo: correctness alone is rewarded, whatever the form of the response."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task
from rlvr.rewards import build_terms, score

RESPONSES = [
    # (text, right)
    ("It is \\boxed{4}.", True),
    ("\\boxed{4}", True),
    ("<think> so </think> <answer> \\boxed{4} </answer>", True),
    ("Let me check: 5? No. \\boxed{4}", True),
    ("so " * 200 + "\\boxed{4}", True),
    ("It is \\boxed{5}.", False),
    ("<think> so </think> <answer> \\boxed{5} </answer>", False),
    ("I do not know.", False),
    ("", False),
    ("so " * 200, False),
]


def test_a_right_answer_has_one_and_any_other_response_nothing(make_rollout):
    paper = find_paper("simplerl-zoo")
    verifier = registry.build("verifier", paper.config.verifier)
    rollouts = []
    for member, (text, _) in enumerate(RESPONSES):
        rollout = make_rollout([9, 1], prompt=1, member=member, text=text)
        rollout.verdicts["math"] = verifier.verify(Task("t", "2+2?", "4"), text)
        rollouts.append(rollout)
    batch = Batch(rollouts)
    score(batch, build_terms(paper.config.rewards))
    right = np.asarray([right for _, right in RESPONSES])
    np.testing.assert_array_equal(batch.column("reward"), right)
    # Half are right: the deviation with n - 1 is sqrt(10 / 4 / 9), and every right answer has the same advantage.
    advantage = registry.build("advantage", paper.config.algorithm.advantage)(batch)
    assert advantage == pytest.approx(np.where(right, 0.5, -0.5) / (10 / 4 / 9) ** 0.5, rel=1e-5)
