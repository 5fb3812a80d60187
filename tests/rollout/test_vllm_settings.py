"""Settings of vLLM that are decided before an engine starts, read from the configuration that vLLM itself makes of them."""

import os

import pytest
from vllm_helpers import needs_vllm, tiny

from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, launch
from rlvr.rollout.vllm.started import flags

pytestmark = needs_vllm
GIB = 1 << 30


class Made(Exception):
    """Carries the configuration that an engine would be built from."""


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
