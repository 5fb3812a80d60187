"""Readers of single fields of a task's `info`: each returns a checked value or raises LayoutError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class LayoutError(ValueError):
    """A task cannot be used; the text names the place and says how to correct it."""


def read_weights(info: Mapping[str, Any], count: int) -> list[float]:
    """The weights of `count` tests; 1 each where the task gives none."""
    weights = info.get("weights")
    if weights is None:
        return [1.0] * count
    if not isinstance(weights, (list, tuple)) or len(weights) != count:
        raise LayoutError(f"'weights' is a list of {count} numbers, one for each test")
    return [read_weight(weight, f"weights[{number}]") for number, weight in enumerate(weights)]


def read_weight(value: Any, place: str) -> float:
    """A weight: a finite number of 0 or more."""
    # `bool` is a subclass of `int`: without the first test, `weight: true` would be a weight of 1.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise LayoutError(f"{place}: a weight is a number of 0 or more, not {value!r}")
    return float(value)


def read_string(row: Mapping[str, Any], name: str, place: str, default: str | None = None) -> str:
    """A text of a case, where a list of lines is also a text; `default` where there is none."""
    value = row.get(name, default)
    # Some rows of APPS write an input as a list of lines; its harness joins them (eval/testing_util.py).
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        if value is None:
            problem = f"there is no {name!r}"
        else:
            problem = f"{name!r} is {type(value).__name__}, not text"
        raise LayoutError(f"{place}: {problem}; write {{'input': '...', 'output': '...'}}")
    # JSON can hold half of a surrogate pair ("\ud800"), which UTF-8 cannot: it would fail when the input is sent.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise LayoutError(f"{place}: {name!r} holds a lone surrogate, which no program can read or write") from None
    return value


def read_text(info: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A text of the task; `default` where there is none."""
    value = info.get(name, default)
    if not isinstance(value, str):
        raise LayoutError(
            f"info[{name!r}] is a text, {'and it is missing' if value is None else 'not ' + type(value).__name__}"
        )
    return value


def read_name(info: Mapping[str, Any], field: str) -> str:
    """The name of a function, with dots for a method."""
    name = read_text(info, field)
    if not all(part.isidentifier() for part in name.split(".")):
        raise LayoutError(f"info[{field!r}] is the name of a function, not {name!r}")
    return name


def read_number(info: Mapping[str, Any], name: str, most: float) -> float | None:
    """A number above 0 and at most `most`, or None where there is none."""
    value = info.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise LayoutError(f"info[{name!r}] is a number above 0 and at most {most:g}, not {value!r}")
    return float(value)


def canonical(value: Any) -> Iterator[str]:
    """The parts of a text that no other value has, for a digest of the task."""
    # Each container writes its type and length first, so that ["a", ["b"]] and ["a", "b"] cannot write the same text.
    if isinstance(value, Mapping):
        yield f"{len(value)} pairs:"
        for pair in value.items():
            yield from canonical(pair)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} of {len(value)}:"
        for item in value:
            yield from canonical(item)
    elif isinstance(value, (set, frozenset)):
        yield f"{type(value).__name__} of {len(value)}:"
        # Sets have no order, and that of their texts differs from process to process (hash seed).
        yield from sorted("".join(canonical(item)) for item in value)
    else:
        # `repr` of an int of more than 4,300 digits raises ValueError (sys.set_int_max_str_digits); `hex` does not.
        # backslashreplace: a lone surrogate in a text cannot be hashed as UTF-8.
        yield f"{hex(value)};" if type(value) is int else f"{value!r};".encode("utf-8", "backslashreplace").decode()
