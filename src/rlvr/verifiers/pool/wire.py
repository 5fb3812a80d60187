"""Messages between the pool and its processes, over socket pairs of their own.

Frames (rlvr.core.process.framing) carry verifiers and jobs as pickles to the processes, and verdicts as JSON, which
cannot run code in the trainer, back. Processes that fork are asked with a `REQUEST` and answer with a
`REPLY`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rlvr.records import Task, Verdict, cut
from rlvr.verifiers.base import Caller, Verifier, judged, judged_group

MAX_FRAME = 64 * 2**20
"""Largest reply in bytes; a process that announces a larger one is broken."""

# Network byte order without padding: 5 bytes.
REQUEST = struct.Struct("!ci")
"""The kind of a request, and the process id that it is about."""
FORK = b"F"
STACKS = b"S"
END = b"E"
WORK = b"W"
"""Kinds of requests: fork, to serve the socket sent along and write stacks into the pipe sent along; ask a child for
the stacks of its threads; kill a child and reap it; become a worker oneself."""
REPLY = struct.Struct("!i")
"""The process id of the fork (0: it failed), 1 where a child will write its stacks (else 0), or the exit code of the
child that was ended."""


@dataclass(frozen=True)
class Load:
    """A verifier in the form in which it is sent."""

    verifier: bytes
    files: tuple[tuple[str, str], ...] = ()
    """(module name, path) of modules that were loaded from a file and cannot be imported by name."""


@dataclass(frozen=True)
class VerifierJob:
    """Completions of one task to verify in one call: a whole group, or one completion."""

    task: Task
    completions: Sequence[str]
    token_ids: Sequence[list[int] | None]
    group: bool = False

    async def verdicts(self, verifier: Verifier, call: Caller | None = None) -> list[Verdict]:
        """Return the verdicts of `verifier`, one per completion."""
        if self.group:
            return await judged_group(verifier, self.task, self.completions, self.token_ids, call)
        return [await judged(verifier, self.task, self.completions[0], self.token_ids[0], call)]


def verdicts_to_json(verdicts: Sequence[Verdict]) -> bytes:
    """The body of a reply. Raises for a verdict that holds something other than JSON types and numbers."""
    # `default=float`: numpy's numbers in the scores of a user's verdict.
    return json.dumps([verdict.to_json() for verdict in verdicts], default=float).encode()


def exhausted_to_json(what: str, memory: bool, traceback: str = "") -> bytes:
    """The body of a reply instead of verdicts: a resource of the worker is used up."""
    return json.dumps({"exhausted": what[:200], "memory": memory, "traceback": cut(traceback)}).encode()


class ExhaustedError(Exception):
    """A resource of a worker is used up, and it must be ended. `memory`: it is its memory. `traceback`: where it was
    asked for."""

    def __init__(self, what: str, memory: bool, traceback: str = "") -> None:
        super().__init__(what)
        self.memory = memory
        self.traceback = traceback


def verdicts_from_json(body: bytes, count: int) -> list[Verdict]:
    """The verdicts of a reply. ExhaustedError where it says so, ValueError for anything else."""
    try:
        rows = json.loads(body)
        # A list holds verdicts; an object says that a resource was used up.
        if isinstance(rows, dict):
            raise ExhaustedError(str(rows["exhausted"]), bool(rows["memory"]), str(rows["traceback"]))
        verdicts = [Verdict.from_json(row) for row in rows]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if len(verdicts) != count:
        raise ValueError(f"{len(verdicts)} verdicts instead of {count}")
    return verdicts
