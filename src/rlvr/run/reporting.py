"""The reports of a run: console, trackers, health monitors, recorded rollouts, profiles and the lines of the run
folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlvr.config import Config
from rlvr.evaluation import TaskResult
from rlvr.monitor.background_trackers import background_trackers
from rlvr.monitor.batch import sample_rows
from rlvr.monitor.console import Console, Counts
from rlvr.monitor.health import Health
from rlvr.monitor.profile import StepProfiler
from rlvr.monitor.rollout_log import RolloutLog
from rlvr.monitor.trackers import Tracker
from rlvr.records import Batch
from rlvr.rollout import StepRollouts
from rlvr.run.run_folder import RunFolder


class Reporting:
    """Shows and writes the steps and evaluations of a run. Ranks other than the first (`is_main` False) show and write
    nothing.

    `counts` gives how far sampling and verifying are, for the live view; `trackers` are the user's own.
    """

    def __init__(
        self, config: Config, folder: RunFolder, is_main: bool, counts: Counts, trackers: Sequence[Tracker] = ()
    ) -> None:
        how = config.logging
        self.folder = folder
        self.is_main = is_main
        self.console = Console(how.console if is_main else "off", how.samples_every, counts=counts)
        # Else each rank would start a run of its own with every tracker.
        if is_main:
            self.trackers = background_trackers(how, config.run.name, trackers)
        else:
            self.trackers = []
        self.health = Health(config.health, self.console, folder.health if is_main else None)
        # 0 steps between files means none: the other ranks write no rollouts.
        self.rollout_log = RolloutLog(folder.path, how.rollouts if is_main else 0, how.rollouts_bytes)
        self.profiler = StepProfiler(folder.path, how.profile)

    def start(self, config: Config, lines: Iterable[str]) -> None:
        """Start the trackers, and show `lines` about the run."""
        for tracker in self.trackers:
            tracker.start(config.dump(), self.folder.path)
        self.console.start(lines)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Give the terminal back at the end of the block; in a notebook the block's output is of the cell that runs."""
        self.console.finish()
        try:
            yield
        finally:
            self.console.finish()

    def rollouts(self, step: int, batch: Batch, collected: StepRollouts) -> None:
        """Begin to record the rollouts of a step that was counted. TrainingError where the run folder is no longer the
        run's."""
        if self.is_main:
            self.folder.check_held()  # before anything is written
        self.rollout_log.later(step, batch, collected.rollouts, collected.dropped, collected.columns)

    def step(self, row: Mapping[str, Any], batch: Batch) -> None:
        """Write and show a step's record, and send it to the trackers."""
        if self.is_main:
            self.folder.check_held()
            # The file first: no tracker that fails or hangs can cost the line.
            self.folder.metrics.append(row)
        for tracker in self.trackers:
            tracker.log(row["step"], row)
            tracker.log_rollouts(row["step"], sample_rows(batch))
        self.console.step(row, batch)

    def completed_step(self, row: Mapping[str, Any]) -> None:
        """Replace the last step's line by one with the results of its evaluation, made after a resume."""
        if not self.is_main:
            return
        # The line that is there lacks the results of the evaluation.
        self.folder.metrics.truncate_after(row["step"] - 1)
        self.folder.metrics.append(row)
        for tracker in self.trackers:
            tracker.log(row["step"], row)  # whole: a kill may have kept the step from them too

    def evaluation(
        self, row: Mapping[str, Any], results: Mapping[str, Any], task_results: Sequence[TaskResult]
    ) -> None:
        """Show the results of an evaluation and, once the run has its folder, write its `row`."""
        if self.folder.begun and self.is_main:
            self.folder.keep_evaluation(dict(row), task_results)
        self.console.evaluation(row["step"], results)

    def finish(self) -> None:
        """Let the trackers send what they have, and give the terminal back."""
        for tracker in self.trackers:
            tracker.finish()
        self.console.finish()

    def close(self) -> None:
        """End the thread that records rollouts, once what is being written is."""
        self.rollout_log.close()
