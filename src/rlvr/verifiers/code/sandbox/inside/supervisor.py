"""Process 1 of a job's namespaces: waits for the job, forks the program, watches it, and says how it ended.

Invariants: it is for one job; it reads no more than the limits say and runs nothing of the program; when it ends the
kernel kills whatever is left in its process namespace. It does so when the trainer closes its socket, too. What it says
may be forged by a program that breaks out of its own lock, and is a claim like any other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import time
from json.encoder import encode_basestring_ascii
from typing import NoReturn

from rlvr.verifiers.code.sandbox.inside import frames, kernel
from rlvr.verifiers.code.sandbox.inside.job_limits import STREAMS, Order, Setting
from rlvr.verifiers.code.sandbox.inside.program import run_program

STARTED = b"F"
"""The first byte to the trainer: from here on, the program is to blame for an end without an outcome."""
# A compromise: one look reads a file of /proc for each process. Between two looks a program can pass `memory_mb` by
# what RLIMIT_AS allows its `processes` together (docs/code.md, "Memory of the host").
_WATCH_SECONDS = 0.03
"""Seconds between two checks of the memory of all processes together."""
_STREAM_BUFFERS = 1.5
_DATAGRAM_BUFFERS = 11
"""Most data in a stream socket and in a datagram socket, in buffers of a socket: a sender goes past its own buffer by
half; eleven datagrams of a buffer each may wait at a receiver (net.unix.max_dgram_qlen is 10 in a new namespace), and
stay when their senders have closed."""
# The capacity of a pipe (pipe(7)): one read empties a full one.
_MOST = 2**16
# Arbitrary. A fork bomb may make children as fast as they are killed; then this gives up, and the tier says that it
# does not stop processes.
_SWEEPS = 50
_TWO = struct.Struct("2i")
"""The descriptors that come with a job."""
_NO_PROGRAMS = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC


def supervise(control: socket.socket, waiting: int, setting: Setting) -> NoReturn:
    """Take the next job of a zygote's socket, run it and send its outcome. `waiting` is closed when the job was
    taken."""
    job = -1
    try:
        # The zygote ignores SIGCHLD, so that the kernel reaps its children. Here the exit status of the program is
        # needed.
        kernel.handle(signal.SIGCHLD, kernel.DEFAULT)
        kernel.signal_on_parent_death(signal.SIGKILL)
        # A program may fork twice and let the parent end. Its orphans become children of this process, where `_sweep`
        # finds them.
        kernel.be_subreaper()
        # Before a job is there, so that no job waits for it. An error is kept for the next job: without one there is
        # nobody to report it to.
        trouble = _prepared(setting)
        job, channel = _taken(control)
        # This process and the program must not reach the zygote's socket, over which the next job's descriptors come.
        os.close(control.detach())
        # The zygote polls the other end of this pipe: its end says that the job was taken, and the next supervisor is
        # forked.
        os.close(waiting)
        body = frames.receive(job)
        if trouble is not None:
            raise trouble
        if body is not None:
            head, _, stdin = body.partition(b"\n")
            _run(job, channel, setting, Order(**frames.decoded(head)), stdin)
    # Whatever failed here is the sandbox's own trouble: "broken" makes the trainer run the job once more in another
    # zygote, and gives it the reason.
    except BaseException as error:
        if job >= 0:
            with contextlib.suppress(OSError):
                _say(job, "broken", f"{type(error).__name__}: {error}", 0.0, b"", b"")
    finally:
        os._exit(0)


def _taken(control: socket.socket) -> tuple[int, int]:
    """The descriptors of the next job: of its supervisor's socket and of its program's. EOFError when there are no more
    jobs."""
    for _, _, data in control.recvmsg(1, socket.CMSG_SPACE(_TWO.size))[1]:
        job, channel = _TWO.unpack(data)
        return job, channel
    raise EOFError("the trainer has closed the zygote's socket")


def _prepared(setting: Setting) -> OSError | None:
    """Do the setup that needs no job; return the error if it fails, to be reported with the job."""
    try:
        if setting.namespaces:
            _own_user()
    except OSError as error:
        return error
    return None


def _run(job: int, channel: int, setting: Setting, order: Order, stdin: bytes) -> None:
    # Opened before /proc is covered below: the watch reads processes through it, and the program has it closed.
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    if setting.namespaces:
        # One inode for each 4 kB: empty files take memory of the kernel that the size of a tmpfs does not count.
        files = order.file_mb * 256
        kernel.mount_memory(setting.tmp, f"size={order.file_mb}m,nr_inodes={files},mode=0700")
        stdin_fd, ends = _streams_with_paths(stdin)
    else:
        stdin_fd = _file_of(stdin)
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        for read, _ in ends:
            # The watch polls and reads each end once; a read that waited would hold up the deadline.
            os.set_blocking(read, False)
    # Before the fork: after it, each page that either process writes to is copied for it.
    watch = _Watch(job, [read for read, _ in ends], order, proc, setting)
    # Not `subprocess`: the program runs in this warmed interpreter.
    pid = os.fork()
    if pid == 0:
        # From here and not from the supervisor, which the program might end before it has said so.
        os.write(job, STARTED)
        os.close(job)
        run_program(channel, [stdin_fd, *(write for _, write in ends)], proc, setting, order)
    start = time.monotonic()
    # The ends that are the program's: as long as one is open here, the end of its output would never be seen.
    for fd in (channel, stdin_fd, *(write for _, write in ends)):
        os.close(fd)
    how, why, outputs = watch.through(pid)
    # With namespaces the end of this process, number 1 of its process namespace, kills the rest.
    if not setting.namespaces:
        _sweep(proc)
    _say(job, how, why, time.monotonic() - start, *outputs)


def _own_user() -> None:
    """Inside of new namespaces: a user map."""
    user = os.geteuid()
    group = os.getegid()
    # setgroups first: an unprivileged process may write gid_map only when it is denied (user_namespaces(7)). One id is
    # mapped, so no other user exists inside.
    for name, text in (("setgroups", "deny"), ("gid_map", f"{group} {group} 1"), ("uid_map", f"{user} {user} 1")):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def _streams_with_paths(stdin: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Inside of new namespaces: in place of /proc, a folder that holds a program's standard streams and cannot be
    changed.

    A descriptor to read `stdin` from, and for output and errors the two ends of a named pipe each.
    """
    # The input and 64 kB for the folder, two pipes and rounding; the program cannot write here.
    size = len(stdin) // 1024 + 64
    # Over /proc: the program sees no process list, no `/proc/self/maps`, and no descriptors of others.
    kernel.mount_memory("/proc", f"size={size}k,nr_inodes=8,mode=0555", _NO_PROGRAMS)
    os.mkdir(STREAMS, 0o555)
    path = f"{STREAMS}/0"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    while stdin:
        stdin = stdin[os.write(fd, stdin) :]
    os.close(fd)
    stdin_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    ends = []
    for number in (1, 2):
        path = f"{STREAMS}/{number}"
        os.mkfifo(path, 0o600)
        # The read end first: opening a named pipe to write without a reader waits for one.
        read = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it would wait for a writer else
        ends.append((read, os.open(path, os.O_WRONLY | os.O_CLOEXEC)))
    # After this nothing can be created, removed or renamed there; reading and the pipes still work.
    kernel.make_read_only("/proc", _NO_PROGRAMS)
    return stdin_fd, ends


