"""Checkpoints: whole or passed over, whatever was damaged and whenever the process was killed."""

import importlib.metadata
import json
import logging
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlvr.config import CheckpointConfig
from rlvr.distributed import PlainBackend, World, checkpoint_writer
from rlvr.distributed.checkpoint import (
    MANIFEST,
    Manifest,
    best,
    checkpoints,
    checksum_of,
    latest,
    load,
    remove_partial,
    why_unusable,
)
from rlvr.distributed.checkpoint_writer import Contents, HostCopies, Writer
from rlvr.distributed.models import model_files
from rlvr.errors import CheckpointError

STATE = {"step": 3, "seeds": [1, 2], "history": {"a b": {"rate": 0.5}}, "nothing": None, "text": "é\n"}
TENSORS = {
    "weights/w": torch.arange(6.0).reshape(2, 3),
    "weights/b": torch.tensor([1.5], dtype=torch.bfloat16),
    "optimizer/step/w": torch.tensor(3),
}


def a_model(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").write_bytes(bytes(range(256)))


def write(folder, step, keep=9, state=STATE, tensors=TENSORS, save_model=a_model, metrics=None, **options):
    """A checkpoint that is on disk when this returns; raises what the write raised."""
    writer = Writer(folder, CheckpointConfig(keep=keep, **options), World())
    assert writer.open(step)

    def models(aside):
        save_model(aside / "model")

    writer.write(Contents(step, tensors, {**state, "step": step}, metrics or {}, models))
    if (error := writer.wait()) is not None:
        raise error
    return folder / f"step-{step}"


def names(folder):
    return [path.name for path in checkpoints(folder)]


def test_what_was_saved_is_loaded(tmp_path):
    path = write(tmp_path / "checkpoints", 12)
    assert path == tmp_path / "checkpoints" / "step-12"
    assert sorted(p.name for p in path.iterdir()) == sorted(["model", "tensors-0.safetensors", "state.json", MANIFEST])
    assert why_unusable(path) is None
    saved = load(path)
    assert saved.state == {**STATE, "step": 12}
    assert saved.tensors.keys() == TENSORS.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(tensor, TENSORS[name])
        assert tensor.dtype == TENSORS[name].dtype
    assert (saved.manifest.step, saved.manifest.ranks, saved.manifest.versions["torch"]) == (
        12,
        1,
        importlib.metadata.version("torch"),
    )
    assert not list(path.parent.glob(".*"))


def test_nothing_saved_is_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "not there") is None
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-3.old").mkdir()
    assert names(tmp_path) == []


def test_the_latest_is_so_by_number(tmp_path):
    for step in (2, 10, 9):
        write(tmp_path, step)
    assert names(tmp_path) == ["step-2", "step-9", "step-10"]
    assert latest(tmp_path).name == "step-10"


def test_the_newest_are_kept(tmp_path):
    for step in range(1, 8):
        write(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-5", "step-6", "step-7"]
    write(tmp_path, 8, keep=1)
    assert names(tmp_path) == ["step-8"]
    (tmp_path / "best").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, 9, keep=1)
    assert (tmp_path / "best").is_dir()
    assert (tmp_path / "notes.txt").is_file()


def test_checkpoints_by_the_clock_push_out_none_of_those_by_steps(tmp_path):
    kept = {
        10: [10],
        13: [10, 13],
        16: [10, 13, 16],
        19: [10, 16, 19],
        20: [10, 20],
        21: [10, 20, 21],
        30: [20, 30],
        31: [20, 30, 31],
    }
    for step, expected in kept.items():
        write(tmp_path, step, keep=2, every=10)
        assert names(tmp_path) == [f"step-{number}" for number in expected]
    write(tmp_path, 32, keep=1, every=10)
    assert names(tmp_path) == ["step-30", "step-32"]


def test_a_checkpoint_just_written_is_kept_beside_a_torn_one_of_a_higher_number(tmp_path):
    """step-10 was torn, the run resumed from step-5 and saves again."""
    write(tmp_path, 5)
    (write(tmp_path, 10) / "tensors-0.safetensors").unlink()
    path = write(tmp_path, 6, keep=1)
    assert path.is_dir()
    assert latest(tmp_path) == path


