"""One strict typed tree: everything that a run can be told, with a docstring under every field.

The docstrings are the reference page docs/config.md. Unknown keys are errors that suggest the nearest name. Values come,
weakest first, from the field defaults, the preset named by `algorithm.preset`, the YAML file and dotted overrides.
A piece (verifier, reward, loss ...) is checked against the piece's own options when the tree is made, so a typo in an
option is found before any model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from rlvr import registry
from rlvr.errors import ConfigError, nearest
from rlvr.monitor.health.watch import Mode, checked_modes
from rlvr.monitor.metrics import FAMILIES, METRICS
from rlvr.schedules import Scalar
from rlvr.tree import merge

Piece = str | dict[str, Any]


TERM_KEYS = ("weight", "as", "sources")
"""What a term of the reward may be written with beside the options of its piece: its weight in the sum (a Scalar), the name
of its column, and the sources of the tasks that have it."""


def bare_term(spec: Piece) -> Piece:
    """A term of the reward as written, without what is not the piece's own."""
    return {key: value for key, value in spec.items() if key not in TERM_KEYS} if isinstance(spec, dict) else spec


def term_name(spec: Piece) -> str:
    """The name of a term of the reward, whose column is `reward/NAME`."""
    given = spec.get("as") if isinstance(spec, dict) else None
    return str(given) if given is not None else registry.split(bare_term(spec))[0].rpartition(":")[2]


def bare_auxiliary(spec: Piece) -> Piece:
    """A further term of the loss as written, without its coefficient."""
    return {key: value for key, value in spec.items() if key != "coef"} if isinstance(spec, dict) else spec


def coefficient(spec: Piece) -> Scalar:
    """The coefficient of a further term of the loss. ConfigError when it is no scalar."""
    written = spec.get("coef", 1.0) if isinstance(spec, dict) else 1.0
    try:
        return TypeAdapter(Scalar).validate_python(written)
    except ValidationError as error:
        raise ConfigError(f"coef={written!r}: {error.errors()[0]['msg']}") from error


@dataclass(frozen=True)
class OfKind:
    """Marks a config field as holding a piece of this kind; the generated reference page links it."""

    kind: str


def _piece(kind: str, *words: str) -> Any:
    """The annotation of a config field that holds a piece of `kind`, checked against the registry, or one of `words`."""

    def check(spec: Piece) -> Piece:
        if spec in words:
            return spec
        try:
            if kind == "auxiliary":
                coefficient(spec)
            bare = {"reward": bare_term, "auxiliary": bare_auxiliary}.get(kind)
            registry.check_options(kind, bare(spec) if bare else spec)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return spec

    return Annotated[Piece, AfterValidator(check), OfKind(kind)]


def _known_monitors(written: str | dict[str, str]) -> str | dict[str, str]:
    checked_modes(written)
    return written


def _known_preset(name: str) -> str:
    try:
        registry.find("preset", name)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return name


class Section(BaseModel):
    """Base of every section: strict keys, docstrings as descriptions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)


class RunConfig(Section):
    """The run as a whole."""

    name: str = "run"
    """Name of the run; its folder is `dir`/`name`."""
    dir: str = "runs"
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0)
    """The seed that every random choice is derived from."""
    steps: int | None = Field(default=None, ge=0)
    """At most this many steps in all; a stage's `steps` is its share. Null: the sum of the stages' steps."""
    overwrite: bool = False
    """Replace a run folder that already holds metrics."""
    max_nonfinite: int = Field(default=5, ge=1)
    """Stop, with a checkpoint, after this many steps in a row with a non-finite loss or gradient."""


class LoraConfig(Section):
    """A LoRA adapter (Hu et al. 2021), made by peft: only the adapter is trained."""

    r: int = Field(default=16, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input. With any, the log-probs trained on differ from those sampled with (`mismatch/*`)."""
    target_modules: list[str] | str = "all-linear"
    """Names of the modules that get an adapter, or `all-linear`."""


