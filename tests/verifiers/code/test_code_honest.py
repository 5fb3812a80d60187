"""Programs as people write them: what CPython, gcc and node do outside of the sandbox is done inside of it, too."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_tiers import usable_tier

from rlvr.records import Task
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.layouts import read_layout
from rlvr.verifiers.code.runner import Ended, Job, Limits, Outcome
from rlvr.verifiers.code.sandbox import languages, open_runner
from rlvr.verifiers.code.sandbox.opening import problem_of

SLOW = Limits(seconds=15.0)


def outcomes(jobs: list[Job], tier: str = "full") -> list[Outcome]:
    """The outcomes of jobs that run beside each other."""
    usable_tier(tier)

    async def run() -> list[Outcome]:
        runner = open_runner(tier, unsafe=True, workers=2)
        try:
            return await asyncio.gather(*(runner.run(job) for job in jobs))
        finally:
            await runner.close()

    return asyncio.run(run())


# --- Python: its end, its streams, its limits

ENDINGS = {
    "exit": "print(7)\nexit()",
    "quit": "print(7)\nquit(0)",
    "exit in a function": "def main():\n    print(7)\n    exit(0)\nmain()\nprint(8)",
    "open(1)": "w = open(1, 'w')\nw.write('7\\n')",
    "fdopen": "import os\nw = os.fdopen(1, 'w')\nw.write('7\\n')",
    "unbuffered layers": "import io\nraw = io.FileIO(1, 'w')\nb = io.BufferedWriter(raw)\nb.write(b'7\\n')",
    "text over bytes": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, "
    "write_through=False)\nprint(7)",
    "layer taken off": "import sys\nbelow = sys.stdout.detach()\nsys.stdout = None\nbelow.write(b'7\\n')",
    "another stdout": "import io, sys\nsys.stdout = io.StringIO()\nsys.__stdout__.write('7\\n')",
    "what streams say of themselves": (
        "import sys\n"
        "said = [(s.seekable(), s.isatty(), s.fileno()) for s in (sys.stdin, sys.stdout, sys.stderr)]\n"
        "ends = sys.stdin.tell(), sys.stdout.line_buffering, sys.stderr.line_buffering\n"
        "print(7 if (*said, ends) == ((True, False, 0), (False, False, 1), (False, False, 2), (0, False, True)) else "
        "said)"
    ),
    "atexit": (
        "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(7)"
    ),
    "fast io": (
        "import os, sys\nfrom io import BytesIO, IOBase\n"
        "class FastIO(IOBase):\n"
        "    def __init__(self, file):\n"
        "        self._fd, self.buffer = file.fileno(), BytesIO()\n"
        "        self.write = lambda s: self.buffer.write(s.encode())\n"
        "    def flush(self):\n"
        "        os.write(self._fd, self.buffer.getvalue())\n"
        "        self.buffer.truncate(0)\n        self.buffer.seek(0)\n"
        "sys.stdout = FastIO(sys.stdout)\nprint(7)"
    ),
    "a file in a list": "files = [open(1, 'w', buffering=4096)]\nprint(7, file=files[0])",
    "after an exception": "w = open(1, 'w')\nw.write('7\\n')\nraise SystemExit",
    "/dev/stdin": "print(sum(map(int, open('/dev/stdin').read().split())))",
    "/dev/stdin twice": "a = open('/dev/stdin').read()\nb = open('/dev/stdin').readline()\nprint(int(b.split()[0]) + "
    "4)",
    "/dev/fd": "print(sum(map(int, open('/dev/fd/0').read().split())))",
    "/dev/stdout": "print(7, file=open('/dev/stdout', 'w'))",
    "/dev/stdout and print": "with open('/dev/stdout', 'w') as w:\n    w.write('7')\nprint()",
    "/dev/stderr": "print('x', file=open('/dev/stderr', 'w'))\nprint(7)",
    "__file__": "import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\nprint(7 if "
    "__file__.endswith('.py') else 8)",
    "stack size": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**29)\n"
        "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\n"
        "def main():\n    print(f(50000) - 49993)\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()"
    ),
    "stack limit": (
        "import resource, sys\nfrom functools import cache\nsys.setrecursionlimit(10**6)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "@cache\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(40000) - 39993)"
    ),
    "recursion limit": "import sys\nsys.setrecursionlimit(5000)\nprint(7 if sys.getrecursionlimit() == 5000 else 8)",
}


@pytest.mark.gate
@pytest.mark.parametrize("tier", ["full", "bubblewrap", "landlock"])
def test_a_program_ends_and_reads_and_writes_as_elsewhere(tier):
    """Each prints 7 under the interpreter itself, whose word is taken for it, and in the sandbox."""
    jobs = [Job(source, stdin=b"3 4\n", limits=SLOW) for source in ENDINGS.values()]
    result = [one.stdout.decode() or one.reason for one in outcomes(jobs, tier)]
    assert dict(zip(ENDINGS, result, strict=True)) == dict.fromkeys(ENDINGS, "7\n")


def test_the_programs_above_print_seven_under_the_interpreter_itself(tmp_path):
    given = tmp_path / "input"
    given.write_text("3 4\n")
    for name, source in ENDINGS.items():
        path = tmp_path / "program.py"
        path.write_text(source)
        ran = subprocess.run([sys.executable, "-I", path], stdin=given.open(), capture_output=True)
        assert ran.stdout == b"7\n", name


DEPTH = """
import sys
def deep():
    n = 0
    def f():
        nonlocal n
        n += 1
        f()
    try:
        f()
    except RecursionError:
        return n
