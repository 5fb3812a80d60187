"""Weights & Biases as a tracker that can neither stop nor delay a run.

Invariants:
- All of wandb, its import included, runs in one daemon thread behind a bounded queue; the run only ever puts.
- Without a network or a key it logs offline. Any other exception from wandb is logged once and switches the tracker
  off; a full queue drops, and says so at the end.
- `finish` waits at most `finish_timeout` seconds, whatever wandb does. Files go to the run folder's `wandb/`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import queue
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlvr.errors import ConfigError
from rlvr.monitor.text import clean

logger = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]


class WandbTracker:
    """A tracker (see `monitor.trackers.Tracker`) that shows metrics and a table of sample rollouts in wandb.

    `mode` auto is online when WANDB_API_KEY is set and offline otherwise, unless WANDB_MODE says which; `name` defaults
    to the run folder's. `queue_size` counts steps and tables that may wait; `finish_timeout`, in seconds, also bounds how
    long wandb tries to get online before it logs offline.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        project: str = "rlvr",
        entity: str | None = None,
        name: str | None = None,
        queue_size: int = 1000,
        finish_timeout: float = 20.0,
    ) -> None:
        self.mode, self.project, self.entity, self.name = mode, project, entity, name
        self.finish_timeout = finish_timeout
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        """Set by `finish`: send what is queued, then end."""
        self._off = threading.Event()
        """Set when wandb failed or was given up: send nothing more."""
        self._dropped = 0

    def start(self, run: Mapping[str, Any], directory: str | Path) -> None:
        """Start wandb in its thread, at once; ConfigError when it is not installed."""
        mode = self._resolve()
        if mode == "disabled":
            return
        if "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
            raise ConfigError('logging to wandb needs the package: pip install "rlvr[wandb]"')
        directory = Path(directory)
        options = {
            "mode": mode,
            "project": self.project,
            "entity": self.entity,
            "name": self.name or directory.resolve().name,
            "config": dict(run),
            "dir": str(directory),
        }
        if mode == "online":
            options |= {"id": _run_id(directory), "resume": "allow"}
        self._thread = threading.Thread(target=self._work, args=(options,), name="rlvr-wandb", daemon=True)
        self._thread.start()

    def _resolve(self) -> str:
        if self.mode != "auto":
            return self.mode
        return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue one step's metrics; None values are left out."""
        self._put({**{name: value for name, value in metrics.items() if value is not None}, "step": step})

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue a table of sample rollouts; its columns are the first row's keys."""
        if rows:
            self._put({"rollouts": [dict(row) for row in rows], "step": step})

    def _put(self, item: dict[str, Any]) -> None:
        if self._thread is None or self._off.is_set():
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._dropped += 1

    def finish(self) -> None:
        """Let wandb finish, for at most `finish_timeout` seconds, and say what was lost. Twice is the same as once."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ending.set()
        thread.join(self.finish_timeout)
        if thread.is_alive():
            self._off.set()
            logger.warning("wandb did not finish within %g s and was left behind", self.finish_timeout)
        if self._dropped:
            logger.warning("wandb was too slow: %d steps or tables were not sent to it", self._dropped)

    def _work(self, options: dict[str, Any]) -> None:
        """The thread: everything that touches wandb. What escapes it must not reach the run, hence the broad catch."""
        try:
            wandb = importlib.import_module("wandb")
            run = _open(wandb, options, self.finish_timeout)
            # A resumed run goes back some steps, which wandb's own step counter may not.
            run.define_metric("*", step_metric="step")
            for item in self._items():
                if "rollouts" in item:
                    item["rollouts"] = _table(wandb, item["rollouts"])
                run.log(item)
            run.finish()
        except BaseException as error:
            self._off.set()
            logger.warning("wandb failed and is switched off for this run: %s: %s", type(error).__name__, error)

    def _items(self) -> Iterator[dict[str, Any]]:
        """What is queued, until the queue is empty and the run has ended, or the tracker is off."""
        while not self._off.is_set():
            try:
                yield self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._ending.is_set():
                    return


def wandb_trackers(asked: Any, name: str) -> list[WandbTracker]:
    """The tracker that `logging.wandb` asks for: true, or the options of the section; none where it is false."""
    if asked is False:
        return []
    return [WandbTracker(name=name, **({} if asked is True else asked.model_dump()))]


def _run_id(directory: Path) -> str:
    """One id for the life of the run folder, so that a resumed run goes on in the same curves."""
    path = directory / "wandb" / "run-id.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text()


def _open(wandb: Any, options: dict[str, Any], timeout: float) -> Any:
    """The wandb run; offline when an online one cannot be had, so that `wandb sync` can send it later."""
    settings = _settings(wandb, timeout)
    # Before `init`, which would ask the terminal for an API key if wandb were not silent by then.
    wandb.setup(settings)
    try:
        return wandb.init(settings=settings, **options)
    except Exception as error:
        if options["mode"] != "online":
            raise
        logger.warning("wandb cannot go online and logs to the run folder: %s: %s", type(error).__name__, error)
        # Under another id: wandb's service still holds the one that failed.
        return wandb.init(
            settings=settings, **{**options, "mode": "offline", "id": secrets.token_hex(4), "resume": None}
        )


def _settings(wandb: Any, timeout: float) -> Any:
    """No capture of the console, no chatter, and bounds on the waits that this version of wandb can bound."""
    wanted = {"console": "off", "silent": True, "init_timeout": timeout, "finish_timeout": timeout}
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _table(wandb: Any, rows: list[dict[str, Any]]) -> Any:
    columns = list(rows[0])
    data = [[clean(row[c]) if isinstance(row.get(c), str) else row.get(c) for c in columns] for row in rows]
    return wandb.Table(columns=columns, data=data, allow_mixed_types=True)
