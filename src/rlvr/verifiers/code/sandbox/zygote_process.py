"""A zygote as the trainer holds it: started by exec, asked for forks, gone when its socket closes."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile

from rlvr.core.process.child_process import spawn, stop
from rlvr.core.process.deadline import Deadline
from rlvr.core.process.framing import Link
from rlvr.errors import RlvrError
from rlvr.verifiers.code.sandbox.cgroups import Leaf
from rlvr.verifiers.code.sandbox.inside.zygote import LINKED_AT_ONCE, READY
from rlvr.verifiers.code.sandbox.tiers import Tier, command

# numpy alone takes seconds to import from a cold disk.
START_SECONDS = 60.0
"""Wall clock for a zygote to start, on a machine that is busy."""


class SandboxError(RlvrError):
    """The sandbox, not the program, failed; `started`: while the program ran, which may have brought it about."""

    def __init__(self, message: str, started: bool = False) -> None:
        super().__init__(message)
        self.started = started


class Zygote:
    """One zygote. It belongs to the event loop on which it was started."""

    def __init__(self, tier: Tier, process: subprocess.Popen[bytes], control: Link, tmp: str, leaf: Leaf) -> None:
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
        zygote: Zygote | None = None
        try:
            with tempfile.TemporaryFile() as output:
                entering, environment = leaf.entering(command(tier, theirs.fileno(), trainer_pidfd, tmp))
                # Nothing of the trainer's environment, which may hold keys.
                environment = {LINKED_AT_ONCE: "1", **environment}
                process = spawn(entering, environment, output, pass_fds=[theirs.fileno(), trainer_pidfd])
                zygote = cls(tier, process, Link(ours), tmp, leaf)
                theirs.close()
                if not await zygote._ready():
                    # Before its output is read: only then it is whole. Closing twice is fine.
                    await zygote.close()
                    output.seek(0)
                    # What bubblewrap or Python printed, such as "No permissions to create new namespace".
                    words = output.read(2000).decode(errors="replace").strip()
                    raise SandboxError(f"the sandbox {tier.name!r} did not start: {words or 'it printed nothing'}")
                return zygote
        except BaseException as error:  # whoever asked for it may be cancelled, too
            if zygote is None:
                ours.close()
                shutil.rmtree(tmp, ignore_errors=True)
                ending = leaf.remove()
            else:
                ending = zygote.close()
            # A task of its own, which a further cancellation does not end.
            await asyncio.shield(asyncio.ensure_future(ending))
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox {tier.name!r} did not start: {error}") from error
            raise
        finally:
            theirs.close()
            os.close(trainer_pidfd)

    async def _ready(self) -> bool:
        try:
            async with Deadline(START_SECONDS):
                return await self._control.take(1) == READY
        except (TimeoutError, OSError, EOFError):
            return False

    @property
    def alive(self) -> bool:
        """Return True if the zygote can still take requests."""
        # The zygote sends nothing after READY.
        return self._process.poll() is None and self._control.quiet

    def fork(self) -> tuple[Link, Link]:
        """A new supervisor and its program: the links to both. SandboxError when the zygote is gone."""
        (job, their_job) = socket.socketpair()
        (channel, their_channel) = socket.socketpair()
        try:
            socket.send_fds(self._control.sock, [b"J"], [their_job.fileno(), their_channel.fileno()])
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
        await stop(self._process)
        await self.leaf.remove()
        if self._tmp:
            shutil.rmtree(self._tmp, ignore_errors=True)
