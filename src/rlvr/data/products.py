"""Generated products: multiplications too hard for a small policy, for which it can ask a calculator.

The question is a chat message ("58*67=?"). The demonstrations are turns of a conversation with the `calculator`
environment: the call "[58*67]"; the answer "#### 3886" after the reply "3886", which then stands in the prompt; a
guess, which is the answer outright. Invariant: training and evaluation tasks never share a question; the side is
decided by a hash of the question.
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

Turn = Literal["call", "answer", "guess"]


@register("source", "products")
def products(
    *,
    count: int,
    split: Literal["train", "eval"] = "train",
    digits: int = 2,
    demonstrate: list[Turn] | None = None,
    seed: int = 0,
) -> Iterator[Task]:
    """`count` different products of two numbers of `digits` digits, of one side of the split; with `demonstrate`, one
    of these turns of a conversation with a calculator each, in rotation.

    The first tasks of a larger count are those of a smaller one. ConfigError when there are not that many.
    """
    # 9 * 10^(d-1) numbers have d digits. Half of the pairs of a side at most: they are drawn at random until enough
    # differ.
    possible = int((9 * 10 ** (digits - 1)) ** 2 * (EVAL_SHARE if split == "eval" else 1 - EVAL_SHARE) / 2)
    if digits < 1 or count > possible:
        raise ConfigError(
            f"source 'products': {count} different tasks of {digits} digits: at most {possible} are possible"
        )
    numbers = random.Random(seed_of("products", seed, split))
    seen: set[str] = set()
    while len(seen) < count:
        a, b = (numbers.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        if f"{a}*{b}" not in seen and in_split(f"{a}*{b}", split, EVAL_SHARE):
            turn = None
            if demonstrate:
                turn = demonstrate[len(seen) % len(demonstrate)]
            seen.add(f"{a}*{b}")
            yield _task(a, b, turn)


def _task(a: int, b: int, turn: Turn | None) -> Task:
    """The question, or the conversation as it stands before `turn`, and that turn as the demonstration."""
    prompt = [{"role": "user", "content": f"{a}*{b}=?"}]
    call = f"[{a}*{b}]"
    answer = f"#### {a * b}"
    if turn == "answer":
        # The turn that is learned comes after the reply, as in a rollout: the earlier turns are context and train
        # nothing.
        prompt += [{"role": "assistant", "content": call}, {"role": "user", "content": str(a * b)}]
    shown = None
    if turn is not None:
        shown = call if turn == "call" else answer
    return Task(id=f"products-{a}*{b}", prompt=prompt, answer=str(a * b), demonstration=shown, source="products")
