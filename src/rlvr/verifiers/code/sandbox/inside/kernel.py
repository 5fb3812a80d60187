"""System calls that Python's standard library has no function for."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import struct

NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x02000000
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWIPC, NEWUTS, NEWCGROUP."""
READ_ONLY = 1
NO_SUID = 2
NO_DEVICES = 4
NO_EXEC = 8
"""Flags of a mount."""
_REMOUNT = 32

_SIGCHLD = 17
_SET_DEATH_SIGNAL = 1
_SET_DUMPABLE = 4
_DROP_BOUND = 24
_SET_SUBREAPER = 36
_NO_NEW_PRIVILEGES = 38
_AMBIENT = 47
_NO_CAPABILITIES = struct.pack("=Ii", 0x20080522, 0), bytes(24)
"""Arguments of capset: the version of its interface (3) and this process; three empty sets, in two halves each."""
_CLONE, _CAPSET = {"x86_64": (56, 126), "aarch64": (220, 91)}.get(platform.machine(), (-1, -1))
"""Numbers of system calls; -1 is none, and fails."""

_PAGE = os.sysconf("SC_PAGESIZE")

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
_signal = importlib.import_module("_signal")
handle = _signal.signal
DEFAULT = _signal.SIG_DFL
"""`signal.signal` without its conversions to and from enumerations, which touch many pages in each fork; SIG_DFL as it
takes it."""
_mount = libc.mount
_prctl = libc.prctl  # looked up once and not in each fork


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
    """Fork into new namespaces; 0 in the child. Only for a process of one thread, whose child calls no C code that asks
    for its own thread id: the C library does not know of this fork."""
    return check(call(_CLONE, ctypes.c_ulong(flags | _SIGCHLD), None, None, None, None), "clone")


def mount_memory(target: str, options: str, flags: int = NO_SUID | NO_DEVICES) -> None:
    """Mount an empty tmpfs."""
    check(_mount(b"tmpfs", target.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def make_read_only(target: str, flags: int = NO_SUID | NO_DEVICES) -> None:
    """Let nobody write to a mounted tmpfs any more; what goes through its named pipes is no writing."""
    flags |= _REMOUNT | READ_ONLY
    check(_mount(b"tmpfs", target.encode(), b"tmpfs", ctypes.c_ulong(flags), None), f"remount {target}")


def signal_on_parent_death(signal: int) -> None:
    """Have the kernel send `signal` when the parent ends."""
    _prctl(_SET_DEATH_SIGNAL, signal, 0, 0, 0)


def be_subreaper() -> None:
    """Become the parent of the descendants whose parents end."""
    _prctl(_SET_SUBREAPER, 1, 0, 0, 0)


def set_dumpable(on: bool) -> None:
    """Set whether the files of this process in /proc belong to its user, and others of that user may look into it."""
    _prctl(_SET_DUMPABLE, int(on), 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability, for this process and what it executes."""
    # Capabilities are bits of a 64-bit set (41 are in use in Linux 6).
    for capability in range(64):
        if _prctl(_DROP_BOUND, capability, 0, 0, 0) < 0:  # past the last one, or not ours to drop
            break
    # PR_CAP_AMBIENT_CLEAR_ALL: ambient capabilities would survive an execve.
    _prctl(_AMBIENT, 4, 0, 0, 0)
    check(call(_CAPSET, *_NO_CAPABILITIES), "capset")


def no_new_privileges() -> None:
    """Have no execution ever give more rights."""
    check(_prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")


def mapped(proc: int) -> int:
    """Bytes that this process has mapped, by a descriptor of /proc."""
    fd = os.open("self/statm", os.O_RDONLY, dir_fd=proc)
    # The first field of statm is the total size in pages (proc(5)).
    pages = os.read(fd, 256).split()[0]
    os.close(fd)
    return int(pages) * _PAGE


def used(proc: int, process: str = "self") -> int:
    """Bytes that a process takes of the machine: in memory, paged out, and its page tables, which no limit of the
    kernel counts and which a program can make large by touching little; 0 when there is no such process."""
    try:
        lines = _read(proc, f"{process}/status").splitlines()
    except OSError:
        return 0
    # Lines such as `VmRSS:     1234 kB`, in KiB.
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith((b"VmRSS:", b"VmSwap:", b"VmPTE:")))


def unix_sockets(proc: int) -> tuple[int, int]:
    """The sockets of our network namespace, those of streams and those of datagrams, open or not yet accepted."""
    try:
        # The fifth column is the type, in hexadecimal: 0001 for streams, 0002 for datagrams, 0005 for sequences of
        # packets, which are counted with the streams.
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
