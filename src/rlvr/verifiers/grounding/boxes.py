"""Visual and temporal grounding: boxes, intervals of time, points in regions.

Invariants: a degenerate box or interval is unparsable, never a division by zero; more boxes than the gold has cost
score, so covering everything pays nothing; a single gold wants a single answer.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, check_threshold, graded, require, unparsable, wrong
from rlvr.verifiers.grounding.coordinates import is_coordinate, read_intervals, read_tuples
from rlvr.verifiers.grounding.geometry import Box, Point, best_matching, generalised_iou, in_polygon, interval_iou, iou

Scale = Literal["same", "pixel", "unit", "thousand"]
Layout = Literal["xyxy", "xywh", "cxcywh"]
# Arbitrary, above the boxes of an image in the public sets; matching takes cubic time.
MOST = 100
"""Boxes or intervals in one answer; one with more is unparsable."""


@register_verifier("boxes")
@dataclass
class BoxesVerifier(AnswerVerifier):
    """The overlap of the answer's boxes with those of `task.answer` (one list of 4 numbers, or a list of such lists).

    With several boxes they are matched one to one for the greatest sum, and the score is that sum over the greater
    count. One gold box wants one box. Boxes are `[x1, y1, x2, y2]`, `(x1,y1),(x2,y2)`, `<box>...</box>` or JSON.
    """

    measure: Literal["iou", "giou"] = "iou"
    """Intersection over union, or (1 + generalised IoU) / 2, which also tells near from far."""
    threshold: float | None = None
    """A box counts 1 where its measure reaches this, else 0; null: the measure itself."""
    layout: Layout = "xyxy"
    """Meaning of the answer's 4 numbers: two corners, corner and size, or centre and size. Golds are always two
    corners."""
    answer_scale: Scale = "same"
    """Unit of the answer's numbers: `pixel`, `unit` (0 to 1), `thousand` (0 to 1000), or the `same` as the gold."""
    gold_scale: Literal["pixel", "unit", "thousand"] = "pixel"
    """Unit of the gold's numbers. Where one of the two is pixels and the other is not, `info["width"]` and
    `info["height"]` are needed."""
    max_length: int = 20_000

    def __post_init__(self) -> None:
        check_threshold("boxes", self.threshold)
        require("scipy", "verifiers", "boxes")
        importlib.import_module("scipy.optimize")  # a third of a second, which the first answer need not wait for

    def check_task(self, task: Task) -> str | None:
        golds = _gold_tuples(task.answer, 4)
        if not golds:
            return "the answer is no list of 4 finite numbers, nor a list of such lists"
        if not all(_is_box(cast(Box, gold)) for gold in golds):
            return "the answer has a box without area: x1 < x2 and y1 < y2 are needed"
        scale = _scale(task, self.answer_scale, self.gold_scale)
        return scale if isinstance(scale, str) else None

    def judge(self, task: Task, answer: str) -> Verdict:
        golds = cast(list[Box], _gold_tuples(task.answer, 4))
        parsed = read_tuples(answer, 4, MOST)
        if isinstance(parsed, str):
            return unparsable(parsed, answer)
        scale = _scale(task, self.answer_scale, self.gold_scale)
        assert not isinstance(scale, str)
        boxes = [_to_corners(cast(Box, box), self.layout, scale) for box in parsed]
        if not all(map(_is_box, boxes)):
            return unparsable("a box without area", answer)
        # With one gold the mean below would still pay a share of a right box among guesses.
        if len(golds) == 1 and len(boxes) > 1:
            return wrong(f"{len(boxes)} boxes where one is asked for", answer)
        # (1 + GIoU) / 2 maps (-1, 1] onto (0, 1]: boxes that do not touch the gold are told apart by their distance.
        measure = iou if self.measure == "iou" else _unit_giou
        matched = [value for _, _, value in best_matching(golds, boxes, measure)]
        counted = [value if self.threshold is None else float(value >= self.threshold) for value in matched]
        # Divided by the greater count: a box that is missing and a box too many cost the same.
        most = max(len(golds), len(boxes))
        return graded(sum(counted) / most, answer, measure=sum(matched) / most)

    def same_answer(self, first: str, second: str) -> bool:
        return read_tuples(first, 4, MOST) == read_tuples(second, 4, MOST)


@register_verifier("interval")
@dataclass
class IntervalVerifier(AnswerVerifier):
    """IoU of the answer's time interval with `task.answer` ([start, end] in seconds, or a list of such pairs).

    Several intervals are compared by what they cover together. One gold interval wants one interval.
    """

    threshold: float | None = None
    """From this IoU on an answer is correct, below it is wrong; null: the IoU itself."""

    def __post_init__(self) -> None:
        check_threshold("interval", self.threshold)

    def check_task(self, task: Task) -> str | None:
        golds = _gold_tuples(task.answer, 2)
        if not golds:
            return "the answer is no pair of finite numbers, nor a list of pairs"
        if all(start < end for start, end in golds):
            return None
        return "the answer has an interval that ends before it starts"

    def judge(self, task: Task, answer: str) -> Verdict:
        golds = _gold_tuples(task.answer, 2)
        parsed = read_intervals(answer, MOST)
        if isinstance(parsed, str):
            return unparsable(parsed, answer)
        if not all(start < end for start, end in parsed):
            return unparsable("an interval that ends before it starts", answer)
        if len(golds) == 1 and len(parsed) > 1:
            return wrong(f"{len(parsed)} intervals where one is asked for", answer)
        return graded(interval_iou(cast(Any, golds), cast(Any, parsed)), answer, self.threshold)

    def same_answer(self, first: str, second: str) -> bool:
        return read_intervals(first, MOST) == read_intervals(second, MOST)


