"""The backends on two real processes against one: gradients, weights, state, files; and what must not leak into a
step."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zero_ranks
from launching import ended, start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from zero_ranks import recorded

from rlvr import registry
from rlvr.distributed import World
from rlvr.policy.loading import load_policy

# One fixture, of two ranks and two minutes, serves them all; beside other tests it takes several times as long.
pytestmark = [pytest.mark.gate, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
ZERO = {stage: {"name": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)}
OFFLOADED = {
    "zero2 offloaded": {**ZERO[2], "offload": "optimizer"},
    "zero3 offloaded": {**ZERO[3], "offload": "parameters"},
}
PACKED = {"packing": True, "share_prefix": True}
LORA = {"adapter": {"r": 4, "alpha": 8}, "tie_word_embeddings": False}
ADAM = {"optim": {"optimizer": "adamw"}, "lr": 0.01}
BFLOAT16 = {"policy": {"model": {"dtype": "bfloat16"}}, "optim": {"micro_batch_size": 2}}

STEPS = {
    "plain": {"backend": "plain", "optim": {"micro_batch_size": 3}},
    "plain packed": {"backend": "plain", "optim": {**PACKED, "micro_batch_tokens": 20}},
    "zero1": {"backend": ZERO[1], "optim": {"micro_batch_size": 1}},
    "zero2": {"backend": ZERO[2], "optim": {**PACKED, "micro_batch_tokens": 20}},
    "zero3": {"backend": ZERO[3], "optim": {"micro_batch_size": 2}},
    "zero3 packed": {"backend": ZERO[3], "optim": PACKED, "policy": {"tie_word_embeddings": False}},
    "zero3 lora": {"backend": ZERO[3], "optim": {"micro_batch_size": 2}, "policy": LORA},
    "zero3 checkpointed": {"backend": ZERO[3], "policy": {"model": {"gradient_checkpointing": True}}},
    **{name: {"backend": backend, "optim": {"micro_batch_size": 2}} for name, backend in OFFLOADED.items()},
}
"""Each on two ranks; the oracle is one process with the plain backend and one micro-batch."""
LR = {"copg": 0.02, "trajectory_balance": 0.01}
"""Where a step of 0.5 would throw the weights about, and rounding with them."""
LOSSES = {
    f"loss {name}": {"backend": backend, "loss": name, "optim": {"micro_batch_size": 2}, "lr": LR.get(name, 0.5)}
    for name, backend in zip(sorted(registry.names("loss")), itertools.cycle(["plain", ZERO[2], ZERO[3]]), strict=False)
}
"""Every registered loss over ranks, those that look at the whole step before it is dealt out among them."""
TROUBLES = {f"troubles {stage}": {"run": "troubles", "backend": ZERO[stage], **ADAM} for stage in ZERO}
BEFORE = {f"bfloat16 {stage}": {"backend": ZERO[stage], **BFLOAT16} for stage in ZERO}


TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node={ranks}"]
ACCELERATE = ["accelerate", "launch", "--config_file", "configs/accelerate/one-machine.yaml", "--num_processes={ranks}"]
DEEPSPEED = ["deepspeed", "--num_accelerators={ranks}", "--no_local_rank", "--master_port=29641"]


RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""What is freed goes back to the system at once, so that a peak of memory is that of what is held and no
allocator's."""


