"""Assertions that are rewritten: what Python means by them, and what is not rewritten."""

from __future__ import annotations

import ast
import asyncio
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.verifiers.code import names
from rlvr.verifiers.code.asserts import rewritten
from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.layout_fields import LayoutError
from rlvr.verifiers.code.layouts import read_layout

HOW = Comparison()


def double(x):
    return 2 * x


def holds(test, f=double, **others):
    """The rewritten test's value with these functions; None where it is not rewritten."""
    functions = {"f": f, **others}
    condition = rewritten(test, functions)
    if condition is None:
        return None

    async def call(name, args, kwargs):
        return functions[name](*args, **kwargs)

    return bool(asyncio.run(condition(call)))


REWRITTEN = [
    "assert f(2) == 4",
    "assert 4 == f(2), 'doubles'",
    "assert f(2) != 4",
    "assert not f(0)",
    "assert f(1)",
    "assert f(1) == f(x=1) == 2",
    "assert f(f(1)) == 4",
    "assert f([1]) == [1, 1]",
    "assert f((1,)) == [1, 1]",
    "assert abs(f(0.35) - 0.7) < 1e-9",
    "assert math.isclose(f(0.35), 0.7, rel_tol=1e-9)",
    "assert sorted(f([2, 1])) == [1, 1, 2, 2]",
    "assert sorted(f([2, 1]), reverse=True) == [1, 1, 2, 2]",
    "assert set(f([2, 1])) == {1, 2}",
    "assert len(f('ab')) == 4 and 'ba' in f('ab')",
    "assert f(1) is None or f(1) == 2",
    "assert f(1) is not None",
    "assert isinstance(f(1), int)",
    "assert isinstance(f(1), (str, list))",
    "assert f([1, 2])[0] == 1 and f('ab')[-1] == 'b'",
    "assert 3 <= f(2) < 4",
    "assert f(float('inf')) == float('inf')",
    "assert f(-float('inf')) == -math.inf",
    "assert (f(1), f(2)) == (2, 4)",
    "assert round(f(1.26), 1) == 2.5",
    "assert max(f(1), f(3)) == 6 and sum([f(1), f(2)]) == 6",
    "assert all([f(1), f(0)])",
    "assert f(2) + 1 == 5 and 1 - f(2) == -3 and f(1) / 4 == 0.5",
]


@pytest.mark.parametrize("test", REWRITTEN)
def test_a_rewritten_assertion_means_what_python_means(test):
    """Against Python itself, which runs the trusted test on a trusted function."""
    try:
        exec(test, {"f": double, "math": math})
        expected = True
    except AssertionError:
        expected = False
    assert holds(test) is expected


@pytest.mark.parametrize(
    "test",
    [
        "x = f(1)",
        "assert f(*[1]) == 2",
        "assert f(**{'x': 1}) == 2",
        "assert all(f(i) for i in range(3))",
        "assert f(1) == g",
        "assert f(1) == [0] * 3",
        "assert f(1) == 2 ** 9",
        "assert (lambda: f(1))() == 2",
        "assert f(1) is f(1)",
        "assert eval('1') == f(1)",
        "assert f(1).__class__ == int",
        "assert open('/etc/passwd') and f(1)",
        "assert f'{f(1)}' == '2'",
        "assert sorted(f([1]), key=len) == []",
        "assert sorted(f([1]), reverse={[]: 1}) == [1]",
        "assert f(1) - f(2) == 0",
        "for i in range(3): assert f(i)",
        "assert f(1) == 2; assert f(2) == 4",
    ],
)
def test_what_is_not_plain_is_not_rewritten(test):
    assert rewritten(test, {"f"}) is None


@given(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
)
def test_literals_come_back_as_they_are(whole, real, text, items):
    for value in (whole, real, text, items, tuple(items), {text: whole}, set(items), [text, [real]], None, True):
        assert holds(f"assert f({value!r}) == {value!r}", f=lambda x: x)


@pytest.mark.parametrize(
    ("test", "f", "error"),
    [
        ("assert set(f(1)) == {1}", lambda x: [n * (2**61 - 1) for n in range(5000)], ValueError),
        ("assert round(1.5, f(1)) == 2", lambda x: 10**12, ValueError),
        ("assert f(1) + 1 == 2", lambda x: "1", TypeError),
        ("assert sorted(f(1)) == []", lambda x: [1, "a"], TypeError),
        ("assert f(1)[0] == 1", lambda x: [], IndexError),
        ("assert sum(f(1)) == 1", lambda x: [[1]] * 9, TypeError),
    ],
)
def test_values_made_to_be_costly_or_wrong_are_errors(test, f, error):
    start = time.process_time()
    with pytest.raises(error):
        holds(test, f)
    assert time.process_time() - start < 1


def test_data_is_not_parsed_and_everything_else_is_parsed_once(monkeypatch):
    """A test of megabytes is read in milliseconds: nobody can look at the clock for it, so what reaches the parser is
    measured."""
    parsed = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda code, *more: parsed.append(code) or parse(code, *more))
    names.statements.cache_clear()
    data = [[1, -2.5e-07, None, "it's [", 'say "x" \\', {"a": (True,)}, {2}, set()] for _ in range(300)]
    test = (
        f"def check(candidate):\n    inputs = {data!r}\n    for one in inputs:\n        assert candidate(one) == "
        "g(one)\n"
    )
    helper = "def g(x):\n    return x\n"
    info = {"kind": "humaneval", "prompt": "def f(x):\n", "entry_point": "f", "test": helper + test}
    (case,) = read_layout(info, "python", HOW).cases
    assert repr(data) in case.source
    assert max(map(len, parsed)) < 400
    assert len(parsed) == len(set(parsed)) < 6
    with pytest.raises(LayoutError, match="uses 'g'"):
        read_layout({**info, "test": test}, "python", HOW)


def test_a_line_of_a_text_that_looks_like_data_is_kept():
    text = f"x = [{'1, ' * 3000}]\n"
    (case,) = read_layout({"kind": "asserts", "tests": [f'assert f() == """\n{text}"""']}, "python", HOW).cases

    async def call(name, args, kwargs):
        return f"\n{text}"

    assert asyncio.run(case.condition(call)) is True
