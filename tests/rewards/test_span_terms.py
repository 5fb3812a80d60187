"""Terms that score parts of responses: what becomes of the scores in sums, gates, sources and schedules."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from reward_helpers import PROMPT, make_batch
from rlvr.config import Config
from rlvr.core.span_rewards import SpanRewards, span_scores
from rlvr.errors import ConfigError, UserCodeError
from rlvr.records import Rollout, Segment, Task, Verdict
from rlvr.rewards import RewardContext, at_step, bind, build_terms, score
from rlvr.rewards.terms import Term
from rlvr.testing import check_reward

SPANS = [[(2, 3, 1.0), (3, 5, math.nan)], [(2, 5, -2.0)], []]


def halves(batch):
    return SpanRewards([span_scores([s[:2] for s in own], [s[2] for s in own]) for own in SPANS[: len(batch)]])


def with_number(batch):
    return SpanRewards(halves(batch).spans, np.asarray([1.0, math.nan, 3.0]))


def scored(*terms, scores=(1.0, 0.0, 1.0), tasks=None, step=None):
    batch = make_batch(list(scores), groups=["a", "b", "c"][: len(scores)], tasks=tasks)
    held = build_terms(list(terms))
    if step is not None:
        held = at_step(held, *step)
    return score(batch, held)


def test_a_term_of_spans_leaves_the_reward_alone_and_shows_its_sum():
    batch = scored("verdict", halves)
    assert batch.column("reward").tolist() == [1.0, 0.0, 1.0]
    assert batch.column("reward/halves").tolist() == [1.0, -2.0, 0.0]
    spans = batch.rollouts[0].spans["halves"]
    assert (spans.start.tolist(), spans.end.tolist()) == ([2, 3], [3, 5])
    np.testing.assert_array_equal(spans.score, [1.0, math.nan])
    column = batch.tokens("span/halves")
    np.testing.assert_array_equal(column[0], [math.nan, math.nan, 1.0, math.nan, math.nan])
    np.testing.assert_array_equal(column[1][PROMPT:], [-2.0] * 3)
    assert np.isnan(column[2]).all()


def test_numbers_of_responses_count_as_those_of_any_term():
    batch = scored("verdict", with_number)
    np.testing.assert_array_equal(batch.column("reward"), [2.0, math.nan, 4.0])
    np.testing.assert_array_equal(batch.column("reward/with_number"), [1.0, math.nan, 3.0])


def test_weights_and_schedules_are_kept_beside_the_scores():
    term = build_terms([halves])[0]
    ramp = Config.model_validate(
        {"rewards": [{"name": "verdict", "weight": {"schedule": "linear", "start": 0, "end": 1}}]}
    )
    scheduled = Term(term.name, term.function, ramp.rewards[0].weight)
    for step, weight in ((0, 0.0), (5, 0.5), (10, 1.0)):
        batch = score(make_batch([1.0, 0.0, 1.0]), at_step([scheduled], step, 10))
        assert batch.rollouts[1].spans["halves"].weight == weight
        assert batch.rollouts[1].spans["halves"].score.tolist() == [-2.0]


def test_a_gate_opens_for_the_spans_of_a_response():
    gate = {"name": "gate", "as": "gated", "term": halves, "by": "verdict", "otherwise": 0.25}
    terms = build_terms(["verdict"])
    (gated,) = build_terms([{**gate, "term": "length"}])
    inner = build_terms([halves])[0]
    batch = make_batch([1.0, 0.0, None], groups=["a", "b", "c"])
    batch = score(batch, [*terms, Term("gated", gated.function, 2.0, inner={"term": inner, "by": terms[0]})])
    np.testing.assert_array_equal(batch.rollouts[0].spans["gated"].score, [1.0, math.nan])
    assert batch.rollouts[1].spans["gated"].score.tolist() == [0.25]
    assert len(batch.rollouts[2].spans["gated"]) == 0
    # What is made of a term has its own spans, and the term keeps its weight where it is paid too.
    assert batch.rollouts[1].spans["halves"].score.tolist() == [-2.0]
    assert batch.rollouts[0].spans["gated"].weight == 2.0
    np.testing.assert_array_equal(batch.column("reward"), [1.0, 0.0, math.nan])


def test_sums_and_products_go_span_by_span():
    inner = build_terms([halves])[0]
    numbers = build_terms([with_number])[0]
    for name, want in (("sum", [[2.0, math.nan], [-4.0]]), ("product", [[1.0, math.nan], [4.0]])):
        function = build_terms([{"name": name, "terms": ["verdict"]}])[0].function
        batch = score(make_batch([1.0, 0.0, 1.0]), [Term("both", function, inner={"terms": [inner, numbers]})])
        for rollout, values in zip(batch.rollouts, want, strict=False):
            np.testing.assert_array_equal(rollout.spans["both"].score, values)


def test_what_does_not_go_by_element_is_refused_unless_there_are_numbers():
    function = build_terms([{"name": "bounded", "centre": "peers"}])[0].function
    with pytest.raises(ConfigError, match="one number per response"):
        score(make_batch([1.0, 0.0, 1.0]), [Term("b", function, inner={"term": build_terms([halves])[0]})])
    batch = score(make_batch([1.0, 0.0, 1.0]), [Term("b", function, inner={"term": build_terms([with_number])[0]})])
    assert "b" not in batch.rollouts[0].spans and np.isfinite(batch.column("reward/b")[0])


def test_other_sources_have_no_spans():
    tasks = {name: Task(id=name, prompt="?", source=f"s{name}") for name in "abc"}
    batch = make_batch([1.0, 0.0, 1.0], groups=["b", "a", "c"], tasks=tasks)
    (term,) = build_terms([halves])
    score(batch, [Term("halves", term.function, 3.0, sources=("sa", "sc"))])
    assert "halves" not in batch.rollouts[0].spans
    # The term is called with the two rollouts alone, in their order.
    assert batch.rollouts[1].spans["halves"].start.tolist() == [2, 3]
    assert batch.rollouts[2].spans["halves"].weight == 3.0
    np.testing.assert_array_equal(batch.column("reward/halves"), [math.nan, 1.0, -2.0])
    assert batch.column("reward").tolist() == [0.0, 0.0, 0.0]


def test_turns_and_verdict_spans():
    batch = make_batch([1.0, 0.5], lengths=[4, 4], texts=["abcd", "abcd"])
    for rollout in batch.rollouts:
        rollout.char_ends = np.asarray([-1, -1, 1, 2, 3, 4])
        rollout.segments = [Segment("turn", 2, 4), Segment("turn", 4, 6)]
        rollout.verdicts["turn 1"] = Verdict.from_score(0.25)
        rollout.verdicts["judge"] = Verdict.from_score(0.5, spans=((0, 2, 0.5), (2, 4, 1.0)))
    terms = [
        {"name": "turns", "as": "each", "terms": [{"name": "verdict", "as": "t1", "verifier": "turn 1"}, "verdict"]},
        {"name": "verdict_spans", "as": "steps", "verifier": "judge", "responses": True},
    ]
    context = RewardContext(Config(), [])
    batch = score(batch, bind(build_terms(terms), context))
    assert [r.spans["each"].score.tolist() for r in batch.rollouts] == [[0.25, 1.0], [0.25, 0.5]]
    assert batch.rollouts[0].spans["each"].end.tolist() == [4, 6]
    assert batch.rollouts[0].spans["steps"].start.tolist() == [2, 4]
    assert batch.column("reward").tolist() == [0.5, 0.5]


def test_a_result_that_fits_nothing_is_named():
    def short(batch):
        return SpanRewards([])

    def past(batch):
        return SpanRewards([span_scores([(0, 99)], [1.0]) for _ in batch.rollouts])

    def wrong(batch):
        return SpanRewards(halves(batch).spans, np.zeros(1))

    def empty(batch):
        return SpanRewards([span_scores([(3, 3)], [1.0]) for _ in batch.rollouts])

    for term, message in ((short, "spans of 0 rollouts for 3"), (past, "up to 99"), (wrong, "shape \\(1,\\)")):
        with pytest.raises(ConfigError, match=message):
            scored(term)
    with pytest.raises(UserCodeError, match="empty"):
        scored(empty)


def test_spans_and_notes_are_recorded_to_the_last_bit():
    batch = scored(halves, lambda batch: np.zeros(len(batch)))
    (rollout, *_) = batch.rollouts
    rollout.notes["budget"] = 0.1
    back = Rollout.from_json(json.loads(json.dumps(rollout.to_json())))
    for name, scores in rollout.spans.items():
        for field in ("start", "end", "score"):
            np.testing.assert_array_equal(getattr(back.spans[name], field), getattr(scores, field))
        assert back.spans[name].weight == scores.weight
    assert back.notes == {"budget": 0.1}
    old = rollout.to_json()
    del old["spans"], old["notes"]
    bare = Rollout.from_json(old)
    assert (bare.spans, bare.notes) == ({}, {})
    assert bare.to_json() == old


def test_the_example_of_the_page(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(def hedges.*?)^```", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "hedges.py"
    path.write_text(f"import re\nfrom rlvr.core.span_rewards import SpanRewards\n\n{block}")
    check_reward(f"{path}:hedges")
    (term,) = build_terms([{"name": f"{path}:hedges", "cost": 0.5}])
    assert term.function.reads_characters
    batch = make_batch([1.0], lengths=[3], texts=["so maybe 4"])
    batch.rollouts[0].char_ends = np.asarray([-1, -1, 3, 8, 10])
    score(batch, [term])
    (spans,) = batch.rollouts[0].spans.values()
    assert (spans.start.tolist(), spans.end.tolist(), spans.score.tolist()) == ([3], [4], [-0.5])
