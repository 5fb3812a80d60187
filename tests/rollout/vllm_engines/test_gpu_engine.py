"""The vLLM engines as they start and publish on a GPU: their own code, with vLLM's process and the CUDA calls
replaced."""

from types import SimpleNamespace

import pytest
import torch
from engine_helpers import small

from rlvr.config import Config, ModelConfig, ScratchConfig
from rlvr.config.stage_plan import longest_sequence, stage_plans
from rlvr.distributed import PlainBackend, World
from rlvr.distributed.engine_router import NullEngine, open_engine
from rlvr.distributed.plain import PlainOptions
from rlvr.errors import ConfigError, TrainingError
from rlvr.policy import loading
from rlvr.rollout.engine import Published
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, devices, installed, launch, server_engine
from rlvr.rollout.vllm import embedded_engine as engine
from rlvr.rollout.vllm.members import Member
from rlvr.rollout.weights import weight_buckets

CUDA = torch.device("cuda", 0)


class Host:
    """An engine's process: what it was started with and told."""

    def __init__(self, arguments, environment, folder, start_timeout):
        self.arguments, self.environment, self.told = arguments, environment, []
        self.facts = {"max_model_len": 64}

    def call(self, method, what, timeout, **arguments):
        self.told.append((method, *arguments.get("tags", ()), *([arguments["level"]] if "level" in arguments else [])))

    def close(self):
        """Nothing is held."""


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, and the vLLM for them."""
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 << 30, 80 << 30))  # free, in all
    properties = {index: SimpleNamespace(uuid=f"GPU-{index}", name="NVIDIA H100 80GB HBM3") for index in range(8)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index or 0])
    monkeypatch.setattr(
        devices, "look", lambda names: [devices.GPU(f"GPU-{name}", 80 << 30, 80 << 30) for name in names]
    )
    monkeypatch.setattr(installed, "version", lambda: "0.32.0")
    monkeypatch.setattr(installed, "for_cpu", lambda: False)
    monkeypatch.setattr(engine, "EngineHost", Host)
    return monkeypatch


def on_gpu(policy, index=0):
    """The policy as if it were computed on a GPU; its weights are where they are."""
    policy.home = torch.device("cuda", index)
    return policy


class Sent(list):
    """A transfer that notes what is sent, in the order of what the engine is told."""

    def __init__(self, host):
        self.host = host

    def send(self, weights, call):
        self.append([(name, tensor) for bucket in weights() for name, tensor in bucket])
        self.host.told.append(("weights", len(self[-1])))
        return Published(1, 1.0)

    def close(self):
        """Nothing is held."""


def opened(policy, **options):
    result = VLLMOptions(**options).open(policy)
    result._transfer = Sent(result._host)
    return result


@pytest.mark.gate
def test_memory_is_taken_in_the_order_in_which_it_is_free(gpus):
    """Gradients and the allocator's cache go first, then the engine's weights wake, then they are sent, then the buffer
    goes, then the cache of keys and values wakes. The engine sleeps from its start, while the backend takes its
    memory."""
    policy = on_gpu(small())
    result = opened(policy)
    assert result._host.told == [("sleep", 2)]
    backend = PlainBackend(policy)
    gpus.setattr(torch.cuda, "empty_cache", lambda: result._host.told.append(("empty cache",)))
    backend.zero()
    assert all(p.grad is not None for p in policy.model.parameters())
    result.publish(0, backend.named_weights)
    for version in (1, 2):
        result.release()
        backend.zero()
        result._host.told.clear()
        backend.release()
        assert all(p.grad is None for p in policy.model.parameters())
        result.publish(version, backend.named_weights)
        count = len(list(policy.model.named_parameters(remove_duplicate=False)))
        assert result._host.told == [
            ("empty cache",),
            ("wake_up", "weights"),
            ("weights", count),
            ("empty cache",),
            ("wake_up", "kv_cache"),
            ("commit",),
        ]
    result.close()


@pytest.mark.gate
def test_a_version_is_sent_once(gpus):
    """An evaluation after a step publishes it again: the engine is awake, with all of its memory taken. Ranks that help
    to gather the weights of rank 0's engine go through them as often."""
    policy = on_gpu(small())
    result, other = opened(policy), NullEngine()
    gathers = []

    def weights():
        gathers.append(other.version)
        return weight_buckets(policy)

    for version, released, sends in ((0, False, 1), (0, False, 1), (0, True, 2), (1, True, 3), (1, False, 3)):
        if released:
            result.release()
            other.release()
        result._host.told.clear()
        assert (result.publish(version, lambda: weight_buckets(policy)).bytes > 0) == bool(result._host.told)
        other.publish(version, weights)
        assert len(result._transfer) == len(gathers) == sends
        assert result.version == other.version == version
    result.close()


