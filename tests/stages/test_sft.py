"""A stage of given responses: losses of their labels, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.errors import ConfigError, DataError
from rlvr.records import Origin
from small_run import overlaid, task_rows


def labelled(count=6):
    return [{**row, "label": n % 2, "demonstration": str(n % 2) * 3} for n, row in enumerate(task_rows(count))]


def stage(**options):
    return {"stages": [{"kind": "sft", "loss": {"name": "outcome_classifier", "beta": 0.5}, **options}]}


def test_an_implicit_reward_model_learns_its_labels(make_trainer):
    """The log-ratio of responses of label 1 rises above 0, that of the others falls below it."""
    over = overlaid(stage(), {"run": {"steps": 40}, "rollout": {"prompts_per_step": 6}, "logging": {"rollouts": 0}})
    trainer = make_trainer(over, tasks=labelled())
    trainer.train()
    rows = trainer.metrics
    assert rows[0]["loss/outcome_classifier"] == pytest.approx(np.log(2), rel=1e-4)  # the model is its own reference
    assert rows[-1]["loss/outcome_classifier"] < 0.2
    batch = trainer.batch
    for i, rollout in enumerate(batch.rollouts):
        on = rollout.origin == Origin.DEMONSTRATION
        now, then = batch.token_columns["logprobs/updated"][i][on], batch.token_columns["logprobs/reference"][i][on]
        assert (float((now - then).sum()) > 0) == (rollout.task.info["label"] == 1)


@pytest.mark.parametrize(
    ("over", "rows", "error", "problem"),
    [
        (stage(), task_rows(), DataError, "task 't0' has no `label`"),
        (stage(), [{**labelled()[0], "label": "yes"}], DataError, "has no `label`"),
        (stage(loss="dpo"), labelled(), ConfigError, "the loss 'dpo' chooses or compares sampled responses"),
        (stage(loss="likelihod"), labelled(), ConfigError, "likelihood"),
        (stage(loss={"name": "likelihood", "threshold": 0.5}), labelled(), ConfigError, "chooses or compares"),
    ],
    ids=["no label", "no number", "pairs", "typo", "chosen"],
)
def test_what_a_stage_of_given_responses_cannot_do(make_trainer, over, rows, error, problem):
    with pytest.raises(error, match=problem):
        make_trainer(over, tasks=rows)


RATIO_LOSS = """
from rlvr.components import Loss
from rlvr.core.needs import Need
from rlvr.losses.tokens import LossTerm


class OfRatio(Loss):
    average = "tokens"
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", "MODEL")})

    def __call__(self, tokens, over):
        return LossTerm(tokens.average(tokens.logprobs, self.average, over))
"""


@pytest.mark.parametrize(
    ("model", "updates", "problem"),
    [
        ("behaviour", 1, "reads log-probs of the policy that sampled, .* have none: choose another loss"),
        ("proximal", 2, "have none: set optim.updates_per_batch and epochs_per_batch to 1"),
        ("proximal", 1, None),
    ],
)
def test_a_ratio_to_a_policy_that_sampled_nothing_is_refused_at_the_start(
    make_trainer, tmp_path, model, updates, problem
):
    file = tmp_path / "of_ratio.py"
    file.write_text(RATIO_LOSS.replace("MODEL", model))
    over = {"stages": [{"kind": "sft", "loss": f"{file}:OfRatio"}], "optim": {"updates_per_batch": updates}}
    if problem is None:
        # In the first optimizer step of a batch the proximal policy is the current one.
        assert make_trainer(over).train()[0]["loss/OfRatio"] < 0
        return
    with pytest.raises(ConfigError, match=problem):
        make_trainer(over)
