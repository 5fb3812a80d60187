"""Typed JSON: Python values as text that gives back the very same builtin types, and whose decoding runs no code.

None, bool, str, finite float, small int and list are JSON's own; everything else is an object with one key, the type's
name. A program's claim arrives in this form, so `decode` takes hostile bytes: it builds exact types of the standard
library only (and `Instance`), takes time linear in their number, and raises nothing but ValueError. A range has more
members than its text has bytes: its members count into the size of the value as if they were written out.

Invariants: `decode(encode(value))` has the same types and values, the order of dicts, the sign of zero and lone
surrogates included. An object of a subclass of these types (a namedtuple, an IntEnum, a Counter) arrives as what it is
a kind of; an iterator (a generator, a map) as an iterator over what it gave; an object of a program's own class as an
Instance; a numpy array as an Array, or as itself where there is numpy.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 100
"""Levels of containers in containers."""
MAX_SIZE = 2**22
"""Bytes of the text, and about as many characters when encoding."""
MAX_ITEMS = 2**19
"""Members of all containers together: reading a million small lists would cost the trainer half a second."""

# Below it every integer is exact as a double, which readers of JSON outside of Python make of it. Larger ones are
# written in hexadecimal, since decimal digits take quadratic time to read.
_SAFE_INT = 2**53
# Arbitrary. Python's hashes of honest values collide by chance, or in small families such as -1 and -2.
_ALIKE = 64
"""Members of a set or keys of a dict that may share their hash with another: more make its building quadratic."""
# Arbitrary. A Decimal of 1e999999999 is a short text, but arithmetic with it, or its conversion to int, is not.
_DIGITS = 1000
"""Digits of a Decimal, size of its exponent, and digits of the parts of a Fraction: arithmetic with them stays
cheap."""
_DTYPE = re.compile(r"[<>|=](?:b1|[iu][1248]|f[248]|c8|c16|[US]\d{1,7}|O)")
"""Types of an array's elements: bool, integers, floats, complex numbers, text, bytes and objects, as numpy writes
them."""
# numpy's own bound before version 2.
_MOST_AXES = 32
_EMPTY_ROWS = 1000
"""Rows of an array that has no elements; others have as many elements at least as rows."""
BUILTIN_METHODS = frozenset(
    name
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, bytearray, range)
    for name in dir(kind)
)
"""Attributes of builtin values. An object that a program returns in place of a builtin value has none of them in a
test: a call such as `f(x).count(3)` would show its argument, which may be the expected answer, to the program."""
_OWN_MODULE = "program"
"""Module name of a program's own classes, see `inside.program`; those of a test are defined elsewhere."""
_TIMES: dict[type, tuple[str, ...]] = {
    datetime.date: ("year", "month", "day"),
    datetime.time: ("hour", "minute", "second", "microsecond"),
    datetime.datetime: ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    datetime.timedelta: ("days", "seconds", "microseconds"),
}


class Source:
    """The text of a function that a test gives to a program as an argument: the program's process alone makes a
    function of it."""

    def __init__(self, text: str) -> None:
        self.text = text


class Instance:
    """An object of a program's own class, by what it holds: its fields can be read, and where its class defines
    `__eq__` it is equal to another of the same name and fields."""

    def __init__(self, name: str, fields: dict[str, Any], comparable: bool) -> None:
        self.__dict__.update(fields)
        self._instance = name, fields, comparable

    def __eq__(self, other: object) -> bool:
        if type(other) is not Instance:
            return NotImplemented
        return self is other or (self._instance[2] and self._instance == other._instance)

    def __hash__(self) -> int:
        return hash(self._instance[0])

    def __repr__(self) -> str:
        name, fields, _ = self._instance
        return f"{name}({', '.join(f'{field}={value!r}' for field, value in fields.items())})"


