"""Adapters: saved, loaded, continued and merged, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlvr.config import LoraConfig, ModelConfig
from rlvr.distributed import PlainBackend
from rlvr.distributed.models import merged_files, model_files, write_base
from rlvr.errors import ConfigError
from rlvr.policy import load_policy
from rlvr.policy.adapters import is_adapter, merge_adapter

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [9, 9, 6, 5, 12, 11, 7, 3]])


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def config(path=None, adapter=None, **more):
    return ModelConfig(
        path=str(path) if path else None, device="cpu", adapter=adapter and LoraConfig(**adapter), **more
    )


def test_an_adapter_depends_on_the_seed_and_changes_nothing_at_first(make_policy):
    plain = make_policy(5)
    one, two, other = (make_policy(seed, adapter={"r": 2}) for seed in (5, 5, 6))
    assert torch.equal(logits_of(one.model), logits_of(plain.model))
    lora = dict(one.trainable().items())
    assert lora
    assert all("lora_" in name for name in lora)
    assert all(torch.equal(p, two.trainable()[name]) for name, p in lora.items())
    assert not all(torch.equal(p, other.trainable()[name]) for name, p in lora.items())


@torch.no_grad()
def moved(policy, seed=0):
    """The policy with its adapter away from zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.trainable().values():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_adapter_is_saved_loaded_continued_and_merged(make_policy, tmp_path, tied):
    base, saved, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    model_files(make_policy(tie_word_embeddings=tied), True, {})(base)
    policy = moved(load_policy(config(base, {"r": 3, "alpha": 6})))
    expected = logits_of(policy.model)
    assert not torch.allclose(expected, logits_of(load_policy(config(base)).model), atol=1e-2)
    model_files(policy, True, {})(saved)
    assert (saved / "adapter_config.json").is_file()
    assert not (saved / "model.safetensors").exists()

    merge_adapter(str(saved), None, str(merged))
    assert not (merged / "adapter_config.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert torch.allclose(logits_of(plain), expected, atol=1e-4)
    assert AutoTokenizer.from_pretrained(merged).get_vocab() == policy.tokenizer.get_vocab()

    continued = load_policy(config(saved, {"r": 3, "alpha": 6}))
    assert is_adapter(continued.model)
    assert len(continued.trainable()) == len(policy.trainable())
    assert torch.allclose(logits_of(continued.model), expected, atol=1e-5)
    whole = load_policy(config(saved))
    assert not is_adapter(whole.model)
    assert torch.allclose(logits_of(whole.model), expected, atol=1e-4)
    assert all(p.requires_grad for p in whole.model.parameters())
    merge_adapter(str(saved), str(base), str(tmp_path / "again"))
    assert torch.allclose(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), expected, atol=1e-4)


def save_base(policy, folder):
    """As the trainer does at the start of a run."""
    write_base(policy, folder, True)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_adapter_on_a_model_from_nothing_can_be_merged(make_policy, tmp_path, tied):
    policy = make_policy(adapter={"r": 2, "alpha": 4}, tie_word_embeddings=tied)
    plain = logits_of(policy.model)
    backend = PlainBackend(policy)
    moved(policy)
    expected = logits_of(policy.model)
    model_files(backend.policy, True, {})(tmp_path / "nameless")
    with pytest.raises(ConfigError, match="does not say its base model: give it with --base"):
        merge_adapter(str(tmp_path / "nameless"), None, str(tmp_path / "out"))

    save_base(policy, tmp_path / "base")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "base")), plain)
    model_files(backend.policy, True, {})(tmp_path / "adapter")
    for folder, base in (("adapter", None), ("nameless", str(tmp_path / "base"))):
        merge_adapter(str(tmp_path / folder), base, str(tmp_path / "out"))
        assert torch.allclose(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected, atol=1e-4)
    assert torch.allclose(logits_of(policy.model), expected)

    merged_files(backend.policy, True)(tmp_path / "whole")
    assert torch.allclose(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")), expected, atol=1e-4)
    assert torch.equal(logits_of(policy.model), expected)


def test_merging_what_is_no_adapter_is_refused(make_policy, tmp_path):
    with pytest.raises(ConfigError, match="there is no folder /no/such"):
        merge_adapter("/no/such", None, str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="there is no adapter in"):
        merge_adapter(str(tmp_path), None, str(tmp_path / "out"))
    model_files(make_policy(adapter={"r": 2}), True, {})(tmp_path)
    with pytest.raises(ConfigError, match=r"base model '/gone' of the adapter cannot be loaded"):
        merge_adapter(str(tmp_path), "/gone", str(tmp_path / "out"))


def test_an_adapter_whose_base_is_gone_is_refused(make_policy, tmp_path):
    policy = make_policy(adapter={"r": 2})
    save_base(policy, tmp_path / "base")
    model_files(policy, True, {})(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"model.path: the folder .*adapter.* cannot be loaded"):
        load_policy(config(tmp_path / "adapter"))


def test_an_adapter_on_modules_that_are_not_there_is_refused(make_policy):
    with pytest.raises(ConfigError, match=r"model.adapter: .*no_such_module"):
        make_policy(adapter={"target_modules": ["no_such_module"]})
