"""Four hundred right programs in the styles that people write, and two hundred wrong twins, through the real sandbox.

A program is a way to read, a shape, a task and a way to print; its twin spoils the answer in one way before it is
printed. A sample of sixty right programs and thirty twins runs in the normal gate.
"""

from __future__ import annotations

import asyncio
import itertools
import textwrap

import pytest
from sandbox_tiers import usable_tier

from rlvr.records import Task
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code.sandbox import languages

INPUTS = ((5, 3, 8, 2, 9), (7, 1, 4))


def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


# A task: its answer, and how Python, JavaScript and C++ compute `out` of the numbers `a`.
TASKS = {
    "sum": (
        lambda a: [sum(a), len(a)],
        "out = [sum(a), len(a)]",
        "out = [a.reduce((x, y) => x + y, 0), a.length];",
        "long long s = 0; for (auto x : a) s += x; out = {s, (long long)a.size()};",
    ),
    "extremes": (
        lambda a: [min(a), max(a)],
        "out = [min(a), max(a)]",
        "out = [Math.min(...a), Math.max(...a)];",
        "out = {*min_element(a.begin(), a.end()), *max_element(a.begin(), a.end())};",
    ),
    "sorted": (
        sorted,
        "import heapq\nh = a[:]\nheapq.heapify(h)\nout = [heapq.heappop(h) for _ in range(len(a))]",
        "out = [...a].sort((x, y) => x - y);",
        "out = a; sort(out.begin(), out.end());",
    ),
    "prefix sums": (
        lambda a: list(itertools.accumulate(a)),
        "from itertools import accumulate\nout = list(accumulate(a))",
        "let t = 0; out = a.map(x => t += x);",
        "out.resize(a.size()); partial_sum(a.begin(), a.end(), out.begin());",
    ),
    "parity": (
        lambda a: [sum(x % 2 == 0 for x in a), sum(x % 2 for x in a)],
        "from collections import Counter\nc = Counter(x & 1 for x in a)\nout = [c[0], c[1]]",
        "const m = new Map(); for (const x of a) m.set(x % 2, (m.get(x % 2) || 0) + 1); out = [m.get(0) || 0, "
        "m.get(1) || 0];",
        "map<int, long long> m; for (auto x : a) ++m[x % 2]; out = {m[0], m[1]};",
    ),
    "squares": (
        lambda a: [sum(x * x for x in a), a[-1]],
        "out = [sum(x ** 2 for x in a), a[-1]]",
        "out = [Number(a.map(x => BigInt(x) ** 2n).reduce((x, y) => x + y)), a[a.length - 1]];",
        "long long s = 0; for (size_t i = 0; i < a.size(); i++) s += a[i] * a[i]; out = {s, a.back()};",
    ),
    "fibonacci": (
        lambda a: [fibonacci(a[0]), sum(a)],
        "from functools import lru_cache\n@lru_cache(None)\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + "
        "fib(n - 2)\n"
        "out = [fib(a[0]), sum(a)]",
        "const fib = n => n < 2 ? n : fib(n - 1) + fib(n - 2); out = [fib(a[0]), a.reduce((x, y) => x + y)];",
        "function<long long(int)> fib = [&](int n) -> long long { return n < 2 ? n : fib(n - 1) + fib(n - 2); };\n"
        "out = {fib((int)a[0]), accumulate(a.begin(), a.end(), 0LL)};",
    ),
    "inversions": (
        lambda a: [sum(x > y for x, y in itertools.combinations(a, 2)), len(a)],
        "out = [0, len(a)]\nfor i in range(len(a)):\n    for j in range(i + 1, len(a)):\n        if a[i] > a[j]:\n   "
        "         out[0] += 1",
        "out = [0, a.length]; a.forEach((x, i) => a.slice(i + 1).forEach(y => { if (x > y) out[0]++; }));",
        "long long k = 0; for (size_t i = 0; i < a.size(); ++i) for (size_t j = i + 1; j < a.size(); ++j) k += a[i] "
        "> a[j];\n"
        "out = {k, (long long)a.size()};",
    ),
}
CASES = {
    name: [
        {"input": f"{len(a)}\n{' '.join(map(str, a))}\n", "output": "".join(f"{x}\n" for x in answer(list(a)))}
        for a in INPUTS
    ]
    for name, (answer, *_) in TASKS.items()
}

