"""A verifier on trial: the built-in tricks (rlvr.verifiers.audit.tricks) tried on it, and what it did with each.

First a correct answer is given in one form after another until the verifier pays: the control. Tricks are then written
in that form, so a refusal is the trick's and not the form's. Invariant: a verifier that pays no control is reported as
not tried, never as honest.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rlvr.monitor.console_text import shorten
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers.audit.targets import FORMS, Form, Target, form_of, gold_texts, wrong_answers
from rlvr.verifiers.audit.tricks import TRICKS, Trick

Judge = Callable[[Task, str], Awaitable[Verdict]]
"""The verdict of the verifier on trial."""


# Arbitrary: a trick may be a megabyte long, and the report is read by people.
KEPT = 2000
"""Characters kept of a completion that fooled the verifier."""


class TrickOutcome(enum.StrEnum):
    """The verdict of a verifier on a trick."""

    REFUSED = "refused"
    PART = "part"
    """Paid less than a correct answer: what a verifier that pays parts may do."""
    PAID = "paid"
    UNDECIDED = "undecided"
    """Left out of loss and baseline: a policy could dodge its zeros that way."""
    SURVIVED = "survived"
    """Decided, where that is all that is asked."""

    @property
    def failed(self) -> bool:
        return self in (TrickOutcome.PAID, TrickOutcome.UNDECIDED)


@dataclass(frozen=True)
class Example:
    """A task to try a verifier with."""

    task: Task
    completion: str | None = None
    """A correct completion, where the forms of rlvr.verifiers.audit.targets do not do."""
    gold: str | None = None
    """A right answer as text, where the task's own `answer` is none."""
    junk_is_wrong: bool = False
    """Junk is known to be wrong although the task has no `answer`: it is not a check of form alone, such as a
    length."""


@dataclass(frozen=True)
class ControlAnswer:
    """A correct completion that the verifier pays, and what tricks are written for."""

    target: Target
    paid: float


@dataclass(frozen=True)
class Attempt:
    """One completion of one trick, and what became of it."""

    trick: Trick
    task: Task
    completion: str
    verdict: Verdict
    outcome: TrickOutcome


