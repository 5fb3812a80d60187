"""Optimizer steps, and the devices that they are shared out to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlvr.config.sections import OfKind, Section
from rlvr.core.specs import ComponentSpec


class OptimConfig(Section):
    """Optimizer steps."""

    optimizer: Annotated[ComponentSpec, OfKind("optimizer")] = ComponentSpec("adamw")
    """adamw, adamw_8bit (2 bytes of state for a weight instead of 8) or sgd, with its options."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine fall to `min_lr` at the end of the stage."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0 to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """The last learning rate of the linear and cosine schedules."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps that one batch is cut into, by whole groups; at most `rollout.prompts_per_step`. A step with
    fewer groups takes fewer (`update/steps`)."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Number of passes over each batch."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Completions per forward pass and rank; null: as many as `micro_batch_tokens` lets in."""
    micro_batch_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """Tokens (unpadded, prompts included) per forward pass and rank. A prompt that completions share is counted once
    where it is computed once. A rollout longer than this goes alone. auto: what the memory plan finds to fit
    (docs/memory.md), or null where `micro_batch_size` is set; null: all of an optimizer step's."""
    packing: Literal["auto"] | bool = "auto"
    """Lay rollouts end to end, without padding, in the update; auto: where it is estimated to be faster and the model
    can. The gradient is the same."""
    share_prefix: Literal["auto"] | bool = "auto"
    """In packed rows, compute the tokens that a group's rollouts begin with (their prompt) once for all of them; auto:
    where it is estimated to be faster and the model can. The gradient is the same."""

    @model_validator(mode="after")
    def _sharing_needs_packing(self) -> OptimConfig:
        if self.packing is False and self.share_prefix is True:
            raise ValueError("`share_prefix: true` needs packed rows: set `packing` to auto or true")
        return self

    @model_validator(mode="before")
    @classmethod
    def _size_before_auto(cls, written: Any) -> Any:
        """A number of completions leaves nothing to choose."""
        if not isinstance(written, dict) or written.get("micro_batch_size") is None:
            return written
        tokens = written.get("micro_batch_tokens", "auto")
        # Else the default `auto` would be a second limit, which `_one_micro_batch` refuses.
        return {**written, "micro_batch_tokens": None if tokens == "auto" else tokens}

    @model_validator(mode="after")
    def _one_micro_batch(self) -> OptimConfig:
        if self.micro_batch_size is not None and self.micro_batch_tokens is not None:
            raise ValueError("`micro_batch_size` and `micro_batch_tokens` exclude each other: set one to null")
        return self


class DistributedConfig(Section):
    """Placement of the policy's weights and optimizer on devices and ranks."""

    backend: Annotated[ComponentSpec, OfKind("backend")] = ComponentSpec("plain")
    """plain: every rank holds the whole model and optimizer; deepspeed: they are shared out among the ranks (ZeRO)."""
    zero_stage: Literal[1, 2, 3] | None = None
    """ZeRO stage of deepspeed, which says what is partitioned among the ranks. 1: the optimizer's state; 2: gradients
    too; 3: weights too; null: 2."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """With deepspeed, the tensors kept in host memory: `optimizer` (its state and the float32 weights), or `parameters`
    (with `zero_stage: 3`: these and the weights computed with)."""
    offload_during_rollout: bool = False
    """Keep what only an optimizer step needs in host memory (pinned, where the device is a GPU) from each publish of
    weights to the next step: the optimizer's state and, with deepspeed, the float32 weights that are not computed with.
    An engine on the same device then has their memory, and so have forward and backward passes; each step waits for the
    copies. The result is the same."""
    deepspeed: str | None = None
    """A JSON file with more of DeepSpeed's own configuration, such as bucket sizes."""
    heartbeat_timeout: float = Field(default=30.0, gt=0)
    """Seconds without a sign of life after which the other ranks give a rank up, name it and end."""

    @property
    def backend_spec(self) -> ComponentSpec:
        """The backend with its options: those of this section, and over them those written with the backend."""
        own: dict[str, Any] = {}
        if self.offload_during_rollout:
            own = {"offload_during_rollout": True}
        if self.backend.name == "deepspeed":
            # ZeRO 2 sends as many bytes as plain data parallelism, ZeRO 3 half as many again (Rajbhandari et al. 2020).
            own |= {"zero_stage": self.zero_stage or 2, "offload": self.offload, "deepspeed": self.deepspeed}
        return ComponentSpec(self.backend.name, {**own, **self.backend.options})

    @property
    def offloads_during_rollout(self) -> bool:
        """`offload_during_rollout`, written in this section or with the backend."""
        return bool(self.backend_spec.options.get("offload_during_rollout"))

    @model_validator(mode="after")
    def _for_deepspeed(self) -> DistributedConfig:
        name = self.backend.name
        options = self.backend_spec.options
        for key, value in {"zero_stage": self.zero_stage, "deepspeed": self.deepspeed}.items():
            if value is not None and name != "deepspeed":
                raise ValueError(f"`{key}` needs `backend: deepspeed`, and the backend is {name!r}")
        if self.offload != "none" and name != "deepspeed":
            raise ValueError(f"`offload` needs `backend: deepspeed`, and the backend is {name!r}")
        if self.offload_during_rollout and name not in ("plain", "deepspeed"):
            raise ValueError(
                f"`offload_during_rollout` needs `backend: plain` or `deepspeed`, and the backend is {name!r}"
            )
        if options.get("offload", "none") != "none" and self.offloads_during_rollout:
            raise ValueError(
                f"`offload: {options['offload']}` keeps in host memory all the time what `offload_during_rollout` "
                "would move there and back: set one of them"
            )
        if self.offload == "parameters" and options["zero_stage"] != 3:
            raise ValueError("`offload: parameters` needs `zero_stage: 3`, which alone shares them out")
        return self
