"""Recipes of supervised learning alone: openchat's weights of sources, one-shot-cft's critiques."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_written_steps import plan_of, score_function, softmax

from rlvr import registry
from rlvr.data import load_tasks
from rlvr.records import Task

LETTERS = {"a": 6, "b": 7}
END = 1
"""Token ids of the lent tokenizer."""
EXPERT, OTHER = 1.0, 0.1
"""Weights of the two classes (imoneoi/openchat@47a3596 README.md, "Preparing Your Data")."""


def ids_of(text):
    return [*(LETTERS[letter] for letter in text), END]


def of_source(number, source, text):
    return Task(id=f"t{number}", prompt="?", source=source, demonstration=text)


def imitation(rows, logits):
    """d / d logits of the mean -log pi over tokens, each weighed by its row: sum w l / sum w, as in imoneoi/openchat@
    47a3596 ochat/models/unpadded_gemma.py and ochat/training_deepspeed/train.py."""
    total = sum(weight * len(ids) for weight, ids in rows)
    return -sum(weight * score_function(ids, logits) for weight, ids in rows) / total


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=8)


def test_the_gradient_is_weighed_by_the_reward_of_the_source(recipe_step, logits):
    rows = [("expert", "ab"), ("other", "aabb"), ("other", "b"), ("expert", "bbb")]
    step = recipe_step("openchat", [of_source(i, *row) for i, row in enumerate(rows)], "sft")
    got = step.gradient(step.demonstrations(), logits)
    weight = {"expert": EXPERT, "other": OTHER}
    expected = imitation([(weight[source], ids_of(text)) for source, text in rows], logits)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert np.abs(got - imitation([(1.0, ids_of(text)) for _, text in rows], logits)).max() > 0.02


def test_two_sources_that_disagree_are_learned_by_their_rewards(recipe_step):
    """An expert writes a, another one b: the loss is least where pi(a) / pi(b) is the ratio of the weights, 10;
    plain imitation would end at 1."""
    step = recipe_step("openchat", [of_source(0, "expert", "a"), of_source(1, "other", "b")], "sft")
    batch = step.demonstrations()
    logits = np.full(8, -40.0)
    logits[END], logits[LETTERS["a"]], logits[LETTERS["b"]] = math.log(11.0), math.log(10.0), 0.0
    assert softmax(logits)[LETTERS["a"]] / softmax(logits)[LETTERS["b"]] == pytest.approx(10)
    np.testing.assert_allclose(step.gradient(batch, logits), 0, atol=1e-4)
    logits[LETTERS["a"]] = logits[LETTERS["b"]]
    assert step.gradient(batch, logits)[LETTERS["a"]] < -0.02 < 0.02 < step.gradient(batch, logits)[LETTERS["b"]]


def test_the_rates_of_openchat_are_those_of_the_authors(recipe_step):
    """cosine_schedule_with_warmup_lr_lambda of ochat/training_deepspeed/train.py: 5 % of the steps to warm up, a cosine
    to a tenth."""
    stage = recipe_step("openchat", [of_source(0, "expert", "a"), of_source(1, "other", "b")], "sft").stage
    steps = stage.steps
    peak = max(stage.learning_rate(step) for step in range(steps))
    warm_up = round(0.05 * steps)
    for step in range(0, steps, 7):
        rate = stage.learning_rate(step) / peak
        if step < warm_up:
            # Their first step has rate 0, ours the rate of their second.
            assert rate == pytest.approx((step + 1) / warm_up)
        else:
            done = (step - warm_up) / (steps - warm_up)
            assert rate == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def test_openchat_is_trained_by_the_authors_adamw():
    """Betas 0.9 and 0.95, epsilon 1e-5, decay 0.1 (train.py), on a matrix of four weights; small gradients, beside
    which the epsilon shows."""
    spec = plan_of("openchat", "sft").config.optim.optimizer
    weights = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=torch.float64))
    optimizer = registry.find("optimizer", spec.name)([weights], **spec.options)
    expected = weights.detach().numpy().copy()
    first, second = np.zeros((2, 2)), np.zeros((2, 2))
    rng = np.random.default_rng(0)
    for step in range(1, 4):
        gradient = rng.normal(0, 1e-4, (2, 2))
        weights.grad = torch.from_numpy(gradient)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        move = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.95**step)) + 1e-5)
        expected = expected - 0.01 * (0.1 * expected + move)
    np.testing.assert_allclose(weights.detach().numpy(), expected, rtol=1e-9)


CRITIQUES = [
    {
        "messages": [
            {"role": "user", "content": "Is the solution right?\n\nQuestion:\n1 + 1\n\nStudent's Solution:\nIt is 3."},
            {"role": "assistant", "content": "ab"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Is the solution right?\n\nQuestion:\n1 + 1\n\nStudent's Solution:\nIt is 2."},
            {"role": "assistant", "content": "bbba"},
        ]
    },
]
"""Rows in the form of TIGER-Lab/One-Shot-CFT-Data, whose critiques are spelled with the lent tokenizer's letters."""


def test_the_critique_is_learned_and_the_solution_is_not(recipe_step, logits):
    """Problem and solution stand in the prompt; the loss is the mean over the critiques' tokens and their ends."""
    tasks = load_tasks(CRITIQUES, fields=plan_of("one-shot-cft", "sft").config.data.fields)
    assert all("Student's Solution" in str(task.prompt) for task in tasks)
    assert [task.demonstration for task in tasks] == ["ab", "bbba"]
    step = recipe_step("one-shot-cft", tasks, "sft")
    batch = step.demonstrations()
    assert [weights.tolist() for weights in batch.tokens("weight/likelihood")] == [[0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]
    expected = imitation([(1.0, ids_of("ab")), (1.0, ids_of("bbba"))], logits)
    np.testing.assert_allclose(step.gradient(batch, logits), expected, rtol=1e-9, atol=1e-12)


def test_critiques_of_one_solution_by_several_teachers_are_all_learned(recipe_step):
    """The 600 rows are of 100 solutions: most have the prompt of another row."""
    question = CRITIQUES[0]["messages"][0]
    rows = [{"messages": [question, {"role": "assistant", "content": text}]} for text in ("ab", "bb", "a")]
    tasks = load_tasks(rows, fields=plan_of("one-shot-cft", "sft").config.data.fields)
    assert [task.demonstration for task in recipe_step("one-shot-cft", tasks, "sft").stage.pool] == ["ab", "bb", "a"]


def test_the_numbers_of_the_critiques_are_those_of_the_authors_script():
    """8 devices with 64 accumulated rows each, 50 epochs of 600 rows, 0.05 of the steps to warm up."""
    plan = plan_of("one-shot-cft", "sft")
    optim = plan.config.optim
    assert plan.config.rollout.prompts_per_step == 8 * 1 * 64
    assert plan.steps == 50 * 600 // 512
    assert (optim.lr, optim.schedule, optim.warmup_steps) == (5e-6, "cosine", round(0.05 * plan.steps))
    assert (optim.min_lr, optim.updates_per_batch, optim.epochs_per_batch) == (0.0, 1, 1)
    assert optim.optimizer.options == {"weight_decay": 0.05, "betas": [0.9, 0.95]}
    assert plan.config.data.skip_long_prompts
    # The first of the paper's four problems of DeepScaleR.
    assert plan.config.data.train == "TIGER-Lab/One-Shot-CFT-Data:dsr_cft_p0"
