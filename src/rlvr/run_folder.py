"""The run folder: config.yaml, metrics.jsonl, evaluations.jsonl, rollouts/ and checkpoints/, and what may be resumed.

Invariants: a folder that holds metrics is never written over unasked; on resume only the number of steps, logging and
intervals may differ from the saved configuration; metrics, rollouts and checkpoints past the checkpoint are cut.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlvr.config import Config
from rlvr.distributed import checkpoint
from rlvr.errors import CheckpointError, ConfigError
from rlvr.monitor.trackers import MetricsFile

FREE_ON_RESUME = (
    "run.steps",
    "run.overwrite",
    "run.dir",
    "run.name",
    "logging",
    "checkpoint",
    "evaluation.every",
    "evaluation.at_start",
    "evaluation.at_end",
    "verification.workers",
    "verification.concurrent",
)
"""Keys of the configuration that may change when a run goes on; none of them changes what is learned."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, config: Config, path: Path | None = None) -> None:
        self.config = config
        self.path = path or config.folder
        self.metrics = MetricsFile(self.path / "metrics.jsonl")
        self.evaluations = MetricsFile(self.path / "evaluations.jsonl")

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    def begin(self, again: bool = False) -> None:
        """Make the folder ready for a fresh run. ConfigError where it already holds metrics, unless it is the same run
        that begins `again` because it holds no whole checkpoint."""
        if self.metrics.path.exists():
            if not (again or self.config.run.overwrite):
                raise ConfigError(
                    f"{self.path} already holds a run: go on with --resume auto, choose another run.name, or replace it with run.overwrite=true"
                )
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_config()

    def _write_config(self) -> None:
        (self.path / "config.yaml").write_text(yaml.safe_dump(self.config.dump(), sort_keys=False, allow_unicode=True))

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `resume` (auto, a run or a checkpoint) means; None where `auto` finds nothing."""
        if resume == "auto":
            return checkpoint.latest(self.checkpoints)
        path = Path(resume)
        if not path.is_dir():
            raise CheckpointError(f"--resume: there is no run or checkpoint {path}")
        found = (
            path
            if (path / checkpoint.SEAL).exists() or path.name.startswith("step-")
            else checkpoint.latest(path / "checkpoints")
        )
        if found is None:
            raise CheckpointError(f"--resume: {path} holds no whole checkpoint")
        elsewhere = found.resolve().parent != self.checkpoints.resolve()
        if elsewhere and self.metrics.path.exists():
            raise CheckpointError(
                f"--resume: {found} is not of the run that {self.path} holds: choose another run.name to go on from it"
            )
        return found

    def go_on(self, saved: dict[str, Any], step: int) -> None:
        """Continue from a checkpoint of `step`: refuse a changed configuration, cut what was logged past it."""
        changes = list(differences(saved, self.config.dump()))
        if changes:
            lines = "\n".join(f"  {line}" for line in changes)
            raise CheckpointError(f"the checkpoint was made with another configuration:\n{lines}")
        self.path.mkdir(parents=True, exist_ok=True)
        self.metrics.truncate_after(step)
        self.evaluations.truncate_after(step)
        for past in checkpoint.checkpoints(self.checkpoints):
            if int(past.name.removeprefix("step-")) > step:
                shutil.rmtree(past)
        self._write_config()


def differences(saved: Any, now: Any, path: str = "") -> Iterator[str]:
    """Each key that differs and may not, as `key: saved -> now`."""
    if path and any(path == free or path.startswith(f"{free}.") for free in FREE_ON_RESUME):
        return
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*saved, *now]):
            yield from differences(saved.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (before, after) in enumerate(zip(saved, now, strict=True)):
            yield from differences(before, after, f"{path}.{number}")
    elif saved != now:
        yield f"{path}: {saved!r} -> {now!r}"