def launch(tmp_path_factory, settings, ranks=2, deadline=1100, launcher=None):
    """What zero_ranks.py found for each setting, with ranks started by `launcher`; None: as processes that have
    imported the libraries."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "settings.json").write_text(json.dumps(list(settings.values())))
    program = [str(HERE / "zero_ranks.py"), str(folder / "settings.json"), str(folder / "out.pt")]
    if launcher is None:
        finished = ended(start(ranks, *program), deadline)
        assert [status for status, _ in finished] == [0] * ranks, finished
    else:
        command = [word.format(ranks=ranks) for word in launcher]
        command[0] = str(Path(sys.executable).with_name(command[0]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **RETURNED}
        done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, timeout=deadline)
        assert done.returncode == 0, done.stderr[-6000:]
    return dict(zip(settings, torch.load(folder / "out.pt", weights_only=False), strict=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def found(tmp_path_factory, folders):
    """Everything that the tests of the default set need of two ranks, in one launch."""
    steps = {name: {**setting, "folder": str(folders / name)} for name, setting in STEPS.items()}
    saving = {
        "save plain": {"run": "save", "backend": "plain", "folder": str(folders / "saved plain"), **ADAM},
        "save zero3": {"run": "save", "backend": ZERO[3], "folder": str(folders / "saved zero3"), **ADAM},
        "zero3 goes on from plain": resuming(ZERO[3], folders / "saved plain", after_a_step=True),
        "zero3 goes on from zero3": resuming(ZERO[3], folders / "saved zero3"),
        "zero1 goes on from zero3": resuming(ZERO[1], folders / "saved zero3"),
        "offloaded zero2 goes on from zero3": resuming(
            OFFLOADED["zero2 offloaded"], folders / "saved zero3", after_a_step=True
        ),
    }
    following = {
        "follows": 0.01,
        "policy": {"model": {"dtype": "bfloat16"}},
        "folder": str(folders / "saved following"),
    }
    saving["save following"] = {"run": "save", "backend": ZERO[3], **ADAM, **following}
    saving["following goes on"] = resuming(ZERO[3], **following)
    more = {
        "stages": {"run": "stages", "backend": ZERO[3], "then": [DECAYING], **ADAM},
        "buckets": {"run": "buckets", "backend": ZERO[3], "size": 8000},
        "loading": {"run": "loading", "policy": LARGE},
        "zero3 from files": {**STEPS["zero3"], "policy": {"path": str(folders / "zero3" / "merged")}},
    }
    files = {**LORA, "path": str(folders / "zero3" / "merged"), "model": {"quantization": "nf4"}}
    more["zero2 qlora"] = {"backend": ZERO[2], "optim": {"micro_batch_size": 2}, "policy": files}
    return launch(tmp_path_factory, {**steps, **LOSSES, **TROUBLES, **BEFORE, **saving, **more}, launcher=TORCHRUN)


LARGE = {"hidden_size": 512, "layers": 8, "intermediate_size": 2048}
DECAYING = {"name": "adamw", "weight_decay": 0.5}


def resuming(backend, folder, **more):
    return {"run": "resume", "backend": backend, "folder": str(folder), **ADAM, **more}


def alone(setting):
    """The same in one process with the plain backend, in one micro-batch without packing."""
    setting = {key: value for key, value in setting.items() if key != "folder"}
    optim = {key: value for key, value in setting.get("optim", {}).items() if key == "optimizer"}
    return getattr(zero_ranks, setting.get("run", "steps"))({**setting, "backend": "plain", "optim": optim}, World())


def flat(tensors, kind="weights/"):
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors) if name.startswith(kind)])


def gap(left, right, kind="weights/", since=None):
    """Global relative gap of tensors, or of what changed in them `since` others."""
    left, right = flat(left, kind), flat(right, kind)
    start = 0 if since is None else flat(since, kind)
    return float((left - right).norm() / (right - start).norm())


# N1 ------------------------------------------------------------------------------------------------------------------


def check_steps(got, want):
    start = want["tensors"][0]
    assert gap(got["tensors"][0], start) == 0
    for left, right, before in zip(got["tensors"][1:], want["tensors"][1:], want["tensors"][:-1], strict=True):
        assert gap(left, right, since=before) < 1e-5  # plain gradient descent: the gradient
    for left, right in zip(got["metrics"], want["metrics"], strict=True):
        for name in ("grad_norm", "loss/total", "loss/policy", "loss/kl", "entropy/trained"):
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-6), name
        assert left["tokens/trained"] == right["tokens/trained"]
    assert got["moved"] == want["moved"]  # every parameter that trains, and no frozen one


@pytest.mark.parametrize("name", STEPS)
def test_gradients_and_weights_are_those_of_one_process(found, name):
    want = alone(STEPS[name])
    check_steps(found[name], want)
    assert len(found[name]["moved"]) == sum(key.startswith("weights/") for key in want["tensors"][0])
    published, wanted = found[name]["published"], want["published"]
    assert published.keys() == wanted.keys()
    assert all(torch.allclose(published[key], wanted[key], atol=1e-5) for key in wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_that_of_one_process(found, name):
    want = alone(LOSSES[name])
    start = want["tensors"][0]
    assert gap(want["tensors"][1], start) > 1e-6
    for left, right, before in zip(found[name]["tensors"][1:], want["tensors"][1:], want["tensors"][:-1], strict=True):
        assert gap(left, right, since=before) < 1e-5
    for left, right in zip(found[name]["metrics"], want["metrics"], strict=True):
        assert left["loss/total"] == pytest.approx(right["loss/total"], rel=1e-4, abs=1e-6)


GRID = list(
    itertools.product(
        ["plain", *ZERO.values(), *OFFLOADED.values()],
        [{}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_tokens": 25}],
        [{"packing": False}, {"packing": True, "share_prefix": False}, PACKED],
        [{"updates_per_batch": 1}, {"updates_per_batch": 2, "epochs_per_batch": 2}],
    )
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_grid(tmp_path_factory):
    settings = {
        f"{i}": {"backend": backend, "optim": {**cut, **layout, **often}, "lr": 0.1}
        for i, (backend, cut, layout, often) in enumerate(GRID)
    }
    results = launch(tmp_path_factory, settings, deadline=1500)
    wanted = [zero_ranks.steps({"backend": "plain", "optim": often, "lr": 0.1}, World()) for often in ({}, GRID[1][3])]
    for name, setting in settings.items():
        check_steps(results[name], wanted[setting["optim"]["updates_per_batch"] - 1])


def test_zero_in_bfloat16_is_the_same_for_all_stages_and_near_float32(found):
    stages, want = [found[name] for name in BEFORE], alone(STEPS["plain"])
    start = want["tensors"][0]
    for got in stages:
        assert all(tensor.dtype == torch.float32 for tensor in got["tensors"][-1].values())
        assert gap(got["tensors"][0], start) == 0  # the float32 weights are not rounded to begin with
        assert gap(got["tensors"][1], want["tensors"][1], since=start) < 0.1
        assert gap(got["tensors"][1], stages[2]["tensors"][1], since=start) < 0.01
        assert all(weight.dtype == torch.bfloat16 for weight in got["published"].values())


def test_a_model_in_files_is_shared_out_as_one_from_nothing(found, folders):
    """The files are those of the steps before it, so it goes on from there."""
    got, before = found["zero3 from files"], found["zero3"]
    start = {name.removeprefix("weights/"): t for name, t in got["tensors"][0].items()}
    assert all(torch.equal(before["published"][name], tensor) for name, tensor in start.items())
    check_steps(got, alone({**STEPS["zero3"], "policy": {"path": str(folders / "zero3" / "merged")}}))


def test_an_adapter_on_weights_in_four_bits(found, folders):
    files = {**LORA, "path": str(folders / "zero3" / "merged"), "model": {"quantization": "nf4"}}
    want = alone({"backend": "plain", "policy": files})
    assert all("lora_" in name for name in want["moved"])
    check_steps(found["zero2 qlora"], want)


def test_only_rank_0_holds_a_whole_model_and_only_in_host_memory_while_it_is_loaded(found):
    size, (first, second) = found["loading"]["size"], found["loading"]["peaks"]
    assert size > 100e6
    assert 1.0 < first / size < 1.2  # all of it, which goes as its part comes
    assert 0.5 < second / size < 0.7  # its part and one parameter at a time


# What must not leak --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TROUBLES)
def test_what_is_not_finite_or_not_stepped_leaves_no_trace(found, name):
    got, want = found[name], alone(TROUBLES[name])
    assert [torch.isfinite(torch.tensor(norm)).item() for norm in got["norms"]] == [True, False, False, True, True]
    assert got["norms"][-1] == 0
    assert all(torch.equal(got["tensors"][0][key], got["tensors"][i][key]) for key in got["tensors"][0] for i in (1, 2))
    assert gap(got["tensors"][4], got["tensors"][3]) > 1e-4  # a step without gradients moves by its momentum
    for left, right in zip(got["tensors"], want["tensors"], strict=True):
        assert left.keys() == right.keys()
        assert gap(left, right, "optimizer/exp_avg/") < 1e-4
        assert gap(left, right, "optimizer/step/") == 0
        assert gap(left, right) < 1e-4  # Adam divides what is nearly nothing by what is nearly nothing
    assert got["norms"][0] == pytest.approx(want["norms"][0], rel=1e-5)
    assert got["norms"][3] == pytest.approx(want["norms"][3], rel=1e-4)


def test_a_later_stage_has_a_fresh_optimizer(found):
    want = alone({"run": "stages", "backend": "plain", "then": [DECAYING], **ADAM})
    for left, right in zip(found["stages"]["tensors"], want["tensors"], strict=True):
        assert gap(left, right) < 1e-4
        assert gap(left, right, "optimizer/step/") == 0


# State and files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zero3 goes on from plain", "zero3 goes on from zero3"])
def test_a_resumed_run_is_the_run_that_went_on(found, name):
    saved = found["save plain" if name.endswith("plain") else "save zero3"]
    same = name.endswith("zero3")
    for got, want in zip(found[name]["tensors"], saved["tensors"], strict=True):
        assert got.keys() == want.keys()
        if same:
            assert all(torch.equal(got[key], want[key]) for key in want)  # every bit, with the same backend and ranks
        assert gap(got, want) < 1e-5
        assert gap(got, want, "optimizer/") < 1e-4
    assert [m["kl/ref"] for m in found[name]["metrics"]] == pytest.approx(
        [m["kl/ref"] for m in saved["metrics"]], rel=1e-4
    )


def test_a_reference_that_follows_is_saved_and_loaded_whole_where_weights_are_partitioned(found, folders):
    """ZeRO-3 in bfloat16 on two ranks: the reference comes back in float32, bit for bit, and goes on following."""
    files = [load_file(folders / "saved following" / f"{rank}.safetensors") for rank in range(2)]
    written = {name: t for file in files for name, t in file.items() if name.startswith("reference/")}
    weights = {name: t for file in files for name, t in file.items() if name.startswith("weights/")}
    assert {name.removeprefix("reference/") for name in written} == {name.removeprefix("weights/") for name in weights}
    assert {t.dtype for t in written.values()} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in written.values())  # bfloat16 would lose some
    resumed = found["following goes on"]
    assert resumed["loaded"].keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(resumed["loaded"][name], tensor), name
    went_on = found["save following"]
    for name, tensor in went_on["reference"].items():
        assert tensor.shape == weights[name.replace("reference/", "weights/")].shape
        assert torch.equal(resumed["reference"][name], tensor), name
    assert gap(went_on["reference"], written, "reference/") > 0
    assert [m["kl/ref"] for m in resumed["metrics"]] == [m["kl/ref"] for m in went_on["metrics"]]


@pytest.mark.parametrize("name", ["zero1 goes on from zero3", "offloaded zero2 goes on from zero3"])
def test_a_resumed_run_may_change_its_backend(found, name):
    for got, want in zip(found[name]["tensors"], found["save zero3"]["tensors"], strict=True):
        assert gap(got, want) < 1e-5


@pytest.mark.parametrize("kind", ["plain", "zero3"])
def test_one_process_goes_on_with_what_two_saved(found, folders, kind):
    got = zero_ranks.resume(resuming("plain", folders / f"saved {kind}"), World())
    for left, right in zip(got["tensors"], found[f"save {kind}"]["tensors"], strict=True):
        assert gap(left, right) < 1e-5


@pytest.mark.slow
def test_two_and_one_process_of_zero_go_on_with_each_other(found, folders, tmp_path_factory):
    settings = {
        "three": resuming(ZERO[3], folders / "saved zero3"),
        "two": resuming(ZERO[2], folders / "saved plain"),
        "alone": STEPS["zero3"],
    }
    got = launch(tmp_path_factory, settings, ranks=1)
    for name, saved in (("three", "save zero3"), ("two", "save plain")):
        for left, right in zip(got[name]["tensors"], found[saved]["tensors"], strict=True):
            assert gap(left, right) < 1e-5
    check_steps(got["alone"], alone(STEPS["zero3"]))


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3 lora", "zero3 offloaded"])
def test_the_files_of_the_model_are_the_model(found, folders, name):
    merged = AutoModelForCausalLM.from_pretrained(folders / name / "merged")
    published = found[name]["published"]
    assert published.keys() == merged.state_dict().keys()
    assert all(torch.equal(published[key], weight) for key, weight in merged.state_dict().items())
    if name == "zero3 lora":  # only the adapter is written; its base is what the run began with
        adapter = load_file(folders / name / "adapter_model.safetensors")
        trained = {key.removeprefix("weights/"): t for key, t in found[name]["tensors"][-1].items()}
        assert adapter.keys() == {key.replace(".default", "") for key in trained}
        assert all(torch.equal(adapter[key.replace(".default", "")], tensor) for key, tensor in trained.items())
        return
    policy = load_policy(zero_ranks.ModelConfig(path=str(folders / name), dtype="float32", device="cpu"))
    assert all(torch.equal(published[key], weight) for key, weight in policy.model.state_dict().items())
    assert recorded(policy)  # its tokenizer is beside it


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [ACCELERATE, DEEPSPEED], ids=["accelerate", "deepspeed"])
def test_the_other_launchers(tmp_path_factory, launcher):
    got = launch(tmp_path_factory, {"zero2": STEPS["zero2"]}, launcher=launcher)["zero2"]
    assert got["ranks"] == 2
    check_steps(got, alone(STEPS["zero2"]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_deepspeeds_is_converted(tmp_path_factory, tmp_path, stage):
    setting = {"run": "deepspeeds_own", "backend": ZERO[stage], "folder": str(tmp_path), **ADAM}
    want = launch(tmp_path_factory, {"own": setting})["own"]
    convert = [sys.executable, "scripts/convert_zero_checkpoint.py", str(tmp_path / "zero"), "--base"]
    convert += [str(tmp_path / "base"), "--out"]
    done = subprocess.run([*convert, str(tmp_path / "out")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    never = [*convert, str(tmp_path / "other"), "--tag", "never"]
    missing = subprocess.run(never, capture_output=True, text=True, timeout=120)
    assert missing.returncode == 2
    assert "never is missing" in missing.stderr


def test_one_bucket_of_partitioned_weights_is_whole_at_a_time(found):
    sizes = found["buckets"]
    assert 0 < sizes["most"] <= 8000 + sizes["largest"] < sizes["all"] / 2
