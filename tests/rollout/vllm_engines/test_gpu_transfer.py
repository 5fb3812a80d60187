"""The trainer's end of a publish between GPUs: vLLM's own sending engines, with the CUDA and NCCL calls alone
replaced."""

import functools
import math
import os
import subprocess
import sys
import threading
import weakref
import zipfile
from collections import Counter

import pytest
import torch
from engine_helpers import PATIENCE, small
from real_shapes import CONFIGS, PARAMETERS, on_meta
from vllm_helpers import needs_vllm
from without_cuda import without_cuda

from process_helpers import until
from rlvr.core.waits import Wait
from rlvr.distributed import PlainBackend
from rlvr.distributed.engine_router import NullEngine
from rlvr.errors import LostRankError, TrainingError, WaitTimeoutError
from rlvr.rollout.weights import Description, described, in_wire_dtype, weight_buckets

pytestmark = needs_vllm


@pytest.fixture
def no_cuda(monkeypatch):
    """See without_cuda; buffers are on the meta device."""
    return without_cuda(monkeypatch.setattr, "meta")


class Calls(list):
    """What an engine is told."""

    def __call__(self, method, **arguments):
        self.append((method, arguments))

    def of(self, method):
        return [arguments for name, arguments in self if name == method]


@pytest.mark.parametrize("name", CONFIGS)
def test_real_models_go_by_ipc_in_the_engines_dtype(name, no_cuda):
    from rlvr.rollout.vllm.gpu_transfer import buffer_bytes, ipc_transfer

    policy, calls = on_meta(name, small().tokenizer), Calls()
    known = described(policy)
    transfer = ipc_transfer(known)
    published = transfer.send(lambda: in_wire_dtype(weight_buckets(policy), policy.dtype), calls)
    updates = [arguments["update_info"] for arguments in calls.of("update_weights")]
    named = [name for update in updates for name in update["names"]]
    assert named == [weight.name for weight in known]
    assert set(named) >= {name for name, _ in policy.model.named_parameters()}
    sizes = [sum(update["tensor_sizes"]) for update in updates]
    assert max(sizes) <= buffer_bytes(known) == transfer.info.packed_buffer_size_bytes
    assert sum(sizes) == published.bytes
    kinds = {
        (kind, len(shape))
        for update in updates
        for kind, shape in zip(update["dtype_names"], update["shapes"], strict=True)
    }
    assert all(kind == "bfloat16" for kind, dimensions in kinds if dimensions > 1)
    tied = policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight
    twice = policy.model.get_input_embeddings().weight.numel() if tied else 0
    # two bytes a parameter, the tied head again, and the vectors in float32
    assert published.bytes == pytest.approx(2 * (PARAMETERS[name] + twice), rel=0.02)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "openai/gpt-oss-20b"])
def test_real_models_are_packed_for_nccl(name, no_cuda):
    """By vLLM's own producer, which fills a buffer until it is over its size."""
    from rlvr.rollout.vllm.gpu_transfer import nccl_transfer

    policy, calls = on_meta(name, small().tokenizer), Calls()
    known = described(policy)
    transfer = nccl_transfer(known, "127.0.0.1", 1, 600.0)
    published = transfer.send(lambda: in_wire_dtype(weight_buckets(policy), policy.dtype), calls)
    buffer = transfer.info.packed_buffer_size_bytes
    assert calls.of("update_weights")[0]["update_info"]["names"] == [weight.name for weight in known]
    assert sum(no_cuda.sent) == published.bytes == sum(weight.nbytes for weight in known)
    assert len(no_cuda.sent) > 1
    assert all(buffer < size <= 2 * buffer for size in no_cuda.sent[:-1])


