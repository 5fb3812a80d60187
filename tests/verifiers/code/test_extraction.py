"""The parts of the code verifier that run no program: which text is the program, comparison, rewritten assertions,
layouts."""

from __future__ import annotations

import ast
import asyncio
import math
import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.errors import ConfigError
from rlvr.records import Task
from rlvr.verifiers.code import CodeVerifier, names
from rlvr.verifiers.code.asserts import rewritten
from rlvr.verifiers.code.compare import Comparison, same_text, same_value, short
from rlvr.verifiers.code.extraction import NoProgramError, find_program, language_of
from rlvr.verifiers.code.layout_fields import LayoutError
from rlvr.verifiers.code.layouts import read_layout
from rlvr.verifiers.code.programs import assembled

HOW = Comparison()


# the program of a completion


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("    return x\n", "    return x"),
        ("Look:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```python\nprint(1)\n```\nor\n```py\nprint(2)\n```", "print(2)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nIt prints\n```text\n1\n```", "print(1)\n"),
        ("```Python3.11\nprint(1)\n```\n```bash\npython a.py\n```", "print(1)\n"),
        ("~~~python\nprint('```')\n~~~", "print('```')\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("1. So:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)\n"),
        ('```python\n"""\n    ```\n"""\n```', '"""\n    ```\n"""\n'),
        ("```python\nprint(1)", "print(1)"),
        ("def f(x):\n    return x\n```", "def f(x):\n    return x\n"),
        ("<think>```python\nprint(1)\n```</think>```python\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```<|im_end|>\n<|im_start|>user\n```python\nprint(2)\n```", "print(1)\n"),
        ("```{.python}\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
        ("\ufeffprint(1)", "print(1)"),
        ("```python\n\ufeffprint(1)\n```", "print(1)\n"),
    ],
)
def test_the_program_is_the_last_fenced_block_or_the_bare_text(completion, program):
    assert find_program(completion) == program


@pytest.mark.parametrize(
    ("completion", "options", "reason"),
    [
        ("", {}, "no program"),
        (" \n\t", {}, "no program"),
        ("```python\n\n```", {}, "no program"),
        ("<think>```python\nprint(1)\n```", {}, "never ended"),
        ("print(1)", {"think_opened_by_prompt": True}, "never ended"),
        ("```javascript\n1\n```", {}, r"marked python .*javascript"),
        ("```python\n1\n```\n```python\n2\n```", {"which": "only"}, "2 fenced blocks"),
        ("x" * 101, {"max_length": 100}, "101 characters"),
        ("print('\ud800')", {}, "surrogate"),
    ],
)
def test_there_is_no_program(completion, options, reason):
    with pytest.raises(NoProgramError, match=reason):
        find_program(completion, **options)


def test_which_block_and_which_language_are_options():
    text = "```python\n1\n```\n```c++\n2\n```\n```cpp\n3\n```"
    assert find_program(text, "cpp", "first") == "2\n"
    assert find_program(text, "cpp") == "3\n"
    assert find_program(text, "python") == "1\n"


F = "```python\ndef f(x):\n    return x\n```\n"
READS = "```python\nprint(int(input()) + 1)\n```\n"
BARE = "```\nprint(int(input()) + 1)\n```\n"


