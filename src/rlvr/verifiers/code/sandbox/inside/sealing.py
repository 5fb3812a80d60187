"""A seal on a process that reads what a program gave: no code runs there that was not there before.

A checker that evaluates an output (`eval`, `exec`, an import of a file that it wrote, a pickle) runs it as itself,
where it could report any verdict. So from the moment when such input can arrive, only the code objects of the checker,
of the standard library and of the task's packages are executed. An audit hook sees every execution, by whatever name it
is asked for, and cannot be removed.

Invariant: imports nothing but the standard library, and stands by itself: a remote sandbox gets it as a text.
"""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

LIBRARIES = [os.path.dirname(os.__file__) + os.sep]
"""Folders whose code may run at any time: the standard library's, and those of the packages that the task's programs
have."""
_FROZEN = "<frozen "
# `namedtuple` evaluates the text of `__new__` and `dataclass` that of `__init__`: without the exception a sealed
# checker could define neither.
_GENERATING = tuple(LIBRARIES[0] + name for name in ("collections/__init__.py", "dataclasses.py"))
"""Modules of the standard library that write code for the classes that they make, of names that they have checked."""


def seal(own: str) -> None:
    """Refuse code that is not there yet: all but that of `LIBRARIES` and that of the file name `own`.
    PermissionError."""

    trusted = (own, _FROZEN, *LIBRARIES)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        # `exec` is raised for exec, eval and imports; `function.__new__` for `types.FunctionType(code, ...)`;
        # `object.__setattr__` for `f.__code__ = ...` (the audit events table of Python's documentation).
        if event in ("exec", "function.__new__", "object.__setattr__"):
            if event == "object.__setattr__":
                code = arguments[-1]
            else:
                code = arguments[0]
            # Of `object.__setattr__` other events than that of `__code__` come here, too, such as `__defaults__`, whose
            # value is no code.
            trusted_code = not isinstance(code, CodeType) or code.co_filename.startswith(trusted)
            refused = not trusted_code and sys._getframe(1).f_code.co_filename not in _GENERATING
        elif event in ("marshal.loads", "marshal.load"):  # how Python itself reads compiled modules
            # Frame 1 is the caller of `marshal.loads`: only the frozen importlib may read compiled modules.
            refused = not sys._getframe(1).f_code.co_filename.startswith(_FROZEN)
        else:
            # A pickle calls what `find_class` returns; `os.exec` would replace this process by one that no hook
            # watches.
            refused = event in ("pickle.find_class", "os.exec")
        if refused:
            raise PermissionError(f"what came with the input is not run here ({event}): read it with a parser")

    sys.addaudithook(hook)
