"""The supply of a stage that trains on recorded rollouts: in the place of `rlvr.rollout.RolloutBuffer`, with its
methods.

Invariants: with the configuration, seed and start weights of the recorded run the updates are those of that run, bit
for bit on a CPU, unless an option follows the metric `entropy`, which is that of the policy that trains; a reward or
verifier that differs from the recorded run's is never passed over in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlvr import registry
from rlvr.config import ComponentSpec, RewardSpec
from rlvr.config.stage_plan import StagePlan
from rlvr.core.needs import BEHAVIOUR, PROXIMAL, Need
from rlvr.data import Sampler
from rlvr.errors import ConfigError
from rlvr.losses import Objective
from rlvr.monitor.recording import recorded_config
from rlvr.records import Rollout
from rlvr.rollout import RolloutContext, StepRollouts
from rlvr.rollout.recorded_rollouts import RecordedOptions, Recording
from rlvr.stages.stage_base import StageContext
from rlvr.verifiers.pool import verify_again


def recording_of(plan: StagePlan) -> RecordedOptions | None:
    """The recorded rollouts that a stage is to train on; None where it samples."""
    options = registry.build("engine", plan.config.rollout.engine)
    if isinstance(options, RecordedOptions):
        return options
    return None


class RecordedBuffer:
    """Gives the recorded rollouts of one step after the other. ConfigError, DataError for what cannot be trained on."""

    def __init__(
        self,
        options: RecordedOptions,
        plan: StagePlan,
        context: StageContext,
        sampler: Sampler,
        rollout_context: RolloutContext,
        objective: Objective,
    ) -> None:
        # Writing to the folder that is read would overwrite rollouts before they were trained on.
        if plan.config.folder.resolve() == Path(options.path).resolve():
            raise ConfigError(
                f"rollout.engine: the run would write to {options.path}, whose rollouts it reads: choose another "
                "run.name"
            )
        if not options.rescore:
            _refuse_other_rewards(options.path, plan)
        # Recorded steps are counted over the whole run and from 1; `before` are those of earlier stages.
        first = plan.before + 1
        last = plan.before + plan.allowed
        self.recording = Recording(options.path, context.policy, first, last, _needs_logprobs(objective, plan))
        self.options = options
        self.plan = plan
        self.sampler = sampler
        self.context = rollout_context
        self.collector = context.collector
        # For `roll_back`, also when no step was read.
        self._before = sampler.state_dict()

    def next(self, step: int) -> StepRollouts:
        """Return the rollouts recorded at `step` of the stage. DataError, with file and line, for what cannot be
        trained on."""
        self._before = self.sampler.state_dict()
        collected = self.recording.read(self.plan.before + step + 1)
        self._draw_as_far_as([*collected.rollouts, *collected.dropped])
        if self.options.rescore:
            rollouts = [*collected.rollouts, *collected.dropped]
            # On the collector's event loop, where verifiers with processes and connections live.
            work = self.collector.begin(verify_again(rollouts, self.context.by_group, self.context.verify_group))
            what = "the verdicts on recorded rollouts"
            self.collector.wait(work, what, self.plan.config.rollout.deadline)
            # The recorded rewards are of the old verdicts: scoring computes them anew.
            collected.columns = None
        return collected

    def roll_back(self) -> None:
        """The step last read is the next to be read."""
        self.sampler.load_state_dict(self._before)

    def state_dict(self) -> dict[str, Any]:
        """As `rlvr.rollout.RolloutBuffer` has it."""
        return {"sampler": self.sampler.state_dict(), "owed": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken."""
        self.sampler.load_state_dict(state["sampler"])

    def _draw_as_far_as(self, rollouts: Iterable[Rollout]) -> None:
        """Draw what the recorded run drew, so that epochs are counted alike."""
        last = max(int(rollout.group.partition("/")[0]) for rollout in rollouts)
        # A group's name is the number of its draw ("17") or begins with it ("17/1"): draw past the last one.
        while self.sampler.state_dict()["draws"] <= last:
            self.sampler.next(1)


def _needs_logprobs(objective: Objective, plan: StagePlan) -> bool:
    """Return True if a component takes a ratio to the log-probs that were sampled with."""
    optim = plan.config.optim
    several = optim.updates_per_batch * optim.epochs_per_batch > 1
    return any(
        Need("logprobs", BEHAVIOUR) in component.loss.needs
        or (component.corrected and objective.correction is not None)
        # On later optimizer steps of a batch the proximal policy is the one that sampled, unless it is recomputed.
        or (several and not objective.recalls_update and Need("logprobs", PROXIMAL) in component.loss.needs)
        for component in objective.components
    )


def _refuse_other_rewards(run: str, plan: StagePlan) -> None:
    """ConfigError where the configuration rewards otherwise than the recorded run did."""
    recorded = recorded_config(run)
    if recorded.get("stages"):
        return  # each may have had rewards of its own
    now = plan.config.dump()
    for key in ("verifier", "verifiers", "rewards"):
        if key in recorded and _parsed(key, recorded[key]) != _parsed(key, now[key]):
            raise ConfigError(
                f"{key} is not that of the recorded run ({recorded[key]!r}, here {now[key]!r}), and rollout.engine "
                f"takes verdicts and rewards as they were recorded: set rollout.engine.rescore=true, or {key} as it was"
            )


def _parsed(key: str, written: Any) -> Any:
    """The verifier, the verifiers by name or the rewards of a configuration, however they were written."""
    if key == "verifiers":
        return {name: ComponentSpec.parse(one) for name, one in written.items()}
    if isinstance(written, list):
        return [RewardSpec.parse(term) for term in written]
    if written is None:
        return None
    return ComponentSpec.parse(written)
