import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hostile_verifiers import AwaitsInProcess, InProcess, Leaks, NeedsMuch, Unpicklable

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers import CombineVerifier, FunctionVerifier, Verifier, VerifierPool, as_verifier, json_schema, judged
from rlvr.verifiers.math import math_verifier, symbolic
from rlvr.verifiers.pool import Verification, worker_process
from rlvr.verifiers.puzzles import gym

TASK = Task("t1", "2+2?", "4", info={"tests": ["a"]})
BOUND = 60  # seconds: generous, since the machine is shared


def run(pool, verifier, completion, task=TASK):
    return pool.verify_many(verifier, [(task, completion)])[0]


def gone(pid):
    """Whether the process is gone, waiting a little for it; a zombie of another parent counts as gone."""
    for _ in range(BOUND * 20):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def below(pid="self"):
    """The processes below one, on any thread, zombies too."""
    result = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
                result |= {int(child) for child in (task / "children").read_text().split()}
    return result.union(*(below(child) for child in result))


def wait_until(condition):
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("completion", "status", "score", "reason"),
    [
        ("good", "correct", 1, ""),
        ("raise", "error", None, "ValueError: no such answer"),
        ("nan", "error", None, "nan"),
        ("text", "error", None, "returned str"),
        ("exit", "error", None, "ended with code 3"),
        ("sys.exit", "error", None, "SystemExit"),
        ("interrupt", "error", None, "KeyboardInterrupt"),
        ("memory", "error", 0, "the answer needs more memory"),
        ("odd scores", "error", None, "set"),
        ("print", "correct", 1, ""),
    ],
)
def test_whatever_a_verifier_does_in_a_worker_is_one_verdict(pool, completion, status, score, reason):
    assert run(pool, InProcess(), "good").score == 1  # where memory is enough for no answer, it is the verifier's fault
    verdict = run(pool, InProcess(), completion)
    assert (verdict.status, verdict.score) == (status, score), verdict
    assert reason in verdict.reason
    assert run(pool, InProcess(), "good").score == 1


@pytest.mark.parametrize("completion", ["long reason", "long error"])
def test_what_a_verifier_says_is_cut_before_it_crosses(pool, completion):
    """Thirty megabytes of a reason or an exception: head, tail and a count of what is left out."""
    for verifier in (InProcess(), as_verifier(lambda completion: InProcess().verify(TASK, completion))):
        verdict = run(pool, verifier, completion)
        assert verdict.status == "error"
        assert len(verdict.reason) <= 4096
        assert verdict.reason.endswith("x" * 1000)
        assert "characters are left out" in verdict.reason


@pytest.mark.gate
@pytest.mark.parametrize(
    "leaky",
    [
        Leaks(),
        Leaks(asynchronous=True),
        Leaks("descriptors"),
        Leaks("wrapped"),
        pytest.param(Leaks("torch"), marks=pytest.mark.slow),
        Leaks("swallowed"),
        pytest.param(Leaks("swallowed at once"), marks=pytest.mark.slow),
    ],
)
def test_a_verifier_that_leaks_costs_its_worker_and_no_answer(leaky, caplog):
    """64 MB a call of 256, and 100 descriptors a call of 256: every answer has its right score, and the log says why,
    also where the verifier makes an error or a score of its own of it."""
    with VerifierPool(workers=1, memory_mb=256) as pool:
        verdicts = pool.verify_many(leaky, [(TASK, str(number)) for number in range(24)])
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0] * 12
    (output,) = [record.getMessage() for record in caplog.records]
    assert "'Leaks' ran out of a resource" in output
    assert "verification.memory_mb=256" in output


def test_a_verifier_that_never_has_enough_memory_scores_no_answer(caplog):
    """It needs more than memory_mb for any answer: the reward says nothing of the answers, and the user is shown
    why."""
    with VerifierPool(workers=1, memory_mb=256) as pool:
        verdicts = pool.verify_many(NeedsMuch(), [(TASK, str(number)) for number in range(4)])
        assert [verdict.score for verdict in verdicts] == [None] * 4
        assert all("verification.memory_mb=256 may be too little" in verdict.reason for verdict in verdicts)
        assert all("bytearray(400" in verdict.traceback for verdict in verdicts)
        assert run(pool, NeedsMuch(), "short").score == 1
        assert run(pool, NeedsMuch(), "1").score == 0  # now it is the answer that needs more than others
    (output,) = [record.getMessage() for record in caplog.records]
    assert "scores 0 if another answer did not, and is undecided otherwise" in output


