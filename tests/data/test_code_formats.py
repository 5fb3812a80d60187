"""Rows in the schemas of the field's data sets, from their columns to verdicts: the right solution scores 1, its wrong
twin 0.

The columns are those of the data sets' cards and loaders; the tasks in them are our own:
- HumanEval+ and MBPP+: `evalplus/data/humaneval.py`, `evalplus/data/mbpp.py`, and the `test` scripts of
  evalplus/humanevalplus and evalplus/mbppplus on the hub, whose `assertion` compares as `evalplus/eval/__init__.py`
  does, but with `np.allclose`
- LiveCodeBench: `lcb_runner/benchmarks/code_generation.py`
- APPS: the loader of codeparrot/apps and `eval/testing_util.py` of hendrycks/apps
- CodeContests: `contest_problem.proto` of google-deepmind/code_contests
- TACO: the card of BAAI/TACO
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import pickle
import zlib

import pytest

from rlvr.data import to_task
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code.sandbox.opening import problem_of
from rlvr.verifiers.code.sandbox.tiers import TIERS

ASSERTION = """
import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match
"""
LOOP = "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"


def humaneval_plus(number, stub, entry, body, inputs, results):
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": stub,
        "canonical_solution": body,
        "entry_point": entry,
        "test": f"{ASSERTION}\n\ndef check(candidate):\n    inputs = {inputs!r}\n    results = {results!r}\n"
        f"    {LOOP}        assertion(candidate(*inp), exp, 0)\n",
    }


def mbpp_plus(number, prompt, code, tests, inputs, results, call):
    return {
        "task_id": number,
        "code": code,
        "prompt": prompt,
        "source_file": "Benchmark Questions Verification V2.ipynb",
        "test_imports": [],
        "test_list": tests,
        "test": f"{ASSERTION}\n\ninputs = {inputs!r}\nresults = {results!r}\n{LOOP}    assertion({call}, exp, 0)\n",
    }


def live(number, starter, public, private, name=None):
    kind = "functional" if name else "stdin"
    tests = [[{"input": i, "output": o, "testtype": kind} for i, o in pairs] for pairs in (public, private)]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests[1])))).decode()
    return {
        "question_title": "a-title",
        "question_content": "Compute it.",
        "platform": "leetcode" if name else "atcoder",
        "question_id": str(number),
        "contest_id": "abc300",
        "contest_date": "2023-04-29T00:00:00",
        "starter_code": starter,
        "difficulty": "easy",
        "public_test_cases": json.dumps(tests[0]),
        "private_test_cases": packed,
        "metadata": json.dumps({"func_name": name} if name else {}),
    }


def apps(number, value, solution, starter=""):
    return {
        "problem_id": number,
        "question": "Compute it.",
        "solutions": json.dumps([solution]),
        "input_output": json.dumps(value),
        "difficulty": "introductory",
        "url": "https://example.com",
        "starter_code": starter,
    }


def contests(public, private, generated, solution, **more):
    pairs = [{"input": [i for i, _ in one], "output": [o for _, o in one]} for one in (public, private, generated)]
    return {
        "name": "1_A. A name",
        "description": "Compute it.",
        **dict(zip(("public_tests", "private_tests", "generated_tests"), pairs, strict=True)),
        "source": 2,
        "difficulty": 7,
        "solutions": {"language": [2, 3], "solution": ["int main() {}", solution]},
        "incorrect_solutions": {"language": [], "solution": []},
        "cf_contest_id": 1,
        "cf_index": "A",
        "cf_points": 0.0,
        "cf_rating": 1000,
        "cf_tags": ["math"],
        "is_description_translated": False,
        "untranslated_description": "",
        "time_limit": {"seconds": 5, "nanos": 0},
        "memory_limit_bytes": 256000000,
        "input_file": "",
        "output_file": "",
        **more,
    }


def taco(value, solution, starter="", **more):
    return {
        "question": "Compute it.",
        "solutions": json.dumps([solution]),
        "starter_code": starter,
        "input_output": json.dumps(value),
        "difficulty": "EASY",
        "raw_tags": "['Mathematics']",
        "name": None,
        "source": "codeforces",
        "tags": "['Mathematics']",
        "skill_types": "[]",
        "url": "https://example.com",
        "Expected Auxiliary Space": None,
        "time_limit": "2.0 seconds",
        "date": "2020-01-01",
        "picture_num": "0",
        "memory_limit": "256.0 megabytes",
        "Expected Time Complexity": None,
        **more,
    }


MEAN = (
    'from typing import List\n\n\ndef mean(xs: List[float]) -> float:\n    """ The mean.\n    >>> mean([1.0, '
    '2.0])\n    1.5\n    """\n'
)
PAIR = 'def pair(a: int, b: int):\n    """ Both, the smaller one first. """\n'
ADD = "a, b = map(int, input().split())\nprint(a + b)"
TYPED = "class Solution:\n    def total(self, nums: List[int], k: int) -> int:\n        "
ONLY = "class Solution:\n    def only(self, n: int) -> List[int]:\n        "
ROTATE = "class Solution:\n    def rotate(self, nums: List[int], k: int) -> None:\n        "
FLIP = "class Solution:\n    def flip(self, root: Optional[TreeNode]) -> None:\n        "
TREE = "class Solution:\n    def depth(self, root: Optional[TreeNode]) -> int:\n        "
SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
DOUBLES = {"fn_name": "double", "inputs": [[[1, 2]], [[]]], "outputs": [[[2, 4]], [[]]]}
GUARD = "def main():\n    n = int(stdin.readline())\n    print(*sorted(map(int, stdin.readline().split())))\n\nmain()"

FORMATS = {
    "HumanEval+ continued": (
        humaneval_plus(0, MEAN, "mean", "    return sum(xs) / len(xs)\n", [[[1.0, 2.0]], [[0.1, 0.2]]], [1.5, 0.15]),
        "    return sum(xs) / len(xs)\n",
        "    return sum(xs) // len(xs)\n",
    ),
    "HumanEval+ anew": (
        humaneval_plus(1, PAIR, "pair", "    return (min(a, b), max(a, b))\n", [[2, 1], [1, 2]], [(1, 2), (1, 2)]),
        "```python\ndef pair(a, b):\n    return tuple(sorted((a, b)))\n```\n```\n(1, 2)\n```",
        "```python\ndef pair(a, b):\n    return sorted((a, b))\n```",
    ),
    "MBPP+": (
        mbpp_plus(
            2,
            "Common.",
            "def common(a, b):\n    return tuple(set(a) & set(b))",
            ["assert set(common((1, 2), (2, 3))) == {2}"],
            [[(1, 2), (2, 3)], [(1,), (2,)]],
            [{2}, set()],
            "set(common(*inp))",
        ),
        "def common(a, b):\n    return {x for x in a if x in b}",
        "def common(a, b):\n    return {2}",  # the one test of MBPP itself, and not those of MBPP+
    ),
    "MBPP+ floats": (
        mbpp_plus(
            3,
            "Area.",
            "import math\ndef area(r):\n    return math.pi * r * r",
            ["assert round(area(1), 2) == 3.14"],
            [[1], [2]],
            [3.141592653589793, 12.566370614359172],
            "area(*inp)",
        ),
        "def area(r):\n    return 3.14159265358979 * r ** 2",
        "def area(r):\n    return 3.14 * r ** 2",
    ),
    "LiveCodeBench function": (
        live(1, TYPED, [("[1, 2, 3]\n2", "5")], [("[4, 1]\n1", "4")], "total"),
        f"```python\n{TYPED}return sum(nlargest(k, nums))\n```",
        f"```python\n{TYPED}return sum(nums[-k:])\n```",
    ),
    "LiveCodeBench list of one": (
        live(4, ONLY, [("3", "[3]")], [("4", "[4]"), ("5", "[5]")], "only"),
        f"```python\n{ONLY}return [n]\n```",
        f"```python\n{ONLY}return n\n```",
    ),
    "LiveCodeBench program": (
        live(2, "", [("3\n3 1 2\n", "1 2 3")], [("1\n5\n", "5")]),
        GUARD,
        GUARD.replace("sorted(", "("),
    ),
    "LiveCodeBench function that changes its argument": (
        live(
            4,
            ROTATE.replace("    def rotate", "    def other(self) -> int: ...\n    def rotate"),
            [("[1, 2, 3]\n1", "[3, 1, 2]")],
            [("[1, 2]\n2", "[1, 2]"), ("[]\n2", "[]")],
            "rotate",
        ),
        ROTATE + "k %= len(nums) or 1\n        nums[:] = nums[len(nums) - k:] + nums[:len(nums) - k]",
        ROTATE + "return nums[len(nums) - k:] + nums[:len(nums) - k]",
    ),
    "TACO nodes changed in place": (
        taco({"fn_name": "flip", "inputs": [[[1, 2, 3]], [[]]], "outputs": [[[1, None, 3, 2]], [[]]]}, "", FLIP),
        FLIP
        + "if root:\n            root.left, root.right = None, root.right\n            root.right.left = TreeNode(2)",
        FLIP + "return root",
    ),
    "APPS program": (apps(1, SUM, ADD), f"```python\n{ADD}\n```\nFor `1 2` it prints\n```\n3\n```", "print(3)"),
    "APPS function": (
        apps(2, DOUBLES, "def double(xs): return [2 * x for x in xs]", "def double(xs):"),
        "def double(xs: List[int]):\n    return tuple(2 * x for x in xs)",
        "def double(xs):\n    return xs * 2",
    ),
    "APPS lines": (
        apps(3, {"inputs": [["2", "1 2"]], "outputs": [["1", "2"]]}, "input()\nprint(*input().split(), sep='\\n')"),
        "input()\nfor x in input().split():\n    print(x)\nexit()",
        "print(input())",
    ),
    "CodeContests": (
        contests([("1 2\n", "3\n")], [("3 4\n", "7\n")], [("5 5\n", "10\n")], ADD),
        "import sys\nprint(sum(map(int, open('/dev/stdin').read().split())))",
        "a, b = map(int, input().split())\nprint(a | b)",
    ),
    "CodeContests words": (
        contests([("4\n", "YES\n")], [("3\n", "NO\n")], [], "print('NO' if int(input()) % 2 else 'YES')"),
        "print('No' if int(input()) % 2 else 'Yes')",
        "print('Yes')",
    ),
    "TACO program": (taco(SUM, ADD), ADD, "print(7)"),
    "TACO function": (
        taco(
            DOUBLES, "def double(xs): return [2 * x for x in xs]", "def double(xs):", time_limit=None, memory_limit=None
        ),
        "class Solution:\n    def double(self, xs):\n        return [x + x for x in xs]",
        "class Solution:\n    def double(self, xs):\n        return [x + x for x in xs][:1]",
    ),
    "TACO digits": (
        taco({"fn_name": "same", "inputs": [["12"], ["13"]], "outputs": ["12", "13"]}, "", "def same(s):"),
        "def same(s): return s",
        "def same(s): return int(s)",
    ),
    "TACO nodes": (
        taco({"fn_name": "depth", "inputs": [[[3, 9, 20, None, None, 15]], [[]]], "outputs": [[3], [0]]}, "", TREE),
        TREE + "return 1 + max(self.depth(root.left), self.depth(root.right)) if root else 0",
        TREE + "return 1 + self.depth(root.left) if root else 0",
    ),
}


def judge_twins(task, right, wrong):
    verifier = CodeVerifier(case_time=10.0)

    async def judged():
        return await asyncio.gather(verifier.verify(task, right), verifier.verify(task, wrong))

    good, bad = asyncio.run(judged())
    assert (good.score, bad.score) == (1.0, 0.0), (good.reason, bad.reason)


FLOATS = (MEAN, "mean", "    return sum(xs) / len(xs)\n", [[[1.0, 2.0]], [[0.1, 0.2]]], [1.5, 0.15])
LISTS = (
    "def halves(xs):\n",
    "halves",
    "    return [x / 2 for x in xs]\n",
    [[[3.0, 3.0]], [[]], [[float("nan")]]],
    [[1.5, 1.5], [], [float("nan")]],
)
TWINS = {
    "an empty list for a float": (FLOATS, "return []", "return sum(xs) / len(xs) + 1e-7"),
    "a list for a float": (FLOATS, "return [sum(xs) / len(xs)]", "return 1.5 if xs[0] == 1.0 else 0.15"),
    "not a number for a float": (FLOATS, "return float('nan')", "return sum(xs) / 2"),
    "an infinity for a float": (FLOATS, "return float('inf')", "return (xs[0] + xs[1]) / 2"),
    "a text for a float": (FLOATS, "return str(sum(xs) / len(xs))", "return sum(x / 2 for x in xs)"),
    "a float for a list": (
        LISTS,
        "return 1.5 if xs and xs[0] == 3 else [x / 2 for x in xs]",
        "return [x * .5 for x in xs]",
    ),
    "a list that is too short": (LISTS, "return [x / 2 for x in xs][:1]", "return tuple(x / 2 for x in xs)"),
    "an empty list for numbers": (LISTS, "return []", "return [x / 2 + 1e-9 for x in xs]"),
}


@pytest.mark.parametrize("name", TWINS)
def test_floats_of_evalplus_are_compared_with_their_shape(name):
    task, wrong, right = TWINS[name]
    if importlib.util.find_spec("numpy") is None:
        pytest.skip("this row's tests need numpy")
    row = humaneval_plus(0, *task)
    row["test"] = row["test"].replace("nan", "float('nan')")
    judge_twins(to_task(row), f"    {right}\n", f"    {wrong}\n")


def test_the_time_limit_of_an_evalplus_row_grows_with_its_inputs():
    inputs = [[[float(n), 2.0], "a, [b\\'", {"k": (1, 2)}] for n in range(1000)]
    small, large = (to_task(humaneval_plus(0, *FLOATS[:3], inputs[:n], [1.5] * n)).info for n in (10, 1000))
    for info, count in ((small, 10), (large, 1000)):
        assert info["time_limit"] == pytest.approx(2 + 0.01 * count + 5e-6 * len(info["test"]))
    many = mbpp_plus(1, "Mean.", "def mean(xs): ...", ["assert mean([1])"], inputs, [1.5] * 1000, "mean(*inp)")
    assert to_task(many).info["time_limit"] > 12
    del many["test"]
    assert "time_limit" not in to_task(many).info


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_the_published_schema_is_judged(name):
    row, right, wrong = FORMATS[name]
    if (problem := problem_of(TIERS[0])) is not None:
        pytest.skip(f"no full sandbox here: {problem}")
    if "numpy" in str(row.get("test")) and importlib.util.find_spec("numpy") is None:
        pytest.skip("this row's tests need numpy")
    task = to_task(dict(row))
    judge_twins(task, right, wrong)
    limits = {"TACO program": (4.0, 256.0), "CodeContests": (5.0, 244)}
    if name in limits:
        assert (task.info["time_limit"], task.info["memory_mb"]) == limits[name]
    if task.info.get("solution"):
        assert CodeVerifier(case_time=10.0, validate=True).check_task(task) is None
