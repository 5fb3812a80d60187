"""torch.compile of a model's decoder layers, one by one: a graph is compiled once and serves all layers of a kind.

Layers and not the whole decoder, because compiling takes time in proportion to the graph (prime-rl does the same:
src/prime_rl/trainer/model.py at 559b447, `apply_compile`). Sizes are dynamic, so that rows of new lengths compile
nothing. Two things run as they did: attention of packed rows (`rlvr.policy.attention`), whose blocks differ from batch
to batch, and a layer with a cache, with which an engine samples.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from rlvr.core.cache_folder import cache_folder
from rlvr.errors import ConfigError
from rlvr.policy.attention import PREFIX
from rlvr.policy.foreign import foreign

# A layer is compiled for passes with and without gradients, for padded and for packed rows, with dynamic sizes and once
# before they are known to be so, for each kind of layer. torch's 8 would end in passes that are not compiled; prime-rl
# sets 16 and 64.
RECOMPILES = 64
"""Graphs of a function at most."""
logger = logging.getLogger(__name__)


def compile_layers(causal_lm: Any, backend: str = "inductor") -> None:
    """Let the layers of a model compile themselves when they are first called.

    ConfigError for a model without layers that transformers marks as such (`GradientCheckpointingLayer`).
    """
    layers = [module for module in causal_lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"model.compile: the decoder layers of {type(causal_lm).__name__} are not known to transformers: set it "
            "to false"
        )
    keep_compiled_code()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    for layer in layers:
        # Where nn.Module.compile puts it; calls with hooks, and of gradient checkpointing, go there.
        layer._compiled_call_impl = _CompiledCall(layer, backend)
    causal_lm.base_model.register_forward_pre_hook(_leave_attention_out)
    logger.info("%d decoder layers are compiled when they are first called, which takes a minute or two", len(layers))


class _CompiledCall:
    """The compiled call of a layer, or its own where it has a cache."""

    def __init__(self, layer: torch.nn.Module, backend: str) -> None:
        self._own = layer._call_impl
        self._compiled = torch.compile(layer._call_impl, dynamic=True, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A cache counts its layers and grows by a token a step: each would compile a graph of its own.
        if kwargs.get("past_key_values") is not None:
            return self._own(*args, **kwargs)
        return self._compiled(*args, **kwargs)


def keep_compiled_code() -> None:
    """Set TORCHINDUCTOR_CACHE_DIR, unless it is set, to a folder in the user's cache, where compiled code stays for the
    next start.

    torch's own is in the folder for temporary files, which a restart of the machine or a new container empties.
    """
    with contextlib.suppress(FileNotFoundError):  # a user without a home has torch's
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))


def _leave_attention_out(decoder: Any, _: Any) -> None:
    """Keep the attention of packed rows out of graphs; a hook, since it is registered anew for each model that packs
    rows."""
    name = decoder.config.get_text_config()._attn_implementation or ""
    if not name.startswith(PREFIX):
        return
    interface = AttentionInterface()
    # torch's mark of a function that is not compiled.
    if not foreign(interface[name], "_torchdynamo_disable", False):
        AttentionInterface.register(name, _uncompiled(interface[name]))


def _uncompiled(attend: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **kwargs)

    return torch.compiler.disable(call)
