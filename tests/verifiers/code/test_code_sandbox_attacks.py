"""Attacks on the sandbox: each must end as a plain failure, or do nothing, with nothing changed on the host.

A program prints `ESCAPED` where its attack worked; `LOWER` says which lower tiers do not stop it (only of the attacks
that do no harm there).
"""

import asyncio
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from sandbox_tiers import one_sandbox, usable_tier

from rlvr.verifiers.code.runner import Ended, Job, Limits
from rlvr.verifiers.code.sandbox.local import LocalRunner

SECRET = f"sk-{secrets.token_hex(16)}"
LIMITS = Limits(seconds=1.5, memory_mb=128, processes=16, file_mb=4)
FAILED = {Ended.RAISED, Ended.TIME, Ended.MEMORY, Ended.OUTPUT, Ended.CRASHED}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A file, a listener and an environment variable that no program may get at."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "canary").write_text(SECRET)
    os.environ["RLVR_TEST_SECRET"] = SECRET
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield folder, listener
    del os.environ["RLVR_TEST_SECRET"]


@pytest.fixture(scope="module", params=["full", "bubblewrap", "landlock"])
def sandbox(request):
    """A runner of each tier that is tested by attacks."""
    with one_sandbox(request.param) as run:
        yield request.param, run


@dataclass
class Attack:
    source: str
    ended: set = frozenset(FAILED | {Ended.DONE})
    """How it may end; a program whose attack is refused may well end by itself."""
    lower: dict = None
    """By lower tier, where it is safe to try: whether the tier stops it."""


