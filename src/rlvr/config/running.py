"""The run round the training: its folder, checkpoints, evaluations and logging."""

from __future__ import annotations

import math
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlvr.config.sections import OfKind, RewardSpec, Section
from rlvr.errors import nearest
from rlvr.monitor.metrics import FAMILIES, METRICS


class RunConfig(Section):
    """The run as a whole."""

    name: str = "run"
    """Name of the run; its folder is `dir`/`name`. `a/b` is a folder within a folder."""
    dir: str = "runs"
    """The folder in which run folders are made."""
    seed: int = Field(default=0, ge=0)
    """The seed that every random choice is derived from."""
    seeds: list[Annotated[int, Field(ge=0)]] = []
    """Several seeds: `python -m rlvr.train` trains one after the other, each in a folder `seed-N` of the run folder,
    and puts their results together. Empty: one run with `seed`."""
    steps: int | None = Field(default=None, ge=0)
    """At most this many steps in all; a stage's `steps` is its share. Null: the sum of the stages' steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training tasks, in place of `steps`: a stage without `steps` of its own makes epochs x tasks /
    `rollout.prompts_per_step` steps, rounded up. Tasks that `data.skip_long_prompts` leaves out are counted too."""
    overwrite: bool = False
    """Move a run that the run folder already holds to `NAME.old-TIME` and start anew. With `--resume auto`: only where
    that run has no checkpoint to go on from."""
    check_memory: bool = True
    """Refuse a run whose memory plan does not fit its devices, before a model is loaded (docs/memory.md). False: warn
    and go on."""
    max_nonfinite: int = Field(default=5, ge=1)
    """Stop, with a checkpoint, after this many steps in a row with a non-finite loss or gradient."""

    @field_validator("name")
    @classmethod
    def _below_dir(cls, name: str) -> str:
        """The name, which must lead to a folder of its own below `dir`."""
        problem = None
        if not name.strip():
            problem = "is empty"
        elif not name.isprintable():
            problem = "has control characters"
        # `a//b`, `../b` and `/b` (whose first part is empty).
        elif any(not part.strip() or part in (".", "..") for part in name.split("/")):
            problem = "would be a folder outside of run.dir, or run.dir itself"
        if problem is not None:
            raise ValueError(f"the name {name!r} {problem}: give a name such as run-1 or group/run-1")
        return name

    @field_validator("dir")
    @classmethod
    def _printable(cls, folder: str) -> str:
        if not folder.strip() or not folder.isprintable():
            raise ValueError(
                f"{folder!r} is empty or has control characters: give the path of a folder, `.` for this one"
            )
        return folder

    @field_validator("name", mode="before")
    @classmethod
    def _is_text(cls, name: Any) -> Any:
        # `run.name=2026-11-23` is a date in YAML, and `run.name=1e3` a number: as text they would be written otherwise.
        if isinstance(name, (bool, int, float, date)):
            raise ValueError(
                f"YAML reads {name} as a value of type {type(name).__name__}, not as text: quote it, "
                f"run.name='\"{name}\"'"
            )
        return name

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("`steps` and `epochs` exclude each other: set one to null")
        return self

    @model_validator(mode="after")
    def _one_way_to_say_the_seed(self) -> Self:
        twice = [seed for seed in dict.fromkeys(self.seeds) if self.seeds.count(seed) > 1]
        if twice:
            raise ValueError(
                f"the seed {twice[0]} stands in `seeds` twice: the second run would be the first one again"
            )
        # A seed of 0 is the default and cannot be told from none.
        if self.seeds and self.seed:
            raise ValueError("`seed` and `seeds` exclude each other: leave one out")
        return self


