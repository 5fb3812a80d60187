"""Named weights in buckets, as engines take them.

Invariants: names are those of the plain Hugging Face model; LoRA updates are merged into what is sent, or left out; a
tied LM head is sent under its own name too, because an engine may keep it apart from the embedding; one bucket at a
time is held, and of weights that ZeRO-3 has partitioned one bucket at a time is whole. With these every rank has to go
through all buckets; `sources` alone gathers nothing, and says names, types and shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch

from rlvr.core.device_memory import record_event
from rlvr.policy import Policy
from rlvr.policy.model import gathered
from rlvr.policy.quantization import dense, dense_dtype, dense_shape, is_quantized
from rlvr.rollout.engine import Bucket

T = TypeVar("T")

# Arbitrary: what exists twice during a publish. The largest tensor of most models (an embedding of 150,000 x 4,096 in
# bfloat16 is 1.2 GB) is above it and goes alone.
BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class WeightSource:
    """A weight before it is made."""

    name: str
    """Its Hugging Face name."""
    parameters: list[torch.nn.Parameter]
    """The parameters that it is made of."""
    make: Callable[[], torch.Tensor]
    """The weight, where the parameters are whole."""

    @property
    def shape(self) -> torch.Size:
        """Its shape, where ranks hold parts of it too."""
        return dense_shape(self.parameters[0], whole_shape(self.parameters[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The type of what `make` gives: an adapter in float32 on a weight in bfloat16 makes a float32 sum."""
        # As torch's `+` in `_merged` promotes.
        return reduce(torch.promote_types, map(dense_dtype, self.parameters))

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_made(self) -> bool:
        """Return True if it takes memory beside what it is made of: a sum, the dense value of a weight in 4 bits, or a
        parameter of which ranks have parts."""
        first = self.parameters[0]
        return len(self.parameters) > 1 or is_quantized(first) or hasattr(first, "ds_id")


def has_parts(policy: Policy) -> bool:
    """Return True if ranks have parts of the weights (ZeRO-3), so that all of them have to go through `weight_buckets`
    together."""
    # `ds_id` is what DeepSpeed puts on parameters that ZeRO-3 has partitioned (runtime/zero/partition_parameters.py),
    # with `ds_numel`, `ds_shape` and `ds_tensor`; `numel` and `shape` are those of an empty tensor then.
    return any(hasattr(parameter, "ds_id") for parameter in policy.model.parameters())


