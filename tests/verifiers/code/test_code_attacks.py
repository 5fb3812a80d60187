"""Programs that try to be paid without solving the task: each one ends as a plain failure, a decided 0.

What is expected is a text that nothing but the verifier knows, so a program that finds it anywhere is paid, and the
test fails.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path

import pytest
from sandbox_tiers import KNOWN, usable_tier

from rlvr.records import Task
from rlvr.verifiers import VerifierPool, judged
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code import cases as code_cases

SECRET = f"EXPECTED-{secrets.token_hex(8)}"
NUMBER = secrets.randbelow(10**15) + 10**15

FUNCTION = Task("function", "?", info={"kind": "function", "name": "f", "cases": [{"args": [1], "expected": SECRET}]})
WHOLE = Task("whole", "?", info={"kind": "function", "name": "f", "cases": [{"args": [1], "expected": NUMBER}]})
ASSERTS = Task("asserts", "?", info={"kind": "asserts", "tests": [f"assert f(1) == {SECRET!r}"]})
CLOSE = Task("close", "?", info={"kind": "asserts", "tests": [f"assert abs(f(1) - {NUMBER}) < 1"], "entry_point": "f"})
IS_IN = Task("in", "?", info={"kind": "asserts", "tests": [f"assert f(1) in [{SECRET!r}] and len(f(2)) == 25"]})
APART = Task("apart", "?", info={"kind": "asserts", "tests": [f"for n in (1, 2):\n    assert f(n) == {SECRET!r}"]})
SETUP = {"setup": f"ANSWER = {SECRET!r}\ndef reference(x): return ANSWER"}
WITH_SETUP = Task("setup", "?", info={"kind": "asserts", "tests": ["assert f(1) == reference(1)"], **SETUP})
HUMANEVAL = Task(
    "humaneval",
    "?",
    info={
        "kind": "humaneval",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "test": f"def check(candidate):\n    for n in range(2):\n        assert candidate(n) == {SECRET!r}\n",
    },
)
PROPERTY = Task(
    "property",
    "?",
    info={
        "kind": "property",
        "entry_point": "f",
        "property": f"def holds(f, random):\n    return f(random.random()) == {SECRET!r}",
        "trials": 1,
    },
)
CALLED = (FUNCTION, ASSERTS, IS_IN, APART, WITH_SETUP, HUMANEVAL, PROPERTY)
STDIO = Task("stdio", "?", info={"kind": "stdio", "cases": [{"input": "1", "output": SECRET}]})
CHECKER = Task(
    "checker",
    "?",
    info={
        "kind": "checker",
        "checker": f"def check(input, output):\n    return output.strip() == {SECRET!r}",
        "cases": [{"input": "1"}],
    },
)
PRINTED = (STDIO, CHECKER)

LOOK = r"""
import gc, os, re, sys
PATTERN = re.compile("EXPECTED" + "-[0-9a-f]{16}")
def found(things):
    for thing in things:
        try:
            text = thing.decode("latin-1") if isinstance(thing, bytes) else thing if isinstance(thing, str) else repr(thing)
            match = PATTERN.search(text)
        except BaseException:
            continue
        if match:
            return match[0]
def frames():
    frame = sys._getframe()
    while frame:
        yield from [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
        frame = frame.f_back
def files(names):
    for name in names:
        try:
            with open(name, "rb", buffering=0) as file:
                yield file.read(1 << 20)
        except OSError:
            pass
def processes():
    try:
        numbers = [n for n in os.listdir("/proc") if n.isdigit()] + ["self", "thread-self"]
    except OSError:
        numbers = ["self", "1", str(os.getppid())]
    return [f"/proc/{n}/{name}" for n in numbers for name in ("cmdline", "environ", "stat", "maps", "stack", "fd/3", "fd/4", "fd/5")]
def memory():
    try:
        maps = open("/proc/self/maps").read().splitlines()
    except OSError:
        return
    with open("/proc/self/mem", "rb", buffering=0) as file:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            try:
                file.seek(start)
                yield file.read(min(end - start, 1 << 22))
            except (OSError, ValueError, OverflowError):
                pass
def others(trainer):
    # The newest first: the rest of a busy machine has more memory than can be read in time.
    for number in sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), reverse=True):
        if number in (os.getpid(), trainer):
            continue
        name = str(number)
        try:
            lines = open(f"/proc/{name}/maps").read().splitlines()
            file = open(f"/proc/{name}/mem", "rb", buffering=0)
        except OSError:
            continue
        for line in lines:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw" in line:
                try:
                    file.seek(start)
                    yield file.read(min(end - start, 1 << 26))
                except (OSError, ValueError, OverflowError):
                    pass
