"""Dynamic sampling by selection: groups that selection drops are drawn anew, in rounds, through the real trainer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rlvr.errors import ConfigError
from rlvr.policy.statistics import add_statistics
from rlvr.rollout import StepRollouts
from rlvr.stages.grpo import scoring
from rlvr.stages.grpo.redraw import add_round, drop_draws
from small_run import changed, overlaid, timeless, weights

PROMPTS = 3


def by_selection(over=None, attempts=5):
    """The reward is the policy's entropy, so that it needs a forward pass; half of the groups are below the mean."""
    tree = {
        "run": {"steps": 5},
        "rewards": ["entropy"],
        "rollout": {
            "prompts_per_step": PROMPTS,
            "group_size": 3,
            "dynamic_sampling": {"by": "selection", "attempts": attempts},
        },
        "algorithm": {"select": [{"name": "spread", "share": 1.0, "decay": 0.5}]},
    }
    return overlaid(tree, over or {})


def watched(trainer):
    """What each step of a trainer scores, with the rewards taken anew by one pass over all that trains."""
    stage = trainer.stages[0]
    score = stage.score
    seen = []

    def spied(collected):
        anew = stage.scoring.score(collected.rollouts, trainer.policy, stage.context.history, (0, 1), peek=True)
        seen.append((collected, anew.column("reward")))
        return score(collected)

    stage.score = spied
    return seen


def deviations(collected):
    """Draw -> (standard deviation of its rewards, whether it trains)."""
    rewards = collected.columns["reward"]
    everyone = [*collected.rollouts, *collected.dropped]
    by_draw = {}
    for position, rollout in enumerate(everyone):
        by_draw.setdefault(int(rollout.group), []).append(position)
    return {
        draw: (float(np.std(rewards[positions])), positions[0] < len(collected.rollouts))
        for draw, positions in sorted(by_draw.items())
    }


@pytest.mark.parametrize("attempts", [5, 1])
def test_the_groups_that_train_are_the_first_that_selection_keeps(make_trainer, attempts):
    """The filter of RLPR written anew: rounds until the step is whole or has its attempts, each draw in one step."""
    trainer = make_trainer(by_selection(attempts=attempts))
    seen = watched(trainer)
    rows = trainer.train()
    average = None
    rounds = 0
    every_draw = []
    for (collected, anew), row in zip(seen, rows, strict=True):
        np.testing.assert_allclose(collected.columns["reward"][: len(anew)], anew, rtol=1e-5)
        groups = deviations(collected)
        every_draw += groups
        bound = 0.0 if average is None else average
        for draw, (deviation, trains) in groups.items():
            assert trains == (deviation >= bound), draw
        trained = [draw for draw, (_, trains) in groups.items() if trains]
        assert len(trained) == PROMPTS or len(groups) == PROMPTS * attempts
        # The last draw trains where the step is whole: no more are drawn than are needed.
        assert len(trained) < PROMPTS or max(groups) in trained
        rounds += len(groups) > PROMPTS
        assert row["rollout/dropped"] == 3 * (len(groups) - len(trained))
        mean = np.mean([deviation for deviation, _ in groups.values()])
        average = mean if average is None else 0.5 * average + 0.5 * mean
    assert every_draw == list(range(len(every_draw))), "a draw was lost or taken twice"
    assert (rounds > 0) == (attempts > 1)
    assert any(row["rollout/dropped"] for row in rows)


@pytest.mark.parametrize("modifiers", [[], ["entropy"]], ids=["rewards alone read it", "advantages read it too"])
def test_a_round_is_not_scored_again_with_the_next(make_trainer, monkeypatch, modifiers):
    """The policy's entropy of each response is computed once, for its reward. Where advantages read it as well, once
    more for all that was sampled together, as for recorded rollouts."""
    passes = []

    def counted(policy, batch, needs, where, config):
        passes.append([rollout.id for rollout in batch.rollouts])
        return add_statistics(policy, batch, needs, where, config)

    monkeypatch.setattr(scoring, "add_statistics", counted)
    trainer = make_trainer(by_selection({"run": {"steps": 3}, "algorithm": {"modifiers": modifiers}}))
    rows = trainer.train()
    # Rounds there were: some step dropped groups.
    assert any(row["rollout/dropped"] for row in rows)
    times = Counter(name for one in passes for name in one)
    assert set(times.values()) == {2 if modifiers else 1}


def test_a_resumed_run_draws_the_same(make_trainer):
    whole = make_trainer(by_selection(), "whole")
    whole.train()
    first = make_trainer(by_selection(), "parts")
    first.train(3)
    first.close()
    second = make_trainer(by_selection(), "parts")
    second.train(resume="auto")
    assert timeless(second.metrics) == timeless(whole.metrics)
    assert changed(weights(whole), weights(second)) == []


def test_a_round_that_fails_gives_all_draws_of_the_step_back(make_trainer):
    trainer = make_trainer(by_selection())
    stage = trainer.stages[0]
    trainer.train(2)
    more = stage.collect_more
    stage.collect_more = lambda count: 1 / 0
    # The filter of some later step drops a group, and the round in its place fails.
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    failed_at = trainer.step
    stage.collect_more = more
    trainer.train(1)
    assert trainer.step == failed_at + 1
    whole = make_trainer(by_selection(), "whole")
    whole.train(failed_at + 1)
    assert changed(weights(whole), weights(trainer)) == []


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({"algorithm": {"select": []}}, "algorithm.select is empty"),
        ({"algorithm": {"select_after": True}}, "set it to false"),
        ({"rollout": {"staleness": 1}}, "set it to 0"),
        ({"rollout": {"dynamic_sampling": {"oversample": 1.5}}}, "set it to 1"),
        ({"rewards": ["verdict", "adaptive_length_target"]}, "follows the run step by step"),
    ],
)
def test_refusals(make_trainer, over, problem):
    with pytest.raises(ConfigError, match=problem):
        make_trainer(by_selection(over))


def rollouts_of(make_rollout, *groups):
    return [make_rollout([1], prompt=1, group=group, member=member) for group in groups for member in range(2)]


def test_columns_stay_beside_their_rollouts(make_rollout):
    """Each rollout's number, as a column, after groups were dropped and a round was added."""
    collected = StepRollouts(rollouts_of(make_rollout, "0", "1", "2"), verifying=1.0)
    collected.columns = {"number": np.arange(6.0)}
    drop_draws(collected, {"0", "2"})
    assert [r.group for r in collected.rollouts] == ["0", "0", "2", "2"]
    assert collected.columns["number"].tolist() == [0, 1, 4, 5, 2, 3]
    further = StepRollouts(rollouts_of(make_rollout, "3"), verifying=0.5, ready=0)
    further.columns = {"number": np.asarray([6.0, 7.0]), "other": np.asarray([8.0, 9.0])}
    collected.further = further
    add_round(collected, further)
    assert [r.group for r in [*collected.rollouts, *collected.dropped]] == list("00223311")
    assert collected.columns["number"].tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    np.testing.assert_array_equal(collected.columns["other"], [np.nan] * 4 + [8, 9] + [np.nan] * 2)
    assert (collected.further, collected.verifying, collected.ready) == (None, 1.5, 0)