print(deep(), sys.getrecursionlimit())
sys.setrecursionlimit(1500)
print(deep(), sys.getrecursionlimit())
"""


def test_recursion_goes_as_deep_as_under_the_interpreter_itself(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(DEPTH)
    alone = subprocess.run([sys.executable, "-I", path], capture_output=True, check=True).stdout
    assert outcomes([Job(DEPTH)])[0].stdout == alone


def test_recursion_through_c_is_deep_enough_for_contest_programs():
    """The interpreter itself, with a stack of 8 MB, crashes at 20,000 levels of a cached function."""
    source = "import sys\nfrom functools import cache\nsys.setrecursionlimit(10**6)\n@cache\ndef f(n):\n"
    source += "    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(60000))\n"
    # Four threads do not fit into the memory if each maps as much as the first.
    thread = "import threading, time\nts = [threading.Thread(target=time.sleep, args=(0.3,)) for i in range(4)]\n"
    thread += "for t in ts:\n    t.start()\nprint(threading.active_count())\n"
    result = outcomes([Job(source, limits=SLOW), Job(thread, limits=SLOW)])
    assert result[0].stdout == b"60000\n", result[0]
    assert result[1].stdout == b"5\n", result[1]


@pytest.mark.parametrize("language", sorted({"c", "cpp", "javascript"} & set(languages())))
def test_other_languages_open_their_streams_by_path(language):
    sources = {
        "c": [
            '#include <stdio.h>\nint main() { int a, b; FILE *f = fopen("/dev/stdin", "r"), *o = '
            'fopen("/dev/stdout", "w");\n'
            ' fscanf(f, "%d %d", &a, &b); fprintf(o, "%d\\n", a + b); }',
            '#include <stdio.h>\nint main() { int a, b; freopen("/dev/fd/0", "r", stdin); scanf("%d %d", &a, &b);\n'
            ' printf("%d\\n", a + b); }',
        ],
        "cpp": [
            '#include <fstream>\n#include <iostream>\nint main() { std::ifstream in("/dev/stdin"); int a, b; in >> a '
            ">> b;\n"
            ' std::ofstream out("/dev/stdout"); out << a + b << "\\n"; }',
        ],
        "javascript": [
            "const t = require('fs').readFileSync('/dev/stdin', 'utf8').split(' ').map(Number); console.log(t[0] + "
            "t[1])",
            "const t = require('fs').readFileSync('/dev/fd/0').toString().split(' ').map(Number);\n"
            "require('fs').writeFileSync('/dev/stdout', (t[0] + t[1]) + '\\n')",
        ],
    }[language]
    result = outcomes([Job(source, language, b"3 4\n", limits=SLOW) for source in sources])
    assert [(one.ended, one.stdout) for one in result] == [(Ended.DONE, b"7\n")] * len(sources)


def test_a_program_can_neither_change_its_input_nor_leave_files_beside_it():
    source = """
