"""Plain functions, groups, memory of verdicts, bad input, and the pool under torchrun."""

import asyncio
import functools
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from hostile_verifiers import AwaitsInProcess, Cached, InProcess, Ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.core.calling import by_signature
from rlvr.errors import ConfigError
from rlvr.records import Origin, Rollout, StopReason, Task, Verdict, VerdictStatus
from rlvr.verifiers import FunctionVerifier, Needs, Verifier, VerifierPool, as_verifier

TASK = Task("t1", "2+2?", "4", info={"tests": ["a"]})
CHAT = Task("t2", [{"role": "user", "content": "2+2?"}], "4", info={"level": 3})


def one(pool, verifier, completion, task=TASK):
    return pool.verify_many(verifier, [(task, completion)])[0]


def group(pool, verifier, completions, task=TASK, rollouts=None):
    return asyncio.run(pool.verify_group(verifier, task, completions, rollouts))


def rollout(ids):
    ids = np.asarray([7, *ids])
    origin = np.asarray([Origin.PROMPT, *[Origin.POLICY] * (len(ids) - 1)], dtype=np.int8)
    unknown, version = np.full(len(ids), np.nan, dtype=np.float32), np.zeros(len(ids), dtype=np.int32)
    return Rollout("r", TASK, "0", 0, ids, origin, unknown, version, StopReason.END)


# where functions run


def test_a_function_runs_in_processes_of_its_own_and_its_state_is_each_ones(pool):
    seen = []

    def reward(completion):
        seen.append(completion)
        time.sleep(0.2)
        return Verdict.from_score(1, answer=str(os.getpid()))

    reward.needs = Needs(process=True)
    verdicts = pool.verify_many(FunctionVerifier(reward), [(TASK, "4")] * 2)
    assert len({v.answer for v in verdicts} - {str(os.getpid())}) == 2
    assert not seen


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_may_stay_in_the_trainers_process(pool, asynchronous):
    seen = []

    def stays(completion):
        seen.append(os.getpid())
        return 1.0

    async def waits(completion):
        seen.append(os.getpid())
        return 1.0

    stays.needs = Needs()
    assert one(pool, FunctionVerifier(waits if asynchronous else stays), "4").score == 1
    assert seen == [os.getpid()]


