"""The start of a vLLM engine or server for a policy: engine arguments and environment.

Sampling options come from the request alone (`generation_config` vllm), log-probs are those of the distribution
that was sampled from (processed_logprobs), equal prompts are computed once (prefix caching), weights come by a publish
(dummy).
"""

from __future__ import annotations

import getpass
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.policy.adapters import is_adapter
from rlvr.rollout.vllm.settings import CommonSettings

OURS = frozenset(
    {
        "model",
        "load_format",
        "logprobs_mode",
        "generation_config",
        "worker_extension_cls",
        "weight_transfer_config",
        "trust_remote_code",
    }
)
"""Engine arguments that this library decides."""
BY_NAME = frozenset({"speculative_config", "quantization", "kv_cache_dtype"})
"""Engine arguments that are options of ours: what they mean for log-probs and publishes is checked."""
NGRAM = frozenset({"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"})
"""Keys of vLLM's SpeculativeConfig that n-grams have; others may change the distribution
(`rejection_sample_method`)."""
OLDEST_FP8 = {"fp8_per_channel": (8, 9)}
"""Compute capability that vLLM 0.32 wants for weights in fp8, where it is not that of OLDEST_FP8_OF_OTHERS: per channel
needs kernels that take activations in fp8 (`Fp8PtpcOnlineLinearMethod`)."""
OLDEST_FP8_OF_OTHERS = (7, 5)
"""`get_min_capability` of vLLM's online quantization."""


FITTING = -1
"""vLLM's own choice of `max_model_len`: the model's context, or as much of it as the memory for keys and values
holds."""
# A socket's path holds 107 bytes on Linux (sun_path); vLLM adds a slash and a UUID of 36 characters to the folder
# (get_open_zmq_ipc_path in utils/network_utils.py), so 70 would just do.
LONGEST = 60
"""Characters of a folder for sockets, whose paths may have 107 in all."""


def sends_adapter(policy: Policy, options: CommonSettings) -> bool:
    """Return True if an adapter goes to the engine by itself."""
    return is_adapter(policy.model) and not options.merge_adapter


def engine_arguments(policy: Policy, folder: Path, options: CommonSettings, transfer: str) -> dict[str, Any]:
    """The fields of vLLM's EngineArgs. ConfigError for one in `engine_args` that is not the user's to set."""
    if taken := sorted(OURS & options.engine_args.keys()):
        raise ConfigError(f"rollout.engine: engine_args may not set {', '.join(taken)}: the library decides it")
    if named := sorted(BY_NAME & options.engine_args.keys()):
        raise ConfigError(
            f"rollout.engine: engine_args may not set {', '.join(named)}: write it beside engine_args, as an option "
            "of the engine"
        )
    check_speculation(options.speculative_config, policy.home)
    check_precision(policy, options)
    if (options.max_model_len or 0) > policy.context:
        raise ConfigError(
            f"rollout.engine: max_model_len {options.max_model_len} is longer than the model's context of "
            f"{policy.context} tokens"
        )
    on_cpu = policy.home.type == "cpu"
    arguments: dict[str, Any] = {
        "model": str(folder),
        "runner": "generate",
        # Random weights at the start: the first publish brings the policy's, and nothing is read from disk.
        "load_format": "dummy",
        "dtype": str(policy.dtype).removeprefix("torch."),
        "max_model_len": options.max_model_len or FITTING,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        # The members of a group share the keys and values of their prompt.
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "trust_remote_code": options.trust_remote_code,
        "worker_extension_cls": "rlvr.rollout.vllm.receiver.WorkerExtension",
        "weight_transfer_config": {"backend": transfer},
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": 0,
        "quantization": quantization(options),
        "kv_cache_dtype": options.kv_cache_dtype,
    }
    if options.speculative_config is not None:
        arguments["speculative_config"] = dict(options.speculative_config)
    # 1 GiB on a CPU: vLLM's own default there is a share of all memory, which the trainer shares.
    kv_cache = options.kv_cache_gib if options.kv_cache_gib is not None else 1.0 if on_cpu else None
    if kv_cache is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache * 2**30)
    if on_cpu:
        arguments["enforce_eager"] = True  # compiling takes minutes and gains little here
        # vLLM takes back what it drew for a part of a prompt, which a CPU's random generator cannot: whole prompts
        # only.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    if sends_adapter(policy, options):
        rank = max(config.r for config in policy.model.peft_config.values())
        # 2: responses under way end with the adapter before, while new ones begin with the newest.
        arguments |= {"enable_lora": True, "max_lora_rank": _allowed_rank(rank), "max_loras": 2}
    # The user's arguments win over these; those of OURS and BY_NAME were refused above.
    return {**arguments, **options.engine_args}


