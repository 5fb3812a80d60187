"""N3 and N7 for the embedded engine: what it samples, and with what log-probs."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from engine_helpers import Spy, ask, gap, ids_of, reference, small, some_requests

from rlvr.rollout import HFEngine, HFEngineOptions, Request, Sampling

ARCHITECTURES = {
    "qwen3": {},
    "llama": {},
    "gemma2": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "gpt2": {},
    "olmo2": {},
    "cohere": {},
}
KINDS = [
    pytest.param(a, tied, id=f"{a}-{'tied' if tied else 'untied'}") for a in ARCHITECTURES for tied in (True, False)
]
KINDS = [kind for kind in KINDS if kind.id not in ("gpt2-untied", "cohere-untied", "olmo2-tied")]


@pytest.fixture(scope="module")
def policy():
    return small()


@pytest.fixture(scope="module")
def of_kind():
    """Policies by architecture, built once."""
    made = {}

    def get(architecture, tied):
        key = architecture, tied
        if key not in made:
            made[key] = small(architecture, tie_word_embeddings=tied, **ARCHITECTURES[architecture])
        return made[key]

    return get


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize(("architecture", "tied"), KINDS)
def test_log_probs_are_the_trainers(of_kind, architecture, tied, temperature, monkeypatch):
    """Prompts of different lengths, rows that finish at different times, requests admitted while others decode."""
    policy = of_kind(architecture, tied)
    spy = Spy(monkeypatch, policy)
    engine = HFEngine(policy)
    requests = some_requests(policy, 14, seed=1, distinct=11, temperature=temperature)
    completions = ask(engine, requests, late=4)
    assert len({len(c.token_ids) for c in completions}) > 1  # rows do finish at different times
    assert min(spy.decoded_rows) < max(spy.decoded_rows)  # and are dropped
    assert len(spy.prefills) > 1  # and others are admitted later
    assert gap(policy, requests, completions) < 1e-4
    for completion in completions:
        assert completion.logprobs.dtype == np.float32
        assert len(completion.logprobs) == len(completion.token_ids) == len(completion.versions) > 0


@pytest.mark.parametrize(("architecture", "tied"), KINDS)
def test_greedy_tokens_are_those_of_a_full_recomputation(of_kind, architecture, tied):
    policy = of_kind(architecture, tied)
    requests = some_requests(policy, 5, seed=2, temperature=0.0, ignore_eos=True)
    for request, completion in zip(requests, ask(HFEngine(policy), requests, late=2), strict=True):
        tokens, logprobs = reference(policy, request)
        assert completion.token_ids.tolist() == tokens
        assert np.allclose(completion.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 4},
        {"top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.0, "top_k": 3},
    ],
    ids=str,
)
def test_sampled_tokens_are_those_of_a_full_recomputation_with_the_same_uniforms(policy, options):
    requests = some_requests(policy, 6, seed=3, **options)
    plain = some_requests(policy, 2, seed=4)  # rows without truncation beside those with it
    completions = ask(HFEngine(policy), requests + plain)
    for request, completion in zip(requests + plain, completions, strict=True):
        tokens, logprobs = reference(policy, request)
        assert completion.token_ids.tolist() == tokens
        assert np.allclose(completion.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize("architecture", ["gemma2", "mistral"])
def test_the_sliding_window_of_these_tests_matters(architecture):
    narrow, wide = small(architecture, sliding_window=8), small(architecture)
    requests = some_requests(wide, 6, seed=1, ignore_eos=True)
    completions = ask(HFEngine(wide), requests)
    assert gap(wide, requests, completions) < 1e-4
    assert gap(narrow, requests, completions) > 1e-2


def test_a_long_completion_outgrows_the_cache_many_times(policy):
    policy = small(context=400)
    requests = some_requests(policy, 3, seed=5, max_new_tokens=300, ignore_eos=True)
    completions = ask(HFEngine(policy), requests)
    assert [len(c.token_ids) for c in completions] == [300] * 3
    assert gap(policy, requests, completions) < 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_of_a_short_prompt_beside_a_long_one_is_not_seen(attention):
    policy = small("llama")
    policy.causal_lm.set_attn_implementation(attention)
    long, short = ids_of(policy, "abcdefghijkl" * 6), ids_of(policy, "b")
    requests = [Request(p, Sampling(10, ignore_eos=True), i) for i, p in enumerate([long, short, short])]
    completions = ask(HFEngine(policy), requests)
    assert np.isfinite(np.concatenate([c.logprobs for c in completions])).all()
    assert gap(policy, requests, completions) < 1e-4


def test_dead_rows_beside_living_ones_do_not_run_past_a_learned_position_table():
    """A finished row stays in the batch for a while: its position must stay where the model has positions."""
    policy = small("gpt2", context=24)
    full = [Request(ids_of(policy, "abcdefghijklabcdefghij"), Sampling(50, ignore_eos=True), 0)]
    short = [Request(ids_of(policy, "ab"), Sampling(15, ignore_eos=True), i) for i in range(1, 40)]
    completions = ask(HFEngine(policy), full + short)
    assert [len(c.token_ids) for c in completions] == [2] + [15] * 39
    assert gap(policy, full + short, completions) < 1e-4


# N7: a request's tokens depend on its prompt, options, seed and the weights only


@pytest.fixture(scope="module")
def forty(policy):
    """Forty requests of 25 prompts, with what each gives when it is alone."""
    requests = some_requests(policy, 40, seed=6, distinct=25, max_new_tokens=16)
    requests += [dataclasses.replace(r, sampling=Sampling(31, 0.8, stop=("ab",))) for r in requests[:3]]
    engine = HFEngine(policy)
    return requests, [ask(engine, [r])[0] for r in requests]


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {}),
        ({}, {"late": 25}),
        ({}, {"late": 42, "ticks": 3}),
        ({"max_rows": 3}, {}),
        ({"max_rows": 1}, {}),
        ({"prefill_tokens": 1}, {}),
        ({"prefill_tokens": 40, "max_rows": 7}, {"late": 10}),
        ({"copy_weights": True}, {}),
    ],
    ids=str,
)
def test_a_request_gives_the_same_whatever_it_is_batched_with(policy, forty, options, how):
    requests, alone = forty
    together = ask(HFEngine(policy, HFEngineOptions(**options)), requests, **how)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.stop, one.text) == (other.stop, other.text)


def test_the_order_of_requests_changes_nothing(policy, forty):
    requests, alone = forty
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = ask(HFEngine(policy), [requests[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place].token_ids.tolist() == alone[i].token_ids.tolist()


def test_a_longer_limit_continues_the_same_tokens(policy, forty):
    requests, alone = forty
    longer = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_new_tokens=40)) for r in requests[:10]
    ]
    for one, other in zip(alone, ask(HFEngine(policy), longer), strict=False):
        assert other.token_ids[: len(one.token_ids)].tolist() == one.token_ids.tolist()


def test_seeds_decide(policy):
    prompt, sampling = ids_of(policy, "abc"), Sampling(24, ignore_eos=True)
    completions = ask(HFEngine(policy), [Request(prompt, sampling, seed) for seed in (1, 2, 3, 1)])
    assert completions[0].token_ids.tolist() == completions[3].token_ids.tolist()
    assert len({tuple(c.token_ids.tolist()) for c in completions}) == 3


# What is computed


def test_equal_prompts_are_prefilled_once(policy, monkeypatch):
    spy = Spy(monkeypatch, policy)
    prompts = [ids_of(policy, text) for text in ("abc", "abcdefg", "ab", "ka")]
    ask(HFEngine(policy), [Request(p, Sampling(4), i) for p in prompts for i in range(16)])
    assert spy.prefills == [(4, 7)]
    assert spy.decoded_rows[0] > 32


def test_a_prefill_keeps_to_its_budget(policy, monkeypatch):
    spy = Spy(monkeypatch, policy)
    requests = some_requests(policy, 30, seed=7, longest=30)
    ask(HFEngine(policy, HFEngineOptions(prefill_tokens=64)), requests)
    assert len(spy.prefills) > 3
    assert sum(rows for rows, _ in spy.prefills) == 30 - sum(len(r.token_ids) == 1 for r in requests)
    assert all(rows == 1 or rows * length <= 64 for rows, length in spy.prefills)


def test_no_more_rows_are_decoded_than_allowed(policy, monkeypatch):
    spy = Spy(monkeypatch, policy)
    engine = HFEngine(policy, HFEngineOptions(max_rows=5))
    ask(engine, some_requests(policy, 23, seed=8))
    assert max(spy.decoded_rows) <= 5


def test_finished_rows_are_not_decoded_on(policy, monkeypatch):
    spy = Spy(monkeypatch, policy)
    limits = [1, 2, 4, 8, 16, 32]
    prompt = ids_of(policy, "abc")
    ask(HFEngine(policy), [Request(prompt, Sampling(n, ignore_eos=True), n) for n in limits])
    assert spy.decoded_rows == [sum(n > step for n in limits) for step in range(1, 32)]


def test_the_engine_leaves_the_policy_as_it_was(policy):
    policy.model.train()
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    try:
        ask(HFEngine(policy), some_requests(policy, 3))
        assert policy.model.training
        assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
        assert all(p.requires_grad for p in policy.model.parameters())
    finally:
        policy.model.eval()


def test_the_engine_gives_way_to_the_loop_after_every_step(policy):
    async def main():
        engine, turns = HFEngine(policy), 0
        task = asyncio.ensure_future(engine.generate(Request((5,), Sampling(40, ignore_eos=True), 0)))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(main()) >= 40


def test_layers_without_keys_and_values_are_refused():
    from rlvr.errors import ConfigError
    from rlvr.rollout.rows import check_cacheable

    class Mixed:
        layer_types = ("linear_attention", "full_attention")

    with pytest.raises(ConfigError, match=r"linear_attention.*use an engine that serves it"):
        check_cacheable(Mixed())
