"""One strict typed tree: every setting of a run, with a docstring under each field.

The docstrings are the reference page docs/config.md. Unknown keys are errors that suggest the nearest name. Values
come, weakest first, from the field defaults, the preset named by `algorithm.preset`, the YAML file and dotted
overrides. A component (verifier, reward, loss ...) is checked against the component's own options when the tree is
made, so a typo in an option is found before any model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, StringConstraints, model_validator

from rlvr import registry
from rlvr.config.algorithm import (
    AlgorithmConfig,
    KLConfig,
    KLScaleConfig,
    SpliceConfig,
    SupervisedStepsConfig,
    over_preset,
)
from rlvr.config.model_config import FrozenModelConfig, LoraConfig, ModelConfig, ScratchConfig
from rlvr.config.renamed_keys import with_new_names
from rlvr.config.rollout_config import DataConfig, DynamicSamplingConfig, RolloutConfig, VerificationConfig
from rlvr.config.running import (
    BestConfig,
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    MlflowConfig,
    RunConfig,
    TensorBoardConfig,
    WandbConfig,
)
from rlvr.config.sections import AuxiliarySpec, OfKind, RewardSpec, Section
from rlvr.config.updating import DistributedConfig, OptimConfig
from rlvr.core.specs import ComponentSpec
from rlvr.monitor.health.watch import Mode, checked_modes

__all__ = [
    "AlgorithmConfig",
    "AuxiliarySpec",
    "BestConfig",
    "CheckpointConfig",
    "ComponentSpec",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "DynamicSamplingConfig",
    "EvaluationConfig",
    "FrozenModelConfig",
    "KLConfig",
    "KLScaleConfig",
    "LoggingConfig",
    "LoraConfig",
    "MlflowConfig",
    "ModelConfig",
    "OfKind",
    "OptimConfig",
    "RewardSpec",
    "RolloutConfig",
    "RunConfig",
    "ScratchConfig",
    "Section",
    "SpliceConfig",
    "SupervisedStepsConfig",
    "TensorBoardConfig",
    "VerificationConfig",
    "WandbConfig",
]


def _known_monitors(written: str | dict[str, str]) -> str | dict[str, str]:
    # Called for its error alone: the value stays as it was written.
    checked_modes(written)
    return written


# No space, so that it is never the name of a turn's verdict (`turn 1`).
VerdictName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
"""A name of verdicts in a rollout."""
ModelName = VerdictName
"""A name of a frozen model."""


def _named_frozen(models: dict[str, FrozenModelConfig]) -> dict[str, FrozenModelConfig]:
    # Verifiers name it beside these.
    if "policy" in models:
        raise ValueError("`policy` is the model that is trained: it is described in the section `model`")
    return models


class Config(Section):
    """A whole run."""

    imports: list[str] = []
    """Files (`FILE.py`) and modules that are imported first, so that the components which they register are known by
    name."""
    run: RunConfig = RunConfig()
    """The run as a whole."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    models: Annotated[dict[ModelName, FrozenModelConfig], AfterValidator(_named_frozen)] = {}
    """Frozen models beside the policy, by the names that verifiers use: `{rm: {path: OWNER/NAME}}` for the verifier
    `{name: scorer, model: rm}`."""
    data: DataConfig = DataConfig()
    """Tasks and how they become prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of groups of responses."""
    verifier: Annotated[ComponentSpec, OfKind("verifier")] | None = None
    """The verifier that scores responses: a name, `FILE.py:Class`, or a mapping with options. null: the verifier that
    each task names, or the one given to the trainer."""
    verifiers: dict[VerdictName, Annotated[ComponentSpec, OfKind("verifier")]] = {}
    """Further verifiers of all tasks, by the name of their verdicts, written as `verifier` is: `{judge: {name: judge,
    ...}}`. They decide nothing by themselves. The reward term `{name: verdict, verifier: judge}` reads one, also inside
    of other terms; metrics, votes and evaluations are of the verdict of `verifier`."""
    verification: VerificationConfig = VerificationConfig()
    """Execution of the verifiers."""
    rewards: list[Annotated[RewardSpec, OfKind("reward")]] = [RewardSpec("verdict")]
    """Terms of the reward, summed with their weights; a list replaces the default. A term also takes a `weight` (a
    scalar), a name for its column (`as`), and the `sources` of the tasks that have it. A term that is undecided for a
    rollout leaves its reward undecided, unless the term's weight is 0 at the step."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """From scored rollouts to a loss."""
    optim: OptimConfig = OptimConfig()
    """Optimizer steps."""
    distributed: DistributedConfig = DistributedConfig()
    """Placement of the policy's weights and optimizer."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved, and which checkpoints are kept."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation during training."""
    logging: LoggingConfig = LoggingConfig()
    """Console output, trackers and files beside metrics.jsonl."""
    health: Annotated[Mode | dict[str, Mode], AfterValidator(_known_monitors)] = "warn"
    """Action of the monitors of docs/when-it-does-not-learn.md when they find something: `warn` reports it once, on the
    console and in health.jsonl, `stop` also ends the run after a checkpoint, `off` does not look. One word for all, or
    a word by monitor: `{all_wrong: stop, slow: off, default: warn}`."""
    stages: list[dict[str, Any]] = []
    """The stages of the run in order, each `{kind: sft | grpo, steps: N}` with overrides of this tree; empty: one grpo
    stage."""

    @model_validator(mode="before")
    @classmethod
    def _under_preset(cls, values: Any) -> Any:
        """Import what registers components, and put the preset under what was written in `algorithm`."""
        # A Config that is validated again comes as an object, with everything done.
        if not isinstance(values, dict):
            return values
        values = with_new_names(values)
        imports = values.get("imports")
        if isinstance(imports, list) and all(isinstance(file, str) for file in imports):  # else refused as a field
            registry.import_components(imports)
        # Here and not in AlgorithmConfig: a registered preset is known only after the imports above.
        algorithm = values.get("algorithm")
        if algorithm is None or isinstance(algorithm, dict):
            values["algorithm"] = over_preset(algorithm or {})
        return values

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run.dir).expanduser() / self.run.name

    def dump(self) -> dict[str, Any]:
        """The resolved tree as plain YAML types."""
        return self.model_dump(mode="json", by_alias=True)
