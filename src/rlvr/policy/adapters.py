"""LoRA through peft: put an adapter on, tell whether there is one, merge it into the weights."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rlvr.config import LoraConfig
from rlvr.errors import ConfigError
from rlvr.policy.foreign import foreign

UNUSED_KERNEL = "Failed to load CPU gemm_4bit_forward"
"""Beginning of a warning of bitsandbytes, which peft imports: it misses a kernel for a CPU, which nothing here
calls."""
# shown at every start with an adapter otherwise
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not record.getMessage().startswith(UNUSED_KERNEL)
)


def add_adapter(model: Any, config: LoraConfig, seed: int) -> Any:
    """`model` with a fresh adapter (an update of zero); only the adapter is trainable. The seed decides its weights."""
    import peft

    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
    # peft draws the first LoRA matrix from torch's global generator; forked, the run's other random numbers stay as
    # they were.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with no_false_alarms():
                return peft.get_peft_model(model, lora)
        except ValueError as error:
            raise ConfigError(f"model.adapter: {error}") from error


@contextlib.contextmanager
def no_false_alarms() -> Iterator[None]:
    """Silence peft's warning about ranks that it chose itself and does use.

    peft 0.19 gives the fused projections of a model's experts the rank of both (`rank_pattern`, `alpha_pattern` in
    utils/transformers_weight_conversion.py) and then looks for them among modules alone (`inject_adapter`), where they
    are parameters.
    """
    with warnings.catch_warnings():
        # Matches "The following rank_pattern keys did not match any targeted module and were ignored: ...".
        warnings.filterwarnings(
            "ignore", r"The following (rank|alpha)_pattern keys did not match any targeted module", RuntimeWarning
        )
        yield


def is_adapter(model: Any) -> bool:
    """Return True if `model` is a peft model."""
    # Not isinstance, which would import peft in runs without an adapter too.
    return hasattr(model, "peft_config") and hasattr(model, "merge_and_unload")


@dataclass(frozen=True)
class LowRank:
    """A product that a LoRA layer adds to its base layer's: scaling x (x @ down.T) @ up.T (Hu et al. 2021,
    arXiv:2106.09685)."""

    down: torch.Tensor
    """[r, in]"""
    up: torch.Tensor
    """[out, r]"""
    scaling: float


def lora_terms(layer: Any) -> list[LowRank] | None:
    """The products that a LoRA layer of peft adds to its base layer's output; None where it is no such layer, or where
    it adds anything else (peft 0.21, tuners/lora/layer.py: `Linear.forward`, and bnb.py: `Linear4bit.forward`)."""
    if foreign(layer, "lora_A") is None:
        return None
    from peft.tuners.lora import Linear as LoraLinear

    # Its layer for weights in 4 bits is defined only where bitsandbytes is installed.
    if type(layer) is not LoraLinear and type(layer).__name__ != "Linear4bit":
        return None
    if layer.fan_in_fan_out:
        return None
    if layer.disable_adapters or layer.merged:
        return []
    terms = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        plain = all(type(part) is torch.nn.Linear and not part._forward_hooks for part in (down, up))
        # DoRA and other variants are no plain sum of products.
        if (
            not plain
            or up.bias is not None
            or name in layer.lora_variant
            or (dropout.training and foreign(dropout, "p"))
        ):
            return None
        terms.append(LowRank(down.weight, up.weight, float(layer.scaling[name])))
    return terms


def name_base(model: Any, folder: Path) -> None:
    """Let the adapter say that its base model is in `folder`."""
    for config in model.peft_config.values():
        # Absolute, since peft loads the base from wherever the process that reads the adapter runs.
        config.base_model_name_or_path = str(folder.resolve())


def merge_adapter(folder: str, base: str | None, out: str) -> None:
    """Write the model of `folder` (adapter files) merged into its base (or `base`) to `out`, tokenizer included."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (Path(folder) / "adapter_config.json").is_file():
        if not Path(folder).is_dir():
            raise ConfigError(f"there is no folder {folder}")
        raise ConfigError(f"there is no adapter in {folder}: adapter_config.json is missing")
    base = base or PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not base:
        raise ConfigError(f"the adapter in {folder} does not say its base model: give it with --base")
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"the base model {base!r} of the adapter cannot be loaded: {error}") from error
    PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
