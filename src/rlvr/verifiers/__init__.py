"""Checking of answers. The public names are imported on first use: `from rlvr.verifiers import MathVerifier` needs
neither torch nor SymPy, nor the other verifiers. rlvr.verifiers.builtin imports, and so registers, all built-in
verifiers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvr.core.first_use import found_on_first_use

_HOME, __getattr__ = found_on_first_use(
    __name__,
    {
        "rlvr.verifiers.overlap": "BleuVerifier RougeVerifier",
        "rlvr.verifiers.grounding.boxes": "BoxesVerifier IntervalVerifier PointVerifier",
        "rlvr.verifiers.choice": "ChoiceVerifier",
        "rlvr.verifiers.code": "CodeVerifier",
        "rlvr.verifiers.combine": "CombineVerifier",
        "rlvr.verifiers.puzzles.countdown": "CountdownVerifier",
        "rlvr.verifiers.answers": "ExactVerifier",
        "rlvr.verifiers.format": "FormatVerifier",
        "rlvr.verifiers.base": "FunctionVerifier Needs Verifier as_verifier judged",
        "rlvr.verifiers.instructions": "InstructionsVerifier",
        "rlvr.verifiers.json_schema": "JsonSchemaVerifier",
        "rlvr.verifiers.puzzles.knights_knaves": "KnightsAndKnavesVerifier",
        "rlvr.verifiers.label": "LabelVerifier RatingVerifier",
        "rlvr.verifiers.math": "MathVerifier",
        "rlvr.verifiers.text": "NumericVerifier RegexVerifier TokenF1Verifier",
        "rlvr.verifiers.ranking": "RankingVerifier",
        "rlvr.verifiers.puzzles.gym": "ReasoningGymVerifier",
        "rlvr.verifiers.puzzles.sudoku": "SudokuVerifier",
        "rlvr.verifiers.tool_calls": "ToolCallVerifier",
        "rlvr.verifiers.pool": "VerifierPool",
    },
)
__all__ = [*_HOME]

if TYPE_CHECKING:
    from rlvr.verifiers.answers import ExactVerifier
    from rlvr.verifiers.base import FunctionVerifier, Needs, Verifier, as_verifier, judged
    from rlvr.verifiers.choice import ChoiceVerifier
    from rlvr.verifiers.code import CodeVerifier
    from rlvr.verifiers.combine import CombineVerifier
    from rlvr.verifiers.format import FormatVerifier
    from rlvr.verifiers.grounding.boxes import BoxesVerifier, IntervalVerifier, PointVerifier
    from rlvr.verifiers.instructions import InstructionsVerifier
    from rlvr.verifiers.json_schema import JsonSchemaVerifier
    from rlvr.verifiers.label import LabelVerifier, RatingVerifier
    from rlvr.verifiers.math import MathVerifier
    from rlvr.verifiers.overlap import BleuVerifier, RougeVerifier
    from rlvr.verifiers.pool import VerifierPool
    from rlvr.verifiers.puzzles.countdown import CountdownVerifier
    from rlvr.verifiers.puzzles.gym import ReasoningGymVerifier
    from rlvr.verifiers.puzzles.knights_knaves import KnightsAndKnavesVerifier
    from rlvr.verifiers.puzzles.sudoku import SudokuVerifier
    from rlvr.verifiers.ranking import RankingVerifier
    from rlvr.verifiers.text import NumericVerifier, RegexVerifier, TokenF1Verifier
    from rlvr.verifiers.tool_calls import ToolCallVerifier


def __dir__() -> list[str]:
    return sorted(__all__)
