"""A vLLM server that takes weights from a run: `python -m rlvr.rollout.vllm.serve --model PATH --port N ...`.

Arguments are those of vLLM's own server. Added to them: what publishing needs (the endpoints that take weights, the
worker extension, token ids in and out, log-probs of the distribution that was sampled from) and RequireKey, which
closes every endpoint to requests without the key in VLLM_API_KEY. Without a key it does not start.
"""

from __future__ import annotations

import hmac
import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rlvr.rollout.vllm.transfer import SHARED_MEMORY

KEY = "VLLM_API_KEY"
"""Environment variable that holds the key: vLLM's own, and not on the command line, where every user could read it."""
# --enable-scale-out gives the endpoint of token ids in and out (/inference/v1/generate).
FLAGS = ("--enable-scale-out", "--disable-uvicorn-access-log", "--disable-log-stats")
OPTIONS = {
    "--middleware": "rlvr.rollout.vllm.serve.RequireKey",
    "--worker-extension-cls": "rlvr.rollout.vllm.receiver.WorkerExtension",
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
}
DEFAULTS = {"--host": "127.0.0.1", "--weight-transfer-config": json.dumps({"backend": SHARED_MEMORY})}

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 for any request without `Authorization: Bearer KEY`, whatever its path or method.

    vLLM's own check of its API key covers the paths under /v1, /v2, /inference and /cohere; those that take weights,
    run methods, put the engine to sleep or stop requests are elsewhere and open to anyone who reaches the port.
    """

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


def main() -> None:
    """Serve until asked to stop."""
    if not os.environ.get(KEY):
        sys.exit(
            f"set {KEY} to a secret: this server takes weights and runs methods, so it does not start without a key"
        )
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the endpoints that take weights; RequireKey stands before them
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # where --enable-lora is given: an adapter by itself
    # Ours come last: argparse takes the last of several values, and appends --middleware to those of the user, so that
    # none of them can be turned off.
    arguments = sys.argv[1:]
    absent = [part for option, value in DEFAULTS.items() if option not in arguments for part in (option, value)]
    sys.argv[1:] = [*arguments, *absent, *FLAGS, *(part for pair in OPTIONS.items() for part in pair)]
    # Imported after the environment is set: vLLM's cli_args.py reads it when it is imported.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
