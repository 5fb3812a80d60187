"""A model's shape from its configuration file: it is built without storage (torch's meta device), so that parameters are
counted, not guessed, for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.config import ModelConfig
from rlvr.planner.micro_batch import kept_per_token, kept_scores
from rlvr.planner.shape import Shape
from rlvr.policy.adapters import add_adapter
from rlvr.policy.loading import dtype_of
from rlvr.policy.scratch import build_model, build_tokenizer

FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: itself, a constant of a byte for 64 of them, and one of four bytes for 256 constants."""


def shape_of(config: ModelConfig) -> Shape:
    """The sizes of the model that `config` describes, from its configuration file alone."""
    compute = dtype_of(config)
    with torch.device("meta"):
        model = _without_storage(config)
        kept = kept_per_token(model)
        if config.adapter is not None:
            model = add_adapter(model.to(compute), config.adapter, 0)
    bare = model.base_model.model if config.adapter is not None else model
    text = bare.config.get_text_config()
    parameters = list(model.parameters())
    layers = int(text.num_hidden_layers)
    width = torch.finfo(compute).bits // 8
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    packed = {}
    if config.quantization is not None:
        others = [m for m in bare.modules() if isinstance(m, torch.nn.Linear) and m is not bare.get_output_embeddings()]
        packed = {m.weight: FOUR_BITS for m in others}
    return Shape(
        weights=round(sum(p.numel() * (4 if p.requires_grad else packed.get(p, width)) for p in parameters)),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        layers=layers,
        hidden=int(text.hidden_size),
        vocabulary=int(text.vocab_size),
        context=int(getattr(text, "max_position_embeddings", 0) or 1 << 30),
        kept=kept,
        scores=kept_scores(config, text),
        keys_and_values=2 * layers * heads * head * width,
    )


def _without_storage(config: ModelConfig) -> Any:
    if config.scratch is not None:
        with torch.device("cpu"):
            tokenizer = build_tokenizer(config.scratch)
        return build_model(config.scratch, tokenizer, 0, None)
    folder = Path(str(config.path)).expanduser()
    where, more = (str(folder), {"local_files_only": True}) if folder.exists() else (str(config.path), {})
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, **more}
    described = AutoConfig.from_pretrained(where, **options)
    return AutoModelForCausalLM.from_config(described, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
