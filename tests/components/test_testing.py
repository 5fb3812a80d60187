"""rlvr.testing: its checks pass on the library's own pieces and refuse pieces that are broken in one way each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rlvr.core.needs import Need
from rlvr.losses import LossTerm
from rlvr.testing import (
    check_advantage,
    check_loss,
    check_modifier,
    check_reward,
    check_selector,
    check_trains,
    made_up_batches,
    make_batch,
)


def test_made_up_batches_repeat_and_hold_the_edge_cases():
    first, second = list(made_up_batches()), list(made_up_batches())
    assert [b.digest() for b in first] == [b.digest() for b in second]
    assert any(len(b) == 1 for b in first) and any(len(b) >= 100 for b in first)
    assert any(not np.isfinite(b.column("reward")).any() for b in first)
    assert any(r.completion_length == 0 for b in first for r in b.rollouts)
    assert make_batch([[1.0, None]]).rollouts[1].verdict.score is None


@pytest.mark.parametrize("piece", ["group", {"name": "group", "baseline": "leave_one_out", "scale": "none"}])
def test_group_advantages_pass(piece):
    check_advantage(piece)


def half_way(batch):
    """Better than half: 15 lines of a user's own, in three."""
    reward = batch.column("reward")
    return np.where(np.isfinite(reward), reward - 0.5, 0.0)


def batch_mean(batch):
    reward = batch.column("reward")
    return np.nan_to_num(reward - np.nanmean(reward)) if np.isfinite(reward).any() else np.zeros(len(batch))


def by_place(batch):
    return np.where(np.isfinite(batch.column("reward")), np.arange(len(batch)), 0.0)


@pytest.mark.parametrize(
    ("piece", "options", "rule"),
    [
        (lambda batch: batch.column("reward"), {}, "must be finite"),
        (lambda batch: np.nan_to_num(batch.column("reward"), nan=0.3), {}, "must get 0"),
        (lambda batch: np.zeros(len(batch) + 1), {}, "has shape"),
        (lambda batch: [np.zeros(2) for _ in batch.rollouts], {}, "per token has the shapes"),
        (by_place, {}, "shuffling"),
        (batch_mean, {}, "groups that were added"),
        (half_way, {}, "a group of equal rewards"),
    ],
)
def test_a_broken_advantage_is_refused(piece, options, rule):
    with pytest.raises(AssertionError, match=rule):
        check_advantage(piece, **options)


def test_an_advantage_without_a_group_baseline_passes_when_it_says_so():
    check_advantage(half_way, zero_when_equal=False)
    check_advantage(batch_mean, by_group=False, zero_when_equal=False)


def test_modifiers():
    check_modifier(lambda batch, advantages: np.clip(advantages, -0.2, 0.2))
    with pytest.raises(AssertionError, match="not finite"):
        check_modifier(lambda batch, advantages: advantages / 0.0)
    with pytest.raises(AssertionError, match="groups that were added"):
        check_modifier(lambda batch, advantages: advantages - advantages.mean())


def test_reward_terms():
    check_reward("verdict")
    check_reward({"name": "length", "per": 10})
    check_reward(lambda completion: len(completion) / 10)
    with pytest.raises(AssertionError, match="one number each"):
        check_reward(lambda batch: np.zeros(1))
    with pytest.raises(AssertionError, match="infinite"):
        check_reward(lambda batch: np.full(len(batch), np.inf))
    with pytest.raises(AssertionError, match="shuffling"):
        check_reward(lambda batch: np.arange(len(batch), dtype=float))


@pytest.mark.parametrize("piece", ["mixed_groups", "decided"])
def test_selectors_pass(piece):
    check_selector(piece)


@pytest.mark.parametrize(
    ("piece", "rule"),
    [
        (lambda batch: [0, 0], "selected twice"),
        (lambda batch: [len(batch)], "does not have"),
        (lambda batch: np.argsort(-np.nan_to_num(batch.column("reward")), kind="stable")[:2], "groups that were added"),
    ],
)
def test_a_broken_selector_is_refused(piece, rule):
    with pytest.raises(AssertionError, match=rule):
        check_selector(piece)


@pytest.mark.parametrize("average", ["tokens", "sequences", "constant"])
def test_the_clipped_loss_passes(average):
    check_loss({"name": "clip", "average": average})


@dataclass(frozen=True)
class Own:
    """A loss of -A log pi with one thing wrong, or nothing."""

    wrong: str = ""

    needs = frozenset({Need("logprobs", grad=True)})
    average = "tokens"
    zero_without_advantage = True

    def __call__(self, tokens, over):
        value = -tokens.advantage * tokens.logprobs
        if self.wrong == "own mean":
            return LossTerm((tokens.weight * value).sum() / tokens.weight.sum().clamp_min(1.0))
        if self.wrong == "all tokens":
            return LossTerm(value.sum() / over.tokens)
        if self.wrong == "no advantage":
            return LossTerm(tokens.average(value + tokens.logprobs, "tokens", over))
        if self.wrong == "gradient":
            return LossTerm(tokens.average(value + (value - value.detach()), "tokens", over))
        if self.wrong == "infinite":
            return LossTerm(tokens.average(value / 0.0, "tokens", over))
        return LossTerm(tokens.average(value, "tokens", over))


def test_a_loss_of_ones_own_passes():
    check_loss(Own())


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("own mean", "micro-batch"),
        ("all tokens", "weight 0"),
        ("no advantage", "advantage 0"),
        ("gradient", "finite differences"),
        ("infinite", "not finite"),
    ],
)
def test_a_broken_loss_is_refused(wrong, rule):
    with pytest.raises(AssertionError, match=rule):
        check_loss(Own(wrong))


def test_a_piece_of_a_file_is_run_by_the_real_trainer(tmp_path):
    file = tmp_path / "ideas.py"
    file.write_text(
        "import numpy as np\n\n\ndef median(batch):\n"
        "    values = np.zeros(len(batch))\n"
        "    for group in batch.groups():\n"
        "        reward = batch.column('reward')[group.index]\n"
        "        if np.isfinite(reward).any():\n"
        "            values[group.index] = np.nan_to_num(reward - np.nanmedian(reward))\n"
        "    return values\n"
    )
    check_advantage(f"{file}:median")
    rows = check_trains(tmp_path, advantage=f"{file}:median", loss={"name": "clip", "average": "tokens"})
    assert [row["step"] for row in rows] == [1, 2]
