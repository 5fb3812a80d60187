"""Evaluations of the policy during a run."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.config import Config
from rlvr.config.stage_plan import StagePlan
from rlvr.data import Prompts, load_tasks
from rlvr.errors import DataError, EvaluationError, LostRankError, UserCodeError
from rlvr.evaluation import TaskResult, evaluate
from rlvr.evaluation.held_out import check_lengths
from rlvr.records import Task
from rlvr.rollout import CollectionInterruptedError
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.reporting import Reporting
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.run_tasks import RunTasks, encoded_lengths
from rlvr.run.train_state import TrainState
from rlvr.stages.grpo.scoring import chooser
from rlvr.verifiers.raised_verdicts import RaisedVerdicts


@dataclass
class Evaluator:
    """Evaluates the policy as it is, under the configuration of the current stage, and records the results.

    With several ranks `evaluate` is called on all of them; rank 0 samples with the engines of all.
    """

    plans: Sequence[StagePlan]
    state: TrainState
    training: PolicyTraining
    rollouts: RolloutRuntime
    tasks: RunTasks
    reporting: Reporting

    def evaluate(self, tasks: Any = None) -> dict[str, Any]:
        """Evaluate on `tasks` or the run's evaluation tasks; results by metric name, empty when the run was told to
        stop meanwhile.

        DataError when there are no tasks; EvaluationError, on all ranks, when sampling, verifying or scoring failed or
        took too long; UserCodeError when the verifier raised on every answer before the first step; LostRankError when
        another rank is gone.
        """
        plan = self.plans[self.state.stage_number]
        if tasks is not None:
            chosen = load_tasks(tasks, split="eval")
        else:
            chosen = self.tasks.evaluation(plan.config)
        if not chosen:
            raise DataError("there are no tasks to evaluate on: set data.eval or evaluation.data")
        start = time.perf_counter()
        if tasks is not None:
            # Other tasks than the run's: their token ids are kept as long as these tasks, and not in the run's cache.
            prompts = Prompts(self.training.policy.tokenizer, plan.config.data.template)
            self._check_lengths(prompts, chosen, plan.config)
        else:
            prompts = self.tasks.prompts.under(plan.config.data.template)
        # The weights may have changed since the last publish: a stage that does not sample publishes none.
        self.rollouts.publish(self.state.version, self.training)
        results: dict[str, Any] = {}
        task_results: list[TaskResult] = []
        failure = None
        if self.rollouts.world.is_main:
            try:
                results, task_results = self._sampled(chosen, prompts, plan)
                results |= {"time/evaluate": time.perf_counter() - start}
            # The run is to stop. `results` stay empty, which the broadcast below tells the other ranks.
            except CollectionInterruptedError:
                pass
            # These end the run: in `train`, `failing_together` tells the other ranks, which wait at the broadcast.
            except (UserCodeError, LostRankError):
                raise
            except Exception as error:  # whatever a verifier, an engine or a scorer raises: the other ranks wait
                failure = error
        problem = None
        if failure is not None:
            # Text, since an exception of a verifier or an engine may not be picklable.
            problem = f"{type(failure).__name__}: {failure}"
        results, problem = self.rollouts.world.broadcast((results, problem), "the evaluation")
        if problem is not None:
            # Only rank 0 has the cause; None elsewhere.
            raise EvaluationError(f"the evaluation at step {self.state.step} failed: {problem}") from failure
        if not results:
            return {}
        row = {"step": self.state.step, "stage": plan.name, **results}
        self.state.evaluations.append(row)
        self.reporting.evaluation(row, results, task_results)
        return results

    def _check_lengths(self, prompts: Prompts, tasks: Sequence[Task], config: Config) -> None:
        """DataError for a task too long for the context. Warn where it cuts responses."""
        lengths = encoded_lengths(prompts, self.rollouts.world, tasks)[0]
        warn = functools.partial(self.reporting.console.message, level="warning")
        check_lengths(config, tasks, lengths, self.rollouts.context, warn)

    def _sampled(
        self, tasks: Sequence[Task], prompts: Prompts, plan: StagePlan
    ) -> tuple[dict[str, Any], list[TaskResult]]:
        """Sample and verify, on rank 0; the results, and those of each task. Raises CollectionInterruptedError when the
        run is to stop."""
        verification = self.rollouts.verifications[self.state.stage_number]
        collect = self.rollouts.evaluation_samples(plan.config, verification, prompts)
        scorer = chooser(plan.config, self.training.policy, tasks, self.training.partitions)
        responses = len(tasks) * (plan.config.evaluation.samples + plan.config.evaluation.greedy)
        with self.reporting.console.evaluating(f"evaluation at step {self.state.step}", len(tasks), responses):
            done = evaluate(tasks, plan.config, collect, verification.same_answer, scorer=scorer, judge=self._judge)
        return dict(done.results), done.task_results

    def _judge(self, verdicts: RaisedVerdicts) -> None:
        """UserCodeError where the verifier raised on every answer of the evaluation at the start.

        Later the run has shown that the verifier works, and goes on without this evaluation's figures.
        """
        if not self.state.step:
            verdicts.refuse_all("of the evaluation at the start")
