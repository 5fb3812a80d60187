"""Hugging Face files of the policy, in two parts: weights come to host memory now, the files are written when it suits.

The first part needs every rank where weights are partitioned, and is a copy, so that training may go on during the
second, which rank 0 alone has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import other
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from rlvr.errors import TrainingError
from rlvr.policy import Policy
from rlvr.policy.adapters import is_adapter, name_base
from rlvr.policy.quantization import dense, has_quantized
from rlvr.rollout.weights import WeightSource, host_copies, sources

Files = Callable[[Path], None]
"""Writes files into a folder."""
_AVAILABLE = other.is_deepspeed_available
"""The function by which accelerate checks for DeepSpeed; restored after `_unwrapped`, by the thread that ends last."""


def model_files(policy: Policy, is_main: bool, copied: Mapping[int, torch.Tensor]) -> Files:
    """The whole model, or the adapter where one is trained, with the tokenizer. `copied`: address of a weight in use ->
    a copy of it that is there already."""
    model = policy.model
    if is_adapter(model):
        kept = policy.trainable()
    else:
        kept = dict(model.named_parameters(remove_duplicate=False))
    return _files(policy, model, [WeightSource(name, [p], p.detach) for name, p in kept.items()], is_main, copied)


def merged_files(policy: Policy, is_main: bool) -> Files:
    """The plain model with the adapter merged into it."""
    return _files(policy, policy.causal_lm, sources(policy), is_main, {})


def write_base(policy: Policy, folder: Path, is_main: bool) -> None:
    """Write the plain model under an adapter to `folder` and let the adapter name it, for bases that are nowhere else.

    Called on every rank; rank 0 (`is_main`) writes. TrainingError where it cannot be written.
    """
    base = policy.model.base_model.model
    parameters = base.named_parameters(remove_duplicate=False)
    plain = {name.replace(".base_layer.", "."): p for name, p in parameters if ".lora_" not in name}
    weights = [WeightSource(name, [p], partial(dense, p)) for name, p in plain.items()]
    write = _files(policy, base, weights, is_main, {})
    if is_main:
        try:
            write(folder)
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"the base model cannot be written to {folder}: {error}") from error
    name_base(policy.model, folder)


def _files(
    policy: Policy, model: Any, weights: Iterable[WeightSource], is_main: bool, copied: Mapping[int, torch.Tensor]
) -> Files:
    found: dict[str, torch.Tensor] = {}
    missing = []
    for source in weights:
        # By address: tied names share a copy, as they share the parameter. The shape tells a view of it apart.
        copy = copied.get(source.parameters[0].data_ptr())
        if copy is not None and copy.shape == source.parameters[0].shape:
            found[source.name] = copy
        else:
            missing.append(source)
    found |= host_copies(missing, keep=is_main)
    buffers = dict(model.named_buffers())
    # state_dict and not named_buffers: buffers that are not persistent do not belong into files.
    found |= {name: tensor.clone() for name, tensor in model.state_dict().items() if name in buffers}

    def write(folder: Path) -> None:
        transformers_logging.disable_progress_bar()
        if is_adapter(model) or not has_quantized(model):
            with _unwrapped():
                model.save_pretrained(folder, state_dict=found)
        else:  # its own method would write the weights in 4 bits
            policy.describe(folder)
            save_torch_state_dict(found, folder)
        policy.tokenizer.save_pretrained(folder)

    return write


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Inside, `save_pretrained` takes it as known that DeepSpeed has not wrapped the model, which it never has here.

    To find out, it would import DeepSpeed where that is installed: seconds and 100 MB in a run that has no use for it.
    """
    other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = _AVAILABLE
