"""Control groups: bounds of memory, processes and processor weight for all processes of one zygote together.

A zygote is started inside a leaf of its own and stays there with all that it forks; nothing is moved for a run, since
moving a process waits for a grace period of the kernel. A leaf is made only below a cgroup that is ours to divide: the
top of what is visible (a container's own, or an unmanaged hierarchy), and for version 2 also a delegated one. A cgroup
that a service manager made for us without delegation is the manager's alone to change, even where root could.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/index.html
and https://systemd.io/CGROUP_DELEGATION (one writer for each cgroup; the mark of delegation).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvr.core.process.deadline import Deadline

CONTROLLERS = ("cpu", "memory", "pids")
_SHARES = 512
"""Half the default of version 1. All processes of a leaf share it, so a program gains nothing by having many. Not
lower: the limits of programs are wall clock, and on a busy machine honest ones would run out of time."""
_WEIGHT = 50
"""The same for version 2, whose default is 100."""
_BESIDE_BYTES = 128 * 2**20
"""Memory of a zygote (60 MB with numpy) and its supervisors, in addition to that of the programs."""
_PROCESSES_BESIDE = 16
"""A zygote, bubblewrap's own process and supervisors."""
# cgroup-v2.rst, "No Internal Process Constraint".
_INITIAL = "rlvr-initial"
"""The leaf for the processes of a cgroup of version 2 that is divided: it may not have processes of its own."""
# Arbitrary; what stays is removed by the next trainer (`remove_left_over`).
_EMPTY_SECONDS = 2.0
"""Time for the processes of a closed zygote to leave its leaf."""
# The shell writes its own number into each leaf, then becomes the zygote: entering before `exec` means that no process
# has to be moved later. A leaf that refuses is left out (`|| :`).
_ENTER = 'for leaf in $LEAVES; do echo $$ > "$leaf/cgroup.procs" || :; done; unset LEAVES; exec "$@"'
_numbers = itertools.count()


@dataclass(frozen=True)
class Hierarchy:
    """A cgroup below which leaves may be made."""

    version: int
    folder: Path
    controllers: tuple[str, ...]

    def shared_out(self) -> list[tuple[str, str]]:
        """Writes (file, text), in order, that give leaves their weight of the processor."""
        if "cpu" not in self.controllers:
            return []
        if self.version == 1:
            # Version 1 names its files otherwise; the default of cpu.shares is 1024, that of cpu.weight 100.
            return [("cpu.shares", str(_SHARES))]
        return [("cpu.weight", str(_WEIGHT))]

    def limits(self, memory: int, processes: int) -> list[tuple[str, str]]:
        """Writes that limit a leaf to `memory` bytes and a number of processes and threads."""
        writes = []
        if "memory" in self.controllers:
            swap = "memory.swappiness"
            most = "memory.limit_in_bytes"
            if self.version == 2:
                swap = "memory.swap.max"
                most = "memory.max"
            # No swap: paged-out memory would not count against the limit of version 1.
            writes += [(swap, "0"), (most, str(memory))]
        if "pids" in self.controllers:
            writes.append(("pids.max", str(processes)))
        return writes

    def division(self) -> list[tuple[str, str]]:
        """Writes that let leaves of version 2 have controllers: all processes move to a leaf, then the controllers are
        enabled."""
        enabled = (self.folder / "cgroup.subtree_control").read_text().split()
        lacking = [f"+{name}" for name in self.controllers if name not in enabled]
        if not lacking:
            return []
        processes = (self.folder / "cgroup.procs").read_text().split()
        moves = [(f"{_INITIAL}/cgroup.procs", pid) for pid in processes]
        return [*moves, ("cgroup.subtree_control", " ".join(lacking))]


def usable(membership: str, mounts: str) -> list[Hierarchy]:
    """The hierarchies to use, by the texts of /proc/self/cgroup and /proc/self/mountinfo."""
    hierarchies = []
    # A line of mountinfo (proc(5)): `36 35 0:31 / /sys/fs/cgroup rw,... - cgroup2 cgroup rw,...`. Fields 4 and 5 are
    # the root within the file system and the place where it is mounted.
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        kind, _, options = source.split()[:3]
        root, place = fields.split()[3:5]
        names = tuple(name for name in CONTROLLERS if name in options.split(","))
        # Hierarchies of version 1 without a controller that is used here, such as `name=systemd`, are passed over.
        if kind == "cgroup2" or (kind == "cgroup" and names):
            version = 2 if kind == "cgroup2" else 1
            hierarchy = _own(version, names, membership, root, Path(place))
            if hierarchy is not None:
                hierarchies.append(hierarchy)
    return hierarchies


