"""A zygote as the trainer holds it: started by exec, asked for forks, gone when its socket closes."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from typing import IO

from rlvr.errors import RlvrError
from rlvr.verifiers.code.sandbox.cgroups import Leaf
from rlvr.verifiers.code.sandbox.inside.zygote import LINKED_AT_ONCE, READY
from rlvr.verifiers.code.sandbox.link import Link
from rlvr.verifiers.code.sandbox.tiers import Tier, command
from rlvr.verifiers.pool.deadline import Deadline

# numpy alone takes seconds to import from a cold disk.
START_SECONDS = 60.0
"""Wall clock for a zygote to start, on a machine that is busy."""
# Arbitrary: a zygote ends within milliseconds when its socket closes. One that does not (it was stopped, say) is
# killed.
_CLOSE_SECONDS = 5.0


class SandboxError(RlvrError):
    """The sandbox, not the program, failed; `started`: while the program ran, which may have brought it about."""

    def __init__(self, message: str, started: bool = False) -> None:
        super().__init__(message)
        self.started = started


class Zygote:
    """One zygote. It belongs to the event loop on which it was started."""

    def __init__(
        self, tier: Tier, process: subprocess.Popen[bytes], control: socket.socket, tmp: str, leaf: Leaf
    ) -> None:
        self.tier = tier
        self.leaf = leaf
        self._process = process
        self._control = control
        self._tmp = tmp

    @classmethod
    async def start(cls, tier: Tier) -> Zygote:
        """A zygote that is ready. SandboxError, with its output, when it does not start."""
        # SEQPACKET keeps messages apart: one `recvmsg` of a supervisor takes one job with its two descriptors. In a
        # stream the bytes of two jobs could come together.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if tier.bubblewrap:
            tmp = ""
        else:
            tmp = tempfile.mkdtemp(prefix="rlvr-code-")
        trainer_pidfd = os.pidfd_open(os.getpid())
        leaf = Leaf()
        try:
            with tempfile.TemporaryFile() as output:
                process = _start(
                    command(tier, theirs.fileno(), trainer_pidfd, tmp), [theirs.fileno(), trainer_pidfd], leaf, output
                )
                zygote = cls(tier, process, ours, tmp, leaf)
                theirs.close()
                if not await zygote._ready():
                    await zygote.close()
                    output.seek(0)
                    # What bubblewrap or Python printed, such as "No permissions to create new namespace".
                    words = output.read(2000).decode(errors="replace").strip()
                    raise SandboxError(f"the sandbox {tier.name!r} did not start: {words or 'it printed nothing'}")
                return zygote
        except OSError as error:
            ours.close()
            shutil.rmtree(tmp, ignore_errors=True)
            await leaf.remove()
            raise SandboxError(f"the sandbox {tier.name!r} did not start: {error}") from error
        finally:
            theirs.close()
            os.close(trainer_pidfd)

    async def _ready(self) -> bool:
        self._control.setblocking(False)
        try:
            async with Deadline(START_SECONDS):
                return await asyncio.get_running_loop().sock_recv(self._control, 1) == READY
        except (TimeoutError, OSError):
            return False

    @property
    def alive(self) -> bool:
        """Return True if the zygote can still take requests."""
        if self._control.fileno() < 0 or self._process.poll() is not None:
            return False
        try:
            # The zygote sends nothing after READY: an empty read is its end, and nothing to read (BlockingIOError) is
            # life.
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def fork(self) -> tuple[Link, Link]:
        """A new supervisor and its program: the links to both. SandboxError when the zygote is gone."""
        (job, their_job) = socket.socketpair()
        (channel, their_channel) = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"J"], [their_job.fileno(), their_channel.fileno()])
        except OSError as error:
            job.close()
            channel.close()
            raise SandboxError(f"the sandbox has ended ({error})") from error
        finally:
            # Only the copies in the sandbox stay open, so that the end of the supervisor is seen as the end of the
            # stream.
            their_job.close()
            their_channel.close()
        return Link(job), Link(channel)

    async def close(self) -> None:
        """End it and all below it."""
        self._control.close()
        until = time.monotonic() + _CLOSE_SECONDS
        while self._process.poll() is None:
            if time.monotonic() > until:
                self._process.kill()
            await asyncio.sleep(0.002)
        await self.leaf.remove()
        if self._tmp:
            shutil.rmtree(self._tmp, ignore_errors=True)


def _start(argv: list[str], passed: list[int], leaf: Leaf, output: IO[bytes]) -> subprocess.Popen[bytes]:
    entering, environment = leaf.entering(argv)
    return subprocess.Popen(
        entering,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # Nothing of the trainer's environment, which may hold keys.
        env={LINKED_AT_ONCE: "1", **environment},
        pass_fds=passed,
        start_new_session=True,  # Ctrl-C is the trainer's to handle
    )