TRY = """
def attempt(f):
    try:
        f()
    except Exception as error:
        print(type(error).__name__)
    else:
        print('ESCAPED')
import os, sys, ctypes, socket, time
libc = ctypes.CDLL(None, use_errno=True)
def must(result):
    if result < 0: raise OSError(ctypes.get_errno())
"""
BOTH = {"bubblewrap": True, "landlock": True}
NOT_LANDLOCK = {"bubblewrap": True, "landlock": False}
NOT_BUBBLEWRAP = {"bubblewrap": False, "landlock": True}
ATTACKS = {
    # an early end
    "exit": Attack("import sys; sys.exit(3)", {Ended.RAISED}, BOTH),
    "_exit": Attack("import os; os._exit(7)", {Ended.RAISED}, BOTH),
    "kill itself": Attack("import os; print('[\"pass\"]', flush=True); os.kill(os.getpid(), 9)", {Ended.CRASHED}, BOTH),
    "kill its parent": Attack(
        "import os, time\nfor _ in range(3):\n    os.kill(os.getppid(), 9)\n    time.sleep(.02)\nos._exit(1)"
    ),
    "kill everybody": Attack("import os; os.kill(-1, 9); os._exit(1)"),
    "stop its parent": Attack("import os; os.kill(os.getppid(), 19); os._exit(1)", {Ended.RAISED}),
    "limits of its parent": Attack(
        TRY + "import resource; attempt(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)))"
    ),
    "stop itself": Attack("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", {Ended.TIME}, BOTH),
    "ignored signals": Attack(
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except Exception: "
        "pass\nwhile 1: pass",
        {Ended.TIME},
        BOTH,
    ),
    "closed descriptors": Attack("import os; os.closerange(0, 1000); os._exit(4)", {Ended.RAISED}, BOTH),
    "closed descriptors, then work": Attack("import os; os.closerange(0, 1000)\nwhile 1: pass", {Ended.TIME}, BOTH),
    "claims on the channel": Attack(
        "import os; os.write(3, bytes(4)); os.write(3, b'\\xff' * 9); os._exit(5)", {Ended.RAISED}, BOTH
    ),
    "endless claims": Attack("import os\nwhile 1: os.write(3, b'\\0' * 60000)", {Ended.TIME}, BOTH),
    # crashes
    "null pointer": Attack("import ctypes; ctypes.string_at(0)", {Ended.CRASHED}, BOTH),
    "deep recursion": Attack("def f(): f()\nf()", {Ended.RAISED}, BOTH),
    "C stack": Attack(
        "import sys; sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
        FAILED,
        BOTH,
    ),
    # bombs
    "fork bomb": Attack(
        "import os\nwhile 1:\n    try: os.fork()\n    except OSError: pass", {Ended.TIME, Ended.MEMORY}
    ),
    "thread bomb": Attack(
        "import threading, time\nwhile 1: threading.Thread(target=time.sleep, args=(9,)).start()",
        {Ended.RAISED, Ended.TIME},
    ),
    "memory at once": Attack("x = bytearray(10**10)", {Ended.MEMORY}, BOTH),
    "memory slowly": Attack("x = []\nwhile 1: x.append(bytearray(10**5))", {Ended.MEMORY}, BOTH),
    "memory of many": Attack(
        "import os\nfor _ in range(4): os.fork()\nx = bytearray(b'x' * (60 << 20))\nimport time; time.sleep(9)",
        {Ended.MEMORY, Ended.TIME},
    ),
    "memory that nobody counts": Attack(
        TRY + "attempt(lambda: os.memfd_create('x'))\nattempt(lambda: must(libc.shmget(0, 1 << 20, 0o1600)))",
        lower=NOT_BUBBLEWRAP,
    ),
    "output": Attack("while 1: print('x' * 10**5)", {Ended.OUTPUT}, BOTH),
    "errors": Attack("import sys\nwhile 1: sys.stderr.write('x' * 10**5)", {Ended.OUTPUT}, BOTH),
    "output of both": Attack(
        "import sys\nwhile 1: print('x' * 999); sys.stderr.write('x' * 999)", {Ended.OUTPUT}, BOTH
    ),
    "disk": Attack(
        TRY
        + """
places = {'.', '/tmp', '/dev/shm', '/var/tmp', '/run', '/dev/mqueue', '/proc', '/', '/usr', '/code', '/dev', '/root', '/home'}
total = 0
for place in places:
    for number in range(99):
        try:
            with open(f'{place}/fill{number}', 'xb') as file:
                for _ in range(64): total += file.write(bytes(1 << 20)); file.flush()
        except OSError: break
print(total, 'ESCAPED' if total > 5 << 20 else '')
"""
    ),
    "files without end": Attack("n = 0\nwhile 1: n += 1; open(f'/tmp/{n}', 'w')", {Ended.RAISED}),
    "daemon": Attack(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(100)\n    "
        "os._exit(0)\nprint('left')",
        {Ended.DONE},
        BOTH,
    ),
    # the kernel
    "mount": Attack(
        TRY + "attempt(lambda: must(libc.mount(b't', b'/tmp', b'tmpfs', 0, b'')))\nattempt(lambda: "
        "must(libc.umount2(b'/proc', 2)))",
        lower=BOTH,
    ),
    "namespaces": Attack(
        TRY
        + "attempt(lambda: must(libc.unshare(0x10000000)))\nattempt(lambda: must(libc.syscall(56, 0x10000011, 0, 0, "
        "0, 0) or 0))"
    ),
    "ptrace": Attack(
        TRY
        + "attempt(lambda: must(libc.ptrace(16, os.getppid(), 0, 0)))\nattempt(lambda: must(libc.ptrace(16, 1, 0, 0)))"
    ),
    "memory of others": Attack(TRY + "attempt(lambda: must(libc.process_vm_readv(1, 0, 0, 0, 0, 0)))"),
    "root": Attack(
        TRY
        + "attempt(lambda: os.setuid(0))\nattempt(lambda: os.chroot('/tmp'))\nattempt(lambda: os.chown('/tmp', 1, 1))"
    ),
    "x32 and io_uring": Attack(
        TRY + "attempt(lambda: must(libc.syscall(0x40000000 + 39)))\nattempt(lambda: must(libc.syscall(425, 1, "
        "bytes(200))))"
    ),
    "setuid programs": Attack(
        TRY + "attempt(lambda: [os.execv(p, [p, '-c', 'true']) for p in ('/usr/bin/su', '/usr/bin/mount') if "
        "os.path.exists(p)] or 1/0)"
    ),
    # the network
    "network": Attack(TRY + "attempt(lambda: socket.create_connection(('1.1.1.1', 53), 1))", lower=BOTH),
    "loopback": Attack(TRY + "attempt(lambda: socket.create_connection(('127.0.0.1', PORT), 1))", lower=BOTH),
    "sockets": Attack(
        TRY + "attempt(lambda: socket.socket(socket.AF_INET))\nattempt(lambda: socket.socket(socket.AF_NETLINK, "
        "socket.SOCK_RAW))",
        lower=NOT_BUBBLEWRAP,
    ),
    "a socket of another": Attack(
        TRY + "s = socket.socket(socket.AF_UNIX)\nattempt(lambda: s.connect('CANARY.sock'))", lower=BOTH
    ),
    # the host's files
    "read the host": Attack(
        TRY + "for p in ('CANARY', '/etc/shadow', '/etc/passwd', '/proc/1/environ', '/proc/self/environ', "
        "'HOME/.ssh/id_rsa', '/proc/kcore'):\n"
        "    attempt(lambda: open(p, 'rb').read(1))\nfor p in ('/home', 'FOLDER', '/var', '/sys'): attempt(lambda: "
        "os.listdir(p)[0])",
    ),
    "read the canary": Attack(TRY + "attempt(lambda: open('CANARY').read())", lower=BOTH),
    "write the host": Attack(
        TRY + "for p in ('CANARY', '/usr/x', '/x', '/code/x', '/dev/x', '/etc/x', sys.prefix + '/x'): attempt(lambda: "
        "open(p, 'w'))\n"
        "attempt(lambda: os.unlink('CANARY'))\nattempt(lambda: os.rename('/code', '/tmp/c'))",
        lower=BOTH,
    ),
    "symbolic links": Attack(
        TRY + "os.symlink('CANARY', 'a'); os.symlink('/etc/shadow', 'b'); os.symlink('/', 'c')\n"
        "for p in ('a', 'b', 'cCANARY'): attempt(lambda: open(p).read())\nattempt(lambda: open('a', 'w'))",
        lower=BOTH,
    ),
    "the environment": Attack(
        TRY + "print('ESCAPED' if any('sk-' in v for v in os.environ.values()) else '')", lower=BOTH
    ),
    "processes of others": Attack(TRY + "attempt(lambda: [p for p in os.listdir('/proc') if p.isdigit()][0])"),
    "descriptors": Attack(
        TRY
        + "import stat\nfor n in range(4, 2000):\n    try: os.fstat(n); print('ESCAPED', n)\n    except OSError: pass",
        lower=BOTH,
    ),
    "the zygote's memory": Attack(
        TRY
        + "import gc\nprint('ESCAPED' if any(type(o) is str and 'sk-' + 'TASK' in o for o in gc.get_objects()) else "
        "'')",
        lower=BOTH,
    ),
}


