"""What an error of pip says of the package index: only an index that is not there is a reason to skip a test."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata

UNREACHABLE = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Connection refused|ConnectTimeout|"
    r"NewConnectionError|Network is unreachable|Max retries exceeded"
)
NO_VERSION = re.compile(r"Could not find a version that satisfies the requirement ([\w.-]+).*\(from versions: none\)")


def is_installed(package: str) -> bool:
    """Return True if the environment of the tests has the package, so that its name is right."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def reason_to_skip(errors: str, installed: Callable[[str], bool] = is_installed) -> str | None:
    """The reason why pip's errors say nothing about our requirements; None where they do.

    A version that the index lacks is a wrong pin where the index has other versions of the package. A package without
    any version is one that this index does not carry, unless it is `installed` from somewhere.
    """
    if "ResolutionImpossible" in errors:
        return None
    absent = NO_VERSION.search(errors)
    if absent is not None and UNREACHABLE.search(errors) is None:
        return None if installed(absent[1]) else f"the package index that pip uses here has no {absent[1]}"
    if UNREACHABLE.search(errors):
        return "the package index that pip uses here does not answer"
    return None
