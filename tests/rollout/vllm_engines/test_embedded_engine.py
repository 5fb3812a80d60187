"""The engine `vllm` for real: what it samples, with what log-probs, by which weights (N3, N7), and what it refuses."""

import asyncio
import dataclasses
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import ask, ask_all, gap, ids_of, shake, some_requests
from vllm_helpers import (
    FAST,
    check_alternatives,
    check_constraint,
    check_publishing_under_way,
    needs_vllm,
    publish,
    tiny,
    truncated_logprobs,
)

from process_helpers import children, until
from rlvr.distributed import PlainBackend
from rlvr.errors import ConfigError, DataError, TrainingError, WaitTimeoutError
from rlvr.records import StopReason
from rlvr.rollout import HFEngine, Request, Sampling, probe
from rlvr.rollout.vllm import VLLMOptions

pytestmark = [needs_vllm, pytest.mark.alone]


@pytest.fixture(scope="module")
def policy():
    return tiny(words=["hello", "gh"])


@pytest.fixture(scope="module")
def engine(policy):
    engine = VLLMOptions(**FAST).open(policy)
    yield engine
    engine.close()


@pytest.fixture
def published(engine, policy):
    """The engine with the policy's weights as they are, under the next version."""
    publish(engine, engine.version + 1, PlainBackend(policy).named_weights)
    return engine


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_log_probs_are_the_trainers_after_each_publish(policy, engine, count):
    backend, first = PlainBackend(policy), engine.version
    for version in range(first + 1, first + 1 + count):
        shake(policy, version)
        done = publish(engine, version, backend.named_weights)
        assert done.bytes == sum(t.nbytes for bucket in backend.named_weights() for _, t in bucket)
        assert 0 < done.seconds < 60
        requests = some_requests(policy, 8, seed=version, temperature=(1.0, 0.7, 1.5, 0.0)[version % 4])
        completions = ask(engine, requests)
        assert gap(policy, requests, completions) < 1e-4
        assert {v for c in completions for v in c.versions.tolist()} == {version}
        for c in completions:
            assert c.token_ids.dtype == np.int64
            assert c.logprobs.dtype == np.float32
            assert c.text == policy.tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=True)
    assert engine.version == first + count


def test_weights_change_on_publish_and_not_before(policy, published):
    requests = some_requests(policy, 6, seed=1)
    before = ask(published, requests)
    shake(policy, 77)
    stale = ask(published, requests)
    assert [c.token_ids.tolist() for c in stale] == [c.token_ids.tolist() for c in before]
    assert gap(policy, requests, stale) > 1e-2
    publish(published, published.version + 1, PlainBackend(policy).named_weights)
    assert gap(policy, requests, ask(published, requests)) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.5, "top_k": 4},
        {"top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_log_probs_are_of_the_truncated_distribution(policy, published, options):
    requests = some_requests(policy, 6, seed=3, **options)
    for request, completion in zip(requests, ask(published, requests), strict=True):
        expected = truncated_logprobs(policy, request, completion)
        assert np.isfinite(expected).all()  # nothing was sampled that the options leave out
        assert np.allclose(completion.logprobs, expected, atol=1e-4)


def test_greedy_is_what_the_hf_engine_says(policy, published):
    requests = some_requests(policy, 6, seed=2, temperature=0.0, ignore_eos=True)
    for ours, theirs in zip(ask(published, requests), ask(HFEngine(policy), requests), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        assert (ours.stop, ours.text) == (theirs.stop, theirs.text)


def test_seeds_decide_and_neither_order_nor_company(policy, published):
    requests = some_requests(policy, 24, seed=6, distinct=10)
    together = [c.token_ids.tolist() for c in ask(published, requests)]
    assert [ask(published, [r])[0].token_ids.tolist() for r in requests[:6]] == together[:6]
    assert [c.token_ids.tolist() for c in ask(published, requests[::-1])][::-1] == together
    prompt, sampling = ids_of(policy, "abc"), Sampling(24, ignore_eos=True)
    many = ask(published, [Request(prompt, sampling, seed) for seed in (1, 2, 2**62 + 5, 1)])
    assert many[0].token_ids.tolist() == many[3].token_ids.tolist()
    assert len({tuple(c.token_ids.tolist()) for c in many}) == 3


def test_more_prompts_than_one_step_takes_change_nothing(policy, published):
    """vLLM cuts prompts into parts where they do not fit one step, which must not move anybody's random numbers."""
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(3, len(policy.tokenizer), size=88).tolist()) for _ in range(150)]
    requests = [Request(prompt, Sampling(8, ignore_eos=True), seed) for seed, prompt in enumerate(prompts)]
    together = [c.token_ids.tolist() for c in ask(published, requests)]
    assert [ask(published, [r])[0].token_ids.tolist() for r in requests[::30]] == together[::30]


