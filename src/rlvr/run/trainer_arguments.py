"""The arguments of GRPOTrainer under our names and under TRL's, and the configuration that they make together.

Invariants: every setting is given once: as a keyword, or in the configuration. What is given as an object (a function,
tasks, a model) stays beside the configuration; `rlvr.run.given_objects` writes it down for the run folder.

Source of TRL's names: TRL 1.16, trl/trainer/grpo_trainer.py and grpo_config.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from rlvr import registry
from rlvr.config import Config
from rlvr.config.algorithm import without_preset
from rlvr.config.config_loading import config_tree, load_config, make_config
from rlvr.config.peer_names import TRL, peer_answer
from rlvr.config.stage_plan import stage_plans
from rlvr.core.calling import name_of
from rlvr.core.specs import ComponentSpec
from rlvr.core.tree import merge, nested
from rlvr.data import TaskSource
from rlvr.errors import ConfigError, nearest
from rlvr.policy.foreign import foreign
from rlvr.verifiers import Verifier

OneReward = Verifier | type[Verifier] | Callable[..., Any] | str | Mapping[str, Any]
"""A verifier, a plain function (`rlvr.core.calling` says which arguments it may ask for), or a component as YAML has
it."""
Rewards = OneReward | Sequence[OneReward | tuple[OneReward, float]]
"""One of them, or a list of them, each alone or as (it, weight)."""
WrittenConfig = Config | Mapping[str, Any] | str | Path
"""A configuration, a mapping of its sections, or a YAML file or published recipe."""


class TrainerSettings(TypedDict, total=False):
    """Keywords of GRPOTrainer beside its own: TRL's names of its arguments, and common settings by TRL's names."""

    train_dataset: TaskSource
    """`tasks`."""
    reward_funcs: Rewards
    """`verifier`."""
    eval_dataset: TaskSource
    """`eval_tasks`."""
    processing_class: PreTrainedTokenizerBase
    """`tokenizer`."""
    args: WrittenConfig
    """`config`."""
    reward_weights: Sequence[float]
    """Weights of `reward_funcs`, in their order, in place of pairs."""
    peft_config: Any
    """`model.adapter`: a mapping of its keys, or peft's own LoraConfig."""
    output_dir: str | Path | None
    """The run folder: `run.dir` and `run.name`."""
    run_name: str
    """`run.name`."""
    seed: int
    """`run.seed`."""
    max_steps: int
    """`run.steps`: batches, where TRL counts updates. -1 counts as not given."""
    num_train_epochs: float
    """`run.epochs`."""
    learning_rate: float
    """`optim.lr`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    """`optim.schedule`."""
    warmup_steps: int
    """`optim.warmup_steps`."""
    max_grad_norm: float
    """`optim.max_grad_norm`."""
    num_iterations: int
    """`optim.epochs_per_batch`."""
    prompts_per_step: int
    """`rollout.prompts_per_step`; our own name, since TRL derives the number from its batch sizes."""
    num_generations: int
    """`rollout.group_size`."""
    max_completion_length: int
    """`rollout.max_new_tokens`."""
    temperature: float
    """`rollout.temperature`."""
    use_vllm: bool
    """`rollout.engine`: vllm, or hf."""
    loss_type: str
    """`algorithm.preset`."""
    beta: float
    """`algorithm.kl.coef`."""
    gradient_checkpointing: bool
    """`model.gradient_checkpointing`."""
    eval_steps: int
    """`evaluation.every`: batches, where TRL counts updates."""
    save_steps: int
    """`checkpoint.every`: batches, where TRL counts updates."""
    save_total_limit: int
    """`checkpoint.keep`."""


OTHER_NAMES = {
    "train_dataset": "tasks",
    "reward_funcs": "verifier",
    "eval_dataset": "eval_tasks",
    "processing_class": "tokenizer",
    "args": "config",
}
"""TRL's name of an argument -> ours."""

