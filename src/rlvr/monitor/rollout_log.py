"""Rollouts on disk: what was sampled, judged and rewarded, as JSON lines that can be read back and trained on.

Invariants:
- `rollouts/step-000012.jsonl` holds one rollout per line, with its columns under `columns` (null where undecided) and, under
  `tokens`, what was computed of each sampled token: `log_ratio` (log-prob at the update minus the behaviour log-prob) and
  `advantage` where it differs between tokens. These are for looking at: rounded, in the order of the sampled tokens.
- A file is written aside and renamed: it is whole or it is not there.
- A disk that takes no more costs the file, not the run.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.errors import DataError
from rlvr.records import UPDATED, Batch, Rollout

log = logging.getLogger(__name__)


class RolloutLog:
    """Writes a batch every `every` steps (0: never) to `directory`/rollouts, `directory` being the run folder."""

    def __init__(self, directory: str | Path, every: int = 1) -> None:
        self.directory = Path(directory) / "rollouts"
        self.every = every

    def due(self, step: int) -> bool:
        """Whether `step` is one that is written."""
        return self.every > 0 and step % self.every == 0

    def write(self, step: int, batch: Batch) -> Path | None:
        """Write the batch if `step` is due; the file's path, or None."""
        if not self.due(step):
            return None
        try:
            return self._write(step, batch)
        except OSError as error:
            log.warning("the rollouts of step %d could not be written: %s", step, error)
            return None

    def _write(self, step: int, batch: Batch) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step-{step:06d}.jsonl"
        aside = path.with_suffix(".tmp")
        with aside.open("w", encoding="utf-8") as file:
            for i, rollout in enumerate(batch.rollouts):
                columns = {name: _number(values[i]) for name, values in batch.columns.items()}
                row = {**rollout.to_json(), "columns": columns, "tokens": _of_tokens(batch, i)}
                file.write(json.dumps(row, default=_plain) + "\n")
        os.replace(aside, path)
        return path

    def truncate_after(self, step: int) -> None:
        """Remove the files of steps past `step`, which a resumed run writes anew."""
        for path in self.directory.glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()


def _of_tokens(batch: Batch, i: int) -> dict[str, list[float | None]]:
    """What the batch holds of the tokens that the policy sampled in its rollout `i`."""
    rollout, found = batch.rollouts[i], {}
    if UPDATED in batch.token_columns:
        found["log_ratio"] = batch.token_columns[UPDATED][i] - rollout.behaviour_logprobs
    if "advantage" in batch.token_columns:
        found["advantage"] = batch.token_columns["advantage"][i]
    rounded = {name: np.round(values[rollout.sampled].astype(np.float64), 4) + 0.0 for name, values in found.items()}
    return {name: [_number(v) for v in values] for name, values in rounded.items() if np.isfinite(values).any()}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """What JSON lacks, which an answer or info may hold: an array is written as a list, the rest as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_rollouts(path: str | Path) -> tuple[list[Rollout], dict[str, np.ndarray]]:
    """The rollouts of a file and their columns, float64 [B] with NaN for undecided.

    DataError, with file and line, for a line that is no rollout.
    """
    rollouts: list[Rollout] = []
    rows: list[dict[str, float | None]] = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                rows.append(row.pop("columns", {}))
                row.pop("tokens", None)
                rollouts.append(Rollout.from_json(row))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(f"{path}, line {number}: not a rollout: {type(error).__name__}: {error}") from error
    names = dict.fromkeys(name for row in rows for name in row)
    # A number of None becomes NaN.
    return rollouts, {name: np.asarray([row.get(name) for row in rows], dtype=np.float64) for name in names}
