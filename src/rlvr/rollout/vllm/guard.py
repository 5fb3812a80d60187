"""The key in front of everything a server offers.

vLLM's own check of its API key covers the paths under /v1, /v2, /inference and /cohere; those that take weights, run
methods, put the engine to sleep or stop requests are elsewhere and open to anyone who reaches the port. This middleware
is given to every server that is started here, with `--middleware`, and lets nothing through without the key.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "VLLM_API_KEY"
"""Environment variable that holds the key: vLLM's own, and not on the command line, where every user could read it."""

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 for any request without `Authorization: Bearer KEY`, whatever its path or method."""

    def __init__(self, app: Application) -> None:
        key = os.environ.get(KEY, "")
        if not key:
            raise RuntimeError(f"{KEY} is not set: this server would take weights from anybody")
        self.app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass the request on when it has the key."""
        # ASGI: "lifespan" is the server's own start and stop, without a client. "websocket" cannot be answered with a
        # status.
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"the API key is missing or wrong"})

    def _has_key(self, scope: Scope) -> bool:
        # Exactly one header: with two, this check and vLLM's own might read different ones. compare_digest takes the
        # same time wherever the first difference is.
        keys = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(keys) == 1 and hmac.compare_digest(keys[0], self._expected)
