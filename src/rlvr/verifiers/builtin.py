"""The built-in verifiers: importing this module registers all of them."""

from rlvr.verifiers import (
    answers,
    choice,
    code,
    combine,
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
    "answers",
    "boxes",
    "choice",
    "code",
    "combine",
    "countdown",
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