def _own(version: int, names: tuple[str, ...], membership: str, root: str, place: Path) -> Hierarchy | None:
    """Our own cgroup of a mounted hierarchy, where it is ours to divide."""
    for line in membership.splitlines():
        # `0::/user.slice` for version 2, `4:cpu,cpuacct:/docker/...` for version 1 (cgroups(7)).
        _, members, path = line.split(":", 2)
        if version == 2:
            ours = members == ""
        else:
            ours = names[0] in members.split(",")
        if not ours:
            continue
        # A trainer that divided its cgroup before is in `rlvr-initial` itself; the cgroup to divide is the one above.
        path = path.removesuffix(f"/{_INITIAL}") or "/"
        folder = place / os.path.relpath(path, root)
        if version == 1:
            # Version 1 has no delegation: only the top of what a container sees is surely nobody else's.
            if path == root and os.access(folder, os.W_OK):
                return Hierarchy(1, folder, names)
            return None
        files = [folder / name for name in ("cgroup.procs", "cgroup.subtree_control")]
        if not all(os.access(file, os.W_OK) for file in [folder, *files]) or not (path == root or _delegated(folder)):
            return None
        there = (folder / "cgroup.controllers").read_text().split()
        names = tuple(name for name in CONTROLLERS if name in there)
        return Hierarchy(2, folder, names) if names else None
    return None


def _delegated(folder: Path) -> bool:
    """Return True if a cgroup is delegated to us: it has the mark that systemd puts on one with Delegate=yes or,
    without root's rights, we own it."""
    if os.geteuid() != 0:
        return True
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


class Leaf:
    """The leaf of a zygote in each hierarchy; nothing where no hierarchy can be used."""

    def __init__(self, hierarchies: Sequence[Hierarchy] | None = None) -> None:
        self._limits = (0, 0)
        self._folders: dict[Path, Hierarchy] = {}
        name = f"{_prefix()}{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"
        for hierarchy in _ready() if hierarchies is None else hierarchies:
            folder = hierarchy.folder / name
            with contextlib.suppress(OSError):
                # A hierarchy that refuses is passed over; the others still hold.
                folder.mkdir()
                self._folders[folder] = hierarchy
                _write(folder, hierarchy.shared_out())

    def entering(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """A command that enters the leaf before it becomes `command`, and the environment that it needs."""
        if not self._folders:
            return list(command), {}
        # The folders go through the environment, so that no path is read as shell code.
        return ["/bin/sh", "-c", _ENTER, "sh", *command], {"LEAVES": " ".join(map(str, self._folders))}

    def limit(self, memory: int, processes: int) -> None:
        """Allow what the programs that run next may use, in bytes and by number. Limits only grow: what an earlier
        program used is freed late, and below what is in use the kernel would kill the zygote."""
        # Called before each run: most find the limit large enough and write nothing.
        limits = max(memory, self._limits[0]), max(processes, self._limits[1])
        if limits == self._limits:
            return
        self._limits = limits
        for folder, hierarchy in self._folders.items():
            _write(folder, hierarchy.limits(limits[0] + _BESIDE_BYTES, limits[1] + _PROCESSES_BESIDE))

    async def remove(self) -> None:
        """Remove the leaf, once its processes have ended."""
        remaining = list(self._folders)
        with contextlib.suppress(TimeoutError):
            async with Deadline(_EMPTY_SECONDS):
                # A folder of a cgroup cannot be removed while a process is in it, and killed processes take a moment to
                # leave.
                while remaining := [folder for folder in remaining if not _removed(folder)]:
                    await asyncio.sleep(0.002)
        self._folders = {}


@functools.cache
def _ready() -> tuple[Hierarchy, ...]:
    """The hierarchies of this process, divided where need be, without the leaves of trainers that have ended."""
    # Cached for the process: divided once, and the leaves of earlier trainers are looked for once.
    try:
        hierarchies = usable(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    except (OSError, ValueError):
        return ()
    for hierarchy in hierarchies:
        remove_left_over(hierarchy.folder)
    return tuple(one for one in hierarchies if one.version == 1 or _divided(one))


def _divided(hierarchy: Hierarchy) -> bool:
    try:
        writes = hierarchy.division()
        if not writes:
            return True
        (hierarchy.folder / _INITIAL).mkdir(exist_ok=True)
        _write(hierarchy.folder, writes[:-1])  # some processes may have ended meanwhile
        return _write(hierarchy.folder, writes[-1:])
    except OSError:
        return False


def remove_left_over(folder: Path) -> None:
    """Remove leaves whose trainer, of our own process namespace, has ended. The kernel keeps those that have
    processes."""
    for path in folder.glob(f"{_prefix()}*-*-*"):
        numbers = path.name.removeprefix(_prefix()).split("-")
        # PID, start and number. A process number alone may have been given again; with its start time it is unique
        # since boot.
        if len(numbers) == 3 and all(map(str.isdigit, numbers)) and _started(int(numbers[0])) != numbers[1]:
            _removed(path)


def _prefix() -> str:
    """The beginning of leaves' names: process numbers mean something in one process namespace only."""
    return f"rlvr-{os.stat('/proc/self/ns/pid').st_ino}-"


def _started(pid: int) -> str:
    """The start of a process in ticks since boot, which tells it from a later one with its number; '' when there is
    none."""
    try:
        # Field 22 of stat, the 20th behind the name in brackets (proc(5)).
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _write(folder: Path, writes: Iterable[tuple[str, str]]) -> bool:
    """Write each text to its file; False where one was refused, which leaves the limit that there was."""
    good = True
    for name, text in writes:
        try:
            (folder / name).write_text(text)
        except OSError:
            good = False
    return good


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
