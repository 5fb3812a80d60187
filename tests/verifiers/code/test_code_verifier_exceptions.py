"""What a program raises is judged as its failure in every form of test, and never ends or passes the test that calls
it."""

from __future__ import annotations

import asyncio
import builtins
import secrets

import pytest

from rlvr.records import Task
from rlvr.verifiers import judged
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code.sandbox import languages
from rlvr.verifiers.code.sandbox.inside import crossing

LOOPS = {
    "map": "for got, want in zip(map(f, [1, 2]), [2, 4]):\n    assert got == want",
    "all": "assert all(map(lambda n: f(n) == 2 * n, [1, 2]))",
    "any": "assert not any(map(lambda n: f(n) != 2 * n, [1, 2]))",
    "filter": "assert list(filter(lambda n: f(n) != 2 * n, [1, 2])) == []",
    "iter": "for got in iter(lambda: f(1), 2):\n    assert False",
    "generator": "def each():\n    yield f(1)\nfor got in each():\n    assert got == 2",
    "delegation": "def inner():\n    assert (yield) == 3 and f(1) == 2\n"
    "def outer():\n    yield from inner()\nrun = outer()\nnext(run)\ntry:\n    run.send(3)\nexcept StopIteration: pass",
    "async for": "import asyncio\nclass Each:\n    def __aiter__(self): return self\n"
    "    async def __anext__(self):\n        if f(1) == 2: raise StopAsyncIteration\n        return 0\n"
    "async def run():\n    async for got in Each():\n        assert False\nasyncio.run(run())",
    "getitem": "class Each:\n    def __getitem__(self, n):\n        if n > 1: raise IndexError\n        assert f(n) "
    "== 2 * n\n"
    "for got in Each(): pass",
    "getitem and a helper": "class Each:\n    def value(self, n): return f(n)\n"
    "    def __getitem__(self, n):\n        if n > 1: raise IndexError\n        assert self.value(n) == 2 * n\n"
    "list(Each())",
    "getattr": "class Each:\n    def __getattr__(self, name): return f(1)\nassert not hasattr(Each(), 'x') or "
    "Each().x == 2",
    "rewritten": "assert f(1) == 2",
}
HOLDS = "def holds(f, random):\n    return all(map(lambda n: f(n) == 2 * n, [1, 2]))"
CHECK = "def check(candidate):\n    assert all(map(lambda n: candidate(n) == 2 * n, [1, 2]))"
CHECKER = "def check(input, output):\n    return True"
TASKS = (
    Task("asserts", "?", info={"kind": "asserts", "entry_point": "f", "tests": list(LOOPS.values())}),
    Task("function", "?", info={"kind": "function", "name": "f", "cases": [{"args": [1], "expected": 2}]}),
    Task("humaneval", "?", info={"kind": "humaneval", "prompt": "def f(x):\n", "entry_point": "f", "test": CHECK}),
    Task("property", "?", info={"kind": "property", "entry_point": "f", "property": HOLDS, "trials": 1}),
)
PRINTED = (
    Task("stdio", "?", info={"kind": "stdio", "cases": [{"input": "", "output": "2"}]}),
    Task("checker", "?", info={"kind": "checker", "checker": CHECKER, "cases": [{"input": ""}]}),
)
BUILTIN = sorted({value.__name__ for value in vars(builtins).values()
                  if isinstance(value, type) and issubclass(value, BaseException)})  # fmt: skip
MADE = {name: name for name in BUILTIN}
MADE |= {name: f"{name}('ascii', b'', 0, 1, '')" for name in ("UnicodeDecodeError",)}
MADE |= {"UnicodeEncodeError": "UnicodeEncodeError('ascii', '', 0, 1, '')"}
MADE |= {"UnicodeTranslateError": "UnicodeTranslateError('', 0, 1, '')"}
MADE |= {name: f"{name}('', [{inner}()])" for name, inner in
         (("ExceptionGroup", "StopIteration"), ("BaseExceptionGroup", "SystemExit"))}  # fmt: skip
MADE["StopIteration with a value"] = "StopIteration(2)"
MADE["SystemExit with success"] = "SystemExit(0)"

HOSTILE = {
    "no text": "class E({}):\n    def __str__(self): raise StopIteration\n    __repr__ = __str__",
    "exit as text": "class E({}):\n    def __str__(self): raise SystemExit(0)\n    __repr__ = __str__",
    "a str that is none": "class S(str):\n    def __getitem__(self, i): raise SystemExit(0)\n"
    "class E({}):\n    def __str__(self): return S('x')",
    "a class that lies": "class E({}):\n    @property\n    def __class__(self): raise SystemExit(0)",
    "attributes that raise": "class E({}):\n    def __getattribute__(self, name): raise SystemExit(0)",
    "args that raise": "class E({}):\n    @property\n    def args(self): raise SystemExit(0)\n"
    "    def with_traceback(self, trace): raise StopIteration",
    "a code of its own": "class E({}):\n    code = property(lambda self: 0)",
    "a metaclass": "class M(type):\n    def __instancecheck__(cls, o): return True\n    __subclasscheck__ = "
    "__instancecheck__\n"
    "    @property\n    def __name__(cls): raise SystemExit(0)\n    @property\n    def __mro__(cls): raise "
    "SystemExit(0)\n"
    "    def mro(cls): return type.mro(cls)\nclass E({}, metaclass=M): pass",
    "two bases": "class E({}, ValueError): pass",
}


