"""Jobs that travel together, and the courier between two event loops."""

import asyncio
import os
import signal
import threading
import time

import pytest

from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.base import as_verifier
from rlvr.verifiers.pool import VerifierPool
from rlvr.verifiers.pool.courier import ENOUGH, Courier
from rlvr.verifiers.pool.crews import Crew
from rlvr.verifiers.pool.threads import LoopThread

TASK = Task(id="t", prompt="p")


def marked(prompt: str, completion: str) -> float:
    """A quick verifier, which some completions hurt."""
    if completion.startswith("hang"):
        time.sleep(60)
    if completion.startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if completion.startswith("raise"):
        raise KeyboardInterrupt
    return float(len(completion) % 2)


@pytest.fixture
def counted(monkeypatch):
    """How many messages went to workers: alone, and together."""
    counts = {"run": 0, "at_once": 0}
    for name in counts:
        real = getattr(Crew, name)

        async def spied(self, *args, real=real, name=name):
            counts[name] += 1
            return await real(self, *args)

        monkeypatch.setattr(Crew, name, spied)
    return counts


def verified(pool, verifier, completions):
    async def everything():
        return await asyncio.wait_for(asyncio.gather(*(pool.verify(verifier, TASK, one) for one in completions)), 60)

    return asyncio.run(everything())


