"""The names that the harnesses of the field give a program before its first line.

LiveCodeBench (`lcb_runner/evaluation/testing_util.py`, `import_string`) puts imports of these modules, with and without
their names, in front of programs that read and print and of functions that it calls, and sets the recursion limit; the
harness of APPS (`eval/testing_util.py`) gives fewer of the same names. LeetCode and the harness of LeetCodeDataset
(github.com/newfacade) define the nodes of linked lists and binary trees too; a call's lists become such nodes and back
in the sandbox (`inside/nodes.py`).
"""

from __future__ import annotations

import functools
import importlib
import inspect

# `builtins` after what hides it: `pow`, `open`.
_STARRED_WORDS = """
    string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json
    builtins typing
"""
STARRED = tuple(_STARRED_WORDS.split())
_NAMED = tuple(name for name in STARRED if name not in ("builtins", "typing"))

IMPORTS = "\n".join(
    [
        *(f"from {name} import *" for name in STARRED),
        *(f"import {name}" for name in _NAMED),
        # As LiveCodeBench's `import_string` has it.
        "sys.setrecursionlimit(50000)",
    ]
)
"""For programs that read and print."""

NODES = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
"""
"""For functions, after `IMPORTS`: the constructors that LeetCode shows above its stubs."""

_BESIDE = ("decimal", "fractions")
"""Modules that no harness imports, whose names tests use as if one did."""


@functools.cache
def meanings() -> dict[str, str]:
    """Names that `IMPORTS` binds, and those of the modules beside, each with the import that binds it to the same.

    A test that uses one means the library's: programs cannot give it another meaning, unless it is what the task asks
    for.
    """
    imports: dict[str, str] = {}
    for module in (*_BESIDE, *STARRED):
        names = importlib.import_module(module)
        # What `from module import *` binds: `__all__`, else the names without an underscore; modules that a module
        # imports are left out, since they are no meaning of its own.
        public = getattr(names, "__all__", None) or [
            name for name, value in vars(names).items() if not name.startswith("_") and not inspect.ismodule(value)
        ]
        imports |= {name: f"from {module} import {name}" for name in public}
    return imports | {name: f"import {name}" for name in (*_BESIDE, *_NAMED)}


HARNESSES = {"livecodebench": IMPORTS}
"""By the name that a task's `harness` gives."""
