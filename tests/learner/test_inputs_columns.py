"""Losses that read columns of the batch: by origin, by source, by a plan's note and by spans, however the step is cut;
in the trainer, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from learner_steps import CUTS, component
from number_oracles import gap, gradient_of, token_statistics
from rlvr.components import Loss
from rlvr.core.needs import LOGPROBS_WITH_GRADIENT
from rlvr.core.span_rewards import span_scores
from rlvr.errors import ConfigError
from rlvr.losses import LossTerm, Objective
from rlvr.records import Batch, Origin


@dataclass(frozen=True)
class ByColumns(Loss):
    """-A log pi, three times as strong at a hint's token, times 1 + span, half for the source `hard`, plus the note."""

    average: ClassVar = "tokens"
    needs: ClassVar = frozenset({LOGPROBS_WITH_GRADIENT})
    reads: ClassVar = ("origin", "source/hard", "note/budget", "span/progress")

    def __call__(self, tokens, over):
        columns = tokens.columns
        factor = torch.where(columns["origin"] == Origin.HINT, 3.0, 1.0)
        factor = factor * (1 + columns["span/progress"].nan_to_num(0.0)) * (1 - 0.5 * columns["source/hard"])
        factor = factor + columns["note/budget"].nan_to_num(0.0)
        return LossTerm(-tokens.average(factor * tokens.advantage * tokens.logprobs, self.average, over))


@pytest.fixture
def marked(steps):
    """The recorded batch with hints, notes, sources and spans in it; and the factor of each token, by hand."""
    factors = []
    for i, rollout in enumerate(steps.batch.rollouts):
        written = np.flatnonzero(rollout.sampled)
        factor = np.ones(len(rollout))
        if i % 2:
            rollout.origin[written[0]] = Origin.HINT
            factor[written[0]] = 3.0
        rollout.spans = {}
        if i % 3:
            rollout.spans["progress"] = span_scores([(written[0], written[0] + 2)], [0.1 * i])
            factor[written[0] : written[0] + 2] *= 1 + 0.1 * i
        if rollout.group == steps.batch.rollouts[0].group:
            rollout.task = rollout.task.__class__(**{**vars(rollout.task), "source": "hard"})
            factor *= 0.5
        if i == 1:
            rollout.notes = {"budget": 0.25}
            factor += 0.25
        factors.append(factor)
    return steps, factors


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_tokens_are_weighted_by_origin_source_note_and_span(marked, cut):
    steps, factors = marked
    (gradient,), _ = steps.gradients(Objective((component(ByColumns()),)), **cut)
    total = torch.zeros((), dtype=torch.float64)
    count = 0.0
    for i, rollout in enumerate(steps.batch.rollouts):
        logprobs, _ = token_statistics(steps.model, rollout)
        weight = steps.batch.tokens("weight/policy")[i][1:].astype(np.float64)
        advantage = steps.batch.tokens("advantage")[i][1:]
        total = total - (torch.as_tensor(weight * factors[i][1:] * advantage) * logprobs).sum()
        count += weight.sum()
    assert gap(gradient, gradient_of(steps.model, total / count)) < 1e-4


def test_the_whole_step_is_shown_them_too(marked):
    """`choose` sees the columns of all tokens of the step."""
    steps, _ = marked
    seen = []

    @dataclass(frozen=True)
    class Chosen(ByColumns):
        chooses_by: ClassVar = frozenset({LOGPROBS_WITH_GRADIENT})

        def choose(self, tokens):
            seen.append(tokens.columns["origin"])
            return (tokens.columns["origin"] == Origin.HINT).double()

        def __call__(self, tokens, over):
            return LossTerm(-tokens.average(tokens.chosen * tokens.logprobs, self.average, over))

    (gradient,), _ = steps.gradients(Objective((component(Chosen()),)), micro_batch_size=2)
    assert len(seen) == 1 and (seen[0] == Origin.HINT).any() and (seen[0] == Origin.POLICY).any()
    assert gradient.norm() > 0


def test_columns_of_a_batch(make_rollout):
    batch = Batch([make_rollout([1, 2, 3, 4])])
    np.testing.assert_array_equal(batch.tokens("origin")[0], [0, 0, 0, 1])
    np.testing.assert_array_equal(batch.tokens("source/a")[0], [0.0] * 4)
    assert np.isnan(batch.tokens("note/a")[0]).all() and np.isnan(batch.tokens("span/a")[0]).all()
    batch.token_columns["span/a"] = [np.ones(4)]
    np.testing.assert_array_equal(batch.tokens("span/a")[0], np.ones(4))
    with pytest.raises(KeyError, match="no column 'orgin'"):
        batch.tokens("orgin")


USER = '''
from dataclasses import dataclass
import numpy as np
from rlvr.core.needs import Need
from rlvr.core.span_rewards import SpanRewards

SEEN = []

@dataclass(frozen=True)
class Weighted:
    """-A log pi times the origin and 1 + the span's score."""
    average = "tokens"
    needs = frozenset({Need("logprobs", grad=True)})
    reads = ("origin", "span/digits_by_token")

    def __call__(self, tokens, over):
        from rlvr.losses import LossTerm

        SEEN.append({name: column.tolist() for name, column in tokens.columns.items()})
        factor = tokens.columns["origin"] * (1 + tokens.columns["span/digits_by_token"])
        return LossTerm(-tokens.average(factor * tokens.advantage * tokens.logprobs, self.average, over))

class Misspelt(Weighted):
    reads = ("span/digits_by_tokens",)

class Text(Weighted):
    reads = "origin"

class Whole:
    average = "sequences"
    needs = frozenset({Need("logprobs")})
    reads = ("origin",)

    def sequence_losses(self, sequences):
        return sequences.logprobs

def digits_by_token(batch):
    return SpanRewards.of_tokens(batch, [np.where(r.token_ids % 2, 0.5, -0.5) for r in batch.rollouts])
'''


def test_a_users_loss_in_the_trainer(make_trainer, tmp_path):
    path = tmp_path / "user.py"
    path.write_text(USER)
    over = {
        "rewards": ["verdict", f"{path}:digits_by_token"],
        "algorithm": {"loss": f"{path}:Weighted", "advantage": {"name": "spans", "terms": {"digits_by_token": 0.5}}},
    }
    trainer = make_trainer(over)
    row = trainer.train(1)[0]
    assert row["grad_norm"] > 0 and "span/digits_by_token" in row
    seen = trainer.stages[0].objective().components[0].loss.__call__.__globals__["SEEN"]
    assert {value for one in seen for value in one["origin"]} == {float(Origin.POLICY)}
    assert {value for one in seen for value in one["span/digits_by_token"]} == {0.5, -0.5}
    for name, message in (
        ("Misspelt", "no reward is called so.*did you mean 'digits_by_token'"),
        ("Text", "tuple of names"),
        ("Whole", "whole responses and reads no columns"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_trainer({**over, "algorithm": {"loss": f"{path}:{name}"}}, name)
