"""Policies from nothing: their tokenizers, the order of ids, and weights by the seed."""

import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.config import ScratchConfig
from rlvr.errors import ConfigError
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "qwen33"}, "model.scratch.architecture 'qwen33' cannot be built"),
        ({"architecture": "vit"}, "model.scratch.architecture 'vit' cannot be built"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(options, said):
    scratch = ScratchConfig(**options)
    with pytest.raises(ConfigError, match=said):
        build_model(scratch, build_tokenizer(ScratchConfig()), 0, "sdpa")
