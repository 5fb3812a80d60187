"""Co-Reward: the vote on a question is the label of its paraphrase, and both train in one update.

The numbers are those of github tmlr-group/Co-rewarding, commit 6c60ea4: Co-rewarding-I/run_corewarding-I.sh,
Co-rewarding-I/verl/trainer/config/ppo_trainer.yaml and Co-rewarding-I/verl/trainer/ppo/ray_trainer.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import PROBES, Response, clipped_gradient, k3_gradient, moved_policy, of_the_group, plan_of

from rlvr.data import Template
from rlvr.records import Task

# The answers in the data are wrong on purpose: no reward reads them.
QUESTION = Task(id="a", prompt="What is 2 + 2?", answer="9", info={"partner": "b"})
PARAPHRASE = Task(id="b", prompt="Two and two make?", answer="9", info={"partner": "a"})
# Five responses to each: the question's majority says 4, the paraphrase's 5.
TO_QUESTION = ["\\boxed{4}", "so \\boxed{4}", "\\boxed{5}", "\\boxed{4}", "The answer is 5."]
TO_PARAPHRASE = ["\\boxed{5}", "It is \\boxed{5}.", "\\boxed{4}", "\\boxed{9}", ""]


@pytest.fixture
def step(recipe_step):
    return recipe_step("co-reward", [QUESTION, PARAPHRASE])


def test_each_majority_labels_the_other_side(step):
    """An answer outside of a box neither votes nor is right: with its vote the paraphrase's majority would stay, and
    the last response to the question would be right."""
    batch = step.score([[Response(text) for text in texts] for texts in (TO_QUESTION, TO_PARAPHRASE)])
    assert batch.column("reward").tolist() == [0, 0, 1, 0, 0] * 2
    np.testing.assert_allclose(batch.column("advantage"), of_the_group([0, 0, 1, 0, 0], 1e-6, True) * 2, rtol=1e-9)


def test_sides_that_agree_make_no_difference(step):
    """Collapse is no way out: where all answer alike there is no advantage."""
    batch = step.score([[Response("\\boxed{4}")] * 4] * 2)
    assert batch.column("reward").tolist() == [1] * 8
    assert not batch.column("advantage").any()


def test_gradient_over_both_sides(step):
    """clip 0.2 on both sides, at most 3 times a negative advantage, the mean over all tokens of both sides, KL 0.005
    (low_var_kl, clamped at 10), no entropy bonus, no weight for the engine's log-probs."""
    logits, old = moved_policy(12)
    reference = np.linspace(0, 1, 12).tolist()
    # The majority of each side is 4, by one member more.
    sides = [
        [Response(text, (1 + number, *more)) for number in range(len(PROBES)) for text in ("\\boxed{4}", "\\boxed{5}")]
        + [Response("\\boxed{4}", (1,))]
        for more in ((), (9,))
    ]
    batch = step.score(sides)
    responses = [response for side in sides for response in side]
    rewards = [float(response.text == "\\boxed{4}") for response in sides[0]]
    ids = [response.ids for response in responses]
    advantages = of_the_group(rewards, 1e-6, unbiased=True) * 2
    # A token of probability 1e-9 is far beyond the clamp at 10, the others are within it.
    kl = 0.005 * k3_gradient(ids, logits, reference, "tokens", bound=10.0)
    expected = clipped_gradient(advantages, ids, logits, old, "tokens", cap=3.0) + kl
    got = step.gradient(batch, logits, old=old, reference=reference)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    engine = np.linspace(1, 0, 12).tolist()
    at_once = clipped_gradient(advantages, ids, logits, logits, "tokens") + kl
    got = step.gradient(batch, logits, reference=reference, engine=engine)
    np.testing.assert_allclose(got, at_once, rtol=1e-9, atol=1e-12)


def test_the_norm_is_cut_where_the_authors_cut_that_of_the_sum_of_both_sides():
    """dp_actor.py: loss = policy_loss_ori + policy_loss_aug, each a mean over its side; grad_clip 1."""
    limit = plan_of("co-reward").config.optim.max_grad_norm
    for norm in (0.01, 0.4, 0.6, 5.0):
        assert 2 * min(limit, norm) == pytest.approx(min(1.0, 2 * norm))


def test_a_system_message_asks_for_the_box():
    """train_original.parquet."""
    template = Template.parse(plan_of("co-reward").config.data.template)
    assert template.system == "Let's think step by step and output the final answer within \\boxed{}."
    assert template.user == "{prompt}"
