"""Errors of pydantic about wrong values, in words that need no knowledge of it."""

from __future__ import annotations

import re
from typing import Any

_NEEDED = {
    "a mapping of keys to values is needed": ("dict_type", "model_type", "model_attributes_type", "dataclass_type"),
    "a list is needed": ("list_type", "tuple_type", "set_type"),
    "text is needed": ("string_type",),
    "a whole number is needed": ("int_type", "int_parsing", "int_from_float"),
    "a number is needed": ("float_type", "float_parsing"),
    "true or false is needed": ("bool_type", "bool_parsing"),
    "a value is needed": ("missing",),
    "unknown key": ("extra_forbidden",),
}
_SUBJECT = re.compile(r"^(Input|String|List|Tuple|Dictionary|Value) should")
_WORDS = {kind: words for words, kinds in _NEEDED.items() for kind in kinds}


def reason(problem: Any) -> str:
    """The reason of one of `ValidationError.errors()`, without the value."""
    known = _WORDS.get(problem["type"])
    if problem["type"] == "missing" and isinstance(problem["loc"][-1], int):
        return "more values are needed"
    if known is not None:
        return known
    message: str = problem["msg"].removeprefix("Value error, ")
    # `Input should be less than 1`, `String should have at least 1 character`.
    return _SUBJECT.sub("it must", message).replace(" after validation", "")
