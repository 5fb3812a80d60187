"""The choices of the fused head by device, with CUDA's answers replaced."""

from __future__ import annotations

import pytest
import torch

from rlvr.policy import fused_head, head_devices
from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.model import Head


@pytest.fixture(autouse=True)
def forget():
    """No answer of another test is kept."""
    choices = (head_devices.triton_kernels, head_devices.gpu_tile, head_devices.sums_wide)
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()


def test_without_triton_operations_of_torch_compute_and_it_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(head_devices, "find_spec", lambda name: None)
    monkeypatch.setattr(fused_head, "INTERPRETED", True)
    head = Head((torch.zeros(2, 3),), (torch.ones(4, 3),))
    for _ in range(2):
        values = fused_statistics(head, torch.ones(2), {"entropy": False})
        torch.testing.assert_close(values["entropy"], torch.full((2,), 4.0).log())
    (record,) = caplog.records
    assert "triton is not installed (pip install triton)" in record.message


@pytest.mark.parametrize(
    ("gibibytes", "entries"), [(80, 16384), (64, 16384), (40, 8192), (24, 4096), (16, 4096), (8, 2048), (4, 2048)]
)
def test_a_tile_of_a_gpu_takes_a_small_share_of_its_memory(gibibytes, entries, monkeypatch):
    class Properties:
        total_memory = gibibytes << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert head_devices.gpu_tile(torch.device("cuda")) == head_devices.TileSize(entries, 2048 * entries)


@pytest.mark.parametrize(("capability", "wide"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_products_are_added_in_one_kernel_where_the_gpu_has_it(capability, wide, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert head_devices.sums_wide(torch.device("cuda")) is wide
    assert head_devices.sums_wide(torch.device("cpu")) is False
