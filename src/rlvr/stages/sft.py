"""The sft stage: the likelihood of the tasks' demonstrations, through the same loop, records and learner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np

from rlvr import registry
from rlvr.components import Loss, TokenSelector
from rlvr.config import ComponentSpec, OfKind
from rlvr.config.stage_plan import StagePlan
from rlvr.core.needs import BEHAVIOUR_LOGPROBS, PROXIMAL_LOGPROBS
from rlvr.errors import ConfigError, DataError, nearest
from rlvr.losses import LikelihoodLoss, Objective, ObjectiveTerm, SequenceLoss
from rlvr.losses.tokens import Average
from rlvr.monitor.batch import batch_metrics
from rlvr.records import Batch, Origin, Task
from rlvr.registry import register
from rlvr.rollout import StepRollouts
from rlvr.stages.grpo.demonstrations import demonstration
from rlvr.stages.stage_base import Stage, StageContext, token_weights

LIKELIHOOD = ComponentSpec("likelihood")
"""The cross-entropy of a demonstration's tokens."""


@register("stage", "sft")
class SFTStage(Stage):
    """Supervised fine-tuning on demonstrations."""

    samples = verifies = False
    _shows_demonstrations = True

    def __init__(
        self,
        plan: StagePlan,
        context: StageContext,
        tasks: Sequence[Task],
        seed: int,
        *,
        average: Average = "tokens",
        loss: Annotated[ComponentSpec, OfKind("auxiliary")] = LIKELIHOOD,
        source_weights: dict[str, float] | None = None,
        token_select: list[Annotated[ComponentSpec, OfKind("token_selector")]] | None = None,
    ) -> None:
        """`loss`: what is learned, `likelihood` (of which `average` says what it averages over) or an auxiliary loss
        with its options; one of whole responses reads each task's `label`, a number, as the reward of its
        demonstration. `source_weights`: the weight of the demonstrations of each source of tasks, above 0, and 1 for
        sources that it does not name (OpenChat, Wang et al. 2023, arXiv 2309.11235; github imoneoi/openchat,
        commit 47a3596, README.md: 1 for GPT-4's, 0.1 for others'). `token_select`: selectors of the tokens that are
        learned, as in `algorithm.token_select`."""
        self.source_weights = source_weights or {}
        sources = {task.source for task in tasks}
        for source, weight in self.source_weights.items():
            if source not in sources:
                named = sorted(s for s in sources if s is not None)
                raise DataError(
                    f"stage {plan.name!r}: no task is of the source {source!r} of "
                    f"source_weights{nearest(source, named)}"
                )
            if not weight > 0:
                raise ConfigError(
                    f"stage {plan.name!r}: the weight of the source {source!r} is {weight}: it must be above 0"
                )
        # Before super().__init__, whose check_tasks reads _reads_labels.
        keep = tuple(_selector(plan, spec) for spec in token_select or ())
        self._objective = Objective((_component(plan, ComponentSpec.parse(loss), average, keep),))
        self._reads_labels = isinstance(self._objective.components[0].loss, SequenceLoss)
        super().__init__(plan, context, tasks, seed)

    @classmethod
    def check_read(cls, plan: StagePlan, tasks: Sequence[Task]) -> None:
        """DataError when a task has no demonstration, unless it may be left out for its length."""
        if not plan.config.data.skip_long_prompts:
            _check_demonstrations(plan, tasks)

    def check_tasks(self) -> None:
        """DataError when a task has no demonstration, or no label where labels are read."""
        _check_demonstrations(self.plan, self.pool)
        for task in self.pool:
            if self._reads_labels and not _is_number(task.info.get("label")):
                raise DataError(
                    f"stage {self.plan.name!r}: {task.named} has no `label`, which the loss reads as the reward of its "
                    "demonstration: give it a number"
                )

    def collect(self, step: int) -> StepRollouts:
        """The demonstrations of the next tasks, as rollouts that nobody sampled."""
        # Kept for `roll_back`: a step that was collected and not trained is drawn again.
        self._before = self.sampler.state_dict()
        draws = self.sampler.next(self.config.rollout.prompts_per_step)
        return StepRollouts([demonstration(draw.task, self.context, str(draw.number)) for draw in draws])

    def roll_back(self) -> None:
        """Draw the same tasks again."""
        self.sampler.load_state_dict(self._before)

    def score(self, collected: StepRollouts) -> tuple[Batch, dict[str, Any]]:
        """Weight 1, or that of its source, on every token of a demonstration."""
        batch = Batch(collected.rollouts)
        everyone = np.ones(len(batch), dtype=bool)
        weights = token_weights(batch.rollouts, Origin.DEMONSTRATION, everyone)
        factors = [np.float32(self.source_weights.get(str(r.task.source), 1.0)) for r in batch.rollouts]
        batch.token_columns["weight/likelihood"] = [f * w for f, w in zip(factors, weights, strict=True)]
        # Before the labels are added, which are not rewards that metrics should show.
        self._trained = batch.with_own_columns()
        if self._reads_labels:
            batch.columns["reward"] = np.asarray([float(r.task.info["label"]) for r in batch.rollouts])
        return batch, {}

    def metrics_of_scoring(self) -> dict[str, Any]:
        """Metrics of the demonstrations."""
        return batch_metrics(self._trained)

    def objective(self) -> Objective:
        """The one loss."""
        return self._objective