@pytest.mark.gate
def test_an_adapters_base_weights_outlive_the_sleep(gpus):
    """They are sent once, so the engine keeps them on the host (level 1); level 2 would discard them."""
    policy = on_gpu(small(adapter={"r": 2}))
    result = opened(policy)
    for version in (0, 1, 2):
        result.publish(version, tuple)
        result.release()
    sleeps = [call for call in result._host.told if call[0] == "sleep"]
    assert sleeps == [("sleep", 2), *[("sleep", 1)] * 3]  # before anything was sent there is nothing to keep
    assert len(result._transfer) == 1
    names = [name for name, _ in result._transfer[0]]
    assert not [name for name in names if "lora" in name or "base_layer" in name]
    result.close()
    merged = opened(on_gpu(small(adapter={"r": 2})), merge_adapter=True)
    merged.publish(0, lambda: weight_buckets(policy))
    merged.release()
    assert merged._host.told[-1] == ("sleep", 2)
    assert [name for name, _ in merged._transfer[0]] == names
    merged.close()


@pytest.mark.gate
def test_another_adapter_of_the_same_version_is_written(gpus):
    """As where the run goes back to a checkpoint."""
    policy = on_gpu(small(adapter={"r": 2}))
    result = opened(policy)
    result.publish(0, tuple)
    before = result._adapter.newest
    result.release()
    result.publish(0, tuple)
    assert result._adapter.newest.number == before.number + 1
    result.close()


def test_quantised_layers_outlive_every_sleep(gpus):
    """Some of their tensors are neither parameters nor buffers, and level 2 keeps buffers alone."""
    gpus.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    result = opened(on_gpu(small(dtype="bfloat16")), quantization="fp8")
    result.publish(0, tuple)
    result.release()
    assert [call for call in result._host.told if call[0] == "sleep"] == [("sleep", 1)] * 2
    assert result._host.arguments["quantization"] == "fp8_per_tensor"
    result.close()