class Races:
    """What CUDA would not keep in order: a weight that is copied on a stream before the work of another that makes it
    has been waited for, and memory that a stream takes again before another's copy from it has been waited for. Trained
    weights are of the default stream, which has the optimizer's step to do. torch's allocator keeps memory for the
    stream that it was taken on."""

    def __init__(self, monkeypatch, no_cuda):
        self.streams, self.found = no_cuda.streams, []
        self.issued = Counter({self.streams.default.name: 1})
        self.waited = Counter()
        self.made = {}  # storage -> stream, number of its work
        self.read = Counter()  # (stream that made what was read, stream that read it) -> number of its last work
        self.packed = Counter()  # stream -> weights
        for stream in (self.streams.default, *self.streams.packing):
            stream.synchronize = functools.partial(self.wait, [stream.name])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.wait([*self.issued]))
        cast, cat = torch.Tensor.to, torch.cat

        def to(tensor, *options):
            new = cast(tensor, *options)
            if new is not tensor:
                self.make(new)
            return new

        def packed(tensors, dim):
            self.pack(tensors)
            return cat(tensors, dim=dim)

        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch, "cat", packed)

    def wait(self, names):
        for name in names:
            self.waited[name] = self.issued[name]

    def make(self, tensor):
        self.take("a weight")
        name = self.streams.current.name
        self.made[tensor.untyped_storage()._cdata] = name, self.issued[name]

    def take(self, what):
        """Work on the current stream that takes memory."""
        name = self.streams.current.name
        self.issued[name] += 1
        for (maker, reader), work in self.read.items():
            if maker == name != reader and self.waited[reader] < work:
                self.found.append(f"stream {name} takes memory for {what} that {reader} may read")

    def pack(self, tensors):
        self.take("a buffer")
        name = self.streams.current.name
        self.packed[name] += len(tensors)
        for tensor in tensors:
            maker, work = self.made.get(tensor.untyped_storage()._cdata, (self.streams.default.name, 1))
            if maker != name and self.waited[maker] < work:
                self.found.append(f"stream {name} reads what {maker} may be making")
            self.read[maker, name] = self.issued[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # cast weights, and the trainer's own
@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"])
def test_weights_are_made_before_another_stream_packs_them(name, dtype, no_cuda, monkeypatch):
    """And read before their memory is used again; for two publishes, by vLLM's own producer, which has a stream for
    each of two buffers."""
    from rlvr.rollout.vllm.gpu_transfer import nccl_transfer

    policy, calls = on_meta(name, small().tokenizer, dtype), Calls()
    known = described(policy)
    transfer, races = nccl_transfer(known, "127.0.0.1", 1, 600.0), Races(monkeypatch, no_cuda)
    for _ in range(2):
        transfer.send(lambda: in_wire_dtype(weight_buckets(policy), policy.dtype), calls)
        races.issued["0"] += 1  # the optimizer's next step
    assert set(races.packed) == {"1", "2"}
    assert sum(races.packed.values()) == 2 * len(known)
    assert races.found == []
    assert {maker for maker, _ in races.made.values()} <= {"0"}  # whose memory the trainer uses again


def test_metadata_is_what_is_sent_and_takes_no_pass(no_cuda):
    """Under ZeRO-3 a pass gathers: rank 0 makes as many as a rank that only helps."""
    from rlvr.rollout.vllm.gpu_transfer import nccl_transfer

    policy = small(dtype="bfloat16")
    backend, passes = PlainBackend(policy), {"rank 0": 0, "rank 1": 0}

    def weights_of(rank):
        def weights():
            passes[rank] += 1
            return in_wire_dtype(backend.named_weights(), policy.dtype)

        return weights

    known = described(policy)
    sent = [(name, t.dtype, t.shape) for bucket in weights_of("rank 0")() for name, t in bucket]
    assert sent == [(weight.name, weight.dtype, weight.shape) for weight in known]
    passes["rank 0"] = 0
    transfer, other, calls = nccl_transfer(known, "127.0.0.1", 1, 60.0), NullEngine(), Calls()
    for version in (1, 2, 3):
        published = transfer.send(weights_of("rank 0"), calls)
        other.publish(version, weights_of("rank 1"))
        assert passes == {"rank 0": version, "rank 1": version}
        assert published.bytes == sum(weight.nbytes for weight in known)
    assert [name for name, _ in calls].count("update_weights") == 3
    assert calls.of("update_weights")[0]["update_info"]["names"] == [weight.name for weight in known]
    transfer.close()


def test_a_bucket_is_gone_before_the_next_one_is_made(no_cuda):
    """Under ZeRO-3 each holds weights that were gathered for it, on every rank."""
    from rlvr.rollout.vllm.gpu_transfer import Source
    from rlvr.rollout.vllm.transfer import SharedMemoryTransfer

    live = []

    def weights():
        for number in range(3):
            assert not [kept for kept in live if kept() is not None], f"bucket {number} is made beside another"
            made = [(f"{number}.{i}", torch.zeros(2, 2)) for i in range(2)]
            live.extend(weakref.ref(tensor) for _, tensor in made)
            yield made
            del made

    def sent():
        return in_wire_dtype(weights(), torch.bfloat16)

    NullEngine().publish(1, weights)
    SharedMemoryTransfer().send(weights, lambda *_, **__: None)
    SharedMemoryTransfer().send(sent, lambda *_, **__: None)
    source = Source([])
    source.weights = weights
    for weight in source:
        del weight
    assert len(live) == 4 * 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("merged", [True, False])
def test_an_adapter_is_described_as_it_is_sent(dtype, merged):
    policy = small(adapter={"r": 2}, dtype=dtype)
    sent = [
        (name, t.dtype, t.shape)
        for bucket in in_wire_dtype(weight_buckets(policy, merged=merged), policy.dtype)
        for name, t in bucket
    ]
    assert sent == [(weight.name, weight.dtype, weight.shape) for weight in described(policy, merged)]
    assert not [name for name, _, _ in sent if "lora" in name or "base_layer" in name]


def waiting_sender(monkeypatch, hangs):
    """vLLM's sender, which broadcasts to a group: it waits while a member is gone."""
    from rlvr.rollout.vllm import gpu_transfer

    made, released = [], threading.Event()

    class Sender:
        def __init__(self, hangs, client, source):
            self.hangs, self.client, self.source, self.closed = hangs, client, source, False

        def send_weights(self):
            if self.hangs == "fails":
                raise TrainingError("no vLLM server took update_weights")
            if self.hangs == "in the broadcast":
                next(iter(self.source))
            if self.hangs == "refused":
                threading.Thread(target=self.refused).start()
            if self.hangs == "slow":
                for _ in self.source:
                    released.wait(0.2)
            elif self.hangs:
                released.wait(60)

        def refused(self):
            with pytest.raises(TrainingError):
                self.client.update_weights({})

        def shutdown(self):
            self.closed = True

    def init(info, client, source):
        made.append(Sender(hangs.pop(0), client, source))
        return made[-1]

    monkeypatch.setattr(gpu_transfer.WeightTransferTrainerFactory, "trainer_init", init)
    return made, released


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_these_tests_pass_with_the_trainers_side_of_vllm_0_33(tmp_path):
    """Its wheel is for GPUs: the Python files alone are unpacked, so that what is compiled in it has not run."""
    get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "vllm==0.33.0", "--dest", str(tmp_path)]
    got = subprocess.run(get, capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"the wheel of vLLM 0.33 could not be fetched: {got.stderr[-300:]}")
    (wheel,) = tmp_path.glob("vllm-0.33.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith((".py", ".json")) or ".dist-info/" in n]
        archive.extractall(tmp_path / "unpacked", names)
    wheel.unlink()
    command = [sys.executable, "-m", "pytest", "-rA", "-m", "not slow", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "unpacked")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert run.returncode == 0, run.stdout[-3000:]
    assert run.stdout.count("PASSED ") > len(CONFIGS) and "SKIPPED" not in run.stdout


def test_the_sender_has_the_installed_versions_form():
    """A method in vLLM 0.32, a cached property in 0.33, which refuses anything else."""
    import vllm

    from rlvr.rollout.vllm.gpu_transfer import AS_PROPERTY, Source

    assert AS_PROPERTY is not vllm.__version__.startswith("0.32")
    source = Source(WEIGHTS)
    metadata = source.metadata if AS_PROPERTY else source.metadata()
    assert [(meta.name, meta.dtype, meta.shape) for meta in metadata] == [("a", torch.float32, (3,))]


WEIGHTS = [Description("a", torch.float32, torch.Size([3]))]


def test_a_send_that_waits_for_a_server_which_is_gone_is_named_and_given_up(monkeypatch):
    from rlvr.rollout.vllm import gpu_transfer

    made, released = waiting_sender(monkeypatch, [True, False, "fails"])
    transfer = gpu_transfer.nccl_transfer(WEIGHTS, "127.0.0.1", 2, 0.5)
    weights = lambda: [[("a", torch.zeros(3))]]  # noqa: E731
    try:
        with pytest.raises(WaitTimeoutError, match="for the weights to reach all vLLM servers"):
            transfer.send(weights, lambda *_, **__: None)
        assert made[0].closed  # which vLLM does by an abort, and waits for nobody
        assert transfer.send(weights, lambda *_, **__: None).bytes == 12
        transfer.close()
        assert made[1].closed
        with pytest.raises(TrainingError, match="no vLLM server took"):
            transfer.send(weights, lambda *_, **__: None)
        assert made[2].closed
    finally:
        released.set()


class Group:
    """A communicator of NCCL. A broadcast waits for a member that is gone until the group is aborted, as the kernel on
    the GPU does."""

    def __init__(self, lacks_a_member):
        self.lacks_a_member = lacks_a_member
        self.broadcasts, self.aborts = 0, 0
        self.aborted = threading.Event()

    def broadcast(self, tensor, src, stream=None):
        self.broadcasts += 1
        if self.lacks_a_member:
            self.aborted.wait(60)

    def destroy(self):
        self.aborts += 1
        self.aborted.set()


def publish_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rlvr-publish"]


@pytest.mark.parametrize("ends_by", ["a stall", "an answer"])
def test_a_group_whose_send_failed_is_aborted_and_its_thread_does_nothing_more(monkeypatch, no_cuda, ends_by):
    """By vLLM's own sender. On a GPU the kernel of the broadcast would stay, and each later send wait for it."""
    from vllm.distributed.weight_transfer import nccl_engine

    from rlvr.rollout.vllm import gpu_transfer

    groups, taken, calls = [], [], Calls()

    def opens(info):
        groups.append(Group(lacks_a_member=not groups))
        return groups[-1]

    def weights():
        for number in range(3):
            taken.append(number)
            yield [(f"{number}", torch.zeros(100))]

    def call(method, **arguments):
        calls(method, **arguments)
        if method == "update_weights" and ends_by == "an answer" and len(groups) == 1:
            assert not groups[0].aborted.wait(0.3)
            raise TrainingError("1 of 2 vLLM servers were lost")

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", opens)
    described = [Description(str(number), torch.float32, torch.Size([100])) for number in range(3)]
    transfer = gpu_transfer.nccl_transfer(described, "127.0.0.1", 2, 60.0, 0.5 if ends_by == "a stall" else math.inf)
    transfer.info.packed_buffer_size_bytes = 100  # a broadcast for each weight
    with pytest.raises((WaitTimeoutError, TrainingError), match=r"no weight was taken|servers were lost"):
        transfer.send(weights, call)
    until(lambda: not publish_threads(), PATIENCE, "the thread of the first send to end")
    assert (groups[0].aborts, groups[0].broadcasts, taken) == (1, 1, [0])
    assert [method for method, _ in calls] == ["init_weight_transfer_engine", "start_weight_update", "update_weights"]
    transfer.stall_timeout = math.inf
    assert transfer.send(weights, call).bytes == 1200
    assert (groups[1].broadcasts, taken) == (3, [0, 0, 1, 2])
    transfer.close()
    assert [group.aborts for group in groups] == [1, 1]


def test_a_handshake_that_ends_after_it_was_given_up_leaves_no_group(monkeypatch, no_cuda):
    from vllm.distributed.weight_transfer import nccl_engine

    from rlvr.rollout.vllm import gpu_transfer

    groups, begun, come = [Group(False), Group(False)], threading.Event(), threading.Event()
    later = iter(groups)

    def opens(info):
        group = next(later)
        if group is groups[0]:
            begun.set()
            come.wait(60)
        return group

    def alarm():
        if begun.is_set():
            raise LostRankError("rank 1 was lost")

    calls = Calls()
    monkeypatch.setattr(Wait, "alarms", [alarm])
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", opens)
    transfer = gpu_transfer.nccl_transfer(WEIGHTS, "127.0.0.1", 2, 60.0)
    weights = lambda: [[("a", torch.zeros(3))]]  # noqa: E731
    with pytest.raises(LostRankError):
        transfer.send(weights, calls)
    begun.clear()
    transfer.send(weights, calls)
    told = len(calls)
    come.set()
    until(lambda: not publish_threads(), PATIENCE, "the thread of the first send to end")
    assert [(group.aborts, group.broadcasts) for group in groups] == [(1, 0), (0, 1)]
    assert len(calls) == told
    transfer.send(weights, calls)
    assert groups[1].broadcasts == 2  # it is the second send's that was kept


def test_a_broadcast_ends_with_the_silence_and_with_the_first_refusal(monkeypatch, no_cuda):
    from rlvr.rollout.vllm import gpu_transfer

    _, released = waiting_sender(monkeypatch, ["in the broadcast", "refused", "slow"])
    transfer = gpu_transfer.nccl_transfer(WEIGHTS, "127.0.0.1", 2, 60.0, stall_timeout=0.5)

    def call(method, **_):
        if method == "update_weights":
            raise TrainingError("1 of 2 vLLM servers were lost in update_weights")

    try:
        with pytest.raises(WaitTimeoutError, match=r"no weight was taken for (0|1) s"):
            transfer.send(lambda: [[("a", torch.zeros(3))]], call)
        with pytest.raises(TrainingError, match="1 of 2 vLLM servers were lost"):
            transfer.send(lambda: [[("a", torch.zeros(3))]], call)
        # longer than the stall timeout, with a weight taken every 0.2 s
        assert transfer.send(lambda: [[("a", torch.zeros(3))]] * 6, call).seconds > 1
    finally:
        released.set()


def test_a_server_lost_in_the_handshake_is_named_and_a_slow_one_is_waited_for(monkeypatch, no_cuda):
    """By vLLM's own engine, which opens its end of the group while the servers open theirs. No weight is taken until
    all are there."""
    from vllm.distributed.weight_transfer import nccl_engine

    from rlvr.rollout.vllm import gpu_transfer

    lost, released = ["cannot connect"], threading.Event()
    opens, waits = nccl_engine.open_trainer_endpoint, [60.0, 1.5]

    def open_slowly(info):
        released.wait(waits.pop(0))
        return opens(info)

    def call(method, **_):
        if method == "init_weight_transfer_engine" and lost:
            raise TrainingError(f"no vLLM server took it: {lost.pop()}")

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", open_slowly)
    transfer = gpu_transfer.nccl_transfer(WEIGHTS, "127.0.0.1", 1, 60.0, stall_timeout=0.5)
    try:
        with pytest.raises(TrainingError, match="no vLLM server took it: cannot connect"):
            transfer.send(lambda: [[("a", torch.zeros(3))]], call)
        assert transfer.send(lambda: [[("a", torch.zeros(3))]], call).seconds > 1
    finally:
        released.set()
