"""Groups with given rewards, and what a selector keeps of them."""

from __future__ import annotations

import numpy as np

from rlvr import registry
from rlvr.records import Batch, Origin, Rollout, StopReason, Task

NAN = np.nan


def batch_of(*groups, lengths=None, sources=None):
    """A batch of groups, each a list of rewards."""
    rollouts, rewards = [], [r for group in groups for r in group]
    for g, group in enumerate(groups):
        task = Task(id=f"t{g}", prompt="?", source=None if sources is None else sources[g])
        for m in range(len(group)):
            size = 1 + (2 if lengths is None else lengths[len(rollouts)])
            origin = np.full(size, Origin.POLICY, dtype=np.int8)
            origin[0] = Origin.PROMPT
            rollouts.append(
                Rollout(
                    id=f"{g}/{m}",
                    task=task,
                    group=f"g{g}",
                    member=m,
                    token_ids=np.arange(size),
                    origin=origin,
                    behaviour_logprobs=np.full(size, np.nan, dtype=np.float32),
                    policy_version=np.zeros(size, dtype=np.int32),
                    stop=StopReason.END,
                )
            )
    return Batch(rollouts, {"reward": np.asarray(rewards, dtype=np.float64), "advantage": -np.asarray(rewards)})


def kept(name, batch, **options):
    positions = np.asarray(registry.build("selector", {"name": name, **options})(batch))
    return (np.flatnonzero(positions) if positions.dtype == bool else positions).tolist()
