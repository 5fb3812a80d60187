"""Measure how long a hostile program stops the trainer's event loops.

    python scripts/benchmarks/code_loop.py [--rounds 3] > scripts/benchmarks/code_loop.json

Each attack is judged by the code verifier while two loops count time: the caller's and the sandbox's own. The figure of
an attack is the longest time between two turns of either, in milliseconds; `idle` is that of the same loops with
nothing to do, which is the cost of the machine's other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from rlvr.records import Task
from rlvr.verifiers import judged
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code.shared import SandboxRequest, shared_runner

TICK_SECONDS = 0.001

CALLED = Task("called", "?", info={"kind": "function", "name": "f", "cases": [{"args": [1], "expected": 7}]})
PRINTED = Task("printed", "?", info={"kind": "stdio", "cases": [{"input": "", "output": "0.5 " * 250_000}]})


def asserted(test: str) -> Task:
    """A task of one test."""
    return Task("asserted", "?", info={"kind": "asserts", "entry_point": "f", "tests": [test]})


def frames(body: str) -> str:
    """A program that writes without end on its private channel."""
    return f"import os\nb = {body}\ndef f(x):\n    while 1: os.write(3, b)\nif __name__ == '__main__': f(1)"


def claim(body: str) -> str:
    """A program that reports a value as it never would by itself."""
    return (
        f"import os\ndef f(x):\n    b = b'v' + {body}\n    b = len(b).to_bytes(4, 'big') + b\n"
        "    while b: b = b[os.write(3, b):]\n    os._exit(0)"
    )


def long_range(bits: int) -> str:
    """A program that returns a range of many members, each of so many bits."""
    return f"def f(x): return range(1 << {bits}, (1 << {bits}) + 2**19)"


LISTS = "def f(x): return [[n] for n in range(250000)]"
PROXIED = "for n in [1]:\n    assert len(f(n)) == 7"
CHECKER = "import re\ndef check(input, output):\n    return bool(re.fullmatch('(a|a)*b', output.strip()))"
REFUSES = "def check(input, output):\n    return False"
ATTACKS: dict[str, tuple[Task, str]] = {
    "idle": (CALLED, "import time\ndef f(x): time.sleep(1)"),
    "frames of a script": (PRINTED, frames(r"b'\0\0\0\1z' * 20000")),
    "frames of a call": (CALLED, frames(r"b'\0\0\0\1l' * 20000")),
    "frames of a candidate": (asserted("for n in range(1000):\n    assert f(n) == "
                                       "1"), frames(r"b'\0\0\0\5v1234' * 9000")),
    "sum": (asserted("assert sum(f(1)) == 7"), "def f(x): return [1 << (8 * 1300 * 1000)] + [1] * 400000"),
    "sum of small values": (asserted("assert sum(f(1)) == 7"), "def f(x): return [1 << (8 * 4000)] + [1] * 3000"),
    "sorted": (asserted("assert sorted(f(1)) == 7"), "import random\ndef f(x): return [random.random() for _ in "
                                                     "range(180000)]"),
    "set": (asserted("assert set(f(1)) == {7}"), "def f(x): return [n << 30 for n in range(200000)]"),
    "a range as a list": (asserted("assert list(f(1)) == [2]"), long_range(30_000)),
    "a range as a set": (asserted("assert set(f(1)) == {1, 2}"), long_range(0)),
    "a range as a forged claim": (
        asserted("assert sum(f(1)) == 2"),
        claim("b'{\"range\":[{\"int\":\"0x1' + b'0' * 7500 + b'\"},{\"int\":\"0x1' + b'0' * 7494 + b'80000\"},1]}'"),
    ),
    "the sum of a range": (asserted("assert sum(f(1)) == 2"), long_range(2_000)),
    "the sum of small ranges": (asserted("assert sum(f(1)) == sum(f(2)) == sum(f(3)) == "
                                         "4"), "def f(x): return range(2500)"),
    "a range, sorted": (asserted("assert sorted(f(1)) == [2]"), "def f(x): return range(2**19, 0, -1)"),
    "a number that is in no range": (asserted("assert 2.5 in f(1)"), long_range(0)),
    "fractions": (asserted("assert sum(f(1)) == 2"),
                  "from fractions import Fraction\ndef f(x): return [Fraction(1, 10**30 + n) for n in range(290)]"),
    "fractions, sorted": (asserted("assert sorted(f(1)) == 2"),
                  "from fractions import Fraction\ndef f(x): return [Fraction(n * 7919 % 101, 997) for n in "
                  "range(500)]"),
    "round": (asserted("assert round(f(1), -999) == 7"), "def f(x): return 7 ** 5000000"),
    "many lists": (CALLED, LISTS),
    "many lists, proxied": (asserted(PROXIED), LISTS),
    "small sets": (CALLED, "def f(x): return [set() for _ in range(1400)]"),
    "small dicts": (CALLED, "def f(x): return [{1: 2} for _ in range(900)]"),
    "brackets": (CALLED, claim("b'[' * 4000000")),
    "empty lists": (CALLED, claim("b'[' + b'[],' * 1300000 + b'[]]'")),
    "digits": (CALLED, claim("b'9' * 4000000")),
    "escapes": (CALLED, claim(r"b'\"' + b'\\u0000' * 690000 + b'\"'")),
    "tokens": (PRINTED, "print('0.6 ' * 250000)"),
    "tokens that are near": (PRINTED, "print('0.5000001 ' * 100000 + '0.50 ' * 20000)"),
    "bytes that are no text": (PRINTED, "import sys\nsys.stdout.buffer.write(b'\\xff' * 1000000)"),
    "a regular expression": (
        Task("checked", "?", info={"kind": "checker", "checker": CHECKER, "cases": [{"input": ""}]}),
        "print('a' * 40)",
    ),
    "a checker's input": (
        Task("checked", "?", info={"kind": "checker", "checker": REFUSES, "cases": [{"input": ""}]}),
        "import sys\nsys.stdout.buffer.write(b'\\xff' * 1000000)",
    ),
    "exception": (CALLED, "def f(x): raise ValueError('x' * 4000000)"),
}  # fmt: skip


class Turns:
    """The longest time between two turns of a loop."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def count(self) -> None:
        """Turn until cancelled."""
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self.longest = max(self.longest, now - before - TICK_SECONDS)
            before = now


async def hold(task: Task, program: str) -> float:
    """Milliseconds of the longest hold while a program is judged."""
    verifier = CodeVerifier(case_time=3.0)
    loops = Turns(), Turns()
    here = asyncio.ensure_future(loops[0].count())
    there = shared_runner(SandboxRequest())._thread.submit(loops[1].count())
    await asyncio.sleep(0.05)
    verdict = await judged(verifier, task, f"```python\n{program}\n```")
    await asyncio.sleep(0.05)
    here.cancel()
    there.cancel()
    assert verdict.score == 0, verdict
    return 1000 * max(loop.longest for loop in loops)


async def measure(rounds: int) -> dict[str, object]:
    """The least over some rounds of each attack's longest hold: what the attack does, and not the machine's other
    work."""
    await hold(*ATTACKS["idle"])
    held = {}
    for name, (task, program) in ATTACKS.items():
        held[name] = round(min([await hold(task, program) for _ in range(rounds)]), 1)
    return {"longest_hold_ms": held, "worst_ms": max(held.values()), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    print(json.dumps(asyncio.run(measure(parser.parse_args().rounds)), indent=1))


if __name__ == "__main__":
    main()
