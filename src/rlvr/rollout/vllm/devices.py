"""The GPUs of an engine or of servers that a run starts: those of the trainer, or those that no rank trains on.

Names are those of CUDA_VISIBLE_DEVICES: indices or UUIDs as the launcher gave them, else the indices of all GPUs.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlvr.core.device_memory import free_cached
from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.rollout.weights import sources

if TYPE_CHECKING:
    from rlvr.rollout.vllm.settings import CommonSettings, EngineSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
GIB = 1 << 30
# Arbitrary above the tens of seconds that importing torch takes on a busy machine.
LOOK_SECONDS = 300.0
"""Deadline of a look at GPUs: torch is imported and contexts are made, on a machine that may be busy."""
# One line of JSON, the last that the process prints: libraries may print before it.
LOOK = """
import json, torch
gpus = range(torch.cuda.device_count())
print(json.dumps([(str(torch.cuda.get_device_properties(gpu).uuid), *torch.cuda.mem_get_info(gpu)) for gpu in gpus]))
"""


@dataclass(frozen=True)
class GPU:
    """A GPU as a process finds it."""

    uuid: str
    free: int
    """Bytes."""
    total: int
    """Bytes."""


def visible() -> list[str]:
    """The GPUs that this process may use, in the order of their indices in torch."""
    count = torch.cuda.device_count()
    named = _named()
    if named is None:
        return [str(index) for index in range(count)]
    # CUDA hides the first name that is no GPU (such as -1) and all that come after it.
    return named[:count]


def _named() -> list[str] | None:
    named = os.environ.get(VISIBLE)
    if named is None:
        return None
    # An empty value is "no GPU" and not "all of them": a list without entries, not None.
    return [name.strip() for name in named.split(",") if name.strip()]


def _for_processes(each: int) -> list[str]:
    """The GPUs that processes of `each` GPUs may be given: those that this one may use, and of parts of GPUs (MIG) all
    that are named. CUDA shows a process one part only, which is why a process of several can have none of the
    others."""
    parts = itertools.takewhile(is_part, _named() or [])
    if each == 1 and any(map(is_part, visible())):
        return [*parts]
    return visible()


def is_part(name: str) -> bool:
    """Return True if this is the name of a part of a GPU (MIG)."""
    return name.startswith("MIG-")


def index_of(home: torch.device) -> int:
    """The index of the GPU `home` in torch."""
    if home.index is not None:
        return home.index
    return torch.cuda.current_device()


def training(home: torch.device) -> list[int]:
    """Indices in torch of the GPUs that the ranks of this machine train on, that of this rank, `home`, first."""
    shown = visible()
    own = index_of(home)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # One rank for each GPU, by local rank (`World._join`), so the ranks of this machine use the indices 0 to ranks - 1.
    used = [own, *(index for index in range(ranks) if ranks > 1 and index != own)]
    if missing := [index for index in used if index >= len(shown)]:
        raise ConfigError(
            f"{ranks} ranks on this machine need as many GPUs, and {VISIBLE} shows {len(shown)} ({', '.join(shown)}): "
            f"there is none for index {missing[0]}"
        )
    return used


def look(names: Sequence[str]) -> list[GPU]:
    """The GPUs that a process sees whose CUDA_VISIBLE_DEVICES is `names`, up to the first that does not exist.

    In a process of its own, because a CUDA context takes hundreds of MiB of each GPU for as long as its process lives.
    `subprocess.run` and not core/process/child_process: it starts nothing, ends by itself, and is waited for.
    """
    # -P keeps the current directory off sys.path, where a user's `torch.py` or `json.py` would be taken for the
    # library.
    environment = {**os.environ, VISIBLE: ",".join(names)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", LOOK], env=environment, capture_output=True, text=True, timeout=LOOK_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the GPUs {', '.join(names)} gave no answer within {LOOK_SECONDS:.0f} s: look at nvidia-smi"
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"the GPUs {', '.join(names)} cannot be used: {reason}")
    return [GPU(*values) for values in json.loads(done.stdout.splitlines()[-1])]


def beside_trainer(home: torch.device, tensor_parallel: int) -> str:
    """CUDA_VISIBLE_DEVICES of an engine on the trainer's own GPU, and on others where it is split.

    ConfigError where no rank leaves as many free as it is split over.
    """
    shown = visible()
    if tensor_parallel == 1:  # also where the launcher shows each rank its own GPU alone
        return shown[index_of(home)]
    used = [shown[index] for index in training(home)]
    free = [name for name in shown if name not in used]
    if tensor_parallel > 1 + len(free):
        raise ConfigError(
            f"rollout.engine: tensor_parallel_size {tensor_parallel} needs {tensor_parallel - 1} GPUs beside the "
            f"trainer's that no rank trains on, and {VISIBLE} shows {len(free)}: the ranks use {', '.join(used)}. "
            "Start fewer ranks, show more GPUs, or set tensor_parallel_size to 1, which gives every rank an engine "
            "of its own"
        )
    return ",".join([used[0], *free[: tensor_parallel - 1]])


def engine_memory(policy: Policy, options: EngineSettings) -> dict[str, int]:
    """Bytes that an engine takes of the trainer's GPU, by the names of vLLM's `wake_up`."""
    # By identity, so that tied weights count once, as vLLM ties them too.
    weights = {id(source.parameters[0]): source.shape.numel() for source in sources(policy, merged=False)}
    taken = sum(weights.values()) * policy.dtype.itemsize // options.tensor_parallel_size
    if options.kv_cache_gib is not None:
        return {"weights": taken, "kv_cache": int(options.kv_cache_gib * 2**30)}
    _, total = torch.cuda.mem_get_info(policy.home)
    return {"weights": taken, "kv_cache": max(0, int(utilization(options) * total) - taken)}


def utilization(options: CommonSettings) -> float:
    """The share of a GPU that vLLM is told to take."""
    return float(options.engine_args.get("gpu_memory_utilization", options.gpu_memory_utilization))


def demanded(total: int, options: CommonSettings) -> int:
    """Bytes that have to be free on a GPU of `total` bytes. vLLM demands its share of the GPU when it starts
    (`request_memory` in its v1/worker/utils.py), also where `kv_cache_gib` says that it takes less."""
    return max(int(utilization(options) * total), int((options.kv_cache_gib or 0) * GIB))


def check_free(home: torch.device, options: EngineSettings) -> None:
    """ConfigError where the GPU `home` of the trainer has less free memory than the engine demands."""
    free_cached(home)  # what torch's allocator keeps unused is free for the engine
    # Of the whole device: what the trainer reserved counts as taken, after the cache was freed above.
    free, total = torch.cuda.mem_get_info(home)
    own = torch.cuda.memory_reserved(home)
    if own:
        beside = f" and {own / GIB:.1f} GiB by the trainer"
    else:
        beside = ""
    _check_memory(visible()[index_of(home)], free, total, options, own, beside, "model.device or ")


def check_split(home: torch.device, options: EngineSettings) -> None:
    """ConfigError where one of the GPUs beside the trainer's, over which the engine is split, has less free memory than
    it demands."""
    names = beside_trainer(home, options.tensor_parallel_size).split(",")[1:]
    for name, gpu in _look_at(names).items():
        _check_memory(name, gpu.free, gpu.total, options)


def of_servers(home: torch.device, servers: int, each: int, named: Sequence[str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each started server, which takes `each` GPUs, none of them one that a rank trains on.

    `named` are those that the configuration names. ConfigError where they do not fit, or where too few are free.
    """
    shown = visible()
    used = [shown[index] for index in training(home)]
    if named:
        _check_names(named, each, used)
        return list(named)
    free = [name for name in _for_processes(each) if name not in used]
    if len(free) < servers * each:
        raise ConfigError(
            f"rollout.engine vllm-server: {servers} servers of {each} GPUs need {servers * each} that no rank trains "
            f"on; of the {len(used) + len(free)} that are visible here the ranks use {', '.join(used)}. Start fewer "
            "ranks or servers, give `urls` of servers on another machine, or use the engine `vllm`, which shares the "
            "trainer's GPU"
        )
    return [",".join(free[number * each : (number + 1) * each]) for number in range(servers)]


