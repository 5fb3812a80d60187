"""PACS: the score of a response is a classifier of its outcome, and it acts at the setting that the recipe ships."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_written_steps import BEFORE, ENGINE, MOVED, TWO_AND_TWO, Response, score_function, softmax

from rlvr import registry
from rlvr.losses import SequenceBatch
from rlvr.recipes.papers import find_paper
from rlvr.recipes.smoke import smoke, smoke_config
from rlvr.records import Task


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def loss_of_two_tokens(theta, old, right, wrong):
    """The authors' loss of one group under a policy of two tokens, of which A (log-odds theta) is right and B is wrong.

    PACS, src/pacs/pacs_core_algos.py: reward method 1 with beta 1, leave-one-out centring, weights by question.
    """
    size = right + wrong
    score_right = math.log(sigmoid(theta)) - math.log(sigmoid(old))
    score_wrong = math.log(sigmoid(-theta)) - math.log(sigmoid(-old))
    total = right * score_right + wrong * score_wrong
    centred_right = score_right - (total - score_right) / (size - 1)
    centred_wrong = score_wrong - (total - score_wrong) / (size - 1)
    # sklearn's "balanced": size / (2 x members of the class).
    loss = -right * size / (2 * right) * math.log(sigmoid(centred_right))
    loss -= wrong * size / (2 * wrong) * math.log(sigmoid(-centred_wrong))
    return loss / size


def gradient_of_the_recipe(theta, old, right, wrong):
    loss = registry.build("loss", find_paper("pacs").config.algorithm.loss)
    policy = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0] * right + [0.0] * wrong, dtype=torch.float64)
    # +1 for the token A and -1 for B: log pi = log sigmoid(sign x theta).
    signs = 2 * rewards - 1
    one = torch.ones_like(rewards)
    batch = SequenceBatch(
        torch.nn.functional.logsigmoid(signs * policy),
        torch.nn.functional.logsigmoid(signs * old),
        0 * one,
        one,
        torch.zeros(len(rewards), dtype=torch.int64),
        rewards,
        0 * one,
    )
    (gradient,) = torch.autograd.grad(loss.sequence_losses(batch).sum(), policy)
    return float(gradient)


@pytest.mark.parametrize(("right", "wrong"), [(4, 4), (1, 7), (6, 2)])
@pytest.mark.parametrize("moved", [-1.0, 0.0, 0.5, 3.0])
def test_gradient_of_a_two_token_policy(right, wrong, moved):
    old = -0.4
    step = 1e-6
    expected = (
        loss_of_two_tokens(old + moved + step, old, right, wrong)
        - loss_of_two_tokens(old + moved - step, old, right, wrong)
    ) / (2 * step)
    assert gradient_of_the_recipe(old + moved, old, right, wrong) == pytest.approx(expected, rel=1e-6)


def test_a_response_that_is_predicted_teaches_less_than_one_that_is_not():
    """At the policy that sampled every prediction is 1/2; after a move to the right answer the error is smaller, and
    after a move away from it larger. REINFORCE has the same factor everywhere.

    The scores of A and B differ by the move, and of the seven others four have the other outcome: psi = 4/7 move.
    """
    for moved in (2.0, 0.0, -2.0):
        error = 1 - sigmoid(4 / 7 * moved)
        assert gradient_of_the_recipe(moved, 0.0, 4, 4) == pytest.approx(-4 / 7 * error, rel=1e-12)


TASKS = [Task(id=str(n), prompt="What is 2 + 2?", answer="4") for n in range(2)]


def test_ten_responses(recipe_step):
    got = recipe_step("pacs", TASKS[:1]).rewards([text for text, _ in TWO_AND_TWO])
    assert got == [float(right) for _, right in TWO_AND_TWO]


GROUPS = [
    # (right, tokens): a mixed group, and one in which all are right, whose weights are 1.
    [(1, (0, 1, 2, 3)), (0, (1,)), (0, (2, 1, 2)), (1, (3, 3)), (0, (0, 2))],
    [(1, (1, 0)), (1, (2,)), (1, (3, 2, 2))],
]


def gradient_of_two_groups(now, old):
    """By the chain rule through the centred scores; the mean is over all responses."""
    ratio = np.log(softmax(now)) - np.log(softmax(old))
    result = np.zeros(len(now))
    for group in GROUPS:
        size, rights = len(group), sum(right for right, _ in group)
        scores = [sum(ratio[list(ids)]) for _, ids in group]
        pulls = [score_function(ids, now) for _, ids in group]
        for n, (right, _) in enumerate(group):
            others = [k for k in range(size) if k != n]
            centred = scores[n] - sum(scores[k] for k in others) / len(others)
            slope = pulls[n] - sum(pulls[k] for k in others) / len(others)
            weight = 1.0 if rights in (0, size) else size / (2 * (rights if right else size - rights))
            result += weight * (sigmoid(centred) - right) * slope
    return result / sum(map(len, GROUPS))


@pytest.mark.parametrize("moved", [False, True])
def test_gradient_of_a_step(recipe_step, moved):
    """The score is the log-ratio to the policy before the update, which is 0 in the first one; nothing of the engine's
    log-probs."""
    texts = {1: TWO_AND_TWO[0][0], 0: TWO_AND_TWO[5][0]}
    step = recipe_step("pacs", TASKS)
    batch = step.score([[Response(texts[right], ids) for right, ids in group] for group in GROUPS])
    got = step.gradient(batch, MOVED, old=BEFORE if moved else None, engine=ENGINE)
    np.testing.assert_allclose(got, gradient_of_two_groups(MOVED, BEFORE if moved else MOVED), rtol=1e-9)


def test_longer_prompts_are_left_out():
    """data.filter_overlong_prompts=True of scripts/pacs/pacs_beta_1.0.sh."""
    assert find_paper("pacs").config.data.skip_long_prompts


def test_no_gradient_is_cut():
    """src/pacs/pacs_actor.py has an optimizer step of its own, which clips no norm. The loss sums log-ratios over up to
    4,096 tokens, and d log pi / d logits of a token has a norm of at most the root of 2."""
    assert find_paper("pacs").config.optim.max_grad_norm > 1e4


def test_the_shipped_updates_let_the_score_move():
    """With one update per batch every score is 0 and the loss of every step is ln 2."""
    paper = find_paper("pacs")
    assert paper.config.optim.updates_per_batch == 4
    assert smoke_config(paper, "unused").optim.updates_per_batch >= 2
    losses = [row["loss/total"] for row in smoke(paper)]
    assert max(abs(loss - math.log(2)) for loss in losses) > 1e-3
