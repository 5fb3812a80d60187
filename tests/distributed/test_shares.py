"""Tensors that ranks have parts of, put together in host memory."""

import pytest
import torch
import torch.distributed as dist

from rlvr.core.device_memory import recorded_events
from rlvr.distributed import shares


@pytest.mark.parametrize(("size", "start"), [(10, 4), (10, 0), (3, 1), (2, 2), (0, 0)])
def test_a_tensor_is_summed_piece_by_piece(monkeypatch, size, start):
    values = torch.tensor([0.0, -0.0, 1.5, float("nan"), -3.0, float("inf"), 1e-40, -7.25, 2.0, -0.0])[:size]
    bits = values.view(torch.int32)
    sizes, done = [], 0

    def all_reduce(piece):
        """The other rank has what comes before `start`."""
        nonlocal done
        others = bits[done : done + piece.numel()].clone()
        others[max(0, start - done) :] = 0
        piece += others
        done += piece.numel()
        sizes.append(piece.untyped_storage().nbytes())

    monkeypatch.setattr(shares, "CHUNK_BYTES", 12)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with recorded_events() as events:
        whole = shares.whole_on_host(size, values[start:], start, torch.device("cpu"), keep=True)
    assert whole.view(torch.int32).equal(bits)  # signs of zeros and all
    assert sizes == [min(4 * size, 12)] * -(-size // 3)
    assert [event.nbytes for event in events] == [min(4 * size, 12), -min(4 * size, 12)]
    done = 0
    assert shares.whole_on_host(size, None, 0, torch.device("cpu"), keep=False) is None
    assert len(sizes) == 2 * -(-size // 3)  # as often on every rank
