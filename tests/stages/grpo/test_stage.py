"""Steps of a grpo stage in which nothing is left to learn from: the run goes on, and says so once."""

from __future__ import annotations

import pytest

from small_run import changed, overlaid, weights

PROBE = {"rollout": {"plan": {"name": "single_turn", "baseline": "greedy", "probe": True}}}
NOTHING = {"algorithm": {"select": [{"name": "pass_rate_band", "low": 2.0, "high": 3.0}]}}
DEMONSTRATIONS = {"algorithm": {"auxiliary": [{"name": "likelihood", "on": "demonstrations"}]}}
GATHER = overlaid(DEMONSTRATIONS, {"algorithm": {"supervised_steps": {"gather": 2}}})


def said(make_trainer, over, name="run", verifier=lambda completion: 1.0):
    """The messages of a run of three steps and whether it changed a weight; every answer is right."""
    trainer = make_trainer(overlaid({"run": {"steps": 3}}, over), name, verifier=verifier)
    messages = []
    trainer.reporting.console.message = lambda text, kind=None: messages.append(text)
    before = weights(trainer)
    assert len(trainer.train()) == 3
    return [text for text in messages if "learned" in text or "optimizer steps" in text], changed(
        before, weights(trainer)
    )


SOLVED = "step 1: nothing was learned, since rollout.plan sampled no group, as where its probe finds every task solved"


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (PROBE, SOLVED),
        (overlaid(PROBE, {"rollout": {"dynamic_sampling": {"attempts": 2}}}), SOLVED),
        # Without groups there are fewer optimizer steps than set, too: one line is enough.
        (overlaid(PROBE, {"optim": {"updates_per_batch": 2}}), SOLVED),
        (
            overlaid(PROBE, {"algorithm": {"modifiers": ["whiten", "entropy"], "kl": {"coef": 0.1}, "entropy": 0.1}}),
            SOLVED,
        ),
        (overlaid(PROBE, {"rewards": ["entropy", "verdict"]}), SOLVED),
        (overlaid(PROBE, GATHER), SOLVED),
        (NOTHING, "step 1: nothing was learned, since algorithm.select left none of the 8 responses"),
    ],
    ids=["probe", "dynamic sampling", "two updates", "terms", "entropy as reward", "failed tasks", "selection"],
)
def test_a_step_without_a_response_to_learn_from_is_said_once(make_trainer, over, message):
    messages, moved = said(make_trainer, over)
    assert len(messages) == 1
    assert messages[0].startswith(message)
    assert not moved


def test_a_step_that_learns_demonstrations_or_equal_groups_is_not_reported(make_trainer):
    sampled = overlaid(DEMONSTRATIONS, {"algorithm": {"demonstrations": "sampled"}})
    messages, moved = said(make_trainer, overlaid(PROBE, sampled), "demonstrations")
    assert moved and not messages
    # Groups of equal rewards have monitors of their own (health).
    messages, moved = said(make_trainer, {}, "equal")
    assert not moved and not messages
