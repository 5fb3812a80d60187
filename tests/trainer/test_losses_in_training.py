"""Losses, KL forms, auxiliary terms and token selection through the real trainer; what contradicts itself is
refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from rlvr import registry
from rlvr.errors import ConfigError, DataError
from rlvr.policy import Snapshot
from rlvr.records import Origin
from rlvr.run import policy_training
from small_run import beside, changed, overlaid, task_rows, timeless, weights


def algorithm(**options):
    return {"algorithm": options}


def trained(make_trainer, over, name="run", steps=2, **more):
    trainer = make_trainer(over, name, **more)
    before = weights(trainer)
    trainer.train(steps)
    assert changed(before, weights(trainer))
    for row in trainer.metrics:
        assert row["skipped/nonfinite"] == 0.0
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
    return trainer


@pytest.mark.slow  # tests/losses/test_whole_step_losses.py takes every loss through two optimizer steps of the learner
@pytest.mark.parametrize("name", [n for n in registry.names("loss") if n != "clip"])
def test_later_optimizer_steps_of_a_batch(make_trainer, name):
    """Where ratios differ from 1."""
    settings = algorithm(loss=name, **beside(name).get("algorithm", {}))
    trainer = trained(make_trainer, {**settings, "optim": {"epochs_per_batch": 2, "lr": 3e-2}}, steps=1)
    ratio = trainer.metrics[0]["ratio/mean"]
    if name not in ("reinforce", "weighted_likelihood", "pacs", "copg", "trajectory_balance"):
        assert ratio is not None and ratio != 1.0
    assert trainer.metrics[0]["loss/policy"] is not None


@pytest.mark.parametrize(
    "kl",
    [
        {"estimator": "k1", "gradient": "k2"},
        {"estimator": "k3", "weighted": True, "bound": 10.0},
        {"estimator": "k1", "where": "reward"},
        {"estimator": "k2", "where": "advantage"},
    ],
    ids=str,
)
def test_forms_of_the_kl_term(make_trainer, kl):
    trainer = trained(make_trainer, algorithm(kl={"coef": 0.5, **kl}), steps=2)
    assert trainer.metrics[0]["kl/ref"] == pytest.approx(0, abs=1e-5)
    assert abs(trainer.metrics[1]["kl/ref"]) > 1e-6
    in_reward = kl.get("where", "loss") != "loss"
    assert ("reward/kl" in trainer.metrics[0]) == in_reward
    assert ("loss/kl" in trainer.metrics[0]) == (not in_reward)


@pytest.mark.parametrize("where", ["loss", "reward", "advantage"])
def test_the_engine_gives_its_memory_back_before_any_pass_of_the_policy(make_trainer, monkeypatch, where):
    trainer = make_trainer(algorithm(kl={"coef": 0.5, "where": where}))
    seen = []
    in_place, publish, release = Snapshot.in_place, trainer.rollouts.engine.publish, trainer.rollouts.engine.release
    monkeypatch.setattr(Snapshot, "in_place", lambda self: seen.append("reference") or in_place(self))
    monkeypatch.setattr(trainer.rollouts.engine, "publish", lambda *given: seen.append("publish") or publish(*given))
    monkeypatch.setattr(trainer.rollouts.engine, "release", lambda: seen.append("release") or release())
    trainer.train(2)
    seen = [what for what, _ in itertools.groupby(seen)]
    assert seen == ["publish", *["release", "reference", "publish"] * 2]


def test_an_engine_beside_the_trainer_sleeps_while_a_stage_takes_its_memory(make_trainer, monkeypatch):
    """Its backend and its reference's snapshot; evaluations publish the version that the engine has."""
    stage = {"kind": "grpo", "steps": 1, "algorithm": {"kl": {"coef": 0.5}}}
    over = {
        "data": {"eval": {"name": "arithmetic", "count": 2}},
        "evaluation": {"samples": 1, "k": [1], "at_start": True},
    }
    trainer = make_trainer({**over, "stages": [stage, stage]})
    seen = []
    publish, release = trainer.rollouts.engine.publish, trainer.rollouts.engine.release
    made = type(trainer.training.backends)
    open_backend = made.open

    class Noted(Snapshot):
        def __init__(self, *given):
            seen.append("snapshot")
            super().__init__(*given)

    def publish_noted(version, weights):
        seen.append(version)
        return publish(version, weights)

    monkeypatch.setattr(policy_training, "Snapshot", Noted)
    monkeypatch.setattr(made, "open", lambda *given: seen.append("backend") or open_backend(*given))
    monkeypatch.setattr(trainer.rollouts.engine, "publish", publish_noted)
    monkeypatch.setattr(trainer.rollouts.engine, "release", lambda: seen.append("release") or release())
    trainer.train()
    # at the start, before the stage; after its step, the evaluation of its end, the next stage
    assert seen == [0, 0, "release", 1, 1, "release", "backend", "snapshot", 1, "release", 2, 2]


