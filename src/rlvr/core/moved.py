"""Old names of modules and of what they contain, which are found for one version with a notice."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "rlvr.needs": "rlvr.core.needs",
    "rlvr.schedules": "rlvr.core.schedules",
    "rlvr.config_loading": "rlvr.config.config_loading",
    "rlvr.losses.clipping": "rlvr.losses.clip",
    "rlvr.verifiers.extraction": "rlvr.verifiers.answers",
    "rlvr.losses.ratio": "rlvr.losses.tokens",
}


class MovedModules(MetaPathFinder, Loader):
    """Finds a module under the name that it had in the version before.

    Raises ImportError, as any import, where the new module cannot be imported.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a moved module, else None."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Nothing, which gives an empty module; `exec_module` replaces it."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module at its new place under the old name. Warns with a FutureWarning."""
        new = MOVED[module.__name__]
        text = f"{module.__name__} is now {new}: the old name goes with the next version"
        warnings.warn(text, FutureWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module in which `names` (old name -> new name) were renamed. Warns with a FutureWarning."""

    def find(name: str) -> Any:
        new = names.get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module}.{name} is now {module}.{new}: the old name goes with the next version"
        warnings.warn(text, FutureWarning, stacklevel=2)
        return vars(sys.modules[module])[new]

    return find
