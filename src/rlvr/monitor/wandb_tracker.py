"""Weights & Biases as a tracker: metrics and a table of sample rollouts.

Invariants:
- Without a network or a key the tracker logs offline, after one warning.
- Files go to `wandb/` in the run folder. Start and finish have timeouts, as far as the installed wandb supports them.
- `rlvr.monitor.background_trackers` calls the tracker in a separate thread, which also imports wandb.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rlvr.monitor.trackers import require, table_of

logger = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]


def has_key() -> bool:
    """Return True if wandb would find an API key: WANDB_API_KEY, or the entry that `wandb login` writes to ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    # As wandb finds it (wandb/sdk/lib/wbauth/wbnetrc.py): NETRC names another file, WANDB_BASE_URL another server.
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbTracker:
    """A tracker (see `monitor.trackers.Tracker`) that logs metrics and a table of sample rollouts to wandb.

    With `mode` auto, WANDB_MODE sets the mode; if it is unset, the run is online if there is a key (WANDB_API_KEY, or
    what `wandb login` wrote), else offline.
    `name` defaults to the name of the run folder. `patience` is the timeout in seconds for going online, after which
    the run is logged offline, and for sending the rest at the end. ConfigError if wandb is not installed, unless the
    mode is disabled.
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
            # Without a key, an online `wandb.init` asks for one on the terminal, or fails if there is none.
            self._keyless = not (os.environ.get("WANDB_MODE") or has_key())
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
            logger.warning(
                "wandb has no key (WANDB_API_KEY, or `wandb login`) and logs offline to %s: `wandb sync` sends that",
                directory,
            )
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
        # wandb cannot resume an offline run: each start makes a new one, which `wandb sync` uploads.
        if self.mode == "online":
            options |= {"id": _run_id(directory), "resume": "allow"}
        self._run = _open(self._wandb, options, self.patience)
        # wandb's own step counter only grows, but a run that resumes from a checkpoint repeats some steps: the metric
        # `step` is the x-axis instead.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of one step, without those that are None."""
        if self._run is not None:
            self._run.log({**{name: value for name, value in metrics.items() if value is not None}, "step": step})

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table of sample rollouts, whose columns are the keys of the first row."""
        if self._run is not None:
            columns, data = table_of(rows)
            table = self._wandb.Table(columns=columns, data=data, allow_mixed_types=True)
            self._run.log({"rollouts": table, "step": step})

    def finish(self) -> None:
        """Finish the wandb run, which sends what is not sent yet."""
        if self._run is not None:
            self._run.finish()


def _run_id(directory: Path) -> str:
    """The wandb id of the run folder, made at its first start: a resumed run continues the same wandb run."""
    path = directory / "wandb" / "run-id.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Eight characters, like the ids that wandb makes.
        path.write_text(secrets.token_hex(4))
    return path.read_text()


def _open(wandb: Any, options: dict[str, Any], timeout: float) -> Any:
    """Open the wandb run. If an online run fails to open, warn and open an offline one, which `wandb sync` can upload
    later."""
    settings = _settings(wandb, timeout)
    try:
        return _init(wandb, settings, options)
    # Errors of wandb, of its service process and of the network have no common base class.
    except Exception as error:
        if options["mode"] != "online":
            raise
        logger.warning("wandb cannot go online and logs to the run folder: %s: %s", type(error).__name__, error)
        # With another id: wandb's service process still holds the run that failed.
        offline = {**options, "mode": "offline", "id": secrets.token_hex(4), "resume": None}
        return _init(wandb, settings, offline)


def _init(wandb: Any, settings: Any, options: dict[str, Any]) -> Any:
    """`wandb.init`, with another service process where the one of an earlier run of this process has been killed."""
    # Before `init`: if wandb is not silent by then, `init` asks for an API key on the terminal.
    wandb.setup(settings)
    try:
        return wandb.init(settings=settings, **options)
    except Exception as error:
        # Of wandb.sdk.mailbox: the connection to the service is closed, so no run of this process uses it any more.
        if type(error).__name__ != "MailboxClosedError":
            raise
        with contextlib.suppress(ConnectionError):  # `teardown` says goodbye to the dead service
            wandb.teardown()
        wandb.setup(settings)
        return wandb.init(settings=settings, **options)


def _settings(wandb: Any, timeout: float) -> Any:
    """Settings for wandb: no capture of the console, no messages, and timeouts where this version supports them."""
    wanted = {"console": "off", "silent": True, "init_timeout": timeout, "finish_timeout": timeout}
    # `finish_timeout` does not exist in older versions, and pydantic refuses unknown settings.
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})
