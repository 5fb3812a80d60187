"""Memory of a forward and backward pass of a model's decoder: measured, in bytes, on tensors without contents.

Two and three layers of the model run on torch's fake tensors, in the types, with the adapter and the rows of a real
update, and every storage is counted from the operation that makes it to its last reference. Bytes grow linearly with
layers and with tokens, so that four passes give every other one. (Masks and scores of padded rows, which grow with
pairs of tokens, are not among them: rlvr.planner.micro_batch.) The token embedding and the LM head are not run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlvr.config import ModelConfig
from rlvr.planner.measurement_cache import kept
from rlvr.policy.adapters import add_adapter, is_adapter, no_false_alarms
from rlvr.policy.attention import Spans, attending, hook
from rlvr.policy.attention.kernels import kernels_of
from rlvr.policy.attention.tiles import WatchedTiles
from rlvr.policy.foreign import foreign
from rlvr.policy.grouped_experts import autocast_experts
from rlvr.policy.model import training_modules

# Any length would do, since packed rows keep nothing that depends on it; 512 is a usual prompt and divides TOKENS.
RUN = 512
"""Tokens of each run of the packed row that is measured, or as many as a sliding window has."""
# Bytes are a line in tokens, so two points give it. Both are above the size at which the peak changes its place: for
# few tokens it is where weights' gradients are made, for many where activations are.
TOKENS = (8192, 32768)
"""Numbers of tokens at which the passes are measured: large enough that a layer's activations, not its weights'
gradients, decide where its peak is."""
# All runs of a row are computed together, as few long ones are, with a few queries of each in a tile: what is made for
# the queries of a tile is little beside what is made for all of them.
ALL_SCORES = 1 << 62
TILE_QUERIES = 64
"""Queries of each run in a tile of attention that is measured."""
# Two depths give the line in layers: bytes(n) = bytes(2) + (n - 2) (bytes(3) - bytes(2)). From 2 and not from 1, since
# the first layer's input needs no gradient where the embedding is frozen.
DEPTHS = (2, 3)
"""Layers that are measured. The first one is not like the others where the embedding does not train."""


_measured: dict[tuple[type, str], np.ndarray] = {}
"""Results of this process by model and settings, [depth, tokens, field]. A plan needs them many times, for one
layer and for all of them, and each pass takes a second."""


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made inside and that something still refers to."""

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        """`before`: tensors that are not counted."""
        super().__init__()
        self.now = 0
        self.peak = 0
        self.in_backward = False
        """True if operations without gradient are autograd's: it adds two gradients in place, but not under a dispatch
        mode."""
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in before)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every second call asks a fake tensor for its device, which allocates nothing.
        if function is torch.ops.prim.device.default:
            return args[0].fake_device
        # Experts (mixture-of-experts models): torch's own fake kernel refuses float32.
        product = function
        if function is torch.ops.aten._grouped_mm.default:
            product = _grouped_product
        output = product(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        # Autograd adds the second gradient of a tensor in place, but under a dispatch mode it makes a new tensor. That
        # copy does not exist in a real run, so it is no peak.
        if not (self.in_backward and function is torch.ops.aten.add.Tensor and not torch.is_grad_enabled()):
            self.peak = max(self.peak, self.now)
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        # Called when the last reference to the storage goes, as the allocator would free it.
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


@dataclass(frozen=True)
class Line:
    """Bytes that depend on a number of tokens."""

    fixed: float
    per_token: float

    def at(self, tokens: float) -> float:
        """Bytes for so many tokens."""
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True)
class DecoderPasses:
    """Bytes beside the weights, and beside gradients that stay from pass to pass."""

    forward: Line
    """The peak until the forward pass ends."""
    kept: Line
    """The bytes that stay after the forward pass for the backward pass."""
    backward: Line
    """The peak of the backward pass, which begins with a gradient of the hidden states."""
    inference: Line
    """The peak of a forward pass without gradients."""
    attention: Line
    """The most that is there in the backward pass when a tile of attention begins, without the tile
    (rlvr.policy.attention.tiles); 0: a kernel computes attention."""
    attention_inference: Line
    """The same in a forward pass without gradients."""


