"""The built-in verifiers: importing this module registers all of them."""

from rlvr.verifiers import (
    choice,
    code,
    combine,
    exact,
    format,
    instructions,
    json_schema,
    label,
    math,
    overlap,
    ranking,
    text,
    tool_calls,
)
from rlvr.verifiers.grounding import boxes
from rlvr.verifiers.puzzles import countdown, gym, knights_knaves, sudoku

__all__ = [
    "boxes",
    "choice",
    "code",
    "combine",
    "countdown",
    "exact",
    "format",
    "gym",
    "instructions",
    "json_schema",
    "knights_knaves",
    "label",
    "math",
    "overlap",
    "ranking",
    "sudoku",
    "text",
    "tool_calls",
]
