"""Runs that belong to one experiment, and the differences between their configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

APART = ("run.name", "run.dir", "run.overwrite", "run.seed", "logging", "health", "checkpoint")
"""Settings in which runs may differ and still be seeds of one experiment."""
OWN = ("run.name", "run.dir", "run.overwrite")
"""Settings whose difference is not worth a row."""


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a configuration by their dotted keys."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        for number, item in enumerate(tree):
            yield from flat(item, f"{path}[{number}]")
    else:
        yield path, tree


def _under(key: str, settings: Sequence[str]) -> bool:
    # `run.seed` matches itself; `logging` matches `logging.rollouts` and `logging[0].x`, not `logging_level`.
    return any(key == setting or key.startswith((f"{setting}.", f"{setting}[")) for setting in settings)


def experiment_of(config: Mapping[str, Any]) -> str:
    """A text that is the same for runs which differ in no more than their seed."""
    kept = {key: value for key, value in flat(config) if not _under(key, APART)}
    return json.dumps(kept, sort_keys=True, default=str)


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys that are not the same in all configurations, each with its values as texts ('' where it is not set)."""
    leaves = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for of_one in leaves for key in of_one)
    rows = []
    for key in keys:
        values = [_text(of_one[key]) if key in of_one else "" for of_one in leaves]
        if len(set(values)) > 1 and not _under(key, OWN):
            rows.append({"key": key, "values": values})
    return rows


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)