def test_the_penalty_is_what_a_response_earns_less(make_trainer):
    """In the reward: its sum before the baseline. In the advantage: from each token on, before the modifiers."""
    batches = {}
    for where in ("reward", "advantage"):
        kl = {"estimator": "k1", "coef": 0.5, "where": where}
        over = algorithm(kl=kl, advantage={"name": "group", "baseline": "mean", "scale": "none"})
        batches[where] = trained(make_trainer, over, where, steps=2).batch
        batch = batches[where]
        for rollout, now, then, penalty in zip(
            batch.rollouts,
            batch.token_columns["logprobs/current"],
            batch.token_columns["logprobs/reference"],
            batch.token_columns["penalty"],
            strict=True,
        ):
            on = rollout.sampled
            np.testing.assert_allclose(penalty[on], 0.5 * (now[on] - then[on]), atol=1e-6)
            assert not penalty[~on].any()
        assert any(p.any() for p in batch.token_columns["penalty"])
    batch = batches["reward"]
    sums = np.asarray([p.sum() for p in batch.token_columns["penalty"]])
    np.testing.assert_allclose(batch.columns["reward"], batch.columns["reward/verdict"] - sums, atol=1e-9)
    for group in batch.groups():
        rewards = batch.columns["reward"][group.index]
        np.testing.assert_allclose(batch.columns["advantage"][group.index], rewards - rewards.mean(), atol=1e-9)
    batch = batches["advantage"]
    np.testing.assert_array_equal(batch.columns["reward"], batch.columns["reward/verdict"])
    for group in batch.groups():
        rewards = batch.columns["reward"][group.index]
        for i, own in zip(group.index, rewards - rewards.mean(), strict=True):
            on, penalty = batch.rollouts[i].sampled, batch.token_columns["penalty"][i]
            to_go = [penalty[t:].sum() for t in np.flatnonzero(on)]
            np.testing.assert_allclose(batch.token_columns["advantage"][i][on], own - np.asarray(to_go), atol=1e-9)