# --- Python

READ = {
    "read": "import sys\na = list(map(int, sys.stdin.read().split()))[1:]",
    "readline": "import sys\ninput = sys.stdin.readline\nn = int(input())\na = list(map(int, input().split()))",
    "input": "n = int(input())\na = [int(x) for x in input().split()]",
    "until EOF": "a = []\nwhile True:\n    try:\n        a.extend(map(int, input().split()))\n    except EOFError:\n "
    "       break\na = a[1:]",
    "lines": "import sys\na = []\nfor line in sys.stdin:\n    a += [int(x) for x in line.split()]\na.pop(0)",
    "fileinput": "import fileinput\na = [int(x) for line in fileinput.input() for x in line.split()][1:]",
    "os.read": "import os\na = list(map(int, os.read(0, 10 ** 6).split()))[1:]",
    "open(0)": "n, *a = map(int, open(0).read().split())",
    "buffer": "import sys\na = list(map(int, sys.stdin.buffer.read().split()))[1:]",
    "buffer lines": "import sys\nr = sys.stdin.buffer.readline\nn = int(r())\na = [*map(int, r().split())]",
    "iter": "import sys\na = []\nfor line in iter(sys.stdin.buffer.readline, b''):\n    a.extend(int(x) for x in "
    "line.split())\na = a[1:]",
    "/dev/stdin": "with open('/dev/stdin') as f:\n    n = int(f.readline())\n    a = list(map(int, "
    "f.readline().split()))",
    "readlines": "import sys\nlines = sys.stdin.readlines()\na = list(map(int, lines[1].split()))",
    "BytesIO": "import io, os\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nn = int(input())\na = "
    "list(map(int, input().split()))",
    "StringIO": "import io, sys\nsys.stdin = io.StringIO(sys.stdin.read())\nn = int(input())\na = list(map(int, "
    "input().split()))",
    "tokens": (
        "import sys\ndef tokens():\n    for line in sys.stdin:\n        yield from line.split()\n"
        "t = tokens()\nn = int(next(t))\na = [int(next(t)) for _ in range(n)]"
    ),
    "walrus": "import sys\na = []\nwhile line := sys.stdin.readline():\n    a += map(int, line.split())\ndel a[0]",
    "asyncio": (
        "import asyncio, sys\nasync def read():\n    loop = asyncio.get_running_loop()\n"
        "    return await loop.run_in_executor(None, sys.stdin.read)\na = [int(x) for x in "
        "asyncio.run(read()).split()][1:]"
    ),
    "TextIOWrapper": "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding='utf-8')\n_, *a = "
    "map(int, sys.stdin.read().split())",
}
PRINT = {
    "each": "for x in out:\n    print(x)",
    "join": "print('\\n'.join(map(str, out)))",
    "star": "print(*out, sep='\\n')",
    "write": "import sys\nsys.stdout.write('\\n'.join(map(str, out)) + '\\n')",
    "buffer": "import sys\nsys.stdout.buffer.write('\\n'.join(map(str, out)).encode())",
    "os.write": "import os\nos.write(1, '\\n'.join(map(str, out)).encode())",
    "open(1)": "w = open(1, 'w')\nfor x in out:\n    w.write(f'{x}\\n')",
    "stdout by path": "with open('/dev/stdout', 'w') as w:\n    print(*out, file=w)",
    "atexit": (
        "import atexit, io, sys\nsys.stdout = io.StringIO()\natexit.register(lambda: "
        "sys.__stdout__.write(sys.stdout.getvalue()))\n"
        "for x in out:\n    print(x)"
    ),
    "percent": "for x in out:\n    print('%d' % x, flush=True)",
    "format": "print(' '.join('{}'.format(x) for x in out), end='')",
    "exit": "print(*out)\nexit()",
    "sys.exit": "import sys\nprint(*out)\nsys.exit(0)",
    "redirect": "import contextlib, io\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    "
    "print(*out)\nprint(b.getvalue(), end='')",
}
SHAPE = {
    "plain": "{body}",
    "main": "def main():\n{inner}\n\nmain()",
    "guard": "def main():\n{inner}\n\nif __name__ == '__main__':\n    main()",
    "class": 'class Solution:\n    def solve(self):\n{deeper}\n\nif __name__ == "__main__":\n    Solution().solve()',
    "thread": (
        "import sys, threading\nsys.setrecursionlimit(10 ** 7)\nthreading.stack_size(1 << 27)\n\ndef "
        "main():\n{inner}\n\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()"
    ),
    "docstring": '#!/usr/bin/env python3\n# -*- coding: utf-8 -*-\n"""Solves it."""\nfrom __future__ import '
    "annotations\n\n{body}",
}

