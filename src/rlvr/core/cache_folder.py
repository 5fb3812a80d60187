"""The folder of the user in which this library keeps what it would compute again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Folder in which this library keeps files between runs: RLVR_CACHE, or `rlvr` in XDG_CACHE_HOME, by default
    ~/.cache.

    FileNotFoundError for a user without a home directory, as containers that run under any user id have.
    """
    try:
        if override := os.environ.get("RLVR_CACHE"):
            return Path(override).expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG base directory specification has relative paths ignored.
        return (base if base.is_absolute() else Path.home() / ".cache") / "rlvr"
    except RuntimeError as error:  # pathlib's, where neither HOME nor the user database has a home
        raise FileNotFoundError(str(error)) from error
