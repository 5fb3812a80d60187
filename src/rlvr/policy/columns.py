"""Statistics of the policy as token columns of a batch, for components that read them before the update.

They are taken from the weights as they are, without gradient, in the micro-batches of the update; one forward pass
however many statistics are asked for, none where none is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.core.needs import Need, Statistic
from rlvr.policy.microbatch import micro_batches
from rlvr.policy.model import Policy
from rlvr.policy.statistics import DeferredColumns, forward
from rlvr.records import Batch


def add_statistics(
    policy: Policy, batch: Batch, needs: Collection[Need], where: Sequence[np.ndarray], config: OptimConfig
) -> None:
    """Add the token columns `STATISTIC/current` that `needs` names, NaN but where `where` (bool [T_b] each) is True."""
    # int64 [rollouts with a marked token]: the others cost no forward pass.
    index = np.flatnonzero([bool(w.any()) for w in where])
    columns: dict[Statistic, list[np.ndarray]] = {
        need.statistic: [np.full(len(r), np.nan, dtype=np.float32) for r in batch.rollouts] for need in needs
    }
    later = DeferredColumns()
    # Without dropout, as the log-probs of the update that these are compared with.
    with torch.no_grad(), policy.evaluating():
        for rows in micro_batches(policy, batch, index, where, config) if len(index) else ():
            statistics = forward(policy, rows, needs)
            for name, values in columns.items():
                later.add(rows, statistics[name, "current"], values)
    later.write()
    batch.token_columns |= {f"{name}/current": values for name, values in columns.items()}
