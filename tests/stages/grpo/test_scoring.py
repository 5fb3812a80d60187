"""Selectors as the stage runs them: in order, with scheduled options, and what is refused."""

from __future__ import annotations

import pytest

from rlvr.config import Config
from rlvr.errors import ConfigError
from rlvr.stages.grpo.scoring import Scoring
from selector_helpers import batch_of


def scoring(*selectors, **algorithm):
    return Scoring(Config.model_validate({"algorithm": {"select": list(selectors), **algorithm}}))


def test_selectors_in_order_with_scheduled_options():
    moving = {"name": "pass_rate_band", "low": {"schedule": "linear", "start": 0.0, "end": 1.0}}
    both = scoring(moving, {"name": "best_worst", "best": 1, "worst": 1})
    batch = batch_of([1, 0, 1, 1], [1, 1, 1])
    assert [r.id for r in both.select(batch, 0, 10).rollouts] == ["0/1", "0/3", "1/0", "1/2"]
    assert [r.id for r in both.select(batch, 9, 10).rollouts] == ["1/0", "1/2"]
    assert both.components.scheduled(5, 10) == {"schedule/pass_rate_band.low": 0.5}


def test_what_reads_advantages_comes_after_them():
    with pytest.raises(ConfigError, match=r"'best_worst' reads advantages.*select_after=true"):
        scoring({"name": "best_worst", "column": "advantage"})
    scoring({"name": "best_worst", "column": "advantage"}, select_after=True)


def test_a_selector_that_compares_members_of_groups_of_one_is_refused():
    with pytest.raises(ConfigError, match=r"group_size is 1, and the selector 'shortest'"):
        Scoring(Config.model_validate({"rollout": {"group_size": 1}, "algorithm": {"select": ["shortest"]}}))


@pytest.mark.parametrize("give", [[7], [-1], [0, 0], [True]])
def test_positions_that_are_not_there_are_refused_by_name(tmp_path, give):
    (tmp_path / "mine.py").write_text(f"import numpy as np\ndef odd(batch): return np.asarray({give})\n")
    with pytest.raises(ConfigError, match="odd"):
        scoring(f"{tmp_path}/mine.py:odd").select(batch_of([1, 0]), 0, 1)
