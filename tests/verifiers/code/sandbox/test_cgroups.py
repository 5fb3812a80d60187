"""Shares of the processor between runs, and the cgroups that a zygote has to itself.

Version 1 is tried for real where this machine lets us make a leaf; version 2 on a tree of plain files.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox_tiers import one_sandbox, usable_tier

from rlvr.verifiers.code.runner import Ended, Job, Limits
from rlvr.verifiers.code.sandbox import cgroups
from rlvr.verifiers.code.sandbox.cgroups import Hierarchy, Leaf
from rlvr.verifiers.code.sandbox.local import LocalRunner

WINDOW_SECONDS = 1.5
SPIN = """
import os, resource, time
def spin():
    time.sleep(max(0, BEGIN - time.monotonic()))
    before = time.process_time()
    while time.monotonic() < END:
        pass
    return time.process_time() - before
"""
HONEST = SPIN + "print(spin())"
MANY = (
    SPIN
    + """
for _ in range(30):
    if os.fork() == 0:
        os.setsid()
        spin()
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)
"""
)


@pytest.mark.parametrize("grouped", [True, False])
def test_a_run_keeps_its_share_beside_one_of_many_sessions(grouped, monkeypatch):
    """On one core, a run of one process gets as much as one of 30 processes, each in a session that it asked for."""
    tier = usable_tier("full")
    if not grouped:
        if Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() != "1":
            pytest.skip("this kernel does not group processes by session")
        monkeypatch.setattr(cgroups, "_ready", tuple)
    elif not any("cpu" in one.controllers for one in cgroups._ready()):
        pytest.skip("no cgroup for the processor can be made here")

    async def scene():
        runner = LocalRunner(tier, workers=2)
        await asyncio.gather(*(runner.run(Job("print(1)")) for _ in range(2)))
        begin = time.monotonic() + 1.5
        clock = f"BEGIN = {begin}\nEND = {begin + WINDOW_SECONDS}\n"
        jobs = (Job(clock + source, limits=Limits(seconds=60.0)) for source in (HONEST, MANY))
        outcomes = await asyncio.gather(*map(runner.run, jobs))
        await runner.close()
        return outcomes

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        outcomes = asyncio.run(scene())
    finally:
        os.sched_setaffinity(0, cores)
    assert [outcome.ended for outcome in outcomes] == [Ended.DONE] * 2, outcomes
    honest, many = (float(outcome.stdout) for outcome in outcomes)
    assert honest > many / 4, (honest, many)


@pytest.mark.parametrize("tier", ["full", "landlock"])
def test_programs_that_ask_for_a_session_go_on(tier):
    source = """
import os, subprocess, sys
os.setsid()
print(subprocess.run(["/bin/echo", "child"], start_new_session=True, capture_output=True).stdout)
child = subprocess.Popen(["/bin/sleep", "9"], process_group=0)
os.killpg(child.pid, 9)
print(child.wait())
"""
    with one_sandbox(tier) as run:
        outcome = run(Job(source))
    assert outcome.stdout == b"b'child\\n'\n-9\n", outcome


def leaves():
    """Paths of the leaves that exist below the hierarchies of this process."""
    return {path for one in cgroups._ready() for path in one.folder.glob("rlvr-*-*-*-*")}


@pytest.mark.alone
def test_a_zygote_lives_in_a_leaf_that_is_removed_with_it():
    tier = usable_tier("full")
    if not cgroups._ready():
        pytest.skip("no cgroup can be made here")
    before = leaves()

    async def scene():
        runner = LocalRunner(tier, workers=1)
        running = asyncio.ensure_future(runner.run(Job("while True: pass", limits=Limits(seconds=1.0, processes=5))))
        await asyncio.sleep(0.1)
        while not (made := leaves() - before) or any(not (leaf / "cgroup.procs").read_text() for leaf in made):
            await asyncio.sleep(0.01)
        outcome = await running
        for leaf in made:
            for name, text in (("cpu.shares", "512"), ("pids.max", "21")):
                assert not (leaf / name).exists() or (leaf / name).read_text().strip() == text
        await runner.close()
        return outcome

    assert asyncio.run(scene()).ended is Ended.TIME
    assert leaves() == before


@pytest.mark.alone
def test_leaves_of_a_killed_trainer_are_removed_by_the_next_and_no_others():
    usable_tier("full")
    if not cgroups._ready():
        pytest.skip("no cgroup can be made here")
    before = leaves()
    code = (
        "import sys, time\nfrom rlvr.verifiers.code.sandbox.cgroups import Leaf\nkept = Leaf()\nprint(1, flush=True)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", f"{code}time.sleep(600)"], stdout=subprocess.PIPE)
    trainer.stdout.readline()
    theirs = leaves() - before
    folders = [one.folder for one in cgroups._ready()]
    foreign = [folder / name for folder in folders for name in ("rlvr-1-2-3-4", "rlvr-others", "rlvr-tests-1-x-y")]
    try:
        assert len(theirs) == len(folders)
        for path in foreign:
            path.mkdir()
        for folder in folders:
            cgroups.remove_left_over(folder)
        assert theirs <= leaves()  # it lives
        trainer.kill()
        trainer.wait()
        for folder in folders:
            cgroups.remove_left_over(folder)
        assert not theirs & leaves()
        assert all(path.exists() for path in foreign)
    finally:
        trainer.kill()
        for path in foreign:
            path.rmdir()


MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / {0}/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / {0}/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 /docker/1 {0}/pids rw,relatime shared:4 - cgroup cgroup rw,pids
41 31 0:38 / {0}/unified rw,relatime - cgroup2 cgroup2 rw
"""


