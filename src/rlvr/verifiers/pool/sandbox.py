"""The command that starts a server in a bubblewrap sandbox, for verifiers that run what a model wrote.

Inside there is no network, no environment, no process of the outside, nothing to write but a bounded folder in memory,
and nothing to read but the system's and Python's own files, this package, and the verifier's file.
"""

from __future__ import annotations

import inspect
import os
import shutil
import site
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlvr.verifiers.base import FunctionVerifier, Verifier
from rlvr.verifiers.pool.worker_process import ONE_THREAD

# Arbitrary: for temporary files of a verifier. It is memory of the host.
TMP_BYTES = 64 * 2**20
"""Bytes that fit into the sandbox's only writable folder, /tmp."""

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""Files of the system that a sandbox can read."""


def missing() -> str | None:
    """Return the reason why there can be no sandbox here, or None."""
    if shutil.which("bwrap") is None:
        return "a sandbox needs the program bwrap: install the package bubblewrap (apt install bubblewrap)"
    return None


def readable(verifier: Verifier) -> list[str]:
    """The files that a verifier is made of."""
    if isinstance(verifier, FunctionVerifier):
        owner = verifier.call.function
    else:
        owner = type(verifier)
    try:
        return [str(Path(inspect.getfile(owner)).resolve())]
    except (TypeError, OSError):  # made in a notebook: it is sent by value
        return []


def sandboxed(files: Sequence[str]) -> Callable[[list[str]], list[str]]:
    """A function that puts a command into a sandbox which can read `files`."""

    def wrap(command: list[str]) -> list[str]:
        # parents[2] is the folder of the package rlvr, parents[3] the one to import it from.
        package, source = (str(Path(__file__).resolve().parents[up]) for up in (2, 3))
        prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), package}
        reads = dict.fromkeys([*SYSTEM, *sorted(prefixes), *files])
        imports = dict.fromkeys([source, *(str(Path(file).parent) for file in files)])
        return [
            *(
                shutil.which("bwrap") or "bwrap",
                # All namespaces: no network, no process of the host. --die-with-parent: the kernel kills all of it with
                # the trainer. --new-session: no terminal to type into.
                "--unshare-all",
                "--die-with-parent",
                "--new-session",
                "--cap-drop",
                "ALL",
            ),
            *("--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"),
            *(option for path in reads if os.path.exists(path) for option in bound(path)),  # some may be below /tmp
            # The environment of the trainer may hold keys; nothing of it goes in.
            *("--remount-ro", "/", "--clearenv", "--setenv", "PYTHONPATH", os.pathsep.join(imports)),
            *(option for name, value in ONE_THREAD.items() for option in ("--setenv", name, value)),
            *command,
        ]

    return wrap


def bound(path: str) -> tuple[str, str, str]:
    """The options of bubblewrap that make a path readable inside."""
    if os.path.islink(path):
        return "--symlink", os.readlink(path), path
    return "--ro-bind", path, path
