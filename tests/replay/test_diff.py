"""`python -m rlvr.diff`: the first key, step, token and tensor in which two runs part, made to part on purpose."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from replay_helpers import files
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rlvr.diff.__main__ import main
from rlvr.diff.parting import differ
from rlvr.diff.tensors import CHUNK, _difference, _natural
from rlvr.monitor.metrics import METRICS
from small_run import lines


@pytest.fixture
def pair(run, tmp_path):
    """The folder of a run, and a copy of it."""
    first = run({"run": {"steps": 4}, "checkpoint": {"every": 2, "keep": 9}}, "first").folder.path
    second = tmp_path / "second"
    shutil.copytree(first, second)
    return first, second


def diff(capsys, *arguments):
    code = main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return code, out + err


def rewrite(path, change):
    rows = lines(path)
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_and_its_equal(run, again, capsys):
    first = run({"checkpoint": {"every": 1}}, "first")
    second = again(first, {"checkpoint": {"every": 1}})
    sampled = [row["entropy"] for row in first.metrics]
    # where nothing is sampled it is that of the policy that trains
    rewrite(
        second.folder.path / "metrics.jsonl",
        lambda rows: [row.update(entropy=value) for row, value in zip(rows, sampled, strict=True)],
    )
    code, text = diff(capsys, first.folder.path, second.folder.path)
    assert code == 0, text
    for what, count in (("rollouts", 3), ("metrics", 3), ("checkpoints", 2)):
        assert f"{what}: equal in all steps that both have ({count})" in text
    assert "rollout.engine: 'hf' -> " in text  # said, though nothing came of it
    assert "the runs are equal as far as both go" in text


def test_what_the_clock_says_is_no_difference(pair, capsys):
    clocked = [name for name, metric in METRICS.items() if metric.of_the_clock]
    assert {"time/step", "time/tokens_per_second", "rollout/ready"} <= set(clocked)
    assert not {"loss/total", "reward/mean", "tokens/sampled"} & set(clocked)
    rewrite(pair[1] / "metrics.jsonl", lambda rows: [row.update(dict.fromkeys(clocked, 1e9)) for row in rows])
    assert diff(capsys, *pair)[0] == 0


def test_the_first_token(pair, capsys):
    """A digit of the third step's second rollout is another one; the text round it is shown."""
    path = files(pair[1])[2]
    was = lines(path)[1]
    place = was["origin"].index(1) + 1

    def other(rows):
        rows[1]["token_ids"][place] = (rows[1]["token_ids"][place] + 1) % 8

    rewrite(path, other)
    code, text = diff(capsys, *pair)
    assert code == 1
    assert (
        f"step 3, line 2, group {was['group']}, member 1, task {was['task']['id']}: they part at token 1 of the "
        "completion" in text
    )
    tokenizer = AutoTokenizer.from_pretrained(pair[0] / "checkpoints/step-4/model")
    ids = was["token_ids"]
    before, after = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:place], ids[place:]))
    assert before.startswith(was["task"]["prompt"])
    assert f"  {before!r} | {after!r} (token {ids[place]})" in text
    assert "the runs part at step 3, first in their rollouts" in text
    shutil.rmtree(pair[0] / "checkpoints")  # without the tokenizer ids are shown
    assert f"| {was['token_ids'][place:]} of " in diff(capsys, *pair)[1]


def test_what_is_made_of_equal_tokens(pair, capsys):
    """A log-prob at step 2, a completion that goes on at step 4: both are said."""

    def nudge(rows):
        rows[0]["behaviour_logprobs"][-1] -= 1e-4

    def longer(rows):
        for name, value in (("token_ids", 3), ("origin", 1), ("behaviour_logprobs", -1.0), ("policy_version", 3)):
            rows[7][name].append(value)

    rewrite(files(pair[1])[1], nudge)
    rewrite(files(pair[1])[3], longer)
    code, text = diff(capsys, *pair)
    assert code == 1
    assert "step 2, line 1" in text
    assert "another log-prob of token" in text
    assert "step 4, line 8" in text
    assert "the runs part at step 2" in text
    assert "step 2" not in diff(capsys, *pair, "--tolerance", "1e-3")[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row["verdicts"]["Evens"].update(score=0.125), "the verdict of Evens: "),
        (lambda row: row["columns"].update(reward=9.0), "reward: .* and 9"),
        (lambda row: row.update(stop="context"), "stopped by .* and by context"),
        (lambda row: row.update(use="left_out"), "trained and left_out"),
        (lambda row: row.update(group="77"), "the other run has group 77"),
    ],
    ids=["verdict", "column", "stop", "use", "group"],
)
def test_what_is_said_of_a_rollout(pair, capsys, change, said):
    rewrite(files(pair[1])[0], lambda rows: change(rows[3]))
    code, text = diff(capsys, *pair)
    assert code == 1
    assert re.search(f"step 1, line 4, .*{said}", text), text


