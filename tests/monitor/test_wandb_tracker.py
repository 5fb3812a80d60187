from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.monitor.background_trackers import BackgroundTracker
from rlvr.monitor.batch import sample_rows
from rlvr.monitor.metrics import record
from rlvr.monitor.trackers import Tracker
from rlvr.monitor.wandb_tracker import WandbTracker
from rlvr.records import Batch


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def tracker_of(timeout: float = 20.0, size: int = 1000, **options) -> Tracker:
    """The tracker as a run has it, offline where nothing else is said."""
    return BackgroundTracker(WandbTracker(**{"mode": "offline", **options}), "wandb", size, timeout)


class Run:
    """What the tracker uses of a wandb run; `log` may be made to hang or to raise."""

    def __init__(self, log=None):
        self.items, self.finished, self.do = [], False, log

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, item):
        if self.do:
            self.do()
        self.items.append(item)

    def finish(self):
        self.finished = True


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a stand-in in the place of wandb whose `init` is the given function."""

    def install(init):
        module = ModuleType("wandb")
        module.init = init
        module.Settings = type("Settings", (SimpleNamespace,), {"model_fields": {"silent": None}})
        module.setup = lambda settings: None
        module.Table = lambda **table: table
        monkeypatch.setitem(sys.modules, "wandb", module)

    return install


def test_real_wandb_offline(tmp_path, rollout, caplog):
    pytest.importorskip("wandb")
    tracker = tracker_of(60, mode="auto")
    tracker.start({"optim": {"lr": 1e-6}}, tmp_path)
    for step in (1, 2, 1, 2):
        tracker.log(step, record({"step": step, "reward/mean": 0.5 * step, "run/stage": "grpo"}))
        tracker.log_rollouts(step, sample_rows(Batch([rollout(text="odd \ud800 \x1b 😀"), rollout(score=None)])))
    tracker.finish()
    tracker.finish()
    (output,) = [entry for entry in caplog.records if entry.name.startswith("rlvr")]
    assert "has no key (WANDB_API_KEY, or `wandb login`) and logs offline" in output.message
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert any(path.stat().st_size > 0 for path in folder.glob("*.wandb"))
    tables = [json.loads(path.read_text()) for path in folder.rglob("*.table.json")]
    assert len(tables) == 4
    assert tables[0]["columns"][:2] == ["task", "member"]
    assert "odd \\ud800 \\x1b 😀" in tables[0]["data"][0]


def test_a_service_process_that_was_killed_is_started_again(tmp_path):
    """As after a notebook's machine ran out of memory: the next run of the process is logged all the same."""
    pytest.importorskip("wandb")
    script = f"""
        import os, signal, sys
        from pathlib import Path
        from rlvr.monitor.wandb_tracker import WandbTracker
        def one(folder):
            tracker = WandbTracker(mode="offline")
            tracker.start({{}}, folder)
            tracker.log(1, {{"lr": 0.1}})
            tracker.finish()
        one({str(tmp_path / "first")!r})
        tasks = Path(f"/proc/{{os.getpid()}}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        services = [c for c in children if b"wandb-core" in Path(f"/proc/{{c}}/cmdline").read_bytes()]
        assert len(services) == 1
        os.kill(services[0], signal.SIGKILL)
        os.waitpid(services[0], 0)
        one({str(tmp_path / "second")!r})
    """
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # one of its own
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300, env=environment)
    for name in ("first", "second"):
        (written,) = (tmp_path / name / "wandb").glob("offline-run-*/*.wandb")
        assert written.stat().st_size > 0


@pytest.mark.gate
def test_real_wandb_without_network_logs_offline_and_lets_the_process_end(tmp_path):
    pytest.importorskip("wandb")
    code = f"""if True:
        import time
        from rlvr.monitor.background_trackers import BackgroundTracker
        from rlvr.monitor.wandb_tracker import WandbTracker
        tracker = BackgroundTracker(WandbTracker(patience=4), 'wandb', finish_timeout=4)
        tracker.start({{}}, {str(tmp_path)!r})
        for step in range(60):
            tracker.log(step, {{"lr": 0.1}})
            time.sleep(0.1)
        tracker.finish()"""
    environment = {**os.environ, "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert "cannot go online" in result.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_values_reach_wandb_without_nulls(stand_in, tmp_path):
    run, options = Run(), {}
    stand_in(lambda **kw: options.update(kw) or run)
    tracker = tracker_of(project="p")
    tracker.start({"run": {"seed": 1}}, tmp_path / "my-run")
    tracker.log(3, {"step": 3, "lr": 0.1, "entropy": None})
    tracker.log_rollouts(3, [])
    tracker.log_rollouts(3, [{"completion": "\x1b", "reward": None}])
    tracker.finish()
    table = {"columns": ["completion", "reward"], "data": [["\\x1b", None]], "allow_mixed_types": True}
    assert run.items == [{"step": 3, "lr": 0.1}, {"rollouts": table, "step": 3}]
    assert run.finished
    assert (options["mode"], options["project"], options["name"]) == ("offline", "p", "my-run")
    assert options["config"] == {"run": {"seed": 1}}
    assert "id" not in options


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline"),
        ("online", {}, "online"),
        ("offline", {"WANDB_API_KEY": "x"}, "offline"),
    ],
)
def test_modes(stand_in, tmp_path, monkeypatch, mode, environment, expected):
    seen = {}
    stand_in(lambda **kw: seen.update(kw) or Run())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracker = tracker_of(mode=mode)
    tracker.start({}, tmp_path)
    tracker.finish()
    assert seen["mode"] == expected


