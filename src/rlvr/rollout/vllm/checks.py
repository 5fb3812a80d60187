"""Checks that a server given by URL can serve this policy: its model, tokenizer, endpoints and settings.

Every finding is a ConfigError that names the server, what differs and how to start it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.errors import ConfigError, DataError
from rlvr.policy import Policy
from rlvr.rollout.vllm import installed, launch
from rlvr.rollout.vllm.client import Client, ServerError
from rlvr.rollout.vllm.settings import ServerSettings

# Digits, a backslash, braces and a newline: what tokenizers of related models split differently.
TEXT = "What is 12 + 30? Answer: 42, \\boxed{42}.\n"
"""Tokenised by both sides."""
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
"""Settings that must agree where both configurations have them."""
# Arbitrary: the pages asked for are answered at once by a server that is idle.
SECONDS = 30.0
HOW = (
    "start it with `VLLM_API_KEY=... python -m rlvr.rollout.vllm.serve --model PATH --port N "
    '--weight-transfer-config \'{"backend": "%s"}\'`'
)


async def check_server(client: Client, policy: Policy, options: ServerSettings, transfer: str) -> int:
    """Set the client's model and return the server's context, in tokens. ConfigError says what does not fit."""
    how = HOW % ("nccl" if transfer == "nccl" else "shared_memory")
    try:
        version = str((await client.ask("GET", "/version", SECONDS))["version"])
        if problem := installed.unfit(version):
            raise ConfigError(f"rollout.engine: the server {client.url} is vLLM {version}, {problem}")
        card = (await client.ask("GET", "/v1/models", SECONDS))["data"][0]
        client.model = str(card["id"])
        body = {"model": client.model, "prompt": TEXT, "add_special_tokens": False}
        tokens = (await client.ask("POST", "/tokenize", SECONDS, body))["tokens"]
        # This page and /collective_rpc exist in vLLM's development mode only, which `rlvr.rollout.vllm.serve` turns on.
        settings = (await client.ask("GET", "/server_info?config_format=json", SECONDS))["vllm_config"]
        model = (await client.call("rlvr_model", SECONDS, keys=list(SHAPE)))[0]
    except ServerError as trouble:
        raise ConfigError(f"rollout.engine: the server {client.url} cannot be used: {trouble}; {how}") from trouble
    except DataError as refusal:
        raise ConfigError(
            f"rollout.engine: {refusal}. A server that takes weights needs its key in ${options.api_key_env}, and "
            f"endpoints that vLLM has only in development mode: {how}"
        ) from refusal
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"rollout.engine: {client.url} does not answer as a vLLM server does: {how}") from error
    if list(tokens) != policy.tokenizer.encode(TEXT, add_special_tokens=False):
        raise ConfigError(f"rollout.engine: the server {client.url} has another tokenizer than the policy: {how}")
    if problem := _differs(settings, model, policy, options, transfer):
        raise ConfigError(f"rollout.engine: the server {client.url} {problem}: {how}")
    return int(card.get("max_model_len") or policy.context)


def _differs(
    settings: Mapping[str, Any], model: Mapping[str, Any], policy: Policy, options: ServerSettings, transfer: str
) -> str | None:
    """Return the first mismatch of a server's settings and model with the policy, in words; None without one."""
    ours = policy.causal_lm.config.get_text_config().to_dict()
    for key, theirs in model.items():
        if key in ours and theirs != ours[key]:
            return f"has another model: its {key} is {theirs}, the policy's {ours[key]}"
    if (dtype := settings["model_config"].get("dtype")) != str(policy.dtype):
        return f"computes in {dtype}, the policy in {policy.dtype}"
    if (mode := settings["model_config"].get("logprobs_mode")) != "processed_logprobs":
        return f"gives {mode}, not log-probs of the distribution that was sampled from"
    if (quantized := settings["model_config"].get("quantization")) != launch.quantization(options):
        return f"has the quantization {quantized}, rollout.engine's is {launch.quantization(options)}"
    cached = str((settings.get("cache_config") or {}).get("cache_dtype"))
    # "auto" and "bfloat16" are the same cache; "fp8" and "fp8_e4m3" too
    if cached.startswith("fp8") != options.kv_cache_dtype.startswith("fp8"):
        return f"keeps keys and values in {cached}, rollout.engine's kv_cache_dtype is {options.kv_cache_dtype}"
    backend = (settings.get("weight_transfer_config") or {}).get("backend")
    wanted = "nccl" if transfer == "nccl" else "shared_memory"
    if backend != wanted:
        return f"takes weights by {backend}, not by {wanted}"
    if launch.sends_adapter(policy, options) and not settings.get("lora_config"):
        return (
            "takes no adapters (add --enable-lora --max-loras 2 --max-lora-rank R, or set rollout.engine's "
            "merge_adapter)"
        )
    return None