_AS_IN_TRL = (
    "run_name",
    "seed",
    "max_steps",
    "num_train_epochs",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "max_grad_norm",
    "num_iterations",
    "num_generations",
    "max_completion_length",
    "temperature",
    "loss_type",
    "gradient_checkpointing",
    "eval_steps",
    "save_steps",
    "save_total_limit",
)
KEYS = {
    **{name: TRL[name].partition(",")[0] for name in _AS_IN_TRL},
    "prompts_per_step": "rollout.prompts_per_step",
    "beta": "algorithm.kl.coef",
}
"""Keyword -> the key that it sets to its value. `output_dir`, `use_vllm` and `peft_config` are put into other words."""

NOT_GIVEN = (("max_steps", -1), ("run_name", None), ("eval_steps", None))
"""Values by which TRL says that an argument is not given."""


@dataclass
class TrainerArguments:
    """The configuration that a trainer was given, and the objects beside it."""

    config: Config
    model: torch.nn.Module | None
    tasks: Any
    eval_tasks: Any
    tokenizer: PreTrainedTokenizerBase | None
    verifier: Any
    verifiers: dict[str, Any] = field(default_factory=dict)
    """Further verifiers that were given as objects, by the name of their verdicts: all but the first of a list."""


def trainer_arguments(
    own: Mapping[str, Any], settings: Mapping[str, Any], names: Sequence[str] = ("resume", "trackers", "callbacks")
) -> TrainerArguments:
    """The arguments of GRPOTrainer together: `own` under our names, None where not given, `settings` under others.

    `names` are its further arguments, for the suggestion of the nearest one. ConfigError names an unknown argument with
    ours for TRL's and verl's, what is given twice, and what is wrong in the configuration: before ranks wait for each
    other.
    """
    # First of all: a script that is only imported for its components (by a worker, or to find a verifier) stops here,
    # before it trains.
    registry.leave_loaded_script()
    for name in settings:
        if name not in TrainerSettings.__annotations__:
            raise ConfigError(f"GRPOTrainer has no argument {name!r}{_suggestion(name, (*own, *names))}")
    given = dict(own)
    for other, name in OTHER_NAMES.items():
        if other in settings:
            if given[name] is not None:
                raise ConfigError(f"GRPOTrainer: {other} is TRL's name of {name}, and both are given: leave one out")
            given[name] = settings[other]
    config, model = given["config"], given["model"]
    refuse_foreign_config(config)
    verifier, verifiers, over = _rewards(given["verifier"], settings.get("reward_weights"))
    for keyword, keys in _keyed(settings).items():
        over = _with_keys(over, config, keyword, keys)
    made = _with_settings(config, over, "verifier" if given["verifier"] is own["verifier"] else "reward_funcs")
    if isinstance(model, (str, Path)):
        # `scratch` goes, since a model is loaded or built, and the argument is the one that was given last.
        named = made.model.model_copy(update={"path": str(model), "scratch": None})
        made = made.model_copy(update={"model": named})
        model = None
    # Called for its errors: a wrong stage is refused before the ranks meet and a model is loaded.
    stage_plans(made)
    return TrainerArguments(made, model, given["tasks"], given["eval_tasks"], given["tokenizer"], verifier, verifiers)


def check_steps(steps: Any, closed: bool) -> None:
    """ConfigError where the trainer is closed, or the `steps` of `GRPOTrainer.train` are no number of steps."""
    if closed:
        raise ConfigError("GRPOTrainer.train: the trainer is closed: make another one, with resume= to go on")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 0):
        raise ConfigError(f"GRPOTrainer.train: steps is {steps!r}: give the number of steps to run")


