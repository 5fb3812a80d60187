"""The engine that `rollout.engine: auto` takes, and the reason that is printed."""

from __future__ import annotations

import pytest
import torch

from rlvr.config import Config
from rlvr.errors import ConfigError
from rlvr.planner import engine_of_run
from rlvr.planner.run_plan import with_engine
from rlvr.rollout.vllm import installed

AUTO = Config(rollout={"engine": "auto"})


@pytest.mark.parametrize(
    ("on_gpu", "here", "version", "for_cpu", "engine", "reason"),
    [
        (False, True, "0.32.0", False, "hf", "computed on a CPU"),
        (True, True, "0.32.0", False, "vllm", "vLLM 0.32.0 is installed"),
        (True, True, "0.31.0", False, "hf", "works with 0.32 up to"),
        (True, True, "0.32.0+cpu", True, "hf", "built for a CPU"),
        (True, True, None, False, "hf", "vLLM"),
        (True, False, None, False, "vllm", "beside these GPUs"),
    ],
)
def test_vllm_is_taken_on_a_gpu_where_it_can_be(monkeypatch, on_gpu, here, version, for_cpu, engine, reason):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(installed, "_found", lambda: version)
    monkeypatch.setattr(installed, "for_cpu", lambda: for_cpu)
    config, output = with_engine(AUTO, on_gpu, here)
    assert config.rollout.engine.name == engine
    assert output.startswith(f"rollout.engine: auto takes {engine}: ")
    assert reason in output
    assert AUTO.rollout.engine.name == "auto"


def test_an_engine_that_is_written_stays():
    for written in ("hf", {"name": "vllm", "sleep": False}):
        config = Config(rollout={"engine": written})
        assert with_engine(config, True) == (config, None)


def test_the_engine_of_a_checkpoint_stays():
    for saved in ("hf", {"name": "vllm", "sleep": False}):
        config, output = with_engine(AUTO, True, saved=saved)
        assert config.rollout.engine.written == saved
        assert "the checkpoint was made with it" in output


def test_all_ranks_take_the_engine_of_rank_0(monkeypatch):
    """Whatever is installed beside the others."""

    class Rank:
        def __init__(self, is_main, box):
            self.is_main = is_main
            self.box = box

        def broadcast(self, value, what):
            self.box.setdefault(what, value)
            return self.box[what]

    def missing():
        raise ConfigError("vLLM is missing")

    monkeypatch.setattr("rlvr.planner.run_plan.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(installed, "for_cpu", lambda: False)
    versions = {True: lambda: "0.32.0", False: missing}
    for rank_0_has_it, engine in ((True, "vllm"), (False, "hf")):
        box = {}
        result = []
        for is_main in (True, False):
            monkeypatch.setattr(installed, "version", versions[is_main is rank_0_has_it])
            result.append(engine_of_run(AUTO, Rank(is_main, box)))
        assert result[0] == result[1]
        assert result[0][0].rollout.engine.name == engine
