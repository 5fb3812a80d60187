"""Memory that the trainer keeps on each device in each phase of a step, beside what one pass takes.

Backends keep different things in different types (w: bytes of a weight that is computed with, 2 in bfloat16 under
DeepSpeed and 4 else; P: weights that train; N: ranks; s: bytes of optimizer state for each):

- plain: weights 4P, gradients 4P from `zero` to `release`, optimizer s P.
- DeepSpeed 0.19.8, read from its source. ZeRO 1 in bfloat16 (runtime/bf16_optimizer.py): weights 2P, float32 weights
  4P/N, float32 gradients of all weights 4P, and the bfloat16 gradients of a backward pass, 2P, which the step frees.
- ZeRO 1 and 2 otherwise (runtime/zero/stage_1_and_2.py): weights wP, float32 weights 4P/N (in float32 too), gradients
  4P under ZeRO 1 and 4P/N under ZeRO 2, where float32 passes after the first add theirs beside them.
- ZeRO 3 (runtime/zero/stage3.py): weights wP/N, float32 weights 4P/N in bfloat16 (in float32 they are the same
  tensors), gradients 4P/N, a bucket, and of whole weights at most stage3_max_live_parameters or those of the largest
  module.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlvr import registry
from rlvr.config import ComponentSpec, Config
from rlvr.distributed.deepspeed import DeepSpeedOptions
from rlvr.distributed.plain import REDUCE_BYTES
from rlvr.distributed.zero_config import Offload, zero_config
from rlvr.planner.shape import MemoryParts, Shape
from rlvr.rollout.weights import BUCKET_BYTES

# AdamW: two moments in float32 (Loshchilov & Hutter 2019, arXiv 1711.05101). 8 bits (Dettmers et al. 2022, arXiv
# 2110.02861; bitsandbytes' AdamW8bit): two moments of a byte each, a float32 constant for each block, and small tensors
# (min_8bit_size) that stay in float32; 0.1 is an allowance for these. SGD: one momentum in float32.
STATE = {"adamw": 8.0, "adamw_8bit": 2.1, "sgd": 4.0}
"""Bytes of optimizer state for a trained weight; others are taken to be like adamw."""
SUB_GROUP = 10**9
"""DeepSpeed's own `sub_group_size`: weights of a rank whose gradients ZeRO 3 copies at once in a step."""

PHASES = ("start", "publish", "evaluation", "sampling", "scoring", "update", "optimizer step")
"""In the order in which a step goes through them."""
START, PUBLISH, EVALUATION, SAMPLING, SCORING, UPDATE, STEP = PHASES
GRADIENTS_LIVE = (UPDATE, STEP)


