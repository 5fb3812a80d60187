"""A vLLM server that takes weights from a run: `python -m rlvr.rollout.vllm.serve --model PATH --port N ...`.

Arguments are those of vLLM's own server. Added to them: what publishing needs (the endpoints that take weights, the
worker extension, token ids in and out, log-probs of the distribution that was sampled from) and the guard, which closes
every endpoint to requests without the key in VLLM_API_KEY. Without a key it does not start.
"""

from __future__ import annotations

import json
import os
import sys

from rlvr.rollout.vllm.guard import KEY
from rlvr.rollout.vllm.transfer import SHARED_MEMORY

# --enable-scale-out gives the endpoint of token ids in and out (/inference/v1/generate).
FLAGS = ("--enable-scale-out", "--disable-uvicorn-access-log", "--disable-log-stats")
OPTIONS = {
    "--middleware": "rlvr.rollout.vllm.guard.RequireKey",
    "--worker-extension-cls": "rlvr.rollout.vllm.receiver.WorkerExtension",
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
}
DEFAULTS = {"--host": "127.0.0.1", "--weight-transfer-config": json.dumps({"backend": SHARED_MEMORY})}


def main() -> None:
    """Serve until asked to stop."""
    if not os.environ.get(KEY):
        sys.exit(
            f"set {KEY} to a secret: this server takes weights and runs methods, so it does not start without a key"
        )
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the endpoints that take weights; the guard stands before all of them
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
