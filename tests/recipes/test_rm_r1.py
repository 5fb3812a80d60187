"""RM-R1: what its shipped settings do beyond the reward of a judgement, which test_judge_recipes.py holds.

The numbers are those of github RM-R1-UIUC/RM-R1, commit d4c2542 (train_rm_r1_rlvr_qwen2.5_instruct_7b.sh,
verl/trainer/config/ppo_trainer.yaml, distill_qwen2.5-7b-instruct.sh, rl_dataset.py), with the loss of github
volcengine/verl, commit e49fb572, verl/trainer/ppo/core_algos.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import Response, k3_gradient, of_the_group, plan_of, score_function, softmax

from rlvr.data import load_tasks
from rlvr.records import Task

FOR_A = "<type>Chat</type> <eval>A is exact.</eval> <answer>[[A]]</answer>"
FOR_B = "<type>Chat</type> <eval>B is exact.</eval> <answer>[[B]]</answer>"
TASK = Task(id="t", prompt="Which is better?", answer="model_a")


def test_gradient_in_a_later_update_of_the_batch(recipe_step):
    """Ratios of 1.19 and 1.21 beside the clip of 0.2 above, 0.81 and 0.79 below; a wrong judgement whose ratio is 6 is
    not capped: the loss has no dual clip. The mean is over all tokens, and the KL's weight 0.001."""
    old = np.log([0.2, 0.2, 0.2, 0.2, 0.05, 0.15])
    new = np.log([0.238, 0.242, 0.162, 0.158, 0.10, 0.10])
    far = np.log([0.19, 0.17, 0.12, 0.12, 0.30, 0.10])
    reference = np.log([0.1, 0.2, 0.3, 0.1, 0.2, 0.1])
    engine = np.log([0.3, 0.1, 0.1, 0.3, 0.1, 0.1])
    responses = [
        (FOR_A, (0, 1, 2, 3)),
        (FOR_B, (0, 1, 2, 3, 4)),
        (FOR_A, (4, 5)),
        (FOR_B, (5,)),
        (FOR_B, (1,)),
        (FOR_B, (2, 2)),
        (FOR_A, (3,)),
    ]
    step = recipe_step("rm-r1", [TASK])
    batch = step.score([[Response(text, ids) for text, ids in responses]])
    advantages = of_the_group([1.0 if text == FOR_A else -1.0 for text, _ in responses], 1e-6, unbiased=True)
    for logits in (new, far):
        ratio = softmax(logits) / softmax(old)
        expected = np.zeros(6)
        tokens = sum(len(ids) for _, ids in responses)
        for advantage, (_, ids) in zip(advantages, responses, strict=True):
            for token in ids:
                beyond = ratio[token] > 1.2 if advantage > 0 else ratio[token] < 0.8
                if not beyond:
                    expected -= advantage * ratio[token] * score_function([token], logits) / tokens
        expected += 0.001 * k3_gradient([ids for _, ids in responses], logits, reference, "tokens")
        # The engine's log-probs do not matter: the ratio is to the trainer's policy before the first update.
        models = {"old": old.tolist(), "reference": reference.tolist(), "engine": engine.tolist()}
        got = step.gradient(batch, logits.tolist(), **models)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_no_token_s_divergence_counts_more_than_ten(recipe_step):
    """kl_penalty, low_var_kl: the value is clamped at 10, beyond which there is no gradient. Token 1 is at
    20 - 1 - log 20 = 16.0, token 2 at 10 - 1 - log 10 = 6.7, token 3 at 0.1 - 1 - log 0.1 = 1.4; equal rewards leave
    the KL alone."""
    logits = np.log([0.9, 0.01, 0.03, 0.06])
    reference = np.log([0.494, 0.2, 0.3, 0.006])
    responses = [(1, 2), (3,), (2, 3, 1), (1,), (2,), (3, 3), (0,)]
    step = recipe_step("rm-r1", [TASK])
    batch = step.score([[Response(FOR_A, ids) for ids in responses]])
    expected = 0.001 * k3_gradient(responses, logits, reference, "tokens", bound=10.0)
    assert np.abs(expected - 0.001 * k3_gradient(responses, logits, reference, "tokens")).max() > 1e-3
    got = step.gradient(batch, logits.tolist(), reference=reference.tolist())
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_a_batch_makes_eight_updates_of_one_epoch():
    """ppo_mini_batch_size 128 of 1,024 prompts."""
    config = plan_of("rm-r1").config
    assert config.optim.updates_per_batch == 1024 // 128
    assert config.optim.epochs_per_batch == 1
    assert config.rollout.prompts_per_step == 1024
    assert config.rollout.group_size == 7
    assert (config.rollout.temperature, config.rollout.max_new_tokens) == (1.0, 8192)
    assert config.data.max_prompt_tokens == 4096
    assert config.algorithm.entropy == 0
    assert config.optim.optimizer.options == {"weight_decay": 0.01}
    assert (config.optim.schedule, config.optim.warmup_steps) == ("constant", 0)


