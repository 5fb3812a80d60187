"""Policy: a causal LM with its tokenizer, and the two halves that training needs apart, the decoder and the LM head.

Keeping the halves apart lets the learner project only the positions that are trained, in chunks. Whether the head alone
gives the model's own logits is not assumed but tried, once, on a few tokens; models that do more after the head than
the known scalings go through their own forward pass.

Training mode has no randomness but an adapter's dropout, and that only in the pass that has gradients. Rollouts are
sampled, ratios, KL and mismatch are computed without dropout, so training with the model's own would compare two
different distributions. TRL zeroes it too (`disable_dropout_in_model`). Training mode itself is needed by gradient
checkpointing, whose layers look at their flag `training`, and by an adapter's dropout. So the flag is set on these
modules alone: attention, embeddings and experts below them (dropout, LayerDrop, router noise) never see it.

`Head` is the LM head taken apart: tensors from which logits can be computed a tile at a time, without calling the
module. logits = cap(scale x sum over terms of input_i @ weight_i.T), where a plain head is one term, a bias another of
width 1, and a LoRA adapter a third of width r, so that its low rank stays low. A head that is anything else (quantised,
hooked, another adapter) is not taken apart; the caller then has to call it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedTokenizerBase

from rlvr.errors import ConfigError
from rlvr.policy.adapters import is_adapter
from rlvr.policy.attention import Packing, Spans, attending, try_packing
from rlvr.policy.foreign import foreign
from rlvr.policy.layer_sizes import LayerSizes
from rlvr.policy.quantization import without_quantization


class Policy:
    """A model that is sampled from and trained. `model` is a Hugging Face causal LM, or peft's wrapper of one.

    `dtype` is what is computed in, by autocast where the weights are kept in float32. `adapter_dropout` says whether
    updates use the dropout of the adapter; nothing else is random.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype = torch.float32,
        adapter_dropout: bool = False,
        home: torch.device | None = None,
    ) -> None:
        self.model = model
        self.has_adapter = is_adapter(model)
        """True if `model` is peft's wrapper."""
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.adapter_dropout = adapter_dropout and any(adapter_dropouts(model))
        """True if the pass that has gradients is random."""
        self._training: list[torch.nn.Module] = []
        """The modules that are in training mode, but for what `evaluating` encloses; none outside of an update."""
        # 2^30 where the configuration names no limit (state-space models): nothing is too long then.
        self.context = int(foreign(self.causal_lm.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
        """Longest sequence in tokens, prompt and response together."""
        self.logit_scaling = LogitScaling.of(self.causal_lm)
        self.home = home or self.device
        """The device that is computed on; weights that are going to be shared out wait elsewhere."""
        self.layers = LayerSizes.of(self.causal_lm, self.home.type)
        vocabulary = self.causal_lm.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > vocabulary:
            raise ConfigError(
                f"the tokenizer has {len(tokenizer)} tokens and the model's embedding only {vocabulary}: they do not "
                "belong together"
            )

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model, with adapter layers in place but without peft's wrapper."""
        if self.has_adapter:
            return self.model.base_model.model
        return self.model

    @property
    def device(self) -> torch.device:
        return self.causal_lm.get_input_embeddings().weight.device

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a response: the generation config's, the model's and the tokenizer's."""
        token_ids: set[int] = set()
        generation = foreign(self.causal_lm, "generation_config")
        for owner in (generation, self.causal_lm.config, self.tokenizer):
            ids = foreign(owner, "eos_token_id")
            token_ids |= {ids} if isinstance(ids, int) else set(ids or ())
        return frozenset(token_ids)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def packing(self) -> Packing:
        """Return the packing that the model computes (packed rows, shared prefixes), tried on a few tokens."""
        with torch.no_grad(), self.evaluating():
            # Relative to the largest hidden state. Rounding is about 1e-7 in float32 and 4e-3 in bfloat16 and grows
            # over the layers.
            return try_packing(self.causal_lm, self.hidden_states, 1e-3 if self.dtype == torch.float32 else 5e-2)

    def describe(self, folder: Path) -> None:
        """Write what there is of the plain model but for its weights to `folder`: configuration and tokenizer."""
        config = without_quantization(self.causal_lm.config)
        # vLLM chooses the class of a model by this name.
        config.architectures = config.architectures or [type(self.causal_lm).__name__]  # one never saved has none
        config.save_pretrained(folder)
        if (generation := foreign(self.causal_lm, "generation_config")) is not None:
            generation.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, spans: Spans | None = None
    ) -> torch.Tensor:
        """The decoder's last hidden states, [R, L, H], after the final norm.

        Rows are causal, so padding on the right needs no mask; `spans` say what a packed row's tokens see.
        """
        decoder = self.causal_lm.base_model
        # use_cache=False: a cache of keys would be filled and never read.
        with self.autocast(), attending(spans):
            output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return output.last_hidden_state

    def own_logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, spans: Spans | None = None
    ) -> torch.Tensor:
        """The model's own float32 logits [R, L, V], for models whose head is not enough."""
        with self.autocast(), attending(spans):
            output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return output.logits.float()

    def autocast(self) -> torch.autocast:
        """Return the context in which a pass computes in `dtype`."""
        # Off in float32, which autocast on a CPU does not take.
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def next_logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Float32 logits [R, V] of the token after each row, whose last column is its last token; fills the cache."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": cache,
            "use_cache": True,
        }
        head_is_enough = self.head_is_enough
        with self.autocast():
            if not head_is_enough:
                return self.model(**inputs, logits_to_keep=1).logits[:, -1].float()
            # [R, H]: the head on the last column alone.
            hidden = self.causal_lm.base_model(**inputs).last_hidden_state[:, -1]
        return self.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The LM head on hidden states [..., H] -> float32 logits [..., V], soft-cap and scale included."""
        with self.autocast():
            logits = self.causal_lm.get_output_embeddings()(hidden)
        return self.logit_scaling.of_head(logits.float())

    @cached_property
    def head_is_enough(self) -> bool:
        """Return True if decoder and head give the model's own logits, tried on a few tokens."""
        ids = torch.arange(4, device=self.device)[None] % self.causal_lm.config.get_text_config().vocab_size
        positions = torch.arange(4, device=self.device)[None]
        # 1e-3 is above the rounding of float32 and far below any scale, bias or cap that a head could be missing.
        # Scales and caps in bfloat16, as the model's own forward pass has them there, round to 4e-3 each.
        exact = copy.copy(self)
        if all(weight.dtype == torch.float32 for weight in self.causal_lm.parameters()):
            exact.dtype = torch.float32
        tolerance = 1e-3 if exact.dtype == torch.float32 else 1e-2
        with torch.no_grad(), self.evaluating():
            own = exact.own_logits(ids, positions)
            ours = exact.logits(exact.hidden_states(ids, positions))
        return own.shape == ours.shape and torch.allclose(own, ours, atol=tolerance, rtol=tolerance)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Inside, gradient checkpointing and the adapter's dropout are on; everything else stays in evaluation mode."""
        # Restored, not cleared, so that `training` can be nested.
        outer = self._training
        self._training = training_modules(self.model, self.adapter_dropout)
        try:
            with _flagged(self._training, True):
                yield
        finally:
            self._training = outer

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode (no dropout) inside, the mode from before after it. May be nested."""
        with _flagged(self._training, False):
            yield


@dataclass(frozen=True)
class LogitScaling:
    """Operations on the output of a model's head, in this order; None: it is left out."""

    factor: float | None
    """`logit_scale` of the model's configuration (Cohere)."""
    divisor: float | None
    """`logits_scaling` (Granite)."""
    cap: float | None
    """`final_logit_softcapping` (Gemma 2): cap x tanh(logits / cap)."""

    @classmethod
    def of(cls, causal_lm: Any) -> LogitScaling:
        """Return the scaling that a model's configuration names."""
        config = causal_lm.config.get_text_config()
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return cls(*(foreign(config, name) for name in names))

    def of_head(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the model's logits from those of its head, of any shape."""
        if self.factor is not None:
            logits = logits * self.factor
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits


@contextlib.contextmanager
def _flagged(modules: Sequence[torch.nn.Module], on: bool) -> Iterator[None]:
    """Inside, the flag `training` of `modules` is `on`; after it, each is as it was."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = on  # not train(), which goes down to the children
    try:
        yield
    finally:
        for module, flag in zip(modules, before, strict=True):
            module.training = flag


def training_modules(model: torch.nn.Module, adapter_dropout: bool) -> list[torch.nn.Module]:
    """Return the modules whose flag `training` an update sets: those that checkpoint, and the adapter's dropout if
    asked."""
    checkpointing: list[torch.nn.Module] = []
    if model.is_gradient_checkpointing:  # the flag is Hugging Face's, which a module has or has not
        checkpointing = [module for module in model.modules() if foreign(module, "gradient_checkpointing", False)]
    return checkpointing + (list(adapter_dropouts(model)) if adapter_dropout else [])


def adapter_dropouts(model: torch.nn.Module) -> Iterator[torch.nn.Dropout]:
    """Yield the dropout modules of peft's LoRA layers whose probability is above 0."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and ".lora_dropout." in name and module.p > 0:
            yield module


PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
"""Types of a weight that can be multiplied a slice at a time; others are quantised. A fake tensor is a shape without
contents, of which a pass is planned."""


@dataclass(frozen=True)
class Head:
    """Factors of the logits [T, V] of T tokens: `inputs` [T, H_i] and `weights` [V, H_i], one of each per term.

    Without weights the one input is the logits themselves.
    """

    inputs: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...] = ()
    scale: float = 1.0
    """Factor of the logits."""
    cap: float | None = None
    """Soft-cap, after the scale: cap x tanh(logits / cap)."""

    @property
    def vocabulary(self) -> int:
        """V: the rows of the head, those beyond the tokenizer included. Of a partitioned head only while it is
        gathered."""
        if self.weights:
            return self.weights[0].shape[0]
        return self.inputs[0].shape[1]


