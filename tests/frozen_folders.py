"""Tiny frozen models of several families, saved as folders."""

from __future__ import annotations

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from rlvr.config import FrozenModelConfig, ScratchConfig
from rlvr.policy.scratch import PAD, UNKNOWN, build_tokenizer
from rlvr.run.loaded_models import LoadedModels

CLASSES = {
    "classifier": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "encoder": AutoModel,
    "causal": AutoModelForCausalLM,
}


def encoder_tokenizer(pair_types: bool):
    """A tokenizer of one and of two texts, as BERT's (with segments) and RoBERTa's (without)."""
    tokenizer = build_tokenizer(ScratchConfig(words=["[CLS]", "[SEP]"]))
    second = 1 if pair_types else 0
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "[CLS]:0 $A:0 [SEP]:0", f"[CLS]:0 $A:0 [SEP]:0 $B:{second} [SEP]:{second}", ids
    )
    # What is not an argument of the constructor is not saved.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=48,
        model_input_names=["input_ids", *(["token_type_ids"] if pair_types else []), "attention_mask"],
    )


@pytest.fixture
def make_folder(tmp_path):
    """`make_folder(family, head, seed=0, context=256, **config)`: the folder of a tiny random model with tokenizer."""

    def make(family: str, head: str = "classifier", seed: int = 0, context: int = 256, **more):
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.3,
        }
        if family == "qwen3":
            tokenizer = build_tokenizer(ScratchConfig(context=context))
            config = AutoConfig.for_model(
                "qwen3",
                vocab_size=len(tokenizer),
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=context,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
                **sizes,
                **{"num_labels": 1, **more},
            )
        else:
            tokenizer = encoder_tokenizer(pair_types=family == "bert")
            kind = {"bert": BertConfig, "roberta": RobertaConfig}[family]
            # RoBERTa's positions begin behind that of its pad token.
            config = kind(
                vocab_size=len(tokenizer),
                max_position_embeddings=64,
                pad_token_id=tokenizer.pad_token_id,
                **sizes,
                **{"num_labels": 1, **more},
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = CLASSES[head].from_config(config, dtype=torch.float32)
        folder = tmp_path / f"{family}-{head}-{seed}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def models():
    """`models(rm=folder, ...)`: these folders as the models of a run."""

    def make(batch_tokens: int = 16384, **folders):
        configs = {
            name: FrozenModelConfig(path=str(folder), device="cpu", batch_tokens=batch_tokens)
            for name, folder in folders.items()
        }
        return LoadedModels(configs)

    return make
