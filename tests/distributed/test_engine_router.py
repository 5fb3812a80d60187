"""How the ranks that sample join rank 0: on any host's addresses, and beside connections that are of no rank."""

import asyncio
import os
import pickle
import socket
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from process_helpers import until
from rlvr.core.process.channel import Channel
from rlvr.distributed import engine_router
from rlvr.distributed.engine_router import EngineRouter
from rlvr.distributed.world import World
from rlvr.errors import DataError, LostRankError, RlvrError, TrainingError


class Pair(World):
    """Two ranks as two threads of this process: what they exchange goes through lists of one."""

    def __init__(self, rank, said, barrier):
        super().__init__(rank, 2)
        self.said, self.threads = said, barrier

    def barrier(self, what, deadline=None):
        self.threads.wait(60)

    def broadcast(self, value, what, deadline=None):
        if self.is_main:
            self.said[what] = value
            self.before_joining(what)
        self.barrier(what)
        return self.said[what]

    def gather(self, value, what, deadline=None):
        self.said[what, self.rank] = value
        self.barrier(what)
        return [self.said[what, rank] for rank in range(2)]

    before_joining = staticmethod(lambda what: None)


class Nothing:
    """An engine that only closes."""

    shares_weights = True
    context = 64

    def close(self):
        pass


@pytest.fixture
def strays():
    """Connections that somebody else opens, until the end of the test."""
    opened = []
    yield opened
    for stray in opened:
        stray.close()


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_join_whatever_the_host_calls_itself_and_whoever_connects(monkeypatch, strays, machines):
    """The launcher's name for rank 0's machine means 127.0.1.1 there, as on Debian, and is not what others would
    reach."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    real = socket.gethostbyname
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.1.1" if host == "localhost" else real(host))
    numbers = iter(range(100))
    monkeypatch.setattr(engine_router, "machine", lambda: ("host", str(next(numbers) if machines == 2 else 0)))
    output, barrier, made = {}, threading.Barrier(2), {}
    loop = asyncio.new_event_loop()
    loop.close()  # as that of a run that has ended

    def strangers(what):
        if what != "the port of the sampling ranks":
            return
        port = output[what]
        strays.append(socket.create_connection(("127.0.0.1", port)))  # says nothing
        wrong = socket.create_connection(("127.0.0.1", port))
        strays.append(wrong)
        wrong.sendall(b"GET / HTTP/1.1\r\n\r\n")
        gone = socket.create_connection(("127.0.0.1", port))
        gone.close()

    def join(rank):
        world = Pair(rank, output, barrier)
        world.before_joining = strangers
        made[rank] = EngineRouter(Nothing(), world, SimpleNamespace(loop=loop))

    other = threading.Thread(target=join, args=[1], daemon=True)
    other.start()
    join(0)
    other.join(60)
    assert list(made[0]._links) == [1] and isinstance(made[1]._channel, Channel)
    for one in made.values():
        one.close()


class Passes:
    """An engine that answers with what was asked for in the same pass of its loop."""

    def __init__(self):
        self.asked, self.given_up = [], []

    async def generate(self, request):
        self.asked.append(request)
        try:
            await asyncio.sleep(0)
            together, self.asked = self.asked, []
            if request == "slow":
                await asyncio.sleep(60)
            return together
        except asyncio.CancelledError:
            self.given_up.append(request)
            raise


class Fails:
    """An engine that raises what it is asked for."""

    async def generate(self, request):
        raise request


def test_errors_of_another_rank_are_told_with_their_traceback():
    here, there = Pipe()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    other = EngineRouter.__new__(EngineRouter)
    other.own, other.collector = Fails(), SimpleNamespace(loop=loop)
    other.world = SimpleNamespace(rank=1)
    other._answer(there)

    async def asked():
        link = engine_router._Link(1, here)
        with pytest.raises(TrainingError, match=r"(?s)^rank 1 could not sample: ValueError: odd; in rank 1:.*generate"):
            await link.ask(ValueError("odd"))
        # An error of ours is written for users: its text stays as it is, and a traceback of it shows the note.
        with pytest.raises(DataError) as refused:
            await link.ask(DataError("too long"))
        assert str(refused.value) == "too long"
        assert "in generate" in "".join(refused.value.__notes__)
        with socket.socket(fileno=os.dup(there.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    asyncio.run(asked())


def test_what_is_asked_together_is_sampled_together_on_another_rank():
    """Batches that depend on when messages arrive would change the last bits of log-probs from run to run."""
    here, there = Pipe()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    other = EngineRouter.__new__(EngineRouter)
    other.own, other.collector = Passes(), SimpleNamespace(loop=loop)
    other.world = SimpleNamespace(rank=1)
    other._answer(there)

    async def asked():
        link = engine_router._Link(1, here)

        async def later():
            await asyncio.sleep(0)
            return await link.ask("c")

        result = await asyncio.gather(link.ask("a"), link.ask("b"), later())
        assert sorted(result, key=len)[-1] == ["a", "b", "c"]
        slow = asyncio.create_task(link.ask("slow"))
        await asyncio.sleep(0.05)
        slow.cancel()
        assert await link.ask("d") == ["d"]
        with socket.socket(fileno=os.dup(there.fileno())) as line:  # it ends under the thread that reads from it, too
            line.shutdown(socket.SHUT_RDWR)
        with pytest.raises(LostRankError):
            await asyncio.gather(link.ask("e"), link.ask("f"))
        assert not link.replies.waiting

    asyncio.run(asked())
    assert other.own.given_up == ["slow"]
    loop.call_soon_threadsafe(loop.stop)
    until(lambda: not routers(), 10, "the threads of both ends to end")


def routers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rlvr-router")]


class TwoArgumentsError(RlvrError):
    """Is pickled as a call with one argument, and cannot be read."""

    def __init__(self, key, value):
        super().__init__(f"{key} is {value}")


class LockError(RlvrError):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.gate = threading.Lock()


class Unreadable:
    """Is pickled, and cannot be read."""

    def __reduce__(self):
        return int, ("no number",)


class Odd:
    """An engine that raises or answers what no other process can read, by the name that it is asked for."""

    async def generate(self, request):
        if request == "two arguments":
            raise TwoArgumentsError("k", 1)
        if request == "a lock":
            raise LockError("cannot go on")
        if request == "odd answer":
            return threading.Lock()
        if request == "unreadable answer":
            return Unreadable()
        return request


@pytest.fixture
def odd_rank():
    """Rank 0's end of a connection with a rank whose engine is odd."""
    here, there = Pipe()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    other = EngineRouter.__new__(EngineRouter)
    other.own, other.collector = Odd(), SimpleNamespace(loop=loop)
    other.world = SimpleNamespace(rank=1)
    other._answer(there)
    link = engine_router._Link(1, here)
    yield link
    link.close()
    until(lambda: not routers(), 10, "the threads of both ends to end")
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("two arguments", "rank 1 could not sample: TwoArgumentsError: k is 1"),
        ("a lock", "rank 1 could not sample: LockError: cannot go on"),
        ("odd answer", "rank 1 could not sample: TypeError: cannot pickle"),
        ("unreadable answer", "the reply of rank 1 to a request cannot be read: ValueError: "),
        (Unreadable(), "rank 1 could not sample: ValueError: invalid literal"),
        (threading.Lock(), "a request cannot be sent to rank 1: TypeError: cannot pickle"),
    ],
    ids=["two arguments", "a lock", "odd answer", "unreadable answer", "unreadable request", "odd request"],
)
def test_what_cannot_be_sent_or_read_fails_alone(odd_rank, asked, text):
    async def ask():
        with pytest.raises(TrainingError) as error:
            await asyncio.wait_for(odd_rank.ask(asked), 30)
        assert str(error.value).startswith(text)
        return await asyncio.wait_for(odd_rank.ask("next"), 30)

    assert asyncio.run(ask()) == "next"


