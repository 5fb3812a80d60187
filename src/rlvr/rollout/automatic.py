"""The engine that `rollout.engine: auto` means on a device."""

from __future__ import annotations

from typing import Any

from rlvr.config import ComponentSpec, Config
from rlvr.errors import ConfigError
from rlvr.rollout.vllm import installed


def with_engine(config: Config, on_gpu: bool, here: bool = True, saved: Any = None) -> tuple[Config, str | None]:
    """The configuration with an engine in place of `auto`, and the reason in words; the latter None where an engine was
    written.

    It is `saved`, the engine of a checkpoint, where there is one. Else `vllm` on a GPU where a vLLM for GPUs is
    installed in a version that this library takes, else `hf`. With `here` false the GPU is elsewhere, and so is what is
    installed beside it: vLLM is assumed.
    """
    if config.rollout.engine.name != "auto":
        return config, None
    # A resumed run keeps the engine of its checkpoint even where another would be chosen now: engines round
    # differently, and a change of engine in the middle of a run shows in `mismatch/*`.
    if saved is None:
        written, reason = _chosen(on_gpu, here)
    else:
        written, reason = (saved, "the checkpoint was made with it")
    engine = ComponentSpec.parse(written)
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"rollout": rollout}), f"rollout.engine: auto takes {engine.name}: {reason}"


def _chosen(on_gpu: bool, here: bool) -> tuple[str, str]:
    if not on_gpu:
        return "hf", "the model is computed on a CPU"
    # A dry run plans for GPUs of another machine, on one that may have no vLLM.
    if not here:
        return "vllm", "vLLM is taken to be installed beside these GPUs"
    try:
        version = installed.version()
    except ConfigError as error:
        return "hf", str(error)
    if installed.for_cpu():
        return "hf", f"vLLM {version} is built for a CPU. {installed.INSTALL}"
    return "vllm", f"the model is computed on a GPU and vLLM {version} is installed"
