"""Coefficients of the KL penalty by source, turn and part: what reaches the tokens, in the loss and in the reward."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.config import KLScaleConfig
from rlvr.errors import ConfigError
from rlvr.records import Segment
from small_run import changed, overlaid, task_rows, weights

TURNS = {
    "stop": list("02468"),
    "plan": {"name": "turns", "turns": 2, "environment": {"name": "script", "replies": ["="]}},
}


def scaled(where="loss", **scale):
    return {"algorithm": {"kl": {"coef": 0.5, "where": where, "scale": scale}}}


def sourced():
    return [{**row, "source": "even" if n % 2 == 0 else "odd"} for n, row in enumerate(task_rows())]


def by_hand(rollout, by, factors, other, letter):
    """The factor of each token, found letter by letter; `letter` is the text of a token, none for a special one."""
    values, turn, text = [], 0, ""
    thinking = rollout.text.find("=") + 1 or len(rollout.text)
    for t, on in enumerate(rollout.sampled):
        if not on:
            values.append(1.0)
            continue
        turn += int(t == 0 or not rollout.sampled[t - 1])
        text += letter(rollout.token_ids[t])
        part = "think" if len(text) <= thinking else "answer"
        name = {"source": rollout.task.source, "turn": str(turn), "part": part}[by]
        values.append(factors.get(name, other))
    return values


CASES = {
    "source": ({"odd": 4.0}, 0.5, {}),
    "turn": ({"1": 10.0}, 1.0, TURNS),
    "part": ({"think": 0.0, "answer": 3.0}, 1.0, {}),
}


@pytest.mark.parametrize("where", ["loss", "reward", "advantage"])
@pytest.mark.parametrize("by", CASES)
def test_every_token_has_its_factor(make_trainer, by, where):
    factors, other, rollout = CASES[by]
    written = {int(k) if k.isdigit() else k: v for k, v in factors.items()}  # YAML reads numbers
    over = overlaid(
        scaled(where, by=by, factors=written, other=other, closing="="), {"rollout": {**rollout, "ignore_eos": True}}
    )
    trainer = make_trainer(overlaid(over, {"rollout": {"max_new_tokens": 12, "prompts_per_step": 6}}), tasks=sourced())
    before = weights(trainer)
    trainer.train(2)
    assert changed(before, weights(trainer))
    batch, seen = trainer.batch, set()
    decode = trainer.policy.tokenizer.decode
    for i, r in enumerate(batch.rollouts):
        want = np.asarray(by_hand(r, by, factors, other, lambda t: decode([int(t)], skip_special_tokens=True)))
        seen |= set(want[r.sampled].tolist())
        if where == "loss":
            np.testing.assert_array_equal(batch.token_columns["factor/kl"][i], want)
        else:
            d = batch.token_columns["logprobs/reference"][i] - batch.token_columns["logprobs/current"][i]
            on = r.sampled
            k3 = np.expm1(d[on].astype(float)) - d[on]
            np.testing.assert_allclose(batch.token_columns["penalty"][i][on], 0.5 * want[on] * k3, atol=1e-7)
    assert len(seen) > 1


def test_a_factor_of_nothing_is_no_penalty(make_trainer):
    """Factors of 0 everywhere: the weights of a run without the term; of 2: those of twice the coefficient."""
    runs = {}
    for name, kl in {
        "none": None,
        "nothing": {"coef": 0.5, "scale": {"by": "turn", "factors": {1: 0}}},
        "twice": {"coef": 1.0},
        "by two": {"coef": 0.5, "scale": {"by": "turn", "factors": {}, "other": 2}},
    }.items():
        trainer = make_trainer({"algorithm": {"kl": kl} if kl else {}}, name.replace(" ", "-"))
        trainer.train(3)
        runs[name] = weights(trainer)
    for left, right, same in (("none", "nothing", True), ("twice", "by two", True), ("none", "twice", False)):
        gap = max(float((runs[left][k] - runs[right][k]).abs().max()) for k in runs[left])
        assert (gap < 1e-6) == same, (left, right, gap)


def test_parts_of_a_text_with_turns(make_trainer):
    from rlvr.stages.grpo.kl_scale import kl_factors

    trainer = make_trainer({"rollout": {"max_new_tokens": 4, "ignore_eos": True}})
    trainer.train(1)
    rollout = trainer.batch.rollouts[0]
    first = int(np.flatnonzero(rollout.sampled)[0])
    rollout.segments = [
        Segment("turn", first, first + 1),
        Segment("tool", first + 1, first + 2),
        Segment("turn", first + 2, first + 4),
    ]
    scale = KLScaleConfig(by="turn", factors={"2": 7.0}, other=0.25)
    [values] = kl_factors(trainer.batch.select([0]), scale, trainer.policy.tokenizer)
    assert values[first:].tolist() == [0.25, 0.25, 7.0, 7.0] and (values[:first] == 1).all()


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        ({"by": "source", "factors": {"evn": 2}}, "names 'evn', and no task is of that source.*did you mean 'even'"),
        ({"by": "turn", "factors": {2: 2}}, "names turn 2, and rollout.plan has 1 at most"),
        ({"by": "turn", "factors": {0: 2}}, "numbers turns from 1"),
        ({"by": "turn", "factors": {"first": 2}}, "numbers turns from 1"),
        ({"by": "part", "factors": {"thinking": 2}}, "knows think and answer, not 'thinking'"),
        ({"by": "part", "factors": {"think": -1}}, "greater than or equal to 0"),
        ({"by": "part", "factors": {}, "closing": ""}, "at least 1 character"),
        ({"by": "segment", "factors": {}}, "source"),
    ],
    ids=str,
)
def test_what_the_run_does_not_have_is_named(make_trainer, scale, problem):
    with pytest.raises(ConfigError, match=problem):
        make_trainer(scaled(**scale), tasks=sourced())
