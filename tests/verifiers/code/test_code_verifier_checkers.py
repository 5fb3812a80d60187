"""Checkers and properties: what passes them, what they may spend, and that no output is run by the process that judges
it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile

import pytest

from rlvr.records import Task
from rlvr.verifiers import judged
from rlvr.verifiers.code import CodeVerifier, cases
from rlvr.verifiers.code.cases import tried
from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.layout_fields import LayoutError
from rlvr.verifiers.code.layouts import read_layout
from rlvr.verifiers.code.runner import Call, Ended, Job, Limits, Outcome
from rlvr.verifiers.code.sandbox import remote


def verdict(info, program, **options):
    return asyncio.run(judged(CodeVerifier(**options), Task("t", "?", info=info), program))


def run_remotely(job):
    """The outcome of what a remote service would be sent, run here."""
    command = [sys.executable, "-I", "-c", remote._code(job, "MARKER" if job.call else "")]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, input=job.stdin, capture_output=True, timeout=60, cwd=folder)
    ran = {"status": "Finished", "return_code": done.returncode}
    ran |= {"stdout": done.stdout.decode(), "stderr": done.stderr.decode()}
    return remote._outcome({"run_result": ran}, job, "MARKER" if job.call else "")


def holds(source):
    return {"kind": "property", "entry_point": "f", "property": source, "trials": 1}


@pytest.mark.parametrize(
    ("body", "program", "score"),
    [
        ("return got and got == sorted(xs)", "return []", 0),
        ("return got and got == sorted(xs)", "return None", 0),
        ("return got and got == sorted(xs)", "return 0", 0),
        ("return got and got == sorted(xs)", "return sorted(xs)", 1),
        ("return got == sorted(xs)", "return sorted(xs)", 1),
        ("return len(got) == 3 and got", "return xs", 1),
        ("if not got: return\n    return got == sorted(xs)", "return None", 0),
        ("if got: return got == sorted(xs)", "return 0", 0),
        ("assert got == sorted(xs)", "return sorted(xs)", 1),
        ("assert got == sorted(xs)", "return xs[1:]", 0),
        ("if got != sorted(xs): raise ValueError\n    return None", "return sorted(xs)", 1),
        ("key = lambda n: n\n    def same(a): return a == sorted(xs)\n    assert same(got)", "return sorted(xs)", 1),
    ],
)
def test_a_property_passes_by_a_true_value_or_by_its_silence(body, program, score):
    source = f"def holds(f, random):\n    xs = [3, 1, 2]\n    got = f(xs)\n    {body}"
    assert verdict(holds(source), f"def f(xs): {program}").score == score


def test_a_property_that_is_a_generator_is_refused():
    with pytest.raises(LayoutError, match="generator"):
        read_layout(holds("def holds(f, random):\n    yield f(1) == 1"), "python", Comparison())


GUESSES = """
import hashlib, hmac, linecache, random
me = "".join(linecache.cache["program.py"][2])
text = f"0\\0{SOURCE}\\0{me}".encode()
seeds = [hashlib.sha256(text).hexdigest(), hmac.digest(b"", text, "sha256").hex()]
known = [random.Random(seed).random() for seed in seeds]
def f(x): return 2 * x if x in known else 0
"""


def test_no_program_computes_the_inputs_of_a_property(monkeypatch):
    """It has all texts: the property's and its own. What it lacks is the machine's secret; without one, its guess is
    right."""
    source = "def holds(f, random):\n    x = random.random()\n    return f(x) == 2 * x"
    guess = f"SOURCE = {source!r}{GUESSES}"
    monkeypatch.setattr(cases, "_machine_secret", lambda: b"")
    assert verdict(holds(source), guess).score == 1  # the guess is what it is meant to be
    monkeypatch.setattr(cases, "_machine_secret", lambda: b"0123456789abcdef")
    assert verdict(holds(source), guess).score == 0
    assert verdict(holds(source), "def f(x): return 2 * x").score == 1


def checker(source, cases=1, **more):
    return {"kind": "checker", "checker": source, "cases": [{"input": ""}] * cases, **more}


HEADS = {
    "input, output": 2,
    "input, output, expected": 3,
    "input, output, answer": 3,
    "input, output, /, expected='', tol=1e-6": 3,
    "input, output, tol=1e-6": 2,
    "input, output='', *, tol=1e-6, **options": 2,
    "*everything": 0,
    "output": 0,
    "input, output, expected, tol": 0,
    "input, output, *, tol": 0,
}


@pytest.mark.parametrize("head", HEADS)
def test_a_checker_may_have_parameters_of_its_own_with_defaults(head):
    source = (
        f"def check({head}): return (output, locals().get('expected', 'y')) == ('1\\n', 'y') and "
        "locals().get('tol', 1) <= 1"
    )
    info = checker(source)
    info["cases"] = [{"input": "x", "output": "y"}]
    if not HEADS[head]:
        with pytest.raises(LayoutError, match="other parameters need a default"):
            read_layout(info, "python", Comparison())
        return
    assert read_layout(info, "python", Comparison()).cases[0].parameters == HEADS[head]
    assert verdict(info, "print(1)").score == 1


WRITES = "import os\nos.write(3, b'\\0\\0\\0\\5vtrue')\nos._exit(0)"
FORGED = f"exec({WRITES!r})"
EVALUATING = {
    "eval": "return eval(output) == 24",
    "exec": "exec(output)\n    return False",
    "by another name": "return getattr(__builtins__, 'ev' + 'al')(output) == 24",
    "compiled": "return eval(compile(output.strip(), 'x', 'eval')) == 24",
    "through the library": "import timeit\n    return timeit.timeit(output.strip(), number=1) < 0",
    "a module": "open('made.py', 'w').write(output)\n    import importlib, sys\n    sys.path.append('.')\n    "
    "importlib.import_module('made')\n    return False",
    "a run path": "import runpy\n    open('made.py', 'w').write(output)\n    runpy.run_path('made.py')\n    return "
    "False",
    "a function": "import types\n    return types.FunctionType(compile(output, 'x', 'exec'), {})() == 24",
    "a function's code": "def f(): pass\n    f.__code__ = compile(output, 'x', 'exec')\n    return f() == 24",
    "a caught error": "try: return eval(output) == 24\n    except Exception: return False",
}


@pytest.mark.parametrize("name", EVALUATING)
def test_no_output_is_run_by_its_checker(name):
    source = f"def check(input, output):\n    {EVALUATING[name]}"
    for printed in (FORGED, WRITES):
        assert verdict(checker(source), f"print({printed!r})").score == 0
    forged = "import os\nos.write(1, b'\\nMARKERtrue')\nos._exit(0)"
    job = Job(source, call=Call("check", ("", f"exec({forged!r})")), limits=Limits(seconds=20), sealed=True)
    assert b"MARKER" not in run_remotely(job).stdout


def test_no_output_is_run_by_a_checker_that_is_a_script():
    source = "import json, sys\ngiven = json.load(sys.stdin)\nif eval(given['output']) != 24: sys.exit(1)"
    for printed in ("__import__('os')._exit(0)", "exit(0)", "24"):
        assert verdict(checker(source), f"print({printed!r})").score == 0
        stdin = json.dumps({"output": printed}).encode()
        job = Job(source, stdin=stdin, limits=Limits(seconds=20), sealed=True)
        assert run_remotely(job).ended is Ended.RAISED
    pickled = "import json, pickle, sys\npickle.loads(bytes.fromhex(json.load(sys.stdin)['output']))"
    assert verdict(checker(pickled), "import os, pickle\nclass P:\n    def __reduce__(self): return os._exit, (0,)\n"
                   "print(pickle.dumps(P()).hex())").score == 0  # fmt: skip
    became = "import json, os, sys\nos.execv('/bin/true', ['true'])"
    assert verdict(checker(became), "print(1)").score == 0


def test_no_value_is_run_by_the_test_that_gets_it():
    program = f"def f(x): return {FORGED!r}"
    for test in ("for n in [1]:\n    assert eval(f(n)) == 24", "for n in [1]:\n    exec(f(n))\n    assert False"):
        assert verdict({"kind": "asserts", "tests": [test]}, program).score == 0
    assert verdict(holds("def holds(f, random):\n    return eval(f(1)) == 24"), program).score == 0


HONEST = """
import re, ast
from collections import namedtuple
def check(input, output):
    import fractions, dataclasses, json, statistics, html.parser, difflib
    Point = namedtuple('Point', 'x y')
    @dataclasses.dataclass
    class Box:
        x: int
        y: int = 2
    tree = ast.parse(output.strip(), mode='eval')
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    text = re.sub(r'\\d', lambda found: found[0], output)
    return ast.literal_eval('[1, 2]') == [1, 2] and numbers == [4, 6] and Box(*Point(1, 2)).y == 2 and text == output