def refuse_foreign_config(config: Any) -> None:
    """ConfigError for a GRPOConfig of TRL: it lists what was set there, each setting with ours."""
    # By its fields: TRL need not be installed.
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        if config is None or isinstance(config, (Config, Mapping, str, Path)):
            return
        raise ConfigError(
            f"GRPOTrainer: a configuration is a rlvr.Config, a mapping or a file, not {type(config).__name__}"
        )
    lines = []
    for one in dataclasses.fields(config):
        value = foreign(config, one.name)
        default = one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        if value == default or one.name not in TRL:
            continue
        if one.name in TrainerSettings.__annotations__:
            lines.append(f"  {one.name}={value!r}: a keyword of GRPOTrainer")
        else:
            lines.append(f"  {one.name}={value!r}: {peer_answer(one.name)}")
    raise ConfigError(
        f"GRPOTrainer: args is a {type(config).__name__} of another library. Give its settings as keywords of "
        "GRPOTrainer or in `config`. It sets\n" + "\n".join(lines)
    )


def _suggestion(name: str, names: Sequence[str]) -> str:
    if (answer := peer_answer(name)) is not None:
        return f": {answer}, in `config`" if "here it is" in answer else f": {answer}"
    return nearest(name, [*names, *TrainerSettings.__annotations__])


# keywords


