"""The built-in verifiers: importing this module registers all of them."""

# ruff: noqa: F401 - imported for what they register

from rlvr.verifiers import (
    answers,
    choice,
    code,
    combine,
    format,
    instructions,
    json_schema,
    judge,
    label,
    math,
    overlap,
    ranking,
    scorer,
    text,
    tool_calls,
)
from rlvr.verifiers.grounding import boxes
from rlvr.verifiers.puzzles import countdown, gym, knights_knaves, sudoku