import os
for action in (lambda: open('/dev/stdin', 'r+'), lambda: os.truncate('/dev/stdin', 0), lambda: os.unlink('/dev/stdin'),
               lambda: os.chmod('/dev/stdin', 0o777), lambda: open('/dev/fd/x', 'w'), lambda: os.remove('/dev/fd/0'),
               lambda: os.rename('/dev/fd/0', '/dev/fd/5'), lambda: os.mkfifo('/dev/fd/y')):
    try:
        print(action())
    except OSError:
        pass
print(input())
"""
    (result,) = outcomes([Job(source, stdin=b"3 4\n")])
    assert result.stdout == b"3 4\n"


# --- what LiveCodeBench's and LeetCode's harnesses give


def scores(task: Task, programs: dict[str, str], **options) -> dict[str, float | None]:
    """The score of each program, all judged beside each other."""

    async def judge():
        verifier = CodeVerifier(case_time=15.0, **options)
        return await asyncio.gather(*(verifier.verify(task, program) for program in programs.values()))

    return {name: one.score for name, one in zip(programs, asyncio.run(judge()), strict=True)}


def function(*cases, **more) -> Task:
    info = {"kind": "function", "name": "f", "cases": [{"args": args, "expected": out} for *args, out in cases]}
    return Task("t", "?", info={**info, **more})


def test_functions_have_the_names_that_livecodebench_gives():
    task = function([[3, 1, 2], 2, 5], [[5, 5], 1, 5])
    right = {
        "List": "class Solution:\n    def f(self, nums: List[int], k: int) -> int:\n        return "
        "sum(sorted(nums)[-k:])",
        "heapq": "def f(nums: List[int], k: int) -> Optional[int]:\n    return sum(nlargest(k, nums))",
        "modules": "def f(n, k):\n    return sum(heapq.nlargest(k, n)) + int(math.log(1)) + len(collections.Counter())",
        "collections": "def f(n, k):\n    d = deque(sorted(n)); h = defaultdict(int)\n    return sum(d.pop() for _ "
        "in range(k))",
        "pow stays the builtin": "def f(n, k):\n    return sum(sorted(n)[-k:]) * pow(3, 2, 8)",
        "cache": "@cache\ndef g(k):\n    return 0 if k == 0 else 1 + g(k - 1)\ndef f(n, k):\n    return "
        "sum(sorted(n)[-k:]) + 0 * g(400)",
        "deep": "def g(k):\n    return 0 if k == 0 else 1 + g(k - 1)\ndef f(n, k):\n    return sum(sorted(n)[-k:]) + "
        "0 * g(9000)",
        "future": "from __future__ import annotations\ndef f(n: Listy, k): return sum(sorted(n)[-k:])",
    }
    assert scores(task, right) == dict.fromkeys(right, 1.0)
    assert scores(task, {"wrong": "def f(nums: List[int], k): return sum(nums)"}) == {"wrong": 0.0}


def test_programs_have_these_names_only_where_the_harness_gives_them():
    cases = [{"input": "1 2", "output": "3"}]
    program = {"p": "a: List[int] = list(map(int, sys.stdin.read().split()))\nprint(reduce(add, a))"}
    plain = Task("t", "?", info={"kind": "stdio", "cases": cases})
    assert scores(plain, program) == {"p": 0.0}
    named = Task("t", "?", info={"kind": "stdio", "cases": cases, "harness": "livecodebench"})
    assert scores(named, program) == {"p": 1.0}
    unknown = Task("t", "?", info={"kind": "stdio", "cases": cases, "harness": "livecodebensh"})
    assert "livecodebench" in CodeVerifier().check_task(unknown)


LINKED = "class Solution:\n    def f(self, head: Optional[ListNode], k: int) -> Optional[ListNode]:\n        "
DEFINED = "class ListNode(object):\n    def __init__(self, x):\n        self.val = x\n        self.next = None\n"
TREES = "class Solution:\n    def f(self, root: Optional[TreeNode]) -> Optional[TreeNode]:\n        "


def test_lists_become_the_nodes_that_a_function_is_annotated_with():
    rotate = "for _ in range(k):\n            if head: head = head.next\n        return head"
    linked = function([[1, 2, 3], 1, [2, 3]], [[], 0, []], [[1], 1, []])
    right = {
        "nodes of the harness": LINKED + rotate,
        "nodes of its own": DEFINED + LINKED + rotate,
        "new nodes": LINKED + "a = None\n        while head:\n            a = ListNode(head.val, a); head = head.next\n"
        "        b = None\n        while a:\n            b = ListNode(a.val, b); a = a.next\n        return b.next "
        "if b and k else b",
        "plain lists": "def f(head, k): return head[k:]",
    }
    assert scores(linked, right) == dict.fromkeys(right, 1.0)
    wrong = {"whole": LINKED + "return head", "endless": LINKED + "head.next = head\n        return head"}
    assert scores(linked, wrong) == dict.fromkeys(wrong, 0.0)

    mirror = "if root:\n            root.left, root.right = self.f(root.right), self.f(root.left)\n        return root"
    trees = function([[1, 2, 3, None, 4], [1, 3, 2, None, None, 4]], [[], []], [[1, None, 2], [1, 2]])
    assert scores(trees, {"mirror": TREES + mirror, "same": TREES + "return root"}) == {"mirror": 1.0, "same": 0.0}
    merge = "def f(lists: List[Optional[ListNode]]) -> int:\n    return sum(one.val for one in lists if one)"
    assert scores(function([[[1, 2], [], [3]], 4]), {"several": merge}) == {"several": 1.0}


# --- compilers

LARGE = (
    '#include <cstdio>\nint a[{n}] = {{1}};\nint main() {{ int x, y; scanf("%d %d", &x, &y); printf("%d\\n", '
    "a[0] + a[{n} - 1] + x + y - 1); }}"
)


CPP20 = """
#include <bits/stdc++.h>
using namespace std;
struct Point { int x, y; auto operator<=>(const Point&) const = default; };
template <typename T> requires integral<T> T twice(T n) { return 2 * n; }
int popcount(int n) { return __builtin_popcount(n); }
int main() {
    int a, b;
    cin >> a >> b;
    vector<int> v{b, a};
    ranges::sort(v);
    unordered_set<int> seen{a};
    auto f = []<typename T>(T n) { return twice(n); };
    int n = 0;
    cout << v[0] << ' ' << f(v[1]) << ' ' << (Point{a, b} < Point{b, a}) << ' ' << seen.contains(a) << popcount(b) << n << endl;
}
"""
"""C++20, GNU's headers, and a name that C++20 gives to its library, too."""


