"""Results of verifiers on labelled rows: every figure by hand, and intervals and differences against loops."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.data.labelled_responses import labelled_row
from rlvr.data.preference_rows import PreferenceRow
from rlvr.data.step_rows import StepRow
from rlvr.errors import DataError
from rlvr.evaluation.estimators import percentile_interval, resampled_sums
from rlvr.evaluation.preference_results import PREFERENCES, scored_preference
from rlvr.evaluation.response_results import RESPONSES, scored_response
from rlvr.evaluation.scored_rows import mean_over_sources, results_by_source, row_differences, row_results
from rlvr.evaluation.step_results import STEPS, scored_steps, step_scores
from rlvr.records import Task, Verdict


def verdict(score, **more):
    return Verdict.undecided("no reply") if score is None else Verdict.from_score(score, **more)


def preference(name, chosen, rejected, source="s", styled=False, texts=None, **more):
    """A scored row of these scores; every response has its own length unless `texts` are given."""
    scores = [*chosen, *rejected]
    texts = texts or [f"r{'x' * n}" for n in range(len(scores))]
    row = PreferenceRow(Task(name, "?", source=source), tuple(texts[: len(chosen)]), tuple(texts[len(chosen) :]))
    return scored_preference(row, [verdict(score, **more) for score in scores], styled)


def steps(name, wrong, scores, correct=None, score=1.0, source="s", threshold=0.5):
    """A scored row with steps of one character, and a verdict with a span for each score."""
    row = StepRow(Task(name, "?", source=source), ("a",) * len(wrong), tuple(wrong), correct)
    if scores is None:
        return scored_steps(row, verdict(None), threshold)
    spans = [(*place, one) for place, one in zip(row.places, scores, strict=True)]
    return scored_steps(row, verdict(score, spans=spans), threshold)


# preferences


def test_a_row_counts_once_and_a_tie_is_half_a_win():
    rows = [preference("a", [0.9], [0.1]), preference("b", [0.5], [0.5]), preference("c", [0.4], [0.1, 0.4, 0.6, 0.9])]
    results = row_results(rows, PREFERENCES)
    # Row c wins one and ties one of four pairs.
    assert results["accuracy"] == pytest.approx((1 + 0.5 + 1.5 / 4) / 3)
    assert results["ties"] == pytest.approx((0 + 1 + 1 / 4) / 3)
    assert results["best_of_n"] == 0 and results["undecided"] == 0 and results["tasks"] == 3
    assert "swap_consistency" not in results and "accuracy_hard" not in results


def test_an_undecided_pair_is_never_right():
    rows = [preference("a", [0.9], [0.1]), preference("b", [0.9], [None]), preference("c", [0.9], [None, 0.1])]
    results = row_results(rows, PREFERENCES)
    assert results["accuracy"] == 1.0 and results["undecided"] == pytest.approx((0 + 1 + 0.5) / 3)
    assert results["accuracy_of_all"] == pytest.approx((1 + 0 + 0.5) / 3)
    # The best of three is not known while one has no score.
    assert "best_of_n" not in results
    assert rows[1].scores == {"chosen": [0.9], "rejected": [None]}


def test_the_best_of_n_is_reward_bench_2s():
    """1 / (number with the highest score) where the chosen one has it, else 0."""
    rows = [
        preference("a", [3.0], [1.0, 2.0]),
        preference("b", [3.0], [3.0, 3.0, 1.0]),
        preference("c", [1.0], [2.0, 0.0]),
    ]
    assert row_results(rows, PREFERENCES)["best_of_n"] == pytest.approx((1 + 1 / 3 + 0) / 3)
    several = preference("d", [3.0, 1.0], [3.0, 0.0])
    assert row_results([several], PREFERENCES)["best_of_n"] == 0.5


def test_swap_consistency_is_what_the_verdicts_say():
    rows = [
        preference("a", [1.0], [0.0], scores={"consistent": 1.0}),
        preference("b", [0.5], [0.5], scores={"consistent": 0.0}),
    ]
    results = row_results(rows, PREFERENCES)
    assert results["swap_consistency"] == 0.5 and results["accuracy"] == 0.75


def test_length_bias_of_a_scorer_of_lengths():
    """A verifier that scores the length is right where the chosen response is longer, and wrong where it is shorter."""
    texts = [("long text", "short"), ("ab", "abcd"), ("xyz", "abc"), ("much longer", "x")]
    rows = [preference(str(n), [float(len(a))], [float(len(b))], texts=[a, b]) for n, (a, b) in enumerate(texts)]
    results = row_results(rows, PREFERENCES)
    assert results["accuracy_chosen_longer"] == 1.0 and results["accuracy_chosen_shorter"] == 0.0
    assert results["accuracy"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert results["length_correlation"] == pytest.approx(1.0)
    assert "calibration_error" not in results  # lengths are no probabilities


def test_the_styles_are_rm_benchs():
    """easy_acc, normal_acc and hard_acc of compute_accuracy, written out for one matrix of wins without ties."""
    chosen, rejected = [0.2, 0.5, 0.9], [0.1, 0.6, 0.7]
    wins = np.asarray([[c > r for r in rejected] for c in chosen], dtype=float)
    results = row_results([preference("a", chosen, rejected, styled=True)], PREFERENCES)
    assert results["accuracy_hard"] == pytest.approx((wins[0, 1] + wins[0, 2] + wins[1, 2]) / 3) == 0
    assert results["accuracy_normal"] == pytest.approx((wins[0, 0] + wins[1, 1] + wins[2, 2]) / 3)
    assert results["accuracy_easy"] == pytest.approx((wins[1, 0] + wins[2, 0] + wins[2, 1]) / 3) == 1
    assert results["accuracy"] == pytest.approx(wins.mean())


def test_calibration_is_of_all_responses():
    results = row_results([preference("a", [0.9], [0.2]), preference("b", [0.6], [0.8])], PREFERENCES)
    assert results["brier"] == pytest.approx((0.1**2 + 0.2**2 + 0.4**2 + 0.8**2) / 4)
    assert results["calibration_error"] == pytest.approx((0.1 + 0.2 + 0.4 + 0.8) / 4)


# steps


def test_f1_is_processbenchs():
    rows = [
        steps("found", [False, True, None], [0.9, 0.2, 0.1]),
        steps("early", [False, True, None], [0.1, 0.2, 0.1]),
        steps("missed", [True, None], [0.9, 0.9]),
        steps("missed too", [True, None], [0.9, 0.2]),
        steps("passed", [False, False], [0.9, 0.5]),
        steps("rejected", [False, False], [0.9, 0.4]),
    ]
    results = row_results(rows, STEPS)
    assert results["error_accuracy"] == pytest.approx(1 / 4) and results["correct_accuracy"] == pytest.approx(1 / 2)
    assert results["f1"] == pytest.approx(2 * 0.25 * 0.5 / 0.75)
    assert [row.scores["prediction"] for row in rows] == [1, 0, -1, 1, -1, 1]
    # Labelled wrong: 4 steps, of which two are rejected; rejected right ones: `early` and `rejected`.
    assert results["step_recall"] == pytest.approx(2 / 4) and results["step_precision"] == pytest.approx(2 / 4)
    assert results["step_f1"] == pytest.approx(2 * 2 / (2 * 2 + 2 + 2))


def test_undecided_rows_are_wrong_in_f1_of_all_as_in_the_authors_code():
    rows = [steps("a", [True], [0.1]), steps("b", [False], [0.9]), steps("c", [True], None), steps("d", [False], None)]
    results = row_results(rows, STEPS)
    assert results["f1"] == 1.0 and results["undecided"] == 0.5
    assert results["f1_of_all"] == pytest.approx(0.5)


def test_nothing_rejected_has_no_precision_and_an_f1_of_0():
    results = row_results([steps("a", [True], [0.9]), steps("b", [False], [0.9])], STEPS)
    assert results["f1"] == 0 and results["step_f1"] == 0 and "step_precision" not in results
    lenient = row_results([steps("a", [True], [0.9], threshold=0.95), steps("b", [False], [0.9], threshold=0.8)], STEPS)
    assert lenient["f1"] == 1


def test_the_outcome_is_ranked_and_step_scores_are_calibrated():
    rows = [
        steps("a", [False], [0.8], correct=True, score=0.8),
        steps("b", [True], [0.9], correct=False, score=0.9),
        steps("c", [True], [0.1], correct=False, score=0.1),
        steps("d", [False], [0.5], correct=True, score=0.5),
    ]
    results = row_results(rows, STEPS)
    assert results["outcome_auc"] == 0.5
    assert results["brier"] == pytest.approx((0.2**2 + 0.9**2 + 0.1**2 + 0.5**2) / 4)


def test_a_step_has_the_least_score_of_the_spans_over_it():
    row = StepRow(Task("a", "?"), ("ab\ncd", "", "ef", "gh"), (False, False, False, True))
    (text,) = row.responses
    assert text == "ab\ncd\n\n\n\nef\n\ngh"
    # The first step was cut in two, the last two were joined, and the empty one has no span.
    spans = [(0, 2, 0.9), (3, 5, 0.3), (text.index("ef"), len(text), 0.6)]
    assert step_scores(row, verdict(1.0, spans=spans)) == [0.3, None, 0.6, 0.6]


# responses


def response(name, score, expected, threshold=None, **more):
    row = labelled_row({"id": name, "prompt": "?", "completion": "c", "expected": expected, **more}, "line 1")
    return scored_response(row, verdict(score), threshold)


def test_precision_recall_and_the_rates_of_errors():
    scores = [(1, True), (1, True), (0, True), (1, False), (0, False), (0, False), (0, False), (None, True)]
    results = row_results([response(str(n), *pair) for n, pair in enumerate(scores)], RESPONSES)
    assert results["precision"] == pytest.approx(2 / 3) and results["recall"] == pytest.approx(2 / 3)
    assert results["f1"] == pytest.approx(2 / 3)
    assert results["false_positive_rate"] == pytest.approx(1 / 4)
    assert results["false_negative_rate"] == pytest.approx(1 / 3)
    assert results["accuracy"] == pytest.approx(5 / 7) and results["accuracy_of_all"] == pytest.approx(5 / 8)
    assert results["undecided"] == pytest.approx(1 / 8)


def test_a_partial_score_is_accepted_from_the_threshold_on():
    pairs = [(0.7, True), (0.5, False), (0.4, True)]
    full = row_results([response(str(n), *pair) for n, pair in enumerate(pairs)], RESPONSES)
    assert full["recall"] == 0 and "precision" not in full and full["accuracy"] == pytest.approx(1 / 3)
    half = row_results([response(str(n), *pair, threshold=0.5) for n, pair in enumerate(pairs)], RESPONSES)
    assert half["recall"] == 0.5 and half["precision"] == 0.5
    assert half["outcome_auc"] == 0.5


# sets of rows


def test_sources_and_their_mean_which_weighs_each_alike():
    rows = [preference("a", [1.0], [0.0], "x"), preference("b", [0.0], [1.0], "y"), preference("c", [0.0], [1.0], "y")]
    by_source = results_by_source(rows, PREFERENCES)
    assert {source: results["accuracy"] for source, results in by_source.items()} == {"x": 1, "y": 0}
    means = mean_over_sources(by_source)
    assert means["accuracy"] == 0.5 and row_results(rows, PREFERENCES)["accuracy"] == pytest.approx(1 / 3)
    assert not {"tasks", "best_of_n"} & set(means)


def test_resampled_sums_are_those_of_drawn_rows():
    """Mean and deviation of a bootstrap of a mean: those of the rows, and theirs over the root of their number."""
    random = np.random.default_rng(0)
    columns = np.stack([random.random(50), np.ones(50)])
    sums = resampled_sums(columns)
    assert sums.shape == (2, 2000) and np.all(sums[1] == 50)
    means = sums[0] / 50
    assert means.mean() == pytest.approx(columns[0].mean(), abs=0.01)
    assert means.std() == pytest.approx(columns[0].std() / np.sqrt(50), rel=0.1)
    low, high = percentile_interval(np.append(np.arange(101.0), np.nan))
    assert (low, high) == pytest.approx((2.5, 97.5)) and percentile_interval(np.asarray([np.nan])) is None


def test_differences_are_paired():
    """The same rows are drawn for both: of two equal evaluations, every difference is 0, and so is its interval."""
    before = [preference(str(n), [float(n % 2)], [0.5]) for n in range(20)]
    after = [preference(str(n), [float(n % 2 or n == 4)], [0.5]) for n in range(1, 20)]
    counts = {row.id: row.counts for row in before}
    same = row_differences(counts, before, PREFERENCES)["differences"]["accuracy"]
    assert (same["difference"], same["interval"]) == (0, (0, 0))
    compared = row_differences(counts, after, PREFERENCES)
    assert (compared["tasks"], compared["only_before"], compared["only_after"]) == (19, 1, 0)
    change = compared["differences"]["accuracy"]
    assert change["difference"] == pytest.approx(1 / 19) and change["interval"][0] == 0
    assert change["interval"][1] <= 4 / 19
    with pytest.raises(DataError, match="no row in common"):
        row_differences({"other": {}}, before, PREFERENCES)
