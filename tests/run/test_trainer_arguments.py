"""The arguments of GRPOTrainer: lists of rewards with weights, TRL's names, and settings that are given twice."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig
from plain_rewards import brief, correct

from rlvr import Config, GRPOTrainer, Verdict, Verifier
from rlvr.config import OptimConfig
from rlvr.config.config_loading import load_config
from rlvr.errors import ConfigError, DataError
from rlvr.run.trainer_arguments import KEYS, OTHER_NAMES, TrainerSettings, trainer_arguments
from small_run import TREE, lines, overlaid, task_rows

OWN = dict.fromkeys(("model", "tasks", "verifier", "config", "eval_tasks", "tokenizer"))
STEPS = {"run": {"steps": 1}}


class HasDigit(Verifier):
    def verify(self, task, completion):
        return Verdict.from_score(any(character.isdigit() for character in completion))


def arguments(**given):
    own = {name: given.pop(name) for name in list(given) if name in OWN}
    return trainer_arguments({**OWN, **own}, given)


def test_the_functions_of_a_list_are_summed_with_their_weights(tmp_path):
    tree = overlaid(TREE, {"run": {"dir": str(tmp_path), "name": "r", "steps": 1}})
    rewards = [correct, (brief, 0.25), (HasDigit(), -2)]
    with GRPOTrainer(None, train_dataset=task_rows(), reward_funcs=rewards, args=tree) as trainer:
        trainer.train()
        columns = trainer.batch.columns
        expected = torch.tensor(
            [
                (r.task.answer in r.text) + 0.25 * (len(r.text) <= 3) - 2 * any(c.isdigit() for c in r.text)
                for r in trainer.batch.rollouts
            ],
            dtype=torch.float64,
        )
        assert torch.equal(torch.as_tensor(columns["reward"]), expected)
        assert len(set(expected.tolist())) > 1
        assert {"reward/correct", "reward/brief", "reward/HasDigit"} <= columns.keys()
    (row,) = lines(tmp_path / "r" / "metrics.jsonl")
    assert row["reward/brief"] == pytest.approx(float(columns["reward/brief"].mean()))
    written = yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())
    assert written["verifier"].endswith("plain_rewards.py:correct")
    assert written["verifiers"]["brief"].endswith("plain_rewards.py:brief")
    assert written["verifiers"]["HasDigit"].endswith("test_trainer_arguments.py:HasDigit")
    assert [term["weight"] for term in written["rewards"]] == [1.0, 0.25, -2.0]


def test_one_function_a_pair_and_a_list_of_one_are_the_same_reward():
    alone = arguments(verifier=correct, config=STEPS)
    assert alone.verifier is correct
    assert arguments(verifier=[correct], config=STEPS).config == alone.config
    pair = arguments(reward_funcs=(correct, 0.5), config=STEPS)
    assert pair.verifier is correct
    assert pair.config.rewards[0].weight == 0.5
    assert pair == arguments(reward_funcs=[correct], reward_weights=[0.5], config=STEPS)
    assert pair == arguments(reward_funcs=[(correct, np.float32(0.5))], config=STEPS)
    named = arguments(verifier=["math", ("exact", 0.1), lambda completion: 1.0, lambda completion: 0.0], config=STEPS)
    assert named.verifier == "math"
    assert list(named.config.verifiers) == ["exact", "lambda", "lambda_2"]
    assert named.config.verifiers["exact"].written == "exact"
    assert list(named.verifiers) == ["lambda", "lambda_2"]


def test_vllm_is_chosen_by_true_or_false():
    assert arguments(use_vllm=True, config=STEPS).config.rollout.engine.name == "vllm"
    with pytest.raises(ConfigError, match="use_vllm is 'no': give True or False"):
        arguments(use_vllm="no", config=STEPS)


def test_a_closed_trainer_does_not_train(tmp_path):
    tree = overlaid(TREE, {"run": {"dir": str(tmp_path), "name": "r", "steps": 1}})
    with GRPOTrainer(None, task_rows(), correct, tree) as trainer:
        pass
    with pytest.raises(ConfigError, match="the trainer is closed: make another one"):
        trainer.train()
    assert not (tmp_path / "r").exists()


def test_a_mapping_of_data_sets_is_refused_in_one_short_line():
    tree = overlaid(TREE, {"run": {"steps": 1}})
    with pytest.raises(
        DataError,
        match=r"^evaluation tasks: a mapping of several data sets \('a', ...\) is not taken: give one of them$",
    ):
        GRPOTrainer(None, task_rows(), correct, tree, eval_dataset={"a": task_rows()})


def test_a_mapping_in_a_list_may_have_its_weight_as_a_reward_term_has():
    written = {"name": "format", "weight": 0.2}
    made = arguments(verifier=[correct, written], config=STEPS)
    assert made == arguments(verifier=[correct, ({"name": "format"}, 0.2)], config=STEPS)
    assert [term.weight for term in made.config.rewards] == [1.0, 0.2]
    assert made.config.verifiers["format"].written == "format"
    assert written == {"name": "format", "weight": 0.2}


@pytest.mark.parametrize(
    ("rewards", "weights", "problem"),
    [
        ([(correct, "0.2")], None, r"the weight of reward 1 \(correct\) is '0.2': give a finite number"),
        ([correct, (brief, None)], None, r"the weight of reward 2 \(brief\) is None"),
        ([(correct, float("nan"))], None, "is nan"),
        ([(correct, True)], None, "is True"),
        ([(correct, 1, 2)], None, "reward 1 is 3 values"),
        ([[correct, brief]], None, r"reward 1 is a pair without a weight: give \(function, weight\)"),
        ([correct, (0.2, brief)], None, "reward 2 is a pair without a weight"),
        ([correct, brief], [0, 0.0], "the weight of every reward is 0"),
        ([correct, 3], None, "reward 2 is int"),
        ([], None, "the list of rewards is empty"),
        ([correct, {"name": "format", "weight": "0.2"}], None, r"the weight of reward 2 \(format\) is '0.2'"),
        ([correct, {"name": "format", "weight": 0.2}], [1.0, 1.0], "in reward_weights and beside a function"),
        ([correct, brief], [1.0], "give a list of 2 numbers"),
        ([correct, brief], 0.5, "give a list of 2 numbers"),
        ([(correct, 1.0), brief], [1.0, 1.0], "in reward_weights and beside a function"),
        (correct, [1.0], "reward_weights are the weights of a list"),
        ([torch.nn.Linear(1, 1)], None, "is a reward model"),
    ],
)
def test_rewards_that_cannot_be_summed_are_refused_in_one_line(rewards, weights, problem):
    more = {} if weights is None else {"reward_weights": weights}
    with pytest.raises(ConfigError, match=problem) as raised:
        arguments(reward_funcs=rewards, config=STEPS, **more)
    assert "\n" not in str(raised.value)


def test_a_list_of_rewards_and_rewards_of_the_configuration_are_refused():
    for key, value in {"rewards": ["length"], "verifiers": {"judge": "exact"}}.items():
        with pytest.raises(ConfigError, match=f"reward_funcs is a list of rewards, and the configuration sets {key}"):
            arguments(reward_funcs=[correct, brief], config={**STEPS, key: value})
    stages = [{"kind": "grpo", "rewards": ["length"]}]
    with pytest.raises(ConfigError, match=r"the configuration sets stages\[0\]\.rewards: leave one of them out"):
        arguments(reward_funcs=[correct, brief], config={**STEPS, "stages": stages})


def values() -> dict:
    """A value of every keyword that sets one key, other than the default."""
    return {
        "run_name": "mine",
        "seed": 3,
        "max_steps": 7,
        "num_train_epochs": 2.0,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "max_grad_norm": 0.5,
        "num_iterations": 3,
        "prompts_per_step": 5,
        "num_generations": 6,
        "max_completion_length": 77,
        "temperature": 0.7,
        "loss_type": "dr_grpo",
        "beta": 0.04,
        "gradient_checkpointing": True,
        "eval_steps": 8,
        "save_steps": 9,
        "save_total_limit": 3,
    }


def at(config: Config, path: str):
    for part in path.split("."):
        config = getattr(config, part)
    return config


def test_every_keyword_is_typed_and_sets_its_key():
    special = {*OTHER_NAMES, "reward_weights", "peft_config", "output_dir", "use_vllm"}
    assert set(TrainerSettings.__annotations__) == set(KEYS) | special
    assert set(values()) == set(KEYS)
    for keyword, value in values().items():
        more = {} if keyword in ("max_steps", "num_train_epochs") else {"max_steps": 1}
        config = arguments(**{keyword: value}, **more).config
        assert at(config, KEYS[keyword]) == value, keyword
        assert at(Config(), KEYS[keyword].partition(".kl")[0]) != at(config, KEYS[keyword].partition(".kl")[0])


def test_values_by_which_trl_says_nothing_are_not_given():
    made = arguments(max_steps=-1, run_name=None, eval_steps=None, num_train_epochs=2.0).config
    assert (made.run.epochs, made.run.steps) == (2.0, Config().run.steps)
    assert (made.run.name, made.evaluation.every) == (Config().run.name, Config().evaluation.every)
    assert arguments(max_steps=-1, config={"run": {"steps": 5}}).config.run.steps == 5
    with pytest.raises(ConfigError, match=r"run\.steps"):
        arguments(max_steps=-2)


@pytest.mark.parametrize("keyword", sorted(set(values()) - {"num_train_epochs"}))
def test_a_setting_as_keyword_and_in_the_configuration_is_one_clear_error(keyword, tmp_path):
    path = KEYS[keyword]
    tree = values()[keyword]
    for part in reversed(path.split(".")):
        tree = {part: tree}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    for config in (tree, file, Config(**tree)):
        with pytest.raises(ConfigError) as raised:
            arguments(**{keyword: values()[keyword]}, config=config)
        problem, _, advice = str(raised.value).partition(", or config=")
        assert problem == (f"GRPOTrainer: {keyword} is also set in the configuration, as {path}: leave one of them out")
        assert bool(advice) == (config is file)


def test_the_advice_about_a_file_can_be_followed(tmp_path):
    file = tmp_path / "run.yaml"
    stages = [{"kind": "sft", "steps": 1}, {"kind": "grpo", "steps": 9, "optim": {"max_grad_norm": 0.5}}]
    tree = {
        "optim": {"lr": 1e-5},
        "algorithm": {"preset": "dr_grpo"},
        "rollout": {"engine": "hf"},
        "run": {"dir": "here", "name": "there"},
        "model": {"adapter": {"r": 2}},
        "stages": stages,
    }
    file.write_text(yaml.safe_dump(tree))
    given = {
        "learning_rate": (1e-6, {"optim.lr": 1e-6}),
        "loss_type": ("dapo", {"algorithm.preset": "dapo"}),
        "output_dir": ("runs/sums", {"run.dir": "runs", "run.name": "sums"}),
        "peft_config": ({"r": 4, "alpha": 8}, {"model.adapter.r": 4, "model.adapter.alpha": 8}),
        "use_vllm": (False, {"rollout.engine.name": "hf"}),
    }
    for keyword, (value, expected) in given.items():
        with pytest.raises(ConfigError) as raised:
            arguments(**{keyword: value}, config=file)
        advised = eval(
            str(raised.value).partition("leave one of them out, or config=")[2], {"load_config": load_config}
        )
        assert {path: at(arguments(config=advised).config, path) for path in expected} == expected
    with pytest.raises(ConfigError, match=re.escape('["stages.1.optim.max_grad_norm=0.25"]')) as raised:
        arguments(max_grad_norm=0.25, config=str(file))
    advised = eval(str(raised.value).partition("or config=")[2], {"load_config": load_config})
    assert advised.stages[1]["optim"]["max_grad_norm"] == 0.25
    with pytest.raises(ConfigError, match=re.escape('or config=load_config("psr", ["optim.lr=1e-06"])')):
        arguments(learning_rate=1e-6, config="psr")


def test_a_keyword_that_a_stage_would_overrule_is_refused(tmp_path):
    stages = [{"kind": "sft", "steps": 1}, {"kind": "grpo", "steps": 60, "optim": {"lr": 2e-3}}]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"stages": stages}))
    for config in ({"stages": stages}, file, Config(stages=stages)):
        with pytest.raises(
            ConfigError, match=r"^GRPOTrainer: learning_rate is also set .* as stages\[1\]\.optim\.lr: .*$"
        ):
            arguments(learning_rate=1e-6, config=config)
        # A stage's `steps` is its share, run.steps a cap, and another key of the same section is the keyword's.
        made = arguments(max_steps=5, warmup_steps=3, config=config).config
        assert (made.run.steps, made.optim.warmup_steps) == (5, 3)
    # A section that the stage switches off.
    without = {"stages": [{"kind": "grpo", "steps": 1, "algorithm": {"kl": None}}]}
    with pytest.raises(
        ConfigError, match=r"beta is also set in the configuration, as stages\[0\]\.algorithm\.kl\.coef"
    ):
        arguments(beta=0.04, config=without)


def test_keywords_go_over_a_config_object_a_file_and_its_preset(tmp_path):
    config = Config(optim=OptimConfig(lr=3e-4), algorithm={"preset": "dapo"})
    made = arguments(config=config, max_steps=2, num_generations=4).config
    assert (made.optim.lr, made.run.steps, made.rollout.group_size) == (3e-4, 2, 4)
    assert made.algorithm == config.algorithm
    made = arguments(config=Config(optim=OptimConfig(lr=3e-4)), max_steps=2, loss_type="dr_grpo").config
    assert made.algorithm == Config(algorithm={"preset": "dr_grpo"}).algorithm
    folder = arguments(output_dir=tmp_path / "out" / "first", max_steps=1).config
    assert folder.folder == tmp_path / "out" / "first"
    with pytest.raises(ConfigError, match=r"run_name and output_dir both set run\.name: leave one out"):
        arguments(run_name="a", output_dir="b", max_steps=1)


@pytest.mark.parametrize("folder", [".", "", "..", "runs/..", "/", "~", Path(".."), 3, b"runs/sums", True])
def test_an_output_dir_that_is_no_run_folder_is_refused_by_its_name(folder):
    shown = repr(str(folder) if isinstance(folder, Path) else folder)
    with pytest.raises(ConfigError) as raised:
        arguments(output_dir=folder, config=STEPS)
    assert str(raised.value) == f"GRPOTrainer: output_dir is {shown}: give the folder of the run, such as runs/sums"


def test_an_output_dir_of_none_is_not_given():
    assert arguments(output_dir=None, run_name="mine", config=STEPS).config.run.name == "mine"
    assert arguments(output_dir=None, config=STEPS).config == arguments(config=STEPS).config


def test_an_adapter_is_taken_from_peft_and_from_a_mapping():
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["v_proj", "q_proj"])
    made = arguments(peft_config=config, max_steps=1).config.model.adapter
    assert (made.r, made.alpha, made.dropout, made.target_modules) == (4, 8.0, 0.1, ["q_proj", "v_proj"])
    assert arguments(peft_config={"r": 4}, max_steps=1).config.model.adapter.r == 4
    with pytest.raises(ConfigError, match="peft_config is object"):
        arguments(peft_config=object(), max_steps=1)


def test_two_names_of_one_argument_are_refused():
    for other, name in OTHER_NAMES.items():
        with pytest.raises(ConfigError, match=f"{other} is TRL's name of {name}, and both are given"):
            arguments(**{name: "x", other: "x"})


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("weight_decay", r"here it is optim\.optimizer: \{name: adamw, weight_decay: \.\.\.\}, in `config`"),
        ("reward_processing_classes", "reward models run behind a server"),
        (
            "steps_per_generation",
            r"optim\.updates_per_batch = steps_per_generation / gradient_accumulation_steps, in `config`",
        ),
        ("per_device_train_batch_size", r"rollout\.prompts_per_step, in prompts where TRL counts completions"),
        ("environment_factory", r"here it is rollout\.plan"),
        ("push_to_hub", r"call trainer\.push_to_hub"),
        ("learning_rat", "did you mean 'learning_rate'"),
        ("callback", "did you mean 'callbacks'"),
    ],
)
def test_an_unknown_argument_is_answered(name, answer):
    with pytest.raises(ConfigError, match=f"GRPOTrainer has no argument '{name}'.*{answer}"):
        arguments(**{name: 1})


@dataclasses.dataclass
class GRPOConfig:
    """The form of TRL's, which need not be installed."""

    output_dir: str = "out"
    learning_rate: float = 1e-6
    num_generations: int = 8
    bf16: bool = False
    report_to: list = dataclasses.field(default_factory=list)


def test_a_config_of_trl_is_answered_with_what_it_sets():
    config = GRPOConfig(learning_rate=1e-5, bf16=True)
    with pytest.raises(ConfigError) as raised:
        arguments(args=config)
    first, *rest = str(raised.value).splitlines()
    assert "a GRPOConfig of another library" in first
    assert rest == [
        "  learning_rate=1e-05: a keyword of GRPOTrainer",
        "  bf16=True: a name of TRL; here it is model.dtype",
    ]
    with pytest.raises(ConfigError, match=re.escape("a rlvr.Config, a mapping or a file, not int")):
        arguments(config=3)
