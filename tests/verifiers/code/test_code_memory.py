"""Memory beyond the limit is refused or seen, in whatever form a program takes it."""

from __future__ import annotations

import os

import pytest
from sandbox_tiers import one_sandbox

from rlvr.verifiers.code.runner import Ended, Job, Limits
from rlvr.verifiers.code.sandbox import languages

LIMITS = Limits(seconds=4.0, memory_mb=96, processes=16, file_mb=8)


@pytest.fixture(scope="module", params=["full", "bubblewrap", "landlock"])
def sandbox(request):
    with one_sandbox(request.param) as run:
        yield request.param, run


SHARED = """
import mmap, os, time
held = []
for n in range(6):
    if os.fork() == 0: break
for n in range(3):
    m = {made}
    for at in range(0, len(m), 4096): m[at] = 1
    m.madvise(mmap.MADV_DONTNEED)
    held.append(m)
print('HELD')
time.sleep(2)
"""
MAPPED = {
    "anonymous": "mmap.mmap(-1, 20 << 20)",
    "the zero device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 20 << 20)",
    "a file": "(open('/tmp/x' + str(os.getpid()) + str(n), 'wb').truncate(20 << 20), mmap.mmap(os.open('/tmp/x' + "
    "str(os.getpid()) + str(n), os.O_RDWR), 20 << 20))[1]",
}


@pytest.mark.parametrize("made", MAPPED)
def test_shared_memory_that_leaves_every_process_is_not_to_be_had(sandbox, made):
    tier, run = sandbox
    if tier == "bubblewrap" or (tier == "landlock" and made == "a file"):
        pytest.skip("this tier does not stop it, and says so")
    outcome = run(Job(SHARED.format(made=MAPPED[made]), limits=LIMITS))
    assert outcome.ended is not Ended.DONE
    assert b"HELD" not in outcome.stdout


SOCKETS = """
import os, socket, time
for n in range(6):
    if os.fork() == 0: break
kept = []
try:
    for n in range(10):
        name = f'\\0{os.getpid()}-{n}'
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind(name)
        kept.append(receiver)
        for _ in range(10):
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sender.setblocking(False)
            sender.sendto(bytes(200_000), name)
            sender.close()
except OSError: pass
time.sleep(2)
"""
WAITING = """
import socket, time
kept = []
for n in range(8):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f'\\0{n}')
    listener.listen(100)
    kept.append(listener)
    for _ in range(90):
        sender = socket.socket(socket.AF_UNIX)
        sender.setblocking(False)
        sender.connect(f'\\0{n}')
        sender.send(bytes(150_000))
        sender.close()
time.sleep(2)
"""


@pytest.mark.parametrize("source", [SOCKETS, WAITING], ids=["datagrams", "connections that nobody accepts"])
def test_what_sockets_hold_is_counted(sandbox, source):
    tier, run = sandbox
    if tier == "landlock":
        pytest.skip("this tier limits the memory of each process only, and says so")
    assert run(Job(source, limits=LIMITS)).ended is Ended.MEMORY


HONEST = """
import asyncio, fcntl, multiprocessing, socket, sqlite3
async def one(): return 1
assert asyncio.run(one()) == 1
def square(x): return x * x
with multiprocessing.Pool(2) as pool: assert pool.map(square, [1, 2, 3]) == [1, 4, 9]
base = sqlite3.connect('x.db')
base.execute('create table t (a)'); base.execute('insert into t values (1)'); base.commit()
assert base.execute('select * from t').fetchall() == [(1,)]
with open('lock', 'w') as file: fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)
assert multiprocessing.Array('i', 5)[:] == [0] * 5
names = multiprocessing.Manager().dict(); names[1] = 2
one, other = socket.socketpair()
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
one.sendall(b'x'); assert other.recv(1) == b'x'
print(dict(names))
"""


def test_honest_programs_keep_what_they_need(sandbox):
    if sandbox[0] == "landlock":
        pytest.skip("semaphores need /dev/shm, which is the host's in this tier")
    outcome = sandbox[1](Job(HONEST, limits=Limits(seconds=20.0)))
    assert (outcome.ended, outcome.stdout) == (Ended.DONE, b"{1: 2}\n"), outcome


# MAP_PRIVATE, MAP_ANONYMOUS and MAP_NORESERVE
PAGES = """
import mmap
m = mmap.mmap(-1, 30 << 30, 0x4022, mmap.PROT_READ)
for at in range(0, len(m), 2 << 20): m[at]
import time; time.sleep(2)
"""
SPAWNS = (
    "for (let n = 0; n < 3; n++) require('child_process').spawn('/usr/bin/python3', ['-c', {!r}], {{stdio: 'ignore'}})"
)
FILLS = "x = bytearray(b'x' * (60 << 20))\nimport time; time.sleep(2)"


@pytest.mark.skipif("javascript" not in languages(), reason="nothing here runs javascript")
@pytest.mark.parametrize("source", [FILLS, PAGES], ids=["memory", "page tables"])
def test_what_javascript_starts_has_the_limit_of_all(sandbox, source):
    tier, run = sandbox
    if tier == "landlock" or not os.path.exists("/usr/bin/python3"):
        pytest.skip("this tier limits the memory of each process only, or there is nothing to start")
    program = f"require('child_process').execSync('true')\n{SPAWNS.format(source)}"
    outcome = run(Job(program, "javascript", limits=Limits(seconds=10.0, memory_mb=160)))
    assert outcome.ended is Ended.MEMORY, outcome
