"""Optional members of objects of other libraries."""

from __future__ import annotations

from typing import Any


def foreign(holder: object, name: str, default: Any = None) -> Any:
    """A member that a configuration or module of transformers, peft, DeepSpeed or torch may lack, else `default`.

    These libraries declare their optional members nowhere, so that asking is the only way. Members of our own classes
    have their defaults there (rlvr.components) and are not asked for.
    """
    return getattr(holder, name, default)
