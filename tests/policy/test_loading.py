"""Policies from folders: weights, types, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
from rlvr.distributed.models import model_files
from rlvr.errors import ConfigError
from rlvr.policy import load_policy

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [9, 9, 6, 5, 12, 11, 7, 3]])


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def config(path=None, adapter=None, **more):
    return ModelConfig(
        path=str(path) if path else None, device="cpu", adapter=adapter and LoraConfig(**adapter), **more
    )


# The tokenizer


# The model


# Folders


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_saved_files_are_those_of_transformers(make_policy, tmp_path, tied):
    policy = make_policy(7, tie_word_embeddings=tied, words=["hello"])
    model_files(policy, True, {})(tmp_path)
    expected = logits_of(policy.model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert torch.equal(logits_of(model), expected)
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert tokenizer.encode("a hello\nb") == policy.tokenizer.encode("a hello\nb")
    assert tokenizer.chat_template == policy.tokenizer.chat_template

    again = load_policy(config(tmp_path))
    assert torch.equal(logits_of(again.model), expected)
    assert again.end_ids == policy.end_ids
    assert again.context == policy.context
    assert not again.model.training
    assert all(p.requires_grad for p in again.model.parameters())


def test_weights_that_train_are_float32_whatever_the_file_has(make_policy, tmp_path):
    policy = make_policy()
    policy.model.to(torch.bfloat16).save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    trained = load_policy(config(tmp_path, dtype="bfloat16"))
    assert {p.dtype for p in trained.model.parameters()} == {torch.float32}
    assert trained.dtype == torch.bfloat16


def test_a_path_without_a_model_is_refused_in_words(make_policy, tmp_path):
    with pytest.raises(ConfigError, match=r"model.path: there is no model in /no/such/model .*hub name"):
        load_policy(config("/no/such/model"))
    with pytest.raises(ConfigError, match=r"no config.json"):
        load_policy(config(tmp_path))
    with pytest.raises(ConfigError, match=r"says no model: set model.path .* or model.scratch"):
        load_policy(config())
    with pytest.raises(ConfigError, match=r"the hub model 'nobody/nothing-of-this-name' cannot be loaded"):
        load_policy(config("nobody/nothing-of-this-name"))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def half_the_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def broken_config(folder):
    (folder / "config.json").write_text('{"model_type": ')


def unknown_type(folder):
    (folder / "config.json").write_text('{"model_type": "nobody_knows"}')


def no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    "damage", [no_weights, half_the_weights, broken_config, unknown_type, no_tokenizer], ids=lambda f: f.__name__
)
def test_a_damaged_folder_is_refused_in_words(make_policy, tmp_path, damage):
    model_files(make_policy(), True, {})(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path: the folder .* cannot be loaded"):
        load_policy(config(tmp_path))


def test_attention_that_is_not_installed_is_refused_in_words(make_policy, tmp_path):
    model_files(make_policy(), True, {})(tmp_path)
    for attention in ("flash_attention_2", "no_such_attention"):
        with pytest.raises(ConfigError, match=r"(?i)flash|no_such_attention"):
            load_policy(config(tmp_path, attention=attention))
        with pytest.raises(ConfigError, match=r"(?i)flash|no_such_attention"):
            load_policy(ModelConfig(scratch=ScratchConfig(), device="cpu", attention=attention))


def test_a_device_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="'gpu0' is no device"):
        load_policy(ModelConfig(scratch=ScratchConfig(), device="gpu0"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            load_policy(ModelConfig(scratch=ScratchConfig(), device="cuda"))


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(make_policy, tmp_path):
    make_policy(alphabet="ab").model.save_pretrained(tmp_path)
    make_policy().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="do not belong together"):
        load_policy(config(tmp_path))


# Adapters