def verdicts(program, tasks, **options):
    """The verdicts on a program for each task."""

    async def every():
        verifier = CodeVerifier(case_time=10.0, **options)
        return await asyncio.gather(*(judged(verifier, task, program) for task in tasks))

    return asyncio.run(every())


def assert_fails(program, tasks):
    """Every case of every task fails, and each verdict is decided."""
    for task, verdict in zip(tasks, verdicts(program, tasks, credit="share"), strict=True):
        assert verdict.score == 0, (task.id, program, verdict)


def test_an_honest_program_passes_every_form():
    assert [verdict.score for verdict in verdicts("def f(x): return 2 * x", TASKS)] == [1] * len(TASKS)
    assert [verdict.score for verdict in verdicts("print(2)", PRINTED)] == [1, 1]


@pytest.mark.parametrize("name", MADE)
def test_no_builtin_exception_passes_a_test(name):
    assert_fails(f"def f(x): raise {MADE[name]}", TASKS)


def test_no_builtin_exception_ends_a_script_well():
    """All in one: a script with each of them ends as a failure, but for the exit code 0 that it may ask for."""
    raised = [made for made in MADE.values() if made not in ("SystemExit", "SystemExit(0)")]
    cases = [{"input": made} for made in raised]
    one = Task("t", "?", info={"kind": "checker", "checker": CHECKER, "cases": cases})
    assert_fails("raise eval(input())", [one])


@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_method_of_an_exception_passes_a_test(name):
    for base in ("StopIteration", "Exception", "SystemExit"):
        assert_fails(f"{HOSTILE[name].format(base)}\ndef f(x): raise E", TASKS)
    assert_fails(f"{HOSTILE[name].format('Exception')}\nraise E", PRINTED)


def test_a_forged_report_of_an_exception_passes_no_test():
    """The program writes on its private channel what its own process never writes."""
    for claim in ('["E","","StopIteration"]', '["StopIteration",""]', "[1,2,3]", '"E"', '["E","","int"]', "nonsense"):
        body = b"r" + claim.encode()
        report = len(body).to_bytes(4, "big") + body
        assert_fails(
            f"import os, time\ndef f(x):\n    os.write(3, {report!r})\n    time.sleep(0.2)\n    os._exit(0)", TASKS
        )


def test_a_test_that_expects_an_exception_gets_it():
    """Classes of Python's own by themselves, a program's own class by the one that it derives from."""
    tests = [
        f"try:\n    f({kind!r})\nexcept {kind} as error:\n    assert type(error) is {kind} and 'words' in str(error)\n"
        "else:\n    assert False"
        for kind in ("ValueError", "KeyError", "IndexError", "ZeroDivisionError", "TypeError", "OSError")
    ]
    tests.append("try:\n    f('Own')\nexcept LookupError: pass\nelse:\n    assert False")
    tests.append("try:\n    f('UnicodeDecodeError')\nexcept UnicodeDecodeError: pass\nelse:\n    assert False")
    one = Task("t", "?", info={"kind": "asserts", "entry_point": "f", "tests": tests})
    program = (
        "class Own(KeyError): pass\ndef f(kind):\n    if kind == 'UnicodeDecodeError': b'\\xff'.decode()\n"
        "    raise eval(kind)('words')"
    )
    assert [verdict.score for verdict in verdicts(program, [one])] == [1]


def test_what_the_harness_raises_is_not_taken_for_the_candidates():
    """Arguments that cannot be sent are the test's fault: it must not pass because it expects an error."""
    tests = ["class Own: pass\ntry:\n    f(Own())\nexcept ValueError: pass\nelse:\n    assert False"]
    one = Task("t", "?", info={"kind": "asserts", "entry_point": "f", "tests": tests})
    (verdict,) = verdicts("def f(x): return x", [one])
    assert verdict.score == 0
    assert "not a plain value: Own" in verdict.reason


def test_described_survives_a_random_name_and_message():
    name, message = secrets.token_hex(8), secrets.token_hex(8)
    error = type(name, (KeyError,), {"__str__": lambda self: message})()
    assert crossing.described(error) == [name, message, "KeyError", "[]"]
    assert type(crossing.raised_again([name, message, "KeyError", ""])) is KeyError


@pytest.mark.skipif("javascript" not in languages(), reason="nothing here runs javascript")
def test_nothing_that_javascript_throws_is_a_success():
    cases = [
        {"input": thrown}
        for thrown in ("null", "undefined", "0", "''", "new Proxy({}, {get() { throw 0 }})",
                       "Object.create(null)", "{get stack() { throw 1 }, toString() { throw 2 }}",
                       "class { static toString() { throw 0 } }", "Promise.reject(0)")
    ]  # fmt: skip
    one = Task("t", "?", info={"kind": "checker", "language": "javascript", "checker": CHECKER, "cases": cases})
    program = "throw eval('(' + require('fs').readFileSync(0, 'utf8') + ')')"
    (verdict,) = verdicts(f"```javascript\n{program}\n```", [one], credit="share")
    assert verdict.score == 0, verdict
