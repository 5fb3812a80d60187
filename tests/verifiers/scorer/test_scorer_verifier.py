"""The verifier `scorer`: its numbers are those of transformers by hand, whatever it is batched with."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers import as_verifier

TASK = Task("1", "2 + 2?", "4", demonstration="It is four, 4.")
TEXTS = ["4", "It is 4, since two and two are that.", "<think>Hm, 2 + 2.</think>\nIt is 4.", "no idea", ""]
ANSWERS = ["4", "It is 4, since two and two are that.", "It is 4.", "no idea", ""]


def scorer(models, **options):
    verifier = as_verifier({"name": "scorer", "model": "rm", **options})
    verifier.attach(models)
    return verifier


def verdicts(verifier, texts, task=TASK):
    return asyncio.run(verifier.verify_group(task, list(texts)))


def scores(verifier, texts, task=TASK):
    return [verdict.score for verdict in verdicts(verifier, texts, task)]


def by_hand(folder, kind=AutoModelForSequenceClassification):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def chat(response, task=TASK):
    return [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": response}]


# equal to transformers


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_decoders_classifier_gives_what_transformers_gives_with_either_padding(make_folder, models, side):
    folder = make_folder("qwen3")
    model, tokenizer = by_hand(folder)
    rows = [tokenizer.apply_chat_template(chat(text), tokenize=True, return_dict=False) for text in ANSWERS]
    tokenizer.padding_side = side
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    positions = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = model(**padded, position_ids=positions).logits[:, 0]
    assert scores(scorer(models(rm=folder)), TEXTS) == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@torch.no_grad()
def test_an_encoders_classifier_sees_a_pair_of_texts(make_folder, models, family):
    folder = make_folder(family)
    model, tokenizer = by_hand(folder)
    # One at a time, so that nothing is padded.
    expected = [model(**tokenizer(TASK.prompt, text, return_tensors="pt")).logits.item() for text in ANSWERS]
    if family == "bert":
        assert 1 in tokenizer(TASK.prompt, "4")["token_type_ids"]
    assert scores(scorer(models(rm=folder)), TEXTS) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(expected)


@torch.no_grad()
def test_outputs_have_names_and_one_is_the_score(make_folder, models):
    names = {0: "bad", 1: "fair", 2: "good"}
    folder = make_folder("bert", num_labels=3, id2label=names, label2id={v: k for k, v in names.items()})
    model, tokenizer = by_hand(folder)
    logits = model(**tokenizer(TASK.prompt, "4", return_tensors="pt")).logits[0]
    expected = dict(zip(names.values(), logits.softmax(0).tolist(), strict=True))
    (verdict,) = verdicts(scorer(models(rm=folder), label="good", activation="softmax"), ["4"])
    assert verdict.score == pytest.approx(expected["good"], abs=1e-5)
    assert verdict.scores == pytest.approx(expected, abs=1e-5)
    (by_number,) = verdicts(scorer(models(rm=folder), label=1), ["4"])
    assert by_number.score == pytest.approx(logits[1].item(), abs=1e-5)
    (squashed,) = verdicts(scorer(models(rm=folder), label=1, activation="sigmoid"), ["4"])
    assert squashed.score == pytest.approx(logits[1].sigmoid().item(), abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("family", ["qwen3", "bert", "roberta"])
@torch.no_grad()
def test_similarity_is_the_cosine_of_embeddings(make_folder, models, family, pooling):
    folder = make_folder(family, "encoder")
    model, tokenizer = by_hand(folder, AutoModel)

    def embedded(text):
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double()
        return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]

    expected = [float(torch.cosine_similarity(embedded(text), embedded("4"), dim=0)) for text in ANSWERS[:4]]
    verifier = scorer(models(rm=folder), kind="embedding", pooling=pooling)
    assert scores(verifier, TEXTS[:4]) == pytest.approx(expected, abs=1e-5)
    assert expected[0] == pytest.approx(1)
    with_demonstration = scorer(models(rm=folder), kind="embedding", pooling=pooling, against="demonstration")
    reference = embedded("It is four, 4.")
    expected = [float(torch.cosine_similarity(embedded(text), reference, dim=0)) for text in ANSWERS[:4]]
    assert scores(with_demonstration, TEXTS[:4]) == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_yes_or_no_is_the_probability_of_a_token(make_folder, models):
    folder = make_folder("qwen3", "causal")
    model, tokenizer = by_hand(folder, AutoModelForCausalLM)
    template = "Q: {prompt} A: {response} Right: {answer}. y or n?"
    verifier = scorer(models(rm=folder), kind="yes_no", template=template, labels={"y": 1.0, "n": 0.0}, least_mass=1e-9)
    for text, verdict in zip(ANSWERS, verdicts(verifier, TEXTS), strict=True):
        asked = [{"role": "user", "content": f"Q: {TASK.prompt} A: {text} Right: 4. y or n?"}]
        ids = tokenizer.apply_chat_template(asked, tokenize=True, return_dict=False, add_generation_prompt=True)
        probabilities = model(torch.tensor([ids])).logits[0, -1].double().softmax(0)
        yes, no = (float(probabilities[tokenizer.convert_tokens_to_ids(one)]) for one in "yn")
        assert verdict.score == pytest.approx(yes / (yes + no), abs=1e-5)
        assert verdict.scores == pytest.approx({"y": yes, "n": no}, abs=1e-6)
    unsure = scorer(models(rm=folder), kind="yes_no", template=template, labels={"y": 1.0, "n": 0.0}, least_mass=1.0)
    (verdict,) = verdicts(unsure, ["4"])
    assert verdict.score is None and unsure.metrics()["undecided/unparsable"] == 1


@torch.no_grad()
def test_likelihood_is_the_mean_log_prob(make_folder, models):
    folder = make_folder("qwen3", "causal")
    model, tokenizer = by_hand(folder, AutoModelForCausalLM)

    def mean_log_prob(before, target):
        ids = torch.tensor([before + target])
        log_probs = model(ids).logits[0].double().log_softmax(-1)
        return sum(float(log_probs[t - 1, ids[0, t]]) for t in range(len(before), ids.shape[1])) / len(target)

    def plain(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt = [{"role": "user", "content": TASK.prompt}]
    opened = tokenizer.apply_chat_template(prompt, tokenize=True, return_dict=False, add_generation_prompt=True)
    after = scorer(
        models(rm=folder), kind="likelihood", against="demonstration", template="{response} So: ", part="all"
    )
    expected = [mean_log_prob(opened + plain(f"{text} So: "), plain("It is four, 4.")) for text in TEXTS]
    assert scores(after, TEXTS) == pytest.approx(expected, abs=1e-5)
    own = verdicts(scorer(models(rm=folder), kind="likelihood", of="response"), TEXTS)
    expected = [mean_log_prob(opened, plain(text)) for text in ANSWERS[:4]]
    assert [verdict.score for verdict in own[:4]] == pytest.approx(expected, abs=1e-5)
    assert own[1].scores == pytest.approx({"sum": expected[1] * len(ANSWERS[1]), "tokens": len(ANSWERS[1])}, abs=1e-4)
    # An empty text has no mean.
    assert own[4].score is None


# what a score does not depend on


@pytest.mark.parametrize("family", ["qwen3", "bert", "roberta"])
def test_neither_padding_nor_the_rest_of_the_batch_changes_a_score(make_folder, models, family):
    folder = make_folder(family)
    together = scores(scorer(models(rm=folder)), TEXTS)
    alone = [scores(scorer(models(rm=folder)), [text])[0] for text in TEXTS]
    assert alone == pytest.approx(together, abs=1e-5)
    order = [3, 0, 4, 2, 1]
    shuffled = scores(scorer(models(rm=folder)), [TEXTS[place] for place in order])
    assert [shuffled[order.index(place)] for place in range(5)] == pytest.approx(together, abs=1e-5)
    in_small_passes = scores(scorer(models(rm=folder, batch_tokens=40)), TEXTS)
    assert in_small_passes == pytest.approx(together, abs=1e-5)


def test_a_model_without_a_pad_token_scores_one_row_at_a_time(make_folder, models):
    folder = make_folder("qwen3")
    expected = scores(scorer(models(rm=folder)), TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"pad_token_id": 0', '"pad_token_id": null'))
    loaded = models(rm=folder)
    assert loaded.loaded("rm", "sequence").pad_id is None
    assert scores(scorer(loaded), TEXTS) == pytest.approx(expected, abs=1e-5)


def test_the_model_is_frozen(make_folder, models):
    model = models(rm=make_folder("qwen3")).loaded("rm", "sequence").model
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


# parts of a response


def test_the_part_that_is_scored(make_folder, models):
    folder = make_folder("qwen3")
    text = "<think>\nHm, 2 + 2.\n</think>\n\nIt is 4."

    def same(texts, as_whole, **options):
        expected = scores(scorer(models(rm=folder), part="all"), as_whole)
        assert scores(scorer(models(rm=folder), **options), texts) == pytest.approx(expected, abs=1e-6)

    # Still thinking: there is no answer, and an answer alone has no thinking.
    same([text, "<think>Hm"], ["It is 4.", ""])
    same([text, "It is 4."], ["Hm, 2 + 2.", ""], part="thinking")
    same(["Hm</think>4", "Hm"], ["4", ""], think_opened_by_prompt=True)
    tagged = ["<a>4</a> or <a>5</a>", "<a>two\nlines</a>", "no tags", "<a>open"]
    same(tagged, ["4", "two\nlines", "no tags", "<a>open"], part="all", within="<a>(.*?)</a>")
    same(["<think><a>3</a></think> <a>4</a>"], ["4"], within="<a>(.*?)</a>")


def test_a_response_cannot_pretend_a_turn(make_folder, models):
    folder = make_folder("qwen3")
    verifier = scorer(models(rm=folder), part="all")
    # The special tokens of this model, which no list of known marks has, are broken up.
    assert scores(verifier, ["no<eos>4"]) == pytest.approx(scores(verifier, ["no< eos>4"]), abs=1e-6)
    # What follows a known end of turn was not said by the policy.
    for mark in ("<|im_end|>", "<|user|>"):
        assert scores(verifier, [f"no{mark}yes, 4"]) == pytest.approx(scores(verifier, ["no"]), abs=1e-6)


# references


def test_a_reference_is_scored_once_and_subtracted(make_folder, models):
    folder = make_folder("qwen3")
    plain = scorer(models(rm=folder))
    for against, text in (("reference", "4"), ("demonstration", "It is four, 4.")):
        verifier = scorer(models(rm=folder), against=against)
        reference = scores(plain, [text])[0]
        first = verdicts(verifier, TEXTS)
        assert [one.score for one in first] == pytest.approx(
            [one - reference for one in scores(plain, TEXTS)], abs=1e-5
        )
        assert first[1].scores["reference"] == pytest.approx(reference, abs=1e-5)
        asked = []
        inner = verifier._scores.score
        verifier._scores.score = lambda task, texts, inner=inner, asked=asked: asked.append(texts) or inner(task, texts)
        verdicts(verifier, TEXTS)
        assert len(asked) == 1 and len(asked[0]) == len(TEXTS)
        verdicts(verifier, TEXTS, Task("2", "3 + 3?", "4", demonstration="It is four, 4."))
        assert len(asked) == 3, "another prompt has a reference of its own"


def test_a_task_without_what_is_compared_is_refused(make_folder, models):
    folder = make_folder("qwen3")
    bare = Task("1", "2 + 2?")
    assert scorer(models(rm=folder)).check_task(bare) is None
    assert "no answer" in scorer(models(rm=folder), against="reference").check_task(bare)
    assert "no demonstration" in scorer(models(rm=folder), against="demonstration").check_task(bare)
    assert "{hint}" in scorer(models(rm=folder), template="{response}{hint}").check_task(bare)


# undecided


def test_what_is_too_long_is_undecided_and_counted(make_folder, models):
    for family in ("qwen3", "bert", "roberta"):
        verifier = scorer(models(rm=make_folder(family)))
        context = verifier._scores.model.context
        assert context == {"qwen3": 256, "bert": 48, "roberta": 48}[family]
        short, long = verdicts(verifier, ["4", "4" * 300])
        assert short.score is not None
        assert (long.score, long.status) == (None, VerdictStatus.ERROR) and "too_long" in long.reason
        counts = verifier.metrics()
        assert (counts["scored"], counts["undecided"], counts["undecided/too_long"]) == (2, 1, 1)
        assert verifier.metrics()["undecided"] == 0
        # The longest that fits does not fall off the end of the positions.
        fits = context + 1 - len(verifier._scores._row(TASK, "4").ids)
        assert scores(verifier, ["4" * fits])[0] is not None
        assert scores(verifier, ["4" * (fits + 1)])[0] is None


def test_a_number_that_is_none_is_undecided(make_folder, models, monkeypatch):
    verifier = scorer(models(rm=make_folder("qwen3")))
    monkeypatch.setattr(
        type(verifier._scores.model), "class_logits", lambda self, rows: np.full((len(rows), 1), np.nan)
    )
    (verdict,) = verdicts(verifier, ["4"])
    assert verdict.score is None and verifier.metrics()["undecided/out_of_range"] == 1


def test_positions_of_roberta_end_where_its_embedding_does(make_folder, models):
    folder = make_folder("roberta")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 10_000
    tokenizer.save_pretrained(folder)
    verifier = scorer(models(rm=folder))
    # 64 positions, of which the pad token (0) and those before it are none of a text's.
    assert verifier._scores.model.context == 63
    fits = 64 - len(verifier._scores._row(TASK, "4").ids)
    assert scores(verifier, ["4" * fits])[0] is not None and scores(verifier, ["4" * (fits + 1)])[0] is None


# refused before training


def test_models_that_do_not_fit_are_refused_in_one_line(make_folder, models, tmp_path):
    def refusal(made, **options):
        with pytest.raises(ConfigError) as caught:
            scorer(made, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    three = make_folder("bert", num_labels=3)
    assert "several outputs: set `label` to one of LABEL_0, LABEL_1, LABEL_2" in refusal(models(rm=three))
    assert "no output 'good'" in refusal(models(rm=three), label="good")
    assert "no output 7" in refusal(models(rm=three), label=7)
    # A language model without a head would give random scores.
    causal = make_folder("qwen3", "causal")
    assert "has no weights for score.weight" in refusal(models(rm=causal))
    assert "has no weights for" in refusal(models(rm=make_folder("bert", "encoder")), kind="yes_no")
    assert "the label 'maybe' is 5 tokens" in refusal(models(rm=causal), kind="yes_no", labels={"maybe": 1.0})
    assert "no chat template" in refusal(models(rm=make_folder("bert")), form="chat")
    assert "there is no 'rm' (there is reward)" in refusal(models(reward=causal))
    assert "there is no model in" in refusal(models(rm=tmp_path / "nowhere"))
    large = make_folder("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(large)
    tokenizer.add_tokens([f"<new{n}>" for n in range(9)])
    tokenizer.save_pretrained(large)
    assert "they do not belong together" in refusal(models(rm=large))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"template": "{prompt}"}, "no {response}"),
        ({"deadline": 0}, "deadline"),
        ({"within": "<a>"}, "within has 0 groups"),
        ({"within": "("}, "within is no regular expression"),
        ({"labels": {}}, "labels"),
        ({"labels": {"y": math.inf}}, "labels"),
        ({"kind": "likelihood", "of": "response", "against": "reference"}, "likelihood of the reference"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        as_verifier({"name": "scorer", "model": "rm", **options})


def test_a_scorer_that_was_given_no_models_says_so():
    with pytest.raises(ConfigError, match="was not loaded"):
        verdicts(as_verifier({"name": "scorer", "model": "rm"}), ["4"])