@dataclass(frozen=True)
class Way:
    """The settings of an update on which the memory of a decoder depends."""

    compute: torch.dtype
    weights: torch.dtype
    """The type of the weights that train. Where they are float32 and `compute` is not, autocast copies them."""
    checkpointing: bool
    """True if layers are computed again in the backward pass."""
    gradients_stay: bool = True
    """True if gradients stay from pass to pass; DeepSpeed takes each away as soon as it is computed."""
    gpu_kernels: bool = True
    """True if attention is computed as on a GPU, False: as on a CPU."""

    @property
    def casts(self) -> bool:
        """True where autocast copies the weights that train to the type computed in."""
        return self.weights != self.compute


@dataclass(frozen=True)
class Given:
    """Properties of a model that was loaded already: what trains, in which type the rest is, and its adapters."""

    trains: frozenset[str] | None
    """Names of the weights that train; None: those of the adapter that is put on it."""
    frozen: torch.dtype | None
    """Type of most weights that do not train; None where all train, or are quantised."""
    adapters: tuple[tuple[str, Any], ...]
    """Names and peft configurations."""

    @classmethod
    def of(cls, model: Any, adapted: bool) -> Given:
        """That of `model`; `adapted`: a plain one gets an adapter."""
        adapters = ()
        if is_adapter(model):
            adapters = tuple(model.peft_config.items())
        freezes = adapted and not adapters
        # An adapter is put on after this; its weights will train and all others will not.
        trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        types = Counter(
            parameter.dtype
            for parameter in model.parameters()
            if parameter.is_floating_point() and (freezes or not parameter.requires_grad)
            # Counted as often as it has dimensions: matrices decide the type, not the many vectors of norms.
            for _ in range(parameter.dim())  # matrices rather than vectors
        )
        return cls(None if freezes else frozenset(trains), next(iter(dict(types.most_common(1))), None), adapters)

    def put_on(self, model: Any) -> Any:
        """`model`, which has no weights and may have fewer layers, with these adapters, and with gradients for the same
        weights."""
        if self.adapters:
            import peft

            (name, first), *others = self.adapters
            with no_false_alarms():
                model = peft.get_peft_model(model, copy.deepcopy(first), adapter_name=name)
                for name, other in others:
                    model.add_adapter(name, copy.deepcopy(other))
        if self.trains is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in self.trains)
        return model


