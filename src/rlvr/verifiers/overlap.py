"""N-gram overlap with a gold text: ROUGE by rouge-score, BLEU by sacrebleu.

Both run in worker processes: ROUGE-L takes time proportional to the product of the two lengths, so these are limited.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, Method, check_threshold, graded, read_texts, require
from rlvr.verifiers.base import Needs


@dataclass
class OverlapVerifier(AnswerVerifier):
    """The common part of ROUGE and BLEU."""

    methods: tuple[Method, ...] = ()
    max_length: int = 10_000
    """Characters of an answer, and of a gold; a longer answer is unparsable."""
    threshold: float | None = None
    """From this score on an answer is correct, below it is wrong; null: the score itself."""
    time_limit: float = 10.0
    """Seconds for one answer; one that takes longer scores 0."""

    needs: ClassVar[Needs] = Needs(process=True)

    def check_gold(self, gold: str) -> str | None:
        if len(gold) > self.max_length:
            return f"an answer of {len(gold)} characters is over max_length={self.max_length}"
        return None


@register_verifier("rouge")
@dataclass
class RougeVerifier(OverlapVerifier):
    """ROUGE of the answer and the nearest gold (Lin 2004), by Google's rouge-score: words of a-z and 0-9 in lower
    case."""

    kind: Literal["rouge1", "rouge2", "rougeL", "rougeLsum"] = "rougeL"
    """Shared words, pairs of words, or the longest common subsequence, of the text or line by line."""
    measure: Literal["f1", "recall", "precision"] = "f1"
    """Recall pays for length: an answer that holds everything recalls everything."""
    stemmer: bool = False
    """Compare word stems (Porter)."""

    def __post_init__(self) -> None:
        check_threshold("rouge", self.threshold)
        require("rouge_score", "verifiers", "rouge")

    def prepare(self) -> None:
        self._scorer()

    def check_gold(self, gold: str) -> str | None:
        problem = super().check_gold(gold)
        if problem is None and not any(c.isascii() and c.isalnum() for c in gold):
            return f"the answer {gold!r} has no letter a-z and no digit: ROUGE's tokenizer reads no other"
        return problem

    def judge(self, task: Task, answer: str) -> Verdict:
        scores = self._scorer().score_multi(read_texts(task.answer), answer)[self.kind]
        return graded(
            {"f1": scores.fmeasure, "recall": scores.recall, "precision": scores.precision}[self.measure],
            answer,
            self.threshold,
        )

    def _scorer(self) -> Any:
        module = importlib.import_module("rouge_score.rouge_scorer")
        return module.RougeScorer([self.kind], use_stemmer=self.stemmer)


@register_verifier("bleu")
@dataclass
class BleuVerifier(OverlapVerifier):
    """Sentence BLEU against all golds at once (Papineni et al. 2002), by sacrebleu, from 0 to 1.

    Exponential smoothing, and no order of n-grams that the answer is too short for.
    """

    tokenize: Literal["13a", "zh", "intl", "char", "none"] = "13a"
    """sacrebleu's tokenizer."""
    lowercase: bool = False
    """Ignore case."""

    def __post_init__(self) -> None:
        check_threshold("bleu", self.threshold)
        require("sacrebleu", "verifiers", "bleu")

    def prepare(self) -> None:
        self._metric()

    def judge(self, task: Task, answer: str) -> Verdict:
        score = self._metric().sentence_score(answer, list(read_texts(task.answer))).score
        # sacrebleu gives 0 to 100.
        return graded(score / 100, answer, self.threshold)

    def _metric(self) -> Any:
        module = importlib.import_module("sacrebleu.metrics.bleu")
        # effective_order: without it an answer of fewer than four words scores 0 for want of 4-grams.
        return module.BLEU(tokenize=self.tokenize, lowercase=self.lowercase, effective_order=True)
