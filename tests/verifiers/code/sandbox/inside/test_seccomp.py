"""The filter of system calls, run in a model of the kernel's machine: what it returns, and in how many steps."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from rlvr.verifiers.code.sandbox.inside import seccomp

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers below are those of x86_64")

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, NOTHING = (0x00050000 | code for code in (errno.EPERM, errno.ENOSYS, 0))
X86_64, I386 = 0xC000003E, 0x40000003
NEWER = {434, 436, 437, 439, 441, 449, 452, 454, 455, 456, 462}
MOST_STEPS = 40


def returned(number: int, *arguments: int, machine: int = X86_64) -> tuple[int, int]:
    """What the filter returns for a system call, and the instructions that it took."""
    data = struct.pack("=IIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("=HBBI", seccomp.PROGRAM))
    accumulator, at = 0, 0
    for steps in range(1, len(program) + 1):
        code, yes, no, value = program[at]
        at += 1
        if code == 0x06:
            return value, steps
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        else:
            tests = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}
            at += yes if {**tests, 0x45: bool(accumulator & value)}[code] else no
    raise AssertionError("it does not end")


def test_each_system_call_has_the_return_of_its_table_and_few_steps_lead_to_it():
    refused = {numbers[0] for numbers in seccomp._REFUSED.values()}
    assert {
        165,
        101,
        298,
        321,
        319,
        253,
        206,
        153,
    } <= refused  # mount, ptrace, perf, bpf, memfd, inotify, io_setup, vhangup
    looked_into = set(seccomp._LOOKED_INTO["x86_64"])
    for number in [*range(600), 2**30 - 1, 2**30, 2**30 + 41, 2**31, 2**32 - 1]:
        value, steps = returned(number)
        assert steps <= MOST_STEPS, number
        if number > 424:
            assert value == (ALLOWED if number in NEWER else ENOSYS), number
        elif number not in looked_into:
            assert value == (EPERM if number in refused else ALLOWED), number
        assert returned(number, machine=I386)[0] == KILLED


@pytest.mark.parametrize(
    ("number", "arguments", "value"),
    [
        (302, [0], ALLOWED),  # prlimit64 of itself and of another
        (302, [1], EPERM),
        (41, [1], ALLOWED),  # socket: AF_UNIX, AF_INET, AF_NETLINK
        (41, [2], 0x00050000 | errno.EAFNOSUPPORT),
        (41, [16], 0x00050000 | errno.EAFNOSUPPORT),
        (56, [17], ALLOWED),  # clone: a fork, and each kind of namespace
        *((56, [1 << bit | 17], EPERM) for bit in (17, 25, 26, 27, 28, 29, 30)),
        (16, [0, 0x5401], ALLOWED),  # ioctl: TCGETS, TIOCSTI
        (16, [0, 0x5412], EPERM),
        (9, [0, 0, 0, 0x22], ALLOWED),  # mmap: private and shared anonymous, a shared file
        (9, [0, 0, 0, 0x21], EPERM),
        (9, [0, 0, 0, 0x01], ALLOWED),
        (72, [0, 3], ALLOWED),  # fcntl: F_GETFL, F_SETLK, F_OFD_SETLKW, F_GETLK, F_NOTIFY
        (72, [0, 6], NOTHING),
        (72, [0, 38], NOTHING),
        (72, [0, 5], 0x00050000 | errno.EINVAL),
        (72, [0, 1026], 0x00050000 | errno.EINVAL),
        (73, [0, 2], NOTHING),  # flock
        (54, [0, 1, 7], NOTHING),  # setsockopt: SO_SNDBUF, SO_RCVBUF
        (54, [0, 1, 8], ALLOWED),
        (55, [0, 1, 77], 0x00050000 | errno.ENOPROTOOPT),  # getsockopt: SO_PEERPIDFD, SO_TYPE
        (55, [0, 1, 3], ALLOWED),
    ],
)
def test_some_system_calls_are_looked_into(number, arguments, value):
    assert returned(number, *arguments)[0] == value