def test_end_tokens_length_and_context(policy, published):
    completions = ask(published, some_requests(policy, 40, seed=4, max_new_tokens=30))
    ended = [c for c in completions if c.stop == StopReason.END]
    assert ended
    for c in ended:
        assert int(c.token_ids[-1]) in policy.end_ids
        assert not policy.end_ids & set(c.token_ids[:-1].tolist())
    assert all(len(c.token_ids) == 30 for c in completions if c.stop == StopReason.LENGTH)
    on = ask(published, some_requests(policy, 40, seed=4, max_new_tokens=60, ignore_eos=True))
    assert {(len(c.token_ids), c.stop) for c in on} == {(60, StopReason.LENGTH)}
    assert any(policy.tokenizer.eos_token_id in c.token_ids for c in on)
    near = ids_of(policy, "a" * (policy.context - 6))
    (cut,) = ask(published, [Request(near, Sampling(50, ignore_eos=True), 0)])
    assert (cut.stop, len(cut.token_ids)) == (StopReason.CONTEXT, 6)
    (exact,) = ask(published, [Request(near, Sampling(6, ignore_eos=True), 0)])
    assert exact.stop == StopReason.LENGTH


def test_every_end_token_of_the_policy_ends(policy, published, monkeypatch):
    monkeypatch.setattr(published, "_end_ids", sorted({*policy.end_ids, *ids_of(policy, "a")}))
    completions = ask(published, some_requests(policy, 30, seed=8, max_new_tokens=60))
    ended = [c for c in completions if c.stop == StopReason.END]
    assert {c.text[-1:] for c in ended} >= {"a"}
    assert all("a" not in c.text[:-1] for c in completions)


def test_stop_strings_end_a_completion_and_stay_in_it(policy, published):
    stop = ("b", "ello", "kc", "c")
    completions = ask(published, some_requests(policy, 60, seed=5, max_new_tokens=40, stop=stop))
    stopped = [c for c in completions if c.stop == StopReason.STOP_STRING]
    assert len(stopped) > 20
    for c in completions:
        whole, before = (policy.tokenizer.decode(ids.tolist()) for ids in (c.token_ids, c.token_ids[:-1]))
        assert not any(s in before for s in stop)
        assert any(s in whole for s in stop) == (c.stop == StopReason.STOP_STRING)
        assert c.text == policy.tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=True)
        assert len(c.logprobs) == len(c.token_ids) == len(c.versions)
    assert any(c.text.endswith("hello") for c in stopped)  # a stop string that ends inside a token


def test_a_constraint_is_kept(policy, published):
    check_constraint(policy, published)


def test_the_likeliest_first_tokens_are_the_policys(policy, published):
    check_alternatives(policy, published)


def test_new_weights_come_after_a_release(policy, published):
    weights = PlainBackend(policy).named_weights
    published.publish(published.version, weights)  # the same once more: a stage begins
    with pytest.raises(TrainingError, match="without a release"):
        published.publish(published.version + 1, weights)
    publish(published, published.version + 1, weights)


def test_weights_published_under_way_are_those_of_the_tokens_after(policy, published):
    check_publishing_under_way(policy, published, publishes=2)


def test_nothing_differs_after_a_publish_and_changed_tensors_are_named(policy, published):
    backend = PlainBackend(policy)
    assert published.mismatched_weights(backend.named_weights) == []
    with torch.no_grad():
        policy.causal_lm.model.norm.weight.add_(0.5)
    assert published.mismatched_weights(backend.named_weights) == ["model.norm.weight"]


