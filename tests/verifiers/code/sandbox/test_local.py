"""The sandbox: what it runs, the limits it keeps, and its recovery. Attacks are in test_code_sandbox_attacks.py."""

import asyncio
import dataclasses
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from sandbox_tiers import usable_tier

from rlvr.errors import ConfigError
from rlvr.verifiers.code.runner import Call, Ended, Job, Limits
from rlvr.verifiers.code.sandbox import cgroups, languages, open_runner
from rlvr.verifiers.code.sandbox.escape_probe import weakness
from rlvr.verifiers.code.sandbox.local import LocalRunner
from rlvr.verifiers.code.sandbox.opening import problem_of
from rlvr.verifiers.code.sandbox.tiers import ESCAPES, TIERS
from rlvr.verifiers.code.sandbox.zygote_process import Zygote

FULL = TIERS[0]


@pytest.fixture(scope="module")
def sandbox():
    usable_tier("full")
    with asyncio.Runner() as loop:
        runner = open_runner("full", workers=2)
        yield lambda job: loop.run(runner.run(job)), lambda *job: loop.run(runner.test(*job))
        loop.run(runner.close())


@pytest.fixture
def run(sandbox):
    return sandbox[0]


def call(run, source, *args, name="f", **kwargs):
    return run(Job(source, call=Call(name, args, kwargs)))


# --- typed JSON


# --- what runs


def test_a_script_reads_its_input_and_prints(run):
    outcome = run(Job("import sys\nprint(sum(map(int, input().split())), file=sys.stdout)", stdin=b"1 2 3\n"))
    assert (outcome.ended, outcome.stdout, outcome.stderr) == (Ended.DONE, b"6\n", b"")


def test_a_large_input_and_output_pass(run):
    outcome = run(Job("import sys\nsys.stdout.write(sys.stdin.read())", stdin=b"0123456789" * 100_000))
    assert outcome.stdout == b"0123456789" * 100_000


@pytest.mark.parametrize(
    "value", [{1: (2, [3.5])}, {1, 2}, frozenset(), b"\0", 2**200, -0.0, math.inf, None, "\ud800", 1j]
)
def test_a_call_gives_back_what_it_is_given(run, value):
    outcome = call(run, "def f(x): return x", value)
    assert repr(outcome.value) == repr(value)


def test_methods_keywords_and_printing(run):
    source = "print('noise')\nclass Solution:\n    def f(self, a, b=1):\n        print('v[1]')\n        return [a, b]"
    outcome = call(run, source, 1, name="Solution.f", b=2)
    assert (outcome.ended, outcome.value, outcome.stdout) == (Ended.DONE, [1, 2], b"noise\nv[1]\n")


@pytest.mark.parametrize(
    ("source", "ended", "reason"),
    [
        ("1/0", Ended.RAISED, "ZeroDivisionError: division by zero"),
        ("x x", Ended.RAISED, "SyntaxError"),
        ("\0", Ended.RAISED, "SyntaxError|ValueError"),
        ("raise SystemExit(3)", Ended.RAISED, "exit code 3"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", Ended.RAISED, "^E$"),
        ("import sys; sys.exit()", Ended.DONE, ""),
        ("while True: pass", Ended.TIME, "0.5 s"),
        ("x = 'a' * 10**10", Ended.MEMORY, "MemoryError"),
        ("print('a' * 10**7)", Ended.OUTPUT, "1048576 bytes"),
        ("import os; os.abort()", Ended.CRASHED, "SIGABRT"),
    ],
)
def test_how_a_script_ends(run, source, ended, reason):
    import re

    outcome = run(Job(source, limits=Limits(seconds=0.5 if ended is Ended.TIME else 5)))
    assert outcome.ended is ended
    assert re.search(reason, outcome.reason)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os; os._exit(0)", "without an answer"),
        ("raise SystemExit", "SystemExit"),
        ("def f(): raise SystemExit", "SystemExit"),
        ("def g(): pass", "NameError"),
        ("f = 3", "TypeError"),
        ("def f(): return object()", "not a plain value: object"),
        ("def f(): return lambda: 1", "not a plain value: function"),
        ("def f():\n    x = []\n    x.append(x)\n    return x", "nested too deeply"),
    ],
)
def test_a_call_without_a_value_is_no_success(run, source, reason):
    outcome = call(run, source)
    assert outcome.ended is Ended.RAISED
    assert outcome.value is None
    assert reason in outcome.reason


def test_a_test_reaches_its_candidate_through_the_trainer(sandbox):
    test = "assert f(3) == 4\nassert f(*[1]) == 2\ntry:\n    f('x')\nexcept TypeError:\n    print('raised')"
    outcome = sandbox[1](Job(test), Job("def f(x): return x + 1"), "f", "secret")
    assert (outcome.ended, outcome.value, outcome.stdout) == (Ended.DONE, "secret", b"raised\n")


