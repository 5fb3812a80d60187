"""Objects and functions that a program made and that stay in its process, while a test that runs as code uses them.

In the program's process they are kept under numbers (`Kept`); in the test's process a `Held` stands for each. Its
fields, methods, length, text, members and indices are asked for one by one, and what comes back is a claim of the
program like any other.

What a test compares with never reaches such an object, or its class could answer `True`: two are equal where what they
hold is, an operation with anything but another held object is a TypeError, and `in` looks at the members. Of the
methods that builtin values have (`startswith`, `count`), only objects of the classes that the test uses as such
(`Stack`, see `names.classes`) have any.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlvr.verifiers.code import values

HELD = b"h"
AWAITED = b"a"
"""Reports: an object that is kept, as `[number, name of its class]`, or a function, with no name; the value that a
coroutine gave."""
Ask = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Sends a call to the program's process and returns its answer: the path is a name, or `#number` with an operation on
that object."""

_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    functools.partial,
    type,
)
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem")},
    "len": len,
    "str": str,
    "repr": repr,
    "list": list,
    "bool": bool,
    "setattr": setattr,
}
_SENT = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, Iterator)
"""Types whose values are sent; an object of a subclass arrives as one of the type itself."""


class Kept:
    """Objects that a program's process keeps for its test."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def find(self, path: str) -> Callable[..., Any]:
        """Return the function for a path that a test asks for: `#3.push`, a method of object 3; `#3?x`, its field;
        `#3`, the object itself; `@len`, an operation."""
        if path.startswith("@"):
            return _OPERATIONS.get(path[1:], lambda one: values.encode(one))
        head, dot, name = path.partition("." if "." in path else "?")
        if head.startswith("#"):
            one = self._objects[int(head[1:])]
        else:
            one = self._names[head]
        if not dot:
            return lambda *args, **kwargs: one(*args, **kwargs)
        if dot == ".":
            return lambda *args, **kwargs: getattr(one, name)(*args, **kwargs)
        return lambda: getattr(one, name)

    def resolved(self, value: Any, function: Callable[[str], Any]) -> Any:
        """An argument with the objects themselves in place of their numbers, at every depth; `function` reads the text
        of one."""
        if type(value) is not values.Source:
            return _with_members(value, lambda one: self.resolved(one, function))
        if value.text.startswith("#"):
            return self._objects[int(value.text[1:])]
        return function(value.text)

    def report(self, value: Any) -> bytes | None:
        """The report of an object that stays here; None for a value that is sent."""
        kind = type(value)
        # Read past a metaclass of the program, which could define `__module__` as a property.
        own = type.__dict__["__module__"].__get__(kind) == "program" and not issubclass(kind, _SENT)
        if not own and kind not in _FUNCTIONS:
            return None
        # By identity: an object that comes back twice has one number, by which `Held.__eq__` knows it again.
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # it lives from now on, so that its id stays its own
        return HELD + values.encode([number, kind.__name__ if own else ""])


class HeldFunction:
    """A function that the program made."""

    def __init__(self, ask: Ask, number: int) -> None:
        self._ask = ask
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(f"#{self._number}", args, kwargs)


class Held:
    """An object that the program made."""

    _ask: Ask
    _number: int
    _whole = False
    """It has the methods, too, that builtin values have."""

    def __getattr__(self, name: str) -> Any:
        # Python looks for dunders on the way (copy, pickle, iteration): asking the program for each would let it answer
        # for the protocol.
        if name.startswith("__") or (name in values.BUILTIN_METHODS and not self._whole):
            raise AttributeError(f"the test's process has no {name!r} of this object")
        return self._ask(f"#{self._number}?{name}", (), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("@setattr", (self, name, value), {})

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Held) and other._number == self._number:
            return True
        # Both as plain values (`values.Instance`): their comparison runs here, on data, and not in the program's
        # `__eq__`.
        mine, others = (one._ask("@plain", (one,), {}) if isinstance(one, Held) else one for one in (self, other))
        return bool(mine == others)

    # Equal objects must have equal hashes, and equality looks at fields that may change: one hash for all of a class.
    def __hash__(self) -> int:
        return hash(type(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("@list", (self,), {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(f"#{self._number}", args, kwargs)

    def __enter__(self) -> Any:
        return self._ask(f"#{self._number}.__enter__", (), {})

    def __exit__(self, *error: object) -> bool:
        # The exception itself stays in the test: its text may hold expected values.
        return bool(self._ask(f"#{self._number}.__exit__", (None, None, None), {}))


def _unary(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._ask(f"@{name}", (self, *args), {})


def _binary(name: str) -> Callable[..., Any]:
    def operate(self: Held, other: object) -> Any:
        if isinstance(other, Held):
            return self._ask(f"@{name}", (self, other), {})
        # Python then raises TypeError, or asks the other side: `held < 3` does not reach the program with the test's 3.
        return NotImplemented

    return operate


for _name in ("len", "str", "repr", "bool", "getitem", "setitem", "delitem"):
    setattr(Held, f"__{_name}__", _unary(_name))
for _name in ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge"):
    setattr(Held, f"__{_name}__", _binary(_name))


class _Class(type):
    """A class of the program: calling it makes an object there."""

    _ask: Ask
    _whole: bool

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls._ask(cls.__name__, args, kwargs)
        if isinstance(made, Held):
            made.__dict__["_whole"] = cls._whole
        return made

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._ask(f"{cls.__name__}?{name}", (), {})


class Proxies:
    """Stand-ins in a test's process for the functions, classes and objects of its program."""

    def __init__(self, ask: Callable[[str, Any, Any, bool], Any]) -> None:
        self._call_program = ask
        self._paths: dict[Any, str] = {}
        self._classes: dict[str, type] = {}
        self.exceptions: dict[str, type[Exception]] = {}
        self._any_held = False

    def function(self, name: str, path: str) -> Callable[..., Any]:
        """A function that is called `name` in the test and has this path in the program."""

        def candidate(*args: Any, **kwargs: Any) -> Any:
            return self.ask(path, args, kwargs)

        candidate.__name__ = name
        self._paths[candidate] = path
        return candidate

    def named(self, name: str, kind: str) -> Any:
        """Return the stand-in for a name of the program in a test, by the kind that `names.kinds` gives it."""
        if kind == "function":
            return self.function(name, name)
        if kind == "exception":
            made = self.exceptions[name] = type(name, (Exception,), {})
            return made
        self._classes[name] = _Class(name, (Held,), {"_ask": staticmethod(self.ask), "_whole": kind == "class"})
        return self._classes[name]

    def changing(self, function: Any) -> Any:
        """The function of a call that `apart.with_changes` marked: one of the program's changes its arguments."""
        if type(function) is not types.FunctionType or function not in self._paths:
            return function
        path = self._paths[function]
        return lambda *args, **kwargs: self._call_program(path, args, kwargs, True)

    def ask(self, path: str, args: Any, kwargs: Any) -> Any:
        """Return the program's answer to a call."""
        return self._call_program(path, args, kwargs, False)

    def held(self, number: int, name: str) -> Any:
        """Return the stand-in for an object of that number and class, or for a function if there is no class."""
        self._any_held = True
        if not name:
            return HeldFunction(self.ask, number)
        made: Any = object.__new__(self._classes.get(name, Held))
        made.__dict__.update(_ask=self.ask, _number=number)
        return made

    def referenced(self, value: Any) -> Any:
        """An argument with numbers in place of objects, at every depth."""
        if not self._any_held:
            return value
        if isinstance(value, (Held, HeldFunction)):
            return values.Source(f"#{value._number}")
        return _with_members(value, self.referenced)


def _with_members(value: Any, replaced: Callable[[Any], Any]) -> Any:
    """A container of a builtin type with other members; any other value as it is."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return kind([replaced(one) for one in value])
    if kind is dict:
        return {replaced(key): replaced(one) for key, one in value.items()}
    return value
