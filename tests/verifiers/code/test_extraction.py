"""Which text of a completion is the program, and what a block takes from earlier ones."""

from __future__ import annotations

import gc
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.extraction import NoProgramError, find_program, language_of
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
def test_time_is_linear_in_the_text(piece):
    def seconds(size):
        gc.disable()  # its passes over all objects are no work of the function
        start = time.process_time()
        try:
            with pytest.raises(NoProgramError):
                find_program(piece * (size // len(piece)), max_length=0)
            return time.process_time() - start
        finally:
            gc.enable()

    # Four times the text: quadratic work would take sixteen times as long.
    quarter = min(seconds(60_000) for _ in range(3))
    assert min(seconds(240_000) for _ in range(2)) < 10 * quarter


def test_a_program_is_put_together():
    stub, context = 'import math\ndef f(x):\n    """Doc."""\n', "import math"
    assert assembled("print(1)") == "print(1)"
    assert assembled("    return x", "", stub, context, "f") == stub + "    return x"
    assert assembled("def f(x): return x", "", stub, context, "f") == "import math\ndef f(x): return x"
    future = "from __future__ import annotations"
    assert assembled(f"{future}\nf = 1", "import re", stub, context, "f").splitlines()[0] == future


# comparison


# assertions


# layouts
