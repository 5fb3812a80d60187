"""A small policy and tokenizer made from nothing: no download, the real architectures.

The tokenizer is one token per character, plus a few words that are one token each, with a chat template. Invariant:
decoding the ids of a text gives the text back, and the same options give the same model for the same seed.
"""

from __future__ import annotations

import re
import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlvr.config import ScratchConfig
from rlvr.errors import ConfigError, nearest

PAD = "<pad>"
END = "<eos>"
UNKNOWN = "<unk>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m['role'] == 'assistant' %}{{ "
    "eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def check_architecture(scratch: ScratchConfig) -> None:
    """ConfigError where transformers has no architecture of this name."""
    name = scratch.architecture
    if name not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.scratch.architecture {name!r} cannot be built: transformers has no model type of this name"
            f"{nearest(name, CONFIG_MAPPING.keys(), '')}"
        )


def build_tokenizer(scratch: ScratchConfig) -> PreTrainedTokenizerFast:
    """The character-level tokenizer; ids in the order pad, eos, unk, roles, words, characters."""
    if scratch.alphabet is not None:
        alphabet = scratch.alphabet
    else:
        alphabet = string.printable[:95] + "\n"
    entries = [PAD, END, UNKNOWN, *ROLES.values(), *scratch.words, *alphabet]
    # dict.fromkeys drops doubles (a word of one character) and keeps the order.
    vocabulary = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # Longest first, since the alternation takes the first that fits: of "<think>" and "<" it must try "<think>" first.
    words = "|".join(re.escape(word) for word in sorted(scratch.words, key=len, reverse=True))
    # With the word "<think>" the text "a<think>b" is split into "a", "<think>", "b"; "<thin" into single characters.
    # [\s\S] is any character with the newline, which "." leaves out.
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[\s\S]" if words else r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES.values()),
        model_max_length=scratch.context,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(
    scratch: ScratchConfig, tokenizer: PreTrainedTokenizerFast, seed: int, attention: str | None
) -> PreTrainedModel:
    """A model with random float32 weights that depend on `seed` only."""
    check_architecture(scratch)
    try:
        config = AutoConfig.for_model(
            scratch.architecture,
            vocab_size=len(tokenizer),
            hidden_size=scratch.hidden_size,
            intermediate_size=scratch.intermediate_size,
            num_hidden_layers=scratch.layers,
            num_attention_heads=scratch.heads,
            num_key_value_heads=scratch.kv_heads,
            head_dim=scratch.head_dim or scratch.hidden_size // scratch.heads,
            max_position_embeddings=scratch.context,
            tie_word_embeddings=scratch.tie_word_embeddings,
            initializer_range=scratch.init_std,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        # The run's own random numbers do not depend on whether its model was built or loaded.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        raise ConfigError(f"model.scratch.architecture {scratch.architecture!r} cannot be built: {error}") from error
