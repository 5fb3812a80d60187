"""Configuration keys that have another name now are read for one version, with a notice."""

from __future__ import annotations

import warnings

import pytest

from rlvr.config.config_loading import load_config
from rlvr.config.renamed_keys import with_new_names
from rlvr.config.stage_plan import stage_plans
from rlvr.errors import ConfigError


def test_an_old_key_is_read_with_a_notice():
    with pytest.warns(FutureWarning, match=r"rollout\.refill is now rollout\.dynamic_sampling"):
        config = load_config({"rollout": {"refill": {"attempts": 3}}, "distributed": {"heartbeat_timeout": 5.0}})
    assert config.rollout.dynamic_sampling.attempts == 3
    with pytest.warns(FutureWarning, match=r"distributed\.silence is now distributed\.heartbeat_timeout"):
        assert load_config({}, ["distributed.silence=7"]).distributed.heartbeat_timeout == 7
    with pytest.warns(FutureWarning, match="stall_timeout"):
        engine = load_config({"rollout": {"engine": {"name": "vllm-server", "silence": 3.0}}}).rollout.engine
    assert engine.options == {"stall_timeout": 3.0}


def test_so_is_one_of_a_stage():
    with pytest.warns(FutureWarning, match="rollout.refill"):
        config = load_config({"stages": [{"kind": "grpo", "steps": 1, "rollout": {"refill": {"attempts": 3}}}]})
    assert stage_plans(config)[0].config.rollout.dynamic_sampling.attempts == 3


def test_new_keys_give_no_notice_and_nothing_else_changes():
    tree = {
        "rollout": {"dynamic_sampling": None, "engine": "hf"},
        "stages": [{"kind": "sft"}],
        "run": {"name": "refill"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_new_names(tree) == tree


def test_a_key_under_both_names_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.refill is now rollout\.dynamic_sampling, and both are given"):
        load_config({"rollout": {"refill": None, "dynamic_sampling": {"attempts": 2}}})