def _keyed(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Keyword -> the keys of the configuration that it sets, with their values."""
    given = {keyword: value for keyword, value in settings.items() if (keyword, value) not in NOT_GIVEN}
    found = {keyword: {KEYS[keyword]: value} for keyword, value in given.items() if keyword in KEYS}
    if settings.get("output_dir") is not None:
        folder = _run_folder(settings["output_dir"])
        found["output_dir"] = {"run.dir": str(folder.parent), "run.name": folder.name}
    if "use_vllm" in settings:
        if not isinstance(settings["use_vllm"], bool):
            raise ConfigError(f"GRPOTrainer: use_vllm is {settings['use_vllm']!r}: give True or False")
        found["use_vllm"] = {"rollout.engine": "vllm" if settings["use_vllm"] else "hf"}
    if "peft_config" in settings:
        found["peft_config"] = {"model.adapter": _adapter(settings["peft_config"])}
    return {keyword: {path: _plain(value) for path, value in keys.items()} for keyword, keys in found.items()}


def _plain(value: Any) -> Any:
    """A section as a mapping of what was set in it; anything else as it is."""
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value


def _run_folder(written: Any) -> Path:
    """The run folder that `output_dir` gives. ConfigError where it has no name of its own: `.`, `..`, `/` or `~`."""
    # Path("") and Path(".") have the name "".
    if not isinstance(written, (str, Path)) or Path(written).name in ("", "..", "~"):
        shown = repr(str(written) if isinstance(written, Path) else written)
        raise ConfigError(f"GRPOTrainer: output_dir is {shown}: give the folder of the run, such as runs/sums")
    return Path(written)


def _adapter(written: Any) -> Any:
    """The section `model.adapter` from peft's LoraConfig; anything else as it is."""
    if written is None or isinstance(written, (BaseModel, Mapping)):
        return written
    if type(written).__name__ != "LoraConfig":
        raise ConfigError(
            f"GRPOTrainer: peft_config is {type(written).__name__}: give a LoraConfig of peft or a mapping of "
            "model.adapter"
        )
    adapter = {
        "r": foreign(written, "r"),
        "alpha": foreign(written, "lora_alpha"),
        "dropout": foreign(written, "lora_dropout"),
    }
    targets = foreign(written, "target_modules")
    if targets is not None:
        # peft keeps a list as a set.
        adapter["target_modules"] = targets if isinstance(targets, str) else sorted(targets)
    return adapter


def _with_keys(over: dict[str, Any], config: Any, keyword: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The tree `over` with a keyword's keys. ConfigError where another keyword or the configuration sets one of
    them."""
    for path, value in keys.items():
        if _is_set(over, path):
            other = next((other for other, key in KEYS.items() if key == path and other != keyword), "another keyword")
            raise ConfigError(f"GRPOTrainer: {other} and {keyword} both set {path}: leave one out")
        if (place := _place(config, path)) is not None:
            # Of a key in a stage, its override alone.
            advice = _override_advice(config, keys if place == path else {place: value})
            raise ConfigError(
                f"GRPOTrainer: {keyword} is also set in the configuration, as {place}: leave one of them out{advice}"
            )
        over = merge(over, nested(path, value))
    return over


def _override_advice(config: Any, keys: Mapping[str, Any]) -> str:
    """The call that lays `keys` over a recipe or a file, which is not the user's to change; empty for another
    configuration."""
    if not isinstance(config, (str, Path)):
        return ""
    overrides = []
    for path, value in keys.items():
        # JSON is YAML, but for text, which needs no quotes. An item of a list is `stages.1` in an override.
        written = value if isinstance(value, str) else json.dumps(value, default=str)
        overrides.append(f"{path.replace('[', '.').replace(']', '')}={written}")
    return f", or config=load_config({json.dumps(str(config))}, {json.dumps(overrides)})"


def _place(config: Any, path: str) -> str | None:
    """The place where a configuration, as it was given, sets the key: its path, or that in the first stage that sets
    it. None where it does not."""
    if _is_set(config, path):
        return path
    # A stage goes over the tree, so that a keyword would have no effect in it.
    stages = config.stages if isinstance(config, Config) else config_tree(config).get("stages")
    # What is no list of mappings is refused when the configuration is made.
    for number, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, Mapping) and _is_set(stage, path, null_counts=True):
            return f"stages[{number}].{path}"
    return None


def _is_set(config: Any, path: str, null_counts: bool = False) -> bool:
    """Return True if a configuration, as it was given, sets the key.

    A null in the place of its section does so where `null_counts`: that of a stage is laid over the key.
    """
    if isinstance(config, (str, Path)):
        config = config_tree(config)
    at = config
    for part in path.split("."):
        if isinstance(at, Mapping):
            if part not in at:
                return False
            at = at[part]
        elif isinstance(at, BaseModel):
            # The preset's values count as set, too, where a Config was made: only other values than the defaults are
            # taken for the user's.
            default = type(at).model_fields[part].get_default(call_default_factory=True)
            if part not in at.model_fields_set or dict(at)[part] == default:
                return False
            at = dict(at)[part]
        else:
            # `algorithm.kl: null` over which `algorithm.kl.coef` would be laid.
            return at is not None or null_counts
    return True


def _with_settings(config: Any, over: Mapping[str, Any], rewards: str) -> Config:
    """The configuration with `over` laid over it. ConfigError where both have rewards."""
    if not over:
        return config if isinstance(config, Config) else load_config(config)
    for key in ("rewards", "verifiers"):
        if key in over and (place := _place(config, key)) is not None:
            raise ConfigError(
                f"GRPOTrainer: {rewards} is a list of rewards, and the configuration sets {place}: leave one of them "
                "out"
            )
    if isinstance(config, Config):
        tree = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if "preset" in over.get("algorithm", {}) and "algorithm" in tree:
            tree["algorithm"] = without_preset(tree["algorithm"])
    else:
        tree = config_tree(config)
    return make_config(merge(tree, over))


# rewards


def _rewards(given: Any, weights: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The verifier, further ones by name, and the keys of the configuration that sum their scores with their weights.

    The first of a list says what is right: evaluations, pass@k and votes are of its verdict.
    """
    if not isinstance(given, (list, tuple)):
        if weights is not None:
            raise ConfigError("GRPOTrainer: reward_weights are the weights of a list of reward_funcs, which is missing")
        _refuse_model(given)
        return given, {}, {}
    if isinstance(given, tuple) and len(given) == 2 and _is_number(given[1]):
        given = [given]  # one pair
    entries = _entries(given, weights)
    names = _names([item for item, _ in entries])
    (first, weight), *others = entries
    specs: list[dict[str, Any]] = [{"name": "verdict", "as": names[0], "weight": weight}]
    for name, (_, other_weight) in zip(names[1:], others, strict=True):
        specs.append({"name": "verdict", "verifier": name, "as": name, "weight": other_weight})
    if not others and weight == 1:
        return first, {}, {}
    further = {name: item for name, (item, _) in zip(names[1:], others, strict=True)}
    objects = {name: item for name, item in further.items() if not isinstance(item, (str, dict))}
    # In the configuration an object stands as words, which are replaced by its name for the run folder.
    written = {**further, **{name: f"<{name}>" for name in objects}}
    return first, objects, {"rewards": specs, "verifiers": written}


def _entries(given: Sequence[Any], weights: Any) -> list[tuple[Any, float]]:
    """(reward, weight) of each entry of a list of rewards. ConfigError names the entry that is none."""
    if not given:
        raise ConfigError("GRPOTrainer: the list of rewards is empty: give a verifier or a function")
    given = [_pair(entry) for entry in given]
    pairs = [entry for entry in given if isinstance(entry, (tuple, list))]
    if weights is not None:
        if pairs:
            raise ConfigError("GRPOTrainer: weights are given in reward_weights and beside a function: leave one out")
        if isinstance(weights, (str, Mapping)) or not isinstance(weights, Sequence) or len(weights) != len(given):
            raise ConfigError(
                f"GRPOTrainer: reward_weights is {weights!r}: give a list of {len(given)} numbers, one for each reward"
            )
        given = list(zip(given, weights, strict=True))
    entries = []
    for number, entry in enumerate(given, 1):
        if not isinstance(entry, (tuple, list)):
            entry = (entry, 1.0)
        if len(entry) != 2:
            raise ConfigError(f"GRPOTrainer: reward {number} is {len(entry)} values: give (function, weight)")
        item, weight = entry
        if callable(weight):
            raise ConfigError(f"GRPOTrainer: reward {number} is a pair without a weight: give (function, weight)")
        if not _is_number(weight):
            raise ConfigError(
                f"GRPOTrainer: the weight of reward {number} ({_called(item)}) is {weight!r}: give a finite number"
            )
        _refuse_model(item)
        if not (isinstance(item, (str, Mapping, Verifier, ComponentSpec)) or callable(item)):
            raise ConfigError(
                f"GRPOTrainer: reward {number} is {type(item).__name__}: give a verifier, a function or a name"
            )
        entries.append((dict(item) if isinstance(item, Mapping) else item, float(weight)))
    if not any(weight for _, weight in entries):
        raise ConfigError("GRPOTrainer: the weight of every reward is 0: nothing would be learned")
    return entries


def _pair(entry: Any) -> Any:
    """(reward, weight) for a mapping with a `weight`, which is that of a reward term in YAML; else the entry."""
    if isinstance(entry, Mapping) and "weight" in entry:
        return {key: value for key, value in entry.items() if key != "weight"}, entry["weight"]
    return entry


def _is_number(value: Any) -> bool:
    # True is a slip for a weight, as it is in YAML.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_model(item: Any) -> None:
    if isinstance(item, torch.nn.Module):
        raise ConfigError(
            f"GRPOTrainer: {type(item).__name__} is a reward model: serve it and name a judge (docs/judges.md), or "
            "give a function that calls it"
        )


def _called(item: Any) -> str:
    """The name of a reward in messages and columns."""
    if isinstance(item, Mapping):
        item = item.get("name", "reward")
    if isinstance(item, ComponentSpec):
        item = item.name
    if isinstance(item, str):
        return item.rpartition(":")[2]
    if isinstance(item, Verifier):
        return item.name
    return name_of(item)


def _names(items: Sequence[Any]) -> list[str]:
    """A name for each reward, which is that of its column and of its verdicts: letters, digits and `_`, no two
    alike."""
    names: list[str] = []
    for item in items:
        # `<lambda>` is no name of verdicts, which begin with a letter.
        base = re.sub(r"\W+", "_", _called(item)).strip("_") or "reward"
        if not base[0].isalpha():
            base = f"reward_{base}"
        name = base
        number = 2
        while name in names:
            name = f"{base}_{number}"
            number += 1
        names.append(name)
    return names
