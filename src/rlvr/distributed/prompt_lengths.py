"""Lengths of prompts and demonstrations, which rank 0 encodes for all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlvr.data import Prompts
from rlvr.distributed.world import World
from rlvr.records import Task


def encoded_lengths(
    prompts: Prompts, world: World, tasks: Sequence[Task], demonstrations: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each task's prompt and, with `demonstrations`, of its demonstration (else 0): int32 [N] each, on every
    rank.

    Only rank 0 encodes and keeps the prompts: it alone samples. Other ranks encode the few that a step asks them for.
    """
    # [N], N tasks; replaced by rank 0's in the broadcast
    lengths = shown = np.zeros(len(tasks), dtype=np.int32)
    if world.is_main:
        lengths = prompts.lengths(tasks)
        if demonstrations:
            shown = prompts.demonstration_lengths(tasks)
    # Without a deadline: a million prompts take minutes, and a rank that dies meanwhile is named all the same.
    return world.broadcast((lengths, shown), "the prompts to be encoded", math.inf)
