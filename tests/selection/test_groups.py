"""Selectors of whole groups: mixed and decided ones, a band of pass rates, a moving bound on the spread."""

from __future__ import annotations

import pytest

from rlvr import registry
from rlvr.errors import ConfigError
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


def trained(selector, *groups):
    """The positions that a step keeps of these groups, which are all that it sampled and trained."""
    batch = batch_of(*groups)
    selector.sampled(batch)
    chosen = selector(batch).tolist()
    selector.observe({})
    return chosen


def test_a_moving_bound_on_the_spread():
    selector = registry.build("selector", {"name": "spread", "share": 0.5, "decay": 0.5})
    wide, narrow = [1, 0], [0.5, 0.4]
    batch = batch_of(wide, narrow, [1, 1])
    selector.sampled(batch)
    assert selector(batch).tolist() == [0, 1, 2, 3]
    assert selector.state_dict()["average"] is None
    selector.observe({})  # mean spread (0.5 + 0.05 + 0) / 3
    assert selector.state_dict()["average"] == pytest.approx(0.55 / 3)
    assert trained(selector, wide, narrow) == [0, 1]  # half of 0.183 is more than 0.05
    again = registry.build("selector", {"name": "spread", "share": 0.5, "decay": 0.5})
    again.load_state_dict(selector.state_dict())
    assert again.state_dict()["average"] == pytest.approx(0.5 * 0.55 / 3 + 0.5 * 0.275)
    assert registry.build("selector", {"name": "spread", "share": 0})(batch_of([1, 1], [NAN])).tolist() == [0, 1]


def test_a_bound_that_begins_later():
    """Steps 1 to 3 keep everything, 2 and 3 are averaged, 4 is the first that filters and moves the average."""
    options = {"name": "spread", "share": 0.5, "decay": 0.9, "average_from": 2, "filter_from": 4}
    selector = registry.build("selector", options)
    # Two rewards that differ by d deviate by d / 2.
    assert trained(selector, [1, 0], [1, 1]) == [0, 1, 2, 3]
    assert trained(selector, [0.4, 0], [1, 1]) == [0, 1, 2, 3]
    again = registry.build("selector", options)
    again.load_state_dict(selector.state_dict())
    assert trained(again, [0.8, 0], [0.4, 0]) == [0, 1, 2, 3]
    mean = (0.1 + 0.3) / 2
    assert again.state_dict()["average"] == pytest.approx(mean)
    # Half of the mean is 0.1.
    assert trained(again, [0.21, 0], [0.19, 0]) == [0, 1]
    assert again.state_dict()["average"] == pytest.approx(0.9 * mean + 0.1 * 0.1)
    with pytest.raises(ConfigError, match="counted from 1"):
        registry.build("selector", {"name": "spread", "average_from": 3, "filter_from": 2})


def test_the_spread_is_that_of_all_that_was_sampled():
    """Groups that were dropped for others count in the average; a step that is given up does not."""
    selector = registry.build("selector", {"name": "spread", "share": 0.5})
    selector.sampled(batch_of([1, 0], [0.5, 0.5]))
    selector(batch_of([1, 0]))
    selector.sampled(batch_of([1, 0], [1, 0], [0, 0]))  # the step begins anew
    selector(batch_of([1, 0], [1, 0]))
    selector.observe({})
    assert selector.state_dict()["average"] == pytest.approx(1 / 3)