def test_the_silent_trap_of_a_stale_head_is_found_and_named(policy, published, collector):
    shake(policy, 5)

    def without_head():
        for bucket in PlainBackend(policy).named_weights():
            yield [(name, tensor) for name, tensor in bucket if name != "lm_head.weight"]

    publish(published, published.version + 1, without_head)
    with pytest.raises(TrainingError, match=r"lm_head\.weight"):
        probe(published, policy, collector, PlainBackend(policy).named_weights)
    publish(published, published.version + 1, PlainBackend(policy).named_weights)
    assert probe(published, policy, collector, PlainBackend(policy).named_weights) < 1e-4


def test_weights_come_in_many_buckets_too(policy, published):
    shake(policy, 6)

    def one_by_one():
        for bucket in PlainBackend(policy).named_weights():
            yield from ([pair] for pair in bucket)

    publish(published, published.version + 1, one_by_one)
    requests = some_requests(policy, 6, seed=12)
    assert gap(policy, requests, ask(published, requests)) < 1e-4


def test_cancelled_requests_end_and_others_go_on(policy, published):
    long = some_requests(policy, 30, seed=7, longest=4, max_new_tokens=90, ignore_eos=True)
    wanted = some_requests(policy, 4, seed=8)
    expected = [c.token_ids.tolist() for c in ask(published, wanted)]

    async def main():
        tasks = [asyncio.ensure_future(published.generate(r)) for r in long]
        await asyncio.sleep(0.02)
        work = asyncio.ensure_future(ask_all(published, wanted))
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return ended, await work

    ended, completions = asyncio.run(main())
    assert any(isinstance(e, asyncio.CancelledError) for e in ended)
    assert [c.token_ids.tolist() for c in completions] == expected
    assert not published._host._replies.waiting


@pytest.mark.parametrize("length", [0, 96, 500])
def test_a_prompt_without_room_is_refused(policy, published, length):
    with pytest.raises(DataError, match=f"a prompt of {length} tokens.*context is 96"):
        ask(published, [Request((5,) * length, Sampling(4), 0)])


def test_what_vllm_would_do_otherwise_is_refused(published):
    with pytest.raises(DataError):
        ask(published, [Request((5,), Sampling(4, 0.001), 0)])


def test_a_request_that_vllm_refuses_leaves_the_others_alone(policy, published):
    bad = Request(ids_of(policy, "ab"), Sampling(4), 0, constraint={"regex": "(((("})

    async def main():
        return await asyncio.gather(
            published.generate(bad), *(published.generate(r) for r in some_requests(policy, 3)), return_exceptions=True
        )

    first, *others = asyncio.run(main())
    assert isinstance(first, TrainingError)
    assert "vLLM refused a request" in str(first)
    assert all(c.stop for c in others)


def test_two_event_loops_at_once(policy, published):
    requests = some_requests(policy, 8, seed=9)
    expected = [c.token_ids.tolist() for c in ask(published, requests)]
    result = {}

    def work(name):
        result[name] = [c.token_ids.tolist() for c in ask(published, requests)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert result == {0: expected, 1: expected}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 97}, "max_model_len 97 is longer than the model's context of 96"),
        ({"engine_args": {"no_such_option": 1}}, "no_such_option"),
        ({"engine_args": {"load_format": "auto"}}, "load_format"),
    ],
)
def test_engine_arguments_that_do_not_fit_are_named(policy, options, message):
    with pytest.raises(ConfigError, match=message):
        VLLMOptions(**FAST, **options).open(policy)


