"""The stages of a run as planned: each with its kind, its share of the steps, and the whole tree as it stands during
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field, ValidationError

from rlvr import registry
from rlvr.config import Config, Section
from rlvr.config.algorithm import without_preset
from rlvr.config.config_loading import make_config, problems
from rlvr.core.specs import ComponentSpec
from rlvr.core.tree import merge
from rlvr.errors import ConfigError

STAGE_SECTIONS = ("data", "rollout", "verifier", "verifiers", "rewards", "algorithm", "optim", "evaluation")
"""The parts of the tree that a stage may override."""


class _StageSpec(ComponentSpec):
    """The kind of a stage and its options."""

    extra_keys = (*STAGE_SECTIONS, "kind", "name", "steps")


class StagePlan(Section):
    """One stage, resolved: its kind and options, its share of the steps, and the whole tree as it stands during it."""

    kind: str
    """The registered kind of stage."""
    name: str
    """The name of the stage in messages and metrics."""
    steps: int | None = Field(ge=0)
    """Its share of the steps, which its schedules go over; null: what `run.steps` leaves, or what `run.epochs` makes
    of its tasks."""
    allowed: int = 0
    """Number of steps that the stage makes: `steps`, or fewer where `run.steps` is reached before."""
    before: int = 0
    """Steps of the stages before it."""
    options: dict[str, Any]
    """Options of the kind itself."""
    config: Config
    """The tree during this stage."""


def stage_plans(config: Config) -> list[StagePlan]:
    """The stages of a run in order, each checked; ConfigError names the stage and key."""
    if config.run.seeds:
        raise ConfigError("run.seeds is a run for each seed: python -m rlvr.train makes them; in Python, set run.seed")
    plans = []
    for number, written in enumerate(config.stages or [{"kind": "grpo"}]):
        if "kind" not in written:
            raise ConfigError(f"stages[{number}]: a stage needs a `kind`: one of {', '.join(registry.names('stage'))}")
        kind = written["kind"]
        overrides = {k: v for k, v in written.items() if k in STAGE_SECTIONS}
        if not isinstance(kind, str):
            raise ConfigError(f"stages[{number}].kind is a name, not {kind!r}")
        options = {k: v for k, v in written.items() if k not in (*STAGE_SECTIONS, "kind", "name", "steps")}
        for key in options:
            if key in Config.model_fields:
                raise ConfigError(
                    f"stages[{number}].{key}: this section holds for the whole run; a stage cannot change it"
                )
        try:
            registry.check_options("stage", _StageSpec(kind, options))
        except ConfigError as error:
            known = ""
            if "no option" in str(error):
                known = f" (sections that a stage may override: {', '.join(STAGE_SECTIONS)})"
            raise ConfigError(f"stages[{number}]: {error}{known}") from error
        # Without the stages, so that a stage does not hold all the others.
        tree = config.dump() | {"stages": []}
        if isinstance(overrides.get("algorithm"), dict) and "preset" in overrides["algorithm"]:
            tree["algorithm"] = without_preset(tree["algorithm"])
        resolved = make_config(merge(tree, overrides), where=f"stages[{number}].")
        # Sampling of a stage may differ in every other way.
        if resolved.rollout.engine != config.rollout.engine:
            raise ConfigError(f"stages[{number}].rollout.engine: one engine serves the whole run; set rollout.engine")
        name = written.get("name", kind)
        steps = written.get("steps")
        try:
            plan = StagePlan(kind=kind, name=name, steps=steps, options=options, config=resolved)
        except ValidationError as error:
            lines = "\n".join(f"  stages[{number}].{line}" for line in problems(error, StagePlan))
            raise ConfigError(f"the configuration is wrong:\n{lines}") from error
        plans.append(plan)
    if config.run.epochs is not None and all(plan.steps is not None for plan in plans):
        raise ConfigError(
            "run.epochs is for stages without `steps`, and every stage has its own: leave one of them out"
        )
    return _share_steps(plans, config.run.steps, config.run.epochs)


def set_steps_of_epochs(plans: Sequence[StagePlan], epochs: float, tasks: Callable[[Config], int]) -> None:
    """Give the stages that have no steps those of `epochs` passes over their tasks, whose number `tasks` returns."""
    before = 0
    for plan in plans:
        if plan.steps is None:
            plan.steps = math.ceil(epochs * tasks(plan.config) / plan.config.rollout.prompts_per_step)
            plan.allowed = plan.steps
        plan.before = before
        before += plan.allowed


def longest_sequence(plans: Sequence[StagePlan], longest_evaluated: Callable[[StagePlan], int]) -> int | None:
    """Tokens of the longest prompt and response together that the stages and their evaluations sample.

    `longest_evaluated(plan)` is the tokens of the longest prompt that a stage is evaluated on, 0 without any, since
    `data.max_prompt_tokens` leaves out training tasks alone; it reads them, and is called only where there is a bound.
    None where the configuration sets none: without `data.max_prompt_tokens`, and where an environment adds to a
    sequence.
    """
    longest = 0
    for plan in plans:
        data = plan.config.data
        rollout = plan.config.rollout
        evaluation = plan.config.evaluation
        # A plan of several turns puts replies into the context, whose length nobody knows before.
        if data.max_prompt_tokens is None or rollout.plan.name != "single_turn":
            return None
        longest = max(longest, data.max_prompt_tokens + rollout.max_new_tokens)
        if prompt := longest_evaluated(plan):
            longest = max(longest, prompt + (evaluation.max_new_tokens or rollout.max_new_tokens))
    return longest


def _share_steps(plans: list[StagePlan], cap: int | None, epochs: float | None) -> list[StagePlan]:
    """Give every stage its share of the steps, its own or what the cap leaves, and how many of it the cap allows.

    With `epochs` a stage without steps keeps none: `set_steps_of_epochs` sets them once the tasks are known.
    """
    # Steps of `run.steps` that the stages before leave; None: no cap.
    remaining = cap
    before = 0
    for plan in plans:
        if plan.steps is None and remaining is None:
            if epochs is not None:
                continue
            raise ConfigError(
                f"stage {plan.name!r} has no number of steps: set run.steps, run.epochs or the stage's `steps`"
            )
        # `steps` is what the schedules go over, and stays whole where the cap cuts the stage short: `allowed` is then
        # less, and a run that goes on with a larger cap continues the same schedule.
        plan.steps = remaining if plan.steps is None else plan.steps
        plan.allowed = plan.steps or 0
        if remaining is not None:
            plan.allowed = min(plan.allowed, remaining)
            remaining -= plan.allowed
        plan.before = before
        before += plan.allowed
    return plans