def test_only_what_is_ours_to_divide_is_used(tmp_path):
    for name in ("cpu", "memory/service", "pids", "unified"):
        (tmp_path / name).mkdir(parents=True)
    for name, text in (("controllers", "hugetlb"), ("procs", ""), ("subtree_control", "")):
        (tmp_path / f"unified/cgroup.{name}").write_text(text)
    membership = "8:pids:/docker/1\n4:memory:/service\n1:cpuacct,cpu:/\n2:name=systemd:/\n0::/\n"
    result = cgroups.usable(membership, MOUNTS.format(tmp_path))
    assert result == [Hierarchy(1, tmp_path / "cpu", ("cpu",)), Hierarchy(1, tmp_path / "pids/.", ("pids",))]
    assert cgroups.usable("", MOUNTS.format(tmp_path)) == []


def test_version_2_is_divided_as_the_kernel_asks(tmp_path, monkeypatch):
    """A cgroup with limits for its leaves has no processes of its own: they are moved before controllers are
    enabled."""
    mounts = f"41 31 0:38 / {tmp_path} rw - cgroup2 cgroup2 rw"
    inner = tmp_path / "trainer"
    inner.mkdir()
    for name, text in (("controllers", "cpuset cpu io memory pids"), ("procs", "7\n9\n"), ("subtree_control", "pids")):
        (inner / f"cgroup.{name}").write_text(text)
    monkeypatch.setattr(cgroups, "_delegated", lambda folder: False)
    assert cgroups.usable("0::/trainer\n", mounts) == []
    monkeypatch.setattr(cgroups, "_delegated", lambda folder: True)
    (one,) = cgroups.usable("0::/trainer\n", mounts)
    assert one == Hierarchy(2, inner, ("cpu", "memory", "pids"))
    assert cgroups.usable("0::/trainer/rlvr-initial\n", mounts) == [one]  # a second process, after the division
    moves = [("rlvr-initial/cgroup.procs", "7"), ("rlvr-initial/cgroup.procs", "9")]
    assert one.division() == [*moves, ("cgroup.subtree_control", "+cpu +memory")]
    assert cgroups._divided(one)
    assert (inner / "rlvr-initial/cgroup.procs").read_text() == "9"
    assert (inner / "cgroup.subtree_control").read_text() == "+cpu +memory"

    leaf = Leaf([one])
    (folder,) = inner.glob("rlvr-*-*")
    leaf.limit(2**28, 32)
    leaf.limit(2**20, 1)  # limits only grow
    written = {path.name: path.read_text() for path in folder.iterdir()}
    expected = {"memory.swap.max": "0", "memory.max": str(2**28 + 2**27), "pids.max": "48", "cpu.weight": "50"}
    assert written == expected
    command, environment = leaf.entering(["/bin/cat", f"{folder}/cgroup.procs"])
    entered = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert entered.communicate()[0].decode().split() == [str(entered.pid)]
    assert Leaf([]).entering(["x"]) == (["x"], {})


def test_version_1_has_its_own_names():
    one = Hierarchy(1, Path("/"), ("memory", "pids"))
    assert one.limits(2**30, 9) == [
        ("memory.swappiness", "0"),
        ("memory.limit_in_bytes", str(2**30)),
        ("pids.max", "9"),
    ]
    assert one.shared_out() == []
