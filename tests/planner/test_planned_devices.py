"""The memory of a machine as its control groups limit it, and what ranks of one machine share."""

from __future__ import annotations

import pytest

from rlvr.config import Config
from rlvr.planner import Devices, Planner
from rlvr.planner import planned_devices as devices

GIB = 1 << 30
PHYSICAL = 16 * GIB
UNLIMITED = "9223372036854771712"
"""As version 1 writes that there is no limit: the largest multiple of a page."""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(lines of /proc/self/cgroup, {file: text})`: the memory of such a machine of 16 GiB, in GiB."""

    def memory(own, files):
        root = tmp_path / "cgroup"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{text}\n")
        (tmp_path / "own").write_text(own)
        return devices.machine_memory() / GIB

    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": PHYSICAL // 4096}
    monkeypatch.setattr(devices.os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(devices, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(devices, "OWN_CGROUPS", tmp_path / "own")
    return memory


V2 = "0::/system.slice/job.scope/step\n"
V1 = "9:name=systemd:/a\n4:memory:/slurm/job\n3:cpu,cpuacct:/slurm\n0::/\n"
HOST_PATH = "5:cpuset,memory:/docker/0123abc\n0::/docker/0123abc\n"


@pytest.mark.parametrize(
    ("own", "files", "gib"),
    [
        ("", {}, 16),
        (V2, {"memory.max": "max"}, 16),
        (V2, {"memory.max": 8 * GIB}, 8),
        # the smallest on the path, which is that of a group above
        (V2, {"system.slice/job.scope/memory.max": 3 * GIB, "system.slice/job.scope/step/memory.max": "max"}, 3),
        (V2, {"system.slice/memory.max": 5 * GIB, "system.slice/job.scope/step/memory.max": 2 * GIB}, 2),
        # of a group that this process is not in
        (V2, {"system.slice/other/memory.max": GIB}, 16),
        (V1, {"memory/memory.limit_in_bytes": UNLIMITED, "memory/slurm/job/memory.limit_in_bytes": 4 * GIB}, 4),
        (V1, {"memory/slurm/memory.limit_in_bytes": 6 * GIB, "memory/slurm/job/memory.limit_in_bytes": UNLIMITED}, 6),
        # a container whose own group is mounted at the root while the path is the host's
        (HOST_PATH, {"memory/memory.limit_in_bytes": 7 * GIB}, 7),
        (HOST_PATH, {"memory.max": 7 * GIB}, 7),
        # outside of the cgroup namespace
        ("0::/../../other\n", {"memory.max": 9 * GIB}, 9),
    ],
)
def test_the_smallest_limit_of_the_groups_around_a_process_counts(machine, own, files, gib):
    assert machine(own, files) == gib


def test_ranks_of_a_machine_share_the_servers_that_the_run_starts_there(monkeypatch):
    monkeypatch.setattr(devices, "machine_memory", lambda: 64 * GIB)

    def engine(ranks: int, written) -> float:
        config = Config(
            run={"steps": 1},
            model={"scratch": {"hidden_size": 32, "layers": 2}, "device": "cpu"},
            rollout={"engine": written},
        )
        planner = Planner(devices.own_devices(config.model, ranks, ranks), ranks)
        (plan,) = planner.plans(planner.stages(config))
        return next(phase for phase in plan.phases if phase.name == "sampling").parts["engine"]

    servers = {"name": "vllm-server", "servers": 2}
    assert engine(4, servers) == engine(1, servers) / 4
    # one in each rank
    assert engine(4, "vllm") == engine(1, "vllm")


def test_devices_of_one_machine_are_no_more_memory(monkeypatch):
    monkeypatch.setattr(devices, "machine_memory", lambda: 64 * GIB)
    model = Config(model={"device": "cpu"}).model
    assert devices.own_devices(model, 8, 4) == Devices(8, 16 * GIB, on_gpu=False, sharing=4)
