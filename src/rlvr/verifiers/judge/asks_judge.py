"""The options that all verifiers with a judge share, and how they ask it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rlvr.core.process.deadline import Deadline
from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.judge.chat_client import ChatClient, ChatUsage, JudgeError
from rlvr.verifiers.judge.engine_client import TEMPLATE_OPTIONS, EngineClient
from rlvr.verifiers.judge.fenced_prompt import NO_CODE, RULES
from rlvr.verifiers.judge.readings import JudgeReading, VerdictReader
from rlvr.verifiers.judge.reply_cache import ReplyCache
from rlvr.verifiers.judge.undecided_counts import UndecidedCounts
from rlvr.verifiers.run_models import POLICY, RunModels

log = logging.getLogger(__name__)
# The judge's own deadline is to strike first: it knows why, and counts it.
GRACE = 10.0
"""Seconds that the time limit is above the deadline."""


@dataclass
class AsksJudge(Verifier):
    """A verifier that asks a language model: at an OpenAI-compatible endpoint, or by the engines of the run."""

    backend: str | None = None
    """In the place of `urls`: `policy`, the model that is trained, with the weights that it has at the time; or the
    name of a frozen one in `models`, loaded here or at its `url`. Requests to a model of this run use no connection, so
    that what is said of those below does not hold for it."""
    urls: str | tuple[str, ...] = ()
    """The endpoint, `https://host/v1`; several equal ones share the requests, and stand in for each other."""
    model: str = ""
    """The model's name at the endpoint."""
    key: str | None = None
    """The environment variable that holds the endpoint's key; null: it needs none. Only rank 0 needs it."""
    system: str = ""
    """Text that goes before the rules on fences in the system message."""
    temperature: float | None = None
    """null: 0 where one reply decides, 1 where several votes do."""
    max_tokens: int = 1024
    """Tokens of a reply, the judge's reasoning included."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as `{reasoning_effort: low}`; of a model of this run
    `chat_template_kwargs` alone, such as `{chat_template_kwargs: {enable_thinking: false}}`."""
    votes: int = 1
    """Replies for each verdict, each a draw of its own."""
    concurrency: int = 64
    """Requests under way at a time; `verification.concurrent` bounds the verdicts."""
    retries: int = 4
    """Further attempts at a request whose failure may pass: the first two at once, unless others fail too, then after
    a second, two ... or what the endpoint asks for."""
    timeout: float = 60.0
    """Seconds for one attempt."""
    deadline: float = 180.0
    """Seconds for one verdict (or the verdicts on one group), with its attempts and the wait for a free slot; past them
    it is undecided. `verification.time_limit` must not be lower."""
    hedge: float | None = 1.5
    """A request that takes this many times as long as 95 % of the others is sent again, and so is one of the last 5 %
    of those that were sent together; two more wait beside it at most, and the first reply counts. null: never."""
    cache: str | None = None
    """A folder that keeps replies, by the whole request and the number of the vote. null: none. With one, equal answers
    to a task get equal verdicts."""
    price: tuple[float, float] = (0.0, 0.0)
    """The prices of a million tokens, of prompts and of replies, for the metric `cost`."""
    longest: int = 50_000
    """Characters of each text in the request; more are cut out of its middle."""
    coded: bool = True
    """The verdict carries a code of its request, so that one in the response counts for nothing; with `read:
    probability` the labels are letters that the code draws. false, for a judge that was trained to another form: a
    response that has the judge say the best verdict is paid."""

    needs = Needs(remote=True)

    def __post_init__(self) -> None:
        self.client: ChatClient | EngineClient | None = None
        urls = (self.urls,) if isinstance(self.urls, str) else tuple(self.urls)
        if self.backend is None:
            self.client = self._endpoint(urls, self.key, self.model)
        elif urls or self.model or self.key is not None:
            raise ConfigError("judge: `backend` names the model: leave urls, model and key out")
        self._replies = ReplyCache(self.cache) if self.cache is not None else None
        if self.votes < 1 or self.max_tokens < 1 or not self.deadline > 0 or self.longest < 100:
            raise ConfigError("judge: votes, max_tokens and deadline must be above 0, and longest at least 100")
        if reserved := {"model", "messages", "stream", "n"} & set(self.request):
            raise ConfigError(f"judge: `request` sets {min(reserved)!r}, which the judge sets itself")
        self.time_limit = self.deadline + GRACE
        self._undecided = UndecidedCounts()

    def attach(self, models: RunModels) -> None:
        """Take the model that `backend` names. ConfigError where it is not there."""
        if not self.coded:
            log.warning(
                "%s: with coded=false the verdict has no code, so that a response which has the judge say the best one "
                "is paid: measure the judge by `python -m rlvr.audit` (docs/judges.md)",
                self.name,
            )
        if self.backend is None:
            return
        if self.backend != POLICY and (described := models.described(self.backend)).urls:
            urls = tuple(url.rstrip("/").removesuffix("/v1") + "/v1" for url in described.urls)
            self.client = self._endpoint(urls, described.key, described.model)
            return
        if others := set(self.request) - {TEMPLATE_OPTIONS}:
            raise ConfigError(f"judge: `request` sets {min(others)!r}, which is for an endpoint: leave it out")
        self.client = EngineClient(models.sampler(self.backend))

    def check_task(self, task: Task) -> str | None:
        """ConfigError where the key is missing, which no task is at fault for."""
        if isinstance(self.client, ChatClient) and (problem := self.client.missing_key()) is not None:
            raise ConfigError(problem)
        return None

    def metrics(self) -> dict[str, float]:
        usage = ChatUsage() if self.client is None else self.client.take_usage()
        cost = usage.prompt_tokens * self.price[0] + usage.completion_tokens * self.price[1]
        return {
            "requests": usage.requests,
            "failed": usage.failed,
            "hedged": usage.hedged,
            "cached": usage.cached,
            "seconds": usage.seconds / usage.replies if usage.replies else 0.0,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cost": cost / 1e6,
            **self._undecided.take(),
        }

    async def readings(self, content: Callable[[str], str], reader: VerdictReader) -> list[JudgeReading | JudgeError]:
        """The readings of as many replies as there are votes to `content(code)`, the text of a request by its code."""
        return list(await asyncio.gather(*(self._vote(content, reader, draw) for draw in range(self.votes))))

    def undecided(self, error: JudgeError, **more: Any) -> Verdict:
        """The verdict of a judge that gave none, which is counted."""
        return self._undecided.verdict(error, **more)

    async def _vote(self, content: Callable[[str], str], reader: VerdictReader, draw: int) -> JudgeReading | JudgeError:
        try:
            async with Deadline(self.deadline):
                return await self._reading(content, reader, draw)
        except JudgeError as error:
            return error
        except TimeoutError:
            return JudgeError("deadline", f"no verdict within {self.deadline:g} s")

    async def _reading(self, content: Callable[[str], str], reader: VerdictReader, draw: int) -> JudgeReading:
        if self.client is None:
            raise ConfigError(f"judge: backend={self.backend} was not opened: call `attach` with the models of a run")
        key = ""
        without_code = content(NO_CODE)
        if self._replies is not None:
            # By a code that is always the same: with its own each request would be a new one.
            key = ReplyCache.key(self.client.identity, self._body(without_code, reader, NO_CODE), draw)
            if (kept := self._replies.get(key)) is not None:
                self.client.usage.cached += 1
                return reader.read(kept)
        code = self.client.fence_code(without_code, draw)
        reply = replace(await self.client.ask(self._body(content(code), reader, code), draw), code=code)
        reading = reader.read(reply)
        # What cannot be read is not kept: it would stay undecided for ever.
        if self._replies is not None:
            self._replies.put(key, reply)
        return reading

    def _endpoint(self, urls: tuple[str, ...], key: str | None, model: str) -> ChatClient:
        return ChatClient(urls, key, self.concurrency, self.retries, self.timeout, self.hedge, model=model)

    def _body(self, content: str, reader: VerdictReader, code: str) -> dict[str, Any]:
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if self.votes == 1 else 1.0
        system = f"{self.system}\n\n{RULES.format(code=code)}".strip()
        return {
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{content}\n\n{reader.instruction(code)}"},
            ],
            "temperature": temperature,
            "max_tokens": self.max_tokens,
            **reader.request(code),
            **self.request,
        }
