"""The code verifier with its sandbox: every kind of task, credit, undecided verdicts, solutions, pool, combine, audit,
loops."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlvr.audit import main
from rlvr.errors import ConfigError, DataError
from rlvr.records import LONGEST_REASON, Task, Verdict
from rlvr.verifiers import VerifierPool, as_verifier, judged
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code import code_verifier as verifier_module
from rlvr.verifiers.code.runner import Ended, Outcome
from rlvr.verifiers.code.sandbox import languages
from rlvr.verifiers.code.steady import is_steady
from rlvr.verifiers.pool import Verification


def task(prompt="?", **info):
    return Task("t", prompt, info=info)


ADD = task(kind="stdio", cases=[{"input": "1 2", "output": "3"}, {"input": "20 -5\n", "output": "15\n"}])
ADDS = "a, b = map(int, input().split())\nprint(a + b)"
DOUBLE = task(kind="function", name="f", cases=[{"args": [2], "expected": 4}, {"kwargs": {"x": "a"}, "expected": "aa"}])
SHARES = task(kind="function", name="f", cases=[{"args": [n], "expected": n, "weight": n} for n in (1, 2, 3, 4)])
HALF = "def f(x):\n    return x if x < 3 else 0"


def verdict(task, completion, **options):
    return asyncio.run(judged(CodeVerifier(**options), task, completion))


def score(task, completion, **options):
    return verdict(task, completion, **options).score


# kinds


def test_programs_read_and_print():
    assert score(ADD, f"Here:\n```python\n{ADDS}\n```") == 1
    output = verdict(ADD, "print(3)")
    assert (output.status, output.score, output.answer) == ("wrong", 0.0, "print(3)")
    assert output.reason == "cases[1] of 2: token 1 is '3' where '15' is expected"
    assert output.seconds > 0


@pytest.mark.parametrize("language", sorted({"c", "cpp", "javascript"} & set(languages())))
def test_programs_in_other_languages(language):
    one = task(kind="stdio", language=language, cases=ADD.info["cases"])
    c = '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }'
    cpp = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
    js = "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(a + b)"
    program = {"c": c, "cpp": cpp, "javascript": js}[language]
    slow = {"case_time": 10.0}
    assert score(one, f"```{language}\n{program}\n```", **slow) == 1
    assert score(one, f"```{language}\n{program.replace('a + b', 'a - b')}\n```", **slow) == 0
    assert score(one, f"```{language}\nint main( {{\n```", **slow) == 0


def test_a_language_that_is_not_here_is_said_before_training(monkeypatch):
    monkeypatch.setattr("rlvr.verifiers.code.sandbox.languages", lambda: {"python": "here"})
    one = task(kind="stdio", language="cpp", cases=ADD.info["cases"])
    assert "programs in cpp cannot be run here" in CodeVerifier().check_task(one)
    assert "bad task: programs in cpp" in verdict(one, "int main() {}").reason


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("def f(x):\n    return x + x", True),
        ("class Solution:\n    def f(self, x):\n        return x * 2", True),
        ("f = lambda x: 2 * x", True),
        ("def f(x):\n    return 4", False),
        ("def f(x):\n    return 4.0 if x == 2 else 'aa'", False),
        ("def g(x):\n    return x + x", False),
        ("def f(y):\n    return y + y", False),
        ("def f(x): return", False),
    ],
)
def test_functions_are_called(program, right):
    assert score(DOUBLE, program) == right


def test_assertions_are_rewritten_or_run_apart():
    tests = [
        "assert f(2) == 4",
        "assert sorted(f([2, 1])) == SORTED",
        "for n in range(3):\n    assert f(n) == 2 * n, n",
        "try:\n    f(None)\n    failed = False\nexcept Exception:\n    failed = True\nassert failed",
    ]
    one = task(kind="asserts", entry_point="f", tests=tests, setup="import math\nSORTED = [1, 1, 2, 2]")
    assert CodeVerifier().check_task(one) is None
    assert score(one, "def f(x):\n    math.pi\n    return x + x") == 1
    assert score(one, "def f(x):\n    return x + x if x != 2 else 5") == 0
    assert score(one, "def f(x):\n    return SORTED") == 0
    assert score(one, "def f(x):\n    return 2 * x if x is not None else 0") == 0
    shares = verdict(one, "def f(x):\n    return [2, 2, 1, 1] if x == [2, 1] else 4", credit="share")
    assert shares.score == 0.5


STUB = (
    'from typing import List\n\ndef helper(x):\n    return x + 1\n\ndef f(items: List[int]) -> int:\n    """Sum."""\n'
)
PLAIN = "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
LOOP = "def check(candidate):\n    for n in range(3):\n        assert helper(candidate([n])) == n + 1\n"


@pytest.mark.parametrize("test", [PLAIN, LOOP])
@pytest.mark.parametrize("prompt_in", ["info", "task"])
def test_humaneval_functions_go_on_or_begin_anew(test, prompt_in):
    info = {"kind": "humaneval", "entry_point": "f", "test": test}
    one = Task("t", "?", info={**info, "prompt": STUB}) if prompt_in == "info" else Task("t", STUB, info=info)
    assert score(one, "    return sum(items)\n") == 1
    assert score(one, "```python\ndef f(items: List[int]) -> int:\n    return helper(sum(items)) - 1\n```") == 1
    assert score(one, "    return len(items)\n") == 0
    assert score(one, STUB) == 0


def test_checkers_judge_outputs():
    function = "def check(input, output):\n    a, b = map(int, output.split())\n    return a + b == int(input)"
    third = "def check(input, output, expected):\n    return int(output) / int(expected)"
    script = "import json, sys\ngiven = json.load(sys.stdin)\nassert given['output'].strip() == given['input'][::-1]"
    cases = [{"input": "7", "output": "8"}]
    assert score(task(kind="checker", checker=function, cases=cases), "print(input(), 0)") == 1
    assert score(task(kind="checker", checker=function, cases=cases), "print(input(), 1)") == 0
    assert score(task(kind="checker", checker=function, cases=cases), "print('x')") == 0
    assert score(task(kind="checker", checker=script, cases=[{"input": "ab"}]), "print(input()[::-1])") == 1
    assert score(task(kind="checker", checker=script, cases=[{"input": "ab"}]), "print(input())") == 0
    part = verdict(task(kind="checker", checker=third, cases=cases), "print(4)", credit="share")
    assert (part.status, part.score) == ("partial", 0.5)
    assert score(task(kind="checker", checker=third, cases=cases), "print(80)", credit="share") == 0


def test_properties_are_tried_on_inputs_that_depend_on_the_program():
    text = (
        "def holds(f, random):\n    items = [random.randrange(99) for _ in range(4)]\n    assert f(items) == "
        "sorted(items)"
    )
    one = task(kind="property", entry_point="f", property=text, trials=3)
    assert score(one, "def f(items):\n    return sorted(items)") == 1
    assert score(one, "def f(items):\n    return items") == 0
    false = task(kind="property", entry_point="f", property="def holds(f, random):\n    return f(1) == 1", trials=1)
    assert [score(false, f"def f(x):\n    return {n}") for n in (1, 2)] == [1, 0]


# credit and status


@pytest.mark.parametrize(("credit", "worth"), [("all", 0.0), ("share", 0.3), ("first_failure", 0.3)])
def test_credit(credit, worth):
    assert score(SHARES, HALF, credit=credit) == pytest.approx(worth)
    assert score(SHARES, "def f(x):\n    return x", credit=credit) == 1
    assert score(SHARES, "def f(x):\n    return x if x > 1 else 0", credit=credit) == {"share": 0.9}.get(credit, 0)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("while True: pass", "timeout"),
        ("input(); import time; time.sleep(60)", "timeout"),
        ("x = 'a' * 10**10", "error"),
        ("print(", "unparsable"),
        ("", "unparsable"),
        ("import sys; print(3); sys.exit(1)", "wrong"),
        ("print(3); raise ValueError", "wrong"),
        ("while True: print('x' * 1000)", "wrong"),
    ],
)
def test_what_a_program_does_wrong_is_decided(program, status):
    output = verdict(ADD, program, case_time=1.0)
    assert (output.status, output.score) == (status, 0.0), output.reason


def test_all_cases_together_have_a_limit():
    cases = [{"input": str(n), "output": str(n)} for n in range(40)]
    slow = "import time\ntime.sleep(0.3)\nprint(input())"
    output = verdict(task(kind="stdio", cases=cases), slow, total_time=0.5, credit="share")
    assert output.status == "partial"
    assert 0 < output.score < 0.5
    assert "together" in output.reason or "token" in output.reason


class BrokenRunner:
    """Says what it is told to, in order."""

    tier = "broken"

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    async def run(self, job):
        return self.outcomes.pop(0)


@pytest.mark.parametrize(
    ("values", "credit", "worth"),
    [
        ([1, None, 3, 4], "all", None),
        ([1, None, 0, 4], "all", 0.0),
        ([1, None, 0, 4], "share", None),
        ([1, None, 0, 4], "first_failure", None),
        ([0, None, None, None], "first_failure", 0.0),
        ([1, 0, None, None], "first_failure", 0.1),
    ],
)
def test_a_sandbox_that_fails_leaves_undecided_what_is_not_decided_already(monkeypatch, values, credit, worth):
    broken = Outcome(Ended.BROKEN, reason="no space left")
    runner = BrokenRunner(*(broken if value is None else Outcome(Ended.DONE, value=value) for value in values))
    monkeypatch.setattr(CodeVerifier, "_runner", lambda self: runner)
    output = verdict(SHARES, HALF, credit=credit)
    assert output.score == worth
    assert output.status == "error" if worth is None else output.status in ("wrong", "partial")


# the task's own solution


def test_solutions_are_run_on_request():
    good = Task("good", "?", info={**SHARES.info, "solution": "```python\ndef f(x): return x\n```"})
    bad = Task("bad", "?", info={**SHARES.info, "solution": HALF})
    shown = Task("shown", "?", demonstration="def f(x): return x", info=SHARES.info)
    verifier = CodeVerifier(validate=True)
    assert [verifier.check_task(one) for one in (good, shown)] == [None, None]
    assert "its own solution does not pass: cases[2] of 4" in verifier.check_task(bad)
    assert "brings no solution" in verifier.check_task(SHARES)
    assert CodeVerifier().check_task(bad) is None
    output = asyncio.run(judged(verifier, bad, "def f(x): return x"))
    assert output.score is None
    assert "bad task: its own solution" in output.reason
    assert asyncio.run(judged(verifier, good, "def f(x): return x")).score == 1


def test_a_bad_task_stops_a_run_and_leaves_a_verdict_undecided():
    bad = task(kind="asserts", tests=["assert f(1 =="])
    assert verdict(bad, "def f(x): return x").score is None
    with VerifierPool(workers=1) as pool, pytest.raises(DataError, match=r"t: tests\[0\] is no Python"):
        Verification("code", pool).check([bad])


# where it runs


def test_many_completions_on_a_pool():
    verifier = CodeVerifier(case_time=60.0)  # of wall clock, which is no part of this test
    with VerifierPool(workers=2) as pool:
        pairs = [(DOUBLE, f"def f(x): return {'x + x' if n % 2 else 'x'}  # {n}") for n in range(64)]
        assert [output.score for output in pool.verify_many(verifier, pairs)] == [n % 2 for n in range(64)]


def test_from_several_threads_and_loops_at_once():
    def one(n):
        return score(DOUBLE, f"def f(x): return x + x  # {n}")

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, range(8), timeout=60)) == [1] * 8


def test_like_in_a_notebook():
    asyncio.run(like_in_a_notebook())


async def like_in_a_notebook():
    assert CodeVerifier(validate=True).check_task(Task("t", "?", demonstration=ADDS, info=ADD.info)) is None
    assert (await judged(CodeVerifier(), ADD, ADDS)).score == 1


def test_as_a_part():
    both = as_verifier({"name": "combine", "how": "all", "parts": ["code", {"name": "regex"}]})
    one = Task("t", "?", "(?s).*lambda.*", info=DOUBLE.info)
    with VerifierPool(workers=1) as pool:
        pairs = [(one, "f = lambda x: 2 * x"), (one, "def f(x): return 2 * x")]
        assert [output.score for output in pool.verify_many(both, pairs)] == [1, 0]


def test_verdicts_are_remembered_where_a_program_cannot_vary():
    verifier = CodeVerifier()
    assert verifier.cache_key(DOUBLE, "def f(x): return x + x") is None  # the task is read when it is first verified
    for task in (DOUBLE, SHARES):
        assert verifier.check_task(task) is None
    key = verifier.cache_key(DOUBLE, "def f(x): return x + x")
    assert key is not None
    assert key[0] == verifier.cache_key(DOUBLE, "So:\n```\ndef f(x): return 2 * x\n```")[0]
    assert key != verifier.cache_key(SHARES, "def f(x): return x + x")
    kept = (
        "def f(x):\n    d: Dict[int, List[int]] = defaultdict(list)\n    d[x].append(max(x, 2))\n    return "
        "sum(d[x]) + ceil(x)"
    )
    assert verifier.cache_key(DOUBLE, kept) is not None
    for varies in (
        "import random\nf = random.choice",
        "f = id",
        "def f(x): return hash('a')",
        "f = ().__class__",
        "def f(x): return eval('_' + '_imp' + 'ort_' + '_(\"random\").choice([4, 5])')",
        "def f(x): return exec(chr(95) * 2)",
        "def f(x): return \uff45\uff56\uff41\uff4c('1')",  # eval in full width letters
        "def f(x): return getattr(f, 'x')",
        "def f(x): return choice([4, 5])",  # of the harness's `from random import *`
        "def f(x): return statistics.NormalDist(0, 1).samples(1)",
        "def f(x): return attrgetter('ran' + 'dom')(statistics)",
        "def f(x): return list({'a', 'b'} | set())",
        "def f(x): return open(0).read()",
        "def f(x): return collections._sys",
    ):
        assert verifier.cache_key(DOUBLE, varies) is None, varies


UNSTEADY = """
print(next(iter({'0', '1'})))
def f(x): return {'yes', 'no'}.pop()
print(*{c for c in '01'})
print(*{*'01'})
print(*{'a':=1, 'b'})
print(*{lambda: 0, len})
print(*{ # two
print(*{None, 1})
print(*frozenset('01'))
print(*(dict.fromkeys('01').keys() | ()))
d = {}; print(*(d.items() ^ d.items()))
print(str(lambda: 0)[-2])
print(f'{print}'[-2])
print(rF'{print!r}'[-2])
print('{}'.format(print)[-2])
print(repr(iter(()))[-2])
print(ascii(x for x in ())[-2])
print(('%s' % print)[-2])
s = 'a%s'; print((s % print)[-2])
print(((chr(37) + 's') % print)[-2])
print(*map(str, [[].append]))
def f(x, made=str): return made(f)[-2]
def f(x): return [str][0](f)[-2]
""".strip().split("\n")
UNSTEADY += [
    "s = '''\n%s\n'''\nprint((s % print)[-2])",
    "s = 'a\\\n%s\\\n'\nprint((s % print)[-2])",
    "s = 'a\x0c%s'\nprint((s\n% print)[-2])",
    "s = '\\x25s'\nprint((s\n% print)[-2])",
    "def f(x): return x[str(f)[-2]:\n-1]",
    "def f(x: str): return str(f)[-2]",
]
STEADY = """
print(sum(map(int, input().split())) % 7)
class Solution: pass
print({'(': ')', "[": "]"}[input()])
d = {}; d[1] = 2; print(*d.keys(), *d.items(), sep=', ')
print({x: x * x for x in range(3)}[2] | 1)
print(*sorted(input(), key=lambda c: -ord(c)))
""".strip().split("\n")
STEADY += [
    "class Solution:\n    def f(self, s: str, words: List[str]) -> Optional[str]:\n        return s + words[0]",
    "def f(a: int, b: int) -> str:\n    if a % b == 0:\n        return 'yes'\n    return 'no'",
]


def test_what_may_differ_from_one_interpreter_to_the_next_is_not_steady():
    """The order of sets, and the texts of objects, which hold their address."""
    assert [program for program in UNSTEADY if is_steady(program, ())] == []
    assert [program for program in STEADY if not is_steady(program, ())] == []


@pytest.mark.parametrize("text", ["{", "%", "{'", '"', "def f(", "def f(a) -> ", " ", "%'", "{a", "\\"])
def test_a_long_program_is_looked_at_in_linear_time(text):
    """No text of 100,000 characters has the expressions try again from every place: 10^10 steps would not end."""
    is_steady(text * (100_000 // len(text)), ())
    is_steady("def f(a) ->" + text * (100_000 // len(text)), ())


def test_a_reason_is_one_line_that_can_be_printed():
    output = verdict(ADD, "raise ValueError('\\x1b[2J\\x00\\nnext line \\ud800 \\u202e ok')")
    assert output.reason.isprintable()
    assert "\\x1b[2J\\x00\\nnext line \\ud800 \\u202e ok" in output.reason
    assert len(Verdict.undecided("\n" * 10**5).reason) <= LONGEST_REASON


def test_the_audit_scores_files_and_validates_solutions(tmp_path):
    rows = [
        {"id": "right", "completion": "def f(x): return x", "kind": "function", **SHARES.info},
        {"id": "wrong", "completion": HALF, "info": SHARES.info},
        {"id": "bad task", "completion": HALF, "info": {**SHARES.info, "solution": HALF}},
    ]
    rows[0]["solution"] = rows[1]["demonstration"] = "def f(x): return x"
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["--verifier", "code", "validate=true", *paths]) == 0
    output = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["score"]) for row in output] == [("right", 1.0), ("wrong", 0.0), ("bad task", None)]


@pytest.mark.parametrize("options", [{"case_time": 0}, {"memory_mb": -1}, {"max_length": 0}, {"tier": "fulll"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        CodeVerifier(**options).prepare()


def test_it_is_loaded_without_the_sandbox_and_closes_at_exit():
    code = (
        "import sys, rlvr.verifiers as v; assert 'rlvr.verifiers.code.sandbox' not in sys.modules\n"
        "import asyncio; from rlvr.records import Task\n"
        "task = Task('t', '?', info={'kind': 'stdio', 'cases': [{'output': '1'}]})\n"
        "print(asyncio.run(v.judged(v.as_verifier('code'), task, 'print(1)')).score)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("1.0", "", 0)


def test_a_task_is_read_once_and_never_on_the_loop(monkeypatch):
    """Large tasks take a second to read, in which the trainer's loop would stand still."""
    threads, read = [], verifier_module.read_layout

    def slowly(*arguments):
        threads.append(threading.get_ident())
        time.sleep(0.05)
        return read(*arguments)

    monkeypatch.setattr(verifier_module, "read_layout", slowly)
    verifier = CodeVerifier()

    async def group():
        first = [verifier.quick(DOUBLE, "no program"), verifier.cache_key(DOUBLE, "no program")]
        verdicts = await asyncio.gather(*(judged(verifier, DOUBLE, f"def f(x): return {n} * x") for n in (1, 2, 2)))
        return first, [verdict.score for verdict in verdicts], threading.get_ident()

    first, scores, loop = asyncio.run(group())
    assert (first, scores) == ([None, None], [0, 1, 1])
    assert len(threads) == 1
    assert loop not in threads
