"""ToolRL: the reward of responses to tasks with tool calls, by the authors' own order of matching."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

FORM = re.compile(r"^<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>$", re.DOTALL)


def jaccard(one, other):
    one, other = Counter(list(one)), Counter(list(other))
    return (one & other).total() / (one | other).total() if one or other else 1.0


def of_the_authors(gold, response):
    """verl/utils/reward_score/rlla.py of qiancheng0/ToolRL for a reference with calls alone."""
    form = float(bool(FORM.search(response)) and response.count("<tool_call>") == response.count("</tool_call>") == 1)
    if "<tool_call>" not in response or "</tool_call>" not in response:
        return form - 3
    try:
        lines = response.split("<tool_call>")[1].split("</tool_call>")[0].strip().split("\n")
        made = [json.loads(line) for line in lines]
    except ValueError:
        return form - 3
    got, most, used = jaccard([c["name"] for c in gold], [c["name"] for c in made]), 1.0, set()
    for call in gold:
        most += 1 + len(call["parameters"])
        best, place = 0.0, None
        for i, other in enumerate(made):
            if i in used or other["name"] != call["name"]:
                continue
            own = jaccard(call["parameters"], other["parameters"])
            own += sum(other["parameters"].get(key) == value for key, value in call["parameters"].items())
            if own > best:
                best, place = own, i
        if place is not None:
            used.add(place)
            got += best
    return form + 6 * got / most - 3


ROME = {"name": "weather", "parameters": {"city": "Rome", "days": 2}}
OSLO = {"name": "weather", "parameters": {"city": "Oslo", "days": 2}}
CLOCK = {"name": "clock", "parameters": {"zone": "UTC"}}


def written(*calls, think="<think> so </think>\n"):
    return think + "<tool_call>\n" + "\n".join(json.dumps(call) for call in calls) + "\n</tool_call>"


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ([ROME], written(ROME)),
        ([ROME], written(OSLO)),
        ([ROME], written(CLOCK)),
        ([ROME], written(ROME, CLOCK)),
        ([ROME, CLOCK], written(CLOCK, ROME)),
        ([ROME, CLOCK], written(ROME)),
        ([ROME, OSLO], written(OSLO, ROME)),
        ([ROME], written({"name": "weather", "parameters": {"city": "Rome", "unit": "C"}})),
        ([ROME], written(ROME, think="")),
        ([ROME], "<think> so </think>\nIt is warm in Rome."),
        ([ROME], "<think> so </think>\n<tool_call>\nweather(Rome)\n</tool_call>"),
    ],
)
def test_the_reward_is_the_authors(gold, response):
    verifier = registry.build("verifier", find_paper("toolrl").config.verifier)
    task = Task("t", "p", written(*gold))
    assert verifier.check_task(task) is None
    expected = of_the_authors(gold, response)
    score = verifier.verify(task, response).score
    # The recipe's `missing` says so: an attempt that cannot be read has no form here, and prose in place of a call has.
    if "weather(Rome)" in response:
        assert (score, expected) == (-3, -2)
    elif "<tool_call>" not in response:
        assert (score, expected) == (-2, -3)
    else:
        assert score == pytest.approx(expected)


def test_a_reference_without_a_call_is_said_to_be_missing():
    paper = find_paper("toolrl")
    verifier = registry.build("verifier", paper.config.verifier)
    assert "holds no call" in verifier.check_task(Task("t", "p", "<think> a </think>\n<response> hi </response>"))
    assert paper.recipe.status == "part" and "without a call" in paper.recipe.missing
