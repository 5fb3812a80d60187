"""Typed JSON: Python values as text that gives back the very same builtin types, and whose decoding runs no code.

None, bool, str, finite float, small int and list are JSON's own; everything else is an object with one key, the type's name.
A program's claim arrives in this form, so `decode` takes hostile bytes: it builds exact builtin types only, takes time linear in
their number, and raises nothing but ValueError.

Invariants: `decode(encode(value))` has the same types and values, the order of dicts, the sign of zero and lone surrogates
included; a subclass of a builtin type is refused, but for the dicts of `collections`, which arrive as dicts.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
"""Levels of containers in containers."""
MAX_SIZE = 2**22
"""Bytes of the text, and about as many characters when encoding."""
MAX_ITEMS = 2**19
"""Members of all containers together: reading a million small lists would cost the trainer half a second."""

_SAFE_INT = 2**53
_ALIKE = 64
"""Members of a set or keys of a dict that may share their hash with another: more make its building quadratic."""
_DICTS = (dict, Counter, OrderedDict, defaultdict)


def encode(value: Any, max_size: int = MAX_SIZE) -> bytes:
    """The text of a value. ValueError for one that is not plain (`not a plain value: Decimal`), too deep, or too large."""
    text = json.dumps(_Tree(max_size).of(value, MAX_DEPTH), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes, max_size: int = MAX_SIZE) -> Any:
    """The value of a text. ValueError for anything that `encode` would not have written."""
    if len(data) > max_size:
        raise ValueError(f"a value of {len(data)} bytes, over the limit of {max_size}")
    try:
        tree = json.loads(data.decode("utf-8", "surrogatepass"), parse_constant=_no_constant)
        _check_items(tree)
        return _value(tree, MAX_DEPTH)
    except RecursionError:
        raise ValueError("a value that is nested too deeply") from None
    except (TypeError, OverflowError) as error:  # an unhashable member of a set, say
        raise ValueError(f"not a typed value: {error}") from None


class _Tree:
    """Makes JSON's types of a value; counts what it makes, since a small value may hold the same list many times over."""

    def __init__(self, max_size: int) -> None:
        self.left, self.items = max_size, MAX_ITEMS

    def of(self, value: Any, depth: int) -> Any:
        kind = type(value)
        size = len(value) if kind is str else 2 * len(value) if kind is bytes else 0  # bytes are written in hexadecimal
        size = value.bit_length() // 4 if kind is int else size
        self.left -= size + 1
        self.items -= 1
        if self.left < 0 or self.items < 0:
            raise ValueError("a value that is too large")
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SAFE_INT < value < _SAFE_INT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is complex:
            return {"complex": [self.of(value.real, depth), self.of(value.imag, depth)]}
        if depth == 0:
            raise ValueError("a value that is nested too deeply")
        if kind in _DICTS:
            return {"dict": [[self.of(k, depth - 1), self.of(v, depth - 1)] for k, v in dict.items(value)]}
        if kind in (list, tuple, set, frozenset):
            items = [self.of(item, depth - 1) for item in value]
            return items if kind is list else {kind.__name__: items}
        raise ValueError(f"not a plain value: {type.__dict__['__name__'].__get__(kind)}")


def _check_items(tree: Any) -> None:
    """ValueError where containers have too many members."""
    left = 2 * MAX_ITEMS  # the pairs of a dict are lists, too
    containers = [tree] if isinstance(tree, (list, dict)) else []
    while containers:
        container = containers.pop()
        left -= len(container)
        if left < 0:
            raise ValueError("a value with too many members")
        members = container if isinstance(container, list) else container.values()
        containers += [member for member in members if isinstance(member, (list, dict))]


def _value(tree: Any, depth: int) -> Any:
    if not isinstance(tree, (list, dict)):
        return tree
    if depth < 0:
        raise ValueError("a value that is nested too deeply")
    if isinstance(tree, list):
        return [_value(item, depth - 1) for item in tree]
    if len(tree) != 1:
        raise ValueError("not a typed value: an object without exactly one key")
    ((name, body),) = tree.items()
    if name not in _READ:
        raise ValueError(f"not a typed value: a type called {name[:40]!r}")
    expected, read = _READ[name]
    if type(body) is not expected:
        raise ValueError(f"not a typed value: {name} of {type(body).__name__}")
    return read(body, depth - 1)


def _int(text: str, depth: int) -> int:
    digits = text.removeprefix("-")
    if not digits.startswith("0x"):
        raise ValueError("not a typed value: an int that is not hexadecimal")
    return int(text, 16)


def _float(text: str, depth: int) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError("not a typed value: a float that is a number")
    return float(text)


def _complex(parts: list[Any], depth: int) -> complex:
    real, imaginary = (_value(part, depth) for part in parts)
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("not a typed value: a complex of other things than floats")
    return complex(real, imaginary)


def _dict(pairs: list[Any], depth: int) -> dict[Any, Any]:
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        raise ValueError("not a typed value: a dict of other things than pairs")
    keys = _hashable([_value(key, depth) for key, _ in pairs])
    return dict(zip(keys, (_value(value, depth) for _, value in pairs), strict=True))


def _hashable(items: list[Any]) -> list[Any]:
    """The items, where a set of them is built in linear time."""
    if len(items) - len({hash(item) for item in items}) > _ALIKE:
        raise ValueError("too many members of a set, or keys of a dict, that share their hash")
    return items


def _items(items: list[Any], depth: int) -> list[Any]:
    return [_value(item, depth) for item in items]


def _no_constant(name: str) -> Any:
    raise ValueError(f"not a typed value: {name}")


_READ: dict[str, tuple[type, Callable[[Any, int], Any]]] = {
    "int": (str, _int),
    "float": (str, _float),
    "bytes": (str, lambda body, depth: bytes.fromhex(body)),
    "complex": (list, _complex),
    "tuple": (list, lambda body, depth: tuple(_items(body, depth))),
    "set": (list, lambda body, depth: set(_hashable(_items(body, depth)))),
    "frozenset": (list, lambda body, depth: frozenset(_hashable(_items(body, depth)))),
    "dict": (list, _dict),
}
