"""Python as a program expects to find it: its standard streams, threads, recursion limit, `exit` and `quit`."""

from __future__ import annotations

import _io
import _thread
import contextlib
import functools
import gc
import os
import site
import sys
import threading
from types import FrameType
from typing import Any, BinaryIO, TextIO

_SMALL_STACK = 2**20
"""Bytes below which a thread's stack is not reduced."""
_LARGEST_LIMIT = 2**31 - 1
"""The largest recursion limit that the interpreter takes: a C int."""
_STANDARD: list[TextIO] = []
"""The text layers of a program's standard streams, made by `prepare`."""
_BELOW: list[BinaryIO] = []
"""The buffers below these layers, kept here because a program may detach its own."""


def prepare() -> None:
    """Do once, in the zygote, what is the same for every program: each page that a fork writes to is copied for it.

    Give what an interpreter with `site` has (`exit`, `quit`), to threads the largest stack that there is memory for,
    and text layers for the standard streams.
    """
    site.setquit()
    # `threading` keeps its own reference to `_thread.start_new_thread`, made when it was imported.
    threading._start_new_thread = _start_with_what_there_is  # type: ignore[attr-defined]
    _STANDARD[:] = _text_layers()
    sys.stdin, sys.stdout, sys.stderr = _STANDARD
    # By `vars`, since assigning to `sys.__stdin__` is an error to a type checker. Programs restore `sys.stdout` from
    # `sys.__stdout__`.
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    _BELOW[:] = [layer.buffer for layer in _STANDARD]


def _start_with_what_there_is(*args: Any) -> int:
    """Start a thread. Its stack is mapped whole and counts against the memory, touched or not."""
    # The size is set for the whole interpreter, so it is put back in `finally`; two threads that start at once may see
    # each other's, which costs stack and nothing else.
    requested = size = threading.stack_size()
    try:
        while size > _SMALL_STACK:
            with contextlib.suppress(RuntimeError):
                return _thread.start_new_thread(*args)
            size //= 4
            threading.stack_size(size)
        return _thread.start_new_thread(*args)
    finally:
        threading.stack_size(requested)


def _text_layers() -> list[TextIO]:
    """Text layers for the descriptors 0 to 2, to be used when those are a program's. What a layer asks its descriptor
    once, such as whether it can seek, it asks of stand-ins of the same kinds: a file to read and pipes to write to."""
    # The zygote's own descriptors 0 to 2 are put aside while stand-ins take their numbers.
    own = [os.dup(fd) for fd in range(3)]
    null = os.open("/dev/null", os.O_RDONLY)
    (read, write) = os.pipe()
    for target, fd in enumerate((null, write, write)):
        os.dup2(fd, target)
    text = functools.partial(open, encoding="utf-8", closefd=False)
    layers: list[TextIO] = [
        text(0, errors="surrogateescape"),
        # Not line-buffered: a pipe is no terminal, and the interpreter buffers whole blocks there.
        text(1, "w", errors="surrogateescape"),
        # Line-buffered with backslashreplace, as Python's standard error is.
        text(2, "w", errors="backslashreplace", buffering=1),
    ]
    for target, fd in enumerate(own):
        os.dup2(fd, target)
    for fd in (*own, null, read, write):
        os.close(fd)
    return layers


def flush_files() -> None:
    """Write what files hold back, as the end of an interpreter does. Layers over others first, then the bytes below
    them."""
    files: list[Any] = [*_STANDARD, *_BELOW]
    with contextlib.suppress(MemoryError):  # the list of all objects does not fit any more
        # `type(one)` and not `isinstance`: an object of the program may define `__class__` and raise there.
        files += [one for one in gc.get_objects() if issubclass(type(one), _io._IOBase)]
    # Text layers hold what they have not encoded yet: flushed first, they hand it to the buffers, which come second.
    for buffers in (False, True):
        for file in [sys.stdout, sys.stderr, *files]:
            if isinstance(file, _io.BufferedWriter) is buffers:
                with contextlib.suppress(Exception):  # closed, or a program's own that fails
                    file.flush()


def hide_own_frames() -> None:
    """Have the recursion limit count the frames of the program only."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None:
        frame = frame.f_back
        depth = depth + 1
    depth += sys.version_info < (3, 12)  # until then a call of a C function, here `exec`, counts too
    set_limit = sys.setrecursionlimit
    get_limit = sys.getrecursionlimit
    set_limit(get_limit() + depth)
    # The program asks for n frames of its own, and gets n beside those below it.
    sys.setrecursionlimit = lambda limit: set_limit(min(limit + depth, _LARGEST_LIMIT))
    sys.getrecursionlimit = lambda: get_limit() - depth
