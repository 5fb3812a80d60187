"""What holds for every registered term (N4): order does not matter, other groups do not, undecided stays out, edges are
defined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_helpers import make_batch, random_batch
from rlvr import registry
from rlvr.config import Config
from rlvr.records import Batch
from rlvr.rewards import RewardContext, bind, build_terms, score, walk

CONFIG = Config.model_validate({"rollout": {"max_new_tokens": 8}})
VARIANTS = [
    {"name": "verdict"},
    {"name": "brevity", "form": "kimi"},
    {"name": "brevity", "form": "range"},
    {"name": "length_target", "form": "exact", "target": 4},
    {"name": "length_target", "relative": "right", "target": 0.8},
    {"name": "length_target", "target": "budget"},
    {"name": "bounded", "centre": "peers", "term": "length"},
    {"name": "majority_vote", "of": "share"},
    {"name": "repetition", "of": "words", "n": 1},
    {"name": "repetition", "of": "words", "n": 1, "limit": 2},
    {"name": "format", "strictness": "soft"},
    {"name": "tiers", "terms": ["format", "verdict", "majority_vote"]},
    {"name": "by_pass_rate", "then": "brevity", "at_least": 0.4},
    {"name": "veto", "vetoes": ["verdict", "format"], "below": 0.5},
    *({"name": name, "token": "?"} if name == "last_token" else name for name in registry.names("reward")),
]
OF_THE_BATCH = [
    {"name": "by_pass_rate", "then": "brevity", "top": 0.5},
    {"name": "by_condition", "balance": 1.0},
    {"name": "majority_vote", "of": "partner"},
]
"""Those that look at other groups by their meaning."""


def rewards(batch: Batch, spec) -> np.ndarray:
    fresh = Batch(list(batch.rollouts), dict(batch.columns), dict(batch.token_columns))
    tasks = list({r.task.id: r.task for r in batch.rollouts}.values())
    return score(fresh, bind(build_terms([spec]), RewardContext(CONFIG, tasks))).column("reward")


@pytest.mark.parametrize("spec", [*VARIANTS, *OF_THE_BATCH], ids=str)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_the_order_of_rollouts_does_not_matter(spec, seed):
    batch = random_batch(seed)
    order = np.random.default_rng(seed).permutation(len(batch))
    np.testing.assert_allclose(rewards(batch.select(order), spec), rewards(batch, spec)[order], atol=1e-12)


@pytest.mark.parametrize("spec", VARIANTS, ids=str)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_other_groups_do_not_matter(spec, seed):
    batch = random_batch(seed)
    part = np.flatnonzero(batch.group_index() < 2)
    np.testing.assert_allclose(rewards(batch.select(part), spec), rewards(batch, spec)[part], atol=1e-12)


@pytest.mark.parametrize("spec", [*VARIANTS, *OF_THE_BATCH[:2]], ids=str)
def test_the_edges_are_defined(spec):
    """No rollout at all, one, all undecided, all equal, and hundreds with an empty response among them."""

    def made(*arguments, **more):
        batch = make_batch(*arguments, **more)
        for name in ("entropy", "logsumexp", "mean_logit"):
            batch.token_columns[f"{name}/current"] = [np.where(r.sampled, 0.5, np.nan) for r in batch.rollouts]
        for rollout in batch.rollouts:
            rollout.task.info["budget"] = 5  # type: ignore[index]
        return batch

    assert rewards(made([]), spec).shape == (0,)
    for scores in ([1.0], [None], [None] * 3, [0.5] * 3, ["none"]):
        assert rewards(made(scores), spec).shape == (len(scores),)
    wide = rewards(made([float(i % 3 == 0) for i in range(300)], [i % 17 for i in range(300)]), spec)
    assert wide.shape == (300,)
    terms = build_terms([spec])
    # `turns` scores turns alone: an undecided one leaves the response decided.
    decide_by_themselves = {"gate", "veto", "tiers", "product", "by_condition", "tagged_answer", "turns"}
    if any(t.name == "verdict" for t in walk(terms)) and terms[0].name not in decide_by_themselves:
        assert np.isnan(rewards(made([None] * 3), spec)).all()
