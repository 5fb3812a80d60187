"""Talks with an environment through the whole trainer: what trains, what evaluation samples with, what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import yaml

from rlvr import GRPOTrainer, registry
from rlvr.errors import ConfigError
from rlvr.records import Origin
from rlvr.rollout import Turns, evaluation_plan
from rlvr.rollout.plans import SingleTurn
from small_run import overlaid

TOOL = '''
def seven(text, task):
    """Says 7 to turns of any text."""
    return "7=?"
'''


@pytest.fixture
def talking(tmp_path):
    """A plan of three turns with a tool from a file."""
    (tmp_path / "tool.py").write_text(TOOL)
    return {
        "rollout": {"plan": {"name": "turns", "environment": f"{tmp_path}/tool.py:seven", "turns": 3}, "stop": ["4"]}
    }


def test_what_the_tool_said_is_read_but_not_trained(make_trainer, talking):
    """One step of plain gradient descent, against autograd over the policy's own tokens."""
    optim = {"optim": {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 1e9}, "rollout": {"max_new_tokens": 16}}
    trainer = make_trainer(overlaid(overlaid(talking, optim), {"algorithm": {"loss": {"average": "tokens"}}}))
    model = copy.deepcopy(trainer.policy.model)
    trainer.train(1)
    batch = trainer.batch
    assert sum((r.origin == Origin.TOOL).any() for r in batch.rollouts) >= 3
    for rollout, weight in zip(batch.rollouts, batch.tokens("weight/policy"), strict=True):
        assert (weight == (rollout.origin == Origin.POLICY)).all()

    total = sum(int(r.sampled.sum()) for r in batch.rollouts)
    loss = torch.zeros(())
    for rollout, advantage in zip(batch.rollouts, batch.column("advantage"), strict=True):
        ids = torch.from_numpy(rollout.token_ids)
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1)
        mine = torch.from_numpy(rollout.sampled[1:])
        loss = loss - advantage * logprobs.gather(-1, ids[1:, None])[:, 0][mine].sum() / total
    loss.backward()
    after = dict(trainer.policy.model.named_parameters())
    for name, parameter in model.named_parameters():
        moved = parameter.detach() - after[name].detach()
        torch.testing.assert_close(moved, parameter.grad, atol=2e-6, rtol=1e-3, msg=name)


def test_training_and_evaluation_talk(make_trainer, talking):
    evaluated = {"evaluation": {"every": 1, "samples": 2, "k": [1]}}
    trainer = make_trainer(overlaid(talking, evaluated), eval_tasks=[{"prompt": "5=?", "answer": "5"}])
    collect, kept = trainer.rollouts.collector.collect, []

    def collecting(draws, *rest):
        kept.extend(collect(draws, *rest))
        return kept[-len(draws) * rest[1].group_size :]

    trainer.rollouts.collector.collect = collecting
    trainer.train(2)
    assert [row["step"] for row in trainer.evaluations] == [0, 1, 2]
    assert len(kept) == 3 * (1 + 2)
    assert any((r.origin == Origin.TOOL).any() for r in kept)
    assert all(row["mismatch/max"] is None or row["mismatch/max"] < 1e-4 for row in trainer.metrics)


def test_evaluation_samples_with_plans_of_independent_responses_only(tmp_path):
    (tmp_path / "more.py").write_text("async def more(draw, means):\n    yield None\n")
    assert evaluation_plan(f"{tmp_path}/more.py:more") == SingleTurn()
    assert evaluation_plan("single_turn") == SingleTurn()
    assert isinstance(evaluation_plan({"name": "turns", "environment": "calculator"}), Turns)


def test_a_role_that_the_chat_template_does_not_know_is_refused_at_the_start(make_trainer):
    plan = {"name": "turns", "environment": "calculator", "role": "tool"}
    over = {"rollout": {"plan": plan}, "data": {"template": {"user": "{prompt}"}}}
    with pytest.raises(ConfigError, match=r"no tokens for .*<\|tool\|>"):
        make_trainer(over)


@pytest.mark.gate
def test_the_shipped_calculator_config_runs(request, tmp_path):
    tree = yaml.safe_load((request.config.rootpath / "configs/calculator.yaml").read_text())
    tree = overlaid(tree, {"run": {"dir": str(tmp_path)}, "logging": {"console": "off"}, "evaluation": {"limit": 4}})
    imitate, reinforce = tree["stages"]
    imitate["steps"], reinforce["steps"] = 12, 2
    reinforce["rollout"] = {"prompts_per_step": 4, "group_size": 4}
    with GRPOTrainer(config=tree) as trainer:
        rows = trainer.train()
        assert [row["run/stage"] for row in rows] == ["sft"] * 12 + ["grpo"] * 2
        assert rows[11]["loss/likelihood"] < rows[0]["loss/likelihood"]
        assert rows[-1]["tokens/sampled"] > 0
        assert len(trainer.evaluations) >= 1


def test_products_ask_for_a_calculator():
    build = registry.build("source", {"name": "products", "count": 300, "demonstrate": ["call", "answer", "guess"]})
    tasks = list(build())
    for task, turn in zip(tasks, ["call", "answer", "guess"] * 100, strict=True):
        a, b = map(int, task.prompt[0]["content"].removesuffix("=?").split("*"))
        assert 10 <= min(a, b) <= max(a, b) <= 99
        assert task.answer == str(a * b)
        output = [message["content"] for message in task.prompt[1:]]
        assert output == ([f"[{a}*{b}]", str(a * b)] if turn == "answer" else [])
        assert task.demonstration == (f"[{a}*{b}]" if turn == "call" else f"#### {a * b}")
    plain = list(registry.build("source", {"name": "products", "count": 100})())
    assert [t.prompt[0] for t in plain] == [t.prompt[0] for t in tasks[:100]]
    assert {t.demonstration for t in plain} == {None}
    held_out = list(registry.build("source", {"name": "products", "count": 300, "split": "eval"})())
    assert not {t.id for t in tasks} & {t.id for t in held_out}
    assert len({t.id for t in held_out}) == 300
    with pytest.raises(ConfigError, match="at most 405 are possible"):
        list(registry.build("source", {"name": "products", "count": 406, "split": "eval"})())
    assert np.all([t.source == "products" for t in tasks])
