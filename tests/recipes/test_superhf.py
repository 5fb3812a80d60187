"""SuperHF: the best reply of each prompt is imitated, and the KL prior of it pulls to the model before training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_written_steps import Response, k3_gradient, score_function, softmax

from rlvr.recipes.papers import find_paper
from rlvr.recipes.raft import reward_model
from rlvr.records import Task

LOGITS = [0.0, 0.4, -0.7, 1.1]
REFERENCE = [0.3, 0.0, 0.2, -0.4]


@pytest.fixture
def shown(monkeypatch):
    """The reward model gives a text as many points as it has exclamation marks, and notes what it was shown."""
    texts = []

    def score(batch):
        texts.extend(batch)
        return [float(text.count("!")) for text in batch]

    monkeypatch.setattr(reward_model, "load_scorer", lambda *_: score)
    return texts


PROMPT = "\n\nHuman: Hi.\n\nAssistant:"


def tasks(count):
    return [Task(f"t{number}", PROMPT) for number in range(count)]


def test_two_prompts_train_on_their_best_reply_with_the_kl_of_the_authors_sum(recipe_step, shown):
    """The authors' loss for the two replies of a step: the mean cross-entropy of all tokens, and 0.35 times the KL of
    each reply, a mean over its tokens."""
    step = recipe_step("superhf", tasks(2))
    batch = step.score(
        [
            [Response("no", (1,)), Response("yes!", (1, 3)), Response("", (2,))],
            [Response("a!", (3, 3)), Response("b!!!", (2, 1, 2)), Response("c!!", (0,))],
        ]
    )
    assert [r.text for r in batch.rollouts] == ["yes!", "b!!!"]
    chosen = [(1, 3), (2, 1, 2)]
    likelihood = -sum(score_function(ids, LOGITS) for ids in chosen) / 5
    prior = sum(0.35 * k3_gradient([ids], LOGITS, REFERENCE) for ids in chosen)
    np.testing.assert_allclose(step.gradient(batch, LOGITS, reference=REFERENCE), likelihood + prior, atol=1e-6)


def test_the_prior_s_gradient_on_samples_is_that_of_the_kl_to_the_policy(recipe_step, shown):
    """Each token as often as the policy writes it: k3's gradient minus the likelihood's is that of KL(reference ||
    policy), which is p - q in the logits: what the authors compute over the vocabulary."""
    p = softmax([np.log(1 / 8), np.log(2 / 8), np.log(4 / 8), np.log(1 / 8)])
    logits = np.log(p).tolist()
    ids = tuple(token for token, times in enumerate((1, 2, 4, 1)) for _ in range(times))
    step = recipe_step("superhf", tasks(1))
    batch = step.score([[Response("yes!", ids), Response("no", (1,))]])
    likelihood = -score_function(ids, logits) / 8
    prior = step.gradient(batch, logits, reference=REFERENCE) - likelihood
    np.testing.assert_allclose(prior, 0.7 * (p - softmax(REFERENCE)), atol=1e-6)
    assert np.abs(prior).max() > 0.05


def test_a_new_turn_is_not_scored(recipe_step, shown):
    step = recipe_step("superhf", tasks(1))
    batch = step.score(
        [[Response("one! Human", (1,)), Response("two!! and\n\nBob: !!!!!", (2,)), Response("Assistant")]]
    )
    assert shown == [f"{PROMPT} one!", f"{PROMPT} two!! and"]
    assert [r.text[:5] for r in batch.rollouts] == ["two!!"]


def test_the_numbers_are_those_of_the_authors_configuration():
    """experiments/superhf/shf_iterative_v1/configs/default.yaml, and training.py for the optimizer: torch's AdamW with
    its own weight decay, one step for each two prompts, no clip of the gradient's norm."""
    config = find_paper("superhf").config
    rollout, optim, adapter = config.rollout, config.optim, config.model.adapter
    assert (rollout.prompts_per_step, rollout.group_size, rollout.max_new_tokens) == (2, 16, 64)
    assert rollout.prompts_per_step * config.run.steps == 10_000
    assert (rollout.temperature, rollout.top_p, rollout.stop) == (1.0, 0.95, ["Human", "Assistant"])
    assert (optim.schedule, optim.warmup_steps, optim.updates_per_batch, optim.epochs_per_batch) == ("cosine", 32, 1, 1)
    (weight,) = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr).param_groups
    assert optim.optimizer.options == {"weight_decay": weight["weight_decay"]}
    assert optim.max_grad_norm > 1e6
    assert (adapter.r, adapter.alpha, adapter.dropout) == (4, 32, 0.05)
    assert adapter.target_modules == ["q_proj", "v_proj"]
