"""The present activity of a run, in a few lines: the answer to SIGUSR1."""

from __future__ import annotations

import os

from rlvr.core.waits import Wait
from rlvr.distributed import World
from rlvr.distributed.step_meters import StepMeters
from rlvr.monitor.console_text import step_cells
from rlvr.run.checkpointing import Checkpointer
from rlvr.run.resolved_config import ResolvedConfig
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.run_folder import RunFolder
from rlvr.run.train_state import TrainState


def status(
    folder: RunFolder,
    world: World,
    resolved: ResolvedConfig,
    state: TrainState,
    meters: StepMeters,
    rollouts: RolloutRuntime,
    checkpointer: Checkpointer,
) -> str:
    """Step, phase, waits with their open groups, verifier processes, checkpoint and the last metrics. Takes no lock."""
    stage = resolved.plans[state.stage_number]
    last = "none yet"
    if state.metrics:
        last = ", ".join(f"{name} {value}" for name, value in step_cells(state.metrics[-1], []).items())
    lines = [
        f"run {folder.path}, process {os.getpid()}, rank {world.rank} of {world.size}",
        f"step: {state.step} done of {resolved.steps}; stage {stage.name}: {state.stage_step} of {stage.allowed}; "
        f"weights of version {state.version}",
        f"phase: {meters.phases.current or 'between phases (evaluation, logging, saving)'}",
        # A copy: other threads begin and end waits while this one reads. No lock is taken, since the thread that holds
        # it may be the one that hangs.
        *[f"waits for: {wait}" for wait in list(Wait.under_way.values())],
        f"verifier processes: {rollouts.pool.processes}",
        f"checkpoint: {checkpointer.writer.state}",
        f"last step: {last}",
    ]
    return "\n".join(lines)
