"""The ranks of a run: rank and size, and named exchanges between all of them, each with a deadline.

Control goes over the CPU (gloo), whatever the devices. Before ranks exchange anything they meet at a name, so that a
rank which is late, dead, failed or somewhere else in the program is named instead of hanging the others. A rank that is
lost while the others are inside a collective is named by the watchdog.

A process may have several Worlds, one after the other or at once, as it may have several trainers: each has keys of its
own in the one store, and all use torch's one process group, which lasts as long as the process.

Invariants: every rank makes the same calls in the same order; a call with one rank costs nothing; what a failed rank
raised reaches the others as a LostRankError that says which rank it was.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import itertools
import math
import os
import platform
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from rlvr.core.waits import Wait
from rlvr.distributed.heartbeat_monitor import HEARTBEAT_SECONDS, HeartbeatMonitor, failure_key, heartbeat_key
from rlvr.errors import ConfigError, LostRankError, TrainingError, WaitTimeoutError

T = TypeVar("T")

# torch's default for gloo (torch.distributed.constants.default_pg_timeout), given explicitly so that NCCL has it too.
GIVEN_UP = 1800.0
"""Seconds that torch's own collectives wait, and that a rank other than 0 may let the others wait."""
LEAVING = 5.0
"""Seconds that rank 0 waits at most, after the last barrier, until no other rank uses the store any more."""
# Those that compute or exchange on every rank; vLLM samples on one side only and is checked there.
PACKAGES = ("rlvr", "torch", "transformers", "deepspeed", "peft", "numpy")
RANKS_HERE = "LOCAL_WORLD_SIZE"
"""Environment variable with the number of ranks on this machine, as torchrun has it."""


