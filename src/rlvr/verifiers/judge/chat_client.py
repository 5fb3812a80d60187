"""An asynchronous client of OpenAI-compatible chat endpoints (`POST /chat/completions`), and of any that take and give
JSON.

Which failures are worth another attempt, the backoff (half a second, doubled up to 8 s, less up to a quarter of jitter)
and the bound on `Retry-After` (two minutes) are those of OpenAI's own client (openai/openai-python,
src/openai/_base_client.py at 000f030a, `_should_retry` and `_calculate_retry_timeout`), but that a failure among
requests that succeed is tried again at once. A request that takes longer than nearly all others is sent again, and the
first reply counts: the hedged requests of Dean and Barroso, "The Tail at Scale" (CACM 2013), who send them past the
95th percentile.

Invariants: connections are open only while requests are, on the event loop that makes them, so that nothing has to be
closed; the key is read from the environment for each request, and is in no configuration, file or message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar
from urllib.parse import urlsplit

from rlvr.errors import ConfigError
from rlvr.verifiers.judge.fenced_prompt import new_code
from rlvr.verifiers.judge.reply_cache import ChatReply

if TYPE_CHECKING:
    import aiohttp

Reply = TypeVar("Reply")
Cause = Literal["unreachable", "refused", "unparsable", "out_of_range", "deadline", "too_long"]
"""Why a judge gave no verdict. All leave it undecided."""

FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 8.0
LONGEST_RETRY_AFTER = 120.0
"""Seconds, see above."""
RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which a request is made again; 425 (too early) is added to OpenAI's."""
FEW_FAILURES = 2
"""Failures in a row, of one request and of its url, that may be chance: of an endpoint that fails at a twentieth of its
requests a third one is at 1 in 8,000."""
LARGEST_REPLY = 16 * 2**20
"""Bytes. Arbitrary: a verdict has kilobytes, with the log-probs of a thousand tokens a megabyte."""
# Arbitrary: a judge's load changes within minutes, and fewer than eight replies say little of the slow ones.
LATENCIES = 64
FEWEST_LATENCIES = 8
"""Most, and fewest, requests whose seconds decide when a further one is late."""

# Arbitrary. Of three requests all hang where a fiftieth does in one of 125,000 cases.
MOST_HEDGES = 2
"""Most further requests that wait beside one that is late."""
OVERTAKEN = 0.95
"""Share of the requests sent with a request, or after it, that have replies when it is late."""
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


@dataclass(frozen=True)
class _Message:
    path: str
    """Behind the url."""
    data: bytes


