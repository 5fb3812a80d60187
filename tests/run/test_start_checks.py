"""Settings, tasks and models that cannot be run are refused, or announced as they are, before the first step."""

from __future__ import annotations

import math
import threading

import numpy as np
import peft
import pytest
import torch

from rlvr import registry
from rlvr import trainer as trainer_module
from rlvr.config import ModelConfig
from rlvr.config.config_loading import load_config
from rlvr.distributed.engine_router import open_engine
from rlvr.errors import ConfigError, DataError, RlvrError
from rlvr.evaluate import main as evaluate
from rlvr.policy import given_policy
from rlvr.run import rollout_runtime
from small_run import LOG_RATIO_LOSSES, task_rows

SHORT = """
from dataclasses import dataclass
from rlvr.rollout import HFEngine

class ShortEngine(HFEngine):
    def __init__(self, policy, in_flight):
        super().__init__(policy, None, in_flight)
        self.context = 8

@dataclass(frozen=True)
class Short:
    per_rank: bool = True

    def open(self, policy, in_flight=None):
        return ShortEngine(policy, in_flight)
"""
LONG = {"id": "long", "prompt": "12345678=?", "answer": "1"}  # 10 tokens: fits the model's 64, not the engine's 8


@pytest.fixture
def short(tmp_path):
    """An engine whose context is shorter than the model's, as vLLM's `max_model_len` makes it."""
    (tmp_path / "short.py").write_text(SHORT)
    return f"{tmp_path / 'short.py'}:Short"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"eval_tasks": [{"question": 3}]}, "question"),
        ({"tasks": [{"question": 3}]}, "question"),
        ({"verifier": 3}, "verifier"),
    ],
    ids=["evaluation tasks", "tasks", "verifier"],
)
def test_a_trainer_that_is_refused_leaves_no_thread(make_trainer, parts, message):
    before = set(threading.enumerate())
    with pytest.raises(RlvrError, match=message):
        make_trainer(**parts)
    assert not [thread.name for thread in threading.enumerate() if thread not in before]