def _file_of(data: bytes) -> int:
    """A file in memory that nobody can change, open at its start."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]
    os.lseek(fd, 0, os.SEEK_SET)
    # F_SEAL_SEAL: no seal can be changed later. The descriptor is open for writing, and the program has it as its
    # standard input.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


class _Watch:
    """Reads the program's output and waits for its end, or for the first limit that it passes."""

    def __init__(self, job: int, reads: list[int], order: Order, proc: int, setting: Setting) -> None:
        self.job = job
        self.order = order
        self.proc = proc
        self.pid = 0
        self.alone = setting.processes_beside is not None
        """Our process and network namespaces hold nobody else's processes and sockets."""
        if setting.namespaces:
            self.own = os.stat("self/ns/pid", dir_fd=proc).st_ino
        else:
            self.own = 0
        self.socket_bytes = setting.socket_bytes
        self.outputs = {fd: bytearray() for fd in reads}
        self.open = set(reads)
        """The outputs whose end has not been read."""
        self.memory = order.memory_mb * 2**20
        self.poll = select.poll()
        for fd in (job, *reads):
            self.poll.register(fd, select.POLLIN)

    def through(self, pid: int) -> tuple[str, str, list[bytes]]:
        """Wait for the program's end; return the kind of its end, the detail of it, and the outputs."""
        self.pid = pid
        how, why = self._until_end()
        if how:
            # It may have ended between the look and this line.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            if code >= 0:
                how, why = ("exit", str(code))
            else:
                how, why = ("signal", str(-code))
            used = os.times()  # of all that has been waited for: the program and what it has waited for
            # `os.times` counts in ticks of 10 ms, so what it says may be a little below the limit at which the kernel
            # killed.
            if used.children_user + used.children_system > self.order.cpu_limit - 0.1:
                how = "time"
                why = f"{self.order.cpu_limit} s of processor time"
        return how, why, [bytes(data[: self.order.output_bytes]) for data in self.outputs.values()]

    def _until_end(self) -> tuple[str, str]:
        # A pidfd becomes readable when the process ends, so one `poll` waits for output, end, cancellation and
        # deadline.
        end = os.pidfd_open(self.pid)
        self.poll.register(end, select.POLLIN)
        now = time.monotonic()
        deadline = now + self.order.seconds
        look = now + _WATCH_SECONDS
        while True:
            if now >= deadline:
                return "time", f"{self.order.seconds:g} s of wall clock"
            if now >= look:
                if self._memory() > self.memory:
                    return "memory", f"{self.order.memory_mb} MB, all processes together"
                look = time.monotonic() + _WATCH_SECONDS
            # At least 1 ms: `poll` counts in milliseconds, and a rest below one would make this loop spin.
            ready = [fd for fd, _ in self.poll.poll(max(1.0, 1000 * (min(deadline, look) - now)))]
            if self.job in ready:  # nothing is said to us but the end
                os._exit(0)
            for fd in self.open.intersection(ready):
                try:
                    if not self._read(fd):
                        return "output", f"{self.order.output_bytes} bytes"
                except BlockingIOError:  # a process of the program's has opened its output, too, and was there first
                    continue
            if end in ready:
                return self._rest()
            now = time.monotonic()

    def _read(self, fd: int) -> bool:
        """Read once; whether what was written in all is within the limit."""
        data = os.read(fd, _MOST)
        if not data:
            # A closed end is always ready, so that the loop would spin.
            self.poll.unregister(fd)
            self.open.remove(fd)
        self.outputs[fd] += data
        return len(self.outputs[fd]) <= self.order.output_bytes

    def _rest(self) -> tuple[str, str]:
        """Read the rest of what the program had written when it ended, without waiting for what its children go on to
        write; return the kind and detail of an end by the output limit, else empty texts."""
        for fd in list(self.open):
            with contextlib.suppress(BlockingIOError):
                while fd in self.open:
                    if not self._read(fd):
                        return "output", f"{self.order.output_bytes} bytes"
        return "", ""

    def _memory(self) -> int:
        """Bytes in use by the processes of our namespace, each beyond what a fresh one uses, and by its sockets at
        their fullest: the kernel does not say how full they are."""
        base = kernel.used(self.proc)
        # Without a process namespace of its own, other processes of the same user are not the program's; only its first
        # process is known.
        if not self.alone:
            return max(0, kernel.used(self.proc, str(self.pid)) - base)
        streams, datagrams = kernel.unix_sockets(self.proc)
        used = int(self.socket_bytes * (_STREAM_BUFFERS * streams + _DATAGRAM_BUFFERS * datagrams))
        for name in filter(str.isdigit, os.listdir(self.proc)):
            # A fresh process takes `base` already, which is the interpreter's and shared: each is counted beyond that.
            if self._is_ours(name):
                used += max(0, kernel.used(self.proc, name) - base)
        return used

    def _is_ours(self, name: str) -> bool:
        """Membership of a process in our process namespace. Without one of the run's own, /proc shows no other
        processes."""
        if not self.own:
            return True
        try:
            return os.stat(f"{name}/ns/pid", dir_fd=self.proc).st_ino == self.own
        except OSError:  # it has ended meanwhile, or is not ours to look into
            return False


def _sweep(proc: int) -> None:
    """Kill what the program left behind, where there is no namespace whose end does it."""
    for _ in range(_SWEEPS):
        # Children only, whose numbers cannot be given to others before they are reaped here. Grandchildren become
        # children when their parent is killed (subreaper), hence the rounds.
        ours = [pid for pid in map(int, filter(str.isdigit, os.listdir(proc))) if _parent(pid, proc) == os.getpid()]
        for pid in ours:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if not ours:
            return


def _parent(pid: int, proc: int) -> int:
    try:
        with open(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=proc)) as file:
            # The second field of /proc/PID/stat is the program's name in brackets, which may hold spaces and brackets
            # itself; the parent is the second field behind it (proc(5)).
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):  # it has ended meanwhile
        return 0


def _say(job: int, how: str, why: str, seconds: float, out: bytes, err: bytes) -> None:
    words = encode_basestring_ascii(why[:1000])  # json.dumps would make an encoder for each head
    head = f'{{"how": "{how}", "why": {words}, "seconds": {seconds!r}, "stdout": {len(out)}}}'
    frames.send(job, head.encode() + b"\n" + out + err)