"""


def test_a_checker_may_parse_and_import_and_make_classes():
    assert verdict(checker(HONEST), "print('4 * 6')").score == 1
    job = Job(HONEST, call=Call("check", ("", "4 * 6")), limits=Limits(seconds=20), sealed=True)
    assert run_remotely(job).value is True


def test_what_a_checker_takes_counts_into_the_total_time():
    slow = "import re\ndef check(input, output):\n    return bool(re.fullmatch('(a|a)*b', output.strip()))"
    output = verdict(checker(slow, cases=5), "print('a' * 40)", total_time=1.5, credit="share")
    assert output.score == 0
    assert "more than 1.5 s" in output.reason or "longer than" in output.reason
    waits = "import time\ndef check(input, output):\n    time.sleep(0.4)\n    return True"
    output = verdict(checker(waits, cases=4), "print(1)", total_time=0.3, credit="share")
    assert output.score <= 0.25
    assert verdict(checker(waits), "print(1)").score == 1


def test_the_seconds_of_programs_and_checkers_are_added():
    """3 s of each program and 4 s of each checker: after the third case 21 s are spent, and the fourth is not tried."""
    given = []

    class Clock:
        tier = "full"

        async def run(self, job):
            given.append(job.limits.seconds)
            checks = job.call is not None
            return Outcome(Ended.DONE, b"1", value=True if checks else None, seconds=4.0 if checks else 3.0)

    source = "def check(input, output): return True"
    one = read_layout(checker(source, cases=4), "python", Comparison())
    trial = cases.Trial(Clock(), "print(1)", "python", Limits(seconds=2.0), total_time=12.0)
    results = asyncio.run(tried(one.cases, trial, "share"))
    assert [result.passed for result in results] == [1.0, 1.0, 1.0, 0.0]
    assert results[3].ended is Ended.TIME
    assert trial.seconds == 21
    assert given[:2] == [2.0, 9.0]  # the first checker has what its program left of 12 s
    assert min(given) < 2.0  # and a later one what all others left


def test_an_output_that_is_too_large_for_a_checker_fails():
    """Where much is expected much may be printed, and more than a call can carry."""
    info = checker("def check(input, output):\n    return True", memory_mb=512)
    info["cases"] = [{"input": "", "output": "x" * 3_000_000}]
    output = verdict(info, "print('x' * 5_000_000)", case_time=10.0)
    assert output.score == 0
    assert "too large" in output.reason
