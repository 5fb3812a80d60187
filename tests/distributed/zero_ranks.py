"""Run by torchrun on every rank: optimizer steps on recorded rollouts with one backend after the other.

    torchrun --nproc_per_node 2 zero_ranks.py SETTINGS.json OUT.pt

Rank 0 writes, for each setting, the whole weights after each step, the metrics, and what the setting asks for beside
them.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rlvr import registry
from rlvr.config import LoraConfig, ModelConfig, OptimConfig, ScratchConfig
from rlvr.core.device_memory import recorded_events
from rlvr.core.needs import CURRENT, Need
from rlvr.distributed import World, shares
from rlvr.distributed.deepspeed import _join_alone
from rlvr.distributed.engine_router import NullEngine
from rlvr.distributed.models import merged_files, model_files
from rlvr.distributed.shares import load_reference, saved_reference
from rlvr.distributed.zero_config import zero_config
from rlvr.distributed.zero_loading import partition
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, EntropyBonus, KLPenalty, Objective, ObjectiveTerm, k3
from rlvr.losses.objective import Renewal
from rlvr.policy import Snapshot, forward, load_policy
from rlvr.policy.microbatch import rows_of
from rlvr.records import Batch, Origin, Rollout, StopReason, Task
from rlvr.rollout.weights import WeightSource, described, host_copies, in_wire_dtype, weight_buckets

DEADLINE = float(os.environ.get("ZERO_RANKS_DEADLINE", "120"))
"""Seconds for one setting; past them all stacks are shown and the rank ends."""
PIECE_BYTES = 4 * 500
"""Tensors are put together from several pieces, and the parts of ranks begin inside of them."""
REWARDS = ((1.0, 0.0, 0.0, 0.5), (1.0, 1.0, 1.0), (0.25, 0.5, 1.0), (0.0, 1.0))
"""By group; the second has no advantage."""


def make_policy(adapter=None, seed=0, model=None, shared_out=False, is_main=True, path=None, **scratch):
    small = {"hidden_size": 32, "layers": 2, "intermediate_size": 64, "context": 96, "init_std": 0.2, **scratch}
    lora = None if adapter is None else LoraConfig(**adapter)
    config = ModelConfig(
        **{"dtype": "float32", **(model or {})},
        path=path,
        scratch=None if path else ScratchConfig(**small),
        adapter=lora,
        device="cpu",
    )
    return load_policy(config, seed, shared_out, is_main)


def recorded(policy, seed=0, rewards=REWARDS):
    """A scored batch of ragged made-up rollouts, the same for the same seed."""
    rng, rollouts, advantages = np.random.default_rng(seed), [], []
    for g, members in enumerate(rewards):
        prompt = rng.integers(3, len(policy.tokenizer), int(rng.integers(1, 7)))
        for m, reward in enumerate(members):
            tail = rng.integers(3, len(policy.tokenizer), int(rng.integers(1, 14)))
            origin = np.r_[np.full(len(prompt), Origin.PROMPT), np.full(len(tail), Origin.POLICY)].astype(np.int8)
            known = np.r_[np.full(len(prompt), np.nan), rng.normal(-4.0, 0.5, len(tail))].astype(np.float32)
            rollouts.append(
                Rollout(
                    id=f"{g}/{m}",
                    task=Task(id=f"t{g}", prompt="?", answer="4"),
                    group=f"g{g}",
                    member=m,
                    token_ids=np.r_[prompt, tail],
                    origin=origin,
                    behaviour_logprobs=known,
                    policy_version=np.where(origin == Origin.POLICY, 0, -1).astype(np.int32),
                    stop=StopReason.END,
                    text="",
                    temperature=(1.0, 0.7, 1.3)[g % 3],
                )
            )
            advantages.append(reward - float(np.mean(members)))
    columns = {"reward": np.concatenate(rewards), "advantage": np.asarray(advantages)}
    # Parts for a loss that reads them, of different signs in some rollouts.
    columns["advantage/local"] = 1.5 * columns["advantage"]
    columns["advantage/global"] = columns["advantage"] - columns["advantage/local"]
    batch = Batch(rollouts, columns)
    batch.token_columns["weight/policy"] = [(r.origin == Origin.POLICY).astype(np.float32) for r in rollouts]
    return batch


def objective(loss=None):
    """Three terms, or the policy loss of a registered name."""
    if loss is not None:
        return Objective((ObjectiveTerm("policy", registry.build("loss", loss), "policy"),), 11.0)
    return Objective(
        (
            ObjectiveTerm("policy", ClippedPolicyLoss(0.2, 0.2, "tokens"), "policy", zero_without_advantage=True),
            ObjectiveTerm("kl", KLPenalty(k3, "tokens"), "policy", 0.5),
            ObjectiveTerm("entropy", EntropyBonus("tokens"), "policy", 0.3),
        ),
        11.0,
    )


def whole(tensors, world):
    """The tensors of all ranks, on every rank."""
    shares = world.gather({name: tensor.clone() for name, tensor in tensors.items()}, "the tensors")
    assert len({name for share in shares for name in share}) == sum(
        len(share) for share in shares
    )  # each from one rank
    return {name: tensor for share in shares for name, tensor in share.items()}


def everything(policy):
    """Every parameter of the model, frozen ones too, as computed with."""
    return host_copies((WeightSource(n, [p], p.detach) for n, p in policy.model.named_parameters()), keep=True)


def start(setting, world, **options):
    """(policy, backend, config) of a setting."""
    backends = registry.build("backend", setting["backend"])
    place = {"shared_out": backends.partitions, "is_main": world.is_main}
    policy = make_policy(**{**setting.get("policy", {}), **place, **options})
    config = OptimConfig(**{"optimizer": "sgd", "max_grad_norm": 1e9, **setting.get("optim", {})})
    return policy, backends.open(policy, config.optimizer, world), config


def updates(setting, world, policy, backend, config, learner=None, first=0):
    """Train as `setting` says: metrics, and weights and optimizer state after each step."""
    learner = learner or Learner(backend, Snapshot(policy), world)
    of_step = objective(setting.get("loss"))
    if setting.get("follows"):
        of_step = dataclasses.replace(of_step, renewal=Renewal(1, setting["follows"]))
    metrics, tensors = [], []
    for step in range(first, first + setting.get("steps", 2)):
        rewards = REWARDS if step != 1 else REWARDS[:1]  # fewer rollouts than ranks could share evenly
        batch = recorded(policy, seed=step, rewards=rewards)
        metrics.append(learner.update(batch, of_step, config, setting.get("lr", 0.5)))
        tensors.append(whole(backend.saved_tensors(), world))
    return {"metrics": metrics, "tensors": tensors}


def steps(setting, world):
    """Some steps; also which parameters moved, what is published, and the files of the model."""
    policy, backend, config = start(setting, world)
    before, begin = everything(policy), whole(backend.saved_tensors(), world)
    result = updates(setting, world, policy, backend, config)
    after = everything(policy)
    result["tensors"].insert(0, begin)
    result["moved"] = sorted(name for name in after if not torch.equal(before[name], after[name]))
    result["ranks"] = world.size
    result["published"] = {name: t.clone() for bucket in backend.named_weights() for name, t in bucket}
    if "folder" in setting:
        write(model_files(policy, world.is_main, {}), Path(setting["folder"]), world)
        write(merged_files(policy, world.is_main), Path(setting["folder"]) / "merged", world)
        world.barrier("the files")
    return result


def likelihood(policy, batch, index, world):
    """This rank's part of a loss, summed over `index`; ranks without a rollout take the first for nothing."""
    own = index[world.rank :: world.size]
    factor = 1.0 if len(own) else 0.0
    trained = [w != 0 for w in batch.tokens("weight/policy")]
    rows = rows_of(batch, own if len(own) else index[:1], trained, policy.tokenizer.pad_token_id, policy.device)
    return -factor * forward(policy, rows, [Need("logprobs", grad=True)])["logprobs", CURRENT].sum() / 50


