"""The trainer's event loop keeps turning, whatever a sandbox sends, and what it missed while it stood still is not held
late."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from sandbox_tiers import usable_tier

from rlvr.core.process.framing import Link
from rlvr.verifiers.code.runner import Call, Ended, Job, Limits
from rlvr.verifiers.code.sandbox import execution
from rlvr.verifiers.code.sandbox.local import LocalRunner
from rlvr.verifiers.code.sandbox.tiers import TIERS

FULL = TIERS[0]
FLOODS = {
    "unknown": "b'\\0\\0\\0\\1z' * 20000",
    "ready for calls": "b'\\0\\0\\0\\1l' * 20000",
    "calls": "b'\\0\\0\\0\\1c' * 20000",
    "empty": "bytes(80000)",
    "lengths": "b'\\0\\x0f\\xff\\xff' * 20000",
}


@pytest.fixture(scope="module")
def runner():
    usable_tier("full")
    with asyncio.Runner() as loop:
        runner = LocalRunner(FULL, workers=1)
        yield runner, loop
        loop.run(runner.close())


@pytest.mark.gate
@pytest.mark.parametrize("name", FLOODS)
def test_frames_that_nobody_asked_for_end_the_conversation(name, runner, monkeypatch):
    """A few of them are read, not as many as fit into the time limit."""
    (sandbox, loop), received = runner, []
    receive = Link.receive

    async def counted(link, most):
        body = await receive(link, most)
        received.append(body)
        return body

    monkeypatch.setattr(Link, "receive", counted)
    flood = f"import os\nwhile 1: os.write(3, {FLOODS[name]})"
    limits = Limits(seconds=1.0)
    assert loop.run(sandbox.run(Job(flood, limits=limits))).ended is Ended.TIME
    assert loop.run(sandbox.run(Job(flood, call=Call("f"), limits=limits))).ended is Ended.TIME
    serves = f"def f(x):\n    {flood.replace(chr(10), chr(10) + '    ')}"
    test = Job("for n in range(100):\n    assert f(n) == 1", limits=limits)
    assert loop.run(sandbox.test(test, Job(serves, limits=limits), "f", "token")).ended is not Ended.DONE
    assert len(received) < 20


def test_the_loop_turns_for_every_frame_that_is_there_already():
    async def scene():
        ours, theirs = socket.socketpair()
        link, turns = Link(ours), 0
        theirs.sendall(b"\0\0\0\1z" * 2000)

        async def turn():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.ensure_future(turn())
        for _ in range(2000):
            assert await link.receive(10) == b"z"
        turning.cancel()
        theirs.close()
        link.close()
        return turns

    assert asyncio.run(scene()) >= 2000


@pytest.mark.gate
def test_an_answer_that_came_while_the_loop_stood_still_is_not_late(runner, monkeypatch):
    """The trainer is held up for longer than every limit of the wait."""
    monkeypatch.setattr(execution, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(execution, "_LATE_SECONDS", 0.1)
    sandbox, loop = runner
    told = execution.Execution.tell

    async def held_up(running):
        await told(running)
        time.sleep(3.5)

    loop.run(sandbox.run(Job("print(1)")))  # the zygote is there
    monkeypatch.setattr(execution.Execution, "tell", held_up)
    assert loop.run(sandbox.run(Job("print(1)"))).ended is Ended.DONE
