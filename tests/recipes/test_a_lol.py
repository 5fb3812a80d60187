"""A-LoL: the gradient on given replies, by the formula, and how often each is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlvr import registry
from rlvr.config.stage_plan import stage_plans
from rlvr.data.samplers import TaskPool
from rlvr.errors import DataError
from rlvr.losses.sequences import SequenceBatch
from rlvr.recipes.a_lol.leftover_lunch import ByLabel
from rlvr.recipes.papers import find_paper
from rlvr.records import Task


def shipped_plan():
    (plan,) = stage_plans(find_paper("a-lol").config)
    return plan


def recipe_loss():
    plan = shipped_plan()
    return registry.build("auxiliary", plan.options["loss"])


def gradient(logprobs, reference, advantage):
    """(the loss, d loss / d log pi(y)) of the recipe's own loss."""
    log_pi = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    other = torch.zeros(len(logprobs), dtype=torch.float64)
    sequences = SequenceBatch(
        logprobs=log_pi,
        proximal=log_pi.detach(),
        reference=torch.tensor(reference, dtype=torch.float64),
        length=other + 3,
        group=torch.arange(len(logprobs)),
        reward=torch.tensor(advantage, dtype=torch.float64),
        advantage=other,
    )
    loss = recipe_loss().sequence_losses(sequences)
    (slope,) = torch.autograd.grad(loss.sum(), log_pi)
    return loss.detach().numpy(), slope.numpy()


def test_the_gradient_is_advantage_times_clipped_ratio():
    """Ratios 1, e, e^-5, e^0.5 and 1: clipped to [0.1, 1.9], they are 1, 1.9, 0.1, e^0.5 and 1. The last advantage is
    negative, so the reply is left over."""
    logprobs = [-4.0, -3.0, -9.0, -2.0, -1.0]
    reference = [-4.0, -4.0, -4.0, -2.5, -1.0]
    advantage = [0.5, 0.5, 0.2, 0.3, -0.4]
    ratio = [1.0, 1.9, 0.1, float(np.exp(0.5)), 1.0]
    loss, slope = gradient(logprobs, reference, advantage)
    expected = [-a * r / 5 for a, r in zip([0.5, 0.5, 0.2, 0.3, 0.0], ratio, strict=True)]
    np.testing.assert_allclose(slope, expected, atol=1e-12)
    np.testing.assert_allclose(loss, [e * p for e, p in zip(expected, logprobs, strict=True)], atol=1e-12)


def test_a_far_ratio_is_finite():
    loss, slope = gradient([-1.0, -2000.0], [-2000.0, -1.0], [1.0, 1.0])
    np.testing.assert_allclose(slope, [-1.9 / 2, -0.1 / 2], atol=1e-12)
    assert np.isfinite(loss).all()


def test_replies_are_drawn_as_often_as_their_advantage_says(recipe_step):
    """By the sampler of the recipe's own stage."""
    labels = [0.1, 0.4, -0.3, 0.0, 0.5]
    tasks = [Task(f"t{i}", "p", demonstration="ab", info={"label": label}) for i, label in enumerate(labels)]
    sampler = recipe_step("a-lol", tasks, "sft").stage.sampler
    drawn = [draw.task.id for draw in sampler.next(20_000)]
    share = [drawn.count(f"t{i}") / len(drawn) for i in range(5)]
    np.testing.assert_allclose(share, [0.1, 0.4, 0.0, 0.0, 0.5], atol=0.015)
    first, again = (ByLabel().bind(TaskPool(tasks), seed=3) for _ in range(2))
    drawn = [draw.task.id for draw in first.next(100)]
    assert [draw.task.id for draw in again.next(100)] == drawn
    other = ByLabel().bind(TaskPool(tasks), seed=4)
    assert [draw.task.id for draw in other.next(100)] != drawn


def test_the_sum_of_four_means_and_its_clip_are_those_of_one_mean():
    """lolrl_qlora_llama_hh.py: micro-batches of four replies, of which four are added up before a clip at 0.3. Adam is
    the same for any factor of the gradient, up to its epsilon; a clip is not."""
    optim = shipped_plan().config.optim
    replies = shipped_plan().config.rollout.prompts_per_step
    assert replies == 4 * 4
    gradients = np.random.default_rng(0).normal(size=(16, 3))
    theirs = sum(gradients[4 * i : 4 * i + 4].mean(axis=0) for i in range(4))
    ours = gradients.mean(axis=0)
    np.testing.assert_allclose(
        theirs * min(1.0, 0.3 / np.linalg.norm(theirs)),
        4 * ours * min(1.0, optim.max_grad_norm / np.linalg.norm(ours)),
        rtol=1e-12,
    )
    assert np.linalg.norm(theirs) > 0.3


def test_the_numbers_are_those_of_the_authors_script():
    """get_scheduler("constant", num_warmup_steps=300) of transformers has no warm-up: it returns the constant schedule
    before it reads the steps. The optimizer of bitsandbytes keeps its own weight decay, 0.01:
    Trainer.get_optimizer_cls_and_kwargs hands over the rate, betas and epsilon alone."""
    plan = shipped_plan()
    optim = plan.config.optim
    assert (optim.lr, optim.schedule, optim.warmup_steps) == (2e-4, "constant", 0)
    assert optim.optimizer.options == {"weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-6}
    assert optim.updates_per_batch == optim.epochs_per_batch == 1
    adapter = plan.config.model.adapter
    assert (adapter.r, adapter.alpha, adapter.dropout) == (64, 16, 0.05)
    assert plan.config.data.max_prompt_tokens == 640
    assert plan.config.rollout.max_new_tokens == 128


def test_tasks_without_a_positive_label_are_refused():
    with pytest.raises(DataError, match="label"):
        ByLabel().bind(TaskPool([Task("a", "p", info={"label": -1.0}), Task("b", "p")]), seed=0)
