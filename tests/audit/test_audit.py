"""The command `python -m rlvr.audit`, mostly as a process of its own, as people run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlvr import audit

VERIFIERS = '''
import asyncio, time
from dataclasses import dataclass
from rlvr import Verdict, Verifier

@dataclass
class Sure(Verifier):
    """Gives the score that the completion writes."""
    times: float = 1.0

    async def verify(self, task, completion):
        await asyncio.sleep(0.001 * (hash(completion) % 3))
        return Verdict.from_score(float(completion) * self.times, answer=completion)

class Ranks(Verifier):
    """The longest of a group is right."""
    def verify(self, task, completion):
        return Verdict.undecided("alone")

    def verify_group(self, task, completions):
        longest = max(map(len, completions))
        return [Verdict.from_score(len(c) == longest, reason=f"of {len(completions)}") for c in completions]

def slow(completion):
    time.sleep(0.05)
    return float(completion)

def same(completion, answer, unit="m"):
    return completion == f"{answer} {unit}"
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(VERIFIERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "rlvr.audit", *arguments], capture_output=True, text=True, timeout=120, **more
    )


def test_two_thousand_rows_come_out_in_order(folder):
    scores = [number % 3 / 2 for number in range(2000)]
    rows = [{"id": f"row {n}", "completion": str(score), "answer": "1"} for n, score in enumerate(scores)]
    done = command("--verifier", "mine.py:Sure", "--input", write(folder / "in.jsonl", rows), "--output", "out.jsonl")
    begin = f"scoring {folder}/in.jsonl: 2000 responses\n"
    assert (done.returncode, done.stderr) == (0, begin)
    out = read(folder / "out.jsonl")
    assert [(row["id"], row["score"]) for row in out] == [(row["id"], s) for row, s in zip(rows, scores, strict=True)]
    assert all(list(row) == ["id", "status", "score", "reason", "seconds"] for row in out)
    assert {row["status"] for row in out} == {"wrong", "partial", "correct"}
    table = [line.split() for line in done.stdout.splitlines()[1:10]]
    assert table == [
        ["mine.py:Sure"],
        *(["rows", "2000"], ["correct", "666"], ["wrong", "667"], ["partial", "667"]),
        *([status, "0"] for status in ("unparsable", "timeout", "error", "undecided")),
    ]


def test_a_function_an_option_and_agreement_with_what_was_expected(folder):
    rows = [
        {"id": "right", "completion": "3 km", "answer": 3, "expected": True},
        {"id": "missed", "completion": "3", "answer": 3, "expected": True},
        {"id": "fooled", "completion": "4 km", "answer": "4", "expected": 0},
        {"id": "wrong", "completion": "5 km", "answer": "4", "expected": False},
        {"id": "open", "completion": "5 km", "answer": "4"},
        {"id": "none", "completion": "1 km", "expected": True},
    ]
    given = write(folder / "in.jsonl", [{**row, "info": {"unit": "km"}} for row in rows])
    done = command("--verifier", "mine.py:same", "--input", given, "--output", "deep/er/out.jsonl")
    assert done.returncode == 0
    out = read(folder / "deep/er/out.jsonl")
    assert [row["score"] for row in out] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert "false accepts: 1 (fooled)" in done.stdout
    assert "false rejects: 2 (missed, none)" in done.stdout
    assert "2 of 5 decided ones agree (40.0%)" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["accepted", "1", "1"] in rows and ["rejected", "2", "1"] in rows


def test_options_are_given_as_key_value(folder):
    given = write(folder / "in.jsonl", [{"id": 1, "completion": "1"}])
    assert command("--verifier", "mine.py:Sure", "times=0.5", "--input", given, "--output", "o").returncode == 0
    assert read(folder / "o")[0]["score"] == 0.5
    assert audit.build_verifier("combine", ["parts=[exact, {name: exact, casefold: true}]", "how=any"]).how == "any"


def test_rows_of_one_task_are_a_group_for_a_verifier_of_groups(folder):
    rows = [{"completion": "a" * n, "prompt": prompt} for prompt in "pq" for n in (1, 3, 2)]
    given = write(folder / "in.jsonl", [*rows, "{", rows[0]])
    assert command("--verifier", "mine.py:Ranks", "--input", given, "--output", "out.jsonl").returncode == 0
    out = read(folder / "out.jsonl")
    assert [row["score"] for row in out] == [0, 1, 0, 0, 1, 0, None, None]
    assert [row["reason"] for row in out[:6]] == ["of 3"] * 6


def test_broken_rows_cost_one_undecided_verdict_each_and_name_their_line(folder):
    good = {"completion": "1", "answer": "1"}
    rows = [
        {"id": "ok", **good},
        "not json",
        "[1]",
        {"id": "no completion", "answer": "1"},
        {"id": "null", "completion": None},
        {"id": "number", "completion": 1},
        {"id": [], **good},
        {"id": "odd", "expected": "perhaps", **good},
        "",
        {"id": "prompt", "prompt": 3, **good},
        "[" * 100_000,
        {"id": "\ud800", "completion": "\ud800\x00", "answer": "1"},
        {"id": "messages", "completion": [{"role": "assistant", "content": "1"}], "answer": "1"},
        {"id": "last", **good},
    ]
    given = write(folder / "in.jsonl", rows)
    with open(given, "ab") as file:
        file.write(b'{"id": "bytes", "completion": "\xff"}\n')
    done = command("--verifier", "exact", "--input", given, "--output", "out.jsonl")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    out = read(folder / "out.jsonl")
    decided = {row["id"]: row["score"] for row in out if row["score"] is not None}
    assert decided == {"ok": 1.0, "\ud800": 0.0, "messages": 1.0, "last": 1.0}
    broken = [(row["id"], row["reason"]) for row in out if row["score"] is None]
    assert [name for name, _ in broken] == [
        *("line 2", "line 3", "no completion", "null", "number", "line 7", "odd", "prompt", "line 11", "line 15")
    ]
    lines = [2, 3, 4, 5, 6, 7, 8, 10, 11, 15]
    assert all(f"line {line}" in reason for line, (_, reason) in zip(lines, broken, strict=True))
    assert {row["status"] for row in out if row["score"] is None} == {"error"}


@pytest.mark.parametrize("text", ["", "\n\n", "nothing\nto read\n"])
def test_a_file_without_a_row_is_refused(folder, text):
    (folder / "in.jsonl").write_text(text)
    done = command("--verifier", "exact", "--input", "in.jsonl", "--output", "out.jsonl")
    assert done.returncode == 2
    assert "holds no row that can be read" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--verifier", "exakt", "--input", "in", "--output", "out"], "did you mean 'exact'"),
        (["--verifier", "exact", "casefolds=true", "--input", "in", "--output", "out"], "did you mean 'casefold'"),
        (["--verifier", "exact", "casefold", "--input", "in", "--output", "out"], "key.path=value"),
        (["--verifier", "none.py:F", "--input", "in", "--output", "out"], "there is no file"),
        (["--verifier", "mine.py:sure", "--input", "in", "--output", "out"], "did you mean 'Sure'"),
        (["--verifier", "exact", "--input", "absent", "--output", "out"], "no file 'absent'"),
        (["--verifier", "exact", "--input", "in", "--output", "in"], "would overwrite"),
        (["--verifier", "exact", "--input", "in", "--output", "in/out"], "cannot be written"),
        (["--verifier", "exact", "--input", "in"], "--input and --output are needed"),
        (["--verifier", "exact", "--tricks", "--output", "out"], "--input, which is missing"),
        (["--verifier", "exact", "--workers", "0", "--input", "in", "--output", "out"], "at least 1 worker"),
        (["--verifier", "exact", "--time-limit", "-1", "--input", "in", "--output", "out"], "above 0"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_done(folder, capsys, arguments, said):
    rows = write(folder / "in", [{"completion": "1", "answer": "1"}])
    before = (folder / "in").read_text()
    assert audit.main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and said in error
    assert Path(rows).read_text() == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_is_done(folder, number, code):
    given = write(folder / "in.jsonl", [{"id": n, "completion": "1"} for n in range(2000)])
    arguments = ["--verifier", "mine.py:slow", "--workers", "2", "--input", given, "--output", "out.jsonl"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlvr.audit", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (folder / "out.jsonl").exists():
        time.sleep(0.05)
    while time.monotonic() < deadline and (folder / "out.jsonl").read_text().count("\n") < 20:
        time.sleep(0.05)
    start = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    out = read(folder / "out.jsonl")
    assert (process.returncode, stderr) == (code, f"scoring {folder}/in.jsonl: 2000 responses\n")
    assert 20 <= len(out) < 2000
    assert [row["id"] for row in out] == list(range(len(out)))
    assert {row["score"] for row in out} == {1.0}
    assert f"stopped after {len(out)} rows" in stdout


def test_torch_is_not_imported(folder):
    given = write(folder / "in.jsonl", [{"completion": "1", "answer": "1"}])
    code = (
        "import sys; from rlvr.audit import main; "
        f"assert main(['--verifier', 'exact', '--tricks', '--input', {given!r}, '--output', 'out']) == 0; "
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_output_of_a_closed_pipe_is_still_written(folder):
    given = write(folder / "in.jsonl", [{"completion": "1", "answer": "1"}] * 100)
    read_end, write_end = os.pipe()
    os.close(read_end)
    arguments = ["--verifier", "exact", "--input", given, "--output", "out.jsonl"]
    done = subprocess.run([sys.executable, "-m", "rlvr.audit", *arguments], stdout=write_end, timeout=60, check=False)
    os.close(write_end)
    assert done.returncode == 0
    assert len(read(folder / "out.jsonl")) == 100


def test_tricks_on_the_tasks_of_a_file_and_the_exit_code_that_says_so(folder):
    (folder / "lax.py").write_text("def lax(completion, answer):\n    return answer in completion\n")
    given = write(folder / "in.jsonl", [{"id": "sum", "prompt": "6 * 7?", "completion": "42", "answer": "42"}])
    lax = command("--verifier", "lax.py:lax", "--tricks", "--input", given)
    assert lax.returncode == 1
    assert "failed attempts" in lax.stdout and "every candidate" in lax.stdout
    strict = command("--verifier", "exact", "--tricks", "--input", given, "--output", "out.jsonl")
    assert strict.returncode == 0
    assert "no trick was paid in full" in strict.stdout
    assert "not tried, for want of a task that they fit" in strict.stdout
    assert "another unit" in strict.stdout
    assert read(folder / "out.jsonl")[0]["score"] == 1.0
