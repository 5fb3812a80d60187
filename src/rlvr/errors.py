"""Errors that a user can fix: one clear message that names the thing, the place and the fix.

Invariant: everything the library refuses because of what it was given is a `RlvrError`; the commands print its
text without a traceback (`command`). Anything else that escapes is a defect of the library and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

# With the separator, so that a package `rlvr_ideas` beside this one is not taken for it.
_PACKAGE = str(Path(__file__).resolve().parent) + os.sep


class RlvrError(Exception):
    """Base of every refusal; `str(error)` is written for the user."""


class ConfigError(RlvrError):
    """A key, value or combination in the configuration that cannot be run."""


class DataError(RlvrError):
    """A row, file or data set that cannot be made into tasks."""


class CheckpointError(RlvrError):
    """A checkpoint that is torn, foreign, or does not fit the run."""


class TrainingError(RlvrError):
    """A run that cannot go on (for example too many non-finite steps in a row); what was done is saved."""


class LostRankError(TrainingError):
    """Another rank of the run failed, was stopped or is gone. No rank can go on: whoever catches other errors lets this
    one pass."""


class EvaluationError(TrainingError):
    """An evaluation that failed. A run goes on without it."""


class UserCodeError(TrainingError):
    """The user's verifier or reward function raised an exception that the run cannot go on after.

    The text is the `problem` in words, the `advice` of whoever knows what was saved, and the user's own `traceback`.
    """

    advice = ""
    """One sentence, or none: an evaluation has nothing to save."""

    def __init__(self, problem: str, traceback: str) -> None:
        super().__init__(problem, traceback)
        self.problem = problem
        self.traceback = traceback

    def __str__(self) -> str:
        sentences = [self.problem, self.advice, "What it raised"]
        return ". ".join(filter(None, sentences)) + f":\n{self.traceback}"


USER_CODE_ERRORS = (Exception, SystemExit)
"""Exceptions that are taken for faults of the user's code. SystemExit is among them: an answer that the code runs with
`exec` may call exit()."""


class WaitTimeoutError(RlvrError):
    """A named wait whose deadline passed."""


def command(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """A command's `main(arguments)` with what went wrong in one line and as its exit code.

    2: bad input. 1: a run that cannot go on, a wait that ended, the disk. 130: Ctrl-C, outside what handles it itself.
    """

    @functools.wraps(main)
    def guarded(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        # Everything else keeps its traceback: it is a defect of the library.
        except (RlvrError, OSError) as error:
            text = _in_words(error) if isinstance(error, OSError) else str(error)
            print(f"error: {text}", file=sys.stderr)
            tell_launcher(text)
            # 1 where the same command may work at another time; 2 where the input has to change.
            if isinstance(error, TrainingError | WaitTimeoutError | OSError):
                return 1
            return 2
        except KeyboardInterrupt:
            print("stopped at once", file=sys.stderr)
            # 128 + SIGINT, as a shell has it.
            return 130

    return guarded


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors that free space would end."""


def _in_words(error: OSError) -> str:
    """The file and the problem, without the number of the error."""
    text = error.strerror or str(error)
    if error.filename is not None:
        text = f"{error.filename}: {text}"
    if error.errno in FULL_DISK:
        text += ". The disk is full: free some space there and start again"
    return text


@contextlib.contextmanager
def prefixed(place: str) -> Iterator[None]:
    """Put the place in front of the text of a ConfigError or DataError, which stays of its class. One whose class has a
    constructor of its own, as a user's may have, passes as it is."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if not place or type(error).__init__ is not Exception.__init__:
            raise
        raise type(error)(f"{place}{error}") from error


@contextlib.contextmanager
def chosen_place(name: str, instead: str) -> Iterator[None]:
    """ConfigError where the place `name` cannot be written to; `instead` says what to choose.

    A full disk is no fault of the choice: its OSError passes, and `command` says what to do about it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        file = "" if error.filename is None or str(error.filename) in name else f" ({error.filename})"
        raise ConfigError(f"{name} cannot be used: {error.strerror or error}{file}. Choose {instead}") from error


UserClass = TypeVar("UserClass", bound=type)


def short_tracebacks(*methods: str) -> Callable[[UserClass], UserClass]:
    """Class decorator: RlvrErrors of these methods leave them without the library's frames and without causes.

    A script then ends with the user's line and the message, as a notebook cell does. The whole traceback goes to the
    debug level of logging. Inside a call of another such method an error is left as it is.
    """

    def shorten(cls: UserClass) -> UserClass:
        for name in methods:
            setattr(cls, name, _shortened(vars(cls)[name]))
        return cls

    return shorten


_within = threading.local()
"""`called` is true in a thread that is inside of a method with short tracebacks."""


def _shortened(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def short(*arguments: Any, **keywords: Any) -> Any:
        __tracebackhide__ = True  # for IPython and pytest
        # The inner call's caller may read the cause, as the run does of an evaluation that failed.
        if vars(_within).get("called"):
            return method(*arguments, **keywords)
        _within.called = True
        try:
            return method(*arguments, **keywords)
        except RlvrError as error:
            log.debug("the whole traceback", exc_info=error)
            raise error.with_traceback(None) from None
        finally:
            _within.called = False

    return short


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` from the first frame that is not the library's on; whole where all are the library's.

    The text alone of an error that the library wrote for users. Never raises, whatever the error's own methods do.
    """
    try:
        if isinstance(error, RlvrError):
            return str(error)
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            place = place.tb_next
        return "".join(traceback.format_exception(type(error), error, place or error.__traceback__)).rstrip()
    # `str(error)` is the user's code and may raise, too.
    except Exception as another:
        return f"{type(error).__name__} (it cannot be shown: {type(another).__name__})"


def tell_launcher(message: str) -> None:
    """Write the error file that torchrun shows at its end, in the layout of torch's own
    ErrorHandler.record_exception."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # Set by torchrun for each rank; without it nobody would read the file.
    if path:
        # The message in the traceback's place: it is what is shown.
        more = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": more}}, file)


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A suggestion for an unknown `name`: `"; did you mean 'x'?"`. When nothing is near, `otherwise`, or where that is
    None the list of what is known."""
    known = sorted(known)
    # 0.6 is difflib's own default: `clp` finds `clip`, and a name that resembles none gives the whole list.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    if otherwise is not None:
        return otherwise
    return f"; known: {', '.join(known)}" if known else ""