def test_a_function_of_main_runs_in_a_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os
        from rlvr.records import Task, Verdict
        from rlvr.verifiers import FunctionVerifier, Needs, Verifier, VerifierPool
        FACTOR = 3

        def reward(completion):
            return Verdict.from_score(1, answer=f"{os.getpid() != PARENT} {FACTOR * len(completion)}")

        class Mine(Verifier):
            needs = Needs(process=True)
            def verify(self, task, completion):
                return reward(completion)

        if __name__ == "__main__":
            PARENT = os.getpid()
            with VerifierPool(workers=2) as pool:
                for verifier in (FunctionVerifier(reward), FunctionVerifier(lambda completion: reward(completion)), Mine()):
                    print(pool.verify_many(verifier, [(Task("t", "p"), "xy")])[0].answer)
        """)
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True 6\n" * 3, done.stderr
    assert not done.stderr


def test_what_cannot_be_sent_runs_on_a_thread_and_says_so_once(pool):
    class Local:
        def __reduce__(self):
            raise TypeError("not for sending")

    local = Local()

    def odd(completion):
        return Verdict.from_score(local is not None, answer=str(os.getpid()))

    odd.needs = Needs(process=True)
    with pytest.warns(UserWarning, match="odd cannot be sent") as output:
        verdicts = pool.verify_many(FunctionVerifier(odd), [(TASK, "4")] * 3)
    assert [v.answer for v in verdicts] == [str(os.getpid())] * 3
    assert len(output) == 1


def test_a_function_that_cannot_be_loaded_there_runs_on_a_thread(pool):
    class Here:
        def __init__(self, pid):
            if os.getpid() != pid:
                raise RuntimeError("no GPU here")

        def __reduce__(self):
            return type(self), (os.getpid(),)

    here = Here(os.getpid())
    pid = os.getpid()

    class Model:
        def __reduce__(self):
            return _refuse, (pid,)

    model = Model()

    def judge(completion):
        return 1.0 if model and here else 0.0

    judge.needs = Needs(process=True)
    with pytest.warns(UserWarning, match="judge cannot be loaded in a worker process"):
        assert one(pool, FunctionVerifier(judge), "4").score == 1


def _refuse(pid):
    raise RuntimeError("no GPU here")


def test_a_function_gets_its_token_ids(pool):
    def reward(completion, token_ids):
        return Verdict.from_score(1, answer=repr(token_ids))

    verdict = asyncio.run(pool.verify(FunctionVerifier(reward), TASK, "4", rollout([3, 1])))
    assert verdict.answer == "[3, 1]"


def test_a_function_that_waits_too_long_is_undecided_and_one_that_computes_scores_0():
    def waits(completion):
        time.sleep(1000)

    def spins(completion):
        while True:
            pass

    with VerifierPool(workers=2, time_limit=0.5) as pool:
        waited, spun = one(pool, FunctionVerifier(waits), "4"), one(pool, FunctionVerifier(spins), "4")
    assert (waited.status, waited.score) == (VerdictStatus.TIMEOUT, None)
    assert (spun.status, spun.score) == (VerdictStatus.TIMEOUT, 0.0)


# groups


def test_a_group_is_one_job(pool):
    verdicts = group(pool, Ranks(), ["a", "bbb", "cc"])
    assert [v.score for v in verdicts] == [0, 1, 0]
    assert len({v.answer for v in verdicts}) == 1
    assert group(pool, InProcess(), ["good", "raise"])[0].score == 1
    assert group(pool, Ranks(), []) == []


@pytest.mark.parametrize(
    ("first", "scores"),
    [
        ("raise", [None] * 4),
        ("short", [None] * 4),
        ("dict", [None] * 4),
        ("exit", [None] * 4),
        ("odd", [1, None, None, None]),
    ],
)
def test_a_group_that_goes_wrong_is_undecided(pool, first, scores):
    assert [v.score for v in group(pool, Ranks(), [first, "b", "c", "d"])] == scores


def test_a_group_that_takes_too_long_is_undecided():
    with VerifierPool(time_limit=0.5) as pool:
        verdicts = group(pool, Ranks(), ["sleep", "b"])
    assert [(v.status, v.score) for v in verdicts] == [(VerdictStatus.TIMEOUT, None)] * 2


# TRL's functions


def test_trl_functions_get_what_trl_gives_them(pool):
    def reward(prompts, completions, solution, level, completion_ids, **kwargs):
        assert prompts == [CHAT.prompt] * 2
        assert completions == [[{"role": "assistant", "content": c}] for c in "45"]
        assert (level, completion_ids, kwargs["answer"]) == ([3, 3], [[1], [2, 3]], ["4", "4"])
        return [float(c[0]["content"] == s) for c, s in zip(completions, solution, strict=True)]

    verdicts = group(pool, as_verifier(reward), ["4", "5"], CHAT, [rollout([1]), rollout([2, 3])])
    assert [v.score for v in verdicts] == [1, 0], verdicts


def test_trl_functions_of_plain_prompts_asynchronous_too(pool):
    async def reward(completions, answer, **kwargs):
        await asyncio.sleep(0.01)
        return [None if c == "?" else float(c == a) for c, a in zip(completions, answer, strict=True)]

    verifier = as_verifier(reward)
    assert [v.score for v in group(pool, verifier, ["4", "5", "?"])] == [1, 0, None]
    assert one(pool, verifier, "4").score == 1


def test_what_trls_trainer_alone_can_give_is_refused_by_name():
    def reward(completions, trainer_state, log_extra, log_metric):
        return [0.0]

    def acting(completions, environments):
        return [0.0]

    def optional(completions, trainer_state=None, log_metric=None):
        return [1.0] * len(completions)

    with pytest.raises(ConfigError, match="'reward' asks for trainer_state, log_extra, log_metric, which only TRL's"):
        as_verifier(reward)
    assert "'environments', which only TRL's trainer has" in as_verifier(acting).check_task(TASK)
    assert as_verifier(optional).check_task(TASK) is None
    assert "'rubric'" in by_signature(lambda completions, rubric: []).missing(TASK)


# memory of verdicts


def test_a_verdict_is_asked_for_once_per_gold_and_answer(pool, tmp_path):
    calls = tmp_path / "calls"
    verifier = Cached(str(calls))
    for completion, score in [("a4", 1), ("b4", 1), ("a5", 0), ("c5", 0), ("x?", None), ("y?", None)]:
        assert one(pool, verifier, completion).score == score
    assert len(calls.read_text()) == 4  # 4, 5, and both undecided ones
    other = Task("t", "p", "5")
    assert one(pool, verifier, "a5", other).score == 1
    assert one(pool, Cached(str(calls)), "a4").score == 1
    assert len(calls.read_text()) == 6


def test_only_what_the_answer_decides_is_kept_and_no_more_than_so_many():
    from rlvr.verifiers.pool.cache import VerdictCache

    cache, verifier = VerdictCache(entries=2), Cached()
    kept = Verdict(VerdictStatus.WRONG, 0.0)
    for verdict in (
        Verdict.undecided("x"),
        Verdict(VerdictStatus.TIMEOUT, 0.0),
        Verdict(VerdictStatus.ERROR, 0.0),
        Verdict(VerdictStatus.PARTIAL, 0.5, spans=[(0, 1, 1.0)]),
    ):
        cache.put((1, "x"), verifier, verdict)
        assert cache.get((1, "x")) is None
    for number in range(3):
        cache.put((number, "x"), verifier, kept)
    assert [cache.get((number, "x")) for number in range(3)] == [None, kept, kept]
    assert cache.key(AwaitsInProcess(), TASK, "") is None


def test_a_cache_key_that_raises_or_cannot_be_hashed_is_none():
    from rlvr.verifiers.pool.cache import VerdictCache

    class Raises(InProcess):
        def cache_key(self, task, completion):
            return {}[completion]

    class Odd(InProcess):
        def cache_key(self, task, completion):
            return [completion]

    assert VerdictCache.key(Raises(), TASK, "x") is None
    assert VerdictCache.key(Odd(), TASK, "x") is None


# parts


class Both(Verifier):
    def verify(self, task, completion):
        raise AssertionError("compose is there")

    async def compose(self, task, completion, verify):
        verdicts = await asyncio.gather(
            verify(InProcess(time_limit=0.5)), verify(FunctionVerifier(lambda completion: 1.0))
        )
        return Verdict(VerdictStatus.PARTIAL, 0.5, reason=" ".join(v.status for v in verdicts))


def test_a_verifier_made_of_verifiers_has_each_part_run_as_it_would_alone(pool):
    assert one(pool, Both(), "good").reason == "correct correct"
    assert one(pool, Both(), "hang").reason == "timeout correct"


# bad input


@pytest.mark.parametrize("completion", [None, b"4", 4, ["4"], {"text": "4"}])
def test_a_completion_that_is_no_text_is_undecided(pool, completion):
    for verdict in (one(pool, as_verifier("math"), completion), *group(pool, Ranks(), [completion, completion])):
        assert verdict.score is None
        assert "not a text" in verdict.reason


@pytest.mark.parametrize("completion", ["x" * 10_000_000, "\udfff\ud800\x00", "", "\x00", "é" * 100])
def test_any_text_passes_through_the_pipe(pool, completion):
    verdict = one(pool, InProcess(), completion)
    assert verdict.score == 1
    assert verdict.answer == completion


@settings(max_examples=60, deadline=None)
@given(
    completion=st.text(st.characters()) | st.none() | st.binary() | st.integers(),
    answer=st.text() | st.none() | st.floats() | st.lists(st.integers()),
    verifier=st.sampled_from([as_verifier("exact"), AwaitsInProcess(), InProcess()]),
)
def test_every_input_ends_in_a_verdict(pool, completion, answer, verifier):
    assert isinstance(one(pool, verifier, completion, Task("t", "p", answer)), Verdict)


# under torchrun

TORCHRUN = """
import os, sys
import torch, torch.distributed as dist
from rlvr.records import Task, Verdict
from rlvr.verifiers import FunctionVerifier, VerifierPool

