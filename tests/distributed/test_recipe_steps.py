"""Steps that newer recipes have, on two ranks: the run of one process, and ranks that agree in every step."""

from __future__ import annotations

import pytest
from launching import configured, rows, sampled, trained

pytestmark = pytest.mark.alone

SAME = ("tokens/trained", "tokens/sampled", "rollout/dropped", "update/steps", "lr")
CLOSE = ("reward/mean", "loss/total", "grad_norm", "entropy/trained")

LEARNED = [{"name": "likelihood", "on": "demonstrations"}]
RELIFT = {
    "run": {"name": "run", "steps": 6},
    "data": {"train": {"name": "arithmetic", "count": 64, "digits": [2]}},
    "algorithm": {
        "auxiliary": LEARNED,
        # Untrained answers have some digits: half of them is what a failed response has at most.
        "supervised_steps": {"gather": 6, "failed": 0.5},
        "decoupled": True,
        "correction": None,
        "token_select": [{"name": "top_entropy", "share": 0.8}],
    },
}
"""ReLIFT: tasks of failed groups are learned in steps of their own. Rank 0 alone gathers them."""
RLPR = {
    "run": {"name": "run", "steps": 3},
    "rewards": ["entropy"],
    "rollout": {"dynamic_sampling": {"by": "selection", "attempts": 3}},
    "algorithm": {"select": [{"name": "spread", "share": 1.0, "decay": 0.5}], "modifiers": ["entropy"]},
}
"""RLPR's rounds: groups are drawn anew for those that selection drops, scored by the policy on all ranks."""
SELF = {
    "run": {"name": "run", "steps": 3},
    "data": {"train": {"name": "arithmetic", "count": 64, "digits": [2]}},
    "rollout": {"plan": {"name": "single_turn", "baseline": "greedy", "probe": True}},
    "algorithm": {"auxiliary": LEARNED, "demonstrations": "sampled"},
}
"""SELF: a probe, and demonstrations of solved tasks too. No answer of the verifier here is all digits."""

SPANS = {
    "run": {"name": "run", "steps": 3},
    "rewards": ["verdict", {"name": "repeated_tokens", "n": 1}],
    "algorithm": {"advantage": {"name": "spans", "terms": {"repeated_tokens": {"credit": "own", "weight": 0.5}}}},
}
"""Credit of spans, which every rank computes."""


def same_run(run, other):
    assert sampled(run) == sampled(other)
    assert len(rows(run)) == len(rows(other)) > 0
    for mine, theirs in zip(rows(run), rows(other), strict=True):
        assert {name: mine[name] for name in SAME} == {name: theirs[name] for name in SAME}
        # None in a step that learns demonstrations alone: it has no reward.
        measured = {name for name in CLOSE if mine[name] is not None}
        assert measured == {name for name in CLOSE if theirs[name] is not None}
        assert {n: mine[n] for n in measured} == pytest.approx({n: theirs[n] for n in measured}, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(RELIFT, id="relift", marks=pytest.mark.slow),
        pytest.param(RLPR, id="rlpr", marks=pytest.mark.slow),
        pytest.param(SELF, id="self", marks=pytest.mark.slow),
        pytest.param(SPANS, id="spans", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_the_same_run_as_one(tmp_path, sections):
    for ranks, name in ((1, "one"), (2, "two")):
        finished = trained(ranks, configured(tmp_path / name, **sections))
        assert [status for status, _ in finished] == [0] * ranks, finished
    same_run(tmp_path / "two" / "run", tmp_path / "one" / "run")
    result = rows(tmp_path / "two" / "run")
    # The parts that the recipe is about took place.
    if sections is RELIFT:
        kinds = [row["reward/mean"] is None for row in result]
        assert set(kinds) == {True, False}
    if sections is RLPR:
        assert any(row["rollout/dropped"] for row in result)
    if sections is SELF:
        assert all(row["loss/likelihood"] > 0 for row in result)


@pytest.mark.slow
def test_a_resumed_run_of_two_ranks_learns_the_tasks_that_had_failed(tmp_path):
    whole = configured(tmp_path / "whole", **RELIFT)
    parts = configured(tmp_path / "parts", **{**RELIFT, "run": {"name": "run", "steps": 3}})
    for config in (whole, parts):
        assert [status for status, _ in trained(2, config)] == [0, 0]
    finished = trained(2, parts, "run.steps=6", "--resume", "auto")
    assert [status for status, _ in finished] == [0, 0], finished
    same_run(tmp_path / "parts" / "run", tmp_path / "whole" / "run")
