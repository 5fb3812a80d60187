"""Settings of vLLM that are decided before an engine starts, read from the configuration that vLLM itself makes of them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_helpers import needs_vllm, tiny

from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, engine, launch, server_engine
from rlvr.rollout.vllm.model_folder import cache_folder, content_digest, model_folder, stable_copy
from rlvr.rollout.vllm.started import flags

GIB = 1 << 30


class Made(Exception):
    """Carries the configuration that an engine would be built from."""


class Started(Exception):
    """Carries what a process would be started with: its engine arguments and its environment."""


class Device:
    """A GPU as vLLM's `get_batch_defaults` asks about it."""

    def __init__(self, memory, name):
        self.memory, self.name = memory, name

    def get_device_total_memory(self):
        return self.memory

    def get_device_name(self):
        return self.name

    def is_tpu(self):
        return False

    def is_cpu(self):
        return False


@pytest.fixture
def vllm(monkeypatch):
    """vLLM in this process, up to the point where an engine would be built; it writes environment variables on the way."""
    before = dict(os.environ)
    from vllm.v1.engine.llm_engine import LLMEngine

    def stop(self, vllm_config, **options):
        raise Made(vllm_config)

    monkeypatch.setattr(LLMEngine, "__init__", stop)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


def on(monkeypatch, device):
    """Have vLLM size its batches for `device`, and nothing else of it."""
    from vllm.engine import arg_utils

    plain = arg_utils.EngineArgs.get_batch_defaults.__func__

    def defaults(cls, world_size):
        with monkeypatch.context() as patch:
            patch.setattr(arg_utils, "current_platform", device)
            return plain(cls, world_size)

    monkeypatch.setattr(arg_utils.EngineArgs, "get_batch_defaults", classmethod(defaults))


def colocated(policy, folder, options):
    """The configuration that the engine's process makes of its arguments."""
    from rlvr.rollout.vllm.process import Server

    with pytest.raises(Made) as made:
        Server(launch.engine_arguments(policy, folder, options, "shared_memory"), None)
    return made.value.args[0]


def served(policy, folder, options):
    """The configuration that vLLM's own server makes of the command line that it is started with."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    line = flags(launch.engine_arguments(policy, folder, options, "shared_memory"))
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)


@needs_vllm
@pytest.mark.parametrize(
    ("device", "tokens", "sequences"),
    [
        (Device(179 * GIB, "NVIDIA B200"), 16384, 1024),
        (Device(80 * GIB, "NVIDIA H100 80GB HBM3"), 8192, 1024),
        (Device(80 * GIB, "NVIDIA A100-SXM4-80GB"), 2048, 256),
        (Device(24 * GIB, "NVIDIA GeForce RTX 4090"), 2048, 256),
        (None, 2048, 128),
    ],
    ids=["B200", "H100", "A100", "4090", "CPU"],
)
def test_batches_are_sized_as_vllms_server_sizes_them(vllm, tmp_path, device, tokens, sequences):
    """Both engines, on a device of this size; what is set goes before it."""
    if device is not None:
        on(vllm, device)
    policy = tiny(context=32768)
    policy.describe(tmp_path)
    chosen = {"max_num_batched_tokens": tokens, "max_num_seqs": sequences}
    asked = {"max_num_batched_tokens": 7000, "max_num_seqs": 7}
    for make, options in ((colocated, VLLMOptions), (served, VLLMServerOptions)):
        for given, expected in (({}, chosen), (asked, asked)):
            batch = make(policy, tmp_path, options(max_model_len=1024, **given)).scheduler_config
            assert {name: getattr(batch, name) for name in expected} == expected


@pytest.fixture
def starts(monkeypatch):
    """A function that gives the engine arguments and the environment of a start of either engine."""

    def stop(*given):
        arguments, environment = (part for part in given if isinstance(part, dict))
        raise Started(arguments, environment)

    monkeypatch.setattr(engine, "EngineHost", stop)
    monkeypatch.setattr(server_engine, "StartedServer", stop)

    def start(policy, options):
        with pytest.raises(Started) as started:
            options.open(policy)
        return started.value.args

    return start


@needs_vllm
@pytest.mark.parametrize("options", [VLLMOptions(), VLLMServerOptions()], ids=["vllm", "vllm-server"])
def test_what_vllm_compiled_is_found_at_the_next_start(vllm, starts, options):
    """The parts of the hash by which vLLM names the folder of its compile cache (compilation/backends.py of 0.32)."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    def hashes(policy):
        arguments, environment = starts(policy, options)
        arguments.pop("data_parallel_size", None)  # of the server's command line
        config = EngineArgs(**arguments).create_engine_config()
        with vllm.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return config.model_config.compute_hash(), config.compute_hash(), envs.compile_factors()

    first = hashes(tiny(seed=0))
    assert hashes(tiny(seed=1)) == first  # other weights, of the same model
    other = hashes(tiny(layers=3))
    assert other[0] != first[0]
    assert other[1] != first[1]
    assert hashes(tiny(alphabet="abcdefghijkl 01\n?"))[0] != first[0]


def test_a_model_has_one_folder_whoever_starts_and_nothing_there_is_changed(monkeypatch, tmp_path):
    monkeypatch.setenv("RLVR_CACHE", str(tmp_path / "cache"))
    policy = tiny()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: model_folder(policy, tmp_path / str(number)), range(8)))
    (folder,) = set(found)
    assert sorted(folder.parent.iterdir()) == [folder]  # nothing is left of those that came second
    assert {"config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not list(folder.rglob("*.safetensors"))

    (folder / "config.json").write_text("{}")  # not what its name says: left alone, and not used
    second = model_folder(policy, tmp_path / "second")
    assert second.name == f"{folder.name}-2"
    assert (folder / "config.json").read_text() == "{}"
    assert model_folder(policy, tmp_path / "third") == second

    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / content_digest(second)).write_text("a file of the user's")
    assert stable_copy(second, taken).name == second.name
    assert (taken / content_digest(second)).read_text() == "a file of the user's"


def test_a_cache_that_cannot_be_written_costs_compiling_alone(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLVR_CACHE", str(tmp_path / "file"))
    scratch = tmp_path / "scratch"
    assert model_folder(tiny(), scratch) == scratch / "model"
    assert (scratch / "model" / "config.json").is_file()
    assert "set RLVR_CACHE to a folder that can be written to" in caplog.text


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"RLVR_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/rlvr"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/somebody/.cache/rlvr"),
        ({}, "/home/somebody/.cache/rlvr"),
    ],
)
def test_the_cache_is_the_users(monkeypatch, variables, folder):
    for name in ("RLVR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/somebody", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)
