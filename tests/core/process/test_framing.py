"""Frames over a socket pair: blocking on one side, on an event loop on the other."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from rlvr.core.process.framing import Link, receive, receive_fds, send


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    with closing(near), closing(far):
        yield near, far


@pytest.mark.parametrize("size", [0, 1, 2**18 - 1, 2**18, 2**18 + 1, 2**21 + 3], ids=str)
def test_a_body_of_any_size_arrives_as_it_was_sent(pair, size):
    near, far = pair
    body = os.urandom(size)
    # A socket buffer holds less than the largest: the sender waits for the reader.
    sender = threading.Thread(target=send, args=(near, body))
    sender.start()
    assert receive(far) == body
    sender.join()


def test_a_frame_has_its_length_in_front_big_endian(pair):
    near, far = pair
    send(near, b"abc")
    assert far.recv(100) == b"\0\0\0\3abc"


def test_the_end_of_the_stream_is_none_and_so_is_an_end_within_a_frame(pair):
    near, far = pair
    near.sendall(struct.pack("!I", 10) + b"half")
    near.close()
    assert receive(far) is None
    assert receive(far) is None


def test_an_end_that_was_killed_with_data_unread_is_an_end(pair):
    near, far = pair
    send(far, b"never read")
    near.close()
    assert receive(far) is None


def test_an_event_loop_and_a_blocking_reader_understand_each_other(pair):
    near, far = pair

    async def ask():
        link = Link(near)
        await link.send(b"one", b"", b"three")
        answers = [await link.receive(100) for _ in range(3)]
        assert not link.has_unread
        return answers

    def echo():
        for _ in range(3):
            send(far, receive(far) * 2)

    thread = threading.Thread(target=echo)
    thread.start()
    assert asyncio.run(ask()) == [b"oneone", b"", b"threethree"]
    thread.join()


def test_an_announced_length_over_the_limit_is_refused_before_it_is_read(pair):
    near, far = pair
    far.sendall(struct.pack("!I", 2**32 - 1))

    async def ask():
        await Link(near).receive(2**20)

    with pytest.raises(EOFError, match="4294967295 bytes are announced, over the limit of 1048576"):
        asyncio.run(ask())


def test_a_link_whose_other_end_closed_raises(pair):
    near, far = pair
    far.sendall(struct.pack("!I", 4) + b"ab")
    far.close()

    async def ask():
        await Link(near).receive(100)

    with pytest.raises(EOFError, match="the other end is closed"):
        asyncio.run(ask())


def test_a_link_is_quiet_until_something_comes_or_the_other_end_closes(pair):
    near, far = pair

    async def look():
        link = Link(near)
        seen = [link.quiet]
        far.send(b"x")
        seen.append(link.quiet)
        await link.take(1)
        seen.append(link.quiet)
        far.close()
        seen.append(link.quiet)
        link.close()
        return [*seen, link.open]

    assert asyncio.run(look()) == [True, False, True, False, False]


def test_many_frames_that_are_there_do_not_keep_the_loop(pair):
    near, far = pair
    for _ in range(50):
        send(far, b"x")
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def read():
        other = asyncio.create_task(count())
        link = Link(near)
        for _ in range(50):
            await link.receive(10)
        other.cancel()

    asyncio.run(read())
    assert turns >= 49  # one for each frame; the other task begins in the first


def test_a_stream_ends_with_its_process_though_a_fork_of_it_holds_the_socket(pair):
    """What the process had sent before is read first; the link closes its descriptor of the process."""
    near, far = pair
    program = f"""
import os, signal, time
if os.fork() == 0:
    time.sleep(60)
os.write({far.fileno()}, b"\\0\\0\\0\\4last")
os.kill(os.getpid(), signal.SIGKILL)
"""

    async def read():
        process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[far.fileno()], start_new_session=True)
        try:
            link = Link(near, os.pidfd_open(process.pid))
            async with asyncio.timeout(30):
                assert await link.receive(10) == b"last"
                with pytest.raises(EOFError):
                    await link.receive(10)
                with pytest.raises(BrokenPipeError):
                    await link.send(b"x")
            assert process.poll() is not None
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(read())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_that_is_closed_first_gives_the_descriptor_of_its_process_back(pair):
    near, _ = pair

    async def close():
        before = len(os.listdir("/proc/self/fd"))
        link = Link(near, os.pidfd_open(os.getpid()))
        link.close()
        link.close()
        return before - len(os.listdir("/proc/self/fd"))

    assert asyncio.run(close()) == 1  # the socket's


def test_descriptors_that_come_with_a_message_are_inherited_by_nobody(pair):
    near, far = pair
    pipe = os.pipe()
    socket.send_fds(near, [b"two"], pipe)
    data, fds = receive_fds(far, 10, 2)
    assert data == b"two" and len(fds) == 2
    assert not any(map(os.get_inheritable, fds))
    os.write(fds[1], b"x")
    assert os.read(pipe[0], 1) == b"x"
    for fd in [*pipe, *fds]:
        os.close(fd)
    near.close()
    assert receive_fds(far, 10, 2) == (b"", [])


def test_close_ends_a_read_and_a_write_that_wait_for_the_socket(pair):
    near, _ = pair

    async def closed():
        before = len(os.listdir("/proc/self/fd"))
        link = Link(near)
        waiting = [asyncio.ensure_future(link.take(1)), asyncio.ensure_future(link.send(b"x" * 2**22))]
        await asyncio.sleep(0.05)
        link.close()
        assert not link.open
        async with asyncio.timeout(30):
            results = await asyncio.gather(*waiting, return_exceptions=True)
        link.close()
        return [type(result) for result in results], before - len(os.listdir("/proc/self/fd"))

    assert asyncio.run(closed()) == ([EOFError, BrokenPipeError], 1)
