"""rlvr.testing: its checks pass on the library's own pieces and refuse pieces that are broken in one way each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rlvr import Task, Verdict, Verifier
from rlvr.components import Environment
from rlvr.core.needs import Need
from rlvr.losses import LossTerm
from rlvr.testing import (
    check_advantage,
    check_environment,
    check_loss,
    check_modifier,
    check_plan,
    check_reward,
    check_selector,
    check_trains,
    check_verifier,
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


@pytest.mark.gate
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


SUM = Task("1", "2+2=", answer="4")


class Sums(Verifier):
    """Checks a sum, with one thing wrong, or nothing."""

    def __init__(self, wrong=""):
        self.wrong = wrong
        self.seen = set()

    def check_task(self, task):
        return "no task is good enough" if self.wrong == "task" else None

    def verify(self, task, completion):
        again = completion in self.seen
        self.seen.add(completion)
        if self.wrong == "raises" and not completion:
            raise ValueError("there is nothing to read")
        if self.wrong == "changes" and again:
            return Verdict.from_score(completion != task.answer)
        if self.wrong == "generous":
            return Verdict.from_score(task.answer in completion)
        return Verdict.from_score(completion == task.answer and self.wrong != "strict")


def test_a_verifier_passes():
    check_verifier("exact", SUM, right=["4"], wrong=["5", "4 or 5"])
    check_verifier(Sums(), SUM, right=["4"], wrong=["5", "4 or 5"])


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("task", "refuses the task: no task is good enough"),
        ("raises", "is undecided: .*nothing to read"),
        ("changes", "the second time"),
        ("generous", "the wrong answer '4 or 5' scores 1"),
        ("strict", "the right answer '4' scores 0"),
    ],
)
def test_a_broken_verifier_is_refused(wrong, rule):
    with pytest.raises(AssertionError, match=rule):
        check_verifier(Sums(wrong), SUM, right=["4"], wrong=["5", "4 or 5"])


class Counting(Environment):
    """Tells how many turns there were, with one thing wrong, or nothing."""

    def __init__(self, wrong=""):
        self.wrong = wrong
        self.turns = 0

    def begin(self, task):
        return self if self.wrong == "shared" else Counting(self.wrong)

    async def reply(self, text):
        self.turns += 1
        if self.wrong == "number":
            return self.turns
        return None if text == "end" else str(self.turns)


def test_environments_and_tools_pass():
    check_environment("calculator", SUM, ["[2+2]", "4"])
    check_environment({"name": "script", "replies": ["Sure?"]}, SUM, ["4", "yes"])
    check_environment(Counting(), SUM, ["a", "b", "end"])


@pytest.mark.parametrize(("wrong", "rule"), [("shared", "share a state"), ("number", "is 1, not text")])
def test_a_broken_environment_is_refused(wrong, rule):
    with pytest.raises(AssertionError, match=rule):
        check_environment(Counting(wrong), SUM, ["a", "b", "end"])


PLANS = """
import random

from rlvr.rollout import Request, make_rollout


async def plan(draw, context, *, wrong=""):
    prompt = context.encode(draw.task)
    for number in range(context.group_size):
        seed = random.getrandbits(60) if wrong == "chance" else context.seed(draw.number, number, 0)
        request = Request(prompt, context.sampling, seed)
        rollout = make_rollout(draw, number, request, await context.generate(request))
        if wrong == "ids":
            rollout.id = "the same"
        yield await context.verify(rollout)
"""


def test_plans(tmp_path):
    (tmp_path / "plans.py").write_text(PLANS)
    assert len(check_plan(tmp_path, f"{tmp_path}/plans.py:plan")) == 12
    for wrong, rule in {"chance": "differs between two runs", "ids": "the same id"}.items():
        with pytest.raises(AssertionError, match=rule):
            check_plan(tmp_path, {"name": f"{tmp_path}/plans.py:plan", "wrong": wrong})
