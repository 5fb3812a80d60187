"""Multiple choice: which of the task's options does the answer name, by letter or by text, and is it the gold one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import LEAST, AnswerVerifier, last_boxed, unparsable, wrong
from rlvr.verifiers.choice.choice_options import Options, read_options, squash

# Matches `the least likely is B`, `worst`; not `the most likely is B`.
_LEAST = re.compile(rf"\b(?:{LEAST})\b", re.IGNORECASE)
"""Words that name an option which is no answer, unless the prompt asks for it."""
# Matches `Which statement is false?`; not `Which is falsely`.
_WRONG = re.compile(r"\b(?:wrong|incorrect|false|untrue)\b", re.IGNORECASE)
# Matches `the wrong answer is B`, `the least likely is B`; not `B is wrong`. `B is wrong` is a claim about B, and
# stays.
_AS_ASKED = re.compile(
    rf"\b(?:{LEAST}|(?:wrong|incorrect|false|untrue)(?= (?:answer|option|choice|statement)\b))", re.IGNORECASE
)
"""Words that an answer repeats from a prompt that asks for the least likely or a wrong option."""


@register_verifier("choice")
@dataclass
class ChoiceVerifier(AnswerVerifier):
    """The answer names the gold option of `info["options"]`, and no other.

    `info["options"]` is a list (labelled A, B, C ...) or a mapping of labels to texts. Where the prompt showed them in
    another order, `info["order"]` says for each place which option (index or label) stood there. The gold is a label,
    an index from 0, or a text, always of the options as stored; a list of these is a task with several right options.
    The verdict's answer is the label as stored, so that votes over shuffled prompts count the same option.
    """

    letters: str = ""
    """Labels to presume where a task lists no options (`ABCD`); empty: such a task is refused."""
    partial_credit: bool = False
    """With several right options: the share of them that is named, if no wrong one is; else all or nothing."""

    def __post_init__(self) -> None:
        if self.letters and (len(set(self.letters)) != len(self.letters) or len(self.letters) < 2):
            raise ConfigError(f"choice: letters={self.letters!r} are not at least two different letters")

    def check_task(self, task: Task) -> str | None:
        options = self._options(task)
        if isinstance(options, str):
            return options
        gold = read_gold(task.answer, options)
        return gold if isinstance(gold, str) else None

    def judge(self, task: Task, answer: str) -> Verdict:
        options = self._options(task)
        assert isinstance(options, Options)
        prompt = str(task.prompt)
        # The option that an answer calls the least likely is the one it does not choose.
        if _LEAST.search(answer) and not _LEAST.search(prompt):
            return wrong("the answer names the least likely option", answer)
        # The words of the question are taken out of the answer, where they would count as a denial of the option.
        if _LEAST.search(prompt) or _WRONG.search(prompt):
            answer = " ".join(_AS_ASKED.sub("", answer).split())
        gold = read_gold(task.answer, options)
        chosen = options.named_by(answer)
        assert not isinstance(gold, str)
        if isinstance(chosen, str):
            return unparsable(chosen, answer)
        named = ", ".join(options.labels[index] for index in sorted(chosen))
        # Two guesses, one of which is right, would be paid otherwise.
        if len(gold) == 1 and len(chosen) > 1:
            return wrong("several options are named where one is right", named)
        if not chosen <= gold:
            return wrong("", named)
        share = len(chosen) / len(gold)
        return Verdict.from_score(share if self.partial_credit else share == 1.0, answer=named)

    def same_answer(self, first: str, second: str) -> bool:
        return squash(first) == squash(second)

    def _options(self, task: Task) -> Options | str:
        return read_options(task.info.get("options"), task.info.get("order"), self.letters)


def read_gold(answer: Any, options: Options) -> frozenset[int] | str:
    """The stored options that are right, at least one; else in words why the gold cannot be used."""
    if isinstance(answer, (list, tuple)):
        each = [read_gold(one, options) for one in answer]
        problems = [one for one in each if isinstance(one, str)]
        if problems:
            return problems[0]
        if not each:
            return "the list of right options is empty"
        return frozenset[int]().union(*(one for one in each if not isinstance(one, str)))
    # Data sets store the gold as an index (MMLU) or as a letter (ARC).
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < len(options.labels):
            return frozenset({answer})
        return f"the answer {answer} is no index of the {len(options.labels)} options (the first is 0)"
    if not isinstance(answer, str) or not answer.strip():
        return f"the answer {answer!r} is not a label, an index or a text of the options"
    if answer.strip() in options.labels:
        return frozenset({options.labels.index(answer.strip())})
    chosen = options.stored.named_by(last_boxed(answer) or answer)
    if isinstance(chosen, str):
        return f"the answer {answer!r}: {chosen}; options: {', '.join(options.labels)}"
    return chosen
