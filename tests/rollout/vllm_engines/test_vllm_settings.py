"""Settings of vLLM that are decided before an engine starts, read from the configuration that vLLM itself makes of
them."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from vllm_helpers import needs_vllm, tiny

from rlvr.config.config_loading import load_config
from rlvr.config.stage_plan import stage_plans
from rlvr.errors import ConfigError
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, checks, launch, server_engine
from rlvr.rollout.vllm import embedded_engine as engine
from rlvr.rollout.vllm.started import flags
from rlvr.rollout.vllm.transfer import checksum
from rlvr.stages.grpo.build_objective import build_objective, warn_uncorrected

GIB = 1 << 30


class MadeError(Exception):
    """Carries the configuration that an engine would be built from."""


class StartedError(Exception):
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
    """vLLM in this process, up to the point where an engine would be built; it writes environment variables on the
    way."""
    before = dict(os.environ)
    from vllm.v1.engine.llm_engine import LLMEngine

    def stop(self, vllm_config, **options):
        raise MadeError(vllm_config)

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
    from rlvr.rollout.vllm.engine_process import EngineServer

    with pytest.raises(MadeError) as made:
        EngineServer(launch.engine_arguments(policy, folder, options, "shared_memory"), None)
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
        raise StartedError(arguments, environment)

    monkeypatch.setattr(engine, "EngineHost", stop)
    monkeypatch.setattr(server_engine, "StartedServer", stop)

    def start(policy, options):
        with pytest.raises(StartedError) as started:
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


@needs_vllm
def test_quantised_weights_are_not_compared_and_their_scales_not_missed(vllm):
    """Those that arrived are told from those that did not all the same."""
    from rlvr.rollout.vllm import receiver

    vllm.setattr(receiver, "get_tensor_model_parallel_world_size", lambda: 1)
    model = torch.nn.Module()
    model.o_proj = torch.nn.Module()
    for name, value in (("weight", torch.zeros(4, 4).to(torch.float8_e4m3fn)), ("weight_scale", torch.ones(4, 1))):
        model.o_proj.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    for name in ("norm", "bias"):
        model.register_parameter(name, torch.nn.Parameter(torch.ones(4)))
    engine = object.__new__(receiver.SharedMemoryEngine)
    engine.loaded = {"o_proj.weight", "norm"}
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        weight_transfer_engine=engine,
    )
    told = receiver.WorkerExtension.rlvr_weights(worker, {"o_proj.weight": [4, 4], "norm": [4]})
    assert told == {"checksums": {"o_proj.weight": None, "norm": checksum(torch.ones(4))}, "unreached": ["bias"]}


SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CUDA = torch.device("cuda", 0)


def arguments(policy, tmp_path, **options):
    return launch.engine_arguments(policy, tmp_path, VLLMOptions(**options), "shared_memory")


def on_gpu(policy, monkeypatch, capability=(9, 0)):
    """The policy as if it were computed on a GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    policy.home = CUDA
    return policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "eagle", "model": "x"}}, "only ngram is taken: a draft model would keep"),
        (
            {"speculative_config": {**SPECULATION, "rejection_sample_method": "synthetic"}},
            "has rejection_sample_method",
        ),
        ({"speculative_config": {"method": "ngram"}}, "needs num_speculative_tokens"),
        (
            {"speculative_config": {**SPECULATION, "num_speculative_tokens": 0}},
            "num_speculative_tokens 0: give a whole",
        ),
        (
            {"speculative_config": {**SPECULATION, "prompt_lookup_min": 4}},
            "a prompt_lookup_min above its prompt_lookup_max",
        ),
        (
            {"quantization": "fp8"},
            "is for policies in bfloat16 or float16, and this one is in float32: set model.dtype",
        ),
        ({"engine_args": {"quantization": "awq"}}, "may not set quantization: write it beside engine_args"),
        ({"engine_args": {"kv_cache_dtype": "fp8"}}, "may not set kv_cache_dtype"),
        ({"engine_args": {"speculative_config": {}}}, "may not set speculative_config"),
    ],
)
def test_options_that_cannot_be_right_are_refused_before_a_start(monkeypatch, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        arguments(on_gpu(tiny(), monkeypatch), tmp_path, **options)


def test_what_this_device_cannot_compute_is_refused_before_a_start(monkeypatch, tmp_path):
    policy = tiny(dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"vLLM 0\.32 samples wrong tokens with it on a CPU"):
        arguments(policy, tmp_path, speculative_config=SPECULATION)
    with pytest.raises(ConfigError, match="no kernel that quantises weights so"):
        arguments(policy, tmp_path, quantization="fp8")
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 7\.5"):
        arguments(on_gpu(policy, monkeypatch, (7, 0)), tmp_path, quantization="fp8")
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9"):
        arguments(on_gpu(policy, monkeypatch, (8, 0)), tmp_path, quantization="fp8_per_channel")


@needs_vllm
def test_vllm_takes_the_options_by_its_own_names(vllm, tmp_path):
    """Both engines: what the process is given, and the server's command line."""
    policy = tiny(dtype="bfloat16")
    policy.describe(tmp_path)
    vllm.setattr(launch, "check_speculation", lambda *_: None)  # which refuses it for a CPU
    options = {"speculative_config": SPECULATION, "quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    for make, kind in ((colocated, VLLMOptions), (served, VLLMServerOptions)):
        config = make(policy, tmp_path, kind(**options))
        assert config.model_config.quantization == "fp8_per_channel"
        assert config.cache_config.cache_dtype == "fp8"
        speculation = config.speculative_config
        assert {name: getattr(speculation, name) for name in SPECULATION} == SPECULATION
    plain = colocated(policy, tmp_path, VLLMOptions())
    assert (plain.model_config.quantization, plain.speculative_config) == (None, None)
    assert not plain.cache_config.cache_dtype.startswith("fp8")


@pytest.mark.gate
@needs_vllm
def test_the_log_probs_of_guessed_tokens_are_of_the_distribution_sampled_from(vllm):
    """vLLM's own rejection sampler: guesses that are taken, those put in the place of one that is not, and the token
    after them.

    Its kernels run on a CPU but for the one that spreads the temperatures over guesses, which is replaced.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()

    def expand(values, ends, number, replace_from=0, replace_to=0):
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        return torch.where(values == replace_from, replace_to, values).to(values.dtype).repeat_interleave(counts)

    vllm.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
    vocabulary, guesses, requests = 11, 3, 64
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(requests * (guesses + 1), vocabulary, generator=random) * 2
    temperature = 0.5 + torch.rand(requests, generator=random)
    likeliest = logits.view(requests, guesses + 1, vocabulary).argmax(-1)
    drafts = likeliest[:, :guesses].tolist()  # so that some of them are taken
    sampling = SamplingMetadata(
        temperature=temperature,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={i: torch.Generator().manual_seed(i) for i in range(requests)},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(requests),
        presence_penalties=torch.zeros(requests),
        repetition_penalties=torch.ones(requests),
        output_token_ids=[[] for _ in range(requests)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=drafts,
    )
    rows = torch.arange(requests * (guesses + 1), dtype=torch.int32).view(requests, guesses + 1)
    metadata = dataclasses.replace(  # rows of the logits: those of the guesses, and of the token after them
        SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu")),
        target_logits_indices=rows[:, :guesses].flatten(),
        bonus_logits_indices=rows[:, guesses],
        logits_indices=rows.flatten(),
    )
    made = rejection_sampler.RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))
    with torch.no_grad():
        output = made(metadata, None, logits.clone(), sampling)
    tokens, logprobs = made.parse_output(output.sampled_token_ids, vocabulary, (), output.logprobs_tensors)
    assert {len(row) for row in tokens} == {
        1,
        2,
        3,
        4,
    }  # every guess refused, up to every guess taken and a token after them
    scaled = logits.double().view(requests, guesses + 1, vocabulary) / temperature.double()[:, None, None]
    expected = scaled.log_softmax(-1)
    result = iter(logprobs.logprobs[:, 0].tolist())
    for request, row in enumerate(tokens):
        for place, token in enumerate(row):
            assert next(result) == pytest.approx(expected[request, place, token].item(), abs=1e-5)
    assert next(result, None) is None


@needs_vllm
@pytest.mark.parametrize("scheme", ["fp8_per_channel", "fp8_per_tensor"])
def test_weights_that_are_published_are_quantised_again(vllm, scheme):
    """vLLM's own layer under its layer-wise reload, as every transfer drives it: new values and new scales in the same
    memory, which CUDA graphs keep. The operator that a CPU lacks for fp8_per_tensor is replaced by its definition."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.quantization import resolve_quantization_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    def quantised(weight, scale):
        return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    vllm.setattr(fp8.ops, "scaled_fp8_quant", quantised)
    # On a CPU with AMX vLLM takes a kernel of its own, which packs the weights; a GPU keeps them as they are.
    vllm.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    vllm.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    model = SimpleNamespace(dtype=torch.bfloat16)
    config = VllmConfig()
    config.model_config = model
    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(64, 128, generator=random) * size for size in (0.05, 0.3))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            args = resolve_quantization_config(scheme, None)
            layer = ReplicatedLinear(128, 64, bias=False, quant_config=OnlineQuantizationConfig(args), disable_tp=True)
            record_metadata_for_reloading(layer)
            addresses = set()
            for number, weight in enumerate((first, second)):
                if number:
                    initialize_layerwise_reload(layer)
                layer.weight.weight_loader(layer.weight, weight.bfloat16())
                finalize_layerwise_reload(layer, model)
                held = layer.weight.float().t() * layer.weight_scale.float()
                assert layer.weight.dtype == torch.float8_e4m3fn
                largest = weight.bfloat16().float().abs().max()
                # e4m3 has 3 bits of mantissa: half a step is 1/16 of a value at most
                assert (held - weight.bfloat16().float()).abs().max() <= largest / 16 * 1.01
                addresses.add((layer.weight.data_ptr(), layer.weight_scale.data_ptr()))
            assert len(addresses) == 1
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("rollout", "algorithm", "named"),
    [
        ({"engine": {"name": "vllm", "quantization": "fp8"}}, {"correction": None}, "has quantization: fp8, so"),
        (
            {"engine": {"name": "vllm-server", "kv_cache_dtype": "fp8"}},
            {"correction": None},
            "has kv_cache_dtype: fp8, so",
        ),
        ({"engine": {"name": "vllm", "quantization": "fp8"}}, {"correction": "auto"}, None),
        ({"engine": {"name": "vllm", "quantization": "fp8"}}, {"loss": "topr", "correction": None}, None),
        ({"engine": {"name": "vllm", "speculative_config": SPECULATION}}, {"correction": None}, None),
        ({"engine": "hf"}, {"correction": None}, None),
        (
            {"engine": {"name": "vllm", "clear_cache": False}, "staleness": 2, "in_flight": "continue"},
            {"correction": None},
            "has clear_cache: false, so",
        ),
        ({"engine": {"name": "vllm", "clear_cache": False}, "staleness": 2}, {"correction": None}, None),
    ],
)
def test_a_run_says_that_nothing_corrects_for_its_engines_precision(caplog, rollout, algorithm, named):
    config = load_config({"run": {"steps": 1}, "rollout": rollout, "algorithm": algorithm})
    warn_uncorrected(config, build_objective(stage_plans(config)[0], shares_weights=False))
    assert (named in caplog.text) if named else (caplog.text == "")


