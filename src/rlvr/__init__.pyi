"""The public names of the package and the modules that have them: read by type checkers, and by `lazy_loader`."""

from .config import Config as Config
from .config.config_loading import load_config as load_config
from .records import (
    Batch as Batch,
    Group as Group,
    Origin as Origin,
    Rollout as Rollout,
    StopReason as StopReason,
    Task as Task,
    Verdict as Verdict,
    VerdictStatus as VerdictStatus,
)
from .registry import (
    register_advantage as register_advantage,
    register_loss as register_loss,
    register_modifier as register_modifier,
    register_plan as register_plan,
    register_reward as register_reward,
    register_sampler as register_sampler,
    register_selector as register_selector,
    register_stage as register_stage,
    register_verifier as register_verifier,
)
from .run.callbacks import Callback as Callback
from .run.run_view import RunView as RunView
from .trainer import GRPOTrainer as GRPOTrainer
from .verifiers import (
    BleuVerifier as BleuVerifier,
    BoxesVerifier as BoxesVerifier,
    ChoiceVerifier as ChoiceVerifier,
    CodeVerifier as CodeVerifier,
    CombineVerifier as CombineVerifier,
    CountdownVerifier as CountdownVerifier,
    ExactVerifier as ExactVerifier,
    FormatVerifier as FormatVerifier,
    FunctionVerifier as FunctionVerifier,
    InstructionsVerifier as InstructionsVerifier,
    IntervalVerifier as IntervalVerifier,
    JsonSchemaVerifier as JsonSchemaVerifier,
    KnightsAndKnavesVerifier as KnightsAndKnavesVerifier,
    LabelVerifier as LabelVerifier,
    MathVerifier as MathVerifier,
    NumericVerifier as NumericVerifier,
    PointVerifier as PointVerifier,
    RankingVerifier as RankingVerifier,
    RatingVerifier as RatingVerifier,
    ReasoningGymVerifier as ReasoningGymVerifier,
    RegexVerifier as RegexVerifier,
    RougeVerifier as RougeVerifier,
    SudokuVerifier as SudokuVerifier,
    TokenF1Verifier as TokenF1Verifier,
    ToolCallVerifier as ToolCallVerifier,
    Verifier as Verifier,
)

__version__: str
