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
            {"token_select": ["top_entropy"], "loss": "outcome_classifier"},
            "token_select leaves out single tokens, and the loss 'outcome_classifier' is one of whole responses",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_selected_is_refused(make_trainer, stage, problem):
    with pytest.raises(ConfigError, match=problem):
        make_trainer(supervised(**stage))
