"""Messages over a socket pair whose other end may be stuck, may be gone, or may send what cannot be read."""

import os
import queue
import threading
import time
from multiprocessing import Pipe

import pytest

from process_helpers import until
from rlvr.core.process.channel import Channel

BOUND = 30


class Unpicklable:
    def __reduce__(self):
        raise TypeError("cannot be pickled")


class Unreadable:
    """Pickled as a call that fails."""

    def __reduce__(self):
        return int, ("no number",)


class Opened:
    """A channel and the other end of its connection; what it received, and how it ended."""

    def __init__(self, take=None):
        ours, self.other = Pipe()
        self.received, self.ends = queue.Queue(), queue.Queue()
        self.channel = Channel(ours, "test-channel", take or self.received.put, self.ends.put)


@pytest.fixture
def opened():
    one = Opened()
    yield one
    one.channel.close()
    one.other.close()
    until(lambda: not threads(), BOUND, "the channel's threads to end")


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-channel")]


def test_messages_pass_both_ways_in_order_and_the_threads_are_daemons(opened):
    for number in range(100):
        opened.channel.send(number)
        opened.other.send(-number)
    assert [opened.other.recv() for _ in range(100)] == list(range(100))
    assert [opened.received.get(timeout=BOUND) for _ in range(100)] == [-number for number in range(100)]
    assert len(threads()) == 2 and all(thread.daemon for thread in threads())


def test_an_end_that_reads_nothing_holds_up_no_sender_and_no_close(opened):
    begun = time.monotonic()
    for _ in range(10):
        opened.channel.send(b"x" * 2**20)  # far more than a socket holds
    opened.channel.close()
    assert opened.ends.get(timeout=BOUND) is None
    assert time.monotonic() - begun < BOUND


def test_a_message_that_cannot_be_pickled_fails_its_sender_alone(opened):
    with pytest.raises(TypeError, match="cannot be pickled"):
        opened.channel.send(Unpicklable())
    opened.channel.send("next")
    assert opened.other.recv() == "next"


def test_a_message_that_cannot_be_read_ends_the_channel_with_the_cause(opened):
    opened.other.send(Unreadable())
    cause = opened.ends.get(timeout=BOUND)
    assert isinstance(cause, ValueError) and "no number" in str(cause)
    with pytest.raises(EOFError):
        opened.other.recv()


def test_a_receiver_that_raises_ends_the_channel_with_the_cause():
    def fails(message):
        raise KeyError(message)

    one = Opened(fails)
    one.other.send("a")
    assert isinstance(one.ends.get(timeout=BOUND), KeyError)
    one.other.close()


@pytest.mark.parametrize("closer", ["this", "the other"])
def test_a_close_is_seen_at_both_ends_and_gives_the_descriptors_back(closer):
    until(lambda: not threads(), BOUND, "the channels of other tests to end")
    before = len(os.listdir("/proc/self/fd"))
    one = Opened()
    time.sleep(0.1)  # the reading thread is inside its system call
    if closer == "this":
        one.channel.close()
        assert one.other.poll(BOUND)
        with pytest.raises(EOFError):
            one.other.recv()
    one.other.close()
    assert one.ends.get(timeout=BOUND) is None
    one.channel.close()
    one.channel.send("dropped")
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, BOUND, "the descriptors to be closed")


def test_what_was_sent_before_a_close_with_time_for_it_arrives(opened):
    for number in range(500):
        opened.channel.send(number)
    reader = threading.Thread(target=lambda: opened.received.put([opened.other.recv() for _ in range(500)]))
    reader.start()
    opened.channel.close(flush=BOUND)
    assert opened.received.get(timeout=BOUND) == list(range(500))
    reader.join(BOUND)


def test_a_close_needs_no_descriptor(opened, monkeypatch):
    """With none left, `os.dup` fails."""

    def none_left(_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", none_left)
    opened.channel.close()
    assert opened.ends.get(timeout=BOUND) is None


def test_an_exit_on_the_reading_thread_is_an_end():
    def leave(message):
        raise SystemExit(message)

    one = Opened(leave)
    one.other.send(3)
    assert isinstance(one.ends.get(timeout=BOUND), SystemExit)
    with pytest.raises(EOFError):
        one.other.recv()
    one.channel._writer.join(BOUND)  # it takes what ends it from the queue
    one.channel.send("late")
    assert one.channel._unsent.qsize() == 0
    one.other.close()
