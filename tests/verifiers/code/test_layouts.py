"""Layouts of tasks: bad tasks are found with their place, and tests find their function."""

from __future__ import annotations

import re

import pytest

from rlvr.records import Task
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.layout_fields import LayoutError
from rlvr.verifiers.code.layouts import read_layout

HOW = Comparison()


def stdio(**more):
    return {"kind": "stdio", "cases": [{"input": "1", "output": "1"}], **more}


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({}, r"no info\['kind'\]; it is one of stdio, function"),
        ({"kind": "studio"}, r"'studio'.*did you mean"),
        (stdio(language="rust"), r"'rust'.*python, c, cpp or javascript"),
        (stdio(language="cpp", kind="function", name="f"), "is for Python.*use kind 'stdio'"),
        (stdio(time_limit=0), r"time_limit.*above 0"),
        (stdio(memory_mb="much"), r"memory_mb"),
        (stdio(cases=[]), "one at least"),
        (stdio(cases={"input": "1"}), "list of objects"),
        (stdio(cases=[{"input": "1", "output": "1"}, {"input": "2"}]), r"cases\[1\]: there is no 'output'"),
        (stdio(cases=[{"input": 1, "output": "1"}]), r"cases\[0\]: 'input' is int, not text"),
        (stdio(cases=[{"output": "\ud800"}]), "surrogate"),
        (stdio(cases=["1"]), r"cases\[0\] is an object"),
        (stdio(cases=[{"output": "1", "weight": -1}]), r"cases\[0\]: a weight"),
        (stdio(cases=[{"output": "1", "weight": 0}]), "weights of all cases are 0"),
        (stdio(comparison=[1]), "'comparison' is a mapping"),
        (stdio(comparison={"tolerence": 1}), "did you mean 'tolerance'"),
        (stdio(prelude="def"), "prelude is no Python"),
        ({"kind": "function", "name": "f()", "cases": [{"args": [], "expected": 1}]}, "name of a function"),
        (
            {"kind": "function", "name": "f", "cases": [{"args": [1], "expected": 1}], "result_argument": 1},
            r"cases\[0\]: there is no argument 1",
        ),
        (
            {"kind": "function", "name": "f", "cases": [{"args": [1], "expected": 1}], "result_argument": True},
            "number of an argument",
        ),
        ({"kind": "function", "name": "f", "cases": [{"args": [1]}]}, r"cases\[0\]: there is no 'expected'"),
        ({"kind": "function", "name": "f", "cases": [{"args": 1, "expected": 1}]}, r"cases\[0\]: 'args' is the list"),
        ({"kind": "function", "name": "f", "cases": [{"kwargs": [1], "expected": 1}]}, r"cases\[0\]: 'kwargs'"),
        ({"kind": "asserts", "tests": ["assert f(1) == 1", "assert f(1 =="]}, r"tests\[1\] is no Python"),
        ({"kind": "asserts", "tests": []}, "one at least"),
        ({"kind": "asserts", "tests": ["assert f(1)"], "setup": "import"}, "setup is no Python"),
        ({"kind": "asserts", "tests": ["assert True"], "entry_point": "f"}, "every program would pass"),
        ({"kind": "asserts", "tests": ["assert True"]}, "name it: entry_point"),
        ({"kind": "asserts", "tests": ["assert f(x) == 1"]}, r"tests\[0\] uses 'x'"),
        (
            {
                "kind": "asserts",
                "tests": ["out = StringIO()\nwith redirect_stdout(out):\n  f(1)\nassert out.getvalue() == '2'"],
            },
            "'redirect_stdout', but the program reads and prints in a process of its own",
        ),
        (
            {"kind": "asserts", "tests": ["import sys, io\nsys.stdin = io.StringIO('1')\nassert f() == 1"]},
            "'sys.stdin'",
        ),
        (
            {
                "kind": "asserts",
                "tests": ["with mock.patch('builtins.print') as p:\n  f(1)"],
                "setup": "from unittest import mock",
            },
            "builtins.print",
        ),
        ({"kind": "asserts", "tests": ["assert f(root) == 1"], "setup": "root = node"}, "uses 'node'"),
        ({"kind": "asserts", "tests": ["assert (f(1) == 2, 'words')"]}, r"tests\[0\].*always true.*without brackets"),
        ({"kind": "asserts", "tests": ["assert f(1)", "if 1:\n  assert [f(1) == 2]"]}, r"tests\[1\].*always true"),
        (
            {
                "kind": "humaneval",
                "prompt": "def f(x):\n",
                "entry_point": "f",
                "test": "def check(c):\n  assert (c(1), 2)",
            },
            "test: .*always true",
        ),
        (
            {
                "kind": "property",
                "entry_point": "f",
                "property": "def holds(f, r):\n  assert lambda: f(1)\n  assert {f(1): 1}",
            },
            "property: .*always true",
        ),
        ({"kind": "asserts", "tests": ["assert f(1)"], "weights": [1, 2]}, "list of 1 numbers"),
        (
            {"kind": "humaneval", "prompt": "def f(x:", "entry_point": "f", "test": "def check(c): assert c(1)"},
            "prompt is no",
        ),
        (
            {"kind": "humaneval", "prompt": "def f(x):\n", "entry_point": "f", "test": "assert f(1)"},
            r"check\(candidate\)",
        ),
        (
            {"kind": "humaneval", "prompt": "def f(x):\n", "entry_point": "f", "test": "def check(c): assert c(y)"},
            "uses 'y'",
        ),
        ({"kind": "checker", "checker": "def check(a): return 1", "cases": [{"input": ""}]}, r"check\(input, output\)"),
        ({"kind": "checker", "checker": "1 +", "cases": [{"input": ""}]}, "checker is no Python"),
        ({"kind": "property", "entry_point": "f", "property": "assert f(1)"}, r"holds\(f, random\)"),
        ({"kind": "property", "entry_point": "f", "property": "def holds(f, r): pass", "trials": 0}, "trials"),
    ],
)
def test_a_bad_task_is_found_with_its_place_and_mend(info, problem):
    with pytest.raises(LayoutError, match=f"(?s){problem}"):
        read_layout(info, "python", HOW)


