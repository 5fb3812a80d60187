"""Components of the broken runs of runs.yaml: an easy task, and components with common faults."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from rlvr import Batch, Task

SLEEPS_AFTER = 800
"""Calls of `gets_slower`, per process, before it does."""
_calls = 0


def sums() -> Iterator[Task]:
    """The 55 sums of two digits that are a digit, each with a worked answer."""
    for a in range(10):
        for b in range(10 - a):
            yield Task(f"{a}+{b}", f"{a}+{b}=?", str(a + b), demonstration=f"{a}+{b}={a + b} #### {a + b}")


def carries() -> Iterator[Task]:
    """Sums of two digits that are no digit, which the policy never saw."""
    for a in range(10):
        for b in range(10 - a, 10):
            yield Task(f"{a}+{b}", f"{a}+{b}=?", str(a + b))


# verifiers


def pays_all() -> float:
    """Right whatever is written."""
    return 1.0


def half_for_all() -> float:
    """The same to everybody, and neither right nor wrong."""
    return 0.5


def raises(completion: str, answer: str) -> float:
    """Takes the third word for granted, and raises where there is none."""
    return float(completion.split(" ")[2] == answer)


def loops(completion: str, answer: str) -> float:
    """Looks for the end of a word of four tokens that may not be there, for ever."""
    words = completion.split(" ")
    while len(words) > 3 or not completion.endswith(tuple("0123456789")) or answer not in completion:
        time.sleep(0.01)
    return 1.0


def ends_with_answer(completion: str, answer: str) -> float:
    """Right where the text ends with the answer; unlike `math`, whose rules for half-formed answers change."""
    return float(completion.endswith(f" {answer}"))


def gets_slower(completion: str, answer: str) -> float:
    """A service that slows down under load."""
    global _calls
    _calls += 1
    time.sleep(0.05 if _calls > SLEEPS_AFTER else 0.0)
    return float(completion.endswith(f" {answer}"))


# reward terms


def wordy(token_ids: list[int]) -> float:
    """More for more tokens."""
    return len(token_ids) / 24


def digit_seven(completion: str) -> float:
    """The share of sevens: rewards something that has nothing to do with the task."""
    return completion.count("7") / max(1, len(completion))


def forgets(completion: str) -> float | None:
    """No value for answers that end in an even digit."""
    return None if completion[-1:] in tuple("02468") else 1.0


def jackpot(completion: str) -> float:
    """A thousand for something that is seldom asked for."""
    return 1000.0 * ("0=0" in completion)


# advantages with a fault


def longer(batch: Batch) -> np.ndarray:
    """A length penalty with the wrong sign, and nothing else."""
    return _centred(batch, 1.0)


def shorter(batch: Batch) -> np.ndarray:
    """A length penalty, and nothing else."""
    return _centred(batch, -1.0)


def _centred(batch: Batch, sign: float) -> np.ndarray:
    lengths = np.asarray([rollout.completion_length for rollout in batch.rollouts], dtype=np.float64)
    return sign * (lengths - lengths.mean()) / (lengths.std() + 1e-6)