class ScratchConfig(Section):
    """A small policy built from random weights, for trying things out without a download."""

    architecture: str = "qwen3"
    """Model type, as transformers names it (qwen3, llama, gemma2 ...)."""
    hidden_size: int = Field(default=64, ge=8)
    """Width of the residual stream."""
    layers: int = Field(default=2, ge=1)
    """Decoder layers."""
    heads: int = Field(default=4, ge=1)
    """Query heads."""
    kv_heads: int = Field(default=2, ge=1)
    """Key and value heads."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of an attention head; null: hidden_size / heads."""
    intermediate_size: int = Field(default=256, ge=8)
    """Width of the feed-forward layers."""
    context: int = Field(default=512, ge=8)
    """Longest context in tokens."""
    alphabet: str | None = None
    """Characters of the character-level tokenizer; null: printable ASCII and newline."""
    words: list[str] = []
    """Strings that are one token each, besides the single characters."""
    tie_word_embeddings: bool = True
    """Share the input embedding with the LM head."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""


class ModelConfig(Section):
    """A model of the run: the policy, or a frozen one beside it."""

    path: str | None = None
    """A folder with Hugging Face files, or a hub name."""
    scratch: ScratchConfig | None = None
    """Build the model from random weights instead of loading it."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type computed in; auto: bfloat16 on a GPU, float32 on a CPU. Weights that train are kept in float32 in any case,
    because an update of 1e-6 is lost in bfloat16."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto: the GPU when there is one."""
    adapter: LoraConfig | None = None
    """Train a LoRA adapter instead of the weights."""
    attention: str | None = None
    """transformers' attention implementation: sdpa, eager, flash_attention_2 ...; null: its own choice for the model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    activation_offload: bool = False
    """Keep the layers' inputs, which is what `gradient_checkpointing` (needed for it) leaves, in host memory until the
    backward pass: less GPU memory for the time of two copies. Of no use on a CPU."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources that you trust."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if self.path is not None and self.scratch is not None:
            raise ValueError("`path` and `scratch` exclude each other: load a model or build one")
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "`activation_offload` keeps what gradient checkpointing leaves: set `gradient_checkpointing: true`"
            )
        return self


class DataConfig(Section):
    """Tasks and how they become prompts."""

    train: Any = None
    """Training tasks: a JSON lines, JSON or parquet file, a folder, a hub name, a registered source, or a list of these."""
    eval: Any = None
    """Held-out tasks, written like `train`."""
    fields: dict[str, Any] | None = None
    """Our field -> the row's field, for layouts that are not recognised: `{prompt: question, answer: final}`."""
    template: str | dict[str, Any] | None = None
    """Text with `{prompt}` put round each prompt, or `{system: ..., user: ...}` that makes chat messages of it
    (`text` makes plain text of a chat, `options` go to the chat template)."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many training tasks."""
    sampler: _piece("sampler") = "shuffle"  # type: ignore[valid-type]
    """The order in which tasks are drawn."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Refuse longer prompts at start, by name. Null: what the model's context leaves for them."""
    skip_long_prompts: bool = False
    """Leave out the tasks that are too long (in an sft stage with their demonstrations), and say how many."""


class RefillConfig(Section):
    """Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): groups whose rewards are all the same are replaced."""

    attempts: int = Field(default=3, ge=1)
    """A step samples at most this many times `prompts_per_step` groups; then it trains with what there is."""
    oversample: float = Field(default=1.0, ge=1, le=2)
    """Keep this many times the missing groups open, and stop when enough are complete. Above 1, complete groups that were
    not needed train in the next step, and which ones train depends on what finishes first."""


class RolloutConfig(Section):
    """How groups of responses are sampled."""

    engine: _piece("engine") = "hf"  # type: ignore[valid-type]
    """What samples: `hf` runs in the trainer's process and needs no server."""
    plan: _piece("plan") = "single_turn"  # type: ignore[valid-type]
    """What a group of rollouts is made of."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Tasks drawn at each step, over all ranks; in an sft stage, demonstrations per step."""
    group_size: int = Field(default=8, ge=1)
    """Responses sampled per prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens."""
    temperature: Scalar = 1.0
    """Sampling temperature; training divides logits by it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; only 1 in training, because truncated sampling needs a correction."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k most likely tokens; 0: all. Only 0 in training."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less likely than this share of the most likely one. Only 0 in training."""
    stop: list[str] = []
    """Strings that end a response (they stay in it)."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token, to `max_new_tokens`."""
    staleness: int = Field(default=0, ge=0)
    """Sample so many steps ahead of the one that trains: the weights that sampled a token are at most this many versions
    old. 0: sample, then train."""
    in_flight: Literal["finish", "continue"] = "finish"
    """With `staleness`, what happens to responses under way when new weights come: they finish on the old ones first, or go
    on with the new ones (each token knows its version)."""
    refill: RefillConfig | None = None
    """Replace groups that teach nothing; null: train on what was drawn."""
    deadline: float = Field(default=1800.0, gt=0)
    """Seconds that one step's collection may take; past it the run stops and says what it waited for."""


