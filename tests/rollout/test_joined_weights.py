"""Products of a decoding step: weights that are joined without a copy, and adapters that are cast once."""

import copy

import pytest
import torch
from engine_helpers import Casts, ask, gap, shake, small, some_requests
from torch import nn

from rlvr.config import LoraConfig
from rlvr.policy import Policy
from rlvr.policy.adapters import add_adapter, lora_terms
from rlvr.rollout import HFEngine, decoder, decoder_products
from rlvr.rollout.decoder import Steps
from rlvr.rollout.decoder_products import MatrixProduct

BOUND = 0.2
"""Largest difference of a log-prob sampled in bfloat16 from the float32 model's (test_decoder_bfloat16.py)."""
LORA = {"r": 16, "target_modules": "all-linear"}


def adapted(architecture="qwen2", targets="all-linear", dtype="bfloat16", **options):
    """A policy with a LoRA adapter whose both factors are random."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, **options}
    policy = small(architecture, adapter={"r": 16, "target_modules": targets}, dtype=dtype, **sizes)
    shake(policy, seed=1, size=0.05)
    return policy


def exactly(policy):
    """The same weights, cast to float32."""
    return Policy(copy.deepcopy(policy.model).float(), policy.tokenizer, torch.float32)


@pytest.mark.parametrize("architecture", ["qwen2", "phi3"])
def test_an_adapter_is_cast_once_for_a_batch_and_once_for_a_publish(architecture):
    policy = adapted(architecture)
    numbers = sum(parameter.numel() for parameter in policy.trainable().values())
    engine = HFEngine(policy)
    requests = some_requests(policy, 6, seed=8, longest=3, distinct=1, max_new_tokens=20, ignore_eos=True)
    ask(engine, requests[:1])  # the trial
    assert engine._decoder.steps is not None
    smallest = min(parameter.numel() for parameter in policy.trainable().values())
    # Of a step norms are cast, of six rows; of the prompt its three tokens.
    assert smallest > 6 * 64
    for _ in range(2):
        with Casts() as casts:
            completions = ask(engine, requests)
        assert sum(size for size in casts.sizes if size >= smallest) == numbers
    assert gap(exactly(policy), requests, completions) < BOUND
    engine._decoder.stale = False
    with Casts() as casts, torch.inference_mode():
        engine.publish(1, lambda: ())
        engine._decoder._refresh(engine._decoder.steps)
        engine._decoder._refresh(engine._decoder.steps)
    assert sum(size for size in casts.sizes if size >= smallest) == numbers


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["k_proj", "gate_proj", "down_proj"]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_with_an_adapter_are_those_of_a_float32_pass(targets, dtype):
    policy = adapted(targets=targets, dtype=dtype)
    requests = some_requests(policy, 10, seed=3, max_new_tokens=16)
    engine = HFEngine(policy)
    completions = ask(engine, requests)
    assert engine._decoder.steps is not None
    exact = exactly(policy)
    assert gap(exact, requests, completions) < (1e-5 if dtype == "float32" else BOUND)
    with exact.model.disable_adapter():
        assert gap(exact, requests, completions) > 2 * BOUND


def test_an_adapter_that_is_switched_off_adds_nothing():
    policy = adapted(dtype="float32")
    requests = some_requests(policy, 6, seed=4, temperature=0.0)
    engine = HFEngine(policy)
    with policy.model.disable_adapter():
        off = ask(engine, requests)
        assert gap(policy, requests, off) < 1e-5
    assert gap(policy, requests, off) > 0.1


@pytest.mark.parametrize("kind", ["dora", "bias", "hooked", "two"])
def test_other_adapters_are_decoded_as_they_compute(kind):
    """DoRA, LoRA with biases and hooked layers are called; two adapters are a sum of four products."""
    import peft

    policy = small("llama", seed=2, hidden_size=64)
    config = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=kind == "dora", lora_bias=kind == "bias")
    model = peft.get_peft_model(policy.model, config)
    if kind == "two":
        model.add_adapter("other", peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"]))
        model.base_model.set_adapter(["default", "other"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    if kind == "hooked":
        layer.register_forward_hook(lambda module, inputs, output: output * 1.5)
    assert (lora_terms(layer) is None) == (kind in ("dora", "bias"))
    policy = Policy(model.eval(), policy.tokenizer)
    requests = some_requests(policy, 6, seed=5)
    engine = HFEngine(policy)
    completions = ask(engine, requests)
    # A hook that a copied block does not have in the trial is a reason for the model's own modules.
    assert engine._decoder.steps is not None or kind in ("hooked", "dora")
    assert gap(policy, requests, completions) < 1e-4


# weights that do not train


@pytest.fixture
def launches_count(monkeypatch):
    """As on a GPU: weights of the right type are joined."""
    for module in (decoder_products, decoder):
        monkeypatch.setattr(module, "by_parts", lambda device, dtype: False)


def frozen(dtype=torch.bfloat16):
    exact = small("qwen2", hidden_size=64, intermediate_size=128)
    shake(exact, seed=1, size=0.05)
    exact.model.to(dtype).requires_grad_(False)
    return Policy(exact.model, exact.tokenizer, dtype)


def storages(policy):
    """Storages of the weights, and bytes of all of them."""
    seen = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in policy.model.parameters()}
    return len(seen), sum(seen.values())


def test_weights_that_do_not_train_become_views_and_take_no_more_memory(launches_count):
    policy = frozen()
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    count, size = storages(policy)
    steps = Steps(policy)
    with torch.inference_mode():
        steps.refresh()
        # Of each layer q, k and v are one, and gate and up: three storages less.
        assert storages(policy) == (count - 2 * 3, size)
        places = {name: weight.data_ptr() for name, weight in policy.model.named_parameters()}
        steps.refresh()
    after = dict(policy.model.named_parameters())
    assert {name: weight.data_ptr() for name, weight in after.items()} == places
    assert all(torch.equal(after[name], weight) and not weight.is_inference() for name, weight in before.items())
    assert all(block.queries._weight is not None for block in steps.blocks)
    assert steps.blocks[0].queries._weight.data_ptr() == after["model.layers.0.self_attn.q_proj.weight"].data_ptr()


def test_what_is_written_into_a_view_is_decoded_with(launches_count):
    policy = frozen(torch.float32)
    engine = HFEngine(policy)
    requests = some_requests(policy, 6, seed=6)
    first = ask(engine, requests)
    assert gap(policy, requests, first) < 1e-5
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "q_proj" in name or "up_proj" in name:
                weight.neg_()
    assert gap(policy, requests, first) > 0.05
    assert gap(policy, requests, ask(engine, requests)) < 1e-5


def test_a_model_whose_weights_are_views_is_trained_copied_and_saved_as_before(launches_count, tmp_path):
    """An adapter's gradients flow through the base model's joined weights."""
    policy = frozen(torch.float32)
    model = add_adapter(policy.model, LoraConfig(**LORA), 0)
    adapter = Policy(model.eval(), policy.tokenizer)
    shake(adapter, seed=3, size=0.05)
    ids = torch.arange(3, 15)[None]

    def gradients():
        loss = adapter.hidden_states(ids, torch.arange(12)[None]).square()[..., ::3].sum()
        return torch.autograd.grad(loss, list(adapter.trainable().values()))

    before = gradients()
    count, size = storages(adapter)
    steps = Steps(adapter)
    with torch.inference_mode():
        steps.refresh()
    assert storages(adapter) == (count - 2 * 3, size)
    for one, other in zip(gradients(), before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = type(merged).from_pretrained(tmp_path)
    for name, weight in merged.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


@pytest.mark.parametrize("kind", ["trains", "is a part of something larger"])
def test_other_weights_stay_where_they_are(launches_count, kind):
    modules = [nn.Linear(8, 4, bias=False), nn.Linear(8, 6, bias=False)]
    if kind != "trains":
        flat = torch.cat([m.weight.detach().flatten() for m in reversed(modules)])
        modules[0].weight = nn.Parameter(flat[48:].view(4, 8), requires_grad=False)
        modules[1].weight = nn.Parameter(flat[:48].view(6, 8), requires_grad=False)
    places = [m.weight.data_ptr() for m in modules]
    x = torch.randn(3, 8)
    want = torch.cat([m(x) for m in modules], -1)
    product = MatrixProduct(modules, torch.float32, lambda: torch.autocast("cpu", enabled=False))
    for copies in (False, True):
        product.refresh(copies)
        assert (product._weight is not None) == copies
        torch.testing.assert_close(product(x), want)
    assert [m.weight.data_ptr() for m in modules] == places
