"""The tiers of isolation: what each is made of, what it does not stop, and the command that starts its zygote."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlvr.verifiers.code.packages import PLACE, paths_of
from rlvr.verifiers.code.sandbox.inside.job_limits import STREAMS, TMP, Setting
from rlvr.verifiers.pool.sandbox import SYSTEM, bound

NOBODY = 65534
SANDBOX_MB = 64
"""Megabytes of the writable folder of a bubblewrap without namespaces inside."""

_CODE = Path(__file__).resolve().parents[1]
# Not /dev/zero: mapped as shared, it is memory that no limit counts.
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_START = """
import sys, types
code = sys.argv[1]
for name, place in (("", None), (".verifiers", None), (".verifiers.code", ""), (".verifiers.code.sandbox", "/sandbox")):
    module = sys.modules["rlvr" + name] = types.ModuleType("rlvr" + name)
    module.__path__ = [] if place is None else [code + place]
from rlvr.verifiers.code.sandbox.inside.zygote import main
main()
"""
"""Imports what runs inside without the packages around it, which need more than the standard library."""


@dataclass(frozen=True)
class Tier:
    """A way to isolate a program."""

    name: str
    bubblewrap: bool
    namespaces: bool
    landlock: bool
    seccomp: bool
    not_stopped: tuple[str, ...]
    """Escapes that the tier does not stop: names of `ESCAPES`."""
    packages: tuple[str, ...] = ()
    """Packages that programs may import beside the standard library."""

    @property
    def lasting(self) -> bool:
        """Return True if one zygote serves many jobs; else each job has its own, which separates them."""
        return self.namespaces


ESCAPES = {
    "files": "reading files of the trainer's user",
    "writes": "writing files of the trainer's user",
    "environment": "reading the environment of other processes",
    "signals": "signals to other processes",
    "network": "connections to the network and the loopback",
    "sockets": "network sockets within its own sandbox",
    "uncounted": "memory that no limit counts (memfd, System V)",
    "ptrace": "tracing processes",
    "namespaces": "namespaces of its own",
    "mount": "mounts",
    "rights": "system calls for administrators",
    "disk": "filling the disk of the temporary folder",
    "memory": "more memory than its limit",
    "processes": "more processes than its limit",
}
"""Escapes that the self-test tries (`escape_probe.py`), in words."""

# Arguments: name, bubblewrap, namespaces, landlock, seccomp, what is not stopped. `docs/code.md` says what each one
# does.
TIERS = (
    Tier("full", True, True, True, True, ()),
    Tier("bubblewrap", True, False, False, False, ("sockets", "uncounted", "ptrace", "namespaces", "disk")),
    Tier("landlock", False, False, True, True, ("disk", "processes")),
    Tier("none", False, False, False, False, tuple(name for name in ESCAPES if name != "memory")),
)
"""From the strongest to the weakest."""


def missing(tier: Tier) -> str | None:
    """Return the reason why a tier cannot be tried here, or None."""
    if sys.platform != "linux":
        return "it needs Linux"
    if tier.bubblewrap and shutil.which("bwrap") is None:
        return "the program bwrap is missing: install the package bubblewrap (apt install bubblewrap)"
    return None


def command(tier: Tier, control: int, trainer_pidfd: int, tmp: str) -> list[str]:
    """The command of a zygote; `tmp` is the writable folder of tiers without bubblewrap."""
    python = os.path.realpath(sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    hidden = packages(prefix)
    package_paths = [path for package in tier.packages for path in paths_of(package)]
    if not tier.bubblewrap:
        shown = (part for path in (*SYSTEM, prefix) for part in _without(path, hidden))
        readable = (*dict.fromkeys(shown), *_DEVICES, str(_CODE), *map(str, package_paths))
        setting = Setting(
            *(None, False, tier.landlock, tier.seccomp, tmp, readable),
            processes_beside=None,
            packages=tier.packages,
            place=str(package_paths[0].parent) if package_paths else "",
        )
        return _python(python, str(_CODE), control, trainer_pidfd, setting)
    root = os.geteuid() == 0
    # Processes of the user nobody that are not the program's: its supervisor, or without namespaces for each run those
    # of other runs, of which 64 are reckoned with.
    beside = 1 if tier.namespaces else 64
    user = NOBODY if root else None
    nobody = ("--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY))
    folder = _writable(prefix)
    setting = Setting(
        *(user, tier.namespaces, tier.landlock, tier.seccomp, folder, ("/",), _socket_bytes()),
        processes_beside=beside,
        packages=tier.packages,
        place=PLACE,
    )
    inside = str(_CODE / "sandbox" / "inside")
    streams = STREAMS if tier.namespaces else "/proc/self/fd"
    return [
        *(shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        # --as-pid-1: the zygote is process 1, so that its end kills all that is left. --new-session: no terminal, into
        # which TIOCSTI could type. Without --cap-drop a trainer that is root would keep its capabilities inside.
        *("--unshare-cgroup-try", "--as-pid-1", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"),
        # As root the zygote becomes nobody itself and gives both capabilities up; else bubblewrap makes a user
        # namespace and maps nobody.
        *(("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if root else nobody),
        # /proc of the new process namespace. --size bounds the next tmpfs; without it half of the host's memory could
        # be filled.
        *("--proc", "/proc", "--size", str(SANDBOX_MB * 2**20), "--perms", "1777", "--tmpfs", folder),
        *(option for path in (prefix, "/dev/null", "/etc/ld.so.cache") for option in _folders_to(path)),
        *(option for path in (*SYSTEM, prefix) if os.path.exists(path) for option in bound(path)),
        # An empty read-only tmpfs over each folder of packages: they may hold data sets with answers.
        *(option for path in hidden for option in ("--perms", "0755", "--tmpfs", path, "--remount-ro", path)),
        # Four harmless devices instead of the host's /dev, which has shared memory and terminals.
        *(option for path in _DEVICES for option in ("--dev-bind", path, path)),
        *(option for name, path in _streams(streams) for option in ("--symlink", path, f"/dev/{name}")),
        *_folders_to("/code/sandbox/inside"),
        *_folders_to(f"{PLACE}/package"),
        *(option for path in package_paths for option in ("--ro-bind", str(path), f"{PLACE}/{path.name}")),
        *("--symlink", folder, "/dev/shm", "--ro-bind", str(_CODE / "values.py"), "/code/values.py"),
        # Options take effect in their order: everything is mounted by now, and the root becomes read-only.
        *("--ro-bind", inside, "/code/sandbox/inside", "--remount-ro", "/", "--chdir", folder),
        *_python(python, "/code", control, trainer_pidfd, setting),
    ]


def packages(prefix: str) -> list[str]:
    """Return the folders in which packages are installed for the interpreters of this system: they may hold data sets,
    and with them answers."""
    patterns = [f"lib*/python3*/{kind}-packages" for kind in ("site", "dist")]
    folders = [path for base in (prefix, "/usr", "/usr/local") for glob in patterns for path in Path(base).glob(glob)]
    return sorted({os.path.realpath(path) for path in folders})


def _without(path: str, hidden: Sequence[str]) -> list[str]:
    """A path, or all that is below it but for what is hidden: rules of Landlock only ever allow."""
    real = os.path.realpath(path)
    if real in hidden:
        return []
    if not any(one.startswith(f"{real}/") for one in hidden):
        return [path]
    return [part for name in os.listdir(real) for part in _without(f"{real}/{name}", hidden)]


def _writable(prefix: str) -> str:
    """The one writable folder in a sandbox: /tmp, but where Python itself is there and would be hidden."""
    if f"{prefix}/".startswith(f"{TMP}/"):
        return "/scratch"
    return TMP


def _streams(folder: str) -> list[tuple[str, str]]:
    """The names below /dev of a program's standard streams, and what they are links to."""
    return [("fd", folder), *((name, f"{folder}/{fd}") for fd, name in enumerate(("stdin", "stdout", "stderr")))]


def _socket_bytes() -> int:
    """Return the bytes that the kernel buffers for one socket; they cannot be read from within a network namespace."""
    try:
        return int(Path("/proc/sys/net/core/wmem_default").read_text())
    except (OSError, ValueError):
        return Setting.socket_bytes


def _folders_to(path: str) -> list[str]:
    """The folders above a path, open to all: bubblewrap makes them for its own user only."""
    above = [str(folder) for folder in reversed(Path(path).parents)][1:]
    return [option for folder in above for option in ("--perms", "0755", "--dir", folder)]


def _python(python: str, code: str, control: int, trainer_pidfd: int, setting: Setting) -> list[str]:
    # -I and -S: no variables of the environment, no user's folder, no site packages. -B: nothing is written beside the
    # sources.
    return [python, "-I", "-S", "-B", "-c", _START, code, str(control), str(trainer_pidfd), json.dumps(asdict(setting))]
