"""How the ranks that sample join rank 0: on any host's addresses, and beside connections that are of no rank."""

import asyncio
import os
import socket
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from rlvr.distributed import engine_router
from rlvr.distributed.engine_router import EngineRouter
from rlvr.distributed.world import World
from rlvr.errors import DataError, LostRankError, TrainingError


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
        made[rank] = EngineRouter(Nothing(), world, None)

    other = threading.Thread(target=join, args=[1], daemon=True)
    other.start()
    join(0)
    other.join(60)
    assert list(made[0]._links) == [1] and isinstance(made[1]._connection, Connection)
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
    other._connection, other._sending = there, threading.Lock()
    threading.Thread(target=other._answer, daemon=True).start()

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
    other._connection, other._sending = there, threading.Lock()
    answering = threading.Thread(target=other._answer, daemon=True)
    answering.start()

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
    here.close()
    loop.call_soon_threadsafe(loop.stop)
    answering.join(10)
    assert not answering.is_alive()