@pytest.mark.parametrize(
    ("completion", "wanted", "first_line"),
    [
        (READS + "Output:\n```\n3\n```", "", "print(int(input()) + 1)"),
        (READS + "For the input\n```\n3 print\n```\nit prints\n```\n4\n```", "", "print(int(input()) + 1)"),
        (BARE + "Output:\n```\n4\n```", "", "print(int(input()) + 1)"),
        ("```\n1 2\n```\n" + BARE + "```\n4\n```", "", "print(int(input()) + 1)"),
        ("```\n4\n```\n```\n5\n```", "", "5"),
        ("```python\nx = 1\n```\n" + READS, "", "print(int(input()) + 1)"),
        (READS + "```python\n>>> 3\n4\n```", "", "print(int(input()) + 1)"),
        (F + "Use it:\n```python\nprint(f(3))\n```", "f", "def f(x):"),
        (F + "Or:\n```python\nf = lambda x: x\n```\n```\n3\n```", "f", "f = lambda x: x"),
        (F + "```python\ndef g(f):\n    return f(1)\n```", "f", "def f(x):"),
        ("```python\nimport math\n```\n```\ndef f(x): return 1\n```", "f", "def f(x): return 1"),
        (
            "```python\nclass Solution:\n    def f(self): pass\n```\n```python\ns = Solution()\n```",
            "f",
            "class Solution:",
        ),
        ("```python\nclass A:\n    def f(self): pass\n```\n```python\ndef f(): pass\n```", "A.f", "class A:"),
        ("```python\n    return 1\n```\n```text\n1\n```", "f", "    return 1"),
        ("```python\n```\n" + BARE, "", "print(int(input()) + 1)"),
    ],
)
def test_the_right_block_among_several(completion, wanted, first_line):
    assert find_program(completion, wanted=wanted).splitlines()[0] == first_line


HELPER = "```python\nimport math\ndef helper(x):\n    return x\n```\n"
MAIN = "```python\ndef f(x):\n    return helper(x)\n```\n"


def test_what_a_block_uses_of_earlier_ones_comes_with_it():
    whole = "import math\ndef helper(x):\n    return x\n\ndef f(x):\n    return helper(x)\n"
    assert find_program(HELPER + MAIN, wanted="f") == whole
    assert find_program(HELPER + MAIN + "Use it:\n```python\nassert f(1)\n```", wanted="f") == whole
    assert find_program(HELPER + READS).startswith("print")
    assert find_program(HELPER + READS.replace("int(", "helper(")).startswith("import math")
    assert find_program(F + MAIN + "```\nhelper = 1\n```", wanted="f") == "def f(x):\n    return helper(x)\n"
    own = MAIN.replace("def f", "def helper(x): return 2\ndef f")
    assert find_program(HELPER + own, wanted="f") == own[10:-4]
    chain = "```python\ndef deep(): pass\n```\n" + HELPER.replace("return x", "return deep()") + MAIN
    assert find_program(chain, wanted="f").startswith("def deep")
    imports = "```python\nfrom collections import Counter as C, deque\nimport os.path\n```\n"
    assert find_program(imports + MAIN.replace("helper", "C"), wanted="f").startswith("from collections")
    assert find_program(imports + MAIN.replace("helper", "Counter"), wanted="f").startswith("def f")
    assert find_program(HELPER + MAIN, which="first", wanted="f") == whole
    inside = MAIN.replace("return helper", "import math\n    return math.floor")
    assert find_program(HELPER + inside, wanted="f").startswith("def f")


def test_the_right_block_in_other_languages():
    text = '```\nint main() { puts("3"); }\n```\nprints\n```\n3\n```'
    assert find_program(text, "c").startswith("int main")
    assert find_program(text, "cpp", "first").startswith("int main")
    assert find_program("```\nconsole.log(3)\n```\n```\n3\n```", "javascript") == "console.log(3)\n"
    assert find_program(READS + "```\n3\n```", which="only").startswith("print")


@pytest.mark.parametrize(
    ("marks", "language"),
    [
        ("python py Python3 python3.11 py3 PyPy3 pypy3.10 python2.7 main.py", "python"),
        ("c C c99 c11 gcc main.c", "c"),
        ("cpp c++ C++17 c++20 cpp20 cpp2a c++1z g++ gnu++17 cc cxx main.cpp", "cpp"),
        ("js javascript node node.js nodejs18 es6 mjs index.js", "javascript"),
        ("text bash csharp c# java output rust go 17 3.11 cs", None),
    ],
)
def test_marks_of_a_language_with_its_version(marks, language):
    for mark in marks.split():
        assert language_of(mark) == language, mark
        if language:
            assert find_program(f"```{mark}\nx\n```\n```text\ny\n```", language) == "x\n"
            assert (
                read_layout({"kind": "stdio", "language": mark, "cases": [{"output": "1"}]}, "python", HOW).language
                == language
            )


