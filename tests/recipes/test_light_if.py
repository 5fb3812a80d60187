"""Light-IF: points for each constraint, tokens that are sure and wrong, and an entropy coefficient for each token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_written_steps import Response, k3_gradient, of_the_group, policy_gradient

from rlvr import registry
from rlvr.losses.tokens import TokenBatch
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

TASK = Task(
    id="t",
    prompt="Describe the sea in at most 8 words, without a comma, and use the word blue.",
    info={
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence", "length_constraints:number_words"],
        "kwargs": [{}, {"keywords": ["blue"]}, {"relation": "less than", "num_words": 9}],
    },
)
RESPONSES = [
    "<think>\nNo comma, blue, eight words.\n</think>\nThe sea is wide and blue.",
    "<think>\nI must not write a comma.\n</think>\nThe sea, wide and blue.",
    "<think>\nPreview: blue. Check: done.\n</think>\nThe sea is wide.",
    "<think>\nso\n</think>\nThe sea, the wind and the waves go on and on for miles.",
    "<think>\nso\n</think>\nThe blue sea goes on and on for many many miles",
    "<think>\nblue\n</think>\nThe sea, wide.",
    "Blue sea",
    "<think>\nso\n</think>\nA very long answer about a blue sea, with waves, and wind, and sand",
    "<think>\nThe sea is wide and blue.\n</think>\n",
    "<think>\nThe sea is wide and blue",
]


def followed(text):
    """The number of instructions that the text after the reasoning follows, counted here by hand; none in silence."""
    if "<think>" in text and "</think>" not in text:
        return 0
    answer = text.rpartition("</think>")[2].strip()
    if not answer:
        return 0
    words = answer.replace(",", " ").replace(".", " ").split()
    return ("," not in answer) + ("blue" in [word.lower() for word in words]) + (len(words) < 9)


def points(text):
    """compute_score of Qihoo360/Light-IF@01e9003 rl/verl/verl/utils/reward_score/IF.py: a bound from one side is worth
    0.05, and so is a comma here, of which their scorer knows nothing; 1 more where all three are met."""
    if "</think>" not in text:
        return 0.0
    met = followed(text)
    return 0.05 * met + (met == 3)


@pytest.fixture
def step(recipe_step):
    return recipe_step("light-if", [TASK])


def test_ten_responses(step):
    counts = [followed(text) for text in RESPONSES]
    assert counts == [3, 2, 2, 0, 2, 1, 3, 1, 0, 0]
    expected = [1.15, 0.1, 0.1, 0, 0.1, 0.05, 0, 0.05, 0, 0]
    assert [points(text) for text in RESPONSES] == pytest.approx(expected)
    np.testing.assert_allclose(step.rewards(RESPONSES), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "arguments", "text", "worth"),
    [
        ("startend:end_checker", {"end_phrase": "That is all."}, "The sea. That is all.", 1.1),
        ("length_constraints:number_words", {"relation": "less than", "num_words": 9}, "The sea.", 1.05),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* sea\n* sky", 1.1),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "The [sea].", 1.05),
        ("detectable_format:title", {}, "<<sea>>\nIt is wide.", 1.05),
        ("startend:end_checker", {"end_phrase": "That is all."}, "The sea.", 0.0),
    ],
)
def test_the_points_of_a_kind(recipe_step, kind, arguments, text, worth):
    task = Task(id="k", prompt="Write.", info={"instruction_id_list": [kind], "kwargs": [arguments]})
    (got,) = recipe_step("light-if", [task]).rewards([f"<think>\nso\n</think>\n{text}"])
    assert got == pytest.approx(worth)


def test_a_group_in_which_nobody_follows_all_has_a_signal(step):
    """The case for a dense reward: all or nothing gives this group no advantage. More instructions, more advantage."""
    group = [RESPONSES[i] for i in (3, 5, 1)]
    assert [followed(text) for text in group] == [0, 1, 2]
    batch = step.score([[Response(text, (1,)) for text in group]])
    advantage = batch.column("advantage")
    # With n - 1 three rewards at equal distances have a deviation of that distance.
    np.testing.assert_allclose(advantage, [-1, 0, 1], rtol=5e-3, atol=1e-12)


def test_gradient_of_a_two_token_policy(step):
    """GRPO of the points over tokens, and the KL with the estimator k3 and weight 0.001. Both tokens are as likely, so
    that the entropy has no gradient, whatever its coefficients are."""
    ids = [(1, 0), (1,), (0, 0, 1)]
    group = [Response(RESPONSES[i], own) for i, own in zip((0, 2, 5), ids, strict=True)]
    logits, reference = [0.7, 0.7], [0.5, 0.0]
    reward = policy_gradient(of_the_group([1.15, 0.1, 0.05], 1e-6, unbiased=True), ids, logits, "tokens")
    kl = 0.001 * k3_gradient(ids, logits, reference, "tokens")
    got = step.gradient(step.score([group]), logits, reference=reference)
    np.testing.assert_allclose(got, reward + kl, rtol=1e-9)


def test_the_last_instruction_is_worth_most(step):
    none, one, _, all_of_them = step.rewards([RESPONSES[i] for i in (3, 5, 1, 0)])
    assert all_of_them - one > 1.5 * (one - none) + 1


def tokens_of(logprobs, entropy, advantage):
    """A batch of sequences of several lengths, in an order in which their tokens are mixed."""
    places = [(number, place) for number, own in enumerate(logprobs) for place in range(len(own))]
    shuffled = [places[i] for i in np.random.default_rng(1).permutation(len(places))]

    def flat(values):
        return torch.tensor([values[number][place] for number, place in shuffled], dtype=torch.float64)

    batch = TokenBatch(
        sequence=torch.tensor([number for number, _ in shuffled]),
        sequences=len(logprobs),
        weight=torch.ones(len(shuffled), dtype=torch.float64),
        advantage=flat(advantage),
        proximal_logprobs=flat(logprobs),
        behaviour_logprobs=flat(logprobs),
        statistics={("logprobs", "current"): flat(logprobs), ("entropy", "current"): flat(entropy)},
    )
    return batch, shuffled


def made_up():
    random = np.random.default_rng(7)
    lengths = (1, 4, 10, 7)
    logprobs = [(-random.exponential(2, n)).tolist() for n in lengths]
    entropy = [random.uniform(0, 3, n).tolist() for n in lengths]
    advantage = [[value] * n for value, n in zip((0.5, -1.5, 2.0, 0.0), lengths, strict=True)]
    return logprobs, entropy, advantage


def selector_of(section):
    config = find_paper("light-if").tree
    if section == "sft":
        (written,) = config["stages"][0]["token_select"]
    else:
        (written,) = config["algorithm"]["entropy_select"]
    return registry.build("token_selector", written)


def test_the_tokens_of_a_demonstration_that_are_learned():
    """custom_entropy_trainer.py of the same repository: of a sequence's tokens the int(0.8 n), at least one, with the
    largest CE - 0.8 H; the loss is the mean of their CE."""
    logprobs, entropy, advantage = made_up()
    batch, places = tokens_of(logprobs, entropy, advantage)
    factors = {place: float(f) for place, f in zip(places, selector_of("sft")(batch), strict=True)}
    for number, (own, of_entropy) in enumerate(zip(logprobs, entropy, strict=True)):
        excess = [-logprob - 0.8 * h for logprob, h in zip(own, of_entropy, strict=True)]
        wanted = max(int(0.8 * len(own)), 1)
        chosen = sorted(range(len(own)), key=lambda i: -excess[i])[:wanted]
        loss = sum(-own[i] for i in chosen) / wanted
        got = sum(-own[i] * factors[number, i] for i in range(len(own))) / len(own)
        assert got == pytest.approx(loss)
        assert {i for i in range(len(own)) if factors[number, i]} == set(chosen)


def test_the_entropy_coefficients_of_a_sequence():
    """compute_entropy_with_cov: 10 softmax of (A - mean A)(log p - mean log p) over the sequence, at most 5."""
    logprobs, entropy, advantage = made_up()
    batch, places = tokens_of(logprobs, entropy, advantage)
    factors = {place: float(f) for place, f in zip(places, selector_of("grpo")(batch), strict=True)}
    mean, centre = np.concatenate(logprobs).mean(), np.concatenate(advantage).mean()
    for number, own in enumerate(logprobs):
        covariance = [(advantage[number][0] - centre) * (logprob - mean) for logprob in own]
        total = sum(math.exp(value) for value in covariance)
        for i, value in enumerate(covariance):
            assert factors[number, i] == pytest.approx(min(10 * math.exp(value) / total, 5.0))
    # The only token of the first sequence is at the bound; a right response's sure tokens have the most.
    assert factors[0, 0] == 5.0
    right = [factors[2, i] for i in range(10)]
    assert int(np.argmax(right)) == int(np.argmax(logprobs[2]))
