"""What a backend saves, in one form for all backends and numbers of ranks.

A checkpoint's tensors are whole and named `weights/PARAMETER`, `optimizer/KEY/PARAMETER` and `reference/PARAMETER`; each is
written by one rank.
So a run saved under ZeRO-3 by two ranks is loaded by one process, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from rlvr.distributed.world import World
from rlvr.errors import CheckpointError
from rlvr.policy import Snapshot
from rlvr.policy.head import gathered
from rlvr.policy.microbatch import deal
from rlvr.rollout.weights import whole_shape, whole_size

WEIGHTS, OPTIMIZER, REFERENCE = "weights/", "optimizer/", "reference/"


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which rank writes each tensor, so that all write about as much."""
    names = list(sizes)
    hands = deal(np.asarray([sizes[name] for name in names], dtype=np.float64), ranks)
    return {names[i]: rank for rank, hand in enumerate(hands) for i in hand}


def check_weights(saved: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], prefix: str = WEIGHTS) -> None:
    """CheckpointError names the tensors that a checkpoint and the model do not both have, or have with another shape."""
    names = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
    wrong = [f"{name} (not in the checkpoint)" for name in sorted(shapes.keys() - names)]
    wrong += [f"{name} (only in the checkpoint)" for name in sorted(names - shapes.keys())]
    if not wrong:
        found = {name: saved[prefix + name].shape for name in sorted(names)}
        wrong = [
            f"{name} ({list(shape)} in the checkpoint, {list(shapes[name])} here)"
            for name, shape in found.items()
            if shape != shapes[name]
        ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(wrong[:5])}{more}")


def optimizer_keys(saved: Mapping[str, torch.Tensor]) -> list[str]:
    """The keys of the optimizer's state in a checkpoint; none where no step was taken."""
    return sorted({name.removeprefix(OPTIMIZER).split("/", 1)[0] for name in saved if name.startswith(OPTIMIZER)})


def saved_reference(snapshot: Snapshot, world: World) -> dict[str, torch.Tensor]:
    """This rank's share of the reference, in host memory: `reference/PARAMETER`. To be called on every rank."""
    parameters = snapshot.policy.trainable()
    owner = owners({name: whole_size(p) for name, p in parameters.items()}, world.size)
    if not _partitioned(snapshot):
        own = {name: tensor for name, tensor in snapshot.weights.items() if owner[name] == world.rank}
        return {REFERENCE + name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
    found: dict[str, torch.Tensor] = {}
    if snapshot.follows:  # in float32, which DeepSpeed's parameters are not
        for name, parameter in parameters.items():
            whole = _whole(snapshot, name, parameter)
            if owner[name] == world.rank:
                found[REFERENCE + name] = whole.cpu()
        return found
    with snapshot.in_place():
        for name, parameter in parameters.items():
            with gathered([parameter]):
                if owner[name] == world.rank:
                    found[REFERENCE + name] = parameter.detach().to("cpu", copy=True)
    return found


def load_reference(snapshot: Snapshot, saved: Mapping[str, torch.Tensor]) -> None:
    """Take back what `saved_reference` gave on all ranks. CheckpointError names what does not fit."""
    parameters = snapshot.policy.trainable()
    check_weights(saved, {name: whole_shape(p) for name, p in parameters.items()}, REFERENCE)
    if not _partitioned(snapshot):
        for name, tensor in snapshot.weights.items():
            tensor.copy_(saved[REFERENCE + name])
        return
    if snapshot.follows:
        for name, own in snapshot.weights.items():
            whole = saved[REFERENCE + name].flatten()
            part = whole[dist.get_rank() * own.numel() :][: own.numel()]
            own.flatten()[: part.numel()].copy_(part)
        return
    with snapshot.in_place(), torch.no_grad():
        for name, parameter in parameters.items():
            with gathered([parameter], written=True):
                parameter.copy_(saved[REFERENCE + name])


def _whole(snapshot: Snapshot, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A weight of a partitioned snapshot, of whose flattened elements every rank has a stretch of the same length in turn (the
    last one with padding)."""
    own = snapshot.weights[name].flatten().to(snapshot.policy.home)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)[: whole_size(parameter)].view(whole_shape(parameter))


def _partitioned(snapshot: Snapshot) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in snapshot.policy.trainable().values())
