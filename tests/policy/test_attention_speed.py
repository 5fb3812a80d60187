"""The constants of the choice of layout: those that were measured on a GPU of this name, else the defaults."""

from __future__ import annotations

import json

import pytest
import torch

from rlvr.errors import ConfigError
from rlvr.policy import attention_speed, microbatch
from rlvr.policy.attention_speed import ELSEWHERE, SPEEDS, AttentionSpeed, read_speeds
from rlvr.policy.microbatch import speed_of


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(name)`: the speed on a GPU that CUDA gives this name."""

    def of(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return speed_of(torch.device("cuda"))

    return of


def test_a_gpu_has_what_was_measured_on_one_of_its_name_and_else_the_defaults_of_its_class(gpu, monkeypatch, tmp_path):
    file = tmp_path / "speeds.json"
    one = {"pair": 2.25, "call": 4e10, "torch": "2.13.0", "begun": None}
    file.write_text(json.dumps({"format": attention_speed.FORMAT, "gpus": {"NVIDIA H100 80GB HBM3": one}}))
    assert gpu("NVIDIA H100 80GB HBM3") == SPEEDS["H100"]
    monkeypatch.setattr(microbatch, "MEASURED", read_speeds(file))
    assert gpu("NVIDIA H100 80GB HBM3") == AttentionSpeed(2.25, 4e10)
    # Another variant of the class is another GPU.
    assert gpu("NVIDIA H100 PCIe") == SPEEDS["H100"]
    assert gpu("NVIDIA A100-SXM4-80GB") == SPEEDS["A100"]
    assert gpu("NVIDIA L4") == ELSEWHERE
    assert speed_of(torch.device("cpu")) == SPEEDS["cpu"]


def test_the_file_of_the_package_is_read_and_its_numbers_can_be_used():
    assert read_speeds(attention_speed.MEASURED_FILE) == attention_speed.MEASURED
    assert microbatch.MEASURED is attention_speed.MEASURED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": 0, "gpus": {}}', "has format 0"),
        ('{"format": 1, "gpus": {"X": {"pair": 1.0}}}', "KeyError"),
        ('{"format": 1, "gpus": {"X": {"pair": 1.0, "call": -2e9}}}', "call of X must be finite numbers above 0"),
        ('{"format": 1, "gpus": {"X": {"pair": NaN, "call": 2e9}}}', "call of X must be finite numbers above 0"),
    ],
)
def test_a_file_that_is_none_is_refused(text, reason, tmp_path):
    file = tmp_path / "speeds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_speeds(file)