def test_tests_find_their_function_and_imports_reach_the_program():
    setup = "import math\nANSWER = 4\ndef reference(x): return 2 * x"
    info = {"kind": "asserts", "tests": ["assert f(2) == ANSWER", "assert f(2) == 4"], "setup": setup}
    layout = read_layout(info, "python", HOW)
    assert (layout.entry_point, layout.prelude) == ("f", "import math")
    assert [type(case).__name__ for case in layout.cases] == ["ProxiedCase", "AssertCase"]


def test_tests_that_say_nothing_of_the_program_are_no_cases():
    info = {"kind": "humaneval", "prompt": "def f(x):\n", "entry_point": "f"}
    test = "def check(candidate):\n    '''Doc.'''\n    assert True, 'fine'\n    assert candidate(1) == 1\n"
    assert len(read_layout({**info, "test": test}, "python", HOW).cases) == 1


@pytest.mark.parametrize("name", ["sorted", "abs"])
def test_a_setup_that_gives_builtins_another_meaning_is_obeyed(name):
    info = {"kind": "asserts", "tests": [f"assert {name}(f(1)) == 1"], "setup": f"def {name}(x): return 1"}
    (case,) = read_layout(info, "python", HOW).cases
    assert type(case).__name__ == "ProxiedCase"


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (
            {"kind": "asserts", "tests": ["import pytest\nassert f(1)"]},
            r"tests\[0\] imports 'pytest'.*take the import out",
        ),
        (
            {"kind": "asserts", "tests": ["assert f(1)"], "setup": "import numpy as np"},
            r"setup imports.*packages: \[numpy\]",
        ),
        ({"kind": "asserts", "tests": ["assert f(1)", "from solution import f\nassert f(1)"]}, "imports 'solution'"),
        (
            {"kind": "checker", "checker": "import scipy.stats\nx = 1", "cases": [{"input": ""}]},
            "imports 'scipy.stats'",
        ),
        (stdio(prelude="from . import x"), "imports '.'"),
    ],
)
def test_a_task_that_imports_what_is_not_there_is_refused(info, problem):
    """Every program would score 0. A service elsewhere has modules of its own, so that there it is no fault of the
    layout."""
    assert re.search(problem, CodeVerifier().check_task(Task("t", "?", info=info)))
    fine = {**info, "tests": ["try:\n  import pytest\nexcept ImportError: pass\nimport os, numpy.ma\nassert f(1)"]}
    assert not read_layout(
        {**fine, "kind": "asserts", "packages": ["numpy"], "setup": "", "checker": "", "prelude": ""}, "python", HOW
    ).lacks
