"""The public names of the package and the modules that have them: read by type checkers, and by `lazy_loader`."""

from .answers import ExactVerifier as ExactVerifier
from .base import (
    FunctionVerifier as FunctionVerifier,
    Needs as Needs,
    Verifier as Verifier,
    as_verifier as as_verifier,
    judged as judged,
)
from .choice import ChoiceVerifier as ChoiceVerifier
from .code import CodeVerifier as CodeVerifier
from .combine import CombineVerifier as CombineVerifier
from .format import FormatVerifier as FormatVerifier
from .grounding.boxes import (
    BoxesVerifier as BoxesVerifier,
    IntervalVerifier as IntervalVerifier,
    PointVerifier as PointVerifier,
)
from .instructions import InstructionsVerifier as InstructionsVerifier
from .json_schema import JsonSchemaVerifier as JsonSchemaVerifier
from .judge import (
    JudgeVerifier as JudgeVerifier,
    PairsVerifier as PairsVerifier,
    RubricVerifier as RubricVerifier,
    StepsVerifier as StepsVerifier,
)
from .label import (
    LabelVerifier as LabelVerifier,
    RatingVerifier as RatingVerifier,
)
from .math import MathVerifier as MathVerifier
from .overlap import (
    BleuVerifier as BleuVerifier,
    RougeVerifier as RougeVerifier,
)
from .pool import VerifierPool as VerifierPool
from .puzzles.countdown import CountdownVerifier as CountdownVerifier
from .puzzles.gym import ReasoningGymVerifier as ReasoningGymVerifier
from .puzzles.knights_knaves import KnightsAndKnavesVerifier as KnightsAndKnavesVerifier
from .puzzles.sudoku import SudokuVerifier as SudokuVerifier
from .ranking import RankingVerifier as RankingVerifier
from .scorer import ScorerVerifier as ScorerVerifier
from .scorer import StepScorerVerifier as StepScorerVerifier
from .text import (
    NumericVerifier as NumericVerifier,
    RegexVerifier as RegexVerifier,
    TokenF1Verifier as TokenF1Verifier,
)
from .tool_calls import ToolCallVerifier as ToolCallVerifier
