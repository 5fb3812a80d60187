"""The memory of a shared GPU over whole steps: events recorded by the code that takes and frees it, replayed against a
device.

Published shapes on the meta device; real engine, transfer and backends, with vLLM's process and the CUDA calls
replaced. The trainer's own weights, its passes (the probe after a publish, the reference's log-probs, the update) and
what a process takes beside tensors are arithmetic of this test.
"""

import contextlib
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import small
from real_shapes import CONFIGS, on_meta
from test_gpu_engine import gpus, on_gpu  # noqa: F401
from test_gpu_transfer import no_cuda  # noqa: F401
from vllm_helpers import needs_vllm

from rlvr.config import LoraConfig
from rlvr.core import device_memory
from rlvr.core.device_memory import CACHE, HostOffload, MemoryEvent, record_event, recorded_events
from rlvr.distributed import PlainBackend
from rlvr.distributed.deepspeed import DeepSpeedBackend
from rlvr.distributed.models import model_files
from rlvr.distributed.plain import optimizer_tensors
from rlvr.distributed.zero_config import zero_config
from rlvr.distributed.zero_shards import Shards
from rlvr.planner import Shape
from rlvr.planner.trainer_memory import TrainerMemory
from rlvr.policy import Policy
from rlvr.policy.adapters import add_adapter
from rlvr.rollout import weights as weights_module
from rlvr.rollout.engine import Published
from rlvr.rollout.probe import TOKENS
from rlvr.rollout.vllm import VLLMOptions
from rlvr.rollout.vllm.adapter import AdapterFiles
from rlvr.rollout.weights import described, in_wire_dtype, weight_buckets

pytestmark = needs_vllm

DEVICE = int(79.2 * 2**30)
"""An H100 or A100 of 80 GB, as the driver gives it."""
PROCESSES = 3 << 30
"""CUDA contexts of trainer and engine, NCCL, kernels and CUDA graphs, which stay."""
NO_RELEASE, CACHE_WAKES_FIRST = "no release", "cache wakes first"
EMPTIED_FIRST = "allocator's cache emptied before offload"
SCORED_AWAKE = "reference scored while the engine is awake"


@dataclass
class Run:
    """A way to train a published shape, and the wrong orders that do not fit."""

    shape: str
    tokens: int
    """Of a micro-batch."""
    utilization: float = 0.4
    gpus: int = 1
    zero_stage: int | None = None
    lora: bool = False
    offload: bool = False
    reference: bool = False
    """Whether a reference is kept, whose log-probs are computed before the update."""
    fails: set[str] = field(default_factory=set)

    def __str__(self):
        how = f"zero{self.zero_stage} on {self.gpus}" if self.zero_stage else "lora" if self.lora else "plain"
        return f"{self.shape.split('/')[1]} {how}{' offloaded' if self.offload else ''}"


RUNS = [
    Run("Qwen/Qwen2.5-0.5B", 65536, 0.88, fails={NO_RELEASE}),
    Run("Qwen/Qwen2.5-1.5B", 32768, 0.7, fails={NO_RELEASE}),
    Run("Qwen/Qwen2.5-1.5B", 32768, 0.77, offload=True, reference=True, fails={NO_RELEASE, SCORED_AWAKE}),
    Run("meta-llama/Llama-3.2-1B", 32768, 0.69, reference=True, fails={NO_RELEASE, SCORED_AWAKE}),
    Run("Qwen/Qwen2.5-7B", 32768, 0.75, lora=True, reference=True, fails={SCORED_AWAKE}),
    Run("Qwen/Qwen2.5-7B", 32768, 0.6, gpus=8, zero_stage=2),
    Run(
        "Qwen/Qwen2.5-7B",
        32768,
        0.9,
        gpus=8,
        zero_stage=3,
        offload=True,
        reference=True,
        fails={NO_RELEASE, CACHE_WAKES_FIRST, SCORED_AWAKE},
    ),
    Run(
        "Qwen/Qwen2.5-32B",
        16384,
        0.89,
        gpus=16,
        zero_stage=3,
        offload=True,
        fails={NO_RELEASE, CACHE_WAKES_FIRST, EMPTIED_FIRST},
    ),
    Run(
        "Qwen/Qwen3-30B-A3B",
        16384,
        0.9,
        gpus=16,
        zero_stage=3,
        offload=True,
        fails={NO_RELEASE, CACHE_WAKES_FIRST, EMPTIED_FIRST},
    ),
    Run("openai/gpt-oss-20b", 16384, 0.88, gpus=8, zero_stage=3, offload=True, fails={NO_RELEASE, CACHE_WAKES_FIRST}),
]
"""Shares of the GPU (`gpu_memory_utilization`) are within two hundredths of the largest that fit."""

