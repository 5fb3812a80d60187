"""The runner of the GPU kit on stages that fail in every way, and the page that is written from its evidence."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from gpu_kit_paths import KIT, ROOT

STAGES = {
    "raises": """
        def run(context):
            context.record("before", {"ms": 1.5})
            raise RuntimeError("the device is on fire")
    """,
    "hangs": """
        import os, signal, subprocess, sys, time
        def run(context):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            child = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(600)"
            pids = [subprocess.Popen([sys.executable, "-c", child]).pid, os.getpid()]
            context.record("pids", pids)
            time.sleep(600)
    """,
    "babbles": """
        import sys
        def run(context):
            print('{"stage": 99, "status": "ok"}')
            sys.stdout.buffer.write(bytes(range(256)))
            with context.results.open("ab") as file:
                file.write(b'\\xff\\xfe garbage\\n{"kind": "result"}\\n[1]\\n{"kind": "resu\\n')
            context.record("after", {"ms": 2.5})
    """,
    "dies": """
        import os, signal, subprocess, sys
        def run(context):
            child = "import os, time; os.setsid(); time.sleep(600)"
            context.record("orphan", subprocess.Popen([sys.executable, "-c", child]).pid)
            print("last words")
            os.kill(os.getpid(), signal.SIGSEGV)
    """,
    "lingers": """
        import threading, time
        def run(context):
            threading.Thread(target=time.sleep, args=[600]).start()
    """,
    "skips": """
        from stages.context import SkipError
        def run(context):
            raise SkipError("there is nothing to measure")
    """,
    "works": """
        def run(context):
            context.record("time", {"ms": 4.5})
    """,
}


@pytest.fixture
def make_kit(tmp_path):
    """`make_kit({name: source})`: a copy of the kit with these stages in the place of its own."""

    def make(stages):
        kit = tmp_path / "checkout/scripts/gpu"
        (kit / "stages").mkdir(parents=True)
        for name in (
            "evidence.py",
            "evidence_page.py",
            "evidence_speeds.py",
            "stages/__main__.py",
            "stages/context.py",
        ):
            shutil.copy(KIT / name, kit / name)
        source = (KIT / "stage_process.py").read_text()
        # 5: a process that has loaded torch takes a second to exit, several where the machine is busy
        quick = source.replace("EXIT_SECONDS = 30.0", "EXIT_SECONDS = 5.0").replace(
            "GRACE_SECONDS = 5.0", "GRACE_SECONDS = 1.0"
        )
        assert quick.count("EXIT_SECONDS = 5.0") == quick.count("GRACE_SECONDS = 1.0") == 1
        (kit / "stage_process.py").write_text(quick)
        head = re.split(r"^STAGES = ", (KIT / "stages/__init__.py").read_text(), flags=re.MULTILINE)[0]
        listed = "".join(f"Stage({n}, {name!r}, 1, 'Question {n}')," for n, name in enumerate(stages, 1))
        (kit / "stages/__init__.py").write_text(f"{head}STAGES = ({listed})\n")
        for name, text in stages.items():
            (kit / f"stages/{name}.py").write_text(textwrap.dedent(text))
        return kit

    return make


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.gate
def test_each_stage_ends_in_one_line_whatever_it_does(make_kit, run_kit, tmp_path):
    kit, out = make_kit(STAGES), tmp_path / "out"
    out.mkdir()
    (out / "evidence.jsonl").write_text('{"an": "earlier line"}\n')
    code, lines, errors = run_kit("--device", "cpu", "--out", out, "--minutes", "2=0.05", kit=kit)
    assert (code, errors) == (1, "")
    kept = [json.loads(text) for text in (out / "evidence.jsonl").read_text().splitlines()]
    assert kept == [{"an": "earlier line"}, *lines]
    assert [(line["stage"], line["name"]) for line in lines] == list(enumerate(STAGES, 1))
    by_name = {line["name"]: line for line in lines}
    statuses = {name: line["status"] for name, line in by_name.items()}
    assert statuses == {
        "raises": "failed",
        "hangs": "timeout",
        "babbles": "ok",
        "dies": "failed",
        "lingers": "failed",
        "skips": "skipped",
        "works": "ok",
    }
    raised = by_name["raises"]
    assert raised["results"] == {"before": {"ms": 1.5}}
    assert "the device is on fire" in raised["reason"] and raised["failures"][0]["traceback"][-1].endswith("on fire")
    assert not [text for text in raised["failures"][0]["traceback"] if str(tmp_path) in text]
    assert "limit of 3 s" in by_name["hangs"]["reason"]
    assert len(by_name["hangs"]["results"]["pids"]) == 2
    assert not [pid for pid in by_name["hangs"]["results"]["pids"] if is_alive(pid)]
    assert by_name["babbles"]["results"] == {"after": {"ms": 2.5}}
    assert "SIGSEGV" in by_name["dies"]["reason"] and "last words" in by_name["dies"]["last_output"]
    assert not is_alive(by_name["dies"]["results"]["orphan"])
    assert "did not exit" in by_name["lingers"]["reason"]
    assert by_name["skips"]["reason"] == "there is nothing to measure"
    assert all(line["versions"]["torch"] and line["device"].startswith("cpu") for line in lines)
    log = (out / "output.log").read_bytes()
    assert b"last words" in log and log.count(b"=====") == len(STAGES)
    assert sorted(path.name for path in out.iterdir()) == ["evidence.jsonl", "output.log"]


USES_ITS_LIMIT = """
import sys
from pathlib import Path
from stage_process import run_limited
command = [sys.executable, "-c", "import time; time.sleep(2)"]
outcome = run_limited(command, {}, Path(sys.argv[1]), 0.2, lambda: False, lambda: True)
print(outcome.code, outcome.timed_out, outcome.lingered)
"""


def test_work_that_is_done_at_the_limit_leaves_time_to_exit(tmp_path):
    # in a process of its own, since what is below it is ended
    environment = {**os.environ, "PYTHONPATH": str(KIT)}
    command = [sys.executable, "-c", USES_ITS_LIMIT, str(tmp_path / "output")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.stdout.strip(), result.stderr) == ("0 False False", "")


def test_a_signal_ends_the_stage_under_way_and_keeps_what_it_had(make_kit, tmp_path):
    kit, out = make_kit({name: STAGES[name] for name in ("works", "hangs", "raises")}), tmp_path / "out"
    command = [sys.executable, str(kit / "evidence.py"), "--device", "cpu", "--out", str(out)]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""})
    deadline = time.monotonic() + 60
    while not any("pids" in path.read_text() for path in out.glob("stage-2-*/results.jsonl")):
        assert time.monotonic() < deadline and runner.poll() is None
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    printed, _ = runner.communicate(timeout=60)
    assert runner.returncode == 128 + signal.SIGTERM
    lines = [json.loads(text) for text in printed.splitlines()]
    assert [line["status"] for line in lines] == ["ok", "failed", "skipped"]
    assert [line["reason"] for line in lines[1:]] == ["stopped by SIGTERM", "stopped by SIGTERM before it began"]
    assert not [pid for pid in lines[1]["results"]["pids"] if is_alive(pid)]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--out", "x", "--stages", "0-3"],
        ["--out", "x", "--stages", "two"],
        ["--out", "x", "--stages", "5-3"],
        ["--out", "x", "--minutes", "-1"],
        ["--out", "x", "--minutes", "1=soon"],
        ["--out", "x", "--write-docs", "x"],
        ["--write-docs", "x", "--write-speeds", "x"],
        ["--write-speeds", "nowhere"],
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(arguments, run_kit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, lines, errors = run_kit(*arguments)
    assert (code, lines, list(tmp_path.iterdir())) == (2, [], [])
    assert "error: " in errors.splitlines()[-1]


def test_minutes_are_shared_out_and_what_is_left_goes_on(make_kit, run_kit, tmp_path):
    kit = make_kit(dict.fromkeys(("one", "two", "three"), STAGES["works"]))
    code, lines, _ = run_kit("--device", "cpu", "--out", tmp_path / "out", "--minutes", "3", "--stages", "1,3", kit=kit)
    assert code == 0
    assert [line["stage"] for line in lines] == [1, 3]
    first, last = (line["limit_seconds"] for line in lines)
    assert first == pytest.approx(90, abs=1)  # two stages of equal weight share three minutes
    assert last == pytest.approx(180 - lines[0]["seconds"], abs=2)


def test_stages_after_the_minutes_are_used_up_are_skipped(make_kit, run_kit, tmp_path):
    kit = make_kit({"hangs": STAGES["hangs"], "works": STAGES["works"], "raises": STAGES["raises"]})
    code, lines, _ = run_kit("--device", "cpu", "--out", tmp_path / "out", "--minutes", "0.01", kit=kit)
    assert code == 0
    assert [line["status"] for line in lines] == ["skipped"] * 3
    assert {line["reason"] for line in lines} == {"the 0.01 minutes were used up before it began"}


def test_relative_folders_of_pythonpath_are_those_of_the_call(make_kit, run_kit, tmp_path, monkeypatch):
    """A stage starts processes in other folders."""
    look = """
        import os, sys
        def run(context):
            context.record("path", os.environ["PYTHONPATH"].split(os.pathsep))
            os.chdir("/")
            import brought
            context.record("brought", brought.NUMBER)
    """
    kit = make_kit({"look": look})
    (tmp_path / "site").mkdir()
    (tmp_path / "site/brought.py").write_text("NUMBER = 7\n")
    monkeypatch.chdir(tmp_path)
    code, (line,), _ = run_kit("--device", "cpu", "--out", tmp_path / "out", kit=kit, path=f"site{os.pathsep}")
    assert (code, line["results"]["brought"]) == (0, 7)
    assert line["results"]["path"] == [str(kit), str(kit.parents[1] / "src"), str(tmp_path / "site")]


# the page

MARKS = "<!-- seen: begin -->\nold\n<!-- seen: end -->\n", "<!-- evidence: begin -->\nold\n<!-- evidence: end -->\n"


def line_of(stage, results, device="cuda", **more):
    known = {"device": "NVIDIA TEST, 80.0 GiB", "versions": {"torch": "2.11.0"}, "failures": [], "left_out": {}}
    head = {"stage": stage, "name": "?", "asked_device": device, "begun": "2026-01-01T00:00:00+00:00", "seconds": 61.5}
    return {**head, **known, "status": "ok", "reason": None, "results": results, **more}


def test_the_page_is_written_from_evidence_of_a_gpu_alone(run_kit, tmp_path):
    page, folder = tmp_path / "gpu.md", tmp_path / "evidence"
    page.write_text(f"# Before\n{MARKS[0]}\nBetween\n{MARKS[1]}\nAfter\n")
    folder.mkdir()

    def written(*lines):
        (folder / "evidence.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, _, errors = run_kit("--write-docs", folder, "--page", page)
        assert code == 0, errors
        text = page.read_text()
        assert text.startswith("# Before\n") and text.endswith("\nAfter\n") and "\nold\n" not in text
        assert text.count("\nBetween\n") == 1
        return text

    for lines in (
        [],
        [line_of(3, {"fused/T4": {"ms": 7.0}}, device="cpu")],
        [line_of(3, {}, device="cuda") | {"device": None, "status": "skipped"}],
    ):
        text = written(*lines)
        assert "No part of this library has run on a GPU yet" in text and "Not yet run on a GPU" in text
    speeds = {
        "fused/T4": {"ms": 1234.5678, "peak_mib": None},
        "whole/T4": {"ms": 0.00001234, "peak_mib": 7},
        "note": "x|y",
    }
    failed = {"status": "timeout", "reason": "killed after its limit of 9 s", "left_out": {"part": "no time"}}
    failed["failures"] = [{"name": "flex", "error": "RuntimeError: no\nkernel", "traceback": []}]
    text = written(line_of(3, {"fused/T4": {"ms": 1.0}}), line_of(3, speeds), line_of(2, {}, **failed))
    assert "Not yet run" not in text and "No part" not in text
    assert "Stage 3 of the kit below measured the library on a GPU (NVIDIA TEST, 80.0 GiB)" in text
    assert "| fused/T4 | 1235 | - |" in text and "| whole/T4 | 1.234e-05 | 7 |" in text and "x\\|y" in text
    assert "| fused/T4 | 1 |" not in text  # an older line of the same stage
    assert "timeout: killed after its limit of 9 s" in text and "| flex | RuntimeError: no kernel |" in text
    assert "| part | no time |" in text and "NVIDIA TEST" in text
    assert text.index("### 2.") < text.index("### 3.")

    for lacking, named in (("no marks", "seen: begin"), (MARKS[1], "seen: begin"), (MARKS[0], "evidence: begin")):
        page.write_text(lacking)
        code, _, errors = run_kit("--write-docs", folder, "--page", page)
        assert code == 2 and named in errors and page.read_text() == lacking
    page.write_text("".join(MARKS))
    (folder / "evidence.jsonl").write_text("[1]\n")
    code, _, errors = run_kit("--write-docs", folder, "--page", page)
    assert code == 2 and "line 1" in errors

    page.write_text(text)  # what was measured stays where a folder or its file is missing
    (folder / "evidence.jsonl").unlink()
    for missing in (folder, tmp_path / "nope"):
        code, _, errors = run_kit("--write-docs", missing, "--page", page)
        assert code == 2 and f"there is no {missing / 'evidence.jsonl'}" in errors and page.read_text() == text


def constants_of(pair, call):
    """A line's results, and those of a layout that the cost model does not count with."""
    return {
        "constants of library shared": {"flops_per_call": 1.0, "speed_pair": pair, "speed_call": call},
        "constants of varlen": {"flops_per_call": 1.0, "speed_pair": 9.0, "speed_call": 9.0},
    }


