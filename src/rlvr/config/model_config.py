"""The policy: where it comes from, what of it trains, what it is computed in; and frozen models beside it."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rlvr.config.sections import Section


class LoraConfig(Section):
    """A LoRA adapter (Hu et al. 2021), made by peft: only the adapter is trained."""

    r: int = Field(default=16, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input in the pass that has gradients. It is in the gradient alone: ratios, KL and
    `mismatch/*` are of log-probs without it, which costs one forward pass more in each optimizer step."""
    target_modules: list[str] | str = "all-linear"
    """Names of the modules that get an adapter, or `all-linear`."""


class ScratchConfig(Section):
    """A small policy built from random weights, for trying things out without a download."""

    architecture: str = "qwen3"
    """Model type, as transformers names it (qwen3, llama, gemma2 ...)."""
    hidden_size: int = Field(default=64, ge=8)
    """Width of the residual stream."""
    layers: int = Field(default=2, ge=1)
    """Decoder layers."""
    heads: int = Field(default=4, ge=1)
    """Query heads."""
    kv_heads: int = Field(default=2, ge=1)
    """Key and value heads."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of an attention head; null: hidden_size / heads."""
    intermediate_size: int = Field(default=256, ge=8)
    """Width of the feed-forward layers."""
    context: int = Field(default=512, ge=8)
    """Longest context in tokens."""
    alphabet: str | None = None
    """Characters of the character-level tokenizer; null: printable ASCII and newline."""
    words: list[str] = []
    """Strings that are one token each, besides the single characters."""
    tie_word_embeddings: bool = True
    """Share the input embedding with the LM head."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ScratchConfig:
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide hidden_size ({self.hidden_size}), or set head_dim")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        return self


class ModelConfig(Section):
    """A model of the run: the policy, or a frozen one beside it."""

    path: str | None = None
    """A folder with Hugging Face files, or a hub name."""
    scratch: ScratchConfig | None = None
    """Build the model from random weights instead of loading it."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type computed in; auto: bfloat16 on a GPU, float32 on a CPU. Weights that train are kept in float32 in any case,
    because an update of 1e-6 is lost in bfloat16."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto: the GPU when there is one."""
    adapter: LoraConfig | None = None
    """Train a LoRA adapter instead of the weights."""
    quantization: Literal["nf4"] | None = None
    """Keep the frozen weights under an adapter in 4 bits (QLoRA), by bitsandbytes; only for a model that is loaded.
    Passes compute with their values in `dtype`."""
    attention: str | None = None
    """transformers' attention implementation: sdpa, eager, flash_attention_2 ...; null: its own choice for the model,
    but eager where that would be sdpa and the model has an attention soft-cap (Gemma 2), which sdpa leaves out."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. Numbers stay the same: a
    model's own dropout is never active. auto: where the memory plan finds that the update does not fit without
    (docs/memory.md)."""
    activation_offload: bool = False
    """Keep the layers' inputs, which is what `gradient_checkpointing` (needed for it) leaves, in host memory until the
    backward pass: less GPU memory for the time of two copies. Of no use on a CPU."""
    fused_layers: Literal["auto"] | bool = "auto"
    """Triton kernels of Liger-Kernel (the extra `liger`, docs/installation.md) for norms, rotary embedding and SwiGLU:
    fewer launches and less memory traffic. auto: on a GPU, where they are installed and there are some for the model.
    The model is tried with and without them, and must compute the same."""
    compile: bool = False
    """Compile the decoder layers with torch.compile for the passes of the update; sampling is not compiled. The first
    passes take minutes longer; compiled code is kept for the next start in TORCHINDUCTOR_CACHE_DIR, or in
    the folder `rlvr/inductor` of the user's cache."""
    override_config: dict[str, Any] = {}
    """Values in place of those of the model's config.json, which engines and checkpoints get too, for example
    `{max_position_embeddings: 32768, rope_parameters: {rope_theta: 1.0e6}}` to sample longer than the model was trained
    for. Mappings are merged."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources that you trust."""

    @property
    def checkpoints_activations(self) -> bool:
        """`gradient_checkpointing`, false where it is still `auto`, which a run resolves at its start;
        `activation_offload` needs it."""
        return self.gradient_checkpointing is True or self.activation_offload

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if self.path is not None and self.scratch is not None:
            raise ValueError("`path` and `scratch` exclude each other: load a model or build one")
        # 4-bit weights have no gradient, and bitsandbytes quantizes them as they are read from files.
        if self.quantization is not None and (self.adapter is None or self.path is None):
            raise ValueError(
                "`quantization` is for the frozen weights of a model that is loaded: set `path` and an `adapter`"
            )
        if self.override_config and self.path is None:
            raise ValueError("`override_config` is for a model that is loaded: set `path`, or write it in `scratch`")
        if self.activation_offload and self.gradient_checkpointing is False:
            raise ValueError(
                "`activation_offload` keeps what gradient checkpointing leaves: set `gradient_checkpointing: true`"
            )
        return self


class FrozenModelConfig(Section):
    """A model beside the policy, which is asked and never trained: a reward model, an embedder, a judge.

    A model from a `path` is loaded on rank 0, which alone verifies, without gradients, and is never sent to an engine.
    """

    path: str | None = None
    """A folder with Hugging Face files, or a hub name."""
    url: str | list[str] | None = None
    """The address of a server that has the model, such as http://localhost:8000; several equal ones share the
    requests, and stand in for each other."""
    model: str = ""
    """The model's name at the server."""
    key: str | None = None
    """The environment variable that holds the server's key; null: it needs none."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights and of what is computed; auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto: the GPU when there is one."""
    attention: str | None = None
    """transformers' attention implementation; null: its own choice for the model."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens of one forward pass, padding included; a single longer text is a pass by itself."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Only for sources that you trust."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of its servers; empty for a model that is loaded."""
        if self.url is None:
            return ()
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)

    @field_validator("url")
    @classmethod
    def _is_address(cls, written: str | list[str] | None) -> str | list[str] | None:
        for url in [written] if isinstance(written, str) else written or []:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"{url!r} is no address such as http://localhost:8000 (with http:// or https://)")
        return written

    @model_validator(mode="after")
    def _one_origin(self) -> FrozenModelConfig:
        if (self.path is None) == (not self.urls):
            raise ValueError("a frozen model has either a `path` to load or the `url` of a server that has it")
        if self.key is not None and not self.urls:
            raise ValueError("`key` is for the server at `url`; a model from a `path` needs none")
        return self
