"""Trackers in the background of a run: each in a thread of its own, behind a bounded queue.

Invariants:
- The run only ever puts into a queue: a tracker can neither stop nor delay it, whatever it raises and however long it
  hangs.
- A tracker that raises is named once, with its exception, and gets nothing more. A full queue drops entries; their
  number is logged at the end.
- `finish` lets what is queued be sent, for at most `finish_timeout` seconds.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.monitor.mlflow_tracker import MlflowTracker
from rlvr.monitor.tensorboard_tracker import TensorBoardTracker
from rlvr.monitor.trackers import Tracker
from rlvr.monitor.wandb_tracker import WandbTracker

logger = logging.getLogger(__name__)

TRACKERS: dict[str, Callable[..., Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
}
"""By their key in the section `logging`."""


class BackgroundTracker:
    """A tracker that is called from a thread of its own. It is a Tracker itself, whose methods return at once.

    `queue_size` counts steps and tables that may wait; `finish_timeout` is in seconds.
    """

    def __init__(
        self, tracker: Tracker, name: str | None = None, queue_size: int = 1000, finish_timeout: float = 20.0
    ) -> None:
        self.tracker = tracker
        self.name = name or type(tracker).__name__
        self.finish_timeout = finish_timeout
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        """Set by `finish`: send what is queued, then end."""
        self._off = threading.Event()
        """Set when the tracker failed or did not finish in time: send nothing more."""
        self._dropped = 0

    def start(self, run: Mapping[str, Any], directory: str | Path) -> None:
        """Start the thread, and the tracker in it."""
        if self._thread is not None:
            return
        # A daemon: a tracker that hangs in a network call must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._work, args=(run, directory), name=f"rlvr-tracker-{self.name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue one step's metrics."""
        # A copy, since the thread reads it later and the caller may change its own.
        kept = dict(metrics)
        self._put(lambda: self.tracker.log(step, kept))

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue a table of sample rollouts."""
        kept = [dict(row) for row in rows]
        if kept:
            self._put(lambda: self.tracker.log_rollouts(step, kept))

    def _put(self, call: Callable[[], object]) -> None:
        if self._thread is None or self._off.is_set():
            return
        try:
            # Never blocks: a full queue means that the tracker is slower than the run, and the run goes first.
            self._queue.put_nowait(call)
        except queue.Full:
            self._dropped += 1

    def finish(self) -> None:
        """Let the tracker finish, for at most `finish_timeout` seconds, and log what was lost. A second call does
        nothing."""
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        self._ending.set()
        # `_ending` is set before the join: the thread ends when the queue is empty, so a join without it never returns.
        thread.join(self.finish_timeout)
        if thread.is_alive():
            self._off.set()
            logger.warning("%s did not finish within %g s and was left behind", self.name, self.finish_timeout)
        if self._dropped:
            logger.warning("%s was too slow: %d steps or tables were not sent to it", self.name, self._dropped)

    def _work(self, run: Mapping[str, Any], directory: str | Path) -> None:
        """The thread: all calls of the tracker are made here."""
        try:
            self.tracker.start(run, directory)
            while not self._off.is_set():
                try:
                    # A timeout and no sentinel in the queue: where the queue is full, `finish` could not put one in
                    # without blocking. 0.1 s is the longest that an idle tracker delays the end of a run.
                    call = self._queue.get(timeout=0.1)
                except queue.Empty:
                    if self._ending.is_set():
                        break
                    continue
                call()
            self.tracker.finish()
        # BaseException, since Python ends a thread silently on SystemExit: without this the queue would fill, and the
        # user would only read at the end that entries were dropped.
        except BaseException as error:
            self._off.set()
            logger.warning("%s failed and is switched off for this run: %s: %s", self.name, type(error).__name__, error)


def background_trackers(section: Any, run: str, given: Sequence[Tracker] = ()) -> list[BackgroundTracker]:
    """The trackers that the section `logging` asks for, and those `given`, in the background; `run` is the run's name.

    ConfigError where the package of one is not installed.
    """
    settings = {key: getattr(section, key) for key in TRACKERS}
    # `wandb: true` is the tracker with its defaults, a mapping is its options.
    options = {
        key: {} if value is True else value.model_dump() for key, value in settings.items() if value is not False
    }
    named = [BackgroundTracker(TRACKERS[key](name=run, **chosen), key) for key, chosen in options.items()]
    return [BackgroundTracker(tracker) for tracker in given] + named
