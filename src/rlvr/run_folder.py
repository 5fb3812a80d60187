"""The run folder: config.yaml, metrics.jsonl, evaluations.jsonl and evaluations/, health.jsonl, rollouts/, checkpoints/ and
log.txt, and what may be resumed.

Invariants: a folder that holds metrics is never written over unasked, and no two processes write to one; on resume only the
number of steps, logging and intervals may differ from the saved configuration; metrics, rollouts and checkpoints past the
checkpoint are cut.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlvr.config import Config
from rlvr.distributed import checkpoint
from rlvr.errors import CheckpointError, ConfigError
from rlvr.evaluation import Tally, write_tallies
from rlvr.monitor.console import Console
from rlvr.monitor.log_screen import ConsoleHandler
from rlvr.monitor.trackers import MetricsFile
from rlvr.run_lock import LOCK, RunLock

log = logging.getLogger(__name__)

FREE_ON_RESUME = (
    "run.steps",
    "run.overwrite",
    "run.dir",
    "run.name",
    "logging",
    "health",
    "checkpoint",
    "evaluation.every",
    "evaluation.at_start",
    "evaluation.at_end",
    "verification.workers",
    "verification.concurrent",
    "distributed",
)
"""Keys of the configuration that may change when a run goes on; none of them changes what is learned."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, config: Config, path: Path | None = None) -> None:
        self.config = config
        self.path = path or config.folder
        self.metrics = MetricsFile(self.path / "metrics.jsonl")
        self.evaluations = MetricsFile(self.path / "evaluations.jsonl")
        self.health = MetricsFile(self.path / "health.jsonl")
        self._lock: RunLock | None = None
        self._log: logging.Handler | None = None
        self._screen: logging.Handler | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    def keep_evaluation(self, row: dict[str, Any], tallies: Sequence[Tally]) -> None:
        """Write what was found of each task, which a full disk costs, and then the results: they say that it was made."""
        try:
            write_tallies(self.path / "evaluations" / f"step-{row['step']:06d}.json", tallies, step=row["step"])
        except OSError as error:
            log.warning("the tasks of the evaluation at step %d could not be written: %s", row["step"], error)
        self.evaluations.append(row)

    def lock(self) -> None:
        """Keep other processes out until `close` or the end of this one. ConfigError names the process that is in."""
        if self._lock is None:
            self._lock = RunLock(self.path)

    def open_log(self, console: Console) -> None:
        """From now on what the library warns of goes to the console, and to log.txt, which is there once something is in it."""
        if self._log is None:
            self._screen = ConsoleHandler(console)
            logging.getLogger("rlvr").addHandler(self._screen)
            self._log = logging.FileHandler(self.path / "log.txt", delay=True, encoding="utf-8")
            self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            self._log.setLevel(logging.WARNING)
            logging.getLogger("rlvr").addHandler(self._log)

    def close(self) -> None:
        """Leave the folder to others."""
        if self._log is not None:
            logging.getLogger("rlvr").removeHandler(self._log)
            self._log.close()
        if self._screen is not None:
            logging.getLogger("rlvr").removeHandler(self._screen)
        if self._lock is not None:
            self._lock.release()
        self._log = self._lock = self._screen = None

    def begin(self, again: bool = False) -> None:
        """Make the folder ready for a fresh run. ConfigError where it already holds metrics, unless it is the same run
        that begins `again` because it holds no whole checkpoint."""
        if self.metrics.path.exists():
            if not (again or self.config.run.overwrite):
                raise ConfigError(
                    f"{self.path} already holds a run: go on with --resume auto, choose another run.name, or replace it with run.overwrite=true"
                )
            for path in self.path.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK:
                    path.unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_partial()
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
        if (path / checkpoint.SEAL).exists() or path.name.startswith("step-"):
            found: Path | None = path
            if (problem := checkpoint.why_unusable(path)) is not None:
                raise CheckpointError(f"--resume: {path} cannot be used: {problem}")
        else:
            found = checkpoint.latest(path / "checkpoints")
        if found is None:
            raise CheckpointError(f"--resume: {path} holds no whole checkpoint")
        elsewhere = found.resolve().parent != self.checkpoints.resolve()
        if elsewhere and self.metrics.path.exists():
            raise CheckpointError(
                f"--resume: {found} is not of the run that {self.path} holds: choose another run.name to go on from it"
            )
        return found

    def check(self, saved: dict[str, Any]) -> None:
        """CheckpointError names each key of the configuration that differs from that of a checkpoint and may not."""
        changes = list(differences(saved, self.config.dump()))
        if changes:
            lines = "\n".join(f"  {line}" for line in changes)
            raise CheckpointError(f"the checkpoint was made with another configuration:\n{lines}")

    def cut(self, step: int, owes_evaluation: bool) -> None:
        """Take away what was logged and saved past `step`, and that step's evaluation where it is to be made again."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.metrics.truncate_after(step)
        self.health.truncate_after(step)
        self.evaluations.truncate_after(step - 1 if owes_evaluation else step)
        for file in (self.path / "evaluations").glob("step-*.json"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()
        for past in checkpoint.checkpoints(self.checkpoints):
            if checkpoint.step_of(past) > step:
                shutil.rmtree(past)
        self._clear_partial()
        self._write_config()

    def _clear_partial(self) -> None:
        """Remove what a process that was killed while saving has left."""
        for path in self.checkpoints.glob(".step-*.partial"):
            shutil.rmtree(path)


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
