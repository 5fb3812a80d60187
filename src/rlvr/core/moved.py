"""Old names of modules and of what they contain, which are found for one version with a notice."""

from __future__ import annotations

import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

MOVED = {
    "rlvr.advantages.statistics": "rlvr.advantages.group",
    "rlvr.calling": "rlvr.core.calling",
    "rlvr.config_loading": "rlvr.config.config_loading",
    "rlvr.data.pool": "rlvr.data.samplers",
    "rlvr.device_memory": "rlvr.core.device_memory",
    "rlvr.dry_run": "rlvr.run.dry_run",
    "rlvr.due_evaluations": "rlvr.run.due_evaluations",
    "rlvr.given_objects": "rlvr.run.given_objects",
    "rlvr.core.lifeline": "rlvr.core.parent_death",
    "rlvr.distributed.farm": "rlvr.distributed.engine_router",
    "rlvr.distributed.watchdog": "rlvr.distributed.heartbeat_monitor",
    "rlvr.evaluation.tally": "rlvr.evaluation.task_result",
    "rlvr.lifeline": "rlvr.core.parent_death",
    "rlvr.losses.ahead": "rlvr.losses.prepass",
    "rlvr.monitor.guests": "rlvr.monitor.background_trackers",
    "rlvr.losses.clipping": "rlvr.losses.clip",
    "rlvr.losses.ratio": "rlvr.losses.tokens",
    "rlvr.losses.step_metrics": "rlvr.losses.objective",
    "rlvr.monitor.averages": "rlvr.losses.objective",
    "rlvr.needs": "rlvr.core.needs",
    "rlvr.own_files": "rlvr.core.own_files",
    "rlvr.policy.dropout": "rlvr.policy.model",
    "rlvr.policy.head": "rlvr.policy.model",
    "rlvr.policy.head_sums": "rlvr.policy.fused_head",
    "rlvr.policy.head_tiles": "rlvr.policy.fused_head",
    "rlvr.policy.packing": "rlvr.policy.microbatch",
    "rlvr.policy.transfer": "rlvr.core.device_memory",
    "rlvr.rewards.basic": "rlvr.rewards.terms",
    "rlvr.rollout.activity": "rlvr.rollout.plans",
    "rlvr.rollout.collector": "rlvr.rollout.buffer",
    "rlvr.rollout.context": "rlvr.rollout.plans",
    "rlvr.rollout.idle": "rlvr.rollout.plans",
    "rlvr.rollout.kv_cache": "rlvr.rollout.rows",
    "rlvr.rollout.products": "rlvr.rollout.decoder",
    "rlvr.rollout.sampling": "rlvr.rollout.rows",
    "rlvr.rollout.supply": "rlvr.rollout.buffer",
    "rlvr.run_folder": "rlvr.run.run_folder",
    "rlvr.run_lock": "rlvr.run.run_lock",
    "rlvr.run_status": "rlvr.run.run_status",
    "rlvr.saved_state": "rlvr.run.checkpointing",
    "rlvr.schedules": "rlvr.core.schedules",
    "rlvr.seeding": "rlvr.core.seeding",
    "rlvr.signals": "rlvr.core.waits",
    "rlvr.stage_plan": "rlvr.config.stage_plan",
    "rlvr.stages.advantages": "rlvr.stages.grpo.scoring",
    "rlvr.stages.appended": "rlvr.stages.grpo.appended",
    "rlvr.stages.demonstrations": "rlvr.stages.grpo.demonstrations",
    "rlvr.stages.kl_scale": "rlvr.stages.grpo.kl_scale",
    "rlvr.stages.objective": "rlvr.stages.grpo.build_objective",
    "rlvr.stages.raised": "rlvr.verifiers.raised_verdicts",
    "rlvr.stages.recorded": "rlvr.stages.grpo.recorded",
    "rlvr.stages.reference_penalty": "rlvr.stages.grpo.reference_penalty",
    "rlvr.stages.scoring": "rlvr.stages.grpo.scoring",
    "rlvr.sweep": "rlvr.train.sweep",
    "rlvr.tree": "rlvr.core.tree",
    "rlvr.verifiers.exact": "rlvr.verifiers.answers",
    "rlvr.verifiers.extraction": "rlvr.verifiers.answers",
    "rlvr.verifiers.golds": "rlvr.verifiers.answers",
    "rlvr.verifiers.math.gold": "rlvr.verifiers.math.verifier",
    "rlvr.verifiers.routing": "rlvr.verifiers.pool.pool",
    "rlvr.waits": "rlvr.core.waits",
}
"""Modules of the version before that have another place or were put together with another one."""


class MovedModules(MetaPathFinder, Loader):
    """Finds a module under the name that it had in the version before.

    Raises ImportError, as any import, where the new module cannot be imported.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a moved module, else None."""
        if fullname in MOVED:
            return ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Nothing, which gives an empty module; `exec_module` replaces it."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module at its new place under the old name. Warns with a FutureWarning."""
        new = MOVED[module.__name__]
        text = f"{module.__name__} is now {new}: the old name goes with the next version"
        warnings.warn(text, FutureWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module in which `names` (old name -> new name, with its module where that is another one)
    were renamed.

    Warns with a FutureWarning.
    """

    def find(name: str) -> Any:
        new = names.get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = new.rpartition(".")
        text = f"{module}.{name} is now {home or module}.{attribute}: the old name goes with the next version"
        warnings.warn(text, FutureWarning, stacklevel=2)
        return vars(importlib.import_module(home) if home else sys.modules[module])[attribute]

    return find


class MovedAttributes:
    """An object some of whose attributes are found under their old names for one version, with a FutureWarning."""

    moved_attributes: ClassVar[Mapping[str, str]] = {}
    """Old name -> where it is now, as a path of attributes."""

    if not TYPE_CHECKING:  # else a type checker would take any misspelt attribute for one that moved

        def __getattr__(self, name: str) -> Any:
            path = self.moved_attributes.get(name)
            if path is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            text = f"{type(self).__name__}.{name} is now {path}: the old name goes with the next version"
            warnings.warn(text, FutureWarning, stacklevel=2)
            return operator.attrgetter(path)(self)
