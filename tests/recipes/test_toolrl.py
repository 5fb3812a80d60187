"""ToolRL: the reward of responses by the form and the calls of their reference, and the KL in it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hand_written_steps import Response, clipped_gradient, of_the_group, plan_of, policy_gradient

from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Task
from rlvr.stages.grpo.build_objective import build_penalty

ROME = {"name": "weather", "parameters": {"city": "Rome", "days": 2}}
OSLO = {"name": "weather", "parameters": {"city": "Oslo", "days": 2}}
CLOCK = {"name": "clock", "parameters": {"zone": "UTC"}}
NOW = {"name": "now", "parameters": {}}
THOUGHT = "<think> so </think>"
SAID = "<response> It is warm. </response>"


def block(*calls):
    lines = "\n".join(call if isinstance(call, str) else json.dumps(call) for call in calls)
    return f"<tool_call>\n{lines}\n</tool_call>"


def written(*parts):
    return "\n".join([THOUGHT, *parts])


def overlap(one, other):
    if one == other:
        return 1.0
    shared = sum((Counter(one) & Counter(other)).values())
    return shared / (len(one) + len(other) - shared)


def form_of_the_authors(gold, response):
    """The point for the form: verl/utils/reward_score/rlla.py of qiancheng0/ToolRL@8cee13e."""
    pattern = "^<think>.*?</think>"
    tags = []
    if "<tool_call>" in gold:
        pattern += "\n<tool_call>\n.*?\n</tool_call>"
        tags += ["<tool_call>", "</tool_call>"]
    if "<response>" in gold:
        pattern += "\n<response>.*?</response>"
        tags += ["<response>", "</response>"]
    return float(bool(re.search(pattern + "$", response, re.DOTALL)) and all(response.count(tag) == 1 for tag in tags))


def calls_of_the_authors(gold, response):
    """The points for the calls in the same file, with 3 as the most and -3 as the least."""
    if "<tool_call>" not in gold:
        return 0.0

    def lines(text):
        return [json.loads(line) for line in text.split("<tool_call>")[1].split("</tool_call>")[0].strip().split("\n")]

    wanted = lines(gold)
    try:
        if "</tool_call>" not in response:
            return -3.0
        made = lines(response)
        if made == wanted:
            return 3.0
        reached, most, used = overlap([c["name"] for c in wanted], [c["name"] for c in made]), 1.0, set()
        for call in wanted:
            most += 1.0 + len(call["parameters"])
            gains = {}
            for i, other in enumerate(made):
                if i not in used and other["name"] == call["name"]:
                    mine, its = call["parameters"], other["parameters"]
                    gains[i] = overlap([*mine.keys()], [*its.keys()]) + sum(
                        k in its and its[k] == mine[k] for k in mine
                    )
            if gains and max(gains.values()) > 0:
                best = max(gains, key=lambda i: (gains[i], -i))
                used.add(best)
                reached += gains[best]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return -3.0
    return 6 * reached / most - 3


CASES = [
    # (reference, response, reward by hand or None)
    (written(block(ROME)), written(block(ROME)), 4),
    # names 1, parameter names 1, one of two values: 6 * 3 / 4 - 3, and the form
    (written(block(ROME)), written(block(OSLO)), 2.5),
    (written(block(ROME)), written(block(CLOCK)), -2),
    # names 1/2, everything else: 6 * 3.5 / 4 - 3
    (written(block(ROME)), written(block(ROME, CLOCK)), 3.25),
    (written(block(ROME, CLOCK)), written(block(CLOCK, ROME)), 4),
    (written(block(ROME, CLOCK)), written(block(ROME)), None),
    (written(block(ROME, OSLO)), written(block(OSLO, ROME)), 4),
    (written(block(ROME)), written(block({"name": "weather", "parameters": {"city": "Rome", "unit": "C"}})), None),
    (written(block(NOW)), written(block(NOW)), 4),
    (written(block(NOW)), written(block({"name": "now", "parameters": {"zone": "UTC"}})), None),
    # no thought, or white space that the form does not have: the calls alone
    (written(block(ROME)), block(ROME), 3),
    (written(block(ROME)), THOUGHT + " " + block(ROME), 3),
    (written(block(ROME)), written(block(ROME)) + "\n\n", 4),
    (written(block(ROME)), written(block(ROME), SAID), 4 - 1),
    # prose in place of the call, with its form: neither tag, so -3, and no form of the reference
    (written(block(ROME)), written(SAID), -3),
    (written(block(ROME)), written("It is warm in Rome."), -3),
    # an unreadable call in the right form: -3 and the point for the form
    (written(block(ROME)), written(block("weather(Rome)")), -2),
    (written(block(ROME)), written(block("[1]")), -2),
    (written(block(ROME)), written(block({"parameters": {}})), -2),
    (written(block(ROME)), written(block({"name": ["weather"], "parameters": {}})), -2),
    (written(block(ROME)), written(block({"name": "weather", "parameters": "Rome"})), -2),
    (written(block(ROME)), written(block({"name": "weather"})), -2),
    # a call that the reference lacks needs no parameters: names 1/2
    (written(block(ROME)), written(block(ROME, {"name": "now"})), 3.25),
    (written(block(ROME)), written("<tool_call>\n" + json.dumps(ROME)), -3),
    (written(block(ROME)), written(block(json.dumps(ROME)[:-1])), -2),
    # only the first block counts, and two of them have no form
    (written(block(ROME)), written(block(ROME), block(CLOCK)), 3),
    (written(block(ROME)), written(block("")), -2),
    # a reference with both
    (written(block(ROME), SAID), written(block(ROME), SAID), 4),
    (written(block(ROME), SAID), written(block(ROME)), 3),
    (written(block(ROME), SAID), written(SAID), -3),
    # a reference without a call: the form alone
    (written(SAID), written("<response> Cold. </response>"), 1),
    (written(SAID), written("Cold."), 0),
    (written(SAID), written(block(ROME)), 0),
    (written(SAID), written(block(ROME), SAID), None),
    (written(SAID), written(SAID, SAID), 0),
    (THOUGHT, "<think> Well. </think>", 1),
    (THOUGHT, "Well.", 0),
    # values as Python compares them
    (
        written(block({"name": "f", "parameters": {"n": 1}})),
        written(block('{"name": "f", "parameters": {"n": 1.0}}')),
        4,
    ),
    (
        written(block({"name": "f", "parameters": {"n": 1}})),
        written(block('{"name": "f", "parameters": {"n": "1"}}')),
        2,
    ),
]


@pytest.fixture
def verifier():
    return registry.build("verifier", find_paper("toolrl").config.verifier)


@pytest.mark.parametrize(("gold", "response", "by_hand"), CASES)
def test_the_reward_is_the_authors(gold, response, by_hand, verifier):
    task = Task("t", "p", gold)
    assert verifier.check_task(task) is None
    verdict = verifier.verify(task, response)
    form, calls = form_of_the_authors(gold, response.strip()), calls_of_the_authors(gold, response.strip())
    assert verdict.scores == pytest.approx({"format": form, "correctness": calls})
    assert verdict.score == pytest.approx(form + calls)
    if by_hand is not None:
        assert verdict.score == pytest.approx(by_hand)
    best = 4 if "<tool_call>" in gold else 1
    assert (verdict.status.value == "correct") == (verdict.score == best)


def test_calls_are_paired_one_after_another(verifier):
    """The first call of the reference takes the one that the second needs: the best assignment would reach 4.5 / 7,
    the authors' order reaches 7/3 / 7."""
    first = {"name": "f", "parameters": {"a": 1, "b": 2}}
    second = {"name": "f", "parameters": {"a": 1, "c": 3}}
    other = {"name": "f", "parameters": {"b": 9}}
    gold, response = written(block(first, second)), written(block(second, other))
    assert calls_of_the_authors(gold, response) == pytest.approx(-1)
    assert verifier.verify(Task("t", "p", gold), response).score == pytest.approx(0)