def test_a_trainer_whose_engine_is_refused_leaves_no_thread(make_trainer, monkeypatch):
    def refused(*_):
        raise ConfigError("the engine cannot be had")

    monkeypatch.setattr(rollout_runtime, "open_engine", refused)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="the engine cannot be had"):
        make_trainer()
    assert not [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("loss", LOG_RATIO_LOSSES)
def test_a_loss_of_the_log_ratio_needs_a_second_step(make_trainer, loss):
    algorithm = {"loss": loss, "advantage": {"name": "group", "baseline": "none", "scale": "none"}}
    with pytest.raises(ConfigError, match=f"the loss '{loss}' is of the log-ratio .*updates_per_batch to 2 or more"):
        make_trainer({"algorithm": algorithm})
    make_trainer({"algorithm": algorithm, "optim": {"updates_per_batch": 2}}, "updates")
    make_trainer({"algorithm": algorithm, "optim": {"epochs_per_batch": 2}}, "epochs")
    # The first optimizer step has a ratio of 1, however old the rollouts are.
    with pytest.raises(ConfigError, match="is of the log-ratio"):
        make_trainer({"algorithm": algorithm, "rollout": {"staleness": 1}}, "older")


def test_a_context_that_no_response_fits_into_is_refused(make_trainer, capsys):
    """Prompts of 3 tokens ("1+1") in a context of 64."""
    plain = {"logging": {"console": "plain"}}
    with pytest.raises(ConfigError) as refused:
        make_trainer({"rollout": {"max_new_tokens": 62}} | plain)
    assert str(refused.value) == (
        "stage 'grpo': rollout.max_new_tokens is 62, and a context of 64 tokens (the smaller one of the model's and "
        "the engine's) leaves at most 61 after the shortest prompt: set rollout.max_new_tokens to 61 or less, give the "
        "model a longer context (model.override_config), or accept it (rollout.accept_short_context=true)"
    )
    # What it says to do.
    make_trainer({"rollout": {"max_new_tokens": 61}} | plain, "enough")
    assert "leaves fewer" not in capsys.readouterr().out
    make_trainer({"rollout": {"max_new_tokens": 62, "accept_short_context": True}} | plain, "accepted")
    lines = " ".join(capsys.readouterr().out.split())
    assert "a context of 64 tokens leaves fewer than rollout.max_new_tokens=62 for responses to" in lines
    assert "at most after 61 tokens: set it lower, or give the model a longer context (model.override_config)" in lines


def test_a_context_that_cuts_some_responses_is_said_at_the_start(make_trainer, capsys):
    rows = [*task_rows(3), LONG]
    make_trainer({"rollout": {"max_new_tokens": 60}, "logging": {"console": "plain"}}, tasks=rows)
    lines = " ".join(capsys.readouterr().out.split())
    assert "leaves fewer than rollout.max_new_tokens=60 for responses to 1 of 4 tasks" in lines


def test_prompts_are_held_to_the_engines_context(make_trainer, short, tmp_path, capsys, make_policy):
    rollout = {"rollout": {"engine": short, "accept_short_context": True}}
    rows = [*task_rows(3), LONG]
    with pytest.raises(DataError, match=r"'long': its prompt has 10 tokens, and 1 to 7 are possible.*engine"):
        make_trainer(rollout, tasks=rows)
    with pytest.raises(DataError, match=r"evaluation task 'long': its prompt has 10 tokens, and the context of 8"):
        make_trainer(rollout, tasks=task_rows(3), eval_tasks=rows)
    trainer = make_trainer({**rollout, "data": {"skip_long_prompts": True}, "run": {"steps": 4}}, tasks=rows)
    assert trainer.stages[0].left_out == 1
    assert all(row["completion/length_mean"] <= 5 for row in trainer.train())  # 8 less the shortest prompt
    with pytest.raises(DataError, match="evaluation task 'long'"):
        trainer.evaluate(rows)
    messages = []
    trainer.reporting.console.message = lambda text, level: messages.append((text, level))
    trainer.evaluate(task_rows(2))
    ((text, level),) = messages
    assert "leaves fewer than rollout.max_new_tokens=6 for responses to 2 of 2 evaluation tasks" in text
    assert level == "warning"
    demonstrated = {**LONG, "demonstration": "11"}
    sft = {"stages": [{"kind": "sft", "steps": 1}], "run": {"steps": None}}
    make_trainer({**rollout, **sft}, "sft", tasks=[*task_rows(3), demonstrated])  # nothing is sampled
    policy = make_policy(context=64)
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "long.jsonl"
    data.write_text('{"id": "long", "prompt": "12345678=?", "answer": "1"}\n')
    arguments = ["--model", str(tmp_path / "model"), "--data", str(data), "--verifier", "exact", "--engine", short]
    assert evaluate(arguments) == 2
    assert "evaluation task 'long'" in capsys.readouterr().err
    data.write_text('{"prompt": "1=?", "answer": "1"}\n')
    assert evaluate([*arguments, "--samples", "1", "--max-new-tokens", "5000"]) == 0
    assert "leaves fewer than evaluation.max_new_tokens=5000 for responses to 1 of 1" in capsys.readouterr().err


def test_an_engine_is_made_as_long_as_training_and_evaluation_need(make_trainer, monkeypatch):
    """Prompts of evaluation tasks may be longer than data.max_prompt_tokens; their responses are not cut for it."""
    asked = []

    def opened(*given):
        asked.append(given[-1])
        return open_engine(*given)

    monkeypatch.setattr(rollout_runtime, "open_engine", opened)
    sizes = {"data": {"max_prompt_tokens": 6}, "rollout": {"max_new_tokens": 5}}
    for count, tasks in enumerate((None, [LONG], task_rows(1))):
        make_trainer(sizes, f"run{count}", eval_tasks=tasks)
    longer = {"kind": "grpo", "steps": 1, "evaluation": {"data": [LONG], "max_new_tokens": 9}}
    make_trainer({**sizes, "stages": [{"kind": "grpo", "steps": 1}, longer], "run": {"steps": None}}, "stages")
    assert asked == [11, 15, 11, 19]


def test_a_rank_without_an_engine_knows_the_context_of_the_one_that_samples(policy):
    """Or it would leave out other tasks."""

    class Second:
        """Rank 1 of 2."""

        size, is_main, heartbeat_timeout = 2, False, 30.0

        def broadcast(self, value, what):
            assert value is None
            return 40

    assert open_engine("vllm-server", policy, None, Second(), None, False).context == 40


def test_a_loaded_model_goes_to_the_configured_device(make_policy, monkeypatch):
    """`auto` is the GPU where there is one. There is none here, so that `to` only says where it was sent."""
    policy = make_policy(layers=1)
    model, moved = policy.model, []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(type(model), "to", lambda self, device: moved.append(str(device)) or self)
    assert str(given_policy(model, policy.tokenizer, ModelConfig()).home) == "cuda"
    given_policy(model, policy.tokenizer, ModelConfig(device="cuda:1"))
    assert moved == ["cuda", "cuda:1"]
    given_policy(model, policy.tokenizer, ModelConfig(device="cpu"))  # it is there
    given_policy(model, policy.tokenizer, ModelConfig(), shared_out=True)  # ZeRO-3 takes it from host memory
    assert moved == ["cuda", "cuda:1"]
    model.is_quantized = True
    with pytest.raises(
        ConfigError, match=r"is quantized and lies on cpu, while model\.device means cuda: load it there"
    ):
        given_policy(model, policy.tokenizer, ModelConfig())
    model.is_quantized = False
    model.hf_device_map = {"model.embed_tokens": 0, "lm_head": "cpu"}
    with pytest.raises(ConfigError, match=r"spread over 0, cpu \(device_map\): load it without device_map"):
        given_policy(model, policy.tokenizer, ModelConfig())
    del model.hf_device_map
    with pytest.raises(ConfigError, match="has no weights"):
        given_policy(make_policy(layers=1).model.to_empty(device="meta"), policy.tokenizer, ModelConfig(device="cpu"))


def test_a_model_of_which_nothing_trains_is_refused(make_policy, tmp_path):
    policy, config = make_policy(layers=1), ModelConfig(device="cpu")
    adapted = peft.get_peft_model(
        policy.model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    adapted.save_pretrained(tmp_path)
    base = make_policy(layers=1).model
    inference = peft.PeftModel.from_pretrained(base, tmp_path)
    with pytest.raises(ConfigError, match=r"loaded for inference.*is_trainable=True"):
        given_policy(inference, policy.tokenizer, config)
    trainable = peft.PeftModel.from_pretrained(make_policy(layers=1).model, tmp_path, is_trainable=True)
    assert given_policy(trainable, policy.tokenizer, config).trainable()
    frozen = make_policy(layers=1).model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter requires a gradient"):
        given_policy(frozen, policy.tokenizer, config)
    adapter = ModelConfig(device="cpu", adapter={"r": 2})
    assert given_policy(frozen, policy.tokenizer, adapter).trainable()


def moving(start, end):
    return {"schedule": "linear", "start": start, "end": end}


FOLLOWS = {"metric": "entropy", "target": 1.0, "initial": 1.0}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rollout": {"temperature": -1}}, "rollout.temperature: the temperature is -1, and must be above 0"),
        ({"rollout": {"temperature": moving(1.0, 0.0)}}, "the temperature goes down to 0, and must be above 0"),
        ({"rollout": {"temperature": {"at": {0: 1.0, 5: -1}}}}, "the temperature goes down to -1"),
        ({"rollout": {"temperature": {**FOLLOWS, "delta": 0.1}}}, "the temperature goes down to 0"),
        ({"rollout": {"stop": [".", " ", ""]}}, r"rollout\.stop\[2\]: it must have at least 1 character"),
        ({"algorithm": {"loss": {"clip_low": -0.5}}}, "clip_low is -0.5, and must be at least 0"),
        (
            {"algorithm": {"loss": {"clip_high": moving(0.2, -0.1)}}},
            "clip_high goes down to -0.1, and must be at least 0",
        ),
        ({"algorithm": {"loss": {"name": "gmpo", "clip_high": -1.0}}}, "clip_high is -1, and must be at least 0"),
        ({"algorithm": {"loss": {"clip_low": 1.2}}}, "clip_low is 1.2, and must be at most 1"),
        ({"algorithm": {"loss": {"clip_low": moving(0.2, 3)}}}, "clip_low goes up to 3, and must be at most 1"),
        (
            {"algorithm": {"loss": {"clip_low": FOLLOWS}}},
            r"clip_low goes up to inf, and must be at most 1 \(set `maximum`",
        ),
        ({"algorithm": {"loss": {"clip": "detach", "clip_low": 1.5}}}, "clip_low is 1.5, and must be at most 1"),
        ({"algorithm": {"loss": {"name": "clip_cov", "clip_low": 1.01}}}, "clip_low is 1.01, and must be at most 1"),
        ({"algorithm": {"loss": {"name": "clip_cov", "share": 2.0}}}, "share is 2, and must be at most 1"),
        ({"algorithm": {"loss": {"name": "kl_cov", "share": -0.1}}}, "share is -0.1, and must be at least 0"),
        (
            {"algorithm": {"loss": {"name": "kl_cov", "share": moving(0.1, 2)}}},
            "share goes up to 2, and must be at most 1",
        ),
        (
            {"algorithm": {"loss": {"name": "weighted_likelihood", "temperature": moving(1.0, 0.0)}}},
            "temperature goes down to 0, and must be above 0",
        ),
        (
            {"algorithm": {"loss": {"name": "trajectory_balance", "floor": moving(0.1, 0.0)}}},
            "floor goes down to 0, and must be above 0",
        ),
        ({"algorithm": {"loss": {"clip_low": math.nan}}}, "finite"),
        ({"algorithm": {"advantage": {"name": "group", "baseline": math.inf}}}, "group"),
        ({"algorithm": {"entropy": math.nan}}, "algorithm.entropy: .*finite"),
        ({"algorithm": {"kl": {"coef": moving(0.1, math.inf)}}}, "algorithm.kl.coef.*finite"),
        ({"optim": {"lr": math.nan}}, "optim.lr: .*finite"),
        ({"rollout": {"deadline": math.inf}}, "rollout.deadline: .*finite"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(section, message):
    with pytest.raises(ConfigError, match=message):
        registry.build("loss", load_config(section).algorithm.loss)


def test_numbers_at_the_edge_are_taken():
    follows = load_config({"rollout": {"temperature": FOLLOWS}}).rollout.temperature
    assert follows.maximum == math.inf
    config = load_config({"algorithm": {"loss": {"clip_low": 0.0, "clip_high": moving(0.0, 1.0)}}})
    assert registry.build("loss", config.algorithm.loss).clip_low == 0.0
    for loss in [
        {"clip_low": 1.0},
        {"clip": "detach", "clip_low": 1.0},
        {"clip": "kl", "clip_low": 2.0},
        {"clip_low": {**FOLLOWS, "initial": 0.2, "maximum": 1.0}},
        {"name": "gmpo", "clip_low": 2.0},
        {"name": "clip_cov", "share": 1.0},
    ]:
        assert registry.build("loss", load_config({"algorithm": {"loss": loss}}).algorithm.loss)
    assert load_config(config.dump()) == config


def test_a_term_of_weight_0_leaves_no_reward_undecided(make_trainer, tmp_path):
    """Also where a schedule is 0 at the step, within another term and for some sources; the column shows what is
    undecided."""
    (tmp_path / "maybe.py").write_text("def maybe(completion, token_ids): return None if len(token_ids) % 2 else 1.0")
    maybe = {"name": f"{tmp_path / 'maybe.py'}:maybe"}
    weights = {"a": 0.0, "b": {"at": {0: 0.0, 1: 1.0}}}
    within = {"name": "sum", "as": "c", "terms": ["verdict", {**maybe, "as": "d", "weight": 0.0}]}
    some = {**maybe, "as": "e", "weight": 0.0, "sources": ["here"]}
    rewards = [within, some, *({**maybe, "as": name, "weight": weight} for name, weight in weights.items())]
    rows = [{**row, "source": "here"} for row in task_rows()]
    trainer = make_trainer({"rewards": rewards, "run": {"steps": 2}}, tasks=rows)
    trainer.train(1)
    undecided = np.isnan(trainer.batch.column("reward/a"))
    assert undecided.any()
    for name in ("b", "d", "e"):
        assert (np.isnan(trainer.batch.column(f"reward/{name}")) == undecided).all()
    assert trainer.batch.column("reward").tolist() == trainer.batch.column("reward/verdict").tolist()
    trainer.train(1)
    assert (np.isnan(trainer.batch.column("reward")) == np.isnan(trainer.batch.column("reward/b"))).all()


def test_evaluations_without_tasks_are_refused_before_a_model_is_loaded(make_trainer, monkeypatch):
    loaded = []
    loading = trainer_module.PolicyTraining
    monkeypatch.setattr(trainer_module, "PolicyTraining", lambda *given: loaded.append(given) or loading(*given))
    with pytest.raises(
        ConfigError, match=r"evaluation\.every is 5, and there are no tasks to evaluate on: set data\.eval"
    ):
        make_trainer({"evaluation": {"every": 5}})
    with pytest.raises(
        ConfigError,
        match=r"checkpoint\.best\.metric is eval/greedy, and there are no tasks to evaluate on: set data\.eval",
    ):
        make_trainer({"checkpoint": {"best": {}}})
    assert not loaded
    make_trainer({"checkpoint": {"best": {"metric": "reward/mean"}}})
    make_trainer({"evaluation": {"at_start": True, "at_end": True}})  # the defaults, as a dumped configuration has them


def test_the_announcement_says_what_the_context_leaves(make_trainer, tmp_path, capsys):
    long = {
        "rollout": {"max_new_tokens": 5000, "accept_short_context": True},
        "logging": {"console": "plain"},
        "run": {"steps": 1},
    }
    make_trainer(long).train()
    output = capsys.readouterr().out.replace("\n", " ")
    assert (
        "2 prompts x 4 = 8 completions, at most 61 new tokens each (488 in all): the context leaves no more" in output
    )
    assert "rollout.max_new_tokens=5000" in output


def test_a_name_that_reads_as_a_number_and_broken_yaml_say_what_to_do(tmp_path):
    for name in ("123", "2026-11-22"):
        with pytest.raises(ConfigError, match=rf"run\.name: YAML reads {name} as a .*quote it, run\.name='\"{name}\"'"):
            load_config({}, [f"run.name={name}"])
    assert load_config({}, ["run.name='123'"]).run.name == "123"
    path = tmp_path / "broken.yaml"
    broken = {
        b"run:\n  steps: 3\n optim: {lr: "
        b"[1\n": r"broken\.yaml, line 3, column 2: it is not YAML \(.*expected <block end>",
        b"": r"broken\.yaml is empty, and a config is a mapping of sections",
        b"# run: {steps: 3}\n": r"broken\.yaml is empty",
        b"run:\n" + bytes(100): r"broken\.yaml, line 2: it is not YAML",  # the end of a file that a power cut leaves
        b"run:\n  name: \xff\n": r"broken\.yaml, line 2: it is not YAML \(no UTF-8 text",
        b"run: 2026-99-99\n": r"broken\.yaml: it is not YAML \(month must be",
        b"- run\n": r"broken\.yaml: a config is a mapping of sections, not list",
    }
    for content, output in broken.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=output) as caught:
            load_config(path)
        assert "\n" not in str(caught.value) and "unicode string" not in str(caught.value)
        assert str(caught.value).endswith(": correct it, or restore the file from a copy")
