"""The self-test of a tier: a program that really tries to escape, and what the trainer sees of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from pathlib import Path

from rlvr.verifiers.code.runner import Ended, Job, Limits
from rlvr.verifiers.code.sandbox.local import LocalRunner
from rlvr.verifiers.code.sandbox.tiers import Tier

# Small, so that an escape past a limit costs the host little: 16 MB of files, 320 MB of memory, 200 processes.
_LIMITS = Limits(seconds=20.0, memory_mb=256, processes=16, file_mb=8)
_DONE = "tried"

# Each function is one escape, by its name in `ESCAPES`, and returns a true value where it succeeded. The tier `none`
# stops only `memory`, so nothing here may do harm: the canary is a file of its own, signal 0 does nothing, the listener
# is ours.
_SOURCE = """
import ctypes, os, socket
import colorsys, csv  # not loaded before: the standard library can be read

canary, secret, trainer, port = {canary!r}, {secret!r}, {trainer}, {port}
libc = ctypes.CDLL(None, use_errno=True)

def files(): return secret in open(canary).read()
def writes(): return open(canary, "a").write("x")
def environment(): return open(f"/proc/{{trainer}}/environ", "rb").read(1)
def signals(): os.kill(trainer, 0); return True
def sockets(): return socket.socket(socket.AF_INET)
def network(): return socket.create_connection(("127.0.0.1", port), 2)
def uncounted(): return os.memfd_create("x")
def ptrace():
    if (pid := os.fork()) == 0:
        os._exit(0 if libc.ptrace(0, 0, 0, 0) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0
def disk():
    megabytes = {file_mb} + 8
    for number in range(megabytes):
        with open(f"/tmp/{{number}}" if os.getcwd() == "/tmp" else str(number), "wb") as file:
            file.write(bytes(1 << 20))
    return True
def rights():
    os.chroot(".")
    return True
def namespaces():
    if (pid := os.fork()) == 0:
        os._exit(0 if libc.unshare(0x10000000) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0
def mount(): return libc.mount(b"tmpfs", os.getcwd().encode(), b"tmpfs", 0, b"") == 0
def memory(): return bytearray(({memory_mb} + 64) << 20)
def processes():
    read, write = os.pipe()
    children = []
    try:
        for _ in range(200):
            pid = os.fork()
            if pid == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            children.append(pid)
        return True
    finally:
        os.close(write)
        for pid in children:
            os.waitpid(pid, 0)

for escape in (files, writes, environment, signals, sockets, network, uncounted, ptrace, disk, rights, namespaces,
               mount, memory, processes):
    try:
        if escape():
            print(escape.__name__)
    except BaseException as error:
        pass
print({done!r})
"""


async def weakness(tier: Tier) -> str | None:
    """Return the reason why a tier cannot be used here, in words, or None: it does not start, or an attempt succeeds
    that it should stop."""
    # Read back from the program's own words: `files` worked only where it saw this.
    secret = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlvr-probe-"))
        canary = Path(folder) / "canary"
        canary.write_text(secret)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        values = {"canary": str(canary), "secret": secret, "trainer": os.getpid(), "port": listener.getsockname()[1]}
        limits = {"file_mb": _LIMITS.file_mb, "memory_mb": _LIMITS.memory_mb, "done": _DONE}
        runner = LocalRunner(tier, workers=1)
        try:
            outcome = await runner.run(Job(_SOURCE.format(**values, **limits), limits=_LIMITS))
        finally:
            await runner.close()
        worked = set(outcome.stdout.decode(errors="replace").split())
        # Looked at from outside, too: a program that wrote and then failed would not say so.
        if canary.read_text() != secret:
            worked.add("writes")
        # The same for the network: a connection that was made counts although the program did not report it.
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
            worked.add("network")
    # The last word shows that every attempt was made: a program that was killed half way proves nothing.
    if outcome.ended is Ended.BROKEN or _DONE not in worked:
        return outcome.reason or f"the self-test ended early: {outcome.ended.value}"
    wrong = sorted(worked - {_DONE} - set(tier.not_stopped))
    if wrong:
        return f"the self-test got through: {', '.join(wrong)}"
    return None
