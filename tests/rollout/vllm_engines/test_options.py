"""Options of the vLLM engines that need no vLLM: adapters, and servers by number or address."""

import pytest
from engine_helpers import small

from rlvr.errors import ConfigError
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, launch


def test_an_adapter_goes_by_itself_unless_it_is_to_be_merged(tmp_path):
    policy = small(adapter={"r": 4})
    alone = launch.engine_arguments(policy, tmp_path, VLLMOptions(), "shared_memory")
    assert (alone["enable_lora"], alone["max_lora_rank"]) == (True, 8)
    merged = launch.engine_arguments(policy, tmp_path, VLLMOptions(merge_adapter=True), "shared_memory")
    assert "enable_lora" not in merged
    assert "enable_lora" not in launch.engine_arguments(small(), tmp_path, VLLMOptions(), "shared_memory")


def test_servers_need_a_number_or_addresses():
    with pytest.raises(ConfigError, match="start at least one server"):
        VLLMServerOptions(servers=0).open(small())
