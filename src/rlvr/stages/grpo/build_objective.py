"""From the `algorithm` section to the objective of a grpo stage; contradictions are refused here, by name.

Invariant: no component is known by name; its declared members say what it can do.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from rlvr import registry
from rlvr.components import AdvantageComponent, Correction, Loss, LossComponent, Selector, SequenceLoss
from rlvr.config import AlgorithmConfig, ComponentSpec, Config, KLConfig, OptimConfig
from rlvr.config.stage_plan import StagePlan
from rlvr.core.needs import BEHAVIOUR, Need
from rlvr.errors import ConfigError, nearest
from rlvr.losses import Divergence, EntropyBonus, KLPenalty, Objective, ObjectiveTerm, Renewal
from rlvr.rollout.vllm.options import deviations
from rlvr.stages.grpo.reference_penalty import ReferencePenalty

log = logging.getLogger(__name__)


def build_objective(plan: StagePlan, shares_weights: bool) -> Objective:
    """The policy loss with the KL, entropy and auxiliary terms that the algorithm asks for.

    `shares_weights`: the engine computes with the trainer's own weights, so that `correction: auto` is none.
    """
    algorithm = plan.config.algorithm
    loss: Loss | SequenceLoss = registry.build("loss", algorithm.loss)
    name = algorithm.loss.name
    _check_loss(loss, name, plan.config.rollout.group_size)
    _check_moves(loss, name, plan.config.optim)
    of_responses = isinstance(loss, SequenceLoss)
    # A loss that reads behaviour log-probs weighs by them already; a second weight would count the ratio twice. A loss
    # of whole responses has no weight per token.
    corrects_itself = of_responses or Need("logprobs", BEHAVIOUR) in loss.needs
    if algorithm.token_select and of_responses:
        raise ConfigError(
            f"algorithm.token_select leaves out single tokens, and the loss {name!r} is one of whole responses: set "
            "token_select to [] or choose a loss of tokens"
        )
    keep = tuple(registry.build("token_selector", spec) for spec in algorithm.token_select)
    # Rollouts of groups whose rewards are all the same then cost no pass, if no other term needs them.
    skips = loss.zero_without_advantage
    components = [ObjectiveTerm("policy", loss, "policy", algorithm.loss_coef, skips, not corrects_itself, keep)]
    components += _kl(algorithm, loss, of_responses)
    if algorithm.entropy != 0.0:
        # The same tokens as the policy loss: an entropy bonus at tokens that are left out would work against their
        # exclusion.
        of_entropy = (*keep, *(registry.build("token_selector", spec) for spec in algorithm.entropy_select))
        bonus = EntropyBonus(loss.average)
        components.append(ObjectiveTerm("entropy", bonus, "policy", algorithm.entropy, keep=of_entropy))
    elif algorithm.entropy_select:
        raise ConfigError("algorithm.entropy_select is of the entropy bonus, and there is none: set algorithm.entropy")
    components += _auxiliary(algorithm, plan.config.rollout.group_size)
    if algorithm.loss_coef == 0.0 and len(components) == 1:
        raise ConfigError(
            "algorithm.loss_coef is 0 and the policy loss is the only term: set loss_coef above 0, or add a term to "
            "algorithm.auxiliary"
        )
    # Dr. GRPO divides by the longest response that can be sampled.
    constant = loss.constant or plan.config.rollout.max_new_tokens
    correction = _correction(algorithm, name, corrects_itself, shares_weights)
    kl = algorithm.kl or KLConfig()
    renewal = None if kl.renew_every is None else Renewal(kl.renew_every, kl.renew_mix)
    objective = Objective(tuple(components), float(constant), correction, algorithm.decoupled, renewal)
    # A penalty in rewards or advantages compares with the reference too, without being a term of the objective.
    compared = objective.needs_reference or build_penalty(algorithm) is not None
    if objective.renewal is not None and not compared:
        raise ConfigError(
            "algorithm.kl.renew_every renews the reference, and nothing is compared with it: set algorithm.kl.coef, or "
            "renew_every to null"
        )
    return objective


def build_penalty(algorithm: AlgorithmConfig) -> ReferencePenalty | None:
    """Return the penalty that takes the divergence from the reference from rewards or advantages; None where there is
    none."""
    kl = algorithm.kl
    if kl is None or kl.coef == 0.0 or kl.where == "loss":
        return None
    return ReferencePenalty(_divergence(kl), kl.coef, kl.where)


def _divergence(kl: KLConfig) -> Divergence:
    """The estimator that the section asks for."""
    if kl.gradient is None:
        gradient = None
    else:
        gradient = registry.build("kl", kl.gradient)
    return Divergence(registry.build("kl", kl.estimator), gradient, kl.bound)


def _check_loss(loss: Loss | SequenceLoss, name: str, group_size: int) -> None:
    if loss.constant is not None and loss.average != "constant":
        raise ConfigError(
            f"algorithm.loss {name!r}: constant={loss.constant} is the length that the constant average divides by, "
            f"and average is {loss.average!r}: set average to constant, or leave constant out"
        )
    check_group_size(group_size, loss, f"the loss {name!r}")


def _check_moves(loss: Loss | SequenceLoss, name: str, optim: OptimConfig) -> None:
    """Refuse a loss of the log-ratio where that is always 0: the first optimizer step of a batch compares with the
    policy as it is then, whatever policy sampled the batch, and there is no second one."""
    if loss.degenerate_on_policy and optim.updates_per_batch * optim.epochs_per_batch == 1:
        raise ConfigError(
            f"the loss {name!r} is of the log-ratio to the policy before the update, which is 0 in the first optimizer "
            "step of a batch, and there is one (optim.updates_per_batch=1, epochs_per_batch=1): set "
            "optim.updates_per_batch to 2 or more"
        )


def check_group_size(
    group_size: int, component: AdvantageComponent | Selector | LossComponent, called: str, otherwise: str = ""
) -> None:
    """ConfigError where a component compares more members of a group than there are."""
    smallest = component.smallest_group
    if group_size < smallest:
        raise ConfigError(
            f"rollout.group_size is {group_size}, and {called} compares the members of a group: set "
            f"rollout.group_size to {smallest} or more{otherwise}"
        )


def _kl(algorithm: AlgorithmConfig, loss: Loss | SequenceLoss, of_responses: bool) -> list[ObjectiveTerm]:
    kl = algorithm.kl
    if kl is None or kl.coef == 0.0:
        if kl is not None and kl.scale is not None:
            raise ConfigError(
                "algorithm.kl.scale multiplies algorithm.kl.coef, which is 0: set coef above 0, or scale to null"
            )
        return []
    if kl.where == "loss":
        penalty = KLPenalty(_divergence(kl), loss.average, kl.weighted)
        return [ObjectiveTerm("kl", penalty, "policy", kl.coef, by_token=kl.scale is not None)]
    for option, neutral in (("gradient", None), ("weighted", False)):
        # Options of the term's gradient, which a penalty in rewards does not have.
        if getattr(kl, option) != neutral:
            raise ConfigError(
                f"algorithm.kl.{option} is about the gradient of the term in the loss, and algorithm.kl.where is "
                f"{kl.where!r}, where it has none: set where to loss, or leave {option} out"
            )
    if of_responses:
        raise ConfigError(
            f"algorithm.kl.where is {kl.where!r}, and the loss {algorithm.loss.name!r} reads the rewards as the "
            "verifier gave them: set algorithm.kl.where to loss"
        )
    return []


def _auxiliary(algorithm: AlgorithmConfig, group_size: int) -> list[ObjectiveTerm]:
    components: list[ObjectiveTerm] = []
    for spec in algorithm.auxiliary:
        kind = spec.short_name
        # Two terms of one kind are told apart in metrics and weights as NAME and NAME#2.
        count = sum(c.name.partition("#")[0] == kind for c in components)
        name = f"{kind}#{count + 1}" if count else kind
        if name in ("policy", "kl", "entropy"):
            raise ConfigError(
                f"algorithm.auxiliary: {name!r} is the name of another term of the loss: rename the class"
            )
        loss: Loss | SequenceLoss = registry.build("auxiliary", spec)
        check_group_size(group_size, loss, f"the auxiliary loss {kind!r}")
        in_reward = algorithm.kl is not None and algorithm.kl.coef != 0.0 and algorithm.kl.where == "reward"
        if isinstance(loss, SequenceLoss) and in_reward:
            raise ConfigError(
                f"algorithm.kl.where is 'reward', and the auxiliary loss {kind!r} reads the rewards as the verifier "
                "gave them: set algorithm.kl.where to loss or advantage"
            )
        weights = name if loss.has_weights else "policy"
        components.append(ObjectiveTerm(name, loss, weights, spec.coef))
    return components


def _correction(
    algorithm: AlgorithmConfig, name: str, corrects_itself: bool, shares_weights: bool
) -> Correction | None:
    spec = algorithm.correction
    automatic = spec is not None and spec.name == "auto"
    if corrects_itself:
        if spec is not None and not automatic:
            raise ConfigError(
                f"algorithm.correction weighs tokens by their ratio to the policy that sampled, and the loss {name!r} "
                "weighs by that itself or not at all: set correction to null"
            )
        return None
    if automatic:
        # With the trainer's own weights the engine's log-probs differ by rounding alone, and are of the newest version.
        spec = None if shares_weights else ComponentSpec("truncate")
    if spec is None:
        return None
    return registry.build("correction", spec)


def check_reads(objective: Objective, config: Config, sources: Collection[str | None]) -> None:
    """ConfigError where a loss reads the column of a source that no task has, or of spans that no term scores."""
    known = {"span": [term.column for term in config.rewards], "source": sorted(filter(None, sources))}
    for component in objective.components:
        if component.reads and isinstance(component.loss, SequenceLoss):
            raise ConfigError(
                f"the loss of {component.name!r} is one of whole responses and reads no columns: leave `reads` out"
            )
        for name in component.reads:
            kind, _, own = name.partition("/")
            if kind in known and own not in known[kind]:
                what = "no reward is called so" if kind == "span" else "no task is of that source"
                raise ConfigError(
                    f"the loss of {component.name!r} reads {name!r}, and {what}{nearest(own, known[kind])}"
                )


def check_shares(objective: Objective, algorithm: AlgorithmConfig) -> None:
    """ConfigError where a loss reads a part `advantage/NAME` of the advantage that the estimator does not make, or that
    something changes the advantage after."""
    estimator = algorithm.advantage
    for component in objective.components:
        shares = [name for name in component.reads if name.startswith("advantage/")]
        if not shares:
            continue
        makes: Sequence[str] = registry.build("advantage", estimator).makes
        kind, name = ("loss", algorithm.loss.name) if component.name == "policy" else ("auxiliary loss", component.name)
        for share in shares:
            if share not in makes:
                raise ConfigError(
                    f"the {kind} {name!r} reads the column {share!r}, which the advantage {estimator.name!r} does not "
                    f"make: {_made_by(share)}"
                )
        # The estimator makes the parts, and what comes after it is of their sum alone.
        if later := _after_the_estimator(algorithm):
            raise ConfigError(
                f"the {kind} {name!r} reads the column {shares[0]!r} as the advantage {estimator.name!r} makes it, "
                f"which {later} does not change: leave {later} out, or choose another loss"
            )


def _made_by(column: str) -> str:
    """Name the estimators that make the column and need no options."""
    makers = []
    for name in registry.names("advantage"):
        try:
            made = registry.build("advantage", name).makes
        except ConfigError:  # it needs an option, or its package cannot be imported
            continue
        if column in made:
            makers.append(name)
    if not makers:
        return "no advantage does; an estimator lists its columns in `makes`"
    return f"set algorithm.advantage to {' or '.join(makers)}, or choose another loss"


def _after_the_estimator(algorithm: AlgorithmConfig) -> str | None:
    """The first key that changes advantages after the estimator; None where none does."""
    if algorithm.modifiers:
        return "algorithm.modifiers"
    if (penalty := build_penalty(algorithm)) is not None and penalty.where == "advantage":
        return "algorithm.kl.where: advantage"
    return None if algorithm.splice is None else "algorithm.splice"


def warn_uncorrected(config: Config, objective: Objective) -> None:
    """Warn where the engine's log-probs differ from the trainer's by more than rounding and no weight corrects for
    it."""
    options = deviations(config.rollout)
    corrects_itself = Need("logprobs", BEHAVIOUR) in objective.needs
    if options and objective.correction is None and not corrects_itself:
        log.warning(
            "rollout.engine has %s, so that its log-probs differ from the trainer's by more than rounding, and "
            "algorithm.correction is null: set it to auto or truncate. mismatch/mean says how far they are apart; "
            "`health: {mismatch: stop}` ends a run in which it stays above 0.05",
            ", ".join(options),
        )
