"""This rank's part of the float32 weights and optimizer state under ZeRO, read and written as whole tensors.

DeepSpeed keeps them flat and partitioned: a rank has a stretch of each parameter, or nothing of it. Its own functions
for this (safe_get_full_fp32_param and the like) cannot make the state of an optimizer that took no step yet, which a
resumed run has to. Reading is collective: every rank asks for the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlvr.core.device_memory import HostOffload, record_event
from rlvr.distributed.plain import optimizer_tensors
from rlvr.distributed.shares import whole_on_host
from rlvr.rollout.weights import whole_shape, whole_size


@dataclass(frozen=True)
class Stretch:
    """The elements of a parameter that this rank has."""

    flat: torch.Tensor
    """The flat float32 weights that they are in; the key of the optimizer's state."""
    place: slice
    """The positions of the elements in `flat`."""
    within: slice
    """The positions of the elements in the parameter."""


class Shards:
    """The float32 weights, the optimizer state and the gradients of `parameters`, which a ZeRO `optimizer` shares out.

    What `offload` has moved out can be read. Before it is written it has to be back."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, torch.nn.Parameter], offload: HostOffload) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.offload = offload
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        """Storages of gradients that are freed, and their sizes in bytes."""
        self._keep_one_copy()

    def _keep_one_copy(self) -> None:
        """Under ZeRO-3 in float32, make the optimizer's weights those computed with, which DeepSpeed means to do and
        misses (it compares a torch.device with a string); an eighth of what a rank holds."""
        if getattr(self.optimizer, "offload_optimizer", True) or not hasattr(
            self.optimizer, "fp16_partitioned_groups_flat"
        ):
            return
        # stage3.py of 0.19.8: `self.fp16_partitioned_groups_flat[i].device == self.device`, where the latter is a name
        # such as "cpu".
        for wide, computed in zip(self.flats(), self.optimizer.fp16_partitioned_groups_flat, strict=True):
            if computed is not None and (computed.dtype, computed.device) == (wide.dtype, wide.device):
                wide.data = computed.data

    @property
    def inner(self) -> torch.optim.Optimizer:
        """torch's optimizer of the flat weights."""
        return self.optimizer.optimizer

    def flats(self) -> list[torch.Tensor]:
        """The flat float32 weights of this rank."""
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self.optimizer, name):  # ZeRO-3, ZeRO-1 and 2, ZeRO-1 in bfloat16
                return getattr(self.optimizer, name)
        raise AttributeError(f"{type(self.optimizer).__name__} keeps its float32 weights at an unknown place")

    def for_steps_alone(self) -> list[torch.Tensor]:
        """This rank's optimizer state, and its float32 weights where passes compute with others."""
        parts = [getattr(parameter, "ds_tensor", parameter) for parameter in self.parameters.values()]
        computed_with = {part.untyped_storage()._cdata for part in parts}  # in float32 they may be the same
        weights = [flat.detach() for flat in self.flats() if flat.untyped_storage()._cdata not in computed_with]
        return [*weights, *optimizer_tensors(self.inner)]

    def stretch(self, name: str) -> Stretch | None:
        """This rank's part of a parameter."""
        parameter: Any = self.parameters[name]
        if hasattr(parameter, "ds_id"):
            # ZeRO-3: rank r has the elements [r * size, (r + 1) * size) of a parameter, at `offset` in the flat tensor
            # of its group (`set_grad_positions` in runtime/zero/stage3.py).
            group, offset, size = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            start = size * dist.get_rank(parameter.ds_process_group)
            size = min(size, parameter.ds_numel - start)  # the last ranks' parts are padded
            if size <= 0:
                return None
        # ZeRO-1 and 2: hp is the float32 weight, lp the one computed with. None where this rank has no element of it.
        elif (mapping := parameter._hp_mapping) is not None:
            group = mapping.param_group_index
            offset = mapping.hp_fragment_address.start
            start = mapping.lp_fragment_address.start
            size = mapping.lp_fragment_address.numel
        else:
            return None
        return Stretch(self.flats()[group], slice(offset, offset + size), slice(start, start + size))

    def of(self, name: str, keep: bool) -> Iterator[tuple[str | None, torch.Tensor | None]]:
        """A parameter's whole float32 weights (under None) and whole optimizer state by key, in host memory; None in
        their place where `keep` is false. Every rank has to go through them."""
        stretch = self.stretch(name)
        yield None, self._whole(name, None, stretch, keep)
        # The keys are the same for all parameters, so those of the first flat tensor that took a step serve. A rank
        # without an element of this parameter goes through them too: `_whole` and `_count` are collective.
        some: Mapping[str, Any] = next(
            (self.inner.state[flat] for flat in self.flats() if self.inner.state.get(flat)), {}
        )
        for key in sorted(some):
            if stretch:
                state = self.inner.state.get(stretch.flat, {})
            else:
                state = {}
            if not torch.is_tensor(some[key]) or some[key].ndim == 0:
                count = self._count(state.get(key))
                yield key, count if keep else None
            else:
                yield key, self._whole(name, key, stretch, keep)

    def _whole(self, name: str, key: str | None, stretch: Stretch | None, keep: bool) -> torch.Tensor | None:
        """The whole state `key` of a parameter (None: its weights), of which this rank has `stretch`."""
        parameter = self.parameters[name]
        part = None
        start = 0
        if stretch is not None:
            if key is None:
                flat = stretch.flat.detach()
            else:
                flat = self.inner.state[stretch.flat][key]
            part = self.offload.on_host(flat)[stretch.place].contiguous()
            start = stretch.within.start
        whole = whole_on_host(whole_size(parameter), part, start, parameter.device, keep)
        if whole is None:
            return None
        return whole.view(whole_shape(parameter))

    def _count(self, value: Any) -> torch.Tensor:
        """A number that the ranks with a part of the parameter share."""
        device = next(iter(self.parameters.values())).device
        # MAX over ranks: those without a part give -1, the others agree. float64 holds counts exactly.
        count = torch.tensor(-1.0 if value is None else float(value), dtype=torch.float64, device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return count.to("cpu", torch.float32)

    def forget(self) -> None:
        """Reset the state to that of an optimizer that took no step."""
        self.inner.state.clear()

    def set_weight(self, name: str, value: torch.Tensor) -> None:
        """Write this rank's part of a whole weight; `publish` makes the model compute with it."""
        if (stretch := self.stretch(name)) is not None:
            stretch.flat.detach()[stretch.place] = value.flatten()[stretch.within].to(stretch.flat)

    def set_state(self, name: str, key: str, value: torch.Tensor) -> None:
        """Write this rank's part of an optimizer state."""
        if (stretch := self.stretch(name)) is None:
            return
        state = self.inner.state[stretch.flat]
        flat = stretch.flat.detach()
        # torch keeps `step` on the CPU but for fused and capturable optimizers, which read it on the device.
        if value.ndim == 0:
            fused = self.inner.defaults.get("fused") or self.inner.defaults.get("capturable")
            state[key] = value.clone().to(flat.device if fused else "cpu")
            return
        if key not in state:
            state[key] = torch.zeros_like(flat)
        state[key][stretch.place] = value.flatten()[stretch.within].to(flat)

    def publish(self) -> None:
        """Round the float32 weights into those that the model computes with, on every rank."""
        with torch.no_grad():
            if hasattr(self.optimizer, "update_lp_params"):
                self.optimizer.update_lp_params()
                return
            self.optimizer.empty_partition_cache()
            for group in range(len(self.optimizer.fp16_groups)):
                self.optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def gradient_buffers(self) -> list[torch.Tensor]:
        """Gradients that DeepSpeed keeps memory for between steps: a rank's own under ZeRO-3, and all of them on every
        rank under ZeRO-1 in bfloat16. Those in host memory are not among them."""
        buffers = list(getattr(self.optimizer, "fp32_groups_gradients_flat", []))
        if hasattr(self.optimizer, "grad_partitions_flat_buffer"):
            buffers.append(self.optimizer.grad_partitions_flat_buffer)
        return [buffer for buffer in buffers if buffer.device.type == self.offload.device.type]

    def free_gradients(self) -> None:
        """Free the memory of `gradient_buffers`; `drop_gradients` takes it again."""
        for storage in (buffer.untyped_storage() for buffer in self.gradient_buffers()):
            if storage.nbytes() > 0:
                self._freed.append((storage, storage.nbytes()))
                record_event("trainer", "gradients", -storage.nbytes())
                # The storage is emptied and not replaced: DeepSpeed holds views of it (see HostOffload).
                storage.resize_(0)

    def drop_gradients(self) -> None:
        """Forget what backward passes added since the last step, in every place where DeepSpeed keeps it.

        It would else be added to by the next pass, or stand in for a parameter that the next passes do not reach.
        """
        for storage, nbytes in self._freed:  # their contents are zeroed below
            storage.resize_(nbytes)
            record_event("trainer", "gradients", nbytes)
        self._freed = []
        zero = self.optimizer
        zero.zero_grad(set_to_none=True)
        stale = [flat.grad for flat in self.flats() if flat.grad is not None]  # offloaded gradients
        stale += getattr(zero, "accumulated_grads_in_cpu", {}).values()
        if hasattr(zero, "grad_partitions_flat_buffer"):  # ZeRO-3
            stale.append(zero.grad_partitions_flat_buffer)
            zero._offload_boundary_param_ids = set()
        elif hasattr(zero, "all_grad_tensors"):  # ZeRO-1 and 2
            zero.micro_step_id = -1
            zero._offload_accumulated_param_ids = set()
            zero._release_preflattened_grad_buffers()
            for group in range(len(zero.bit16_groups)):
                zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
        if hasattr(zero, "norm_for_param_grads"):
            zero.norm_for_param_grads.clear()
        for gradient in stale:
            gradient.zero_()

    def no_gradients(self) -> None:
        """Leave the gradients of a backward pass that reaches no parameter, for a step without any pass."""
        if hasattr(self.optimizer, "setup_buckets"):  # ZeRO-1 and 2
            self.optimizer.setup_buckets()
        if hasattr(self.optimizer, "fp32_groups_has_gradients"):  # ZeRO-1 in bfloat16
            self.optimizer.fp32_groups_has_gradients = [[True] * len(g) for g in self.optimizer.bf16_groups]
        else:
            self.optimizer.overlapping_partition_gradients_reduce_epilogue()
