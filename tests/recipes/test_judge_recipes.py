"""Judges that learn by their verdicts: j1-7b, rm-r1 and spct, on judgements in the form that each asks for."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import (
    Response,
    k3_gradient,
    of_the_group,
    plan_of,
    policy_gradient,
)

from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

A_IS_BETTER = Task(id="t", prompt="Which is better?", answer="A", info={"labels": ["A", "B"]})
FOR_RM_R1 = Task(id="t", prompt="Which is better?", answer="model_a")

# (text, whether it names A as the better one)
FREE_FORM = [
    ("Response B is wordy and wrong about the date.\n\nVerdict: A", True),
    ("Both answer the question. A is more exact.\nSo **A**.", True),
    ("Let me check. B looks right.\nWait, B has the sign wrong.\nTherefore Response A is better.", True),
    ("<think>B might win on style.</think>\nA", True),
    ("My verdict is \\boxed{A}.", True),
    ("A gives no source.\nVerdict: B", False),
    ("Wait, A has the sign wrong.\nResponse B is better.", False),
    ("Both are good, A or B.", False),
    ("I cannot tell which one is better.", False),
    ("", False),
]


@pytest.mark.parametrize(("slug", "right", "wrong"), [("j1-7b", 1.0, 0.0), ("spct", 1.0, -1.0)])
def test_ten_judgements(recipe_step, slug, right, wrong):
    """J1 pays for the verdict, SPCT pays 1 or -1; the reasoning before the verdict has no reward."""
    got = recipe_step(slug, [A_IS_BETTER]).rewards([text for text, _ in FREE_FORM])
    assert got == [right if better else wrong for _, better in FREE_FORM]


def lm_as_judge(text, winner):
    """The reward of RM-R1-UIUC/RM-R1@d4c2542 rm_r1/verl/utils/reward_score/lm_as_judge.py."""
    end = text[-80:]
    tags = {name: f"<answer>[[{name[-1].upper()}]]</answer>" in end for name in ("model_a", "model_b")}
    other = {"model_a": "model_b", "model_b": "model_a"}[winner]
    return 1.0 if tags[winner] and not tags[other] else -1.0


RM_R1 = [
    "<type>Chat</type>\n<rubric>Accuracy 60 %, tone 40 %</rubric>\n<eval>A is exact.</eval>\n<answer>[[A]]</answer>",
    "<type>Reasoning</type>\n<solution>2 + 2 = 4</solution>\nChatbot A says 4.\n<answer>[[A]]</answer>",
    "<type>Reasoning</type>\n<solution>2 + 2 = 5</solution>\nChatbot B says 5.\n<answer>[[B]]</answer>",
    "<answer>[[A]]</answer>",
    "Chatbot A is better than Chatbot B.",
    "<answer>A</answer>",
    "[[A]] or [[B]]: both are good.",
    "<answer>[[C]]</answer>",
    "<type>Chat</type>\n<rubric>Accuracy</rubric>\n<eval>[[A]] is exact, [[B]] is not.</eval>\n<answer>[[B]]</answer>",
    "",
]


@pytest.mark.parametrize("winner", ["model_a", "model_b"])
def test_ten_judgements_of_rm_r1(recipe_step, winner):
    """1 for the right verdict and -1 for all else, with rubrics or without: there is no reward for the format."""
    step = recipe_step("rm-r1", [Task(id="t", prompt="Which is better?", answer=winner)])
    got = step.rewards(RM_R1)
    assert got == [lm_as_judge(text, winner) for text in RM_R1]
    assert {1.0, -1.0} == set(got)


@pytest.mark.parametrize(
    "text",
    [
        "So the answer is [[A]]",
        "<answer>[[A]]</answer>\n" + "and so on " * 12,
        "<answer>[[B]]</answer> <answer>[[A]]</answer>",
        "The better one is model_a.",
        "<answer>[[A]]</answer>\n<answer>[[B]]</answer>",
    ],
)
def test_a_verdict_that_the_authors_do_not_read_is_wrong(recipe_step, text):
    for winner in ("model_a", "model_b"):
        task = Task(id="t", prompt="Which is better?", answer=winner)
        assert recipe_step("rm-r1", [task]).rewards([text]) == [lm_as_judge(text, winner)] == [-1.0]


def test_the_end_of_the_turn_is_counted_in_the_80_characters(recipe_step):
    """The authors' text ends in `<|im_end|>`, ours before it. One character decides on both sides."""
    texts = ["<answer>[[A]]</answer>" + "." * after for after in range(40, 60)]
    got = recipe_step("rm-r1", [FOR_RM_R1]).rewards(texts)
    assert got == [lm_as_judge(text + "<|im_end|>", "model_a") for text in texts]
    assert got == [1.0] * 9 + [-1.0] * 11


