"""The saved state of a backend, in one form for all backends and numbers of ranks.

A checkpoint's tensors are whole and named `weights/PARAMETER`, `optimizer/KEY/PARAMETER` and `reference/PARAMETER`;
each is written by one rank. So a run saved under ZeRO-3 by two ranks is loaded by one process, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from rlvr.core.device_memory import record_event
from rlvr.distributed.world import World
from rlvr.errors import CheckpointError
from rlvr.policy import Snapshot
from rlvr.policy.load_balancing import deal
from rlvr.policy.model import gathered
from rlvr.rollout.weights import has_parts, whole_shape, whole_size

WEIGHTS = "weights/"
OPTIMIZER = "optimizer/"
REFERENCE = "reference/"
# Arbitrary: small beside what an engine leaves free on its GPU, large beside the latency of an all-reduce.
CHUNK_BYTES = 64 << 20
"""On the device at once while a tensor that ranks have parts of is put together in host memory."""


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the rank that writes each tensor, so that all ranks write about as much."""
    names = list(sizes)
    # `deal` balances the sums of costs, as for micro-batches. A function of sizes alone, so ranks agree without asking.
    hands = deal(np.asarray([sizes[name] for name in names], dtype=np.float64), ranks)
    return {names[i]: rank for rank, hand in enumerate(hands) for i in hand}


def check_weights(saved: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], prefix: str = WEIGHTS) -> None:
    """CheckpointError names the tensors that a checkpoint and the model do not both have, or have with another
    shape."""
    names = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
    wrong = [f"{name} (not in the checkpoint)" for name in sorted(shapes.keys() - names)]
    wrong += [f"{name} (only in the checkpoint)" for name in sorted(names - shapes.keys())]
    if not wrong:
        saved_shapes = {name: saved[prefix + name].shape for name in sorted(names)}
        wrong = [
            f"{name} ({list(shape)} in the checkpoint, {list(shapes[name])} here)"
            for name, shape in saved_shapes.items()
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
    if not has_parts(snapshot.policy):
        own = {name: tensor for name, tensor in snapshot.weights.items() if owner[name] == world.rank}
        return {REFERENCE + name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        size = whole_size(parameter)
        part = snapshot.weights[name].flatten()  # ranks in turn have stretches of this length; the last one is padded
        start = dist.get_rank() * part.numel()
        part = part[: max(0, size - start)]
        whole = whole_on_host(size, part, start, snapshot.policy.home, keep=owner[name] == world.rank)
        if whole is not None:
            tensors[REFERENCE + name] = whole.view(whole_shape(parameter)).to(snapshot.weights[name].dtype)
    return tensors


def load_reference(snapshot: Snapshot, saved: Mapping[str, torch.Tensor]) -> None:
    """Take back what `saved_reference` gave on all ranks. CheckpointError names what does not fit."""
    parameters = snapshot.policy.trainable()
    check_weights(saved, {name: whole_shape(p) for name, p in parameters.items()}, REFERENCE)
    if not has_parts(snapshot.policy):
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


def whole_on_host(
    size: int, part: torch.Tensor | None, start: int, device: torch.device, keep: bool
) -> torch.Tensor | None:
    """A flat float32 tensor of `size` elements in host memory, of which each rank has a `part` from the element `start`
    on, or nothing. Parts may be of a narrower type, which float32 holds exactly. None where it is not to be kept; every
    rank has to call this.

    It is summed over ranks on `device`, chunk by chunk: an engine beside the trainer has most of a GPU's memory by
    then.
    """
    # int32: the bit patterns of float32. A rank without a part adds 0, which changes no bit, also of -0.0 and NaN.
    whole = torch.empty(size, dtype=torch.int32) if keep else None
    # 4 bytes an element
    step = CHUNK_BYTES // 4
    chunk = torch.empty(min(size, step), dtype=torch.int32, device=device)
    record_event("trainer", "checkpoint", chunk.nbytes)
    for begin in range(0, size, step):
        bits = chunk[: size - begin]
        bits.zero_()
        end = begin + bits.numel()
        if part is not None:
            first = max(begin, start)
            last = min(end, start + part.numel())
            if first < last:
                # The overlap of [begin, end) with [start, start + numel) of this rank's part.
                own = part[first - start : last - start].float()
                bits[first - begin : last - begin].copy_(own.view(torch.int32))
        dist.all_reduce(bits)  # of bit patterns, or a negative zero would come back positive
        if whole is not None:
            whole[begin:end].copy_(bits)
    record_event("trainer", "checkpoint", -chunk.nbytes)
    if whole is None:
        return None
    return whole.view(torch.float32)
