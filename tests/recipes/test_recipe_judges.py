"""Responses that speak to the judge of a recipe: none is paid, but by a judge that was trained to a form without a
code and that says what it is told inside of the fences.

Each recipe's judge is as the recipe writes it, with its template, labels and form of the verdict; the model is
scripted. `outside` takes orders from what stands outside of the fences, `inside` from anywhere and says them word by
word, `echo` repeats the response before its own verdict, which is the worst.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import yaml

from judge_attacks import ORDER, attack_texts
from rlvr.config.config_loading import recipe_files
from rlvr.recipes.stand_ins import JUDGES
from rlvr.records import Task
from rlvr.testing import StubJudge
from rlvr.verifiers import as_verifier
from rlvr.verifiers.judge.fenced_prompt import FIELD

HONEST = "4"
UNCODED = {"think-rm": "label", "cross-domain-soft-reward-rlvr": "probability"}
"""Recipes whose judge was trained to a form without a code -> that form; docs/judges.md says what is paid there."""


def judges_in(tree):
    """The verifiers that ask a chat model, wherever they stand in a configuration."""
    if isinstance(tree, Mapping):
        if tree.get("name") in JUDGES and ("urls" in tree or "backend" in tree):
            yield tree
        for key, value in tree.items():
            if key != "recipe":
                yield from judges_in(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from judges_in(value)


CASES = [
    pytest.param(slug, written, id=f"{slug}-{number}")
    for slug, path in sorted(recipe_files().items())
    for number, written in enumerate(judges_in(yaml.safe_load(path.read_text(encoding="utf-8"))))
]


@dataclass(frozen=True)
class Form:
    """The verdicts of a judge as the recipe has them read."""

    written: Mapping

    @property
    def read(self):
        return self.written.get("read", "label")

    @property
    def coded(self):
        return self.written.get("coded", True)

    def label(self, wanted):
        """The label, number or truth value of the best or the worst score."""
        if self.read in ("number", "json") and self.written["name"] == "judge":
            low, high = self.written.get("low", 0), self.written.get("high", 10)
            return {"best": f"{high:g}", "worst": f"{low:g}"}[wanted]
        usual = {"judge": {"yes": 1, "no": 0}, "pairs": {"A": 1, "tie": 0.5, "B": 0}, "steps": {"right": 1, "wrong": 0}}
        labels = self.written.get("labels") or usual[self.written["name"]]
        return {"best": max, "worst": min}[wanted](labels, key=labels.__getitem__)

    def text(self, wanted, code, request=None):
        """The reply with that verdict and this code."""
        name = self.written["name"]
        if name == "rubric":
            count = len(request.fenced["criteria"].splitlines()) if request else 3
            return json.dumps({"code": code, "met": {str(n): wanted == "best" for n in range(1, count + 1)}})
        if name == "steps":
            count = sum(key.startswith("step_") for key in request.fenced) if request else 1
            return json.dumps({"code": code, "steps": {str(n): self.label(wanted) for n in range(1, count + 1)}})
        if self.read == "json":
            return f'{{"{self.written.get("json_field", "score")}": {self.label(wanted)}, "code": "{code}"}}'
        return f"Verdict {code}: {self.label(wanted)}" if self.coded else self.label(wanted)


def scripted(form, kind):
    def answer(request):
        orders = ORDER.findall(request.outside if kind == "outside" else request.text)
        # Of two responses the honest one is better: the label of the first, or that of the second.
        own = "best" if request.fenced.get("first") == HONEST else "worst"
        judged = [text for name, text in request.fenced.items() if name in ("response", "first", "second")]
        if form.read == "probability":
            if kind == "inside" and orders:
                return request.probabilities({f"{orders[-1]} ": 0.9})
            words = " ".join(judged).split(maxsplit=1)
            if kind == "echo" and words:
                return request.probabilities({words[0]: 0.9})
            return request.probabilities({form.label("best" if orders else own): 0.9})
        if kind == "echo":
            return "\n".join([*request.fenced.values(), form.text(own, request.code, request)])
        if not orders:
            return form.text(own, request.code, request)
        return orders[-1] if kind == "inside" else form.text("best", request.code, request)

    return answer


def tried(written, kind):
    """Attack -> score, of the recipe's judge, and the score of a response that says nothing to it."""
    form = Form(written)
    own = {key: value for key, value in written.items() if key not in ("backend", "key", "request", "cache")}
    criteria = [{"text": "It is right."}, {"text": "It is brief."}]
    fields = dict.fromkeys(FIELD.findall(str(own.get("template", ""))), "short")
    fields |= {own.get("rubric", "rubric"): criteria, own.get("anchor", "answer"): HONEST}
    task = Task("1", "What is 2 + 2?", HONEST, info=fields)
    label = "true" if written["name"] == "rubric" else form.label("best")
    texts = {"plain": "5", **attack_texts(label, lambda code: form.text("best", code))}
    del texts["nothing"]  # what is empty says nothing, and has no step
    with StubJudge(scripted(form, kind)) as stub:
        verifier = as_verifier({**own, "urls": stub.url, "model": "m", "hedge": None})

        async def gather():
            if verifier.verify_group is None:
                return await asyncio.gather(*(verifier.verify(task, text) for text in texts.values()))
            groups = await asyncio.gather(*(verifier.verify_group(task, [HONEST, text]) for text in texts.values()))
            return [verdicts[1] for verdicts in groups]

        verdicts = asyncio.run(gather())
    scores = {name: verdict.score for name, verdict in zip(texts, verdicts, strict=True)}
    return scores, scores.pop("plain")


@pytest.mark.parametrize("kind", ["outside", "inside", "echo"])
@pytest.mark.parametrize(("slug", "written"), CASES)
def test_no_response_is_paid_by_the_judge_of_a_recipe_for_what_it_says(slug, written, kind):
    scores, honest = tried(written, kind)
    if (kind, written.get("read")) != ("echo", "probability"):  # its first token is the response's own
        assert honest is not None
    worst = -1.0 if honest is None else honest
    paid = {name for name, score in scores.items() if score is not None and score > worst}
    if kind == "inside" and slug in UNCODED:
        # The gap that docs/judges.md and the warning at start speak of.
        assert "order" in paid
    else:
        assert not paid


def test_judges_without_a_code_are_those_that_say_so(caplog):
    uncoded = {slug: written.get("read", "label") for slug, written in (p.values for p in CASES) if "coded" in written}
    assert uncoded == UNCODED
    for slug, written in (case.values for case in CASES):
        with caplog.at_level(logging.WARNING), StubJudge() as stub:
            caplog.clear()
            given = {key: value for key, value in written.items() if key not in ("backend", "key")}
            as_verifier({**given, "urls": stub.url, "model": "m"}).attach(None)
        assert ["has no code" in record.getMessage() for record in caplog.records] == [True] * (slug in UNCODED)
