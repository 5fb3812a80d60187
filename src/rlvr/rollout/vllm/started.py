"""A server that the run starts on this machine: its process, port and key.

It listens on loopback, on a free port, with a random key. Invariant: it ends with the trainer, however that ends (see
rlvr.core.process.parent_death).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlvr.core.daemon_calls import awaited_in_daemon
from rlvr.core.process import child_process
from rlvr.core.waits import Wait
from rlvr.errors import ConfigError, DataError, WaitTimeoutError
from rlvr.rollout.vllm.client import Client, ServerError
from rlvr.rollout.vllm.serve import KEY

HOST = "127.0.0.1"
CALL = "rlvr-vllm-servers-call"
"""The name of threads that wait for a process or the weights lock in the place of the servers' loop."""
# Arbitrary: that five free ports in a row are taken within the seconds of a start is not a race any more.
TRIES = 5
"""Ports tried before giving up: another process may take a free one before the server binds it."""
# Arbitrary beside a start of tens of seconds.
SETTLE = 0.25
"""Seconds between two looks at a server that starts."""


class StartedServer:
    """The command that starts one server, and starts it again. `arguments` are vLLM's engine arguments."""

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        port: int | None,
        model: str,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.folder = folder
        self.port = port
        self.model = model
        self.log = folder / f"{name.replace(' ', '-')}.log"
        self.environment = dict(environment)
        self.process: subprocess.Popen[bytes] | None = None
        self._finalizer: Callable[[], Any] = lambda: None

    async def start(self, timeout: float) -> Client:
        """Start the process and wait until it is well. ConfigError when it refuses, WaitTimeoutError when it takes too
        long."""
        deadline = time.monotonic() + timeout
        for _ in range(TRIES):
            port = self.port or free_port()
            # 256 random bits, new for each start.
            key = secrets.token_urlsafe(32)
            if self.port is not None:
                check_free(port, self.name)
            self._run(port, key)
            client = Client(f"http://{HOST}:{port}", key, self.model)
            try:
                if await self._up(client, deadline):
                    await self._warm_up(client, deadline)
                    return client
            # Also a cancelled start: the process would stay with its GPU.
            except BaseException:
                await client.close()
                self.end()
                raise
            await client.close()
            self.end()
            if self.port is not None:
                break
        raise ConfigError(f"{self.name}: the port {port} was taken by another process while the server started")

    def explain(self) -> str:
        """The end of its log; while it runs, with the stacks of its threads and of those of its engine core."""
        if self.process is None:
            return ""
        return child_process.explain(self.process, self.log)

    def end(self) -> None:
        """End the process and what it started."""
        self._finalizer()
        self.process = None

    def _run(self, port: int, key: str) -> None:
        # Emptied: what the log ends with must be of this start, since `_up` looks in it for the reason of an end.
        self.log.write_bytes(b"")
        arguments = ["--host", HOST, "--port", str(port), "--served-model-name", self.model, *flags(self.arguments)]
        self.process = child_process.start(
            "rlvr.rollout.vllm.serve", arguments, {**self.environment, KEY: key}, self.folder, self.log
        )
        self._finalizer = weakref.finalize(self, child_process.kill, self.process)

    async def _up(self, client: Client, deadline: float) -> bool:
        """True when it is well, False when the port was taken."""
        assert self.process is not None
        with Wait(f"{self.name} to start", deadline) as waiting:
            while self.process.poll() is None:
                if await client.healthy(5.0):
                    return True
                try:
                    waiting.check()
                except WaitTimeoutError as error:
                    text = await awaited_in_daemon(self.explain, CALL)
                    raise WaitTimeoutError(f"{self.name} did not start in time; its log ends with:\n{text}") from error
                await asyncio.sleep(SETTLE)
        text = child_process.tail(self.log, 40)
        # Python's and uvicorn's words for EADDRINUSE: "[Errno 98] error while attempting to bind ...: address already
        # in use". Any other end is vLLM's refusal, which another port would not change.
        if re.search("address already in use", text, re.IGNORECASE):
            return False
        raise ConfigError(f"rollout.engine vllm-server: {self.name} ended with code {self.process.poll()}:\n{text}")

    async def _warm_up(self, client: Client, deadline: float) -> None:
        """Sample two tokens: what the first use compiles is done then, and a model that cannot be computed is
        refused."""
        fields = {"max_tokens": 2, "seed": 0, "logprobs": 0, "detokenize": False}
        try:
            await client.generate([0], fields, None, max(1.0, deadline - time.monotonic()))
        except (ServerError, DataError) as error:
            text = f"rollout.engine vllm-server: {self.name} cannot sample: {error}; its log ends with:"
            raise ConfigError(f"{text}\n{child_process.tail(self.log)}") from error


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command line has them."""
    line: list[str] = []
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            # vLLM's parser makes both flags of a boolean (argparse.BooleanOptionalAction).
            line.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, (list, tuple)):
            line += [option, *map(str, value)]
        else:
            line += [option, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return line


def free_port() -> int:
    """A port that is free now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_free(port: int, name: str) -> None:
    """ConfigError when the port is taken."""
    with contextlib.closing(socket.socket()) as probe:
        # As the server does: without it a port whose last connections are still closing would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"rollout.engine: port {port} for {name} is taken ({error.strerror}): choose another, or null for a "
                "free one"
            ) from error
