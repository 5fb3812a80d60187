"""One decoding step in few operations, for decoder blocks of the Llama family; other models go through their own
modules.

A step of one token a row is mostly overhead in a general module: masks are built, rotary tables computed, keys repeated
for their query heads. Here the same arithmetic is done over the model's own linear layers, norms and activations,
several of them in one call where they are plain: linear layers of one input are one product, over a copy of their
weights where the model is small, and a plain RMS norm is four operations. An adapter, a hook or a quantised layer is
called as it is.

Invariants:
- A model is decoded here only after its logits were tried against its own forward pass, and each kind of its blocks
  against itself with random weights, large enough that every part of it shows. Otherwise its modules do it, and the log
  says why.
- What is computed with is what the modules held when the newest prompt was read, or when the engine last took new
  weights: within a request that is one and the same. No more than `COPIED` weights are copied, when a prompt is read.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from rlvr.policy import Policy
from rlvr.policy.attention import PREFIX
from rlvr.rollout.rows import GrowingLayer, RowCache

log = logging.getLogger(__name__)

# In float32 (epsilon 1.2e-7) sums in another order differ by some epsilon for each layer; a wrong constant or a missing
# part of a block shows far above that with the weights of the trial.
TOLERANCE = 1e-5
"""Largest difference from the model's own numbers, as a share of the largest of them (or of 1)."""
# A budget, not a measured optimum: 4 million numbers are copied for each prompt that is read. What joining gains is
# measured with the whole step (docs/performance.md, The embedded engine).
COPIED = 1 << 22
"""Weights (16 MiB) that may be copied to join products; copying them is then little beside reading a prompt."""
# `rope_type` of transformers (modeling_rope_utils.py). "dynamic" and "longrope" change their angles with the length,
# for which one table would be wrong.
_FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend on the position only."""
# Names of submodules in transformers' models of the Llama family (Phi-3 has qkv_proj and gate_up_proj). A block with
# any other part, such as a second norm or a router, is not this arithmetic.
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "qkv_proj"}
_MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}


class UnfitError(Exception):
    """Why a model is decoded by its own modules."""


class Decoder:
    """Next-token logits of `policy` over a `RowCache`."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.steps: Steps | None = None
        """The short way, once it was tried and found equal."""
        self.stale = True
        """True if the weights have changed since the last step."""
        self._tried = False

    def next_logits(
        self, ids: torch.Tensor, seen: torch.Tensor | None, positions: torch.Tensor, cache: RowCache
    ) -> torch.Tensor:
        """Float32 logits [R, V] after tokens [R, q] at `positions` [R, q]; their keys and values are added to the
        cache.

        `seen` [R, slots] is true where the cache, these tokens included, holds a token of the row; None where it always
        does.
        """
        if not self._tried:
            self._tried = True
            try:
                self.steps = proven(self.policy)
            except UnfitError as reason:
                kind = type(self.policy.causal_lm).__name__
                log.info("rollout.engine hf: %s is decoded by its own modules: %s", kind, reason)
        self.stale |= cache.length == 0  # a prompt is read: nothing says that the weights are those of the last one
        if self.steps is None:  # some models warn where they are given no mask
            if seen is None:
                seen = ids.new_ones(len(ids), cache.length + ids.shape[1])
        # Prompts (q > 1) go through the model's own modules, which have a causal mask; this way is for one token a row.
        elif ids.shape[1] == 1 and cache.length < self.steps.window:
            if self.stale:
                self.stale = False
                self.steps.refresh()
            return self.steps(ids, seen, positions, cache)
        return self.policy.next_logits(ids, seen, positions, cache)


