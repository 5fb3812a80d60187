"""R1-Reward: the reward with the consistency of analysis and verdict, the clamp of log-ratios, and the filter.

The numbers are those of github yfzhang114/r1_reward, commit 3693413: openrlhf/models/remote_rm/math_verifier_mllm.py,
openrlhf/models/loss.py, openrlhf/trainer/ppo_utils/replay_buffer.py and scripts/train.sh.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_written_steps import plan_of, score_function, softmax

from reward_helpers import make_batch
from rlvr import registry
from rlvr.losses.tokens import Denominators, TokenBatch
from rlvr.records import Task
from rlvr.testing import StubJudge

TASK = Task(id="t", prompt="Which is better?", answer="A", info={"labels": ["A", "B"]})
RIGHT = "<think>1 is exact, 2 is not.</think><answer>1</answer>"
JUDGEMENTS = [
    (RIGHT, 1, 1, 1),
    ("<think>2 is exact.</think><answer>1</answer>", 1, 1, -1),
    ("<think>2 is exact.</think><answer>2</answer>", 1, 0, 1),
    ("<think>1 is exact.</think><answer>2</answer>", 1, 0, -1),
    ("1 is exact. <answer>1</answer>", 0, 1, 1),
    ("<think>1 is exact.</think> <answer>1</answer>", 1, 1, 1),
    ("<think>1 is exact.</think><answer>1</answer> So it is.", 0, 1, 1),
    ("<think><think>1 is exact.</think><answer>1</answer>", 0, 1, 1),
    ("<think>1 is exact.</think><answer>2</answer><answer>1</answer>", 0, 1, 1),
    ("1 is exact.", 0, 0, -1),
]
"""Judgements with form and verdict, 1 or 0, and their consistency, 1 or -1."""


def by_table(request):
    """The consistency that the table has; all texts stand in fences with their marks broken up."""
    said = request.fenced["response"].replace("< ", "<")
    consistency = {text: value for text, _, _, value in JUDGEMENTS}[said]
    return request.verdict("match" if consistency == 1 else "mismatch")


def test_rewards_of_judgements(recipe_step):
    """0.5 x form + verdict x (1 + 0.5 x consistency): a right verdict against its own analysis is worth 0.5 of 1.5,
    a wrong one nothing, whatever it follows from."""
    with StubJudge(by_table) as stub:
        got = recipe_step("r1-reward", [TASK], judge=stub.url).rewards([text for text, _, _, _ in JUDGEMENTS])
    assert got == pytest.approx([0.5 * form + right * (1 + 0.5 * same) for _, form, right, same in JUDGEMENTS])
    assert got[:5] == pytest.approx([2.0, 1.0, 0.5, 0.5, 1.5])


def test_a_wrong_verdict_does_not_wait_for_the_judge(recipe_step):
    with StubJudge("hm") as stub:
        got = recipe_step("r1-reward", [TASK], judge=stub.url).rewards([JUDGEMENTS[2][0], RIGHT])
    assert got[0] == 0.5 and math.isnan(got[1])


def normalised(values):
    """`NaiveReplayBuffer.normalize`: over the standard deviation of the batch, and 0 beyond 3."""
    values = np.asarray(values, dtype=float)
    result = (values - values.mean()) / values.std()
    return np.where(np.abs(result) > 3, 0.0, result)


def test_one_right_judgement_among_many_wrong_ones_is_filtered():
    """The only one of 20 is at 4.4 deviations and teaches nothing; of 8 it is at 2.6 and does."""
    config = plan_of("r1-reward").config.algorithm
    modifiers = [registry.build("modifier", spec) for spec in config.modifiers]
    for size in (20, 8):
        rewards = [2.0] + [0.0] * (size - 1)
        batch = make_batch(rewards, groups=list(range(size)))
        batch.columns["reward"] = values = np.asarray(rewards)
        for modifier in modifiers:
            values = modifier(batch, values)
        np.testing.assert_allclose(values, normalised(rewards), rtol=1e-6, atol=1e-9)
    assert normalised([2.0] + [0.0] * 19)[0] == 0 and normalised([2.0] + [0.0] * 7)[0] > 2.6


def test_ratios_are_clamped_before_the_exponential():
    """loss.py: exp(clamp(log pi - log pi_old, log 1e-3, log 1e3)), then the clip at 0.2. A token whose probability rose
    by 1e5 has a negative advantage, for which the clip has no bound: its loss is 1,000 and its gradient 0."""
    loss = plan_of("r1-reward").config.algorithm.loss.options
    assert loss["bound"] == pytest.approx(math.log(1e3))
    assert (loss["clip_low"], loss["clip_high"], loss["average"]) == (0.2, 0.2, "sequences")
    assert "cap" not in loss


def test_gradient_in_a_later_update(recipe_step):
    """The mean over each response's tokens, then over responses; a token beyond the clamp has no gradient."""
    plan = plan_of("r1-reward")
    component = registry.build("loss", plan.config.algorithm.loss)
    old = np.log([0.5, 0.4, 1e-7, 0.0999999])
    new = np.log([0.2, 0.44, 0.26, 0.1])
    ratio = softmax(new) / softmax(old)
    assert ratio[2] > 1e5 and 0.8 < ratio[1] < 1.2
    responses, advantages = [(1, 2), (1,), (3,)], [-1.0, 2.0, 0.5]
    logits = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([token for tokens in responses for token in tokens])
    sequence = torch.tensor([number for number, tokens in enumerate(responses) for _ in tokens])
    proximal = torch.log_softmax(torch.tensor(old), 0)[ids]
    tokens = TokenBatch(
        sequence=sequence,
        sequences=len(responses),
        weight=torch.ones(len(ids), dtype=torch.float64),
        advantage=torch.tensor(advantages, dtype=torch.float64)[sequence],
        proximal_logprobs=proximal,
        behaviour_logprobs=proximal,
        statistics={("logprobs", "current"): torch.log_softmax(logits, 0)[ids], ("logprobs", "proximal"): proximal},
    )
    value = component(tokens, Denominators(len(ids), len(responses), 1.0, 0.0)).value
    (gradient,) = torch.autograd.grad(value, logits)
    expected = np.zeros(4)
    for advantage, own in zip(advantages, responses, strict=True):
        for token in own:
            if token != 2:
                share = advantage * ratio[token] / len(own) / len(responses)
                expected -= share * score_function([token], np.asarray(new))
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_the_numbers_are_those_of_the_authors_script():
    """train.sh and the defaults of train_ppo_ray.py; the warm-up is ceil(0.03 x steps)."""
    plan = plan_of("r1-reward")
    algorithm, optim = plan.config.algorithm, plan.config.optim
    assert (algorithm.kl.where, algorithm.kl.estimator.name, algorithm.kl.coef) == ("advantage", "k1", 1e-3)
    assert optim.optimizer.options == {"betas": [0.9, 0.95], "weight_decay": 0}
    assert optim.min_lr == pytest.approx(0.1 * optim.lr) and optim.schedule == "cosine"
    assert optim.warmup_steps == math.ceil(0.03 * plan.config.run.steps)
    assert (optim.max_grad_norm, optim.epochs_per_batch, plan.config.rollout.temperature) == (1.0, 1, 1.0)
