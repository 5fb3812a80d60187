"""An asynchronous client of OpenAI-compatible chat endpoints (`POST /chat/completions`).

Which failures are worth another attempt, the backoff (half a second, doubled up to 8 s, less up to a quarter of jitter)
and the bound on `Retry-After` (two minutes) are those of OpenAI's own client (openai/openai-python,
src/openai/_base_client.py at 000f030a, `_should_retry` and `_calculate_retry_timeout`), but that a single failure is
tried again at once. A request that takes longer than nearly all others is sent again, and the first reply counts: the
hedged requests of Dean and Barroso, "The Tail at Scale" (CACM 2013), who send them past the 95th percentile.

Invariants: connections are open only while requests are, on the event loop that makes them, so that nothing has to be
closed; the key is read from the environment for each request, and is in no configuration, file or message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rlvr.errors import ConfigError
from rlvr.verifiers.judge.reply_cache import ChatReply

if TYPE_CHECKING:
    import aiohttp

Cause = Literal["unreachable", "refused", "unparsable", "out_of_range", "deadline"]
"""Why a judge gave no verdict. All leave it undecided."""

FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 8.0
LONGEST_RETRY_AFTER = 120.0
"""Seconds, see above."""
RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which a request is made again; 425 (too early) is added to OpenAI's."""
LARGEST_REPLY = 16 * 2**20
"""Bytes. Arbitrary: a verdict has kilobytes, with the log-probs of a thousand tokens a megabyte."""
# Arbitrary: a judge's load changes within minutes, and fewer than eight replies say little of the slow ones.
LATENCIES = 64
FEWEST_LATENCIES = 8
"""Most, and fewest, requests whose seconds decide when a further one is late."""

# Arbitrary. Of three requests all hang where a fiftieth does in one of 125,000 cases.
MOST_HEDGES = 2
"""Most further requests beside one that is late."""
SOONEST_HEDGE = 0.05
"""Seconds before which no request is late: where replies take milliseconds, a busy machine delays many."""


class JudgeError(Exception):
    """A judge gave no verdict. `retried`: another attempt may end otherwise; `throttled`: there are too many of them;
    `retry_after`: seconds that the endpoint asks to wait."""

    def __init__(
        self, cause: Cause, text: str, retried: bool = False, throttled: bool = False, retry_after: float = 0.0
    ) -> None:
        super().__init__(text)
        self.cause: Cause = cause
        self.retried = retried
        self.throttled = throttled
        self.retry_after = retry_after


@dataclass
class ChatUsage:
    """Counts since the last step."""

    requests: int = 0
    """Requests that were sent, attempts and second ones of slow ones included."""
    failed: int = 0
    """Requests without a usable reply."""
    hedged: int = 0
    """Requests that were sent since those before were late."""
    cached: int = 0
    """Replies from the cache."""
    replies: int = 0
    seconds: float = 0.0
    """Of the requests with a reply, in sum."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class _Endpoint:
    url: str
    open: int = 0
    """Requests under way."""
    failures: int = 0
    """In a row."""
    down_until: float = 0.0
    """When another url no longer goes before this one, by time.monotonic."""
    resting_until: float = 0.0
    """When it may be asked again at all: it said so by `Retry-After`."""


@dataclass
class _Connections:
    """The parts that the requests of one event loop share."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore
    users: int = 0


