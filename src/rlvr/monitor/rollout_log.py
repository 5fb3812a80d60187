"""Rollouts on disk: everything that a step sampled, judged and rewarded, as JSON lines that can be trained on again.

`rollouts/step-000012.jsonl` holds one rollout per line: the fields of `Rollout`, and

- `use`: `trained`; `left_out` by a selector; `dropped` with a group that was replaced; `baseline`, a rollout that
  others are compared with; `added`, a demonstration that trained beside the sampled rollouts.
- `columns`: its columns in the batch that trained; of one that did not train, those that scoring gave (null:
  undecided).
- `scored`: those that scoring gave, where they were changed since (a reward less its KL penalty).
- `tokens`: what was computed of each sampled token: `log_ratio` (log-prob at the update minus the behaviour log-prob)
  and `advantage` where it differs between tokens. These are for looking at: rounded, in the order of the sampled
  tokens.

Invariants: numbers come back bit for bit, `tokens` apart; lines are in the order of the draws, what was dropped after
the rest; a file is written under another name and renamed, so it is whole or absent, and it is there before a
checkpoint of its step or a later one is begun; a full disk costs the file, not the run.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rlvr.core.daemon_calls import in_daemon
from rlvr.core.own_files import numbered
from rlvr.core.waits import finished
from rlvr.errors import WaitTimeoutError
from rlvr.monitor.whole_file import naming
from rlvr.records import BASELINE, UPDATED, Batch, Origin, Rollout

log = logging.getLogger(__name__)

# Ten minutes: a file system that is slow (a network disk under load) gets through; one that hangs ends the run with a
# message.
WRITE_SECONDS = 600.0
"""Seconds after which a wait for a step's rollouts to be written ends in an error."""
# Thousands of long rollouts are written in a few seconds; nobody waits at a prompt for a disk that hangs.
EXIT_SECONDS = 10.0
"""Seconds for which the end of the program waits for the last file of a log that was not closed."""
# A quarter: what the policy wrote at the start is what later steps are compared with, and the newest are looked at
# most.
FIRST = 0.25
"""The share of the bytes that the first steps of a run may keep; the newest have the rest."""
# Both figures only feed the check of free disk space at the start (rlvr.run), which errs on the side of too much where
# texts are short.
TOKEN_BYTES = 45
"""Bytes of a token on a line, measured: its id, log-prob, version, origin, log-ratio and text."""
ROLLOUT_BYTES = 1000
"""Bytes of the rest of a line, measured with short prompts and reasons."""


def estimate(rollouts: int, tokens: int) -> int:
    """About how many bytes the file of a step takes, with this many `tokens` per rollout."""
    return rollouts * (ROLLOUT_BYTES + TOKEN_BYTES * tokens)


