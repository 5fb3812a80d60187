"""The bytes that the forward and backward pass of one micro-batch take, beside weights, gradients and optimizer state.

What the decoder's layers take is measured on tensors without contents (rlvr.planner.decoder_passes) and grows linearly
with layers and tokens; what the LM head, the token embedding, the masks of padded rows and the tiles of attention take
is computed here. A micro-batch has its peak at one of five points: at the end of the forward pass through the layers,
in the backward pass of the LM head, in that of the layers, in a tile of their attention, or in that of the token
embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlvr.config import ModelConfig
from rlvr.planner.decoder_passes import DecoderPasses, Line, Way
from rlvr.planner.shape import MemoryParts, Shape
from rlvr.policy.attention.tiles import tiles_within
from rlvr.policy.head_devices import has_triton, tile_for
from rlvr.policy.head_tiles import HeadBuffers, TilePlan, fits, tile_size
from rlvr.policy.loading import dtype_of

# rlvr.rollout.rows.draw: the logits in float32, these over the temperature, their softmax and a padded copy of it. The
# sort of top-k, top-p and min-p (`truncate`) takes more, which is not counted.
LOGITS_COPIES = 4
"""Temporaries of the size of the logits that sampling has."""


def micro_batch_bytes(
    shape: Shape,
    model: ModelConfig,
    tokens: float,
    trained: float,
    length: int,
    padded: bool = False,
    deepspeed: bool = False,
    gpu_memory: float | None = None,
    prefix: int = 0,
) -> MemoryParts:
    """Bytes by part of one micro-batch's forward and backward pass, at their peak.

    `tokens`: of the micro-batch, a shared prefix once; `trained`: those of them that the loss is computed on;
    `length`: of its longest rollout; `padded`: True where each rollout is a row of its own, whose sliding windows are
    masks and whose eager attention keeps its scores, False for packed rows, which keep nothing of pairs of tokens;
    `deepspeed`: True where weights that train are in the type computed in, and each gradient is taken away as soon as
    it is computed; `gpu_memory`: bytes of the GPU that computes it, None for a CPU; `prefix`: tokens of a group that
    are computed once.
    """
    way = way_of(model, deepspeed, on_gpu=gpu_memory is not None)
    # where inputs of layers wait in host memory, the device has one layer at a time
    # One layer's activations are on the device, those of the others in host memory.
    layers = 1 if model.activation_offload else shape.layers
    passes = shape.decoder.passes(way, layers)
    beside = _beside(shape, way, tokens, length, gpu_memory is None) if padded else 0.0
    work = _Work(shape, way, passes, tokens, trained, beside, gpu_memory)
    # autocast's copies of the weights of all layers live until the forward pass ends
    copies = shape.decoder.passes(way).forward.fixed
    # Everything that is alive at one of these moments; their maximum is the micro-batch's peak.
    points = [work.forward(copies), work.head(), work.backward(), work.embedding()]
    if not padded and passes.attention.per_token > 0:
        points.append(work.attention(tile_bytes(shape, way, tokens, length, gpu_memory, prefix)))
    return {name: size for name, size in max(points, key=lambda parts: sum(parts.values())).items() if size}


def way_of(model: ModelConfig, deepspeed: bool = False, on_gpu: bool = False) -> Way:
    """Return the settings of an update on which the memory of the decoder of `model` depends."""
    compute = dtype_of(model)
    return Way(
        compute=compute,
        weights=compute if deepspeed else torch.float32,
        checkpointing=model.checkpoints_activations,
        gradients_stay=not deepspeed,
        # In half precision as on a GPU wherever it is, whose flash attention copies nothing.
        gpu_kernels=on_gpu or compute != torch.float32,
    )


def _beside(shape: Shape, way: Way, tokens: float, length: int, on_cpu: bool) -> float:
    """Bytes that attention of padded rows of `length` tokens keeps of pairs of tokens, and of keys and values where
    there is a mask, beside what is linear in tokens."""
    # shape.scores: bytes for each pair of a token and a position, over all layers.
    scores = shape.scores + (shape.cpu_scores if on_cpu else 0.0)
    every = tokens * length * scores / shape.layers
    windowed = mask = 0.0
    if shape.windowed and length > shape.window:
        # One bool [length, length], which all rows and layers share. In each layer with a window sdpa makes of it what
        # it adds to the scores, [rows, length, length], and of keys and values a copy for each query head.
        mask = length**2
        windowed = way.compute.itemsize * (tokens * length + 2 * tokens * (shape.queries - shape.keys))
    if way.checkpointing:
        # of the layer that is computed again, and as much for gradients
        return mask + 2 * (every + windowed)
    return mask + shape.layers * every + shape.windowed * windowed


@dataclass(frozen=True)
class _Work:
    """One micro-batch, and the points where it may have its peak."""

    shape: Shape
    way: Way
    passes: DecoderPasses
    tokens: float
    trained: float
    beside: float
    """Bytes in the layers that are not linear in tokens."""
    gpu_memory: float | None
    """Bytes of the GPU that computes it; None: a CPU."""

    @property
    def gradient(self) -> float:
        """Of the LM head's weight: it is whole, in the weight's type, before it is added to that of the step."""
        return float(self.way.weights.itemsize * self.shape.head_trained)

    def _layers(self, line: Line) -> MemoryParts:
        # autocast's copies, or gradients of weights that are not yet added to those of the step
        fixed = "temporary gradients"
        if self.way.casts:
            fixed = "weights in bfloat16"
        return {fixed: line.fixed, "activations": line.per_token * self.tokens + self.beside}

    def forward(self, copies: float) -> MemoryParts:
        """At the end of the forward pass through the layers."""
        return self._layers(replace(self.passes.forward, fixed=copies))

    def head(self) -> MemoryParts:
        """In the backward pass of the LM head."""
        parts = self._layers(self.passes.kept)
        # [T, H] three times: the hidden states of trained tokens in the type computed in, their gradient in float32 (4
        # bytes) and again in that type.
        parts["activations"] += self.trained * self.shape.hidden * (4 + 2 * self.way.compute.itemsize)
        logits = logits_bytes(self.shape, self.way, math.ceil(self.trained), self.gpu_memory)
        return parts | {"logits": logits, "gradient of the LM head": self.gradient}

    def backward(self) -> MemoryParts:
        """In the backward pass of the layers. The gradient of a weight that is the embedding's too waits for the
        embedding's."""
        return self._layers(self.passes.backward) | {
            "gradient of the LM head": self.gradient if self.shape.tied else 0.0
        }

    def attention(self, tile: float) -> MemoryParts:
        """In the backward pass of a layer's attention, in tiles of so many bytes."""
        waits = self.gradient if self.shape.tied else 0.0
        return self._layers(self.passes.attention) | {"tiles of attention": tile, "gradient of the LM head": waits}

    def embedding(self) -> MemoryParts:
        """In the backward pass of the token embedding, whose gradient is as large as the LM head's."""
        # Tied: the head's gradient waits while the embedding's, of the same size, is made.
        both = 2 if self.shape.tied else 1
        return {
            "gradient of the LM head": both * self.gradient,
            "activations": self.way.weights.itemsize * self.tokens * self.shape.hidden,
        }


