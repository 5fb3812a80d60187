"""The languages that programs can be written in here, and how each is run: Python always, others where their compiler
is."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass

from rlvr.errors import ConfigError, nearest
from rlvr.verifiers.code.runner import Job, Limits
from rlvr.verifiers.pool.sandbox import SYSTEM

COMPILING = Limits(seconds=60.0, cpu_seconds=20.0, memory_mb=1024, output_bytes=2**16, processes=32, file_mb=64)
"""Limits of the compilation of one program. The bound is processor time, which a busy machine does not change; the wall
clock, three times as much, ends a compiler that waits."""
PROGRAM = "program"
"""File name of a compiler's output."""


@dataclass(frozen=True)
class Language:
    """Commands that run programs of a language."""

    source: str
    """The name of the file that the program is written to."""
    programs: tuple[str, ...]
    """Names of the compiler or interpreter, the first that is there is taken."""
    options: tuple[str, ...] = ()
    compiled: bool = True
    after: tuple[str, ...] = ()
    """Options after the source."""

    @property
    def path(self) -> str | None:
        """Return the path of the compiler or interpreter in the folders that a sandbox can read, or None."""
        for name in self.programs:
            # Only what a sandbox can read: a compiler of conda or nix, elsewhere in PATH, could not be executed there.
            executable = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin")
            if executable and os.path.realpath(executable).startswith(SYSTEM):
                return executable
        return None


NATIVE = {
    # -O2 as contests compile; -w, since warnings would fill the reason of a failure; libm after the source, where the
    # linker looks for it.
    "c": Language("program.c", ("gcc", "cc", "clang"), ("-O2", "-w", "-o", PROGRAM), after=("-lm",)),
    # C++20 with GNU's extensions, as contests have it; compilers from before 2020 know it by this name only.
    "cpp": Language("program.cpp", ("g++", "c++", "clang++"), ("-std=gnu++2a", "-O2", "-w", "-o", PROGRAM)),
    "javascript": Language("program.js", ("node", "nodejs"), compiled=False),
}


# Looked up once: `which` reads folders, and this is asked for each job.
@functools.cache
def _installed() -> dict[str, str]:
    return {name: language.path for name, language in NATIVE.items() if language.path}


def languages() -> dict[str, str]:
    """The languages that can be run here, each with the program that compiles or interprets it."""
    return {"python": "the trainer's own", **_installed()}


def check_language(job: Job) -> None:
    """ConfigError for a job in a language that is not here, or for a call in another language than Python."""
    available = languages()
    if job.language not in available:
        lacking = NATIVE.get(job.language)
        if lacking:
            remedy = f": install {' or '.join(lacking.programs)} below /usr"
        else:
            remedy = nearest(job.language, available)
        raise ConfigError(f"programs in {job.language!r} cannot be run here{remedy}")
    if job.call is not None and job.language != "python":
        raise ConfigError(f"functions are called in python only, not in {job.language}")
