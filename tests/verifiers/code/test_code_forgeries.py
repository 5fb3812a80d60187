"""Programs that make a test agree with them, beside honest ones: what a test compares with is never the program's to
choose."""

from __future__ import annotations

import asyncio

import pytest

from rlvr.records import Task
from rlvr.verifiers import judged
from rlvr.verifiers.code import CodeVerifier


def asserts(*tests, **more):
    return {"kind": "asserts", "tests": list(tests), **more}


def prop(body, entry="f"):
    lines = "\n    ".join(["xs = [random.randint(0, 9) for _ in range(5)]", *body])
    return {
        "kind": "property",
        "entry_point": entry,
        "property": f"def holds(f, random):\n    {lines}",
        "trials": 2,
    }


def humaneval(entry, *lines, helpers=""):
    body = "\n    ".join(lines)
    test = f"{helpers}\ndef check(candidate):\n    {body}\n"
    return {"kind": "humaneval", "prompt": f"def {entry}(xs):\n", "entry_point": entry, "test": test}


POLY = "def poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))"
SORTS = "def f(xs): return sorted(xs)"
EMPTIES = "def f(xs):\n    xs.clear()\n    return []"

CHANGED_ARGUMENTS = {
    "property": (prop(["return f(xs) == sorted(xs)"]), SORTS, EMPTIES),
    "property with a name": (prop(["got = f(xs)", "return got == sorted(xs)"]), SORTS, EMPTIES),
    "property of a permutation": (
        prop(["ys = f(xs)", "return sorted(xs) == sorted(ys) and all(a <= b for a, b in zip(ys, ys[1:]))"]),
        SORTS,
        "def f(xs):\n    xs.clear()\n    return xs",
    ),
    "property of a dict": (
        prop(["d = {x: -x for x in xs}", "return f(d) == {v: k for k, v in d.items()}"]),
        "def f(d): return {v: k for k, v in d.items()}",
        "def f(d):\n    d.clear()\n    return {}",
    ),
    "property in place": (prop(["f(xs)", "assert sorted(xs) == xs"]), None, "def f(xs): xs[:] = [0] * len(xs)"),
    "asserts": (asserts("data = [3, 1, 2]\nassert f(data) == sorted(data)"), SORTS, EMPTIES),
    "asserts with a name": (asserts("data = [3, 1]\ngot = f(data)\nassert got == sorted(data)"), SORTS, EMPTIES),
    "asserts in a loop": (
        asserts("for d in ([1, 2], [3, 4, 5]):\n    assert f(d) == d[::-1]"),
        "def f(xs): return xs[::-1]",
        EMPTIES,
    ),
    "a length": (asserts("data = [1, 1]\nassert f(data) == len(data)"), "def f(xs): return len(xs)", EMPTIES + " or 0"),
    "humaneval": (
        humaneval(
            "f", "for xs in [[1, 2], [-6, 11, -6, 1]]:", "    assert abs(poly(xs, candidate(xs))) <= 1e-4", helpers=POLY
        ),
        "def f(xs): return -0.5 if len(xs) == 2 else 1",
        "def f(xs):\n    xs[:] = [0] * len(xs)\n    return 7",
    ),
    "humaneval and nothing returned": (
        humaneval("f", "xs = [1, 2]", "x = candidate(xs)", "assert abs(poly(xs, x)) <= 1e-4", helpers=POLY),
        "def f(xs): return -0.5",
        "def f(xs): xs.clear()",
    ),
}
IN_PLACE = {
    "thrown away": (asserts("xs = [2, 1]\nf(xs)\nassert xs == [1, 2]"), "def f(xs): xs.sort()", SORTS),
    "no result": (asserts("xs = [2, 1]\nassert f(xs) is None\nassert xs == [1, 2]"), "def f(xs): xs.sort()", SORTS),
    "a length and the list": (
        asserts("xs = [1, 1, 2]\nk = f(xs)\nassert k == 2 and sorted(xs[:k]) == [1, 2]"),
        "def f(xs):\n    xs[:] = sorted(set(xs)) + [0]\n    return 2",
        "def f(xs): return 2",
    ),
    "a name that nobody reads": (
        asserts("'é'; xs = [2, 1]; _ = f(xs); assert xs == [1, 2]"),
        "def f(xs): xs.sort()",
        SORTS,
    ),
    "humaneval": (
        humaneval("f", "xs = [2, 1]", "candidate(xs)", "assert xs == [1, 2]"),
        "def f(xs): xs.sort()",
        SORTS,
    ),
}
TAKEN_NAMES = {
    "isclose": (asserts("assert isclose(f(1), 2.5)"), "def f(x): return 2.5", "def isclose(*a, **k): return True"),
    "isclose of the standard library's": (
        asserts("assert isclose(mean([1, 2]), 1.5)"),
        "def mean(xs): return sum(xs) / len(xs)",
        "def mean(xs): return 0\ndef isclose(*a, **k): return True",
    ),
    "Counter": (
        asserts("assert Counter(f(1)) == Counter([1, 2])"),
        "def f(x): return [2, 1]",
        "def Counter(x): return 0",
    ),
    "Decimal": (
        asserts("assert f(1) == Decimal('1.5')"),
        "from decimal import Decimal\ndef f(x): return Decimal('1.50')",
        "def Decimal(x): return 0",
    ),
    "deepcopy": (
        asserts("xs = [1, 2]\nassert f(deepcopy(xs)) == xs[::-1]"),
        "def f(xs): return xs[::-1]",
        "def deepcopy(xs): return 0",
    ),
    "a module": (
        asserts("assert math.floor(f(1)) == math.floor(2.5)"),
        "def f(x): return 2.5",
        "class math:\n    floor = lambda x: 0",
    ),
    "property": (
        prop(["return math.isclose(f(xs), fsum(xs))"]),
        "def f(xs): return float(sum(xs))",
        "class math:\n    isclose = lambda x, y: True\ndef fsum(x): return 0",
    ),
    "humaneval": (
        humaneval("f", "for n in (1, 2):", "    assert Counter(candidate(n)) == Counter([n])"),
        "def f(n): return [n]",
        "def Counter(x): return 0",
    ),
    "a function of the same name as the library's": (
        asserts("assert gcd(4, 6) == 2", "assert gcd(1, 3) == 1"),
        "def gcd(a, b): return gcd(b, a % b) if b else a",
        "def gcd(a, b): return 2",
    ),
    "a function of that name that the task names": (
        asserts("assert sum(1, 2) == 3", "for n in (1, 2):\n    assert sum(n, n) == 2 * n", entry_point="sum"),
        "def sum(a, b): return a + b",
        "def sum(a, b): return 3",
    ),
}


def scores(info, *programs, **options):
    """The scores of programs, and why."""

    async def every():
        verifier = CodeVerifier(**{"case_time": 10.0, **options})
        task = Task("t", "?", info=info)
        return await asyncio.gather(*(judged(verifier, task, program) for program in programs))

    verdicts = asyncio.run(every())
    return [verdict.score for verdict in verdicts], [verdict.reason for verdict in verdicts]


def check(info, right, forged):
    result, reasons = scores(info, *(program for program in (right, forged) if program is not None))
    assert result == ([1.0, 0.0] if right is not None else [0.0]), reasons


@pytest.mark.parametrize("name", CHANGED_ARGUMENTS)
def test_what_a_program_does_to_its_argument_does_not_change_the_right_answer(name):
    check(*CHANGED_ARGUMENTS[name])


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_is_seen_where_no_answer_depends_on_it(name):
    check(*IN_PLACE[name])


@pytest.mark.parametrize("name", TAKEN_NAMES)
def test_names_of_the_library_mean_the_library(name):
    info, right, forged = TAKEN_NAMES[name]
    check(info, right, f"{forged}\ndef f(x): return 0")
