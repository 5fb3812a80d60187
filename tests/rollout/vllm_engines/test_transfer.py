"""Weights in buckets, through shared memory and files: they arrive as they were sent, and what differs is named."""

import mmap

import pytest
import torch
from engine_helpers import small

from rlvr.distributed import PlainBackend
from rlvr.rollout.vllm.transfer import FileTransfer, SharedMemoryTransfer, checksum, mismatched_weights


def received(calls):
    """What a worker would read of the buckets that were sent."""
    result = {}
    for info in calls:
        with open(info["path"], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            for name, dtype, shape, offset in zip(
                info["names"], info["dtypes"], info["shapes"], info["offsets"], strict=True
            ):
                count = torch.Size(shape).numel()
                result[name] = torch.frombuffer(
                    bytearray(memory), dtype=getattr(torch, dtype), count=count, offset=offset
                ).view(shape)
    return result


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_buckets_arrive_as_they_were_sent_whatever_their_sizes(tmp_path, kind):
    transfer = SharedMemoryTransfer() if kind == "memory" else FileTransfer(tmp_path / "weights")
    generator = torch.Generator().manual_seed(0)
    sent = [
        [("a", torch.randn(3, 5, generator=generator)), ("b", torch.randn(7, generator=generator).bfloat16())],
        [("c", torch.randn(100, 33, generator=generator).T)],  # larger, and not contiguous
        [("d", torch.randn(1, generator=generator)), ("e", torch.randn(2, 2, generator=generator).double())],
    ]
    methods, result = [], {}

    def call(method, **arguments):
        methods.append(method)
        if method == "update_weights":
            result.update(received([arguments["update_info"]]))

    done = transfer.send(lambda: iter(sent), call)
    assert methods == ["start_weight_update", *["update_weights"] * 3, "finish_weight_update"]
    assert done.bytes == sum(t.nbytes for bucket in sent for _, t in bucket)
    assert {name: t.dtype for b in sent for name, t in b} == {name: t.dtype for name, t in result.items()}
    assert all(torch.equal(result[name], tensor) for bucket in sent for name, tensor in bucket)
    if kind == "files":
        assert len(list((tmp_path / "weights").iterdir())) == 1  # one bucket at a time
    transfer.close()
    assert not (tmp_path / "weights").exists()


def test_what_differs_is_named_and_what_cannot_be_told_is_not():
    tensors = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}

    def ask(shapes):
        assert shapes == {"a": [2], "b": [3], "c": [4]}
        held = {"a": checksum(torch.ones(2)), "b": checksum(torch.zeros(3)), "c": None}
        return [{"checksums": held, "unreached": ["lm_head.weight"]}]

    assert mismatched_weights(lambda: [list(tensors.items())], ask, torch.float32) == ["b", "lm_head.weight"]


def test_the_whole_model_is_never_held_twice():
    """The transfer's memory is the largest bucket's, not the model's."""
    policy, transfer, sizes = small(), SharedMemoryTransfer(), []

    def one_by_one():
        for bucket in PlainBackend(policy).named_weights():
            yield from ([pair] for pair in bucket)

    transfer.send(one_by_one, lambda method, **given: sizes.append(len(transfer._memory or b"")))
    largest = max(t.nbytes for bucket in one_by_one() for _, t in bucket)
    assert max(sizes) <= largest + 64
    transfer.close()