def check_servers(home: torch.device, each: int, servers: Sequence[str], options: CommonSettings) -> None:
    """ConfigError where one of the GPUs of `servers`, as CUDA_VISIBLE_DEVICES of each, is not there, is one that a rank
    trains on by another name, is there twice, or has less free memory than vLLM demands."""
    # UUIDs decide, not names: one GPU may be "0" for the launcher and "GPU-..." in the configuration.
    names = [name.strip() for shown in servers for name in shown.split(",")]
    gpus = _look_at(names)
    used = [torch.device("cuda", index) for index in training(home)]
    trained = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in used]
    seen: set[str] = set()
    for name, gpu in gpus.items():
        if gpu.uuid in trained:
            raise ConfigError(_trained_on(names.index(name) // each, name))
        if gpu.uuid in seen:
            raise ConfigError(f"rollout.engine: devices names the GPU {name} ({gpu.uuid}) twice")
        seen.add(gpu.uuid)
    for name, gpu in gpus.items():
        _check_memory(name, gpu.free, gpu.total, options)


def _look_at(names: Sequence[str]) -> dict[str, GPU]:
    """The GPUs `names`, each of them once, without parts of GPUs (MIG): CUDA shows a process one of them. ConfigError
    where one is not there."""
    by_name: dict[str, GPU] = {}
    for kind in ("index", "UUID"):  # CUDA takes names of one kind together
        same = [name for name in names if _kind(name) == kind]
        gpus = look(same) if same else []
        if len(gpus) < len(same):
            raise ConfigError(
                f"rollout.engine: there is no GPU {same[len(gpus)]} on this machine (of {', '.join(names)}): name "
                "indices or UUIDs that nvidia-smi -L shows"
            )
        by_name |= zip(same, gpus, strict=True)
    return by_name


def _kind(name: str) -> str:
    if is_part(name):
        return "part"
    return "UUID" if name.startswith("GPU-") else "index"


def _check_memory(
    name: str, free: int, total: int, options: CommonSettings, own: int = 0, beside: str = "", other: str = ""
) -> None:
    """ConfigError where the GPU `name` has less free memory than vLLM demands. `own`: bytes that the trainer has."""
    needed = demanded(total, options)
    if free >= needed:
        return
    share = f"gpu_memory_utilization {utilization(options)}"
    # Rounded down, so that what is proposed fits.
    lower = f"gpu_memory_utilization to {math.floor(100 * free / total) / 100} or less"
    if needed > utilization(options) * total:
        share = f"kv_cache_gib {options.kv_cache_gib:g}"
        lower = "a lower kv_cache_gib"
    raise ConfigError(
        f"the GPU {name} has {free / GIB:.1f} of {total / GIB:.1f} GiB free, and vLLM demands {needed / GIB:.1f} GiB "
        f"({share}): {max(0, total - free - own) / GIB:.1f} GiB are held by other processes (nvidia-smi){beside}. End "
        f"them, set {lower}, or choose another GPU by {other}{VISIBLE}"
    )


def _check_names(named: Sequence[str], each: int, used: Sequence[str]) -> None:
    names = [[name.strip() for name in devices.split(",")] for devices in named]
    for number, own in enumerate(names):
        if len(own) != each:
            raise ConfigError(
                f"rollout.engine: devices[{number}] names {len(own)} GPUs, and the server needs {each} "
                "(tensor_parallel_size x "
                "data_parallel_size)"
            )
        if taken := [name for name in own if name in used]:
            raise ConfigError(_trained_on(number, taken[0]))
        if len({_kind(name) for name in own}) > 1:
            raise ConfigError(
                f"rollout.engine: devices[{number}] ({named[number]}) names GPUs in different ways, and CUDA would "
                "show the server the first alone: name all of them by indices, or all by UUIDs"
            )
    every = [str(int(name)) if name.isdecimal() else name for own in names for name in own]  # 01 is 1
    if twice := [name for name in every if every.count(name) > 1]:
        raise ConfigError(f"rollout.engine: devices names the GPU {twice[0]} for two servers")


def _trained_on(number: int, name: str) -> str:
    return (
        f"rollout.engine: devices[{number}] names the GPU {name}, which a rank trains on: NCCL cannot send from a GPU "
        "to itself. Name another one, or use the engine `vllm`"
    )
