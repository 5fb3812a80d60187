"""The memory planner of the library, called in one place."""

from __future__ import annotations

from rlvr.config import Config
from rlvr.planner import parts, shape_of

PROGRAM = "program"
"""The part that torch's allocator does not hand out: Python, libraries, the GPU's context."""


def planned_parts(config: Config) -> dict[str, float]:
    """MiB by part in the worst update of a run that samples nothing, without the program itself."""
    found = parts(shape_of(config.model), config, sampled=False, reference=False)
    return {name: round(size / 2**20, 1) for name, size in found.items() if name != PROGRAM}