@dataclass
class _Connections:
    """The parts that the requests of one event loop share."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore
    users: int = 0


@dataclass
class EndpointClient(ABC, Generic[Reply]):
    """Asks several equal urls (`https://host/v1`), each time that with the fewest requests under way of those that
    work.

    `key` names an environment variable. ConfigError for urls that are none and for numbers out of range.
    """

    urls: tuple[str, ...]
    key: str | None = None
    concurrency: int = 64
    retries: int = 4
    timeout: float = 60.0
    """Seconds for one request."""
    hedge: float | None = 1.5
    """A request that takes this many times as long as 95 % of the others is sent again, and so is one of the last 5 %
    of those that were sent together; None: never."""
    who: str = "judge"
    """The verifier in messages."""
    reply_name: ClassVar[str] = "reply"
    """A reply in messages."""

    def __post_init__(self) -> None:
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ConfigError(f"{self.who}: {url!r} is no url such as http://localhost:8000/v1")
        if self.concurrency < 1 or self.retries < 0 or not self.timeout > 0:
            raise ConfigError(f"{self.who}: concurrency must be 1 or more, retries 0 or more, and timeout above 0")
        if self.hedge is not None and not self.hedge >= 1:
            raise ConfigError(f"{self.who}: hedge={self.hedge} must be 1 or more, or null")
        self.usage = ChatUsage()
        self._endpoints = [_Endpoint(url.rstrip("/")) for url in self.urls]
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._replied: deque[float] = deque(maxlen=LATENCIES)
        """When the requests with the newest replies were sent, by time.monotonic."""
        self._under_way: list[float] = []
        """When the requests without a reply were sent."""
        self._loops: dict[asyncio.AbstractEventLoop, _Connections] = {}

    @abstractmethod
    def read(self, row: Any) -> tuple[Reply, tuple[int, int]]:
        """The reply in the JSON of a response, and its tokens (prompt, completion).

        What is no reply may raise ValueError, KeyError, IndexError, TypeError or AttributeError, after which the
        request is made again; JudgeError where that is of no use.
        """

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loops": {}}

    def missing_key(self) -> str | None:
        """Return the problem of the environment, or None."""
        if self.key is not None and not os.environ.get(self.key):
            return f"{self.who}: the environment variable {self.key} with the key of {self.urls[0]} is not set"
        return None

    def take_usage(self) -> ChatUsage:
        """The counts since the last call."""
        usage, self.usage = self.usage, ChatUsage()
        return usage

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """The reply to a request, `body` being its JSON. JudgeError where there is none."""
        # Lone surrogates of a policy's text become question marks: they are no UTF-8.
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        async with self._slot() as session:
            return await self._with_retries(session, _Message(path, data))

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

    async def _with_retries(self, session: aiohttp.ClientSession, message: _Message) -> Reply:
        failed: _Endpoint | None = None
        throttled = False
        for attempt in range(self.retries + 1):
            endpoint = self._choose(failed)
            wait = endpoint.resting_until - time.monotonic()
            # A url that has not failed is asked at once, and one that has after the backoff.
            # Few failures among replies are no reason to wait either; a limit of requests is.
            single = attempt <= FEW_FAILURES and endpoint.failures <= FEW_FAILURES and not throttled
            if failed is not None and (endpoint is failed or endpoint.failures) and not single:
                backoff = min(FIRST_BACKOFF * 2.0 ** max(0, attempt - 2), LONGEST_BACKOFF)
                wait = max(wait, backoff * (1 - 0.25 * random.random()))
            if wait > 0:
                await asyncio.sleep(wait)
            try:
                return await self._hedged(session, endpoint, message)
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

    async def _hedged(self, session: aiohttp.ClientSession, endpoint: _Endpoint, message: _Message) -> Reply:
        """The reply to a request, or to a further one where those before are late."""
        requests = [self._send(session, endpoint, message)]
        waiting: set[asyncio.Task[Reply]] = set(requests)
        sent = time.monotonic()
        try:
            while waiting:
                # Of those that failed there may be as many as of attempts; the others wait, perhaps for ever.
                allowed = len(waiting) <= MOST_HEDGES and len(requests) <= MOST_HEDGES + self.retries
                late = self._late() if allowed else None
                waited = time.monotonic() - sent
                if late is not None and (waited >= late or (waited >= SOONEST_HEDGE and self._overtaken(sent))):
                    self.usage.hedged += 1
                    requests.append(self._send(session, self._choose(endpoint), message))
                    waiting.add(requests[-1])
                    sent = time.monotonic()
                    continue
                # Asked again after a while where it is not known yet what is late: the first requests of a run go out
                # together, and one of them may hang.
                # And now and then, since others may overtake it.
                patience = SOONEST_HEDGE if late is None else min(late - waited, max(SOONEST_HEDGE, 0.1 * late))
                unknown = late is None and (self.hedge is None or not allowed)
                done, waiting = await asyncio.wait(
                    waiting, timeout=None if unknown else patience, return_when=asyncio.FIRST_COMPLETED
                )
                for request in done:
                    if request.exception() is None:
                        return request.result()
                # One of several has failed, and those that are left were late before: the next one goes out at once,
                # unless the url fails on others, too.
                by_chance = self._choose(endpoint).failures <= FEW_FAILURES and not _throttled(done)
                if done and waiting and late is not None and by_chance:
                    sent = -math.inf
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

    def _overtaken(self, sent: float) -> bool:
        """Return True if nearly all requests that were sent with a request, or after it, have their replies: what is
        left of a step's requests would otherwise hold it up for as long as it takes to be sure that they are late."""
        since = sent - SOONEST_HEDGE
        replied = sum(at >= since for at in self._replied)
        left = sum(at >= since for at in self._under_way)
        return replied >= FEWEST_LATENCIES and replied >= OVERTAKEN * (replied + left)

    def _send(self, session: aiohttp.ClientSession, endpoint: _Endpoint, message: _Message) -> asyncio.Task[Reply]:
        # Counted here and not in the task, which begins later: the next request is to see it.
        endpoint.open += 1
        sent = time.monotonic()
        self._under_way.append(sent)
        request = asyncio.ensure_future(self._post(session, endpoint, message))

        def ended(_: asyncio.Task[Reply]) -> None:
            endpoint.open -= 1
            self._under_way.remove(sent)

        request.add_done_callback(ended)
        return request

    async def _post(self, session: aiohttp.ClientSession, endpoint: _Endpoint, message: _Message) -> Reply:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self.key, '')}"
        self.usage.requests += 1
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout):
                # Not redirected: the key is for this url.
                async with session.post(
                    endpoint.url + message.path, data=message.data, headers=headers, allow_redirects=False
                ) as response:
                    body = await response.content.read(LARGEST_REPLY)
                    while len(body) <= LARGEST_REPLY and (more := await response.content.read(LARGEST_REPLY)):
                        body += more
            reply, tokens = self._reply(response.status, response.headers, body)
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
        self._replied.append(start)
        self.usage.replies += 1
        self.usage.seconds += seconds
        self.usage.prompt_tokens += tokens[0]
        self.usage.completion_tokens += tokens[1]
        return reply

    def _reply(self, status: int, headers: Mapping[str, str], body: bytes) -> tuple[Reply, tuple[int, int]]:
        """The reply in a response, and its tokens (prompt, completion). JudgeError for anything else."""
        if status != 200:
            said = body[:500].decode("utf-8", "replace")
            retried = status in RETRIED or status >= 500
            cause: Cause = "unreachable" if retried else "refused"
            # vLLM (renderers/params.py of 0.32) and OpenAI's API both say it in these words.
            if status == 400 and "maximum context length" in said:
                cause = "too_long"
            raise JudgeError(
                cause, f"HTTP {status}: {said}", retried, status == 429, _retry_after(headers) if retried else 0.0
            )
        try:
            return self.read(json.loads(body))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise JudgeError("unreachable", f"the reply is no {self.reply_name} ({error!r})", retried=True) from error

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


