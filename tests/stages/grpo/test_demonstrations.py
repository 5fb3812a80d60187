"""`algorithm.demonstrations`: refused where no demonstration is learned beside the groups of a step."""

from __future__ import annotations

import pytest

from rlvr.errors import ConfigError

LEARNED = [{"name": "likelihood", "on": "demonstrations"}]


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        ({}, "no term learns them: add {name: likelihood, on: demonstrations} to algorithm.auxiliary"),
        ({"auxiliary": [{"name": "likelihood", "on": "right"}]}, "no term learns them"),
        ({"auxiliary": LEARNED, "supervised_steps": {"gather": 2}}, "in steps of their own: leave one of them out"),
        ({"auxiliary": LEARNED}, None),
    ],
    ids=["no term", "a term on sampled responses", "steps of their own", "a term"],
)
def test_sampled_without_a_term_that_learns_them_is_refused(make_trainer, algorithm, problem):
    tree = {"algorithm": {**algorithm, "demonstrations": "sampled"}}
    if problem is None:
        make_trainer(tree)
        return
    with pytest.raises(ConfigError, match=problem):
        make_trainer(tree)
