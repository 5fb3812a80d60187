"""The values that replaced `auto` in the configuration of a checkpoint, stage by stage."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.config import Config
from rlvr.config.stage_plan import StagePlan, stage_plans
from rlvr.core.tree import merge
from rlvr.planner.planner import with_tokens

CHECKPOINTING = "model.gradient_checkpointing"
TOKENS = "optim.micro_batch_tokens"


def automatic_keys(config: Config) -> list[str]:
    """The keys of the configuration that leave their value to the memory plan."""
    keys = []
    if config.model.gradient_checkpointing == "auto":
        keys.append(CHECKPOINTING)
    if config.optim.micro_batch_tokens == "auto":
        keys.append(TOKENS)
    for number, stage in enumerate(config.stages):
        if _section(stage, "optim").get("micro_batch_tokens") == "auto":
            keys.append(f"stages.{number}.{TOKENS}")
    return keys


def with_saved(config: Config, saved: Mapping[str, Any]) -> Config:
    """`config` with what the configuration `saved` of a checkpoint has in place of each `auto`."""
    model = config.model
    if model.gradient_checkpointing == "auto":
        kept = saved["model"].get("gradient_checkpointing", "auto")
        model = model.model_copy(update={"gradient_checkpointing": kept})
    optim = config.optim
    if optim.micro_batch_tokens == "auto":
        optim = optim.model_copy(update={"micro_batch_tokens": _tokens(saved["optim"])})
    # a configuration of other stages is refused later, by the names of its keys
    before = itertools.chain(saved.get("stages", []), itertools.repeat({}))
    stages = [
        with_tokens(stage, _tokens(merge(saved["optim"], _section(own, "optim"))))
        for stage, own in zip(config.stages, before, strict=False)
    ]
    return config.model_copy(update={"model": model, "optim": optim, "stages": stages})


def put_values(values: Config, config: Config, stages: Sequence[StagePlan]) -> None:
    """Put the values that `auto` has in `values` into the configuration of a run and of its stages, in place: parts of
    the run hold these."""
    config.model.gradient_checkpointing = values.model.gradient_checkpointing
    config.optim.micro_batch_tokens = values.optim.micro_batch_tokens
    config.stages[:] = values.stages
    for stage, other in zip(stages, stage_plans(values), strict=True):
        stage.config.model.gradient_checkpointing = other.config.model.gradient_checkpointing
        stage.config.optim.micro_batch_tokens = other.config.optim.micro_batch_tokens


def setting(config: Config, key: str) -> str:
    """The value of one of `automatic_keys` as it is written in YAML."""
    value: Any = config.dump()
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        else:
            value = value[part]
    return "null" if value is None else str(value).lower()


def _section(stage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a stage as written."""
    section = stage.get(name)
    return section if isinstance(section, dict) else {}


def _tokens(saved: Mapping[str, Any]) -> Any:
    """The tokens of a micro-batch in the section `optim` of a checkpoint; `auto` where it had a number of completions
    instead."""
    if saved.get("micro_batch_size") is not None:
        return "auto"
    return saved.get("micro_batch_tokens", "auto")
