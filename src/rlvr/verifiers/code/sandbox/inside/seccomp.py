"""A seccomp filter: which system calls a program may make.

Refused is what reaches past the program: namespaces, mounts, other processes' memory and scheduling, the network,
kernel keys and modules, memory that no limit counts (memfd, shared anonymous mappings, System V and POSIX queues), and
what is one for all programs of the host: watches of its files, its asynchronous input and output. Locks of files, which
another program could see and wait for, larger socket buffers, and sessions of a program's own, for each of which the
scheduler would give it another share of the processor (autogroup), are granted in name only: the call succeeds and does
nothing. Of the calls newer than pidfd_send_signal only those that programs need exist; clone3, whose flags a filter
cannot see, does not, so that the C library falls back to clone.

Source: https://docs.kernel.org/userspace-api/seccomp_filter.html; numbers of Linux's unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from rlvr.verifiers.code.sandbox.inside.kernel import NAMESPACES, check, libc

# fmt: off
_REFUSED: dict[str, tuple[int, int | None]] = {  # name: (x86_64, aarch64)
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250,
    219),
    "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162),
    "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "memfd_create": (319, 279), "shmget": (29, 194), "shmat": (30,
    196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "msgget": (68, 186),
    "msgsnd": (69, 189), "mq_open": (240, 180), "mq_unlink": (241, 181), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237), "setpriority": (141, 140),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "personality": (135, 92), "settimeofday": (164, 170),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "io_setup": (206, 0),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "vhangup": (153, 58),
}
# fmt: on
_LAST_KNOWN = 424
_NEWER = (434, 436, 437, 439, 441, 449, 452, 454, 455, 456, 462)
"""pidfd_open, close_range, openat2, faccessat2, epoll_pwait2, futex_waitv, fchmodat2, futex_*, mseal."""
_LOOKED_INTO = {
    "x86_64": (302, 41, 56, 16, 9, 72, 73, 54, 55, 112),
    "aarch64": (261, 198, 220, 29, 222, 25, 32, 208, 209, 157),
}
"""prlimit64, socket, clone, ioctl, mmap, fcntl, flock, setsockopt, getsockopt, setsid."""
_SHARED_ANONYMOUS = 0x21
"""MAP_SHARED and MAP_ANONYMOUS."""
_LOCKS = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW and those of open file descriptions."""
_OF_OTHERS = (5, 36, 1024, 1025, 1026)
"""F_GETLK and F_OFD_GETLK, F_SETLEASE, F_GETLEASE, F_NOTIFY: what other programs do with a file."""
_SEND_BUFFER = 7
_PEER = 77
"""SO_SNDBUF; SO_PEERPIDFD, a handle of the process at the other end, which is the trainer."""
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_UNIX_SOCKET = 1
_TYPE_INTO_TERMINAL = 0x5412

_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_GREATER = 0x25
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_NUMBER = 0
_MACHINE = 4
"""Places in the data that a filter sees."""
_FEW = 4
"""System calls that are looked for one after the other."""


def install() -> None:
    """Filter this process and all that it starts. Needs no_new_privs."""
    check(libc.prctl(22, 2, _HEADER, 0, 0), "seccomp")


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _argument(index: int) -> int:
    return 16 + 8 * index


def _give(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _refuse(code: int) -> bytes:
    return _give(0x00050000 | code)


def _when(number: int, then: bytes) -> bytes:
    """`then`, which returns, for a system call by number."""
    return _instruction(_EQUAL, number, 0, len(then) // 8) + then


def _looking(index: int, test: int, value: int, if_true: bytes, if_false: bytes) -> bytes:
    """One of two returns, by the low half of an argument."""
    return _instruction(_LOAD, _argument(index)) + _instruction(test, value, 0, 1) + if_true + if_false


def _by_value(index: int, returns: dict[int, bytes]) -> bytes:
    """A return for some values of the low half of an argument; any other is allowed."""
    choices = b"".join(_when(value, then) for value, then in returns.items())
    return _instruction(_LOAD, _argument(index)) + choices + _give(_ALLOW)


def _among(returns: dict[int, bytes], other: bytes) -> bytes:
    """A return by the system call's number, `other` for those without one. Found by halves: whenever the kernel takes a
    filter it runs it for each number that there is, to learn which are always allowed."""
    numbers = sorted(returns)
    if len(numbers) <= _FEW:
        return b"".join(_when(number, returns[number]) for number in numbers) + other
    middle = numbers[len(numbers) // 2]
    below = _among({number: then for number, then in returns.items() if number < middle}, other)
    above = _among({number: then for number, then in returns.items() if number >= middle}, other)
    return _instruction(_AT_LEAST, middle, len(below) // 8, 0) + below + above


def _program() -> bytes:
    machine = platform.machine()
    if machine not in _AUDIT:
        return b""
    column = 0 if machine == "x86_64" else 1
    allow = _give(_ALLOW)
    no = _refuse(errno.EPERM)
    prlimit, socket, clone, ioctl, mmap, fcntl, flock, setsockopt, getsockopt, setsid = _LOOKED_INTO[machine]
    nothing = _refuse(0)
    shared = _instruction(_LOAD, _argument(3)) + _instruction(_AND, _SHARED_ANONYMOUS)
    locks = dict.fromkeys(_LOCKS, nothing) | dict.fromkeys(_OF_OTHERS, _refuse(errno.EINVAL))
    newer = _among(dict.fromkeys(_NEWER, allow), _refuse(errno.ENOSYS))
    known = {number: no for numbers in _REFUSED.values() if (number := numbers[column]) is not None} | {
        prlimit: _looking(0, _EQUAL, 0, allow, no),
        socket: _looking(0, _EQUAL, _UNIX_SOCKET, allow, _refuse(errno.EAFNOSUPPORT)),
        clone: _looking(0, _ANY_BIT, NAMESPACES, no, allow),
        ioctl: _looking(1, _EQUAL, _TYPE_INTO_TERMINAL, no, allow),
        mmap: shared + _when(_SHARED_ANONYMOUS, no) + allow,
        fcntl: _by_value(1, locks),
        flock: nothing,
        setsid: nothing,
        setsockopt: _by_value(2, {_SEND_BUFFER: nothing}),
        getsockopt: _by_value(2, {_PEER: _refuse(errno.ENOPROTOOPT)}),
    }
    return b"".join(
        [
            _instruction(_LOAD, _MACHINE),
            _instruction(_EQUAL, _AUDIT[machine], 1, 0),
            _give(_KILL),
            _instruction(_LOAD, _NUMBER),
            _instruction(_GREATER, _X32 - 1, 0, 1),
            _refuse(errno.ENOSYS),
            _instruction(_GREATER, _LAST_KNOWN, 0, len(newer) // 8),
            newer,
            _among(known, allow),
        ]
    )


PROGRAM = _program()
"""The filter; empty on a machine that it is not written for."""
_IN_MEMORY = ctypes.create_string_buffer(PROGRAM, len(PROGRAM))
_HEADER = struct.pack("@HP", len(PROGRAM) // 8, ctypes.addressof(_IN_MEMORY))