def logits_bytes(shape: Shape, way: Way, trained: int, gpu_memory: float | None) -> float:
    """Bytes of the fused LM head's buffers in the backward pass of so many tokens, on a GPU of so many bytes or a CPU
    (None).

    With triton if this machine has it, and with the one kernel that adds products to float32, as on GPUs of compute
    capability 8 and above. An adapter's matrices of the head are left out.
    """
    on_gpu = gpu_memory is not None
    plan = TilePlan(
        asked={},
        terms=1,
        scale=1.0,
        cap=1.0 if shape.capped else None,
        vocabulary=shape.vocabulary,
        tile=tile_size(torch.device("cpu")) if gpu_memory is None else tile_for(gpu_memory),
        kernels=on_gpu and has_triton(),
        wide_sums=on_gpu,
    )
    trains = shape.head_trained > 0
    with torch.device("meta"):
        hidden = torch.empty(trained, shape.hidden, dtype=way.compute)
        weight = torch.empty(shape.vocabulary, shape.hidden, dtype=way.weights if trains else way.compute)
    # Few logits are kept in the forward pass, in float32.
    kept = 4.0 * trained * shape.vocabulary if fits(trained, plan) else 0.0
    return kept + HeadBuffers(plan, [hidden], [weight], [trains]).nbytes


def layer_bytes(shape: Shape, model: ModelConfig, tokens: float) -> float:
    """Bytes of activations in a pass without gradients."""
    return shape.decoder.passes(way_of(model)).inference.per_token * tokens


def scoring_bytes(shape: Shape, model: ModelConfig, tokens: float, length: int, gpu_memory: float | None) -> float:
    """Bytes of activations in a pass without gradients over packed rows of rollouts of `length` tokens, on a GPU of so
    many bytes or a CPU (None)."""
    way = way_of(model, on_gpu=gpu_memory is not None)
    passes = shape.decoder.passes(way)
    peak = passes.inference.per_token * tokens
    if passes.attention_inference.per_token > 0:
        tile = tile_bytes(shape, way, tokens, length, gpu_memory, backward=False)
        peak = max(peak, passes.attention_inference.per_token * tokens + tile)
    return peak


def tile_bytes(
    shape: Shape,
    way: Way,
    tokens: float,
    length: int,
    gpu_memory: float | None,
    prefix: int = 0,
    backward: bool = True,
) -> float:
    """Bytes of the largest tile of attention of packed rows, where tiles compute it (`micro_batch_bytes`)."""
    tiles = tiles_within(gpu_memory)
    heads = shape.decoder.heads
    own = max(1, length - prefix)
    scores = tiles.most_scores(heads, math.ceil(tokens / length), own, own, causal=True)
    if 0 < prefix < tokens:
        # All queries of a group below its prefix; several groups have as many pairs as this one call.
        scores = max(scores, tiles.most_scores(heads, 1, int(tokens) - prefix, prefix, causal=False))
    return float(scores * tiles.bytes_of_score(way.compute, shape.decoder.caps_attention, backward))


def kept_scores(config: ModelConfig, text: Any) -> float:
    """Bytes of attention scores that eager attention keeps over all layers, for each pair of positions: a float32 for
    each head after the softmax and, with a soft-cap (Gemma 2), one after its tanh."""
    # Gemma 2: rlvr.policy.loading takes eager attention where a model has a soft-cap and the setting is null, since
    # sdpa leaves the cap out.
    cap = getattr(text, "attn_logit_softcapping", None)
    if config.attention != "eager" and (config.attention is not None or cap is None):
        return 0.0
    return (1 if cap is None else 2) * one_score(text)


def one_score(text: Any) -> float:
    """Bytes of a float32 for each head of all layers."""
    return 4.0 * int(text.num_attention_heads) * int(text.num_hidden_layers)
