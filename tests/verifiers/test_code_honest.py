"""Programs as people write them: what CPython, gcc and node do outside of the sandbox is done inside of it, too."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from rlvr.verifiers.code.runner import Ended, Job, Limits, Outcome
from rlvr.verifiers.code.sandbox import languages, open_runner
from rlvr.verifiers.code.sandbox.opening import problem_of
from rlvr.verifiers.code.sandbox.tiers import TIERS

SLOW = Limits(seconds=15.0)


def outcomes(jobs: list[Job], tier: str = "full") -> list[Outcome]:
    """The outcomes of jobs that run beside each other."""
    if (problem := problem_of(next(one for one in TIERS if one.name == tier))) is not None:
        pytest.skip(f"no sandbox {tier!r} here: {problem}")

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
    "text over bytes": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, write_through=False)\nprint(7)",
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
    "/dev/stdin twice": "a = open('/dev/stdin').read()\nb = open('/dev/stdin').readline()\nprint(int(b.split()[0]) + 4)",
    "/dev/fd": "print(sum(map(int, open('/dev/fd/0').read().split())))",
    "/dev/stdout": "print(7, file=open('/dev/stdout', 'w'))",
    "/dev/stdout and print": "with open('/dev/stdout', 'w') as w:\n    w.write('7')\nprint()",
    "/dev/stderr": "print('x', file=open('/dev/stderr', 'w'))\nprint(7)",
    "__file__": "import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\nprint(7 if __file__.endswith('.py') else 8)",
    "stack size": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**29)\n"
        "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\n"
        "def main():\n    print(f(50000) - 49993)\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()"
    ),
    "recursion limit": "import sys\nsys.setrecursionlimit(5000)\nprint(7 if sys.getrecursionlimit() == 5000 else 8)",
}


@pytest.mark.parametrize("tier", ["full", "bubblewrap", "landlock"])
def test_a_program_ends_and_reads_and_writes_as_elsewhere(tier):
    """Each prints 7 under the interpreter itself, whose word is taken for it, and in the sandbox."""
    jobs = [Job(source, stdin=b"3 4\n", limits=SLOW) for source in ENDINGS.values()]
    found = [one.stdout.decode() or one.reason for one in outcomes(jobs, tier)]
    assert dict(zip(ENDINGS, found, strict=True)) == dict.fromkeys(ENDINGS, "7\n")


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


@pytest.mark.parametrize("language", sorted({"c", "cpp", "javascript"} & set(languages())))
def test_other_languages_open_their_streams_by_path(language):
    sources = {
        "c": [
            '#include <stdio.h>\nint main() { int a, b; FILE *f = fopen("/dev/stdin", "r"), *o = fopen("/dev/stdout", "w");\n'
            ' fscanf(f, "%d %d", &a, &b); fprintf(o, "%d\\n", a + b); }',
            '#include <stdio.h>\nint main() { int a, b; freopen("/dev/fd/0", "r", stdin); scanf("%d %d", &a, &b);\n'
            ' printf("%d\\n", a + b); }',
        ],
        "cpp": [
            '#include <fstream>\n#include <iostream>\nint main() { std::ifstream in("/dev/stdin"); int a, b; in >> a >> b;\n'
            ' std::ofstream out("/dev/stdout"); out << a + b << "\\n"; }',
        ],
        "javascript": [
            "const t = require('fs').readFileSync('/dev/stdin', 'utf8').split(' ').map(Number); console.log(t[0] + t[1])",
            "const t = require('fs').readFileSync('/dev/fd/0').toString().split(' ').map(Number);\n"
            "require('fs').writeFileSync('/dev/stdout', (t[0] + t[1]) + '\\n')",
        ],
    }[language]
    found = outcomes([Job(source, language, b"3 4\n", limits=SLOW) for source in sources])
    assert [(one.ended, one.stdout) for one in found] == [(Ended.DONE, b"7\n")] * len(sources)


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
    (found,) = outcomes([Job(source, stdin=b"3 4\n")])
    assert found.stdout == b"3 4\n"
