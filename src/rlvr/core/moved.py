"""Names that are looked up when they are used: the public ones of a package, and old names of modules and of what they
contain, which are found for one version with a notice."""

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
    "rlvr.advantages.blend": "rlvr.recipes.laser.laser",
    "rlvr.advantages.conditional": "rlvr.recipes.canon.conditional",
    "rlvr.advantages.consistency": "rlvr.recipes.copo.consistency",
    "rlvr.advantages.exploration": "rlvr.advantages",
    "rlvr.advantages.noise": "rlvr.recipes.noisy_verifier_corrections.noise",
    "rlvr.advantages.prefix_tree": "rlvr.recipes.tempo.prefix_tree",
    "rlvr.advantages.risk": "rlvr.recipes.riskpo.risk",
    "rlvr.advantages.statistics": "rlvr.advantages.group",
    "rlvr.calling": "rlvr.core.calling",
    "rlvr.config.model": "rlvr.config.model_config",
    "rlvr.config.pieces": "rlvr.config.sections",
    "rlvr.config.sampling": "rlvr.config.rollout_config",
    "rlvr.config_loading": "rlvr.config.config_loading",
    "rlvr.core.lifeline": "rlvr.core.process.parent_death",
    "rlvr.core.parent_death": "rlvr.core.process.parent_death",
    "rlvr.data.adapters": "rlvr.data.row_adapters",
    "rlvr.data.pool": "rlvr.data.samplers",
    "rlvr.device_memory": "rlvr.core.device_memory",
    "rlvr.diff.metric_differences": "rlvr.diff.parting",
    "rlvr.diff.metrics": "rlvr.diff.parting",
    "rlvr.distributed.farm": "rlvr.distributed.engine_router",
    "rlvr.distributed.prompt_lengths": "rlvr.run.run_tasks",
    "rlvr.distributed.versions": "rlvr.distributed.world",
    "rlvr.distributed.watchdog": "rlvr.distributed.heartbeat_monitor",
    "rlvr.dry_run": "rlvr.run.dry_run",
    "rlvr.due_evaluations": "rlvr.run.due_evaluations",
    "rlvr.evaluation.best_of": "rlvr.evaluation.estimators",
    "rlvr.evaluation.held_out": "rlvr.evaluation.evaluation_loop",
    "rlvr.evaluation.intervals": "rlvr.evaluation.estimators",
    "rlvr.evaluation.levels": "rlvr.evaluation.task_result",
    "rlvr.evaluation.runs": "rlvr.evaluation.result",
    "rlvr.evaluation.tally": "rlvr.evaluation.task_result",
    "rlvr.given_objects": "rlvr.run.given_objects",
    "rlvr.lifeline": "rlvr.core.process.parent_death",
    "rlvr.losses.ahead": "rlvr.losses.prepass",
    "rlvr.losses.clipping": "rlvr.losses.clip",
    "rlvr.losses.copg": "rlvr.recipes.copg.copg",
    "rlvr.losses.entropy": "rlvr.losses.reinforce",
    "rlvr.losses.inverse_soft_q": "rlvr.recipes.scalable_irl.inverse_soft_q",
    "rlvr.losses.likelihood": "rlvr.losses.likelihood_loss",
    "rlvr.losses.pacs": "rlvr.recipes.pacs.pacs",
    "rlvr.losses.ratio": "rlvr.losses.tokens",
    "rlvr.losses.reference": "rlvr.losses.reference_test",
    "rlvr.losses.rover": "rlvr.recipes.rover.rover",
    "rlvr.losses.self_reward": "rlvr.losses",
    "rlvr.losses.step_metrics": "rlvr.losses.objective",
    "rlvr.losses.topr": "rlvr.recipes.topr.topr",
    "rlvr.losses.trajectory_balance": "rlvr.recipes.for_.trajectory_balance",
    "rlvr.losses.weighted_likelihood": "rlvr.losses.reinforce",
    "rlvr.monitor.averages": "rlvr.losses.objective",
    "rlvr.monitor.guests": "rlvr.monitor.background_trackers",
    "rlvr.monitor.health.series": "rlvr.monitor.health.monitors",
    "rlvr.monitor.health.voice": "rlvr.monitor.health.watch",
    "rlvr.monitor.lines": "rlvr.monitor.console_text",
    "rlvr.monitor.live": "rlvr.monitor.console",
    "rlvr.monitor.text": "rlvr.monitor.console_text",
    "rlvr.needs": "rlvr.core.needs",
    "rlvr.own_files": "rlvr.core.own_files",
    "rlvr.planner.devices": "rlvr.planner.planned_devices",
    "rlvr.planner.report": "rlvr.planner.run_plan",
    "rlvr.planner.saved_values": "rlvr.planner.run_plan",
    "rlvr.policy.columns": "rlvr.policy.statistics",
    "rlvr.policy.continuations": "rlvr.policy.statistics",
    "rlvr.policy.dropout": "rlvr.policy.model",
    "rlvr.policy.head": "rlvr.policy.model",
    "rlvr.policy.head_sums": "rlvr.policy.fused_head",
    "rlvr.policy.head_tiles": "rlvr.policy.fused_head",
    "rlvr.policy.offload": "rlvr.policy.loading",
    "rlvr.policy.packable": "rlvr.policy.attention",
    "rlvr.policy.packing": "rlvr.policy.microbatch",
    "rlvr.policy.transfer": "rlvr.core.device_memory",
    "rlvr.recipes.page": "rlvr.recipes.recipes_page",
    "rlvr.replay.changes": "rlvr.replay.rescore",
    "rlvr.report.compare": "rlvr.report.page",
    "rlvr.report.page_elements": "rlvr.report.sampled_rollouts",
    "rlvr.report.pieces": "rlvr.report.sampled_rollouts",
    "rlvr.report.run_comparison": "rlvr.report.page",
    "rlvr.report.sampling": "rlvr.report.sampled_rollouts",
    "rlvr.rewards.basic": "rlvr.rewards.terms",
    "rlvr.rewards.ranks": "rlvr.recipes.reasonrank.rank_overlap",
    "rlvr.rollout.activity": "rlvr.rollout.plans",
    "rlvr.rollout.automatic": "rlvr.planner.run_plan",
    "rlvr.rollout.collector": "rlvr.rollout.buffer",
    "rlvr.rollout.context": "rlvr.rollout.plans",
    "rlvr.rollout.idle": "rlvr.rollout.plans",
    "rlvr.rollout.kv_cache": "rlvr.rollout.rows",
    "rlvr.rollout.products": "rlvr.rollout.decoder",
    "rlvr.rollout.recorded": "rlvr.rollout.recorded_rollouts",
    "rlvr.rollout.sampling": "rlvr.rollout.rows",
    "rlvr.rollout.supply": "rlvr.rollout.buffer",
    "rlvr.rollout.vllm.engine": "rlvr.rollout.vllm.embedded_engine",
    "rlvr.rollout.vllm.process": "rlvr.rollout.vllm.engine_process",
    "rlvr.run.disk_space": "rlvr.run.resuming",
    "rlvr.run.run_identity": "rlvr.run.resolved_config",
    "rlvr.run_folder": "rlvr.run.run_folder",
    "rlvr.run_lock": "rlvr.run.run_lock",
    "rlvr.run_status": "rlvr.run.run_status",
    "rlvr.saved_state": "rlvr.run.checkpointing",
    "rlvr.schedules": "rlvr.core.schedules",
    "rlvr.seeding": "rlvr.core.seeding",
    "rlvr.selection.members": "rlvr.selection.member_selectors",
    "rlvr.signals": "rlvr.core.waits",
    "rlvr.stage_plan": "rlvr.config.stage_plan",
    "rlvr.stages.advantages": "rlvr.stages.grpo.scoring",
    "rlvr.stages.appended": "rlvr.stages.grpo.appended",
    "rlvr.stages.base": "rlvr.stages.stage_base",
    "rlvr.stages.demonstrations": "rlvr.stages.grpo.demonstrations",
    "rlvr.stages.grpo.recorded": "rlvr.stages.grpo.recorded_buffer",
    "rlvr.stages.kl_scale": "rlvr.stages.grpo.kl_scale",
    "rlvr.stages.objective": "rlvr.stages.grpo.build_objective",
    "rlvr.stages.raised": "rlvr.verifiers.raised_verdicts",
    "rlvr.stages.recorded": "rlvr.stages.grpo.recorded_buffer",
    "rlvr.stages.reference_penalty": "rlvr.stages.grpo.reference_penalty",
    "rlvr.stages.scoring": "rlvr.stages.grpo.scoring",
    "rlvr.sweep": "rlvr.train.sweep",
    "rlvr.tree": "rlvr.core.tree",
    "rlvr.verifiers.audit.in_order": "rlvr.verifiers.audit.trial",
    "rlvr.verifiers.choice.options": "rlvr.verifiers.choice.choice_options",
    "rlvr.verifiers.choice.statements": "rlvr.verifiers.choice.choice_statements",
    "rlvr.verifiers.code.credit": "rlvr.verifiers.code.cases",
    "rlvr.verifiers.code.sandbox.probe": "rlvr.verifiers.code.sandbox.escape_probe",
    "rlvr.verifiers.code.sandbox.process": "rlvr.verifiers.code.sandbox.zygote_process",
    "rlvr.verifiers.code.verifier": "rlvr.verifiers.code.code_verifier",
    "rlvr.verifiers.exact": "rlvr.verifiers.answers",
    "rlvr.verifiers.extraction": "rlvr.verifiers.answers",
    "rlvr.verifiers.golds": "rlvr.verifiers.answers",
    "rlvr.verifiers.instructions.case": "rlvr.verifiers.instructions.constraints",
    "rlvr.verifiers.instructions.combination": "rlvr.verifiers.instructions.constraints",
    "rlvr.verifiers.instructions.content": "rlvr.verifiers.instructions.constraints",
    "rlvr.verifiers.instructions.edges": "rlvr.verifiers.instructions.constraints",
    "rlvr.verifiers.instructions.keywords": "rlvr.verifiers.instructions.constraints",
    "rlvr.verifiers.instructions.layout": "rlvr.verifiers.instructions.constraints",
    "rlvr.verifiers.instructions.length": "rlvr.verifiers.instructions.constraints",
    "rlvr.verifiers.instructions.registry": "rlvr.verifiers.instructions.instruction_registry",
    "rlvr.rollout.vllm.guard": "rlvr.rollout.vllm.serve",
    "rlvr.verifiers.instructions.verifier": "rlvr.verifiers.instructions.instructions_verifier",
    "rlvr.verifiers.math.answers": "rlvr.verifiers.math.math_answers",
    "rlvr.verifiers.math.compare": "rlvr.verifiers.math.answer_comparison",
    "rlvr.verifiers.math.deadline": "rlvr.verifiers.math.computation_deadline",
    "rlvr.verifiers.math.evaluate": "rlvr.verifiers.math.evaluation",
    "rlvr.verifiers.math.gold": "rlvr.verifiers.math.math_verifier",
    "rlvr.verifiers.math.joined": "rlvr.verifiers.math.parser",
    "rlvr.verifiers.math.literals": "rlvr.verifiers.math.reader",
    "rlvr.verifiers.math.operators": "rlvr.verifiers.math.evaluation",
    "rlvr.verifiers.math.postfixes": "rlvr.verifiers.math.commands",
    "rlvr.verifiers.math.sampling": "rlvr.verifiers.math.point_sampling",
    "rlvr.verifiers.math.tokens": "rlvr.verifiers.math.math_tokens",
    "rlvr.verifiers.math.values": "rlvr.verifiers.math.math_values",
    "rlvr.verifiers.math.verifier": "rlvr.verifiers.math.math_verifier",
    "rlvr.verifiers.pool.deadline": "rlvr.core.process.deadline",
    "rlvr.verifiers.pool.process": "rlvr.verifiers.pool.worker_process",
    "rlvr.verifiers.puzzles.arithmetic": "rlvr.verifiers.puzzles.expressions",
    "rlvr.verifiers.routing": "rlvr.verifiers.pool.pool",
    "rlvr.verifiers.tool_calls.verifier": "rlvr.verifiers.tool_calls.tool_call_verifier",
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
        # The same module object under both names, so that a class imported by the old name is the class of the new one.
        sys.modules[module.__name__] = importlib.import_module(new)


def found_on_first_use(module: str, homes: Mapping[str, str]) -> tuple[dict[str, str], Callable[[str], Any]]:
    """The public names of a package, each with the module that has it, and the package's `__getattr__`, which imports
    a name when it is first used. `homes`: module -> its names, with spaces between them."""
    home = {name: place for place, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return home, find


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
        # FutureWarning, since Python hides DeprecationWarning outside of `__main__`.
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
