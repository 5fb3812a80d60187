"""The pages for users of TRL and verl: every option of theirs has a row, and what a row names here is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlvr import registry
from rlvr.config import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
TRL = [
    "router_aux_loss_coef",
    "disable_dropout",
    "cast_lm_head_to_fp32",
    "num_generations",
    "num_generations_eval",
    "max_completion_length",
    "ds3_gather_for_generation",
    "shuffle_dataset",
    "pad_to_multiple_of",
    "generation_batch_size",
    "steps_per_generation",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "generation_kwargs",
    "chat_template_kwargs",
    "repetition_penalty",
    "cache_implementation",
    "use_vllm",
    "vllm_mode",
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_structured_outputs_regex",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "beta",
    "num_iterations",
    "epsilon",
    "delta",
    "epsilon_high",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "importance_sampling_level",
    "reward_weights",
    "multi_objective_aggregation",
    "scale_rewards",
    "loss_type",
    "mask_truncated_completions",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "max_tool_calling_iterations",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "off_policy_mask_threshold",
    "use_bias_correction_kl",
    "log_completions",
    "log_multimodal",
    "num_completions_to_print",
    "log_unique_prompts",
    "log_completions_hub_repo",
    "use_transformers_continuous_batching",
    "transformers_continuous_batching_config",
    "use_transformers_paged",
    "vllm_importance_sampling_cap",
    "model_init_kwargs",
    "trust_remote_code",
]
"""The fields of TRL 1.16's GRPOConfig that transformers.TrainingArguments does not have."""
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
LOSS_MODES = [
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "cispo",
    "dro",
    "bypass_mode",
]
"""verl's policy losses."""
ESTIMATORS = [
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
"""verl's advantage estimators."""


def table(page):
    """(left cell, right cell) of every row of the page's tables."""
    rows = [line.strip("|\n ").split("|") for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    return [(left.strip(), right.strip()) for left, right in rows if set(left) - set("- ")]


def test_every_option_of_trl_has_a_row():
    named = {name for left, _ in table("from-trl.md") for name in re.findall(r"[\w]+", left)}
    assert not set(TRL) - named
    assert all(f"`loss_type: {name}`" in [left for left, _ in table("from-trl.md")] for name in LOSS_TYPES)


def test_every_loss_and_estimator_of_verl_has_a_row():
    named = {name for left, _ in table("from-verl.md") for name in re.findall(r"[\w]+", left)}
    assert not {*LOSS_MODES, *ESTIMATORS} - named


def exists(path: str) -> bool:
    """Whether the configuration has the key."""
    at = Config
    for key in path.split("."):
        fields = getattr(at, "model_fields", None)
        if fields is None or key not in fields:
            return False
        kinds = [fields[key].annotation, *getattr(fields[key].annotation, "__args__", ())]
        at = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return True


@pytest.mark.parametrize("page", ["from-trl.md", "from-verl.md"])
def test_what_a_row_names_here_is_there(page):
    for left, right in table(page):
        for path in re.findall(r"`([a-z]+\.[a-z_.]+)", right):
            assert exists(path.rstrip(".")) or path.endswith(".*") or path in ("metrics.jsonl",), (
                f"{left}: there is no {path}"
            )
        for name in re.findall(r"preset: (\w+)`", right):
            assert name in registry.names("preset"), f"{left}: there is no preset {name}"
        for kind, name in re.findall(r"(loss|advantage|modifier|correction)`? `(\w+)`", right):
            assert name in registry.names(kind), f"{left}: there is no {kind} {name}"
        for key, name in re.findall(r"algorithm\.(\w+): \[?\{name: (\w+)", right):
            kind = {"token_select": "token_selector", "select": "selector", "modifiers": "modifier"}.get(key, key)
            assert name in registry.names(kind), f"{left}: there is no {kind} {name}"
        assert right, f"{left}: the row says nothing"
