"""`python -m rlvr.replay`: what another verifier or other rewards would have changed."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from replay_helpers import files

from rlvr.records import Batch, Rollout, StopReason, Task, Verdict, VerdictStatus
from rlvr.replay.__main__ import main
from rlvr.replay.rescore import FLIPS, Replay, ScoreChange, change, flip
from small_run import lines


@pytest.fixture
def recorded(run, pieces):
    """The folder of a run whose verifier leaves some verdicts undecided."""
    over = {"verifier": f"{pieces}:starts_even", "rewards": ["verdict", {"name": f"{pieces}:longer", "weight": 0.5}]}
    return run(over, "first").folder.path


def replay(capsys, *arguments):
    code = main(list(map(str, arguments)))
    return code, *capsys.readouterr()


def test_another_verifier(recorded, pieces, tmp_path, capsys):
    """Against scores computed here from the recorded texts."""
    out = tmp_path / "out" / "again.jsonl"
    before = {path: path.read_bytes() for path in files(recorded)}
    code, text, _ = replay(
        capsys, recorded, "--rescore", f"verifier={pieces}:starts_odd", "--output", out, "--examples", 3
    )
    assert code == 0
    rows, written = [row for path in files(recorded) for row in lines(path)], lines(out)
    assert [row["id"] for row in rows] == [row["id"] for row in written]
    counts = dict.fromkeys(FLIPS, 0)
    for row, now in zip(rows, written, strict=True):
        first = row["text"][:1]
        then, odd = (float(first in tuple("02468")) if first else None), float(first in tuple("13579"))
        assert [v["score"] for v in now["before"]["verdicts"].values()] == [then]
        assert [v["score"] for v in now["after"]["verdicts"].values()] == [odd]
        longer = (len(row["token_ids"]) - row["origin"].count(0)) / 6
        assert now["after"]["columns"]["reward"] == pytest.approx(odd + 0.5 * longer)
        assert now["before"]["columns"]["reward"] == (None if then is None else pytest.approx(then + 0.5 * longer))
        if then is None:
            counts["undecided ->"] += 1
        elif then != odd:
            counts["right -> wrong" if then else "wrong -> right"] += 1
    assert sum(counts.values()) > 3
    # Shares are written as `31.2 %`; columns are two spaces apart.
    table = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    whole = next(cells for cells in table if cells[:1] == ["all"])
    assert whole[1] == str(len(rows))
    shares = [float(cell.removesuffix(" %")) / 100 for cell in whole[4:9]]
    assert shares == pytest.approx([counts[k] / len(rows) for k in FLIPS], abs=1e-3)
    mean = np.mean([row["after"]["columns"]["reward"] for row in written])
    assert float(whole[3]) == pytest.approx(mean, abs=1e-3)
    assert text.count("completion: ") == 3
    assert {path: path.read_bytes() for path in files(recorded)} == before


def test_the_run_s_own_verifier_changes_nothing(recorded, capsys):
    code, text, _ = replay(capsys, recorded)
    assert code == 0
    whole = next(line.split() for line in text.splitlines() if line.startswith("all"))
    assert whole[2] == whole[3]
    assert whole[4:9] == ["0"] * 5
    assert whole[-2:] == ["1", "0"]
    assert "completion:" not in text


def test_only_rewards_change(recorded, pieces, capsys):
    """Verdicts stay as they were recorded: the verifier is not asked, though it would say something else."""
    pieces.write_text(
        pieces.read_text().replace("def starts_even(completion):", "def starts_even(completion):\n    return 1.0")
    )
    code, text, _ = replay(capsys, recorded, "--rescore", "rewards=[verdict]", "--steps", "2:2")
    assert code == 0
    assert "verdicts as recorded" in text
    rows = lines(files(recorded)[1])
    scores = [v["score"] for row in rows for v in row["verdicts"].values() if v["score"] is not None]
    cells = next(line.split() for line in text.splitlines() if line.startswith("2 "))
    assert float(cells[3]) == pytest.approx(np.mean(scores), abs=1e-3)
    assert cells[4:9] == ["0"] * 5


def test_a_verifier_that_judges_groups_and_a_baseline(run, pieces, capsys, tmp_path):
    over = {
        "rollout": {"plan": {"name": "single_turn", "baseline": "greedy"}},
        "algorithm": {"advantage": {"name": "group", "baseline": "greedy", "scale": "none"}},
    }
    folder = run(over, "first").folder.path
    code, text, _ = replay(capsys, folder, "--examples", 0)
    assert code == 0
    assert (
        next(line.split() for line in text.splitlines() if line.startswith("all"))[1] == "24"
    )  # without the baselines
    assert "warning" not in text


def test_what_cannot_be_scored_is_said(recorded, run, tmp_path, capsys, pieces):
    for arguments, output in (
        ((tmp_path / "nowhere",), "no run folder"),
        ((__file__,), "is a file, not a run folder"),
        ((recorded, "--rescore", "optim.lr=3"), "only verifier, verifiers, rewards"),
        ((recorded, "--rescore", "verifier.foo=3"), "no option 'foo'"),
        ((recorded, "--rescore", "rewards=[verdict, self_certainty]"), "needs a forward pass of the policy"),
        ((recorded, "--steps", "9:"), "none of these steps .* there are 1-3"),
        ((recorded, "--steps", "one"), "steps are written A:B"),
        ((recorded, "--output", recorded / "rollouts" / "x.jsonl"), "among the recorded rollouts"),
        ((recorded, "--rescore", "verifier=countdown"), "this verifier can check no task of the first step: t"),
    ):
        code, _, err = replay(capsys, *arguments)
        assert code == 2
        assert re.search(output, err), err
    sft = run({"stages": [{"kind": "sft", "steps": 2}]}, "sft").folder.path
    code, _, err = replay(capsys, sft)
    assert (code, "have no verdicts" in err) == (2, True)
    silent = run({"logging": {"rollouts": 0}}, "silent").folder.path
    code, _, err = replay(capsys, silent)
    assert (code, "holds no recorded rollouts" in err) == (2, True)


def test_a_cut_file_and_a_folder_of_another_version(recorded, capsys):
    path = files(recorded)[2]
    path.write_bytes(path.read_bytes()[:-50])
    for other in files(recorded)[:2]:
        rows = [{k: v for k, v in row.items() if k not in ("use", "scored", "tokens")} for row in lines(other)]
        other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = recorded / "config.yaml"
    config.write_text("gone: true\n" + config.read_text())
    code, text, _ = replay(capsys, recorded)
    assert code == 0
    assert next(line.split() for line in text.splitlines() if line.startswith("all"))[1] == "23"
    assert f"{path}, line 8: not a rollout (it is cut); the file is used up to there" in text
    assert "is of another version" in text
    config.unlink()
    code, text, err = replay(capsys, recorded, "--rescore", "verifier=exact")
    assert code == 0 and err.endswith(f"reading the rollouts of {recorded}\n") and err.count("\n") == 1
    assert "the defaults are used" in text


def batch(scores, rewards, groups):
    """Rollouts with these scores (None: undecided), rewards and groups."""
    rollouts = []
    for number, (score, group) in enumerate(zip(scores, groups, strict=True)):
        verdict = Verdict.undecided("?") if score is None else Verdict.from_score(score)
        one = np.ones(1, np.int64)
        rollouts.append(
            Rollout(str(number), Task("t", "p"), group, number, one, one, one.astype(np.float32), one, StopReason.END)
        )
        rollouts[-1].verdicts["v"] = verdict
    return Batch(rollouts, {"reward": np.asarray(rewards, dtype=np.float64)})


def test_counts_by_hand():
    before = batch([1, 0, None, 0.5, 1, 1], [1, 0, np.nan, 0.5, 2, 2], "aaabbb")
    after = batch([0, 1, 0, 0.25, None, 1], [0, 1, 0, 0.5, np.nan, 0.5], "aaabbb")
    a, b = np.asarray([1.0, -1.0, 0.5, 2.0]), np.asarray([-1.0, 1.0, 0.5, 1.0])
    result = change(before, after, (a, b))
    assert dict(zip(FLIPS, result.flips.tolist(), strict=True)) == {
        "right -> wrong": 1, "wrong -> right": 1, "-> undecided": 1, "undecided ->": 1, "other score": 1,
    }  # fmt: skip
    assert result.mean_rewards == pytest.approx([5.5 / 5, 2 / 5])
    assert (result.groups, result.same.tolist()) == (2, [0, 1])
    assert (result.compared, result.opposed) == (4, 2)
    assert result.correlation == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert change(before, before, (a, a)).flips.sum() == 0


def test_steps_add_up():
    random, parts, total = np.random.default_rng(0), [], []
    for _ in range(5):
        scores = random.integers(0, 2, 8).astype(float)
        a, b = random.normal(size=8), random.normal(size=8)
        total.append((a, b))
        one = batch(scores, scores, "aaaabbbb")
        parts.append(change(one, batch(1 - scores, 1 - scores, "aaaabbbb"), (a, b)))
    whole = sum(parts, ScoreChange())
    a, b = (np.concatenate(side) for side in zip(*total, strict=True))
    assert whole.correlation == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert (whole.rollouts, whole.flips.sum(), whole.groups) == (40, 40, 10)
    assert whole.opposed == (np.sign(a) != np.sign(b)).sum()
    assert ScoreChange().mean_rewards == [None, None]


@pytest.mark.parametrize("then", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("now", [None, 0.0, 0.5, 1.0])
def test_a_flip_back_is_the_other_flip(then, now):
    verdicts = [Verdict(VerdictStatus.PARTIAL, score) for score in (then, now)]
    back = {
        "right -> wrong": "wrong -> right",
        "-> undecided": "undecided ->",
        "other score": "other score",
        None: None,
    }
    back |= {value: key for key, value in back.items()}
    assert flip(*reversed(verdicts)) == back[flip(*verdicts)]


def test_one_step_is_in_memory_at_a_time(recorded, monkeypatch):
    """The next file is not read before the step before it was taken."""
    import asyncio

    from rlvr.replay import rescore

    read, real = [], rescore.read_recorded
    monkeypatch.setattr(
        rescore, "read_recorded", lambda path, notes=None: (read.append(path.name), real(path, notes))[1]
    )

    async def go():
        seen = []
        async for one in Replay(recorded, []).steps():
            seen.append((one.step, len(read)))
        return seen

    assert asyncio.run(go()) == [(1, 1), (2, 2), (3, 3)]