def troubles(setting, world):
    """Steps among passes that no step follows, gradients that are not finite, and a step without any pass."""
    policy, backend, _ = start(setting, world)
    batch, result = recorded(policy), {"norms": [], "tensors": []}

    def step(*passes):
        backend.zero()
        for index, factor in passes:
            backend.backward(factor * likelihood(policy, batch, np.asarray(index), world))
        result["norms"].append(backend.step(0.05, 0.5))
        result["tensors"].append(whole(backend.saved_tensors(), world))

    step(([0, 1, 2], 1.0), ([3], 1.0))
    step(([4, 5], math.nan), ([6, 7], 1.0))
    step(([4, 5], math.inf))
    backend.zero()
    backend.backward(likelihood(policy, batch, np.asarray([8, 9]), world))  # and no step
    step(([6, 7], 1.0), ([0], 2.0), ([1], 1.0))
    step()
    return result


def nonfinite(setting, world):
    """Updates of two optimizer steps each, of which the second and third have one whose loss is not finite, by one
    rollout alone."""
    policy, backend, config = start(setting, world)
    learner = Learner(backend, Snapshot(policy), world)
    result = {"metrics": [], "tensors": [whole(backend.saved_tensors(), world)]}
    for step, (row, advantage) in enumerate([(0, 1.0), (0, math.inf), (-1, math.nan), (0, 1.0)]):
        batch = recorded(policy, seed=step)
        batch.columns["advantage"][row] = advantage
        result["metrics"].append(learner.update(batch, objective(), config, setting["lr"]))
        result["tensors"].append(whole(backend.saved_tensors(), world))
    return result


