"""From scored rollouts to a loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlvr import registry
from rlvr.config.sections import AuxiliarySpec, OfKind, Section
from rlvr.core.answer_text import PLACE, check_place
from rlvr.core.schedules import Scalar
from rlvr.core.specs import ComponentSpec
from rlvr.core.tree import merge
from rlvr.errors import ConfigError


def _known_preset(name: str) -> str:
    try:
        registry.find("preset", name)
    except ConfigError as error:
        # pydantic collects ValueErrors as problems of the field; a ConfigError would end the validation at the first
        # one.
        raise ValueError(str(error)) from error
    return name


class KLScaleConfig(Section):
    """Factors that make a penalty on the divergence stronger or weaker at some tokens than at others."""

    by: Literal["source", "turn", "part"]
    """source: the task's source; turn: the number of the policy's turn, from 1; part: `think`, up to and with
    `closing`, and `answer`, what follows."""
    factors: dict[str, Annotated[float, Field(ge=0)]]
    """Name of a source, number of a turn, or part -> factor of `coef` there."""
    other: float = Field(default=1.0, ge=0)
    """The factor of sources, turns and parts that are not named."""
    closing: str = Field(default="</think>", min_length=1)
    """With `by: part`, the text that ends the thinking; without it all is `think`."""

    @field_validator("factors", mode="before")
    @classmethod
    def _named_by_text(cls, factors: Any) -> Any:
        if isinstance(factors, dict):
            # YAML reads `{1: 0.5}`, a turn, with a number as the key.
            return {str(name): factor for name, factor in factors.items()}
        return factors

    @model_validator(mode="after")
    def _names(self) -> KLScaleConfig:
        for name in self.factors:
            # `isdecimal` alone is true of digits of other scripts.
            if self.by == "turn" and not (name.isascii() and name.isdecimal() and int(name) > 0):
                raise ValueError(f"`by: turn` numbers turns from 1, and {name!r} is no such number")
            if self.by == "part" and name not in ("think", "answer"):
                raise ValueError(f"`by: part` knows think and answer, not {name!r}")
        return self


class KLConfig(Section):
    """A penalty on the divergence from the reference, a snapshot of the policy at the start of the stage."""

    estimator: Annotated[ComponentSpec, OfKind("kl")] = ComponentSpec("k3")
    """k1, k2, k3 (Schulman 2020, "Approximating KL divergence") or abs."""
    coef: Scalar = 0.0
    """Weight of the term."""
    where: Literal["loss", "reward", "advantage"] = "loss"
    """loss: a term of the loss. reward: its sum over a response is taken from the reward before the baseline (RLOO).
    advantage: each token's advantage loses the sum from that token on, before the modifiers (PPO, REINFORCE++). The two
    last take a pass of the policy and one of the reference before the update."""
    gradient: Annotated[ComponentSpec, OfKind("kl")] | None = None
    """In the loss: the estimator whose gradient is taken; null: that of `estimator`; k2's is the KL's own."""
    weighted: bool = False
    """In the loss: multiply the term by the ratio of current to proximal policy, which keeps k3's gradient right
    off-policy (DeepSeek-V3.2)."""
    bound: float | None = Field(default=None, gt=0)
    """Clamps the value at each token to [-bound, bound] (and the log-ratio to 20 nats), beyond which there is no
    gradient."""
    scale: KLScaleConfig | None = None
    """Factors of `coef` for tasks of some sources, some turns, or thinking and answer; null: `coef` everywhere. They
    count in no average: a factor of 2 everywhere is twice the coefficient."""
    renew_every: int | None = Field(default=None, ge=1)
    """Steps after which the reference follows the policy; null: it stays as it was at the start of the stage."""
    renew_mix: float = Field(default=1.0, gt=0, le=1)
    """Weight of the policy in the renewed reference, mix x policy + (1 - mix) x reference. 1: the policy itself; less,
    with renew_every 1: a moving average."""


class SpliceConfig(Section):
    """The task's answer in the place of the policy's own, for training: the response is cut where its answer begins,
    `text` is put there, and its tokens are learned.

    Policy and entropy terms then learn the reasoning before it, with the advantage, and the tokens of `text` with the
    weight that `by` names in the place of the advantage. A response without `opening` is learned as it is. The gradient
    of VeriFree (Zhou et al. 2025, arXiv 2505.21493; sail-sg/VeriFree, verifree.py, `learning_step`), whose reward is
    `answer_likelihood` with the same `opening` and `text`.
    """

    opening: str = Field(default="<answer>", min_length=1)
    """The text after which the answer stands; its first occurrence counts."""
    text: Annotated[str, AfterValidator(check_place)] = PLACE
    """The text that is put there; `{answer}` stands for the task's answer."""
    by: Literal["reward", "advantage", "one"] = "reward"
    """The weight of the answer's tokens: the response's reward, its advantage, or 1."""