IN_GATE = [RUNS[4], RUNS[6]]
"""An adapter, and ZeRO-3 with offload."""


def inside_of_a_layer(policy):
    """Float32 values for each token inside of a layer: about 16 vectors of the hidden size and 6 of the
    feed-forward's."""
    config = policy.causal_lm.config.get_text_config()
    inside = getattr(config, "moe_intermediate_size", config.intermediate_size) * getattr(
        config, "num_experts_per_tok", 1
    )
    return 16 * config.hidden_size + 6 * inside


def copies(policy, run):
    """Bytes of the weights that a pass makes: autocast's copies of float32 weights, and those that ZeRO-3 has whole at
    once."""
    sizes = [p.numel() for p in policy.model.parameters()]
    if run.zero_stage == 3:
        limit = zero_config(3, "none", True, run.gpus, None, sum(sizes))["zero_optimization"]
        return 2 * max(limit["stage3_max_live_parameters"], *sizes)
    return 2 * sum(p.numel() for p in policy.model.parameters() if p.dtype == torch.float32)


def scoring(policy, run, tokens):
    """Bytes that a pass without gradients takes."""
    return 4 * tokens * inside_of_a_layer(policy) + copies(policy, run)


def activations(policy, run):
    """Bytes that a pass takes with gradient checkpointing, in float32: the input of every layer, and the inside of one.
    Beside them ZeRO-2's gradients."""
    config = policy.causal_lm.config.get_text_config()
    inputs = 4 * run.tokens * config.num_hidden_layers * config.hidden_size
    gradients = 4 * sum(p.numel() for p in policy.model.parameters()) // run.gpus if run.zero_stage == 2 else 0
    return inputs + scoring(policy, run, run.tokens) + gradients


def take_and_free(what, nbytes):
    """Events of memory that is taken for a moment."""
    record_event("trainer", what, nbytes)
    record_event("trainer", what, -nbytes)


def flat_parts(policy, run):
    """One rank's part of the float32 weights as ZeRO has it, and of the gradients, on the meta device."""
    count = sum(p.numel() for p in policy.model.parameters()) // run.gpus
    flat = torch.empty(count, device="meta")
    always = {"optimizer": SimpleNamespace(state={}), "zero_grad": lambda set_to_none: None}
    if run.zero_stage == 2:  # gradients are there during a backward pass and its step alone
        return SimpleNamespace(single_partition_of_fp32_groups=[flat], **always)
    gradients = torch.empty(count, device="meta")
    return SimpleNamespace(fp32_partitioned_groups_flat=[flat], grad_partitions_flat_buffer=gradients, **always)


def zero_backend(policy, run):
    """The backend's own `zero` and `release`, over a stand-in for DeepSpeed's optimizer: eight ranks do not run
    here."""
    backend = DeepSpeedBackend.__new__(DeepSpeedBackend)
    backend.policy, backend.offload_during_rollout = policy, run.offload
    backend.offload = HostOffload(torch.device("meta"))
    backend.shards = Shards(flat_parts(policy, run), dict(policy.model.named_parameters()), backend.offload)
    backend.engine = SimpleNamespace(set_gradient_accumulation_boundary=lambda _: None)
    backend.parameters, backend.world = (
        backend.shards.parameters,
        SimpleNamespace(size=run.gpus, rank=-1),
    )  # keeps nothing
    return backend


