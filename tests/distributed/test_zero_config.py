"""DeepSpeed's configuration: what we decide, what a user's file may add, and what it must not say otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlvr.config import ComponentSpec, Config, DistributedConfig
from rlvr.distributed import World, world
from rlvr.distributed.deepspeed import DeepSpeedBackend, DeepSpeedOptions
from rlvr.distributed.zero_config import zero_config
from rlvr.errors import ConfigError

SHIPPED = sorted(Path("configs/deepspeed").glob("*.json"))


@pytest.fixture
def written(tmp_path):
    def write(**content):
        (tmp_path / "zero.json").write_text(json.dumps(content))
        return str(tmp_path / "zero.json")

    return write


def test_a_file_adds_what_we_do_not_decide(written):
    file = written(
        train_batch_size="auto",
        gradient_accumulation_steps="auto",
        bf16={"enabled": "auto"},
        fp16={"enabled": False},
        zero_optimization={
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "stage3_prefetch_bucket_size": 7,
            "reduce_bucket_size": "auto",
        },
        comms_logger={"enabled": True},
    )
    got = zero_config(3, "optimizer", True, 4, file)
    assert got["train_batch_size"] == 4
    assert got["bf16"] == {"enabled": True}
    assert got["comms_logger"] == {"enabled": True}
    zero = got["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 7
    assert zero["stage3_param_persistence_threshold"] == 10_000  # ours, where the file says nothing
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "auto" not in json.dumps(got)
    assert zero.get("offload_param") is None


def test_every_contradiction_is_named(written):
    file = written(
        train_micro_batch_size_per_gpu=8,
        gradient_clipping=0.5,
        optimizer={"type": "AdamW"},
        fp16={"enabled": True},
        prescale_gradients=True,
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}},
        bf16={"enabled": True},
    )
    with pytest.raises(ConfigError) as refused:
        zero_config(3, "optimizer", False, 2, file)
    output = str(refused.value)
    for name in (
        "`train_micro_batch_size_per_gpu` has no place in it",
        "`gradient_clipping` has no place in it (it is `optim.max_grad_norm`)",
        "`optimizer` has no place in it",
        "`fp16` has no place in it",
        "`prescale_gradients` is true there and false here",
        "`zero_optimization.stage` is 2 there and 3 here",
        '`zero_optimization.offload_optimizer.device` is "nvme" there and "cpu" here',
        "`zero_optimization.offload_param` is",
        "`bf16.enabled` is true there and false here",
    ):
        assert name in output, name


@pytest.mark.parametrize(
    ("content", "what"), [("[1]", "a JSON object"), ("{", "is not JSON"), (None, "cannot be read")]
)
def test_a_file_that_is_none_is_refused(tmp_path, content, what):
    if content is not None:
        (tmp_path / "zero.json").write_text(content)
    with pytest.raises(ConfigError, match=what):
        zero_config(2, "none", False, 1, str(tmp_path / "zero.json"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_files_go_with_the_settings_that_they_are_for(file):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    stage = json.loads(file.read_text())["zero_optimization"]["stage"]
    offload = "parameters" if "offload" in file.stem else "none"
    got = zero_config(stage, offload, True, 8, str(file))
    assert DeepSpeedZeroConfig(**got["zero_optimization"]).stage == stage  # DeepSpeed's own check refuses unknown keys


@pytest.mark.parametrize("file", sorted(Path("configs/accelerate").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_launches_are_accelerates(file):
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(str(file))
    assert config.num_processes >= 2
    assert set(yaml.safe_load(file.read_text())) <= set(ClusterConfig.__dataclass_fields__)
    assert config.mixed_precision == "no"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"zero_stage": 3}, "`zero_stage` needs `backend: deepspeed`"),
        ({"offload": "optimizer"}, "`offload` needs `backend: deepspeed`"),
        ({"deepspeed": "x.json"}, "`deepspeed` needs `backend: deepspeed`"),
        ({"backend": "deepspeed", "zero_stage": 2, "offload": "parameters"}, "needs `zero_stage: 3`"),
        ({"backend": "deepspeed", "zero_stage": 4}, "Input should be 1, 2 or 3"),
        (
            {"backend": "deepspeed", "offload": "optimizer", "offload_during_rollout": True},
            "`offload: optimizer` keeps in host memory all the time .*: set one of them",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        DistributedConfig(**options)


def test_the_section_gives_the_backend_its_options():
    assert Config().distributed.backend_spec == ComponentSpec("plain")
    section = DistributedConfig(backend="deepspeed", zero_stage=3, offload="parameters", deepspeed="x.json")
    assert section.backend_spec.written == {
        "name": "deepspeed",
        "zero_stage": 3,
        "offload": "parameters",
        "deepspeed": "x.json",
    }
    assert DistributedConfig(backend={"name": "deepspeed", "zero_stage": 1}).backend_spec.options["zero_stage"] == 1
    assert DistributedConfig(offload_during_rollout=True).backend_spec.written == {
        "name": "plain",
        "offload_during_rollout": True,
    }
    assert DistributedConfig(backend={"name": "plain", "offload_during_rollout": True}).offloads_during_rollout
    assert not Config().distributed.offloads_during_rollout


def test_what_zero_cannot_hold_is_refused(policy):
    with pytest.raises(ConfigError, match="adamw_8bit does not go with"):
        DeepSpeedBackend(policy, "adamw_8bit")
    with pytest.raises(ConfigError, match="needs zero_stage 3"):
        DeepSpeedBackend(policy, options=DeepSpeedOptions(zero_stage=2, offload="parameters"))
    with pytest.raises(
        ConfigError, match=r"offload optimizer .* distributed.offload_during_rollout .*: set one of them"
    ):
        DeepSpeedBackend(policy, options=DeepSpeedOptions(offload="optimizer", offload_during_rollout=True))


def test_different_versions_on_ranks_are_refused_by_name():
    class Two(World):
        def gather(self, value, what, deadline=1.0):
            return [value, value | {"torch": "1.0", "deepspeed": "none"}, value]

    world.check_versions(World())
    with pytest.raises(ConfigError) as refused:
        world.check_versions(Two(0, 3))
    here = world.installed(world.PACKAGES)
    assert f"torch is {here['torch']} on rank 0 2, 1.0 on rank 1" in str(refused.value)
    assert f"deepspeed is {here['deepspeed']} on rank 0 2, none on rank 1" in str(refused.value)
    assert "transformers" not in str(refused.value)
