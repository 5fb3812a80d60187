"""New weights: they arrive whole, on publish and not before, for tied and untied heads and for adapters."""

import numpy as np
import pytest
import torch
from engine_helpers import ask, gap, shake, small, some_requests

from rlvr.distributed import PlainBackend
from rlvr.rollout import HFEngine, HFEngineOptions
from rlvr.rollout.weights import buckets, weight_buckets

COPY = HFEngineOptions(copy_weights=True)
KINDS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "gemma2": {"architecture": "gemma2", "sliding_window": 8},
    "lora tied": {"adapter": {"r": 4, "alpha": 8}},
    "lora untied": {"adapter": {"r": 4, "alpha": 8}, "tie_word_embeddings": False},
    "lora on some": {"adapter": {"r": 2, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}},
    "biases": {"architecture": "qwen2", "adapter": {"r": 2, "alpha": 8}},
}


@pytest.fixture(params=KINDS)
def policy(request):
    return small(**KINDS[request.param])


def test_a_copy_follows_the_policy_on_publish_and_not_before(policy):
    backend, engine = PlainBackend(policy), HFEngine(policy, COPY)
    requests = some_requests(policy, 6, seed=1)
    before = ask(engine, requests)
    assert gap(policy, requests, before) < 1e-4
    for version in range(1, 6):
        shake(policy, version)
        stale = ask(engine, requests)
        assert [c.token_ids.tolist() for c in stale] == [c.token_ids.tolist() for c in before]
        assert gap(policy, requests, stale) > 1e-2  # the change of weights is one that shows
        assert {v for c in stale for v in c.versions.tolist()} == {version - 1}

        engine.publish(version, backend.named_weights)
        before = ask(engine, requests)
        assert gap(policy, requests, before) < 1e-4
        assert engine.version == version
        assert {v for c in before for v in c.versions.tolist()} == {version}


def test_publishing_leaves_the_policy_as_it_is(policy):
    engine = HFEngine(policy, COPY)
    shake(policy, 1)
    weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    trained = set(policy.trainable())
    engine.publish(1, PlainBackend(policy).named_weights)
    ask(engine, some_requests(policy, 2))
    assert all(torch.equal(p, weights[name]) for name, p in policy.model.named_parameters())
    assert set(policy.trainable()) == trained


def test_shared_weights_need_no_stream(policy):
    engine = HFEngine(policy)
    requests = some_requests(policy, 6, seed=2)
    ask(engine, requests)
    shake(policy, 1)

    def weights():
        raise AssertionError("shared memory needs no stream")

    engine.publish(7, weights)
    completions = ask(engine, requests)
    assert gap(policy, requests, completions) < 1e-4
    assert {v for c in completions for v in c.versions.tolist()} == {7}
    assert all(c.versions.dtype == np.int32 for c in completions)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_names_and_values_of_the_plain_model(kind):
    policy = small(**KINDS[kind])
    plain = small(**{**KINDS[kind], "adapter": None}).model
    shake(policy, 3)
    sent = [weight for bucket in weight_buckets(policy) for weight in bucket]
    assert sorted(name for name, _ in sent) == sorted(plain.state_dict())
    assert "lm_head.weight" in dict(sent)
    assert all(not tensor.requires_grad for _, tensor in sent)
    assert {n: t.shape for n, t in sent} == {n: t.shape for n, t in plain.state_dict().items()}
    plain.load_state_dict(dict(sent))
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, policy.model(input_ids=ids).logits, atol=1e-4)


def test_buckets_keep_to_their_size_and_to_the_order():
    tensors = [(f"t{i}", torch.zeros(n)) for i, n in enumerate([1, 2, 10, 3, 3, 3, 25, 1, 1])]  # 4 bytes each
    cut = list(buckets(iter(tensors), size=40))
    assert [[name for name, _ in bucket] for bucket in cut] == [
        ["t0", "t1"],
        ["t2"],
        ["t3", "t4", "t5"],
        ["t6"],
        ["t7", "t8"],
    ]
    assert [pair[0] for bucket in cut for pair in bucket] == [name for name, _ in tensors]
    assert list(buckets(iter([]))) == []


def test_one_bucket_at_a_time_is_made():
    made = []

    def weights():
        for i in range(6):
            made.append(i)
            yield f"t{i}", torch.zeros(10)

    stream = buckets(weights(), size=80)
    next(stream)
    assert len(made) == 3
