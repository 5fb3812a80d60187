"""Jobs that go together, and the courier between two event loops."""

import asyncio
import os
import signal
import threading
import time

import pytest

from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.base import as_verifier
from rlvr.verifiers.pool import VerifierPool
from rlvr.verifiers.pool.courier import Courier
from rlvr.verifiers.pool.threads import LoopThread
from rlvr.verifiers.pool.together import ENOUGH, MOST, Together
from rlvr.verifiers.pool.wire import VerifierJob
from rlvr.verifiers.pool.worker_groups import WorkerGroup

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
    counts = {"run": 0, "_at_once": 0}
    for name in counts:
        real = getattr(WorkerGroup, name)

        async def spied(self, *args, real=real, name=name):
            counts[name] += 1
            return await real(self, *args)

        monkeypatch.setattr(WorkerGroup, name, spied)
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
        if all(worker_group.latency.quick for worker_group in pool._worker_groups._worker_groups.values()):
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
        assert -(-40 // MOST) <= counted["_at_once"] - before["_at_once"] <= 20


@pytest.mark.gate
def test_quick_verdicts_of_a_moment_travel_together_where_they_are_held(counted):
    async def one_after_the_other(pool, verifier):
        tasks = []
        for n in range(6):
            tasks.append(asyncio.ensure_future(pool.verify(verifier, TASK, "x" * n)))
            await asyncio.sleep(0.001)
        return [verdict.score for verdict in await asyncio.wait_for(asyncio.gather(*tasks), 60)]

    with VerifierPool(workers=4, batch_delay=lambda: 5.0) as pool:
        verifier = as_verifier(marked)
        warmed(pool, verifier)
        before, start = dict(counted), time.monotonic()
        assert asyncio.run(one_after_the_other(pool, verifier)) == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
        assert time.monotonic() - start > 4.0  # nothing else came
        assert counted["run"] == before["run"]
        assert 1 <= counted["_at_once"] - before["_at_once"] <= 2


def test_slow_verdicts_each_have_a_worker(counted):
    def waits(prompt: str, completion: str) -> float:
        time.sleep(0.05)
        return 1.0

    with VerifierPool(workers=8) as pool:
        verifier = as_verifier(waits)
        for _ in range(3):
            assert all(verdict.score == 1.0 for verdict in verified(pool, verifier, "abcdefgh"))
    assert counted == {"run": 24, "_at_once": 0}


@pytest.mark.parametrize("bad", ["hang", "die"])
def test_who_breaks_the_bundle_pays_alone(counted, bad):
    with VerifierPool(workers=4, time_limit=2.0) as pool:
        verifier = as_verifier(marked)
        warmed(pool, verifier)
        verdicts = verified(pool, verifier, ["x", "xx", bad, "x", "xx", "x", "xx", "x"])
    assert counted["_at_once"] > 0
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


class Sent:
    """What was sent, in bundles; each job finds its own completion."""

    def __init__(self):
        self.bundles = []

    async def __call__(self, verifier, jobs):
        texts = [job.completions[0] for job in jobs]
        self.bundles.append(texts)
        if "broken" in texts:
            raise OSError("the pool is gone")
        return [[text] for text in texts]


def held(together, texts, batch_delay, turn=0.0, between=None):
    """What each text finds, asked for one in each turn of the loop."""
    verifier = as_verifier(marked)

    async def everything():
        tasks = []
        for number, text in enumerate(texts):
            wait = batch_delay[number] if isinstance(batch_delay, list) else batch_delay
            tasks.append(asyncio.ensure_future(together.verdicts(verifier, VerifierJob(TASK, (text,), (None,)), wait)))
            await asyncio.sleep(turn)
        if between is not None:
            between(tasks)
        return await asyncio.gather(*tasks, return_exceptions=True)

    return run(everything())


def test_held_jobs_go_when_they_are_enough_or_one_that_is_not_held_comes():
    sent = Sent()
    together, texts = Together(sent), [str(n) for n in range(ENOUGH)]
    for batch_delay in (60.0, [60.0] * (ENOUGH - 1) + [0.0], 0.02):
        assert held(together, texts, batch_delay) == [[text] for text in texts]
    assert sent.bundles == [texts, texts, texts]
    assert held(together, texts[:3], 0.02) == [["0"], ["1"], ["2"]]
    assert sent.bundles[3:] == [texts[:3]]


def test_jobs_that_are_not_held_go_with_those_of_their_turn():
    sent = Sent()
    together, verifier = Together(sent), as_verifier(marked)

    async def at_once():
        return await asyncio.gather(
            *(together.verdicts(verifier, VerifierJob(TASK, (t,), (None,)), 0.0) for t in "abc")
        )

    assert run(at_once()) == [["a"], ["b"], ["c"]]
    assert sent.bundles == [["a", "b", "c"]]


def test_verifiers_and_loops_do_not_wait_for_each_other():
    sent = Sent()
    together, first, second = Together(sent), as_verifier(marked), as_verifier(marked)

    async def both():
        asked = ((first, "a"), (second, "b"), (first, "c"))
        return await asyncio.gather(*(together.verdicts(v, VerifierJob(TASK, (t,), (None,)), 0.02) for v, t in asked))

    result = []
    threads = [threading.Thread(target=lambda: result.append(run(both()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == [[["a"], ["b"], ["c"]]] * 2
    assert sorted(sent.bundles) == [["a", "c"], ["a", "c"], ["b"], ["b"]]


def test_a_held_job_that_is_cancelled_is_never_sent():
    sent = Sent()
    result = held(Together(sent), "abc", 0.1, 0.001, lambda tasks: tasks[1].cancel())
    assert sent.bundles == [["a", "c"]]
    assert result[0] == ["a"] and isinstance(result[1], asyncio.CancelledError) and result[2] == ["c"]


def test_jobs_whose_bundle_fails_are_to_be_done_alone():
    sent = Sent()
    assert held(Together(sent), ["a", "broken"], 0.02) == [None, None]


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