def warmed(pool, verifier):
    """Until the pool has seen that the verifier is quick (a busy machine may hide it for a while)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        verified(pool, verifier, ["x"] * 8)
        if all(crew.together.quick for crew in pool._crews._crews.values()):
            return
    pytest.fail("the verifier never was quick")


def test_quick_verdicts_travel_together_and_each_gets_its_own(counted):
    with VerifierPool(workers=4) as pool:
        verifier = as_verifier(marked)
        assert verified(pool, verifier, ["x"])[0].score == 1.0
        warmed(pool, verifier)
        before = dict(counted)
        verdicts = verified(pool, verifier, ["x" * n for n in range(1, 41)])
        assert [verdict.score for verdict in verdicts] == [float(n % 2) for n in range(1, 41)]
        assert counted["run"] == before["run"]
        assert 3 <= counted["at_once"] - before["at_once"] <= 40


def test_quick_verdicts_of_a_moment_travel_together_where_they_are_held(counted):
    async def one_after_the_other(pool, verifier):
        tasks = []
        for n in range(6):
            tasks.append(asyncio.ensure_future(pool.verify(verifier, TASK, "x" * n)))
            await asyncio.sleep(0.001)
        return [verdict.score for verdict in await asyncio.wait_for(asyncio.gather(*tasks), 60)]

    with VerifierPool(workers=4, hold=lambda: 5.0) as pool:
        verifier = as_verifier(marked)
        warmed(pool, verifier)
        before, start = dict(counted), time.monotonic()
        assert asyncio.run(one_after_the_other(pool, verifier)) == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
        assert time.monotonic() - start > 4.0  # nothing else came
        assert counted["run"] == before["run"]
        assert 1 <= counted["at_once"] - before["at_once"] <= 2


def test_slow_verdicts_each_have_a_worker(counted):
    def waits(prompt: str, completion: str) -> float:
        time.sleep(0.05)
        return 1.0

    with VerifierPool(workers=8) as pool:
        verifier = as_verifier(waits)
        for _ in range(3):
            assert all(verdict.score == 1.0 for verdict in verified(pool, verifier, "abcdefgh"))
    assert counted == {"run": 24, "at_once": 0}


@pytest.mark.parametrize("bad", ["hang", "die"])
def test_who_breaks_the_bundle_pays_alone(counted, bad):
    with VerifierPool(workers=4, time_limit=2.0) as pool:
        verifier = as_verifier(marked)
        warmed(pool, verifier)
        verdicts = verified(pool, verifier, ["x", "xx", bad, "x", "xx", "x", "xx", "x"])
    assert counted["at_once"] > 0
    others = [verdict.score for i, verdict in enumerate(verdicts) if i != 2]
    assert others == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert not verdicts[2].decided
    assert verdicts[2].status is (VerdictStatus.TIMEOUT if bad == "hang" else VerdictStatus.ERROR)


def test_what_a_completion_makes_the_verifier_raise_stays_its_own():
    with VerifierPool(workers=4) as pool:
        verifier = as_verifier(marked)
        warmed(pool, verifier)
        verdicts = verified(pool, verifier, ["x", "raise", "xx", "x"])
    assert [verdict.score for verdict in verdicts] == [1.0, None, 0.0, 1.0]


def test_one_task_of_a_bundle_that_cannot_be_sent_costs_the_others_nothing():
    with VerifierPool(workers=4) as pool:
        verifier = as_verifier(marked)
        warmed(pool, verifier)
        odd = Task(id="odd", prompt="p", info={"lock": threading.Lock()})

        async def both():
            calls = [pool.verify(verifier, task, "x") for task in (TASK, odd, TASK)]
            return await asyncio.wait_for(asyncio.gather(*calls), 60)

        verdicts = asyncio.run(both())
    assert [verdict.score for verdict in verdicts] == [1.0, None, 1.0]


@pytest.fixture
def other():
    thread = LoopThread("other")
    yield thread
    thread.stop()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_the_courier_wakes_the_other_loop_once_for_a_turn(other, monkeypatch):
    calls, real = [], other.loop.call_soon_threadsafe
    monkeypatch.setattr(other.loop, "call_soon_threadsafe", lambda *args: calls.append(args) or real(*args))
    courier = Courier(other.loop)

    async def number(n):
        assert threading.current_thread() is not threading.main_thread()
        if n == 3:
            raise LookupError(str(n))
        await asyncio.sleep(0.001 * (n % 2))
        return n

    async def everything():
        return await asyncio.gather(*(courier.run(number(n)) for n in range(20)), return_exceptions=True)

    results = run(everything())
    assert isinstance(results.pop(3), LookupError)
    assert results == [n for n in range(20) if n != 3]
    assert len(calls) == 1


def test_held_calls_go_when_they_are_enough_or_one_that_is_not_held_comes(other, monkeypatch):
    calls, real = [], other.loop.call_soon_threadsafe
    monkeypatch.setattr(other.loop, "call_soon_threadsafe", lambda *args: calls.append(args) or real(*args))
    courier = Courier(other.loop)

    async def number(n):
        return n

    async def everything(holds):
        tasks = []
        for n, hold in enumerate(holds):
            tasks.append(asyncio.ensure_future(courier.run(number(n), hold)))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    assert run(everything([60.0] * ENOUGH)) == list(range(ENOUGH))
    assert run(everything([60.0] * (ENOUGH - 1) + [0.0])) == list(range(ENOUGH))
    assert run(everything([0.02] * 3)) == [0, 1, 2]
    assert len(calls) == 3


def test_a_held_call_that_is_cancelled_is_never_begun(other):
    courier, begun = Courier(other.loop), []

    async def begin(n):
        begun.append(n)

    async def give_up():
        tasks = [asyncio.ensure_future(courier.run(begin(n), 0.1)) for n in range(3)]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        await asyncio.wait(tasks)

    run(give_up())
    assert begun == [0, 2]


def test_a_cancelled_call_is_cancelled_over_there(other):
    courier, seen = Courier(other.loop), threading.Event()

    async def forever():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.set()
            raise

    async def give_up():
        task = asyncio.ensure_future(courier.run(forever()))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        early = asyncio.ensure_future(courier.run(forever()))
        await asyncio.sleep(0)
        early.cancel()  # before it was sent
        await asyncio.wait({early})
        return task.cancelled() and early.cancelled()

    assert run(give_up())
    assert seen.wait(10)


def test_a_loop_that_ends_ends_its_calls():
    thread = LoopThread("ends")
    courier = Courier(thread.loop)

    async def over():
        task = asyncio.ensure_future(courier.run(asyncio.sleep(60)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(thread.stop)
        await asyncio.wait({task})
        with pytest.raises(RuntimeError, match="ended"):
            await courier.run(asyncio.sleep(0))
        return task.cancelled()

    assert run(over())
