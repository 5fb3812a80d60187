"""Rankings of ids against graded relevance: NDCG@k, recall@k, the reciprocal rank, hits.

Invariant: an answer is a ranking without ties, in which every id is known and stands once, or it scores 0: repeating a
relevant id or inventing ids pays nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, bare, check_threshold, graded, unparsable

# Matches `1. a`, `(2) b`, `- c`; not `1a`.
_NUMBERING = re.compile(r"\s*(?:\(?[0-9]{1,4}[.):]|[-*\u2022])\s+")
_EDGES = " \t\"'`[](){}<>.;:*"


@register_verifier("ranking")
@dataclass
class RankingVerifier(AnswerVerifier):
    """A ranking of ids, best first, by one of the usual metrics; the others are among the verdict's named scores.

    `task.answer` is a mapping of ids to grades (0 or more; what it leaves out has 0) or a list of the relevant ids
    (grade 1). `info["candidates"]` lists the ids that may be ranked; by default the ids of the answer. The answer is
    `[3] > [1] > [2]`, a list with commas, one id a line, or a JSON list. Fewer ids than candidates may be ranked.
    """

    metric: Literal["ndcg", "recall", "mrr", "hit"] = "ndcg"
    """`ndcg` (Jarvelin and Kekalainen 2002), `recall`: relevant ids found over all relevant ids, `mrr`: 1 / rank of the
    first relevant id, `hit`: whether any relevant id was found."""
    k: int = 10
    """Only the first k places count."""
    gain: Literal["exponential", "linear"] = "exponential"
    """The gain of grade g in NDCG: 2^g - 1, or g."""
    complete: bool = False
    """Refuse a ranking that leaves candidates out."""
    threshold: float | None = None
    """From this score on an answer is correct, below it is wrong; null: the score itself."""
    max_length: int = 20_000

    def __post_init__(self) -> None:
        check_threshold("ranking", self.threshold)
        if self.k < 1:
            raise ConfigError(f"ranking: k={self.k} is not 1 or more")

    def check_task(self, task: Task) -> str | None:
        grades = read_grades(task.answer)
        if isinstance(grades, str):
            return grades
        candidates = task.info.get("candidates")
        if candidates is None:
            return None
        if not isinstance(candidates, (list, tuple)):
            return f'info["candidates"] is {type(candidates).__name__}, not a list'
        candidate_ids = [str(candidate) for candidate in candidates]
        if len(set(candidate_ids)) < len(candidate_ids):
            return 'info["candidates"] has an id twice'
        strange = [identity for identity, grade in grades.items() if grade > 0 and identity not in candidate_ids]
        if strange:
            return f'the relevant id {strange[0]!r} is not among info["candidates"]'
        return None

    def judge(self, task: Task, answer: str) -> Verdict:
        grades = read_grades(task.answer)
        assert not isinstance(grades, str)
        candidates = {str(candidate) for candidate in task.info.get("candidates") or grades}
        ranked = read_ranking(answer, candidates)
        if isinstance(ranked, str):
            return unparsable(ranked, answer)
        if self.complete and len(ranked) < len(candidates):
            return unparsable(f"{len(candidates) - len(ranked)} candidates are not ranked", answer)
        gains = [grades.get(identity, 0.0) for identity in ranked]
        scores = {
            "ndcg": ndcg(gains, list(grades.values()), self.k, self.gain),
            "recall": recall(gains, list(grades.values()), self.k),
            "mrr": reciprocal_rank(gains, self.k),
            "hit": float(any(grade > 0 for grade in gains[: self.k])),
        }
        return graded(scores[self.metric], answer, self.threshold, **scores)

    def same_answer(self, first: str, second: str) -> bool:
        return _split(first) == _split(second)


def read_grades(answer: Any) -> dict[str, float] | str:
    """Id -> grade, at least one above 0; else in words why the gold cannot be used."""
    if isinstance(answer, (list, tuple)):
        grades = {str(identity): 1.0 for identity in answer}
        if len(grades) < len(answer):
            return "the answer has an id twice"
    elif isinstance(answer, Mapping):
        # Up to 100, so that 2^g stays a finite float with room for sums; 0.001 keeps the ideal DCG away from 0.
        if not all(type(grade) in (int, float) and (grade == 0 or 1e-3 <= grade <= 100) for grade in answer.values()):
            return "the answer has a grade that is neither 0 nor a number from 0.001 to 100"
        grades = {str(identity): float(grade) for identity, grade in answer.items()}
    else:
        return f"the answer is {type(answer).__name__}, not a mapping of ids to grades or a list of relevant ids"
    if any(grades.values()):
        return grades
    return "no id of the answer is relevant"


def read_ranking(text: str, candidates: set[str]) -> list[str] | str:
    """The ids that `text` ranks, best first; else in words why it is no ranking of candidates."""
    ranked = [identity if identity in candidates else identity.strip(_EDGES) for identity in _split(text)]
    if not ranked:
        return "nothing is ranked"
    unknown = next((identity for identity in ranked if identity not in candidates), None)
    if unknown is not None:
        return f"{unknown[:40]!r} is none of the candidates"
    if len(set(ranked)) == len(ranked):
        return ranked
    return "an id stands twice"


def _split(text: str) -> list[str]:
    """The items of a list as written: JSON, `a > b`, one a line, or with commas."""
    try:
        # RecursionError: `[[[[...` from a model that repeats itself.
        items = json.loads(text)
    except (ValueError, RecursionError):
        items = None
    if isinstance(items, list):
        return [str(item) if type(item) in (str, int) else "" for item in items]
    lines = [bare(line) for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and all(_NUMBERING.match(line) for line in lines):
        lines = [_NUMBERING.sub("", line, count=1) for line in lines]
    separator = ">" if any(">" in line for line in lines) else ","
    return [item.strip() for line in lines for item in line.rstrip(separator + " ").split(separator)]


def ndcg(gains: Sequence[float], grades: Sequence[float], k: int, gain: str = "exponential") -> float:
    """DCG@k of the grades in ranked order over the best that the grades allow; discount 1 / log2(rank + 1)."""

    def dcg(values: Sequence[float]) -> float:
        # Gain 2^g - 1 (Burges et al. 2005) or g (Jarvelin and Kekalainen 2002); discount log2(rank + 1), where `rank`
        # counts from 0 here.
        worth = [2.0**value - 1 if gain == "exponential" else value for value in values[:k]]
        return math.fsum(value / math.log2(rank + 2) for rank, value in enumerate(worth))

    return dcg(gains) / dcg(sorted(grades, reverse=True))


def recall(gains: Sequence[float], grades: Sequence[float], k: int) -> float:
    """Relevant ids among the first k over all relevant ids."""
    return sum(grade > 0 for grade in gains[:k]) / sum(grade > 0 for grade in grades)


def reciprocal_rank(gains: Sequence[float], k: int) -> float:
    """1 / rank of the first relevant id, 0 where there is none among the first k."""
    return next((1 / rank for rank, grade in enumerate(gains[:k], 1) if grade > 0), 0.0)