def built(run):
    """(policy, backend, bytes that are taken before the engine starts, bytes that the backend takes)."""
    policy = on_meta(run.shape, small().tokenizer)
    if run.lora:
        policy = Policy(
            add_adapter(policy.model.to(torch.bfloat16), LoraConfig(r=32), 0), policy.tokenizer, torch.bfloat16
        )
    on_gpu(policy)
    if not run.zero_stage:
        backend = PlainBackend(policy, "adamw", offload_during_rollout=run.offload)
        return policy, backend, sum(p.nbytes for p in policy.model.parameters()), 0
    policy.model.to(torch.bfloat16)
    count = sum(p.numel() for p in policy.model.parameters())
    if run.zero_stage == 2:  # loaded in float32, then rounded; the float32 weights of one rank
        return policy, zero_backend(policy, run), 4 * count, 4 * (count // run.gpus) - 2 * count
    for parameter in policy.model.parameters():  # what waits in host memory is cut by the backend
        parameter.ds_id, parameter.ds_shape, parameter.ds_numel = 0, parameter.shape, parameter.numel()
    return policy, zero_backend(policy, run), 0, (2 + 4 + 4) * (count // run.gpus)  # with float32 weights and gradients


def take_first_step(backend):
    """Make both moments, as the first optimizer step does."""
    zero = isinstance(backend, DeepSpeedBackend)
    optimizer = backend.shards.inner if zero else backend.optimizer
    for weight in backend.shards.flats() if zero else backend.parameters.values():
        optimizer.state[weight] = {key: torch.empty_like(weight) for key in ("exp_avg", "exp_avg_sq")}
        record_event("trainer", "moments", 2 * weight.nbytes)


def peak(events, held):
    """The most of the device that is taken at once, and after which event."""
    allocated = reserved = held
    engine = most = 0
    at = None
    for event in events:
        if event.holder == "engine":
            engine += event.nbytes
        elif event.what == CACHE:
            reserved = allocated
        else:
            allocated += event.nbytes
            reserved = max(reserved, allocated)
        assert allocated >= 0 and engine >= 0
        if PROCESSES + reserved + engine > most:
            most, at = PROCESSES + reserved + engine, event
    return most, at


def kept_bytes(backend):
    """Bytes of the storages that the backend moves and frees: gradients, optimizer state and ZeRO's float32 weights."""
    if isinstance(backend, DeepSpeedBackend):
        shards = backend.shards
        tensors = [*shards.flats(), *shards.gradient_buffers(), *optimizer_tensors(shards.inner)]
    else:
        gradients = [p.grad for p in backend.parameters.values() if p.grad is not None]
        tensors = [*gradients, *optimizer_tensors(backend.optimizer)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def reconciled(backend, events, call):
    """Call, and compare the events that it records with the bytes that storages have gained or lost."""
    before = kept_bytes(backend)
    first = len(events)
    call()
    assert sum(event.nbytes for event in events[first:]) == kept_bytes(backend) - before


def events_of(run, releases=True):
    """The events of a start and two steps, and the bytes before them."""
    policy, backend, held, made = built(run)
    with recorded_events() as events:
        engine = VLLMOptions(gpu_memory_utilization=run.utilization).open(policy)
        record_event("trainer", "backend", made)
        if run.reference:
            partitions = run.gpus if run.zero_stage == 3 else 1
            record_event("trainer", "reference", sum(p.nbytes for p in policy.trainable().values()) // partitions)
        for version in (0, 1, 2):
            if version:
                engine.release()
                if run.reference:
                    take_and_free("scoring", scoring(policy, run, run.tokens))
                reconciled(backend, events, backend.zero)
                take_and_free("pass", activations(policy, run))
                reconciled(backend, events, backend.offload.move_back)  # as `step` does
                if version == 1:
                    take_first_step(backend)
            if releases:
                reconciled(backend, events, backend.release)
            engine.publish(version, lambda: weights_module.weight_buckets(policy))
            take_and_free("probe", scoring(policy, run, 2 * TOKENS))
            if releases:  # an evaluation, and the next step after it, publish the version that the engine has
                reconciled(backend, events, backend.release)
                engine.publish(version, lambda: weights_module.weight_buckets(policy))
                take_and_free("probe", scoring(policy, run, 2 * TOKENS))
        if run.zero_stage:
            backend.saved_tensors()
            model_files(policy, False, {})
            gathered = [event.nbytes for event in events if event.what == "gathered"]
            assert any(gathered) == (run.zero_stage == 3)  # with ZeRO-2 the weights are whole
            largest = max(parameter.nbytes for parameter in policy.model.parameters())
            assert max(gathered) <= max(largest, weights_module.BUCKET_BYTES)
        engine.close()
    return events, held


def in_wrong_order(events, wrong):
    """The events with those of `wrong` moved to where they would be."""
    moved = []
    for event in events:
        if wrong == CACHE_WAKES_FIRST and event.what == "wake kv_cache":
            continue
        if wrong == EMPTIED_FIRST and event.what == CACHE and moved and moved[-1].what == "offload":
            moved.insert(-1, event)
            continue
        if wrong == SCORED_AWAKE and event.what == "scoring":
            last_sleep = max(number for number, before in enumerate(moved) if before.what == "sleep")
            moved.insert(last_sleep, event)
            continue
        moved.append(event)
        if wrong == CACHE_WAKES_FIRST and event.what == "wake weights":
            moved.append(next(one for one in events if one.what == "wake kv_cache"))
    return moved


def cached_at_wakes(events):
    """Bytes that the trainer's allocator keeps unused when the engine takes memory, each time."""
    allocated = reserved = 0
    cached = []
    for event in events:
        if event.what.startswith("wake"):
            cached.append(reserved - allocated)
        elif event.what == CACHE:
            reserved = allocated
        elif event.holder == "trainer":
            allocated += event.nbytes
            reserved = max(reserved, allocated)
    return cached


def at_last_publish(events, held):
    """Bytes that the trainer has when the engine takes memory for its weights for the last time."""
    last = max(number for number, event in enumerate(events) if event.what == "wake weights")
    return held + sum(event.nbytes for event in events[:last] if event.holder == "trainer")


def planned_at_publish(run):
    """The same by the memory planner's arithmetic."""
    policy = on_meta(run.shape, small().tokenizer)
    if run.lora:
        policy = Policy(
            add_adapter(policy.model.to(torch.bfloat16), LoraConfig(r=32), 0), policy.tokenizer, torch.bfloat16
        )
    weights = list(policy.model.parameters())
    sizes = (
        "largest_module",
        "layers",
        "hidden",
        "vocabulary",
        "context",
        "head_trained",
        "scores",
        "queries",
        "keys",
        "keys_and_values",
    )
    shape = Shape(
        parameters=sum(p.numel() for p in weights),
        trained=sum(p.numel() for p in weights if p.requires_grad),
        frozen=sum(p.nbytes for p in weights if not p.requires_grad),
        largest=max(p.numel() for p in weights),
        **dict.fromkeys(sizes, 0),
        tied=False,
        decoder=None,  # no pass is planned of it
    )
    memory = TrainerMemory(
        shape=shape,
        ranks=run.gpus,
        on_gpu=True,
        bfloat16=True,
        stage=run.zero_stage or 0,
        offload="none",
        offload_during_rollout=run.offload,
        frees_gradients=True,
        state=8.0,
        reference=run.reference,
    )
    return sum(size for part, size in memory.at("publish").items() if part != "buffers")


@pytest.fixture
def on_meta_host(gpus, no_cuda, monkeypatch):  # noqa: F811
    """Host memory of the sizes of GPUs, on the meta device; adapters are not written, parts are not gathered."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (DEVICE, DEVICE))
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(CACHE))
    monkeypatch.setattr(HostOffload, "_host_memory", lambda self, n: torch.empty(n, dtype=torch.uint8, device="meta"))
    monkeypatch.setattr(HostOffload, "_wait", lambda self: None)
    monkeypatch.setattr(Shards, "stretch", lambda self, name: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(weights_module, "gathered", lambda parameters: torch.no_grad())

    def write(self, version, base):
        self.newest = SimpleNamespace(version=version)
        return base or Published(0, 0.0)

    monkeypatch.setattr(AdapterFiles, "write", write)
    return emptied


@pytest.mark.gate
@pytest.mark.parametrize(
    "run", [pytest.param(run, id=str(run), marks=[] if run in IN_GATE else pytest.mark.slow) for run in RUNS]
)
def test_no_moment_takes_more_than_the_device_has(on_meta_host, run):
    events, held = events_of(run)
    most, at = peak(events, held)
    assert most <= DEVICE, f"{most / 2**30:.1f} GiB at {at}"
    assert [event.what for event in events if event.what == CACHE] == on_meta_host  # torch's allocator is told as often
    assert cached_at_wakes(events) == [0] * 6
    assert at_last_publish(events, held) == pytest.approx(planned_at_publish(run), rel=1e-4)
    fails = set()
    for wrong in (CACHE_WAKES_FIRST, EMPTIED_FIRST, SCORED_AWAKE):
        if peak(in_wrong_order(events, wrong), held)[0] > DEVICE:
            fails.add(wrong)
    assert any(cached_at_wakes(in_wrong_order(events, EMPTIED_FIRST))) == run.offload
    unreleased, held = events_of(run, releases=False)
    if peak(unreleased, held)[0] > DEVICE:
        fails.add(NO_RELEASE)
    assert any(cached_at_wakes(unreleased))
    assert fails == run.fails


def test_every_wrong_order_is_seen():
    assert set.union(*(run.fails for run in RUNS)) == {NO_RELEASE, CACHE_WAKES_FIRST, EMPTIED_FIRST, SCORED_AWAKE}


@pytest.mark.parametrize("shape", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"])
def test_chunks_that_nccl_keeps_are_in_the_ledger(no_cuda, monkeypatch, shape):  # noqa: F811
    """vLLM's own packing, with its streams replaced."""
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    from rlvr.rollout.vllm.gpu_transfer import nccl_transfer

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", packed_tensor.packed_nccl_broadcast_producer)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: [stream] * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    policy = on_meta(shape, small().tokenizer)
    kept = {parameter.untyped_storage()._cdata for parameter in policy.model.parameters()}
    cat, chunks, real, recorded = torch.cat, [], [], []

    def joined(tensors, dim=0):
        chunk = cat(tensors, dim)
        waiting = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        chunks.append(weakref.ref(chunk))
        sent = sum(one().nbytes for one in chunks if one() is not None)
        real.append(sent + sum(nbytes for key, nbytes in waiting.items() if key not in kept))
        recorded.append(sum(event.nbytes for event in events))
        return chunk

    monkeypatch.setattr(torch, "cat", joined)
    transfer = nccl_transfer(described(policy), "127.0.0.1", 1, 60.0)
    with recorded_events() as events:
        transfer.send(lambda: in_wire_dtype(weight_buckets(policy), policy.dtype), lambda method, **arguments: None)
    assert len(real) > 2
    assert all(now <= known for now, known in zip(real, recorded, strict=True))
    assert max(real) > 0.6 * max(recorded)  # the buffer's event is the most that can be, whatever has to be cast
    assert sum(event.nbytes for event in events) == 0


@pytest.mark.parametrize("merged", [True, False])
def test_dense_weights_under_an_adapter_are_in_the_ledger(merged):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    policy = small(adapter={"r": 2})
    for name, module in policy.causal_lm.named_modules():
        if name.endswith("base_layer"):
            weight = bitsandbytes.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            module.weight = weight.to("cpu")  # which quantizes
    kept = {parameter.untyped_storage()._cdata for parameter in policy.model.parameters()}
    quantized = 0
    with recorded_events() as events:
        for bucket in weight_buckets(policy, 4000, merged):
            made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for _, t in bucket}
            new = sum(nbytes for key, nbytes in made.items() if key not in kept)
            quantized += new
            assert sum(event.nbytes for event in events) == new
    assert quantized > 0
    assert sum(event.nbytes for event in events) == 0


def test_what_is_not_recorded_is_not_kept():
    record_event("trainer", "gradients", 1)
    with recorded_events() as events:
        record_event("trainer", "gradients", 2)
    record_event("trainer", "gradients", 3)
    assert events == [MemoryEvent("trainer", "gradients", 2)]
    assert device_memory._ledger is None


def test_every_published_shape_has_a_run():
    assert {run.shape for run in RUNS} == set(CONFIGS)
