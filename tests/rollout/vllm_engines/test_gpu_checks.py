"""Runs that the GPUs found cannot hold: refused in one line, before any weight is loaded. The CUDA calls alone are
replaced."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import small
from test_gpu_engine import gpus, on_gpu  # noqa: F401

from rlvr.config import Config
from rlvr.distributed import World, gpu_checks
from rlvr.distributed.gpu_checks import check_gpus
from rlvr.errors import ConfigError
from rlvr.evaluate.model_evaluation import Part, sampler
from rlvr.rollout.vllm import VLLMOptions, devices, installed
from rlvr.rollout.vllm import embedded_engine as engine
from rlvr.run import policy_training
from rlvr.trainer import GRPOTrainer

GIB = 1 << 30
TOTAL = 80 * GIB


@pytest.fixture
def machine(gpus):  # noqa: F811
    """Two free GPUs; `free` and `uuids` by index can be changed."""
    result = SimpleNamespace(free=[TOTAL] * 2, uuids=["GPU-a", "GPU-b"], name="NVIDIA H100 80GB HBM3", patch=gpus)

    def index_of(device):
        return device.index or 0

    gpus.setattr(torch.cuda, "is_available", lambda: True)
    gpus.setattr(torch.cuda, "set_device", lambda device: None)
    gpus.setattr(torch.cuda, "mem_get_info", lambda device: (result.free[index_of(device)], TOTAL))
    gpus.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=result.uuids[index_of(device)], name=result.name),
    )

    def look(names):
        """As CUDA does it, whose rule for names is torch's: one kind at a time, none twice, up to the first that is no
        GPU."""
        with gpus.context() as there:
            there.setenv(devices.VISIBLE, ",".join(names))
            known = torch.cuda._parse_visible_devices()
        numbers = [result.uuids.index(name) if name in result.uuids else name for name in known]
        shown = itertools.takewhile(lambda number: number in range(len(result.uuids)), numbers)
        return [devices.GPU(result.uuids[number], result.free[number], TOTAL) for number in shown]

    gpus.setattr(devices, "look", look)
    return result


class Ranks(World):
    """Rank 0 of several; the others answer as `others` say, or as rank 0 does."""

    def __init__(self, size=2, others=()):
        super().__init__(0, size)
        self.others = others

    def gather(self, value, what, deadline=None):
        others = [other if other is not None else value for other in self.others]
        return [value, *others, *[value] * (self.size - 1 - len(others))]


class Rank(World):
    """A rank that sees its own answer alone: its GPU and its problem."""

    def gather(self, value, what, deadline=None):
        self.answer = value
        return [value]


def tree(**sections):
    """The configuration of a run with the engine `vllm`."""
    rollout = {"engine": "vllm", **sections.pop("rollout", {})}
    return Config(**{"model": {"scratch": {}, **sections.pop("model", {})}, "rollout": rollout, **sections})


def answer_of(config, rank, size=2):
    world = Rank(rank, size, rank)
    check_gpus(config, world)
    return world.answer


@pytest.mark.slow
def test_ranks_with_gpus_of_their_own_are_taken(machine):
    check_gpus(tree(), World())
    assert [answer_of(tree(), rank)[0].uuid for rank in (0, 1)] == ["GPU-a", "GPU-b"]
    check_gpus(tree(), Ranks(others=[answer_of(tree(), 1)]))


@pytest.mark.gate
def test_two_ranks_on_one_gpu_are_refused(machine):
    config = tree(model={"device": "cuda:1"})
    with pytest.raises(
        ConfigError, match=r"ranks 0 and 1 are to train on the same GPU \(1, GPU-b\).*model\.device \(cuda:1\)"
    ):
        check_gpus(config, Ranks())
    machine.uuids[:] = ["GPU-a", "GPU-a"]  # as where each rank's container shows it the same GPU by another number
    second = answer_of(tree(), 1)
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 are to train on the same GPU \(1, GPU-a\)"):
        check_gpus(tree(), Ranks(others=[second]))
    machine.uuids[0] = "GPU-c"
    with pytest.raises(ConfigError, match="ranks 1 and 2 are to train on the same GPU"):
        check_gpus(tree(), Ranks(3, [second, second]))
    machine.patch.setenv(devices.VISIBLE, "MIG-1,MIG-2")  # two parts of one GPU
    machine.uuids[:] = ["GPU-a", "GPU-a"]
    check_gpus(tree(), Ranks(others=[answer_of(tree(), 1)]))
    machine.patch.delenv(devices.VISIBLE)  # as where each rank's container has one of them
    machine.name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    check_gpus(tree(), Ranks(others=[answer_of(tree(), 1)]))
    machine.patch.setattr(gpu_checks, "machine", lambda: ("second", ""))
    second = answer_of(tree(model={"device": "cuda:0"}), 1)
    machine.patch.setattr(gpu_checks, "machine", lambda: ("first", ""))
    check_gpus(tree(), Ranks(others=[second]))
    with pytest.raises(ConfigError, match="ranks 0 and 1 are to train on the same GPU"):
        check_gpus(tree(model={"device": "cuda:0"}), Ranks())


def test_a_rank_that_is_shown_too_few_gpus_is_refused_on_all_ranks(machine):
    machine.patch.setenv(devices.VISIBLE, "3")
    with pytest.raises(
        ConfigError, match=r"GPU of index 1, and CUDA_VISIBLE_DEVICES shows 1 \(3\): start at most"
    ) as own:
        answer_of(tree(), 1)
    with pytest.raises(ConfigError, match=r"rank 1: .*GPU of index 1"):
        check_gpus(tree(rollout={"engine": "hf"}), Ranks(others=[(None, str(own.value))]))
    with pytest.raises(ConfigError, match="GPU of index 1"):
        check_gpus(tree(rollout={"engine": "hf"}, model={"device": "cuda:1"}), World())


@pytest.mark.gate
def test_a_gpu_that_another_process_uses_is_refused_before_anything_is_loaded(machine, tmp_path):
    machine.free[0] = 10 * GIB
    machine.patch.setattr(policy_training, "load_policy", lambda *_: pytest.fail("weights were loaded"))
    config = tree(
        run={"dir": str(tmp_path), "steps": 1}, data={"train": {"name": "arithmetic", "count": 4}}, verifier="math"
    )
    message = (
        r"the GPU 0 has 10\.0 of 80\.0 GiB free, and vLLM demands 32\.0 GiB \(gpu_memory_utilization 0\.4\): "
        r"70\.0 GiB are held by other processes \(nvidia-smi\)\. End them, set gpu_memory_utilization to 0\.12 or "
        r"less, or choose "
    )
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(config=config)
    machine.free[:] = [TOTAL, 10 * GIB]
    with pytest.raises(ConfigError, match="the GPU 1 has 10"):
        check_gpus(tree(model={"device": "cuda:1"}), World())
    machine.free[0] = 50 * GIB
    check_gpus(tree(), World())
    over = {"name": "vllm", "engine_args": {"gpu_memory_utilization": 0.7}}  # they go over the option
    with pytest.raises(ConfigError, match=r"demands 56\.0 GiB"):
        check_gpus(tree(rollout={"engine": over}), World())
    check_gpus(tree(rollout={"engine": "hf"}), World())  # which has no memory of its own


def test_weights_of_the_trainer_that_leave_too_little_are_named(machine):
    machine.free[0] = 20 * GIB
    machine.patch.setattr(torch.cuda, "memory_reserved", lambda device: 55 * GIB)
    machine.patch.setattr(engine, "EngineHost", lambda *_: pytest.fail("the engine was started"))
    with pytest.raises(ConfigError, match=r"5\.0 GiB are held by other processes .* and 55\.0 GiB by the trainer"):
        VLLMOptions().open(on_gpu(small()))


def test_what_torchs_allocator_keeps_unused_is_free(machine):
    machine.free[0] = 20 * GIB
    machine.patch.setattr(torch.cuda, "empty_cache", lambda: machine.free.__setitem__(0, 60 * GIB))
    VLLMOptions().check(torch.device("cuda", 0))


def test_a_split_engine_does_not_take_a_gpu_that_another_rank_trains_on(machine):
    split = {"rollout": {"engine": {"name": "vllm", "tensor_parallel_size": 2}}}
    check_gpus(tree(**split), World())
    machine.patch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError,
        match=r"rank 0: .*tensor_parallel_size 2 needs 1 GPUs beside the trainer's that no rank trains on.* use 0, 1",
    ):
        check_gpus(tree(**split), Ranks(others=[answer_of(tree(), 1)]))
    assert answer_of(tree(**split), 1)[1] is None  # the engine is rank 0's


def test_what_was_refused_after_loading_is_refused_before(machine):
    """Too few GPUs for servers, a vLLM for CPUs, and options that do not go together."""
    with pytest.raises(ConfigError, match="2 servers of 1 GPUs need 2 that no rank trains on"):
        check_gpus(tree(rollout={"engine": {"name": "vllm-server", "servers": 2}}), World())
    check_gpus(tree(rollout={"engine": {"name": "vllm-server", "servers": 1}}), World())
    check_gpus(tree(rollout={"engine": {"name": "vllm-server", "urls": ["http://127.0.0.1:1"]}}), World())
    with pytest.raises(ConfigError, match="transfer ipc sends from a GPU to the same one"):
        check_gpus(tree(rollout={"engine": {"name": "vllm", "transfer": "ipc", "tensor_parallel_size": 2}}), World())
    with pytest.raises(ConfigError, match=r"model.device is a CPU, and the vLLM installed here is built for a GPU"):
        check_gpus(tree(model={"device": "cpu"}), World())
    machine.patch.setattr(installed, "for_cpu", lambda: True)
    for name in ("vllm", "vllm-server"):
        with pytest.raises(ConfigError, match=r"model.device is a GPU, and the vLLM installed here is built for a CPU"):
            check_gpus(tree(rollout={"engine": name}), World())
    machine.patch.setattr(installed, "version", lambda: (_ for _ in ()).throw(ConfigError("vLLM 0.31 is installed")))
    with pytest.raises(ConfigError, match=r"vLLM 0.31 is installed"):
        check_gpus(tree(), World())


def servers(**options):
    return tree(rollout={"engine": {"name": "vllm-server", **options}})


def test_a_server_is_not_placed_on_a_gpu_of_a_rank_by_another_name(machine):
    check_gpus(servers(devices=["GPU-b"]), World())
    for given in ("0", "00", "GPU-a"):
        with pytest.raises(ConfigError, match=rf"devices\[0\] names the GPU {given}, which a rank trains on"):
            check_gpus(servers(devices=[given]), World())
    with pytest.raises(ConfigError, match=r"devices names the GPU GPU-b \(GPU-b\) twice"):
        check_gpus(servers(servers=2, devices=["1", "GPU-b"]), World())
    machine.patch.setenv("LOCAL_WORLD_SIZE", "2")
    for given in ("1", "GPU-b"):
        with pytest.raises(ConfigError, match=f"names the GPU {given}, which a rank trains on"):
            check_gpus(servers(devices=[given]), World())
    machine.patch.delenv("LOCAL_WORLD_SIZE")
    machine.patch.setenv(devices.VISIBLE, "GPU-a,GPU-b")
    check_gpus(servers(devices=["1"]), World())
    with pytest.raises(ConfigError, match="names the GPU 0, which a rank trains on"):
        check_gpus(servers(devices=["0"]), World())


def test_servers_may_be_named_in_different_ways_and_the_gpus_of_one_may_not(machine):
    machine.uuids[:] = ["GPU-a", "GPU-b", "GPU-c"]
    machine.free.append(TOTAL)
    for given in (["1", "GPU-c"], ["GPU-c", "1"], ["GPU-b", "MIG-1"]):
        check_gpus(servers(servers=2, devices=given), World())
    machine.free[1] = GIB
    for given in (["1", "GPU-c"], ["GPU-c", "1"], ["MIG-1", "1"]):
        with pytest.raises(ConfigError, match=r"the GPU 1 has 1\.0 of 80\.0 GiB free"):
            check_gpus(servers(servers=2, devices=given), World())
    with pytest.raises(ConfigError, match=r"there is no GPU GPU-d on this machine \(of GPU-d, 1\)"):
        check_gpus(servers(servers=2, devices=["GPU-d", "1"]), World())
    with pytest.raises(ConfigError, match=r"devices\[0\] \(1,GPU-c\) names GPUs in different ways"):
        check_gpus(servers(tensor_parallel_size=2, devices=["1,GPU-c"]), World())
    with pytest.raises(ConfigError, match="devices names the GPU 1 for two servers"):
        check_gpus(servers(servers=2, devices=["01", "1"]), World())


def test_parts_of_gpus_that_cuda_does_not_show_the_trainer_are_for_servers(machine):
    machine.patch.setenv(devices.VISIBLE, "MIG-1,MIG-2,MIG-3")
    machine.patch.setattr(torch.cuda, "device_count", lambda: 1)
    check_gpus(servers(servers=2), World())
    home = torch.device("cuda", 0)
    assert devices.of_servers(home, 2, 1, ()) == ["MIG-2", "MIG-3"]
    with pytest.raises(ConfigError, match="3 servers of 1 GPUs need 3 that no rank trains on; of the 3"):
        check_gpus(servers(servers=3), World())
    with pytest.raises(ConfigError, match="1 servers of 2 GPUs need 2 that no rank trains on; of the 1"):
        check_gpus(servers(tensor_parallel_size=2), World())
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 needs 1 GPUs beside the trainer's"):
        check_gpus(tree(rollout={"engine": {"name": "vllm", "tensor_parallel_size": 2}}), World())
    with pytest.raises(ConfigError, match="GPU of index 1"):
        answer_of(tree(), 1)


def test_an_engine_of_each_rank_needs_no_more_than_the_gpu_that_the_rank_is_shown(machine):
    """As where the launcher shows each rank its own GPU alone."""
    machine.patch.setenv("LOCAL_WORLD_SIZE", "2")
    machine.patch.setenv(devices.VISIBLE, "1")
    machine.patch.setattr(torch.cuda, "device_count", lambda: 1)
    config = tree(model={"device": "cuda:0"})
    machine.uuids[0] = "GPU-b"
    second = answer_of(config, 1)
    machine.uuids[0] = "GPU-a"
    check_gpus(config, Ranks(others=[second]))
    assert devices.beside_trainer(torch.device("cuda", 0), 1) == "1"
    machine.free[0] = GIB
    with pytest.raises(ConfigError, match=r"the GPU 1 has 1\.0 of 80\.0 GiB free"):
        check_gpus(config, World())


def test_gpus_that_are_not_there_are_refused(machine):
    with pytest.raises(ConfigError, match=r"there is no GPU 9 on this machine \(of 1, 9\)"):
        check_gpus(servers(servers=2, devices=["1", "9"]), World())
    with pytest.raises(ConfigError, match="2 servers need as many `devices`, not 1"):
        check_gpus(servers(servers=2, devices=["1"]), World())
    with pytest.raises(ConfigError, match="start at least one server"):
        check_gpus(servers(servers=0), World())
    machine.patch.setenv(devices.VISIBLE, "0,-1,1")  # CUDA shows what comes before the -1
    machine.patch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="1 servers of 1 GPUs need 1 that no rank trains on"):
        check_gpus(servers(), World())
    machine.patch.undo()
    assert devices.look(["-1"]) == []  # in a process, without a GPU here
    machine.patch.setattr(devices, "LOOK", "raise SystemExit('no driver')")
    with pytest.raises(ConfigError, match="the GPUs 0, 1 cannot be used: no driver"):
        devices.look(["0", "1"])


def test_the_memory_of_gpus_beside_the_trainers_is_looked_at(machine):
    machine.free[1] = GIB
    with pytest.raises(ConfigError, match=r"the GPU 1 has 1\.0 of 80\.0 GiB free, and vLLM demands 72\.0 GiB"):
        check_gpus(servers(), World())
    split = {"name": "vllm", "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"the GPU 1 has 1\.0 of 80\.0 GiB free, and vLLM demands 32\.0 GiB"):
        check_gpus(tree(rollout={"engine": split}), World())
    check_gpus(tree(), World())
    with pytest.raises(ConfigError, match=r"demands 100\.0 GiB \(kv_cache_gib 100\).* set a lower kv_cache_gib"):
        check_gpus(tree(rollout={"engine": {"name": "vllm", "kv_cache_gib": 100}}), World())


def test_an_evaluation_is_refused_before_anything_is_loaded(machine):
    machine.free[0] = 10 * GIB
    machine.patch.setattr("rlvr.policy.load_policy", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match="the GPU 0 has 10"), sampler([Part("", tree(), [])], World()):
        pass