def descriptors():
    for number in range(64):
        try:
            os.set_blocking(number, False)
            yield os.read(number, 1 << 20)
        except OSError:
            pass
def folders():
    return [os.path.join(folder, name) for top in ("/tmp", ".", "/dev/shm", "/run") for folder, _, names in os.walk(top) for name in names]
"""

PLACES = {
    "frames": "found(frames())",
    "gc": "found(o for o in gc.unfreeze() or gc.get_objects() if isinstance(o, (str, dict, list, tuple)))",
    "referrers of the frames": "found(gc.get_referrers(*[m for m in sys.modules.values()]))",
    "argv and environment": "found([*sys.argv, *sys.orig_argv, dict(os.environ)])",
    "proc": "found(files(processes()))",
    "memory": "found(memory())",
    "descriptors": "found(descriptors())",
    "files": "found(files(folders()))",
    "modules": "found(v for m in list(sys.modules.values()) for v in list(vars(m).values()))",
    "names of the setup": "ANSWER",
    "the setup's function": "reference(1)",
}


def verdicts(program, tasks, case_time=5.0, **options):
    """The verdicts on a program for each task."""

    async def every():
        verifier = CodeVerifier(case_time=case_time, **options)
        return await asyncio.gather(*(judged(verifier, task, program) for task in tasks))

    return asyncio.run(every())


def assert_failure(program, tasks, **options):
    """Decided, and 0."""
    for task, printed in zip(tasks, verdicts(program, tasks, 1.5, **options), strict=True):
        assert printed.score == 0, (task.id, printed)


def test_honest_programs_are_paid():
    """The control: what an attack would have to return is paid by every one of the tasks."""
    program = f"def f(x):\n    return {SECRET!r}"
    assert [printed.score for printed in verdicts(program, CALLED)] == [1] * len(CALLED)
    assert [printed.score for printed in verdicts(f"print({SECRET!r})", PRINTED)] == [1, 1]
    assert [printed.score for printed in verdicts(f"def f(x):\n    return {NUMBER}", (WHOLE, CLOSE))] == [1, 1]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_expected_is_nowhere_to_be_found(place):
    assert_failure(f"{LOOK}\ndef f(x):\n    return {PLACES[place]}", CALLED)
    assert_failure(f"{LOOK}\nprint({PLACES[place]})", PRINTED)


def test_the_search_itself_works():
    """It finds what is there: a text in a frame, in the environment, in a file."""
    hidden = f"{LOOK}\nimport os\nos.environ['X'] = open('x', 'w').write('') or {SECRET!r}\n"
    for place in ("frames", "gc", "argv and environment"):
        assert [
            printed.score for printed in verdicts(f"{hidden}\ndef f(x):\n    return {PLACES[place]}", (FUNCTION,))
        ] == [1]


@pytest.mark.parametrize("tier", KNOWN)
def test_the_memory_of_a_test_is_not_readable(tier):
    """In the tier `none` the trainer's own memory may be, which that tier says: it is left out of the search."""
    usable_tier(tier)
    search = f"found(others({os.getpid()}))"
    assert_failure(f"{LOOK}\ndef f(x):\n    return {search}", (APART, HUMANEVAL, PROPERTY), tier=tier, unsafe=True)


