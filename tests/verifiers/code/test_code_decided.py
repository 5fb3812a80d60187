"""Whatever a program does once it runs, its outcome is decided: it never escapes a 0 by breaking its own sandbox."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path

import pytest
from sandbox_tiers import KNOWN, usable_tier

from rlvr.core.process.framing import Link
from rlvr.verifiers.code import values
from rlvr.verifiers.code.runner import Call, Ended, Job, Limits, Outcome
from rlvr.verifiers.code.sandbox import execution, tiers
from rlvr.verifiers.code.sandbox.local import LocalRunner
from rlvr.verifiers.code.sandbox.zygote_process import SandboxError, Zygote

LIMITS = Limits(seconds=0.6, memory_mb=128, processes=16)

HELPERS = """
import os, signal, socket, struct, sys, threading, time
def attempt(f, *args):
    try:
        f(*args)
    except BaseException:
        pass
def parent(pid):
    with open(f'/proc/{pid}/stat') as file:
        return int(file.read().rpartition(')')[2].split()[1])
def above():
    try:
        return [os.getppid(), parent(os.getppid())]
    except OSError:
        return [os.getppid()]
def frame(body):
    return struct.pack('!I', len(body)) + body
"""
SEEN = {
    # kill(-1) and numbers that were not looked up are for tiers in which the host's processes cannot be reached
    "full": "[1, -1, 0, *above(), *range(2, 8)]",
    "bubblewrap": "[1, -1, 0, *above(), *range(2, 8)]",
    "landlock": "above()",
    "none": "above()",
}


def action(rng: random.Random, tier: str) -> str:
    """One line of a hostile program."""
    number = rng.choice([2, 2, 2, 1, 3, 9, 13, 15, 17, 18, 19, 20, rng.randint(1, 64)])
    lowest = -1 if tier in ("full", "bubblewrap") else 2
    signals = f"[attempt(os.kill, pid, {number}) for pid in {SEEN[tier]} if pid != os.getpid() and pid >= {lowest}]"
    garbage = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
    letter = rng.choice([b"v", b"r", b"c", b"l", b"", b"z"])
    body = letter + rng.choice([b"", b"null", b"[", garbage, b'["a","b","StopIteration"]', b'{"int":"0x7"}'])
    return rng.choice([
        signals,
        f"threading.Thread(target=lambda: [time.sleep(0.01) or {signals} for _ in range(99)], daemon=True).start()",
        f"os.fork() or [{signals} and time.sleep(0.001) for _ in range(9999)]",
        f"attempt(os.write, 3, {garbage!r})",
        f"attempt(os.write, 3, frame({body!r}))",
        f"[attempt(os.write, 3, frame({body!r}) * 999) for _ in range(99)]",
        "attempt(os.write, 3, struct.pack('!I', 2**32 - 1))",
        f"attempt(os.close, {rng.randrange(5)})",
        "attempt(os.closerange, 0, 99)",
        "attempt(socket.socket(fileno=3).shutdown, 2)",
        f"attempt(os.write, {rng.randrange(1, 3)}, b'x' * {rng.choice([1, 10**5, 2 * 10**6])})",
        "attempt(os.setsid)",
        f"time.sleep({rng.random() / 20})",
        f"os._exit({rng.choice([0, 1, 77])})",
        "os.kill(os.getpid(), 19)",
        "os.abort()",
        "1 / 0",
        "os.execv('/bin/true', ['true'])",
    ])  # fmt: skip


def hostile(seed: int, tier: str) -> str:
    """A program of random actions, at its load or in its function, that has no right answer."""
    rng = random.Random(seed)
    top = [action(rng, tier) for _ in range(rng.randrange(3))]
    inner = [action(rng, tier) for _ in range(rng.randrange(1, 5))]
    lines = [HELPERS, *top, "def f(x):", *(f"    {line}" for line in inner), "    return 'wrong'"]
    return "\n".join([*lines, "if __name__ == '__main__': f(1)"])


def outcomes(tier, programs):
    """How each program ends as a script, as a call and as the candidate of a test."""

    async def scene():
        runner = LocalRunner(KNOWN[tier], workers=2)

        async def one(source):
            script = await runner.run(Job(source, limits=LIMITS))
            call = await runner.run(Job(source, call=Call("f", (1,)), limits=LIMITS))
            test = Job("for _ in range(3):\n    assert f(1) == 'right'", limits=LIMITS)
            return script, call, await runner.test(test, Job(source, limits=LIMITS), "f", "token")

        try:
            return await asyncio.gather(*map(one, programs))
        finally:
            await runner.close()

    return asyncio.run(scene())


def assert_decided(tier, programs):
    for source, ended in zip(programs, outcomes(tier, programs), strict=True):
        for outcome in ended:
            assert outcome.ended is not Ended.BROKEN, (outcome, source)
            assert "right" not in str(outcome.value)
            assert outcome.value != "token"


@pytest.fixture
def short_grace(monkeypatch):
    """A supervisor that a program has stopped is given up soon."""
    monkeypatch.setattr(execution, "GRACE_SECONDS", 1.5)


@pytest.fixture
def without_signal_scope(monkeypatch, tmp_path):
    """The sandbox as on Linux before 6.12, where Landlock does not keep signals within a program's own processes."""
    code = tmp_path / "code"
    shutil.copytree(Path(tiers.__file__).parents[1], code, ignore=shutil.ignore_patterns("__pycache__"))
    place = code / "sandbox" / "inside" / "landlock.py"
    text = place.read_text()
    assert "return max(0, call(" in text
    place.write_text(text.replace("return max(0, call(", "return min(3, call("))
    monkeypatch.setattr(tiers, "_CODE", code)