def some_text(seed):
    """Text of fences, code and odd characters."""
    pieces = [
        "```",
        "~~~",
        "python",
        "\n",
        "   ",
        "<think>",
        "</think>",
        "x = 1",
        "`",
        "\x00",
        "\ud800",
        "\u2028",
        "{.",
        "text",
    ]
    numbers = random.Random(seed)
    return "".join(numbers.choice(pieces) for _ in range(numbers.randrange(60)))


@given(st.integers())
def test_any_text_has_one_program_or_none(seed):
    text = some_text(seed)
    for which in ("first", "last", "only"):
        try:
            program = find_program(text, which=which)
        except NoProgramError:
            continue
        assert program.strip()
        assert program.encode()
        assert all(line.strip() in text for line in program.splitlines())


@pytest.mark.parametrize("piece", ["```\n", "``` ", "`", "~~~ x\n", " ", "```python\nx\n", "\t```  \t"])
def test_a_megabyte_is_read_in_linear_time(piece):
    start = time.process_time()
    with pytest.raises(NoProgramError):
        find_program(piece * (1_000_000 // len(piece)), max_length=0)
    assert time.process_time() - start < 2


def test_a_program_is_put_together():
    stub, context = 'import math\ndef f(x):\n    """Doc."""\n', "import math"
    assert assembled("print(1)") == "print(1)"
    assert assembled("    return x", "", stub, context, "f") == stub + "    return x"
    assert assembled("def f(x): return x", "", stub, context, "f") == "import math\ndef f(x): return x"
    future = "from __future__ import annotations"
    assert assembled(f"{future}\nf = 1", "import re", stub, context, "f").splitlines()[0] == future


# comparison


@pytest.mark.parametrize(
    ("found", "expected", "how", "same"),
    [
        ("3\n", "3", {}, True),
        (" 1  2\r\n3 ", "1 2\n3\n", {}, True),
        ("3.0", "3", {}, False),
        ("+3", "3", {}, False),
        ("03", "3", {}, False),
        ("0.50", "0.5", {}, True),
        ("5e-1", "0.5", {}, True),
        ("2", "2.0", {}, True),
        ("0.5000004", "0.5", {}, True),
        ("0.501", "0.5", {}, False),
        ("0.501", "0.5", {"tolerance": 0.01}, True),
        ("4", "3", {"tolerance": 10}, False),
        ("1000000.04", "1000000.0", {}, True),
        ("1000000.5", "1000000.0", {}, False),
        ("1000000", "1000000.5", {}, False),
        ("500000", "500000.5", {}, False),
        ("1234567", "1234567.49", {}, False),
        ("12345678.0", "12345678.1", {}, False),
        ("98765432109.0", "98765432109.5", {}, False),
        ("0", "2.5e-7", {}, False),
        ("0.0", "0.0000001", {"tolerance": 1.0}, False),
        ("2.5000001e-7", "2.5e-7", {}, True),
        ("2.51e-7", "2.5e-7", {}, False),
        ("1e-9", "0.0", {}, True),
        ("-0.000000", "0.0", {}, True),
        ("0.001", "0.0", {}, False),
        ("3.14159", "3.14159265", {}, True),
        ("3.1415", "3.14159265", {}, False),
        ("123456889", "123456789.0", {}, False),
        ("123456790", "123456789.0", {}, False),
        ("123456789", "123456789.0", {}, True),
        ("123456789.02", "123456789.0", {}, True),
        ("123456789.2", "123456789.0", {}, False),
        ("123456792.0", "123456789.0", {"tolerance": 1e-4}, True),
        ("1000000000000001024", "1e18", {}, True),
        ("1000000100000000000", "1e18", {}, False),
        ("0.5000004", "0.5", {"tolerance": 0}, False),
        ("1.1", "1.10", {}, True),
        ("1.1", "1.10", {"tolerance": 0}, True),
        ("3e4567", "9e9999", {}, False),
        ("9e9999", "9e9999", {}, True),
        ("1e-4567", "0.0", {}, False),
        ("0.0", "1e-4567", {}, False),
        ("0e1234", "0.0", {}, True),
        ("nan", "0.5", {}, False),
        ("inf", "1e300", {}, False),
        ("1e400", "0.5", {}, False),
        ("yes", "YES", {}, False),
        ("yes", "YES", {"ignore_case": True}, True),
        ("1 2 3", "1 2", {}, False),
        ("1", "1 2", {}, False),
        ("", "", {}, True),
        ("0 1 2 3 4 5", "3", {}, False),
        ("a b", "a  b", {"lines": True}, False),
        ("a  b  \n\n", "a  b", {"lines": True}, True),
        ("0.50", "0.5", {"lines": True}, False),
        ("１", "1", {}, False),  # noqa: RUF001 (a digit of another script)
    ],
)
def test_printed_text_is_compared_token_by_token(found, expected, how, same):
    assert (same_text(found, expected, Comparison(**how)) is None) is same


@pytest.mark.parametrize(
    ("found", "expected", "how", "same"),
    [
        (1, 1, {}, True),
        (True, 1, {}, False),
        (1, True, {}, False),
        (1.0, 1, {}, False),
        (1, 1.0, {}, True),
        (True, 1.0, {}, False),
        (True, 1, {"strict_numbers": False}, True),
        (1.0, 1, {"strict_numbers": False}, True),
        (0.1 + 0.2, 0.3, {}, True),
        (0.1 + 0.2, 0.3, {"tolerance": 0}, False),
        (float("nan"), float("nan"), {}, True),
        (float("inf"), 1e308, {}, False),
        (10**400, 1.5, {}, False),
        (10**30, 10**30 + 1, {}, False),
        ((1, 2), [1, 2], {}, True),
        ((1, 2), [1, 2], {"strict_sequences": True}, False),
        ([[1, (2,)]], [[1, [2]]], {}, True),
        ([1, 2, 3], [1, 2], {}, False),
        ({"a": (1,)}, {"a": [1]}, {}, True),
        ({1: 2}, {True: 2}, {}, False),
        ({"a": 1, "b": 2}, {"a": 1}, {}, False),
        ({1, 2}, {1, 2}, {}, True),
        ({1, 2}, {1, True + 1.0}, {}, False),
        ({1, 2}, [1, 2], {}, False),
        ("1", 1, {}, False),
        (None, None, {}, True),
        (None, 0, {}, False),
        (b"a", "a", {}, False),
    ],
)
def test_values_are_compared_by_type(found, expected, how, same):
    assert same_value(found, expected, Comparison(**how)) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (0.0, 3e-9, False),
        (3e-9, 3e-9 * (1 + 1e-9), True),
        (0, 1e-300, False),
        (1e-12, 0.0, True),
        (123456889.0, 123456789.0, False),
        (123456889, 123456789.0, False),
        (2000001 // 2, 1000000.5, False),
        (2000001 / 2, 1000000.5, True),
        (1000000, 1000000.0, True),
        (0.1 + 0.2, 0.3, True),
        ({(True, True), (2.0, False)}, {(1, 1), (2, 0)}, False),
        ({(1, 1), (2, 0)}, {(1, 1), (2, 0)}, True),
        ({(1, (True,))}, {(1, (1,))}, False),
        ({frozenset({1})}, {frozenset({True})}, False),
        ({(1, True): 0}, {(1, 1): 0}, False),
        ({(1, 1): 0}, {(1, 1): 0}, True),
        ({1, 2}, {1, 2.0}, False),
    ],
)
def test_values_within_sets_and_close_to_zero(found, expected, same):
    assert same_value(found, expected, HOW) is same
    loose = Comparison(strict_numbers=False)
    assert same_value(found, expected, loose) is (same or isinstance(found, (set, dict)))


def test_deep_and_large_values_are_compared_and_shown():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert not same_value(deep, deep, HOW)
    assert short(deep)
    assert short(10**100_000) == "an int of 332193 bits"
    assert "5000000 characters" in short("x" * 5_000_000)


@pytest.mark.parametrize("written", [{"tolerance": -1}, {"tolerance": True}, {"lines": 1}, {"tolerence": 1}])
def test_a_bad_comparison_is_refused(written):
    with pytest.raises(ConfigError, match=r"code: .*(tolerance|lines)"):
        CodeVerifier(comparison=written)


# assertions


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


# layouts


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
