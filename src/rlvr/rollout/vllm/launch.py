"""How a vLLM engine or server is started for a policy: engine arguments and environment.

Sampling is what a request says and nothing else (`generation_config` vllm), log-probs are those of the distribution that
was sampled from (processed_logprobs), equal prompts are computed once (prefix caching), weights come by a publish (dummy).
"""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path
from typing import Any

from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.policy.adapters import is_adapter
from rlvr.rollout.vllm.options import Common

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


FITTING = -1
"""vLLM's own choice of `max_model_len`: the model's context, or as much of it as the memory for keys and values holds."""
LONGEST = 60
"""Characters of a folder for sockets, whose paths may have 107 in all."""


def sends_adapter(policy: Policy, options: Common) -> bool:
    """Whether an adapter goes to the engine by itself."""
    return is_adapter(policy.model) and not options.merge_adapter


def engine_arguments(policy: Policy, folder: Path, options: Common, transfer: str) -> dict[str, Any]:
    """The fields of vLLM's EngineArgs. ConfigError for one in `engine_args` that is not the user's to set."""
    if taken := sorted(OURS & options.engine_args.keys()):
        raise ConfigError(f"rollout.engine: engine_args may not set {', '.join(taken)}: the library decides it")
    if (options.max_model_len or 0) > policy.context:
        raise ConfigError(
            f"rollout.engine: max_model_len {options.max_model_len} is longer than the model's context of {policy.context} tokens"
        )
    on_cpu = policy.home.type == "cpu"
    arguments: dict[str, Any] = {
        "model": str(folder),
        "runner": "generate",
        "load_format": "dummy",
        "dtype": str(policy.dtype).removeprefix("torch."),
        "max_model_len": options.max_model_len or FITTING,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "trust_remote_code": options.trust_remote_code,
        "worker_extension_cls": "rlvr.rollout.vllm.receiver.WorkerExtension",
        "weight_transfer_config": {"backend": transfer},
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": 0,
    }
    kv_cache = options.kv_cache_gib if options.kv_cache_gib is not None else 1.0 if on_cpu else None
    if kv_cache is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache * 2**30)
    if on_cpu:
        arguments["enforce_eager"] = True  # compiling takes minutes and gains little here
        # vLLM takes back what it drew for a part of a prompt, which a CPU's random generator cannot: whole prompts only.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    if sends_adapter(policy, options):
        rank = max(config.r for config in policy.model.peft_config.values())
        arguments |= {"enable_lora": True, "max_lora_rank": _allowed_rank(rank), "max_loras": 2}
    return {**arguments, **options.engine_args}


def environment(policy: Policy, options: Common, folder: Path) -> dict[str, str]:
    """Environment variables of a started engine or server; what it leaves in its temporary folder goes with `folder`."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The scheduler in the process of the engine, which does not step with half of the new weights; one in a process beside
        # it would, and waits busily.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder) if len(str(folder)) <= LONGEST else "/tmp",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache()),  # kept from run to run
    }
    if policy.home.type == "cpu" and options.threads is not None:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(options.threads)}
    return variables


def default_cache() -> str:
    """Where torch keeps what it compiled when TMPDIR is as it is here."""
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")


def _allowed_rank(rank: int) -> int:
    """The smallest rank that vLLM allocates for and that holds `rank`."""
    for allowed in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= allowed:
            return allowed
    raise ConfigError(
        f"model.adapter.r {rank} is larger than vLLM takes (512): set rollout.engine's merge_adapter to true"
    )