# --- JavaScript: `solve(text)` is called by the reader

JS_READ = {
    "fd": "solve(require('fs').readFileSync(0, 'utf8'));",
    "path": "solve(require('fs').readFileSync('/dev/stdin').toString());",
    "events": "let t = ''; process.stdin.setEncoding('utf8'); process.stdin.on('data', d => t += d); "
    "process.stdin.on('end', () => solve(t));",
    "resume": "process.stdin.resume(); let t = ''; process.stdin.on('data', function (d) { t += d; "
    "});\nprocess.stdin.on('end', function () { solve(t); });",
    "readline": (
        "const rl = require('readline').createInterface({ input: process.stdin }); const lines = [];\n"
        "rl.on('line', l => lines.push(l)); rl.on('close', () => solve(lines.join('\\n')));"
    ),
    "async lines": (
        "(async () => { const rl = require('readline').createInterface({ input: process.stdin, crlfDelay: Infinity "
        "}); let t = '';\n"
        "for await (const line of rl) t += line + '\\n'; solve(t); })();"
    ),
    "async chunks": "(async () => { const c = []; for await (const d of process.stdin) c.push(d); "
    "solve(Buffer.concat(c).toString()); })();",
    "readSync": (
        "const fs = require('fs'); const b = Buffer.alloc(1 << 16); let n, t = '';\n"
        "while ((n = fs.readSync(0, b, 0, b.length, null)) > 0) t += b.toString('utf8', 0, n);\nsolve(t);"
    ),
    "promises": "require('fs/promises').readFile('/dev/stdin', 'utf8').then(solve);",
}
JS_PRINT = {
    "log": "for (const x of out) console.log(x);",
    "join": "console.log(out.join('\\n'));",
    "write": "process.stdout.write(out.map(String).join('\\n') + '\\n');",
    "template": "out.forEach(x => console.log(`${x}`));",
    "spread": "console.log(...out);",
    "writeSync": "require('fs').writeSync(1, out.join(' '));",
    "format": "console.log(require('util').format('%s', out.join(' ')));",
}
JS_SHAPE = {
    "function": "function solve(text) {{\n  const a = text.trim().split(/\\s+/).map(Number).slice(1);\n  let out;\n  "
    "{body}\n}}\n{read}",
    "arrow": "'use strict';\nconst solve = text => {{\n  const [n, ...a] = text.split(/\\s+/).filter(Boolean).map(x "
    "=> parseInt(x, 10));\n  var out;\n  {body}\n}};\n{read}",
    "class": (
        "class Solution {{\n  run(text) {{\n    const lines = text.split('\\n');\n    const a = lines[1].split(' "
        "').map(x => +x);\n"
        "    let out;\n    {body}\n  }}\n}}\nconst solve = text => new Solution().run(text);\n{read}"
    ),
}

# --- C++