@pytest.mark.parametrize(
    ("theirs", "options", "message"),
    [
        ({"quantization": "fp8_per_tensor"}, {}, "has the quantization fp8_per_tensor, rollout.engine's is None"),
        ({}, {"quantization": "fp8"}, "has the quantization None, rollout.engine's is fp8_per_tensor"),
        ({"cache_dtype": "fp8_e4m3"}, {}, "keeps keys and values in fp8_e4m3, rollout.engine's kv_cache_dtype is auto"),
        ({"cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, "keeps keys and values in bfloat16"),
        (
            {"quantization": "fp8_per_tensor", "cache_dtype": "fp8"},
            {"quantization": "fp8", "kv_cache_dtype": "fp8"},
            None,
        ),
    ],
)
def test_a_server_given_by_url_has_the_precision_that_is_written(theirs, options, message):
    policy = tiny(dtype="bfloat16")
    model = {
        "dtype": "torch.bfloat16",
        "logprobs_mode": "processed_logprobs",
        "quantization": theirs.get("quantization"),
    }
    settings = {
        "model_config": model,
        "cache_config": {"cache_dtype": theirs.get("cache_dtype", "bfloat16")},
        "weight_transfer_config": {"backend": "shared_memory"},
    }
    result = checks._differs(settings, {}, policy, VLLMServerOptions(urls=("a",), **options), "files")
    assert (message in result) if message else result is None
