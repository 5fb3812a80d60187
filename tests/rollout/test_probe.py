"""The probe after a publish: passes with the published weights, names an engine that has others."""

import asyncio
import dataclasses
import sys

import pytest
import torch
from engine_helpers import small

from rlvr import GRPOTrainer
from rlvr.distributed import PlainBackend
from rlvr.errors import TrainingError, WaitTimeoutError
from rlvr.rollout import Collector, HFEngine, HFEngineOptions, probe


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def pair(request):
    policy = small("qwen3", tie_word_embeddings=request.param)
    return policy, HFEngine(policy, HFEngineOptions(copy_weights=True))


def change(policy):
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def test_published_weights_pass(pair, collector):
    policy, engine = pair
    for version in range(1, 4):
        change(policy)
        engine.publish(version, PlainBackend(policy).named_weights)
        assert probe(engine, policy, collector) < 1e-5


def test_an_engine_of_a_short_context_is_probed_within_it(pair, collector, monkeypatch):
    """As vLLM's is with a small `max_model_len`, or where its cache of keys and values is small."""
    policy, engine = pair
    engine.publish(1, PlainBackend(policy).named_weights)
    asked = []
    generate = engine.generate

    async def noted(request):
        asked.append((len(request.token_ids), request.sampling.max_new_tokens))
        return await generate(request)

    monkeypatch.setattr(engine, "generate", noted)
    for engine.context in (7, 2, 64):
        assert probe(engine, policy, collector) < 1e-5
    assert asked == [(3, 4), (1, 1), (8, 8)]


def test_stale_weights_are_found(pair, collector):
    policy, engine = pair
    change(policy)
    engine.publish(1, list)
    with pytest.raises(TrainingError, match="version 1"):
        probe(engine, policy, collector)


def test_an_engine_of_low_precision_may_round_more_and_no_more(pair, collector, monkeypatch):
    """Log-probs as fp8 has them pass where they are expected; those of a stale head do not."""
    policy, engine = pair
    change(policy)
    engine.publish(1, PlainBackend(policy).named_weights)
    off = 0.3
    plain = engine.generate

    async def rounded(request):
        completion = await plain(request)
        return dataclasses.replace(completion, logprobs=completion.logprobs + off)

    monkeypatch.setattr(engine, "generate", rounded)
    assert probe(engine, policy, collector, low_precision=True) == pytest.approx(off, abs=1e-3)
    with pytest.raises(TrainingError, match="does not sample with the weights"):
        probe(engine, policy, collector)
    off = 0.7
    with pytest.raises(TrainingError, match="does not sample with the weights"):
        probe(engine, policy, collector, low_precision=True)


def test_a_stale_head_alone_is_found(pair, collector):
    """The silent trap of engines that keep a tied head apart: everything but `lm_head.weight` is new."""
    policy, engine = pair
    copied = dict(engine.policy.causal_lm.named_parameters(remove_duplicate=False))
    head = torch.nn.Parameter(copied["lm_head.weight"].detach().clone())
    engine.policy.causal_lm.lm_head.weight = head  # apart, as such an engine has it
    change(policy)

    def without_head():
        for bucket in PlainBackend(policy).named_weights():
            yield [(name, tensor) for name, tensor in bucket if name != "lm_head.weight"]

    engine.publish(1, without_head)
    with pytest.raises(TrainingError):
        probe(engine, policy, collector)
    engine.publish(2, PlainBackend(policy).named_weights)
    assert probe(engine, policy, collector) < 1e-5


@pytest.mark.parametrize(("told_to_stop", "limit"), [(False, "SECONDS"), (True, "STOP_SECONDS")])
def test_a_probe_that_is_not_answered_is_named_and_given_up(pair, monkeypatch, told_to_stop, limit):
    policy, engine = pair
    monkeypatch.setattr(sys.modules["rlvr.rollout.probe"], limit, 0.3)
    collector = Collector(lambda: told_to_stop)
    engine.publish(7, PlainBackend(policy).named_weights)
    try:
        assert probe(engine, policy, collector) < 1e-5  # a stop does not spoil one that is answered
        given_up = []

        async def never(request):
            try:
                await asyncio.Event().wait()
            finally:
                given_up.append(request)

        engine.generate = never
        with pytest.raises(WaitTimeoutError, match="the probe of version 7 of the weights"):
            probe(engine, policy, collector)
    finally:
        collector.close()
    assert len(given_up) == 1


def test_a_run_with_an_engine_of_its_own_weights_is_probed(tmp_path, monkeypatch):
    config = {
        "run": {"dir": str(tmp_path), "steps": 2},
        "model": {"scratch": {"hidden_size": 32, "context": 64, "init_std": 0.2}, "device": "cpu"},
        "rollout": {
            "engine": {"name": "hf", "copy_weights": True},
            "prompts_per_step": 2,
            "group_size": 4,
            "max_new_tokens": 8,
        },
        "optim": {"lr": 0.01},
        "logging": {"console": "off"},
    }

    def digits(completion):
        return sum(c.isdigit() for c in completion) / 8

    with GRPOTrainer(None, ["a b", "c d"], digits, config) as trainer:
        rows = trainer.train()
        assert all(row["mismatch/max"] < 1e-4 for row in rows)
    monkeypatch.setattr(HFEngine, "publish", lambda self, version, weights: setattr(self, "version", version))
    config["run"]["name"] = "stale"
    stale = pytest.raises(TrainingError, match="does not sample with the weights")
    with GRPOTrainer(None, ["a b", "c d"], digits, config) as trainer, stale:
        trainer.train()
