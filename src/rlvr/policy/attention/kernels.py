"""The kernels that compute the calls of `rlvr.policy.attention.calls`, forward and backward.

Each gives the outputs together with their log-sum-exp, and takes both in its backward pass, so that the outputs of
several calls can be merged (`rlvr.policy.attention.merged`). None makes a tensor with the queries along one dimension
and the keys along another, but for tiles of a fixed size.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from packaging.version import Version
from torch.nn.functional import pad

from rlvr.policy.attention.calls import Gradients, ScoreRule, Segments
from rlvr.policy.attention.padded import CpuFlash, Padded
from rlvr.policy.attention.tiles import Tiles, tiles_of

log = logging.getLogger(__name__)

OLDEST_FLASH_ATTN = "2.7"
WIDEST = 256
"""Largest width of a head that flash attention computes (torch's aten/native/transformers/cuda/flash_attn, and
flash-attn 2)."""


class Kernel(Protocol):
    """Computes one call. Q queries and K keys are those of the call, stretch after stretch, H heads of queries, G of
    keys and values, H a multiple of G; widths D of queries and keys, E of values."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[Q, H, D], [K, G, D], [K, G, E] -> the outputs [Q, H, E], and the natural logarithm of the sum of
        exp(score) over the keys that each query sees, [H, Q], in float32 or float64."""
        ...

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> Gradients:
        """The gradients of queries, keys and values, from that of the outputs.

        With `output` and `lse` of all keys of which the call has a part (merged), it is the part of the gradient that
        flows through the call: a probability is exp(score - lse), and the mean gradient of a query's probabilities is
        gradient . output.
        """
        ...


_computing: ContextVar[tuple[str | None, Tiles | None]] = ContextVar("computing", default=(None, None))


@contextlib.contextmanager
def kernels_of(device_type: str, tiles: Tiles | None = None) -> Iterator[None]:
    """Inside, calls are computed as on this type of device ("cuda", "cpu"), wherever the tensors are; by `tiles`, if
    given, where its kernel is tiles.

    Of use on tensors without contents alone, of which memory and operations are counted.
    """
    token = _computing.set((device_type, tiles))
    try:
        yield
    finally:
        _computing.reset(token)


def kernel_for(query: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule) -> Kernel:
    """The fastest kernel that computes the call on the tensors' device and in their dtype."""
    device_type, tiles = _computing.get()
    device_type = device_type or query.device.type
    width = max(query.shape[-1], value.shape[-1])
    if device_type == "cuda" and takes_any_length(query.device, query.dtype, width, scoring.softcap is not None):
        return TorchFlash() if scoring.softcap is None else FlashAttn()
    square = not segments.causal or bool((segments.key_length == segments.query_length).all())
    plain = scoring.softcap is None and segments.window is None and query.shape[-1] == value.shape[-1]
    if device_type == "cpu" and plain and square:
        return Padded(CpuFlash())
    return Padded(tiles or tiles_of(query.device, device_type))


def takes_any_length(device: torch.device, dtype: torch.dtype, width: int, capped: bool) -> bool:
    """True if a GPU has flash attention for stretches of any length, of heads of this width, with a soft-cap or without
    one; False: its attention is padded tiles."""
    return has_flash(device, dtype) and width <= WIDEST and (not capped or _has_flash_attn())


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a GPU computes flash attention in this type: 16 bits, and from compute capability 8 on, below which
    neither torch (aten/native/transformers/cuda/flash_attn/flash_api.cpp) nor flash-attn 2 has it."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    # Tensors elsewhere, or without contents, stand for those of a GPU that has it (`kernels_of`).
    return device.type != "cuda" or not torch.cuda.is_available() or _is_ampere(device)


@cache
def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_flash_attn() -> bool:
    """True if the package flash-attn 2, which caps scores, can be imported; else a warning says why not, once."""
    try:
        from flash_attn import __version__, flash_attn_interface

        # Before it the two functions had other arguments (flash-attention, commit 83e41b3c).
        if Version(__version__) < Version(OLDEST_FLASH_ATTN):
            raise ImportError(f"it is version {__version__}, and {OLDEST_FLASH_ATTN} is the oldest that is used")
        _ = flash_attn_interface._flash_attn_varlen_forward, flash_attn_interface._flash_attn_varlen_backward
    # Wide, since it is binary code: a wheel for another torch raises ImportError or OSError, and its own checks others.
    # flash-attn 4 alone leaves a namespace without these functions.
    except Exception as error:
        log.warning(
            "soft-caps of attention are computed in tiles of plain torch, whose scores go through memory: the package "
            "flash-attn 2, which caps scores in its kernel, cannot be imported (%s: %s)",
            type(error).__name__,
            error,
        )
        return False
    return True


