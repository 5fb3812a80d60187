"""Stand-ins at toy size for what judges a recipe's responses: tiny frozen models, and a scripted judge.

They replace the models of `models` and the endpoints of `urls`. All other options are the recipe's own.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rlvr.config import ScratchConfig
from rlvr.policy.frozen_model import HEADS as MODEL_CLASSES
from rlvr.policy.frozen_model import Head
from rlvr.policy.scratch import build_tokenizer
from rlvr.verifiers.judge.stub_judge import StubJudge, StubRequest

JUDGES = ("judge", "rubric", "pairs", "steps")
"""Verifiers that ask a chat endpoint."""
SCORER_HEADS: dict[str, Head] = {"classifier": "sequence", "embedding": "none", "yes_no": "causal"}
"""The verifier `scorer`: kind -> what is loaded; `likelihood` is causal, too."""
# As the tiny policy of a smoke run; 4,096 tokens hold a judge's template, one token a character.
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
CONTEXT = 4096
# transformers' 0.02 gives a model of this size nearly the same score for every text; 0.5 spreads them by about 1.
SPREAD = 0.5
"""Standard deviation of the random weights."""


@dataclass(frozen=True)
class StandIn:
    """A frozen model as the verifiers that read it need it."""

    head: Head
    labels: tuple[str, ...] = ("score",)
    """Names of a classifier's outputs."""
    words: tuple[str, ...] = ()
    """Texts that are one token."""


def save_stand_in(folder: Path, wanted: StandIn, seed: int = 0) -> Path:
    """A model of random weights and its tokenizer in a new folder, which is returned."""
    tokenizer = build_tokenizer(ScratchConfig(context=CONTEXT, words=list(wanted.words)))
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer),
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        initializer_range=SPREAD,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        id2label=dict(enumerate(wanted.labels)),
        label2id={label: number for number, label in enumerate(wanted.labels)},
        **SIZES,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_CLASSES[wanted.head].from_config(config)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_stand_ins(tree: Mapping[str, Any], folder: Path, judge_url: str | None) -> dict[str, Any]:
    """A configuration whose `models` are tiny ones, saved below `folder`, and whose judges are at `judge_url`."""
    result: dict[str, Any] = copy.deepcopy(dict(tree))
    wanted: dict[str, StandIn] = {}
    for written in _verifiers(result):
        if written["name"] in JUDGES and "urls" in written:
            # A key is for the endpoint that is replaced.
            written.pop("key", None)
            written |= {"urls": judge_url or "", "model": "stand-in", "hedge": None}
        elif written["name"] in JUDGES and written.get("backend") not in (None, "policy"):
            wanted[written["backend"]] = StandIn("causal")
        elif "model" in written:
            wanted[written["model"]] = _stand_in(written)
    models = result.get("models", {})
    for number, name in enumerate(models):
        path = save_stand_in(folder / name, wanted.get(name, StandIn("sequence")), seed=number)
        models[name] = {"path": str(path), "device": "cpu"}
    return result


def _verifiers(tree: Any) -> Iterator[dict[str, Any]]:
    """The verifiers in a configuration that ask a model, wherever they stand."""
    if isinstance(tree, Mapping):
        if tree.get("name") in (*JUDGES, "scorer", "step_scorer"):
            assert isinstance(tree, dict)
            yield tree
        for value in tree.values():
            yield from _verifiers(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _verifiers(value)


def _stand_in(written: dict[str, Any]) -> StandIn:
    """The model for a verifier `scorer` or `step_scorer`. One with code of its own becomes a token classifier."""
    outputs = _outputs(written.get("label"))
    if written["name"] == "scorer":
        head = SCORER_HEADS.get(written.get("kind", "classifier"), "causal")
        words = tuple(written.get("labels", ("yes", "no"))) if head == "causal" else ()
        return StandIn(head, outputs or ("score",), words)
    if written.get("head") == "next_token":
        return StandIn("causal", words=tuple(written.get("labels", ("+", "-"))))
    written["head"] = "token"
    return StandIn("token", outputs or ("wrong", "right"))


def _outputs(label: str | int | None) -> tuple[str, ...]:
    """Outputs among which there is this one."""
    if label is None:
        return ()
    if isinstance(label, str):
        return ("other", label)
    return tuple(f"output {number}" for number in range(max(2, label + 1)))


@contextmanager
def scripted_judge(rules: Mapping[str, str] | None) -> Iterator[str | None]:
    """The url of a judge that follows `rules` while the block runs; None without any."""
    if not rules:
        yield None
        return
    with StubJudge(lambda request: scripted_reply(request, rules)) as stub:
        yield stub.url


def scripted_reply(request: StubRequest, rules: Mapping[str, str]) -> str | dict[str, Any]:
    """The reply to a request: the verdict of the first rule whose regular expression is found in a text.

    A request with steps gets one verdict for each step, one with criteria for each criterion by the response, one with
    two responses the better of them by the numbers of the rules, one for the probability of a token the verdict as its
    token, any other one by the response.
    """
    steps = _numbered(request, "step")
    if steps:
        return _labels(request, "steps", [_verdict(text, rules) for text in steps])
    if "criteria" in request.fenced:
        count = len(request.fenced["criteria"].splitlines())
        return _labels(request, "met", [_verdict(request.fenced["response"], rules)] * count)
    if "first" in request.fenced:
        said = _preferred(request, rules)
    else:
        said = _verdict(request.fenced.get("response", request.outside), rules)
    if request.body.get("logprobs"):
        return request.probabilities({said: 0.9})
    return request.verdict(said)


def _numbered(request: StubRequest, name: str) -> list[str]:
    """The texts that stand in fences `name_1`, `name_2` and so on."""
    found = {
        int(key.rpartition("_")[2]): text for key, text in request.fenced.items() if re.fullmatch(rf"{name}_\d+", key)
    }
    return [found[number] for number in sorted(found)]


def _labels(request: StubRequest, name: str, verdicts: Sequence[str]) -> str:
    labels: dict[str, Any] = {}
    for number, said in enumerate(verdicts, start=1):
        labels[str(number)] = said == "true" if said in ("true", "false") else said
    return json.dumps({name: labels, "code": request.code})


def _preferred(request: StubRequest, rules: Mapping[str, str]) -> str:
    """The first of the labels that the end of the request lists where the first text has the greater number, the last
    one where the second has it, else the one in the middle."""
    first, second = (float(_verdict(request.fenced[name], rules)) for name in ("first", "second"))
    labels = list(request.letters) or re.split(", | or ", request.text.rstrip(" .\n").rpartition(": ")[2])
    if first == second:
        return labels[len(labels) // 2]
    return labels[0] if first > second else labels[-1]


def _verdict(text: str, rules: Mapping[str, str]) -> str:
    for pattern, verdict in rules.items():
        if re.search(pattern, text):
            return verdict
    raise ValueError(f"no rule of the scripted judge fits {text!r}: end the rules with one for all texts ('')")