def test_measured_constants_are_those_that_the_library_reads(run_kit, tmp_path):
    """From evidence of a GPU to the cost model's constants, by the name of the GPU."""
    from rlvr.policy import attention_speed

    folder, speeds = tmp_path / "evidence", tmp_path / "speeds.json"
    folder.mkdir()
    other = {"pair": 1.25, "call": 1e9, "torch": "2.11.0", "begun": None}
    before = json.dumps({"format": attention_speed.FORMAT, "gpus": {"NVIDIA OTHER": other}})
    speeds.write_text(before)

    def written(*lines):
        (folder / "evidence.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run_kit("--write-speeds", folder, "--speeds", speeds)

    toy = line_of(2, constants_of(5.0, 5.0), device="cpu")
    below = line_of(2, constants_of(2.5, -3.0))
    for nothing in ((), (toy,), (line_of(3, constants_of(2.0, 2e9)),), (below,)):
        code, _, errors = written(*nothing)
        assert code == 2 and "no constants of attention" in errors and speeds.read_text() == before
    # The newest that can be used; a line that is broken off or of a fit below 0 replaces nothing.
    code, _, errors = written(line_of(2, constants_of(1.5, 7e9)), line_of(2, constants_of(2.0, 8e9)), below, toy)
    assert code == 0, errors
    read = attention_speed.read_speeds(speeds)
    assert read == {
        "NVIDIA OTHER": attention_speed.AttentionSpeed(1.25, 1e9),
        "NVIDIA TEST": attention_speed.AttentionSpeed(2.0, 8e9),
    }


def test_an_attempt_that_fails_hides_nothing_that_was_measured_before(run_kit, tmp_path):
    page, folder = tmp_path / "gpu.md", tmp_path / "evidence"
    folder.mkdir()
    page.write_text("".join(MARKS))
    first = line_of(3, {"fused/T4": {"ms": 1.0}})
    good = line_of(3, {"fused/T4": {"ms": 2.0}}, begun="2026-02-02T00:00:00+00:00")
    partial = line_of(
        3, {"fused/T4": {"ms": 3.0}}, status="failed", reason="it broke", begun="2026-03-03T00:00:00+00:00"
    )
    nothing = line_of(3, {}, status="timeout", reason="killed", begun="2026-04-04T00:00:00+00:00")
    newest = line_of(3, {"fused/T4": {"ms": 5.0}}, begun="2026-05-05T00:00:00+00:00")

    def shown(*lines):
        (folder / "evidence.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, _, errors = run_kit("--write-docs", folder, "--page", page)
        assert code == 0, errors
        text = page.read_text()
        assert text.count("### 3.") == 1
        return [int(n) for n in re.findall(r"\| fused/T4 \| (\d) \|", text)], [
            status for status in ("ok", "failed", "timeout") if f"| 3 | head | {status}" in text
        ]

    assert shown(first, good, partial, nothing) == ([2], ["ok", "timeout"])
    assert shown(first, good, partial) == ([3, 2], ["ok", "failed"])
    assert shown(partial, nothing) == ([3], ["failed", "timeout"])
    assert shown(nothing, nothing) == ([], ["timeout"])
    assert shown(first, good, partial, nothing, newest) == ([5], ["ok"])


def test_the_repositorys_page_is_that_of_its_evidence(monkeypatch):
    """scripts/gpu/evidence.jsonl is where evidence of a GPU is committed."""
    monkeypatch.syspath_prepend(KIT)
    for name in [name for name in sys.modules if name.partition(".")[0] == "stages"]:
        monkeypatch.delitem(sys.modules, name)
    import evidence_page

    evidence = KIT / "evidence.jsonl"
    lines = evidence_page.read_lines(evidence) if evidence.exists() else []
    text = (ROOT / "docs/gpu.md").read_text()
    assert f"{evidence_page.BEGIN}\n{evidence_page.block_of(lines)}\n{evidence_page.END}" in text
    assert f"{evidence_page.TOP_BEGIN}\n{evidence_page.seen(lines)}\n{evidence_page.TOP_END}" in text