class Steps:
    """Decoding steps over the modules of a model. UnfitError where a module is not of the form that is known."""

    def __init__(self, policy: Policy) -> None:
        model = policy.causal_lm.base_model
        config = policy.causal_lm.config.get_text_config()
        # The trial's tolerance, and the gain (calls, not arithmetic), were measured in float32 only.
        if policy.dtype != torch.float32 or policy.causal_lm.get_input_embeddings().weight.dtype != torch.float32:
            raise UnfitError("it does not compute in float32")
        if not policy.head_is_enough:
            raise UnfitError("its logits are more than its LM head's")
        if (kind := (config._attn_implementation or "sdpa").removeprefix(PREFIX)) not in ("sdpa", "eager"):
            raise UnfitError(f"its attention is {kind}")
        self._rotary: Any = getattr(model, "rotary_emb", None)
        if getattr(self._rotary, "rope_type", None) not in _FIXED_ROTARY:
            raise UnfitError("it has no rotary embedding, or one that changes with the length")
        if not all(hasattr(model, name) for name in ("layers", "norm")):
            raise UnfitError("it has no list of layers with a norm after them")
        self._embed = policy.causal_lm.get_input_embeddings()
        self._norm = Norm(model.norm)
        self.blocks = [DecoderBlock(layer) for layer in model.layers[: config.num_hidden_layers]]
        self.window = int(getattr(config, "sliding_window", None) or 1 << 30)
        """Used slots up to which no sliding window cuts anything off."""
        self.copies = sum(block.copied for block in self.blocks) <= COPIED
        self._table = torch.empty(0, 0)
        scaled = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        plain = all(getattr(config, name, None) is None for name in scaled)
        if plain:
            self._logits: Any = MatrixProduct([policy.causal_lm.get_output_embeddings()])
        else:
            self._logits = policy.logits
        self.refresh()

    def refresh(self) -> None:
        """Take the weights as they are now."""
        self._norm.refresh()
        if isinstance(self._logits, MatrixProduct):
            self._logits.refresh(self.copies)
        for block in self.blocks:
            block.refresh(self.copies)

    def __call__(
        self, ids: torch.Tensor, seen: torch.Tensor | None, positions: torch.Tensor, cache: RowCache
    ) -> torch.Tensor:
        # x: [R, H]; cos, sin: [R, 1, D], broadcast over the heads; hidden: [R, 1, 1, slots]
        x = self._embed(ids[:, 0])
        cos, sin = self.angles(positions[:, 0], x, cache.length + 1).split(1, 1)
        hidden = None if seen is None else ~seen[:, None, None]
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, cos, sin, hidden, layer)
        return self._logits(self._norm(x))

    def angles(self, positions: torch.Tensor, x: torch.Tensor, least: int) -> torch.Tensor:
        """The rotary table's rows [R, 2, D] at these positions: cosines, and sines with the sign that the halves take.

        `least` is a bound of the positions; where it is beyond the table, a larger one is made.
        """
        # _table: [n, 2, D]. Twice the need, so that it is made a logarithmic number of times.
        if len(self._table) < least:
            every = torch.arange(2 * least, device=x.device)[None]
            cos, sin = self._rotary(x[:1, None], every)
            half = sin.shape[-1] // 2
            # RoFormer (Su et al. 2021, arXiv 2104.09864): x' = x cos + rotate_half(x) sin with rotate_half([a, b]) =
            # [-b, a]. The minus is put into the table, so that a step only swaps the halves.
            self._table = torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)], 1)
        return self._table.index_select(0, positions)


