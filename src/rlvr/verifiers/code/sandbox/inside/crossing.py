"""Exceptions that cross from a program's process into a test's: the one place where they are taken apart and made
again.

Invariants: what crosses is four texts; no method of the program's exception is trusted to return, or to return a text;
what is raised in a test is an error that tests handle (`Exception`) and none that steers Python's own loops. A function
that raises StopIteration would end the `map`, `zip` or `filter` that calls it, and with it the test, so it becomes a
RuntimeError, as Python does with one that leaves a generator (PEP 479).
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rlvr.verifiers.code import values

# Arbitrary, enough for messages with a few values. Longer arguments are left out, not cut, since half a value is
# another value.
_ARGUMENTS_SIZE = 4000
"""Bytes of an exception's arguments; longer ones are left out."""
_NAME_LENGTH = 200
_MESSAGE_LENGTH = 1000
_NAME = type.__dict__["__name__"].__get__
_ARGUMENTS = BaseException.__dict__["args"].__get__
_BASES = type.__dict__["__mro__"].__get__
"""Read past a metaclass, which may define both anew."""
_STEERS = (StopIteration, StopAsyncIteration)
"""Exceptions by which Python's iteration protocols end a loop."""


_ENDS_LOOKUP: dict[str, type[Exception]] = {
    "__getitem__": IndexError,
    "__getattr__": AttributeError,
    "__getattribute__": AttributeError,
}
"""Exceptions by which a method of a test's own class ends a loop over its object, or says `hasattr` that there is
nothing."""


class CandidateEndedError(Exception):
    """The end of a test because an exception or report of the candidate cannot be raised in it."""


def described(error: BaseException) -> list[str]:
    """The name of an exception's class, its message, the name of the nearest class of Python's own that it derives
    from, and its arguments as typed JSON; nothing in place of arguments that are not plain."""
    kind = type(error)
    try:
        # `str(error)` runs `__str__` of the program, which may return a subclass of str: `str.__str__` makes an exact
        # one of it.
        message = str.__str__(str(error))[:_MESSAGE_LENGTH]
    except BaseException:
        message = ""
    # The first of Python's own classes in the method resolution order: what an `except` of the test can catch.
    own = [_NAME(base) for base in _BASES(kind) if base in _BUILTIN]
    try:
        arguments = values.encode(list(_ARGUMENTS(error)), _ARGUMENTS_SIZE).decode()
    except BaseException:  # not plain, or text that is no UTF-8
        arguments = ""
    return [str.__str__(_NAME(kind))[:_NAME_LENGTH], message, own[0], arguments]


def raised_again(claim: Any, known: Mapping[str, type[Exception]] | None = None) -> Exception:
    """The exception that a test gets for a claim of `described`: of the class that the test means by that name
    (`known`), else of Python's own. CandidateEndedError for what no test handles."""
    # The program writes to the channel itself if it likes, so the shape is checked as of any claim.
    if type(claim) is not list or len(claim) != 4 or any(type(part) is not str for part in claim):
        raise CandidateEndedError("the candidate reported nonsense in place of an exception")
    name, message, own, arguments = claim
    kind = getattr(builtins, own, None)
    words = f"{name}: {message}"
    if known and name in known:
        return known[name](message)
    # SystemExit and KeyboardInterrupt are no `Exception`: no test handles them, so the test ends here and fails.
    if kind not in _BUILTIN or not issubclass(kind, Exception):
        raise CandidateEndedError(f"the candidate raised {words}")
    if issubclass(kind, _STEERS):
        return RuntimeError(words)
    try:
        error: Exception = kind(*_given(arguments, message))
    except TypeError:  # an error of decoding is made of five values, an ExceptionGroup holds others
        if issubclass(kind, UnicodeError):
            # Made past `__init__`, which wants five arguments; the class is what a test looks at.
            error = kind.__new__(kind, message)
        else:
            error = RuntimeError(words)
    return error


def in_method(error: Exception, frame: FrameType | None, file: str) -> Exception:
    """The exception where a test, the code of `file`, calls the candidate: a RuntimeError for one that would end a
    lookup of its own class."""
    while frame is not None:
        # Only frames of the test count: the proxies themselves have a `__getattr__`, too.
        own = frame.f_code.co_filename == file
        if own and isinstance(error, _ENDS_LOOKUP.get(frame.f_code.co_name, ())):
            return RuntimeError(f"{type(error).__name__}: {error}")
        frame = frame.f_back
    return error


def _given(arguments: str, message: str) -> list[Any]:
    """Return the arguments of the exception, or a list of its message if they were not sent: `KeyError('a')` has the
    message `'a'` in quotes."""
    try:
        decoded = values.decode(arguments.encode(), _ARGUMENTS_SIZE)
    except ValueError:
        return [message]
    return decoded if type(decoded) is list else [message]


_BUILTIN = frozenset(
    value for value in vars(builtins).values() if isinstance(value, type) and issubclass(value, BaseException)
)
