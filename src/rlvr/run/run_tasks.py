"""The tasks of a run and their prompts as token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlvr.config import Config
from rlvr.config.stage_plan import StagePlan
from rlvr.core.startup_lines import startup
from rlvr.data import Prompts, load_tasks
from rlvr.data.samplers import fingerprint_of
from rlvr.data.sources import check_written, limited
from rlvr.distributed import World
from rlvr.errors import ConfigError, prefixed
from rlvr.records import Task
from rlvr.run.given_objects import GivenObjects, kept_in_folder, written_data
from rlvr.run.trainer_arguments import TrainerArguments


class TaskSets:
    """Training and evaluation tasks, each set read once: those given in Python, else those that the configuration
    names."""

    def __init__(self, train: Any = None, evaluation: Any = None) -> None:
        self._arguments = {"train": train, "eval": evaluation}
        self._loaded: dict[str, list[Task]] = {}

    def written(self, split: str, config: Config) -> tuple[str, Any]:
        """The key that names the tasks of a split (words for what was given in Python), and the tasks as they are
        written there; None where there are none."""
        # What the configuration names for evaluation goes before `eval_tasks`: a stage may set its own.
        if split == "eval" and config.evaluation.data is not None:
            return "evaluation.data", config.evaluation.data
        key = f"data.{split}"
        if self._arguments[split] is not None:
            key = {"train": "training tasks", "eval": "evaluation tasks"}[split]
        return key, self._spec(split, config)

    def check_written(self, config: Config) -> None:
        """ConfigError or DataError where the tasks are written wrong, in what can be seen without reading them."""
        for split in self._arguments:
            key, spec = self.written(split, config)
            if spec is None and split == "train":
                raise ConfigError(
                    "the config names no tasks: set data.train to a file, a folder, a hub name or a source"
                )
            if spec is None:
                continue
            with prefixed(f"{key}: "):
                check_written(spec, config.data.fields)

    def training(self, config: Config) -> list[Task]:
        """The tasks that a stage with this configuration trains on."""
        # Cut after loading: stages with different limits share the tasks that were read.
        return limited(self._read("train", config), config.data.limit, config.data.limit_seed)

    def evaluation(self, config: Config) -> list[Task]:
        """The tasks that are evaluated on under a stage's configuration; empty without any."""
        return limited(self._read("eval", config), config.evaluation.limit, config.evaluation.limit_seed)

    def _read(self, split: str, config: Config) -> list[Task]:
        key, spec = self.written(split, config)
        if spec is None:
            return []
        with prefixed(f"{key}: "):
            return self._load(spec, split, config)

    def given_objects(
        self, config: Config, given: TrainerArguments, plans: Sequence[StagePlan], is_main: bool
    ) -> GivenObjects:
        """The objects that the trainer was given, as the run folder is to record them under the resolved `config`, with
        facts of the tasks that the stages `plans` use (rank 0 alone writes them); after all tasks have been read."""
        tasks = {
            split: self._load(self._spec(split, config), split, config)
            for split, argument in self._arguments.items()
            if kept_in_folder(config, split, argument)
        }
        verifiers = {
            task.verifier for of_split in self._loaded.values() for task in of_split if task.verifier is not None
        }
        facts = self._facts(plans) if is_main else {}
        return GivenObjects(
            config, given.model, given.verifier, self._arguments, tasks, verifiers, given.verifiers, facts
        )

    def _facts(self, plans: Sequence[StagePlan]) -> dict[str, Any]:
        """Stage -> split -> number of tasks, fingerprint, and where they come from."""
        facts: dict[str, Any] = {}
        # Stages mostly have the same tasks, which are compared by identity and cost seconds to hash.
        hashed: list[tuple[list[Task], str]] = []
        for number, plan in enumerate(plans):
            config = plan.config
            of_stage = {}
            for split, tasks in (("train", self.training(config)), ("eval", self.evaluation(config))):
                key, written = self.written(split, config)
                # Also where a resume reads them from the folder that keeps them.
                if key != "evaluation.data" and kept_in_folder(config, split, self._arguments[split]):
                    written = "given in Python"
                fingerprint = next((known for same, known in hashed if same == tasks), None) or fingerprint_of(tasks)
                hashed.append((tasks, fingerprint))
                of_stage[split] = {"tasks": len(tasks), "fingerprint": fingerprint, "source": written}
            facts[f"{number} {plan.name}"] = of_stage
        return facts

    def _spec(self, split: str, config: Config) -> Any:
        """The tasks of a split as they were given in Python, else as the configuration writes them."""
        if self._arguments[split] is not None:
            return self._arguments[split]
        return written_data(config, split)

    def _load(self, spec: Any, split: str, config: Config) -> list[Task]:
        """The tasks that `spec` writes, read once."""
        is_argument = spec is self._arguments[split]  # its text would be long, and its identity lasts as long as we do
        key = f"{split} {config.data.fields!r} {id(spec) if is_argument else spec!r}"
        if key not in self._loaded:
            startup.info("reading tasks: data.%s", split)
            self._loaded[key] = load_tasks(spec, split=split, fields=config.data.fields)
        return self._loaded[key]


class RunTasks:
    """The tasks of a run (`sets`), and their prompts as the policy's tokenizer encodes them."""

    def __init__(self, sets: TaskSets, tokenizer: Any, world: World, report: Callable[[str], None]) -> None:
        self.sets = sets
        self.prompts = Prompts(tokenizer, report=report)
        self._world = world

    def training(self, config: Config) -> list[Task]:
        """The tasks that a stage with this configuration trains on."""
        return self.sets.training(config)

    def evaluation(self, config: Config) -> list[Task]:
        """The tasks that are evaluated on under a stage's configuration; empty without any."""
        return self.sets.evaluation(config)

    def longest_evaluated(self, plan: StagePlan) -> int:
        """Tokens of the longest prompt that a stage is evaluated on; 0 without any."""
        tasks = self.evaluation(plan.config)
        prompts = self.prompts.under(plan.config.data.template)
        return int(encoded_lengths(prompts, self._world, tasks)[0].max(initial=0))


def encoded_lengths(
    prompts: Prompts, world: World, tasks: Sequence[Task], demonstrations: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each task's prompt and, with `demonstrations`, of its demonstration (else 0): int32 [N] each, on every
    rank.

    Only rank 0 encodes and keeps the prompts: it alone samples. Other ranks encode the few that a step asks them for.
    """
    # [N], N tasks; replaced by rank 0's in the broadcast
    lengths = shown = np.zeros(len(tasks), dtype=np.int32)
    if world.is_main:
        lengths = prompts.lengths(tasks)
        if demonstrations:
            shown = prompts.demonstration_lengths(tasks)
    # Without a deadline: a million prompts take minutes, and a rank that dies meanwhile is named all the same.
    return world.broadcast((lengths, shown), "the prompts to be encoded", math.inf)
