"""Generated one-line functions: a small policy finds which function has two given values, and writes it in Python.

The question is a chat message, "f(0)=37 f(4)=41"; the demonstration is "def f(x):return x+37"; the tests (kind
`function` of the verifier `code`) ask for other values, which the question does not show. Invariants: the two values
fit no other function x+n, x-n or x*n; training and evaluation tasks never share a question; the side is decided by a
hash of the question.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from rlvr.core.seeding import seed_of
from rlvr.data.splits import EVAL_SHARE, in_split
from rlvr.errors import ConfigError
from rlvr.records import Task
from rlvr.registry import register

# From 2 on, since x+0, x-0 and x*1 are one function; to 99 by choice.
NUMBERS = range(2, 100)
"""A function's number."""
# From 2 on: together with the first value it tells the three forms apart.
SECOND = range(2, 10)
"""The second argument that a question shows; the first one is where the function's value is its number: 1 for x*n, else
0."""
# Outside of SECOND, so that a table of the two values that are shown passes no test.
TESTED = (11, 20, -3)
"""Arguments that are tested, none of which a question shows."""


@register("source", "functions")
def functions(*, count: int, split: Literal["train", "eval"] = "train", seed: int = 0) -> Iterator[Task]:
    """`count` different questions about functions x+n, x-n and x*n, of one side of the split.

    The first tasks of a larger count are those of a smaller one. ConfigError when there are not that many.
    """
    possible = 3 * len(NUMBERS) * len(SECOND) * (EVAL_SHARE if split == "eval" else 1 - EVAL_SHARE)
    # Questions are drawn at random until enough differ: beyond half of them most draws would be repeats.
    if count > possible / 2:
        raise ConfigError(f"source 'functions': {count} different tasks are too many: at most {int(possible / 2)}")
    numbers = random.Random(seed_of("functions", seed, split))
    seen: set[str] = set()
    while len(seen) < count:
        operator = numbers.choice("+-*")
        number = numbers.choice(NUMBERS)
        shown = (int(operator == "*"), numbers.choice(SECOND))
        question = " ".join(f"f({x})={_value(x, operator, number)}" for x in shown)
        if question not in seen and in_split(question, split, EVAL_SHARE):
            seen.add(question)
            yield _task(question, operator, number)


def _task(question: str, operator: str, number: int) -> Task:
    cases = [{"args": [x], "expected": _value(x, operator, number)} for x in TESTED]
    return Task(
        id=f"functions-{question}",
        prompt=[{"role": "user", "content": question}],
        demonstration=f"def f(x):return x{operator}{number}",
        verifier="code",
        info={"kind": "function", "name": "f", "cases": cases},
        source="functions",
    )


def _value(x: int, operator: str, number: int) -> int:
    return {"+": x + number, "-": x - number, "*": x * number}[operator]