class VerificationConfig(Section):
    """How verifiers are run."""

    workers: int = Field(default=64, ge=1)
    """Worker processes for plain functions, which mostly wait; each is forked when first needed. Verifiers that compute
    (`needs.process`) get one per core, but no more than this."""
    concurrent: int = Field(default=64, ge=1)
    """Asynchronous verifications that wait at the same time."""
    time_limit: float | None = Field(default=None, gt=0)
    """Seconds for one call of a verifier; null: what the verifier says itself."""
    memory_mb: int = Field(default=2048, ge=64)
    """Address space that one worker process may take, in MiB, on top of what its loaded verifier takes."""


class KLConfig(Section):
    """A penalty on the divergence from the reference, a snapshot of the policy at the start of the stage."""

    estimator: _piece("kl") = "k3"  # type: ignore[valid-type]
    """k1, k2, k3 (Schulman 2020, "Approximating KL divergence") or abs."""
    coef: Scalar = 0.0
    """Weight of the term."""
    where: Literal["loss", "reward", "advantage"] = "loss"
    """loss: a term of the loss. reward: its sum over a response is taken from the reward before the baseline (RLOO).
    advantage: each token's advantage loses the sum from that token on, before the modifiers (PPO, REINFORCE++). The two last
    take a pass of the policy and one of the reference before the update."""
    gradient: _piece("kl") | None = None  # type: ignore[valid-type]
    """In the loss: the estimator whose gradient is taken, where it is not that of `estimator`; k2's is the KL's own."""
    weighted: bool = False
    """In the loss: times the ratio of current to proximal policy, which keeps k3's gradient right off-policy (DeepSeek-V3.2)."""
    bound: float | None = Field(default=None, gt=0)
    """Clamps the value at each token to [-bound, bound] (and the log-ratio to 20 nats), beyond which there is no gradient."""
    renew_every: int | None = Field(default=None, ge=1)
    """Steps after which the reference follows the policy; null: it stays as it was at the start of the stage."""
    renew_mix: float = Field(default=1.0, gt=0, le=1)
    """What it then becomes: mix x policy + (1 - mix) x reference. 1: the policy; less, with renew_every 1: a moving average."""


class AlgorithmConfig(Section):
    """From scored rollouts to a loss."""

    preset: Annotated[str, AfterValidator(_known_preset)] = "grpo"
    """A named set of the values below; what is written here goes over it."""
    select: list[_piece("selector")] = []  # type: ignore[valid-type]
    """Which rollouts train: selectors, in order."""
    select_after: bool = False
    """Select after advantages were computed, not before."""
    advantage: _piece("advantage") = "group"  # type: ignore[valid-type]
    """From rewards to advantages."""
    modifiers: list[_piece("modifier")] = []  # type: ignore[valid-type]
    """What is done to the advantages then, in order: whitening, clipping, weights by sign, length or surprise ..."""
    loss: _piece("loss") = "clip"  # type: ignore[valid-type]
    """The policy loss and what it averages over."""
    loss_coef: Scalar = 1.0
    """Weight of the policy loss beside the other terms; CHORD's 1 - mu."""
    kl: KLConfig | None = None
    """Penalty on the divergence from the reference; null: none, and no reference is kept."""
    entropy: Scalar = 0.0
    """Weight of an entropy bonus; 0: none (the entropy is logged all the same). A controller on the metric entropy holds it near
    a target."""
    token_select: list[_piece("token_selector")] = []  # type: ignore[valid-type]
    """Which tokens of an optimizer step the policy loss and the entropy bonus learn from; a selector sees all of them."""
    auxiliary: list[_piece("auxiliary")] = []  # type: ignore[valid-type]
    """Further terms of the loss: likelihood of chosen responses or demonstrations, preferences between a group's members. A term
    also takes a `coef` (a scalar, 1 by default)."""
    correction: _piece("correction", "auto") | None = "auto"  # type: ignore[valid-type]
    """Weights for tokens that the engine sampled with other log-probs than the trainer's. auto: `truncate` where the engine
    does not compute with the trainer's own weights; null: none (the gap is logged all the same)."""
    decoupled: bool = False
    """With several optimizer steps per batch, take the ratio to the policy as it was before the first of them (one extra
    forward pass), and leave the gap to the sampling policy to the correction."""
    mask_truncated: bool = False
    """Leave truncated responses out of the policy loss (they still count in their group's baseline)."""