ROW = {
    "context_messages": [{"role": "user", "content": "Which is better, A or B?"}],
    "winner": "abba",
    "ground_truth": "model_b",
}
"""A row of gaotang/RM-R1-Distill-SFT, where `winner` is the whole judgement to imitate."""


def test_the_judgement_is_imitated_and_the_label_is_not(recipe_step):
    plan = plan_of("rm-r1", "sft")
    (train,) = plan.config.data.train
    (task,) = load_tasks([ROW], fields=train["fields"])
    assert (task.demonstration, task.answer) == ("abba", "model_b")
    assert task.prompt == ROW["context_messages"]
    batch = recipe_step("rm-r1", [task], "sft").demonstrations()
    assert len(batch.tokens("weight/likelihood")[0]) == 1 + len("abba") + 1


def test_the_reinforcement_reads_its_own_columns():
    row = {"context_messages": ROW["context_messages"], "winner": "model_a"}
    (task,) = load_tasks([row], fields=plan_of("rm-r1").config.data.train["fields"])
    assert (task.answer, task.demonstration) == ("model_a", None)


def test_judgements_weigh_the_same_whatever_their_length(recipe_step):
    """micro_train_batch_size 1 and GPTLMLoss: the mean over a row's tokens, then the mean over the rows."""
    short, long = (Task(id=text, prompt="Which?", answer="model_a", demonstration=text) for text in ("b", "abbaab"))
    step = recipe_step("rm-r1", [short, long], "sft")
    batch = step.demonstrations()
    logits = np.linspace(-1, 1, 12)
    expected = np.zeros(12)
    lengths = []
    for rollout, weight in zip(batch.rollouts, batch.tokens("weight/likelihood"), strict=True):
        ids = [int(token) for token in rollout.token_ids[weight != 0]]
        lengths.append(len(ids))
        expected -= score_function(ids, logits) / len(ids) / 2
    assert lengths[0] < lengths[1]
    np.testing.assert_allclose(step.gradient(batch, logits.tolist()), expected, rtol=1e-9, atol=1e-12)


def test_the_distillation_has_the_authors_numbers():
    """OpenRLHF's trainer: Adam of 0.9 and 0.95 without decay, a cosine to a tenth after 3 % of the steps; prompts of
    less than max_len - 2 tokens (sft_dataset.py)."""
    plan = plan_of("rm-r1", "sft")
    assert plan.config.data.max_prompt_tokens == 12288 - 2 - 1
    optim = plan.config.optim
    assert plan.config.rollout.prompts_per_step == 128
    assert optim.optimizer.options == {"betas": [0.9, 0.95], "weight_decay": 0}
    assert (optim.lr, optim.schedule) == (5e-6, "cosine")
    assert optim.min_lr == pytest.approx(optim.lr / 10)
    assert optim.warmup_steps == math.ceil(0.03 * plan.steps)
    assert optim.updates_per_batch == 1
