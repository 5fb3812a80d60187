"""Where in a completion the final answer stands: an explicit policy, the same for every verifier.

Only what comes after the last closed reasoning block counts, and an unclosed `<think>` means that there is no answer yet.
In that text several methods are tried in order, and the first that finds something wins; each takes its last
occurrence. So a completion cannot be paid for several guesses: there is always exactly one answer, or none.

Invariant: every function here takes time linear in the text, and none raises on any string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

Method = Literal["boxed", "hash", "tag", "phrase"]
Fallback = Literal["none", "last_number", "whole"]

METHODS: tuple[Method, ...] = ("boxed", "hash", "tag", "phrase")
"""`\\boxed{}` or `\\fbox{}`, then a `####` line (GSM8K), then `<answer>...</answer>`, then "the answer is ..."."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\[^A-Za-z]|[{}]", re.DOTALL)
_PHRASE = re.compile(r"\banswer[\s*]*(?:is\b[\s*:]*|:[\s*]*)", re.IGNORECASE)
_SENTENCE = re.compile(r"(?:\$\$.*?\$\$|\\\[.*?\\\])?.*?(?=\.\s|\.?\Z|\.?\n)", re.DOTALL)
_NUMBER = re.compile(r"(?:(?<![\w)])[-+\u2212])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?")


def extract_answer(
    completion: str,
    methods: Sequence[Method] = METHODS,
    fallback: Fallback = "none",
    think_opened_by_prompt: bool = False,
) -> str | None:
    """The final answer as the completion writes it, stripped, or None when there is none.

    `fallback` says what to do when no method finds anything: give up (`none`), take the last number (`last_number`), or
    the whole text after the reasoning (`whole`). With `think_opened_by_prompt` a completion without `</think>` is still
    reasoning.
    """
    text = after_reasoning(completion, think_opened_by_prompt)
    if text is None:
        return None
    for method in methods:
        answer = _FINDERS[method](text)
        if answer and (answer := answer.strip()):
            return answer
    if fallback == "last_number":
        return last_number(text)
    return (text.strip() or None) if fallback == "whole" else None


def after_reasoning(completion: str, think_opened_by_prompt: bool = False) -> str | None:
    """What comes after the last `</think>`; None where the completion is still thinking."""
    _, closed, text = completion.rpartition("</think>")
    if "<think>" in text or (think_opened_by_prompt and not closed):
        return None
    return text


def last_boxed(text: str) -> str | None:
    """The content of the last balanced `\\boxed{}` or `\\fbox{}`; of nested ones the outermost."""
    first = _BOX.search(text)
    if first is None:
        return None
    answer, open_braces = None, []  # of each open brace: where a box's content starts, or -1
    for token in _BRACE.finditer(text, first.start()):
        if token[1] or token[0] == "{":
            open_braces.append(token.end() if token[1] else -1)
        elif token[0] == "}" and open_braces and (start := open_braces.pop()) >= 0:
            answer = (start, token.start())
    return None if answer is None else text[slice(*answer)]


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`."""
    _, mark, rest = text.rpartition("####")
    return rest.partition("\n")[0] if mark else None


def last_tag(text: str) -> str | None:
    """The content of the last closed `<answer>...</answer>`."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer if closed and opened else None


def after_phrase(text: str) -> str | None:
    """The rest of the sentence after the last "the answer is", "final answer:" and the like."""
    end = -1
    for match in _PHRASE.finditer(text):
        end = match.end()
    sentence = _SENTENCE.match(text, end) if end >= 0 else None
    return sentence[0] if sentence else None


def last_number(text: str) -> str | None:
    """The last number written in digits."""
    number = None
    for match in _NUMBER.finditer(text):
        number = match[0]
    return number.rstrip(",") if number else None


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "boxed": last_boxed,
    "hash": after_hashes,
    "tag": last_tag,
    "phrase": after_phrase,
}
