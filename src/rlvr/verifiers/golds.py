"""Gold answers that are texts: one, or several of which any counts."""

from __future__ import annotations

from typing import Any


def read_texts(answer: Any) -> tuple[str, ...] | str:
    """The texts that are right, at least one, none empty; else in words why the gold cannot be used."""
    texts = answer if isinstance(answer, (list, tuple)) else [answer]
    if not texts:
        return "the list of answers is empty"
    for text in texts:
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            return "the task has no answer" if text is None else f"the answer {text!r} is not a text or a number"
        if isinstance(text, int) and abs(text) >= 10**1000:
            return "the answer has too many digits"
        if not str(text).strip():
            return "the answer is empty"
    return tuple(str(text) for text in texts)
