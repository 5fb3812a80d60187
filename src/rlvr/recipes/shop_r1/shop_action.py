"""A person's next action in a shop on the web, and the hierarchical reward of a prediction of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register
from rlvr.verifiers.answers import require
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.documents import DocumentError, read_json

FORMAT = 0.5
TYPE = 0.3
PRESENT = {"terminate": {}, "click": {"name": 0.2}, "type_and_submit": {"name": 0.1, "text": 0.1}}
"""Type of an action -> the reward of each of its fields for having any text."""
NEAR = {"type_and_submit": {"name": 0.1}}
"""Type -> the weight of ROUGE-L of a field that is no long text."""
LONG = {"click": "name", "type_and_submit": "text"}
"""Type -> the field whose ROUGE-L weighs `difficulty`."""


@register("verifier", "shop_action")
@dataclass
class ShopActionVerifier(Verifier):
    """Compares the JSON object `{"rationale": TEXT, "action": {"type": ..., "name": ..., "text": ...}}` of a response
    with the action in `task.answer`: 1 where type and fields are the same, else 0.

    `Verdict.scores["reward"]` is the reward v(a) of Shop-R1 (Zhang et al. 2025, arXiv 2507.17842v1, table 1 and the
    text around it), the sum of the other scores: `format` 0.5 for such an object, `type` 0.3 for the right type, and
    with it `fields` 0.2 for fields that are not empty and `value`, ROUGE-L (F1) of each field where it is above
    `threshold`, times `difficulty` of the long one and 0.1 of the other.
    """

    difficulty: float = 1000.0
    """The factor of difficulty-aware reward scaling."""
    threshold: float = 0.75
    """ROUGE-L that a field has to be above to be paid."""
    max_length: int = 10_000
    """Characters of a response, and of a field of the answer; a longer response is unparsable."""
    time_limit: float = 10.0
    """Seconds for one response; one that takes longer scores 0."""

    needs: ClassVar[Needs] = Needs(process=True)

    def __post_init__(self) -> None:
        require("rouge_score", "verifiers", "shop_action")

    def prepare(self) -> None:
        self._scorer()

    def check_task(self, task: Task) -> str | None:
        if not isinstance(task.answer, Mapping) or task.answer.get("type") not in PRESENT:
            return f"the answer is no action of the type {', '.join(PRESENT)}"
        for name in PRESENT[task.answer["type"]]:
            value = task.answer.get(name)
            if not isinstance(value, str) or not any(c.isascii() and c.isalnum() for c in value):
                return f"the action's {name} is {value!r}: it needs a letter a-z or a digit, ROUGE reads no other"
            if len(value) > self.max_length:
                return f"the action's {name} has {len(value)} characters, over max_length={self.max_length}"
        return None

    def verify(self, task: Task, completion: str) -> Verdict:
        problem, action = self._read(completion)
        scores = {"format": 0.0, "type": 0.0, "fields": 0.0, "value": 0.0}
        if problem is not None:
            status = VerdictStatus.UNPARSABLE
            return Verdict(status, 0.0, reason=problem, scores={**scores, "reward": 0.0})
        scores["format"] = FORMAT
        wanted = task.answer
        kind = wanted["type"]
        same = action.get("type") == kind
        if same:
            fields = {name: action[name] for name in PRESENT[kind] if isinstance(action.get(name), str)}
            scores["type"] = TYPE
            scores["fields"] = sum(PRESENT[kind][name] for name, text in fields.items() if text.strip())
            weights = {**NEAR.get(kind, {}), **({LONG[kind]: self.difficulty} if kind in LONG else {})}
            scores["value"] = sum(weights[name] * self._similarity(wanted[name], text) for name, text in fields.items())
            same = all(fields.get(name) == wanted[name] for name in PRESENT[kind])
        scores["reward"] = sum(scores.values())
        reason = "the same action" if same else f"the action is {str(action)[:200]}"
        return Verdict.from_score(same, reason=reason, answer=str(action)[:200], scores=scores)

    def _read(self, completion: str) -> tuple[str | None, dict[str, Any]]:
        """What is wrong with the form of a response, or None, and its action."""
        try:
            document = read_json(completion.strip(), self.max_length)
        except DocumentError as error:
            return str(error), {}
        if not isinstance(document, dict) or set(document) != {"rationale", "action"}:
            return "no object with the two keys rationale and action", {}
        if not isinstance(document["rationale"], str) or not isinstance(document["action"], dict):
            return "the rationale is no text, or the action no object", {}
        return None, document["action"]

    def _similarity(self, wanted: str, text: str) -> float:
        """ROUGE-L, or 0 where it is not above the threshold."""
        value = float(self._scorer().score(wanted, text)["rougeL"].fmeasure)
        return value if value > self.threshold else 0.0

    def _scorer(self) -> Any:
        module = importlib.import_module("rouge_score.rouge_scorer")
        return module.RougeScorer(["rougeL"], use_stemmer=False)
