"""The verifier `pairs`: a language model compares the responses of a group two by two, in both orders.

Judges prefer a place (Zheng et al. 2023, "Judging LLM-as-a-Judge", arXiv 2306.05685, section 3.3), so every pair is
asked for in both orders, and a judge that always prefers the first makes all pairs ties. The score is the share of
comparisons that are won, or comes from the Bradley-Terry model, fitted by the MM algorithm of Hunter (2004, "MM
algorithms for generalized Bradley-Terry models", Annals of Statistics 32, equation 3).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlvr.core.seeding import seed_of
from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.judge.asks_judge import AsksJudge
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.fenced_prompt import JudgeTemplate, plain
from rlvr.verifiers.judge.readings import JudgeReading, LabelReader, ProbabilityReader, VerdictReader

TEMPLATE = """Decide which of two responses to the task is better. Neither their order nor their length counts.

Task:
{prompt}

Response A:
{first}

Response B:
{second}"""
LABELS = {"A": 1.0, "tie": 0.5, "B": 0.0}
"""The verdict on a pair -> the share of the win that its first response has."""
PRIOR = 0.1
"""Comparisons of each pair that are added as ties. Arbitrary: without any, a member that wins all has no finite
strength."""
STEPS = 1000
"""Most iterations of the MM algorithm; it stops where no strength changes by a part in 1e10."""


@register_verifier("pairs")
@dataclass
class PairsVerifier(AsksJudge):
    """The share of the group's other responses, or of an anchor, that a response beats, from 0 to 1.

    A group of n different responses takes n (n - 1) requests for each vote. Equal responses are ties that nobody is
    asked for. A pair of which one order has no verdict is left out; a response of which fewer than half of the pairs
    are left is undecided.
    """

    against: Literal["all", "random", "anchor"] = "all"
    """The others that a response is compared with. all: each other one; random: one of the group, drawn for the group,
    whose own score is 0.5, for 2 (n - 1) requests; anchor: a text of the task."""
    anchor: str = "answer"
    """The field with the text for `against: anchor`: `answer`, or one of `info`."""
    score: Literal["win_rate", "bradley_terry"] = "win_rate"
    """win_rate: the mean over comparisons of 1 for a win and 0.5 for a tie. bradley_terry: the mean probability to beat
    the others, in the Bradley-Terry model of all comparisons of the group."""
    template: str = TEMPLATE
    """The request, with `{first}`, `{second}`, `{prompt}`, `{answer}` and fields of `info`."""
    labels: dict[str, float] = field(default_factory=lambda: dict(LABELS))
    """The verdict on a pair -> the share of the win, 0 to 1, that its first response has. More than three are a scale
    of preference: `{A++: 1, A+: 0.75, B+: 0.25, B++: 0}`."""
    read: Literal["label", "probability"] = "label"
    """The form of the verdict, as of the verifier `judge`: one of `labels`, or the mean share, weighted with the
    probability of each as the reply's first token."""
    least_mass: float = 0.5
    """As of the verifier `judge`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._template = JudgeTemplate(self.template, ("first", "second"), self.longest)
        self._reader = self._make_reader()
        if self.score == "bradley_terry" and self.against != "all":
            raise ConfigError("pairs: score=bradley_terry needs against=all: with one opponent it is the win rate")

    def _make_reader(self) -> VerdictReader:
        if not all(0 <= share <= 1 for share in self.labels.values()):
            raise ConfigError("pairs: the share of the win that a label gives must be from 0 to 1")
        if self.read == "label":
            return LabelReader(self.labels, self.coded)
        if self.votes > 1:
            raise ConfigError("pairs: the probability of a token is the same for every vote: set votes to 1")
        return ProbabilityReader(self.labels, self.least_mass, self.coded)

    def check_task(self, task: Task) -> str | None:
        problem = super().check_task(task) or self._template.problem(task)
        if problem is None and self.against == "anchor" and self._anchor(task) is None:
            problem = f"the task has no {self.anchor!r} to compare with"
        return problem

    async def verify(self, task: Task, completion: str) -> Verdict:
        return (await self.verify_group(task, [completion]))[0]

    async def verify_group(self, task: Task, completions: Sequence[str]) -> list[Verdict]:  # type: ignore[override]
        """The verdicts on the responses of a group, in their order."""
        centre = self._centre(task, completions)
        texts = list(dict.fromkeys(completions if centre is None else [centre, *completions]))
        everyone = range(len(texts))
        if centre is None:
            pairs = [(i, j) for i in everyone for j in everyone if i < j]
        else:
            pairs = [(0, j) for j in everyone if j]
        results = await asyncio.gather(*(self._compared(task, texts[i], texts[j]) for i, j in pairs))
        # [M, M] of the M different texts: entry (i, j) is the share of the win that i has against j, NaN where unknown;
        # equal responses are ties.
        won = np.full((len(texts), len(texts)), np.nan)
        np.fill_diagonal(won, 0.5)
        agreed = np.eye(len(texts))
        errors: dict[int, JudgeError] = {}
        for (i, j), result in zip(pairs, results, strict=True):
            if isinstance(result, JudgeError):
                errors |= {i: result, j: result}
            else:
                won[i, j] = sum(result) / 2
                won[j, i] = 1 - won[i, j]
                # Both orders prefer the same one, or neither, by however much.
                agreed[i, j] = agreed[j, i] = float(np.sign(result[0] - 0.5) == np.sign(result[1] - 0.5))
        place = np.asarray([texts.index(text) for text in completions])
        members = won[np.ix_(place, place)]
        strengths = bradley_terry(members) if self.score == "bradley_terry" else None
        return [
            self._verdict(number, centre is not None, place, won, agreed, strengths, errors.get(int(place[number])))
            for number in range(len(completions))
        ]

    def _verdict(
        self,
        number: int,
        central: bool,
        place: np.ndarray,
        won: np.ndarray,
        agreed: np.ndarray,
        strengths: np.ndarray | None,
        error: JudgeError | None,
    ) -> Verdict:
        """The verdict on one member from the comparisons of all."""
        mine = place[number]
        others = np.asarray([0]) if central else np.delete(place, number)
        if not len(others):
            return Verdict.undecided("there is no other response in the group to compare with")
        shares = won[mine, others]
        known = np.isfinite(shares)
        if 2 * known.sum() < len(others):
            assert error is not None, "a pair without a result has an error"
            return self.undecided(error)
        score = float(shares[known].mean())
        if strengths is not None:
            rest = np.delete(strengths, number)
            score = float((strengths[number] / (strengths[number] + rest)).mean())
        # On the scale of `win_rate` a whole win is 1, and none 0; everything between is partial.
        return Verdict.from_score(
            score,
            reason=f"{shares[known].sum():g} of {known.sum()} comparisons won",
            scores={"consistent": float(agreed[mine, others][known].mean())},
        )

    async def _compared(self, task: Task, first: str, second: str) -> tuple[float, float] | JudgeError:
        """The share of the win that `first` has as the first and as the second of two; the error where one is
        unknown."""
        orders = [self._shares(task, first, second), self._shares(task, second, first)]
        forward, backward = await asyncio.gather(*orders)
        if isinstance(forward, JudgeError):
            return forward
        return backward if isinstance(backward, JudgeError) else (forward, 1 - backward)

    async def _shares(self, task: Task, first: str, second: str) -> float | JudgeError:
        """The mean share of the win that the votes give to the first of two."""
        given = {"first": first, "second": second}
        votes = await self.readings(lambda code: self._template.filled(task, given, code), self._reader)
        scores = [vote.score for vote in votes if isinstance(vote, JudgeReading)]
        errors = [vote for vote in votes if isinstance(vote, JudgeError)]
        return sum(scores) / len(scores) if scores else errors[0]

    def _centre(self, task: Task, completions: Sequence[str]) -> str | None:
        """The text that all are compared with; None where each is with each."""
        match self.against:
            case "all":
                return None
            case "anchor":
                return self._anchor(task)
            case "random":
                return random.Random(seed_of("pairs", task.id, *completions)).choice(list(completions))

    def _anchor(self, task: Task) -> str | None:
        value = task.answer if self.anchor == "answer" else task.info.get(self.anchor)
        return None if value is None else plain(value)


def bradley_terry(won: np.ndarray) -> np.ndarray:
    """float64 [n]: the strengths p, of geometric mean 1, under which i beats j with probability p_i / (p_i +
    p_j), most likely for these results.

    `won` [n, n] is the share of the win that i has against j, NaN where they were not compared; the diagonal is not
    read. Each pair that was compared has `PRIOR` comparisons more, as ties.
    """
    compared = np.isfinite(won) & ~np.eye(len(won), dtype=bool)
    # W_i of equation 3, the wins of i, and n_ij, the comparisons of i with j.
    wins = np.where(compared, won + PRIOR / 2, 0.0).sum(axis=1)
    count = np.where(compared, 1 + PRIOR, 0.0)
    strengths = np.ones(len(won))
    for _ in range(STEPS):
        before = strengths
        pull = (count / (strengths[:, None] + strengths[None, :])).sum(axis=1)
        # A member without a comparison stays at the mean of the others.
        strengths = np.divide(wins, pull, out=np.ones(len(won)), where=pull > 0)
        strengths = strengths / np.exp(np.log(strengths).mean())
        if np.abs(strengths / before - 1).max() < 1e-10:
            break
    return strengths
