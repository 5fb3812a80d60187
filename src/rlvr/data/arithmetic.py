"""Generated arithmetic: additions worked column by column, for the quickstart and for tests.

The question is a chat message ("58+67=?"), the demonstration works from the last digit to the first, each column as
`digit+digit+carry=sum`, and ends in `#### N`: "8+7+0=15,5+6+1=12 #### 125". Invariant: training and evaluation tasks
never share a question; the side is decided by a hash of the question, not by its digits.
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


@register("source", "arithmetic")
def arithmetic(
    *, count: int, split: Literal["train", "eval"] = "train", digits: list[int] | None = None, seed: int = 0
) -> Iterator[Task]:
    """`count` different additions of two numbers of equal length, one of `digits` (2 and 3), of one side of the split.

    The first tasks of a larger count are those of a smaller one. ConfigError when there are not that many.
    """
    lengths = digits or [2, 3]
    possible = sum((9 * 10 ** (n - 1)) ** 2 for n in lengths) * (EVAL_SHARE if split == "eval" else 1 - EVAL_SHARE)
    # Questions are drawn at random until enough differ: beyond half of them most draws would be repeats.
    if count > possible / 2:
        raise ConfigError(
            f"source 'arithmetic': {count} different tasks are too many for {lengths} digits: at most "
            f"{int(possible / 2)}"
        )
    numbers = random.Random(seed_of("arithmetic", seed, split))
    seen: set[str] = set()
    while len(seen) < count:
        length = numbers.choice(lengths)
        a, b = (numbers.randrange(10 ** (length - 1), 10**length) for _ in range(2))
        question = f"{a}+{b}=?"
        if question not in seen and in_split(question, split, EVAL_SHARE):
            seen.add(question)
            yield Task(
                id=f"arithmetic-{a}+{b}",
                prompt=[{"role": "user", "content": question}],
                answer=str(a + b),
                demonstration=f"{_columns(a, b)} #### {a + b}",
                source="arithmetic",
            )


def _columns(a: int, b: int) -> str:
    """The columns of an addition, last digit first, each with its carry and two-digit sum."""
    columns = []
    carry = 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        # Two digits always (`3+4+0=07`), so that each column has the same number of characters.
        columns.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return ",".join(columns)