class World:
    """The processes that train together: `rank` of `size`, and `local_rank` on this machine."""

    _worlds: ClassVar[Iterator[int]] = itertools.count()
    """Numbers of the Worlds of this process with several ranks; the same on every rank."""
    _shared_store: ClassVar[Any] = None
    """The connection to the store that the launcher's address names: one for the process, since rank 0 may keep the
    store."""
    _ends_badly: ClassVar[bool] = False
    """True if a World of this process failed. Then ranks do not leave torch's process group together."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, heartbeat_timeout: float = 30.0) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.heartbeat_timeout = heartbeat_timeout
        """Seconds without a sign of life after which a rank is given up."""
        self._meetings = 0
        self._store: Any = None
        self._failed = False
        self._closed = False
        self._watchdog: HeartbeatMonitor | None = None
        self._at = "its start"
        """The name of this rank's latest exchange, which may still be under way; errors about lost ranks contain it."""

    @classmethod
    def from_environment(cls, heartbeat_timeout: float = 30.0) -> World:
        """The world that torchrun, accelerate or deepspeed launched this process in; of one rank where none did.

        Where the launcher does not say how many ranks this machine has, as deepspeed and srun do not, they are counted,
        and LOCAL_WORLD_SIZE says it: cores, memory and GPUs are shared out by it.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(heartbeat_timeout=heartbeat_timeout)
        # The variables are torchrun's, which accelerate and deepspeed set too.
        world = cls(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")), heartbeat_timeout)
        world._join()
        if RANKS_HERE not in os.environ:
            os.environ[RANKS_HERE] = str(world.gather(machine(), "the machines of the ranks").count(machine()))
        return world

    @property
    def is_main(self) -> bool:
        """Return True if this is rank 0, which alone draws, verifies, decides, logs and writes."""
        return self.rank == 0

    def _join(self) -> None:
        if World._shared_store is None:
            # One store for the process: under plain MASTER_ADDR the first rendezvous on rank 0 listens on the port, and
            # a second could not.
            World._shared_store, _, _ = next(iter(dist.rendezvous("env://", self.rank, self.size)))
        store = World._shared_store
        # Ranks make Worlds in the same order, so the number agrees without asking.
        self._store = dist.PrefixStore(f"rlvr/{next(World._worlds)}", store)
        # Before the first barrier: a rank that dies while the others start is named too.
        self._watchdog = HeartbeatMonitor(self.rank, self.size, self._store, self.heartbeat_timeout, lambda: self._at)
        # 10 minutes: machines of a cluster may start minutes apart. Then torch's group is made while all are here.
        self.barrier("the other ranks to start", 600.0)
        if dist.is_initialized():
            return
        cuda = torch.cuda.is_available()
        if cuda and self.local_rank < torch.cuda.device_count():  # else refused by name where a GPU is needed
            # Before init_process_group: NCCL takes the current device for a rank's.
            torch.cuda.set_device(self.local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.PrefixStore("torch", store),
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=GIVEN_UP),
        )
        # torch warns of a group that is not destroyed before the process ends.
        atexit.register(_leave_process_group)

    # exchanges between ranks

    def broadcast(self, value: T, what: str, deadline: float | None = None) -> T:
        """Rank 0's `value`, on every rank. `what` says in words what it is."""
        if self.size == 1:
            return value
        box = [value]
        self.barrier(what, deadline)
        with self.naming(what):
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T, what: str, deadline: float | None = None) -> list[T]:
        """Every rank's `value`, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self.barrier(what, deadline)
        with self.naming(what):
            dist.all_gather_object(values, value)
        return values

    def same(self, value: T, what: str) -> T:
        """`value`, which every rank must have alike: TrainingError shows the first rank whose value differs."""
        values = self.gather(value, what)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise TrainingError(f"the ranks differ in {what}: rank 0 has {values[0]!r}, rank {rank} has {other!r}")
        return value

    def barrier(self, what: str, deadline: float | None = None) -> None:
        """Wait until every rank is here.

        WaitTimeoutError names the ranks that are not here by the deadline (seconds); LostRankError one that failed or
        shows no sign of life, TrainingError one that waits for something else. Without a deadline of its own a meeting
        waits for rank 0 as long as that lives: what rank 0 does alone (sampling, verifying, evaluating, reading and
        writing checkpoints) may take hours and has deadlines there, and it says when it fails.
        """
        if self.size == 1:
            return
        # The number of the meeting, and not only its name, is in the key: a loop meets at one name many times.
        self._meetings += 1
        missing = {rank for rank in range(self.size) if rank != self.rank}
        if deadline is None:
            deadline = GIVEN_UP if self.is_main else math.inf
        with self.naming(what), Wait(_Awaited(what, missing), time.monotonic() + deadline) as waiting:
            # Keys are set once and read by all the others: a rank that comes late finds who was there before.
            self._store.set(self._place(self._meetings, self.rank), what)
            # From 0.2 ms, so that a meeting of ranks that come together costs little, to 20 ms, so that a long wait
            # does not load the store (docs/log.md, "ranks": some milliseconds with the exchange).
            pause = 0.0002
            watch = BarrierWait(self, missing)
            while missing:
                for rank in sorted(missing):
                    if self._store.check([self._place(self._meetings, rank)]):
                        missing.discard(rank)
                        self._compare(what, rank)
                if not missing:
                    break
                # After the keys were read: a rank that came and then failed counts as having come.
                watch.look(what)
                waiting.check()
                time.sleep(pause)
                pause = min(0.02, pause * 1.3)
            if self._meetings > 2:  # every rank has left the meeting before the last
                # Each rank deletes its own key, or the store of a long run grows with its steps. Two back: a slower
                # rank may still read that of the meeting before, but it has left the one before that to come here.
                self._store.delete_key(self._place(self._meetings - 2, self.rank))

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Inside, what torch raises when a rank is gone becomes a LostRankError that names it, as far as it can be
        known, and `what`."""
        self._at = what
        try:
            yield
        except BaseException as error:
            self.notice()
            # gloo and NCCL raise RuntimeError (DistBackendError is a subclass) where a peer's connection is closed.
            if isinstance(error, RuntimeError) and not isinstance(error, (TrainingError, WaitTimeoutError)):
                raise LostRankError(f"{self._gone()} was lost while rank {self.rank} was at {what}: {error}") from error
            raise

    def _gone(self) -> str:
        """The ranks that failed or give no sign of life within a few beats."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            before = {rank: self.heard(rank) for rank in others}
            # Three beats: one may just be on its way, and a busy machine delays another.
            time.sleep(3 * HEARTBEAT_SECONDS)
            gone = [rank for rank in others if self.failure(rank) or self.heard(rank) == before[rank]]
        except Exception:
            gone = [0]  # without the store, which rank 0 or its launcher keeps
        return " and ".join(f"rank {rank}" for rank in gone) or "another rank"

    def notice(self) -> None:
        """The main thread knows that something is wrong with a rank, and ends by itself."""
        if self._watchdog is not None:
            self._watchdog.notice()

    def _compare(self, what: str, rank: int) -> None:
        theirs = self._store.get(self._place(self._meetings, rank)).decode()
        if theirs != what:
            # A rank that fails meets under no other name: its failure is the reason to give.
            self.raise_failure(rank, what)
            raise TrainingError(
                f"the ranks are not at the same place: rank {self.rank} waits for {what}, rank {rank} for {theirs}"
            )

    @staticmethod
    def _place(meeting: int, rank: int) -> str:
        return f"meeting/{meeting}/{rank}"

    # life and death

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with `error`; never raises."""
        if self.size == 1 or self._failed:
            return
        self._failed = World._ends_badly = True
        self.notice()
        with contextlib.suppress(Exception):  # the store dies with the rank that keeps it
            # 2000 characters: a message may quote data; the store is not for files.
            self._store.set(failure_key(self.rank), f"{type(error).__name__}: {error}"[:2000])

    def close(self) -> None:
        """Leave, after all ranks came to their end or the one that keeps the store is gone."""
        if self._closed or self.size == 1:
            return
        together = False
        if not self._failed:
            with contextlib.suppress(TrainingError, WaitTimeoutError):  # a rank that failed has reported it
                # Rank 0 may keep the store: if it left first, the others would lose the store and take that for a
                # failure.
                self.barrier("the end of the run", self.heartbeat_timeout if self.is_main else None)
                together = True
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.close()
        if together:
            with contextlib.suppress(Exception):  # the store dies with the rank that keeps it
                self._clear_store()

    def _clear_store(self) -> None:
        """Rank 0, which may keep the store, leaves last, and deletes this World's keys."""
        if not self.is_main:
            self._store.add("left", 1)
            return
        until = time.monotonic() + LEAVING
        while self._store.add("left", 0) < self.size - 1 and time.monotonic() < until:
            time.sleep(0.005)
        meetings = range(max(1, self._meetings - 1), self._meetings + 1)  # those before are deleted
        keys = [self._place(meeting, rank) for meeting in meetings for rank in range(self.size)]
        for key in [*keys, *(heartbeat_key(rank) for rank in range(self.size)), "left"]:
            self._store.delete_key(key)

    def heard(self, rank: int) -> bytes:
        """The newest sign of life of `rank`."""
        if self._store.check([heartbeat_key(rank)]):
            return self._store.get(heartbeat_key(rank))
        return b""

    def raise_failure(self, rank: int, what: str) -> None:
        """LostRankError where `rank` reported a failure."""
        if (failure := self.failure(rank)) is not None:
            raise LostRankError(f"rank {rank} failed while rank {self.rank} waited for {what}: {failure}")

    def failure(self, rank: int) -> str | None:
        """The error with which `rank` failed; None where it did not."""
        if self._store.check([failure_key(rank)]):
            return self._store.get(failure_key(rank)).decode()
        return None


