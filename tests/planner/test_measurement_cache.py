"""Measured memory of decoders that is kept between runs: what it depends on, and a cache in trouble."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlvr.config import ModelConfig
from rlvr.planner import decoder_passes, measurement_cache
from rlvr.planner.decoder_passes import DecoderSettings, Way
from rlvr.planner.measurement_cache import kept

SHAPE = (2, 2, 2)
WAY = Way(torch.float32, torch.float32, False)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("RLVR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decoder_passes, "_measured", {})
    return tmp_path / "cache" / "decoder_memory"


def small(hidden=32):
    sizes = {"hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=4, num_key_value_heads=2, **sizes))


def counted(value=7):
    calls = []

    def measure():
        calls.append(1)
        return np.asarray([[[value, 1], [2, 3]], [[4, 5], [6, value]]])

    return measure, calls


def test_another_process_measures_nothing_and_plans_the_same(cache, monkeypatch):
    settings = DecoderSettings.of(small(), ModelConfig(device="cpu"))
    first = settings.passes(WAY)
    (file,) = cache.iterdir()
    decoder_passes._measured.clear()
    monkeypatch.setattr(DecoderSettings, "_at", None)
    assert settings.passes(WAY) == first
    assert [file] == list(cache.iterdir())


def test_each_model_way_and_adapter_is_another(cache, monkeypatch):
    monkeypatch.setattr(DecoderSettings, "_at", lambda self, way, depth, tokens: (depth, tokens, 0, 0, 0, 0))
    model = small()
    settings = [
        DecoderSettings.of(model, ModelConfig(device="cpu")),
        DecoderSettings.of(small(64), ModelConfig(device="cpu")),
        DecoderSettings.of(model, ModelConfig(device="cpu", adapter={"r": 2})),
        DecoderSettings.of(model, ModelConfig(device="cpu"), given=model),
        DecoderSettings.of(model, ModelConfig(device="cpu"), given=model.requires_grad_(False)),
    ]
    for one in settings:
        one.passes(WAY)
    settings[0].passes(Way(torch.bfloat16, torch.float32, False))
    settings[0].passes(Way(torch.float32, torch.float32, True))
    assert len(list(cache.iterdir())) == 7


def test_versions_and_source_code_are_part_of_it(cache, monkeypatch):
    measure, calls = counted()
    kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    assert len(calls) == 1
    monkeypatch.setattr(transformers, "__version__", "0.1")
    kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    monkeypatch.setattr(measurement_cache, "_own_code", lambda: "changed")
    kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    monkeypatch.setattr(measurement_cache, "_digest", lambda path: "changed")
    kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    assert len(calls) == 4


def test_code_that_is_not_transformers_own_is_measured_each_time(cache):
    own = type("Qwen3ForCausalLM", (Qwen3ForCausalLM,), {"__module__": "transformers_modules.somebody.modeling"})
    measure, calls = counted()
    for _ in range(2):
        kept(own, "it", SHAPE, measure)
    assert len(calls) == 2 and not cache.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"measured": "another", "bytes": []}', '{"measured": 3}', "\xff"])
def test_a_file_that_is_broken_is_measured_again_and_replaced(cache, text):
    measure, calls = counted()
    kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(text.encode("latin-1"))
    result = kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    assert len(calls) == 2 and file.read_bytes() == good
    assert result.tolist() == measure().tolist()


def test_a_file_with_numbers_of_another_shape_is_measured_again(cache):
    measure, calls = counted()
    kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    (file,) = cache.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bytes": [[1, 2]]}))
    assert kept(Qwen3ForCausalLM, "it", SHAPE, measure).shape == SHAPE
    assert len(calls) == 2


def test_nothing_is_left_of_a_write_that_failed(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    measure, _ = counted()
    assert kept(Qwen3ForCausalLM, "it", SHAPE, measure).shape == SHAPE
    assert list(cache.iterdir()) == []


def test_how_experts_are_computed_and_flash_attention_are_part_of_it(cache, monkeypatch):
    monkeypatch.setattr(DecoderSettings, "_at", lambda self, way, depth, tokens: (depth, tokens, 0, 0, 0, 0))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8}
    for experts in ("grouped_mm", "batched_mm"):
        config = Qwen3MoeConfig(num_attention_heads=4, num_experts=4, moe_intermediate_size=16, **sizes)
        model = Qwen3MoeForCausalLM._from_config(config, experts_implementation=experts)
        settings = DecoderSettings.of(model, ModelConfig(device="cpu"))
        settings.passes(WAY)
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(measurement_cache, "version", lambda package: f"another {package}")
    decoder_passes._measured.clear()
    settings.passes(WAY)
    assert len(list(cache.iterdir())) == 3


def test_layers_that_differ_are_measured_for_themselves(cache, monkeypatch):
    monkeypatch.setattr(DecoderSettings, "_at", lambda self, way, depth, tokens: (depth, tokens, 0, 0, 0, 0))
    unlike = small()
    unlike.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 16, bias=False)
    for given in (small(), unlike):
        decoder_passes._measured.clear()
        DecoderSettings.of(small(), ModelConfig(device="cpu"), given=given).passes(WAY)
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_measuring_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLVR_CACHE", str(tmp_path / "file"))
    measure, calls = counted()
    for _ in range(2):
        kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    assert len(calls) == 2
    for name in ("HOME", "XDG_CACHE_HOME", "RLVR_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    kept(Qwen3ForCausalLM, "it", SHAPE, measure)
    assert len(calls) == 3


IDENTITY = """
from peft import LoraConfig, get_peft_model
from test_measurement_cache import small
from rlvr.config import ModelConfig
from rlvr.planner.decoder_passes import DecoderSettings
lora = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
print(DecoderSettings.of(small(), ModelConfig(device="cpu"), given=get_peft_model(small(), lora))._identity)
"""


def test_a_given_model_is_the_same_in_every_process(tmp_path):
    """Names of weights and of an adapter's layers are sets, whose order differs from process to process."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
    here = DecoderSettings.of(small(), ModelConfig(device="cpu"), given=get_peft_model(small(), lora))._identity
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", IDENTITY], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(here)