def _selector(plan: StagePlan, spec: ComponentSpec | str) -> TokenSelector:
    """Return the selector. ConfigError for one that reads what demonstrations do not have."""
    selector: TokenSelector = registry.build("token_selector", spec)
    if selector.reads_advantage:
        raise ConfigError(
            f"stage {plan.name!r}: token_select: {ComponentSpec.parse(spec).short_name!r} reads advantages, and the "
            "demonstrations of an sft stage have none: leave it out, or name it in algorithm.token_select or "
            "entropy_select of a grpo stage"
        )
    return selector


def _component(
    plan: StagePlan, loss: ComponentSpec, average: Average, keep: tuple[TokenSelector, ...]
) -> ObjectiveTerm:
    """Return the objective's term for demonstrations. ConfigError for a loss that compares or chooses responses."""
    if loss == LIKELIHOOD:
        return ObjectiveTerm("likelihood", LikelihoodLoss(average), "likelihood", keep=keep)
    auxiliary = registry.build("auxiliary", loss)
    name = loss.short_name
    if auxiliary.has_weights or auxiliary.smallest_group > 1:
        raise ConfigError(
            f"stage {plan.name!r}: the loss {name!r} chooses or compares sampled responses, and an sft stage has one "
            "given response for each task: use it in algorithm.auxiliary of a grpo stage, or choose another loss"
        )
    if parts := [column for column in auxiliary.reads if column.startswith("advantage/")]:
        raise ConfigError(
            f"stage {plan.name!r}: the loss {name!r} reads the column {parts[0]!r}, and the demonstrations of an sft "
            "stage have no advantage: use it in algorithm.auxiliary of a grpo stage, or choose another loss"
        )
    _check_policies(plan, name, auxiliary)
    if keep and isinstance(auxiliary, SequenceLoss):
        raise ConfigError(
            f"stage {plan.name!r}: token_select leaves out single tokens, and the loss {name!r} is one of whole "
            "responses: leave out token_select or choose a loss of tokens"
        )
    return ObjectiveTerm(name, auxiliary, "likelihood", keep=keep)


def _check_policies(plan: StagePlan, name: str, auxiliary: Loss | SequenceLoss) -> None:
    """ConfigError for a loss of the ratio to a policy that sampled: nobody sampled a demonstration."""
    optim = plan.config.optim
    if BEHAVIOUR_LOGPROBS in auxiliary.needs:
        fix = "choose another loss"
    elif PROXIMAL_LOGPROBS in auxiliary.needs and optim.updates_per_batch * optim.epochs_per_batch > 1:
        # In the first optimizer step of a batch it is the current policy, in later ones that which sampled.
        fix = "set optim.updates_per_batch and epochs_per_batch to 1, or choose another loss"
    else:
        return
    raise ConfigError(
        f"stage {plan.name!r}: the loss {name!r} reads log-probs of the policy that sampled, and demonstrations of an "
        f"sft stage have none: {fix}"
    )


def _is_number(value: Any) -> bool:
    # JSON has no NaN, but Python's reader takes it, and a label NaN would be an undecided reward.
    return isinstance(value, (int, float)) and bool(np.isfinite(value))


def _check_demonstrations(plan: StagePlan, tasks: Iterable[Task]) -> None:
    for task in tasks:
        if not task.demonstration:
            raise DataError(
                f"stage {plan.name!r}: {task.named} has no demonstration to learn from; map one (fields: "
                "{demonstration: COLUMN}) or leave it out"
            )
