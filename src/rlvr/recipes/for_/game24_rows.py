"""data/for-game24.jsonl: fifteen puzzles of the 24 game that have a solution.

The paper trains on about 15; which ones is not known, so they are drawn here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

from rlvr.config import Config
from rlvr.data.files import Placed

PUZZLES = 15
LARGEST = 13
"""Numbers are those of playing cards, 1 to 13."""
TARGET = 24


def rows(config: Config) -> Iterator[Placed]:
    """Yield the puzzles, the same for each seed of a run."""
    generator = random.Random(f"game24-{config.run.seed}")
    drawn: set[tuple[int, ...]] = set()
    while len(drawn) < PUZZLES:
        numbers = tuple(sorted(generator.randint(1, LARGEST) for _ in range(4)))
        if numbers in drawn or not reaches([Fraction(number) for number in numbers]):
            continue
        drawn.add(numbers)
        listed = f"{numbers[0]}, {numbers[1]}, {numbers[2]} and {numbers[3]}"
        prompt = f"Use {listed} once each with + - * / to get {TARGET}. Give the expression in \\boxed{{}}."
        yield f"puzzle {len(drawn)}", {"prompt": prompt, "answer": TARGET, "info": {"numbers": list(numbers)}}


def reaches(numbers: Sequence[Fraction], target: int = TARGET) -> bool:
    """Return True if the numbers, each used once with + - * /, make the target."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, first in enumerate(numbers):
        for j, second in enumerate(numbers):
            if i == j:
                continue
            others = [number for k, number in enumerate(numbers) if k not in (i, j)]
            results = [first + second, first - second, first * second]
            if second:
                results.append(first / second)
            if any(reaches([*others, result], target) for result in results):
                return True
    return False
