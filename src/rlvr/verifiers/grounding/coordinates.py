"""Coordinates in an answer: boxes, points, intervals and times, in the layouts that vision-language models write.

Invariants: every number in the text belongs to a coordinate or the text is refused, so nothing is picked out of several
guesses; only finite numbers of at most 12 digits; linear in the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Matches `12`, `-0.5`, `.5`, `3.`; at most 12 digits on each side, so that `float` is finite and cheap.
_NUMBER = r"[-+]?(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})"
# `x1=12` and `<box>12` hold a number; the digits of `v2.5b`, `1e5` and `30%` are none.
_ONE = re.compile(rf"(?<![\w.])({_NUMBER})(?![\w.]*[0-9eE]|%)")
# What must not be left over once the numbers are taken out: then some digits belonged to none.
_DIGIT = re.compile(r"[0-9]|\b(?:nan|inf|infinity)\b", re.IGNORECASE)
# `01:20.5`, `1:02:03`; not `12:5` (two digits of seconds) nor a part of `1:2:3:4`.
_TIME = re.compile(r"(?<![\w.:])(?:([0-9]{1,3}):)?([0-9]{1,3}):([0-9]{2}(?:\.[0-9]{1,6})?)(?![\w:])")
_BOX_KEYS = ("bbox_2d", "bbox", "box_2d", "box", "Position", "position", "coordinates")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
# `"x1":`, `y2 =`, `bbox_2d:`: names with digits in them, which are no coordinates.
_KEY = re.compile(r"[\"']?\b(?:[xy][0-9]|bbox_2d|box_2d)\b[\"']?\s*[=:]")
# `12.5s`, `20 seconds`.
_SECONDS = re.compile(r"(?<=[0-9])\s*(?:seconds|second|secs|sec|s)\b", re.IGNORECASE)
# "not [1, 2, 3, 4]" and "everything except ..." name a place that is not the answer.
_NOT = re.compile(r"\b(?:not|never|except|outside|instead)\b|n't\b|n\u2019t\b", re.IGNORECASE)
# `12.5 - 20` is an interval and not the number -20; dashes of print count too.
_DASH = re.compile(r"(?<=[0-9])\s*[-\u2013\u2014~]\s*(?=[0-9])")


def read_tuples(text: str, size: int, most: int) -> list[tuple[float, ...]] | str:
    """All coordinates of `text` in tuples of `size` (4 for boxes, 2 for points), at most `most` of them.

    Read are JSON (lists, lists of lists, objects with a key such as `bbox_2d`) and any other writing with the right
    count of numbers: `[x1, y1, x2, y2]`, `(x1,y1),(x2,y2)`, `<box>...</box>`. In words why it cannot be read,
    otherwise.
    """
    if _NOT.search(text):
        return "the answer says what it is not"
    fenced = _FENCE.search(text)
    numbers = _from_json(fenced[1] if fenced else text, size)
    if numbers is None:
        plain = _KEY.sub(" ", text)
        numbers = [float(match[1]) for match in _ONE.finditer(plain)]
        # `1e5` or `50%` in the text: reading the other numbers only would be a guess.
        if _DIGIT.search(_ONE.sub(" ", plain)):
            return "a number that is no plain coordinate"
    if not numbers or len(numbers) % size:
        return f"{len(numbers)} numbers are not tuples of {size}"
    if len(numbers) > size * most:
        return f"more than {most} tuples of {size}"
    return [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]


def _from_json(text: str, size: int) -> list[float] | None:
    """The coordinates of a JSON answer in order; None where it is no JSON or not of numbers only."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    items = value if isinstance(value, list) else [value]
    # `[1, 2, 3, 4]` is one box, `[[1, 2, 3, 4]]` a list of them.
    if items and not isinstance(items[0], (list, dict)):
        items = [items]
    numbers: list[float] = []
    for item in items:
        if isinstance(item, dict):
            box = next((item[key] for key in _BOX_KEYS if key in item), None)
        else:
            box = item
        if not isinstance(box, list) or len(box) != size or not all(map(is_coordinate, box)):
            return None
        numbers += map(float, box)
    return numbers


def is_coordinate(value: Any) -> bool:
    """Return True if a value is a finite number in the range of a coordinate."""
    return type(value) in (int, float) and abs(value) <= 1e12


def read_intervals(text: str, most: int) -> list[tuple[float, ...]] | str:
    """Intervals in seconds: `12.5 - 20`, `[12.5, 20]`, `from 12.5s to 20s`, `00:12 to 01:20.5`."""
    # Hours, minutes and seconds to seconds: `1:02:03` is 3723.0.
    text = _TIME.sub(lambda m: repr(3600 * int(m[1] or 0) + 60 * int(m[2]) + float(m[3])), text)
    text = _DASH.sub(" , ", _SECONDS.sub(" ", text))
    return read_tuples(text, 2, most)
