"""Whether a server given by URL can serve this policy: its model, tokenizer, endpoints and settings.

Every finding is a ConfigError that names the server, what differs and how to start it.
"""

from __future__ import annotations

from typing import Any

from rlvr.errors import ConfigError, DataError
from rlvr.policy import Policy
from rlvr.rollout.vllm.client import Client, ServerTrouble
from rlvr.rollout.vllm.options import VLLMServerOptions

TEXT = "What is 12 + 30? Answer: 42, \\boxed{42}.\n"
"""Tokenised by both sides."""
SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
"""What must agree in the configurations, where both have it."""
SECONDS = 30.0
HOW = "start it with `VLLM_API_KEY=... python -m rlvr.rollout.vllm.serve --model PATH --port N --weight-transfer-config '{\"backend\": %s}'`"


async def check_server(client: Client, policy: Policy, options: VLLMServerOptions, transfer: str) -> int:
    """Set the client's model and return the server's context, in tokens. ConfigError says what does not fit."""
    how = HOW % (f'"{transfer}"' if transfer != "files" else '"shared_memory"')
    try:
        models = await client.ask("GET", "/v1/models", SECONDS)
        card = models["data"][0]
        client.model = str(card["id"])
        tokenised = await client.ask("POST", "/tokenize", SECONDS, {"model": client.model, "prompt": TEXT, "add_special_tokens": False})
        info = await client.ask("GET", "/server_info?config_format=json", SECONDS)
    except ServerTrouble as trouble:
        raise ConfigError(f"rollout.engine: the server {client.url} cannot be used: {trouble}") from trouble
    except DataError as refusal:
        raise ConfigError(
            f"rollout.engine: {refusal}. A server that takes weights needs its key in ${options.api_key_env}, and endpoints "
            f"that vLLM has only in development mode: {how}"
        ) from refusal
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"rollout.engine: {client.url} is not a vLLM server that is known: {how}") from error
    if list(tokenised["tokens"]) != policy.tokenizer.encode(TEXT, add_special_tokens=False):
        raise ConfigError(f"rollout.engine: the server {client.url} has another tokenizer than the policy: {how}")
    problem = _differs(info.get("vllm_config", {}), policy, transfer)
    if problem:
        raise ConfigError(f"rollout.engine: the server {client.url} {problem}: {how}")
    return int(card.get("max_model_len") or policy.context)


def _differs(config: dict[str, Any], policy: Policy, transfer: str) -> str | None:
    """What does not fit in a server's configuration, in words."""
    model = config.get("model_config", {})
    theirs = model.get("hf_text_config") or model.get("hf_config") or {}
    ours = policy.causal_lm.config.get_text_config().to_dict()
    if isinstance(theirs, dict):
        for key in SHAPE:
            if key in theirs and key in ours and theirs[key] != ours[key]:
                return f"has another model: its {key} is {theirs[key]}, the policy's {ours[key]}"
    if (mode := model.get("logprobs_mode", "processed_logprobs")) != "processed_logprobs":
        return f"gives {mode}, not log-probs of the distribution that was sampled from"
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if transfer != "files" and backend != transfer:
        return f"takes weights by {backend}, not by {transfer}"
    return None
