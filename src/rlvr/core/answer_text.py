"""Texts in which `{answer}` stands for the task's answer."""

from __future__ import annotations

PLACE = "{answer}"
"""The place of the task's answer in a text."""


def check_place(text: str) -> str:
    """The text; ValueError where it has no place for the task's answer."""
    if PLACE not in text:
        raise ValueError(f"the text {text!r} has to name the task's answer as {PLACE}")
    return text


def with_answer(text: str, answer: object) -> str:
    """The text with `answer` in every place for it."""
    return text.replace(PLACE, str(answer))
