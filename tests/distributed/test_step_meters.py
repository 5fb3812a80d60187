"""Memory by phase, use and idle share: the arithmetic by hand, and the calls of CUDA by a recording fake."""

from __future__ import annotations

import pytest
import torch

from rlvr import GRPOTrainer
from rlvr.core.device_memory import PeakMemory
from rlvr.distributed.step_meters import RankUse, idle_share, use
from rlvr.monitor.console_text import step_cells
from rlvr.monitor.phases import Phases
from rlvr.rollout.vllm.options import devices_apart
from small_run import TREE, overlaid, task_rows


class FakeCuda:
    """torch.cuda's counters of one device: `allocate` changes what is held, peaks are since the last reset."""

    def __init__(self, monkeypatch):
        self.held = self.peak = self.reserved = self.reserved_peak = 0
        self.calls = []
        for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the host waited for the device"))

    def allocate(self, gib):
        self.held += gib * 2**30
        self.peak = max(self.peak, self.held)
        self.reserved = max(self.reserved, self.held + 2**30)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def max_memory_allocated(self, device):
        self.calls.append(str(device))
        return self.peak

    def max_memory_reserved(self, device):
        return self.reserved_peak

    def reset_peak_memory_stats(self, device):
        self.calls.append(str(device))
        self.peak, self.reserved_peak = self.held, self.reserved


def test_peak_memory_is_of_the_phase_that_held_it(monkeypatch):
    cuda, memory = FakeCuda(monkeypatch), PeakMemory(torch.device("cuda", 1))
    phases = Phases(meters=(memory,))
    cuda.allocate(100)  # before the step, and given back
    cuda.allocate(-97)
    phases.start()
    with phases("rollout"):
        cuda.allocate(2)
        with phases("score"):
            cuda.allocate(5)
            cuda.allocate(-5)
        cuda.allocate(-2)
    cuda.allocate(40)  # in no phase
    cuda.allocate(-40)
    with phases("update"):
        cuda.allocate(9)
        cuda.allocate(-9)
    phases.finish()
    peaks = memory.peaks()
    assert {key: size for key, size in peaks.items() if "reserved" not in key} == {
        "memory/rollout": 5,
        "memory/score": 10,
        "memory/update": 12,
    }
    assert peaks["memory/update_reserved"] == 101
    assert set(cuda.calls) == {"cuda:1"}
    phases.start()
    assert memory.peaks() == {}


def test_a_cpu_has_no_memory_figures(monkeypatch):
    cuda, memory = FakeCuda(monkeypatch), PeakMemory(torch.device("cpu"))
    memory.start()
    memory.settle("update")
    assert memory.peaks() == {}
    assert cuda.calls == []


def test_use_of_two_ranks():
    ranks = [
        RankUse(3e12, 100, 10e12, {"memory/update": 4.0, "memory/update_reserved": 6.0}),
        RankUse(1e12, 300, 10e12, {"memory/update": 5.0, "memory/update_reserved": 5.5}),
    ]
    assert use(ranks, update=2.0, step=8.0) == {
        "time/update_tokens_per_second_per_device": 100.0,
        "mfu/update": 0.1,
        "mfu/step": 0.025,
        "memory/update": 4.0,
        "memory/update_reserved": 6.0,
        "memory/update_max": 5.0,
        "memory/update_reserved_max": 6.0,
    }
    unknown = [ranks[0], RankUse(1e12, 300, None, {})]
    assert use(unknown, 2.0, 8.0)["mfu/update"] is None
    assert use(ranks, 2.0, None)["mfu/step"] is None


def test_idle_share_by_phases():
    seconds = {
        "rollout": 4.0,
        "verify": 1.0,
        "score": 2.0,
        "update": 6.0,
        "publish": 1.0,
        "unaccounted": 2.0,
        "step": 16.0,
    }
    times = {f"time/{name}": value for name, value in seconds.items()}
    engine = {"rollout": 1.0, "verify": 1.0, "score": 2.0, "update": 6.0, "publish": 1.0, None: 0.5}
    assert idle_share(times, engine, engine_apart=False) == 4.5 / 16
    assert idle_share(times, engine, engine_apart=True) == 9 / 16
    assert idle_share(times, {"update": 6.0}, engine_apart=False) == 0
    # every rank takes the same, though only rank 0 has the engine
    servers = {"name": "vllm-server", "tensor_parallel_size": 2}
    assert [devices_apart(spec) for spec in ("hf", "vllm", "vllm-server", servers)] == [False, False, True, True]


def test_the_line_shows_memory_and_mfu_where_there_are_any():
    cells = step_cells({"memory/update_max": 41.25, "memory/rollout_max": 60.04, "mfu/update": 0.314}, [])
    assert cells["mem"] == "60.0GiB"
    assert cells["mfu"] == "31%"
    assert not {"mem", "mfu"} & set(step_cells({"memory/update_max": None, "mfu/update": None}, []))


def test_a_run_on_a_cpu_counts_tokens_and_no_gpu(tmp_path):
    def evens(completion):
        return sum(c in "02468" for c in completion) / max(1, len(completion))

    with GRPOTrainer(None, task_rows(), evens, overlaid(TREE, {"run": {"dir": str(tmp_path), "name": "r"}})) as trainer:
        first, *later = trainer.train()
        assert trainer.training.learner.computed.flops > 0
    for row in later:
        assert row["time/tokens_per_second_per_device"] == row["time/tokens_per_second"]
        assert row["time/sampling_tokens_per_second"] >= row["time/tokens_per_second"]
        assert row["time/engine_idle"] <= row["time/step"]
    for row in (first, *later):
        gpu = [key for key in row if key.startswith(("memory/", "mfu/", "gpu/"))]
        assert len(gpu) == 5 * 4 + 3
        assert all(row[key] is None for key in gpu)
        assert row["tokens/trained"] == 0 or row["time/update_tokens_per_second_per_device"] > 0
