"""What the pool and its worker processes say to each other: frames of a length (4 bytes, big-endian) and a body."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rlvr.records import Task

LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Job:
    """One answer to verify; the verifier is pickled apart, so that a worker loads each only once."""

    verifier: bytes
    files: tuple[tuple[str, str], ...]
    """(module name, path) of modules that were loaded from a file and cannot be imported by name."""
    task: Task
    completion: str
