"""The client of chat endpoints: attempts, waits, balance, limits, and what it leaves behind."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from email.utils import formatdate

import pytest

from rlvr.testing import StubJudge
from rlvr.verifiers.judge import chat_client
from rlvr.verifiers.judge.chat_client import ChatClient, JudgeError

BODY = {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]}


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_BACKOFF", 0.02)


def client(*urls, **options):
    return ChatClient(urls, model="m", **{"hedge": None, **options})


def asked(made, times=1):
    """The replies, and the errors, to so many requests at once."""

    async def gather():
        return await asyncio.gather(*(made.ask(BODY) for _ in range(times)), return_exceptions=True)

    return asyncio.run(gather())


class Flaky(StubJudge):
    """Gives these statuses first, and then replies."""

    statuses: tuple[int, ...] = ()

    def reply(self, body, key):
        number = len(self.requests)
        status, row = super().reply(body, key)
        return (self.statuses[number], {}) if number < len(self.statuses) else (status, row)


@pytest.mark.parametrize("status", [0, 408, 425, 429, 500, 503, 599])
def test_a_failure_that_may_pass_is_tried_again(status):
    with Flaky() as stub:
        stub.statuses = (status, status)
        made = client(stub.url, retries=2)
        assert asked(made)[0].text == "yes"
        assert (made.usage.requests, made.usage.failed, made.usage.replies) == (3, 2, 1)
        stub.requests.clear()
        (error,) = asked(client(stub.url, retries=1))
    assert isinstance(error, JudgeError) and error.cause == "unreachable"


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_a_refusal_is_not_tried_again(status):
    with Flaky() as stub:
        stub.statuses = (status,) * 9
        (error,) = asked(client(stub.url))
        assert (error.cause, len(stub.requests)) == ("refused", 1)
        assert f"HTTP {status}" in str(error)


def test_each_wait_is_about_twice_the_one_before(monkeypatch):
    waits = []
    monkeypatch.setattr(chat_client.asyncio, "sleep", lambda seconds: waits.append(seconds) or _nothing())
    with StubJudge(fail=1.0) as stub:
        asked(client(stub.url, retries=12))
    bounds = [min(0.02 * 2**n, chat_client.LONGEST_BACKOFF) for n in range(1, 11)]
    assert len(waits) == 10  # the first two attempts after a failure are made at once
    assert all(0.75 * most <= wait <= most for wait, most in zip(waits, bounds, strict=True)), waits


async def _nothing():
    pass


@pytest.mark.parametrize("date", [False, True])
def test_the_endpoints_own_wait_is_kept(date):
    with Flaky(retry_after=0.3) as stub:
        stub.statuses = (429,)
        start = time.monotonic()
        assert asked(client(stub.url))[0].text == "yes"
        assert time.monotonic() - start >= 0.3
    if date:
        seconds = chat_client._retry_after({"Retry-After": formatdate(time.time() + 60, usegmt=True)})
        assert 55 < seconds <= 60
        for nonsense in ("soon", "-3", "inf", "nan", "1e9", ""):
            assert chat_client._retry_after({"Retry-After": nonsense}) == 0


def test_requests_are_shared_out_and_a_dead_url_is_left():
    with StubJudge(delay=0.05) as one, StubJudge(delay=0.05) as other:
        asked(client(one.url, other.url), times=20)
        assert len(one.requests) == len(other.requests) == 10
    with StubJudge(delay=0.01) as alive:
        made = client("http://127.0.0.1:9/v1", alive.url, retries=1)
        assert all(reply.text == "yes" for reply in asked(made, times=20))
        assert all(reply.text == "yes" for reply in asked(made, times=5))
        # The dead one is tried by the requests that were under way together, and left alone after them.
        assert made.usage.failed <= 12


def test_no_more_requests_at_once_than_allowed():
    with StubJudge(delay=0.03) as stub:
        assert all(reply.text == "yes" for reply in asked(client(stub.url, concurrency=3), times=12))
        assert stub.most_at_once == 3


@pytest.mark.parametrize("warm", [True, False])
def test_a_request_that_hangs_is_sent_again(warm):
    """Also where all requests of a run's first step go out together, so that it is not known yet what is late."""
    with StubJudge(delay=0.02, hang=0.1, seed=3) as stub:
        made = client(stub.url, hedge=1.5, timeout=30.0)
        if warm:
            stub.hang = 0.0
            asked(made, times=8)
            stub.hang = 0.1
        start = time.monotonic()
        assert all(reply.text == "yes" for reply in asked(made, times=40))
        assert time.monotonic() - start < 10
        assert made.usage.hedged >= stub.hung > 0
        assert made.usage.failed == 0


