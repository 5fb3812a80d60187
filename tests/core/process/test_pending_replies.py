"""Requests by number: who asked gets the reply, whichever loop and thread it comes from."""

import asyncio
import threading
from concurrent.futures import CancelledError, Future

import pytest

from rlvr.core.process.pending_replies import Replies


class LostError(Exception):
    pass


def test_each_request_gets_its_own_reply_in_any_order():
    replies = Replies()
    sent = []

    def answer_all(number):
        sent.append(number)
        if len(sent) == 20:  # from a thread, the last one first
            backwards = [(n, n * 10) for n in reversed(sent)]
            threading.Thread(target=replies.settle, args=(backwards,)).start()

    async def ask():
        return await asyncio.gather(*(replies.ask(answer_all, lambda number: None) for _ in range(20)))

    results = asyncio.run(ask())
    assert results == [number * 10 for number in sent]
    assert len(set(sent)) == 20 and not replies.waiting


def test_two_loops_wait_beside_each_other():
    replies = Replies()
    numbers, results = [], {}
    both = threading.Barrier(3)

    def run(name):
        def send(number):
            numbers.append((name, number))
            both.wait(timeout=30)

        results[name] = asyncio.run(replies.ask(send, lambda number: None))

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    both.wait(timeout=30)
    replies.settle((number, name) for name, number in numbers)
    for thread in threads:
        thread.join(timeout=30)
    assert results == {"a": "a", "b": "b"}


def test_an_error_in_place_of_a_reply_is_raised():
    replies = Replies()

    async def ask():
        await replies.ask(lambda number: replies.settle([(number, LostError("this one"))]), lambda number: None)

    with pytest.raises(LostError, match="this one"):
        asyncio.run(ask())


def test_a_connection_that_ends_fails_what_waits_and_what_is_asked_later():
    replies = Replies()

    async def ask():
        waiting = [asyncio.create_task(replies.ask(lambda number: None, lambda number: None)) for _ in range(3)]
        await asyncio.sleep(0)
        replies.fail(LostError, "gone")
        before = await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(LostError, match="gone"):
            await replies.ask(lambda number: pytest.fail("sent to a connection that ended"), lambda number: None)
        return before

    assert [str(error) for error in asyncio.run(ask())] == ["gone"] * 3
    assert not replies.waiting


def test_a_cancelled_request_is_given_up_once_and_its_late_reply_is_dropped():
    replies = Replies()
    sent, given_up = [], []

    async def ask():
        task = asyncio.create_task(replies.ask(sent.append, given_up.append))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        replies.settle([(sent[0], "late")])
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert sent == given_up and len(sent) == 1 and not replies.waiting


def test_a_reply_for_a_loop_that_was_closed_harms_no_other():
    replies = Replies()
    abandoned = []

    async def leave():
        asyncio.get_running_loop().create_task(replies.ask(abandoned.append, lambda number: None))
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()

    async def ask():
        def answer(number):
            replies.settle([(abandoned[0], "nobody"), (number, "mine")])

        return await replies.ask(answer, lambda number: None)

    assert asyncio.run(ask()) == "mine"


def test_a_thread_waits_beside_a_loop_with_numbers_of_their_own():
    replies = Replies()
    sent = []
    future = replies.submit(sent.append)

    async def ask():
        def answer_both(number):
            sent.append(number)
            replies.settle((n, n) for n in sent)

        return await replies.ask(answer_both, lambda number: None)

    assert asyncio.run(ask()) == sent[1] != sent[0]
    assert future.result(timeout=0) == sent[0]
    assert not replies.waiting


def test_a_thread_gets_the_error_in_place_of_a_reply_and_that_of_a_connection_that_ends():
    replies = Replies()
    future = replies.submit(lambda number: replies.settle([(number, LostError("this one"))]))
    with pytest.raises(LostError, match="this one"):
        future.result(timeout=0)
    waiting = replies.submit(lambda number: None)
    replies.fail(LostError, "gone")
    with pytest.raises(LostError, match="gone"):
        waiting.result(timeout=0)
    with pytest.raises(LostError, match="gone"):
        replies.submit(lambda number: pytest.fail("sent to a connection that ended"))
    assert not replies.waiting


def test_a_reply_that_a_thread_gave_up_is_dropped_and_a_request_that_was_not_sent_forgotten():
    replies = Replies()
    sent = []
    future = replies.submit(sent.append)
    future.cancel()
    assert not replies.waiting
    replies.settle([(sent[0], "late")])
    with pytest.raises(CancelledError):
        future.result(timeout=0)

    def fails(number):
        raise LostError("not sent")

    with pytest.raises(LostError, match="not sent"):
        replies.submit(fails)
    assert not replies.waiting


def test_who_is_told_of_the_end_and_asks_again_is_told_again():
    """The callback of a request that failed asks once more: the connection must be known as ended by then."""
    replies = Replies()
    again = []

    def ask_again(_):
        with pytest.raises(LostError, match="gone"):
            replies.submit(lambda number: pytest.fail("sent to a connection that ended"))
        again.append(True)

    replies.submit(lambda number: None).add_done_callback(ask_again)
    replies.fail(LostError, "gone")
    assert again == [True] and not replies.waiting


@pytest.mark.parametrize("reply", ["late", LostError("late")])
def test_a_reply_to_a_request_that_is_given_up_in_the_same_moment_stops_no_other(reply):
    """The request is cancelled after it was seen to be open, by a reply that takes effect just before."""
    replies = Replies()
    sent = []

    class Racing(Future):
        def done(self):
            seen = super().done()
            self.cancel()
            return seen

    racing = Racing()
    sent.append(replies._register(None, racing))
    other = replies.submit(sent.append)
    replies.settle([(sent[0], reply), (sent[1], "mine")])
    assert racing.cancelled() and other.result(timeout=0) == "mine"