def save(setting, world):
    """Two steps, a checkpoint's tensors in `folder`, and two steps more."""
    policy, backend, config = start(setting, world)
    learner = Learner(backend, Snapshot(policy, follows="follows" in setting), world)
    updates(setting, world, policy, backend, config, learner)
    tensors = {**backend.saved_tensors(), **saved_reference(learner.reference, world)}
    Path(setting["folder"]).mkdir(exist_ok=True)
    save_file({n: t.clone() for n, t in tensors.items()}, Path(setting["folder"]) / f"{world.rank}.safetensors")
    world.barrier("the files")
    result = updates(setting, world, policy, backend, config, learner, first=2)
    return {**result, "reference": whole(saved_reference(learner.reference, world), world)}


def resume(setting, world):
    """The two steps more, from other weights and the tensors in `folder`."""
    policy, backend, config = start(setting, world, seed=1)
    learner = Learner(backend, Snapshot(policy, follows="follows" in setting), world)
    saved = {}
    for file in sorted(Path(setting["folder"]).glob("*.safetensors")):
        saved |= load_file(file)
    if setting.get("after_a_step"):  # what was there before must not shine through
        updates({**setting, "steps": 1}, world, policy, backend, config, learner)
    backend.load_tensors(saved)
    load_reference(learner.reference, saved)
    loaded = whole(saved_reference(learner.reference, world), world)
    result = updates(setting, world, policy, backend, config, learner, first=2)
    reference = whole(saved_reference(learner.reference, world), world)
    return {**result, "loaded": loaded, "reference": reference}


def released(setting, world):
    """Steps with a release before each, as before a publish: what is saved and published then, and the bytes that are
    out. The tensors of the last release but one are in `folder`."""
    policy, backend, config = start(setting, world)
    learner = Learner(backend, Snapshot(policy), world)
    result = {"tensors": [], "published": [], "metrics": [], "out": [], "gradients": [], "pieces": []}
    for step in range(4):
        backend.release()
        backend.release()  # an evaluation publishes too
        result["out"].append(world.gather(sum(host.nbytes for _, host in backend.offload._away.values()), "the bytes"))
        if setting["backend"]["name"] == "deepspeed":
            result["gradients"].append(sum(b.untyped_storage().nbytes() for b in backend.shards.gradient_buffers()))
        with recorded_events() as events:
            saved = backend.saved_tensors()
        result["pieces"].append(max((event.nbytes for event in events), default=0))
        result["tensors"].append(whole(saved, world))
        result["published"].append({name: t.clone() for bucket in backend.named_weights() for name, t in bucket})
        if step == 2:
            tensors = {**saved, **saved_reference(learner.reference, world)}
            Path(setting["folder"]).mkdir(exist_ok=True)
            save_file({n: t.clone() for n, t in tensors.items()}, Path(setting["folder"]) / f"{world.rank}.safetensors")
        batch = recorded(policy, seed=step)
        result["metrics"].append(learner.update(batch, objective(), config, setting.get("lr", 0.01)))
    result["tensors"].append(whole(backend.saved_tensors(), world))
    world.barrier("the files")
    return result


def going_on(setting, world):
    """The step after those tensors, from other weights and the tensors in `folder`, which are loaded while others are
    out."""
    policy, backend, config = start(setting, world, seed=1)
    learner = Learner(backend, Snapshot(policy), world)
    learner.update(recorded(policy, seed=7), objective(), config, 0.01)
    backend.release()
    saved = {}
    for file in sorted(Path(setting["folder"]).glob("*.safetensors")):
        saved |= load_file(file)
    backend.load_tensors(saved)
    load_reference(learner.reference, saved)
    backend.release()
    loaded = whole(backend.saved_tensors(), world)
    learner.update(recorded(policy, seed=2), objective(), config, setting.get("lr", 0.01))
    return {"tensors": [loaded, whole(backend.saved_tensors(), world)]}