@pytest.mark.gate
@pytest.mark.skipif("cpp" not in languages(), reason="there is no C++ compiler here")
def test_cpp_is_cpp20():
    (outcome,) = outcomes([Job(CPP20, "cpp", b"3 4\n", limits=SLOW)])
    assert (outcome.reason, outcome.stdout) == ("", b"3 8 1 110\n")


@pytest.mark.skipif("cpp" not in languages(), reason="there is no C++ compiler here")
def test_programs_with_large_initialised_arrays_compile_and_run():
    """A binary of 4 MB, one of 24 MB (more than the files that a program may write), and one that is refused, at
    once."""
    interpreter = os.path.realpath(sys.executable)  # a file of many MB that a sandbox can read, and that packs badly
    random_data = f'asm(".data\\n.incbin \\"{interpreter}\\"");\nint main() {{}}'
    jobs = [Job(LARGE.format(n=n), "cpp", b"3 4\n", limits=SLOW) for n in (1_000_005, 6_000_000)]
    *result, refused = outcomes([*jobs, Job(random_data, "cpp", limits=SLOW)])
    assert [(one.ended, one.stdout) for one in result] == [(Ended.DONE, b"7\n")] * 2, result
    if os.path.getsize(interpreter) > 10 * 2**20:
        assert refused.ended is Ended.RAISED
        assert "the program is too large" in refused.reason


