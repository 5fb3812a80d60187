"""The reward of "ToolRL": the form that the reference has, and the calls of the reference, paired as its authors do."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register
from rlvr.verifiers.base import Verifier

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_RESPONSE = ("<response>", "</response>")
# (the reference has a call, it has a response) -> the form of a right response. The groups between the tags may hold
# any text, also none; the line breaks beside the tags are wanted as they stand.
_FORMS = {
    (True, False): re.compile(r"<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>", re.DOTALL),
    (False, True): re.compile(r"<think>.*?</think>\n<response>.*?</response>", re.DOTALL),
    (True, True): re.compile(
        r"<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>\n<response>.*?</response>", re.DOTALL
    ),
    (False, False): re.compile(r"<think>.*?</think>", re.DOTALL),
}
# CORRECTMAX1 = 0 of train_grpo.sh: correctness lies in [-3, 3], and the form gives 1 or 0.
_MOST = 3.0


class _UnreadableError(ValueError):
    """Calls that are no JSON objects with a name and parameters; the text says why."""


@register("verifier", "toolrl")
@dataclass
class ReferenceCalls(Verifier):
    """1 for the form of the reference, and -3 to 3 for its calls; without a call in the reference, 0 for them.

    The reference is the text `task.answer`: `<think>`, then `<tool_call>` (one JSON object with `name` and `parameters`
    a line), `<response>`, or both. A response without the two tags of a call, or whose first block cannot be read, has
    -3. Else the calls have 6 R / S - 3: R is the Jaccard index of the names (as multisets) plus, for each call of the
    reference in order, the largest sum of the Jaccard index of parameter names and the number of equal values over
    the calls of that name which are not yet taken; S = 1 + calls + parameters of the reference. Values are compared as
    Python compares them, so that 1, 1.0 and true are equal. As rlla.py of qiancheng0/ToolRL (commit 8cee13e,
    verl/utils/reward_score) does with the settings of train_grpo.sh; Qian et al. 2025, arXiv 2504.13958, section 3.3.

    `Verdict.scores` has `format`, 0 or 1, and `correctness`, in [-3, 3].
    """

    def verify(self, task: Task, completion: str) -> Verdict:
        problem = self.check_task(task)
        if problem is not None:
            return Verdict.undecided(f"bad gold: {problem}")
        text = completion.strip()
        layout = float(_has_form(text, task.answer))
        if _OPEN not in task.answer:
            status = VerdictStatus.CORRECT if layout else VerdictStatus.WRONG
            return Verdict(status, layout, scores={"format": layout, "correctness": 0.0})
        wanted = _read_calls(task.answer)
        try:
            made = _read_calls(text, {call["name"] for call in wanted})
        except _UnreadableError as error:
            scores = {"format": layout, "correctness": -_MOST}
            return Verdict(VerdictStatus.UNPARSABLE, layout - _MOST, reason=str(error), scores=scores)
        correctness = 2 * _MOST * _agreement(wanted, made) - _MOST
        score = layout + correctness
        status = VerdictStatus.PARTIAL
        if score == _MOST + 1:
            status = VerdictStatus.CORRECT
        elif correctness == -_MOST:
            status = VerdictStatus.WRONG
        return Verdict(status, score, scores={"format": layout, "correctness": correctness})

    def check_task(self, task: Task) -> str | None:
        if not isinstance(task.answer, str):
            return f"the answer is the text of a reference response, not {type(task.answer).__name__}"
        if _OPEN in task.answer:
            try:
                calls = _read_calls(task.answer)
            except _UnreadableError as error:
                return f"the answer: {error}"
            if not all(isinstance(call.get("parameters"), dict) for call in calls):
                return "the answer: the parameters of a call are an object"
        return None


def _has_form(text: str, reference: str) -> bool:
    """True where `text` has the blocks of `reference`, each tag of a call or a response once, and nothing else."""
    has_call = _OPEN in reference
    has_response = _RESPONSE[0] in reference
    once = [*((_OPEN, _CLOSE) if has_call else ()), *(_RESPONSE if has_response else ())]
    # Counted first: with one tag each, the patterns take linear time.
    return all(text.count(tag) == 1 for tag in once) and _FORMS[has_call, has_response].fullmatch(text) is not None


def _read_calls(text: str, wanted: Collection[Any] = ()) -> list[dict[str, Any]]:
    """The calls of the first block, one a line; those with a name in `wanted` have parameters, others need none.

    _UnreadableError where the authors' code raises, which there and here costs the same as the worst calls.
    """
    if _OPEN not in text or _CLOSE not in text:
        raise _UnreadableError(f"without {_OPEN} and {_CLOSE}")
    block = text.split(_OPEN)[1].split(_CLOSE)[0].strip()
    try:
        calls = [json.loads(line) for line in block.split("\n")]
    except (ValueError, RecursionError):
        raise _UnreadableError("a line of the calls is no JSON") from None
    for call in calls:
        # A name that is a list or an object cannot be counted.
        if not isinstance(call, dict) or "name" not in call or isinstance(call["name"], (list, dict)):
            raise _UnreadableError("a call is an object with a name")
        if call["name"] in wanted and not isinstance(call.get("parameters"), dict):
            raise _UnreadableError("the parameters of a call are an object")
    return calls


def _agreement(wanted: Sequence[Mapping[str, Any]], made: Sequence[Mapping[str, Any]]) -> float:
    """R / S, in [0, 1]."""
    reached = _jaccard([call["name"] for call in wanted], [call["name"] for call in made])
    most = 1.0
    free = set(range(len(made)))
    for call in wanted:
        parameters = call["parameters"]
        most += 1 + len(parameters)
        best = 0.0
        taken = None
        # In the order of the calls: among equals the first is taken.
        for i in sorted(free):
            if made[i]["name"] != call["name"]:
                continue
            others = made[i]["parameters"]
            equal = sum(key in others and others[key] == value for key, value in parameters.items())
            gain = _jaccard(list(parameters), list(others)) + equal
            if gain > best:
                best = gain
                taken = i
        if taken is not None:
            free.remove(taken)
        reached += best
    return reached / most


def _jaccard(one: Sequence[Any], other: Sequence[Any]) -> float:
    """The Jaccard index of two multisets; 1 where both are empty."""
    first = Counter(one)
    second = Counter(other)
    union = (first | second).total()
    return (first & second).total() / union if union else 1.0
