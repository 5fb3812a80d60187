"""RAFT: which reply of a prompt is imitated, the gradient of imitating it, and a score of a reward model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_written_steps import Response, score_function

from rlvr.config.stage_plan import stage_plans
from rlvr.errors import ConfigError
from rlvr.recipes.papers import find_paper
from rlvr.recipes.raft import reward_model
from rlvr.recipes.raft.clean_reply import CleanReply
from rlvr.records import Task

LOGITS = [0.0, 0.4, -0.7, 1.1]

SCORES = {"good": 3.0, "fair": 1.0, "bad": -2.0, "worse": -5.0, "see # this": 9.0, "x": 8.0}
"""A reward model of the test's own, by the reply that it is shown."""


@pytest.fixture
def scored_by_table(monkeypatch):
    """The recipe's reward model scores by the table, and notes the texts that it was shown."""
    shown = []

    def load_scorer(path, device, max_tokens, batch_size):
        assert path == "weqweasdas/hh_rlhf_rm"

        def score(texts):
            shown.extend(texts)
            return [SCORES[text.removeprefix("Human: Hi. Assistant: ")] for text in texts]

        assert device.startswith("cuda"), "a reward model of 2.7B parameters on a CPU"

        return score

    monkeypatch.setattr(reward_model, "load_scorer", load_scorer)
    return shown


def task(number=0):
    return Task(f"t{number}", "Human: Hi. Assistant:")


def test_the_best_reply_of_each_prompt_is_imitated_and_nothing_else(recipe_step, scored_by_table):
    """Negative rewards too: a reply trains because it is the best of its prompt, not because it is good."""
    step = recipe_step("raft", [task(0), task(1)])
    first = [Response("bad", (2,)), Response("good", (1, 3)), Response("fair", (2, 2))]
    second = [Response("worse", (3, 3)), Response("bad", (2, 1, 2))]
    batch = step.score([first, second])
    assert [r.text for r in batch.rollouts] == ["good", "bad"]
    replies = ["bad", "good", "fair", "worse", "bad"]
    assert scored_by_table == [f"Human: Hi. Assistant: {reply}" for reply in replies], "the whole text is scored"
    # Cross-entropy: the mean over all imitated tokens of minus their log-probs.
    expected = -(score_function((1, 3), LOGITS) + score_function((2, 1, 2), LOGITS)) / 5
    np.testing.assert_allclose(step.gradient(batch, LOGITS), expected, atol=1e-6)


def test_the_gradient_of_a_later_epoch_is_of_the_same_likelihood(recipe_step, scored_by_table):
    """No ratio and no clip: the policy that sampled does not matter."""
    step = recipe_step("raft", [task()])
    batch = step.score([[Response("good", (1, 3)), Response("bad", (2,))]])
    far = [5.0, -5.0, 5.0, -5.0]
    np.testing.assert_allclose(step.gradient(batch, LOGITS, old=far), step.gradient(batch, LOGITS), atol=1e-12)
    np.testing.assert_allclose(step.gradient(batch, LOGITS), -score_function((1, 3), LOGITS) / 2, atol=1e-6)


def test_discarded_replies_do_not_win(recipe_step, scored_by_table):
    """Those with the highest scores of the table have a `#` or one character; they are not even scored."""
    step = recipe_step("raft", [task()])
    batch = step.score([[Response("see # this", (1,)), Response("x", (1,)), Response("fair", (2, 3)), Response("bad")]])
    assert [r.text for r in batch.rollouts] == ["fair"]
    assert scored_by_table == ["Human: Hi. Assistant: fair", "Human: Hi. Assistant: bad"]


def test_a_prompt_whose_replies_are_all_discarded_trains_nothing(recipe_step, scored_by_table):
    step = recipe_step("raft", [task(0), task(1)])
    batch = step.score([[Response("see # this"), Response("x")], [Response("fair", (2, 3)), Response("bad")]])
    assert [r.text for r in batch.rollouts] == ["fair"]
    assert scored_by_table == ["Human: Hi. Assistant: fair", "Human: Hi. Assistant: bad"]


def test_what_follows_the_other_side_s_turn_is_not_looked_at(recipe_step, scored_by_table):
    step = recipe_step("raft", [task()])
    batch = step.score([[Response("good\n\nHuman: # and", (1,)), Response("fair")]])
    assert [r.text[:4] for r in batch.rollouts] == ["good"]
    assert scored_by_table[0] == "Human: Hi. Assistant: good"


def test_the_numbers_are_those_of_the_authors_script():
    """scripts/archive/run_raft_align.sh: 1,024 prompts in an iteration, of which the best of 8 replies (top_reward
    0.125) trains for four epochs; raft.md: one epoch of supervised learning, of the 112,052 rows of the set."""
    supervised, aligned = stage_plans(find_paper("raft").config)
    rollout = aligned.config.rollout
    assert (aligned.steps, rollout.prompts_per_step, rollout.group_size) == (20, 1024, int(1 / 0.125))
    assert (rollout.temperature, rollout.top_p, rollout.stop) == (0.85, 1.0, ["Human:"])
    optim = aligned.config.optim
    assert (optim.epochs_per_batch, rollout.prompts_per_step // optim.updates_per_batch) == (4, 8)
    assert supervised.steps == math.ceil(112_052 / supervised.config.rollout.prompts_per_step)
    assert supervised.config.optim.updates_per_batch == supervised.config.optim.epochs_per_batch == 1
    for plan in (supervised, aligned):
        assert (plan.config.optim.schedule, plan.config.optim.warmup_steps) == ("constant", 0)
        assert plan.config.data.max_prompt_tokens == 256


@pytest.mark.parametrize(
    ("reply", "kept"),
    [("ok", 1), ("a", 0), ("", 0), ("  a  ", 0), ("Human: x", 0), ("one # two", 0), ("a Human: #", 0)],
)
def test_what_is_discarded(reply, kept):
    assert CleanReply().verify(task(), reply).score == kept


def test_an_expression_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="turn is no regular expression"):
        CleanReply(turn="(")


def test_the_score_is_the_first_logit_of_the_classifier(tmp_path):
    """Against the classifier called on one text at a time, without padding."""
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    from rlvr.config import ScratchConfig
    from rlvr.policy.scratch import build_tokenizer

    tokenizer = build_tokenizer(ScratchConfig(alphabet="abc "))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=2, pad_token_id=tokenizer.eos_token_id, **sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    texts = ["a", "ab ca", "c", "bbb"]
    score = reward_model.load_scorer(str(tmp_path), "cpu", 4, 3)(texts)
    with torch.no_grad():
        ids = [tokenizer(text).input_ids[:4] for text in texts]
        expected = [float(model(torch.tensor([one])).logits[0, 0]) for one in ids]
    np.testing.assert_allclose(score, expected, atol=1e-5)
    assert len(set(score)) == 4
