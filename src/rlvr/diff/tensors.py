"""The first tensor in which two runs' checkpoints differ: weights of the model, then optimizer and reference.

Invariant: one tensor of each run is in memory at a time.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from rlvr.diff.parting import Parting
from rlvr.distributed.checkpoint import Tensors, checkpoints, step_of
from rlvr.errors import CheckpointError

# 4 million numbers are 32 MiB in float64 for each of the four temporaries; an embedding may have a billion.
CHUNK = 1 << 22
"""Numbers compared at a time."""


def compare_checkpoints(a: Path, b: Path, tolerance: float, notes: list[str]) -> Parting:
    """The steps of which both runs have a checkpoint, in order, up to the first that differs."""
    parting = Parting("checkpoints")
    folders = [{step_of(path): path for path in checkpoints(run / "checkpoints")} for run in (a, b)]
    for step in sorted(folders[0].keys() & folders[1].keys()):
        for part in ("model/*.safetensors", "tensors-*.safetensors"):
            try:
                tensors = [Tensors(sorted(of_run[step].glob(part))) for of_run in folders]
            except CheckpointError as error:
                notes.append(f"{error}; it is not compared")
                continue
            parting.lines = _parting(tensors[0], tensors[1], tolerance)
            if parting.lines:
                parting.compared += 1
                parting.step = step
                parting.lines = [f"{part.partition('/')[0].partition('-')[0]}: {line}" for line in parting.lines]
                return parting
        parting.compared += 1
    return parting


def _parting(a: Tensors, b: Tensors, tolerance: float) -> list[str]:
    """Descriptions of the differences between two sets of tensors."""
    lines = [f"{name} is in one checkpoint only" for name in sorted(set(a) ^ set(b), key=_natural)[:3]]
    first = ""
    different = 0
    common = sorted(set(a) & set(b), key=_natural)
    for name in common:
        difference = _difference(a[name], b[name], tolerance)
        if difference is not None:
            different += 1
            first = first or f"{name}{difference}"
    if first:
        lines.append(f"{first}; {different} of {len(common)} tensors differ")
    return lines


def _difference(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> str | None:
    """The first entry in which two tensors differ, and the largest difference; None where there is none."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f" is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    flat = (a.reshape(-1), b.reshape(-1))
    first = None
    largest = 0.0
    count = 0
    for begin in range(0, len(flat[0]), CHUNK):
        x, y = (values[begin : begin + CHUNK].double() for values in flat)
        # In float64, where the difference of two float32 or bfloat16 numbers is exact enough to be compared with the
        # tolerance.
        gap = (x - y).abs()
        near = gap.isfinite() & (gap <= tolerance * torch.maximum(x.abs(), y.abs()).clamp(min=1))
        # inf in both and NaN in both are equal, though their difference is NaN.
        over = ~(near | (x == y) | (x.isnan() & y.isnan()))
        if bool(over.any()):
            places = over.nonzero()[:, 0]
            first = begin + int(places[0]) if first is None else first
            largest = max(largest, float(gap[over].nan_to_num(torch.inf).max()))
            count = count + len(places)
    if first is None:
        return None
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)]
    values = " and ".join(f"{float(values[first]):.9g}" for values in flat)
    return f"{index}: {values} (largest difference {largest:.3g}, {count} of {a.numel()} entries)"


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10."""
    # "layers.10.bias" becomes [(-1, "layers."), (10, ""), (-1, ".bias")]: digits compare as numbers.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
