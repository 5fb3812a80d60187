"""Whole training runs on both engines: adapters sent by themselves, several turns, and a server that is killed in a
step.

Before each update the trainer's policy is that which sampled, so all its rollouts' log-probs are computed anew there.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from engine_helpers import LETTERS, ask, gap, recomputed, some_requests
from vllm_helpers import FAST, TINY, check_publishing_under_way, needs_vllm

from process_helpers import until
from rlvr import GRPOTrainer
from rlvr.distributed import PlainBackend
from rlvr.records import Origin, StopReason
from rlvr.rollout.vllm import VLLMServerOptions

pytestmark = [needs_vllm, pytest.mark.alone, pytest.mark.timeout(600)]


def digits(completion):
    """The share of 0 and 1."""
    return sum(c in "01" for c in completion) / max(1, len(completion))


@pytest.fixture
def make_trainer(tmp_path):
    """`make_trainer(engine, model={...}, scratch={...}, **rollout options)`: a trainer, closed after the test."""
    made = []

    def make(engine, model=None, scratch=None, **rollout):
        sampled = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 12, **rollout}
        config = {
            "run": {"dir": str(tmp_path), "steps": 4},
            "model": {
                "device": "cpu",
                "scratch": {**TINY, "context": 256, "init_std": 0.2, "alphabet": LETTERS, **(scratch or {})},
                **(model or {}),
            },
            "rollout": {"engine": {**FAST, **engine}, **sampled},
            "optim": {"lr": 0.01},
            "logging": {"console": "off"},
        }
        made.append(GRPOTrainer(None, ["a b", "c d", "e f", "g h"], digits, config))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def looked_after(trainer):
    """The rollouts of each step that trains, appended as it trains; they have the log-probs of their weights."""
    update, seen = trainer._update, []

    def look(stage, batch):
        for rollout, expected in zip(batch.rollouts, recomputed(trainer.policy, batch.rollouts), strict=True):
            assert np.abs(rollout.behaviour_logprobs[rollout.sampled] - expected).max() < 1e-4
            assert set(rollout.policy_version[rollout.sampled].tolist()) == {trainer.state.version}
        seen.append(batch.rollouts)
        return update(stage, batch)

    trainer._update = look
    return seen


@pytest.mark.parametrize("name", [pytest.param("vllm", marks=pytest.mark.slow), "vllm-server"])
def test_an_adapter_trains_and_is_sent_by_itself(make_trainer, monkeypatch, name):
    trainer = make_trainer({"name": name}, {"adapter": {"r": 4, "alpha": 8}})
    policy, backend = trainer.policy, trainer.training.backend
    whole = sum(t.nbytes for bucket in backend.named_weights() for _, t in bucket)
    seen = looked_after(trainer)
    rows = trainer.train(3)
    assert [len(step) for step in seen] == [8] * 3
    assert all(0 < row["publish/bytes"] < whole for row in rows)  # the weights under it went before the first step
    assert max(row["mismatch/max"] or 0 for row in rows) < 1e-4
    assert any(row["mismatch/max"] is not None for row in rows)
    requests = some_requests(policy, 6)
    assert gap(policy, requests, ask(trainer.rollouts.engine, requests)) < 1e-4
    check_publishing_under_way(policy, trainer.rollouts.engine, publishes=4)
    if name == "vllm-server":  # the same server, as one given by URL to another run
        client = trainer.rollouts.engine._members.all[0].client
        monkeypatch.setenv("THE_KEY", client._session.headers["Authorization"].removeprefix("Bearer "))
        options = VLLMServerOptions(urls=(client.url,), api_key_env="THE_KEY", health_every=0.2, **FAST)
        for _ in range(2):
            other = options.open(policy)
            try:
                other.publish(1, PlainBackend(policy).named_weights)
                assert gap(policy, requests, ask(other, requests)) < 1e-4
                other._run(other._members.lose(other._members.all[0], "the test says so"))  # back with what it has
                until(lambda engine=other: not engine._members.all[0].returning, 60, "the server to be back")
                assert gap(policy, requests, ask(other, requests)) < 1e-4
                assert other._members.all[0].returns == 1
            finally:
                other.close()


def test_talks_with_a_calculator(make_trainer):
    """A policy of few tokens, some of which are calls, so that a random one calls often."""
    scratch = {"alphabet": "01 +=", "words": ["[1+1]", "[10*11]", "[1/0]"]}
    trainer = make_trainer(
        {"name": "vllm"},
        scratch=scratch,
        plan={"name": "turns", "environment": "calculator", "turns": 4},
        stop=["]"],
        max_new_tokens=40,
    )
    seen = looked_after(trainer)
    rows = trainer.train(3)
    assert max(row["mismatch/max"] or 0 for row in rows) < 1e-4
    assert any(row["mismatch/max"] is not None for row in rows)
    talks = [rollout for step in seen for rollout in step]
    replies = [s for rollout in talks for s in rollout.segments if s.kind == "tool"]
    assert len(replies) > 10
    assert all(
        (rollout.origin == Origin.TOOL).any() == any(s.kind == "tool" for s in rollout.segments) for rollout in talks
    )


@pytest.mark.slow
def test_a_server_killed_in_a_step_costs_no_rollout_and_no_wrong_token(make_trainer):
    """The first of two servers is killed under way in the second step; the third step begins with it back or without
    it."""
    trainer = make_trainer(
        {"name": "vllm-server", "servers": 2, "health_every": 0.5}, prompts_per_step=4, group_size=8, max_new_tokens=230
    )
    seen = looked_after(trainer)
    trainer.train(1)
    victim = trainer.rollouts.engine._members.all[0]
    killed = []

    def kill():
        until(lambda: len(victim.tasks) > 4, 60, "the second step's requests")
        os.kill(victim.started.process.pid, signal.SIGSTOP)  # so that it owes its answers however fast it is
        time.sleep(0.05)
        killed.append(len(victim.tasks))
        os.kill(victim.started.process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    trainer.train(1)
    killer.join(60)
    assert killed[0] > 0, "the server was killed when it had nothing to do"
    assert victim.returns >= 1
    trainer.train(2)
    assert [len(step) for step in seen] == [32] * 4
    assert all(rollout.stop is not StopReason.ABORTED for step in seen for rollout in step)
    assert len({(r.group, r.member) for step in seen for r in step}) == 128