class Array:
    """A numpy array where there is no numpy: `items` are its elements in C order. As a sequence it is that of its rows;
    it is equal to itself only, since numpy's comparison of arrays is no bool."""

    def __init__(self, dtype: str, shape: tuple[int, ...], items: list[Any]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.items = items

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __getitem__(self, at: int) -> Any:
        count = len(self)
        if type(at) is not int:
            raise TypeError(f"an array outside of its program is indexed by an int, not by {type(at).__name__}")
        if not -count <= at < count:
            raise IndexError(f"index {at} is out of bounds for an array of {count}")
        row = len(self.items) // count
        part = self.items[at % count * row : (at % count + 1) * row]
        if self.shape[1:]:
            return Array(self.dtype, self.shape[1:], part)
        return part[0]

    def __repr__(self) -> str:
        return f"an array of {self.dtype} and shape {self.shape}"


make_array: Callable[[str, tuple[int, ...], list[Any]], Any] = Array
"""Makes what `decode` gives for an array; numpy's own in the processes that have numpy (`inside.arrays`)."""


def encode(value: Any, max_size: int = MAX_SIZE) -> bytes:
    """The text of a value. ValueError for one that is not plain (`not a plain value: Decimal`), too deep, or too
    large."""
    # ensure_ascii=False: lone surrogates stay characters, which surrogatepass encodes. One value has one text:
    # `_with_changes` of the program's process compares texts.
    text = json.dumps(_Tree(max_size).of(value, MAX_DEPTH), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes, max_size: int = MAX_SIZE) -> Any:
    """The value of a text. ValueError for anything that `encode` would not have written."""
    value, size = measured(data, max_size)
    if size > max_size:
        raise ValueError(f"a value of {size} bytes, over the limit of {max_size}")
    return value


def measured(data: bytes, max_size: int) -> tuple[Any, int]:
    """The value of a text, and its size in bytes with the members of ranges written out; None in place of a value that
    is larger than `max_size`. ValueError as in `decode`."""
    if len(data) > max_size:
        return None, len(data)
    try:
        tree = json.loads(data.decode("utf-8", "surrogatepass"), parse_constant=_no_constant)
        # Before any value is built: `range(10**9)` is one short object, and `list` of it would fill the memory.
        size = len(data) + _size_of_ranges(tree)
        return (_value(tree, MAX_DEPTH) if size <= max_size else None), size
    # `json.loads` recurses on nested lists, before the depth is looked at.
    except RecursionError:
        raise ValueError("a value that is nested too deeply") from None
    except (TypeError, OverflowError) as error:  # an unhashable member of a set, say
        raise ValueError(f"not a typed value: {error}") from None


class _Tree:
    """Makes JSON's types of a value; counts what it makes, since a small value may hold the same list many times
    over."""

    def __init__(self, max_size: int) -> None:
        self.bytes_left = max_size
        self.items = MAX_ITEMS

    def of(self, value: Any, depth: int) -> Any:
        kind = type(value)
        size = len(value) if kind is str else 2 * len(value) if kind is bytes else 0  # bytes are written in hexadecimal
        # Four bits are one hexadecimal digit.
        size = value.bit_length() // 4 if kind is int else size
        self.bytes_left -= size + 1
        self.items -= 1
        if self.bytes_left < 0 or self.items < 0:
            raise ValueError("a value that is too large")
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            if -_SAFE_INT < value < _SAFE_INT:
                return value
            return {"int": hex(value)}
        if kind is float:
            if math.isfinite(value):
                return value
            return {"float": repr(value)}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is complex:
            return {"complex": [self.of(value.real, depth), self.of(value.imag, depth)]}
        # Also ends a list that contains itself.
        if depth == 0:
            raise ValueError("a value that is nested too deeply")
        if kind is dict:
            return {"dict": [[self.of(k, depth - 1), self.of(v, depth - 1)] for k, v in dict.items(value)]}
        if kind in (list, tuple, set, frozenset):
            items = [self.of(item, depth - 1) for item in value]
            if kind is list:
                return items
            return {kind.__name__: items}
        return self._less_common(value, kind, depth)

    def _less_common(self, value: Any, kind: type, depth: int) -> Any:
        if kind is range:
            self.bytes_left -= _range_size(value)
        if kind in (bytearray, range, Decimal, Fraction):
            return {kind.__name__: self.of(_parts(value), depth - 1)}
        if kind is Source:
            return {"source": value.text}
        if kind in _TIMES and getattr(value, "tzinfo", None) is None:
            return {kind.__name__: [getattr(value, name) for name in _TIMES[kind]]}
        # Before the general cases: a namedtuple, an IntEnum or a Counter is sent as the tuple, int or dict that it is.
        for base, read in _BASES.items():
            if issubclass(kind, base):
                return self.of(read(value), depth)
        for view, name in _VIEWS.items():
            if issubclass(kind, view):
                return {name: [self.of(item, depth - 1) for item in value]}
        if kind is Array:
            return self._array(value.dtype, value.shape, value.items, depth)
        if _name(kind, "__module__").startswith("numpy"):
            if _name(kind, "__name__") == "ndarray":
                return self._array(value.dtype.str, value.shape, value.ravel().tolist(), depth)
            # `np.float64` is also a float and was taken above; `np.int64` and `np.bool_` are not.
            plain = value.tolist() if hasattr(kind, "tolist") else value  # a scalar is its number
            if type(plain) is not kind:  # there is no other number for a longdouble
                return self.of(plain, depth)
        if issubclass(kind, Iterator):
            return {"iterator": [self.of(item, depth - 1) for item in value]}
        if _name(kind, "__module__") == _OWN_MODULE and not issubclass(kind, type):
            # `kind.__eq__ is not object.__eq__`: without an `__eq__` of its own, two objects of a class are equal only
            # when they are one.
            fields = [[str(name), self.of(field, depth - 1)] for name, field in _fields(value, kind).items()]
            return {"object": [_name(kind, "__name__"), fields, kind.__eq__ is not object.__eq__]}
        raise ValueError(f"not a plain value: {_name(kind, '__name__')}")

    def _array(self, dtype: str, shape: tuple[int, ...], items: list[Any], depth: int) -> Any:
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"not a plain value: an array of {dtype[:40]}")
        return {"array": [dtype, list(shape), [self.of(item, depth - 1) for item in items]]}