# --- where Python is, and what tasks hold


def test_python_may_be_installed_below_tmp(tmp_path, monkeypatch):
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("the tests' folder is not below /tmp")
    real = Path(os.path.realpath(sys.executable))
    library = Path(os.__file__).parent
    prefix = tmp_path / "python"
    prefix.mkdir(mode=0o755)  # pytest's own folder is closed to others, and the sandbox is one
    (prefix / "bin").mkdir()
    (prefix / "lib").mkdir()
    shutil.copy(real, prefix / "bin" / real.name)
    kept = [path for path in library.iterdir() if path.name not in ("test", "site-packages", "idlelib", "__pycache__")]
    (prefix / "lib" / library.name).mkdir()
    for path in kept:
        target = prefix / "lib" / library.name / path.name
        if path.is_dir():
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, target)
    for shared in library.parent.glob("libpython*.so*"):
        shutil.copy(shared, prefix / "lib")
    started = subprocess.run([prefix / "bin" / real.name, "-I", "-S", "-c", "import csv"], capture_output=True)
    if started.returncode != 0:
        pytest.skip("this Python does not run from another place")
    monkeypatch.setattr(sys, "executable", str(prefix / "bin" / real.name))
    monkeypatch.setattr(sys, "base_prefix", str(prefix))
    problem_of.cache_clear()
    try:
        source = "import csv, os, tempfile\nopen(tempfile.mktemp(), 'w').write('x')\nprint(len(os.listdir()))"
        (result,) = outcomes([Job(source)])
    finally:
        problem_of.cache_clear()
    assert result.stdout == b"1\n", result.reason


def test_expected_values_may_be_large_integers_and_dicts_with_tuples_as_keys():
    large = function([5000, 10**5000], [6000, 10**6000])
    assert CodeVerifier().check_task(large) is None
    assert scores(large, {"right": "def f(n): return 10 ** n", "wrong": "def f(n): return 10 ** n + 1"}) == {
        "right": 1.0,
        "wrong": 0.0,
    }
    pairs = function([2, {(0, 1): "a", (1, (2, 3)): {1, 2}}])
    wrong = "def f(n): return {(0, True): 'a', (1, (2, 3)): {1, 2}}"
    right = "def f(n): return {(0, 1): 'a', (1, (2, 3)): {1, 2}}"
    assert scores(pairs, {"right": right, "wrong": wrong}) == {"right": 1.0, "wrong": 0.0}


def test_a_digest_tells_tasks_apart():
    values = [
        1,
        True,
        "1",
        [1],
        (1,),
        {1},
        {1: 1},
        {"1": 1},
        None,
        1.0,
        [[], []],
        [[[]]],
        10**5000,
        10**5000 + 1,
        "\ud800",
    ]
    digests = {read_layout(function(value).info, "python", Comparison()).digest for value in [[v, v] for v in values]}
    assert len(digests) == len(values)


# --- values


def asserts(*tests: str, setup: str = "") -> Task:
    return Task("t", "?", info={"kind": "asserts", "tests": list(tests), "setup": setup, "entry_point": "f"})


