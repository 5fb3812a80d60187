"""Groups that are drawn anew for those that selection drops: dynamic sampling by selection, in rounds.

A round is scored on all ranks, with nothing being sampled meanwhile, so that rewards may need the policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from rlvr.components import RewardTerm
from rlvr.config import Config
from rlvr.errors import ConfigError
from rlvr.records import Rollout
from rlvr.rollout import StepRollouts


def draw_of(rollout: Rollout) -> str:
    """The number of a rollout's draw; a group's name is it, or begins with it (`3/1`)."""
    return rollout.group.partition("/")[0]


def redraws(config: Config) -> bool:
    """Return True if dynamic sampling is by selection."""
    dynamic = config.rollout.dynamic_sampling
    return dynamic is not None and dynamic.by == "selection"


def check_redraw(config: Config) -> None:
    """ConfigError where groups are to be drawn anew by a selection that is not known in time."""
    if not redraws(config):
        return
    rollout = config.rollout
    algorithm = config.algorithm
    assert rollout.dynamic_sampling is not None
    supervised = algorithm.supervised_steps is not None
    problems = {
        "algorithm.select is empty: name a selector there": not algorithm.select,
        "algorithm.select_after selects when all are sampled: set it to false": algorithm.select_after,
        "rollout.staleness samples steps ahead: set it to 0": rollout.staleness > 0,
        "oversample cuts off groups while others are sampled: set it to 1": rollout.dynamic_sampling.oversample > 1,
        "algorithm.supervised_steps has steps without a selection: set it to null": supervised,
    }
    for problem, there in problems.items():
        if there:
            raise ConfigError(
                "rollout.dynamic_sampling.by=selection replaces the groups that selection drops, and "
                f"{problem}, or set by to rewards"
            )


def check_terms(config: Config, terms: Iterable[tuple[str, RewardTerm]]) -> None:
    """ConfigError for a reward with a memory, which would take each round for a step."""
    if not redraws(config):
        return
    for name, term in terms:
        if term.remembers or term.monitoring is not None:
            raise ConfigError(
                f"rewards: {name!r} follows the run step by step, and with rollout.dynamic_sampling.by=selection a "
                "step is scored in rounds: leave the term out, or set by to rewards"
            )


def drop_draws(collected: StepRollouts, kept: Collection[str]) -> None:
    """Move the rollouts of draws that are not kept to those that are dropped, with their columns."""
    assert collected.columns is not None, "rollouts are scored before any is dropped"
    everyone = [*collected.rollouts, *collected.dropped]
    stays = np.asarray([draw_of(rollout) in kept for rollout in collected.rollouts], dtype=bool)
    dropped = np.arange(len(collected.rollouts), len(everyone))
    order = np.concatenate([np.flatnonzero(stays), dropped, np.flatnonzero(~stays)]).astype(np.int64)
    count = int(stays.sum())
    collected.rollouts = [everyone[i] for i in order[:count]]
    collected.dropped = [everyone[i] for i in order[count:]]
    collected.columns = {name: values[order] for name, values in collected.columns.items()}


def add_round(collected: StepRollouts, further: StepRollouts) -> None:
    """Add a further round, scored, to what was collected."""
    assert collected.columns is not None and further.columns is not None, "rounds are scored before they are joined"
    first = len(collected.rollouts)
    second = len(further.rollouts)
    columns = {}
    for name in collected.columns | further.columns:
        # A column that one round lacks is unknown there.
        own = collected.columns.get(name, np.full(first + len(collected.dropped), np.nan))
        new = further.columns.get(name, np.full(second + len(further.dropped), np.nan))
        columns[name] = np.concatenate([own[:first], new[:second], own[first:], new[second:]])
    collected.columns = columns
    collected.rollouts = [*collected.rollouts, *further.rollouts]
    collected.dropped = [*collected.dropped, *further.dropped]
    collected.verifying += further.verifying
    collected.ready = further.ready
    collected.further = None
