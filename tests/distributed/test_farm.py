"""How the ranks that sample join rank 0: on any host's addresses, and beside connections that are of no rank."""

import socket
import threading
from multiprocessing.connection import Connection

import pytest

from rlvr.distributed import farm
from rlvr.distributed.farm import Farm
from rlvr.distributed.world import World


class Pair(World):
    """Two ranks as two threads of this process: what they exchange goes through lists of one."""

    def __init__(self, rank, said, barrier):
        super().__init__(rank, 2)
        self.said, self.barrier = said, barrier

    def meet(self, what, deadline=None):
        self.barrier.wait(60)

    def broadcast(self, value, what, deadline=None):
        if self.leads:
            self.said[what] = value
            self.before_joining(what)
        self.meet(what)
        return self.said[what]

    def gather(self, value, what, deadline=None):
        self.said[what, self.rank] = value
        self.meet(what)
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
    """The launcher's name for rank 0's machine means 127.0.1.1 there, as on Debian, and is not what others would reach."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    real = socket.gethostbyname
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.1.1" if host == "localhost" else real(host))
    numbers = iter(range(100))
    monkeypatch.setattr(farm, "machine", lambda: ("host", str(next(numbers) if machines == 2 else 0)))
    said, barrier, made = {}, threading.Barrier(2), {}

    def strangers(what):
        if what != "the port of the sampling ranks":
            return
        port = said[what]
        strays.append(socket.create_connection(("127.0.0.1", port)))  # says nothing
        wrong = socket.create_connection(("127.0.0.1", port))
        strays.append(wrong)
        wrong.sendall(b"GET / HTTP/1.1\r\n\r\n")
        gone = socket.create_connection(("127.0.0.1", port))
        gone.close()

    def join(rank):
        world = Pair(rank, said, barrier)
        world.before_joining = strangers
        made[rank] = Farm(Nothing(), world, None)

    other = threading.Thread(target=join, args=[1], daemon=True)
    other.start()
    join(0)
    other.join(60)
    assert list(made[0]._links) == [1] and isinstance(made[1]._connection, Connection)
    for one in made.values():
        one.close()
