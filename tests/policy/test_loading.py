"""Policies from nothing and from folders: tokenizer, weights, adapters, and what is refused."""

import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
from rlvr.distributed import PlainBackend
from rlvr.distributed.models import merged_files, model_files, write_base
from rlvr.errors import ConfigError
from rlvr.policy import load_policy
from rlvr.policy.adapters import is_adapter, merge_adapter
from rlvr.policy.scratch import build_model, build_tokenizer

WORDS = ["think", "thin", "a|b", "\\boxed{", "<answer>", "two words", "x\ny", "(", "#1", "don't", "."]
PRINTABLE = string.printable[:95] + "\n"
GREEK = "αβγδ é漢🙂\n\t "
TOKENIZERS = {
    "ascii": (build_tokenizer(ScratchConfig()), PRINTABLE),
    "words": (build_tokenizer(ScratchConfig(words=WORDS)), PRINTABLE),
    "unicode": (build_tokenizer(ScratchConfig(alphabet=GREEK, words=["βγ", "漢🙂"])), GREEK),
    "digits": (build_tokenizer(ScratchConfig(alphabet="0123456789+= \n")), "0123456789+= \n"),
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [9, 9, 6, 5, 12, 11, 7, 3]])


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def config(path=None, adapter=None, **more):
    return ModelConfig(
        path=str(path) if path else None, device="cpu", adapter=adapter and LoraConfig(**adapter), **more
    )


# The tokenizer


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_text_comes_back(kind, data):
    tokenizer, alphabet = TOKENIZERS[kind]
    pieces = st.sampled_from([*alphabet, *(WORDS if kind == "words" else ())])
    text = "".join(data.draw(st.lists(pieces, max_size=40)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert len(ids) <= len(text)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_ids_decode_to_text_without_special_tokens(kind, data):
    """What a random policy samples; plain pieces come back in order."""
    tokenizer, _ = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    pieces = [tokenizer.convert_ids_to_tokens(i) for i in ids if i not in tokenizer.all_special_ids]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(pieces)


def test_a_word_is_one_token_and_the_longest_word_wins():
    tokenizer, _ = TOKENIZERS["words"]
    for word in WORDS:
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("thinthinkthi\\boxed{4}", add_special_tokens=False))
    assert pieces == ["thin", "think", "t", "h", "i", "\\boxed{", "4", "}"]


def test_ids_are_in_the_documented_order_and_repeats_take_one():
    tokenizer = build_tokenizer(ScratchConfig(alphabet="aab", words=["ab", "ab", "a"]))
    expected = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "ab", "a", "b"]
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == expected
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.encode("aXb", add_special_tokens=False) == [7, 2, 8]


def test_the_chat_template_writes_roles_as_single_tokens():
    tokenizer, _ = TOKENIZERS["ascii"]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?\n"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|user|>1+1?\n<|assistant|>2<eos><|user|>sure?<|assistant|>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 5 + len("Be brief.1+1?\n2sure?") + 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.apply_chat_template(messages[1:2], tokenize=False) == "<|user|>1+1?\n"


# The model


def test_the_seed_decides_the_weights_and_nothing_else_is_touched(make_policy):
    def weights(seed):
        return make_policy(seed).model.state_dict()

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second, third = weights(3), weights(4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])
    assert all(tensor.dtype == torch.float32 for tensor in first.values())


def test_an_adapter_depends_on_the_seed_and_changes_nothing_at_first(make_policy):
    plain = make_policy(5)
    one, two, other = (make_policy(seed, adapter={"r": 2}) for seed in (5, 5, 6))
    assert torch.equal(logits_of(one.model), logits_of(plain.model))
    lora = dict(one.trainable().items())
    assert lora
    assert all("lora_" in name for name in lora)
    assert all(torch.equal(p, two.trainable()[name]) for name, p in lora.items())
    assert not all(torch.equal(p, other.trainable()[name]) for name, p in lora.items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden_size": 30, "heads": 4}, r"heads \(4\) must divide hidden_size \(30\)"),
        ({"heads": 4, "kv_heads": 3}, r"kv_heads \(3\) must divide heads"),
        ({"architecture": "qwen33"}, "model.scratch.architecture 'qwen33' cannot be built"),
        ({"architecture": "vit"}, "model.scratch.architecture 'vit' cannot be built"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(options, said):
    scratch = ScratchConfig(**options)
    with pytest.raises(ConfigError, match=said):
        build_model(scratch, build_tokenizer(ScratchConfig()), 0, "sdpa")


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