class RolloutLog:
    """Writes a batch every `every` steps (0: never) to `directory`/rollouts, `directory` being the run folder.

    Where its files take more than `limit` bytes, the oldest go, but for those of the first steps; the newest always
    stays.
    """

    def __init__(self, directory: str | Path, every: int = 1, limit: float = math.inf) -> None:
        self.directory = Path(directory) / "rollouts"
        self.every = every
        self.limit = limit
        self.kept_until = 0
        """The files of steps up to this one are never removed, and do not count: they were recorded under a larger
        limit."""
        self._sizes: dict[int, int] | None = None
        """Bytes of the files by step; None until the first one is written."""
        self._under_way: Future[Path | None] | None = None
        self._wait_at_exit = False

    def due(self, step: int) -> bool:
        """Return True if `step` is one that is written."""
        return self.every > 0 and step % self.every == 0

    def write(
        self,
        step: int,
        batch: Batch,
        sampled: Sequence[Rollout] = (),
        dropped: Sequence[Rollout] = (),
        columns: Mapping[str, np.ndarray] | None = None,
    ) -> Path | None:
        """Write the step if it is due; the file's path, or None.

        `batch` is what trained, `sampled` and `dropped` all that was collected for it, and `columns` what scoring gave
        to each of [*sampled, *dropped].
        """
        if not self.due(step):
            return None
        try:
            return self._write(step, _rows(batch, [*sampled, *dropped], len(sampled), columns or {}))
        except OSError as error:
            log.warning("the rollouts of step %d could not be written: %s", step, error)
            return None

    def keep_until(self, step: int) -> int:
        """Keep the files of steps up to this one for good, and return their size in bytes."""
        self.kept_until = step
        self._sizes = None
        files = numbered(self.directory, ".jsonl")
        return sum(path.stat().st_size for number, path in files.items() if number <= step)

    def later(
        self,
        step: int,
        batch: Batch,
        sampled: Sequence[Rollout],
        dropped: Sequence[Rollout],
        columns: Mapping[str, np.ndarray] | None,
    ) -> None:
        """`write` in a thread of its own, while the next step goes on; two steps are never under way at once."""
        # Waits for the previous file: `_sizes` and the batch belong to one thread at a time.
        self.flush()
        if self.due(step):
            if not self._wait_at_exit:
                self._wait_at_exit = True
                atexit.register(self._exit)
            self._under_way = in_daemon(lambda: self.write(step, batch, sampled, dropped, columns), "rlvr-rollouts")

    def flush(self, seconds: float | None = None) -> None:
        """Wait for what is being written. WaitTimeoutError after `seconds` (None: WRITE_SECONDS): the disk hangs."""
        under_way = self._under_way
        if under_way is None:
            return
        try:
            finished(
                under_way, "the file of rollouts", time.monotonic() + (WRITE_SECONDS if seconds is None else seconds)
            )
        except WaitTimeoutError:
            # Nothing waits for this file once more. After an interrupt `close` does.
            self._under_way = None
            raise
        self._under_way = None
        # Raises here what the write raised there; OSError is caught in `write` and costs the file only.
        under_way.result()

    def close(self) -> None:
        """Wait for what is being written, which the end of the program would cut off."""
        self._finish(WRITE_SECONDS)
        if self._wait_at_exit:
            self._wait_at_exit = False
            atexit.unregister(self._exit)

    def _exit(self) -> None:
        self._finish(EXIT_SECONDS)

    def _finish(self, seconds: float) -> None:
        try:
            self.flush(seconds)
        except Exception as error:
            # The run has ended, perhaps with an error of its own.
            log.warning("the last file of rollouts was not written: %s", error)

    def _write(self, step: int, rows: Iterator[dict[str, Any]]) -> Path:
        self.directory.mkdir(exist_ok=True)  # not its parents: a run folder that was removed is not made again
        path = self._path(step)
        aside = path.with_name(f".{path.name}.partial")
        try:
            with naming(path), aside.open("wb") as file:
                file.writelines(json_line(row) for row in rows)
            # Atomic on one file system: a reader sees the old file or the new one. Without fsync: after a power cut the
            # file may be lost, which costs a step's rollouts and no checkpoint.
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)  # half a file would keep a full disk full
            raise
        self._keep_within(step)
        return path

    def _keep_within(self, newest: int) -> None:
        """Remove the files of steps in the middle, oldest first, until the rest fits the limit."""
        if self._sizes is None:
            files = numbered(self.directory, ".jsonl")
            within = {step: path for step, path in files.items() if self.kept_until < step <= newest}
            self._sizes = {step: path.stat().st_size for step, path in within.items()}
        self._sizes[newest] = self._path(newest).stat().st_size
        total = sum(self._sizes.values())
        # Files of the first steps are kept while they fit into FIRST of the limit. After them the oldest are removed
        # until the total fits.
        first = 0.0
        for step, size in sorted(self._sizes.items()):
            if total <= self.limit or step == newest:
                return
            if first + size <= FIRST * self.limit:
                first += size
                continue
            first = math.inf  # the first steps end where one does not fit
            self._path(step).unlink(missing_ok=True)
            del self._sizes[step]
            total -= size

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}.jsonl"


