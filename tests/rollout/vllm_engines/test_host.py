"""The trainer's end of an engine's process: its answers, errors, hangs and deaths, with a process that has no vLLM."""

import asyncio
import os
import signal
import threading
import time

import pytest

from process_helpers import alive, until
from rlvr.errors import ConfigError, TrainingError, WaitTimeoutError
from rlvr.rollout.vllm import host
from rlvr.rollout.vllm.host import EngineHost
from rlvr.rollout.vllm.requests import Answer

ENGINE = """
import os, pickle, sys, time

def hangs_here():
    time.sleep(600)

if os.environ.get("HANGS"):
    hangs_here()
from multiprocessing.connection import Connection
from rlvr.core.process.tracing import RemoteFailure

def answer(tokens):
    from rlvr.rollout.vllm.requests import Answer  # here: its imports take seconds
    return Answer(list(tokens), [0.0] * len(tokens), "stop", None, [])

def breaks_here():
    os.abort()

def raises_here():
    raise ValueError("no such method")

class Unreadable:
    def __reduce__(self):
        return int, ("no number",)

def failure(function):
    try:
        function()
    except Exception as error:
        return RemoteFailure.of(error)

pipe = Connection(int(sys.argv[1]))
kind, start, arguments = pipe.recv()
assert kind == "start"
if arguments.get("refused"):
    pipe.send(("failed", start, failure(raises_here)))
    sys.exit(1)
pipe.send(("result", start, {"max_model_len": 96}))
aborted, late = [], []
while True:
    kind, *content = pipe.recv()
    if kind == "generate":
        number, tokens = content
        if tokens == "refused":
            pipe.send(("done", [(number, failure(raises_here))]))
        elif tokens != "never":
            pipe.send(("done", [(number, answer(tokens))]))
    elif kind == "abort":
        aborted += content[0]
    else:
        number, method, arguments = content
        if method == "raise":
            pipe.send(("error", number, failure(raises_here)))
        elif method == "hang":
            hangs_here()
        elif method == "break":
            breaks_here()
        elif method == "unreadable":
            pipe.send_bytes(pickle.dumps(("result", number, Unreadable())))
        elif method == "late":
            time.sleep(arguments["seconds"])
            pipe.send(("result", number, "late"))
        else:
            pipe.send(("result", number, (method, arguments, len(aborted))))
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """`engine(start_timeout, environment, **arguments)`: a host of such a process."""
    monkeypatch.setattr(host, "MODULE", "engine_without_vllm")
    (tmp_path / "engine_without_vllm.py").write_text(ENGINE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = []

    def engine(start_timeout=60.0, environment=None, **arguments):
        made.append(EngineHost(arguments, {"PYTHONPATH": path, **(environment or {})}, tmp_path, start_timeout))
        return made[-1]

    yield engine
    for one in made:
        one.close()
        until(lambda one=one: not alive(one.process.pid), 20, "the process to end")


def test_requests_of_a_loop_and_calls_of_a_thread_share_a_process(engine):
    one = engine()
    assert one.facts == {"max_model_len": 96}

    async def both():
        answers = [one.generate((number,)) for number in range(5)]
        calls = [asyncio.to_thread(one.call, "echo", "an echo", 60.0, number=number) for number in range(5)]
        return await asyncio.gather(*answers, *calls)

    results = asyncio.run(both())
    assert [a.token_ids for a in results[:5]] == [[n] for n in range(5)]
    assert isinstance(results[0], Answer)
    assert results[5:] == [("echo", {"number": n}, 0) for n in range(5)]

    async def given_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.generate("never"), 0.2)

    asyncio.run(given_up())
    assert one.call("echo", "an echo", 60.0) == ("echo", {}, 1)
    assert not one._replies.waiting


def test_errors_of_the_process_are_told_with_their_traceback(engine):
    one = engine()
    with pytest.raises(TrainingError) as failed:
        one.call("raise", "a method", 60.0)
    with pytest.raises(TrainingError) as refused:
        asyncio.run(one.generate("refused"))
    assert str(failed.value).startswith("the vLLM engine failed: ValueError: no such method; in the vLLM engine's")
    assert str(refused.value).startswith("vLLM refused a request: ValueError: no such method; in the vLLM engine's")
    for error in (failed, refused):
        assert "in raises_here" in str(error.value)
    with pytest.raises(ConfigError, match=r"(?s)the engine cannot be started: ValueError.*in raises_here"):
        engine(refused=True)
    assert one.call("echo", "an echo", 60.0)[0] == "echo"


def test_a_process_that_hangs_is_told_with_its_stack(engine):
    with pytest.raises(WaitTimeoutError, match=r"(?s)the vLLM engine to start.*in hangs_here"):
        engine(start_timeout=4.0, environment={"HANGS": "1"})
    one = engine()
    with pytest.raises(WaitTimeoutError, match=r"(?s)a hang.*in hangs_here"):
        one.call("hang", "a hang", 0.5)


def test_a_call_that_was_given_up_gets_no_reply_of_another(engine):
    one = engine()
    with pytest.raises(WaitTimeoutError, match="a late method"):
        one.call("late", "a late method", 0.3, seconds=1.0)
    assert one.call("echo", "an echo", 60.0, x=1) == ("echo", {"x": 1}, 0)
    assert not one._replies.waiting


def test_a_process_that_crashes_is_told_at_once_with_its_stack(engine):
    one = engine()

    async def both():
        waiting = asyncio.ensure_future(one.generate("never"))
        await asyncio.sleep(0.1)
        breaking = asyncio.to_thread(one.call, "break", "a crash", 300.0)
        return await asyncio.gather(waiting, breaking, return_exceptions=True)

    begun = time.monotonic()
    for error in asyncio.run(both()):
        assert isinstance(error, TrainingError) and "process is gone (exit code -6)" in str(error)
        assert "Fatal Python error: Aborted" in str(error) and "in breaks_here" in str(error)
    assert time.monotonic() - begun < 60
    with pytest.raises(TrainingError, match="process is gone"):
        one.call("echo", "an echo", 60.0)


def test_a_process_that_reads_nothing_stops_no_deadline_of_a_loop_a_call_or_a_close(engine):
    """Its socket is full after some of these requests: a send that blocked would block the loop."""
    one = engine()
    os.kill(one.process.pid, signal.SIGSTOP)

    async def limited():
        turns = 0
        requests = [asyncio.ensure_future(one.generate(tuple(range(100_000)))) for _ in range(20)]
        until_then = time.monotonic() + 1.0
        while time.monotonic() < until_then:
            await asyncio.sleep(0.01)
            turns += 1
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        return turns

    assert asyncio.run(asyncio.wait_for(limited(), 30)) > 5
    with pytest.raises(WaitTimeoutError, match="a call"):
        one.call("echo", "a call", 0.3)
    one.close()
    assert one.process.returncode == -signal.SIGKILL


def test_a_request_that_cannot_be_sent_fails_alone(engine):
    one = engine()

    async def both():
        return await asyncio.gather(one.generate((1,)), one.generate(threading.Lock()), return_exceptions=True)

    good, bad = asyncio.run(both())
    assert good.token_ids == [1]
    assert isinstance(bad, TypeError) and "pickle" in str(bad)
    assert not one._replies.waiting


def test_a_message_that_cannot_be_read_fails_all_that_waits_with_the_cause(engine):
    one = engine()

    async def both():
        waiting = asyncio.ensure_future(one.generate("never"))
        await asyncio.sleep(0.1)
        odd = asyncio.to_thread(one.call, "unreadable", "an odd result", 60.0)
        return await asyncio.gather(waiting, odd, return_exceptions=True)

    for error in asyncio.run(both()):
        assert isinstance(error, TrainingError) and "could not be read: ValueError: " in str(error)


def test_the_log_is_read_once_for_all_that_waits(engine, monkeypatch):
    one = engine()
    read = []
    monkeypatch.setattr(host.child_process, "tail", lambda *_: read.append(1) or "the end")

    async def many():
        waiting = [asyncio.ensure_future(one.generate("never")) for _ in range(50)]
        await asyncio.sleep(0.1)
        one.process.kill()
        return await asyncio.gather(*waiting, return_exceptions=True)

    errors = asyncio.run(many())
    assert {str(error) for error in errors} == {
        "the vLLM engine's process is gone (exit code -9); its log ends with:\nthe end"
    }
    assert len({id(error) for error in errors}) == 50 and len(read) == 1
