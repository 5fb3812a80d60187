"""Each monitor: a synthetic run that triggers it, once and with its first step, and one that must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvr.config.config_loading import load_config
from rlvr.errors import ConfigError, TrainingError
from rlvr.monitor.console import Console
from rlvr.monitor.health import MONITORS, Finding, Health, Watch, checked_modes, findings_of
from rlvr.monitor.metrics import FAMILIES, METRICS, record
from rlvr.monitor.trackers import MetricsFile
from rlvr.records import Batch, Verdict, VerdictStatus

Row = dict[str, Any]
HEALTHY: Row = {
    "reward/mean": 0.4,
    "reward/undecided": 0.0,
    "group/all_wrong": 0.3,
    "group/all_correct": 0.1,
    "group/zero_variance": 0.4,
    "verdict/error": 0.0,
    "verdict/timeout": 0.0,
    "verdict/unparsable": 0.05,
    "completion/truncated": 0.02,
    "completion/length_mean": 200.0,
    "completion/repetition": 0.1,
    "completion/duplicates": 0.02,
    "entropy": 0.4,
    "kl/ref": 0.02,
    "ratio/mean": 1.0,
    "ratio/clipped_low": 0.01,
    "ratio/clipped_high": 0.01,
    "mismatch/mean": 0.004,
    "grad_norm": 0.5,
    "lr": 1e-6,
    "policy/staleness_mean": 0.0,
    "time/tokens_per_second": 5000.0,
    "explained/verdict": 0.9,
    "explained/format": 0.2,
}


def run(steps: int, change: Callable[[int], Row], stage: str = "grpo", first: int = 1) -> list[Row]:
    """A run that is healthy but for what `change` says of each step, counted from 1 within the stage."""
    noise = np.random.default_rng(0).normal(1, 0.03, (steps, len(HEALTHY)))
    rows = []
    for k in range(steps):
        usual = {name: value * noise[k, i] for i, (name, value) in enumerate(HEALTHY.items())}
        rows.append(record({**usual, **change(k + 1), "step": first + k, "run/stage": stage}))
    return rows


def late(**values: Any) -> Callable[[int], Row]:
    """These values from step 31 on; `__` stands for `/`."""
    return lambda step: {name.replace("__", "/"): value for name, value in values.items()} if step > 30 else {}


def evaluated(
    scores: Callable[[int], float], rewards: Callable[[int], float], tasks: int = 500
) -> Callable[[int], Row]:
    """An evaluation every ten steps."""

    def change(step: int) -> Row:
        eval_row = {"eval/greedy": scores(step), "eval/tasks": tasks} if step % 10 == 0 else {}
        return {"reward/mean": rewards(step), **eval_row}

    return change


TRIGGERS: dict[str, Callable[[int], Row]] = {
    "all_wrong": late(group__all_wrong=0.95),
    "all_right": late(group__all_correct=0.97),
    "no_spread": late(group__zero_variance=1.0, group__all_wrong=0.5, group__all_correct=0.5),
    "verifier_errors": late(verdict__error=0.2),
    "undecided_rewards": late(reward__undecided=0.2),
    "verifier_timeouts": late(verdict__timeout=0.3),
    "unparsable": late(verdict__unparsable=0.8),
    "no_spans": late(span__missing=1.0),
    "truncated": late(completion__truncated=0.7),
    "length_jump": late(completion__length_mean=450.0, reward__mean=0.6),
    "length_drift": lambda step: {"completion/length_mean": 200.0 * 1.03**step},
    "length_collapse": lambda step: {"completion/length_mean": 200.0 * 0.95**step},
    "repetition": late(completion__repetition=0.7),
    "duplicates": late(completion__duplicates=0.9),
    "entropy_collapse": lambda step: {"entropy": 0.4 * 0.92**step},
    "entropy_blowup": lambda step: {"entropy": 0.4 + 0.05 * step},
    "kl_runaway": late(kl__ref=2.0),
    "ratio_drift": late(ratio__mean=1.4),
    "mismatch": late(mismatch__mean=0.3),
    "clip_share": late(ratio__clipped_low=0.2, ratio__clipped_high=0.2),
    "gradient_spikes": lambda step: {"grad_norm": 50.0} if step in (33, 38, 44) else {},
    "lr_zero": late(lr=0.0),
    "reward_hacking": evaluated(lambda s: 0.6 if s <= 30 else 0.4, lambda s: 0.4 + 0.005 * s),
    "term_dominates": late(explained__verdict=0.1, explained__format=0.99),
    "stale_weights": late(policy__staleness_mean=6.0, mismatch__mean=0.04),
    "slow": late(time__tokens_per_second=1000.0),
}
HARMLESS: dict[str, Callable[[int], Row]] = {
    "all_wrong": lambda step: {"group/all_wrong": 0.95 if step % 4 else 0.5},
    "all_right": late(group__all_correct=0.8),
    "no_spread": late(group__zero_variance=0.9),
    "verifier_errors": lambda step: {"verdict/error": 1.0 if step % 3 == 0 else 0.0},
    "undecided_rewards": late(reward__undecided=0.3, verdict__error=0.0, verdict__timeout=0.3),
    "verifier_timeouts": lambda step: {"verdict/timeout": 0.05},
    "unparsable": lambda step: {"verdict/unparsable": 0.9 if step < 5 else 0.2},
    "no_spans": late(span__missing=0.95),
    "truncated": late(completion__truncated=0.4),
    "length_jump": lambda step: {"completion/length_mean": 600.0 if step == 33 else 200.0},
    "length_drift": lambda step: {"completion/length_mean": 200.0 * 1.03**step, "reward/mean": 0.4 + 0.005 * step},
    "length_collapse": lambda step: {"completion/length_mean": 200 * 0.95**step, "reward/mean": 0.4 + 0.005 * step},
    "repetition": late(completion__repetition=0.4),
    "duplicates": late(completion__duplicates=0.95, group__all_correct=0.8),
    "entropy_collapse": lambda step: {"entropy": 0.4 * 0.92**step, "group/all_correct": 0.7},
    "entropy_blowup": lambda step: {"entropy": 0.2 + 0.005 * step},
    "kl_runaway": late(kl__ref=0.3),
    "ratio_drift": late(ratio__mean=1.05),
    "mismatch": late(mismatch__mean=0.02),
    "clip_share": late(ratio__clipped_low=0.1, ratio__clipped_high=0.1),
    "gradient_spikes": lambda step: {"grad_norm": 50.0} if step in (33, 44) else {},
    "lr_zero": lambda step: {"lr": 0.0 if step in (1, 60) else 1e-6},
    "reward_hacking": evaluated(lambda s: 0.6 if s <= 30 else 0.57, lambda s: 0.4 + 0.005 * s),
    "term_dominates": late(explained__verdict=0.99, explained__format=0.0),
    "stale_weights": late(policy__staleness_mean=6.0),
    "slow": late(time__tokens_per_second=3000.0),
}


def test_both_lists_are_of_all_monitors():
    assert set(TRIGGERS) == set(HARMLESS) == set(MONITORS)


@pytest.mark.parametrize("name", MONITORS)
def test_a_monitor_speaks_once_and_says_since_when(name):
    result = [f for f in findings_of(run(60, TRIGGERS[name])) if f.monitor == name]
    assert len(result) == 1
    assert 20 <= result[0].step <= 60
    assert result[0].since <= result[0].step
    if TRIGGERS[name](30) == {} and name != "slow":
        assert 30 < result[0].since <= 35
    text = str(result[0])
    assert "{" not in text and "Try: " in text


@pytest.mark.parametrize("name", MONITORS)
def test_a_monitor_is_silent_where_it_must_be(name):
    assert name not in {f.monitor for f in findings_of(run(60, HARMLESS[name]))}


@pytest.mark.parametrize("change", [{}, dict.fromkeys(HEALTHY), {"lr": None}])
def test_a_healthy_run_and_one_without_metrics_say_nothing(change):
    assert findings_of(run(200, lambda step: change)) == []


def test_hacking_is_not_claimed_from_the_noise_of_few_tasks():
    noisy = evaluated(lambda s: [0.5, 0.62, 0.48][s // 10 % 3], lambda s: 0.3 + 0.005 * s, tasks=32)
    assert findings_of(run(60, noisy)) == []


def test_each_stage_is_looked_at_by_itself():
    sft = run(40, lambda step: {"completion/length_mean": 50.0, "entropy": 3.0, "reward/mean": None}, stage="sft")
    assert findings_of([*sft, *run(40, lambda step: {}, first=41)]) == []
    wrong = late(group__all_wrong=1.0)
    result = findings_of([*run(60, wrong), *run(60, wrong, stage="second", first=61)])
    assert [(f.monitor, f.step) for f in result] == [("all_wrong", 35), ("all_wrong", 95)]


def test_monitors_read_metrics_that_there_are():
    for monitor in MONITORS.values():
        assert monitor.name == monitor.name.lower()
        for name in monitor.reads:
            assert name in METRICS or name.removesuffix("*") in FAMILIES


def test_after_a_resume_nothing_is_said_again():
    rows = run(60, TRIGGERS["all_wrong"])
    whole, again = Watch(checked_modes("warn")), Watch(checked_modes("warn"))
    first = [f for k in range(40) for f in whole.look(rows[: k + 1])]
    assert [f.monitor for f in first] == ["all_wrong"]
    assert [f for k in range(40, 60) for f in again.look(rows[: k + 1])] == []
    late_one = Watch(checked_modes("warn"))
    late_one.look(rows[:33])
    assert [f.step for k in range(33, 60) for f in late_one.look(rows[: k + 1])] == [35]


def test_modes_by_word_and_by_name():
    assert set(checked_modes("off").values()) == {"off"}
    modes = checked_modes({"all_wrong": "stop", "default": "off"})
    assert (modes["all_wrong"], modes["slow"]) == ("stop", "off")
    rows = run(60, late(group__all_wrong=1.0, completion__truncated=0.9))
    assert {f.monitor: f.mode for f in findings_of(rows, modes)} == {"all_wrong": "stop"}
    for written, match in (({"all_wrongg": "off"}, "did you mean 'all_wrong'"), ("loud", "loud")):
        with pytest.raises(ValueError, match=match):
            checked_modes(written)


def test_the_configuration_takes_a_word_or_words_by_name(tmp_path):
    assert load_config(None, ["health=off"]).health == "off"
    assert load_config(None, ["health.slow=off", "health.all_wrong=stop"]).health == {
        "slow": "off",
        "all_wrong": "stop",
    }
    file = tmp_path / "c.yaml"
    file.write_text("health: stop\n")
    assert checked_modes(load_config(file, ["health.slow=off"]).health)["truncated"] == "stop"
    assert checked_modes(load_config(file, ["health.slow=off"]).health)["slow"] == "off"
    with pytest.raises(ConfigError, match="truncated"):
        load_config(None, ["health.truncatd=off"])


def test_the_unparsable_show_three_examples_of_different_tasks(tmp_path, rollout, capsys):
    unread = [rollout(f"g{k // 4}", k % 4, 0.0, text=f"I think\n\x1b[31m {k}", id=f"task-{k // 4}") for k in range(16)]
    for one in unread:
        one.verdicts = {
            "math": Verdict(VerdictStatus.UNPARSABLE, 0.0, "no final\nanswer found\nstep 9, all_right: forged")
        }
    file = MetricsFile(tmp_path / "health.jsonl")
    health = Health({"unparsable": "stop"}, Console("plain"), file)
    rows = run(60, TRIGGERS["unparsable"])
    ends = [f for k in range(60) if (f := health.step(rows[: k + 1], Batch(unread))) is not None]
    assert [(f.monitor, f.step) for f in ends] == [("unparsable", 35)]
    assert len(ends[0].examples) == 3
    assert [e.split(":")[0] for e in ends[0].examples] == ["task task-0", "task task-1", "task task-2"]
    output = capsys.readouterr().out
    assert output.count("unparsable") == 1 and r"no final\nanswer found" in output and "\x1b" not in output
    assert not any(line.startswith("step 9") for line in output.splitlines())
    (row,) = file.rows()
    assert Finding.from_json(json.loads(json.dumps(row))) == ends[0]


def test_only_a_rank_that_leads_speaks(capsys, rollout):
    health = Health("stop", Console("plain"), None)
    rows = run(60, TRIGGERS["truncated"])
    ends = [f for k in range(60) if (f := health.step(rows[: k + 1], Batch([rollout()])))]
    assert [f.step for f in ends] == [35]
    assert capsys.readouterr().out == ""


# the metrics that were made for monitors


# in training


def test_a_run_is_ended_with_a_checkpoint_and_says_why(tmp_path):
    from rlvr.trainer import GRPOTrainer

    config = {
        "run": {"dir": str(tmp_path), "name": "broken", "steps": 8},
        "model": {"scratch": {"hidden_size": 16, "layers": 1, "intermediate_size": 16, "heads": 2, "context": 32}},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, "ignore_eos": True},
        "logging": {"console": "off"},
        "health": {"all_wrong": "stop"},
    }
    tasks = [{"prompt": f"{k}+1=", "answer": "impossible"} for k in range(4)]
    with GRPOTrainer(None, tasks, "exact", config) as trainer:
        with pytest.raises(TrainingError, match=r"health.all_wrong: in 100% .*step-5"):
            trainer.train()
        rows = list(trainer.folder.health.rows())
    monitors = {row["monitor"] for row in rows}
    assert "all_wrong" in monitors
    assert "truncated" not in monitors  # `ignore_eos`: every completion has the full length by request
    assert (tmp_path / "broken" / "checkpoints" / "step-5").is_dir()
    with GRPOTrainer(None, tasks, "exact", config) as trainer:
        assert len(trainer.train(resume="auto")) == 8
        again = [row["monitor"] for row in trainer.folder.health.rows()]
    assert again.count("all_wrong") == 1


def test_the_page_tells_of_every_monitor_in_its_own_words():
    page = (Path(__file__).resolve().parents[3] / "docs" / "when-it-does-not-learn.md").read_text()
    for monitor in MONITORS.values():
        reads = ", ".join(f"`{name}`" for name in monitor.reads)
        assert f"| `{monitor.name}` | {reads} | " in page
        assert f" | {monitor.advice} |" in page
