"""PROF: half of each group is removed by its process scores, and right and wrong ones are evened out.

The filter is that of github amazon-science/PROF-GRPO, commit 8164ec2, prof_grpo/prof_grpo_both/prof_ray_trainer.py
(`compute_verify_step_level_score`, `filter_trajectories`), and the scores those of
prof_grpo/verl/workers/reward_model/prof_dp_rm.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group
from scores_by_hand import step_scores

from rlvr.records import Task

TASK = Task(id="t", prompt="1+1=", answer="2")


def text_of(number, right, steps=2):
    return "\n\n".join([f"Step {number}.{step}." for step in range(steps - 1)] + [f"\\boxed{{{2 if right else 3}}}"])


def kept_by_the_authors(means, counts, right, remove=4):
    """`filter_trajectories`: by the sign of the outcome times the mean less the batch's, and 10 less for few or many
    steps; the lowest go."""
    value = [
        2 * (mean - np.mean(means)) * (1 if good else -1) - 10 * (count < 2 or count > 30)
        for mean, count, good in zip(means, counts, right, strict=True)
    ]
    good = sorted((i for i in range(len(value)) if right[i]), key=value.__getitem__)
    bad = sorted((i for i in range(len(value)) if not right[i]), key=value.__getitem__)
    of_good = min(remove, round((len(good) - len(bad) + remove) / 2))
    if of_good <= 0:
        return {*good, *bad[remove:]}
    of_good = min(of_good, len(good))
    return {*good[of_good:], *bad[remove - of_good :]}


GROUPS = {
    "six are right": (True, True, True, True, True, True, False, False),
    "half are right": (True, False) * 4,
    "one is right": (False, False, True, False, False, False, False, False),
    "all are right": (True,) * 8,
    "none is right": (False,) * 8,
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_filter_is_that_of_the_authors(recipe_step, tmp_path, name):
    right = GROUPS[name]
    step = recipe_step("prof", [TASK], models=tmp_path)
    # The third has one step and the sixth 31: they go before others of their kind.
    counts = [2, 3, 1, 2, 4, 31, 3, 2]
    texts = [text_of(i, good, count) for i, (good, count) in enumerate(zip(right, counts, strict=True))]
    means = [step_scores(tmp_path / "prm", TASK.prompt, text.split("\n\n"), "<extra_0>").mean() for text in texts]
    assert np.ptp(means) > 0.02
    batch = step.score([[Response(text) for text in texts]])
    kept = [rollout.member for rollout in batch.rollouts]
    assert set(kept) == kept_by_the_authors(means, counts, right)
    # The process scores are no reward, and the advantages are those of what is left.
    rewards = [float(right[member]) for member in kept]
    assert batch.column("reward").tolist() == rewards
    expected = of_the_group(rewards, 1e-6, unbiased=True)
    np.testing.assert_allclose(batch.column("advantage"), expected, atol=1e-9)


def test_a_right_answer_with_poor_steps_does_not_train(recipe_step, tmp_path):
    """The case of the paper: right by chance. Of six right ones four stay, those with the best steps."""
    right = GROUPS["six are right"]
    step = recipe_step("prof", [TASK], models=tmp_path)
    texts = [text_of(i, good) for i, good in enumerate(right)]
    means = [step_scores(tmp_path / "prm", TASK.prompt, text.split("\n\n"), "<extra_0>").mean() for text in texts]
    batch = step.score([[Response(text) for text in texts]])
    kept = {rollout.member for rollout in batch.rollouts}
    best = sorted(range(6), key=means.__getitem__)[-2:]
    assert kept == {*best, 6, 7}
