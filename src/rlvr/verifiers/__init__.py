"""Checking of answers. The public names are imported on first use: `from rlvr.verifiers import MathVerifier` needs
neither torch nor SymPy, nor the other verifiers. rlvr.verifiers.builtin imports, and so registers, all built-in
verifiers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "BleuVerifier": "rlvr.verifiers.overlap",
    "BoxesVerifier": "rlvr.verifiers.grounding.boxes",
    "ChoiceVerifier": "rlvr.verifiers.choice",
    "CodeVerifier": "rlvr.verifiers.code",
    "CombineVerifier": "rlvr.verifiers.combine",
    "CountdownVerifier": "rlvr.verifiers.puzzles.countdown",
    "ExactVerifier": "rlvr.verifiers.answers",
    "FormatVerifier": "rlvr.verifiers.format",
    "FunctionVerifier": "rlvr.verifiers.base",
    "InstructionsVerifier": "rlvr.verifiers.instructions",
    "IntervalVerifier": "rlvr.verifiers.grounding.boxes",
    "JsonSchemaVerifier": "rlvr.verifiers.json_schema",
    "KnightsAndKnavesVerifier": "rlvr.verifiers.puzzles.knights_knaves",
    "LabelVerifier": "rlvr.verifiers.label",
    "MathVerifier": "rlvr.verifiers.math",
    "Needs": "rlvr.verifiers.base",
    "NumericVerifier": "rlvr.verifiers.text",
    "PointVerifier": "rlvr.verifiers.grounding.boxes",
    "RankingVerifier": "rlvr.verifiers.ranking",
    "RatingVerifier": "rlvr.verifiers.label",
    "ReasoningGymVerifier": "rlvr.verifiers.puzzles.gym",
    "RegexVerifier": "rlvr.verifiers.text",
    "RougeVerifier": "rlvr.verifiers.overlap",
    "SudokuVerifier": "rlvr.verifiers.puzzles.sudoku",
    "TokenF1Verifier": "rlvr.verifiers.text",
    "ToolCallVerifier": "rlvr.verifiers.tool_calls",
    "Verifier": "rlvr.verifiers.base",
    "VerifierPool": "rlvr.verifiers.pool",
    "as_verifier": "rlvr.verifiers.base",
    "judged": "rlvr.verifiers.base",
}

__all__ = [*_HOME]

if TYPE_CHECKING:
    from rlvr.verifiers.answers import ExactVerifier as ExactVerifier
    from rlvr.verifiers.base import FunctionVerifier as FunctionVerifier
    from rlvr.verifiers.base import Needs as Needs
    from rlvr.verifiers.base import Verifier as Verifier
    from rlvr.verifiers.base import as_verifier as as_verifier
    from rlvr.verifiers.base import judged as judged
    from rlvr.verifiers.choice import ChoiceVerifier as ChoiceVerifier
    from rlvr.verifiers.code import CodeVerifier as CodeVerifier
    from rlvr.verifiers.combine import CombineVerifier as CombineVerifier
    from rlvr.verifiers.format import FormatVerifier as FormatVerifier
    from rlvr.verifiers.grounding.boxes import BoxesVerifier as BoxesVerifier
    from rlvr.verifiers.grounding.boxes import IntervalVerifier as IntervalVerifier
    from rlvr.verifiers.grounding.boxes import PointVerifier as PointVerifier
    from rlvr.verifiers.instructions import InstructionsVerifier as InstructionsVerifier
    from rlvr.verifiers.json_schema import JsonSchemaVerifier as JsonSchemaVerifier
    from rlvr.verifiers.label import LabelVerifier as LabelVerifier
    from rlvr.verifiers.label import RatingVerifier as RatingVerifier
    from rlvr.verifiers.math import MathVerifier as MathVerifier
    from rlvr.verifiers.overlap import BleuVerifier as BleuVerifier
    from rlvr.verifiers.overlap import RougeVerifier as RougeVerifier
    from rlvr.verifiers.pool import VerifierPool as VerifierPool
    from rlvr.verifiers.puzzles.countdown import CountdownVerifier as CountdownVerifier
    from rlvr.verifiers.puzzles.gym import ReasoningGymVerifier as ReasoningGymVerifier
    from rlvr.verifiers.puzzles.knights_knaves import KnightsAndKnavesVerifier as KnightsAndKnavesVerifier
    from rlvr.verifiers.puzzles.sudoku import SudokuVerifier as SudokuVerifier
    from rlvr.verifiers.ranking import RankingVerifier as RankingVerifier
    from rlvr.verifiers.text import NumericVerifier as NumericVerifier
    from rlvr.verifiers.text import RegexVerifier as RegexVerifier
    from rlvr.verifiers.text import TokenF1Verifier as TokenF1Verifier
    from rlvr.verifiers.tool_calls import ToolCallVerifier as ToolCallVerifier


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