def test_weights_under_a_quantized_adapter_are_sent_dense(gpus):
    """As `dense` has them, by the names of the plain model; not packed in bytes beside their constants."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed here")
    from rlvr.policy.quantization import dense

    plain = small()
    policy = small(adapter={"r": 2})

    for name, module in list(policy.causal_lm.named_modules()):
        if name.endswith("down_proj.base_layer"):
            packed = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
            module.weight = packed
    result = opened(on_gpu(policy))
    result.publish(0, tuple)
    sent = dict(result._transfer[0])
    assert sent.keys() == {name for name, _ in plain.model.named_parameters(remove_duplicate=False)}
    for name, parameter in plain.model.named_parameters(remove_duplicate=False):
        assert sent[name].shape == parameter.shape, name
    held = policy.causal_lm.get_submodule("model.layers.0.mlp.down_proj.base_layer").weight
    assert torch.equal(sent["model.layers.0.mlp.down_proj.weight"], dense(held))
    result.close()


def test_weights_that_wait_on_the_host_for_zero_3_have_an_engine_for_the_gpu(gpus):
    gpus.setattr(loading, "device_of", lambda config: torch.device("cuda"))
    gpus.setattr(torch.cuda, "set_device", lambda device: None)
    policy = loading.load_policy(ModelConfig(scratch=ScratchConfig(), dtype="bfloat16"), shared_out=True)
    assert policy.device.type == "cpu"
    result = opened(policy)
    assert result._host.arguments["gpu_memory_utilization"] == 0.4
    assert not {"enforce_eager", "kv_cache_memory_bytes"} & result._host.arguments.keys()
    assert result._host.arguments["weight_transfer_config"] == {"backend": "ipc"}
    assert result._host.arguments["enable_sleep_mode"]
    assert result._host.environment[devices.VISIBLE] == "0"
    result.close()
    servers = VLLMServerOptions()
    assert servers.transfer_to(policy.home) == "nccl"
    assert launch.engine_arguments(policy, result._folder, servers, "nccl")["gpu_memory_utilization"] == 0.9


@pytest.mark.gate
def test_weights_go_by_ipc_or_through_the_hosts_memory(gpus):
    for options, backend in (
        ({}, "ipc"),
        ({"transfer": "ipc"}, "ipc"),
        ({"transfer": "shared_memory"}, "shared_memory"),
        ({"tensor_parallel_size": 2}, "shared_memory"),
    ):
        result = VLLMOptions(**options).open(on_gpu(small()))
        assert result._host.arguments["weight_transfer_config"] == {"backend": backend}
        result.close()
    with pytest.raises(ConfigError, match="transfer ipc sends from a GPU to the same one"):
        VLLMOptions(transfer="ipc", tensor_parallel_size=2).open(on_gpu(small()))
    with pytest.raises(ConfigError, match="transfer ipc sends from a GPU to the same one"):
        VLLMOptions(transfer="ipc").open(small())


@pytest.mark.gate
def test_a_split_engine_has_the_trainers_gpu_and_others(gpus):
    for index, shown in ((0, "0,1"), (1, "1,0")):
        result = VLLMOptions(tensor_parallel_size=2).open(on_gpu(small(), index))
        assert result._host.environment[devices.VISIBLE] == shown
        result.close()
    gpus.setenv(devices.VISIBLE, "5,GPU-c0ffee")
    result = VLLMOptions().open(on_gpu(small(), 1))
    assert result._host.environment[devices.VISIBLE] == "GPU-c0ffee"
    result.close()
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size 4 needs 3 GPUs beside .* CUDA_VISIBLE_DEVICES shows 1: the ranks use"
    ):
        VLLMOptions(tensor_parallel_size=4).open(on_gpu(small()))


def test_servers_are_placed_on_gpus_that_no_rank_uses(gpus):
    policy = on_gpu(small())
    assert devices.of_servers(policy.home, 1, 1, ()) == ["1"]
    with pytest.raises(
        ConfigError, match=r"2 servers of 1 GPUs need 2 .* the 2 that are visible .* use 0\. Start fewer"
    ):
        devices.of_servers(policy.home, 2, 1, ())
    gpus.setattr(torch.cuda, "device_count", lambda: 8)
    assert devices.of_servers(policy.home, 2, 2, ()) == ["1,2", "3,4"]
    gpus.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.of_servers(policy.home, 2, 2, ()) == ["4,5", "6,7"]
    gpus.setenv(devices.VISIBLE, "3,2,1,0,7,6")
    assert devices.of_servers(policy.home, 2, 1, ()) == ["7", "6"]
    assert devices.of_servers(policy.home, 2, 1, ("4", "5")) == ["4", "5"]
    for given, message in (
        (("2", "5"), r"devices\[0\] names the GPU 2, which a rank trains on"),
        (("7,6", "5"), r"devices\[0\] names 2 GPUs, and the server needs 1"),
        (("7", "7"), "devices names the GPU 7 for two servers"),
    ):
        with pytest.raises(ConfigError, match=message):
            devices.of_servers(policy.home, 2, 1, given)
    gpus.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="8 ranks on this machine need as many GPUs"):
        devices.of_servers(policy.home, 1, 1, ())


def test_servers_without_a_gpu_of_their_own_are_refused_before_any_is_started(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(server_engine, "StartedServer", None)
    with pytest.raises(ConfigError, match="1 servers of 1 GPUs need 1 that no rank trains on"):
        VLLMServerOptions().open(on_gpu(small()))


def test_servers_elsewhere_need_an_address_of_the_trainer_that_is_not_their_own(gpus):
    here, elsewhere = "http://127.0.0.1:8000", "http://203.0.113.7:8000/"  # a network for documentation (RFC 5737)
    for address in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(ConfigError, match=r"203\.0\.113\.7:8000/ is on another machine .* set `address` to"):
            VLLMServerOptions(urls=(here, elsewhere), address=address).check(CUDA)
    with pytest.raises(ConfigError, match="is on another machine"):  # before any server is asked
        VLLMServerOptions(urls=(elsewhere,)).open(on_gpu(small()))
    for urls, options, home in (
        ((here, "http://localhost:8000"), {}, CUDA),
        ((elsewhere,), {"address": "198.51.100.1"}, CUDA),
        ((elsewhere,), {"transfer": "files"}, CUDA),
        ((elsewhere,), {}, torch.device("cpu")),
    ):
        VLLMServerOptions(urls=urls, **options).check(home)


def test_the_device_that_is_asked_for_is_the_current_one(monkeypatch):
    """vLLM's sender and NCCL ask for the current device."""
    policy, made = small(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(str(device)))
    monkeypatch.setattr(loading, "build_model", lambda *_: pytest.fail(f"built after {made}"))
    with pytest.raises(pytest.fail.Exception, match="cuda:1"):
        loading.load_policy(ModelConfig(scratch=ScratchConfig(), device="cuda:1"))
    monkeypatch.setattr(type(policy.model), "to", lambda self, device: self)
    loading.given_policy(policy.model, policy.tokenizer, ModelConfig(device="cuda:1"))
    assert made == ["cuda:1", "cuda:1"]


