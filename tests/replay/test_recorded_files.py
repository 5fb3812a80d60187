"""What is written comes back bit for bit, and what cannot be read is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.errors import DataError
from rlvr.monitor.recording import read_recorded, read_rollouts, recorded_steps
from rlvr.monitor.rollout_log import RolloutLog
from rlvr.records import Batch, Rollout, Segment, StopReason, Task, Verdict, VerdictStatus
from small_run import lines

TEXTS = ["", "plain", "é😀\u2028\u2029\x00\x7f", "half \ud800 pair", '"\\\n\r\t', "x" * 2000]
VALUES = [None, 3, 10**30, -(2**70), 0.1, "text", [1, [2.5]], {"a": {"b": None}}, True]


def arbitrary(random: np.random.Generator, group: int, member: int) -> Rollout:
    """A rollout whose every field is drawn."""
    length, prompt = int(random.integers(1, 12)), int(random.integers(0, 3))
    length += prompt

    def pick(values):
        return values[int(random.integers(len(values)))]

    # At most e^80: above e^88.7 a float32 is infinite, and no token that was sampled has such a log-prob.
    logprobs = -np.exp(np.minimum(random.normal(0, 20, length), 80)).astype(np.float32)
    logprobs[random.random(length) < 0.3] = np.nan
    text = pick(TEXTS)
    verdict = Verdict(
        pick(list(VerdictStatus)),
        pick([None, 0.0, 1.0, 1 / 3]),
        pick(TEXTS),
        pick([None, *TEXTS]),
        {"a": 0.1},
        ((0, 1, 0.7),),
    )
    return Rollout(
        id=f"{group}/{member}",
        task=Task(f"t{group}", pick([text, [{"role": "user", "content": text}]]), pick(VALUES),
                  pick([None, text]), "math", {"x": pick(VALUES)}),
        group=str(group),
        member=member,
        token_ids=random.integers(0, 2**40, length),
        origin=np.asarray([0] * prompt + random.choice([1, 2, 3, 5], length - prompt).tolist(), dtype=np.int8),
        behaviour_logprobs=logprobs,
        policy_version=random.integers(-1, 2**31 - 1, length).astype(np.int32),
        stop=pick(list(StopReason)),
        text=text,
        temperature=float(np.exp(random.normal())),
        role=pick(["policy", "judge"]),
        segments=pick([[], [Segment("turn", prompt, length)]]),
        char_ends=pick([None, random.integers(-1, 9, length)]),
        verdicts=pick([{}, {"math": verdict}]),
        timings={"generate": float(random.random())},
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_rollout_comes_back_bit_for_bit(seed, tmp_path_factory):
    random = np.random.default_rng(seed)
    rollouts = [arbitrary(random, group, member) for group in range(2) for member in range(2)]
    columns = {"reward": random.normal(size=4), "reward/a": np.exp(random.normal(0, 99, 4))}
    columns["reward"][random.random(4) < 0.3] = np.nan
    kept = Batch(rollouts[:3], {"reward": columns["reward"][:3] - 0.25, "advantage": random.normal(size=3)})
    path = RolloutLog(tmp_path_factory.mktemp("log")).write(1, kept, rollouts[:3], rollouts[3:], columns)
    read = list(read_recorded(path))
    assert [row.use for row in read] == ["trained"] * 3 + ["dropped"]
    for row, rollout in zip(read, rollouts, strict=True):
        assert row.rollout.to_json() == rollout.to_json()
        for name in ("token_ids", "origin", "behaviour_logprobs", "policy_version"):
            now, then = getattr(row.rollout, name), getattr(rollout, name)
            assert (now.dtype, now.tobytes()) == (then.dtype, then.tobytes())
    for name, values in columns.items():
        np.testing.assert_array_equal([row.scored[name] for row in read], values)
    np.testing.assert_array_equal([row.columns["reward"] for row in read[:3]], kept.columns["reward"])
    np.testing.assert_array_equal([row.columns["advantage"] for row in read[:3]], kept.columns["advantage"])


def test_a_million_log_probs_come_back(tmp_path):
    """The shortest text of a float32 is read as a double first."""
    random = np.random.default_rng(0)
    logprobs = random.integers(0, 0x7F800000, 1_000_000, dtype=np.uint32).view(np.float32) * np.float32(-1)
    count = len(logprobs)
    rollout = Rollout(
        "0/0", Task("t", "p"), "0", 0, np.ones(count, np.int64), np.ones(count, np.int8), logprobs,
        np.zeros(count, np.int32), StopReason.END
    )  # fmt: skip
    path = RolloutLog(tmp_path).write(1, Batch([rollout]))
    (read,) = read_rollouts(path)[0]
    assert read.behaviour_logprobs.tobytes() == logprobs.tobytes()


def test_what_was_computed_of_tokens_is_of_the_sampled_ones(run):
    trainer = run({"algorithm": {"modifiers": []}})
    row = lines(trainer.folder.path / "rollouts/step-000003.jsonl")[1]
    assert len(row["tokens"]["log_ratio"]) == sum(origin == 1 for origin in row["origin"])
    assert max(map(abs, row["tokens"]["log_ratio"])) < 1e-3  # the engine has the trainer's own weights


def test_reading_up_to_a_line_that_is_none(run):
    path = run().folder.path / "rollouts/step-000002.jsonl"
    text = path.read_text().split("\n")
    path.write_text("\n".join([*text[:5], "{", *text[6:]]))
    with pytest.raises(DataError, match=rf"{path}, line 6: not a rollout"):
        list(read_recorded(path))
    notes = []
    assert [row.line for row in read_recorded(path, notes)] == [1, 2, 3, 4, 5]
    (note,) = notes
    assert note.startswith(f"{path}, line 6: not a rollout (JSONDecodeError: ")
    assert note.endswith("; the file is used up to there")
    path.write_text(text[0] + "\n" + text[1][:100])
    notes = []
    assert len(list(read_recorded(path, notes))) == 1
    assert notes == [f"{path}, line 2: not a rollout (it is cut); the file is used up to there"]


def test_steps_are_in_order_of_numbers(tmp_path):
    for step in (10, 2, 1_000_000):
        RolloutLog(tmp_path).write(step, Batch([]))
    (tmp_path / "rollouts" / "step-x.jsonl").write_text("")
    assert list(recorded_steps(tmp_path)) == [2, 10, 1_000_000]