def quantization(options: CommonSettings) -> str | None:
    """Return vLLM's name of the quantization of weights; `fp8` is its name for checkpoints that are quantised
    already."""
    if options.quantization == "fp8":
        return "fp8_per_tensor"
    return options.quantization


def check_speculation(config: Mapping[str, Any] | None, home: torch.device) -> None:
    """ConfigError where speculative decoding is asked for with something else than n-grams, or for a policy on a
    CPU."""
    if config is None:
        return
    where = "rollout.engine: speculative_config"
    if config.get("method") != "ngram":
        raise ConfigError(
            f"{where} has the method {config.get('method')!r}, and only ngram is taken: a draft model would keep its "
            "weights while the policy is trained, since a publish brings the policy's alone"
        )
    if unknown := sorted(config.keys() - NGRAM):
        raise ConfigError(f"{where} has {', '.join(unknown)}, and ngram takes {', '.join(sorted(NGRAM))} here")
    counts = {name: value for name, value in config.items() if name != "method"}
    if "num_speculative_tokens" not in counts:
        raise ConfigError(f"{where} needs num_speculative_tokens, the most tokens that are guessed at once, such as 4")
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{where} has {name} {value!r}: give a whole number of at least 1")
    if counts.get("prompt_lookup_min", 1) > counts.get("prompt_lookup_max", math.inf):
        raise ConfigError(f"{where} has a prompt_lookup_min above its prompt_lookup_max")
    if home.type == "cpu":
        raise ConfigError(
            f"{where}: vLLM 0.32 samples wrong tokens with it on a CPU, where its temperatures are not initialised "
            "(expand_kernel_impl of its CPU build writes whole numbers alone): leave it out, or use a GPU"
        )


def check_precision(policy: Policy, options: CommonSettings) -> None:
    """ConfigError where vLLM cannot quantise the weights that are published."""
    if options.quantization is None:
        return
    where = f"rollout.engine: quantization {options.quantization}"
    if policy.dtype == torch.float32:
        raise ConfigError(
            f"{where} is for policies in bfloat16 or float16, and this one is in float32: set model.dtype"
        )
    if policy.home.type == "cpu":
        if options.quantization != "fp8_per_channel":
            raise ConfigError(f"{where}: vLLM's build for CPUs has no kernel that quantises weights so: leave it out")
        return
    oldest = OLDEST_FP8.get(options.quantization, OLDEST_FP8_OF_OTHERS)
    if torch.cuda.get_device_capability(policy.home) < oldest:
        raise ConfigError(
            f"{where} needs a GPU of compute capability {'.'.join(map(str, oldest))} or newer: leave it out"
        )


def environment(policy: Policy, options: CommonSettings, folder: Path) -> dict[str, str]:
    """Environment variables of a started engine or server; what it leaves in its temporary folder goes with
    `folder`."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # fork would copy a process that has threads and a CUDA context.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The scheduler in the process of the engine, which does not step with half of the new weights; one in a process
        # beside it would, and waits busily.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # So that files that vLLM leaves when it is killed go with the run's scratch folder.
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder) if len(str(folder)) <= LONGEST else "/tmp",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache()),  # kept from run to run
    }
    # vLLM on a CPU otherwise binds its threads to cores ("auto"), beside or on those of the trainer.
    if policy.home.type == "cpu" and options.threads is not None:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(options.threads)}
    return variables


def default_cache() -> str:
    """Return the folder in which torch keeps compiled code when TMPDIR is as it is here."""
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")


def _allowed_rank(rank: int) -> int:
    """The smallest rank that vLLM allocates for and that holds `rank`."""
    # `MaxLoRARanks` in vllm/config/lora.py (0.32).
    for allowed in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= allowed:
            return allowed
    raise ConfigError(
        f"model.adapter.r {rank} is larger than vLLM takes (512): set rollout.engine's merge_adapter to true"
    )
