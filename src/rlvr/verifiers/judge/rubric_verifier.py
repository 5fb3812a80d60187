"""The verifier `rubric`: a language model says which criteria of a task a response meets; weights make the score.

The score is that of HealthBench (openai/simple-evals, healthbench_eval.py at 9e2fafd1, `calculate_score`): the points
of the criteria that are met, divided by the sum of the positive points, so that criteria of what is undesirable have
negative points and the score may be below 0. Its field names `criterion` and `points` are taken, too. That one request
holds all criteria, and that a reply without each of them is no verdict, is as in PrimeIntellect-ai/verifiers
(verifiers/v1/judges/rubric.py at a60a606e, `max_criteria: None` and `score_verdicts`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.judge.asks_judge import AsksJudge
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.fenced_prompt import JudgeTemplate
from rlvr.verifiers.judge.judge_verifier import voted
from rlvr.verifiers.judge.numbered_reader import NumberedReader, of_number
from rlvr.verifiers.judge.readings import JudgeReading, VerdictReader, after_reasoning, json_objects, unparsable
from rlvr.verifiers.judge.reply_cache import ChatReply

TEMPLATE = """Decide for each criterion whether the response meets it. A criterion of several parts is met where all \
are. A criterion may be of something undesirable: say whether it is met, not whether that is good.

Task:
{prompt}

Response:
{response}

Criteria:
{criteria}"""
CRITERIA_TEMPLATE = """Write the criteria by which responses to this task are to be judged: each of one thing that can \
be found in a response or not, those of what is undesirable with a negative weight. You do not see the responses.

