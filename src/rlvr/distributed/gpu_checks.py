"""Refusal of a run that the GPUs found here cannot hold, before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr import registry
from rlvr.config import Config
from rlvr.distributed.world import World, machine
from rlvr.errors import ConfigError
from rlvr.policy.loading import device_of
from rlvr.rollout.vllm import devices
from rlvr.rollout.vllm.options import VLLMOptions, VLLMServerOptions


@dataclass(frozen=True)
class RankGPU:
    """The GPU that a rank is to train on."""

    name: str
    """As CUDA_VISIBLE_DEVICES names it."""
    uuid: str
    """Its identity, whatever a launcher or a container calls it."""
    is_part: bool
    """True if this is a part of a GPU (MIG), which may share its UUID with the other parts."""
    machine: tuple[str, str]

    def is_same(self, other: RankGPU) -> bool:
        """Return True if both are one GPU, as far as can be told: parts of one are the same where one machine or
        container has one name for both."""
        parts = self.is_part and other.is_part
        return self.uuid == other.uuid and (not parts or (self.name, self.machine) == (other.name, other.machine))


def check_gpus(config: Config, world: World, engine_reason: str | None = None) -> None:
    """ConfigError, the same on every rank, where a rank has no GPU of its own, or where the engine does not fit the
    GPUs: too few, too little free memory, or a vLLM that was built for another device. `engine_reason` says why it is
    this engine."""
    home = device_of(config.model)
    gpu: RankGPU | None = None
    problem: str | None = None
    try:
        if home.type == "cuda":
            home = torch.device("cuda", _index(home, world))
            properties = torch.cuda.get_device_properties(home)
            name = devices.visible()[home.index]
            # CUDA calls a part "NVIDIA A100-SXM4-40GB MIG 1g.5gb", also where CUDA_VISIBLE_DEVICES has its index
            is_part = devices.is_part(name) or " MIG " in properties.name
            gpu = RankGPU(name, str(properties.uuid), is_part, machine())
        options = registry.build("engine", config.rollout.engine)
        if isinstance(options, VLLMOptions | VLLMServerOptions) and (options.per_rank or world.is_main):
            try:
                options.check(home)
            except ConfigError as error:
                raise ConfigError(f"{error} ({engine_reason})" if engine_reason is not None else str(error)) from error
    except ConfigError as error:
        problem = str(error)
    # Problems are gathered and not raised at once: a rank that raises alone would leave the others to find out by its
    # silence.
    answers = world.gather((gpu, problem), "the GPUs of the ranks")
    for rank, (_, theirs) in enumerate(answers):
        if theirs is not None:
            raise ConfigError(f"rank {rank}: {theirs}" if world.size > 1 else theirs)
    gpus = [theirs for theirs, _ in answers]
    for rank, own in enumerate(gpus):
        # By UUID: two ranks may see one GPU under two indices.
        for other in range(rank):
            before = gpus[other]
            if own is not None and before is not None and own.is_same(before):
                raise ConfigError(
                    f"ranks {other} and {rank} are to train on the same GPU ({own.name}, {own.uuid}): start one rank "
                    f"for each GPU (--nproc-per-node), leave out the number in model.device ({config.model.device}), "
                    f"and let {devices.VISIBLE} show each rank all of them"
                )


def _index(home: torch.device, world: World) -> int:
    """The index of this rank's GPU among those that are visible. ConfigError where there is none."""
    shown = devices.visible()
    # `cuda` without a number: the local rank chooses; with a number the user did.
    if home.index is None and world.size > 1:
        index = world.local_rank
    else:
        index = devices.index_of(home)
    if index >= len(shown):
        raise ConfigError(
            f"the run is to train on the GPU of index {index}, and {devices.VISIBLE} shows {len(shown)} "
            f"({', '.join(shown)}): start at most as many ranks on a machine as it has GPUs (--nproc-per-node), or "
            "show it more"
        )
    return index
