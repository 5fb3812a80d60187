"""Advantages in the real trainer: baselines that the plan adds, history, modifiers, spans, statistics, memory,
refusals."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr import Task, Verdict, Verifier
from rlvr.errors import ConfigError
from rlvr.records import StopReason
from rlvr.rollout.characters import char_ends
from small_run import changed, task_rows, timeless, weights


def by(advantage, modifiers=(), plan="single_turn", **sections):
    rollout = {"plan": plan, **sections.pop("rollout", {})}
    return {"algorithm": {"advantage": advantage, "modifiers": list(modifiers)}, "rollout": rollout, **sections}


def trained(trainer, steps=2):
    before = weights(trainer)
    trainer.train(steps)
    assert all(row["grad_norm"] > 0 and not row["skipped/nonfinite"] for row in trainer.metrics)
    return changed(before, weights(trainer))


def test_the_greedy_response_is_the_baseline_and_does_not_train(make_trainer):
    over = by(
        {"name": "group", "baseline": "greedy", "scale": "none"}, plan={"name": "single_turn", "baseline": "greedy"}
    )
    trainer = make_trainer(over | {"rollout": over["rollout"] | {"group_size": 1, "prompts_per_step": 5}})
    greedy = {}
    collect = trainer.stages[0].collect

    def spied(step):
        collected = collect(step)
        greedy.update({r.group: r for r in collected.rollouts if r.role == "baseline"})
        return collected

    trainer.stages[0].collect = spied
    assert trained(trainer)
    assert len(greedy) == 10
    batch = trainer.batch
    assert len(batch) == 5
    assert all(r.role == "policy" for r in batch.rollouts)
    want = [r.verdict.score - greedy[r.group].verdict.score for r in batch.rollouts]
    np.testing.assert_allclose(batch.columns["advantage"], want)
    assert all(trainer.rollouts.history[f"t{n}"].attempts <= 2 for n in range(6)), "the greedy response is no attempt"
    assert all(r.temperature == 1.0 for r in batch.rollouts)


def test_the_reference_answer_is_the_baseline(make_trainer):
    over = by(
        {"name": "group", "baseline": "reference", "scale": "none"},
        plan={"name": "single_turn", "baseline": "reference"},
    )
    trainer = make_trainer(over)
    assert trained(trainer)
    evens = {f"t{n}": float(n % 2 == 0) for n in range(6)}  # the demonstration of task n is the digit n twice
    for rollout, baseline in zip(trainer.batch.rollouts, trainer.batch.columns["baseline"], strict=True):
        assert baseline == evens[rollout.task.id]


def test_the_history_of_a_prompt_is_the_baseline(make_trainer):
    over = by({"name": "group", "baseline": "history", "scale": "none"}, data={"limit": 2})
    trainer = make_trainer(over)
    assert trained(trainer, 1)
    assert np.isnan(trainer.batch.columns["history/mean"]).all()
    seen = {task: trainer.rollouts.history[task].pass_rate for task in ("t0", "t1")}
    trainer.train(1)
    batch = trainer.batch
    want = [r.verdict.score - seen[r.task.id] for r in batch.rollouts]
    np.testing.assert_allclose(batch.columns["advantage"], want)


def test_a_chain_of_modifiers_trains_and_its_schedules_are_logged(make_trainer):
    weight = {"schedule": "linear", "start": 0.0, "end": 1.0}
    baseline = {"at": {0: 0.25, 1: 0.75}}
    chain = ["whiten", {"name": "signs", "positive": weight}, {"name": "surprise", "power": 0.5}, "entropy", "clip"]
    trainer = make_trainer(by({"name": "group", "baseline": baseline, "scale": "none"}, chain))
    assert trained(trainer, 3)
    assert [row["schedule/signs.positive"] for row in trainer.metrics] == pytest.approx([0, 1 / 3, 2 / 3])
    assert [row["schedule/group.baseline"] for row in trainer.metrics] == [0.25, 0.75, 0.75]
    assert isinstance(trainer.batch.token_columns["advantage"], list)


def test_a_schedule_reaches_the_estimator_and_a_baseline_changes_nothing_in_what_is_sampled(make_trainer):
    advantage = {"name": "group", "baseline": {"at": {0: 0.25, 1: 0.75}}, "scale": "none"}
    plain = make_trainer(by(advantage))
    compared = make_trainer(by(advantage, plan={"name": "single_turn", "baseline": "greedy"}), "compared")
    for value in (0.25, 0.75):
        plain.train(1)
        columns = plain.batch.columns
        np.testing.assert_allclose(columns["advantage"], columns["reward"] - value)
    compared.train(2)
    assert timeless(plain.metrics) == timeless(compared.metrics)


def test_statistics_are_those_of_the_update_that_follows(make_trainer):
    trainer = make_trainer(by("group", ["entropy"], optim={"micro_batch_size": 3}))
    trainer.train(1)
    columns = trainer.batch.token_columns["entropy/current"]
    sampled = np.concatenate([c[r.sampled] for c, r in zip(columns, trainer.batch.rollouts, strict=True)])
    whole = np.concatenate(columns)
    assert np.isnan(whole).sum() == len(whole) - len(sampled)
    trained_tokens = [
        c[r.sampled]
        for c, r, a in zip(columns, trainer.batch.rollouts, trainer.batch.token_columns["advantage"], strict=True)
        if a.any()
    ]
    assert trainer.metrics[0]["entropy/trained"] == pytest.approx(np.concatenate(trained_tokens).mean(), rel=1e-4)


def test_a_memory_is_saved_and_taken_back(make_trainer):
    over = by({"name": "mvar", "track": 0.5, "bundle": 2}) | {"run": {"steps": 3}}
    whole, parts = make_trainer(over), make_trainer(over, "parts")
    whole.train()
    parts.train(2)
    saved = parts.stages[0].advantages.components.state_dict()
    assert saved[0]["quantiles"] is not None
    again = make_trainer(over, "parts")
    again.train(resume="auto")
    assert timeless(again.metrics) == timeless(whole.metrics)
    assert changed(weights(again), weights(whole)) == []
    assert again.stages[0].advantages.components.state_dict() == whole.stages[0].advantages.components.state_dict()


class Digits(Verifier):
    """Each character is a span; even digits score 1."""

    gives_spans = True

    def verify(self, task: Task, completion: str) -> Verdict:
        spans = tuple((i, i + 1, float(c in "02468")) for i, c in enumerate(completion))
        return Verdict(Verdict.from_score(0.5).status, 0.5, spans=spans)


def test_scores_of_spans_reach_their_tokens(make_trainer):
    advantage = {"name": "spans", "outcome": "none", "normalise": "none", "transform": ["delta"]}
    trainer = make_trainer(by(advantage), tasks=task_rows(3), verifier=Digits())
    assert trained(trainer)
    tokenizer = trainer.policy.tokenizer
    for rollout, values in zip(trainer.batch.rollouts, trainer.batch.token_columns["advantage"], strict=True):
        written = np.flatnonzero(rollout.sampled)
        texts = [tokenizer.decode([i], skip_special_tokens=True) for i in rollout.token_ids[written]]
        for place, text in zip(written, texts, strict=True):
            if text:  # delta: the return from a step on is that step's score
                assert values[place] == float(text in "02468")


class Plain(Digits):
    gives_spans = False


STEPS = {"name": "verdict_spans", "as": "steps"}
JUDGE = {"name": "judge", "urls": "http://127.0.0.1:9/v1", "model": "none"}


@pytest.mark.parametrize(
    "over",
    [
        {"algorithm": {"advantage": "spans"}},
        {"rewards": ["verdict", STEPS]},
        {"rewards": ["verdict", {"name": "gate", "as": "gated", "term": STEPS, "by": "verdict"}]},
        {"rewards": ["verdict", {**STEPS, "verifier": "plain"}], "verifiers": {"plain": JUDGE}},
        {"algorithm": {"advantage": "spans"}, "verifier": {"name": "combine", "parts": ["math", JUDGE]}},
    ],
    ids=["advantage", "term", "inner term", "named", "combination"],
)
def test_spans_of_a_verifier_that_gives_none_are_refused(make_trainer, over):
    verifier = {} if "verifier" in over else {"verifier": Plain()}
    says = r"reads scores of spans.*(plain|of the tasks) gives none.*gives_spans = True"
    with pytest.raises(ConfigError, match=says):
        make_trainer(over, tasks=task_rows(3), **verifier)


@pytest.mark.parametrize(
    "over",
    [
        {"algorithm": {"advantage": "spans"}},
        {
            "rewards": ["verdict", {**STEPS, "verifier": "turn 1"}],
            "rollout": {"plan": {"name": "turns", "judge": "each", "environment": "calculator"}},
        },
        {"rewards": ["verdict", {**STEPS, "verifier": "s"}], "verifiers": {"s": {**JUDGE, "name": "steps"}}},
        {
            "algorithm": {"advantage": "spans"},
            "verifier": {"name": "combine", "parts": ["math", {**JUDGE, "name": "steps"}]},
        },
    ],
    ids=["function", "verdict of a plan", "steps", "part of a combination"],
)
def test_spans_that_there_may_be_are_not_refused(make_trainer, over):
    def even(completion):
        return completion.endswith(tuple("02468"))

    verifier = {} if "verifier" in over else {"verifier": even}
    make_trainer(over, tasks=task_rows(3), **verifier)


def test_responses_without_spans_are_counted(make_trainer):
    """Of a function, which may give spans: here of every answer that is even."""

    def even(completion):
        score = float(completion.endswith(tuple("02468")))
        return Verdict(Verdict.from_score(score).status, score, spans=[(0, len(completion), 1.0)] if score else [])

    for over in (
        {"algorithm": {"advantage": "spans"}},
        {"rewards": ["verdict", STEPS], "algorithm": {"advantage": {"name": "spans", "terms": {"steps": 1.0}}}},
        {"rewards": ["verdict", STEPS]},
    ):
        trainer = make_trainer(over, f"run-{len(str(over))}", tasks=task_rows(3), verifier=even)
        (row,) = trainer.train(1)
        want = np.mean([not r.verdict.spans for r in trainer.batch.rollouts])
        assert 0 < row["span/missing"] == pytest.approx(want)
    trainer = make_trainer({}, "other", tasks=task_rows(3), verifier=even)
    assert trainer.train(1)[0]["span/missing"] is None


def test_characters_of_several_tokens():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    for text in ("aé😀b" * 20, "", "plain", "😀", "\n\n é\n"):
        ids = tokenizer(text)["input_ids"]
        rollout = _rollout(ids)
        ends = char_ends(tokenizer, rollout)
        assert ends[0] == -1
        want = [len(bytes(text.encode()[: n + 1]).decode(errors="ignore")) for n in range(len(text.encode()))]
        assert ends[1:].tolist() == want


def _rollout(ids):
    from rlvr.records import Origin, Rollout

    origin = np.asarray([Origin.PROMPT] + [Origin.POLICY] * len(ids), dtype=np.int8)
    nothing = np.zeros(len(origin))
    return Rollout(
        "0/0",
        Task("t", "?"),
        "0",
        0,
        np.asarray([0, *ids]),
        origin,
        nothing.astype(np.float32),
        nothing.astype(np.int32),
        StopReason.END,
    )


@pytest.mark.parametrize(
    ("over", "says"),
    [
        (by({"name": "group", "baseline": "greedy"}), "rollout.plan to {name: single_turn, baseline: greedy}"),
        (
            by({"name": "group", "baseline": "reference"}, plan={"name": "single_turn", "baseline": "greedy"}),
            "baseline: reference}",
        ),
        (by({"name": "group", "per_reward": {"lenght": 1.0}}, rewards=["verdict", "length"]), "did you mean 'length'"),
        (by({"name": "group", "baseline": "history"}, rewards=["verdict", "length"]), "set rewards to \\[verdict\\]"),
        (by({"name": "pass_at_k", "k": 8}), "rollout.group_size is 4.*'pass_at_k'.*to 8 or more"),
        (by("group", rollout={"group_size": 1}), "rollout.group_size is 1.*'group'.*to 2 or more"),
        (by("group", ["surprise", "noise"]), "'noise' needs one advantage per response, and 'surprise'"),
        (
            by("spans", [{"name": "whiten", "over": "responses"}]),
            "'whiten' needs one advantage per response, and 'spans'",
        ),
        (
            by({"name": "group", "baseline": 0.5, "scale": 0.5}, rollout={"group_size": 1, "dynamic_sampling": {}}),
            "rollout.dynamic_sampling replaces groups",
        ),
    ],
    ids=range(9),
)
def test_contradictions_are_refused_at_start(make_trainer, over, says):
    with pytest.raises(ConfigError, match=says):
        make_trainer(over)


def test_a_reference_needs_demonstrations(make_trainer):
    tasks = [*task_rows(3), {"id": "bare", "prompt": "9=?", "answer": "9"}]
    over = by({"name": "group", "baseline": "reference"}, plan={"name": "single_turn", "baseline": "reference"})
    with pytest.raises(ConfigError, match=r"1 of 4 tasks.*'bare'"):
        make_trainer(over, tasks=tasks)


def test_a_modifier_that_returns_nonsense_is_named(make_trainer, tmp_path):
    (tmp_path / "mine.py").write_text("def half(batch, advantage): return advantage[:1]\n")
    trainer = make_trainer(by("group", [f"{tmp_path}/mine.py:half"]))
    with pytest.raises(ConfigError, match=r"modifiers.*half' returned shapes"):
        trainer.train(1)