@pytest.mark.parametrize(
    ("candidate", "ended"),
    [
        ("def f(x): return x", Ended.RAISED),
        ("def f(x):\n    import os\n    os._exit(0)", Ended.RAISED),
        ("def f(x):\n    while True: pass", Ended.TIME),
        ("import os; os._exit(0)", Ended.RAISED),
        ("x x", Ended.RAISED),
        ("def g(): pass", Ended.RAISED),
        ("def f(x): raise SystemExit", Ended.RAISED),
        ("def f(x):\n    return type('R', (int,), {'__eq__': lambda *a: True})()", Ended.RAISED),
        (
            "import gc, sys\ndef f(x):\n    return [o for o in gc.get_objects() if type(o) is str and 'secret' in o]",
            Ended.RAISED,
        ),
        ("import os\ndef f(x):\n    os.write(3, b'\\0\\0\\0\\x09v\"secret\"')\n    return 4", Ended.RAISED),
    ],
)
def test_a_candidate_that_fails_or_cheats_gets_no_token(sandbox, candidate, ended):
    test = Job("r = f(3)\nassert type(r) is int and r == 4, r\nassert f(5) == 6", limits=Limits(seconds=1))
    outcome = sandbox[1](test, Job(candidate), "f", "secret")
    assert outcome.ended is ended
    assert outcome.value is None


LANGUAGES = {
    "c": ('#include <stdio.h>\nint main(){int a;scanf("%d",&a);printf("%d\\n",a*2);return 0;}', "int main(){"),
    "cpp": ("#include <iostream>\nint main(){int a;std::cin>>a;std::cout<<a*2<<std::endl;}", "int main(){"),
    "javascript": ('console.log(require("fs").readFileSync(0,"utf8")*2)', "let let"),
}


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_other_languages(run, language):
    if language not in languages():
        pytest.skip(f"nothing here runs {language}")
    right, wrong = LANGUAGES[language]
    limits = Limits(seconds=10)
    assert [run(Job(right, language, stdin=b"%d" % n, limits=limits)).stdout for n in (4, 5)] == [b"8\n", b"10\n"]
    assert run(Job(wrong, language, limits=limits)).ended is Ended.RAISED


def test_what_cannot_be_run_is_said(run):
    with pytest.raises(ConfigError, match="cannot be run here"):
        run(Job("", "cobol"))
    with pytest.raises(ConfigError, match="in python only"):
        run(Job("", "c", call=Call("f")))


@pytest.mark.gate
def test_processor_time_has_a_limit_of_its_own(run):
    """A compiler is limited by it: on a busy machine the wall clock would refuse a program that compiles."""
    limits = Limits(seconds=20.0, cpu_seconds=1.0)
    waits = run(Job("import time; time.sleep(2); print(1)", limits=limits))
    assert (waits.ended, waits.stdout) == (Ended.DONE, b"1\n")
    computes = run(Job("while True: pass", limits=limits))
    assert computes.ended is Ended.TIME and "processor time" in computes.reason


# --- tiers


def test_lower_tiers_need_unsafe_and_say_what_they_do_not_stop():
    for tier in TIERS[1:]:
        with pytest.raises(ConfigError, match=rf"unsafe: true.*{tier.name} does not stop"):
            open_runner(tier.name)
    with pytest.raises(ConfigError, match="did you mean 'full'"):
        open_runner("ful")


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_each_tier_stops_what_it_does_not_list(tier):
    if tier.bubblewrap and problem_of(tier) is not None:
        pytest.skip(problem_of(tier))
    assert asyncio.run(weakness(tier)) is None
    assert set(tier.not_stopped) <= set(ESCAPES)


@pytest.mark.parametrize("tier", TIERS[1:], ids=lambda tier: tier.name)
def test_the_self_test_finds_what_a_lower_tier_lets_through(tier, monkeypatch):
    """Without cgroups, which limit processes in every tier."""
    monkeypatch.setattr(cgroups, "_ready", tuple)
    problem = asyncio.run(weakness(dataclasses.replace(tier, not_stopped=())))
    assert problem is not None
    got = set(problem.partition("through: ")[2].split(", "))
    assert got <= set(tier.not_stopped)
    assert got == set(tier.not_stopped) or tier.name == "none"  # what the last lets through depends on the user


# --- recovery


