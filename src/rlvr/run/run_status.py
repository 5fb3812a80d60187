"""What a run is doing at this moment, in a few lines: the answer to SIGUSR1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlvr.core.waits import Wait
from rlvr.monitor.lines import step_cells

if TYPE_CHECKING:
    from rlvr.trainer import GRPOTrainer


def status(trainer: GRPOTrainer) -> str:
    """Step, phase, waits with their open groups, verifier processes, checkpoint and the last metrics. Takes no lock."""
    stage, world = trainer.resolved.plans[trainer.state.stage_number], trainer.world
    writer, last = trainer.saver.writer, trainer.state.metrics[-1] if trainer.state.metrics else None
    lines = [
        f"run {trainer.folder.path}, process {os.getpid()}, rank {world.rank} of {world.size}",
        f"step: {trainer.state.step} done of {sum(plan.allowed for plan in trainer.resolved.plans)}; stage {stage.name}: "
        f"{trainer.state.stage_step} of {stage.allowed}; weights of version {trainer.state.version}",
        f"phase: {trainer.meters.phases.current or 'between phases (evaluation, logging, saving)'}",
        *[f"waits for: {wait}" for wait in list(Wait.under_way.values())],
        f"verifier processes: {trainer.rollouts.pool.processes}",
        f"checkpoint: {writer.state}",
        "last step: "
        + ("none yet" if last is None else ", ".join(f"{k} {v}" for k, v in step_cells(last, []).items())),
    ]
    return "\n".join(lines)