@register_verifier("point")
@dataclass
class PointVerifier(AnswerVerifier):
    """The answer is one point in the region `task.answer`: a box of 4 numbers, or a polygon of 3 or more [x, y]."""

    answer_scale: Scale = "same"
    """Unit of the answer's numbers: `pixel`, `unit` (0 to 1), `thousand` (0 to 1000), or the `same` as the gold."""
    gold_scale: Literal["pixel", "unit", "thousand"] = "pixel"
    """Unit of the gold's numbers. Where one of the two is pixels and the other is not, `info["width"]` and
    `info["height"]` are needed."""

    def check_task(self, task: Task) -> str | None:
        if _region(task.answer) is None:
            return (
                "the answer is neither a box [x1, y1, x2, y2] with x1 < x2 and y1 < y2 nor a polygon of 3 or more "
                "[x, y]"
            )
        scale = _scale(task, self.answer_scale, self.gold_scale)
        return scale if isinstance(scale, str) else None

    def judge(self, task: Task, answer: str) -> Verdict:
        corners = _region(task.answer)
        scale = _scale(task, self.answer_scale, self.gold_scale)
        assert corners is not None and not isinstance(scale, str)
        parsed = read_tuples(answer, 2, 1)
        if isinstance(parsed, str):
            return unparsable(parsed, answer)
        point = (parsed[0][0] * scale[0], parsed[0][1] * scale[1])
        return Verdict.from_score(in_polygon(point, corners), answer=answer)

    def same_answer(self, first: str, second: str) -> bool:
        return read_tuples(first, 2, 1) == read_tuples(second, 2, 1)


def _unit_giou(a: Box, b: Box) -> float:
    return (1 + generalised_iou(a, b)) / 2


def _gold_tuples(answer: Any, size: int) -> list[tuple[float, ...]]:
    """The gold as tuples; empty where it cannot be used."""
    if not isinstance(answer, (list, tuple)) or not answer:
        return []
    if isinstance(answer[0], (list, tuple)):
        items = answer
    else:
        items = [answer]
    fits = all(
        isinstance(item, (list, tuple)) and len(item) == size and all(map(is_coordinate, item)) for item in items
    )
    if fits and len(items) <= MOST:
        return [tuple(map(float, item)) for item in items]
    return []


def _region(answer: Any) -> Sequence[Point] | None:
    box = _gold_tuples(answer, 4)
    if len(box) == 1:
        x1, y1, x2, y2 = box[0]
        if x1 < x2 and y1 < y2:
            return [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]
        return None
    corners = _gold_tuples(answer, 2)
    # Fewer than three different corners have no inside.
    if len(set(corners)) >= 3:
        return cast(list[Point], corners)
    return None


def _is_box(box: Box) -> bool:
    width = box[2] - box[0]
    height = box[3] - box[1]
    # The product may underflow to 0 although both sides are above it, and would be divided by.
    return width > 0 and height > 0 and width * height > 0


def _to_corners(box: Box, layout: Layout, scale: tuple[float, float]) -> Box:
    a = box[0] * scale[0]
    b = box[1] * scale[1]
    c = box[2] * scale[0]
    d = box[3] * scale[1]
    # COCO's boxes: corner and size. `cxcywh` are DETR's and YOLO's: centre and size.
    if layout == "xywh":
        return (a, b, a + c, b + d)
    if layout == "cxcywh":
        return (a - c / 2, b - d / 2, a + c / 2, b + d / 2)
    return (a, b, c, d)


def _scale(task: Task, answer_scale: Scale, gold: str) -> tuple[float, float] | str:
    """Return the factors that convert the answer's x and y to the gold's unit; else the reason, in words, why they are
    unknown."""
    if answer_scale in ("same", gold):
        return (1.0, 1.0)
    # The length of the image's sides in each measure: `thousand` is that of Qwen-VL and of Gemini (0 to 1000).
    size = {"unit": (1.0, 1.0), "thousand": (1000.0, 1000.0)}
    if "pixel" in (answer_scale, gold):
        width, height = (task.info.get(side, 0) for side in ("width", "height"))
        if not (is_coordinate(width) and is_coordinate(height) and width > 0 and height > 0):
            return 'info["width"] and info["height"] are needed to compare pixels with shares of the image'
        size["pixel"] = (width, height)
    return (size[gold][0] / size[answer_scale][0], size[gold][1] / size[answer_scale][1])