def test_the_first_metric(pair, capsys):
    def change(rows):
        rows[2] |= {"entropy": rows[2]["entropy"] * (1 + 1e-7), "loss/total": None}

    rewrite(pair[1] / "metrics.jsonl", change)
    code, text = diff(capsys, *pair)
    assert code == 1
    row = lines(pair[0] / "metrics.jsonl")[2]
    assert "metrics: part at step 3" in text
    assert f"entropy: {row['entropy']!r} and " in text
    assert f"loss/total: {row['loss/total']!r} and None" in text
    text = diff(capsys, *pair, "--tolerance", "1e-6")[1]
    assert "entropy" not in text
    assert "loss/total" in text


def test_the_first_tensor(pair, capsys):
    path = pair[1] / "checkpoints" / "step-4" / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] += 0.5
    tensors[name][40, 1] -= 0.25
    save_file(tensors, path)
    code, text = diff(capsys, *pair)
    assert code == 1
    was = load_file(pair[0] / "checkpoints/step-4/model/model.safetensors")[name][3, 5].item()
    assert "checkpoints: part at step 4" in text
    assert f"model: {name}[3, 5]: {was:.9g} and {was + 0.5:.7g}"[:-2] in text
    assert f"(largest difference 0.5, 2 of {tensors[name].numel()} entries); 1 of {len(tensors)} tensors differ" in text
    assert diff(capsys, *pair, "--tolerance", "0.6")[0] == 0


def test_an_optimizer_that_differs(pair, capsys):
    path = next((pair[1] / "checkpoints" / "step-2").glob("tensors-*.safetensors"))
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name] + 1}, path)
    code, text = diff(capsys, *pair)
    assert code == 1
    assert "checkpoints: part at step 2" in text
    assert f"tensors: {name}" in text


def test_a_run_that_is_shorter_and_files_that_are_cut(pair, capsys):
    metrics, rollouts = pair[1] / "metrics.jsonl", files(pair[1])[3]
    metrics.write_text("".join(line + "\n" for line in metrics.read_text().split("\n")[:2]) + '{"step": 3, "rew')
    rollouts.unlink()
    shutil.rmtree(pair[1] / "checkpoints" / "step-4")
    code, text = diff(capsys, *pair)
    assert code == 0
    assert f"{metrics}, line 3 is cut; the file is used up to there" in text
    assert "rollouts: equal in all steps that both have (3)" in text
    assert "metrics: equal in all steps that both have (2)" in text
    assert "checkpoints: equal in all steps that both have (1)" in text


def test_a_folder_of_an_older_version(pair, capsys):
    """Fewer metrics, lines of rollouts without their use, a torn checkpoint."""
    rewrite(pair[1] / "metrics.jsonl", lambda rows: [row.pop("grad_norm") for row in rows])
    rewrite(files(pair[1])[0], lambda rows: [(row.pop("use"), row.pop("scored", None)) for row in rows])
    (pair[1] / "checkpoints/step-2/model/model.safetensors").write_bytes(b"torn")
    code, text = diff(capsys, *pair)
    assert code == 0
    assert "1 metrics are in" in text
    assert "grad_norm" in text
    assert "it is not compared" in text


def test_nothing_in_common(pair, tmp_path, capsys):
    code, text = diff(capsys, pair[0], tmp_path / "nowhere")
    assert (code, "there is no run folder" in text) == (2, True)
    (tmp_path / "empty").mkdir()
    code, text = diff(capsys, pair[0], tmp_path / "empty")
    assert code == 2
    assert "have no finished step in common" in text
    assert "holds no recorded rollouts" in text
    assert diff(capsys, *pair, "--tolerance", "-1")[0] == 2


def test_tensors_larger_than_a_chunk_and_odd_ones():
    a = torch.zeros(2, CHUNK)
    b = a.clone()
    b[1, 7], b[1, 9] = 2.0, float("nan")
    assert _difference(a, b, 0.0) == f"[1, 7]: 0 and 2 (largest difference inf, 2 of {2 * CHUNK} entries)"
    assert (
        _difference(torch.tensor(1.0), torch.tensor(2.0), 0.0) == "[]: 1 and 2 (largest difference 1, 1 of 1 entries)"
    )
    nan = torch.tensor([float("nan"), float("inf"), -0.0])
    assert _difference(nan, torch.tensor([float("nan"), float("inf"), 0.0]), 0.0) is None
    assert "inf" in _difference(torch.tensor([float("inf")]), torch.tensor([-float("inf")]), 1e-3)
    assert _difference(torch.zeros(2), torch.zeros(3), 0.0) == " is torch.float32 [2] and torch.float32 [3]"
    assert _difference(torch.zeros(0), torch.zeros(0), 0.0) is None
    assert _difference(torch.tensor([3], dtype=torch.int64), torch.tensor([4]), 0.0) is not None
    assert sorted(["layers.10.w", "layers.2.w", "embed"], key=_natural) == ["embed", "layers.2.w", "layers.10.w"]


def test_numbers():
    assert not differ(np.nan, np.nan, 0.0)
    assert differ(np.nan, 1.0, 9.0)
    assert differ(np.inf, -np.inf, 1e-3)
    assert differ(1.0, np.nextafter(1.0, 2.0), 0.0)
    assert not differ(1e6, 1e6 + 1, 1e-6)
    assert differ(0.0, 1.1e-6, 1e-6)
