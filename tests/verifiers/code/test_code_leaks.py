"""What a program could learn of the host or of programs beside it, or take from them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys

import pytest
from sandbox_tiers import usable_tier

from rlvr.verifiers.code.runner import Ended, Job, Limits
from rlvr.verifiers.code.sandbox.local import LocalRunner
from rlvr.verifiers.code.sandbox.tiers import packages

LIMITS = Limits(seconds=10.0, memory_mb=128)


def outcomes(tier, *sources):
    """What programs that run beside each other print."""
    known = usable_tier(tier)

    async def scene():
        runner = LocalRunner(known, workers=len(sources))
        try:
            return await asyncio.gather(*(runner.run(Job(source, limits=LIMITS)) for source in sources))
        finally:
            await runner.close()

    return asyncio.run(scene())


CALLS = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
x86 = platform.machine() == 'x86_64'
def call(number, *arguments):
    if number is not None and libc.syscall(number, *arguments) >= 0: print('ESCAPED', number)
call(253 if x86 else None)
call(294 if x86 else 26, 0)
call(254 if x86 else 27, 0, b'/usr/bin', 0x20)
call(206 if x86 else 0, 128, ctypes.byref(ctypes.c_ulong()))
fd, folder = os.open('/usr/bin/env', os.O_RDONLY), os.open('/usr/bin', os.O_RDONLY)
fcntl = 72 if x86 else 25
call(fcntl, folder, 1026, 0x20)
call(fcntl, fd, 1024, 0)
call(fcntl, fd, 5, ctypes.create_string_buffer(64))
call(fcntl, fd, 36, ctypes.create_string_buffer(64))
import socket
try: print('ESCAPED', socket.socket(fileno=3).getsockopt(socket.SOL_SOCKET, 77, 4))
except OSError: pass
print('done', flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("tier", ["full", "landlock"])
def test_what_is_one_for_all_of_the_host_is_refused(tier):
    (outcome,) = outcomes(tier, CALLS)
    assert outcome.stdout == b"done\n", outcome


LOCKS = """
import fcntl, os, time
fd = os.open('/usr/bin/env', os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
time.sleep(1.5)
print('locked')
"""


@pytest.mark.parametrize("tier", ["full", "landlock"])
def test_a_lock_is_seen_by_nobody(tier):
    """Two programs and the host hold the same lock at once, each as if it were alone."""
    usable_tier(tier)
    with open("/usr/bin/env", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert [outcome.stdout for outcome in outcomes(tier, LOCKS, LOCKS)] == [b"locked\n"] * 2


PACKAGES = """
import os, sys
for place in {places!r}:
    try:
        print(place, os.listdir(place))
    except OSError: pass
    sys.path.append(place)
for name in {names!r}:
    try:
        __import__(name)
    except ImportError: continue
    print('imported', name)
import colorsys, wave, xml.dom.minidom, json, unittest, sqlite3
print('done')
"""


@pytest.mark.parametrize("tier", ["full", "bubblewrap", "landlock"])
def test_no_package_of_any_interpreter_can_be_read(tier, tmp_path):
    places = packages(os.path.realpath(sys.base_prefix))
    names = {name.partition(".")[0] for place in places if os.path.isdir(place) for name in os.listdir(place)}
    names = sorted(
        name for name in names if name.isidentifier() and name[0] != "_" and name not in sys.stdlib_module_names
    )[:30]
    (outcome,) = outcomes(tier, PACKAGES.format(places=places, names=names))
    assert outcome.ended is Ended.DONE, outcome
    lines = outcome.stdout.decode().splitlines()
    assert lines.pop() == "done"
    assert [line for line in lines if not line.endswith("[]")] == []


def test_packages_are_found_below_a_prefix(tmp_path):
    made = tmp_path / "lib" / "python3.99" / "site-packages"
    made.mkdir(parents=True)
    assert str(made) in packages(str(tmp_path))
