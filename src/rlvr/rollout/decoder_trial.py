"""The trial of the short decoding step: the model against its own modules, before anything is sampled with it.

What is proved is the arithmetic, in float32, where an error of it cannot hide behind rounding: each kind of block with
random weights, large enough that every part of it shows, then the whole model, with prompts of different lengths and a
sliding window that cuts. A model whose weights are in another type is tried as a whole in that type, more loosely.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch

from rlvr.policy import Policy
from rlvr.policy.attention.packing_trial import narrowed
from rlvr.rollout.aligned_cache import RowCache
from rlvr.rollout.decoder import DecoderBlock, NextAttention, RotaryForm, RotaryTables, Rotation, Steps
from rlvr.rollout.decoder_parts import UnfitError, block_parts, feed_forward_of
from rlvr.rollout.rows import CachePlan, LayerShape, SlotCache

# In float32 (epsilon 1.2e-7) sums in another order differ by some epsilon for each layer; a wrong constant or a missing
# part of a block shows far above that with the weights of the trial.
TOLERANCE = 1e-5
"""Largest difference from the model's own numbers, as a share of the largest of them (or of 1)."""
# As for packed rows (Policy.packing): rounding is about 4e-3 and grows over the layers.
ROUNDED = 5e-2
"""The same for a whole model whose weights are in bfloat16; its blocks are held to `TOLERANCE`."""
WINDOW = 3
"""Sliding window of the trial: less than its prompts have."""


def proven(policy: Policy) -> Steps:
    """The short way for `policy`, tried and found equal. UnfitError otherwise."""
    try:
        with torch.inference_mode():
            exact = copy.copy(policy)
            tolerance = ROUNDED
            if all(weight.dtype == torch.float32 for weight in policy.causal_lm.parameters()):
                exact.dtype = torch.float32
                tolerance = TOLERANCE
            with narrowed(policy.causal_lm.config.get_text_config(), WINDOW):
                forms = _forms(exact)
                _try_whole(exact, Steps(exact, forms), tolerance)
            return Steps(policy, forms)
    except UnfitError:
        raise
    except Exception as error:  # a module that only looks like those that are known
        raise UnfitError(f"its layers compute other values ({type(error).__name__}: {error})") from error


def _forms(policy: Policy) -> list[RotaryForm]:
    """The rotary form of each layer with which a block of ours gives what the layer does. UnfitError without one."""
    steps = Steps(policy)
    tried: dict[Any, RotaryForm] = {}
    forms: list[RotaryForm] = []
    for layer, block in zip(policy.causal_lm.base_model.layers, steps.blocks, strict=False):
        # Layers of one kind differ in their weights and number only: one trial stands for all of them.
        kind = _kind(layer)
        if kind not in tried:
            tried[kind] = _tried_form(policy, layer, steps, block.rotation.layer_type)
        forms.append(tried[kind])
    return forms


def _tried_form(policy: Policy, layer: Any, steps: Steps, layer_type: str | None) -> RotaryForm:
    """The first form with which the trial of a layer succeeds."""
    reasons: list[UnfitError] = []
    for form in RotaryForm:
        try:
            _try_block(policy, layer, steps, Rotation(form, layer_type))
        # A form of other widths than the layer's fails in the rotation.
        except (UnfitError, RuntimeError, IndexError) as error:
            reasons.append(error if isinstance(error, UnfitError) else UnfitError(str(error)))
        else:
            return form
    raise reasons[0]


def _kind(layer: Any) -> Any:
    """Return the properties in which a layer may differ from others, except its weights and its number."""
    parts = (layer, layer.self_attn, feed_forward_of(layer))
    plain = [{k: v for k, v in vars(m).items() if isinstance(v, (bool, int, float, str))} for m in parts]
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return *map(type, parts), *(tuple((k, v) for k, v in of.items() if k != "layer_idx") for of in plain), shapes