def head_of(policy: Policy, hidden: torch.Tensor) -> Head | None:
    """The policy's head on hidden states [T, H]; None where it cannot be taken apart."""
    module = policy.causal_lm.get_output_embeddings()
    dtype = None if policy.dtype == torch.float32 else policy.dtype
    with policy.autocast():
        if policy.has_adapter:
            terms = _lora(module, hidden, dtype)
        else:
            terms = _linear(module, hidden, dtype)
    if terms is None:
        return None
    inputs, weights = zip(*terms, strict=True)
    scaling = policy.logit_scaling
    return Head(inputs, weights, (scaling.factor or 1.0) / (scaling.divisor or 1.0), scaling.cap)


@contextlib.contextmanager
def gathered(weights: Iterable[torch.Tensor], written: bool = False) -> Iterator[None]:
    """Inside, weights that DeepSpeed ZeRO-3 has partitioned are whole. Every rank has to come here equally often.

    With `written`, what rank 0 writes into them inside is kept, by all ranks.
    """
    partitioned: dict[int, Any] = {weight.ds_id: weight for weight in weights if hasattr(weight, "ds_id")}
    if not partitioned:
        yield
        return
    import deepspeed

    # By id: gathering is collective, and every rank has to ask for the weights in one order.
    ordered = [partitioned[key] for key in sorted(partitioned)]
    for weight in ordered:  # it may be on its way to a module that shares it
        under_way = weight._z3_optimizer.parameter_offload.module.ds_inflight_param_registry
        if (fetch := under_way.pop(weight, None)) is not None:
            fetch.wait()
    if written:
        with deepspeed.zero.GatheredParameters(ordered, modifier_rank=0):
            yield
        return
    absent = [weight for weight in ordered if weight.ds_status.name == "NOT_AVAILABLE"]
    if absent:
        absent[0].all_gather(param_list=absent)
    try:
        yield
    finally:  # what a module has come to use meanwhile is released with that module
        if idle := [weight for weight in absent if not weight.ds_active_sub_modules]:
            idle[0].partition(param_list=idle)


