"""How often weights that ZeRO-3 has shared out are gathered for a publish, on two real processes."""

import importlib.util

import pytest
from test_backends import ZERO, launch

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]


def test_every_rank_gathers_every_weight_once_in_each_publish(tmp_path_factory):
    """What is sent is known from shapes: a sender that made a pass to find out would wait in a gather that no other
    rank makes."""
    settings = {
        f"tied {tied}": {"run": "publishes", "backend": ZERO[3], "policy": {"tie_word_embeddings": tied}}
        for tied in (True, False)
    }
    for name, result in launch(tmp_path_factory, settings).items():
        assert ("lm_head.weight" in result["names"]) == (name == "tied False")
        once = dict.fromkeys(result["names"], 1)
        for publish, counts in result["counts"].items():
            assert counts == [once, once], (name, publish)
