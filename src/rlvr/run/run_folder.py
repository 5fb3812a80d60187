"""The run folder: config.yaml, environment.json, data.json, tasks.jsonl and eval_tasks.jsonl of a run that was given
tasks as objects, metrics.jsonl, evaluations.jsonl and evaluations/, health.jsonl, rollouts/, checkpoints/ and log.txt,
and what may be resumed.

Invariants: nothing is removed that a run did not write: a folder without the configuration of a run is not touched, a
run that gives way is moved aside, and so is what a resume from an older checkpoint cuts; no two processes write to one
folder; on resume only the number of steps, logging and intervals may differ from the saved configuration.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from rlvr.config import Config
from rlvr.config.config_loading import TASK_FILES
from rlvr.core.own_files import free_path, is_run_config, is_verbatim, numbered, set_aside
from rlvr.core.tree import read_mapping
from rlvr.distributed import checkpoint
from rlvr.errors import CheckpointError, ConfigError, chosen_place
from rlvr.evaluation import TaskResult, write_task_results
from rlvr.monitor.console import Console
from rlvr.monitor.log_screen import ConsoleHandler
from rlvr.monitor.trackers import MetricsFile
from rlvr.monitor.whole_file import write_whole
from rlvr.run.given_objects import DATA_FILE, GivenObjects, texts_of
from rlvr.run.run_environment import run_environment
from rlvr.run.run_lock import LOCK, RunLock, holder_of

log = logging.getLogger(__name__)

FREE_ON_RESUME = (
    "run.steps",
    "run.epochs",
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


WRITTEN = (
    "config.yaml",
    "environment.json",
    DATA_FILE,
    "metrics.jsonl",
    "evaluations.jsonl",
    "health.jsonl",
    "log.txt",
    "report.html",
    "base",
)
"""Files and folders that every run writes into its folder; one that was given tasks as objects also writes
`GivenObjects.files`."""
NUMBERED = {
    # Full matches, as of `step-000100.json`; `step-best.json` or `step-3.json.bak` is the user's and refuses nothing.
    "evaluations": r"step-\d+\.json",
    "rollouts": r"step-\d+\.jsonl",
    "checkpoints": r"step-\d+",
    "profile": r"step-\d+\.(json|txt)",
}
"""Patterns of the files that a run writes into the folders of its run folder."""


class _LogFile(logging.FileHandler):
    """A log file. On a full disk its lines are lost; standard error gets one line about it and no tracebacks."""

    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. The file is opened at the first one, which raises where its folder is gone or the disk is
        full."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            with contextlib.suppress(OSError):
                print(f"{self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)


def _resumed(resume: str) -> Path:
    """The folder of the run or checkpoint that --resume names. CheckpointError where there is none."""
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"--resume: there is no run or checkpoint {path}")
    return path


class RunFolder:
    """The folder of one run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path = config.folder
        self.given = GivenObjects(config)
        """The objects that the run was given, which its config.yaml names."""
        self.metrics = MetricsFile(self.path / "metrics.jsonl")
        self.evaluations = MetricsFile(self.path / "evaluations.jsonl")
        self.health = MetricsFile(self.path / "health.jsonl")
        self.begun = False
        """A run was begun in the folder, fresh or from a checkpoint; set on every rank."""
        # Taken by `lock` on rank 0 alone: the other ranks write no file but their tensors, which `Writer` places.
        self._lock: RunLock | None = None
        self._log: logging.Handler | None = None
        self._screen: logging.Handler | None = None

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.path / "checkpoints"

    def keep_evaluation(self, row: dict[str, Any], task_results: Sequence[TaskResult]) -> None:
        """Write the results of each task, which are lost on a full disk, and then the `row` of the evaluation, which
        marks it as made."""
        self.check_held()
        try:
            # The tasks first, then the row: a kill in between leaves an evaluation that counts as not made, and it is
            # made again.
            write_task_results(
                self.path / "evaluations" / f"step-{row['step']:06d}.json", task_results, step=row["step"]
            )
        except OSError as error:
            log.warning("the tasks of the evaluation at step %d could not be written: %s", row["step"], error)
        self.evaluations.append(row)

    def check_place(self) -> None:
        """ConfigError where the folder cannot be made or written to, before a model is loaded for it."""
        with self.chosen():
            above = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
            problem = None
            if not above.is_dir():
                problem = errno.ENOTDIR
            elif not os.access(above, os.W_OK | os.X_OK):
                problem = errno.EACCES
            if problem is not None:
                raise OSError(problem, os.strerror(problem), str(above))

    def chosen(self) -> AbstractContextManager[None]:
        """ConfigError where what is done within fails because the folder cannot be made or written to."""
        return chosen_place(f"the run folder {self.path}", "another run.dir or run.name")

    def lock(self) -> None:
        """Keep other processes out until `close` or the end of this one. ConfigError names the process that is in."""
        if self._lock is None:
            self._lock = RunLock(self.path)

    def check_held(self) -> None:
        """TrainingError where the folder, once locked, is no longer there or this run's."""
        if self._lock is not None:
            self._lock.check()

    def open_log(self, console: Console) -> None:
        """From now on what the library warns of goes to the console, and to log.txt, which is there once something is
        in it."""
        if self._log is None:
            self._screen = ConsoleHandler(console)
            logging.getLogger("rlvr").addHandler(self._screen)
            # `delay`: the file is made at its first line, so that a run without warnings leaves none.
            self._log = _LogFile(self.path / "log.txt", delay=True, encoding="utf-8")
            self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            self._log.setLevel(logging.WARNING)
            logging.getLogger("rlvr").addHandler(self._log)

    def close(self) -> None:
        """Leave the folder to others."""
        if self._log is not None:
            logging.getLogger("rlvr").removeHandler(self._log)
            with contextlib.suppress(OSError):  # a full disk
                self._log.close()
        if self._screen is not None:
            logging.getLogger("rlvr").removeHandler(self._screen)
        if self._lock is not None:
            # Last: until then no other run may write to the files that are being closed.
            self._lock.release()
        self._log = self._lock = self._screen = None

    def begin(self, resume: bool = False) -> Path | None:
        """Make the folder ready for a fresh run; where the run that it held is now, None where it held none.

        ConfigError where it holds a run that is not to be moved; with `resume`, of a run without a checkpoint.
        """
        moved = self._move_aside() if self._holds_movable_run(resume) else None
        self.path.mkdir(parents=True, exist_ok=True)
        # All lines go: those of a run that was killed before its first step was done, whose evaluation at the start has
        # step 0.
        for file in (self.metrics, self.evaluations, self.health):
            file.truncate_after(-1)
        self._clear_partial()
        self._write_config()
        return moved

    def check_start(self, resume: str | None) -> None:
        """ConfigError or CheckpointError where a run that goes on from `resume`, or is fresh without it, would be
        refused for what lies here. Reads no checkpoint, so that it is known before a model is loaded."""
        self.refuse_foreign()
        if resume not in (None, "auto"):
            _resumed(resume)
        elif resume is None or not any(checkpoint.checkpoints(self.checkpoints)):
            self._holds_movable_run(resume is not None)

    def _holds_movable_run(self, resume: bool) -> bool:
        """Return True if a run is here that may be moved aside. ConfigError where it may not."""
        holds = self._holds_run()
        if holds and not self.config.run.overwrite:
            raise ConfigError(self._refusal(resume))
        return holds

    def _holds_run(self) -> bool:
        """Return True if a step was done here."""
        # metrics.jsonl may be cut or lost; rollouts and checkpoints show a run, too.
        files = (numbered(self.path / "rollouts", ".jsonl"), numbered(self.checkpoints))
        return self.metrics.lines() > 0 or any(files)

    def _refusal(self, resume: bool) -> str:
        if not resume:
            return (
                f"{self.path} already holds a run: go on with --resume auto (from Python, resume='auto'), choose "
                "another run.name, or start over with run.overwrite=true, which moves it aside"
            )
        steps = max([self.metrics.lines(), *numbered(self.path / "rollouts", ".jsonl")])
        held = "1 step" if steps == 1 else f"{steps} steps"
        return (
            f"--resume auto: {self.path} holds {held} and no checkpoint to go on from: they would be lost. "
            "run.overwrite=true starts over and moves them aside"
        )

    def _move_aside(self) -> Path:
        """Rename the folder that holds a run, its files and all others, and take its place; where it is now."""
        place = self.path.resolve()  # of a link, what it leads to: the new run is to be on the same disk
        # A run name may be `a/b`, so that runs lie inside this folder. A rename would take them along under their feet.
        for lock in place.rglob(f"*/{LOCK}"):
            if (holder := holder_of(lock)) is not None:
                raise ConfigError(f"{place} cannot be moved aside: {lock.parent} is in use by {holder}")
        if (needed := self._needed_inside(place)) is not None:
            raise ConfigError(
                f"run.overwrite: {needed} is in the run folder that would be moved aside, and the new run needs it: "
                "copy it to another place, or choose another run.name"
            )
        # The lock is on the inode of the old folder and moves with it. The new folder gets one of its own.
        held = self._lock is not None
        moved = set_aside(place)
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        place.mkdir(parents=True)
        if held:
            self.lock()
        return moved

    def _needed_inside(self, place: Path) -> str | None:
        """A path in the configuration that leads into the run folder; None where there is none."""
        tree = self.config.dump()
        read = [tree[section] for section in tree.keys() - {"run", "logging"}]
        # A config.yaml of this run, given as the configuration, names these.
        own = [place / file for file in TASK_FILES.values()]  # in memory by now, and written anew
        for text in texts_of(read):
            for name in (text, text.rpartition(":")[0]):  # FILE.py:Name, FOLDER:split
                path = os.path.expanduser(name)
                if not name or not os.path.lexists(path):
                    continue
                if Path(path).resolve() in own:
                    continue
                # Both, as a link outside may lead into the folder, and a link in the folder to the outside moves with
                # it.
                lexical = Path(os.path.abspath(path)).is_relative_to(os.path.abspath(self.path))
                if lexical or Path(path).resolve().is_relative_to(place):
                    return name
        return None

    def refuse_foreign(self) -> None:
        """ConfigError where the folder has a file that a run would write, and no configuration of a run beside it."""
        config = self.path / "config.yaml"
        if is_run_config(config):
            return
        numbered_files = (
            path
            for folder, pattern in NUMBERED.items()
            for path in (self.path / folder).glob("step-*")
            if re.fullmatch(pattern, path.name)
        )
        files = (self.path / name for name in (*WRITTEN, *self.given.files))
        for path in (*files, *numbered_files):
            # `lexists`, so that a link that leads nowhere counts: to write through it would make a file elsewhere.
            if os.path.lexists(path):
                if config.is_file():
                    self._refuse_broken(config)
                raise ConfigError(
                    f"{self.path} holds {path.relative_to(self.path)}, and no config.yaml as a run of rlvr writes it: "
                    "nothing there is touched, choose another run.name"
                )

    def _refuse_broken(self, config: Path) -> None:
        """ConfigError where the folder's `config` is empty or broken."""
        try:
            read_mapping(config)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. Nothing in {self.path} is touched until then; or choose another run.name, and go on there "
                f"from the newest checkpoint with --resume {self.path}"
            ) from error

    def _write_config(self) -> None:
        path = self.path / "config.yaml"
        # The run writes the resolved tree. Comments and layout of a person would be lost.
        if path.exists() and not is_verbatim(path):
            log.warning("%s was edited by hand; it is kept as %s", path, set_aside(path))
        self.given.write_tasks()
        write_whole(path, yaml.safe_dump(self.given.tree, sort_keys=False, allow_unicode=True))

    def write_environment(self) -> None:
        """Write environment.json, of the process that trains last: a run may go on elsewhere."""
        write_whole(self.path / "environment.json", json.dumps(run_environment(), indent=1) + "\n")

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `resume` (auto, a run or a checkpoint) means; None where `auto` finds nothing."""
        if resume == "auto":
            try:
                # It passes over torn checkpoints with a warning, and refuses where there are only such.
                return checkpoint.latest(self.checkpoints)
            except CheckpointError as error:
                raise CheckpointError(
                    f"--resume auto: {error}. Without --resume, run.overwrite=true moves the run aside and starts over"
                ) from error
        path = _resumed(resume)
        # A torn checkpoint has no manifest but the name, and is to be refused as a checkpoint, not as a run without
        # one.
        if (path / checkpoint.MANIFEST).exists() or path.name.startswith("step-"):
            chosen: Path | None = path
            if (problem := checkpoint.why_unusable(path)) is not None:
                raise CheckpointError(f"--resume: {path} cannot be used: {problem}")
        else:
            chosen = checkpoint.latest(path / "checkpoints")
        if chosen is None:
            raise CheckpointError(f"--resume: {path} holds no whole checkpoint")
        # A copy of another run's state into a folder with steps of its own would mix two runs in one log.
        elsewhere = chosen.resolve().parent != self.checkpoints.resolve()
        if elsewhere and self._holds_run():
            raise CheckpointError(
                f"--resume: {chosen} is not of the run that {self.path} holds: choose another run.name to go on from it"
            )
        return chosen

    def saved_engine(self, resume: str) -> Any:
        """The engine of the newest checkpoint that `resume` may mean, by its configuration alone; None where none can
        be read."""
        path = Path(resume)
        if resume == "auto":
            candidates = checkpoint.checkpoints(self.checkpoints)
        elif (path / checkpoint.MANIFEST).exists():
            candidates = [path]
        else:
            candidates = checkpoint.checkpoints(path / "checkpoints")
        # Without comparing checksums, which reads the whole file: `find` does so later, and may then take an older one.
        for one in reversed(candidates):
            if checkpoint.is_sealed(one):
                with contextlib.suppress(CheckpointError):  # `find` says what is wrong with it
                    return checkpoint.read(one).state["config"]["rollout"]["engine"]
        return None

    def check(self, saved: dict[str, Any], recorded: dict[str, Any], free: Collection[str] = ()) -> None:
        """CheckpointError names each key of the configuration that differs from that of a checkpoint and may not; those
        in `free` may, beside those that always may.

        `saved` is the checkpoint's without, `recorded` with what was given as objects: a run that was begun in Python
        goes on in Python with its objects, and by the command with the configuration that names them.
        """
        changes = list(differences(saved, self.config.dump(), free))
        # Both have to differ: the run may have been begun with objects and go on with files, or the other way round.
        if changes and list(differences(recorded, self.given.tree, free)):
            lines = "\n".join(f"  {line}" for line in changes)
            raise CheckpointError(f"the checkpoint was made with another configuration:\n{lines}")

    def cut(self, step: int, owes_evaluation: bool, keep: bool) -> Path | None:
        """Take away what was logged and saved past `step`, and that step's evaluation where it is to be made again.

        With `keep`, or where there are later checkpoints, it goes to a folder `cut-TIME`, which is returned. Else it is
        what a kill left past the newest checkpoint: it is removed, and done again.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        later = [
            *(path for number, path in numbered(self.checkpoints).items() if number > step),
            *(path for number, path in numbered(self.path / "rollouts", ".jsonl").items() if number > step),
            *(path for number, path in numbered(self.path / "evaluations", ".json").items() if number > step),
        ]
        logs = {self.metrics: step, self.health: step, self.evaluations: step - 1 if owes_evaluation else step}
        # Only checkpoints are folders. One that is newer and was not chosen cost training time, so it is not removed.
        keep = keep or any(path.is_dir() for path in later)
        rows = {file: [row for row in file.rows() if row["step"] > last] for file, last in logs.items()}
        aside = free_path(self.path, "cut-")
        for path in later:  # checkpoints first: a kill in between leaves a run that goes on from the one before
            if keep:
                place = aside / path.relative_to(self.path)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.rename(path, place)
            else:
                path.unlink()
        for file, last in logs.items():
            if keep and rows[file]:
                aside.mkdir(exist_ok=True)
                for row in rows[file]:
                    MetricsFile(aside / file.path.name).append(row)
            # It writes a new file and renames it over the old one, so that a kill leaves one of the two.
            file.truncate_after(last)
        self._clear_partial()
        self._write_config()
        return aside if aside.exists() else None

    def _clear_partial(self) -> None:
        """Remove what a process that was killed while saving has left."""
        for path in self.checkpoints.glob(".step-*.partial"):
            checkpoint.remove_partial(path)
        for path in (self.path / "rollouts").glob(".step-*.jsonl.partial"):
            if re.fullmatch(r"\.step-\d+\.jsonl\.partial", path.name) and path.is_file() and not path.is_symlink():
                path.unlink()


def differences(saved: Any, now: Any, free: Collection[str] = (), path: str = "") -> Iterator[str]:
    """Each key that differs and may not, as `key: saved -> now`; those in `free` may, too."""
    # The key itself or a section of it: `logging` frees `logging.console`, and not a key `logging_level`.
    if path and any(path == key or path.startswith(f"{key}.") for key in (*FREE_ON_RESUME, *free)):
        return
    # A section that the checkpoint's version had not, and that says nothing.
    if saved is None and now == {}:
        return
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*saved, *now]):
            yield from differences(saved.get(key), now.get(key), free, f"{path}.{key}" if path else key)
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (before, after) in enumerate(zip(saved, now, strict=True)):
            yield from differences(before, after, free, f"{path}.{number}")
    elif saved not in (now, {"name": now}):  # older versions saved a component without options as a mapping too
        yield f"{path}: {saved!r} -> {now!r}"