@dataclass(frozen=True)
class Description:
    """A weight as it is sent, before it is made."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.shape.numel() * self.dtype.itemsize


def wire_dtype(dtype: torch.dtype, dimensions: int, engine: torch.dtype) -> torch.dtype:
    """The type in which a weight of `dtype` goes to an engine that computes in `engine`.

    Matrices go in the engine's type, which the engine would round them to anyway: half of the bytes where masters are
    float32. Vectors stay as they are: they are few, and engines keep some of them in float32 (an expert router's bias,
    the decay rates of a state space model).
    """
    wider = dtype.is_floating_point and dtype.itemsize > engine.itemsize
    return engine if wider and dimensions > 1 else dtype


def whole_size(parameter: torch.nn.Parameter) -> int:
    """The number of elements of a parameter that may be partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """The shape of a parameter that may be partitioned."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def sources(policy: Policy, merged: bool = True) -> Iterator[WeightSource]:
    """Every weight of the policy by its Hugging Face name; tied weights under each of their names, one after the other.

    With `merged` an adapter's update is added to the weights that it is on, else these are the weights under it.
    """
    model = policy.causal_lm
    # peft's LoRA layers (tuners/lora/layer.py): the weight under an adapter is `NAME.base_layer.weight`, its update
    # `get_delta_weight`.
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    named = list(model.named_parameters(remove_duplicate=False))
    # The place of a parameter's first name; sorted by it, all names of a tied weight stand one after the other, which
    # `weight_buckets` groups by.
    first = {id(parameter): place for place, (_, parameter) in reversed(list(enumerate(named)))}
    for name, parameter in sorted(named, key=lambda item: first[id(item[1])]):
        owner, _, leaf = name.rpartition(".")
        module = adapted.get(owner.removesuffix(".base_layer"))
        if module is not None and leaf == "weight" and merged:
            yield WeightSource(f"{owner.removesuffix('.base_layer')}.{leaf}", *_merged(module, parameter))
        elif module is not None:
            yield WeightSource(f"{owner.removesuffix('.base_layer')}.{leaf}", [parameter], partial(dense, parameter))
        elif not any(owner.startswith(f"{prefix}.") for prefix in adapted):
            yield WeightSource(name, [parameter], partial(dense, parameter))
        # else lora_A, lora_B ... of an adapted module, which go into its merged weight


def _merged(module: Any, parameter: torch.nn.Parameter) -> tuple[list[torch.nn.Parameter], Callable[[], torch.Tensor]]:
    def make() -> torch.Tensor:
        with torch.no_grad():
            # W + sum of B A x alpha / r over the active adapters (Hu et al. 2021, arXiv 2106.09685).
            delta = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
            return dense(parameter) + delta

    # The parameter of the weight comes first: its shape is the weight's, and its identity groups tied names.
    return [parameter, *(p for p in module.parameters() if p is not parameter)], make


def described(policy: Policy, merged: bool = True) -> list[Description]:
    """Return the descriptions of the tensors that `in_wire_dtype` of `weight_buckets` gives, from shapes alone: nothing
    is gathered or merged."""
    return [
        Description(source.name, wire_dtype(source.dtype, len(source.shape), policy.dtype), source.shape)
        for source in sources(policy, merged)
    ]


def in_wire_dtype(weights: Iterable[Bucket], engine: torch.dtype) -> Iterator[Bucket]:
    """The buckets with every weight in the type in which it goes to an engine that computes in `engine`."""
    for bucket in weights:
        sent = [(name, tensor.to(wire_dtype(tensor.dtype, tensor.ndim, engine))) for name, tensor in bucket]
        # `to` gives the tensor itself where the type is that already.
        copied = sum(new.nbytes for (_, new), (_, old) in zip(sent, bucket, strict=True) if new is not old)
        del bucket  # else it would last until the next one is made
        record_event("trainer", "cast", copied)
        yield sent
        # Before the next `bucket` is made, or two of them would be alive at once.
        del sent
        record_event("trainer", "cast", -copied)


def weight_buckets(policy: Policy, size: int = BUCKET_BYTES, merged: bool = True) -> Iterator[Bucket]:
    """The weights, see `sources`, in lists of at most `size` bytes (a larger one alone). Tied ones are in one list, so
    that they are gathered once and take memory once."""
    tied = [
        list(same) for _, same in itertools.groupby(sources(policy, merged), lambda source: id(source.parameters[0]))
    ]
    for group in buckets(tied, size, lambda same: same[0].nbytes):
        part = [source for same in group for source in same]
        made = sum(same[0].nbytes for same in group if same[0].is_made)
        record_event("trainer", "bucket", made)
        with gathered(parameter for source in part for parameter in source.parameters):
            yield [(source.name, source.make()) for source in part]
        # After the `yield` returns: the consumer has let go of the bucket by then.
        record_event("trainer", "bucket", -made)


def buckets(
    items: Iterable[T],
    size: int = BUCKET_BYTES,
    nbytes: Callable[[T], int] = lambda item: item[1].nbytes,  # type: ignore[index]
) -> Iterator[list[T]]:
    """`items`, such as (name, tensor), in lists of at most `size` bytes (a larger item alone)."""
    bucket: list[T] = []
    used = 0
    for item in items:
        # Tested before the item is added, so only a single item can be above `size`.
        if bucket and used + nbytes(item) > size:
            yield bucket
            bucket = []
            used = 0
        bucket.append(item)
        used += nbytes(item)
    if bucket:
        yield bucket


def host_copies(weights: Iterable[WeightSource], keep: bool, size: int = BUCKET_BYTES) -> dict[str, torch.Tensor]:
    """The weights in host memory where `keep`, else nothing; weights that are tied stay one tensor.

    Every rank has to call this where weights are partitioned.
    """
    copies: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for part in buckets(weights, size, lambda source: source.nbytes):
        taken = _gathered_bytes(part) + (_made_bytes(part) if keep else 0)
        record_event("trainer", "gathered", taken)
        with gathered(parameter for source in part for parameter in source.parameters):
            for source in part if keep else []:
                key = id(source.parameters[0])
                # The names of a tied weight share one copy, as they share one parameter.
                if len(source.parameters) == 1 and key in first:
                    copies[source.name] = copies[first[key]]
                    continue
                made = source.make()
                # A copy in any case: `make` may give the parameter itself, which training changes while files are
                # written.
                if made.device.type != "cpu":
                    copies[source.name] = made.cpu()
                else:
                    copies[source.name] = made.clone()
                first[key] = source.name
        record_event("trainer", "gathered", -taken)
    return copies


def _gathered_bytes(part: Sequence[WeightSource]) -> int:
    """Bytes that the parameters of `part` take while they are whole, where ranks have parts of them."""
    parameters = {id(parameter): parameter for source in part for parameter in source.parameters}
    return sum(
        whole_shape(parameter).numel() * parameter.element_size()
        for parameter in parameters.values()
        if hasattr(parameter, "ds_id")
    )


def _made_bytes(part: Sequence[WeightSource]) -> int:
    """The largest size in bytes of a weight of `part` that is computed from other weights or from its 4 bits. Only one
    exists at a time."""
    made = (source.nbytes for source in part if len(source.parameters) > 1 or is_quantized(source.parameters[0]))
    # One at a time: each is copied to the host and dropped before the next is made.
    return max(made, default=0)
