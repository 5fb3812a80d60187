"""The judge's requests, answered by a model of this run: the policy's own engine, or a frozen model.

Invariant: a reply follows from the weights, the request and the number of its draw, so that a run is repeated by its
seed (N7). So the code of a request's fences is not drawn at random here, but a hash of the run's seed and the request,
which no response can hold, since it would have to hold a hash of itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from rlvr.core.seeding import seed_of
from rlvr.errors import DataError, RlvrError
from rlvr.verifiers.judge.chat_client import ChatUsage, JudgeError
from rlvr.verifiers.judge.reply_cache import ChatReply
from rlvr.verifiers.run_models import ChatSampler

TEMPLATE_OPTIONS = "chat_template_kwargs"
"""The field of vLLM's chat requests with options of the chat template."""


class EngineClient:
    """Asks a model of this run, as `ChatClient` asks one at an endpoint."""

    def __init__(self, sampler: ChatSampler) -> None:
        self.sampler = sampler
        self.usage = ChatUsage()

    @property
    def identity(self) -> str:
        """Name of the source of its replies, for a cache: the model and the version of its weights."""
        return f"{self.sampler.identity} version {self.sampler.version}"

    def fence_code(self, content: str, draw: int) -> str:
        """A code for the fences of a request, the same for the same request."""
        return hashlib.sha256(f"{self.sampler.seed}\x1f{draw}\x1f{content}".encode("utf-8", "replace")).hexdigest()[:16]

    def take_usage(self) -> ChatUsage:
        """The counts since the last call."""
        usage, self.usage = self.usage, ChatUsage()
        return usage

    async def ask(self, body: Mapping[str, Any], draw: int = 0) -> ChatReply:
        """The reply to a chat request. JudgeError where there is none.

        A JSON schema (`response_format`) does not bind the reply here; the reader of the verdict checks it.
        """
        messages = body["messages"]
        self.usage.requests += 1
        start = time.monotonic()
        try:
            sampled = await self.sampler.sample(
                messages,
                max_tokens=body["max_tokens"],
                temperature=body["temperature"],
                seed=seed_of(self.sampler.seed, "judge", draw, json.dumps(messages)),
                alternatives=body.get("top_logprobs", 0),
                template=body.get(TEMPLATE_OPTIONS),
            )
        except DataError as error:
            self.usage.failed += 1
            raise JudgeError("too_long", str(error)) from error
        except RlvrError as error:
            self.usage.failed += 1
            raise JudgeError("unreachable", str(error)) from error
        self.usage.replies += 1
        self.usage.seconds += time.monotonic() - start
        self.usage.prompt_tokens += sampled.tokens[0]
        self.usage.completion_tokens += sampled.tokens[1]
        return ChatReply(sampled.text, sampled.first_token, sampled.truncated)