def _try_block(policy: Policy, layer: Any, steps: Steps, rotation: Rotation) -> None:
    """UnfitError where a copy of `layer` with random weights gives something else than our block does."""
    slots = 7
    width = policy.causal_lm.get_input_embeddings().weight.shape[1]
    layer = copy.deepcopy(layer).eval().float()
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
    parts = block_parts(layer, steps.exact)
    block = DecoderBlock(parts, 0, None, rotation, torch.float32, contextlib.nullcontext)
    block.refresh(steps.copies, torch.float32)
    x = normal(3, width)
    # Rows that have 7, 5 and 2 tokens before the new one.
    positions = torch.tensor([slots, slots - 2, slots - 5], device=device)
    pairs = normal(3, 2, block.shared, slots, block.size)
    expected = _by_module(layer, x, pairs, positions, steps.tables, rotation)
    cache = SlotCache([LayerShape(block.shared, block.size)], CachePlan(3, slots + 1), torch.float32, device, slots + 1)
    cache.placed(3, 0)
    cache.clear(slots + 1)
    for row, count in enumerate(positions.tolist()):  # the module's rows are aligned on the right, ours on the left
        cache.layers[0][:, row, :, :count] = pairs[row, :, :, slots - count :]
    hidden = torch.arange(slots + 1, device=device) > positions[:, None]
    mask = torch.zeros(3, 1, 1, slots + 1, device=device).masked_fill(hidden[:, None, None], -torch.inf)
    angles = {rotation: steps.tables.angles(rotation, positions, slots + 1)}
    output = block(x, angles, NextAttention(cache, positions, slots + 1, None, {None: mask}))
    _compare(output, expected, f"a block {type(layer).__name__} with random weights", TOLERANCE)


def _by_module(
    layer: Any,
    x: torch.Tensor,
    pairs: torch.Tensor,
    positions: torch.Tensor,
    tables: RotaryTables,
    rotation: Rotation,
) -> torch.Tensor:
    """The layer's own output [R, H] for inputs [R, H] at `positions` [R] after keys and values [R, 2, heads, slots,
    D]."""
    slots = pairs.shape[3]
    number = int(layer.self_attn.layer_idx)
    cache = RowCache(number + 1)
    cache.layers[number].update(pairs[:, 0], pairs[:, 1])
    seen = torch.arange(slots + 1, device=x.device) >= (slots - positions)[:, None]
    mask = torch.zeros(len(x), 1, 1, slots + 1, device=x.device).masked_fill(~seen[:, None, None], -torch.inf)
    output = layer(
        x[:, None].clone(),
        attention_mask=mask,
        position_ids=positions[:, None],
        past_key_values=cache,
        use_cache=True,
        position_embeddings=tables.of_module(x[:, None], positions[:, None], rotation.layer_type),
    )
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states[:, 0]


def _try_whole(policy: Policy, steps: Steps, tolerance: float) -> None:
    """UnfitError where the model's own logits differ from ours over a few steps, with prompts of different lengths."""
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    device = policy.device
    length = min(6, policy.context - 3)
    if length < 2:
        raise UnfitError(f"its context of {policy.context} tokens is too short for a trial")
    steps.refresh()
    # [2, length + 3]: a prompt and three steps after it. Multiples of the prime 7919 are spread over the vocabulary.
    ids = (torch.arange(1, 1 + 2 * (length + 3), device=device) * 7919 % vocabulary).view(2, -1)
    seen = torch.ones_like(ids, dtype=torch.bool)
    # The second row is one token shorter, so that the mask and the positions take part.
    seen[1, 0] = False
    positions = (seen.cumsum(-1) - 1).clamp_min(0)
    theirs = RowCache(len(steps.blocks))
    expected = policy.next_logits(ids[:, :length], seen[:, :length], positions[:, :length], theirs)
    # The same prompts aligned on the left: the second loses its first token and has one behind its end.
    prompts = torch.stack([ids[0, :length], ids[1, :length].roll(-1)])
    cache = steps.cache(CachePlan(2, length + 3), length + 3)
    last = torch.tensor([length - 1, length - 2], device=device)
    _compare(steps.read(cache, prompts, last, torch.arange(2, device=device)), expected, "its logits", tolerance)
    for at in range(length, ids.shape[1]):
        inputs = ids[:, at : at + 1], seen[:, : at + 1], positions[:, at : at + 1]
        ours = steps.next_logits(ids[:, at], positions[:, at], at + 1, None, cache)
        _compare(ours, policy.next_logits(*inputs, theirs), "its logits", tolerance)


def _compare(ours: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float) -> None:
    # accepted: max |ours - theirs| <= tolerance max(1, max |theirs|)
    gap = float((ours - expected).abs().max())
    size = float(expected.abs().max())
    if not gap <= tolerance * max(1.0, min(size, 1e6)):  # an infinity proves nothing
        raise UnfitError(f"{what} would be {gap:.1e} off, of {size:.1e}")
