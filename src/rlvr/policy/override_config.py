"""Values of a model's config.json that the run replaces: `model.override_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.errors import ConfigError, nearest


def override_config(config: Any, overrides: Mapping[str, Any], name: str = "model.override_config") -> Any:
    """`config`, a transformers configuration, with the values of `overrides` in place of its own.

    A mapping (`rope_parameters`) is merged into the one that is there. Of a model of several parts (text and vision)
    the text part is changed. ConfigError names a key that the configuration lacks.
    """
    text = config.get_text_config()
    for key, value in overrides.items():
        setattr(text, key, _merged(_own(text, key, name), value, f"{name}.{key}"))
    return config


def _own(config: Any, key: str, name: str) -> Any:
    values = config.to_dict()
    if key in values:
        return values[key]
    # Where transformers before version 5 had it, and config.json files have it still.
    if key in (values.get("rope_parameters") or {}):
        raise ConfigError(
            f"{name}.{key}: transformers keeps it in rope_parameters: write rope_parameters: {{{key}: ...}}"
        )
    raise ConfigError(f"{name}: a model of type {config.model_type!r} has no {key!r}{nearest(key, list(values))}")


def _merged(own: Any, value: Any, name: str) -> Any:
    if not isinstance(own, Mapping):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a mapping: it cannot become {value!r}")
    # A key that is new is right here: `factor` comes with another rope_type.
    return {**own, **{key: _merged(own.get(key), inner, f"{name}.{key}") for key, inner in value.items()}}