@pytest.mark.parametrize(
    ("gold", "says"),
    [
        ([ROME], "the text of a reference response"),
        (written(block("weather(Rome)")), "no JSON"),
        (written("<tool_call>"), "without <tool_call> and </tool_call>"),
        (written(block({"name": "f"})), "parameters of a call"),
    ],
)
def test_a_reference_that_cannot_be_read_is_named(gold, says, verifier):
    task = Task("t", "p", gold)
    assert says in verifier.check_task(task)
    assert not verifier.verify(task, written(block(ROME))).decided


def test_a_deep_value_costs_what_an_unreadable_call_costs(verifier):
    deep = '{"name": "weather", "parameters": {"city": ' + "[" * 200_000 + "]" * 200_000 + "}}"
    assert verifier.verify(Task("t", "p", written(block(ROME))), written(block(deep))).score == -2


def test_gradient_of_a_two_token_policy(recipe_step):
    """GRPO of these rewards over tokens, with the deviation of n - 1, and in a later update the ratio to the trainer's
    own policy before the first one, whatever the engine's log-probs were (verl's old_log_prob); the entropy bonus of
    0.001 has no gradient where both tokens are as likely."""
    step = recipe_step("toolrl", [Task("t", "p", written(block(ROME)))])
    texts = [written(block(ROME)), written(block(OSLO)), block(ROME), written("so")]
    ids = [(1,), (0, 1), (0,), (0, 0, 1)]
    advantages = of_the_group([4, 2.5, 3, -3], epsilon=1e-6, unbiased=True)
    # At the first step the divergence from the reference is 0; the trainer's own policy would have to compute it.
    step.stage.penalty = None
    batch = step.score([[Response(text, own) for text, own in zip(texts, ids, strict=True)]])
    now, engine = [0.0, 0.0], [-0.2, 0.1]
    expected = policy_gradient(advantages, ids, now, "tokens")
    np.testing.assert_allclose(step.gradient(batch, now), expected, rtol=1e-9)
    np.testing.assert_allclose(step.gradient(batch, now, engine=engine), expected, rtol=1e-9)
    old = [0.3, 0.0]
    expected = clipped_gradient(advantages, ids, now, old, "tokens")
    np.testing.assert_allclose(step.gradient(batch, now, old=old, engine=engine), expected, rtol=1e-9)


def test_the_divergence_is_taken_from_the_reward():
    """Off in the loss, `use_kl_loss=False`, is on in the reward: verl/trainer/ppo/ray_trainer.py, apply_kl_penalty."""
    penalty = build_penalty(plan_of("toolrl").config.algorithm)
    assert (penalty.where, penalty.coef) == ("reward", 0.001)
    now, then = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.8)])
    assert float(penalty.divergence(now, then)) == pytest.approx(math.log(0.5 / 0.8))
