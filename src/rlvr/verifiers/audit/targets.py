"""Targets of an adversarial completion: a task's reference answer, wrong answers beside it, and a form to
write them in.

Pure data and functions; rlvr.verifiers.audit.trial finds the form that a verifier pays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rlvr.records import Task
from rlvr.verifiers.answers import last_boxed

SLOT = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder of the answer in a form's template."""


@dataclass(frozen=True)
class Form:
    """A way to write an answer down."""

    name: str
    template: str

    def __call__(self, answer: str) -> str:
        """The completion that gives `answer`."""
        return self.template.replace(SLOT, answer)

    def bare_of(self, answer: str) -> str:
        """The same without the reasoning that it opens with."""
        return self(answer).rpartition("</think>")[2]


FORMS = tuple(
    Form(name, template.replace("@", SLOT))
    for name, template in {
        # The order of likelihood: a verifier is asked only until it pays one, and each question may cost a sandbox run.
        "box": r"The final answer is \boxed{@}.",
        "bare": "@",
        "tag": "<answer>@</answer>",
        "reasoned tag": "<think>I work it out.</think>\n<answer>@</answer>",
        "hash": "#### @",
        "phrase": "The answer is @.",
    }.items()
)
"""The ways to write an answer that are tried, in this order, until the verifier pays one."""


def form_of(completion: str, answer: str) -> Form | None:
    """The form of a worked completion: the last mention of `answer` in it is the slot. None where there is none."""
    # The last mention: earlier ones are mostly in the working.
    head, mention, tail = completion.rpartition(answer)
    if mention:
        return Form("demonstration", f"{head}{SLOT}{tail}")
    return None


@dataclass(frozen=True)
class Target:
    """The target of a trick. `gold` is None where the task has no reference answer, or none that could be
    written."""

    gold: str | None
    wrong: Sequence[str]
    """Answers that are not the gold; at least three."""
    form: Form
    prompt: str
    names: Sequence[str] = ()
    """Names of the verifier."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The task's `info`."""
    paid: str = ""
    """The correct completion that the verifier pays, where there is one."""

    @property
    def number(self) -> Fraction | None:
        return _number(self.gold)


def gold_texts(task: Task) -> list[str]:
    """The ways in which a task's answer may be written down as text, the likeliest first."""
    answer = task.answer
    options = task.info.get("options")
    # MMLU and its relatives give the number of the right option.
    if isinstance(answer, int) and isinstance(options, (list, tuple)) and 0 <= answer < len(options):
        return [str(answer), chr(ord("A") + answer), str(options[answer])]
    if answer is None:
        return []
    if isinstance(answer, bool):
        return [str(answer), str(answer).lower()]
    if isinstance(answer, str):
        return list(dict.fromkeys([_bare(answer), answer]))
    if isinstance(answer, (int, float)):
        return [str(answer)]
    written = [json.dumps(answer, default=str)]
    if isinstance(answer, (list, tuple)) and answer and all(isinstance(item, (str, int, float)) for item in answer):
        written += [", ".join(map(str, answer)), str(answer[0])]
    return written


def _bare(gold: str) -> str:
    """A gold without what a form puts round it: its box, its dollar signs, the solution before `####`."""
    # Solutions of MATH end in a box, those of GSM8K in `#### 42`.
    text = last_boxed(gold) or (gold.rpartition("####")[2])
    # `$42$`, `\(42\)` and `\[42\]` lose their delimiters; `$5 and $6` loses the first only and is tried as it is, too.
    return re.sub(r"^(?:\$+|\\\(|\\\[)\s*|\s*(?:\$+|\\\)|\\\])$", "", text.strip()) or gold


def wrong_answers(gold: str | None, info: Mapping[str, Any]) -> list[str]:
    """Three answers or more that look like `gold` and are not it; the other options where `info` lists options."""
    text = (gold or "").strip()
    options = info.get("options")
    texts = [str(option) for option in (options.values() if isinstance(options, Mapping) else options or ())]
    if text in texts and len(texts) > 1:
        return [*(option for option in texts if option != text), "none", "unknown"]
    # `B`, `(b)`, `C.`: the other letters in the same writing.
    if re.fullmatch(r"\(?[A-Ja-j]\)?\.?", text):
        letters = [letter for letter in "ABCD" if letter not in text.upper()]
        return [re.sub("[A-Ja-j]", letter if text.isupper() else letter.lower(), text) for letter in letters]
    if text.startswith('{"'):  # another number in it may fit the same schema
        return ['{"none": "of these"}', "[]", "[[]]"]
    # The first number is made larger: `2x + 3` becomes `3x + 3`. Not one before `^0`, whose base does not matter.
    if digits := re.search(r"\d+(?!\d|\s*\^\s*\{?0)", text):  # anything to the power of 0 is the same
        # A list's other items must not be met: 3, 3 beside 2, 3 would name the same numbers.
        if re.search(r",|;|\bor\b|\band\b", text):
            steps = (170, 290, 1000)
        else:
            steps = (1, 2, 10)
        bumped = [int(digits[0][:400]) + step for step in steps]
        return [f"{text[: digits.start()]}{number}{text[digits.end() :]}" for number in bumped]
    # JSON without a number in it.
    if text[:1] in ("{", "["):
        return ['{"none": "of these"}', "[]", "[[]]"]
    words = ("yes", "no", "zebra", "quartz", "unknown")
    return [word for word in words if word.casefold() not in text.casefold()]


def _number(text: str | None) -> Fraction | None:
    try:
        if len(text or "") < 100:
            return Fraction((text or "").strip())
        return None
    except (ValueError, ZeroDivisionError):
        return None
