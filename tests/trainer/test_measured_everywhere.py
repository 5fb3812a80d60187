"""Entropy and mismatch are of everything that was sampled, groups without an advantage included."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.rollout.hf import HFEngine


def wrong_engine(monkeypatch, by, when=lambda row: True):
    """The hf engine says log-probs that are off by `by` at the tokens of the rows for which `when` holds."""
    plain = HFEngine._settle

    def settle(engine, rows, i, reason):
        if when(rows, i):
            rows.logprobs[i] += by
        return plain(engine, rows, i, reason)

    monkeypatch.setattr(HFEngine, "_settle", settle)


def constant(completion):
    return 1.0


def sampled_logprobs(rollouts):
    return np.concatenate([r.behaviour_logprobs[r.sampled] for r in rollouts]).astype(np.float64)


@pytest.mark.slow
def test_where_all_groups_agree_both_are_measured(make_trainer, monkeypatch, forwards):
    """No group has an advantage: mismatch and entropy are numbers, for one pass without gradient; a wrong engine
    shows."""
    over = {"rollout": {"prompts_per_step": 4}, "run": {"steps": 1}}
    with make_trainer(over, verifier=constant) as trainer:
        (row,) = trainer.train()
        rollouts = trainer.batch.rollouts
    assert row["group/zero_variance"] == 1.0 and row["tokens/trained"] == 0
    assert 0 <= row["mismatch/mean"] <= row["mismatch/max"] < 1e-4
    assert row["entropy"] == pytest.approx(-sampled_logprobs(rollouts).mean(), rel=1e-9)
    assert row["entropy/trained"] is None
    assert forwards == [(8, False)]
    wrong_engine(monkeypatch, -0.5, lambda rows, i: True)
    with make_trainer(over, "wrong", verifier=constant) as trainer:
        (row,) = trainer.train()
    assert row["mismatch/mean"] == pytest.approx(0.5, abs=1e-3)


def test_the_entropy_counts_rollouts_that_were_dropped(make_trainer):
    """It is over all that was sampled, as reward and verdicts are; that of trained tokens has a name of its own."""
    rollout = {"dynamic_sampling": {"attempts": 4}, "group_size": 2, "prompts_per_step": 4}
    over = {"rollout": rollout, "run": {"steps": 2}, "algorithm": {"entropy": 0.01}}
    collected = []
    with make_trainer(over) as trainer:
        stage = trainer.stages[0]
        collect = stage.collect
        stage.collect = lambda step: collected.append(collect(step)) or collected[-1]
        rows = trainer.train()
    assert any(c.dropped for c in collected), "groups were dropped"
    for row, got in zip(rows, collected, strict=True):
        assert row["entropy"] == pytest.approx(-sampled_logprobs([*got.rollouts, *got.dropped]).mean(), rel=1e-9)
        assert row["entropy/trained"] > 0


def test_a_stage_that_does_not_sample_falls_back_to_the_exact_entropy(make_trainer):
    over = {"stages": [{"kind": "sft", "steps": 1}, {"kind": "grpo", "steps": 1}], "run": {"steps": None}}
    with make_trainer(over) as trainer:
        sft, grpo = trainer.train()
    assert sft["entropy"] == sft["entropy/trained"] > 0 and sft["mismatch/mean"] is None
    assert grpo["entropy"] > 0