def test_what_is_no_checkpoint_of_ours_is_neither_removed_nor_written_over(tmp_path):
    mine = tmp_path / "step-7"
    mine.mkdir()
    (mine / "data.bin").write_bytes(b"\x00mine")
    elsewhere = write(tmp_path / "elsewhere", 3)
    (tmp_path / "step-3").symlink_to(elsewhere, target_is_directory=True)
    with_notes = write(tmp_path, 5)
    (with_notes / "model" / "notes.txt").write_text("mine")
    (tmp_path / ".step-8.partial" / "mine").mkdir(parents=True)
    write(tmp_path, 6, keep=1)
    write(tmp_path, 7, keep=1)  # in the place of the user's folder
    write(tmp_path, 8, keep=1)  # and aside, where there is one too
    assert latest(tmp_path).name == "step-8"
    assert why_unusable(elsewhere) is None
    assert [path.relative_to(with_notes).as_posix() for path in with_notes.rglob("*")] == ["model", "model/notes.txt"]
    assert [path.read_bytes() for path in tmp_path.glob("step-7.old-*/data.bin")] == [b"\x00mine"]
    assert len(list(tmp_path.glob(".step-8.partial.old-*/mine"))) == 1
    assert not (tmp_path / "step-6").exists()


def test_a_step_is_written_again_over_what_was_there(tmp_path):
    write(tmp_path, 4)
    path = write(tmp_path, 4, state={**STATE, "text": "second"})
    assert load(path).state["text"] == "second"
    (path / "state.json").unlink()
    assert load(write(tmp_path, 4)).state["text"] == STATE["text"]


# Torn ones


def unseal(path):
    (path / MANIFEST).unlink()


def cut(path):
    file = path / "tensors-0.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def flip(path):
    file = path / "model" / "additional_chat_templates" / "x.jinja"
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)


def lose(path):
    (path / "state.json").unlink()


def half_a_seal(path):
    (path / MANIFEST).write_text((path / MANIFEST).read_text()[:30])


def empty_seal(path):
    (path / MANIFEST).write_text("")


def odd_seal(path):
    (path / MANIFEST).write_text("[1, 2]")


def no_model(path):
    shutil.rmtree(path / "model")


TEARS = {
    unseal: "complete.json is missing",
    cut: "tensors-0.safetensors is damaged",
    flip: "x.jinja is damaged",
    lose: "state.json is missing",
    half_a_seal: "not finished",
    empty_seal: "not finished",
    odd_seal: "not finished",
    no_model: "x.jinja is missing",
}


@pytest.mark.parametrize("tear", TEARS, ids=lambda tear: tear.__name__)
def test_a_torn_checkpoint_is_passed_over_in_words_and_refused(tmp_path, caplog, tear):
    good, torn = write(tmp_path, 1), write(tmp_path, 2)
    tear(torn)
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == good
    output = [record.getMessage() for record in caplog.records]
    assert len(output) == 1
    assert str(torn) in output[0]
    assert TEARS[tear] in output[0]
    with pytest.raises(CheckpointError, match="step-2 cannot be used") as error:
        load(torn)
    assert TEARS[tear] in str(error.value)
    tear(good)
    with pytest.raises(CheckpointError, match=r"step-2 cannot be used: .*; .*step-1 cannot be used: "):
        latest(tmp_path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sound"), 1)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_of_any_file_is_noticed(sound, data):
    file = data.draw(st.sampled_from(sorted(p for p in sound.rglob("*") if p.is_file())))
    original = file.read_bytes()
    place = data.draw(st.integers(0, 8 * len(original) - 1))
    flipped = bytearray(original)
    flipped[place // 8] ^= 1 << place % 8
    try:
        file.write_bytes(flipped)
        assert why_unusable(sound) is not None
    finally:
        file.write_bytes(original)
    assert why_unusable(sound) is None


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="cannot be used"):
            load(path)


def seal_again(path):
    manifest = load_seal(path)
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != MANIFEST)
    manifest.files = {str(p.relative_to(path)): checksum_of(p) for p in files}
    (path / MANIFEST).write_text(manifest.text())


