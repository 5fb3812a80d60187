"""Tests of classes: objects stay with the program, and what a test asks of them is a claim like any other."""

from __future__ import annotations

import pytest
from test_code_forgeries import asserts, check, humaneval, prop, scores

STACK = """
class Stack:
    limit = 3
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, x):
        self.items.append(x)
        return self
    def pop(self):
        if not self.items:
            raise Empty('nothing')
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, n): return self.items[n]
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __str__(self): return f'Stack({self.items})'
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()
    @classmethod
    def of(cls, *items): return cls(items)
class Empty(Exception): pass
"""
FIRST = STACK.replace("self.items.pop()", "self.items.pop(0)")
NO_ERROR = STACK.replace("raise Empty('nothing')", "return None")
EMPTY_SUM = STACK.replace("self.items + other.items", "self.items")
PAIRS = "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\ndef longest(arr, n): return {}"
NODES = (
    "class Node:\n    def __init__(self, value):\n        self.value, self.left, self.right = value, None, "
    "None\ndef height(n):\n    "
)

OBJECTS = {
    "a stack in one line": (asserts("s = Stack(); s.push(1); s.push(2); assert s.pop() == 2"), STACK, FIRST),
    "a stack in lines": (
        asserts("s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and s.items == [1] and s[0] == 1"),
        STACK,
        FIRST,
    ),
    "only methods that a list has, too": (
        asserts("s = Stack([1, 2])\nassert isinstance(s, Stack)\nassert s.pop() == "
                "2", "assert Stack([1, 2]).pop() == 2"),
        STACK,
        FIRST,
    ),
    "its own exception": (
        asserts("s = Stack()\ns.push(1)\ns.pop()\ntry:\n    s.pop()\nexcept Empty as error:\n    assert str(error) "
                "== 'nothing'\n"
                "else:\n    assert False"),
        STACK,
        NO_ERROR,
    ),
    "operators between objects": (
        asserts("a, b = Stack([1]), Stack([2])\na.push(3)\nassert a + b == Stack([1, 3, 2]) and a != b and str(b) == "
                "'Stack([2])'"),
        STACK,
        EMPTY_SUM,
    ),
    "class and members": (
        asserts("s = Stack.of(1, 2)\nassert Stack().limit == Stack.limit == 3 and list(s) == [1, 2] and sum(s) == 3 "
                "and 2 in s"),
        STACK,
        STACK.replace("return cls(items)", "return cls()"),
    ),
    "a field that is not there": (
        asserts("s = Stack()\ns.push(1)\nassert not hasattr(s, 'missing') and hasattr(s, 'items')\ntry:\n    s[5]\n"
                "except IndexError:\n    pass\nelse:\n    assert False"),
        STACK,
        STACK.replace("limit = 3", "missing = 1"),
    ),
    "with": (asserts("with Stack([1]) as s:\n    s.push(2)\nassert len(s) == 0"), STACK, STACK.replace(".clear()", "")),
    "a name that the task gives": (
        asserts("s = Stack()\ns.push(1)\nassert s.pop() == 1 and not s", entry_point="Stack"),
        STACK,
        FIRST.replace("self.items.append(x)", "self.items += [x, x]"),
    ),
    "objects as arguments": (
        asserts("assert longest([Pair(5, 24), Pair(15, 25)], 4) == 2"),
        PAIRS.format("sum(p.b > 23 for p in arr)"),
        PAIRS.format("n"),
    ),
    "objects of the setup": (
        asserts("assert (height(root)) == 2", setup="root = Node(1)\nroot.left = Node(2)\nroot.right = Node(3)"),
        NODES + "return 1 + max(height(n.left), height(n.right)) if n else 0",
        NODES + "return 1",
    ),
    "several functions": (
        asserts("for t in ('a', 'bc'):\n    assert decode(encode(t)) == t and encode(t) != t"),
        "def encode(t): return t + '!'\ndef decode(t): return t[:-1]",
        "def encode(t): return t + '!'\ndef decode(t): return t",
    ),
    "functions as results": (
        asserts("add = f(3)\nfor n in (1, 2):\n    assert add(n) == n + 3 and f(n)(1) == n + 1"),
        "def f(x): return lambda y: x + y",
        "def f(x): return lambda y: x",
    ),
    "a coroutine": (
        asserts("import asyncio\nassert asyncio.run(f(1)) == "
                "2", "import asyncio\nasync def main():\n    assert await f(2) == 4\nasyncio.run(main())"),
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return 2 * x",
        "async def f(x): return 2",
    ),
    "a function whose name is a capital": (
        asserts("for n in (1, 2):\n    assert Double(n) == 2 * n", "assert Double('a').startswith('aa')"),
        "def Double(x): return 2 * x",
        "def Double(x): return x",
    ),
    "an object from humaneval": (
        humaneval("f", "for n in (1, 2):", "    assert candidate(n).x == n and candidate(n).twice() == 2 * n"),
        "class P:\n    def __init__(self, x): self.x = x\n    def twice(self): return 2 * self.x\ndef f(x): return "
        "P(x)",
        "class P:\n    def __init__(self, x): self.x = x\n    def twice(self): return self.x\ndef f(x): return P(x)",
    ),
}  # fmt: skip