def _rows(
    batch: Batch, collected: Sequence[Rollout], kept: int, columns: Mapping[str, np.ndarray]
) -> Iterator[dict[str, Any]]:
    """One row for each rollout that was collected, the first `kept` of them not dropped, then for each that was
    added."""
    # (group, member, role) is unique among the rollouts of a step; the batch may hold them in another order and with
    # fewer or other members.
    places = {_key(rollout): place for place, rollout in enumerate(batch.rollouts)}
    final = _by_rollout(batch.columns, len(batch))
    scored = _by_rollout(columns, len(collected))
    tokens = _of_tokens(batch)
    for number, rollout in enumerate(collected):
        place = places.pop(_key(rollout), None)
        row = rollout.row()
        as_scored = scored[number]
        if place is None:
            left_out = "baseline" if rollout.role == BASELINE else "left_out"
            row |= {"use": left_out if number < kept else "dropped", "columns": as_scored}
        else:
            now = final[place]
            row |= {"use": "trained", "columns": {**as_scored, **now}, "tokens": tokens[place]}
            # `x == x` is False for NaN: two NaN are no change.
            before = {name: x for name, x in as_scored.items() if x != (y := now.get(name, x)) and (x == x or y == y)}
            if before:
                row["scored"] = before
        yield row
    for place in places.values():
        use = "added" if collected else "trained"
        yield batch.rollouts[place].row() | {"use": use, "columns": final[place], "tokens": tokens[place]}


def _by_rollout(columns: Mapping[str, np.ndarray], count: int) -> list[dict[str, float]]:
    """Name -> value for each rollout."""
    values = [np.asarray(column, dtype=np.float64).tolist() for column in columns.values()]
    if values:
        return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    return [{}] * count


def _key(rollout: Rollout) -> tuple[str, int, str]:
    return rollout.group, rollout.member, rollout.role


def _of_tokens(batch: Batch) -> list[dict[str, np.ndarray]]:
    """For each rollout what the batch holds of the tokens that the policy sampled in it."""
    result: list[dict[str, np.ndarray]] = [{} for _ in batch.rollouts]
    arrays = {}
    if UPDATED in batch.token_columns and result:
        behaviour = np.concatenate([rollout.behaviour_logprobs for rollout in batch.rollouts])
        arrays["log_ratio"] = np.concatenate(batch.token_columns[UPDATED]) - behaviour
    if "advantage" in batch.token_columns and result:
        arrays["advantage"] = np.concatenate(batch.token_columns["advantage"])
    if not arrays:
        return result
    sampled = np.concatenate([rollout.origin for rollout in batch.rollouts]) == int(Origin.POLICY)
    # Sampled tokens before each rollout, [B + 1]: rollout i has places counts[i] to counts[i + 1] among all sampled
    # tokens.
    counts = np.concatenate([[0], np.cumsum(sampled)])[np.cumsum([0, *map(len, batch.rollouts)])].tolist()
    for name, values in arrays.items():
        # Four decimals, since these are for colours in a report: 5 digits or so in the place of 17. Adding 0.0 turns
        # -0.0 into 0.0.
        rounded = np.round(values[sampled].astype(np.float64), 4) + 0.0
        finite = np.concatenate([[0], np.cumsum(np.isfinite(rounded))])[counts].tolist()
        for i, row in enumerate(result):
            # A rollout without one finite value (a demonstration, say) has no such array.
            if finite[i] < finite[i + 1]:
                row[name] = rounded[counts[i] : counts[i + 1]]
    return result


# NON_STR_KEYS: `info` of a task may have numbers as keys, which JSON writes as text.
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS


def json_line(row: Mapping[str, Any]) -> bytes:
    """A row in JSON, with a line break; NaN and infinities are null."""
    try:
        return orjson.dumps(row, default=_plain, option=_OPTIONS)
    except TypeError:  # half a surrogate pair, or an integer over 64 bits, which JSON itself can hold
        return (json.dumps(_finite(row), default=_plain) + "\n").encode("ascii")


def _finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, arrays as lists."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_finite(one) for one in (value.tolist() if isinstance(value, np.ndarray) else value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _plain(value: Any) -> Any:
    """The JSON form of a value that JSON lacks (in an answer or info): a list for an array, else its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