@dataclass
class ChatClient:
    """Asks a model at several equal urls (`https://host/v1`), each time that with the fewest requests under way of
    those that work.

    `key` names an environment variable. ConfigError for urls that are none and for numbers out of range.
    """

    model: str
    urls: tuple[str, ...]
    key: str | None = None
    concurrency: int = 64
    retries: int = 4
    timeout: float = 60.0
    """Seconds for one request."""
    hedge: float | None = 1.5
    """A request that takes this many times as long as 95 % of the others is sent again; None: never."""

    def __post_init__(self) -> None:
        if not self.model or not self.urls:
            raise ConfigError("judge: it needs `urls` (such as http://localhost:8000/v1) and a `model`")
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ConfigError(f"judge: {url!r} is no url such as http://localhost:8000/v1")
        if self.concurrency < 1 or self.retries < 0 or not self.timeout > 0:
            raise ConfigError("judge: concurrency must be 1 or more, retries 0 or more, and timeout above 0")
        if self.hedge is not None and not self.hedge >= 1:
            raise ConfigError(f"judge: hedge={self.hedge} must be 1 or more, or null")
        self.usage = ChatUsage()
        self._endpoints = [_Endpoint(url.rstrip("/") + "/chat/completions") for url in self.urls]
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._loops: dict[asyncio.AbstractEventLoop, _Connections] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loops": {}}

    def missing_key(self) -> str | None:
        """Return the problem of the environment, or None."""
        if self.key is not None and not os.environ.get(self.key):
            return f"judge: the environment variable {self.key} with the key of {self.urls[0]} is not set"
        return None

    def take_usage(self) -> ChatUsage:
        """The counts since the last call."""
        usage, self.usage = self.usage, ChatUsage()
        return usage

    async def ask(self, body: Mapping[str, Any]) -> ChatReply:
        """The reply to a request, `body` being its JSON without the model. JudgeError where there is none."""
        # Lone surrogates of a policy's text become question marks: they are no UTF-8.
        data = json.dumps({"model": self.model, **body}, ensure_ascii=False).encode("utf-8", "replace")
        async with self._slot() as session:
            return await self._with_retries(session, data)

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A session of this event loop, closed with the last request that is under way."""
        # Slow to import, and needed only where a judge is asked.
        import aiohttp

        loop = asyncio.get_running_loop()
        shared = self._loops.get(loop)
        if shared is None:
            # The environment's proxy stands between a machine and others, not between it and itself.
            local = all(urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost") for url in self.urls)
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(), trust_env=not local
            )
            shared = self._loops[loop] = _Connections(session, asyncio.Semaphore(self.concurrency))
        shared.users += 1
        try:
            async with shared.slots:
                yield shared.session
        finally:
            shared.users -= 1
            if not shared.users:
                self._loops.pop(loop, None)
                await shared.session.close()

    async def _with_retries(self, session: aiohttp.ClientSession, data: bytes) -> ChatReply:
        failed: _Endpoint | None = None
        throttled = False
        for attempt in range(self.retries + 1):
            endpoint = self._choose(failed)
            wait = endpoint.resting_until - time.monotonic()
            # A url that has not failed is asked at once, and one that has after the backoff.
            # One failure among replies is no reason to wait either; a limit of requests is.
            single = attempt == 1 and endpoint.failures <= 1 and not throttled
            if failed is not None and (endpoint is failed or endpoint.failures) and not single:
                backoff = min(FIRST_BACKOFF * 2.0 ** max(0, attempt - 2), LONGEST_BACKOFF)
                wait = max(wait, backoff * (1 - 0.25 * random.random()))
            if wait > 0:
                await asyncio.sleep(wait)
            try:
                return await self._hedged(session, endpoint, data)
            except JudgeError as error:
                if not error.retried or attempt == self.retries:
                    raise
                failed = endpoint
                throttled = error.throttled
        raise AssertionError("the last attempt returns or raises")

    def _choose(self, avoid: _Endpoint | None = None) -> _Endpoint:
        now = time.monotonic()

        def rank(endpoint: _Endpoint) -> tuple[bool, bool, bool, int]:
            resting = endpoint.resting_until > now
            return resting, endpoint.down_until > now, endpoint is avoid, endpoint.open

        return min(self._endpoints, key=rank)

    async def _hedged(self, session: aiohttp.ClientSession, endpoint: _Endpoint, data: bytes) -> ChatReply:
        """The reply to a request, or to a further one where those before are late."""
        requests = [self._send(session, endpoint, data)]
        waiting: set[asyncio.Task[ChatReply]] = set(requests)
        sent = time.monotonic()
        try:
            while waiting:
                late = self._late() if len(requests) <= MOST_HEDGES else None
                if late is not None and time.monotonic() - sent >= late:
                    self.usage.hedged += 1
                    requests.append(self._send(session, self._choose(endpoint), data))
                    waiting.add(requests[-1])
                    sent = time.monotonic()
                    continue
                # Asked again after a while where it is not known yet what is late: the first requests of a run go out
                # together, and one of them may hang.
                patience = SOONEST_HEDGE if late is None else late - (time.monotonic() - sent)
                unknown = late is None and (self.hedge is None or len(requests) > MOST_HEDGES)
                done, waiting = await asyncio.wait(
                    waiting, timeout=None if unknown else patience, return_when=asyncio.FIRST_COMPLETED
                )
                for request in done:
                    if request.exception() is None:
                        return request.result()
            return requests[0].result()  # raises
        finally:
            for request in requests:
                request.cancel()
            # Cancelled requests close their connections before the session may be closed.
            await asyncio.gather(*requests, return_exceptions=True)

    def _late(self) -> float | None:
        """Seconds after which a request is late; None where it is not known."""
        if self.hedge is None or len(self._latencies) < FEWEST_LATENCIES:
            return None
        ordered = sorted(self._latencies)
        return max(SOONEST_HEDGE, self.hedge * ordered[int(0.95 * (len(ordered) - 1))])

    def _send(self, session: aiohttp.ClientSession, endpoint: _Endpoint, data: bytes) -> asyncio.Task[ChatReply]:
        # Counted here and not in the task, which begins later: the next request is to see it.
        endpoint.open += 1
        request = asyncio.ensure_future(self._post(session, endpoint, data))

        def ended(_: asyncio.Task[ChatReply]) -> None:
            endpoint.open -= 1

        request.add_done_callback(ended)
        return request

    async def _post(self, session: aiohttp.ClientSession, endpoint: _Endpoint, data: bytes) -> ChatReply:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self.key, '')}"
        self.usage.requests += 1
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout):
                # Not redirected: the key is for this url.
                async with session.post(endpoint.url, data=data, headers=headers, allow_redirects=False) as response:
                    body = await response.content.read(LARGEST_REPLY)
                    while len(body) <= LARGEST_REPLY and (more := await response.content.read(LARGEST_REPLY)):
                        body += more
            reply, tokens = _read(response.status, response.headers, body)
        except JudgeError as error:
            self._note(endpoint, error)
            raise
        except TimeoutError:
            raise self._note(
                endpoint, JudgeError("unreachable", f"no reply within {self.timeout:g} s", retried=True)
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            raise self._note(endpoint, JudgeError("unreachable", text, retried=True)) from error
        endpoint.failures = 0
        endpoint.down_until = 0.0
        seconds = time.monotonic() - start
        self._latencies.append(seconds)
        self.usage.replies += 1
        self.usage.seconds += seconds
        self.usage.prompt_tokens += tokens[0]
        self.usage.completion_tokens += tokens[1]
        return reply

    def _note(self, endpoint: _Endpoint, error: JudgeError) -> JudgeError:
        """Count a failure, and let the other urls go first for a while."""
        now = time.monotonic()
        self.usage.failed += 1
        if error.retry_after:
            endpoint.resting_until = now + error.retry_after
        if error.retried:
            endpoint.failures += 1
            endpoint.down_until = now + min(FIRST_BACKOFF * 2.0 ** min(endpoint.failures, 16), LONGEST_BACKOFF)
        return error


def _read(status: int, headers: Mapping[str, str], body: bytes) -> tuple[ChatReply, tuple[int, int]]:
    """The reply in a response, and its tokens (prompt, completion). JudgeError for anything else."""
    if status != 200:
        text = f"HTTP {status}: {body[:500].decode('utf-8', 'replace')}"
        retried = status in RETRIED or status >= 500
        cause: Cause = "unreachable" if retried else "refused"
        raise JudgeError(cause, text, retried, status == 429, _retry_after(headers) if retried else 0.0)
    try:
        row = json.loads(body)
        choice = row["choices"][0]
        message = choice["message"]
        refusal = message.get("refusal")
        text = message.get("content") or ""
        usage = row.get("usage") or {}
        tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        reply = ChatReply(str(text), _first_token(choice), choice.get("finish_reason") == "length")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise JudgeError("unreachable", f"the reply is no chat completion ({error!r})", retried=True) from error
    if refusal or choice.get("finish_reason") == "content_filter":
        raise JudgeError("refused", f"the judge refused: {refusal or 'content filter'}")
    return reply, tokens


def _first_token(choice: Mapping[str, Any]) -> dict[str, float]:
    content = (choice.get("logprobs") or {}).get("content") or []
    if not content:
        return {}
    alternatives = content[0].get("top_logprobs") or [content[0]]
    return {str(one["token"]): float(one["logprob"]) for one in alternatives}


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that `Retry-After` (RFC 9110, 10.2.3) asks to wait, as a number or a date; 0 where it asks for none, or
    for more than is waited."""
    value = headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return seconds if 0 < seconds <= LONGEST_RETRY_AFTER else 0.0
