"""Training on responses that were sampled from a truncated distribution (`rollout.top_p`, `top_k`, `min_p`)."""

from __future__ import annotations

from rlvr import registry
from rlvr.components import AdvantageComponent, RewardTerm
from rlvr.config import Config
from rlvr.core.needs import BEHAVIOUR_LOGPROBS
from rlvr.errors import ConfigError
from rlvr.losses import Objective
from rlvr.rewards import build_terms, walk


def check_truncation(config: Config, objective: Objective) -> None:
    """ConfigError where sampling is truncated and that was not asked for or the other way round, or a ratio would be
    taken to it.

    The engine's log-probs are those of the truncated distribution, the policy's those of the whole one: their ratio is
    the probability that truncation kept, whatever the policy did since.
    """
    rollout = config.rollout
    # The neutral values are the defaults: top_p 1, top_k and min_p 0.
    defaults = {name: type(rollout).model_fields[name].default for name in ("top_p", "top_k", "min_p")}
    values = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p}
    name = next((name for name, value in values.items() if value != defaults[name]), None)
    if name is None:
        if config.algorithm.truncated_sampling:
            raise ConfigError(
                "algorithm.truncated_sampling accepts rollout.top_p, top_k and min_p, and none is set: set one of them "
                "or truncated_sampling to false"
            )
        return
    if not config.algorithm.truncated_sampling:
        raise ConfigError(
            f"rollout.{name}={values[name]} cannot be trained on: the policy's log-probs are those of the whole "
            f"distribution, not of a truncated one. Set it to {defaults[name]}, or algorithm.truncated_sampling to "
            f"true to accept the bias; evaluation.{name} is free"
        )
    what = f"rollout.{name}={values[name]}: the engine's log-probs are those of the truncated distribution, and "
    if objective.correction is not None:
        raise ConfigError(f"{what}algorithm.correction would take the truncation for a fault of it: set it to null")
    for component in objective.components:
        if BEHAVIOUR_LOGPROBS in component.loss.needs:
            raise ConfigError(f"{what}the loss of {component.name!r} reads them: sample without truncation")
    for key, read_by in _scoring(config):
        if read_by.reads_behaviour_logprobs:
            raise ConfigError(f"{what}{key} reads them: sample without truncation, or leave it out")
    updates = config.optim.updates_per_batch * config.optim.epochs_per_batch
    if updates > 1 and not objective.recalls_update:
        raise ConfigError(
            f"{what}later optimizer steps take their ratio to them: set algorithm.decoupled to true, or "
            "optim.updates_per_batch and epochs_per_batch to 1"
        )


def _scoring(config: Config) -> list[tuple[str, RewardTerm | AdvantageComponent]]:
    """The parts of rewards and advantages, each with its key and name."""
    algorithm = config.algorithm
    terms = [(f"rewards: {term.name!r}", term.function) for term in walk(build_terms(config.rewards))]
    advantage = algorithm.advantage
    modifiers = [(f"algorithm.modifiers: {m.name!r}", registry.build("modifier", m)) for m in algorithm.modifiers]
    return [*terms, (f"algorithm.advantage: {advantage.name!r}", registry.build("advantage", advantage)), *modifiers]
