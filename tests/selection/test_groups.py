"""Selectors of whole groups: mixed and decided ones, a band of pass rates, a moving bound on the spread."""

from __future__ import annotations

import pytest

from rlvr import registry
from selector_helpers import NAN, batch_of, kept


def test_mixed_and_decided():
    batch = batch_of([1, 0, NAN], [1, 1], [NAN], [0.5, NAN])
    assert kept("mixed_groups", batch) == [0, 1, 2]
    assert kept("decided", batch) == [0, 1, 3, 4, 6]


def test_a_band_of_pass_rates():
    batch = batch_of([1, 1], [1, 0, NAN], [0, 0, 0, 1], [0, 0], [NAN])
    assert kept("pass_rate_band", batch) == list(range(11))
    assert kept("pass_rate_band", batch, low=0.25, high=0.5) == [2, 3, 4, 5, 6, 7, 8]
    assert kept("pass_rate_band", batch, low=0.3, high=0.9) == [2, 3, 4]
    batch.columns["reward/x"] = 1 - batch.columns["reward"]
    assert kept("pass_rate_band", batch, low=1, column="reward/x") == [9, 10]
    with pytest.raises(KeyError, match="reward/y"):
        kept("pass_rate_band", batch, column="reward/y")


def test_a_moving_bound_on_the_spread():
    selector = registry.build("selector", {"name": "spread", "share": 0.5, "decay": 0.5})
    wide, narrow = [1, 0], [0.5, 0.4]
    assert selector(batch_of(wide, narrow, [1, 1])).tolist() == [0, 1, 2, 3]
    assert selector.state_dict() == {"average": None}
    selector.observe({})  # mean spread (0.5 + 0.05 + 0) / 3
    assert selector.state_dict()["average"] == pytest.approx(0.55 / 3)
    assert selector(batch_of(wide, narrow)).tolist() == [0, 1]  # half of 0.183 is more than 0.05
    selector.observe({})
    again = registry.build("selector", {"name": "spread", "share": 0.5, "decay": 0.5})
    again.load_state_dict(selector.state_dict())
    assert again.state_dict()["average"] == pytest.approx(0.5 * 0.55 / 3 + 0.5 * 0.275)
    assert registry.build("selector", {"name": "spread", "share": 0})(batch_of([1, 1], [NAN])).tolist() == [0, 1]
