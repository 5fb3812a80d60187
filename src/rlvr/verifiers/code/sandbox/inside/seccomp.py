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
# pidfd_send_signal. From 424 on the numbers are the same on all machines; what comes later is refused unless it is in
# `_NEWER`.
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
# __X32_SYSCALL_BIT: the same calls of x86_64 by other numbers, which would pass a filter that knows only the ordinary
# ones.
_X32 = 0x40000000
_UNIX_SOCKET = 1
# TIOCSTI: puts characters into the input of the terminal, where the trainer's shell would run them.
_TYPE_INTO_TERMINAL = 0x5412

# Classic BPF (linux/filter.h): BPF_LD|BPF_W|BPF_ABS, BPF_ALU|BPF_AND|BPF_K, and BPF_JMP with JEQ, JGT, JGE and JSET;
# BPF_RET|BPF_K.
_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_GREATER = 0x25
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# SECCOMP_RET_ALLOW and SECCOMP_RET_KILL_PROCESS of linux/seccomp.h.
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
# struct seccomp_data: `nr` at byte 0, `arch` at 4, the instruction pointer at 8, six arguments of 8 bytes from 16 on.
_NUMBER = 0
_MACHINE = 4
"""Places in the data that a filter sees."""
# Arbitrary: for four numbers a list is as short as a tree. A list of all 100 took 0.5 ms to install, the tree 0.18
# (docs/log.md, 2026-11-22).
_FEW = 4
"""System calls that are looked for one after the other."""


def install() -> None:
    """Filter this process and all that it starts. Needs no_new_privs."""
    # PR_SET_SECCOMP with SECCOMP_MODE_FILTER. It is for this thread and what it starts; the process has one thread
    # here.
    check(libc.prctl(22, 2, _HEADER, 0, 0), "seccomp")


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    # struct sock_filter: code, jump if true, jump if false, value; 8 bytes. A jump counts instructions behind this one.
    return struct.pack("=HBBI", code, yes, no, value)


def _argument(index: int) -> int:
    # The low half of an argument: both machines are little-endian, and no value that is looked for has bits in the high
    # half.
    return 16 + 8 * index


def _give(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _refuse(code: int) -> bytes:
    # SECCOMP_RET_ERRNO with the number of the error; 0 makes the call a success that does nothing.
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
    # A jump is one byte, at most 255 instructions: `_instruction` fails at import if a half gets longer.
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
    # ENOSYS, as of an older kernel: the C library then falls back to an older call, such as clone3 to clone.
    newer = _among(dict.fromkeys(_NEWER, allow), _refuse(errno.ENOSYS))
    actions = {number: no for numbers in _REFUSED.values() if (number := numbers[column]) is not None} | {
        # prlimit64(pid, ...): only for pid 0, itself; for another process it would change that one's limits.
        prlimit: _looking(0, _EQUAL, 0, allow, no),
        # socket(domain, ...): Unix sockets only, which multiprocessing and asyncio need. Others would reach a network
        # that a tier without namespaces shares with the host.
        socket: _looking(0, _EQUAL, _UNIX_SOCKET, allow, _refuse(errno.EAFNOSUPPORT)),
        # clone(flags, ...): a new user namespace would give back all capabilities within it, and with them mounts.
        clone: _looking(0, _ANY_BIT, NAMESPACES, no, allow),
        ioctl: _looking(1, _EQUAL, _TYPE_INTO_TERMINAL, no, allow),
        # mmap(addr, length, prot, flags): MAP_SHARED|MAP_ANONYMOUS stays allocated when it is in no process, so no
        # limit counts it.
        mmap: shared + _when(_SHARED_ANONYMOUS, no) + allow,
        # fcntl(fd, command, ...).
        fcntl: _by_value(1, locks),
        flock: nothing,
        setsid: nothing,
        # setsockopt(fd, level, option, ...): a larger send buffer would hold more than the watch reckons for a socket.
        setsockopt: _by_value(2, {_SEND_BUFFER: nothing}),
        getsockopt: _by_value(2, {_PEER: _refuse(errno.ENOPROTOOPT)}),
    }
    return b"".join(
        [
            # The architecture first: on x86_64 a program can make 32-bit calls, whose numbers mean other things.
            _instruction(_LOAD, _MACHINE),
            _instruction(_EQUAL, _AUDIT[machine], 1, 0),
            _give(_KILL),
            _instruction(_LOAD, _NUMBER),
            _instruction(_GREATER, _X32 - 1, 0, 1),
            _refuse(errno.ENOSYS),
            _instruction(_GREATER, _LAST_KNOWN, 0, len(newer) // 8),
            newer,
            _among(actions, allow),
        ]
    )


PROGRAM = _program()
"""The filter; empty on a machine that it is not written for."""
# Kept at module level: the kernel reads the program through the pointer in `_HEADER`, and a collected buffer would be
# read as a filter.
_IN_MEMORY = ctypes.create_string_buffer(PROGRAM, len(PROGRAM))
_HEADER = struct.pack("@HP", len(PROGRAM) // 8, ctypes.addressof(_IN_MEMORY))
