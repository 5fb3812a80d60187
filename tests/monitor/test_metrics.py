from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from rlvr.losses.objective import Averages
from rlvr.monitor.batch import batch_metrics, prompt_text, sample_rows
from rlvr.monitor.metrics import FAMILIES, METRICS, record
from rlvr.monitor.phases import KNOWN
from rlvr.records import Batch, StopReason, VerdictStatus

PUBLIC = """step, reward/mean, reward/std, loss/policy, loss/total, grad_norm, lr, kl/ref, entropy, ratio/mean,
ratio/clipped_low, ratio/clipped_high, mismatch/mean, mismatch/max, completion/length_mean, completion/truncated,
group/all_correct, group/all_wrong, group/mixed, tokens/trained, tokens/sampled, time/rollout, time/verify, time/score,
time/update, time/publish, time/step, time/unaccounted, policy/version, policy/staleness_max"""


def test_public_keys_are_registered():
    expected = {*re.split(r",\s+", PUBLIC), *(f"verdict/{s}" for s in VerdictStatus), *(f"time/{p}" for p in KNOWN)}
    assert expected <= set(METRICS)


def test_every_metric_is_described():
    for metric in [*METRICS.values(), *FAMILIES.values()]:
        assert metric.unit
        assert metric.description.endswith(".")
        assert metric.healthy


def test_a_record_always_has_every_key_and_is_json():
    row = record({"step": np.int64(3), "reward/mean": np.float32(0.5), "run/stage": "grpo", "grad_norm": math.inf})
    assert list(row) == list(METRICS)
    assert (row["step"], row["reward/mean"], row["run/stage"]) == (3, 0.5, "grpo")
    assert row["grad_norm"] is None
    assert row["loss/policy"] is None
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, -math.inf, np.float64("nan"), np.float32("inf"), np.asarray(np.nan), None])
def test_what_is_not_finite_is_null(value):
    assert record({"loss/total": value})["loss/total"] is None


def test_families_are_free_and_come_last():
    row = record({"eval/gsm8k/pass@1": 0.25, "step": 1, "reward/format": 1.0, "schedule/clip": 0.2, "loss/value": 0.1})
    assert list(row)[len(METRICS) :] == ["eval/gsm8k/pass@1", "reward/format", "schedule/clip", "loss/value"]


def test_unknown_keys_and_values_are_refused():
    with pytest.raises(KeyError, match="did you mean 'grad_norm'"):
        record({"grad_nrom": 1.0})
    with pytest.raises(TypeError, match=r"lr.*list"):
        record({"lr": [1.0]})


def test_averages_are_weighted_and_do_not_depend_on_the_cut():
    whole, first, second = Averages(), Averages(), Averages()
    whole.add("entropy", 2.0 + 3.0 + 7.0, 3)
    first.add("entropy", 2.0, 1)
    second.add("entropy", 3.0 + 7.0, 2)
    first.update(second.pairs())
    assert first.means() == whole.means() == {"entropy": 4.0}


def test_averages_keep_maxima():
    averages = Averages()
    for value in (-3.0, -1.0, -2.0):
        averages.add("ratio/max", value)
        averages.add("completion/length_max", value)
    averages.add("ratio/max", 99.0, 0)
    assert averages.means() == {"ratio/max": -1.0, "completion/length_max": -1.0}
    averages.add("ratio/max", math.nan)
    averages.add("ratio/max", 5.0)
    assert math.isnan(averages.means()["ratio/max"] or 0.0)


def test_averages_of_nothing_are_none():
    averages = Averages()
    averages.add("kl/ref", 0.0, 0)
    averages.add("mismatch/max", 0.0, 0)
    assert averages.means() == {"kl/ref": None, "mismatch/max": None}
    with pytest.raises(ValueError, match="negative"):
        averages.add("kl/ref", 0.0, -1)