dist.init_process_group("gloo")
torch.ones(4).sum().item()
with VerifierPool(workers=3) as pool:
    def reward(completion):
        return Verdict.from_score(len(completion) / 8, answer=str(os.getpid()))
    verdicts = pool.verify_many(FunctionVerifier(reward), [(Task("t", "p"), "x" * (i + 1)) for i in range(8)])
    total = torch.tensor([sum(v.score for v in verdicts)])
    dist.all_reduce(total)
    assert str(os.getpid()) not in {v.answer for v in verdicts}
os.write(1, f"total {total.item()}\\n".encode())  # in one piece: both ranks write to it
dist.destroy_process_group()
"""


@pytest.mark.gate
def test_two_ranks_of_torchrun_have_a_pool_each(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "ranks.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total 9.0") == 2


# Functions that may hold state --------------------------------------------------------------------------------------


def enclosing(kind):
    """A function that closes over a list, a constant, itself, or nothing."""
    seen, limit = [], 3

    def appends(completion):
        seen.append(completion)
        return 1.0

    def compares(completion):
        return float(len(completion) < limit)

    def recursive(completion):
        return 1.0 if not completion else recursive(completion[1:])

    def plain(completion):
        return 1.0

    return {
        "appends": (appends, seen),
        "compares": (compares, None),
        "recursive": (recursive, None),
        "plain": (plain, None),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "process"), [("appends", False), ("compares", True), ("recursive", True), ("plain", True)]
)
def test_a_function_that_may_hold_state_stays_in_the_trainers_process(pool, kind, process):
    function, seen = enclosing(kind)
    assert FunctionVerifier(function).needs.process is process
    verdict = pool.verify_many(FunctionVerifier(function), [(Task("t", "?"), "ab")])[0]
    assert verdict.score == 1.0
    assert seen in (None, ["ab"])
    bound = functools.partial(function)
    assert FunctionVerifier(bound).needs.process is process


def test_what_a_function_says_that_it_needs_decides():
    function, _ = enclosing("appends")
    function.needs = Needs(process=True)
    assert FunctionVerifier(function).needs.process
