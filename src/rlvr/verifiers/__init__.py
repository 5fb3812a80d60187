"""Checking of answers. Importing this room registers the built-in verifiers; it needs neither torch nor SymPy."""

from rlvr.verifiers.base import FunctionVerifier, Needs, Verifier, as_verifier, judged
from rlvr.verifiers.choice import ChoiceVerifier
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.combine import CombineVerifier
from rlvr.verifiers.exact import ExactVerifier
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

__all__ = [
    "BleuVerifier",
    "BoxesVerifier",
    "ChoiceVerifier",
    "CodeVerifier",
    "CombineVerifier",
    "CountdownVerifier",
    "ExactVerifier",
    "FormatVerifier",
    "FunctionVerifier",
    "InstructionsVerifier",
    "IntervalVerifier",
    "JsonSchemaVerifier",
    "KnightsAndKnavesVerifier",
    "LabelVerifier",
    "MathVerifier",
    "Needs",
    "NumericVerifier",
    "PointVerifier",
    "RankingVerifier",
    "RatingVerifier",
    "ReasoningGymVerifier",
    "RegexVerifier",
    "RougeVerifier",
    "SudokuVerifier",
    "TokenF1Verifier",
    "ToolCallVerifier",
    "Verifier",
    "VerifierPool",
    "as_verifier",
    "judged",
]
