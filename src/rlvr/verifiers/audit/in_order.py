"""Many verifications at once with their results in order, in bounded memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
V = TypeVar("V")

MOST = 256
"""Items under way at once: more than the pool has slots for verifiers that wait."""
MOST_SIZE = 64_000_000
"""Their size together (characters, say), unless one alone is larger."""


async def in_order(
    items: Iterable[T], work: Callable[[T], Awaitable[V]], size: Callable[[T], int]
) -> AsyncIterator[tuple[T, V]]:
    """(item, result of `work` on it) in the order of `items`, which are read as earlier ones leave.

    When the iteration is given up, what is under way is cancelled.
    """
    waiting: deque[tuple[T, asyncio.Future[V]]] = deque()
    held = 0
    try:
        for item in items:
            waiting.append((item, asyncio.ensure_future(work(item))))
            held += size(item)
            # The first one is awaited also where it is done already, so that results leave as early as they can.
            while len(waiting) >= MOST or held > MOST_SIZE or (waiting and waiting[0][1].done()):
                first, future = waiting[0]
                result = await future
                waiting.popleft()
                held -= size(first)
                yield first, result
            await asyncio.sleep(0)  # let what was just given start
        while waiting:
            first, future = waiting[0]
            result = await future
            waiting.popleft()
            yield first, result
    finally:
        for _, future in waiting:
            future.cancel()