@dataclass(frozen=True)
class DecoderSettings:
    """A model's decoder without its weights."""

    model: type[PreTrainedModel]
    described: Any
    """The model's own configuration."""
    config: ModelConfig
    layers: int
    alike: bool
    """True if all layers have weights of the same shapes that train alike, so that a few of them stand for all."""
    given: Given | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, config: ModelConfig, given: Any = None) -> DecoderSettings:
        """That of `model`, on any device and without an adapter, which `config` may add; or of `given`, the same with
        what was loaded already and may be a peft model."""
        layers = {
            tuple((weight.shape, weight.requires_grad) for weight in module.parameters())
            for module in (model if given is None else given).modules()
            if isinstance(module, GradientCheckpointingLayer)
        }
        depth = int(model.config.get_text_config().num_hidden_layers)
        own = None
        if given is not None:
            own = Given.of(given, adapted=config.adapter is not None)
        return cls(type(model), model.config, config, depth, alike=len(layers) == 1, given=own)

    @property
    def heads(self) -> int:
        """Heads of queries of a layer."""
        return int(self.described.get_text_config().num_attention_heads)

    @property
    def caps_attention(self) -> bool:
        """True if the scores of attention have a soft-cap."""
        return foreign(self.described.get_text_config(), "attn_logit_softcapping") is not None

    @functools.cached_property
    def _identity(self) -> str:
        """All that is measured but for the way, the same in every process. Computed once: a plan asks for it many
        times."""
        adapter = None if self.config.adapter is None else self.config.adapter.model_dump(mode="json")
        given = None if self.given is None else dataclasses.asdict(self.given)
        # Not in the model's configuration as it is written.
        experts = foreign(self.described.get_text_config(), "_experts_implementation")
        settings = [self.described.to_json_string(), experts, self.alike, adapter, given]
        return json.dumps(settings, default=_plain)

    def passes(self, way: Way, layers: int | None = None) -> DecoderPasses:
        """The bytes of all layers, or, where layers are alike, as if there were only `layers` layers; measured once."""
        key = (self.model, f"{self._identity} {way}")
        if key not in _measured:
            depths = DEPTHS if self.alike else (self.layers,)
            shape = (len(depths), len(TOKENS), len(fields(DecoderPasses)))
            _measured[key] = kept(
                *key, shape, lambda: np.asarray([[self._at(way, depth, n) for n in TOKENS] for depth in depths])
            )
        measured = _measured[key][0]
        if self.alike:
            few, more = _measured[key]
            # The line in layers, [tokens, field]; exact where layers are alike.
            measured = few + (more - few) * ((self.layers if layers is None else layers) - DEPTHS[0])
        # The line in tokens for each of the fields: bytes(t) = fixed + slope t.
        slopes = (measured[1] - measured[0]) / (TOKENS[1] - TOKENS[0])
        fixed = measured[0] - slopes * TOKENS[0]
        return DecoderPasses(*(Line(float(a), float(b)) for a, b in zip(fixed, slopes, strict=True)))

    def _at(self, way: Way, layers: int, tokens: int) -> tuple[int, int, int, int, int, int]:
        """The bytes of DecoderPasses for this number of layers and tokens."""
        at_tiles = 0

        @contextlib.contextmanager
        def tile() -> Iterator[None]:
            nonlocal at_tiles
            at_tiles = max(at_tiles, live.now)
            # Of tiles of another size: what it takes is no part of the lines.
            peak = live.peak
            yield
            live.peak = peak

        kind = "cuda" if way.gpu_kernels else "cpu"
        tiles = WatchedTiles(ALL_SCORES, wide_sums=way.gpu_kernels, queries=TILE_QUERIES, watch=tile)
        with _without_log(), FakeTensorMode(allow_non_fake_inputs=True), kernels_of(kind, tiles):
            model = self._fake_model(way, layers)
            # Without the LM head, whose logits are computed in tiles (rlvr.policy.fused_head) and counted in
            # rlvr.planner.micro_batch.
            decoder = (model.base_model.model if is_adapter(model) else model).base_model
            run = _run(self.described.get_text_config())
            # Packed row: tokens / run sequences of `run` tokens, none with a shared prefix (-1).
            spans = Spans(np.full(tokens // run, run), np.full(tokens // run, -1), torch.device("cpu"))
            positions = torch.arange(run).repeat(tokens // run)[None]
            looked_up = model.get_input_embeddings().weight
            weights = list(model.parameters())
            trained = [p for p in weights if p.requires_grad]
            for parameter in trained:
                if way.gradients_stay:
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    parameter.register_post_accumulate_grad_hook(_take_away)
            gradients = [p.grad for p in trained if p.grad is not None]
            before = [*weights, *gradients, *model.buffers(), positions]

            def hidden_states() -> torch.Tensor:
                embedded = torch.zeros(
                    1, tokens, self.described.get_text_config().hidden_size, dtype=next(iter(weights)).dtype
                )
                # The output of an embedding that trains has a gradient; that of a frozen one has none, and then the
                # first layer keeps less.
                embedded.requires_grad_(torch.is_grad_enabled() and looked_up.requires_grad)
                autocast = torch.autocast("cpu", way.compute, enabled=way.compute != torch.float32)
                with autocast, attending(spans):
                    return decoder(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state

            with torch.no_grad(), LiveBytes(before) as live:
                hidden_states()
                inference = live.peak
            at_tiles_inference = at_tiles
            for module in training_modules(model, adapter_dropout=False):
                module.training = True
            with LiveBytes(before) as live:
                # One token [1, H], as the LM head selects the trained ones: hidden states that are not kept are freed
                # before the backward pass.
                chosen = hidden_states().flatten(0, 1).index_select(0, positions[0, :1]).sum()
                forward = live.peak
                # From here on the peak is that of the backward pass.
                kept = live.peak = live.now
                at_tiles = 0
                live.in_backward = True
                chosen.backward()
            return forward, kept, live.peak, inference, at_tiles, at_tiles_inference

    def _fake_model(self, way: Way, layers: int) -> Any:
        described = copy.deepcopy(self.described)
        text = described.get_text_config()
        text.num_hidden_layers = layers
        # A configuration with a kind for each layer (sliding, full) has to have as many as layers.
        if kinds := getattr(text, "layer_types", None):
            text.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
        frozen = way.compute
        # DeepSpeed converts all weights to the type computed in.
        if self.given is not None and self.given.frozen is not None and way.gradients_stay:
            frozen = self.given.frozen
        # As rlvr.policy.loading: sdpa leaves a soft-cap out.
        attention = "eager" if self.caps_attention else "sdpa"
        with torch.device("meta"):
            model: Any = self.model._from_config(described, dtype=frozen, attn_implementation=attention)
            if self.given is not None:
                model = self.given.put_on(model)
            if self.config.adapter is not None and not is_adapter(model):
                model = add_adapter(model, self.config.adapter, 0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(way.weights)
        to_cpu(model)
        if way.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        causal_lm = model.base_model.model if is_adapter(model) else model
        autocast_experts(causal_lm)
        hook(causal_lm)
        return model.eval()


def _run(text: Any) -> int:
    """A power of two, so that `TOKENS` are a multiple of it."""
    # Runs within the window have no keys before their own, of which copies would be made.
    window = getattr(text, "sliding_window", None) or RUN
    return 1 << (min(RUN, int(window)).bit_length() - 1)


def to_cpu(model: torch.nn.Module) -> None:
    """Replace the weights and buffers of a model on the meta device, in place; under FakeTensorMode they stay without
    contents."""
    made: dict[int, Any] = {}
    for module in model.modules():
        # Tied weights are one object in several modules and have to stay one, hence `made` by id.
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if tensors is module._parameters:
                        new = torch.nn.Parameter(new, tensor.requires_grad)
                    made[id(tensor)] = new
                tensors[name] = made[id(tensor)]


def _take_away(parameter: torch.Tensor) -> None:
    parameter.grad = None


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Suppress the tracebacks that torch logs for operations that fake tensors lack; the plan has a line for those."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = disabled


def _plain(value: Any) -> Any:
    """Return a value that JSON does not know as text or a list, the same in every process."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _grouped_product(
    one: torch.Tensor,
    other: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product of tokens and their experts' weights as far as its bytes go: a result and nothing else.

    torch's own function for tensors without contents takes bfloat16 alone (torch/_meta_registrations.py); the kernels
    multiply float32 too, one expert after the other into the result.
    """
    if not isinstance(one, FakeTensor):
        return torch.ops.aten._grouped_mm.default(one, other, offsets, bias, out_dtype)
    if one.dim() == 2 and other.dim() == 2:  # the gradient of the weights: [experts, rows, columns]
        assert offsets is not None
        size = [offsets.shape[0], one.shape[0], other.shape[1]]
    else:
        size = [*one.shape[:-1], other.shape[-1]]
    return torch.empty(size, dtype=out_dtype or one.dtype, device=one.device)
