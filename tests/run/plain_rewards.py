"""Reward functions in a file that imports nothing: each is loaded in a process of its own."""

from __future__ import annotations


def correct(completion, answer):
    """1 where the answer is in the completion."""
    return float(answer in completion)


def brief(completions, **columns):
    """In TRL's form: 1 for completions of at most three characters."""
    return [float(len(completion) <= 3) for completion in completions]
