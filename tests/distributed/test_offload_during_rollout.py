"""What only an optimizer step reads, in host memory while the engine samples: the run is the same to the last bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from test_backends import ADAM, ZERO, launch
from zero_ranks import PIECE_BYTES

from rlvr.core.device_memory import HostOffload
from rlvr.trainer import GRPOTrainer
from small_run import TREE, overlaid, timeless, weights

BFLOAT16 = {"policy": {"model": {"dtype": "bfloat16"}}}
BACKENDS = {
    "plain": ({"name": "plain"}, {}),
    "zero1 in bfloat16": (ZERO[1], BFLOAT16),  # DeepSpeed has an optimizer of its own for this
    "zero2 in float32": (ZERO[2], {}),
    "zero3 in float32": (ZERO[3], {}),
    "zero3 in bfloat16": (ZERO[3], BFLOAT16),
}
IN_GATE = "zero3 in bfloat16"
"""Moments, float32 weights and gradients leave, and a checkpoint puts all of them together; the others are slow
tests."""


# tensors -------------------------------------------------------------------------------------------------------------


def test_contents_leave_and_come_back_under_every_view():
    base = torch.randn(100)
    before = base.clone()
    view, column = base[10:20], base.view(20, 5)[:, 1]
    other = torch.arange(7, dtype=torch.int64)
    offload = HostOffload(torch.device("cpu"))
    offload.move_out([view, base, other])
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0  # the memory is free
    assert offload.on_host(view).equal(before[10:20])
    assert offload.on_host(column).equal(before.view(20, 5)[:, 1])
    assert offload.on_host(other).equal(torch.arange(7))
    offload.move_out([view, column])  # they are out already
    offload.move_back()
    assert base.equal(before)
    assert view.equal(before[10:20])
    assert other.equal(torch.arange(7))
    assert offload.on_host(base) is base
    view.add_(1)  # it is a view still
    assert base[10:20].equal(before[10:20] + 1)
    (kept,) = offload._spare[base.nbytes]
    offload.move_out([base])
    ((_, host),) = offload._away.values()
    assert host is kept  # pinned once
    assert not offload._spare  # nothing is kept for tensors that are no more


def test_host_memory_is_pinned_for_a_gpu(monkeypatch):
    empty, asked, waited = torch.empty, [], []

    def without_pinning(*size, pin_memory=False, **options):
        asked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", without_pinning)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    tensor = torch.ones(3)
    offload = HostOffload(torch.device("cuda", 1))
    offload.move_out([tensor])
    assert asked.count(True) == 1
    assert waited == ["cuda:1"]  # before the memory of the tensors goes
    offload.move_back()
    assert waited == ["cuda:1"] * 2
    assert tensor.equal(torch.ones(3))


# a run ---------------------------------------------------------------------------------------------------------------


def run(tmp_path, name, offloads, steps=4, resume=None, engine="hf"):
    """A trainer that ran, and the bytes that were out at each verdict."""
    tree = {
        "run": {"dir": str(tmp_path), "name": name, "steps": steps},
        "optim": {"optimizer": "adamw", "updates_per_batch": 2},
        "algorithm": {"kl": {"coef": 0.1}},
        "distributed": {"offload_during_rollout": offloads},
        "checkpoint": {"every": 2, "keep": 9, "minutes": 0},
        "rollout": {"engine": engine},
        "data": {"train": {"name": "arithmetic", "count": 8}},
    }
    out = []

    def digits(completion):
        backend = trainer.training.backend
        out.append(sum(host.nbytes for _, host in backend.offload._away.values()))
        return sum(c.isdigit() for c in completion) / max(1, len(completion))

    trainer = GRPOTrainer(verifier=digits, config=overlaid(TREE, tree))
    try:
        trainer.train(resume=resume)
    finally:
        trainer.close()
    return trainer, out


@pytest.mark.parametrize("engine", ["hf", {"name": "hf", "copy_weights": True}], ids=["shares", "copies"])
def test_a_run_is_the_same_and_its_checkpoints_are_whole(tmp_path, engine):
    plain, none = run(tmp_path, "plain", False, engine=engine)
    offloaded, out = run(tmp_path, "offloaded", True, engine=engine)
    assert not any(none)
    trained = sum(p.nbytes for p in offloaded.policy.model.parameters())
    first = len(out) // 4  # those of the first step, when there is no state yet
    assert set(out[:first]) == {0}
    assert set(out[first:]) == {2 * trained}  # two moments in float32
    assert timeless(plain.metrics) == timeless(offloaded.metrics)
    before, after = weights(plain), weights(offloaded)
    assert all(before[name].equal(after[name]) for name in before)
    for step in (2, 4):
        wanted, got = ({}, {})
        for kept, name in ((wanted, "plain"), (got, "offloaded")):
            for file in (tmp_path / name / "checkpoints" / f"step-{step}").rglob("*.safetensors"):
                kept |= {f"{file.name} {key}": tensor for key, tensor in load_file(file).items()}
        assert any("optimizer/exp_avg/" in key for key in wanted)
        assert wanted.keys() == got.keys()
        assert all(got[key].equal(wanted[key]) for key in wanted)
    resumed, _ = run(
        tmp_path, "resumed", True, resume=str(tmp_path / "offloaded" / "checkpoints" / "step-2"), engine=engine
    )
    last = weights(resumed)
    assert all(before[name].equal(last[name]) for name in before)
    assert timeless(resumed.metrics)[-1] == timeless(plain.metrics)[-1]


# ranks ---------------------------------------------------------------------------------------------------------------


def launched(tmp_path_factory, names):
    """Runs of two ranks with and without offload, and resumed ones."""
    folder = tmp_path_factory.mktemp("folders")
    settings = {}
    for name in names:
        backend, more = BACKENDS[name]
        for offloads in (False, True):
            saved = str(folder / f"{name} {offloads}")
            own = {"backend": {**backend, "offload_during_rollout": offloads}, "folder": saved, **ADAM, **more}
            settings[f"{name} {offloads}"] = {"run": "released", **own}
            if offloads:
                settings[f"{name} resumed"] = {"run": "going_on", **own}
    return launch(tmp_path_factory, json.loads(json.dumps(settings)))


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_ranks_compute_the_same_and_save_whole_tensors(tmp_path_factory):
    check(launched(tmp_path_factory, [IN_GATE]), IN_GATE)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launched(tmp_path_factory, [name for name in BACKENDS if name != IN_GATE])


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != IN_GATE])
def test_the_other_backends_do_so_too(found, name):
    check(found, name)


def check(found, name):
    got, want, resumed = found[f"{name} True"], found[f"{name} False"], found[f"{name} resumed"]
    assert not any(map(any, want["out"]))
    weights = sum(t.numel() for key, t in want["tensors"][0].items() if key.startswith("weights/"))
    moments = 8 * weights
    masters = 0 if name in ("plain", "zero3 in float32") else 4 * weights  # else those that passes compute with
    shared = 1 if name == "plain" else 2
    for step, out in enumerate(got["out"]):
        expected = (masters + (moments if step else 0)) / shared
        assert out == pytest.approx([expected] * 2, rel=0.02)  # ZeRO pads the parts
    assert (
        got["pieces"] == [0 if name == "plain" else PIECE_BYTES] * 4
    )  # no whole tensor is on the device for a checkpoint
    assert not any(got["gradients"])
    kept = {"zero1 in bfloat16": 4 * weights, "zero3 in float32": 2 * weights, "zero3 in bfloat16": 2 * weights}
    if name in kept:  # by DeepSpeed, unless they are freed
        assert want["gradients"] == pytest.approx([kept[name]] * 4, rel=0.02)
    assert got["metrics"] == want["metrics"]
    for kind in ("tensors", "published"):
        for left, right in zip(got[kind], want[kind], strict=True):
            assert left.keys() == right.keys()
            assert all(left[key].equal(right[key]) for key in right)
    for left, right in zip(resumed["tensors"], want["tensors"][2:4], strict=True):
        assert left.keys() == right.keys()
        assert all(left[key].equal(right[key]) for key in right)