def test_batch_metrics_by_hand(rollout):
    scores = {"a": [1.0, 1.0], "b": [0.0, 0.0, None], "c": [1.0, 0.0, 0.5], "d": [None, None]}
    rollouts = [rollout(group, i, score) for group, members in scores.items() for i, score in enumerate(members)]
    rollouts[0].stop = StopReason.LENGTH
    rollouts[1] = rollout("a", 1, 1.0, tokens=14)
    batch = Batch(rollouts)
    batch.columns["reward"] = np.asarray([1, 1, 0, 0, np.nan, 1, 0, 0.5, np.nan, np.nan])
    batch.columns["reward/format"] = np.asarray([1.0, 0.0] * 5)
    batch.columns["reward/judge"] = np.full(10, np.nan)
    batch.columns["advantage"] = np.asarray([1.0, -1.0] * 5)
    got = batch_metrics(batch)
    assert got["reward/mean"] == pytest.approx(3.5 / 7)
    assert got["reward/std"] == pytest.approx(math.sqrt((3 * 0.25 + 3 * 0.25 + 0) / 7))
    assert got["reward/format"] == 0.5
    assert got["reward/judge"] is None
    assert (got["advantage/mean"], got["advantage/std"]) == (0.0, 1.0)
    assert got["group/count"] == 4
    shares = [got[f"group/{kind}"] for kind in ("all_correct", "all_wrong", "mixed", "undecided", "zero_variance")]
    assert shares == [0.25, 0.25, 0.25, 0.25, 0.5]
    assert (got["verdict/correct"], got["verdict/wrong"], got["verdict/partial"]) == (0.3, 0.3, 0.1)
    assert (got["verdict/error"], got["verdict/timeout"]) == (0.3, 0.0)
    assert (got["completion/length_max"], got["completion/length_min"], got["completion/length_mean"]) == (14, 4, 5.0)
    assert (got["completion/truncated"], got["tokens/sampled"]) == (0.1, 50)
    record(got)


def test_all_undecided_is_none_not_zero(rollout):
    batch = Batch([rollout("a", i, None) for i in range(3)], {"reward": np.full(3, np.nan)})
    got = batch_metrics(batch)
    assert got["reward/mean"] is None
    assert got["reward/std"] is None
    assert (got["group/undecided"], got["group/all_wrong"], got["group/zero_variance"]) == (1.0, 0.0, 0.0)


def test_empty_batch():
    got = batch_metrics(Batch([]))
    counts = {"group/count": 0, "tokens/sampled": 0}
    assert {name: value for name, value in got.items() if value is not None} == counts
    assert record(got)["completion/length_max"] is None


def test_without_verdicts_shares_are_not_computed(rollout):
    got = batch_metrics(Batch([rollout(score="none")]))
    assert got["verdict/correct"] is None
    assert got["group/undecided"] is None
    assert got["group/zero_variance"] is None


def test_advantages_per_token_count_sampled_tokens_only(rollout):
    batch = Batch([rollout(tokens=2), rollout(tokens=1)])
    batch.token_columns["advantage"] = [np.asarray([9, 9, 9, 1.0, 2.0]), np.asarray([9, 9, 9, 6.0])]
    assert batch_metrics(batch)["advantage/mean"] == 3.0


def test_permuting_rollouts_changes_nothing(rollout):
    rollouts = [rollout(f"g{i % 3}", i, [1.0, 0.0, None, 0.5][i % 4], tokens=i) for i in range(11)]
    batch = Batch(rollouts, {"reward": np.arange(11.0) / 10})
    shuffled = batch.select(np.random.default_rng(0).permutation(11))
    assert batch_metrics(shuffled) == pytest.approx(batch_metrics(batch))


def test_sample_rows_keep_groups_together(rollout):
    rollouts = [rollout("a", 0), rollout("b", 0, None), rollout("a", 1, 0.0)]
    rows = sample_rows(Batch(rollouts, {"reward": np.asarray([1.0, np.nan, 0.0])}), limit=3)
    assert [(row["task"], row["reward"]) for row in rows] == [("task-a", 1.0), ("task-a", 0.0), ("task-b", None)]
    assert rows[2]["status"] == "error"
    assert len(sample_rows(Batch(rollouts), limit=1)) == 1
    assert sample_rows(Batch([rollout(score="none")]))[0]["status"] is None


def test_chat_prompts_are_text():
    assert prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user"}]) == "system: Be brief.\nuser: "


def test_the_registry_is_ground_floor():
    import rlvr.monitor.metrics as module

    imports = re.findall(r"^(?:from|import) (rlvr\S*)", Path(module.__file__).read_text(), re.MULTILINE)
    assert imports == ["rlvr.errors"]
