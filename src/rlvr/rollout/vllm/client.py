"""One server over HTTP: its health, its answers, its methods. Every request has the key and a time limit.

A request that the server refuses is a DataError; everything that makes the server unusable (no connection, no answer
in time, an error of its own) is a ServerError.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import aiohttp

from rlvr.core.process.deadline import Deadline
from rlvr.errors import DataError
from rlvr.rollout.vllm.requests import Answer

RPC = ("rlvr_model", "rlvr_weights")
"""Methods of vLLM's workers without an endpoint of their own."""


# The only bound, since `limit=0` below puts none on connections: 2,000 of them at once made a busy server look dead
# (docs/log.md, "a busy vLLM server is not a dead one").
AT_ONCE = 1024
"""Most completions asked for at once: more than a server batches (`max_num_seqs` is 256, or 1,024 on large GPUs)."""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""Replaces aiohttp's own limit of 5 minutes: each request has a Deadline."""
OPEN_FILES = 65_535
"""The limit on open files that vLLM's own server sets (vllm/utils/system_utils.py, `set_ulimit`)."""


def allow_open_files() -> None:
    """Raise this process's soft limit on open files, where the hard one lets it."""
    # Each completion is a connection, and the usual soft limit of 1,024 is what one server's completions alone need.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ServerError(Exception):
    """The server cannot be used for now; the text says why."""


class Client:
    """Speaks to the server at `url`; belongs to one event loop."""

    def __init__(self, url: str, key: str | None, model: str) -> None:
        self.url = url.rstrip("/")
        self.model = model
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Not kept alive: a server that was busy closes connections that were idle for 5 s
        # (VLLM_HTTP_TIMEOUT_KEEP_ALIVE) with the next request already in them. aiohttp's own limit of 100 is off:
        # `_places` bounds completions, and health checks and weight calls must not queue behind them.
        allow_open_files()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        self._places = asyncio.Semaphore(AT_ONCE)
        self.answered = time.monotonic()
        """When its engine last answered anything."""
        self.calls = 0
        """Methods of the engine under way."""

    async def healthy(self, timeout: float) -> bool:
        """Return True if the health page answers: the server is up, which does not say that it computes."""
        return await _succeeds(self.ask("GET", "/health", timeout))

    async def responsive(self, timeout: float) -> bool:
        """Return True if the engine core answers, which it does between two steps, paused or not.

        The health page is the HTTP process's, which is well while the core hangs.
        """
        # A method of the workers, which reaches them through the engine core (POST /collective_rpc); with no keys it
        # costs nothing.
        return await _succeeds(self._call("rlvr_model", timeout, {"keys": []}))

    async def generate(
        self,
        token_ids: Sequence[int],
        fields: Mapping[str, Any],
        adapter: str | None,
        timeout: float,
        cache_salt: str | None = None,
    ) -> Answer:
        """The answer to one request, which shares cached keys and values with requests of the same salt alone."""
        body = {"model": adapter or self.model, "token_ids": list(token_ids), "sampling_params": dict(fields)}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        try:
            # Waiting for a place does not count towards `timeout`, which is for one answer.
            async with self._places:
                reply = await self.ask("POST", "/inference/v1/generate", timeout, body)
        except DataError as refusal:
            if adapter and f"`{adapter}` does not exist" in str(refusal):  # its owner restarted it
                raise ServerError(f"it lost the adapter {adapter}") from refusal
            raise
        try:
            choice = reply["choices"][0]
            first = choice["logprobs"]["content"][:1]
            alternatives = [one for token in first for one in token.get("top_logprobs", ())]
            return Answer(
                token_ids=choice["token_ids"],
                # /inference/v1/generate is vLLM's endpoint of token ids in and out
                # (entrypoints/scale_out/token_in_token_out), which labels spans of tokens with weight versions.
                logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                finish_reason=choice["finish_reason"],
                stop_reason=choice["stop_reason"],
                versions=[(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()],
                first_tokens={one["token_id"]: one["logprob"] for one in alternatives},
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{self.url} answers in an unknown form: {str(reply)[:300]}") from error

    async def call(self, method: str, timeout: float, **arguments: Any) -> Any:
        """A method of the engine, by the names that the engine process has too."""
        self.calls += 1
        try:
            return await self._call(method, timeout, arguments)
        finally:
            self.calls -= 1

    async def _call(self, method: str, timeout: float, arguments: Mapping[str, Any]) -> Any:
        # Names are those that `engine_process.EngineServer` takes, so that both engines share the code of a publish:
        #   rlvr_*               POST /collective_rpc, to the worker extension
        #   commit               POST /reset_prefix_cache, POST /update_weight_version
        #   pause, resume ...    endpoints of the same name (vllm/entrypoints/rl/online/api_router.py)
        if method in RPC:
            body = {"method": method, "kwargs": arguments, "timeout": timeout}
            return (await self.ask("POST", "/collective_rpc", timeout, body) or {}).get("results")
        if method == "commit":
            # The cache before the version: a token that is labelled with the new version must not attend to keys of the
            # old.
            if arguments["clear_cache"]:
                await self.ask("POST", "/reset_prefix_cache?reset_running_requests=true", timeout)
            return await self.ask("POST", "/update_weight_version", timeout, {"new_version": arguments["version"]})
        if method == "get_world_size":
            return (await self.ask("GET", "/get_world_size", timeout))["world_size"]
        if method == "pause":
            clears = str(arguments["clear_cache"]).lower()
            return await self.ask("POST", f"/pause?mode={arguments['mode']}&clear_cache={clears}", timeout)
        if method == "load_lora_adapter":
            return await self._load_adapter({name: arguments[name] for name in ("lora_name", "lora_path")}, timeout)
        return await self.ask("POST", f"/{method}", timeout, arguments)

    async def _load_adapter(self, body: Mapping[str, Any], timeout: float) -> None:
        """Load an adapter. A server that has it already is not refused: an adapter's name stands for its version."""
        try:
            await self.ask("POST", "/v1/load_lora_adapter", timeout, body)
        except DataError as refusal:
            if "already been loaded" not in str(refusal):
                raise

    async def ask(self, verb: str, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that a path answers with, None when it is empty."""
        try:
            # A Deadline, and no limit of aiohttp's: the answer that waits in its socket while the trainer is stopped is
            # not late.
            async with (
                Deadline(timeout),
                self._session.request(verb, self.url + path, json=body, timeout=NO_TIMEOUT) as response,
            ):
                content = await response.read()
                # Also for refusals: the process answers.
                self.answered = time.monotonic()
                # The request's fault; asking another server would give the same answer.
                if response.status in (400, 404, 422):
                    raise DataError(f"{self.url}{path} refuses: {_text(content)}")
                if response.status in (401, 403):
                    raise DataError(f"{self.url}{path} is closed to us ({response.status}): {_text(content)}")
                if response.status >= 300:
                    raise ServerError(f"{path} answers {response.status}: {_text(content)}")
                if content and response.content_type == "application/json":
                    return await response.json()
                return None
        # Before the next clause: TimeoutError is a subclass of OSError.
        except TimeoutError as error:
            raise ServerError(f"{path} did not answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerError(f"{path}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


async def _succeeds(request: Awaitable[Any]) -> bool:
    """Return True if a request is answered, and False if it is refused or the server cannot be used."""
    try:
        await request
    except (ServerError, DataError):
        return False
    return True


def _text(content: bytes) -> str:
    return content.decode(errors="replace")[:500]