@dataclass
class TrickTrial:
    """Results of all tricks: counts and the longest seconds by trick, and the attempts that failed."""

    controls: list[tuple[Task, ControlAnswer | None]] = field(default_factory=list)
    """Each task that was tried, with its control; None where no correct completion was paid."""
    counts: dict[str, Counter[TrickOutcome]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    timeouts: Counter[str] = field(default_factory=Counter)
    """Attempts that ended in a timeout, by trick, whatever became of them."""
    failures: list[Attempt] = field(default_factory=list)

    @property
    def not_tried(self) -> list[str]:
        """The built-in tricks that have no completion for these tasks, by name."""
        return [trick.name for trick in TRICKS if trick.name not in self.counts]

    def add(self, attempt: Attempt) -> None:
        """Count an attempt; a failed one is kept, its completion shortened to `KEPT` characters."""
        name = attempt.trick.name
        verdict = attempt.verdict
        self.counts.setdefault(name, Counter())[attempt.outcome] += 1
        self.seconds[name] = max(self.seconds.get(name, 0.0), verdict.seconds)
        self.timeouts[name] += verdict.status is VerdictStatus.TIMEOUT
        if attempt.outcome.failed:
            self.failures.append(replace(attempt, completion=shorten(attempt.completion, KEPT)))


async def try_tricks(
    judge: Judge, examples: Iterable[Example], name: str, trial: TrickTrial, tricks: Sequence[Trick] = TRICKS
) -> None:
    """Try every trick on every example and add what came of it to `trial`, which keeps it when this is cancelled.

    A task without a control is tried with the tricks that need none.
    """
    for example in examples:
        control = await find_control(judge, example, (name,))
        trial.controls.append((example.task, control))
        if control is None:
            # FORMS[1] is the bare answer: without a control no form is known to be paid.
            target = Target(None, wrong_answers(None, {}), FORMS[1], prompt_text(example.task), (name,))
            control = ControlAnswer(target, 1.0)
        async for attempt in attempts(judge, example, control, tricks):
            trial.add(attempt)


async def find_control(judge: Judge, example: Example, names: Sequence[str] = ()) -> ControlAnswer | None:
    """The first correct completion that is paid in full, else the one that is paid best; None where none is paid."""
    best: ControlAnswer | None = None
    for form, gold in _plain_answers(example):
        verdict = await judge(example.task, form(gold or ""))
        paid = verdict.score or 0.0
        if paid > (best.paid if best else 0.0):
            correct = form(gold or "")
            form = FORMS[1] if gold is None else form  # a form without a place for an answer would repeat the right one
            info = example.task.info
            target = Target(gold, wrong_answers(gold, info), form, prompt_text(example.task), names, info, correct)
            best = ControlAnswer(target, paid)
        # Verifiers with partial credit may pay the first forms less: the best of all is the control.
        if paid >= 1:
            break
    return best


async def attempts(
    judge: Judge, example: Example, control: ControlAnswer, tricks: Sequence[Trick] = TRICKS
) -> AsyncIterator[Attempt]:
    """Every trick on one task, in order."""
    task = example.task
    known_wrong = example.junk_is_wrong or example.task.answer is not None

    async def try_out(written: tuple[Trick, str]) -> Verdict:
        return await judge(task, written[1])

    async for (trick, completion), verdict in in_order(_written(tricks, control.target), try_out, lambda w: len(w[1])):
        yield Attempt(trick, task, completion, verdict, outcome_of(trick, verdict, control.paid, known_wrong))


def outcome_of(trick: Trick, verdict: Verdict, full: float, known_wrong: bool = True) -> TrickOutcome:
    """Return the outcome of a trick by its verdict, when a correct answer is paid `full`.

    `known_wrong` says that completions without an answer are wrong; if not, a verifier may rightly pay for junk.
    """
    if verdict.score is None:
        return TrickOutcome.UNDECIDED
    # A check of form alone (a length, a schema) may rightly pay a wrong answer, unless there is nothing to pay for
    # (`strict`).
    if trick.must == "survive" or not (known_wrong or trick.strict):
        return TrickOutcome.SURVIVED
    if verdict.score <= 0:
        return TrickOutcome.REFUSED
    # As much as a correct answer: the policy has no reason to prefer that one.
    if trick.strict or verdict.score >= full:
        return TrickOutcome.PAID
    return TrickOutcome.PART


def prompt_text(task: Task) -> str:
    """The prompt as one text, of chat messages the last one."""
    if isinstance(task.prompt, str):
        return task.prompt
    return str(task.prompt[-1].get("content"))


def _written(tricks: Sequence[Trick], target: Target) -> Iterator[tuple[Trick, str]]:
    for trick in tricks:
        if target.gold is not None or not trick.needs_gold:
            # A trick may write the same text in two ways, where the gold is short.
            for completion in dict.fromkeys(trick.write(target)):
                yield trick, completion


def _plain_answers(example: Example) -> Iterator[tuple[Form, str | None]]:
    """Correct completions as a form and the answer to put into it; without an answer, the form is all."""
    if example.gold is None:
        golds = gold_texts(example.task)
    else:
        golds = [example.gold]
    if example.completion is not None:
        yield _slotted(example.completion, golds)
    for gold in golds:
        for form in FORMS:
            yield form, gold
    if example.task.demonstration is not None:
        yield _slotted(example.task.demonstration, golds)


def _slotted(completion: str, golds: Sequence[str]) -> tuple[Form, str | None]:
    """A completion as a form round the first of `golds` that it mentions."""
    forms = ((form_of(completion, gold), gold) for gold in golds)
    return next(((form, gold) for form, gold in forms if form), (Form("completion", completion), None))


T = TypeVar("T")
V = TypeVar("V")

MOST = 256
"""Items under way at once: more than the pool has slots for verifiers that wait."""
MOST_SIZE = 64_000_000
"""Their size together (characters, say), unless one alone is larger."""


async def in_order(
    items: Iterable[T], work: Callable[[T], Awaitable[V]], size: Callable[[T], int]
) -> AsyncIterator[tuple[T, V]]:
    """(item, result of `work` on it) in the order of `items`, which are read as earlier ones leave.

    When the iteration is given up, what is under way is cancelled.
    """
    waiting: deque[tuple[T, asyncio.Future[V]]] = deque()
    held = 0
    try:
        for item in items:
            waiting.append((item, asyncio.ensure_future(work(item))))
            held += size(item)
            # The first one is awaited also where it is done already, so that results leave as early as they can.
            while len(waiting) >= MOST or held > MOST_SIZE or (waiting and waiting[0][1].done()):
                first, future = waiting[0]
                result = await future
                waiting.popleft()
                held -= size(first)
                yield first, result
            await asyncio.sleep(0)  # let what was just given start
        while waiting:
            first, future = waiting[0]
            result = await future
            waiting.popleft()
            yield first, result
    finally:
        for _, future in waiting:
            future.cancel()
