"""Runs that train with frozen models: a reward model beside a rule, and judges by the run's own models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlvr import GRPOTrainer
from rlvr.errors import CheckpointError, ConfigError
from small_run import changed, overlaid, timeless, weights

TERM = {"name": "verdict", "verifier": "rm", "as": "rm"}


def with_model(folder, **more):
    return {
        "models": {"rm": {"path": str(folder), "device": "cpu"}},
        "verifiers": {"rm": {"name": "scorer", "model": "rm"}},
        "rewards": [
            "verdict",
            TERM,
            {"name": "bounded", "term": TERM, "as": "bounded", "weight": 0.5},
            {"name": "product", "terms": ["verdict", TERM], "as": "product", "weight": 0},
            {"name": "gate", "term": TERM, "by": "verdict", "at_least": 0.5, "as": "gated", "weight": 0},
        ],
        **more,
    }


def test_a_run_trains_on_a_reward_model(make_folder, make_trainer):
    folder = make_folder("qwen3")
    trainer = make_trainer(with_model(folder))
    before = weights(trainer)
    trainer.train()
    assert changed(before, weights(trainer))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    columns = trainer.batch.columns
    for number, rollout in enumerate(trainer.batch.rollouts):
        text = rollout.text.strip()
        chat = [{"role": "user", "content": rollout.task.prompt}, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits.item()
        assert rollout.verdicts["rm"].score == pytest.approx(expected, abs=1e-5)
        assert columns["reward/rm"][number] == pytest.approx(expected, abs=1e-5)
        assert columns["reward/bounded"][number] == pytest.approx(1 / (1 + np.exp(-expected)), abs=1e-5)
        rule = columns["reward/verdict"][number]
        assert columns["reward/product"][number] == pytest.approx(rule * expected, abs=1e-5)
        assert columns["reward/gated"][number] == pytest.approx(expected if rule >= 0.5 else 0, abs=1e-5)
    row = trainer.metrics[-1]
    assert (row["verifier/rm/scored"], row["verifier/rm/undecided"]) == (8, 0)


def test_the_same_seed_gives_the_same_run_and_a_resume_goes_on(make_folder, make_tree):
    folder = make_folder("bert")
    over = with_model(folder)

    def run(name, steps, resume=None):
        tree = make_tree(overlaid(over, {"run": {"steps": steps}}), name)
        with GRPOTrainer(config=tree) as trainer:
            trainer.train(resume=resume)
        return trainer

    whole = run("whole", 3)
    run("parts", 1)
    parts = run("parts", 3, "auto")
    assert timeless(whole.metrics, "verifier/rm/seconds") == timeless(parts.metrics, "verifier/rm/seconds")
    assert changed(weights(whole), weights(parts)) == []
    manifest = json.loads((parts.folder.path / "checkpoints/step-3/complete.json").read_text())
    record = manifest["models"]["rm"]
    assert record["path"] == str(folder) and record["revision"] is None and len(record["config_hash"]) == 64
    # The checkpoint of a run is not taken for one with another reward model.
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"layer_norm_eps"', '"another_setting": 1,\n "layer_norm_eps"'))
    with pytest.raises(CheckpointError, match=r"models\.rm: the checkpoint was made with another model"):
        run("parts", 4, "auto")


def test_a_response_that_is_too_long_is_undecided_and_the_run_goes_on(make_folder, make_trainer):
    folder = make_folder("bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # [CLS] 3=? [SEP] and six characters are more than eleven tokens: shorter responses fit.
    tokenizer.model_max_length = 11
    tokenizer.save_pretrained(folder)
    trainer = make_trainer({**with_model(folder), "rewards": ["verdict", {**TERM, "weight": 0}]})
    trainer.train(2)
    undecided = sum(row["verifier/rm/undecided/too_long"] for row in trainer.metrics if row["verifier/rm/undecided"])
    assert undecided > 0 and trainer.step == 2


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"rm": {"path": "./nowhere"}}, r"models\.rm\.path: there is no model in .*nowhere"),
        ({"rm": {"path": "{folder}", "device": "cuda:7"}}, r"models\.rm\.device .*GPU"),
        ({"other": {"path": "{folder}"}}, r"models: there is no 'rm' \(there is other\)"),
        ({"rm": {"url": "http://localhost:1", "key": "NO_SUCH_KEY"}}, r"models\.rm\.key: .* NO_SUCH_KEY is not set"),
        ({"rm": {"url": "localhost:8000"}}, r"models\.rm\.url: .*'localhost:8000' is no address"),
        ({"rm": {}}, r"either a `path` to load or the `url`"),
        ({"rm": {"path": "a", "url": "http://b"}}, r"either a `path` to load or the `url`"),
        ({"policy": {"path": "a"}}, r"models: .*`policy` is the model that is trained"),
        ({"rm": {"path": "a", "pth": "b"}}, r"models\.rm\.pth: unknown key"),
    ],
)
def test_what_is_missing_is_one_error_before_training(make_folder, make_trainer, models, said):
    folder = str(make_folder("qwen3"))
    filled = json.loads(json.dumps(models).replace("{folder}", folder))
    with pytest.raises(ConfigError, match=said):
        make_trainer({**with_model(folder), "models": filled})


def test_a_model_that_nothing_uses_gets_a_word(make_folder, make_trainer, capsys):
    over = with_model(make_folder("qwen3"), logging={"console": "plain"})
    make_trainer(over)
    assert "no verifier uses" not in capsys.readouterr().out
    over["models"] |= {"spare": {"path": str(make_folder("bert")), "device": "cpu"}}
    trainer = make_trainer(over, "spare")
    assert "warning: models: no verifier uses spare, so that it is not loaded" in capsys.readouterr().out
    assert list(trainer.rollouts.models.records()) == ["rm", "spare"]


# judges by the models of the run

JUDGE = {
    "name": "judge",
    "read": "probability",
    "coded": False,
    "labels": {"1": 1.0, "0": 0.0},
    "least_mass": 1e-6,
    "template": "{prompt}\n{response}",
}


def judged(backend, **more):
    return {
        "model": {"scratch": {"context": 2048, "alphabet": None}},
        "verifiers": {"judge": {**JUDGE, "backend": backend}},
        "rewards": ["verdict", {"name": "verdict", "verifier": "judge", "as": "judge"}],
        **more,
    }


@torch.no_grad()
def probability(model, tokenizer, judge, rollout):
    """The probability of `1` against `0` as the reply's first token, by the model's own forward pass."""
    code = judge.client.fence_code(judge._template.filled(rollout.task, {"response": rollout.text}, "0" * 16), 0)
    body = judge._body(judge._template.filled(rollout.task, {"response": rollout.text}, code), judge._reader, code)
    ids = tokenizer.apply_chat_template(body["messages"], tokenize=True, return_dict=False, add_generation_prompt=True)
    log_probs = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
    one, zero = (float(log_probs[tokenizer.convert_tokens_to_ids(label)].exp()) for label in "10")
    return one / (one + zero), set(log_probs.topk(20).indices.tolist())


def test_the_policy_judges_with_the_weights_that_it_has(make_trainer):
    # Updates that round to nothing, so that the weights after the step are those that judged.
    trainer = make_trainer(judged("policy", optim={"lr": 1e-30}))
    judge = trainer.rollouts.verifications[0]._named[0][0]
    trainer.train(1)
    assert trainer.metrics[-1]["verifier/judge/requests"] == 8
    policy = trainer.policy
    labels = {policy.tokenizer.convert_tokens_to_ids(label) for label in "10"}
    for rollout in trainer.batch.rollouts:
        expected, likeliest = probability(policy.causal_lm, policy.tokenizer, judge, rollout)
        score = rollout.verdicts["judge"].score
        if labels <= likeliest:
            assert score == pytest.approx(expected, abs=1e-4)
        elif not labels & likeliest:
            assert score is None
        else:
            assert score == float(policy.tokenizer.convert_tokens_to_ids("1") in likeliest)


def test_each_version_of_the_policy_has_replies_of_its_own(make_trainer):
    over = judged("policy")
    trainer = make_trainer(over)
    client = trainer.rollouts.verifications[0]._named[0][0].client
    first = client.identity
    trainer.train(1)
    # The trainer publishes before the first step, and after each.
    assert client.identity != first and client.identity.partition(" version ")[0] == first.partition(" version ")[0]
    other = make_trainer(over, name="other")
    assert other.rollouts.verifications[0]._named[0][0].client.identity != first, "another run's weights are others"


def test_a_run_with_the_policy_as_judge_is_repeated_by_its_seed(make_tree):
    def run(name):
        over = judged("policy")
        over["verifiers"]["judge"] |= {"read": "label", "coded": False, "votes": 3, "rule": "any", "max_tokens": 8}
        with GRPOTrainer(config=make_tree(over, name)) as trainer:
            trainer.train(2)
        return trainer

    first, second = run("first"), run("second")
    assert timeless(first.metrics, "verifier/judge/seconds") == timeless(second.metrics, "verifier/judge/seconds")
    assert first.metrics[0]["verifier/judge/requests"] == 24


def test_a_frozen_model_judges(make_folder, make_trainer):
    folder = make_folder("qwen3", "causal", context=2048)
    over = judged("helper", models={"helper": {"path": str(folder), "device": "cpu"}})
    trainer = make_trainer(over)
    judge = trainer.rollouts.verifications[0]._named[0][0]
    trainer.train(2)
    frozen = trainer.rollouts.models.loaded("helper", "causal")
    for rollout in trainer.batch.rollouts:
        expected, likeliest = probability(frozen.model, frozen.tokenizer, judge, rollout)
        labels = {frozen.tokenizer.convert_tokens_to_ids(label) for label in "10"}
        score = rollout.verdicts["judge"].score
        if labels <= likeliest:
            assert score == pytest.approx(expected, abs=1e-4)
        elif not labels & likeliest:
            assert score is None
    assert judge.client.sampler.version == 0


def test_a_judge_that_is_asked_too_much_is_undecided(make_trainer):
    over = judged("policy")
    over["model"]["scratch"]["context"] = 64
    trainer = make_trainer(over)
    trainer.train(1)
    assert trainer.metrics[0]["verifier/judge/undecided/too_long"] == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "helper"}, "there is no 'helper'"),
        ({"backend": "policy", "urls": "http://localhost:1"}, "leave urls, model and key out"),
        ({"backend": "policy", "request": {"top_p": 0.5}}, "sets 'top_p'"),
    ],
)
def test_a_backend_that_is_not_there_is_refused(make_trainer, options, said):
    with pytest.raises(ConfigError, match=said):
        make_trainer(overlaid(judged("policy"), {"verifiers": {"judge": options}}))
