"""The verifier `step_scorer`: its numbers are those of transformers by hand at the separators of the steps."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rlvr.config import FrozenModelConfig
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.run.loaded_models import LoadedModels
from rlvr.verifiers import as_verifier

TASK = Task("1", "2 + 2?", "4")
STEPS = ["We add 2.", "That is 4; I think.", "So: 4"]
TEXT = "We add 2.\n\nThat is 4; I think.\n \n So: 4\n"
TEXTS = [TEXT, "4", "No #tag here.\n\nNo.", "a\n\nb\n\nc\n\nd"]


def step_scorer(models, **options):
    verifier = as_verifier({"name": "step_scorer", "model": "prm", **options})
    verifier.attach(models)
    return verifier


def verdicts(verifier, texts=TEXTS, task=TASK):
    return asyncio.run(verifier.verify_group(task, list(texts)))


def steps_of(verdict):
    return [score for *_, score in verdict.spans]


@torch.no_grad()
def by_hand(folder, shown, tag, kind, read):
    """`read(logits [outputs])` at each character `tag` of a text: one token per character."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
    places = [place for place, one in enumerate(ids) if one == tokenizer.convert_tokens_to_ids(tag)]
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    return [read(logits[place]) for place in places]


def chat(steps, separator):
    return f"<|user|>2 + 2?<|assistant|>{''.join(step + separator for step in steps)}<eos>"


def second(logits):
    return float(logits.softmax(-1)[1])


def cut(text):
    return [part.strip() for part in text.replace("\n \n", "\n\n").split("\n\n")]


def test_a_head_at_the_token_after_each_step(make_folder, models):
    """As Qwen2.5-Math-PRM: the probability of label 1 at the separator, in the chat; batched and alone."""
    folder = make_folder("qwen3", "tokens", num_labels=2)
    verifier = step_scorer(models(prm=folder), separator="~")
    got = verdicts(verifier)
    for verdict, text in zip(got, TEXTS, strict=True):
        want = by_hand(folder, chat(cut(text), "~"), "~", AutoModelForTokenClassification, second)
        assert steps_of(verdict) == pytest.approx(want, abs=1e-5)
    assert [TEXT[a:b] for a, b, _ in got[0].spans] == STEPS
    for verdict, text in zip(got, TEXTS, strict=True):
        assert steps_of(asyncio.run(verifier.verify(TASK, text))) == pytest.approx(steps_of(verdict), abs=1e-5)
    scores = steps_of(got[0])
    assert got[0].scores == pytest.approx(
        {
            "min": min(scores),
            "mean": sum(scores) / 3,
            "product": math.prod(scores),
            "last": scores[2],
            "before_error": next((n for n, score in enumerate(scores) if score < 0.5), 3) / 3,
            "steps": 3.0,
        }
    )
    assert got[0].score == got[0].scores["min"]
    for fused in ("product", "last", "mean"):
        assert verdicts(step_scorer(models(prm=folder), separator="~", score=fused))[0].score == got[0].scores[fused]
    assert verifier.metrics()["scored"] == 8


def test_the_share_of_two_of_three_outputs(make_folder, models):
    """`against` leaves the third output out: 0.5 is where the two logits are the same."""
    folder = make_folder("qwen3", "tokens", num_labels=3)
    for label, against in ((2, 1), (2, 0), ("LABEL_0", "LABEL_2")):
        verifier = step_scorer(models(prm=folder), separator="~", label=label, against=against)
        pair = [int(str(one)[-1]) for one in (label, against)]
        for verdict, text in zip(verdicts(verifier), TEXTS, strict=True):
            want = by_hand(
                folder,
                chat(cut(text), "~"),
                "~",
                AutoModelForTokenClassification,
                lambda logits, pair=pair: (float(logits[pair].softmax(-1)[0]), int(logits[pair].argmax())),
            )
            assert steps_of(verdict) == pytest.approx([share for share, _ in want], abs=1e-5)
            assert [score >= 0.5 for score in steps_of(verdict)] == [first == 0 for _, first in want]


def test_the_probability_of_a_token_after_each_step(make_folder, models):
    """As Math-Shepherd: the softmax over + and - as the next token after the tag, with the line break behind it."""
    folder = make_folder("qwen3", "causal")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plus, minus = tokenizer.convert_tokens_to_ids(["+", "-"])
    options = {"head": "next_token", "separator": " ~\n", "template": "{prompt} {response}"}

    def share(logits):
        return float(logits[[plus, minus]].softmax(-1)[0])

    for verdict, text in zip(verdicts(step_scorer(models(prm=folder), **options)), TEXTS, strict=True):
        shown = f"2 + 2? {''.join(step + ' ~' + chr(10) for step in cut(text))}"
        want = by_hand(folder, shown, "~", AutoModelForCausalLM, share)
        assert steps_of(verdict) == pytest.approx(want, abs=1e-5)