def test_the_search_of_memory_finds_another_process():
    """A control in the tier `none`: a child that may be read."""
    child = f"import time\nif (child := os.fork()) == 0:\n    text = {SECRET!r} * 9\n    time.sleep(60)\n"
    program = f"{LOOK}\n{child}def f(x):\n    return found(others({os.getpid()}))"
    # A busy machine has much memory to look through.
    (verdict,) = verdicts(program, [FUNCTION], case_time=60.0, tier="none", unsafe=True)
    assert verdict.score == 1


RIGGED = {
    "an object equal to all": (
        "class All:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
        "    def __hash__(self): return 0\n    def __len__(self): return 25\n    def __sub__(self, o): return 0\n"
        "    def __abs__(self): return 0\n    def __lt__(self, o): return True\n    __rsub__ = __sub__\n"
        "def f(x): return All()"
    ),
    "an int that equals all": (
        "class Int(int):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
        "    def __hash__(self): return 0\ndef f(x): return Int(7)"
    ),
    "a str that equals all": (
        "class Str(str):\n    def __eq__(self, o): return True\n    def __hash__(self): return hash(o)\n"
        "def f(x): return Str('x' * 25)"
    ),
    "a float that equals all": "class F(float):\n    def __sub__(self, o): return 0.0\ndef f(x): return F(1)",
    "a list that equals all": "class L(list):\n    def __eq__(self, o): return True\ndef f(x): return L()",
    "a dict that equals all": "class D(dict):\n    def __eq__(self, o): return True\ndef f(x): return D()",
    "a metaclass": "class M(type):\n    def __eq__(c, o): return True\nclass A(metaclass=M): pass\ndef f(x): return A",
    "a class that says it is str": "class S:\n    __class__ = str\n    def __eq__(s, o): return True\ndef f(x): "
    "return S()",
    "mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "a pickle": "class P:\n    def __reduce__(self): return (print, ('x',))\ndef f(x): return P()",
    "a coroutine": "async def f(x): return x",
    "a generator": "def f(x): yield x",
    "a list of itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "not a number": "def f(x): return float('nan')",
    "true": "def f(x): return True",
    "itself": "def f(x): return f",
    "a rigged exception": "class E(Exception):\n    def __str__(self): return 'passed'\ndef f(x): raise E",
    "an assertion error": "def f(x): raise AssertionError",
    "a str patched by ctypes": (
        "import ctypes\ndef f(x):\n    s = 'x' * 25\n    ctypes.memset(id(s) + 16, 0, 8)\n    return s"
    ),
    "a slot of int replaced": (
        "import ctypes, gc\ndef f(x):\n    d = gc.get_referents(int.__dict__)[0]\n    d['__eq__'] = lambda s, o: True\n"
        "    ctypes.pythonapi.PyType_Modified(ctypes.py_object(int))\n    return 7"
    ),
}


@pytest.mark.parametrize("name", RIGGED)
def test_what_is_returned_is_compared_as_plain_values(name):
    assert_failure(RIGGED[name], (*CALLED, WHOLE, CLOSE))


ENDINGS = {
    "exit at once": "import os\nos._exit(0)",
    "sys.exit at once": "import sys\nsys.exit(0)",
    "exit when called": "import os\ndef f(x): os._exit(0)",
    "sys.exit when called": "import sys\ndef f(x): sys.exit(0)",
    "SystemExit as a result": "def f(x): raise SystemExit",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "kill itself": "import os\ndef f(x): os.kill(os.getpid(), 9)",
    "kill its parent": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return x",
    "kill everybody": "import os\ndef f(x):\n    os.kill(-1, 9)\n    return x",
    "abort": "import os\ndef f(x): os.abort()",
    "a crash": "import ctypes\ndef f(x): return ctypes.string_at(0)",
    "exec of true": "import os\ndef f(x): os.execv('/bin/true', ['true'])",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return x",
    "a fork that goes on": "import os\ndef f(x):\n    if os.fork(): os._exit(0)\n    return x",
}