@dataclass(frozen=True)
class TrainerMemory:
    """Settings of a stage that the memory of one rank depends on."""

    shape: Shape
    ranks: int
    on_gpu: bool
    bfloat16: bool
    """True if passes are computed in bfloat16."""
    stage: int
    """The ZeRO stage; 0 for the plain backend."""
    offload: Offload
    offload_during_rollout: bool
    frees_gradients: bool
    """True if a publish frees the gradients, which it does for an engine that does not share the trainer's weights."""
    state: float
    """Bytes of optimizer state for a weight that trains."""
    reference: bool
    follows: bool = False
    """True if the reference follows the policy, for which it is kept in float32."""
    deepspeed: str | None = None
    """The user's file of DeepSpeed's configuration."""
    merges: bool = False
    """True if checkpoints hold the model with its adapter merged."""
    writes_base: bool = False
    """True if the base under an adapter, which was made from nothing, is written at the start."""

    @property
    def width(self) -> int:
        """Bytes of a weight that trains and is computed with."""
        return 2 if self.stage and self.bfloat16 else 4

    @property
    def casts(self) -> bool:
        """Return True if passes copy the weights that train to bfloat16, by autocast."""
        return self.bfloat16 and not self.stage

    def _zero(self) -> dict[str, float]:
        """DeepSpeed's own sizes of buffers, in weights."""
        config = zero_config(self.stage, self.offload, self.bfloat16, self.ranks, self.deepspeed, self.shape.trained)
        return config["zero_optimization"]

    def at(self, phase: str) -> MemoryParts:
        """Bytes by part in a phase."""
        if phase == START:
            return {
                "weights as loaded": 0.0 if self.stage == 3 and self.on_gpu else self.shape.weights,
                "copy of the base": self.shape.frozen if self.writes_base and not self.on_gpu else 0.0,
            }
        parts = {
            "weights": self._weights(),
            "float32 weights": self._masters(phase),
            "gradients": self._gradients(phase),
            "optimizer": self._optimizer(phase),
            "reference": self._reference(),
            "buffers": self._buffers(phase),
            "checkpoint's copies": self._checkpoint(),
        }
        return {name: size for name, size in parts.items() if size}

    def _weights(self) -> float:
        # Bytes: w P of the weights that train and those of the frozen ones.
        here = self.width * self.shape.trained + self.shape.frozen
        if self.stage < 3:
            return here
        if self.offload == "parameters" and self.on_gpu:
            return 0.0
        return here / self.ranks

    def _away(self, phase: str) -> bool:
        """Return True if what only the optimizer reads is in host memory. On a CPU that is the same memory."""
        moved = self.offload_during_rollout and phase != STEP
        return self.on_gpu and (moved or self.offload != "none")

    def _masters(self, phase: str) -> float:
        if self.stage == 0 or (self.stage == 3 and not self.bfloat16) or self._away(phase):
            return 0.0
        return 4 * self.shape.trained / self.ranks

    def _optimizer(self, phase: str) -> float:
        if self._away(phase):
            return 0.0
        # Every stage of ZeRO shards the optimizer's state; the plain backend has all of it on each rank.
        return self.state * self.shape.trained / (self.ranks if self.stage else 1)

    def _gradients(self, phase: str) -> float:
        trained = self.shape.trained
        live = phase in GRADIENTS_LIVE or not self.frees_gradients
        if self.stage == 0:
            return 4 * trained if live else 0.0
        part = 4 * trained / self.ranks
        offloaded = self.offload != "none"
        # bf16_optimizer.py: float32 gradients of all weights, and during passes the bfloat16 ones too.
        if self.stage == 1 and self.bfloat16 and not offloaded:
            return (4 * trained if live else 0) + (2 * trained if phase in GRADIENTS_LIVE else 0)
        if self.stage == 1:
            # The step copies a rank's part into one flat tensor.
            flat = part if phase == STEP and not offloaded else 0.0
            if phase in GRADIENTS_LIVE:
                return 4 * trained + flat
            return 0.0
        if self.stage == 2:
            if phase not in GRADIENTS_LIVE:
                return 0.0
            if self.bfloat16:
                return part
            # In float32 the gradients of later passes are beside the sums.
            return 0.0 if offloaded and self.on_gpu else 2 * part
        if offloaded and self.on_gpu:
            return 0.0
        return (part if live else 0.0) + (4 * self._sub_group() if phase == STEP else 0.0)

    def _sub_group(self) -> float:
        """Weights of a rank in the largest group of ZeRO 3: a group ends with the weight that brings it to
        `sub_group_size` (_create_fp16_sub_groups)."""
        # Elements, not bytes; the default is in deepspeed/runtime/zero/config.py.
        size = self._zero().get("sub_group_size", SUB_GROUP)
        largest = min(self.shape.largest, self.shape.trained)
        return min(self.shape.trained, size * self.ranks + largest) / self.ranks

    @property
    def _whole_reference(self) -> float:
        """Bytes of the reference on all ranks together; 0 without one."""
        if not self.reference:
            return 0.0
        # A reference that follows the policy is averaged in float32, so that small steps are not rounded away.
        return (4 if self.follows else self.width) * self.shape.trained

    def _reference(self) -> float:
        here = self._whole_reference
        if self.stage < 3:
            return here
        if self.offload == "parameters" and self.on_gpu:
            return 0.0
        return here / self.ranks

    def _checkpoint(self) -> float:
        """Bytes that a checkpoint copies to host memory, which is a CPU's own: float32 weights and optimizer state, of
        which each rank writes a part and keeps the copies for the next one, and the reference and a merged model while
        they are written. Any phase may come after the first checkpoint, or during one."""
        if self.on_gpu:
            return 0.0
        merged = 4 * self.shape.parameters if self.merges else 0
        # 4 P of float32 weights and s P of optimizer state, of which each rank writes its part: with AdamW 12 P / N.
        return ((4 + self.state) * self.shape.trained + self._whole_reference) / self.ranks + merged

    def _buffers(self, phase: str) -> float:
        """Of communication between ranks, and of weights on their way to host memory."""
        largest = min(self.shape.largest, self.shape.trained)
        if self.stage == 0:
            if phase == STEP and self.ranks > 1:
                # Gradients are reduced in buckets; a tensor larger than one is a bucket by itself.
                return max(REDUCE_BYTES, 4 * largest)
            return 0.0
        zero = self._zero()
        bucket = zero["reduce_bucket_size"]
        always = self.width * bucket if self.stage == 3 else 0.0
        # DeepSpeed's temp_grad_buffer_for_gpu_offload (stage_1_and_2.py): as large as the largest parameter, since
        # gradients go through it to host memory one by one.
        if self.stage < 3 and self.offload != "none":
            always = self.width * largest
        if phase != UPDATE:
            return always
        # one is filled while the other is reduced (stage_1_and_2.py, setup_buckets); bf16_optimizer.py has no such
        # buffers
        in_bf16_optimizer = self.stage == 1 and self.bfloat16 and self.offload == "none"
        second = 0.0
        if self.stage < 3 and zero.get("overlap_comm", False) and not in_bf16_optimizer:
            second = bucket
        return always + self.width * (max(bucket, largest) + second)

    def pass_weights(self, phase: str) -> MemoryParts:
        """Weights that a pass makes for itself: copies in bfloat16, or those that ZeRO 3 puts together."""
        if self.casts:
            return {"weights in bfloat16": 2 * self.shape.trained}
        if self.stage < 3:
            return {}
        # all weights that a module has itself are gathered before it runs, however many (fetch_sub_module)
        largest = max(self._zero()["stage3_max_live_parameters"], self.shape.largest_module)
        whole = min(largest, self.shape.parameters)
        # the LM head is whole from the start of a backward pass to its end, beside what the layers have
        head = 0
        if phase == UPDATE:
            head = self.shape.vocabulary * self.shape.hidden
        return {"gathered weights": self.width * min(whole + head, self.shape.parameters)}

    def published(self) -> MemoryParts:
        """Return the bytes of the weights made to be sent, in the type computed in: a bucket, or the largest weight."""
        width = 2 if self.bfloat16 else 4
        return {"weights on their way": max(BUCKET_BYTES, width * self.shape.largest)}