class HangsOnce(StubJudge):
    """Hangs on the fourth request."""

    def __init__(self, **options):
        super().__init__(**options)
        self.numbers = itertools.count()

    def reply(self, body, key):
        if next(self.numbers) == 3:
            self.hung += 1
            self._over.wait()
            return 0, {}
        return super().reply(body, key)


def test_a_request_that_nearly_all_others_have_overtaken_is_sent_again():
    """Before it is late by the time that requests take."""
    with HangsOnce(delay=0.02) as stub:
        made = client(stub.url, hedge=1000.0, timeout=120.0)
        start = time.monotonic()
        assert all(reply.text == "yes" for reply in asked(made, times=40))
        assert time.monotonic() - start < 60  # half of the time that the request which hangs is given
        assert made.usage.hedged >= stub.hung == 1 and made.usage.failed == 0


class HangsThenFails(Flaky):
    """Hangs on the first request after the warm ones, fails on the second and third, and replies to the fourth."""

    def reply(self, body, key):
        number = len(self.requests)
        if number == 8:
            self.hang = 1.0
        elif number > 8:
            self.hang = 0.0
        return super().reply(body, key)


def test_a_second_request_that_fails_beside_one_that_hangs_is_made_again():
    """At once, and not when the first one has timed out, however many of those beside it fail by chance."""
    with HangsThenFails(delay=0.02) as stub:
        made = client(stub.url, hedge=1.0, timeout=120.0)
        asked(made, times=8)
        stub.statuses = (0,) * 9 + (500, 503)
        start = time.monotonic()
        assert asked(made)[0].text == "yes"
        assert len(stub.requests) == 12 and made.usage.failed == 2 and made.usage.hedged == 3
        assert time.monotonic() - start < 60  # half of the time that the request which hangs is given


def test_a_limit_of_requests_is_waited_for_and_a_single_failure_is_not(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_BACKOFF", 4.0)
    # At least three quarters of it are waited.
    for status, least, most in ((429, 3.0, 60.0), (500, 0.0, 2.9)):
        with Flaky() as stub:
            stub.statuses = (status,)
            start = time.monotonic()
            assert asked(client(stub.url))[0].text == "yes"
            assert least <= time.monotonic() - start < most


def test_a_request_that_hangs_ends_at_its_time_limit():
    with StubJudge(hang=1.0) as stub:
        (error,) = asked(client(stub.url, retries=0, timeout=0.1))
    assert error.cause == "unreachable" and "0.1 s" in str(error)


def test_an_endpoint_that_speaks_something_else_is_unreachable():
    class Page(StubJudge):
        def reply(self, body, key):
            super().reply(body, key)
            return 200, {"html": "<h1>welcome</h1>"}

    with Page() as stub:
        (error,) = asked(client(stub.url, retries=0))
    assert error.cause == "unreachable" and "no chat completion" in str(error)


def test_cancelling_leaves_no_connection():
    with StubJudge(hang=1.0) as stub:
        made = client(stub.url)

        async def give_up():
            task = asyncio.ensure_future(made.ask(BODY))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]

        assert asyncio.run(give_up()) == []
        assert not made._loops and made._endpoints[0].open == 0


def test_a_client_works_in_one_event_loop_after_the_other_and_can_be_sent():
    with StubJudge() as stub:
        made = client(stub.url, concurrency=1)
        for _ in range(3):
            assert [reply.text for reply in asked(made, times=3)] == ["yes"] * 3
        assert asked(pickle.loads(pickle.dumps(made)))[0].text == "yes"


def test_strange_texts_are_sent():
    with StubJudge() as stub:
        body = {"messages": [*BODY["messages"], {"role": "user", "content": "\ud800 \x00 \u202e"}]}
        assert asyncio.run(client(stub.url).ask(body)).text == "yes"
        assert stub.requests[0].text == "? \x00 \u202e"