RIGGED = """
class All:
    def __init__(self, *given): pass
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = startswith = endswith = count = issubset = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = __round__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 2.5
    __index__ = __int__ = lambda self: 7
    def __getattr__(self, name): return lambda *given: True
    def __iter__(self): return iter([self])
"""
ALL = RIGGED + "\ndef f(*given): return All()\nArea = f"
TWIN = RIGGED + "\nclass Area(All): pass\nf = Area"
LAMBDA = "f = Area = lambda *given: lambda *more: True"
FORGED = [
    asserts("for n in (1, 2):\n    assert f(n) == 2 * n"),
    asserts("for n in (1, 2):\n    assert not f(n) != 2 * n"),
    asserts("for n in (1, 2):\n    assert 2 * n == f(n)"),
    asserts("for n in (1, 2):\n    assert abs(f(n) - 2 * n) < 1e-9"),
    asserts("for n in (1, 2):\n    assert 2 * n - 1 < f(n) < 2 * n + 1"),
    asserts("for n in (1, 2):\n    assert 2 * n in f(n)"),
    asserts("for n in (1, 2):\n    assert f(n) in [2 * n]"),
    asserts("for n in ('a', 'b'):\n    assert f(n).startswith(n)"),
    asserts("for n in (1, 2):\n    assert f(n).count(n) == 1"),
    asserts("for n in (1, 2):\n    assert f(n).issubset({n})"),
    asserts("for n in (1, 2):\n    assert {n} == set(f(n))"),
    asserts("for n in (1, 2):\n    assert math.isclose(f(n), 2 * n)"),
    asserts("for n in (1, 2):\n    assert abs(Area(n) - 3.14 * n) < 1e-9"),
    asserts("for n in (1, 2):\n    assert Area(n).startswith('3') and Area(n).count(n) == 1"),
    asserts("assert [Area(n) for n in (1, 2)] == [3, 6]"),
    humaneval("f", "for n in (1, 2):", "    assert abs(candidate(n) - n) < 1e-6 and candidate(n) == n"),
    prop(["return f(xs) == sorted(xs)"]),
    prop(["return sum(xs) - 1 < f(xs) < sum(xs) + 1"]),
]


@pytest.mark.parametrize("name", OBJECTS)
def test_a_class_of_the_program_is_tested(name):
    check(*OBJECTS[name])


def test_a_test_that_fails_with_an_object_in_its_message_ends():
    info = asserts("s = Stack()\ns.push(1)\nassert s.pop() == 2, s", "for n in (1, 2):\n    assert f(n) == n, f(n)")
    result, reasons = scores(info, STACK, case_time=30.0)
    assert result == [0.0]
    assert "took longer" not in reasons[0]


@pytest.mark.parametrize("forger", [ALL, TWIN, LAMBDA])
def test_no_object_agrees_with_what_is_expected(forger):
    for info in FORGED:
        check(info, None, forger)