def prepared(source: str, folder: Path, listener: socket.socket) -> str:
    named = {"HOME": Path.home(), "CANARY": folder / "canary", "FOLDER": folder, "PORT": listener.getsockname()[1]}
    for name, value in named.items():
        source = source.replace(name, str(value))
    return source


@pytest.mark.gate
@pytest.mark.parametrize("name", ATTACKS)
def test_attack(sandbox, host, name):
    tier, run = sandbox
    attack, (folder, listener) = ATTACKS[name], host
    if tier != "full" and (attack.lower is None or tier not in attack.lower):
        pytest.skip("could do harm in this tier, or is judged for the full one only")
    start = time.monotonic()
    outcome = run(Job(prepared(attack.source, folder, listener), limits=LIMITS))
    assert time.monotonic() - start < 30
    assert outcome.ended in attack.ended, outcome
    stopped = b"ESCAPED" not in outcome.stdout
    assert stopped is (True if tier == "full" else attack.lower[tier]), outcome
    assert SECRET.encode() not in outcome.stdout + outcome.stderr
    # the host is as it was, and the next program neither notices nor fails
    assert (folder / "canary").read_text() == SECRET
    assert sorted(path.name for path in folder.iterdir()) == ["canary"]
    with pytest.raises(BlockingIOError):
        listener.accept()
    after = run(
        Job("import os; print(sorted(os.listdir('.')), len(os.listdir('/dev/shm')) if os.getcwd() == '/tmp' else 0)")
    )
    assert after.stdout == b"[] 0\n", after


def test_nothing_is_left_for_the_next_run_or_seen_of_one_beside(host):
    """Files, shared memory, abstract sockets and processes of a program that still runs are invisible to another."""
    full = usable_tier("full")
    leave = """
import os, socket, time
open('/tmp/left', 'w').write('x')
s = socket.socket(socket.AF_UNIX); s.bind('\\0left'); s.listen()
if os.fork() == 0: time.sleep(5)
print('left', flush=True); time.sleep(1)
"""
    look = """
import os, socket
print(os.listdir('/tmp'), os.listdir('/dev/shm'), os.getpid())
try: socket.socket(socket.AF_UNIX).connect('\\0left'); print('ESCAPED')
except OSError: print('refused')
"""

    async def scene():
        runner = LocalRunner(full, workers=2)
        try:
            first = asyncio.ensure_future(runner.run(Job(leave, limits=Limits(seconds=5))))
            await asyncio.sleep(0.5)
            beside = await runner.run(Job(look))
            return await first, beside, await runner.run(Job(look))
        finally:
            await runner.close()

    first, *others = asyncio.run(scene())
    assert first.stdout == b"left\n"
    assert [other.stdout for other in others] == [b"[] [] 2\nrefused\n"] * 2