TREE = {
    "run": {"steps": 1},
    "data": {"train": "arithmetic", "max_prompt_tokens": 20},
    "rollout": {"max_new_tokens": 12, "engine": "vllm"},
    "model": {"scratch": {}},
    "verifier": "math",
}


def longest(evaluated=0, **sections):
    tree = {
        name: {**value, **sections.get(name, {})} if isinstance(value, dict) else value for name, value in TREE.items()
    }
    plans = stage_plans(Config(**{**tree, **{k: v for k, v in sections.items() if k not in tree}}))
    return longest_sequence(plans, lambda _: evaluated)


@pytest.mark.gate
def test_the_engine_is_as_long_as_the_longest_sequence(gpus):
    assert longest() == 32
    assert longest(10) == 32
    assert longest(30) == 42  # data.max_prompt_tokens leaves out training tasks alone
    assert longest(10, evaluation={"max_new_tokens": 40}) == 50
    assert longest(30, data={"max_prompt_tokens": None}) is None
    assert longest(data={"max_prompt_tokens": None}) is None
    assert longest(rollout={"plan": {"name": "turns", "environment": "calculator"}}) is None
    policy, world = on_gpu(small()), World()
    for known, given, told in ((32, {}, 32), (None, {}, -1), (500, {}, 96), (32, {"max_model_len": 64}, 64)):
        result = open_engine({"name": "vllm", **given}, policy, None, world, None, False, known)
        assert result._host.arguments["max_model_len"] == told
        result.close()


def test_servers_are_given_up_after_the_runs_silence(gpus, monkeypatch):
    seen = []
    monkeypatch.setattr(VLLMServerOptions, "open", lambda self, *_: seen.append(self.stall_timeout))
    for given in ({}, {"stall_timeout": 5.0}):
        open_engine({"name": "vllm-server", **given}, on_gpu(small()), None, World(heartbeat_timeout=12.0), None, False)
    assert seen == [12.0, 5.0]


def test_a_server_lost_in_a_broadcast_ends_it():
    """Those that are left wait in NCCL for the lost one, as the trainer would."""
    made = server_engine.VLLMServerEngine.__new__(server_engine.VLLMServerEngine)
    first, second = (Member(name, None, None) for name in ("first", "second"))
    made._pauses, made._clears, made._adapter = False, True, None
    made._offsets = {first.process: 1, second.process: 2}
    made.policy = small()

    class Transfer:
        """One that tells every server."""

        def send(self, weights, call):
            call("start_weight_update")
            call("update_weights")

        def close(self):
            """Nothing is held."""

    def asked(processes, method, arguments):
        if method == "update_weights":
            processes.pop()
        return [None] * len(processes)

    made._all, made._transfer, made._make_transfer = asked, Transfer(), lambda processes: Transfer()
    with pytest.raises(
        TrainingError, match="1 of 2 vLLM servers were lost in update_weights: a broadcast by NCCL cannot go on"
    ):
        made._give([first, second], 1, tuple)


def test_backends_share_the_protocol():
    """`release` is asked of every backend before weights are published."""
    backend = PlainOptions().open(small(), "adamw")
    backend.zero()
    backend.release()
    assert all(p.grad is not None for p in backend.parameters.values())  # on a CPU they stay
