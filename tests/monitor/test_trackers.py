"""TensorBoard and MLflow by what their own readers find in the files; a tracker that raises or hangs costs the run
nothing."""

from __future__ import annotations

import json
import re
import sys
import threading
import time

import pytest

from rlvr.config.config_loading import load_config
from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.monitor.background_trackers import BackgroundTracker, background_trackers
from rlvr.monitor.batch import sample_rows
from rlvr.monitor.metrics import record
from rlvr.monitor.mlflow_tracker import MlflowTracker
from rlvr.monitor.tensorboard_tracker import TensorBoardTracker
from rlvr.records import Batch

ODD = "odd | \ud800 <b>x</b> \x1b 😀\nsecond line"


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def log(tracker, rollout, directory, steps, config=None):
    """A run of some steps by a process of its own."""
    tracker.start(config or {"optim": {"lr": 1e-6, "schedule": "constant"}}, directory)
    for step in steps:
        tracker.log(step, record({"step": step, "reward/mean": 0.5 * step, "run/stage": "grpo", "eval/pass@8": 0.25}))
        tracker.log_rollouts(step, sample_rows(Batch([rollout(text=ODD), rollout(score=None)])))
    tracker.finish()


# TensorBoard


def events(folder):
    """What TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    result.Reload()
    return result


def test_tensorboard_reads_back_what_was_logged(tmp_path, rollout):
    log(TensorBoardTracker(), rollout, tmp_path, [1, 2, 3])
    result = events(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in result.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert [e.value for e in result.Scalars("eval/pass@8")] == [0.25] * 3
    assert not {"step", "run/stage", "entropy"} & set(result.Tags()["scalars"])  # no text, nothing that is null
    texts = [e.tensor_proto.string_val[0].decode() for e in result.Tensors("rollouts/text_summary")]
    assert len(texts) == 3
    header, rule, *rows = texts[0].split("\n")
    assert len({line.count("|") for line in (header, rule, *rows)}) == 1 and len(rows) == 2
    assert "odd &#124; \\ud800 &lt;b&gt;x&lt;/b&gt; \\x1b 😀<br>second line" in rows[0]
    (config,) = result.Tensors("config/text_summary")
    assert "lr: 1.0e-06" in config.tensor_proto.string_val[0].decode()


def test_tensorboard_hides_what_a_resumed_run_writes_anew(tmp_path, rollout):
    log(TensorBoardTracker(), rollout, tmp_path, [1, 2, 3, 4])
    time.sleep(1.1)  # event files are ordered by the second in their names
    log(TensorBoardTracker(), rollout, tmp_path, [3, 4, 5])
    assert [e.step for e in events(tmp_path / "tensorboard").Scalars("reward/mean")] == [1, 2, 3, 4, 5]


def test_tensorboard_in_another_folder(tmp_path, rollout):
    log(TensorBoardTracker(str(tmp_path / "all"), "mine"), rollout, tmp_path / "run", [1])
    assert events(tmp_path / "all" / "mine").Scalars("reward/mean")
    assert not (tmp_path / "run").exists()


# MLflow


def client(folder):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")


def runs(folder):
    store = client(folder)
    return store.search_runs([e.experiment_id for e in store.search_experiments()])


@pytest.mark.gate
def test_mlflow_reads_back_what_was_logged(tmp_path, rollout):
    config = {"optim": {"lr": 1e-6}, "many": {str(i): "x" * 1000 for i in range(150)}, "empty": {}}
    log(MlflowTracker(), rollout, tmp_path / "mine", [1, 2, 3], config)
    (run,) = runs(tmp_path / "mine")
    store = client(tmp_path / "mine")
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    history = store.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert run.data.metrics["eval/pass_at_8"] == 0.25 and "run/stage" not in run.data.metrics
    assert run.data.params["optim.lr"] == "1e-06" and len(run.data.params) == 152
    assert len(run.data.params["many.149"]) == 500
    (path,) = (tmp_path / "mine").rglob("step-000002.json")
    table = json.loads(path.read_text())
    assert table["columns"][:2] == ["task", "member"] and len(table["data"]) == 2
    assert "odd | \\ud800 <b>x</b> \\x1b 😀\nsecond line" in table["data"][0]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_mlflow_run(tmp_path, rollout):
    log(MlflowTracker(), rollout, tmp_path, [1, 2], {"run": {"steps": 2}})
    log(MlflowTracker(), rollout, tmp_path, [3], {"run": {"steps": 3}})
    (run,) = runs(tmp_path)
    assert [m.step for m in client(tmp_path).get_metric_history(run.info.run_id, "reward/mean")] == [1, 2, 3]


@pytest.mark.gate
def test_mlflow_without_its_server_logs_to_the_run_folder_and_says_so_once(tmp_path, rollout, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    log(MlflowTracker("http://127.0.0.1:9"), rollout, tmp_path, [1, 2])
    (output,) = [r.message for r in caplog.records if r.name.startswith("rlvr")]
    assert "mlflow cannot log to http://127.0.0.1:9 and logs to" in output
    assert len(runs(tmp_path)) == 1


# guests


class Recorder:
    """A tracker that keeps what it gets; `fail` is called in the method of that name."""

    def __init__(self, where=None, fail=None):
        self.where, self.fail, self.got, self.threads = where, fail, [], set()

    def _called(self, name, *what):
        self.threads.add(threading.current_thread())
        if name == self.where:
            self.fail()
        self.got.append((name, *what))

    def start(self, run, directory):
        self._called("start", run, directory)

    def log(self, step, metrics):
        self._called("log", step, metrics)

    def log_rollouts(self, step, rows):
        self._called("log_rollouts", step, rows)

    def finish(self):
        self._called("finish")


def test_a_guest_gets_everything_in_order_in_one_thread(tmp_path):
    recorder = Recorder()
    guest = BackgroundTracker(recorder)
    guest.start({"a": 1}, tmp_path)
    guest.start({"a": 2}, tmp_path)  # `train` is called again
    metrics = {"lr": 1.0}
    guest.log(1, metrics)
    metrics["lr"] = 2.0  # what the run does to its record afterwards is not seen
    guest.log_rollouts(1, [])
    guest.log_rollouts(1, [{"a": 1}])
    guest.finish()
    guest.finish()
    guest.log(2, metrics)
    got = [("start", {"a": 1}, tmp_path), ("log", 1, {"lr": 1.0}), ("log_rollouts", 1, [{"a": 1}]), ("finish",)]
    assert recorder.got == got
    assert threading.current_thread() not in recorder.threads and len(recorder.threads) == 1


@pytest.mark.parametrize("where", ["start", "log", "log_rollouts", "finish"])
def test_a_broken_tracker_is_said_once_and_dropped(tmp_path, caplog, where):
    def fail():
        raise SystemExit(3)

    broken, sound = BackgroundTracker(Recorder(where, fail), "broken", finish_timeout=5), Recorder()
    everyone = [broken, BackgroundTracker(sound)]
    for guest in everyone:
        guest.start({}, tmp_path)
    for step in range(20):
        for guest in everyone:
            guest.log(step, {"lr": 0.1})
            guest.log_rollouts(step, [{"a": 1}])
    for guest in everyone:
        guest.finish()
    assert [r.message for r in caplog.records] == ["broken failed and is switched off for this run: SystemExit: 3"]
    assert len(sound.got) == 42


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_hangs_holds_nothing(tmp_path, caplog, where):
    release = threading.Event()
    guest = BackgroundTracker(Recorder(where, lambda: release.wait(60)), "stuck", queue_size=5, finish_timeout=0.4)
    began = time.monotonic()
    guest.start({}, tmp_path)
    for step in range(50):
        guest.log(step, {})
        time.sleep(0 if where != "finish" else 0.002)
    guest.finish()
    assert time.monotonic() - began < 30  # it hangs for a minute
    release.set()
    assert "stuck did not finish within 0.4 s and was left behind" in caplog.text
    assert ("steps or tables were not sent" in caplog.text) == (where != "finish")


def test_the_section_says_which_trackers(tmp_path):
    section = load_config({"logging": {"tensorboard": {"directory": str(tmp_path)}, "mlflow": True}}).logging
    named = background_trackers(section, "mine", [Recorder()])
    assert [guest.name for guest in named] == ["Recorder", "tensorboard", "mlflow"]
    assert named[1].tracker.directory == str(tmp_path) and named[2].tracker.name == "mine"
    assert background_trackers(load_config().logging, "mine") == []


@pytest.mark.parametrize(("key", "extra"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")])
def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch, key, extra):
    monkeypatch.delitem(sys.modules, key, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command(extra))):
        background_trackers(load_config({"logging": {key: True}}).logging, "mine")


@pytest.mark.gate
def test_a_run_with_all_trackers_and_a_broken_one(tmp_path, caplog, monkeypatch):
    """The trainer itself: every tracker has every step; a broken one costs nothing but a line."""
    from rlvr.trainer import GRPOTrainer

    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")

    def fail():
        raise RuntimeError("broken")

    tree = {
        "run": {"name": "mine", "dir": str(tmp_path), "steps": 3},
        "model": {"scratch": {"hidden_size": 32, "layers": 2, "context": 48}, "device": "cpu"},
        "data": {"train": {"name": "arithmetic", "count": 16, "digits": [1]}},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6},
        "logging": {"console": "off", "tensorboard": True, "mlflow": True, "wandb": True},
    }
    sound = Recorder()
    given = [Recorder("start", fail), sound]
    with GRPOTrainer(None, None, lambda completion: float("1" in completion), tree, trackers=given) as trainer:
        for guest in trainer.reporting.trackers:
            guest.finish_timeout = 90.0  # a busy machine takes its time to import all three
        rows = trainer.train()
    assert len(rows) == 3
    assert "Recorder failed and is switched off for this run: RuntimeError: broken" in caplog.text
    assert [call[0] for call in sound.got] == ["start", *["log", "log_rollouts"] * 3, "finish"]
    folder = tmp_path / "mine"
    assert [e.step for e in events(folder / "tensorboard").Scalars("reward/mean")] == [1, 2, 3]
    (run,) = runs(folder)
    rewards = [m.value for m in client(folder).get_metric_history(run.info.run_id, "reward/mean")]
    assert rewards == [row["reward/mean"] for row in rows]
    assert len(list((folder / "wandb").rglob("*.table.json"))) == 3


def test_trackers_import_nothing_until_they_start():
    import subprocess

    code = (
        "import sys, rlvr.monitor.background_trackers; assert not {'torch', 'wandb', 'mlflow', 'tensorboard'} & "
        "set(sys.modules), "
        "sorted(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