def gather_until_backward_ends(weights: Iterable[torch.Tensor]) -> None:
    """`gathered` from here, inside a backward pass, to its end.

    A gradient can be accumulated only in a parameter that is whole, and a tied one's comes together last; autograd
    brings it there and DeepSpeed's hook takes it.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(gathered(weights))
    # Called by autograd when the whole backward pass is over; private, and what torch's FSDP uses.
    torch.autograd.Variable._execution_engine.queue_callback(stack.close)


_Terms = list[tuple[torch.Tensor, torch.Tensor]]


def _linear(module: Any, hidden: torch.Tensor, dtype: torch.dtype | None) -> _Terms | None:
    """The terms of a plain `nn.Linear` that nothing was hooked to but DeepSpeed, whose hooks only gather the weight.

    They are computed in `dtype`; None: in the weight's.
    """
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return None
    if type(module.weight) not in PLAIN:
        return None
    if (module._forward_hooks or module._forward_pre_hooks) and not hasattr(module.weight, "ds_id"):
        return None
    dtype = dtype or module.weight.dtype
    terms = [(hidden.to(dtype), module.weight)]
    if module.bias is not None:
        # [T, 1] times [V, 1] transposed adds the bias to every row.
        terms.append((hidden.new_ones(len(hidden), 1, dtype=dtype), module.bias[:, None]))
    return terms


def _lora(module: Any, hidden: torch.Tensor, dtype: torch.dtype | None) -> _Terms | None:
    """The terms of a head under peft, with or without plain LoRA matrices of its own."""
    from peft.tuners.lora import Linear as LoraLinear

    if type(module) is not LoraLinear:
        return _linear(module, hidden, dtype)
    terms = _linear(module.base_layer, hidden, dtype)
    if terms is None or module.disable_adapters or module.merged or module.fan_in_fan_out:
        if terms is not None and module.merged and not module.disable_adapters:
            return terms
        return None
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        down = module.lora_A[name]
        up = module.lora_B[name]
        # DoRA and other variants are no plain sum of products.
        if name in module.lora_variant or up.bias is not None:
            return None
        # [T, r]: the logits get low_rank @ up.weight.T, and the [V, H] product of the two matrices is never made.
        low_rank = down(module.lora_dropout[name](hidden.to(down.weight.dtype))) * module.scaling[name]
        terms.append((low_rank.to(terms[0][0].dtype), up.weight))
    return terms