def trainer_memory(
    shape: Shape, config: Config, ranks: int, on_gpu: bool, bfloat16: bool, reference: bool, frees_gradients: bool
) -> TrainerMemory:
    """The settings of the stage of `config`, on each of `ranks` ranks."""
    backend = registry.build("backend", config.distributed.backend_spec)
    if isinstance(backend, DeepSpeedOptions):
        zero = backend
    else:
        zero = None
    follows = config.algorithm.kl is not None and config.algorithm.kl.renew_every is not None
    return TrainerMemory(
        shape=shape,
        ranks=ranks,
        on_gpu=on_gpu,
        bfloat16=bfloat16,
        stage=0 if zero is None else zero.zero_stage,
        offload="none" if zero is None else zero.offload,
        offload_during_rollout=config.distributed.offloads_during_rollout,
        frees_gradients=on_gpu and (frees_gradients or config.distributed.offloads_during_rollout),
        state=state_bytes(config.optim.optimizer),
        reference=reference,
        follows=follows,
        deepspeed=None if zero is None else zero.deepspeed,
        merges=config.checkpoint.merged and config.model.adapter is not None,
        writes_base=config.model.scratch is not None and config.model.adapter is not None,
    )


def state_bytes(optimizer: ComponentSpec) -> float:
    """Bytes of optimizer state for a trained weight."""
    if optimizer.name == "sgd" and not optimizer.options.get("momentum"):
        return 0.0
    return STATE.get(optimizer.name, STATE["adamw"])
