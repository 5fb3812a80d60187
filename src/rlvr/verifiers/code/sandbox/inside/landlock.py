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

# Numbers of the three system calls, the same on all machines.
_CREATE = 444
_ADD_RULE = 445
_RESTRICT = 446
# LANDLOCK_ACCESS_FS_* of linux/landlock.h. `_FILE` are those that a rule on a file, not a folder, may have: any other
# is EINVAL.
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
    # LANDLOCK_CREATE_RULESET_VERSION; -1 where the kernel lacks Landlock or has it turned off.
    return max(0, call(_CREATE, None, ctypes.c_size_t(0), 1))


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow reading and executing below `readable`, everything below `writable`, and nothing else. Needs
    no_new_privs."""
    abi = version()
    # Rights that a ruleset handles are refused unless a rule allows them. One that an older kernel does not know must
    # not be named, or the call fails.
    rights = (1 << _RIGHTS.get(abi, 16)) - 1
    fields = [rights, _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0]
    # The struct grew by a field in versions 4 (network) and 6 (scopes); an older kernel takes a longer one only if the
    # rest is zero.
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
    # Not on this system, as /lib32 on most.
    except OSError:  # not on this system
        return
    if not os.path.isdir(path):
        allowed &= _FILE
    check(call(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, place), 0), f"landlock {path}")
    os.close(place)
