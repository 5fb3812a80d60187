"""From tasks to verdicts: data, rollouts, the running of verifiers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from rlvr.config.sections import OfKind, Section
from rlvr.core.schedules import Scalar, refuse_below
from rlvr.core.specs import ComponentSpec


class DataConfig(Section):
    """Tasks and how they become prompts."""

    train: Any = None
    """Training tasks: a JSON lines, JSON or parquet file, a folder, a hub name, a registered source, or a list of
    these."""
    eval: Any = None
    """Held-out tasks, written like `train`."""
    fields: dict[str, Any] | None = None
    """Our field -> the row's field, for layouts that are not recognised: `{prompt: question, answer: final}`;
    `meta.question` is a field within another."""
    template: str | dict[str, Any] | None = None
    """Text with `{prompt}` put round each prompt; or `chat`: a text prompt becomes the user message of a chat; or
    `{system: ..., user: ..., assistant: ...}`, which makes chat messages of it (`assistant` is the begin of the answer,
    `text` makes plain text of a chat, `options` go to the chat template)."""
    limit: int | None = Field(default=None, ge=1)
    """Number of training tasks to use, the first ones unless `limit_seed` is set; null: all."""
    limit_seed: int | None = Field(default=None, ge=0)
    """Seed with which the `limit` tasks are drawn at random, for sets that are sorted; null: the first ones."""
    sampler: Annotated[ComponentSpec, OfKind("sampler")] = ComponentSpec("shuffle")
    """The order in which tasks are drawn."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Refuse longer prompts at start, by name. Null: what the context of model and engine leaves
    for them."""
    skip_long_prompts: bool = False
    """Leave out the tasks that are too long (in an sft stage with their demonstrations), and say how many."""


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): groups whose rewards are all the same are replaced."""

    by: Literal["rewards", "selection"] = "rewards"
    """The groups that are replaced. rewards: those whose rewards are all the same, while others are still sampled.
    selection: those of which `algorithm.select` leaves no response, in rounds, each after all of the round before was
    scored; rewards may then need the policy (RLPR, Yu et al. 2025; OpenBMB/RLPR, commit 8490fca,
    verl/trainer/ppo/ray_trainer.py, `fit`)."""
    attempts: int = Field(default=3, ge=1)
    """A step samples at most this many times `prompts_per_step` groups; then it trains with what there is."""
    oversample: float = Field(default=1.0, ge=1, le=2)
    """Keep this many times the missing groups open, and stop when enough are complete. Above 1, complete groups that
    were not needed train in the next step, and which ones train depends on what finishes first."""


class RolloutConfig(Section):
    """Sampling of groups of responses."""

    engine: Annotated[ComponentSpec, OfKind("engine", words=("auto",))] = ComponentSpec("hf")
    """The inference engine. `hf` runs in the trainer's process and needs no server. auto: `vllm` on a GPU where vLLM is
    installed in a version that is taken, else `hf`; the run says which and why, and its config.yaml has it."""
    plan: Annotated[ComponentSpec, OfKind("plan")] = ComponentSpec("single_turn")
    """The plan by which the rollouts of a group are made."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Tasks drawn at each step, over all ranks; in an sft stage, demonstrations per step."""
    group_size: int = Field(default=8, ge=1)
    """Responses sampled per prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens. More than the context leaves after the shortest prompt is refused at the start
    (`accept_short_context`)."""
    accept_short_context: bool = False
    """Start although the context of model and engine leaves fewer than `max_new_tokens` even after the shortest prompt:
    responses then end at the context, and what reads `max_new_tokens` as the longest response (the constant average,
    penalties on length) reads too large a number."""
    temperature: Scalar = 1.0
    """Sampling temperature; training divides logits by it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; in training 1, unless `algorithm.truncated_sampling` accepts the bias."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k most likely tokens; 0: all. In training as `top_p`."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less likely than this share of the most likely one. In training as `top_p`."""
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = []
    """Strings that end a response (they stay in it)."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token, to `max_new_tokens`."""
    staleness: int = Field(default=0, ge=0)
    """Sample so many steps ahead of the one that trains: the weights that sampled a token are at most this many
    versions old. 0: sample, then train."""
    in_flight: Literal["finish", "continue"] = "finish"
    """With `staleness`, what happens to responses under way when new weights come: they finish on the old ones first,
    or go on with the new ones (each token knows its version)."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups that teach nothing; null: train on what was drawn."""
    deadline: float = Field(default=1800.0, gt=0)
    """Seconds that one step's collection may take; past it the run stops and says what it waited for. The same for 4096
    rollouts of an evaluation, past which that evaluation fails and the run goes on."""

    @field_validator("temperature")
    @classmethod
    def _above_zero(cls, temperature: Scalar) -> Scalar:
        """0 alone is left to the stage, because one that does not sample has no use for it."""
        # A schedule or controller is never equal to 0, and is checked over all of its steps.
        if temperature != 0:
            refuse_below("the temperature", temperature, 0, above=True)
        return temperature


class VerificationConfig(Section):
    """Processes, time limits and memory of verifiers."""

    workers: int = Field(default=64, ge=1)
    """Worker processes for plain functions, which mostly wait; each is forked when first needed. Verifiers that compute
    (`needs.process`) get one per core, but no more than this."""
    concurrent: int = Field(default=64, ge=1)
    """Asynchronous verifications that wait at the same time."""
    time_limit: float | None = Field(default=None, gt=0)
    """Seconds for one call of a verifier; null: the verifier's own limit."""
    memory_mb: int = Field(default=2048, ge=64)
    """Address space that one worker process may take, in MiB, on top of what its loaded verifier takes."""