VALUES = {
    "generator": ("def f(n):\n    yield from range(n)", "def f(n):\n    yield from range(n + 1)"),
    "map": ("def f(n): return map(int, range(n))", "def f(n): return map(str, range(n))"),
    "filter": ("def f(n): return filter(lambda x: x < n, range(9))", "def f(n): return filter(None, range(n))"),
    "range": ("def f(n): return range(n)", "def f(n): return range(n - 1)"),
    "keys": ("def f(n): return dict.fromkeys(range(n)).keys()", "def f(n): return dict.fromkeys(range(n + 1)).keys()"),
    "values": (
        "def f(n): return {str(i): i for i in range(n)}.values()",
        "def f(n): return {i: 1 for i in range(n)}.values()",
    ),
    "deque": ("from collections import deque\ndef f(n): return deque(range(n))", "def f(n): return []"),
    "itertools": (
        "import itertools\ndef f(n): return itertools.chain(range(n))",
        "import itertools\nf = itertools.repeat",
    ),
    "own iterator": (
        "class I:\n    def __init__(self, n): self.i, self.n = 0, n\n    def __iter__(self): return self\n"
        "    def __next__(self):\n        self.i += 1\n        if self.i > self.n: raise StopIteration\n        "
        "return self.i - 1\n"
        "f = I",
        "class I:\n    def __init__(self, n): pass\n    def __iter__(self): return self\n    def __next__(self): "
        "return 1\nf = I",
    ),
}
ITERATED = asserts(
    "assert list(f(3)) == [0, 1, 2]",
    "assert sorted(f(3)) == [0, 1, 2]",
    "assert set(f(3)) == {0, 1, 2}",
    "assert tuple(f(2)) == (0, 1)",
    "assert 2 in f(3) and 3 not in f(3)",
    "assert sum(f(4)) == 6 and max(f(4)) == 3",
    "for i, x in enumerate(f(3)):\n    assert i == x",
)
KINDS = {
    "namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(n): return P(n, 2)",
        ("assert f(1) == (1, 2)", "assert f(1)[0] == 1"),
        "def f(n): return [n, 2]",
    ),
    "bytearray": ("def f(n): return bytearray(b'ab')", ("assert f(1) == b'ab'",), "def f(n): return 'ab'"),
    "Fraction": (
        "from fractions import Fraction\ndef f(n): return Fraction(n, 2)",
        (
            "assert f(1) == 0.5",
            "assert abs(f(1) - 0.5) < 1e-9",
            "from fractions import Fraction\nassert f(3) == Fraction(3, 2)",
        ),
        "from fractions import Fraction\ndef f(n): return Fraction(n, 3)",
    ),
    "Decimal": (
        "from decimal import Decimal\ndef f(n): return Decimal(n) / 4",
        (
            "assert f(1) == 0.25",
            "from decimal import Decimal\nassert f(1) == Decimal('0.25')",
            "assert round(f(10)) == 2",
        ),
        "from decimal import Decimal\ndef f(n): return Decimal(n) / 5",
    ),
    "date": (
        "import datetime\ndef f(n): return datetime.date(2000, 1, n)",
        (
            "import datetime\nassert f(2) == datetime.date(2000, 1, 2)",
            "from datetime import *\nassert f(2) - f(1) == timedelta(1)",
        ),
        "import datetime\ndef f(n): return datetime.date(2000, 1, n + 1)",
    ),
    "IntEnum": (
        "import enum\nclass C(enum.IntEnum):\n    A = 1\n    B = 2\nf = C",
        ("assert f(1) == 1", "assert [f(1), f(2)] == [1, 2]"),
        "def f(n): return str(n)",
    ),
    "own class": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 0\ndef f(n): return P(n)",
        ("assert f(1) == f(1) and f(1) != f(2)", "p = f(3)\nassert (p.x, p.y) == (3, 0)"),
        "class P:\n    def __init__(self, x): self.x = self.y = x\ndef f(n): return P(n)",
    ),
}


