"""Shop-R1: the shipped reward of an action, by ten responses, with the certainty of the policy, and the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_written_steps import PROMPT, Response, of_the_group, policy_gradient

from rlvr.records import Task

SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string"}, "name": {"type": "string"}, "text": {"type": "string"}},
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
    ('{"type": "type_and_submit", "name": "search", "text": "red shoes"}', (1, 2, 3), 1.0),
    # Nothing stands beside the object: the authors' rationale is a field of it.
    ('I need shoes.\n{"type": "type_and_submit", "name": "search", "text": "red shoes"}', (4, 1), 0.0),
    ('{"type": "type_and_submit", "name": "search", "text": "shoes"}', (2,), 2 / 3),
    ('{"type": "type_and_submit", "name": "filter", "text": "shoes"}', (3, 3), 1 / 3),
    ('{"type": "click", "name": "search"}', (5,), 1 / 3),
    ('{"type": "type_and_submit"}', (1, 1, 1), 1 / 3),
    ('{"type": "terminate"}', (7, 2), 0.0),
    ('{"name": "search", "text": "red shoes"}', (6,), 0.0),
    ('{"type": "type_and_submit", "name": "search", "text": ', (5, 4), 0.0),
    ("", (1,), 0.0),
]


def certainty(policy, ids):
    """The mean over the tokens of KL(uniform || policy) up to log V, by a forward pass of the model."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([[PROMPT, *ids]])).logits[0, : len(ids)].double()
    return float((logits.logsumexp(-1) - logits.mean(-1)).mean())


@pytest.fixture
def step(recipe_step):
    return recipe_step("shop-r1", [TASK])


def rewards(policy):
    return [share + 0.01 * certainty(policy, ids) for _, ids, share in TEN]


def test_ten_rewards(step, lent_policy):
    batch = step.score([[Response(text, ids) for text, ids, _ in TEN]])
    np.testing.assert_allclose(batch.column("reward"), rewards(lent_policy), rtol=1e-5)
    # The certainty decides between equal actions, of responses of several tokens.
    of_none = [own for own, (_, _, share) in zip(rewards(lent_policy), TEN, strict=True) if share == 0]
    assert len(set(of_none)) == 4


def test_gradient(step, lent_policy):
    got = step.gradient(step.score([[Response(text, ids) for text, ids, _ in TEN]]), LOGITS)
    advantages = of_the_group(rewards(lent_policy))
    expected = policy_gradient(advantages, [ids for _, ids, _ in TEN], LOGITS, "sequences")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
