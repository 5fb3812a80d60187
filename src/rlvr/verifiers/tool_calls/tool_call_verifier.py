"""The tool-call verifier: the calls of a completion against the calls that the task wants.

Invariants: an attempted call that cannot be read is never "no call"; nothing is evaluated; what the answer causes
scores the least, only a bad gold is undecided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import after_reasoning
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.documents import MAX_LENGTH, DocumentError, JsonEquality, TextMatch, read_json
from rlvr.verifiers.tool_calls.matching import Argument, Match, Wanted, match_calls
from rlvr.verifiers.tool_calls.reading import (
    MAX_CALLS,
    CallError,
    Format,
    ToolCall,
    ToolSchema,
    as_call,
    read_calls,
    read_tools,
)

Credit = Literal["none", "fraction", "toolrl"]


@register_verifier("tool_calls")
@dataclass
class ToolCallVerifier(Verifier):
    """The completion makes the tool calls of `task.answer`, and no other.

    The gold is a list of calls: `{"name", "arguments"}`, `{name: arguments}` (BFCL), OpenAI's form, or text that holds
    them. An empty list wants an answer without a call. `task.info["tools"]`, where given, holds the tools' schemas:
    defaults may then be written or left out, and Python-like calls may leave out names of arguments.

    Score: with `credit: none` 1 (all calls as wanted) or 0; with `fraction` in [0, 1]; with `toolrl` in [-3, 4].
    `Verdict.scores` has `names`, `parameters`, `values` and `total`, each in [0, 1], and `format`, 0 or 1.
    """

    format: Format = "hermes"
    """Format of the calls: `hermes` (`<tool_call>` blocks, Qwen too), `json` (a list), `openai`, `python`
    (`f(a=1)`)."""
    credit: Credit = "none"
    """Partial credit: `none`, `fraction` (ToolRL's R_max / S_max), or `toolrl`, its reward 6 R_max / S_max - 3 plus 1
    for the format (arXiv 2504.13958, section 3.3): one `<think>` block, then nothing but the calls. The verifier
    `toolrl` is the rule of its authors' code, for their data alone."""
    extra_calls_cost: bool = True
    """With partial credit, calls beyond those wanted lower all parts; false is the paper's formula, where guesses
    pay."""
    ordered: bool = False
    """The order of calls counts."""
    acceptable_values: bool = False
    """Each argument of the gold is a list of acceptable values; an empty text among them: it may be left out (BFCL)."""
    int_is_float: bool = True
    """1 and 1.0 are the same argument: JSON has one kind of number."""
    number_is_text: bool = False
    """1 and "1" are the same argument."""
    text: TextMatch = "exact"
    """Texts are compared `exact`, or as in `bfcl`: without case, spaces and `,./-_*^`."""
    think_opened_by_prompt: bool = False
    """The prompt's template ends in `<think>`: a completion without `</think>` has no answer yet."""

    def __post_init__(self) -> None:
        if self.format == "python":  # its parser has crashed interpreters: in a worker process it costs one verdict
            self.needs = Needs(process=True)  # type: ignore[misc]

    def verify(self, task: Task, completion: str) -> Verdict:
        try:
            tools = read_tools(task.info.get("tools") or [])
            wanted = self._wanted(task, tools)
        except (CallError, DocumentError) as error:
            return Verdict.undecided(f"bad gold: {error}")
        text = after_reasoning(completion, self.think_opened_by_prompt)
        if text is None:
            return self._unparsable("the reasoning never ended")
        if not text.strip() or len(text) > MAX_LENGTH:
            return self._unparsable("nothing after the reasoning" if not text.strip() else f"{len(text)} characters")
        try:
            reading = read_calls(text, self.format, tools)
        except (CallError, DocumentError) as error:
            return self._unparsable(str(error)[:200])
        equality = JsonEquality(self.int_is_float, self.number_is_text, self.text)
        match = match_calls(wanted, reading.calls, equality, self.ordered, self.extra_calls_cost)
        # ToolRL's format reward: one `<think>` block at the start, then nothing but the calls, or prose where no call
        # is made.
        layout = self._thinks_once(completion) and (reading.bare or not reading.calls)
        return self._verdict(match, layout, f"{len(reading.calls)} calls, {len(wanted)} wanted")

    def check_task(self, task: Task) -> str | None:
        try:
            tools = read_tools(task.info.get("tools") or [])
            wanted = self._wanted(task, tools)
        except (CallError, DocumentError) as error:
            return str(error)
        unknown = next((call.name for call in wanted if tools and call.name not in tools), None)
        if unknown is not None:
            return f"the answer calls {unknown!r}, which info['tools'] does not have: it has {', '.join(tools)}"
        return None

    def _verdict(self, match: Match, layout: bool, reason: str) -> Verdict:
        if self.credit != "none":
            score = match.total
        else:
            score = float(match.total == 1)
        if match.total == 1:
            status = VerdictStatus.CORRECT
        elif score > 0:
            status = VerdictStatus.PARTIAL
        else:
            status = VerdictStatus.WRONG
        if self.credit == "toolrl":
            # ToolRL (section 3.3): R_correct = 6 R_max / S_max - 3, in [-3, 3], plus R_format, 0 or 1.
            score = 6 * match.total - 3 + layout
        parts = {"names": match.names, "parameters": match.parameters, "values": match.values, "total": match.total}
        return Verdict(status, score, reason=reason, scores={**parts, "format": float(layout)})

    def _unparsable(self, reason: str) -> Verdict:
        # The lowest score of an answer that can be read, so that an unreadable one is never better.
        least = -3.0 if self.credit == "toolrl" else 0.0
        parts = {"names": 0.0, "parameters": 0.0, "values": 0.0, "total": 0.0, "format": 0.0}
        return Verdict(VerdictStatus.UNPARSABLE, least, reason=reason, scores=parts)

    def _thinks_once(self, completion: str) -> bool:
        opened = completion.count("<think>")
        if self.think_opened_by_prompt:
            starts = opened == 0
        else:
            starts = opened == 1 and completion.lstrip().startswith("<think>")
        return starts and completion.count("</think>") == 1

    def _wanted(self, task: Task, tools: Mapping[str, ToolSchema]) -> list[Wanted]:
        calls = self._gold_calls(task.answer, tools)
        if len(calls) > MAX_CALLS:
            raise CallError(f"the answer has {len(calls)} calls, over the limit of {MAX_CALLS}")
        return [self._wanted_call(call, tools[call.name].defaults if call.name in tools else {}) for call in calls]

    def _gold_calls(self, answer: Any, tools: Mapping[str, ToolSchema]) -> list[ToolCall]:
        if isinstance(answer, str):
            if answer.strip() == "[]":
                return []
            if answer.lstrip()[:1] in ("[", "{") and self.format != "python":
                answer = read_json(answer)
            elif calls := read_calls(answer, self.format, tools).calls:
                return calls
            else:
                raise CallError(f"the answer holds no call in the format {self.format}; where none is right, it is []")
        if isinstance(answer, Mapping):
            answer = [dict(answer)]
        if not isinstance(answer, Sequence):
            raise CallError(
                f"the answer is a list of calls, not {type(answer).__name__}; where none is right, it is []"
            )
        return [as_call(item) for item in answer]

    def _wanted_call(self, call: ToolCall, defaults: Mapping[str, Any]) -> Wanted:
        equality = JsonEquality(self.int_is_float, self.number_is_text, self.text)
        arguments: dict[str, Argument] = {}
        for key, value in call.arguments.items():
            if self.acceptable_values:
                _check_choices(value, f"{call.name}.{key}")
            values = value if self.acceptable_values else [value]
            # An argument whose wanted value is the default may be left out: the tool does the same.
            by_default = key in defaults and any(equality.same(defaults[key], one) for one in values)
            optional = by_default or (self.acceptable_values and "" in values)
            arguments[key] = Argument(values, optional, nested=self.acceptable_values)
        return Wanted(call.name, arguments, defaults)


def _check_choices(value: Any, place: str) -> None:
    """CallError unless `value` is a list of acceptable values, and so is every entry of the mappings among them."""
    if not isinstance(value, list) or not value:
        raise CallError(
            f"with acceptable_values, {place} of the answer is a list of acceptable values, not {value!r}"[:300]
        )
    for choice in value:
        for inner in choice if isinstance(choice, list) else [choice]:
            if isinstance(inner, dict):
                for key, choices in inner.items():
                    _check_choices(choices, f"{place}.{key}")