def _name(kind: type, of: str) -> str:
    """The name of a class, or of its module, read past a metaclass that may define it anew."""
    text = type.__dict__[of].__get__(kind)
    return text if type(text) is str else ""


def _fields(value: Any, kind: type) -> dict[str, Any]:
    # `__slots__` of all bases; an object may have both slots and a `__dict__`.
    slots = [name for base in kind.__mro__ for name in _names(vars(base).get("__slots__", ()))]
    fields = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    return fields | getattr(value, "__dict__", {})


def _names(slots: Any) -> tuple[str, ...]:
    if isinstance(slots, str):
        return (slots,)
    return tuple(slots)


def _parts(value: Any) -> Any:
    if type(value) is range:
        return [value.start, value.stop, value.step]
    if type(value) is Fraction:
        return [value.numerator, value.denominator]
    if type(value) is bytearray:
        return value.hex()
    return str(value)


_BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    dict: lambda value: dict(dict.items(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
"""An object of a subclass, as an exact object of the class: by the class's own methods, which a subclass cannot rig."""

_VIEWS: dict[type, str] = {deque: "deque", KeysView: "keys", ValuesView: "values", ItemsView: "items"}


def _size_of_ranges(tree: Any) -> int:
    """Bytes of the members of all ranges, written out. ValueError where containers have too many members."""
    size = 0
    members_left = 2 * MAX_ITEMS  # the pairs of a dict are lists, too
    # A list instead of recursion, so that depth costs nothing before it is checked.
    containers = [tree] if isinstance(tree, (list, dict)) else []
    while containers:
        container = containers.pop()
        members_left -= len(container)
        if members_left < 0:
            raise ValueError("a value with too many members")
        if isinstance(container, dict) and type(container.get("range")) is list:
            size += _range_size(_range(container["range"], 1))
        members = container if isinstance(container, list) else container.values()
        containers += [member for member in members if isinstance(member, (list, dict))]
    return size


def _value(tree: Any, depth: int) -> Any:
    if not isinstance(tree, (list, dict)):
        return tree
    if depth < 0:
        raise ValueError("a value that is nested too deeply")
    if isinstance(tree, list):
        return [_value(item, depth - 1) for item in tree]
    if len(tree) != 1:
        raise ValueError("not a typed value: an object without exactly one key")
    # An object with exactly one key: the type's name and what it is made of.
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
    # Base 16 is linear in the digits; base 10 is quadratic.
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
    # Hashing is linear even where building the set would not be, and equal hashes are one member of the set of hashes.
    if len(items) - len({hash(item) for item in items}) > _ALIKE:
        raise ValueError("too many members of a set, or keys of a dict, that share their hash")
    return items


def _decimal(text: str, depth: int) -> Decimal:
    if len(text) > _DIGITS or not text.isascii():
        raise ValueError("a Decimal that is too long")
    try:
        number = Decimal(text)
    except ArithmeticError:
        raise ValueError("not a typed value: a Decimal that is no number") from None
    # A signalling NaN raises on every comparison.
    if number.is_snan() or (number.is_finite() and abs(number.adjusted()) > _DIGITS):
        raise ValueError("a Decimal that is too large, too small or signals")
    return number


def _integers(parts: list[Any], depth: int, count: int) -> list[int]:
    numbers = _items(parts, depth)
    if len(numbers) != count or any(type(number) is not int for number in numbers):
        raise ValueError(f"not a typed value: something else than {count} integers")
    return numbers


def _fraction(parts: list[Any], depth: int) -> Fraction:
    # A Fraction is reduced when it is made, which computes a gcd: quadratic in the digits.
    over, below = _integers(parts, depth, 2)
    if below <= 0 or max(over.bit_length(), below.bit_length()) > 4 * _DIGITS:
        raise ValueError("a Fraction that is too long")
    return Fraction(over, below)


def _range(parts: list[Any], depth: int) -> range:
    return range(*_integers(parts, depth, 3))


def _range_size(value: range) -> int:
    """Bytes of a range's members as a list of hexadecimal digits; `len` cannot count more than `sys.maxsize`
    members."""
    if not value:
        return 0
    members = (value[-1] - value.start) // value.step + 1
    digits = max(value.start.bit_length(), value.stop.bit_length()) // 4 + 1
    return members * (digits + 1)


def _time(kind: type) -> Callable[[list[Any], int], Any]:
    return lambda parts, depth: kind(*_integers(parts, depth, len(_TIMES[kind])))


def _pairs(pairs: list[Any]) -> dict[Any, Any]:
    if not all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
        raise ValueError("not a typed value: items of other things than pairs")
    _hashable([key for key, _ in pairs])
    return dict(pairs)


def _instance(parts: list[Any], depth: int) -> Instance:
    name, fields, comparable = parts
    if type(name) is not str or type(fields) is not list or type(comparable) is not bool:
        raise ValueError("not a typed value: an object without name or fields")
    held = _dict(fields, depth)
    if any(type(field) is not str or field == "_instance" for field in held):
        raise ValueError("not a typed value: an object whose fields are not named")
    return Instance(name, held, comparable)


def _array(parts: list[Any], depth: int) -> Any:
    dtype, shape, items = parts
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype) or type(shape) is not list or type(items) is not list:
        raise ValueError("not a typed value: an array without a type, a shape or elements")
    most = max(len(items), _EMPTY_ROWS)
    # Each axis is bounded too: a shape such as (10**18, 0) has no elements, and would still be walked row by row.
    if len(shape) > _MOST_AXES or any(type(length) is not int or not 0 <= length <= most for length in shape):
        raise ValueError("an array of too many axes, or too long")
    if math.prod(shape) != len(items):
        raise ValueError(f"not a typed value: an array of {len(items)} elements and another shape")
    return make_array(dtype, tuple(shape), _items(items, depth))


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
    "bytearray": (str, lambda body, depth: bytearray.fromhex(body)),
    "range": (list, _range),
    "Decimal": (str, _decimal),
    "Fraction": (list, _fraction),
    **{kind.__name__: (list, _time(kind)) for kind in _TIMES},
    "deque": (list, lambda body, depth: deque(_items(body, depth))),
    "keys": (list, lambda body, depth: dict.fromkeys(_hashable(_items(body, depth))).keys()),
    "values": (list, lambda body, depth: dict(enumerate(_items(body, depth))).values()),
    "items": (list, lambda body, depth: _pairs(_items(body, depth)).items()),
    "iterator": (list, lambda body, depth: iter(_items(body, depth))),
    "array": (list, _array),
    "object": (list, _instance),
    "source": (str, lambda body, depth: Source(body)),
}
