"""Verifiers that do what verifiers should not; in a module of their own, so that worker processes can import them."""

import errno
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlvr.records import Verdict, VerdictStatus
from rlvr.verifiers import Needs, Verifier


@dataclass
class InProcess(Verifier):
    """Does what the completion says, in a worker process."""

    time_limit: float = 60.0
    needs: ClassVar[Needs] = Needs(process=True)

    def verify(self, task, completion):
        match completion.split(":"):
            case ["hang"]:
                while True:
                    pass
            case ["sleep"]:
                time.sleep(1000)
            case ["raise"]:
                raise ValueError("no such answer")
            case ["nan"]:
                return float("nan")
            case ["text"]:
                return "1.0"
            case ["exit"]:
                os._exit(3)
            case ["sys.exit"]:
                raise SystemExit(3)
            case ["interrupt"]:
                raise KeyboardInterrupt
            case ["memory"]:
                return Verdict.from_score(len(bytearray(1 << 40)) > 0)
            case ["print"]:
                print("x" * 100_000)
                os.write(1, b"\x00\x00\x00\x02{}")
                return Verdict.from_score(1)
            case ["print 50 MB"]:
                os.write(1, b"first")
                for _ in range(50):
                    print("x" * 2**20, flush=True)
            case ["long reason"]:
                return Verdict(VerdictStatus.ERROR, None, reason="x" * 30_000_000)
            case ["long error"]:
                raise ValueError("x" * 30_000_000)
            case ["pid"]:
                return Verdict(VerdictStatus.CORRECT, 1.0, answer=str(os.getpid()))
            case ["odd scores"]:
                return Verdict(VerdictStatus.PARTIAL, 0.5, scores={"nested": {1, 2}})
            case ["die once", path]:
                if not Path(path).exists():
                    Path(path).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            case ["die", number]:
                os.kill(os.getpid(), int(number))
            case ["fork and die", number]:
                # The fork holds every descriptor of the worker, its socket too.
                if os.fork() == 0:
                    time.sleep(1000)
                os.kill(os.getpid(), int(number))
            case ["descriptors"]:
                inherited = []
                for name in os.listdir("/proc/self/fd"):
                    try:
                        if int(name) > 2 and os.get_inheritable(int(name)):
                            inherited.append(name)
                    except OSError:  # that of the folder, which is closed again
                        continue
                return Verdict(VerdictStatus.CORRECT, 1.0, answer=" ".join(inherited))
            case ["child", path]:
                worker, pid = os.getpid(), os.fork()
                if pid:
                    Path(f"{path}.part").write_text(f"{worker} {pid}")
                    Path(f"{path}.part").rename(path)
                time.sleep(1000)
            case ["daemon", path]:
                if os.fork() == 0:
                    os.setsid()
                    Path(f"{path}.part").write_text(str(os.getpid()))
                    Path(f"{path}.part").rename(path)
                    time.sleep(1000)
                time.sleep(1000)
        return Verdict.from_score(1, answer=completion)


@dataclass
class Leaks(Verifier):
    """Right where the completion is even, and keeps 64 MB or 100 descriptors of each call."""

    what: str = "memory"
    asynchronous: bool = False
    needs: ClassVar[Needs] = Needs(process=True)
    kept: ClassVar[list] = []

    def verify(self, task, completion):
        return self._later(completion) if self.asynchronous else self._now(completion)

    async def _later(self, completion):
        return self._now(completion)

    def _now(self, completion):
        match self.what:
            case "memory":
                self.kept.append(bytearray(64 * 2**20))
            case "descriptors":
                resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
                self.kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(100))
            case "wrapped":
                resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
                self.kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(90))
                try:
                    for opened in [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]:
                        os.close(opened)
                except OSError as error:
                    raise RuntimeError("the connection failed") from error
            case "torch":
                self.kept.append(bytearray(100 * 2**20))
                if not _fits(100 * 2**20):
                    raise RuntimeError(
                        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 104857600 bytes"
                    )
            case "swallowed":
                if not _fits(64 * 2**20):
                    return Verdict.from_score(0.0)
                self.kept.append(bytearray(64 * 2**20))
            case "swallowed at once":
                if not _fits(160 * 2**20):
                    self.kept.append(bytearray(40 * 2**20))
                    return Verdict.from_score(0.0)
                self.kept.append(bytearray(100 * 2**20))
            case "disk":
                raise OSError(errno.ENOSPC, "No space left on device")
        return Verdict.from_score(int(completion) % 2 == 0)


def _fits(count):
    try:
        return bool(bytearray(count))
    except MemoryError:
        return False


class NeedsMuch(Verifier):
    """Needs 400 MB for any answer but a short one."""

    needs: ClassVar[Needs] = Needs(process=True)

    def verify(self, task, completion):
        return Verdict.from_score(completion == "short" or bool(bytearray(400 * 2**20)))


@dataclass
class Cached(Verifier):
    """Counts its calls in a file; the same last character is the same answer."""

    path: str = ""
    needs: ClassVar[Needs] = Needs(process=True)

    def cache_key(self, task, completion):
        return task.answer, completion[-1:]

    def verify(self, task, completion):
        with open(self.path, "a") as file:
            file.write("x")
        if completion.endswith("?"):
            return Verdict.undecided("?")
        return Verdict.from_score(completion[-1:] == task.answer)


class Ranks(Verifier):
    """The longest completion of a group wins; says what its first completion tells it to."""

    needs: ClassVar[Needs] = Needs(process=True)

    def verify(self, task, completion):
        return 1.0

    def verify_group(self, task, completions):
        match completions[0]:
            case "raise":
                raise ValueError("no such group")
            case "short":
                return [1.0]
            case "dict":
                return {"a": 1.0}
            case "odd":
                return [1.0, "x", None, object()][: len(completions)]
            case "sleep":
                time.sleep(1000)
            case "exit":
                os._exit(3)
        best = max(len(c) for c in completions)
        return [Verdict.from_score(len(c) == best, answer=str(os.getpid())) for c in completions]


class AwaitsInProcess(Verifier):
    needs = Needs(process=True)

    async def verify(self, task, completion):
        return Verdict.from_score(1)


class Unpicklable(InProcess):
    def __reduce__(self):
        raise TypeError("not for sending")
