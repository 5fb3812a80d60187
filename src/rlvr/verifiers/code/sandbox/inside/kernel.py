"""System calls that Python's standard library has no function for."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x02000000
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWIPC, NEWUTS, NEWCGROUP."""
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
"""Flags of a mount."""
_REMOUNT = 32

_SIGCHLD = 17
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _DROP_BOUND, _SET_SUBREAPER, _NO_NEW_PRIVILEGES, _AMBIENT = 1, 4, 24, 36, 38, 47
_CAPABILITY_VERSION_3 = 0x20080522
_NUMBERS = {"x86_64": (56, 126), "aarch64": (220, 91)}
"""clone and capset."""

_PAGE = os.sysconf("SC_PAGESIZE")

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def check(result: int, what: str) -> int:
    """The result of a system call; OSError for a negative one."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def call(number: int, *arguments: object) -> int:
    """A system call by number."""
    return int(libc.syscall(ctypes.c_long(number), *arguments))


def clone(flags: int) -> int:
    """Fork into new namespaces; 0 in the child. Only for a process of one thread, whose child calls no C code that asks for its
    own thread id: the C library does not know of this fork."""
    number = _NUMBERS[platform.machine()][0]
    return check(call(number, ctypes.c_ulong(flags | _SIGCHLD), None, None, None, None), "clone")


def mount_memory(target: str, options: str, flags: int = NO_SUID | NO_DEVICES) -> None:
    """Mount an empty tmpfs."""
    check(libc.mount(b"tmpfs", target.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def make_read_only(target: str, flags: int = NO_SUID | NO_DEVICES) -> None:
    """Let nobody write to a mounted tmpfs any more; what goes through its named pipes is no writing."""
    flags |= _REMOUNT | READ_ONLY
    check(libc.mount(b"tmpfs", target.encode(), b"tmpfs", ctypes.c_ulong(flags), None), f"remount {target}")


def die_with_parent(signal: int) -> None:
    """Have the kernel send `signal` when the parent ends."""
    libc.prctl(_SET_DEATH_SIGNAL, signal, 0, 0, 0)


def be_subreaper() -> None:
    """Become the parent of the descendants whose parents end."""
    libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)


def set_dumpable(on: bool) -> None:
    """Whether the files of this process in /proc belong to its user, and others of that user may look into it."""
    libc.prctl(_SET_DUMPABLE, int(on), 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability, for this process and what it executes."""
    for capability in range(64):
        if libc.prctl(_DROP_BOUND, capability, 0, 0, 0) < 0:  # past the last one, or not ours to drop
            break
    libc.prctl(_AMBIENT, 4, 0, 0, 0)
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    check(call(_NUMBERS[platform.machine()][1], header, none), "capset")


def no_new_privileges() -> None:
    """Have no execution ever give more rights."""
    check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")


def mapped(proc: int) -> int:
    """Bytes that this process has mapped, by a descriptor of /proc."""
    return int(_read(proc, "self/statm").split()[0]) * _PAGE


def used(proc: int, process: str = "self") -> int:
    """Bytes that a process takes of the machine: in memory, paged out, and its page tables, which no limit of the kernel
    counts and which a program can make large by touching little; 0 when there is no such process."""
    try:
        lines = _read(proc, f"{process}/status").splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith((b"VmRSS:", b"VmSwap:", b"VmPTE:")))


def unix_sockets(proc: int) -> tuple[int, int]:
    """The sockets of our network namespace, those of streams and those of datagrams, open or not yet accepted."""
    try:
        types = [line.split()[4] for line in _read(proc, "self/net/unix").splitlines()[1:]]
    except OSError:
        return 0, 0
    return len(types) - types.count(b"0002"), types.count(b"0002")


def _read(proc: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY, dir_fd=proc)
    try:
        parts = []
        while part := os.read(fd, 2**16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)