@dataclass
class ChatClient(EndpointClient[ChatReply]):
    """Asks a model at chat endpoints."""

    model: str = ""
    reply_name = "chat completion"

    def __post_init__(self) -> None:
        if not self.model or not self.urls:
            raise ConfigError(f"{self.who}: it needs `urls` (such as http://localhost:8000/v1) and a `model`")
        super().__post_init__()

    @property
    def identity(self) -> str:
        """Name of the source of its replies, for a cache."""
        return self.model

    def fence_code(self, content: str, draw: int) -> str:
        """A code for the fences of a request, which none of its texts can know."""
        return new_code()

    async def ask(self, body: Mapping[str, Any], draw: int = 0) -> ChatReply:
        """The reply to a request, `body` being its JSON without the model. JudgeError where there is none."""
        return await self.post("/chat/completions", {"model": self.model, **body})

    def read(self, row: Any) -> tuple[ChatReply, tuple[int, int]]:
        choice = row["choices"][0]
        message = choice["message"]
        refusal = message.get("refusal")
        usage = row.get("usage") or {}
        tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        text = message.get("content") or ""
        # Some endpoints give a list of parts, of which those of thinking have no `text`.
        if isinstance(text, list):
            text = "".join(str(part.get("text") or "") for part in text)
        reply = ChatReply(str(text), _first_token(choice), choice.get("finish_reason") == "length")
        if refusal or choice.get("finish_reason") == "content_filter":
            raise JudgeError("refused", f"the judge refused: {refusal or 'content filter'}")
        return reply, tokens


def _throttled(requests: Iterable[asyncio.Task[Any]]) -> bool:
    """Return True if one of these failed requests met a limit of requests."""
    errors = (request.exception() for request in requests)
    return any(isinstance(error, JudgeError) and error.throttled for error in errors)


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