def test_the_reference_is_renewed(make_trainer):
    """After the second step it is the policy, so the third begins at a divergence of 0."""
    row = trained(make_trainer, algorithm(kl={"coef": 0.1, "renew_every": 2}), steps=3).metrics
    assert row[1]["kl/ref"] > 1e-6
    assert row[2]["kl/ref"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_a_run_with_a_penalty_in_the_reward_resumes_where_it_was(make_trainer):
    kl = {"coef": {"metric": "kl/ref", "target": 0.01, "initial": 0.5}, "where": "reward", "renew_every": 3}
    over = {**algorithm(kl=kl), "run": {"steps": 4}, "checkpoint": {"every": 2}}
    whole = make_trainer(over, "whole")
    whole.train()
    cut = make_trainer(over, "cut")
    cut.train(2)
    cut.save()
    cut.close()
    again = make_trainer(over, "cut")
    again.train(resume="auto")
    assert timeless(again.metrics) == timeless(whole.metrics)
    assert changed(weights(whole), weights(again)) == []
    assert whole.metrics[3]["schedule/kl.coef"] != 0.5


def test_an_adaptive_entropy_bonus(make_trainer):
    """The coefficient falls while the entropy is above its target, and rises below it."""
    for target, up in ((0.01, False), (50.0, True)):
        bonus = {"metric": "entropy", "target": target, "initial": 0.1, "gain": -1.0, "maximum": 1.0}
        trainer = trained(make_trainer, algorithm(entropy=bonus), f"to-{target}")
        coefs = [row["schedule/entropy.coef"] for row in trainer.metrics]
        assert coefs[0] == 0.1
        assert (coefs[1] > coefs[0]) == up


def test_an_entropy_bonus_of_equal_steps_starts_from_nothing(make_trainer):
    """Skywork-OR1: +delta while the entropy is below its target; idle above it."""
    bonus = {"metric": "entropy", "target": 50.0, "initial": 0.0, "delta": -0.01, "maximum": 0.015}
    rows = trained(make_trainer, algorithm(entropy=bonus), steps=3).metrics
    assert [row["schedule/entropy.coef"] for row in rows] == pytest.approx([0.0, 0.01, 0.015])
    assert rows[0].get("loss/entropy") is None and rows[2]["loss/entropy"] < 0
    idle = {"metric": "entropy", "target": 0.01, "initial": 0.02, "delta": -0.01, "idle": True}
    rows = trained(make_trainer, algorithm(entropy=idle), "idle", steps=2).metrics
    assert [row["schedule/entropy.coef"] for row in rows] == [0.02, 0.0]


def test_learning_from_the_tokens_that_were_least_sure(make_trainer):
    selector = {"name": "top_entropy", "share": {"schedule": "linear", "start": 0.25, "end": 1.0, "over": 2}}
    trainer = trained(make_trainer, algorithm(token_select=[selector]), steps=3)
    kept = [row["tokens/kept"] for row in trainer.metrics]
    assert 0.1 < kept[0] < 0.5 < kept[1] < kept[2] == 1.0
    assert [row["schedule/TopEntropy.share"] for row in trainer.metrics] == [0.25, 0.625, 1.0]


def test_demonstrations_in_the_same_step(make_trainer):
    """One per group, learned from beside the policy loss with a falling weight; no reward, no advantage, no ratio."""
    term = {"name": "likelihood", "on": "demonstrations", "coef": {"schedule": "linear", "start": 1.0, "end": 0.0}}
    mixed = {"loss_coef": {"schedule": "linear", "start": 0.0, "end": 1.0}, "auxiliary": [term]}
    over = {"algorithm": mixed, "optim": {"updates_per_batch": 2}}
    trainer = trained(make_trainer, over, steps=2)
    plain = trained(make_trainer, {"optim": {"updates_per_batch": 2}}, "plain", steps=1)
    batch = trainer.batch
    shown = [i for i, r in enumerate(batch.rollouts) if r.role == "demonstrator"]
    assert len(shown) == 2 and len(batch) == 10
    for i in shown:
        on = batch.token_columns["weight/likelihood"][i] > 0
        assert on.any() and (on == (batch.rollouts[i].origin == Origin.DEMONSTRATION)).all()
        assert math.isnan(batch.columns["reward"][i])
        assert not batch.token_columns["weight/policy"][i].any()
    first = trainer.metrics[0]
    assert first["loss/likelihood"] > 0
    for key in ("reward/mean", "reward/std", "group/mixed", "completion/length_mean", "advantage/std"):
        assert first[key] == plain.metrics[0][key]
    assert [row["schedule/likelihood.coef"] for row in trainer.metrics] == [1.0, pytest.approx(2 / 3)]
    assert [row["schedule/policy.coef"] for row in trainer.metrics] == [0.0, pytest.approx(1 / 3)]
    assert first["loss/policy"] is None and first["loss/total"] == first["loss/likelihood"]
    assert trainer.metrics[1]["loss/likelihood"] < first["loss/likelihood"]


def test_demonstrations_that_selection_does_not_take_away(make_trainer):
    """No group is left, and the demonstrations of all are learned; they are where their groups were."""
    term = {"name": "likelihood", "on": "demonstrations"}
    nothing = {"name": "pass_rate_band", "low": 2.0, "high": 3.0}
    over = {"algorithm": {"auxiliary": [term], "select": [nothing], "demonstrations": "sampled"}}
    trainer = trained(make_trainer, over, steps=1)
    assert [r.role for r in trainer.batch.rollouts] == ["demonstrator"] * 2
    first = trainer.metrics[0]
    assert not first["loss/policy"] and first["loss/likelihood"] > 0
    # Where all groups are left both forms are the same batch, by group.
    kept, plain = (
        trained(make_trainer, algorithm(auxiliary=[term], demonstrations=of), of, steps=1)
        for of in ("sampled", "selected")
    )
    assert sorted(r.id for r in kept.batch.rollouts) == sorted(r.id for r in plain.batch.rollouts)
    order = [r.group for r in kept.batch.rollouts]
    assert order == [order[0]] * 5 + [order[-1]] * 5
    assert kept.metrics[0]["loss/total"] == pytest.approx(plain.metrics[0]["loss/total"], rel=1e-5)


def test_tasks_that_a_probe_finds_solved(make_trainer):
    """Every task is solved: nothing is sampled but the probes, and the demonstrations are learned all the same."""
    term = {"name": "likelihood", "on": "demonstrations"}
    plan = {"name": "single_turn", "baseline": "greedy", "probe": True}
    over = {"algorithm": {"auxiliary": [term], "demonstrations": "sampled"}, "rollout": {"plan": plan}}
    trainer = trained(make_trainer, over, steps=2, verifier=lambda completion: 1.0)
    assert [r.role for r in trainer.batch.rollouts] == ["demonstrator"] * 2
    assert trainer.metrics[-1]["loss/likelihood"] > 0
    # Without demonstrations a step of solved tasks changes nothing, and the run goes on.
    over = {"rollout": {"plan": plan, "dynamic_sampling": {"attempts": 2}}}
    alone = make_trainer(over, "alone", verifier=lambda completion: 1.0)
    before = weights(alone)
    assert [row["reward/mean"] for row in alone.train(2)] == [None, None]
    assert not changed(before, weights(alone))


def test_two_terms_of_the_same_kind(make_trainer):
    terms = [{"name": "dpo", "coef": 0.1}, {"name": "dpo", "pairs": "extremes"}, "kto"]
    row = trained(make_trainer, algorithm(auxiliary=terms), steps=1).metrics[0]
    assert {"loss/dpo", "loss/dpo#2", "loss/kto"} <= set(row)
    assert row["loss/dpo"] == pytest.approx(math.log(2), rel=1e-4)  # the policy is the reference


def test_entropy_select_is_a_factor_of_the_entropy_bonus_alone(make_trainer):
    def trained(name, **over):
        trainer = make_trainer(algorithm(**over) | {"run": {"steps": 2}}, name=name)
        trainer.train()
        return weights(trainer)

    none = trained("none")
    zero = trained("zero", entropy=1.0, entropy_select=[{"name": "covariance_softmax", "scale": 0.0}])
    some = trained("some", entropy=1.0, entropy_select=["covariance_softmax"])
    everywhere = trained("everywhere", entropy=1.0)
    assert not changed(none, zero)
    assert changed(none, some) and changed(everywhere, some)


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({"loss": "pacs", "token_select": ["top_entropy"]}, "token_select leaves out single tokens"),
        ({"loss": "topr", "correction": "truncate"}, "set correction to null"),
        ({"loss": "copg", "correction": "mask"}, "set correction to null"),
        ({"kl": {"coef": 0.1, "where": "reward", "weighted": True}}, "algorithm.kl.weighted is about the gradient"),
        ({"kl": {"coef": 0.1, "where": "advantage", "gradient": "k2"}}, "algorithm.kl.gradient is about the gradient"),
        ({"loss": "pacs", "kl": {"coef": 0.1, "where": "reward"}}, "set algorithm.kl.where to loss"),
        ({"kl": {"renew_every": 5}}, "nothing is compared with it"),
        ({"kl": {"scale": {"by": "turn", "factors": {1: 2}}}}, "algorithm.kl.coef, which is 0"),
        ({"kl": {"coef": 0.1, "where": "reward"}, "auxiliary": ["kto"]}, "'kto' reads the rewards as the verifier"),
        ({"loss_coef": 0.0}, "the policy loss is the only term"),
        ({"loss": {"name": "clip", "average": "tokens", "constant": 5}}, "set average to constant"),
        ({"loss": "trajectory_balance", "token_select": ["top_entropy"]}, "token_select leaves out single tokens"),
        ({"loss": {"name": "clip", "clip": "tv", "ratio": "geometric"}}, "masks single tokens"),
        ({"auxiliary": [{"name": "dpo", "coef": "much"}]}, "coef='much'"),
        ({"auxiliary": [{"name": "dpo", "beat": 1}]}, "no option 'beat'.*beta"),
        ({"auxiliary": ["dop"]}, "no auxiliary 'dop'.*dpo"),
        ({"token_select": ["top"]}, "no token_selector 'top'"),
        ({"entropy_select": ["top_entropy"]}, "algorithm.entropy_select is of the entropy bonus, and there is none"),
        ({"kl": {"coef": 0.1, "where": "advantage"}, "modifiers": ["signs", "informative"]}, None),
    ],
    ids=str,
)
def test_contradictions_are_refused_at_start(make_trainer, over, problem):
    tree = overlaid(algorithm(**over), beside(over.get("loss")))
    if problem is None:
        make_trainer(tree)
        return
    with pytest.raises(ConfigError, match=problem):
        make_trainer(tree)


