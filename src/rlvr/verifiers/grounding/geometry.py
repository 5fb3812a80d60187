"""Boxes, intervals and points: overlap measures on plain floats.

A box is (x1, y1, x2, y2) with x1 < x2 and y1 < y2, an interval (start, end) with start < end; the callers see to that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

Box = tuple[float, float, float, float]
Interval = tuple[float, float]
Point = tuple[float, float]


def area(box: Box) -> float:
    """Width x height; 0 where the box is empty."""
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def iou(a: Box, b: Box) -> float:
    """Intersection over union, in [0, 1]."""
    # IoU = |A and B| / |A or B|, with |A or B| = |A| + |B| - |A and B|.
    shared = _shared(a, b)
    return shared / (area(a) + area(b) - shared)


def _shared(a: Box, b: Box) -> float:
    return area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))


def generalised_iou(a: Box, b: Box) -> float:
    """IoU less the share of the enclosing box that neither fills, in (-1, 1] (Rezatofighi et al. 2019)."""
    # GIoU = IoU - |C \ (A or B)| / |C|, C the smallest box around both (Rezatofighi et al. 2019, algorithm 1).
    hull = area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    union = area(a) + area(b) - _shared(a, b)
    return iou(a, b) - (hull - union) / hull


def interval_iou(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Length covered by both sets of intervals over length covered by either, in [0, 1]."""
    covered = _length(a)
    both = _length(b)
    union = _length([*a, *b])
    # |A and B| = |A| + |B| - |A or B|; rounding may leave it a little below 0.
    return max(covered + both - union, 0.0) / union


def _length(intervals: Sequence[Interval]) -> float:
    """The length that at least one of the intervals covers."""
    total = 0.0
    end = float("-inf")
    # In order of their starts, so that only the end so far has to be kept.
    for start, stop in sorted(intervals):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def in_polygon(point: Point, corners: Sequence[Point]) -> bool:
    """Return True if the point lies in the polygon or on its edge (even-odd rule)."""
    x, y = point
    inside = False
    for (x1, y1), (x2, y2) in zip(corners, [*corners[1:], corners[0]], strict=True):
        # The cross product of the edge with the point: 0 on its line, above 0 to its left.
        turn = (x2 - x1) * (y - y1) - (y2 - y1) * (x - x1)
        if turn == 0 and min(x1, x2) <= x <= max(x1, x2) and min(y1, y2) <= y <= max(y1, y2):
            return True
        # A ray to the right crosses the edge where it goes from one side of y to the other and the point is to its
        # left; an odd number of crossings means inside. One end of each edge counts (`>`), so that a corner is crossed
        # once.
        if (y1 > y) != (y2 > y) and (turn > 0) == (y2 > y1):
            inside = not inside
    return inside


def best_matching(
    golds: Sequence[Box], answers: Sequence[Box], measure: Callable[[Box, Box], float]
) -> list[tuple[int, int, float]]:
    """(gold, answer, measure) of the one-to-one matching with the greatest sum, by SciPy's assignment solver."""
    table = [[measure(gold, answer) for answer in answers] for gold in golds]
    rows, columns = importlib.import_module("scipy.optimize").linear_sum_assignment(table, maximize=True)
    return [(int(row), int(column), table[row][column]) for row, column in zip(rows, columns, strict=True)]