GROUPS = {
    # slug -> (task, a right judgement, a wrong one)
    "j1-7b": (A_IS_BETTER, FREE_FORM[0][0], FREE_FORM[5][0]),
    "spct": (A_IS_BETTER, FREE_FORM[0][0], FREE_FORM[5][0]),
    "rm-r1": (FOR_RM_R1, RM_R1[0], RM_R1[2]),
}


@pytest.mark.parametrize(("slug", "weight"), [("j1-7b", 0.001), ("spct", 0.08)])
def test_gradient_of_a_two_token_policy(recipe_step, slug, weight):
    """GRPO's gradient of right and wrong judgements and the KL's to the policy after the cold start. The policy has
    moved away from it by 2 nats of log-odds, where the larger weight of SPCT shows."""
    task, right, wrong = GROUPS[slug]
    size = plan_of(slug).config.rollout.group_size
    ids = [(1, 0), (1,), (0, 0, 1)] + [(0,)] * (size - 3)
    texts = [right, right, wrong] + [wrong] * (size - 3)
    step = recipe_step(slug, [task])
    batch = step.score([[Response(text, own) for text, own in zip(texts, ids, strict=True)]])
    logits, reference = [0.0, 1.3], [0.0, -0.7]
    got = step.gradient(batch, logits, reference=reference)
    reward = policy_gradient(of_the_group([1.0, 1.0] + [0.0] * (size - 2)), ids, logits, "sequences")
    # 1 and -1 have the same standardised advantages as 1 and 0, up to the 1e-4 beside the deviation.
    np.testing.assert_allclose(got, reward + weight * k3_gradient(ids, logits, reference), rtol=3e-4)


def test_gradient_of_rm_r1_is_that_of_verl(recipe_step):
    """1 and -1 by the unbiased deviation with 1e-6, over all tokens, and the KL over all tokens."""
    size = plan_of("rm-r1").config.rollout.group_size
    ids = [(1, 0), (1,), (0, 0, 1)] + [(0,)] * (size - 3)
    texts = [RM_R1[0], RM_R1[0]] + [RM_R1[2]] * (size - 2)
    step = recipe_step("rm-r1", [FOR_RM_R1])
    batch = step.score([[Response(text, own) for text, own in zip(texts, ids, strict=True)]])
    logits, reference = [0.0, 1.3], [0.0, -0.7]
    advantages = of_the_group([lm_as_judge(text, "model_a") for text in texts], 1e-6, unbiased=True)
    expected = policy_gradient(advantages, ids, logits, "tokens")
    expected += 0.001 * k3_gradient(ids, logits, reference, "tokens")
    np.testing.assert_allclose(step.gradient(batch, logits, reference=reference), expected, rtol=1e-9)


def test_the_kl_of_spct_holds_a_drifted_policy_back(recipe_step):
    """A group without a difference has the KL's gradient alone, which points back to the cold start: 80 times as strong
    as that of the other judges."""
    forces = {}
    for slug, (task, right, _) in GROUPS.items():
        step = recipe_step(slug, [task])
        batch = step.score([[Response(right, (1,)), Response(right, (0,))]])
        forces[slug] = step.gradient(batch, [0.0, 1.3], reference=[0.0, -0.7])[1]
    assert forces["j1-7b"] == forces["rm-r1"] > 0
    assert forces["spct"] == pytest.approx(80 * forces["j1-7b"], rel=1e-12)


@pytest.mark.parametrize("slug", sorted(GROUPS))
def test_reinforcement_comes_after_imitation_of_judgements(recipe_step, slug):
    assert [plan.kind for plan in stage_plans(find_paper(slug).config)] == ["sft", "grpo"]
    judgement = Task(id="t", prompt="Which is better?", answer="A", demonstration="abba", info={"labels": ["A", "B"]})
    batch = recipe_step(slug, [judgement], "sft").demonstrations()
    # The reasoning is learned with the verdict: each token after the prompt, and the end.
    (weights,) = batch.tokens("weight/likelihood")
    assert weights.tolist() == [0, 1, 1, 1, 1, 1]


@pytest.mark.xfail(
    strict=True,
    reason="SPCT scores each response and pays where the best one has the highest score (Liu et al. 2025, arXiv "
    "2504.02495); the recipe, which is in part, asks for the name of the better one.",
)
def test_pointwise_scores_are_a_verdict(recipe_step):
    texts = ["Principle: accuracy.\nScores: \\boxed{8, 5}", "Principle: accuracy.\nScores: \\boxed{3, 5}"]
    assert recipe_step("spct", [A_IS_BETTER]).rewards(texts) == [1.0, -1.0]
