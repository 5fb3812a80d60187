"""The likelihood of a given answer as a reward: what is asked for, the numbers worked by hand, and the log-probs
themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from reward_helpers import make_rollout
from rlvr.config import Config, OptimConfig
from rlvr.data import History
from rlvr.errors import ConfigError
from rlvr.policy import Snapshot
from rlvr.policy.statistics import continuation_logprobs, encoded
from rlvr.records import Batch, Task
from rlvr.rewards import AnswerLikelihood, RewardContext, bind, build_terms
from rlvr.stages.grpo.scoring import Scoring

TASK = Task(id="t", prompt="?", answer="ab")


def encode(text):
    return [ord(c) for c in text] or [0]


def responses(*texts, group="g", task=TASK):
    """Responses with a token for each character."""
    rollouts = []
    for m, text in enumerate(texts):
        rollout = make_rollout(
            group, m, len(text), 1.0, text, None, task, np.asarray([ord(c) for c in text], dtype=np.int64)
        )
        rollout.char_ends = np.asarray([-1, -1, *range(1, len(text) + 1)])
        rollouts.append(rollout)
    return Batch(rollouts)


def test_what_is_asked_for():
    batch = responses("x=[b]", "none", "[")
    asked = AnswerLikelihood(opening="[").asks(batch, encode)
    assert [(c.rollout, list(c.context), list(c.target)) for c in asked] == [
        (0, [1, 2, *encode("x=[")], encode("ab")),
        (2, [1, 2, *encode("[")], encode("ab")),
    ]
    batch.rollouts[0].char_ends = np.asarray([-1, -1, 1, 4, 4, 4, 5])  # "=[b" is one piece of text: cut before it
    assert list(AnswerLikelihood(opening="[").asks(batch, encode)[0].context) == [1, 2, ord("x")]
    debiased = AnswerLikelihood(opening="[", debias=True).asks(responses("[", "["), encode)
    assert [c.rollout for c in debiased] == [0, -1, 1]
    assert list(debiased[1].context) == [1, 2, ord("[")]


def test_what_is_asked_for_with_the_answer_alone():
    """The text before the answer is context, but for a token that reaches into it; the text after it is not there."""
    piece = AnswerLikelihood(opening="[", text="= {answer}]", scored="answer")
    (one,) = piece.asks(responses("x=[b]"), encode)
    assert (list(one.context), list(one.target)) == ([1, 2, *encode("x=[= ")], encode("ab"))

    def merging(text):
        return encode(text.replace(" a", "Z"))

    (one,) = piece.asks(responses("x=[b]"), merging)
    assert (list(one.context), list(one.target)) == ([1, 2, *encode("x=[=")], encode("Zb"))
    # No text before it: `encode` of no text is the token that a text begins after, and is not put there.
    (one,) = AnswerLikelihood(opening="[", scored="answer").asks(responses("["), encode)
    assert (list(one.context), list(one.target)) == ([1, 2, *encode("[")], encode("ab"))


def test_what_is_asked_of_the_reference():
    piece = AnswerLikelihood(opening="[", debias=True, baseline="reference", bare="", text=" {answer}", scored="answer")
    assert piece.needs_reference
    assert not AnswerLikelihood(debias=True).needs_reference
    own, bare = piece.asks(responses("x["), encode)
    assert (own.model, bare.model) == ("current", "reference")
    assert (list(bare.context), list(bare.target)) == ([1, 2, *encode(" ")], encode("ab"))
    with pytest.raises(ConfigError, match="debias is off"):
        build_terms([{"name": "answer_likelihood", "baseline": "reference"}])


def reward(piece, batch, *logprobs):
    asked = piece.asks(batch, encode)
    return piece(batch, list(zip(asked, map(np.asarray, logprobs), strict=True)))


def test_the_mean_probability_and_the_product():
    batch = responses("[", "none", "[")
    half, all_of_it = [math.log(0.5), math.log(0.1)], [0.0, 0.0]
    np.testing.assert_allclose(reward(AnswerLikelihood(opening="["), batch, half, all_of_it), [0.3, 0, 1])
    product = AnswerLikelihood(reduce="product", opening="[", without=-1)
    np.testing.assert_allclose(reward(product, batch, half, all_of_it), [0.05, -1, 1])


def test_without_the_reasoning_is_subtracted():
    piece, batch = AnswerLikelihood(opening="[", debias=True), responses("[", "[")
    got = reward(piece, batch, [math.log(0.9)] * 2, [math.log(0.4)] * 2, [math.log(0.3)] * 2)
    np.testing.assert_allclose(got, [0.5, 0])


def test_tokens_that_react_to_the_reasoning_count():
    """Deviations 0 and 1: only the second token counts; where none deviates, both do."""
    piece, batch = AnswerLikelihood(reduce="reactive", opening="["), responses("[", "[")
    np.testing.assert_allclose(reward(piece, batch, [-3.0, -1.0], [-3.0, -3.0]), [-1, -3])
    np.testing.assert_allclose(reward(piece, batch, [-3.0, -1.0], [-3.0, -1.0]), [-2, -2])
    np.testing.assert_allclose(reward(piece, responses("["), [-3.0, -1.0]), [-2])


def test_a_task_without_an_answer():
    batch = responses("[", task=Task(id="bare", prompt="?"))
    assert AnswerLikelihood(opening="[").asks(batch, encode) == []
    assert np.isnan(AnswerLikelihood(opening="[")(batch)).all()
    with pytest.raises(ConfigError, match="1 of 1 tasks have none, the first is task 'bare'"):
        bind(build_terms(["answer_likelihood"]), RewardContext(Config(), [batch.rollouts[0].task]))
    with pytest.raises(ConfigError, match="debias is of probabilities"):
        build_terms([{"name": "answer_likelihood", "debias": True, "reduce": "reactive"}])
    with pytest.raises(ConfigError, match=r"the text 'so 4' has to name the task's answer as \{answer\}"):
        build_terms([{"name": "answer_likelihood", "text": "so 4"}])


def test_the_log_probs_are_those_of_a_plain_forward_pass(make_policy):
    policy = make_policy(layers=1)
    asked = [([5, 6, 7], [8, 9]), ([4], [5, 6, 7, 8]), ([5, 6, 7], [9]), ([3] * 90, [4] * 90)]
    result = continuation_logprobs(policy, asked, OptimConfig())
    for (context, target), got in zip(asked[:3], result[:3], strict=True):
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*context, *target]])).logits[0].double()
        expected = logits.log_softmax(-1)[torch.arange(len(context) - 1, len(context) + len(target) - 1), target]
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)
    assert np.isnan(result[3]).all()  # does not fit
    assert encoded(policy, "12") == policy.tokenizer.encode("12", add_special_tokens=False)
    assert len(encoded(policy, "")) == 1


def test_the_stage_computes_what_a_term_asks_for(make_policy):
    policy = make_policy(layers=1)
    ids = policy.tokenizer.encode("so <answer>7", add_special_tokens=False)
    task = Task(id="t", prompt="?", answer="7")
    rollouts = [make_rollout("g", m, len(ids), 1.0, "so <answer>7", None, task, np.asarray(ids)) for m in range(2)]
    scoring = Scoring(Config.model_validate({"rewards": ["verdict", {"name": "answer_likelihood", "weight": 0.5}]}))
    batch = scoring.score(rollouts, policy, History(), (0, 1))
    context = [1, 2, *ids[:-1]]
    (logprobs,) = continuation_logprobs(policy, [(context, ids[-1:])], OptimConfig())
    np.testing.assert_allclose(batch.column("reward/answer_likelihood"), np.exp(logprobs[0]), atol=1e-6)
    np.testing.assert_allclose(batch.column("reward"), 1 + 0.5 * np.exp(logprobs[0]), atol=1e-6)


def test_the_reference_scores_without_the_reasoning(make_policy):
    """Against plain forward passes: the policy's own after it has moved, the reference's from before."""
    policy = make_policy(layers=1)
    ids = policy.tokenizer.encode("so <answer>7", add_special_tokens=False)
    task = Task(id="t", prompt="?", answer="7")
    rollout = make_rollout("g", 0, len(ids), 1.0, "so <answer>7", None, task, np.asarray(ids))

    def probability(context):
        with torch.no_grad():
            logits = policy.model(torch.tensor([context])).logits[0, -1].double()
        return float(logits.softmax(-1)[ids[-1]])

    before = probability([1, 2])
    reference = Snapshot(policy)
    with torch.no_grad():
        for number, parameter in enumerate(policy.trainable().values()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.1 * noise)
    moved = {name: parameter.detach().clone() for name, parameter in policy.trainable().items()}
    after = probability([1, 2, *ids[:-1]])
    assert abs(probability([1, 2]) - before) > 1e-3
    term = {"name": "answer_likelihood", "debias": True, "baseline": "reference", "bare": ""}
    scoring = Scoring(Config.model_validate({"rewards": [term]}))
    assert scoring.needs_reference
    assert after > before + 1e-3, "another seed: the cut to [0, 1] would hide the difference"
    batch = scoring.score([rollout], policy, History(), (0, 1), reference=reference)
    assert batch.column("reward")[0] == pytest.approx(after - before, abs=1e-6)
    assert all(torch.equal(parameter, moved[name]) for name, parameter in policy.trainable().items())