def test_either_order_and_both(make_folder, models):
    folder = make_folder("qwen3", "tokens", num_labels=2)
    left, right, both = (
        steps_of(verdicts(step_scorer(models(prm=folder), separator="~", order=order))[0])
        for order in ("l2r", "r2l", "both")
    )
    backwards = by_hand(folder, chat(STEPS[::-1], "~"), "~", AutoModelForTokenClassification, second)
    assert right == pytest.approx(backwards[::-1], abs=1e-5)
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(left, right, strict=True)], abs=1e-9)
    assert left != pytest.approx(right, abs=1e-5)


def test_a_separator_of_line_breaks_and_one_output(make_folder, models):
    """As a model of TRL's PRMTrainer: line breaks may stand in the steps too, and places are not found by them."""
    folder = make_folder("qwen3", "tokens", num_labels=1)
    verifier = step_scorer(models(prm=folder), separator="\n", template="{prompt} {response}")
    (verdict,) = verdicts(verifier, ["a\nb\n\nc"])

    def sigmoid(logits):
        return float(logits[0].sigmoid())

    want = by_hand(folder, "2 + 2? a\nb\nc\n", "\n", AutoModelForTokenClassification, sigmoid)
    assert steps_of(verdict) == pytest.approx(want[1:], abs=1e-5)


def test_a_model_with_code_of_its_own(make_folder):
    folder = make_folder("qwen3", "tokens", num_labels=2)
    code = "from transformers import Qwen3ForTokenClassification\nclass Prm(Qwen3ForTokenClassification):\n    pass\n"
    (folder / "modeling_prm.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_prm.Prm"}}))
    section = FrozenModelConfig(path=str(folder), device="cpu", trust_remote_code=True)
    got = verdicts(step_scorer(LoadedModels({"prm": section}), separator="~", head="own"))[0]
    want = by_hand(folder, chat(STEPS, "~"), "~", AutoModelForTokenClassification, second)
    assert steps_of(got) == pytest.approx(want, abs=1e-5)


def test_a_response_cannot_write_its_own_separators_or_turns(make_folder, models):
    """A separator in a step is broken up, so that the number of scores is that of the steps."""
    folder = make_folder("qwen3", "tokens", num_labels=2)
    verifier = step_scorer(models(prm=folder), separator="<+>")
    (verdict,) = verdicts(verifier, ["a<+>b <eos><|user|>\n\nc"])
    shown = chat(["a< +>b < eos>< |user|>", "c"], "<+>")
    want = by_hand(folder, shown, ">", AutoModelForTokenClassification, second)
    closing = [place for place, char in enumerate(shown_characters(shown)) if char == ">"]
    ends = [n for n, place in enumerate(closing) if shown_characters(shown)[place - 2 : place + 1] == ["<", "+", ">"]]
    assert steps_of(verdict) == pytest.approx([want[n] for n in ends], abs=1e-5)


def shown_characters(shown):
    """The tokens of a text: characters, and the special tokens."""
    result = []
    while shown:
        token = next((one for one in ("<|user|>", "<|assistant|>", "<eos>") if shown.startswith(one)), shown[0])
        result.append(token)
        shown = shown[len(token) :]
    return result


def test_what_gives_no_score_is_undecided_and_no_text_is_wrong(make_folder, models):
    folder = make_folder("qwen3", "tokens", num_labels=2)
    verifier = step_scorer(models(prm=folder), separator="~")
    long, empty, good = verdicts(verifier, ["a" * 400, " \n\n ", "4"])
    assert long.score is None and long.reason.startswith("too_long")
    assert (empty.score, empty.status) == (0.0, VerdictStatus.UNPARSABLE)
    assert good.decided
    assert verifier.metrics()["undecided/too_long"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separator": ""}, "separator is empty"),
        ({"split": "turn"}, "judge: each"),
        ({"template": "{prompt}"}, "no {response}"),
        ({"label": "good"}, "has the outputs LABEL_0, LABEL_1, LABEL_2"),
        ({}, "set `label` to one of them"),
        ({"label": 1, "against": 1}, "set `against` to one that is not `label`"),
        ({"label": 1, "against": "bad"}, "has the outputs LABEL_0, LABEL_1, LABEL_2: set `against`"),
        ({"head": "next_token", "labels": {"yes": 1.0}}, "3 tokens"),
        ({"model": "prn"}, "did you mean 'prm'"),
    ],
)
def test_what_is_refused_before_training(make_folder, models, options, message):
    head = "causal" if options.get("head") else "tokens"
    folder = make_folder("qwen3", head, num_labels=3)
    with pytest.raises(ConfigError, match=message):
        step_scorer(models(prm=folder), **options)
