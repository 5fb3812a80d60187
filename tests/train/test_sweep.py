"""run.seeds: real processes, one after the other; what they amount to; a seed that fails; a stop; controls."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from rlvr.config import RewardSpec
from rlvr.config.config_loading import load_config
from rlvr.config.stage_plan import stage_plans
from rlvr.errors import ConfigError
from rlvr.evaluation import over_runs, read_result
from rlvr.train import as_control, main
from rlvr.trainer import GRPOTrainer

DIGITS = "def digits(completion):\n    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n"


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "digits.py").write_text(DIGITS)
    return {
        "run": {"name": "many", "dir": str(tmp_path), "steps": 2},
        "model": {"scratch": {"hidden_size": 32, "layers": 2, "context": 48}, "device": "cpu"},
        "data": {
            "train": {"name": "arithmetic", "count": 16, "digits": [1]},
            "eval": {"name": "arithmetic", "count": 4, "split": "eval", "digits": [1]},
        },
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6},
        "evaluation": {"samples": 4, "k": [1, 4]},
        "verifier": f"{tmp_path / 'digits.py'}:digits",
        "logging": {"console": "plain", "samples_every": 0, "rollouts": 0},
    }


def written(folder, tree):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return ["--config", str(path)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def learned(folder):
    """The metrics of a run but for its times."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_sweep_is_its_runs_and_a_seed_that_fails_loses_itself(tree, tmp_path, capfd):
    arguments = [*written(tmp_path, tree), "run.seeds=[0, 5, 2]"]
    blocked = tmp_path / "many" / "seed-5"
    blocked.mkdir(parents=True)
    (blocked / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(arguments) == 1
    out, err = capfd.readouterr()
    assert (
        "seed-5 holds metrics.jsonl, and no config.yaml" in err
        and "seed 5 ended with exit code 2; the others go on" in out
    )
    assert json.loads((tmp_path / "many" / "seeds.json").read_text())["seeds"] == [0, 2]

    (blocked / "metrics.jsonl").unlink()
    before = (tmp_path / "many" / "seed-0" / "metrics.jsonl").read_bytes()
    assert main([*arguments, "--resume", "auto"]) == 0
    assert (tmp_path / "many" / "seed-0" / "metrics.jsonl").read_bytes() == before  # it was done
    out, _ = capfd.readouterr()
    assert "after the last step, 3 seeds" in out and "eval/pass@4" in out
    assert out.rstrip().splitlines()[-1].startswith("done: seeds 0, 5, 2, run folder")
    result = json.loads((tmp_path / "many" / "seeds.json").read_text())["results"]
    folders = [tmp_path / "many" / f"seed-{seed}" for seed in (0, 5, 2)]
    rewards = [lines(folder / "metrics.jsonl")[-1]["reward/mean"] for folder in folders]
    assert result["reward/mean"]["runs"] == rewards
    assert result["reward/mean"]["mean"] == pytest.approx(np.mean(rewards))
    task_results = [read_result(folder / "evaluations" / "step-000002.json") for folder in folders]
    expected = over_runs(task_results, [1, 4])["mean"]
    assert result["eval/mean"] == {k: list(v) if isinstance(v, tuple) else v for k, v in expected.items()}
    assert (tmp_path / "many" / "report.html").stat().st_size > 10_000

    alone = {**tree, "run": {**tree["run"], "name": "alone", "seed": 5}, "logging": {"console": "off", "rollouts": 0}}
    with GRPOTrainer(config=alone) as trainer:
        trainer.train()
    assert learned(tmp_path / "alone") == learned(tmp_path / "many" / "seed-5")


@pytest.mark.gate
def test_runs_of_seeds_are_no_ranks_of_the_sweeps_launcher(tree, tmp_path, capfd, monkeypatch):
    """A refused seed of a sweep under torchrun with one process does not report the launcher's own process as
    failed."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    blocked = tmp_path / "many" / "seed-5"
    blocked.mkdir(parents=True)
    (blocked / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main([*written(tmp_path, tree), "run.seeds=[5]"]) == 2
    assert "seed-5 holds metrics.jsonl, and no config.yaml" in capfd.readouterr().err
    assert not (tmp_path / "error.json").exists()


@pytest.mark.slow
def test_a_stop_goes_to_the_run_under_way_and_no_other_is_begun(tree, tmp_path):
    tree["run"]["steps"], tree["evaluation"] = 100_000, {"at_start": False, "at_end": False}
    arguments = [sys.executable, "-m", "rlvr.train", *written(tmp_path, tree), "run.seeds=[0, 1]"]
    process = subprocess.Popen(arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    metrics, until = tmp_path / "many" / "seed-0" / "metrics.jsonl", time.monotonic() + 120
    try:
        while not metrics.exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    finally:
        process.kill()
        process.wait()
    assert list((tmp_path / "many" / "seed-0" / "checkpoints").glob("step-*"))
    assert not (tmp_path / "many" / "seed-1").exists()


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"seeds": [1, 2, 1]}, "the seed 1 stands in `seeds` twice"),
        ({"seeds": [1, 2], "seed": 3}, "`seed` and `seeds` exclude each other"),
        ({"seeds": [1, -2]}, "run.seeds[1]"),
        ({"seeds": 3}, "run.seeds"),
    ],
)
def test_seeds_that_make_no_sense_are_refused(run, said):
    with pytest.raises(ConfigError) as error:
        load_config({"run": run})
    assert said in str(error.value)


def test_what_a_sweep_cannot_do_is_refused(tree, tmp_path, capsys, monkeypatch):
    arguments = [*written(tmp_path, tree), "run.seeds=[0, 1]"]
    assert main([*arguments, "--resume", str(tmp_path)]) == 2
    assert "--resume auto" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(arguments) == 2
    assert "under torchrun" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"run\.seeds is a run for each seed"):
        stage_plans(load_config({"run": {"seeds": [0, 1], "steps": 1}}))
    assert not (tmp_path / "many").exists()


def test_a_dry_run_of_a_sweep_is_that_of_its_first_seed(tree, tmp_path, capsys):
    assert main([*written(tmp_path, tree), "run.seeds=[4, 1]", "--dry-run"]) == 0
    assert "seed: 4" in capsys.readouterr().out
    assert not (tmp_path / "many").exists()


# controls


def test_a_control_pays_something_else_in_every_stage(tree):
    config = load_config(
        {
            **tree,
            "rewards": ["verdict", {"name": "format", "template": "<a>{x}</a>", "weight": 0.5, "as": "form"}],
            "stages": [{"kind": "grpo", "steps": 1, "rewards": ["length"]}, {"kind": "grpo", "steps": 1}],
        }
    )
    control = as_control(config, "format")
    assert control.run.name == "many-format" and config.run.name == "many"
    assert control.rewards == [config.rewards[1]]
    assert [plan.config.rewards for plan in stage_plans(control)] == [control.rewards] * 2
    assert as_control(config, "random").rewards == [RewardSpec("random")]
    assert control.verifier == config.verifier  # verdicts are still counted, and evaluated by


@pytest.mark.parametrize("control", ["random", "format"])
def test_a_control_trains(tree, tmp_path, control, capsys):
    assert main([*written(tmp_path, tree), "--control", control]) == 0
    out = capsys.readouterr().out
    assert "tasks with a right response: " in out  # against the start, task by task
    assert re.search(r"mean: \d+\.\d % -> ", out)
    rows = lines(tmp_path / f"many-{control}" / "metrics.jsonl")
    assert len(rows) == 2 and f"reward/{control}" in rows[0] and "reward/verdict" not in rows[0]
    assert rows[-1]["eval/mean"] is not None
