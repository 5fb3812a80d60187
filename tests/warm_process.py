"""Processes that begin where the imports end: forked from a server that has imported the library, with torch and
transformers, once. These imports are most of what a short run takes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rlvr.trainer", "rlvr.train", "peft"])


class WarmProcess:
    """`python *arguments` in this environment, with its two streams in one text: as much of `subprocess.Popen` as
    tests of ranks need. Functions registered with atexit run, but the interpreter is not torn down."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str]):
        self._output = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  (as long as the process)
        self._process = CONTEXT.Process(target=_run, args=(arguments, environment, self._output.name))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, -N where signal N ended it, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        self._output.seek(0)
        return self._output.read(), None

    def kill(self) -> None:
        self._process.kill()


def _run(arguments: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    """What `python *arguments` does, in a process of the server."""
    stream = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        # multiprocessing leaves by os._exit.
        atexit._run_exitfuncs()
