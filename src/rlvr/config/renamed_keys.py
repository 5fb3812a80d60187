"""Keys of a configuration that have another name now. The old ones are read for one version, with a notice."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

RENAMED = {
    "rollout.refill": "dynamic_sampling",
    "rollout.engine.silence": "stall_timeout",
    "distributed.silence": "heartbeat_timeout",
}
"""Path of a key that was renamed -> its name now, in the same section."""


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration with renamed keys under their names now, those of its stages too.

    Warns with a FutureWarning where there are any. Raises ValueError where a key is given under both names.
    """
    changed = dict(tree)
    for path, now in RENAMED.items():
        # `rollout.engine.silence` is the key `silence` of the mapping `rollout.engine`.
        *sections, old = path.split(".")
        changed = _renamed(changed, sections, old, now, path)
    stages = changed.get("stages")
    # Anything else is refused by the field's own type.
    if isinstance(stages, list):
        changed["stages"] = [with_new_names(stage) if isinstance(stage, Mapping) else stage for stage in stages]
    return changed


def _renamed(tree: dict[str, Any], sections: list[str], old: str, now: str, path: str) -> dict[str, Any]:
    if sections:
        name, *below = sections
        part = tree.get(name)
        if not isinstance(part, Mapping):
            return tree
        return {**tree, name: _renamed(dict(part), below, old, now, path)}
    if old not in tree:
        return tree
    new_path = path.removesuffix(old) + now
    if now in tree:
        raise ValueError(f"{path} is now {new_path}, and both are given: leave the old one out")
    # Python shows a FutureWarning to users; a DeprecationWarning only to who runs tests.
    warnings.warn(f"{path} is now {new_path}: the old name goes with the next version", FutureWarning, stacklevel=2)
    # In the old place, so that an error lists the keys in the order in which they were written.
    return {(now if key == old else key): value for key, value in tree.items()}
