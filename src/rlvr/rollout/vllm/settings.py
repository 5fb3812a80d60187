"""Settings of the vLLM engines, which the code below the engines reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch

from rlvr.rollout.engine import EngineFactory
from rlvr.rollout.vllm.transfer import SHARED_MEMORY


@dataclass(frozen=True)
class CommonSettings(EngineFactory):
    """Settings of both engines."""

    max_model_len: int | None = None
    """Longest sequence in tokens, prompt and response together; null: `data.max_prompt_tokens` and the longest
    response, or the longest evaluation prompt and its response, where the former is set and responses have one turn;
    else the model's context, or what of it fits into the memory for keys and values."""
    max_num_seqs: int | None = None
    """Most sequences sampled at once; null: as vLLM's own server would choose for the device (0.32: 1024 on a GPU of 70
    GiB or more but an A100, 256 on others, 128 on a CPU)."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step of the engine, prompts included; null: as vLLM's own server would choose for the
    device (0.32: 16384 from 160 GiB of memory, 8192 from 70 GiB but on an A100, 2048 on others and on a CPU)."""
    tensor_parallel_size: int = 1
    """Devices that one copy of the model is split over."""
    kv_cache_gib: float | None = None
    """Memory for keys and values, in GiB; null: on a GPU what `gpu_memory_utilization` leaves, on a CPU 1."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that vLLM may take."""
    threads: int | None = None
    """On a CPU, threads that the engine computes with, not bound to cores; null: vLLM's own choice, bound to cores."""
    clear_cache: bool = True
    """At a publish under `rollout.in_flight: continue`: true computes the keys and values of responses under way anew,
    with the new weights; false keeps them, so that the next tokens attend to keys and values of older weights
    (`clear_cache` of vLLM's /pause, which prime-rl sets to false). What is sampled then differs from what the trainer
    computes: see `mismatch/*`."""
    merge_adapter: bool = False
    """Send the weights with the LoRA adapter merged in instead of the adapter alone, where one is trained: more to send
    at each publish, and faster to sample with."""
    speculative_config: Mapping[str, Any] | None = None
    """Speculative decoding with n-grams of the sequence itself, in vLLM's words: `{method: ngram,
    num_speculative_tokens: 4, prompt_lookup_min: 2, prompt_lookup_max: 4}`. It changes neither the distribution nor the
    log-probs. Methods with a draft model are refused, whose weights no publish brings; so is a CPU, for which vLLM 0.32
    has no right kernel."""
    quantization: Literal["fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] | None = None
    """Weights and activations of linear layers in fp8; vLLM quantises the weights of each publish. fp8 is
    fp8_per_tensor. What is sampled differs from what the trainer computes by far more than rounding: see `mismatch/*`.
    Needs a policy in bfloat16 or float16."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of cached keys and values; auto: the policy's. In fp8 (e4m3) twice as many tokens fit, unscaled: see
    `mismatch/*`."""
    structured_outputs: Mapping[str, Any] | None = None
    """A constraint on every completion, as vLLM takes it (`regex`, `json`, `choice`, `grammar` ...). Training does not
    apply it, so the behaviour log-probs differ from the trainer's: see `mismatch/*`."""
    trust_remote_code: bool = False
    """Let vLLM run code that comes with the model. Only for sources that you trust."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments of vLLM by their names (`enforce_eager`, `enable_chunked_prefill` ...)."""
    start_timeout: float = 600.0
    """Seconds for an engine or server to start."""
    publish_timeout: float = 600.0
    """Seconds for each answer during a publish, and for responses to finish on the old weights."""

    def for_run(self, longest: int | None, partitions: bool, heartbeat_timeout: float | None) -> Self:
        """The run's longest sequence as `max_model_len`; adapters merged into the weights where no rank can write one
        alone."""
        return dataclasses.replace(
            self, max_model_len=self.max_model_len or longest, merge_adapter=self.merge_adapter or partitions
        )

    @property
    def low_precision(self) -> tuple[str, ...]:
        """The options by which vLLM computes in less than the policy's type, as they are written."""
        options = {"quantization": self.quantization, "kv_cache_dtype": self.kv_cache_dtype}
        return tuple(f"{name}: {value}" for name, value in options.items() if value not in (None, "auto"))


@dataclass(frozen=True)
class EngineSettings(CommonSettings):
    """Settings of an engine that the run owns."""

    gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory that vLLM may take beside the trainer."""
    transfer: Literal["auto", "ipc", "shared_memory"] = "auto"
    """Transport of the weights to the engine. ipc: from one GPU to itself, for a model that is not split;
    shared_memory: through the host's memory, which always works and is slower. auto: ipc where it can be."""
    sleep: bool = True
    """On a GPU, give the engine's memory back while the trainer updates. Not on a CPU, where vLLM cannot."""


@dataclass(frozen=True)
class ServerSettings(CommonSettings):
    """Settings of servers."""

    servers: int = 1
    """Servers to start, each on loopback with a free port and a key of its own."""
    port: int | None = None
    """First port of the started servers, one more for each; null: free ones."""
    data_parallel_size: int = 1
    """Copies of the model in each started server."""
    urls: tuple[str, ...] = ()
    """Servers that run already, started with `python -m rlvr.rollout.vllm.serve`; none is started then."""
    api_key_env: str = "VLLM_API_KEY"
    """Environment variable with the key of the servers in `urls`."""
    transfer: Literal["auto", "shared_memory", "files", "nccl"] = "auto"
    """Transport of the weights to the servers. auto: nccl from a GPU; else shared memory to servers that the run
    starts, files to those in `urls`. The servers in `urls` have to be started for it."""
    weights_dir: str | None = None
    """For `files`: a folder that the trainer writes and every server reads; null: a temporary one on this machine."""
    address: str = "127.0.0.1"
    """For `nccl`: where servers reach the trainer. Those in `urls` on other machines need a name or address other than
    the default."""
    devices: tuple[str, ...] = ()
    """For each started server the CUDA_VISIBLE_DEVICES that it gets, such as `["4,5", "6,7"]`; empty: GPUs that no rank
    trains on. One that a rank trains on is refused."""
    stall_timeout: float | None = None
    """For `nccl`: seconds after the first weight of a publish in which servers may take no further one before it is
    given up; until the first one `publish_timeout` holds. null: distributed.heartbeat_timeout."""
    restarts: int = 3
    """Number of times that a lost server is brought back before it is given up."""
    request_timeout: float = 1800.0
    """Seconds for one answer; past it the server counts as hanging."""
    health_every: float = 5.0
    """Seconds between health checks."""
    health_timeout: float = 30.0
    """Seconds that the engine of a server may take to answer a health check, which it does between two steps. One that
    takes longer is started anew."""

    def for_run(self, longest: int | None, partitions: bool, heartbeat_timeout: float | None) -> Self:
        """See CommonSettings; `heartbeat_timeout` is the `stall_timeout` of transfers."""
        settings = super().for_run(longest, partitions, heartbeat_timeout)
        return dataclasses.replace(
            settings, stall_timeout=heartbeat_timeout if self.stall_timeout is None else self.stall_timeout
        )

    def transfer_to(self, home: torch.device) -> str:
        """The transfer from a policy that is computed on `home`, as this library calls it."""
        if self.transfer != "auto":
            return self.transfer
        if home.type != "cpu":
            return "nccl"
        return "files" if self.urls else SHARED_MEMORY
