"""Weights & Biases as a tracker: metrics and a table of sample rollouts.

Invariants:
- Without a network or a key it logs offline, with one warning.
- Files go to the run folder's `wandb/`. wandb's own waits are bounded where this version of it can bound them.
- It is called from a thread of its own (`rlvr.monitor.background_trackers`), its import included.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlvr.monitor.console_text import clean
from rlvr.monitor.trackers import require

logger = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]


class WandbTracker:
    """A tracker (see `monitor.trackers.Tracker`) that shows metrics and a table of sample rollouts in wandb.

    `mode` auto is online when WANDB_API_KEY is set and offline otherwise, unless WANDB_MODE says which; `name` defaults
    to the run folder's; `patience`, in seconds, bounds how long wandb tries to get online before it logs offline.
    ConfigError when wandb is not installed.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        project: str = "rlvr",
        entity: str | None = None,
        name: str | None = None,
        patience: float = 20.0,
    ) -> None:
        self.mode: str = mode
        self._keyless = False
        if mode == "auto":
            self._keyless = not (os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"))
            self.mode = os.environ.get("WANDB_MODE") or ("offline" if self._keyless else "online")
        if self.mode != "disabled":
            require("wandb", "wandb")
        self.project = project
        self.entity = entity
        self.name = name
        self.patience = patience
        self._wandb: Any = None
        self._run: Any = None

    def start(self, run: Mapping[str, Any], directory: str | Path) -> None:
        """Open the run."""
        if self.mode == "disabled":
            return
        if self._keyless:
            logger.warning("wandb has no WANDB_API_KEY and logs offline to %s: `wandb sync` sends it later", directory)
        self._wandb = importlib.import_module("wandb")
        directory = Path(directory)
        options = {
            "mode": self.mode,
            "project": self.project,
            "entity": self.entity,
            "name": self.name or directory.resolve().name,
            "config": dict(run),
            "dir": str(directory),
        }
        if self.mode == "online":
            options |= {"id": _run_id(directory), "resume": "allow"}
        self._run = _open(self._wandb, options, self.patience)
        # A resumed run goes back some steps, which wandb's own step counter may not.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step's metrics; None values are left out."""
        if self._run is not None:
            self._run.log({**{name: value for name, value in metrics.items() if value is not None}, "step": step})

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of sample rollouts; its columns are the first row's keys."""
        if self._run is not None:
            self._run.log({"rollouts": _table(self._wandb, rows), "step": step})

    def finish(self) -> None:
        """Send what is left."""
        if self._run is not None:
            self._run.finish()


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


def _table(wandb: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    columns = list(rows[0])
    data = [[clean(row[c]) if isinstance(row.get(c), str) else row.get(c) for c in columns] for row in rows]
    return wandb.Table(columns=columns, data=data, allow_mixed_types=True)
