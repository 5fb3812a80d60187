"""Public names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def found_on_first_use(module: str, homes: Mapping[str, str]) -> tuple[dict[str, str], Callable[[str], Any]]:
    """The public names of a package, each with the module that has it, and the package's `__getattr__`, which imports
    a name when it is first used. `homes`: module -> its names, with spaces between them."""
    home = {name: place for place, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return home, find
