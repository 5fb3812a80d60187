"""Shop-R1: the shipped reward of an action, by ten responses, with the certainty of the policy, and the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_written_steps import PROMPT, Response, k3_gradient, of_the_group, policy_gradient

from rlvr.recipes.shop_r1.shop_action import ShopActionVerifier
from rlvr.records import Task
from rlvr.stages.grpo import scoring

TASK = Task(
    id="t",
    prompt="The page of a shop.",
    answer={"type": "type_and_submit", "name": "search_input", "text": "red running shoes"},
)
LOGITS = [0.3, -0.2, 0.5, 0.1, 0.0, 0.2, -0.4, 0.6]


def said(action, rationale=r"I need \"red\" shoes."):
    return f'{{"rationale": "{rationale}", "action": {action}}}'


RIGHT = '{"type": "type_and_submit", "name": "search_input", "text": "red running shoes"}'
# (response, tokens, v(a) of table 1: format, type, fields, ROUGE-L of fields)
TEN = [
    (said(RIGHT), (1, 2, 3), 0.5 + 0.3 + 0.2 + 0.1 + 1000),
    # Nothing stands beside the object.
    ("I need shoes.\n" + said(RIGHT), (4, 1), 0.0),
    # Four words, three of which are the three of the answer: F1 of 3/4 and 1 is 6/7, above 0.75.
    (
        said(RIGHT.replace("red running", "my red running")),
        (2,),
        0.5 + 0.3 + 0.2 + 0.1 + 1000 * 6 / 7,
    ),
    # One word of one, of three: F1 1/2, which is not above 0.75; the name is another one.
    (said('{"type": "type_and_submit", "name": "filter", "text": "shoes"}'), (3, 3), 0.5 + 0.3 + 0.2),
    (said('{"type": "type_and_submit", "name": "search_input", "text": " "}'), (5,), 0.5 + 0.3 + 0.1 + 0.1),
    (said('{"type": "click", "name": "search_input"}'), (1, 5, 1), 0.5),
    (said('{"type": "terminate"}', "Enough."), (7, 2, 4, 4), 0.5),
    (RIGHT, (6,), 0.0),
    (said(RIGHT)[:-2], (5, 4), 0.0),
    ("", (1,), 0.0),
]


def ends_of(text, ids):
    """The tokens are made up: each has an equal share of the text."""
    return [round((number + 1) * len(text) / len(ids)) for number in range(len(ids))]


def certainty(policy, text, ids):
    """The mean over the rationale's tokens of KL(uniform || policy) up to log V, by a forward pass of the model; 0
    without a rationale."""
    begin = text.find('"rationale": "')
    if begin < 0:
        return 0.0
    begin += len('"rationale": "')
    end = next(place for place in range(begin, len(text)) if text[place] == '"' and text[place - 1] != "\\")
    ends = ends_of(text, ids)
    own = [number for number, past in enumerate(ends) if past > begin and (ends[number - 1] if number else 0) < end]
    with torch.no_grad():
        logits = policy.model(torch.tensor([[PROMPT, *ids]])).logits[0, : len(ids)].double()
    return float((logits.logsumexp(-1) - logits.mean(-1))[own].mean())


@pytest.fixture
def step(recipe_step, monkeypatch):
    def char_ends(_, rollout):
        return np.asarray([-1, *ends_of(rollout.text, rollout.token_ids[1:])])

    monkeypatch.setattr(scoring, "char_ends", char_ends)
    return recipe_step("shop-r1", [TASK], stage="reinforcement")


def rewards(policy):
    return [action + 0.005 * certainty(policy, text, ids) for text, ids, action in TEN]


def test_ten_rewards(step, lent_policy):
    batch = step.score([[Response(text, ids) for text, ids, _ in TEN]])
    np.testing.assert_allclose(batch.column("reward"), rewards(lent_policy), rtol=1e-5)
    # Exact actions are what the verdict counts, as the paper's accuracy does.
    assert [rollout.verdict.score for rollout in batch.rollouts] == [1, *[0] * 9]


@pytest.mark.parametrize(
    ("wanted", "action", "expected"),
    [
        ({"type": "terminate"}, '{"type": "terminate"}', (0.8, 1)),
        ({"type": "terminate"}, '{"type": "click", "name": "buy"}', (0.5, 0)),
        ({"type": "click", "name": "buy now"}, '{"type": "click", "name": "buy now"}', (1001.0, 1)),
        ({"type": "click", "name": "buy now"}, '{"type": "click", "name": "now"}', (1.0, 0)),
        ({"type": "click", "name": "buy now"}, '{"type": "click", "name": ""}', (0.8, 0)),
        ({"type": "click", "name": "buy now"}, '{"type": "click", "name": ["buy now"]}', (0.8, 0)),
    ],
)
def test_easy_actions_have_no_long_text(wanted, action, expected):
    verifier = ShopActionVerifier()
    verdict = verifier.verify(Task("t", "?", wanted), said(action))
    assert (verdict.scores["reward"], verdict.score) == (pytest.approx(expected[0]), expected[1])
    assert verdict.scores["reward"] == pytest.approx(
        sum(value for name, value in verdict.scores.items() if name != "reward")
    )


def test_an_answer_that_is_no_action_is_refused():
    verifier = ShopActionVerifier()
    assert "no action of the type" in verifier.check_task(Task("t", "?", "click"))
    assert "the action's name is None" in verifier.check_task(Task("t", "?", {"type": "click"}))
    assert "ROUGE reads no other" in verifier.check_task(Task("t", "?", {"type": "click", "name": "\u8d2d\u4e70"}))
    assert verifier.check_task(TASK) is None


def test_gradient(step, lent_policy):
    reference = [0.1, 0.4, -0.3, 0.2, 0.5, -0.1, 0.0, 0.3]
    got = step.gradient(step.score([[Response(text, ids) for text, ids, _ in TEN]]), LOGITS, reference=reference)
    responses = [ids for _, ids, _ in TEN]
    expected = policy_gradient(of_the_group(rewards(lent_policy)), responses, LOGITS, "tokens")
    expected += 0.001 * k3_gradient(responses, LOGITS, reference, "tokens")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