def test_an_adapter_is_sent_by_itself():
    policy = tiny(adapter={"r": 4, "alpha": 8})
    whole = sum(t.nbytes for bucket in PlainBackend(policy).named_weights() for _, t in bucket)
    engine = VLLMOptions(**FAST).open(policy)
    try:
        for version in range(1, 5):
            shake(policy, version)
            done = publish(engine, version, PlainBackend(policy).named_weights)
            assert (done.bytes > whole) == (version == 1)  # the weights under it go once
            requests = some_requests(policy, 6, seed=version, temperature=(1.0, 0.7)[version % 2])
            completions = ask(engine, requests)
            assert gap(policy, requests, completions) < 1e-4
            assert {v for c in completions for v in c.versions.tolist()} == {version}
        check_publishing_under_way(policy, engine, publishes=5)
        assert len(list(engine._adapter.folder.iterdir())) <= 8  # those that were still needed at the last publish
        publish(engine, engine.version + 1, PlainBackend(policy).named_weights)
        assert len(list(engine._adapter.folder.iterdir())) == 3
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cache_that_is_far_too_small_costs_time_only(monkeypatch):
    """vLLM takes memory away from requests under way, and computes them anew: 40 of 16 blocks each, in 60 blocks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    policy = tiny(context=512)
    arguments = {
        "block_size": 32,
        "num_gpu_blocks_override": 60,
        "scheduler_cls": "counting_scheduler.CountingScheduler",
    }
    engine = VLLMOptions(**FAST, engine_args=arguments).open(policy)
    try:
        publish(engine, 1, PlainBackend(policy).named_weights)
        requests = some_requests(policy, 40, seed=20, max_new_tokens=440, ignore_eos=True)
        completions = ask(engine, requests)
        assert engine._host.log.read_text().count("PREEMPTED") > 20
        assert {len(c.token_ids) for c in completions} == {440}
        assert gap(policy, requests, completions) < 1e-4
        for request, completion in list(zip(requests, completions, strict=True))[
            ::13
        ]:  # by itself, without any preemption
            (alone,) = ask(engine, [request])
            assert alone.token_ids.tolist() == completion.token_ids.tolist()
        check_publishing_under_way(policy, engine, publishes=2)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_split_over_two_workers():
    policy = tiny(heads=4, kv_heads=2)
    engine = VLLMOptions(**FAST, tensor_parallel_size=2).open(policy)
    try:
        for version in range(1, 4):
            shake(policy, version)
            publish(engine, version, PlainBackend(policy).named_weights)
            requests = some_requests(policy, 12, seed=version)
            assert gap(policy, requests, ask(engine, requests)) < 1e-4
        assert engine.mismatched_weights(PlainBackend(policy).named_weights) == []
        norm = policy.causal_lm.model.norm.weight
        published = norm.detach().clone()
        with torch.no_grad():
            norm.add_(0.5)
        assert engine.mismatched_weights(PlainBackend(policy).named_weights) == ["model.norm.weight"]
        with torch.no_grad():
            norm.copy_(published)  # what the engine has is what the tokens before the next publish are compared with
        check_publishing_under_way(policy, engine, publishes=2)
    finally:
        engine.close()


def test_an_engine_that_hangs_is_named(policy):
    """Stopped: at the start, and at a publish. Nothing of it is left."""
    before = set(children())
    with pytest.raises(WaitTimeoutError, match="the vLLM engine to start"):
        VLLMOptions(**FAST, start_timeout=0.5).open(policy)
    until(lambda: set(children()) == before, 20, "the process to end")


def test_nothing_is_sampled_before_the_first_publish_and_hanging_and_death_are_told(policy, monkeypatch):
    engine = VLLMOptions(**FAST).open(policy)
    try:
        with pytest.raises(TrainingError, match="no weights before the first publish"):
            ask(engine, some_requests(policy, 1))
        publish(engine, 1, PlainBackend(policy).named_weights)

        async def main():
            os.kill(engine._host.process.pid, signal.SIGSTOP)  # so that it owes its answers however fast it is
            work = [
                asyncio.ensure_future(engine.generate(r))
                for r in some_requests(policy, 6, max_new_tokens=80, ignore_eos=True)
            ]
            await asyncio.sleep(0.02)
            os.kill(engine._host.process.pid, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 30)

        os.kill(engine._host.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(engine, "options", dataclasses.replace(engine.options, publish_timeout=1.0))
        with pytest.raises(WaitTimeoutError, match="the vLLM engine to do"):
            publish(engine, 2, PlainBackend(policy).named_weights)
        os.kill(engine._host.process.pid, signal.SIGCONT)

        assert all(isinstance(e, TrainingError) and "process is gone" in str(e) for e in asyncio.run(main()))
        with pytest.raises(TrainingError, match="process is gone"):
            publish(engine, 3, PlainBackend(policy).named_weights)
    finally:
        engine.close()