def machine() -> tuple[str, str]:
    """This machine and network, as far as ranks can tell them apart: containers have names of their own, machines
    boots."""
    # A host name alone is not unique (cloned machines), the boot id alone is shared by containers of one machine.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else ""


def _leave_process_group() -> None:
    """At the end of the process: leave torch's process group, where all ranks came to their end."""
    # destroy_process_group may wait for the other ranks, which do not come after a failure.
    if dist.is_initialized() and not World._ends_badly:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Awaited:
    """The ranks that a barrier waits for, in words."""

    what: str
    missing: set[int]

    def __str__(self) -> str:
        return f"{self.what}, where {', '.join(f'rank {rank}' for rank in sorted(self.missing))} did not come"


class BarrierWait:
    """Checks the ranks of `world` in `missing`, which a wait is for, once a heartbeat.

    Silence is counted in checks, not by the clock: a process that was itself stopped blames no rank.
    """

    def __init__(self, world: World, missing: set[int]) -> None:
        self.world = world
        self.missing = missing
        self._last: dict[int, bytes] = {}
        self._silent = dict.fromkeys(missing, 0.0)
        self._next = time.monotonic() + HEARTBEAT_SECONDS

    def look(self, what: str, failures: bool = True) -> None:
        """LostRankError where a missing rank was silent for too long, or, with `failures`, said that it has failed."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + HEARTBEAT_SECONDS
        for rank in sorted(self.missing):
            if failures:
                self.world.raise_failure(rank, what)
            heartbeat = self.world.heard(rank)
            same = heartbeat == self._last.get(rank) and heartbeat != b""  # who has not begun is late, not silent
            self._silent[rank] = self._silent[rank] + HEARTBEAT_SECONDS if same else 0.0
            self._last[rank] = heartbeat
            if self._silent[rank] > self.world.heartbeat_timeout:
                raise LostRankError(
                    f"rank {rank} has shown no sign of life for {self._silent[rank]:.0f} s, while rank "
                    f"{self.world.rank} waited for {what}: its process was killed or stopped, or its machine is gone; "
                    "go on with --resume auto"
                )


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions here, Python's and those of the packages that are installed, by name."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):  # rlvr itself, run from a source tree, say
            versions[package] = _version(package)
    return versions


# Kept, since each checkpoint asks, and the metadata of six packages takes 30 ms to parse.
_version = functools.cache(version)


def check_versions(world: World) -> None:
    """ConfigError names each package that is not the same on all ranks, and who has which: two versions of one can
    differ in what they compute or in what they exchange."""
    of_rank = world.gather(installed(PACKAGES), "the versions of packages")
    wrong = []
    for package in ("python", *PACKAGES):
        ranks: dict[str, list[str]] = {}
        for rank, versions in enumerate(of_rank):
            ranks.setdefault(versions.get(package, "none"), []).append(str(rank))
        if len(ranks) > 1:
            wrong.append(f"{package} is " + ", ".join(f"{v} on rank {' '.join(who)}" for v, who in ranks.items()))
    if wrong:
        raise ConfigError(f"the ranks run different versions: {'; '.join(wrong)}; install the same on all machines")