HEADERS = "".join(
    f"#include <{name}>\n"
    for name in (
        *(
            "algorithm",
            "cstdio",
            "cstdlib",
            "cstring",
            "fstream",
            "functional",
            "iostream",
            "iterator",
            "map",
            "numeric",
        ),
        *("sstream", "string", "vector"),
    )
)
CPP_READ = {
    "cin": "int n; cin >> n; for (int i = 0; i < n; i++) { long long x; cin >> x; a.push_back(x); }",
    "fast cin": "ios::sync_with_stdio(false); cin.tie(nullptr); int n; cin >> n; a.resize(n); for (auto& x : a) cin "
    ">> x;",
    "scanf": 'int n; scanf("%d", &n); a.resize(n); for (int i = 0; i < n; ++i) scanf("%lld", &a[i]);',
    "getline": "string line; getline(cin, line); getline(cin, line); stringstream ss(line); long long x; while (ss "
    ">> x) a.push_back(x);",
    "getchar": (
        "long long v = 0; bool in = false, first = true; int c; do { c = getchar(); if (c >= '0' && c <= '9') { v = "
        "v * 10 + c - '0'; in = true; }\n"
        "else if (in) { if (!first) a.push_back(v); first = false; v = 0; in = false; } } while (c != EOF);"
    ),
    "fread": (
        "static char b[1 << 16]; size_t got = fread(b, 1, sizeof b - 1, stdin); b[got] = 0; char* p = b; long n = "
        "strtol(p, &p, 10);\n"
        "while (n--) a.push_back(strtoll(p, &p, 10));"
    ),
    "iterators": "a.assign(istream_iterator<long long>(cin), {}); a.erase(a.begin());",
    "fgets": 'static char buf[9999]; fgets(buf, 9999, stdin); fgets(buf, 9999, stdin); for (char* p = strtok(buf, " '
    '\\n"); p; p = strtok(0, " \\n")) a.push_back(atoll(p));',
    "path": 'ifstream f("/dev/stdin"); int n; f >> n; a.resize(n); for (auto& x : a) f >> x;',
    "freopen": 'freopen("/dev/stdin", "r", stdin); int n; scanf("%d", &n); a.resize(n); for (auto& x : a) '
    'scanf("%lld", &x);',
}
CPP_PRINT = {
    "endl": "for (auto x : out) cout << x << endl;",
    "newline": "for (size_t i = 0; i < out.size(); i++) cout << out[i] << '\\n';",
    "printf": 'for (auto x : out) printf("%lld\\n", x);',
    "puts": "for (auto x : out) puts(to_string(x).c_str());",
    "stream": "ostringstream o; for (auto x : out) o << x << ' '; cout << o.str();",
    "copy": 'copy(out.begin(), out.end(), ostream_iterator<long long>(cout, "\\n"));',
    "fwrite": 'string text; for (auto x : out) text += to_string(x) + "\\n"; fwrite(text.data(), 1, text.size(), '
    "stdout);",
}
CPP_SHAPE = {
    "main": "using namespace std;\nint main() {{\n  vector<long long> a, out;\n  {body}\n  return 0;\n}}\n",
    "solve": "using namespace std;\ntypedef long long ll;\nvector<ll> a, out;\nvoid solve() {{\n  {body}\n}}\nint "
    "main() {{ int t = 1; while (t--) solve(); }}\n",
    "class": (
        "#define all(x) x.begin(), x.end()\nusing namespace std;\nint big[1000005] = {{1}};\nstruct Solution {{ "
        "vector<long long> a, out; void run() {{\n  {body}\n}} }};\n"
        "int main() {{ Solution().run(); }}\n"
    ),
}

# --- the twins: what is done to `out` before it is printed, in Python, JavaScript and C++

TWINS = {
    "off by one": ("out[0] += 1", "out[0] += 1;", "out[0] += 1;"),
    "wrong type": (
        "out = [f'{x}.0' for x in out]",
        "out = out.map(x => x.toFixed(1));",
        "out.back() = -out.back() - 1;",
    ),
    "nothing": ("out = []", "out = [];", "out.clear();"),
    "partial": ("out = out[:-1]", "out.pop();", "out.pop_back();"),
    "swapped": ("out[0], out[-1] = out[-1], out[0]", "out.reverse();", "swap(out.front(), out.back());"),
    "hard-coded": ("out = {sample}", "out = {sample};", "out = {{{values}}};"),
    "one too many": ("out.append(0)", "out.push(0);", "out.push_back(0);"),
}