Task:
{prompt}"""
_TEXTS = ("text", "criterion", "description")
_NAMES = ("name", "title")
_WEIGHTS = ("weight", "points")
"""Keys of a criterion: ours first, then those of published data sets."""


@dataclass(frozen=True)
class Criterion:
    """One criterion of a rubric."""

    name: str
    text: str
    weight: float = 1.0
    veto: bool = False
    """True: the whole rubric gets `veto_score` where it is not met (of a negative weight: where it is)."""

    def strikes(self, met: float) -> bool:
        """Return True if the criterion is a veto and strikes."""
        return self.veto and bool(met) == (self.weight < 0)


def read_criteria(written: Any, whole: bool = True) -> list[Criterion] | str:
    """The criteria of a list of texts or mappings; else in words what is wrong with them. `whole`: a score is made of
    these alone, and not with those of a task, so that one has to be worth something."""
    if not isinstance(written, Sequence) or isinstance(written, str) or not written:
        return "a rubric is a list of criteria, at least one"
    result = []
    for number, one in enumerate(written, start=1):
        row: Mapping[str, Any] = one if isinstance(one, Mapping) else {"text": one}
        text = next((row[key] for key in _TEXTS if row.get(key)), None)
        weight = next((row[key] for key in _WEIGHTS if key in row), 1.0)
        name = next((str(row[key]) for key in _NAMES if row.get(key)), str(number))
        if not isinstance(text, str):
            return f"criterion {number} has no `text`"
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            return f"the weight of criterion {number} is {weight!r}, not a finite number"
        result.append(Criterion(name, text, float(weight), bool(row.get("veto", False))))
    names = [criterion.name for criterion in result]
    if len(set(names)) < len(names):
        return "two criteria have one name"
    if whole and not any(criterion.weight > 0 for criterion in result):
        return "no criterion has a weight above 0, so nothing could ever be paid"
    return result


@register_verifier("rubric")
@dataclass
class RubricVerifier(AsksJudge):
    """The weighted share of a task's criteria that a language model finds met.

    `Verdict.scores` has 1 or 0 for each criterion by its name, so that the reward term `verdict` reads each with
    `part`. Several votes are counted for each criterion by itself.
    """

    rubric: str = "rubric"
    """The field of `info` with the task's criteria: a list of texts, or of mappings with `text` (or `criterion`,
    `description`), `weight` (or `points`; 1 by default, negative for what is undesirable), `name` (or `title`) and
    `veto`."""
    criteria: list[Any] = field(default_factory=list)
    """Criteria of all tasks, written the same, which come before a task's own; with some, a task need have none."""
    write_criteria: bool = False
    """The judge writes the criteria of a task that has none in `info`, once for a task, before any response is judged;
    a run that is resumed has others written, unless `cache` keeps the replies."""
    criteria_template: str = CRITERIA_TEMPLATE
    """The request for them, with `{prompt}`, `{answer}` and fields of `info`."""
    veto_score: float = 0.0
    """The score where a veto strikes, whatever else is met."""
    template: str = TEMPLATE
    """The request, with `{response}`, `{criteria}`, `{prompt}`, `{answer}` and fields of `info`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._template = JudgeTemplate(self.template, ("response", "criteria"), self.longest)
        self._criteria_template = JudgeTemplate(self.criteria_template, (), self.longest)
        self._written: dict[str, list[Criterion]] = {}
        """Task id -> the criteria that the judge has written."""
        self._writing: dict[tuple[int, str], asyncio.Task[list[Criterion] | JudgeError]] = {}
        """Event loop and task id -> the request for them that is under way."""
        # Vetoes of all tasks need no weight of their own: a task's criteria may be what is paid.
        if self.criteria and isinstance(problem := read_criteria(self.criteria, whole=False), str):
            raise ConfigError(f"rubric: {problem}")

    def check_task(self, task: Task) -> str | None:
        problem = super().check_task(task)
        if problem is None and self._writes(task):
            problem = self._criteria_template.problem(task)
        elif problem is None and isinstance(criteria := self._criteria(task), str):
            problem = f"info[{self.rubric!r}]: {criteria}"
        return problem or self._template.problem(task)

    async def verify(self, task: Task, completion: str) -> Verdict:
        criteria = await self._written_for(task) if self._writes(task) else self._criteria(task)
        if isinstance(criteria, JudgeError):
            return self.undecided(criteria)
        if isinstance(criteria, str):
            return Verdict.undecided(criteria)
        # One line each, so that none of them can look like two.
        shown = "\n".join(f"{n}. {' '.join(one.text.split())}" for n, one in enumerate(criteria, start=1))
        given = {"response": completion, "criteria": shown}
        reader = NumberedReader("met", len(criteria), "criteria", {"true": 1.0, "false": 0.0}, self.coded)
        votes = await self.readings(lambda code: self._template.filled(task, given, code), reader)
        met: dict[str, float] = {}
        for number, criterion in enumerate(criteria, start=1):
            said = voted([of_number(vote, number) for vote in votes], "majority", reader)
            if isinstance(said, JudgeError):
                return self.undecided(said)
            met[criterion.name] = said
        struck = [criterion.name for criterion in criteria if criterion.strikes(met[criterion.name])]
        reason = "met: " + (", ".join(name for name, value in met.items() if value) or "none")
        if struck:
            return Verdict.from_score(self.veto_score, reason=f"veto of {', '.join(struck)}; {reason}", scores=met)
        total = math.fsum(criterion.weight for criterion in criteria if criterion.weight > 0)
        points = math.fsum(criterion.weight * met[criterion.name] for criterion in criteria)
        return Verdict.from_score(points / total, reason=reason, scores=met)

    def _writes(self, task: Task) -> bool:
        return self.write_criteria and task.info.get(self.rubric) is None

    async def _written_for(self, task: Task) -> list[Criterion] | JudgeError:
        """The criteria that the judge has written for a task, or the error of a judge that wrote none. The responses of
        a group, which are judged at once, wait for one request."""
        if task.id in self._written:
            return self._written[task.id]
        key = id(asyncio.get_running_loop()), task.id
        if key not in self._writing:
            self._writing[key] = asyncio.ensure_future(self._write(task))
            self._writing[key].add_done_callback(lambda _: self._writing.pop(key, None))
        # Shielded, so that a verdict that is given up does not end the request for the others.
        return await asyncio.shield(self._writing[key])

    async def _write(self, task: Task) -> list[Criterion] | JudgeError:
        reader = CriteriaReader(self.criteria, self.coded)
        vote = await self._vote(lambda code: self._criteria_template.filled(task, {}, code), reader, 0)
        if isinstance(vote, JudgeError):
            return vote
        written = read_criteria([*self.criteria, *json.loads(vote.text)])
        assert not isinstance(written, str), "the reader has refused what is no rubric"
        self._written[task.id] = written
        return written

    def _criteria(self, task: Task) -> list[Criterion] | str:
        written = task.info.get(self.rubric)
        if written is None:
            return read_criteria(self.criteria)
        return read_criteria([*self.criteria, *written] if isinstance(written, (list, tuple)) else written)


@dataclass(frozen=True)
class CriteriaReader(VerdictReader):
    """Criteria that a judge writes: a JSON object with a list of objects of `text` and `weight`, as its reading's text.

    With `before`, the criteria of all tasks, they have to be a rubric.
    """

    before: Sequence[Any]
    coded: bool = True
    worst = 0.0
    best = 0.0

    def instruction(self, code: str) -> str:
        key = f', and the key "code" with the value "{code}"' if self.coded else ""
        return (
            'End your reply with one JSON object whose key "criteria" has a list of objects, each with a "text" and a '
            f'"weight", a number{key}.'
        )

    def read(self, reply: ChatReply) -> JudgeReading:
        found = [
            row["criteria"]
            for row in json_objects(after_reasoning(reply.text))
            if "criteria" in row and (not self.coded or row.get("code") == reply.code)
        ]
        if not found or any(one != found[0] for one in found):
            raise unparsable(reply, "has two lists of criteria" if found else "has no JSON object with 'criteria'")
        # A judge's own veto would decide alone, and its names are no column's.
        rows = found[0] if isinstance(found[0], list) else []
        kept = [{key: row[key] for key in (*_TEXTS, *_WEIGHTS) if key in row} for row in rows if isinstance(row, dict)]
        if len(kept) < len(rows) or not kept:
            raise unparsable(reply, "has criteria that are no objects")
        if isinstance(problem := read_criteria([*self.before, *kept]), str):
            raise unparsable(reply, f"has no rubric: {problem}")
        return JudgeReading(0.0, json.dumps(kept))