class DecoderBlock:
    """One decoder layer: norm, attention, residual, norm, gated feed-forward, residual."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        for module, supported in ((layer, _LAYER), (attention, _ATTENTION), (mlp, _MLP)):
            names = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
            if not names <= supported:
                raise UnfitError(
                    f"{type(module).__name__} has parts that are not supported here: {', '.join(names - supported)}"
                )
        queries = [m for name in ("q_proj", "k_proj", "v_proj", "qkv_proj") if (m := getattr(attention, name, None))]
        gates = [m for name in ("gate_proj", "up_proj", "gate_up_proj") if (m := getattr(mlp, name, None))]
        self.size = int(attention.head_dim)
        self.scale = float(attention.scaling)
        # Query heads from the output projection, the rest of the joined projection is keys and values in equal parts;
        # so it holds for separate and for fused (qkv_proj) layers, and for grouped queries.
        self.heads = attention.o_proj.in_features // self.size
        self.shared = (sum(m.out_features for m in queries) // self.size - self.heads) // 2
        """Heads of keys, and of values."""
        self._turned = [self.heads, self.shared]
        self.queries = MatrixProduct(queries)
        self.gates = MatrixProduct(gates)
        self.out = MatrixProduct([attention.o_proj])
        self.down = MatrixProduct([mlp.down_proj])
        self.first_norm = Norm(layer.input_layernorm)
        self.second_norm = Norm(layer.post_attention_layernorm)
        self.head_norms = [Norm(m) for name in ("q_norm", "k_norm") if (m := getattr(attention, name, None))]
        if len(self.head_norms) == 1:
            raise UnfitError("it has a norm for the queries only, or for the keys only")
        self.activation = getattr(mlp, "act_fn", None) or mlp.activation_fn
        if type(self.activation) in (nn.SiLU, SiLUActivation):
            self.activation = nn.functional.silu

    @property
    def copied(self) -> int:
        """Weights that are copied where copies are allowed."""
        return self.queries.size + self.gates.size

    def refresh(self, copies: bool) -> None:
        """Take the weights as they are now."""
        for product in (self.queries, self.out, self.gates, self.down):
            product.refresh(copies)
        for norm in (self.first_norm, self.second_norm, *self.head_norms):
            norm.refresh()

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        hidden: torch.Tensor | None,
        layer: GrowingLayer,
    ) -> torch.Tensor:
        """The block's output [R, H] for inputs [R, H]; `hidden` [R, 1, 1, slots] is true where nothing may be seen."""
        # x <- x + O attention(norm(x));  x <- x + W_down (act(W_gate n) * W_up n), n = norm(x)
        x = self.out.onto(x, self._attention(self.first_norm(x), cos, sin, hidden, layer))
        gate, up = self.gates(self.second_norm(x)).chunk(2, -1)
        return self.down.onto(x, self.activation(gate) * up)

    def _attention(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        hidden: torch.Tensor | None,
        layer: GrowingLayer,
    ) -> torch.Tensor:
        rows = len(x)
        shared = self.shared
        # joined: [R, heads + 2 shared, D]; both (queries, then keys): [R, heads + shared, D]; v: [R, shared, D]
        joined = self.queries(x).view(rows, -1, self.size)
        both, v = joined.split_with_sizes([self.heads + shared, shared], 1)
        if self.head_norms:
            normed = zip(self.head_norms, both.split_with_sizes(self._turned, 1), strict=True)
            both = torch.cat([norm(heads) for norm, heads in normed], 1)
        # x' = x cos + swap(x) sin, see `Steps.angles`
        # q: [R, heads, D]; k: [R, shared, D]; keys, values: [R, shared, slots, D]
        half = self.size // 2
        swapped = torch.cat([both[..., half:], both[..., :half]], -1)
        turned = torch.addcmul(both * cos, swapped, sin)  # Su et al. 2021
        q, k = turned.split_with_sizes(self._turned, 1)
        keys, values = layer.append(k, v)
        # The query heads that share keys are rows of one product, so nothing is repeated for them.
        q = (q * self.scale).view(rows, shared, self.heads // shared, self.size)
        scores = q @ keys.transpose(-1, -2)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        return (scores.softmax(-1) @ values).view(rows, -1)


def proven(policy: Policy) -> Steps:
    """The short way for `policy`, tried and found equal. UnfitError otherwise."""
    try:
        with torch.inference_mode():
            steps = Steps(policy)
            tried: set[Any] = set()
            for layer in policy.causal_lm.base_model.layers:
                # Layers of one kind differ in their weights and number only, so one trial stands for all of them.
                if (kind := _kind(layer)) not in tried:
                    tried.add(kind)
                    _try_block(layer, steps)
            _try_whole(policy, steps)
    except UnfitError:
        raise
    except Exception as error:  # a module that only looks like those that are known
        raise UnfitError(f"its modules could not be used: {type(error).__name__}: {error}") from error
    return steps


def _kind(layer: Any) -> Any:
    """Return the properties in which a layer may differ from others, except its weights and its number."""
    parts = (layer, layer.self_attn, layer.mlp)
    plain = [{k: v for k, v in vars(m).items() if isinstance(v, (bool, int, float, str))} for m in parts]
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return *map(type, parts), *(tuple((k, v) for k, v in of.items() if k != "layer_idx") for of in plain), shapes


def _try_block(layer: Any, steps: Steps) -> None:
    """UnfitError where a copy of `layer` with random weights gives something else than our block does."""
    rows = 3
    slots = 7
    width = steps._embed.weight.shape[1]
    layer = copy.deepcopy(layer).eval()
    device = next(layer.parameters()).device
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    # Matrices get rows of norm 1, so that outputs neither vanish nor explode; vectors (norms, biases) get a spread that
    # a forgotten bias or scale would show in.
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            spread = parameter.shape[-1] ** -0.5
        else:
            spread = 0.5
        parameter.copy_(spread * normal(*parameter.shape))
    block = DecoderBlock(layer)
    number = int(layer.self_attn.layer_idx)
    block.refresh(steps.copies)
    x = normal(rows, width)
    # Rows with 0, 2 and 5 unused slots on the left.
    positions = torch.tensor([slots, slots - 2, slots - 5], device=device)
    seen = torch.arange(slots + 1, device=device) >= (slots - positions)[:, None]
    shape = (rows, block.shared, slots, block.size)
    keys = normal(*shape)
    values = normal(*shape)
    ours = GrowingLayer()
    theirs = RowCache(number + 1)
    ours.update(keys, values)
    theirs.layers[number].update(keys, values)
    mask = torch.zeros(rows, 1, 1, slots + 1, device=device).masked_fill(~seen[:, None, None], -torch.inf)
    expected = layer(
        x[:, None],
        attention_mask=mask,
        position_ids=positions[:, None],
        past_key_values=theirs,
        use_cache=True,
        position_embeddings=steps._rotary(x[:, None], positions[:, None]),
    )
    expected = (expected[0] if isinstance(expected, tuple) else expected)[:, 0]
    cos, sin = steps.angles(positions, x, slots + 1).split(1, 1)
    output = block(x, cos, sin, ~seen[:, None, None], ours)
    _compare(output, expected, f"a block {type(layer).__name__} with random weights")


def _try_whole(policy: Policy, steps: Steps) -> None:
    """UnfitError where the model's own logits differ from ours over a few steps, with prompts of different lengths."""
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    length = min(6, policy.context - 3)
    if length < 2:
        raise UnfitError(f"its context of {policy.context} tokens is too short for a trial")
    # [2, length + 3]: a prompt and three steps after it. Multiples of the prime 7919 are spread over the vocabulary.
    ids = (torch.arange(1, 1 + 2 * (length + 3), device=policy.device) * 7919 % vocabulary).view(2, -1)
    seen = torch.ones_like(ids, dtype=torch.bool)
    # The second row is one token shorter, so that the mask and the positions take part.
    seen[1, 0] = False
    positions = (seen.cumsum(-1) - 1).clamp_min(0)
    theirs = RowCache(len(steps.blocks))
    ours = RowCache(len(steps.blocks))
    for cache in (theirs, ours):
        policy.next_logits(ids[:, :length], seen[:, :length], positions[:, :length], cache)
    for at in range(length, ids.shape[1]):
        inputs = ids[:, at : at + 1], seen[:, : at + 1], positions[:, at : at + 1]
        _compare(steps(*inputs, ours), policy.next_logits(*inputs, theirs), "its logits")


def _compare(ours: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    # accepted: max |ours - theirs| <= TOLERANCE max(1, max |theirs|)
    gap = float((ours - expected).abs().max())
    size = float(expected.abs().max())
    if not gap <= TOLERANCE * max(1.0, min(size, 1e6)):  # an infinity proves nothing
        raise UnfitError(f"{what} would be {gap:.1e} off, of {size:.1e}")


class MatrixProduct:
    """Linear modules of one input, their outputs side by side."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)
        self._weight: torch.Tensor | None = None
        """[in, out]"""
        self._bias: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Numbers that are copied to make them one."""
        if len(self.modules) > 1 and self._plain:
            return sum(m.weight.numel() for m in self.modules)
        return 0

    @property
    def _plain(self) -> bool:
        return all(type(m) is nn.Linear and not _hooked(m) for m in self.modules)

    def refresh(self, copies: bool) -> None:
        """Take the weights as they are now; several only where `copies` allows to copy them."""
        self._weight = self._bias = None
        if not self._plain or (len(self.modules) > 1 and not copies):
            return
        weights = [m.weight.detach() for m in self.modules]
        biases = [m.bias for m in self.modules]
        # nn.Linear holds [out, in]; torch.mm and addmm take [in, out]
        self._weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).t()
        if any(b is not None for b in biases):
            there = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
            self._bias = there[0] if len(there) == 1 else torch.cat(there)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, out] of [R, in]."""
        if self._weight is None:
            parts = [module(x) for module in self.modules]
            if len(parts) == 1:
                return parts[0]
            return torch.cat(parts, -1)
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    def onto(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`base` + the product."""
        if self._weight is None:
            return base + self(x)
        # The residual is added by the product itself: one operation and one tensor less.
        sums = torch.addmm(base, x, self._weight)
        if self._bias is None:
            return sums
        return sums.add_(self._bias)


# RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467): y = w x / sqrt(mean(x^2) + e). With H channels that is y =
# (sqrt(H) w) x / sqrt(|x|^2 + H e), which is a norm, hypot, a division and a product; sqrt(H) w and sqrt(H e) are
# computed once for the weights.
class Norm:
    """A norm, computed here where the module was tried and found to be a plain RMS norm."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._epsilon = rms_epsilon(module)
        self._weight: torch.Tensor | None = None
        """sqrt(H) x weight"""
        self._bound = torch.empty(0)
        """sqrt(H x epsilon)"""

    def refresh(self) -> None:
        """Take the weight as it is now."""
        self._weight = None
        if self._epsilon is not None and not _hooked(self.module):
            weight = self.module.weight.detach()
            self._weight, self._bound = (
                weight * len(weight) ** 0.5,
                weight.new_tensor(len(weight) * self._epsilon).sqrt(),
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] of [..., H]."""
        if self._weight is None:
            normed: torch.Tensor = self.module(x)
            return normed
        return _rms(x, self._weight, self._bound)


def rms_epsilon(module: Any) -> float | None:
    """The epsilon of a module that is x / sqrt(mean(x^2) + epsilon) x weight; None where it is something else."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    trial = copy.deepcopy(module)
    weight = module.weight
    generator = torch.Generator(weight.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=weight.device, dtype=weight.dtype)

    with torch.no_grad():
        trial.weight.copy_(normal(*weight.shape))
        # A module that adds 1 to its weight (Gemma) or subtracts the mean (LayerNorm has a bias too) fails this trial
        # and is called as it is.
        sizes = weight.new_tensor([1e-3, 0.1, 1.0, 10.0])[:, None]  # epsilon shows in small ones
        x = sizes * normal(4, *weight.shape)
        bound = weight.new_tensor(len(weight) * epsilon).sqrt()
        ours = _rms(x, trial.weight * len(weight) ** 0.5, bound)
        if torch.allclose(trial(x), ours, rtol=1e-5, atol=1e-6):
            return epsilon
        return None


def _rms(x: torch.Tensor, weight: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|^2 + bound^2) x weight: four operations, of which torch's own rms_norm makes more."""
    return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(bound)).mul_(weight)


def _hooked(module: Any) -> bool:
    # `forward` in the instance's own attributes: accelerate and some patches replace the method of one module.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
