"""A model's shape from its configuration file: it is built without storage (torch's meta device), so that parameters
are counted, not guessed, for every architecture."""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.config import ModelConfig
from rlvr.core.hub_retries import without_retry_lines
from rlvr.planner.decoder_passes import DecoderSettings
from rlvr.planner.micro_batch import kept_scores, one_score
from rlvr.planner.shape import Shape
from rlvr.policy.adapters import add_adapter, is_adapter
from rlvr.policy.attention import PREFIX
from rlvr.policy.attention.packing_trial import unpackable_layers
from rlvr.policy.foreign import foreign
from rlvr.policy.layer_sizes import attention_windows, head_widths, masked_beyond, one_rope_up_to
from rlvr.policy.loading import dtype_of, override_config
from rlvr.policy.quantization import dense_shape, is_quantized, without_quantization
from rlvr.policy.scratch import build_model, build_tokenizer

# QLoRA (Dettmers et al. 2023, arXiv 2305.14314, section 3): blocks of 64 weights with one constant, and double
# quantisation, which keeps these constants in 8 bits with one float32 for 256 of them. 0.5 + 1 / 64 + 4 / 16384 =
# 0.5159 bytes, 4.127 bits.
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: itself, a constant of a byte for 64 of them, and one of four bytes for 256 constants."""


def shape_of(config: ModelConfig, model: Any = None) -> Shape:
    """The sizes of the model that `config` describes, from its configuration file alone; or of `model`, which is loaded
    already, as rlvr.policy.loading.given_policy trains it."""
    compute = dtype_of(config)
    adds = config.adapter is not None and not is_adapter(model)
    with torch.device("meta"):
        empty = _without_storage(config, model)
        decoder = DecoderSettings.of(empty, config, model)
        if config.adapter is not None and adds:
            empty = add_adapter(empty.to(compute), config.adapter, 0)
    here = empty if model is None else model
    bare = here.base_model.model if is_adapter(here) else here
    text = bare.config.get_text_config()
    trained = [p for p in (empty if adds else here).parameters() if p.requires_grad]
    # an adapter that is put on a given model freezes all that the model has
    frozen = [p for p in here.parameters() if not p.requires_grad or (adds and model is not None)]
    layers = int(text.num_hidden_layers)
    width = torch.finfo(compute).bits // 8
    # Some configurations (Qwen 3, Gemma) have a head_dim that is not hidden_size / heads.
    head = foreign(text, "head_dim") or text.hidden_size // text.num_attention_heads
    # Grouped-query attention: fewer heads of keys and values than of queries.
    heads = foreign(text, "num_key_value_heads") or text.num_attention_heads
    # `Shape.masked_beyond` is read for a CPU, whose sdpa computes all scores where values are not as wide as keys.
    of_keys, of_values = head_widths(text)
    head_weight = bare.get_output_embeddings().weight
    packed: set[Any] = set()
    if config.quantization is not None:
        # Linear layers are packed in 4 bits; transformers leaves the LM head as it is.
        packed = {m.weight for m in bare.modules() if isinstance(m, torch.nn.Linear)} - {head_weight}
    # Of a model on the meta device it is what transformers chooses for its class: eager where it has nothing else.
    eager = bare.config._attn_implementation == "eager" and (model is not None or config.attention is None)
    outside = {id(bare.get_input_embeddings().weight), id(head_weight)}
    # Tokens that each layer with a window sees.
    every_window = attention_windows(text)
    windows = [int(window) for window in every_window if math.isfinite(window)]
    scores = kept_scores(config.model_copy(update={"attention": "eager"}) if eager else config, text)
    # The model on the meta device has the attention that transformers chooses for its class.
    attention = "eager" if scores else config.attention or foreign(bare.config, "_attn_implementation") or "sdpa"
    return Shape(
        parameters=sum(map(_numel, [*trained, *frozen])),
        trained=sum(map(_numel, trained)),
        frozen=sum(_frozen_bytes(p, p in packed, None if model is not None else width) for p in frozen),
        largest=max(map(_numel, [*trained, *frozen])),
        # `recurse=False`: ZeRO 3 gathers the parameters that a module has itself.
        largest_module=max(sum(map(_numel, module.parameters(recurse=False))) for module in here.modules()),
        layers=layers,
        hidden=int(text.hidden_size),
        vocabulary=int(text.vocab_size),
        # A configuration without a bound: 2^30 tokens are none in practice.
        context=int(foreign(text, "max_position_embeddings", 0) or 1 << 30),
        decoder=decoder,
        head_trained=head_weight.numel() if head_weight.requires_grad and config.adapter is None else 0,
        tied=head_weight is bare.get_input_embeddings().weight,
        scores=scores,
        queries=int(text.num_attention_heads) * head,
        keys=heads * head,
        # 2 (keys, values) x layers x heads x width of a head x bytes of a number, for one token.
        keys_and_values=2 * layers * heads * head * width,
        # matrices of the decoder: layers' norms and biases are vectors
        linear=sum(_numel(p) for p in bare.parameters() if p.dim() > 1 and id(p) not in outside),
        window=max(windows, default=0),
        windowed=len(windows),
        packs=not unpackable_layers(text),
        one_rope_up_to=one_rope_up_to(text),
        masked_beyond=masked_beyond(attention.removeprefix(PREFIX), every_window, of_keys != of_values),
        cpu_scores=one_score(text) if attention.removeprefix(PREFIX) == "sdpa" and of_keys != of_values else 0.0,
        capped=foreign(text, "final_logit_softcapping") is not None,
    )


def _numel(weight: Any) -> int:
    """The numbers of a weight, whatever it is packed in."""
    return dense_shape(weight, weight.shape).numel()


def _frozen_bytes(weight: Any, packs: bool, width: int | None) -> float:
    """Bytes of a weight that does not train, of `width` bytes for each number (None: those that it has now) or in 4
    bits."""
    if packs or is_quantized(weight):
        return _numel(weight) * FOUR_BITS
    if width is None:
        return weight.nbytes
    return weight.numel() * width


def _without_storage(config: ModelConfig, model: Any) -> Any:
    if model is not None:
        bare = model.base_model.model if is_adapter(model) else model
        return type(bare)._from_config(without_quantization(bare.config), dtype=torch.float32)
    if config.scratch is not None:
        with torch.device("cpu"):
            tokenizer = build_tokenizer(config.scratch)
        return build_model(config.scratch, tokenizer, 0, None)
    described = override_config(_described(config), config.override_config)
    return AutoModelForCausalLM.from_config(described, dtype=torch.float32, trust_remote_code=config.trust_remote_code)


@without_retry_lines()
def _described(config: ModelConfig) -> Any:
    """The model's configuration: its own file from a folder or the hub's cache, else the sizes that are shipped, else
    from the hub."""
    path = str(config.path)
    folder = Path(path).expanduser()
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if folder.exists():
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, **options)
    sizes = shipped_sizes()
    if path not in sizes:
        return AutoConfig.from_pretrained(path, **options)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, **options)
    except OSError:  # not in the cache
        return AutoConfig.for_model(**sizes[path])


@functools.cache
def shipped_sizes() -> dict[str, dict[str, Any]]:
    """Sizes of published models by their hub names, as their config.json has them."""
    shipped = json.loads(resources.files("rlvr.planner").joinpath("model_shapes.json").read_text())
    return {name: {key: value for key, value in sizes.items() if key != "source"} for name, sizes in shipped.items()}