def test_values_of_many_kinds_are_judged_as_python_judges_them():
    """The right program of each kind passes, as it does under exec, and its wrong twin fails."""
    for name, (right, wrong) in VALUES.items():
        for program, passes in ((right, True), (wrong, False)):
            endless = "repeat" in program or "def __next__(self): return 1" in program
            assert endless or passed_by_exec(program, ITERATED.info["tests"]) is passes, (name, program)
    right = {name: program for name, (program, _) in VALUES.items()}
    wrong = {name: program for name, (_, program) in VALUES.items()}
    assert scores(ITERATED, right) == dict.fromkeys(right, 1.0)
    assert scores(ITERATED, wrong) == dict.fromkeys(wrong, 0.0)
    lists = asserts("assert f(3) == [0, 1, 2]")
    assert set(scores(lists, right).values()) == {0.0}, "an iterator is no list"
    for name, (program, tests, twin) in KINDS.items():
        assert passed_by_exec(program, tests), name
        assert not passed_by_exec(twin, tests), name
        assert scores(asserts(*tests), {"right": program, "wrong": twin}) == {"right": 1.0, "wrong": 0.0}, name


FUNCTIONS = {
    "functions as arguments": (
        (
            "assert f(lambda x: x + 1, [1, 2]) == [2, 3]",
            "assert f(str, [1]) == ['1']",
            "assert f(str.upper, ['a']) == ['A']",
        ),
        "def f(g, xs): return [g(x) for x in xs]",
        "def f(g, xs): return xs",
    ),
    "by name": (
        ("assert f([3, 1, 2], key=lambda x: -x) == [3, 2, 1]", "assert f(['aa', 'b'], key=len) == ['b', 'aa']"),
        "def f(xs, key): return sorted(xs, key=key)",
        "def f(xs, key): return sorted(xs)",
    ),
    "functions as results": (
        ("assert f(3)(4) == 7", "assert f(1)(y=2) == 3"),
        "def f(x): return lambda y: x + y",
        "def f(x): return lambda y: x - y",
    ),
    "methods of results": (
        ("assert f(2, 3).area() == 6", "assert f(2, h=5).w == 2", "assert f(1, 1).scaled(3).area() == 9"),
        "class R:\n    def __init__(self, w, h): self.w, self.h = w, h\n    def area(self): return self.w * self.h\n"
        "    def scaled(self, k): return R(self.w * k, self.h * k)\nf = R",
        "class R:\n    def __init__(self, w, h): self.w, self.h = w, h\n    def area(self): return self.w + self.h\n"
        "    def scaled(self, k): return self\nf = R",
    ),
}


def test_functions_are_arguments_and_results():
    for name, (tests, right, wrong) in FUNCTIONS.items():
        for program, passes in ((right, True), (wrong, False)):
            assert passed_by_exec(program, [f"{program}\n{test}" for test in tests]) is passes, name
        assert scores(asserts(*tests), {"right": right, "wrong": wrong}) == {"right": 1.0, "wrong": 0.0}, name
    check = "def check(candidate):\n    assert candidate(3)(4) == 7\n    assert candidate(0)(1) == 1\n"
    info = {"kind": "humaneval", "prompt": "def f(x):\n", "entry_point": "f", "test": check}
    programs = {"right": "def f(x): return lambda y: x + y", "wrong": "def f(x): return lambda y: 7"}
    assert scores(Task("t", "?", info=info), programs) == {"right": 1.0, "wrong": 0.0}


def test_a_program_is_not_told_what_a_method_of_a_builtin_is_asked():
    """`f(x).endswith('42')` runs as a test: an object with a method of that name would be told the answer."""
    rigged = "class A:\n    def __getattr__(self, name): return lambda *a: True\ndef f(x): return A()"
    for test in (
        "assert f(1).endswith('42')",
        "assert f(1).issubset({1})",
        "assert f(1).count(3) == 1",
        "assert f(1).x == 5",
    ):
        assert scores(asserts(test), {"rigged": rigged}) == {"rigged": 0.0}, test