@pytest.mark.parametrize("over", [{"loss": "pacs"}, {"loss": "copg"}, {"auxiliary": ["dpo"]}], ids=str)
def test_a_group_of_one_compares_nothing(make_trainer, over):
    one = {"rollout": {"group_size": 1}, "algorithm": {"advantage": {"baseline": "none", "scale": "none"}, **over}}
    with pytest.raises(ConfigError, match="compares the members of a group"):
        make_trainer(one)


def test_demonstrations_have_to_be_there_and_fit(make_trainer):
    over = algorithm(auxiliary=[{"name": "likelihood", "on": "demonstrations"}])
    bare = [{k: v for k, v in row.items() if k != "demonstration"} for row in task_rows()]
    with pytest.raises(DataError, match="no task has one"):
        make_trainer(over, tasks=bare)
    long = [{**row, "demonstration": "1" * 80} for row in task_rows()]
    with pytest.raises(DataError, match="prompt and demonstration have"):
        make_trainer(overlaid(over, {"run": {"overwrite": True}}), tasks=long)
    trained(make_trainer, overlaid(over, {"run": {"overwrite": True}}), tasks=[*task_rows()[:1], *bare[1:]])


def test_the_preset_of_a_loss_is_its_loss(make_trainer):
    """`algorithm.preset: luspo` is what its options write out."""
    preset = make_trainer(algorithm(preset="luspo"))
    written = {"ratio": "geometric", "clip_low": 3e-4, "clip_high": 4e-4, "average": "constant", "constant": 1}
    spelled = make_trainer(algorithm(loss={"name": "clip", **written}), "spelled")
    for trainer in (preset, spelled):
        trainer.train(2)
    assert timeless(preset.metrics) == timeless(spelled.metrics)
    for name, value in weights(preset).items():
        assert torch.equal(value, weights(spelled)[name])
