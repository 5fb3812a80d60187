"""Large claims are judged in a sandbox of their own, with the same result as small ones in the trainer's process."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from rlvr.records import Task
from rlvr.verifiers import judged
from rlvr.verifiers.code import CodeVerifier, asserts, cases
from rlvr.verifiers.code import judge as judge_module
from rlvr.verifiers.code.runner import Ended, Outcome


def task(**info):
    return Task("t", "?", info=info)


def asserted(*tests, **info):
    return task(kind="asserts", tests=list(tests), **info)


def score(one, program, **options):
    verdict = asyncio.run(judged(CodeVerifier(case_time=10.0, **options), one, program))
    return verdict.score, verdict.reason


MANY = "def f(x): return list(range(x))\ndef g(x): return sum(x)\ndef h(x): return [x]"
BIG = 20_000

SAME = {
    "a value": (task(kind="function", name="f", cases=[{"args": [BIG], "expected": list(range(BIG))}]), MANY),
    "a wrong value": (task(kind="function", name="f", cases=[{"args": [BIG], "expected": [*range(BIG - 1), 0]}]), MANY),
    "a type": (task(kind="function", name="f", cases=[{"args": [BIG], "expected": [*map(float, range(BIG))]}]),
               "def f(x): return [float(n) + 1e-9 for n in range(x)]"),
    "a text": (task(kind="stdio", cases=[{"input": "", "output": " ".join(f"{n}.5" for n in range(BIG))}]),
               f"for n in range({BIG}): print(n + 0.50000001)"),
    "a wrong text": (task(kind="stdio", cases=[{"input": "", "output": " ".join(f"{n}.5" for n in range(BIG))}]),
                     f"for n in range({BIG}): print(n + 0.5 + (n == {BIG - 1}))"),
    "asserts": (asserted(f"assert len(f({BIG})) == {BIG} and sorted(f({BIG}))[-1] == {BIG - 1}"), MANY),
    "a wrong assert": (asserted(f"assert f({BIG})[5] == 6"), MANY),
    "an error": (asserted(f"assert f({BIG})[{BIG}] == 6"), MANY),
    "calls of calls": (asserted(f"assert g(f({BIG})) == {BIG * (BIG - 1) // 2} and len(h(f({BIG}))[0]) == "
                                f"{BIG}"), MANY),
    "a call that fails": (asserted(f"assert h(f({BIG})) == 1 or f('x') == 2"), MANY),
    "humaneval": (task(kind="humaneval", prompt="def f(x):\n", entry_point="f",
                       test=f"def check(candidate):\n    assert candidate({BIG})[-1] == {BIG - 1}"), MANY),
    "surrogates": (task(kind="function", name="f", cases=[{"args": [], "expected": ["\ud800\n"] * BIG}]),
                   f"def f(): return ['\\ud800\\n'] * {BIG}"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_judge_says_what_the_trainer_would(name, monkeypatch):
    one, program = SAME[name]
    inside = score(one, program)
    used = []
    for made in ("text_job", "value_job", "test_job"):
        monkeypatch.setattr(judge_module, made, lambda *args: used.append(args))
    monkeypatch.setattr("rlvr.verifiers.code.cases.DECODED_SIZE", 2**30)
    monkeypatch.setattr("rlvr.verifiers.code.runner.DECODED_SIZE", 2**30)
    monkeypatch.setattr("rlvr.verifiers.code.sandbox.execution.DECODED_SIZE", 2**30)
    assert score(one, program) == inside
    assert not used
    assert inside[0] == (0 if name.startswith(("a wrong", "an error", "a call that")) else 1)


LONG = "def f(x):\n    n = 1 << 20 * x\n    return range(n, n + 2**17)"
LONG_RANGES = {
    "list(f(0))[-1] == 2": 0,
    f"list(f(0))[-1] == {2**17}": 1,
    f"sum(f(0)) == {sum(range(1, 2**17 + 1))}": 1,
    "sum(f(0)) == 2": 0,
    f"len(set(f(0))) == {2**17} and len(f(1)) == {2**17}": 1,
    f"2.5 in f(0) or f(0)[1] == 2 and f(1)[1] == {2**20 + 1}": 1,
    "list(f(1000)) == [2]": 0,  # 2 KB each, 300 MB in all
    "sum(f(1000)) == 2": 0,
}


@pytest.mark.parametrize("test", LONG_RANGES)
def test_what_is_longer_than_its_text_is_judged_by_its_length(test, monkeypatch):
    """A range of a few bytes has as many members as a list of a megabyte, and they may have kilobytes each."""
    made, jobs = [], judge_module.test_job

    def counted(*args):
        made.append(args)
        return jobs(*args)

    monkeypatch.setattr(judge_module, "test_job", counted)
    verdict = score(asserted(f"assert {test}"), LONG)
    assert verdict[0] == LONG_RANGES[test], verdict
    assert made or "f(1000)" in test  # that one is too large for its own process to send


def test_a_large_range_is_compared_in_its_judge():
    one = task(kind="function", name="f", cases=[{"args": [0], "expected": list(range(1, 2**17 + 1))}])
    assert score(one, LONG)[0] == 0  # it is no list
    assert score(one, LONG.replace("return range", "return list(range") + ")") == (1, "")


NONSENSE = (
    "import os\ndef f(x):\n    body = b'v' + {body!r} * 30000\n    os.write(3, len(body).to_bytes(4, 'big') + "
    "body)\n    os._exit(0)"
)


@pytest.mark.parametrize("body", [b"[", b'{"set":[', b"x", b'{"int":"0x"}', b"\xff", b"[[]],", b'"a" '])
def test_large_nonsense_is_a_failure(body):
    for one in (SAME["a value"][0], SAME["asserts"][0], asserted("for n in [1]:\n    assert f(n) == 2")):
        verdict = score(one, NONSENSE.format(body=body))
        assert verdict[0] == 0, verdict


@pytest.mark.parametrize("ended", [Ended.TIME, Ended.MEMORY, Ended.CRASHED, Ended.BROKEN])
def test_a_judge_that_fails_fails_the_case_and_one_that_broke_leaves_it_undecided(ended, monkeypatch):
    async def other(self, job):
        return Outcome(ended, reason="why") if "NeedsCall" in job.source else await self.runner.run(job)

    monkeypatch.setattr(cases.Trial, "other", other)
    for name in ("a value", "a text", "asserts"):
        assert score(*SAME[name])[0] == (None if ended is Ended.BROKEN else 0)


def test_a_proxied_test_takes_large_arguments_and_results_and_methods():
    test = f"for n in [1]:\n    rows = f(list(range({BIG})))\n    assert rows == list(range({BIG}))"
    assert score(asserted(test), "def f(x): return x") == (1, "")
    assert score(asserted(test), "class Solution:\n    def f(self, x): return x") == (1, "")


class Counted(int):
    """An integer that counts the bits which its additions read."""

    read = 0

    def __add__(self, other):
        Counted.read += self.bit_length() + int(other).bit_length()
        return Counted(int(self) + int(other))

    __radd__ = __add__


def test_the_sum_of_one_large_and_many_small_integers_does_not_copy_the_large_one_for_each():
    count, bits = 4096, 30_000
    Counted.read = 0
    assert asserts._PLAIN["sum"][0]([Counted(1 << bits), *[Counted(1)] * count]) == (1 << bits) + count
    assert 0 < Counted.read < 30 * bits  # one after the other it is count x bits


def test_a_set_of_members_that_share_their_hash_is_refused():
    """(2^61 - 1) i has the hash 0 for every i, so that each is compared with all others."""
    alike = [(2**61 - 1) * i for i in range(200)]
    for kind in (set, frozenset):
        build = asserts._PLAIN[kind.__name__][0]
        assert build(alike[:60] * 3) == kind(alike[:60])
        with pytest.raises(ValueError, match="share their hash"):
            build(alike)
        assert build([-1, -2] * 100) == {-1, -2}  # the two share a hash


def test_the_sum_means_what_python_means():
    rng = random.Random(5)
    added = asserts._PLAIN["sum"][0]
    for _ in range(300):
        items = [
            rng.choice([rng.randint(-(2**70), 2**70), True, rng.uniform(-9, 9), 1j]) for _ in range(rng.randrange(9))
        ]
        items = sorted(items, key=lambda item: not isinstance(item, int)) if rng.random() < 0.5 else items
        assert repr(added(items)) == repr(sum(items))
    for bad in (["a"], [[1]], [None], 5):
        with pytest.raises(TypeError):
            added(bad)
    assert math.isnan(added([math.nan]))
