import importlib.util
import itertools
import json
import math
import re
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.grounding.boxes import BoxesVerifier, IntervalVerifier, PointVerifier
from rlvr.verifiers.grounding.geometry import generalised_iou, in_polygon, interval_iou, iou

GOLD = [10, 20, 50, 80]


def judge(answer, gold=GOLD, verifier=BoxesVerifier, info=(), **options):
    return verifier(**options).quick(Task("t", "find 10 20 50 80", gold, info=dict(info)), answer)


@pytest.mark.parametrize(
    "answer",
    [
        "[10, 20, 50, 80]", "(10,20),(50,80)", "<box>(10,20),(50,80)</box>", "<box>10, 20, 50, 80</box>", "<box>[[10, 20, 50, 80]]</box>", "<|box_start|>(10,20),(50,80)<|box_end|>", "10 20 50 80",
        '[{"bbox_2d": [10, 20, 50, 80], "label": "cat '
        '2"}]', '```json\n[{"bbox_2d": [10, 20, 50, 80], "label": '
                '"cat"}]\n```', '{"bbox": [10, 20, 50.0, 80]}', "x1=10, y1=20, x2=50, y2=80", "[[10, 20, 50, 80]]",
        "<answer>[10, 20, 50, "
        "80]</answer>", "\\boxed{[10, 20, 50, 80]}", "The box is [10.0, 20.0, 50.0, "
                                                     "80.0].", '{"x1": 10, "y1": 20, "x2": 50, "y2": '
                                                               '80}', '"bbox_2d": [10, 20, 50, 80]',
        "<think>[1, 2, 3, 4]</think>[10, 20, 50, 80]", "10px 20px 50px 80px",
    ],
)  # fmt: skip
def test_boxes_are_read_in_many_layouts(answer):
    verdict = judge(answer)
    assert (verdict.status, verdict.score) == (VerdictStatus.CORRECT, 1.0), verdict


@pytest.mark.parametrize(
    "answer",
    [
        "", "[]", "banana", "[10, 20, 50]", "[10, 20, 50, 80, 90]", "[10, 20, 10, 80]", "[50, 80, 10, 20]", "[10, 20, 50, 20]", "[NaN, 20, 50, 80]", "[10, 20, Infinity, 80]", "[10, 20, 1e99, 80]", "nan nan nan nan",
        "[10, 20, 50, 80] or [11, 20, 50, "
        "80]", "[[10, 20, 50, 80], [0, 0, 1, "
               "1]]", "[10, 20, 50, 80][10, 20, 50, "
                      "80]", "[10%, 20%, 50%, 80%]", "[10, 20, 5.0.0, 80]", "[true, 20, 50, 80]",
        "0x10 20 50 80", "[" + "9" * 400 + ", 20, 50, 80]", "[[10, 20], [50, 80], [1, 1]]", "[60, 90, 70, 99]", "10 "
                                                                                                                "20 50 80 with confidence 0.9", '{"score": 1}', "[[[10, 20, 50, 80]]]x1",
    ],
)  # fmt: skip
def test_what_is_no_single_box_earns_nothing(answer):
    verdict = judge(answer)
    assert verdict.score == 0.0, verdict


def test_partial_credit_threshold_and_giou():
    half = "[10, 20, 30, 80]"
    assert judge(half).score == pytest.approx(0.5)
    assert judge(half, threshold=0.5).score == 1 and judge(half, threshold=0.6).score == 0
    assert judge(half, threshold=0.6).scores["measure"] == pytest.approx(0.5)
    near, far = judge("[52, 20, 60, 80]", measure="giou").score, judge("[900, 900, 910, 910]", measure="giou").score
    assert 0 < far < near < 0.5 and judge("[10, 20, 50, 80]", measure="giou").score == 1
    assert judge("[52, 20, 60, 80]").score == 0


def test_layouts_and_scales():
    assert judge("[10, 20, 40, 60]", layout="xywh").score == 1
    assert judge("[30, 50, 40, 60]", layout="cxcywh").score == 1
    image = {"width": 100, "height": 200}
    assert judge("[0.1, 0.1, 0.5, 0.4]", info=image, answer_scale="unit").score == 1
    assert judge("[100, 100, 500, 400]", info=image, answer_scale="thousand").score == pytest.approx(1)
    assert judge(
        "[10, 20, 50, 80]", [0.1, 0.1, 0.5, 0.4], info=image, answer_scale="pixel", gold_scale="unit"
    ).score == pytest.approx(1)
    assert judge(
        "[100, 100, 500, 400]", [0.1, 0.1, 0.5, 0.4], answer_scale="thousand", gold_scale="unit"
    ).score == pytest.approx(1)
    assert "width" in BoxesVerifier(answer_scale="unit").check_task(Task("t", "p", GOLD))
    assert judge("[1, 1, 2, 2]", info={"width": 0, "height": 5}, answer_scale="unit").score is None