def test_a_request_beside_one_that_cannot_be_sent_is_answered(odd_rank):
    async def ask():
        asked = (odd_rank.ask("a"), odd_rank.ask(threading.Lock()), odd_rank.ask("b"))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)

    first, error, last = asyncio.run(ask())
    assert (first, last) == ("a", "b") and isinstance(error, TrainingError)


@pytest.mark.parametrize("message", [b"no pickle", pickle.dumps("no number and body")], ids=["bytes", "form"])
def test_a_message_that_is_no_reply_fails_all_that_waits_with_the_cause(message):
    here, there = Pipe()

    async def ask():
        link = engine_router._Link(1, here)
        waiting = [asyncio.ensure_future(link.ask(name)) for name in "ab"]
        await asyncio.sleep(0.05)
        there.send_bytes(message)
        for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30):
            assert isinstance(error, LostRankError) and "brought what cannot be read" in str(error)
        with pytest.raises(LostRankError):
            await link.ask("c")

    asyncio.run(ask())
    there.close()


def test_close_ends_a_connection_that_a_thread_reads_at_both_ends():
    """Over a port, as between ranks: `close` of a descriptor wakes nobody who reads from it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Connection(socket.create_connection(server.getsockname()).detach())
        here = Connection(server.accept()[0].detach())

    async def ask():
        link = engine_router._Link(1, here)
        waiting = asyncio.ensure_future(link.ask("a"))
        await asyncio.sleep(0.05)
        assert there.recv()[0] == [0]
        link.close()
        with pytest.raises(LostRankError):
            await asyncio.wait_for(waiting, 30)

    asyncio.run(ask())
    assert there.poll(30)
    with pytest.raises(EOFError):
        there.recv()
    there.close()


def test_a_rank_that_reads_nothing_blocks_no_loop():
    here, there = Pipe()

    async def ask():
        link = engine_router._Link(1, here)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(link.ask(b"x" * 2**20) for _ in range(5))), 0.5)
        link.close()

    begun = time.monotonic()
    asyncio.run(ask())
    assert time.monotonic() - begun < 30
    there.close()
