"""The task of the mechanism curves: additions whose worked answers begin with words that do no work.

A demonstration is that of the quickstart (`rlvr.data.arithmetic`) after 0 to 6 times the word `so`, so that the length
of a response is free: it may grow or shrink without a change of the sum. `one_in_ten_wrong` is a verifier that errs.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Literal

from rlvr.core.seeding import seed_of
from rlvr.data.arithmetic import arithmetic
from rlvr.records import Task

MOST_WORDS = 6
ERRORS = 0.1


def padded_sums(*, count: int, split: Literal["train", "eval"]) -> Iterator[Task]:
    """`count` different additions of two numbers of two digits, of one side of the split (rlvr.data.in_split)."""
    draws = random.Random(seed_of("filler", split))
    for task in arithmetic(count=count, split=split, digits=[2]):
        words = "so " * draws.randint(0, MOST_WORDS)
        yield dataclasses.replace(task, demonstration=f"{words}{task.demonstration}")


def one_in_ten_wrong(completion: str, answer: str, prompt: str) -> float:
    """1 where the number after `####` is the answer, else 0, and the opposite for a tenth of all responses.

    A hash of question and response chooses them, so that the same response to a question always has the same reward.
    """
    right = completion.rpartition("#### ")[2].strip() == answer
    errs = random.Random(seed_of("error", str(prompt), completion)).random() < ERRORS
    return float(right != errs)