def test_several_boxes_and_no_pay_for_spraying():
    golds = [[0, 0, 10, 10], [20, 20, 30, 30]]
    assert judge("[[20, 20, 30, 30], [0, 0, 10, 10]]", golds).score == 1
    assert judge("[0, 0, 10, 10]", golds).score == 0.5
    assert judge("[[0, 0, 10, 10], [0, 0, 10, 10]]", golds).score == 0.5
    spray = json.dumps([[x, y, x + 10, y + 10] for x in range(0, 100, 10) for y in range(0, 100, 10)])
    assert judge(spray, golds).score == pytest.approx(2 / 100)
    assert judge(spray, golds, threshold=0.5).score == pytest.approx(2 / 100)
    assert judge(json.dumps([[0, 0, 1, 1]] * 101), golds).status == VerdictStatus.UNPARSABLE
    assert judge("[[0, 0, 10, 10], [20, 20, 30, 40]]", golds, threshold=0.6).score == 0.5


@pytest.mark.parametrize(
    "gold",
    [
        None,
        [],
        "x",
        [1, 2, 3],
        [1, 2, 1, 4],
        [4, 3, 2, 1],
        [1, 2, 3, math.nan],
        [1, 2, 3, math.inf],
        [[1, 2, 3, 4], [1]],
        [1, 2, 3, True],
        {"a": 1},
        [[1, 2, 3, 4]] * 101,
        [0, 0, 1e-200, 1e-200],
    ],
)
def test_bad_golds_are_found(gold):
    assert BoxesVerifier().check_task(Task("t", "p", gold))
    assert judge("[1, 2, 3, 4]", gold).score is None


def test_bad_options_and_a_missing_library(monkeypatch):
    with pytest.raises(ConfigError, match="threshold"):
        IntervalVerifier(threshold=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("verifiers"))):
        registry.build("verifier", "boxes")


BOX = st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(1, 8), st.integers(1, 8)).map(
    lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3])
)


def cells(box):
    grid = np.zeros((20, 20), dtype=bool)
    grid[box[0] : box[2], box[1] : box[3]] = True
    return grid


@settings(deadline=None)
@given(BOX, BOX)
def test_iou_and_giou_count_cells_and_are_symmetric(a, b):
    one, other = cells(a), cells(b)
    expected = (one & other).sum() / (one | other).sum()
    hull = np.zeros((20, 20), dtype=bool)
    rows, columns = np.nonzero(one | other)
    hull[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = True
    assert iou(a, b) == iou(b, a) == pytest.approx(expected)
    assert (
        generalised_iou(a, b)
        == generalised_iou(b, a)
        == pytest.approx(expected - (hull.sum() - (one | other).sum()) / hull.sum())
    )
    assert judge(str(list(a)), b).score == judge(f"<box>{b}</box>", a).score == pytest.approx(expected)
    assert -1 < generalised_iou(a, b) <= iou(a, b) <= 1


@settings(deadline=None)
@given(BOX, BOX, st.sampled_from([0.5, 2.0, 1024.0]), st.sampled_from([0.25, 4.0]))
def test_iou_does_not_depend_on_the_unit_of_each_axis(a, b, sx, sy):
    scaled = [(x1 * sx, y1 * sy, x2 * sx, y2 * sy) for x1, y1, x2, y2 in (a, b)]
    assert iou(*scaled) == pytest.approx(iou(a, b))


@settings(max_examples=50, deadline=None)
@given(st.lists(BOX, min_size=2, max_size=4), st.lists(BOX, min_size=1, max_size=4), st.randoms())
def test_matching_is_the_best_of_all_permutations_in_any_order(golds, said, random):
    small, large = sorted((golds, said), key=len)
    best = max(
        sum(iou(a, b) for a, b in zip(small, chosen, strict=True))
        for chosen in itertools.permutations(large, len(small))
    )
    expected = best / max(len(golds), len(said))
    shuffled = random.sample(said, len(said))
    assert judge(json.dumps(said), golds).score == judge(json.dumps(shuffled), golds).score == pytest.approx(expected)


# intervals


@pytest.mark.parametrize(
    "answer",
    [
        "[12.5, 80]",
        "12.5 - 80",
        "12.5-80",
        "from 12.5s to 80s",
        "12.5 to 80 seconds",
        "00:12.5 - 1:20",
        "00:00:12.50 to 00:01:20",
        "(12.5, 80.0)",
        "<answer>12.50 \u2013 80.00</answer>",
        "[[12.5, 80]]",
    ],
)
def test_intervals_are_read(answer):
    assert judge(answer, [12.5, 80], IntervalVerifier).score == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "x",
        "12.5",
        "80 - 12.5",
        "12.5, 12.5",
        "12.5, 80, 90",
        "[[12.5, 80], [0, 1]]",
        "nan, 80",
        "[90, 95]",
        "1e1 80",
        "0-10, 10-20, 20-30",
    ],
)
def test_what_is_no_single_interval_earns_nothing(answer):
    assert judge(answer, [12.5, 80], IntervalVerifier).score == 0.0