ALL_SIGNALS = """
for number in range(1, 65):
    for pid in {seen}:
        if pid != os.getpid() and number not in (9, 19): attempt(os.kill, pid, number)
for pid in {seen}:
    if pid > 0 and pid != os.getpid(): attempt(os.kill, pid, {last})
time.sleep(0.1)
def f(x): return 'wrong'
"""


@pytest.mark.parametrize("tier", ["full", "bubblewrap"])
def test_no_signal_makes_an_outcome_undecided(tier, without_signal_scope, short_grace):
    """Every signal to every process that the program sees, then its parent killed, stopped or interrupted."""
    usable_tier(tier)
    seen = "[os.getppid(), 1, *range(3, 8)]"
    assert_decided(tier, [HELPERS + ALL_SIGNALS.format(seen=seen, last=last) for last in (9, 19, 2)])


@pytest.mark.gate
@pytest.mark.parametrize("scope", ["scope", pytest.param("no scope", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tier", ["full", "bubblewrap", "landlock", "none"])
def test_no_program_makes_its_outcome_undecided(tier, scope, short_grace, request):
    usable_tier(tier)
    if scope == "no scope":
        if tier not in ("full", "bubblewrap"):
            pytest.skip("without the scope this tier is refused, or it has none anyway")
        request.getfixturevalue("without_signal_scope")
    seeds = range(20 if tier == "full" else 8)
    assert_decided(tier, [hostile(1000 * len(tier) + seed, tier) for seed in seeds])


HEADS = [
    {"how": "exit", "why": "0", "seconds": 10**400, "stdout": 0},
    {"how": "exit", "why": "0", "seconds": float("nan"), "stdout": 0},
    {"how": [], "why": {}, "seconds": None, "stdout": 0},
    {"how": "exit", "why": "x" * 10**4, "seconds": 0.0, "stdout": float("inf")},
    {"how": "broken", "why": "KeyboardInterrupt", "seconds": 0.0, "stdout": 0},
    {"how": "exit"},
    [],
    7,
]


@pytest.mark.gate
@pytest.mark.parametrize("started", [True, False])
def test_no_last_words_of_a_supervisor_are_an_error_of_the_trainers(monkeypatch, started):
    """Where a program can write as its supervisor, nonsense is a failure; before it ran it is the sandbox's own
    trouble."""
    usable_tier("full")
    if not started:
        monkeypatch.setattr(execution, "STARTED", b"never")
    for head in HEADS:
        said = json.dumps(head).encode() + b"\n"

        async def words(link, most, said=said):
            if most == values.MAX_SIZE + 1:
                raise EOFError  # the program's own channel, on which a script says nothing
            return said

        async def scene():
            runner = LocalRunner(KNOWN["full"], workers=1)
            try:
                return await runner.run(Job("print(1)", limits=LIMITS))
            finally:
                await runner.close()

        with monkeypatch.context() as patch:
            patch.setattr(Link, "receive", words)
            ended = asyncio.run(scene())
        broken = isinstance(head, dict) and head.get("how") == "broken"
        assert (ended.ended is Ended.BROKEN) == (broken and not started), (head, ended)
        assert len(ended.reason) <= 1000


def test_a_sandbox_that_ends_twice_under_a_program_is_ended_by_it(monkeypatch):
    """A failure before a program starts is tried again and undecided; after it started, tried again and decided."""

    async def scene(started):
        runner, tried = LocalRunner(KNOWN["none"], workers=1), []

        async def fails(zygote):
            tried.append(zygote)
            raise SandboxError("it ended", started)

        class Stub:
            alive = True

            async def close(self):
                pass

        async def start(tier):
            return Stub()

        monkeypatch.setattr(Zygote, "start", start)
        return (await runner._with_retry(fails)).ended, len(tried)

    assert asyncio.run(scene(True)) == (Ended.CRASHED, 2)
    assert asyncio.run(scene(False)) == (Ended.BROKEN, 2)


def test_a_compilation_that_raised_is_tried_again(monkeypatch):
    """It raised for a reason of the sandbox's own, such as a lack of file descriptors."""
    runner, results = LocalRunner(KNOWN["none"], workers=1), [OSError("too many open files"), Outcome(Ended.DONE)]

    async def compiling(language, source):
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def twice():
        with pytest.raises(OSError, match="too many open files"):
            await runner._compile("cpp", b"int main() {}")
        return [await runner._compile("cpp", b"int main() {}") for _ in range(2)]

    monkeypatch.setattr(runner, "_compiling", compiling)
    assert [outcome.ended for outcome in asyncio.run(twice())] == [Ended.DONE] * 2