# Stretches of any length ----------------------------------------------------------------------------------------------


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The last dimension padded with zeros to `width`."""
    if tensor.shape[-1] == width:
        return tensor
    return pad(tensor, (0, width - tensor.shape[-1]))


def _common_width(*tensors: torch.Tensor) -> int:
    """A width that flash attention takes, a multiple of 8, for all of them."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    return -(-widest // 8) * 8


@dataclass(frozen=True)
class TorchFlash:
    """Flash attention 2 for stretches of any length, of torch's own (`torch.nn.attention.varlen` calls the same two
    operators). Flash attention 3 and 4, which torch can put in their place
    (`torch.nn.attention.activate_flash_attention_impl`), are not used."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        where = segments.varlen
        width = _common_width(query, value)
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(_widened(tensor, width) for tensor in (query, key, value)),
            where.query_offsets,
            where.key_offsets,
            where.most_queries,
            where.most_keys,
            0.0,
            segments.causal and segments.window is None,
            False,
            scale=scoring.scale,
            **_torch_window(segments),
        )
        return output[..., : value.shape[-1]], lse

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> Gradients:
        where = segments.varlen
        width = _common_width(query, value)
        # Both belong to dropout, which there is none of.
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, device=query.device)
        gradients = torch.ops.aten._flash_attention_backward(
            *(_widened(tensor, width) for tensor in (gradient, query, key, value, output)),
            lse.contiguous(),
            where.query_offsets,
            where.key_offsets,
            where.most_queries,
            where.most_keys,
            0.0,
            segments.causal and segments.window is None,
            random_state,
            unused,
            scale=scoring.scale,
            **_torch_window(segments),
        )
        return _narrowed(gradients, query, value)


def _torch_window(segments: Segments) -> dict[str, int]:
    """Keys before and after that of a query's own place, which it sees."""
    if segments.window is None:
        return {}
    return {"window_size_left": segments.window - 1, "window_size_right": 0}


def _narrowed(gradients: Any, query: torch.Tensor, value: torch.Tensor) -> Gradients:
    """The gradients without the columns that `_widened` added."""
    of_query, of_key, of_value = gradients
    width = query.shape[-1]
    return of_query[..., :width], of_key[..., :width], of_value[..., : value.shape[-1]]


@dataclass(frozen=True)
class FlashAttn:
    """The package flash-attn 2, which caps scores (`flash_attn/flash_attn_interface.py`: `_flash_attn_varlen_forward`
    and `_flash_attn_varlen_backward`)."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn import flash_attn_interface

        where = segments.varlen
        width = _common_width(query, value)
        output, lse, *_ = flash_attn_interface._flash_attn_varlen_forward(
            *(_widened(tensor, width) for tensor in (query, key, value)),
            where.query_offsets,
            where.key_offsets,
            where.most_queries,
            where.most_keys,
            **self._options(segments, scoring),
        )
        return output[..., : value.shape[-1]], lse

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> Gradients:
        from flash_attn import flash_attn_interface

        where = segments.varlen
        width = _common_width(query, value)
        inputs = [_widened(tensor, width).contiguous() for tensor in (gradient, query, key, value, output)]
        gradients = tuple(torch.empty_like(tensor) for tensor in inputs[1:4])
        flash_attn_interface._flash_attn_varlen_backward(
            *inputs,
            lse.contiguous(),
            *gradients,
            where.query_offsets,
            where.key_offsets,
            where.most_queries,
            where.most_keys,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._options(segments, scoring),
        )
        return _narrowed(gradients, query, value)

    def _options(self, segments: Segments, scoring: ScoreRule) -> dict[str, Any]:
        window = -1 if segments.window is None else segments.window - 1
        return {
            "dropout_p": 0.0,
            "softmax_scale": scoring.scale,
            "causal": segments.causal,
            "window_size_left": window,
            "window_size_right": 0 if segments.causal else -1,
            "softcap": scoring.softcap or 0.0,
            "alibi_slopes": None,
        }