def test_interval_scores():
    assert judge("0 - 10", [5, 15], IntervalVerifier).score == pytest.approx(1 / 3)
    assert judge("0 - 10", [5, 15], IntervalVerifier, threshold=0.3).score == 1
    assert judge("[[0, 10], [20, 30]]", [[0, 10], [20, 30]], IntervalVerifier).score == 1
    assert judge("[0, 30]", [[0, 10], [20, 30]], IntervalVerifier).score == pytest.approx(2 / 3)
    for gold in (None, [], [1], [2, 1], [1, 1], [[1, 2], [3]], [math.nan, 1], "1-2"):
        assert judge("[1, 2]", gold, IntervalVerifier).score is None


SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])), min_size=1, max_size=5
)


@settings(deadline=None)
@given(SPANS, SPANS)
def test_interval_iou_counts_seconds_and_is_symmetric(a, b):
    one, other = ({second for start, end in spans for second in range(start, end)} for spans in (a, b))
    assert interval_iou(a, b) == pytest.approx(len(one & other) / len(one | other))
    assert interval_iou(a, b) == pytest.approx(interval_iou(b, a))
    assert interval_iou(a, a) == 1


# points


def test_points():
    def score(answer, gold=GOLD, **more):
        return judge(answer, gold, PointVerifier, **more).score

    assert (
        score("(30, 50)")
        == score("[30, 50]")
        == score("click(start_box='(30,50)')")
        == score("<point>30 50</point>")
        == score("10, 20")
        == score("x=30, y=50")
        == 1
    )
    assert (
        score("(60, 50)")
        == score("(30, 81)")
        == score("30")
        == score("[10, 20, 50, 80]")
        == score("(30, 50) (31, 50)")
        == score("nan 3")
        == score("")
        == 0
    )
    assert score("[0.3, 0.25]", answer_scale="unit", info={"width": 100, "height": 200}) == 1
    triangle = [[0, 0], [10, 0], [0, 10]]
    assert (
        score("(2, 2)", triangle) == score("(5, 5)", triangle) == score("(0, 0)", triangle) == 1
        and score("(6, 6)", triangle) == 0
    )
    for gold in (None, [1, 2], [[1, 2], [3, 4]], [[1, 2], [1, 2], [1, 2]], [3, 4, 1, 2], "x"):
        assert score("1, 2", gold) is None


COORDINATE = st.integers(-5, 5).map(float)


@settings(deadline=None)
@given(st.lists(st.tuples(COORDINATE, COORDINATE), min_size=3, max_size=6), st.tuples(COORDINATE, COORDINATE))
def test_in_polygon_agrees_with_the_angles_that_the_point_sees(corners, point):
    """Even-odd by another way: the sum of signed angles tells the winding number, whose parity decides; edges apart."""
    total = 0.0
    for (x1, y1), (x2, y2) in zip(corners, corners[1:] + corners[:1], strict=True):
        a, b = complex(x1 - point[0], y1 - point[1]), complex(x2 - point[0], y2 - point[1])
        cross, dot = a.real * b.imag - a.imag * b.real, a.real * b.real + a.imag * b.imag
        if cross == 0 and dot <= 0:
            assert in_polygon(point, corners)
            return
        total += math.atan2(cross, dot)
    assert in_polygon(point, corners) == (round(total / (2 * math.pi)) % 2 == 1)


# all


@settings(deadline=None)
@given(st.text() | st.text("0123456789.,-[](){}: e\n", max_size=60))
def test_no_text_raises(text):
    assume(text is not None)
    assert 0 <= judge(text).score <= 1
    assert 0 <= judge(text, [GOLD, [0, 0, 5, 5]]).score <= 1
    assert 0 <= judge(text, [1, 5], IntervalVerifier).score <= 1
    assert judge(text, GOLD, PointVerifier).score in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "[10, 20, 50, 80], " * 50_000,
        "[" * 10**6,
        "1:" * 10**6,
        "1 " * 9_000,
        "[" * 19_000,
        "9" * 19_000,
        "1.1" * 6_000,
        "a1" * 9_000,
        "1-" * 990,
        "```" * 600,
        "``` " * 4_000,
    ],
)
def test_long_answers_are_refused_at_once(text):
    start = time.process_time()
    assert (
        judge(text).score == judge(text, [1, 5], IntervalVerifier).score == judge(text, GOLD, PointVerifier).score == 0
    )
    assert time.process_time() - start < 2


def test_votes():
    assert BoxesVerifier().same_answer("[1, 2, 3, 4]", "(1,2),(3,4.0)") and not BoxesVerifier().same_answer(
        "[1, 2, 3, 4]", "[1, 2, 3, 5]"
    )
    assert IntervalVerifier().same_answer("1 - 2", "[1, 2]") and PointVerifier().same_answer("1 2", "(1, 2)")
