"""The arguments of a launch: remote code is off unless it is asked for."""

import pytest
from engine_helpers import small

from rlvr.errors import ConfigError
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, launch


def test_remote_code_is_off_unless_asked_for(tmp_path):
    policy = small()
    for options in (VLLMOptions(), VLLMServerOptions()):
        assert launch.engine_arguments(policy, tmp_path, options, "shared_memory")["trust_remote_code"] is False
    asked = VLLMOptions(trust_remote_code=True)
    assert launch.engine_arguments(policy, tmp_path, asked, "shared_memory")["trust_remote_code"] is True
    with pytest.raises(ConfigError, match="trust_remote_code"):
        launch.engine_arguments(policy, tmp_path, VLLMOptions(engine_args={"trust_remote_code": True}), "shared_memory")
