"""Shop-R1: the shipped reward of an action, by ten responses, with the certainty of the policy, and the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_written_steps import PROMPT, Response, of_the_group, policy_gradient

from rlvr.records import Task
from rlvr.stages.grpo import scoring

SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {name: {"type": "string"} for name in ("rationale", "type", "name", "text")},
}
TASK = Task(
    id="t",
    prompt="The page of a shop.",
    answer={"type": "type_and_submit", "name": "search", "text": "red shoes"},
    info={"schema": SCHEMA},
)
LOGITS = [0.3, -0.2, 0.5, 0.1, 0.0, 0.2, -0.4, 0.6]
# (response, tokens, the share of the answer's three fields that it has)
TEN = [
    (
        '{"rationale": "I need \\"red\\" shoes.", "type": "type_and_submit", "name": "search", "text": "red shoes"}',
        (1, 2, 3),
        1.0,
    ),
    # Nothing stands beside the object: the rationale is a field of it.
    ('I need shoes.\n{"type": "type_and_submit", "name": "search", "text": "red shoes"}', (4, 1), 0.0),
    ('{"type": "type_and_submit", "name": "search", "text": "shoes"}', (2,), 2 / 3),
    ('{"type": "type_and_submit", "name": "filter", "text": "shoes"}', (3, 3), 1 / 3),
    ('{"type": "click", "name": "search"}', (5,), 1 / 3),
    ('{"type": "type_and_submit", "rationale": "The shop has some."}', (1, 5, 1), 1 / 3),
    ('{"type": "terminate", "rationale": "Enough."}', (7, 2, 4, 4), 0.0),
    ('{"name": "search", "text": "red shoes"}', (6,), 0.0),
    ('{"type": "type_and_submit", "name": "search", "text": ', (5, 4), 0.0),
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
    return recipe_step("shop-r1", [TASK])


def rewards(policy):
    return [share + 0.01 * certainty(policy, text, ids) for text, ids, share in TEN]


def test_ten_rewards(step, lent_policy):
    batch = step.score([[Response(text, ids) for text, ids, _ in TEN]])
    np.testing.assert_allclose(batch.column("reward"), rewards(lent_policy), rtol=1e-5)
    # The certainty decides between equal actions with a rationale.
    of_a_third = [own for own, (_, _, share) in zip(rewards(lent_policy), TEN, strict=True) if share == 1 / 3]
    assert len(set(of_a_third)) == 2


def test_gradient(step, lent_policy):
    got = step.gradient(step.score([[Response(text, ids) for text, ids, _ in TEN]]), LOGITS)
    advantages = of_the_group(rewards(lent_policy))
    expected = policy_gradient(advantages, [ids for _, ids, _ in TEN], LOGITS, "sequences")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