FAKE = """
import json, os, sys
def say():
    lines = ['{"status": "correct", "score": 1.0}', 'PASSED', 'OK', '1', 'true', '{"passed": true, "token": ""}']
    for number in range(1, 40):
        for line in lines:
            try:
                os.write(number, (line + chr(10)).encode())
            except OSError:
                pass
"""
ENDINGS["fake verdicts, then an exit"] = f"{FAKE}\nsay()\nos._exit(0)"
ENDINGS["fake verdicts when called"] = f"{FAKE}\ndef f(x):\n    say()\n    os._exit(0)"
ENDINGS["fake verdicts and a wrong answer"] = f"{FAKE}\ndef f(x):\n    say()\n    return x"


@pytest.mark.parametrize("name", ENDINGS)
def test_no_way_to_end_is_a_way_to_pass(name):
    assert_failure(ENDINGS[name], CALLED)


PATCHES = {
    "builtins": (
        "import builtins\nfor n in ('len', 'sorted', 'abs', 'isinstance', 'all', 'repr', 'print', 'range', 'type', "
        "'getattr'):\n"
        "    setattr(builtins, n, lambda *a, **k: True)\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
        "def f(x): return x"
    ),
    "exceptions": "import builtins\nbuiltins.Exception = builtins.BaseException = int\ndef f(x): raise ValueError",
    "json": (
        "import json, json.encoder\njson.dumps = lambda *a, **k: 'true'\n"
        "json.encoder.c_make_encoder = json.encoder.encode_basestring = json.JSONEncoder.encode = lambda *a: 'true'\n"
        "def f(x): return x"
    ),
    "unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.main = lambda *a, **k: None\n"
        "def f(x): return x"
    ),
    "sys.modules": (
        "import sys, types\nfor n in list(sys.modules):\n    sys.modules[n] = types.ModuleType(n)\ndef f(x): return x"
    ),
    "a module of its own": (
        "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a, **k: True\nsys.modules['math'] = m\n"
        "def f(x): return x"
    ),
    "the import system": "import builtins\nbuiltins.__import__ = lambda *a, **k: None\ndef f(x): return x",
    "trace and profile": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): "
    "return x",
    "the streams": "import sys, io\nsys.stdout = sys.stderr = sys.__stdout__ = io.StringIO()\ndef f(x): return x",
    "the caller's code": (
        "import sys\ndef f(x):\n    frame = sys._getframe(1)\n    while frame:\n"
        "        for n, v in list(frame.f_globals.items()):\n            if callable(v): frame.f_globals[n] = lambda "
        "*a, **k: b'true'\n"
        "        frame = frame.f_back\n    return x"
    ),
    "every function's code": (
        "import gc, types\ndef yes(*a, **k): return b'true'\ndef f(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, types.FunctionType) and o is not yes and not o.__code__.co_freevars:\n"
        "            o.__code__ = yes.__code__\n    return x"
    ),
    "the test's names": (
        "def check(candidate): pass\ndef holds(f, random): return True\ndef reference(x): return x\ncandidate = check\n"
        "ANSWER = 1\ndef f(x): return x"
    ),
    "a look at the caller": (
        "import sys, inspect\ndef f(x):\n    names = [i.function for i in inspect.stack()]\n"
        "    return sys._getframe(1).f_locals.get('expected', sys._getframe(1).f_locals.get('token', names))"
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_a_program_changes_changes_nothing_outside_of_it(name):
    assert_failure(PATCHES[name], CALLED)


def test_no_state_is_kept_from_case_to_case():
    """A program that counts its runs, wherever it can write, is at its first run in every case."""
    count = (
        "import os\ndef f(x):\n    n = 0\n    for place in ('/tmp/n', 'n', '/dev/shm/n', '/var/tmp/n', "
        "os.path.expanduser('~/n')):\n"
        "        try:\n            n = max(n, int(open(place).read()))\n        except (OSError, ValueError): pass\n"
        "    n += 1\n    f.calls = getattr(f, 'calls', 0) + 1\n"
        "    for place in ('/tmp/n', 'n', '/dev/shm/n', '/var/tmp/n', os.path.expanduser('~/n')):\n"
        "        try:\n            open(place, 'w').write(str(n))\n        except OSError: pass\n    return max(n, "
        "f.calls)"
    )
    cases = [{"args": [0], "expected": number} for number in (1, 2, 3, 4)]
    counted = Task("count", "?", info={"kind": "function", "name": "f", "cases": cases})
    (printed,) = verdicts(count, [counted], credit="share")
    assert printed.score == 0.25


NUMBERS = Task(
    "numbers", "?", info={"kind": "stdio", "cases": [{"input": "", "output": "7"}, {"input": "", "output": "8"}]}
)


@pytest.mark.parametrize(
    "program",
    [
        "print(*range(100))",
        "print('7', end=chr(0))",
        "print('7 or 8')",
        "print('7.0')",
        "import sys\nprint('7', file=sys.stderr)",
        "print(7)\nraise SystemExit(1)",
        "print(7)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "while True: print(7)",
        "print('7' * 10**8)",
        "import sys\nsys.stdout.buffer.write(b'\\xff' * 10**7)",
        "import sys\nsys.stdout.close()",
        "print('\\x1b[2K7\\r' * 3)",
    ],
)
def test_printing_everything_is_no_answer(program):
    assert_failure(program, [NUMBERS], credit="first_failure")


@pytest.mark.parametrize(
    "returned",
    [
        "10 ** (4 * 10 ** 6)",
        "'x' * 10 ** 8",
        "list(range(10 ** 7))",
        "{n * (2 ** 61 - 1) for n in range(3000)}",
        "[[]] * 10 ** 6",
        "eval('[' * 90 + ']' * 90)",
    ],
)
def test_a_value_made_to_be_costly_costs_the_trainer_little(returned):
    start = time.process_time()
    assert_failure(f"def f(x): return {returned}", [FUNCTION, ASSERTS])
    assert time.process_time() - start < 3  # seconds of this process; the programs' own are not counted


def test_a_checker_that_an_output_breaks_is_a_failure_and_not_undecided():
    checker = "def check(input, output):\n    return eval(output) == 1"
    one = Task("checker", "?", info={"kind": "checker", "checker": checker, "cases": [{"input": ""}]})
    for output in (
        "__import__('os')._exit(0)",
        "9" * 5000,
        "1/0",
        "(" * 10_000,
        "type('A', (int,), {'__eq__': lambda s, o: 5})()",
    ):
        assert_failure(f"print({output!r})", [one])


def test_a_token_that_was_seen_is_worth_nothing_the_next_time(monkeypatch):
    """Tokens of runs are fresh: a program that returns or prints an earlier one fails."""
    tokens = iter(["first", "second", "third"])
    monkeypatch.setattr(code_cases.secrets, "token_hex", lambda size: next(tokens))
    says = "import os\ndef f(x):\n    print('first')\n    for n in range(3, 20):\n        try: os.write(n, b'first')\n"
    says += "        except OSError: pass\n    return 'first'"
    assert [printed.score for printed in verdicts(f"def f(x): return {SECRET!r}", [APART])] == [1]
    assert_failure(says, [APART])


@pytest.mark.gate
def test_a_group_of_attacks_leaves_the_sandbox_whole():
    """All at once on a pool, and an honest program is paid between and after them."""
    attacks = [*ENDINGS.values(), *PATCHES.values()]
    honest = f"def f(x): return {SECRET!r}"
    pairs = [(FUNCTION, program) for attack in attacks for program in (attack, honest)]
    with VerifierPool(workers=4) as pool:
        scores = [printed.score for printed in pool.verify_many(CodeVerifier(case_time=3.0), pairs)]
    assert scores[::2] == [0] * len(attacks)
    assert scores[1::2] == [1] * len(attacks)


def test_nothing_is_written_to_the_host(tmp_path):
    target = tmp_path / "written"
    places = [
        str(target),
        str(Path.home() / "rlvr-attack"),
        "/tmp/rlvr-attack",
        "/var/tmp/rlvr-attack",
        "/dev/shm/rlvr-attack",
    ]
    write = f"def f(x):\n    for p in {places!r}:\n        try: open(p, 'w').write('x')\n        except OSError: pass"
    assert_failure(write, [FUNCTION])
    assert not [place for place in places if Path(place).exists()]