def test_a_disk_that_is_full_is_not_the_answers_fault(caplog):
    with VerifierPool(workers=1) as pool:
        verdict = run(pool, Leaks("disk"), "2")
    assert verdict.score is None
    assert "No space left on device" in verdict.reason


def test_what_verifiers_print_does_not_fill_the_log(capfd):
    """100 MB in two calls reach the screen as 64 kB and one line, and the calls are not held up."""
    with VerifierPool(workers=2) as pool:
        verdicts = pool.verify_many(InProcess(), [(TASK, "print 50 MB")] * 2)
        assert [verdict.score for verdict in verdicts] == [1, 1]
    deadline = time.monotonic() + 10
    output = ""
    while "more is left out" not in output and time.monotonic() < deadline:
        output += capfd.readouterr().err
        time.sleep(0.01)
    assert 2**16 <= len(output) < 2**16 + 200
    assert output.count("more is left out") == 1


PRINTS = """
import os, sys
sys.path.insert(0, {folder!r})
from hostile_verifiers import InProcess
from rlvr.records import Task
from rlvr.verifiers import VerifierPool
out = os.dup(1)
reads, writes = os.pipe()
os.dup2(writes, 2)
with VerifierPool(workers=2) as pool:
    verdicts = pool.verify_many(InProcess(time_limit=10.0), [(Task("t", "p"), "print 50 MB")] * 2)
os.write(out, str([verdict.score for verdict in verdicts]).encode())
"""


def test_a_standard_error_that_nobody_reads_holds_up_no_verifier():
    script = PRINTS.format(folder=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=BOUND, check=True)
    assert done.stdout == b"[1.0, 1.0]"


@pytest.mark.parametrize("completion", ["hang", "sleep"])
def test_a_hang_in_a_worker_is_the_answers_fault(pool, completion):
    start = time.perf_counter()
    verdict = run(pool, InProcess(time_limit=1.0), completion)
    assert (verdict.status, verdict.score) == (VerdictStatus.TIMEOUT, 0.0)
    assert 0.9 < verdict.seconds < BOUND
    assert time.perf_counter() - start < BOUND
    assert run(pool, InProcess(), "good").score == 1


def test_the_wait_for_a_free_worker_is_not_the_answers(pool):
    verdicts = pool.verify_many(
        InProcess(time_limit=1.5), [(TASK, c) for c in ["sleep", "sleep", "sleep", "sleep", "good"]]
    )
    assert [v.score for v in verdicts] == [0, 0, 0, 0, 1]


def test_a_worker_is_used_again_and_a_worker_killed_between_jobs_costs_nothing():
    with VerifierPool(workers=1) as pool:
        pid = run(pool, InProcess(), "pid").answer
        assert run(pool, InProcess(), "pid").answer == pid
        os.kill(int(pid), signal.SIGKILL)
        verdict = run(pool, InProcess(), "pid")
        assert verdict.score == 1
        assert verdict.answer != pid


def test_a_worker_killed_from_outside_is_tried_again_then_undecided(pool, tmp_path):
    assert run(pool, InProcess(), f"die once:{tmp_path / 'died'}").score == 1
    verdict = run(pool, InProcess(), f"die:{signal.SIGKILL}")
    assert (verdict.status, verdict.score) == (VerdictStatus.ERROR, None)
    assert "died twice" in verdict.reason
    assert run(pool, InProcess(), "good").score == 1


def test_a_killed_worker_is_seen_at_once_though_a_process_that_it_forked_holds_its_socket(pool):
    verdict = run(pool, InProcess(time_limit=30.0), f"fork and die:{signal.SIGKILL}")
    assert (verdict.status, verdict.score) == (VerdictStatus.ERROR, None)
    assert "died twice" in verdict.reason
    verdict = run(pool, InProcess(time_limit=30.0), f"fork and die:{signal.SIGSEGV}")
    assert (verdict.status, verdict.score) == (VerdictStatus.ERROR, 0.0)


