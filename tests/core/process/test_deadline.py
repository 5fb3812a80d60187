"""A time limit that counts the time in which the loop ran: on a loop whose clock the test moves."""

import asyncio

import pytest

from rlvr.core.process.deadline import TICKS, Deadline


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time goes on by itself from timer to timer, and by `hold_up` besides."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        # Nothing is ready: the next timer is due at once.
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


def run(main):
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        return runner.run(main())


async def limited(seconds, wait):
    loop = asyncio.get_running_loop()
    try:
        async with Deadline(seconds):
            await wait()
    except TimeoutError:
        return "late", loop.time()
    return "in time", loop.time()


def test_it_passes_after_its_seconds():
    assert run(lambda: limited(8.0, lambda: asyncio.sleep(100))) == ("late", pytest.approx(8.0))


def test_what_takes_less_ends_in_time():
    assert run(lambda: limited(8.0, lambda: asyncio.sleep(7.5))) == ("in time", pytest.approx(7.5))


def test_a_hold_up_does_not_count():
    async def held_up():
        await asyncio.sleep(2.5)
        asyncio.get_running_loop().now += 1000.0  # stopped by a signal, say
        await asyncio.sleep(5.0)

    outcome, ended = run(lambda: limited(8.0, held_up))
    assert outcome == "in time" and ended == pytest.approx(1007.5)


def test_a_loop_that_is_always_late_reaches_the_limit_too():
    async def always_late():
        while True:
            await asyncio.sleep(0.5)
            asyncio.get_running_loop().now += 3.0

    outcome, ended = run(lambda: limited(8.0, always_late))
    assert outcome == "late"
    # Each part of a second takes 3.5 seconds at most and is given again TICKS times at most.
    assert ended <= 2 * TICKS * 3.5 + 1


def test_an_error_within_it_passes_through_and_leaves_no_timer():
    async def wrong():
        loop = asyncio.get_running_loop()
        with pytest.raises(ValueError, match="mine"):
            async with Deadline(8.0):
                raise ValueError("mine")
        return [timer for timer in loop._scheduled if not timer.cancelled()]

    assert run(wrong) == []


def test_a_part_that_is_a_little_late_counts():
    """Timers of a busy loop are late by a fraction of a part. If that were not counted, a limit would take twice as
    long."""

    async def a_little_late():
        while True:
            await asyncio.sleep(0.9)
            asyncio.get_running_loop().now += 0.4  # a part is 1 s: its timer fires after 1.3 s

    assert run(lambda: limited(8.0, a_little_late)) == ("late", pytest.approx(8 * 1.3))
