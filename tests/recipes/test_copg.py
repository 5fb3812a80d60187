"""CoPG: the gradient of the recipe on pairs of responses, by a loop.

Contrastive Policy Gradient (Flet-Berliac et al. 2024, arXiv 2406.19185); beta is chosen here.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hand_written_steps import Response, score_function, softmax

from rlvr.recipes.copg.copg import ContrastiveLoss
from rlvr.records import Task
from sequence_cases import as_batch, responses

BETA = 0.1
TASKS = [Task(id=f"t{i}", prompt=f"What is {i} + 2?", answer="4") for i in range(2)]
RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"
LOGITS, REFERENCE = [0.0, 0.9, -0.4], [0.3, -0.6, 0.2]
GROUPS = [
    [(RIGHT, (1, 1)), (WRONG, (2,)), (WRONG, (1, 0)), (RIGHT, (0,))],
    [(RIGHT, (1,)), (RIGHT, (2, 2, 0)), (RIGHT, (0,)), (WRONG, (2, 1))],
]
RESPONSES = [
    (RIGHT, 1.0),
    ("It is \\boxed{4}.", 1.0),
    ("<think> so </think> \\boxed{4}", 1.0),
    ("\\boxed{2} no, \\boxed{4}", 1.0),
    ("The answer is 4.", 1.0),
    (WRONG, 0.0),
    ("\\boxed{4} no, \\boxed{5}", 0.0),
    ("It is four or five", 0.0),
    ("\\boxed{}", 0.0),
    ("", 0.0),
]


def test_ten_responses(recipe_step):
    """Raw scores: neither centred nor scaled."""
    got = recipe_step("copg", TASKS[:1]).rewards([text for text, _ in RESPONSES])
    assert got == [reward for _, reward in RESPONSES]


def log_ratio(ids, logits):
    return sum(math.log(softmax(logits)[token] / softmax(REFERENCE)[token]) for token in ids)


def by_pairs(groups, logits):
    """The mean over groups and their pairs of -(R_b(y) - R_b(y')) (grad log pi(y) - grad log pi(y')), R_b = R - beta
    log pi / pi_reference."""
    result = np.zeros(len(logits))
    for members in groups:
        pairs = list(itertools.combinations(members, 2))
        for (one, ids), (other, others) in pairs:
            gain = float(one == RIGHT) - float(other == RIGHT)
            drift = log_ratio(ids, logits) - log_ratio(others, logits)
            direction = score_function(ids, logits) - score_function(others, logits)
            result -= (gain - BETA * drift) * direction / len(pairs) / len(groups)
    return result


@pytest.mark.parametrize("old", [None, [1.0, -1.0, 0.5]])
def test_gradient(recipe_step, old):
    """Whoever sampled: there are no importance weights."""
    step = recipe_step("copg", TASKS)
    batch = step.score([[Response(text, ids) for text, ids in members] for members in GROUPS])
    got = step.gradient(batch, LOGITS, old=old, reference=REFERENCE)
    np.testing.assert_allclose(got, by_pairs(GROUPS, LOGITS), rtol=1e-9, atol=1e-12)


def test_where_it_comes_to_rest(recipe_step):
    """A right and a wrong token: at log-odds of 1 / beta beyond the reference's the pair has no gradient, below it the
    right one gains, above it loses. The gradient of a reward alone would never end."""
    step = recipe_step("copg", TASKS[:1])
    batch = step.score([[Response(RIGHT, (0,)), Response(WRONG, (1,))]])

    def slope(log_odds):
        return step.gradient(batch, [log_odds, 0.0], reference=[0.5, 0.0])[0]

    assert slope(0.5 + 1 / BETA) == pytest.approx(0, abs=1e-9)
    assert slope(0.5 + 0.9 / BETA) < 0 < slope(0.5 + 1.1 / BETA)


def test_at_beta_0_copg_is_twice_rloo():
    s = responses(1, [1.0, 0.0, 0.3, 0.9], [0, 0, 0, 0])
    batch = as_batch(s)
    (gradient,) = torch.autograd.grad(ContrastiveLoss(0.0).sequence_losses(batch).sum(), batch.logprobs)
    reward = np.asarray(s.reward)
    leave_one_out = reward - (reward.sum() - reward) / 3
    np.testing.assert_allclose(gradient.numpy(), -2 * leave_one_out / 4, rtol=1e-9)