def load_seal(path):
    return Manifest(**json.loads((path / MANIFEST).read_text()))


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_tensors_with_code_in_them_are_refused_and_not_run(tmp_path):
    path = write(tmp_path, 1)
    ran = tmp_path / "ran"
    torch.save({"weights": Code(str(ran))}, path / "tensors-0.safetensors")
    with pytest.raises(CheckpointError, match=r"tensors-0.safetensors is damaged"):
        load(path)
    seal_again(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)
    assert not ran.exists()


@pytest.mark.parametrize("junk", [b"", b"junk", b"PK\x03\x04", b"\x80\x02."], ids=repr)
@pytest.mark.parametrize("name", ["tensors-0.safetensors", "state.json"])
def test_sealed_junk_is_refused_in_words(tmp_path, junk, name):
    path = write(tmp_path, 1)
    (path / name).write_bytes(junk)
    seal_again(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)


def test_other_formats_are_refused_in_words_and_not_taken_for_nothing(tmp_path):
    """As version 0.1 wrote them, and as a later one may."""
    old = tmp_path / "step-3"
    old.mkdir()
    (old / MANIFEST).write_text(json.dumps({"state.json": "0" * 32, "tensors.pt": "0" * 32}))
    later = write(tmp_path, 5)
    manifest = load_seal(later)
    manifest.format = 7
    (later / MANIFEST).write_text(manifest.text())
    for path, number in ((old, 1), (later, 7)):
        with pytest.raises(CheckpointError, match=f"format {number}, and this version of rlvr reads format 2"):
            load(path)
    with pytest.raises(CheckpointError, match="step-5 cannot be used"):
        latest(tmp_path)
    good = write(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"step-5 cannot be used: .*step-4 can be used, by its own name"):
        latest(tmp_path)
    later.rename(tmp_path / "later")
    assert latest(tmp_path) == good


def test_of_a_folder_that_was_being_written_only_what_a_checkpoint_writes_is_removed(tmp_path):
    partial = tmp_path / ".step-3.partial"
    ours = ["tensors-0.safetensors", "state.json", "model/config.json", "model/tokenizer_config.json"]
    ours += ["model/model-00001-of-00002.safetensors", "model/tokenizer.json", "merged/model.safetensors.index.json"]
    for name in [*ours, "model/notes.txt", "model/data/mine.json"]:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text(name)
    remove_partial(partial)
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(name.partition("/")[2] for name in left) == ["model/data/mine.json", "model/notes.txt"]
    assert not partial.exists()
    elsewhere = write(tmp_path / "elsewhere", 3)
    partial.symlink_to(elsewhere)
    remove_partial(partial)
    assert why_unusable(elsewhere) is None


# Dying while saving


