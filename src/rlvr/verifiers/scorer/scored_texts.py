"""The part of a response that a model scores, and its forms: a chat, a pair of texts, or a template.

A response may spell the special tokens of the model that scores it, and so pretend further turns. They are broken up by
a space, as those of judges are (rlvr.verifiers.judge.fenced_prompt); what follows an end of turn is not scored at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlvr.errors import ConfigError
from rlvr.records import Task
from rlvr.verifiers.answers import after_reasoning, own_turn
from rlvr.verifiers.judge.fenced_prompt import FIELD, plain, value_of

Part = Literal["answer", "thinking", "all"]

# Matches `<think>`, ` [THINK]\n`; not `a <think>`.
_OPENED = re.compile(r"\s*(?:<(?:think|thinking|thought|reasoning)>|\[THINK\])\s*")
# Matches `</think>\n`; not `</think> so`.
_CLOSED = re.compile(r"\s*(?:</(?:think|thinking|thought|reasoning)>|\[/THINK\])\s*\Z")


def pattern_within(written: str) -> re.Pattern[str]:
    """The regular expression of the option `within`. ConfigError for one without one group."""
    try:
        pattern = re.compile(written, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"scorer: within is no regular expression: {error}") from error
    if pattern.groups != 1:
        raise ConfigError(f"scorer: within has {pattern.groups} groups: one is needed, for what is scored")
    return pattern


def part_of(
    completion: str, part: Part, think_opened_by_prompt: bool = False, within: re.Pattern[str] | None = None
) -> str:
    """The part of a completion that is scored, or what `within` finds in it.

    A completion that never ends its thinking has no answer, and one without any has no thinking: that part is then the
    empty text, which the model scores like another.
    """
    text = _part(own_turn(completion), part, think_opened_by_prompt)
    found = within.search(text) if within is not None else None
    return text if found is None else (found[1] or "")


def _part(own: str, part: Part, think_opened_by_prompt: bool) -> str:
    if part == "all":
        return own
    answer = after_reasoning(own, think_opened_by_prompt)
    if part == "answer":
        return "" if answer is None else answer.strip()
    if answer is None:
        thinking = own
    else:
        thinking = own[: len(own) - len(answer)]
    return _CLOSED.sub("", _OPENED.sub("", thinking, count=1)).strip()


def without_tokens(text: str, tokens: Sequence[str]) -> str:
    """The text with a space inside of each of the special `tokens` that it spells."""
    for token in tokens:
        if len(token) > 1 and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def as_chat(task: Task, response: str | None) -> list[dict[str, Any]]:
    """The task's prompt as a chat, and the response as the assistant's turn; None: without one."""
    prompt = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
    messages = [dict(message) for message in prompt]
    if response is None:
        return messages
    # A prompt may have begun the assistant's turn.
    if messages and messages[-1]["role"] == "assistant":
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{response}"}]
    return [*messages, {"role": "assistant", "content": response}]


def missing_field(template: str, task: Task) -> str | None:
    """Return in words the field of a template that the task lacks, or None."""
    for name in FIELD.findall(template):
        if name not in ("response", "prompt") and _value(task, name) is None:
            return f"the template has {{{name}}}, and the task has none"
    return None


def filled(template: str, task: Task, given: Mapping[str, str]) -> str:
    """The template with its fields: `given` and those of the task. Braces round anything but a name stay."""
    return FIELD.sub(lambda field: given[field[1]] if field[1] in given else plain(_value(task, field[1])), template)


def check_template(verifier: str, template: str) -> None:
    """ConfigError, of the `verifier`, for a template without the response."""
    if "response" not in FIELD.findall(template):
        raise ConfigError(f"{verifier}: the template has no {{response}}, so that the model would not see it")


def reference_of(task: Task, which: str) -> str | None:
    """The text that a response is compared with; None where the task has none."""
    if which == "demonstration":
        return task.demonstration
    return None if task.answer is None else plain(task.answer)


def _value(task: Task, name: str) -> Any:
    return task.demonstration if name == "demonstration" else value_of(task, name)
