"""Options of vLLM that change what is sampled, in the real engine on a CPU."""

import asyncio
import dataclasses
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import ask, ask_all, gap, shake, some_requests, trainer_logprobs
from transformers import DynamicCache
from vllm_helpers import FAST, needs_vllm, publish, tiny

from rlvr.distributed import PlainBackend
from rlvr.rollout import probe
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions
from rlvr.rollout.vllm.server_engine import VLLMServerEngine

pytestmark = [needs_vllm, pytest.mark.alone, pytest.mark.timeout(600)]


def copy_of(policy):
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def load(policy, weights):
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(weights[name])


def log_of(engine):
    """The log of the engine's process, or of its one server."""
    host = engine._members.all[0].started if isinstance(engine, VLLMServerEngine) else engine._host
    return host.log


def with_old_cache(policy, old, new, request, completion):
    """float64 log-probs of the tokens that the weights `new` sampled after keys and values of the weights `old`."""
    ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
    first = int((completion.versions == completion.versions.min()).sum())
    before = len(request.token_ids) + first - 1  # the last token of the old version is computed with the new weights
    cache = DynamicCache()
    with torch.no_grad():
        load(policy, old)
        policy.model(input_ids=ids[:, :before], past_key_values=cache, use_cache=True)
        load(policy, new)
        logits = policy.model(input_ids=ids[:, before:-1], past_key_values=cache, use_cache=True).logits[0]
    return logits.double().log_softmax(-1).gather(1, ids[0, before + 1 :, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(VLLMOptions, id="vllm"),
        pytest.param(partial(VLLMServerOptions, servers=1), id="vllm-server", marks=pytest.mark.slow),
    ],
)
def test_responses_under_way_keep_their_keys_and_values(options, monkeypatch):
    """They go on in the memory that they have, each token is of the version that it is labelled with, and what the old
    weights computed is not used for new requests with the same prompt."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    policy = tiny(context=512)
    arguments = {"block_size": 32, "scheduler_cls": "counting_scheduler.CountingScheduler"}
    engine = options(**FAST, clear_cache=False, engine_args=arguments).open(policy, "continue")
    backend = PlainBackend(policy)
    prompts = {"seed": 3, "longest": 100, "ignore_eos": True}

    async def over_a_publish(requests):
        work = asyncio.ensure_future(ask_all(engine, requests))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(publish, engine, engine.version + 1, backend.named_weights)
        return await work

    try:
        publish(engine, 1, backend.named_weights)
        for attempt in range(5):  # a quick engine may be done before the publish comes
            old = copy_of(policy)
            requests = some_requests(policy, 8, max_new_tokens=380, **prompts)
            shake(policy, 10 + attempt, 0.03)
            new = copy_of(policy)
            completions = asyncio.run(over_a_publish(requests))
            if all(len(set(completion.versions.tolist())) == 2 for completion in completions):
                break
        else:
            pytest.fail("the publish came too late to be under way, five times")
        assert "PREEMPTED" not in log_of(engine).read_text()
        kept, anew = [], []
        for request, completion in zip(requests, completions, strict=True):
            assert (np.diff(completion.versions) >= 0).all()
            later = completion.versions == completion.versions.max()
            expected = with_old_cache(policy, old, new, request, completion)
            kept.append(completion.logprobs[later] - expected)
            (trained,) = trainer_logprobs(policy, [request], [completion])
            anew.append(completion.logprobs[later] - trained[later])
        assert np.abs(np.concatenate(kept)).max() < 1e-4
        bias = np.abs(np.concatenate(anew)).mean()
        assert bias > 1e-3  # the trainer computes keys and values anew: the mismatch that `mismatch/mean` shows
        print(f"bias of kept keys and values: {bias:.4f} nats per token")
        again = some_requests(policy, 8, max_new_tokens=24, **prompts)
        assert [request.token_ids for request in again] == [request.token_ids for request in requests]
        assert gap(policy, again, ask(engine, again)) < 1e-4
    finally:
        engine.close()


@pytest.mark.parametrize("adapter", [None, pytest.param({"r": 4}, marks=pytest.mark.slow)])
def test_weights_and_cache_in_fp8_are_those_of_the_newest_publish(adapter, collector):
    """Quantised again at each publish: the log-probs are far closer to the new weights' than to the old ones'. An
    adapter goes by itself, over weights in fp8 that are sent once. The engine's own constraint does not bind the
    probe."""
    policy = tiny(dtype="bfloat16", adapter=adapter)
    constraint = {"structured_outputs": {"regex": "[01]{1,60}"}}
    # vLLM's attention for CPUs has a cache in fp8 only with these instructions; elsewhere the weights alone are in fp8.
    has_fp8_cache = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    cache = {"kv_cache_dtype": "fp8"} if has_fp8_cache else {}
    options = VLLMOptions(**FAST, quantization="fp8_per_channel", **cache, **constraint)
    engine = options.open(policy)
    backend = PlainBackend(policy)

    def mean_gap(requests, completions):
        expected = trainer_logprobs(policy, requests, completions)
        return np.abs(np.concatenate([c.logprobs - e for c, e in zip(completions, expected, strict=True)])).mean()

    try:
        publish(engine, 1, backend.named_weights)
        probe(engine, policy, collector, backend.named_weights, low_precision=True)
        old = copy_of(policy)
        shake(policy, 5, 0.2)
        new = copy_of(policy)
        publish(engine, 2, backend.named_weights)
        assert engine.mismatched_weights(backend.named_weights) == []
        constrained = some_requests(policy, 8, seed=7, max_new_tokens=60)
        assert all(re.fullmatch("[01]+", completion.text) for completion in ask(engine, constrained))
        # as the probe asks: without the engine's constraint, whose log-probs are of another distribution
        requests = [dataclasses.replace(request, constraint={}) for request in constrained]
        completions = ask(engine, requests)
        assert not all(re.fullmatch("[01]*", completion.text) for completion in completions)
        gap_of_new = mean_gap(requests, completions)
        load(policy, old)
        gap_of_old = mean_gap(requests, completions)
        load(policy, new)
        assert 0.02 < gap_of_new < 0.4
        assert gap_of_old > 3 * gap_of_new
    finally:
        engine.close()
