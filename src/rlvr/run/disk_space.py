"""The disk space that a run needs for checkpoints and recorded rollouts."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlvr.config import CheckpointConfig, Config
from rlvr.distributed import checkpoint
from rlvr.errors import ConfigError
from rlvr.planner import STATE
from rlvr.policy import Policy
from rlvr.rollout.weights import whole_size
from rlvr.run.dry_run import recorded_bytes, size_text
from rlvr.run.resolved_config import ResolvedConfig


def check_space(folder: Path, resolved: ResolvedConfig, checkpoint_size: int, exempt: int) -> None:
    """ConfigError where there is less space than the checkpoints and rollouts that the run keeps take.

    `checkpoint_size`: bytes of one checkpoint; `exempt`: bytes of recorded rollouts in `folder` that stay beside these.
    """
    count = kept_checkpoints(resolved.config.checkpoint, resolved.steps) + 1  # and the one that is being written
    rollouts = recorded_bytes(resolved.config, resolved.plans)[1]
    needed = count * checkpoint_size + rollouts
    # A run that goes on has part of what it needs already: its old files are replaced by the new ones. `exempt` files
    # stay.
    files = (file for name in ("checkpoints", "rollouts") for file in (folder / name).rglob("*"))
    there = sum(file.stat().st_size for file in files if file.is_file()) - exempt
    free = shutil.disk_usage(folder).free
    if free + there < needed:
        raise ConfigError(
            f"{folder} has {size_text(free)} of free space, and the run takes up to {size_text(needed)}: {count} "
            f"checkpoints of about {size_text(checkpoint_size)} (checkpoint.keep, and one that is being written) and "
            f"{size_text(rollouts)} of rollouts (logging.rollouts_gb). Free some space, lower these, or set run.dir "
            "to a place that has more"
        )


def kept_checkpoints(config: CheckpointConfig, steps: int) -> int:
    """The number of checkpoints that a run of so many steps keeps at most, as far as it can be known before."""
    # The best checkpoint is kept beside the `keep` newest ones, of which it may not be one.
    best = int(config.best is not None)
    if config.every == 0:
        return min(config.keep, 2, max(1, steps)) + best  # how many more there will be, only the clock can tell
    if config.minutes:
        # Checkpoints by the clock fall between the multiples of `every`.
        between = checkpoint.kept_between(config.keep)
    else:
        # The end of a run is saved at a step that need not be a multiple of `every`.
        between = 1
    return min(config.keep, steps // config.every) + between + best


def checkpoint_bytes(config: Config, policy: Policy, keeps_reference: bool) -> int:
    """About how many bytes a checkpoint takes; `keeps_reference`: a stage keeps a copy of the weights to compare
    with."""
    trained = policy.trainable().values()
    weights = sum(whole_size(p) * p.element_size() for p in trained)
    optimizer = config.optim.optimizer.name
    # STATE is in bytes for a weight: 8 for Adam's two float32 moments. An optimizer of the user's is taken for AdamW.
    state = sum(whole_size(p) for p in trained) * STATE.get(optimizer, STATE["adamw"])
    reference = weights if keeps_reference else 0
    model = sum(whole_size(p) * p.element_size() for p in policy.model.parameters())
    if policy.has_adapter:
        # `model/` then holds the adapter alone; `merged/` is the whole model.
        model = weights + (model if config.checkpoint.merged else 0)
    return int(weights + state + reference + model)