def test_where_the_system_refuses_pidfds_the_socket_alone_tells_the_end(tmp_path, monkeypatch):
    """An old kernel or a filter of system calls; every process of the pool reads this module at its start."""
    refusal = "import os\n\n\ndef refuse(*_):\n    raise PermissionError(1, 'refused')\n\n\nos.pidfd_open = refuse\n"
    (tmp_path / "sitecustomize.py").write_text(refusal, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # which the pool hands on
    with VerifierPool(workers=1) as pool:
        assert run(pool, InProcess(), "good").score == 1
        verdict = run(pool, InProcess(), f"die:{signal.SIGKILL}")
        assert (verdict.status, verdict.score) == (VerdictStatus.ERROR, None)


def test_no_descriptor_of_a_worker_is_inherited_by_what_its_verifier_starts(pool):
    assert run(pool, InProcess(), "descriptors").answer == ""


def test_an_answer_that_crashes_its_worker_twice_scores_0(pool):
    verdict = run(pool, InProcess(), f"die:{signal.SIGSEGV}")
    assert (verdict.status, verdict.score) == (VerdictStatus.ERROR, 0.0)
    assert "SIGSEGV" in verdict.reason


@pytest.mark.parametrize("kills", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_kills_leave_no_process_and_no_file_descriptor(kills):
    with VerifierPool(workers=4) as pool:
        assert run(pool, InProcess(), "good").score == 1

        def left():
            return len(below()), len(os.listdir("/proc/self/fd"))

        before = left()
        verdicts = pool.verify_many(InProcess(time_limit=0.02), [(TASK, "sleep")] * kills)
        assert {(v.status, v.score) for v in verdicts} == {(VerdictStatus.TIMEOUT, 0.0)}
        pool.verify_many(InProcess(), [(TASK, "good")] * 4)
        wait_until(
            # 4 warm workers with a socket, a pipe and a pidfd each; the late one's template
            lambda: left() <= (before[0] + 4 + 1, before[1] + 3 * 4 + 1)
        )
        zombies = [p for p in below() if ") Z " in Path(f"/proc/{p}/stat").read_text()]
        assert not zombies


def test_hostile_answers_among_ordinary_ones():
    with VerifierPool(workers=2) as pool:
        pool.verify_many(InProcess(time_limit=0.2), [(TASK, "good")] * 2)
        answers = ["good"] * 100
        answers[::10] = ["sleep", "hang"] * 5
        verdicts = pool.verify_many(InProcess(time_limit=0.2), [(TASK, a) for a in answers])
        assert [v.score for v in verdicts] == [float(a == "good") for a in answers]


def test_the_server_may_be_killed():
    others = below()  # of earlier tests of this process, which may use them yet
    with VerifierPool(workers=1) as pool:
        assert run(pool, InProcess(), "good").score == 1
        killed = below() - others
        assert killed
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert run(pool, InProcess(), "good").score == 1


def test_what_a_verifier_detaches_dies_with_its_worker(pool, tmp_path):
    run(pool, InProcess(time_limit=1.0), f"daemon:{tmp_path / 'pid'}")
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_pool_that_is_closed_while_its_server_starts_ends_at_once():
    """The server is stopped before its imports are done, so that its first answer never comes."""
    pool = VerifierPool(workers=1)
    thread = threading.Thread(target=run, args=[pool, InProcess(), "good"])
    thread.start()
    wait_until(lambda: pool._worker_groups._servers)
    (server,) = pool._worker_groups._servers.values()
    os.kill(server.process.pid, signal.SIGSTOP)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < worker_process.START_SECONDS / 2
    thread.join(BOUND)
    assert not thread.is_alive() and server.process.returncode is not None


@pytest.mark.parametrize("kind", ["child", "daemon"])
@pytest.mark.parametrize("killed", ["server", "template"])
def test_what_a_verifier_started_ends_though_what_would_end_it_is_killed(tmp_path, killed, kind):
    """A process of the worker's group, and one with a session of its own."""
    path = tmp_path / "pids"
    with VerifierPool(workers=1) as pool:
        thread = threading.Thread(target=run, args=[pool, InProcess(), f"{kind}:{path}"])
        thread.start()
        wait_until(path.exists)
        started = int(path.read_text().split()[-1])
        (server,) = pool._worker_groups._servers.values()
        if killed == "server":
            os.kill(server.process.pid, signal.SIGKILL)
        else:
            (template,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
            os.kill(int(template), signal.SIGKILL)
        assert gone(started)  # while the pool goes on: the answer is tried once more
    thread.join(BOUND)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("os._exit(7)", "ended with code 7"),
        ("os.kill(os.getpid(), 11)", "ended with code -11"),
        ("time.sleep(1000)", "did not load within"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_a_verifier_that_cannot_be_loaded_costs_its_verdicts_only(pool, tmp_path, monkeypatch, line, reason):
    monkeypatch.setattr("rlvr.verifiers.pool.worker_process.START_SECONDS", 1.5)
    file = tmp_path / "bad.py"
    file.write_text(
        f"import os, time\nfrom rlvr.verifiers import Needs, Verifier\nif os.getpid() != {os.getpid()}:\n    {line}\n"
        "class Bad(Verifier):\n    needs = Needs(process=True)\n    def verify(self, task, completion):\n        "
        "return 1.0\n"
    )
    bad = as_verifier(f"{file}:Bad")
    verdicts = pool.verify_many(bad, [(TASK, "x")] * 8)
    assert {v.score for v in verdicts} == {None}
    assert all(reason in v.reason for v in verdicts), verdicts
    assert run(pool, InProcess(), "good").score == 1


def test_a_verifier_that_starts_threads_is_not_forked(pool, tmp_path):
    file = tmp_path / "threaded.py"
    file.write_text(
        "import os, threading\nfrom rlvr.records import Verdict\nfrom rlvr.verifiers import Needs, Verifier\n"
        "class Threaded(Verifier):\n    needs = Needs(process=True)\n"
        "    def prepare(self):\n        threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "    def verify(self, task, completion):\n"
        "        return Verdict.from_score(threading.active_count() - 1, answer=str(os.getpid()))\n"
    )
    verdicts = pool.verify_many(as_verifier(f"{file}:Threaded"), [(TASK, "x")] * 8)
    assert [v.score for v in verdicts] == [1] * 8


def test_an_async_verifier_works_in_a_worker(pool):
    assert run(pool, AwaitsInProcess(), "x").score == 1


def test_a_task_that_cannot_be_sent_costs_its_verdict(pool):
    verdict = run(pool, InProcess(), "good", Task("t", "p", info={"f": lambda: 0}))
    assert verdict.score is None
    assert "pickle" in verdict.reason.lower()


def test_a_verifier_that_cannot_be_sent_runs_on_a_thread(pool):
    with pytest.warns(UserWarning, match="Unpicklable"):
        verdict = run(pool, Unpicklable(), "pid")
    assert verdict.answer == str(os.getpid())


def test_a_verifier_from_a_file_runs_in_a_worker(pool, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
        import os
        from rlvr.verifiers import Needs, Verifier
        from rlvr.records import Verdict

        class Mine(Verifier):
            needs = Needs(process=True)
            def verify(self, task, completion):
                return Verdict.from_score(1, answer=str(os.getpid()))
        """)
    )
    verdict = run(pool, as_verifier(f"{file}:Mine"), "x")
    assert verdict.score == 1
    assert verdict.answer != str(os.getpid())


# functions: on threads and on the loop


def test_functions_receive_what_they_ask_for(pool):
    def reward(completion, answer, tests, prompt):
        return float(completion == answer and tests == ["a"] and prompt == "2+2?")

    assert run(pool, FunctionVerifier(reward), "4").score == 1
    assert run(pool, FunctionVerifier(lambda completion, **rest: 0.25 * len(rest["tests"])), "4").status == "partial"
    missing = run(pool, FunctionVerifier(lambda rubric: 1.0), "4")
    assert missing.score is None
    assert "'rubric'" in missing.reason
    assert "'t1'" in missing.reason


@pytest.mark.parametrize(
    ("function", "score", "reason"),
    [
        (lambda completion: 1 / 0, None, "ZeroDivisionError"),
        (lambda completion: float("nan"), None, "nan"),
        (lambda completion: "0.5", None, "str"),
        (lambda completion: None, None, "no score"),
        (lambda completion: True, 1, ""),
        (lambda completion: sys.exit(), None, "SystemExit"),
        (lambda completion: next(iter(())), None, "StopIteration"),
    ],
)
def test_whatever_a_function_does_is_one_verdict(pool, function, score, reason):
    verdict = run(pool, FunctionVerifier(function), "4")
    assert verdict.score == score
    assert reason in verdict.reason


def test_async_functions_run_together(pool):
    together = [0, 0]  # now, at most

    async def reward(completion):
        together[0] += 1
        together[1] = max(together)
        await asyncio.sleep(0.5)
        together[0] -= 1
        return 1.0

    verdicts = pool.verify_many(FunctionVerifier(reward), [(TASK, "4")] * 40)
    assert [v.score for v in verdicts] == [1] * 40
    assert together[1] > 10


@pytest.mark.gate
def test_sync_functions_run_together(pool):
    two = threading.Barrier(2)

    def reward(completion):
        two.wait(60)  # broken where no other is under way
        return 1.0

    verdicts = pool.verify_many(FunctionVerifier(reward), [(TASK, "4")] * 64)
    assert [v.score for v in verdicts] == [1] * 64


@pytest.mark.gate
def test_functions_that_hang_are_undecided_and_block_nobody():
    stop = threading.Event()

    def waits(completion):
        return stop.wait() * 1.0

    async def deaf(completion):
        while not stop.is_set():
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        return 1.0

    async def blocks(completion):
        stop.wait()
        return 1.0

    with VerifierPool(workers=1, time_limit=0.5) as pool:
        for function, count in ((waits, 8), (deaf, 3), (blocks, 2)):
            verdicts = pool.verify_many(FunctionVerifier(function), [(TASK, "4")] * count)
            assert {(v.status, v.score) for v in verdicts} == {(VerdictStatus.TIMEOUT, None)}
        assert run(pool, FunctionVerifier(lambda completion: 1.0), "4").score == 1
        assert run(pool, as_verifier("math"), "\\boxed{4}").score == 1
        stop.set()


def test_the_pool_serves_any_loop_and_cancellation_reaches_it(pool):
    async def many():
        verifier = as_verifier("math")
        verdicts = await asyncio.gather(*(pool.verify(verifier, TASK, f"\\boxed{{{i}}}") for i in range(8)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.verify(InProcess(), TASK, "sleep"), 3.0)
        return verdicts, await pool.verify(InProcess(), TASK, "good")

    verdicts, after = asyncio.run(many())
    assert [v.score for v in verdicts] == [float(i == 4) for i in range(8)]
    assert after.score == 1


def test_a_quick_that_raises_is_a_verdict(pool):
    class Bad(Verifier):
        def quick(self, task, completion):
            raise KeyError("x")

        def verify(self, task, completion):
            return Verdict.from_score(1)

    assert run(pool, Bad(), "x").score is None


def test_judged_works_without_a_pool():
    assert asyncio.run(judged(as_verifier("math"), TASK, "\\boxed{4}")).score == 1
    assert asyncio.run(judged(FunctionVerifier(lambda completion: 1 / 0), TASK, "")).score is None


@pytest.mark.parametrize("options", [{"workers": 0}, {"time_limit": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=r"worker|limit"):
        VerifierPool(**options)


# the end


def test_close_ends_everything_and_what_was_under_way_is_undecided(tmp_path):
    before = below()
    pool = VerifierPool(workers=2)
    verdicts = []

    def work():
        verifiers = [InProcess(), InProcess(), InProcess(), FunctionVerifier(lambda completion: time.sleep(3))]

        async def gather():
            return await asyncio.gather(
                *(pool.verify(v, TASK, f"child:{tmp_path / str(i)}") for i, v in enumerate(verifiers))
            )

        verdicts.extend(asyncio.run(gather()))

    thread = threading.Thread(target=work)
    thread.start()
    for name in "01":
        while not (tmp_path / name).exists():
            time.sleep(0.05)
    start = time.perf_counter()
    pool.close()
    pool.close()
    assert time.perf_counter() - start < BOUND
    thread.join(BOUND)
    assert [v.score for v in verdicts] == [None] * 4
    assert not below() - before
    assert all(gone(int(pid)) for name in "01" for pid in (tmp_path / name).read_text().split())
    assert run(pool, InProcess(), "good").score is None


SCRIPT = """
import os, sys, threading, time
sys.path.insert(0, {folder!r})
from hostile_verifiers import InProcess
from rlvr.records import Task
from rlvr.verifiers import VerifierPool
pool = VerifierPool(workers=1)
print(pool.verify_many(InProcess(), [(Task("t", "p"), "pid")])[0].answer, flush=True)
{then}
"""


@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_a_parent_that_is_killed(busy):
    hang = 'pool.verify_many(InProcess(), [(Task("t", "p"), "hang")])'
    script = SCRIPT.format(folder=str(Path(__file__).parents[1]), then=hang if busy else "time.sleep(1000)")
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    time.sleep(1.0)
    assert Path(f"/proc/{worker}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(worker)


def test_stopped_processes_outlive_neither_the_pool_nor_the_parent(monkeypatch):
    """All processes of the pool are stopped: verification goes on with new ones, and at the end none is left."""
    monkeypatch.setattr(worker_process, "FORK_SECONDS", 1.0)
    others = below()
    with VerifierPool(workers=1) as pool:
        assert run(pool, InProcess(), "good").score == 1
        before = below() - others
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        assert pool.verify_many(InProcess(time_limit=1.0), [(TASK, "good")])
        assert run(pool, InProcess(time_limit=30.0), "good").score == 1
    assert all(gone(pid) for pid in before)
    script = SCRIPT.format(folder=str(Path(__file__).parents[1]), then="time.sleep(1000)")
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    parent.stdout.readline()
    children = below(parent.pid)
    for pid in children:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(children) >= 3
    assert all(gone(pid) for pid in children)


def test_a_program_that_forgets_to_close_ends_quietly():
    script = SCRIPT.format(folder=str(Path(__file__).parents[1]), then="")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=BOUND, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    assert gone(int(done.stdout))


HELD_UP = """
import asyncio, os, signal, subprocess, sys, threading, time
from rlvr.records import Task, Verdict
from rlvr.verifiers import Needs, Verifier, VerifierPool

class Works(Verifier):
    time_limit = 2.0
    def __init__(self, process):
        self.needs = Needs(process=process)
    def verify(self, task, completion):
        if completion == "hang":
            time.sleep(1000)
        time.sleep(float(completion))
        return Verdict.from_score(1.0, answer="x" * 1_000_000)

class Waits(Works):
    async def verify(self, task, completion):
        await asyncio.sleep(float(completion))
        return Verdict.from_score(1.0)

task = Task("t", "p")
if __name__ == "__main__":
    with VerifierPool(workers=2) as pool:
        for verifier in (Works(True), Works(False), Waits(False)):
            pool.verify_many(verifier, [(task, "0")])
            stop = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", stop])
            (verdict,) = pool.verify_many(verifier, [(task, "0.5")])
            print(verdict.status.value, verdict.score, verdict.reason)
        print(pool.verify_many(Works(True), [(task, "hang")])[0].status.value)
"""


@pytest.mark.gate
def test_an_answer_does_not_pay_for_a_trainer_that_was_held_up(tmp_path):
    """The trainer is stopped for 3 s while answers with a limit of 2 s take 0.5 s; one that hangs is late still."""
    file = tmp_path / "held_up.py"
    file.write_text(HELD_UP)
    run = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines() == ["correct 1.0 "] * 3 + ["timeout"]


def test_a_verifier_that_excuses_errors_lets_want_of_memory_through(monkeypatch):
    """It is the pool that finds out whose doing it is: not the answer's, after another verifier call has kept the
    memory."""

    def without_memory(*_):
        raise MemoryError

    with pytest.raises(MemoryError):
        gym._score_or_zero(without_memory, "1", {})
    monkeypatch.setattr(json_schema, "_validator", without_memory)
    with pytest.raises(MemoryError):
        json_schema._misfit({}, True, "1")
    monkeypatch.setattr(symbolic, "equal", without_memory)
    with pytest.raises(MemoryError):
        math_verifier._by_math_verify("1", "2", 1.0, "")


def test_the_counts_of_verifiers_are_under_their_names():
    """Those of a part, too; and each count once."""

    class Counts(Verifier):
        def __init__(self, asked):
            self.asked = asked

        def verify(self, task, completion):
            self.asked += 1
            return 1.0

        def metrics(self):
            asked, self.asked = self.asked, 0
            return {"asked": asked}

    with VerifierPool() as pool:
        made = Verification(Counts(1), pool, {"second": CombineVerifier({"part": Counts(2)})})
        expected = {"verifier/Counts/asked": 1, "verifier/second/part/asked": 2}
        assert made.metrics() == expected
        assert made.metrics() == dict.fromkeys(expected, 0)