def killed_in(folder, where):
    """A process that is killed while it saves step 2; its exit status."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:

        def wait(*_):
            os.write(writer, b"here")
            time.sleep(600)

        def slow_model(path):
            a_model(path)
            wait()

        if where == "sync":
            checkpoint_writer._sync = wait
        if where == "rename":
            os.replace = wait
        write(folder, 2, save_model=slow_model if where == "model" else a_model, background=False)
        os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 10) == b"here"
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("where", ["model", "sync", "rename"])
def test_a_process_killed_while_it_saves_leaves_no_checkpoint(tmp_path, where):
    write(tmp_path, 1)
    assert killed_in(tmp_path, where) == -signal.SIGKILL
    assert names(tmp_path) == ["step-1"]
    assert latest(tmp_path).name == "step-1"
    assert load(latest(tmp_path)).state["step"] == 1

    write(tmp_path, 2)  # the same step, after the resume
    assert latest(tmp_path).name == "step-2"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_an_error_while_saving_leaves_what_was_there(tmp_path):
    def full(folder):
        a_model(folder)
        raise OSError("no space left on device")

    write(tmp_path, 1)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, 2, save_model=full, keep=1)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, 1, save_model=full, keep=1)
    assert names(tmp_path) == ["step-1"]
    assert load(latest(tmp_path)).state["step"] == 1


# The thread


def test_a_write_goes_on_while_the_run_does_and_the_next_one_waits_for_it(tmp_path):
    gate, writer = threading.Event(), Writer(tmp_path, CheckpointConfig(keep=9), World())

    def slow_model(aside):
        assert gate.wait(60)
        a_model(aside / "model")

    assert writer.open(1)
    writer.write(Contents(1, TENSORS, models=slow_model))
    assert names(tmp_path) == []
    assert writer.state == "step 1 is being written"
    threading.Timer(0.5, gate.set).start()
    began = time.monotonic()
    assert writer.open(2)
    assert 0.2 < time.monotonic() - began < 30
    assert names(tmp_path) == ["step-1"]
    assert writer.state == "step 1 is on disk"


def test_what_is_written_is_what_was_copied(tmp_path, make_policy):
    """Weights that change after the copy are not in it, neither in the tensors nor in the model."""
    policy, gate = make_policy(), threading.Event()
    backend, copies = PlainBackend(policy), HostCopies()
    live = backend.saved_tensors()
    before = {name: tensor.clone() for name, tensor in live.items()}
    held = copies(live)
    files = model_files(policy, True, {tensor.data_ptr(): held[name] for name, tensor in live.items()})
    writer = Writer(tmp_path, CheckpointConfig(), World())

    def models(aside):
        assert gate.wait(60)
        files(aside / "model")

    assert writer.open(1)
    writer.write(Contents(1, held, models=models))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.fill_(7.0)
    gate.set()
    assert writer.wait() is None
    saved = load(tmp_path / "step-1").tensors
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1" / "model")
    assert all(torch.equal(p, before[f"weights/{name}"]) for name, p in model.named_parameters())


def test_buffers_of_copies_are_used_again():
    copies, tensor = HostCopies(), torch.arange(4.0)
    first = copies({"a": tensor})["a"]
    tensor += 1
    assert first.tolist() == [0, 1, 2, 3]
    second = copies({"a": tensor})["a"]
    assert second.data_ptr() == first.data_ptr()
    assert second.tolist() == [1, 2, 3, 4]
    assert copies({"a": torch.ones(2, 2)})["a"].shape == (2, 2)


def test_a_write_that_fails_is_said_and_the_next_one_is_made(tmp_path, caplog):
    writer = Writer(tmp_path, CheckpointConfig(keep=1), World())
    write(tmp_path, 1)

    def full(aside):
        raise OSError(28, "No space left on device")

    assert writer.open(2)
    writer.write(Contents(2, TENSORS, models=full))
    error = writer.wait()
    assert "No space left" in str(error)
    assert f"the checkpoint of step 2 could not be written to {tmp_path}: [Errno 28] No space left on" in caplog.text
    assert names(tmp_path) == ["step-1"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert writer.open(3)
    writer.write(Contents(3, TENSORS, models=lambda aside: a_model(aside / "model")))
    assert writer.wait() is None
    assert names(tmp_path) == ["step-3"]


def test_the_best_is_kept_beside_the_newest(tmp_path):
    keeps = {"metric": "eval/greedy", "mode": "max"}
    for step, value in enumerate([0.1, 0.7, 0.7, None, 0.3, 0.2], start=1):
        write(tmp_path, step, keep=2, best=keeps, metrics={"eval/greedy": value})
    assert names(tmp_path) == ["step-2", "step-5", "step-6"]
    assert best(tmp_path, "eval/greedy", "max") == (tmp_path / "step-2", 0.7)
    assert best(tmp_path, "eval/greedy", "min") == (tmp_path / "step-6", 0.2)
    assert best(tmp_path, "eval/other", "max") is None
    write(tmp_path, 7, keep=1, best={"metric": "eval/greedy", "mode": "min"}, metrics={"eval/greedy": 0.9})
    assert names(tmp_path) == ["step-6", "step-7"]


class Rank(World):
    """A rank that hears itself only."""

    def broadcast(self, value, what, deadline=0.0):
        return value


def test_every_rank_writes_its_own_tensors_and_rank_0_seals(tmp_path):
    shares = [{"weights/a": torch.zeros(2)}, {"weights/b": torch.ones(3)}]
    writers = [Writer(tmp_path, CheckpointConfig(), Rank(rank, 2)) for rank in range(2)]
    assert [writer.open(4) for writer in writers] == [True, True]
    writers[0].write(Contents(4, shares[0], {"step": 4}))
    time.sleep(0.3)
    assert names(tmp_path) == []
    writers[1].write(Contents(4, shares[1]))
    assert [writer.wait() for writer in writers] == [None, None]
    saved = load(tmp_path / "step-4")
    assert saved.manifest.ranks == 2
    assert {name: tensor.tolist() for name, tensor in saved.tensors.items()} == {
        "weights/a": [0, 0],
        "weights/b": [1, 1, 1],
    }
    assert sorted(p.name for p in (tmp_path / "step-4").iterdir()) == sorted(
        ["tensors-0.safetensors", "tensors-1.safetensors", "state.json", MANIFEST]
    )


def test_a_rank_that_writes_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "WRITE_SECONDS", 0.4)
    writer = Writer(tmp_path, CheckpointConfig(background=False), Rank(0, 3))
    assert writer.open(4)
    writer.write(Contents(4, {"weights/a": torch.zeros(2)}))
    assert "rank 1, rank 2 wrote nothing: run.dir must be on storage that all ranks share" in str(writer.wait())
    assert names(tmp_path) == []


def test_a_share_that_takes_long_is_awaited_while_it_grows(tmp_path, monkeypatch):
    """Ten looks 500 s apart, at a file that grows, where a rank that writes nothing is given up after 1800 s."""
    writer = Writer(tmp_path, CheckpointConfig(background=False), Rank(0, 2))
    other = Writer(tmp_path, CheckpointConfig(background=False), Rank(1, 2))
    share = tmp_path / ".step-4.partial" / "tensors-1.safetensors"

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += 500.0
            if self.now < 5000.0:
                share.write_bytes(bytes(int(self.now)))
            else:
                other.write(Contents(4, {"weights/b": torch.ones(3)}))

    assert writer.open(4)
    monkeypatch.setattr(checkpoint_writer, "time", Clock())
    writer.write(Contents(4, {"weights/a": torch.zeros(2)}, {"step": 4}))
    assert writer.wait() is None
    assert load(tmp_path / "step-4").tensors["weights/b"].tolist() == [1, 1, 1]


# With a backend


def trained(policy, optimizer, steps, seed=0):
    backend = PlainBackend(policy, optimizer)
    go_on(backend, steps, seed)
    return backend


def go_on(backend, steps, seed=0):
    for step in range(steps):
        ids = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(100 * seed + step))
        backend.zero()
        backend.backward(backend.policy.model(input_ids=ids, labels=ids).loss)
        backend.step(lr=0.01, max_norm=1.0)


@pytest.mark.parametrize("optimizer", ["adamw", {"name": "sgd", "momentum": 0.9}], ids=str)
@pytest.mark.parametrize("adapter", [None, {"r": 2, "alpha": 4}], ids=["whole", "lora"])
def test_a_backend_taken_up_again_goes_on_as_if_never_stopped(make_policy, tmp_path, optimizer, adapter):
    backend = trained(make_policy(adapter=adapter), optimizer, 3)
    path = write(
        tmp_path, 3, tensors=HostCopies()(backend.saved_tensors()), save_model=model_files(backend.policy, True, {})
    )
    go_on(backend, 3, seed=1)

    other = PlainBackend(make_policy(adapter=adapter), optimizer)
    other.load_tensors(load(path).tensors)
    go_on(other, 3, seed=1)
    assert backend.parameters.keys() == other.parameters.keys()
    assert all(torch.equal(p, other.parameters[name]) for name, p in backend.parameters.items())


def test_a_checkpoint_of_another_model_is_refused_by_name(make_policy):
    saved = PlainBackend(make_policy()).saved_tensors()
    for other in (make_policy(layers=3), make_policy(intermediate_size=80), make_policy(adapter={"r": 2})):
        with pytest.raises(CheckpointError, match=r"of another model: .*(layers|lora)"):
            PlainBackend(other).load_tensors(saved)


def test_a_step_without_a_finite_norm_changes_nothing(make_policy):
    backend = trained(make_policy(), "adamw", 2)
    before = {name: p.clone() for name, p in backend.parameters.items()}
    moments = {k: v.clone() for s in backend.optimizer.state.values() for k, v in s.items()}
    backend.zero()
    next(iter(backend.parameters.values())).grad.fill_(float("nan"))
    assert not torch.isfinite(torch.tensor(backend.step(0.1, 1.0)))
    assert all(torch.equal(p, before[name]) for name, p in backend.parameters.items())
    assert all(torch.equal(v, moments[k]) for s in list(backend.optimizer.state.values())[-1:] for k, v in s.items())