class OptimConfig(Section):
    """Optimizer steps."""

    optimizer: _piece("optimizer") = "adamw"  # type: ignore[valid-type]
    """adamw, adamw_8bit (2 bytes of state for a weight instead of 8) or sgd, with its options."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up; linear and cosine go to `min_lr` at the end of the stage."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0 to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """Where linear and cosine schedules end."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps that one batch is cut into, by whole groups."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """How often the batch is gone through."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Completions per forward pass and rank; null: all of an optimizer step's."""
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens (unpadded, prompts included) per forward pass and rank, instead of a number of completions. A prompt that
    completions share is counted once where it is computed once. A rollout longer than this goes alone."""
    packing: Literal["auto"] | bool = "auto"
    """Lay rollouts end to end, without padding, in the update; auto: where it is estimated to be faster and the model can.
    The gradient is the same."""
    share_prefix: Literal["auto"] | bool = "auto"
    """In packed rows, compute the tokens that a group's rollouts begin with (their prompt) once for all of them; auto:
    where it is estimated to be faster and the model can. The gradient is the same."""

    @model_validator(mode="after")
    def _sharing_needs_packing(self) -> OptimConfig:
        if self.packing is False and self.share_prefix is True:
            raise ValueError("`share_prefix: true` needs packed rows: set `packing` to auto or true")
        return self

    @model_validator(mode="after")
    def _one_micro_batch(self) -> OptimConfig:
        if self.micro_batch_size is not None and self.micro_batch_tokens is not None:
            raise ValueError("`micro_batch_size` and `micro_batch_tokens` exclude each other: set one to null")
        return self


class DistributedConfig(Section):
    """Where the policy's weights and optimizer live."""

    backend: _piece("backend") = "plain"  # type: ignore[valid-type]
    """plain: every rank holds the whole model and optimizer; deepspeed: they are shared out among the ranks (ZeRO)."""
    zero_stage: Literal[1, 2, 3] | None = None
    """With deepspeed, what is shared out: 1, the optimizer's state; 2, gradients too; 3, weights too. Null: 2."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """With deepspeed, what waits in host memory: `optimizer` (its state and the float32 weights), or `parameters` (with
    `zero_stage: 3`: these and the weights computed with)."""
    deepspeed: str | None = None
    """A JSON file with more of DeepSpeed's own configuration, such as bucket sizes."""
    silence: float = Field(default=30.0, gt=0)
    """Seconds without a sign of life after which the other ranks give a rank up, name it and end."""

    @property
    def piece(self) -> dict[str, Any]:
        """The backend with its options: those of this section, and over them those written with the backend."""
        name, options = registry.split(self.backend)
        own = {"zero_stage": self.zero_stage or 2, "offload": self.offload, "deepspeed": self.deepspeed}
        return {"name": name, **(own if name == "deepspeed" else {}), **options}

    @model_validator(mode="after")
    def _for_deepspeed(self) -> DistributedConfig:
        name = registry.split(self.backend)[0]
        for key, value in {"zero_stage": self.zero_stage, "deepspeed": self.deepspeed}.items():
            if value is not None and name != "deepspeed":
                raise ValueError(f"`{key}` needs `backend: deepspeed`, and the backend is {name!r}")
        if self.offload != "none" and name != "deepspeed":
            raise ValueError(f"`offload` needs `backend: deepspeed`, and the backend is {name!r}")
        if self.offload == "parameters" and self.piece["zero_stage"] != 3:
            raise ValueError("`offload: parameters` needs `zero_stage: 3`, which alone shares them out")
        return self


class BestConfig(Section):
    """Which checkpoint is the best."""

    metric: str = "eval/greedy"
    """A metric by its name in metrics.jsonl."""
    mode: Literal["max", "min"] = "max"
    """Whether more of it is better, or less."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.metric not in METRICS and not self.metric.startswith(tuple(FAMILIES)):
            raise ValueError(f"no metric is called {self.metric!r}{nearest(self.metric, METRICS)}")
        return self


class CheckpointConfig(Section):
    """When the run is saved."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only at the end of the run."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept."""
    best: BestConfig | None = None
    """Keep the checkpoint with the best value of a metric too; a step that is better than all before is saved, whatever
    `every` says."""
    background: bool = True
    """Write while training goes on: a step waits only for a copy of what is saved, which is kept in host memory. False: it
    waits for the disk."""
    accept_changed_data: bool = False
    """Go on from a checkpoint that was made with other tasks (they are compared by their content). The draws go on with a new
    epoch of the tasks as they are now."""
    merged: bool = False
    """Where an adapter is trained, write the merged model (`merged/`) beside the adapter (`model/`) too."""


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only where `at_start` and `at_end` say."""
    at_start: bool = True
    """Evaluate before the first step of a run, where there are evaluation tasks."""
    at_end: bool = True
    """Evaluate after the last step of a stage."""
    data: Any = None
    """Tasks to evaluate on; null: `data.eval`."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many of them."""
    greedy: bool = True
    """One greedy response per task: `eval/greedy`."""
    samples: int = Field(default=0, ge=0)
    """Responses sampled per task for pass@k, maj@k and the mean; 0: none."""
    k: list[int] = [1]
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

    @model_validator(mode="after")
    def _k_fits(self) -> EvaluationConfig:
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