@pytest.mark.parametrize(
    ("server", "machine", "mode"),
    [
        (None, "api.wandb.ai", "online"),
        ("http://wandb.lan:8080", "wandb.lan:8080", "online"),
        ("http://wandb.lan:8080", "api.wandb.ai", "offline"),
    ],
)
def test_a_login_is_a_key(stand_in, tmp_path, monkeypatch, server, machine, mode):
    seen = {}
    stand_in(lambda **kw: seen.update(kw) or Run())
    (tmp_path / "netrc").write_text(f"machine {machine}\n  login user\n  password {'a' * 40}\n")
    (tmp_path / "netrc").chmod(0o600)
    if server is not None:
        monkeypatch.setenv("WANDB_BASE_URL", server)
    tracker = tracker_of(mode="auto")
    tracker.start({}, tmp_path)
    tracker.finish()
    assert seen["mode"] == mode


def test_a_resumed_online_run_keeps_its_id(stand_in, tmp_path):
    ids = []
    stand_in(lambda **kw: ids.append((kw["id"], kw["resume"])) or Run())
    for _ in range(2):
        tracker = tracker_of(mode="online")
        tracker.start({}, tmp_path)
        tracker.finish()
    assert ids[0] == ids[1]
    assert ids[0][1] == "allow"


def test_disabled_needs_no_wandb(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = tracker_of(mode="disabled")
    tracker.start({}, tmp_path)
    tracker.log(1, {"lr": 1})
    tracker.finish()
    assert not list(tmp_path.iterdir())


def test_not_installed_is_one_clear_error(monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("wandb"))):
        WandbTracker("offline")


def test_no_network_is_offline(stand_in, tmp_path, caplog):
    run, modes = Run(), []

    def init(mode, **options):
        modes.append((mode, options["id"]))
        if mode == "online":
            raise RuntimeError("no network")
        return run

    stand_in(init)
    tracker = tracker_of(mode="online")
    tracker.start({}, tmp_path)
    tracker.log(1, {"lr": 0.1})
    tracker.finish()
    assert [mode for mode, _ in modes] == ["online", "offline"]
    assert modes[0][1] != modes[1][1]
    assert run.items == [{"lr": 0.1, "step": 1}]
    assert [r.message for r in caplog.records] == [
        "wandb cannot go online and logs to the run folder: RuntimeError: no network"
    ]


@pytest.mark.parametrize("where", ["init", "log"])
@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(1), KeyboardInterrupt()])
def test_wandb_that_raises_is_switched_off_once(stand_in, tmp_path, caplog, where, error):
    def fail(**_):
        raise error

    stand_in(fail if where == "init" else lambda **_: Run(log=fail))
    tracker = tracker_of(60)
    tracker.start({}, tmp_path)
    for step in range(50):
        tracker.log(step, {"lr": 0.1})
        time.sleep(0.001)
    began = time.monotonic()
    tracker.finish()
    assert time.monotonic() - began < 30
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "switched off" in caplog.text


@pytest.mark.parametrize("where", ["init", "log"])
def test_wandb_that_hangs_does_not_hold_the_run(stand_in, tmp_path, caplog, where):
    release = threading.Event()
    run = Run(log=release.wait)
    stand_in((lambda **_: release.wait() and run) if where == "init" else (lambda **_: run))
    tracker = tracker_of(0.5, 10)
    began = time.monotonic()
    tracker.start({}, tmp_path)
    for step in range(100):
        tracker.log(step, {"lr": 0.1})
    tracker.finish()
    assert 0.4 < time.monotonic() - began < 30  # its time limit of 0.5 s, and not for ever
    release.set()
    assert len(caplog.records) == 2
    assert "did not finish within 0.5 s" in caplog.text
    assert "steps or tables were not sent" in caplog.text


def test_a_slow_wandb_gets_what_is_queued_at_the_end(stand_in, tmp_path, caplog):
    run = Run(log=lambda: time.sleep(0.01))
    stand_in(lambda **_: run)
    tracker = tracker_of()
    tracker.start({}, tmp_path)
    for step in range(30):
        tracker.log(step, {})
    tracker.finish()
    assert [item["step"] for item in run.items] == list(range(30))
    assert not caplog.records
