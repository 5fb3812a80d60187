from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import unicodedata

import numpy as np
import pytest
from rich.console import Console as RichConsole
from rich.text import Text

from rlvr.core.startup_lines import StartupLines, startup
from rlvr.monitor.console import Console, LiveView
from rlvr.monitor.console_text import (
    clean,
    duration,
    encodable,
    evaluation_lines,
    number,
    shorten,
    sparkline,
    step_cells,
    trend_scale,
)
from rlvr.monitor.metrics import record
from rlvr.monitor.samples import sample_blocks
from rlvr.records import Batch, StopReason

ODD = (
    "esc \x1b[2J bell \x07 cr \r c1 \x9b lone \ud800 bidi \u202e line \u2028 null \0 emoji 😀👩\u200d🚀 "
    "[bold]m[/bold] :smile: [/x]"
)
STEP = record(
    {
        "step": 12,
        "reward/mean": 0.4125,
        "reward/std": 0.49,
        "completion/length_mean": 211.6,
        "group/all_correct": 0.12,
        "group/mixed": 0.6,
        "group/all_wrong": 0.28,
        "kl/ref": 0.00123,
        "grad_norm": 0.8412,
        "time/tokens_per_second": 1234.5,
        "time/step": 4.0,
        "time/rollout": 2.4,
        "time/update": 1.4,
        "time/unaccounted": 0.2,
    }
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    return Terminal()


def no_controls(text):
    return not [c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c != "\n"]


def show(console, batch=None):
    """A short run."""
    console.start("model: tiny\ntasks: 10")
    console.stage("grpo", 200, done=11)
    console.step(STEP, batch)
    console.evaluation(12, {"eval/gsm8k/pass@1": 0.5123, "eval/n": 100, "eval/none": None})
    console.message("look here", "warning")
    console.table("results", ["metric", "value"], [["pass@1", 0.5], ["pass@8", None]])
    console.finish()
    console.finish()


def test_plain_lines_say_everything(rollout):
    file = io.StringIO()
    show(Console("plain", samples_every=4, file=file), Batch([rollout()]))
    text = file.getvalue()
    assert no_controls(text)
    for part in (
        "model: tiny\ntasks: 10\n",
        "stage grpo: 200 steps, 11 of them done\n",
        "grpo 12/200  elapsed 0:00  left ",
        "step 12  reward 0.412 ±0.49  trend ▄  length 212  right/mixed/wrong 12/60/28%  kl 0.00123  grad 0.841",
        "tok/s 1234  time 4.0s rollout 60% update 35% other 5%\n",
        "gold answer: 4\n#0 correct, score 1, 4 tokens: compared\n    4\n",
        "evaluation at step 12\n  gsm8k:  pass@1 51.2 %\n",
        "warning: look here\n",
        "results\nmetric  value",
    ):
        assert part in text


def test_a_terminal_gets_a_bar_and_a_table(terminal, rollout):
    show(Console("auto", samples_every=4, file=terminal), Batch([rollout()]))
    text = terminal.getvalue()
    assert "\x1b[" in text
    assert "12/200" in text
    assert "right/mixed/wrong" in text
    assert "4.0s rollout 60% update 35% other 5%" in text
    assert "gold answer: 4" in text
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h", "\x1b[1A"))  # the bar is gone and the cursor back


def test_rows_stand_under_their_header(terminal):
    console = Console("auto", samples_every=0, file=terminal)
    for step in range(1, 4):
        console.step({**STEP, "step": step})
    header, *rows = terminal.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert len(rows) == 3
    assert {row.index("12/60/28%") + len("12/60/28%") for row in rows} == {
        header.index("right/mixed/wrong") + len("right/mixed/wrong")
    }


def test_a_narrow_terminal_keeps_one_line_per_step(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    console = Console("auto", file=terminal)
    console.step(STEP)
    assert len(terminal.getvalue().splitlines()) == 2


def test_auto_is_plain_in_a_pipe_even_when_colours_are_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    file = io.StringIO()
    show(Console("auto", file=file))
    assert no_controls(file.getvalue())


def test_off_shows_nothing(capsys):
    show(Console("off"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("mode", ["plain", "auto"])
def test_odd_text_is_shown_and_harmless(terminal, rollout, mode):
    batch = Batch([rollout(text=ODD, prompt=ODD, answer=ODD, id=ODD), rollout(member=1, score=0.0, text=ODD * 100)])
    console = Console(mode, samples_every=1, file=terminal)
    console.start([ODD])
    console.stage(ODD, 3)
    console.step({**STEP, "run/stage": ODD}, batch)
    console.evaluation(1, {ODD: 0.5, "words": ODD})
    console.message(ODD, "error")
    console.table(ODD, [ODD, "b"], [[ODD, ODD], [None, 1.0]])
    console.finish()
    text = terminal.getvalue()
    text.encode("utf-8")
    assert "\x1b[2J" not in text
    assert "\\x1b[2J" in text
    assert "[bold]m[/bold] :smile: [/x]" in text
    assert "😀" in text
    if mode == "plain":
        assert no_controls(text)


def test_a_stream_of_another_encoding(rollout):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, "ascii", write_through=True)
    show(Console("plain", samples_every=1, file=file), Batch([rollout(text="é 😀")]))
    text = raw.getvalue().decode("ascii")
    assert "0.412 +-0.49" in text
    assert "\\xe9 \\U0001f600" in text


@pytest.mark.parametrize("mode", ["plain", "auto"])
def test_a_stream_that_is_gone_ends_the_console_only(terminal, caplog, mode):
    console = Console(mode, file=terminal)
    terminal.close()
    show(console)
    assert len(caplog.records) == 1
    assert "is off" in caplog.text


def test_a_closed_pipe_does_not_end_the_run(tmp_path):
    code = (
        "from rlvr.monitor.console import Console\nimport sys\n"
        "c = Console('plain')\nfor i in range(20000): c.message('x' * 50)\nprint('went on', file=sys.stderr)"
    )
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
    assert "went on" in errors.read_text()


def test_works_in_a_notebook():
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    shown: list[str] = []

    def output(message):
        assert message["msg_type"] != "error", message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown.append(message["content"]["data"]["text/plain"])

    try:
        code = (
            "from rlvr.monitor.console import Console\nc = Console()\nc.stage('grpo', 2)\nc.step({'step': 1}); "
            "c.finish()"
        )
        reply = client.execute_interactive(code, output_hook=output, timeout=60)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    # One output, which is replaced: the last one is whole.
    assert shown[-1].startswith("stage grpo: 2 steps\ngrpo 1/2")
    assert no_controls(shown[-1])


def test_a_step_of_nulls_and_one_of_sft():
    assert step_cells(record({}), []) == {"step": "-"}
    assert step_cells(record({"step": 3, "loss/total": 1.5}), []) == {"step": "3", "loss": "1.5"}
    file = io.StringIO()
    console = Console("plain", samples_every=1, file=file)
    console.stage("sft", None)
    console.step({}, Batch([]))
    console.step({"reward/mean": float("nan")})
    assert "sft 1/?  elapsed 0:00  step -\n" in file.getvalue()


def test_columns_that_change_get_a_new_header(terminal):
    console = Console("auto", file=terminal)
    for metrics in (STEP, STEP, {**STEP, "kl/ref": None}):
        console.step(metrics)
    assert terminal.getvalue().count("right/mixed/wrong") == 2


def test_the_sample_is_a_group_that_teaches(rollout):
    easy = [rollout("easy", i, 1.0) for i in range(3)]
    mixed = [rollout("mixed", i, score) for i, score in enumerate([0.0, 0.0, 0.0, 0.0, 1.0, None])]
    mixed[1].stop = StopReason.LENGTH
    text = [text for _, text in sample_blocks(Batch([*easy, *mixed]), completions=4)]
    assert text[0] == "sample: task task-mixed"
    assert [t.split(",")[0] for t in text if t.startswith("#")] == ["#0 wrong", "#4 correct", "#5 error", "#1 wrong"]
    assert "undecided" in text[7]
    assert "4 tokens, cut: compared" in text[9]
    assert text[-1] == "... and 2 more"


def test_the_sample_is_short(rollout):
    long = "step\n\n" * 5000 + "the answer is 42"
    blocks = sample_blocks(Batch([rollout(prompt=long, text=long), rollout(member=1, text="", score="none")]))
    assert sum(len(text) + 80 * text.count("\n") for _, text in blocks) < 4000
    assert blocks[4][1].endswith("the answer is 42")
    assert blocks[5][1] == "#1 not verified, 4 tokens"
    assert blocks[6][1].strip() == "(empty)"
    assert sample_blocks(Batch([])) == []


def test_rewards_feed_the_sparkline():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("rewards", "ends", "bars"),
    [
        ([0.359, 0.340], (0.0, 1.0), "▄▃"),
        ([0.0, 1.0], (0.0, 1.0), "▁█"),
        ([-1.0, 1.0], (-1.0, 1.0), "▁█"),
        ([0.5, 1.5], (0.5, 1.5), "▁█"),
        ([100.0, 99.0], (89.5, 109.5), "▅▄"),
        ([-2.0], (-2.2, -1.8), "▅"),
    ],
)
def test_a_trend_is_drawn_on_a_scale_that_small_changes_do_not_fill(rewards, ends, bars):
    scale = trend_scale(min(rewards), max(rewards))
    assert scale == pytest.approx(ends)
    assert sparkline(rewards, scale) == bars


def test_start_up_lines_are_wrapped_by_words_on_a_terminal_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "40")
    text = "loading the tokenizer and the model of a/long-path/without-any-space/in-it and more words"
    terminal, pipe = Terminal(), io.StringIO()
    for file in (terminal, pipe):
        StartupLines("plain", file).say(text)
    first, *others = terminal.getvalue().splitlines()
    assert re.fullmatch(r"  0\.\d s  loading the tokenizer and the", first)
    assert others == [
        "         model of",
        "         a/long-path/without-any-space/in-it",
        "         and more words",
    ]
    assert len(pipe.getvalue().splitlines()) == 1


def test_elapsed_time_is_of_the_run_and_time_left_of_the_stage(monkeypatch):
    now = 100.0
    monkeypatch.setattr("rlvr.monitor.console.time.monotonic", lambda: now)
    file = io.StringIO()
    console = Console("plain", file=file)
    console.stage("sft", 2, 0, 0)
    now += 60
    console.step({"step": 1, "reward/mean": 0.5})
    console.stage("grpo", 10, 0, 2)
    now += 30
    console.step({"step": 3, "reward/mean": 0.5})
    console.finish()
    now += 3600
    console.stage("grpo", 10, 1, 3)
    now += 5
    console.step({"step": 4, "reward/mean": 0.5})
    lines = [line for line in file.getvalue().splitlines() if "elapsed" in line]
    assert [re.search(r"elapsed \S+  left \S+", line).group() for line in lines] == [
        "elapsed 1:00  left 1:00",
        "elapsed 1:30  left 4:30",
        "elapsed 0:05  left 0:40",
    ]


def test_numbers_and_durations():
    shown = [number(x) for x in (None, 3, 0.0, 0.12345, 12.345, 1234.5, 1e-5, 1e7, float("nan"), "words")]
    assert shown == ["-", "3", "0", "0.123", "12.3", "1234", "0.000010", "10,000,000", "nan", "words"]
    assert number(-1e-9) == ">-0.00001" and number(3e-7) == "<0.00001" and number(0.00123) == "0.00123"
    assert [duration(s) for s in (0, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


RESULTS = {
    "eval/greedy": 0.98,
    "eval/mean": 0.971,
    "eval/pass@1": 0.971,
    "eval/pass@8": 1.0,
    "eval/maj@8": None,
    "eval/truncated": 0.02,
    "eval/unparsable": 0.0,
    "eval/length_mean": 12.5,
    "eval/tasks": 256,
    "eval/math/greedy": 3.5,
    "time/evaluate": 7.0,
}


def test_an_evaluation_is_read_in_percent():
    first, math = evaluation_lines(RESULTS)
    assert first == "greedy 98.0 %  pass@1 97.1 %  pass@8 100.0 %  cut 2.0 %  256 tasks"
    assert math == "  math:  greedy 3.5"  # a score of a function, which is no share
    assert "mean 50.0 %" in evaluation_lines({"eval/mean": 0.5, "eval/pass@1": 0.25})[0]


def test_results_stand_below_the_row_of_their_step():
    file = io.StringIO()
    console = Console("plain", file=file)
    console.evaluation(0, RESULTS)
    console.stage("grpo", 2, 0, 300)
    for step in (301, 302):
        if step == 302:
            console.evaluation(step, RESULTS)
        console.step({**STEP, "step": step})
    lines = file.getvalue().splitlines()
    kinds = [line.split("  ")[0] for line in lines if not line.startswith("  ")]
    assert kinds == [
        "evaluation at step 0",
        "stage grpo: 2 steps",
        "grpo 301/302",
        "grpo 302/302",
        "evaluation at step 302",
    ]


def test_rows_of_sft_are_thinned_and_the_last_one_is_kept(monkeypatch):
    now = iter(x / 10 for x in range(10_000))
    monkeypatch.setattr("rlvr.monitor.console.time.monotonic", lambda: next(now))
    file = io.StringIO()
    console = Console("plain", file=file)
    console.stage("sft", None)
    for step in range(1, 101):
        console.step({"step": step, "loss/total": 1.0})
    console.stage("grpo", 5, 0, 100)
    shown = [int(match[1]) for match in re.finditer(r"^sft (\d+)/", file.getvalue(), re.MULTILINE)]
    assert shown[0] == 1 and shown[-1] == 100 and 5 <= len(shown) <= 30


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_rows_fit_the_terminal_without_a_cut(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    console = Console("auto", file=terminal)
    busy = {**STEP, "memory/update_max": 12.3, "mfu/update": 0.41}
    console.step(busy)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    header, row = plain.splitlines()
    assert max(len(header), len(row)) <= columns
    assert "0.412 ±0.49" in row and row.rstrip().endswith(("4.0s", "other 5%")) and "12/60/28%" in row


def test_an_evaluation_has_a_bar_of_its_own():
    now = {"sampling": (10, 10), "verifying": (10, 10)}
    output = RichConsole(file=io.StringIO(), record=True, width=100, force_terminal=True)
    view = LiveView(output, "grpo", 20, 4, lambda: now, before=300)

    def shown():
        output.print(view._view())
        return [" ".join(re.sub(r"[━╸╺]+", "", line).split()) for line in output.export_text().splitlines()]

    assert shown() == ["grpo step 304/320 0:00 left -:--:--"]  # nothing sampled: no bar of 0/0
    view.evaluating("evaluation at step 304", 40)
    now |= {"sampling": (30, 50), "verifying": (25, 30)}
    assert shown()[1:] == ["evaluation at step 304 15/40 left -:--:--"]
    view.again()
    now |= {"sampling": (31, 34), "verifying": (25, 30)}
    assert shown()[1:] == ["sampling 1/4", "verifying 0/5"]


def test_the_evaluation_before_the_first_stage_is_shown_on_a_terminal(terminal):
    console = Console("auto", file=terminal, counts=lambda: {"verifying": (3, 8)})
    with console.evaluating("evaluation at step 0", 4, 8):
        console._view._live.refresh()
        assert "evaluation at step 0" in terminal.getvalue()
    assert console._view is None
    with Console("plain", file=terminal).evaluating("gsm8k", 4, 8):
        assert terminal.getvalue().endswith("gsm8k: 4 tasks, 8 responses\n")


def test_phases_before_the_first_step_are_lines_with_seconds(monkeypatch, capsys):
    for mode, rank, shown in (("auto", "0", True), ("quiet", "0", False), ("auto", "1", False)):
        monkeypatch.setenv("RANK", rank)
        with StartupLines(mode) as lines:
            lines.say("loading torch")
            startup.info("loading the model %s", "a/b")
        startup.info("nobody looks")
        printed = capsys.readouterr().out
        if shown:
            assert re.fullmatch(r" +\d+\.\d s  loading torch\n +\d+\.\d s  loading the model a/b\n", printed)
        else:
            assert printed == ""


def test_inside_another_block_only_the_outer_one_shows(capsys):
    with StartupLines("plain"):
        with StartupLines("plain"):
            startup.info("loading")
        startup.info("reading")
    assert [line.split(" s  ")[1] for line in capsys.readouterr().out.splitlines()] == ["loading", "reading"]


@pytest.mark.parametrize(("mode", "shown"), [("plain", True), ("quiet", False)])
def test_a_trainer_from_python_shows_the_phases_before_its_first_step(make_trainer, capsys, mode, shown):
    make_trainer({"logging": {"console": mode}})
    printed = capsys.readouterr().out
    assert (" s  planning: devices" in printed) == shown
    assert (" s  loading the model" in printed) == shown


def test_clean_keeps_what_is_harmless():
    assert clean("a\tb\r\nc\nd é 漢字 👩\u200d🚀") == "a    b\nc\nd é 漢字 👩\u200d🚀"
    assert clean("\r\x1b\ud800") == "\\r\\x1b\\ud800"
    assert clean(None) == "None"
    assert encodable("é ▁", "latin-1") == "é 1"


def test_shorten_keeps_both_ends():
    assert shorten("short", 10) == "short"
    assert shorten("a" * 50 + "b" * 50, 9) == "aaa [... 91 characters ...] bbbbbb"


def test_batches_with_columns_only(rollout):
    batch = Batch([rollout(score="none")], {"reward": np.asarray([np.nan])})
    file = io.StringIO()
    Console("plain", samples_every=1, file=file).step(STEP, batch)
    assert "#0 not verified" in file.getvalue()


# the live view, quiet mode, and a real terminal


def test_the_live_view_says_how_far_the_step_is():
    now = {"sampling": (10, 12), "verifying": (9, 10)}
    output = RichConsole(file=io.StringIO(), record=True, width=100, force_terminal=True)
    view = LiveView(output, "grpo", 20, 4, lambda: now)

    def shown():
        output.print(view._view())
        return [" ".join(re.sub(r"[━╸╺]+", "", line).split()) for line in output.export_text().splitlines()]

    assert shown() == ["grpo step 4/20 0:00 left -:--:--", "sampling 0/2", "verifying 0/1"]
    now |= {"sampling": (13, 76), "verifying": (10, 15)}
    assert shown()[1:] == ["sampling 3/66", "verifying 1/6"]
    view.step()
    assert shown()[0].startswith("grpo step 5/20")
    assert shown()[1:] == ["sampling 0/63", "verifying 0/5"]  # what was asked for ahead is not forgotten
    view.note(Text("warning: first"))
    view.note(Text("warning: all groups are wrong"))
    assert shown()[3:] == ["warning: all groups are wrong"]


def test_the_last_warning_stays_in_view(terminal):
    console = Console("auto", file=terminal, counts=lambda: {"sampling": (1, 2)})
    console.stage("grpo", 5)
    console.message("all groups\nare wrong", "warning")
    console.message("plain words")
    console._view._live.refresh()
    after = terminal.getvalue().split("plain words")[-1]
    console.finish()
    assert "warning: all groups are wrong" in after and "sampling" in after


def test_quiet_shows_warnings_errors_and_the_last_line(rollout):
    file = io.StringIO()
    console = Console("quiet", samples_every=1, file=file)
    show(console, Batch([rollout()]))
    console.message("gone", "error")
    console.closing("done: 200 steps")
    assert file.getvalue() == "warning: look here\nerror: gone\ndone: 200 steps\n"


def in_a_terminal(*command: str, cwd=None) -> tuple[int, str]:
    """Exit code and everything that a command writes to a pseudo-terminal of its own."""
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment, cwd=cwd)
    os.close(end)
    parts, until = [], time.monotonic() + 120
    try:
        while time.monotonic() < until:
            if select.select([main], [], [], 0.5)[0]:
                try:
                    data = os.read(main, 65536)
                except OSError:  # the other end is closed: the process has ended
                    break
                if not data:
                    break
                parts.append(data)
        return process.wait(10), b"".join(parts).decode("utf-8", "replace")
    finally:
        process.kill()
        process.wait()
        os.close(main)


RUN = """
run: {name: live, steps: 3}
model: {scratch: {hidden_size: 32, layers: 2, context: 64}, device: cpu}
data: {train: {name: arithmetic, count: 16, digits: [1]}}
rollout: {prompts_per_step: 2, group_size: 4, max_new_tokens: 6}
verifier: slow.py:slow
logging: {samples_every: 0}
"""


@pytest.mark.gate
def test_training_in_a_real_terminal(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "slow.py").write_text("import time\ndef slow(completion):\n    time.sleep(0.5)\n    return 0.0\n")
    command = [sys.executable, "-m", "rlvr.train", "--config", "run.yaml", "verification.workers=2"]
    code, text = in_a_terminal(*command, cwd=tmp_path)
    assert code == 0, text
    frames = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "━" in frames and re.search(r"grpo.*step \d/3", frames)
    assert re.search(r"sampling\s*\S+\s*8/8", frames), "the bar of sampling inside the step"
    assert re.search(r"verifying\s*\S+\s*[1-7]/8", frames), "the bar of verifying moves inside the step"
    assert "trend" in frames and "right/mixed/wrong" in frames and "0/0/100%" in frames and "tok/s" in frames
    assert frames.rstrip().splitlines()[-1].strip().startswith("done: 3 steps, reward 0.000")
    assert text.count("\x1b[?25l") <= text.count("\x1b[?25h")  # the cursor is given back


def test_a_table_on_a_narrow_terminal_folds_long_texts_alone():
    stream = io.StringIO()
    console = Console("plain", file=stream)
    console._output.width = 60
    console.table("slow", ["id", "status of it", "completion"], [["r1234567", "unparsable", "a long answer " * 9]])
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert "status of it" in lines[1] and "r1234567" in lines[2] and "unparsable" in lines[2]