CHANGES = {
    "a list that is sorted": (
        "xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]",
        "def f(xs): xs.sort()",
        "def f(xs): sorted(xs)",
    ),
    "with a result": (
        "xs = [3, 1]\nassert f(xs) == 2\nassert xs == [3]",
        "def f(xs):\n    n = len(xs)\n    xs.pop()\n    return n",
        "def f(xs): return len(xs)",
    ),
    "rows of a matrix": (
        "m = [[1, 2], [3]]\nrow = m[0]\nf(m)\nassert m == [[2, 1], [3], []] and row is m[0] and row == [2, 1]",
        "def f(m):\n    m[0].reverse()\n    m.append([])",
        "def f(m):\n    m[0].reverse()",
    ),
    "a dict and a set by name": (
        "d, s = {'a': [1]}, {1}\nf(d, s=s)\nassert d == {'a': [1, 2], 'b': 3} and s == {1, 5}",
        "def f(d, s):\n    d['a'].append(2)\n    d['b'] = 3\n    s.add(5)",
        "def f(d, s):\n    d = {'a': [1, 2], 'b': 3}\n    s.add(5)",
    ),
    "arguments of an exception": (
        "try:\n    f({})\nexcept KeyError as error:\n    assert error.args == ('a',)\nelse:\n    assert False",
        "def f(d): return d['a']",
        "def f(d): raise KeyError(\"'a'\")",
    ),
    "several arguments": (
        "try:\n    f(1)\nexcept ValueError as error:\n    assert error.args == (1, 'two', (3,))\nelse:\n    assert "
        "False",
        "def f(x): raise ValueError(x, 'two', (3,))",
        "def f(x): raise ValueError(x, 'two', [3])",
    ),
}


def test_changes_in_place_and_arguments_of_exceptions_reach_a_test():
    for name, (test, right, wrong) in CHANGES.items():
        assert passed_by_exec(right, [f"{right}\n{test}"]), name
        assert not passed_by_exec(wrong, [f"{wrong}\n{test}"]), name
        assert scores(asserts(test), {"right": right, "wrong": wrong}) == {"right": 1.0, "wrong": 0.0}, name


def passed_by_exec(program: str, tests) -> bool:
    names: dict = {"__name__": __name__}  # dataclasses look their module up
    exec(program, names)
    try:
        for test in tests:
            exec(test, dict(names))
    except Exception:
        return False
    return True


# --- packages


@pytest.mark.gate
def test_numpy_is_there_only_where_the_task_says_so():
    pytest.importorskip("numpy")
    source = "import numpy as np\nprint(int(np.linalg.norm([3.0, 4.0])), np.arange(3).sum())"
    look = "import os\nprint([os.path.exists(p) for p in ('/packages', '/packages/numpy')])"
    with_numpy = {"packages": ("numpy",), "limits": SLOW}
    for tier in ("full", "bubblewrap", "landlock"):
        result, without, listed = outcomes(
            [
                Job(source, **with_numpy),
                Job(source, limits=SLOW),
                Job("import os\nprint(sorted(os.listdir('/packages')))", **with_numpy),
            ],
            tier,
        )
        assert result.stdout == b"5 3\n", (tier, result.reason)
        assert without.ended is Ended.RAISED
        assert "numpy" in without.reason
        if tier != "landlock":
            assert listed.stdout in (b"['numpy', 'numpy.libs']\n", b"['numpy']\n")
    assert outcomes([Job(look)])[0].stdout == b"[True, False]\n"
    task = function([[1.0, 2.0], 3.0], packages=["numpy"])
    right = "import numpy as np\ndef f(x): return np.sum(x)"
    wrong = "import numpy as np\ndef f(x): return np.array([3.0])"
    assert scores(task, {"right": right, "wrong": wrong}) == {"right": 1.0, "wrong": 0.0}
    assert "numpy" in CodeVerifier().check_task(function([1, 1], packages=["nunpy"]))
