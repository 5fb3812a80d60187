"""The metrics record of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.distributed.step_meters import StepMeters
from rlvr.monitor.batch import staleness_metrics
from rlvr.monitor.metrics import record
from rlvr.records import Batch
from rlvr.rollout import StepRollouts
from rlvr.rollout.vllm.options import devices_apart
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.train_state import TrainState
from rlvr.stages import Stage


@dataclass
class StepRecorder:
    """Counts the steps of a run and makes their records. With several ranks `record` is called on all of them."""

    state: TrainState
    training: PolicyTraining
    rollouts: RolloutRuntime
    meters: StepMeters

    def record(self, stage: Stage, collected: StepRollouts, batch: Batch, metrics: dict[str, Any]) -> None:
        """Count a step that was trained and published, and add its record; `metrics` are those of scoring and
        update."""
        state = self.state
        with self.meters.phases("score"):
            metrics = stage.metrics_of_scoring() | metrics
        # Those that dynamic sampling dropped, too: they were attempts at their tasks. After the update, so that a step
        # that is rolled back leaves no trace. A task that a plan made is not drawn again.
        everyone = [*collected.rollouts, *collected.dropped]
        self.rollouts.history.record_rollouts(r for r in everyone if r.task.id in stage.pool)
        # Before the step is counted: these are the values that it was trained with.
        metrics |= stage.scheduled(state.stage_step)
        state.step += 1
        state.stage_step += 1
        published = self.rollouts.published
        metrics |= (
            self._times(collected, metrics)
            # The update has raised the version; the batch was sampled for the version before it.
            | staleness_metrics(batch, state.version - 1)
            | {
                "step": state.step,
                "run/stage": stage.plan.name,
                "run/epoch": stage.sampler.epoch,
                "policy/version": state.version,
                **(published.metrics() if published is not None and stage.samples else {}),
                **collected.metrics(),
                **stage.context.rollout_context.verification.metrics(),
            }
        )
        # Log-probs of recorded responses are those of the policy that was recorded, and controllers steer the one that
        # trains.
        if not stage.samples or metrics.get("entropy") is None:
            metrics["entropy"] = metrics.get("entropy/trained")
        # Every completion then has the full length by request: being cut says nothing about it.
        if stage.plan.config.rollout.ignore_eos:
            metrics["completion/truncated"] = None
        # Controllers move with the metrics, and must move alike on all ranks.
        metrics = self.rollouts.world.broadcast(metrics, "the metrics")
        stage.observe(metrics)
        row = record(metrics)
        state.metrics.append(row)
        # In a row: one finite step begins the count anew. `run.max_nonfinite` limits it.
        state.nonfinite = state.nonfinite + 1 if row["skipped/nonfinite"] else 0

    def _times(self, collected: StepRollouts, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The step's time, memory and use of the devices."""
        apart = devices_apart(self.rollouts.config.rollout.engine)
        starting = self.state.step == self.state.first_step  # most of whose time is that of starting, not of sampling
        sampled = metrics.get("tokens/sampled")
        return self.meters.finish(sampled, collected.verifying, self.training.learner.computed, apart, starting)
