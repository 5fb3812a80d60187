"""Landlock: what a process may touch of the file system, for itself and all that it starts.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Sequence

from rlvr.verifiers.code.sandbox.inside.kernel import call, check

_CREATE = 444
_ADD_RULE = 445
_RESTRICT = 446
_EXECUTE = 1
_WRITE = 2
_READ = 4
_READ_FOLDER = 8
_TRUNCATE = 1 << 14
_FILE = _EXECUTE | _WRITE | _READ | _TRUNCATE
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""The number of file system rights by version of the interface; from 5 on, 16."""
_NETWORK = 3
_SCOPES = 3
"""TCP bind and connect (from version 4); abstract sockets and signals (from version 6)."""


@functools.cache
def version() -> int:
    """The version of the interface, 0 where there is none."""
    return max(0, call(_CREATE, None, ctypes.c_size_t(0), 1))


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow reading and executing below `readable`, everything below `writable`, and nothing else. Needs
    no_new_privs."""
    abi = version()
    rights = (1 << _RIGHTS.get(abi, 16)) - 1
    fields = [rights, _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0]
    size = 8 * (1 if abi < 4 else 2 if abi < 6 else 3)
    rules = check(call(_CREATE, struct.pack("=3Q", *fields), ctypes.c_size_t(size), 0), "landlock")
    for paths, allowed in ((readable, _EXECUTE | _READ | _READ_FOLDER), (writable, rights)):
        for path in paths:
            _allow(rules, path, allowed & rights)
    check(call(_RESTRICT, rules, 0), "landlock")
    os.close(rules)


def _allow(rules: int, path: str, allowed: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this system
        return
    if not os.path.isdir(path):
        allowed &= _FILE
    check(call(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, place), 0), f"landlock {path}")
    os.close(place)