def below(pid: int) -> set[int]:
    """The processes that descend from one."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    result, new = set(), {pid}
    while new := {child for child, parent in parents.items() if parent in new} - result:
        result |= new
    return result


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def test_a_killed_zygote_costs_no_verdict_and_nothing_is_left():
    usable_tier("full")
    before, descriptors = below(os.getpid()), set(os.listdir("/proc/self/fd"))

    async def scene():
        runner = LocalRunner(FULL, workers=1)
        assert (await runner.run(Job("print(1)"))).ended is Ended.DONE
        started = set()

        def all_started():
            started.clear()
            started.update(below(os.getpid()) - before)
            return len(started) == 3

        until(all_started)  # bubblewrap, the zygote, the supervisor that waits
        _, zygote, _ = sorted(started)
        running = asyncio.ensure_future(runner.run(Job("import time; time.sleep(0.5); print(2)")))
        await asyncio.sleep(0.25)
        os.kill(zygote, signal.SIGKILL)
        assert (await running).stdout == b"2\n"
        cancelled = asyncio.ensure_future(runner.run(Job("while True: pass", limits=Limits(seconds=60))))
        await asyncio.sleep(0.25)
        cancelled.cancel()
        assert (await runner.run(Job("print(3)"))).stdout == b"3\n"
        last = asyncio.ensure_future(runner.run(Job("while True: pass", limits=Limits(seconds=60))))
        await asyncio.sleep(0.25)
        await runner.close()
        assert (await last).ended is Ended.BROKEN

    asyncio.run(scene())
    until(lambda: below(os.getpid()) <= before)
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_a_waiting_supervisor_that_dies_is_replaced():
    usable_tier("full")
    before = below(os.getpid())

    async def scene():
        runner = LocalRunner(FULL, workers=1)
        for _ in range(3):
            assert (await runner.run(Job("print(1)"))).stdout == b"1\n"
            until(lambda: len(below(os.getpid()) - before) == 3)
            *_, waiting = sorted(below(os.getpid()) - before)
            os.kill(waiting, signal.SIGKILL)
            until(lambda gone=waiting: gone not in below(os.getpid()))
        await runner.close()

    asyncio.run(scene())


def test_everything_ends_with_the_trainer():
    usable_tier("full")
    code = """
import asyncio
from rlvr.verifiers.code.runner import Job, Limits
from rlvr.verifiers.code.sandbox.local import LocalRunner
from rlvr.verifiers.code.sandbox.tiers import TIERS
async def main():
    runner = LocalRunner(TIERS[0], workers=2)
    job = Job("while True: pass", limits=Limits(seconds=100))
    await asyncio.gather(runner.run(job), runner.run(job))
asyncio.run(main())
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: len(below(trainer.pid)) >= 10, 60)  # twice bubblewrap, zygote, program and two supervisors
        started = below(trainer.pid)
    finally:
        trainer.kill()
        trainer.wait(10)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


@pytest.mark.slow
def test_after_5000_runs_nothing_is_left():
    before, descriptors = below(os.getpid()), len(os.listdir("/proc/self/fd"))

    async def scene():
        runner = LocalRunner(FULL, workers=2)
        for _ in range(50):
            outcomes = await asyncio.gather(*(runner.run(Job(f"print({i})")) for i in range(100)))
            assert [o.stdout for o in outcomes] == [b"%d\n" % i for i in range(100)]
        until(lambda: len(below(os.getpid()) - before) == 6)
        await runner.close()

    asyncio.run(scene())
    until(lambda: below(os.getpid()) <= before)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


# --- a sandbox that is just starting


def left_behind(before):
    """Processes, folders and leaves of cgroups that were made since `before`, which is what this gave then."""
    children = {
        int(child) for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    }
    folders = set(Path(tempfile.gettempdir()).glob("rlvr-code-*"))
    leaves = {leaf for one in cgroups._ready() for leaf in one.folder.glob(f"rlvr-*-{os.getpid()}-*")}
    return (children | folders | leaves) - before


@pytest.mark.parametrize("name", ["full", "none"])
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_a_start_that_is_cancelled_leaves_nothing(name, delay):
    tier = usable_tier(name)
    before = left_behind(set())

    async def cancelled():
        start = asyncio.ensure_future(Zygote.start(tier))
        await asyncio.sleep(delay)
        start.cancel()
        (result,) = await asyncio.gather(start, return_exceptions=True)
        if isinstance(result, Zygote):  # it was quicker
            await result.close()
        return left_behind(before)

    assert not asyncio.run(cancelled())


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_close_ends_a_sandbox_that_is_just_starting(delay):
    runner = LocalRunner(usable_tier("full"), 1)
    before = left_behind(set())

    async def closed():
        job = asyncio.ensure_future(runner.run(Job("print(1)")))
        await asyncio.sleep(delay)
        await runner.close()
        left = left_behind(before)
        return left, (await asyncio.wait_for(job, 30)).ended

    assert asyncio.run(closed()) == (set(), Ended.BROKEN)
