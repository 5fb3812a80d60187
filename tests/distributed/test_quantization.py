"""QLoRA: the frozen weights in 4 bits, on the CPU. What is trained, sampled with, published and written is one
function."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from zero_ranks import objective, recorded

from rlvr.config import LoraConfig, ModelConfig, OptimConfig
from rlvr.distributed import PlainBackend, World
from rlvr.distributed.models import merged_files, model_files
from rlvr.errors import ConfigError
from rlvr.learner import Learner
from rlvr.planner import shape_of
from rlvr.policy import Snapshot, load_policy
from rlvr.policy.adapters import UNUSED_KERNEL
from rlvr.rollout import Collector, HFEngine, HFEngineOptions
from rlvr.rollout.probe import probe

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


@pytest.fixture
def base(make_policy, tmp_path):
    """A folder with a model whose layers are wide enough for blocks of 4-bit weights."""
    model_files(make_policy(3, hidden_size=64, intermediate_size=128, init_std=0.1), True, {})(tmp_path / "base")
    return str(tmp_path / "base")


def quantized(base, **more):
    config = ModelConfig(
        path=base, device="cpu", dtype="float32", quantization="nf4", adapter=LoraConfig(r=4, alpha=8), **more
    )
    return load_policy(config)


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(policy, optim=None, steps=2):
    """Metrics and the adapter after each of some steps on recorded rollouts."""
    backend = PlainBackend(policy, "sgd")
    learner = Learner(backend, Snapshot(policy), World())
    config = OptimConfig(**{"optimizer": "sgd", "max_grad_norm": 1e9, **(optim or {})})
    metrics = [learner.update(recorded(policy, seed=step), objective(), config, 0.5) for step in range(steps)]
    return backend, metrics, {name: p.detach().clone() for name, p in policy.trainable().items()}


def test_the_weights_are_in_four_bits_and_stay_as_they_are(base):
    policy = quantized(base)
    frozen = {name: p.detach().clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    packed = {name: p for name, p in frozen.items() if p.dtype == torch.uint8}
    assert len(packed) == 2 * 7  # every linear layer of two blocks
    plain = load_policy(ModelConfig(path=base, device="cpu")).model
    assert sum(p.numel() for p in packed.values()) * 2 == sum(
        m.weight.numel() for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n
    )
    assert not torch.allclose(logits_of(policy.model), logits_of(plain), atol=1e-3)  # four bits lose something
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    *_, after = trained(policy)
    assert all("lora_" in name for name in after)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert all(torch.equal(p, frozen[name]) for name, p in policy.model.named_parameters() if name in frozen)


def test_the_gradient_is_that_of_the_dense_weights_and_the_same_however_it_is_cut(base, tmp_path):
    """The twin is a plain model whose files hold the dequantised weights, under an adapter that begins alike."""
    policy = quantized(base)
    merged_files(policy, True)(tmp_path / "dense")
    twin = load_policy(
        ModelConfig(path=str(tmp_path / "dense"), device="cpu", dtype="float32", adapter=LoraConfig(r=4, alpha=8))
    )
    begin = {name: p.detach().clone() for name, p in policy.trainable().items()}
    assert all(torch.equal(begin[name], p) for name, p in twin.trainable().items())
    _, metrics, want = trained(twin)
    for optim in ({}, {"micro_batch_size": 2}, {"packing": True, "share_prefix": True, "micro_batch_tokens": 25}):
        policy = quantized(base)
        _, result, got = trained(policy, optim)
        gap = sum(float((got[n] - want[n]).square().sum()) for n in want) ** 0.5
        moved = sum(float((want[n] - begin[n]).square().sum()) for n in want) ** 0.5
        assert gap < 1e-5 * moved
        assert [m["grad_norm"] for m in result] == pytest.approx([m["grad_norm"] for m in metrics], rel=1e-5)


def test_an_engine_with_a_copy_samples_with_what_was_trained(base):
    policy = quantized(base)
    backend, *_ = trained(policy)
    engine = HFEngine(policy, HFEngineOptions(copy_weights=True))
    assert not any(p.dtype == torch.uint8 for p in engine.policy.model.parameters())
    engine.publish(1, backend.named_weights)
    assert torch.allclose(logits_of(engine.policy.model), logits_of(policy.model), atol=1e-5)
    collector = Collector()
    try:
        probe(engine, policy, collector, backend.named_weights)
        probe(HFEngine(policy), policy, collector)
    finally:
        collector.close()


def test_the_merged_files_are_a_plain_model_that_computes_the_same(base, tmp_path):
    policy = quantized(base)
    trained(policy)
    merged_files(policy, True)(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not hasattr(plain.config, "quantization_config")
    assert torch.allclose(logits_of(plain), logits_of(policy.model), atol=1e-5)
    model_files(policy, True, {})(tmp_path / "adapter")
    again = quantized(str(tmp_path / "adapter"))
    assert torch.allclose(logits_of(again.model), logits_of(policy.model), atol=1e-6)


def test_memory_counts_half_a_byte_for_a_weight_in_four_bits(base):
    policy = quantized(base)
    held = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    state = [m.weight.quant_state for m in policy.model.modules() if hasattr(getattr(m, "weight", None), "quant_state")]
    held += sum(s.absmax.nbytes + s.state2.absmax.nbytes for s in state)
    config = ModelConfig(path=base, device="cpu", dtype="float32", quantization="nf4", adapter=LoraConfig(r=4))
    assert shape_of(config).weights == pytest.approx(held, rel=0.02)


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(ValueError, match=r"`quantization` is for the frozen weights .* set `path` and an `adapter`"):
        ModelConfig(path="x", quantization="nf4")
    with pytest.raises(ConfigError, match=r"model.quantization does not go with distributed.zero_stage 3"):
        load_policy(ModelConfig(path="x", quantization="nf4", adapter=LoraConfig(), device="cpu"), shared_out=True)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(ModelConfig(path="nobody/nothing", quantization="nf4", adapter=LoraConfig(), device="cpu"))


def test_a_kernel_that_is_not_used_is_not_missed_aloud(caplog):
    """bitsandbytes logs it when peft imports it; its other warnings are shown."""
    (package,) = importlib.util.find_spec("bitsandbytes").submodule_search_locations
    source = (Path(package) / "backends" / "cpu" / "ops.py").read_text()
    assert f'"{UNUSED_KERNEL}' in source and "logging.getLogger(__name__)" in source
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning(f"{UNUSED_KERNEL} from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("another")
    assert [record.getMessage() for record in caplog.records] == ["another"]
