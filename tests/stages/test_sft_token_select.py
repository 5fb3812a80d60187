"""`token_select` of the sft stage: selectors of the tokens of demonstrations, through the real trainer."""

from __future__ import annotations

import pytest

from rlvr.errors import ConfigError
from small_run import changed, weights


def supervised(**stage):
    return {"run": {"steps": 2}, "stages": [{"kind": "sft", "average": "sequences", **stage}]}


def trained(make_trainer, name, **stage):
    trainer = make_trainer(supervised(**stage), name=name)
    trainer.train()
    return weights(trainer)


def test_selected_tokens_alone_are_learned(make_trainer):
    everything = trained(make_trainer, "everything")
    all_selected = trained(make_trainer, "all", token_select=[{"name": "surprise_over_entropy", "share": 1.0}])
    some = trained(make_trainer, "some", token_select=[{"name": "surprise_over_entropy", "share": 0.5}])
    assert not changed(everything, all_selected)
    assert changed(everything, some)


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ({"token_select": ["top"]}, "no token_selector 'top'"),
        (
            {"token_select": ["top_entropy", {"name": "covariance_softmax", "bound": 2.0}]},
            "token_select: 'covariance_softmax' reads advantages, and .* have none: leave it out, or name it",
        ),
        (
            {"token_select": ["top_entropy"], "loss": "outcome_classifier"},
            "token_select leaves out single tokens, and the loss 'outcome_classifier' is one of whole responses",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_selected_is_refused(make_trainer, stage, problem):
    with pytest.raises(ConfigError, match=problem):
        make_trainer(supervised(**stage))


def controlled(selector, option):
    """The selector with `option` driven by the gradient norm, which is far above its target: times 1.1 in each step,
    for an error that is clipped at 0.2 and a gain of 0.5."""
    driven = {"metric": "grad_norm", "target": 1e-9, "initial": 0.5, "gain": 0.5, "maximum": 1.0}
    return {"name": selector, option: driven}


def test_a_controller_of_a_selector_moves_once_a_step_and_goes_on_in_a_resumed_run(make_trainer):
    expected = [0.5, 0.55, 0.605, 0.6655]
    stage = {"kind": "sft", "token_select": [controlled("top_entropy", "share")]}
    trainer = make_trainer({"run": {"steps": 4}, "stages": [stage]}, name="whole")
    assert [row["schedule/TopEntropy.share"] for row in trainer.train()] == pytest.approx(expected)
    first = make_trainer({"run": {"steps": 4}, "stages": [stage]}, name="parts")
    first.train(2)
    first.close()
    second = make_trainer({"run": {"steps": 4}, "stages": [stage]}, name="parts", resume="auto")
    assert [row["schedule/TopEntropy.share"] for row in second.train()][-2:] == pytest.approx(expected[2:])
    assert not changed(weights(trainer), weights(second))


def test_a_selector_of_two_terms_moves_once_a_step(make_trainer):
    """The policy loss and the entropy bonus of a grpo stage share the selectors of `token_select`."""
    algorithm = {"entropy": 0.01, "token_select": [controlled("top_entropy", "share")]}
    # The length is rewarded, so that every step has a gradient.
    tree = {"run": {"steps": 3}, "rewards": [{"name": "length", "per": 3}], "algorithm": algorithm}
    rows = make_trainer(tree).train()
    assert all(row["grad_norm"] for row in rows)
    assert [row["schedule/TopEntropy.share"] for row in rows] == pytest.approx([0.5, 0.55, 0.605])
