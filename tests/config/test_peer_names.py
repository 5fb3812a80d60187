"""Every name of a setting in TRL and verl is answered with ours, where it is written as a key of the configuration."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from rlvr import registry
from rlvr.config import Config
from rlvr.config.config_loading import load_config
from rlvr.config.peer_names import TRL, VERL, peer_answer, unknown_leaves
from rlvr.errors import ConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs"
SECTIONS = "run|model|data|rollout|algorithm|optim|distributed|checkpoint|evaluation|logging"


def names_of(page: str) -> set[str]:
    """The names in the left column of the page's tables: `a.b` of `a.b: value`."""
    rows = [line.strip("|\n ").split("|")[0] for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    return {name.split(":")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}


def exists(path: str) -> bool:
    """Return True if the configuration has the key."""
    at = Config
    for key in path.split("."):
        fields = getattr(at, "model_fields", {})
        if key not in fields:
            return False
        kinds = [fields[key].annotation, *getattr(fields[key].annotation, "__args__", ())]
        at = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return True


def test_every_field_of_grpoconfig_and_of_its_base_is_answered():
    named = {name for name in names_of("from-trl.md") if re.fullmatch(r"\w+", name)}
    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert not {name for name in named | fields if peer_answer(name) is None} - {"model"}
    assert len(named) > 90 and len(fields) > 100


def test_every_key_of_the_tables_for_verl_is_answered():
    sections = {
        "algorithm": "algorithm",
        "actor_rollout_ref.actor": "actor_rollout_ref.actor",
        "actor_rollout_ref.rollout` and `model": "actor_rollout_ref.rollout",
        "data`, `reward` and `trainer": "",
    }
    text = (DOCS / "from-verl.md").read_text()
    unanswered = []
    for title, section in sections.items():
        table = text.split(f"## `{title}`\n")[1].split("\n## ")[0]
        cells = [line.strip("| ").split("|")[0] for line in table.splitlines() if line.startswith("| `")]
        for cell in cells:
            first, *others = re.findall(r"`([^`]+)`", cell)
            keys = [first.split(":")[0].removesuffix(".*")]
            # `adv_estimator: rloo`, `rloo_vectorized` are two values of one key; else each name is a key.
            if ": " not in first:
                keys += others
            prefix, _, _ = keys[0].rpartition(".")
            for key in keys:
                path = f"actor_rollout_ref.{key}" if key.startswith("model.") else f"{section}.{key}".strip(".")
                # `rollout_correction.rollout_is`, `rollout_is_threshold`: of the same section.
                beside = f"{section}.{prefix}.{key}".strip(".")
                if peer_answer(path) is None and peer_answer(beside) is None:
                    unanswered.append(path)
    assert not unanswered


@pytest.mark.parametrize("names", [TRL, VERL], ids=["TRL", "verl"])
def test_what_an_answer_names_is_there(names):
    for name, answer in names.items():
        if answer.startswith("no: "):
            continue
        paths = re.findall(rf"\b((?:{SECTIONS})\.[a-z_.]+)", answer)
        assert all(exists(path.rstrip(".")) for path in paths), f"{name}: {answer}"
        assert paths or re.match(r"(verifier|rewards|the sections)", answer), f"{name}: {answer} names no key"
        kinds = {"loss": "loss", "advantage": "advantage", "correction": "correction", "engine": "engine"}
        kinds |= {"optimizer": "optimizer", "plan": "plan"}
        for key, component, option in re.findall(r"\.(\w+): \[?\{name: (\w+), (\w+):", answer):
            if key in kinds and component != "vllm":
                accepted = registry.options_of(registry.find(kinds[key], component))
                assert option in accepted, f"{name}: {component} has no option {option}"


@pytest.mark.parametrize(
    ("tree", "lines"),
    [
        ({"learning_rate": 1e-5}, ["learning_rate: unknown key, a name of TRL; here it is optim.lr"]),
        (
            {"rollout": {"num_generations": 8}},
            ["rollout.num_generations: unknown key, a name of TRL; here it is rollout.group_size"],
        ),
        ({"optim": {"clip_grad": 1}}, ["optim.clip_grad: unknown key, a name of verl; here it is optim.max_grad_norm"]),
        (
            {"actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"optim": {"lr": 1e-6}}}},
            [
                "actor_rollout_ref.rollout.n: unknown key, a name of verl; here it is rollout.group_size",
                "actor_rollout_ref.actor.optim.lr: unknown key, a name of verl; here it is optim.lr",
            ],
        ),
        (
            {"trainer": {"total_epochs": 2}, "critic": {"optim": {"lr": 1e-5}}},
            [
                "trainer.total_epochs: unknown key, a name of verl; here it is run.epochs",
                "critic.optim.lr: unknown key, a name of verl, which has no equivalent key here: there is no critic",
            ],
        ),
        (
            {"trainer": {"ray_wait_register_center_timeout": 300, "critic_warmup": 0}, "ray_kwargs": {"ray_init": 1}},
            [
                "trainer.ray_wait_register_center_timeout: unknown key, of verl's section trainer, and not listed; "
                "what that section sets is here in the sections run, checkpoint, evaluation and logging",
                "trainer.critic_warmup: unknown key, a name of verl, which has no equivalent key here: there is no "
                "critic",
                "ray_kwargs.ray_init: unknown key, a name of verl, which has no equivalent key here: there is no Ray; "
                "torchrun starts the ranks",
            ],
        ),
        (
            {"reward_model": {"overlong_buffer": {"len": 4096}}},
            [
                "reward_model.overlong_buffer.len: unknown key, a name of verl; here it is rewards: [verdict, {name: "
                "soft_overlong, cache: ...}]"
            ],
        ),
        ({"rollout": {"group_sise": 8}}, ["rollout.group_sise: unknown key; did you mean 'group_size'?"]),
        (
            {"run.steps": 5},
            [
                "run.steps: unknown key; a path of keys is an override (key.path=value): in a mapping write sections "
                "inside each other"
            ],
        ),
    ],
)
def test_an_unknown_key_is_answered_with_ours(tree, lines):
    with pytest.raises(ConfigError) as raised:
        load_config(tree)
    first, *rest = str(raised.value).splitlines()
    assert first == "the configuration is wrong:"
    assert [line.strip() for line in rest] == lines


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("trainer.device", "here it is model.device"),
        ("trainer.log_val_generations", "an evaluation keeps the scores"),
        ("trainer.validation_data_dir", "an evaluation keeps the scores"),
        ("trainer.resume_from_path", "--resume PATH"),
        ("actor_rollout_ref.rollout.load_format", "the trainer's weights"),
        ("actor_rollout_ref.hybrid_engine", "rollout.engine says where"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "a copy of the weights that train"),
        ("fsdp_config.param_offload", "here it is distributed.offload: parameters"),
        ("data.truncation", "refused, or left out"),
        ("data.val_batch_size", "in blocks that fit"),
        ("data.reward_fn_key", "selects no verifier"),
        ("data.return_raw_chat", "both kept"),
        ("data.image_key", "no images"),
        ("data.filter_overlong_prompts_workers", "the ranks share"),
        ("ray_kwargs.ray_init.num_cpus", "there is no Ray"),
        ("global_profiler.global_tool_config.nsys.discrete", "is here in logging.profile"),
        ("logging_dir", "here it is logging.tensorboard: {directory: ...}"),
        ("overwrite_output_dir", "here it is run.overwrite"),
        ("ref_model", "a snapshot of the policy"),
        ("compute_metrics", "a callback is shown the results"),
        ("model_name_or_path", "here it is model.path"),
        ("dataset_name", "here it is data.train"),
        ("torch_dtype", "here it is model.dtype"),
        ("dtype", "here it is model.dtype"),
        ("attn_implementation", "here it is model.attention"),
        ("max_length", "here it is rollout.max_new_tokens for a response"),
        ("warmup_ratio", "the ratio x run.steps"),
    ],
)
def test_a_common_name_has_an_answer_of_its_own(path, part):
    assert part in peer_answer(path)


def test_an_override_of_verl_is_answered_too():
    with pytest.raises(ConfigError, match=r"data\.train_files: unknown key, a name of verl; here it is data\.train$"):
        load_config({}, ["data.train_files=x.parquet"])


def test_our_own_names_and_strangers_are_left_to_the_nearest_name():
    assert peer_answer("rollout.group_sise") is None
    assert list(unknown_leaves("whatever", {"a": {"b": 1}})) == ["whatever"]
