"""The short decoding step against the models' own modules, and when it is not taken."""

import logging

import numpy as np
import pytest
import torch
from engine_helpers import Spy, ask, compared, gap, ids_of, shake, small, some_requests

from rlvr.rollout import HFEngine, HFEngineOptions, Request, Sampling
from rlvr.rollout.aligned_cache import padded
from rlvr.rollout.decoder_parts import UnfitError
from rlvr.rollout.decoder_trial import proven

FAMILY = ["llama", "qwen2", "qwen3", "gemma", "mistral", "phi3"]


@pytest.fixture(scope="module")
def of_kind():
    """Policies by architecture, built once, with every weight shaken so that norms and biases show."""
    made = {}

    def get(architecture):
        if architecture not in made:
            made[architecture] = small(architecture)
            shake(made[architecture], seed=1)
        return made[architecture]

    return get


@pytest.mark.parametrize("architecture", FAMILY)
def test_logits_are_those_of_the_whole_sequence(of_kind, architecture):
    decoder, worst = compared(of_kind(architecture))
    assert decoder.steps is not None
    assert worst < 1e-5


@pytest.mark.parametrize("architecture", FAMILY)
def test_greedy_tokens_and_log_probs_are_those_of_hugging_face(of_kind, architecture):
    """generate() over the same prompts, padded on the left, and a full forward pass over what was sampled."""
    policy = of_kind(architecture)
    requests = some_requests(policy, 9, seed=5, temperature=0.0, ignore_eos=True)
    completions = ask(HFEngine(policy, HFEngineOptions(max_rows=4)), requests)  # rows that end are refilled
    ids, unused = padded([request.token_ids for request in requests])
    out = policy.causal_lm.generate(
        torch.from_numpy(ids),
        attention_mask=torch.from_numpy(np.arange(ids.shape[1]) >= unused[:, None]).long(),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert [c.token_ids.tolist() for c in completions] == out[:, ids.shape[1] :].tolist()
    assert gap(policy, requests, completions) < 1e-5


def test_an_adapter_is_decoded_as_it_is_trained():
    policy = small("llama", adapter={})
    shake(policy, seed=2)
    decoder, worst = compared(policy)
    assert decoder.steps is not None
    assert worst < 1e-5


def test_a_sliding_window_is_left_to_the_model_once_it_cuts():
    policy = small("mistral", sliding_window=14)
    shake(policy, seed=3)
    decoder, worst = compared(policy)
    assert decoder.steps.window == 14  # reached after five of the twenty steps
    assert worst < 1e-5


def test_new_weights_are_used_at_once(of_kind):
    policy = small("qwen3")
    engine = HFEngine(policy)
    requests = some_requests(policy, 6, seed=2)
    ask(engine, requests)
    assert engine._decoder.steps is not None
    shake(policy, seed=5)
    assert gap(policy, requests, ask(engine, requests)) < 1e-4


@pytest.mark.parametrize("architecture", FAMILY)
def test_the_engine_samples_the_same_either_way(of_kind, architecture, monkeypatch):
    policy = of_kind(architecture)
    requests = some_requests(policy, 12, seed=3, distinct=5, temperature=0.8)
    short = ask(HFEngine(policy), requests, late=3)
    spy = Spy(monkeypatch, policy)
    long = ask(HFEngine(policy), requests, late=3)
    assert spy.decoded_rows
    for one, other in zip(short, long, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("gpt2", "it has no rotary embedding"),
        ("gpt_neox", "it has no list of layers with a norm after them"),
        ("persimmon", "parts that are not supported here: k_layernorm"),
        ("jetmoe", "JetMoeDecoderLayer has no self_attn"),
        ("nanochat", "a block NanoChatDecoderLayer with random weights"),  # turns the other way
    ],
)
def test_other_models_are_left_to_their_modules_and_it_is_said_once(architecture, why, caplog):
    policy = small(architecture)
    engine = HFEngine(policy)
    with caplog.at_level(logging.INFO, "rlvr.rollout.hf"):
        for _ in range(2):
            ask(engine, [Request(ids_of(policy, "abc"), Sampling(3, ignore_eos=True), 0)])
    assert engine._decoder.steps is None
    (message,) = [message for message in caplog.messages if "is decoded by its own modules" in message]
    assert why in message


def test_a_block_that_only_looks_like_one_of_ours_is_found_though_its_weights_hide_it(monkeypatch):
    """With weights this small the two ways agree to 1e-5 on the model itself: the random ones tell them apart."""
    policy = small("llama", init_std=1e-4)
    assert proven(policy)
    attention = policy.causal_lm.base_model.layers[0].self_attn
    monkeypatch.setattr(type(attention), "forward", _with_swapped_angles(type(attention).forward))
    with pytest.raises(UnfitError, match="with random weights"):
        proven(policy)


def _with_swapped_angles(forward):
    def bent(self, hidden_states, position_embeddings, *args, **kwargs):
        cos, sin = position_embeddings
        return forward(self, hidden_states, (sin, cos), *args, **kwargs)

    return bent


def test_logits_that_are_not_finite_prove_nothing(of_kind, monkeypatch):
    policy = of_kind("llama")
    real = policy.next_logits
    monkeypatch.setattr(policy, "next_logits", lambda *inputs: torch.full_like(real(*inputs), -torch.inf))
    with pytest.raises(UnfitError, match="its logits"):
        proven(policy)


def test_the_proof_leaves_the_policy_as_it_was(of_kind):
    policy = of_kind("qwen3")
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    proven(policy)
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in policy.model.named_parameters())