class LoggingConfig(Section):
    """What is said and kept beside metrics.jsonl."""

    console: Literal["auto", "plain", "off"] = "auto"
    """A live display in a terminal, plain lines elsewhere; or always plain; or nothing."""
    samples_every: int = Field(default=10, ge=0)
    """Steps between samples of a group shown on the console; 0: never."""
    rollouts: int = Field(default=1, ge=0)
    """Steps between files of rollouts in the run folder; 0: none."""
    wandb: bool | WandbConfig = False
    """Track the run with wandb."""
    profile: list[int] = []
    """Steps whose time is looked into: `profile/step-N.json` of the run folder is a trace by torch's profiler (for Perfetto
    or chrome://tracing), `profile/step-N.txt` says what took longest. Such a step is slower."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    """The run as a whole."""
    model: ModelConfig = ModelConfig()
    """The policy; short for `models.policy`."""
    models: dict[str, ModelConfig] = {}
    """The named models of the run; so far `policy` is the only one."""
    data: DataConfig = DataConfig()
    """Tasks and how they become prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """How groups of responses are sampled."""
    verifier: _piece("verifier") | None = None  # type: ignore[valid-type]
    """What checks the answers; null: what the tasks name, or what the trainer is given."""
    verification: VerificationConfig = VerificationConfig()
    """How verifiers are run."""
    rewards: list[_piece("reward")] = ["verdict"]  # type: ignore[valid-type]
    """Terms of the reward, summed with their weights; a list replaces the default. A term also takes a `weight` (a scalar), a
    name for its column (`as`), and the `sources` of the tasks that have it."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """From scored rollouts to a loss."""
    optim: OptimConfig = OptimConfig()
    """Optimizer steps."""
    distributed: DistributedConfig = DistributedConfig()
    """Where the policy's weights and optimizer live."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation during training."""
    logging: LoggingConfig = LoggingConfig()
    """What is said and kept beside metrics.jsonl."""
    health: Annotated[Mode | dict[str, Mode], AfterValidator(_known_monitors)] = "warn"
    """What the monitors of docs/when-it-does-not-learn.md do when they find something: `warn` says it once, on the console and
    in health.jsonl, `stop` also ends the run after a checkpoint, `off` does not look. One word for all, or a word by monitor:
    `{all_wrong: stop, slow: off, default: warn}`."""
    stages: list[dict[str, Any]] = []
    """The stages of the run in order, each `{kind: sft | grpo, steps: N}` with overrides of this tree; empty: one grpo stage."""

    @model_validator(mode="before")
    @classmethod
    def _under_preset(cls, values: Any) -> Any:
        """Put the preset under what was written in `algorithm`, and `model` and `models.policy` together."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        algorithm = values.get("algorithm")
        if algorithm is None or isinstance(algorithm, dict):
            values["algorithm"] = _over_preset(algorithm or {})
        models = values.get("models")
        if isinstance(models, dict) and "policy" in models:
            models = dict(models)
            policy = models.pop("policy")
            if values.get("model") not in (None, policy):
                raise ValueError("`model` is short for `models.policy`: give one of the two")
            values |= {"model": policy, "models": models}
        if models:
            raise ValueError(f"models.{next(iter(models))}: `policy` is the only model that a run has so far")
        return values

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run.dir) / self.run.name

    def dump(self) -> dict[str, Any]:
        """The resolved tree as plain YAML types."""
        return self.model_dump(mode="json", by_alias=True)


def _over_preset(algorithm: dict[str, Any]) -> dict[str, Any]:
    preset = algorithm.get("preset", AlgorithmConfig.model_fields["preset"].default)
    try:
        return merge(registry.find("preset", preset)(), {"preset": preset, **algorithm}, ("algorithm",))
    except ConfigError:  # the field's own check says what is wrong with the name
        return algorithm