def stages(setting, world):
    """A stage after another: a fresh optimizer on the weights as they are."""
    policy, backend, config = start(setting, world)
    result = updates(setting, world, policy, backend, config)
    for optimizer in setting["then"]:
        backend = registry.build("backend", setting["backend"]).open(policy, optimizer, world)
        more = updates(setting, world, policy, backend, config, first=2)
        result["tensors"] += more["tensors"]
    return result


def buckets(setting, world):
    """The most weights that are whole at once while buckets are published, in bytes, beside the bucket's size."""
    policy, backend, config = start(setting, world)
    updates({**setting, "steps": 1}, world, policy, backend, config)
    partitioned = [p for p in policy.model.parameters() if hasattr(p, "ds_id")]
    backend.engine.empty_partition_cache()
    most, largest = 0, 0
    for bucket in weight_buckets(policy, setting["size"]):
        here = [p for p in partitioned if p.ds_status.name == "AVAILABLE"]
        most = max(most, sum(p.ds_numel * p.element_size() for p in here))
        largest = max(largest, *(t.nbytes for _, t in bucket))
    return {"most": most, "largest": largest, "all": sum(p.ds_numel * p.element_size() for p in partitioned)}


def publishes(setting, world):
    """How often each weight is gathered on each rank in two publishes by vLLM's senders: rank 0's to servers, which the
    other ranks help with, and each rank's own to the engine beside it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
    from without_cuda import without_cuda

    from rlvr.rollout.vllm.gpu_transfer import ipc_transfer, nccl_transfer

    without_cuda(setattr, "cpu")
    policy, backend, _ = start(setting, world)
    known, names, result = described(policy), {}, {}
    for name, parameter in policy.model.named_parameters():
        names[parameter.ds_id] = name
        parameter.all_gather = functools.partial(counted, parameter.all_gather, parameter, lambda: counts)

    def weights():
        return in_wire_dtype(weight_buckets(policy, 4000), policy.dtype)  # many buckets

    def call(method, **arguments):
        """An engine that takes everything."""

    servers = nccl_transfer(known, "127.0.0.1", 1, 60.0) if world.is_main else NullEngine()
    beside = ipc_transfer(known)
    for version in (1, 2):
        for kind in ("servers", "beside"):
            counts = Counter()
            backend.engine.empty_partition_cache()
            if kind == "beside":
                beside.send(weights, call)
            elif world.is_main:
                servers.send(weights, call)
            else:
                servers.publish(version, weights)
            named = {names[key]: count for key, count in counts.items()}
            result[f"{kind} {version}"] = world.gather(named, "the counts")
    return {"counts": result, "names": sorted(names.values())}


def counted(all_gather, parameter, counts, param_list=None, **options):
    """`all_gather` of a parameter, which counts those that it gathers."""
    counts().update(one.ds_id for one in param_list or [parameter])
    return all_gather(param_list=param_list, **options)


def loading(setting, world):
    """The most memory, in bytes, that each rank takes while a model is loaded and cut into parts, and the size of its
    weights."""
    _join_alone()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    policy = make_policy(**setting["policy"], shared_out=True, is_main=world.is_main)
    size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    partition(policy, world, zero_config(3, "none", False, world.size, None, size // 4), torch.float32)
    return {"size": size, "peaks": world.gather(memory("VmHWM") - before, "the memory")}


def memory(name):
    """A figure of /proc/self/status, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def write(files, folder, world):
    """Rank 0 writes the files that every rank helped to gather."""
    if world.is_main:
        files(folder)


def deepspeeds_own(setting, world):
    """A checkpoint in DeepSpeed's own format, and the model's files beside it."""
    policy, backend, config = start(setting, world)
    write(model_files(policy, world.is_main, {}), Path(setting["folder"]) / "base", world)
    updates(setting, world, policy, backend, config)
    backend.engine.save_checkpoint(str(Path(setting["folder"]) / "zero"))
    return {name: t.clone() for bucket in backend.named_weights() for name, t in bucket}


def main(settings, out):
    world = World.from_environment()
    torch.set_num_threads(1)
    shares.CHUNK_BYTES = PIECE_BYTES
    result = []
    for setting in json.loads(Path(settings).read_text()):
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        result.append(globals()[setting.get("run", "steps")](setting, world))
    faulthandler.cancel_dump_traceback_later()
    if world.is_main:
        torch.save(result, out)
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