class SupervisedStepsConfig(Section):
    """Steps that learn demonstrations alone; the others are of reinforcement alone. The term that learns them is in
    `auxiliary`, {name: likelihood, on: demonstrations}.

    With `warmup` they are drawn by chance. The probability of a supervised step is G / (G + gamma G_w), of the gradient
    norms of the last supervised step (G) and of the last step of the warm-up (G_w): SASR (Chen et al. 2025, arXiv
    2505.13026, algorithm 1). With `gather` they come when enough groups have failed, and learn the tasks of those:
    ReLIFT (TheRoadQaQ/ReLIFT, commit eb95454, relift/verl/verl/relift/trainer.py).
    """

    warmup: int | None = Field(default=None, ge=1)
    """Steps at the start of the stage that are all supervised; later ones are drawn by chance."""
    gamma: float = Field(default=1.0, ge=0)
    """Weight of G_w: the larger, the fewer steps are supervised."""
    gather: int | None = Field(default=None, ge=1)
    """Demonstrations of a supervised step, of tasks at which a whole group failed: it is taken as soon as so many have
    failed."""
    failed: float = 0.0
    """With `gather`, the largest reward of a failed response: a group has failed where none is above it."""

    @model_validator(mode="after")
    def _one_rule(self) -> SupervisedStepsConfig:
        if (self.warmup is None) == (self.gather is None):
            raise ValueError("set warmup, to draw supervised steps by chance, or gather, to take them when groups fail")
        if self.gather is None and self.failed != type(self).model_fields["failed"].default:
            raise ValueError("`failed` says which groups `gather` takes: leave it out, or set gather")
        return self


class AlgorithmConfig(Section):
    """From scored rollouts to a loss."""

    preset: Annotated[str, AfterValidator(_known_preset)] = "grpo"
    """A named set of the values below; values written here override it."""
    select: list[Annotated[ComponentSpec, OfKind("selector")]] = []
    """Selectors of the rollouts that train, applied in order."""
    select_after: bool = False
    """Select after advantages were computed, not before."""
    advantage: Annotated[ComponentSpec, OfKind("advantage")] = ComponentSpec("group")
    """From rewards to advantages."""
    modifiers: list[Annotated[ComponentSpec, OfKind("modifier")]] = []
    """Changes to the advantages after they are computed, in order: whitening, clipping, weights by sign, length or
    surprise ..."""
    loss: Annotated[ComponentSpec, OfKind("loss")] = ComponentSpec("clip")
    """The policy loss and what it averages over."""
    loss_coef: Scalar = 1.0
    """Weight of the policy loss beside the other terms; CHORD's 1 - mu."""
    kl: KLConfig | None = None
    """Penalty on the divergence from the reference; null: none, and no reference is kept."""
    entropy: Scalar = 0.0
    """Weight of an entropy bonus; 0: none (the entropy is logged all the same). A controller on the metric entropy
    holds it near a target."""
    token_select: list[Annotated[ComponentSpec, OfKind("token_selector")]] = []
    """Selectors of the tokens that the policy loss and the entropy bonus learn from; a selector sees all tokens of an
    optimizer step."""
    entropy_select: list[Annotated[ComponentSpec, OfKind("token_selector")]] = []
    """Selectors whose factors multiply the entropy bonus at each token, beside those of `token_select`: a coefficient
    of its own for each token."""
    auxiliary: list[Annotated[AuxiliarySpec, OfKind("auxiliary")]] = []
    """Further terms of the loss: likelihood of chosen responses or demonstrations, preferences between a group's
    members. A term also takes a `coef` (a scalar, 1 by default)."""
    correction: Annotated[ComponentSpec, OfKind("correction", words=("auto",))] | None = ComponentSpec("auto")
    """Weights for tokens that the engine sampled with other log-probs than the trainer's. auto: `truncate` where the
    engine does not compute with the trainer's own weights; null: none (the gap is logged all the same). With several
    optimizer steps per batch it costs one forward pass, and the weight multiplies the loss in every step."""
    decoupled: bool = False
    """Without a correction and with several optimizer steps per batch, take the ratio to the policy as it was before
    the first of them (one forward pass) in place of the policy that sampled. With a correction the ratio is always
    taken to it."""
    truncated_sampling: bool = False
    """Accept `rollout.top_p`, `top_k` and `min_p` in training, as TRL and verl do: responses are sampled from the
    truncated distribution, log-probs, ratios and entropy are those of the whole one. The gradient is biased: tokens
    that truncation leaves out are never sampled, and only the normalisation lowers them. `mismatch/*` then has the
    probability that was kept, and the metric `entropy` is that of the truncated distribution. Needs `correction: null`,
    and with several optimizer steps per batch `decoupled`. The engine's log-probs are those of the truncated
    distribution, so that what reads them is refused: the reward `likelihood`, the modifier `surprise`, the loss
    `topr`."""
    mask_truncated: bool = False
    """Leave truncated responses out of the policy loss (they still count in their group's baseline)."""
    demonstrations: Literal["selected", "sampled"] = "selected"
    """The groups beside which the demonstrations of their tasks are learned, where a term of `auxiliary` learns them:
    those of which `select` leaves a response, or all of the step, tasks of which the plan sampled no group among
    them."""
    supervised_steps: SupervisedStepsConfig | None = None
    """Learn demonstrations in steps of their own; null: beside the groups of every step, where a term of `auxiliary`
    learns them."""
    splice: SpliceConfig | None = None
    """Learn the task's answer in the place of the policy's own; null: the response as it was sampled."""


def without_preset(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a section `algorithm`, as it was dumped, without its preset and the values of that.

    A dump has them as if somebody had written them: they would go over those of another preset.
    """
    name = algorithm.get("preset", AlgorithmConfig.model_fields["preset"].default)
    replaced = {"preset", *registry.find("preset", name)()}
    return {key: value for key, value in algorithm.items() if key not in replaced}


def over_preset(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `algorithm`, with the values of its preset for those that it does not set."""
    preset = algorithm.get("preset", AlgorithmConfig.model_fields["preset"].default)
    try:
        return merge(registry.find("preset", preset)(), {"preset": preset, **algorithm}, ("algorithm",))
    except ConfigError:  # the field's own check says what is wrong with the name
        return algorithm