class BestConfig(Section):
    """The rule that chooses the best checkpoint."""

    metric: str = "eval/greedy"
    """The metric that is compared, by its name in metrics.jsonl."""
    mode: Literal["max", "min"] = "max"
    """max: a larger value of the metric is better; min: a smaller one."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        # FAMILIES are the metrics with a free part in their names, such as `eval/...`.
        if self.metric not in METRICS and not self.metric.startswith(tuple(FAMILIES)):
            raise ValueError(f"no metric is called {self.metric!r}{nearest(self.metric, METRICS)}")
        return self


class CheckpointConfig(Section):
    """When the run is saved."""

    minutes: float = Field(default=10.0, ge=0)
    """Minutes between checkpoints by the clock of rank 0; 0: none by the clock. From the second one on the interval is
    longer where all checkpoints together would otherwise hold the steps up for over 3 % of the time. The end of a run
    is saved in any case."""
    every: int = Field(default=0, ge=0)
    """Steps between checkpoints, beside those by the clock; 0: only by the clock."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. With `every`: of those at its multiples, and beside them at most two that
    are newer (by the clock, or of the end)."""
    best: BestConfig | None = None
    """Keep the checkpoint with the best value of a metric too; a step that is better than all before is saved, whatever
    `every` says."""
    background: bool = True
    """Write while training goes on: a step waits only for a copy of what is saved, which is kept in host memory. False:
    it waits for the disk."""
    accept_changed_data: bool = False
    """Go on from a checkpoint that was made with other tasks (they are compared by their content). The draws go on with
    a new epoch of the tasks as they are now."""
    merged: bool = False
    """Write the merged model (`merged/`) beside the adapter (`model/`) too, where an adapter is trained."""


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only those of `at_start` and `at_end`."""
    at_start: bool = True
    """Evaluate before the first step of a run, where there are evaluation tasks."""
    at_end: bool = True
    """Evaluate after the last step of a stage."""
    data: Any = None
    """Tasks to evaluate on; null: `data.eval`."""
    limit: int | None = Field(default=None, ge=1)
    """Number of tasks to evaluate on, the first ones of `data` unless `limit_seed` is set; null: all."""
    limit_seed: int | None = Field(default=None, ge=0)
    """Seed with which the `limit` tasks are drawn at random, for sets that are sorted; null: the first ones."""
    greedy: bool = True
    """One greedy response per task: `eval/greedy`."""
    samples: int = Field(default=0, ge=0)
    """Responses sampled per task for pass@k, maj@k and the mean; 0: none."""
    k: list[Annotated[int, Field(ge=1)]] = [1]
    """The k of pass@k and maj@k; at most `samples`."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of the evaluation's samples; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in evaluation."""
    top_k: int = Field(default=0, ge=0)
    """Top-k sampling in evaluation; 0: all tokens."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Min-p sampling in evaluation."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest response in evaluation; null: as in training."""
    scorer: Annotated[RewardSpec, OfKind("reward")] | None = None
    """The scorer that chooses among samples without the verdict, for best@k: a reward term, such as `likelihood`,
    `self_certainty`, or a function `FILE.py:name`; null: no best@k."""
    difficulty: str = "difficulty"
    """The field of a task's `info` (a column of the data) that says how difficult it is: results are given by level
    too."""

    @model_validator(mode="after")
    def _k_fits(self) -> EvaluationConfig:
        # 0 samples: k is not used.
        if self.samples and max(self.k, default=1) > self.samples:
            raise ValueError(f"pass@{max(self.k)} needs at least {max(self.k)} `samples`, there are {self.samples}")
        return self


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online where an API key is set, else offline."""
    project: str = "rlvr"
    """Project that the run is filed under."""
    entity: str | None = None
    """Team or user."""


class TensorBoardConfig(Section):
    """TensorBoard."""

    directory: str | None = None
    """The folder in which the run's folder of event files is made; null: `tensorboard/` of the run folder."""


class MlflowConfig(Section):
    """MLflow."""

    uri: str | None = None
    """Tracking server or store; null: what MLFLOW_TRACKING_URI says, else a database in `mlflow/` of the run folder,
    where it also goes when the server cannot be reached."""
    experiment: str = "rlvr"
    """Experiment that the run is filed under."""


class LoggingConfig(Section):
    """Console output, trackers and files beside metrics.jsonl."""

    console: Literal["auto", "plain", "quiet", "off"] = "auto"
    """auto: a live view in a terminal, plain lines elsewhere. plain: always lines. quiet: what the monitors of health
    find, errors and a last line. off: nothing."""
    samples_every: int = Field(default=10, ge=0)
    """Steps between samples of a group shown on the console; 0: never."""
    rollouts: int = Field(default=1, ge=0)
    """Steps between files of rollouts in the run folder; 0: none."""
    rollouts_gb: float | None = Field(default=2.0, gt=0)
    """Gigabytes that these files may take together; where they take more, the oldest are removed, but for those of the
    first steps (a quarter of the bytes). Where a resume lowers it, what was recorded before stays and does not count.
    Null: all are kept."""
    wandb: bool | WandbConfig = False
    """Track the run with wandb."""
    tensorboard: bool | TensorBoardConfig = False
    """Track the run with TensorBoard."""
    mlflow: bool | MlflowConfig = False
    """Track the run with MLflow."""
    profile: list[int] = []
    """Steps whose time is looked into: `profile/step-N.json` of the run folder is a trace by torch's profiler (for
    Perfetto or chrome://tracing), `profile/step-N.txt` says what took longest. Such a step is slower."""

    @property
    def rollouts_bytes(self) -> float:
        """`rollouts_gb` in bytes, infinite where all are kept."""
        # Gigabytes of 10^9 bytes, as disks are sold.
        if self.rollouts_gb is None:
            return math.inf
        return self.rollouts_gb * 1e9
