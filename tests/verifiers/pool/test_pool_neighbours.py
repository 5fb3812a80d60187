"""Answers that are verified at the same moment: none pays for another."""

import asyncio
import os
import signal
import threading
import time

import pytest

from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.base import as_verifier
from rlvr.verifiers.pool import VerifierPool

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


def verified(pool, verifier, completions, tasks=None):
    async def everything():
        pairs = zip(tasks or [TASK] * len(completions), completions, strict=True)
        return await asyncio.wait_for(asyncio.gather(*(pool.verify(verifier, *pair) for pair in pairs)), 60)

    return asyncio.run(everything())


def test_each_answer_gets_its_own_verdict():
    with VerifierPool(workers=4) as pool:
        verdicts = verified(pool, as_verifier(marked), ["x" * n for n in range(1, 41)])
    assert [verdict.score for verdict in verdicts] == [float(n % 2) for n in range(1, 41)]


@pytest.mark.parametrize("bad", ["hang", "die"])
def test_an_answer_that_hurts_its_worker_pays_alone(bad):
    with VerifierPool(workers=4, time_limit=2.0) as pool:
        verdicts = verified(pool, as_verifier(marked), ["x", "xx", bad, "x", "xx", "x", "xx", "x"])
    others = [verdict.score for i, verdict in enumerate(verdicts) if i != 2]
    assert others == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert not verdicts[2].decided
    assert verdicts[2].status is (VerdictStatus.TIMEOUT if bad == "hang" else VerdictStatus.ERROR)


def test_what_a_completion_makes_the_verifier_raise_stays_its_own():
    with VerifierPool(workers=4) as pool:
        verdicts = verified(pool, as_verifier(marked), ["x", "raise", "xx", "x"])
    assert [verdict.score for verdict in verdicts] == [1.0, None, 0.0, 1.0]


def test_one_task_that_cannot_be_sent_costs_the_others_nothing():
    odd = Task(id="odd", prompt="p", info={"lock": threading.Lock()})
    with VerifierPool(workers=4) as pool:
        verdicts = verified(pool, as_verifier(marked), ["x"] * 3, (TASK, odd, TASK))
    assert [verdict.score for verdict in verdicts] == [1.0, None, 1.0]


def test_a_cancelled_call_is_cancelled_in_the_pool():
    began, cancelled = threading.Event(), threading.Event()

    async def forever(completion):
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def give_up(pool):
        task = asyncio.ensure_future(pool.verify(as_verifier(forever), TASK, "x"))
        assert await asyncio.to_thread(began.wait, 30)
        task.cancel()
        await asyncio.wait({task})
        early = asyncio.ensure_future(pool.verify(as_verifier(forever), TASK, "x"))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.wait({early})
        return task.cancelled() and early.cancelled()

    with VerifierPool(workers=1) as pool:
        assert asyncio.run(give_up(pool))
        assert cancelled.wait(10)
