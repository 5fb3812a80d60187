"""Landlock: a process restricts its own access to files, TCP and signals, and that of all processes it starts.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Sequence

from rlvr.verifiers.code.sandbox.inside.kernel import call, check

# System call numbers, the same on x86-64 and aarch64: landlock_create_ruleset, landlock_add_rule,
# landlock_restrict_self.
_CREATE = 444
_ADD_RULE = 445
_RESTRICT = 446
# LANDLOCK_ACCESS_FS_* of linux/landlock.h.
_EXECUTE = 1
_WRITE = 2
_READ = 4
_READ_FOLDER = 8
_TRUNCATE = 1 << 14
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ | _TRUNCATE
"""The rights that a rule on a single file grants. A right that only folders have makes landlock_add_rule fail with
EINVAL; the ioctl right of devices is left out."""
_RIGHTS_COUNT = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Landlock ABI version -> the number of its file system rights, which are the lowest bits of a mask; 16 from version 5
on."""
_NETWORK_RIGHTS = 3
"""TCP bind and connect, from ABI version 4."""
_SCOPES = 3
"""Connections to abstract Unix sockets, and signals, from inside the restricted processes to others; ABI version 6."""


@functools.cache
def version() -> int:
    """The Landlock ABI version of the kernel; 0 if it has no Landlock."""
    # Flag 1 is LANDLOCK_CREATE_RULESET_VERSION. The call returns -1 if the kernel lacks Landlock or disables it.
    return max(0, call(_CREATE, None, ctypes.c_size_t(0), 1))


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow this process to read and execute files below `readable`, and every file access below `writable`.

    All other access that Landlock controls is denied: to files, to TCP (ABI version 4), and to abstract sockets and
    processes other than this one and its children (version 6). OSError if Landlock is missing or no_new_privs not set.
    """
    abi = version()
    # A right that the ruleset handles is denied unless a rule grants it. The call fails if the mask has a bit that the
    # kernel does not know.
    rights = (1 << _RIGHTS_COUNT.get(abi, 16)) - 1
    fields = [rights, _NETWORK_RIGHTS if abi >= 4 else 0, _SCOPES if abi >= 6 else 0]
    # struct landlock_ruleset_attr has one field of 8 bytes, two from version 4 (network) and three from version 6
    # (scopes) on. The size says how much of `fields` is passed.
    size = 8 * (1 if abi < 4 else 2 if abi < 6 else 3)
    ruleset = check(call(_CREATE, struct.pack("=3Q", *fields), ctypes.c_size_t(size), 0), "landlock")
    for paths, allowed in ((readable, _EXECUTE | _READ | _READ_FOLDER), (writable, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    check(call(_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    """Add a rule that grants the rights `allowed` on a path and everything below it; none if the path is missing."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a path that this system does not have, such as /lib32
        return
    if not os.path.isdir(path):
        allowed &= _FILE_RIGHTS
    # 1 is LANDLOCK_RULE_PATH_BENEATH, whose struct holds the rights and the descriptor.
    check(call(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, fd), 0), f"landlock {path}")
    os.close(fd)