STYLES = {
    "python": len(TASKS) * len(READ) * len(SHAPE) * len(PRINT),
    "javascript": len(TASKS) * len(JS_READ) * len(JS_SHAPE) * len(JS_PRINT),
    "cpp": len(TASKS) * len(CPP_READ) * len(CPP_SHAPE) * len(CPP_PRINT),
}
STEP = 1009
"""A prime that divides none of these: its multiples go through all styles, each once."""


def written(language: str, number: int, twin: str | None = None) -> tuple[str, str]:
    """The task and the text of program `number`."""
    at, chosen = divmod(number * STEP % STYLES[language], len(TASKS))
    task = list(TASKS)[chosen]
    column = {"python": 1, "javascript": 2, "cpp": 3}[language]
    body = TASKS[task][column]
    if twin is not None:
        sample = TASKS[task][0](list(INPUTS[0]))
        spoilt = TWINS[twin][column - 1]
        body += "\n" + spoilt.replace("{sample}", str(sample)).replace("{{{values}}}", "{" + str(sample)[1:-1] + "}")
    read, shape, show = {
        "python": (READ, SHAPE, PRINT),
        "javascript": (JS_READ, JS_SHAPE, JS_PRINT),
        "cpp": (CPP_READ, CPP_SHAPE, CPP_PRINT),
    }[language]
    at, chosen = divmod(at, len(show))
    printer = list(show.values())[chosen]
    at, chosen = divmod(at, len(read))
    reader = list(read.values())[chosen]
    frame = list(shape.values())[at]
    if language == "javascript":
        return task, frame.format(body=f"{body}\n  {printer}", read=reader)
    whole = "\n".join([reader, body, printer])
    if language == "cpp":
        return task, HEADERS + frame.format(body=whole)
    parts = {"body": whole, "inner": textwrap.indent(whole, " " * 4), "deeper": textwrap.indent(whole, " " * 8)}
    return task, frame.format(**parts)


def judged(programs: list[tuple[str, str, str]]) -> list[float | None]:
    """The scores of (language, task, text), all judged beside each other."""
    usable_tier("full")
    verifier = CodeVerifier(case_time=20.0, total_time=200.0)

    async def run():
        tasks = [
            Task(str(n), "?", info={"kind": "stdio", "language": one[0], "cases": CASES[one[1]]})
            for n, one in enumerate(programs)
        ]
        fenced = [f"So:\n```{language}\n{text}\n```\nIt prints\n```\n27\n```\n" for language, _, text in programs]
        return await asyncio.gather(*(verifier.verify(task, text) for task, text in zip(tasks, fenced, strict=True)))

    result = asyncio.run(run())
    return [(one.score, one.reason) for one in result]


def some(language: str, count: int, twins: bool = False) -> list[tuple[str, str, str]]:
    ways = list(TWINS)
    numbers = range(1000, 1000 + count) if twins else range(count)
    made = [written(language, n, ways[n % len(ways)] if twins else None) for n in numbers]
    return [(language, *one) for one in made]


def check(programs, score):
    assert len({text for _, _, text in programs}) == len(programs)
    result = judged(programs)
    bad = [(*one[:2], output, one[2]) for one, output in zip(programs, result, strict=True) if output[0] != score]
    assert not bad, f"{len(bad)} of {len(programs)}: {bad[:3]}"


def needs(language: str) -> None:
    if language not in languages():
        pytest.skip(f"programs in {language} cannot be run here")


@pytest.mark.gate
@pytest.mark.parametrize(("language", "right", "wrong"), [("python", 40, 18), ("javascript", 12, 7), ("cpp", 8, 5)])
def test_a_sample_of_programs_is_judged_right(language, right, wrong):
    needs(language)
    check(some(language, right), 1.0)
    check(some(language, wrong, twins=True), 0.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a hundred and twenty compilations
@pytest.mark.parametrize(
    ("language", "right", "wrong"), [("python", 220, 110), ("javascript", 100, 50), ("cpp", 80, 40)]
)
def test_four_hundred_programs_and_two_hundred_twins(language, right, wrong):
    needs(language)
    check(some(language, right), 1.0)
    check(some(language, wrong, twins=True), 0.0)
