"""The verifier of each task, and where verifiers run: in the caller (quick), in worker processes, on threads, or on an
event loop.

    with VerifierPool(workers=4) as pool:
        verdict = await pool.verify(verifier, task, completion)

Invariants: every call of `verify` ends in one Verdict, within the time limit plus the wait for a free slot, and never
in an exception; the clock of an answer starts when its verification starts, not while it waits; no process outlives the
pool or the program. Every task has a verifier and a verifier accepts every task before training starts, or the run is
refused with the task's name.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from rlvr.core.calling import sampled_ids
from rlvr.core.process.deadline import Deadline
from rlvr.core.specs import ComponentSpec
from rlvr.errors import ConfigError
from rlvr.records import BASELINE, Rollout, Task, Verdict, VerdictStatus
from rlvr.registry import refuse_words
from rlvr.verifiers.base import (
    FunctionVerifier,
    Verifier,
    as_verdict,
    as_verdicts,
    as_verifier,
    display_name,
    is_coroutine,
    timed,
)
from rlvr.verifiers.pool.cache import VerdictCache
from rlvr.verifiers.pool.sandbox import missing as missing_sandbox
from rlvr.verifiers.pool.threads import LoopThread, Threads, cores
from rlvr.verifiers.pool.wire import VerifierJob
from rlvr.verifiers.pool.worker_groups import LoadError, WorkerGroup, WorkerGroups
from rlvr.verifiers.run_models import RunModels
from rlvr.verifiers.unverifiable import problem_of, refuse_unverifiable, without_verifier

T = TypeVar("T")

# Arbitrary: each such thread keeps its stack and whatever the call holds, and there is no way to end it.
MAX_LOST = 256
"""Abandoned calls that never returned, beyond which no new thread is started."""


class VerifierPool:
    """Runs verifiers of any kind; safe to await from any event loop, several at once.

    Plain functions, and verifiers that need a process and are `remote`, mostly wait: `workers` processes run them. A
    verifier that `needs.process` and is not remote computes: as many processes run it as there are cores for this
    trainer, but no more than `workers`. Processes are forked when first needed, and may take `memory_mb` of address
    space each on top of what the loaded verifier takes. Asynchronous verifiers wait on one thread, `concurrent` at a
    time. `time_limit` (seconds) replaces the verifiers' own.

    What happens past the time limit: a worker process is killed, and the answer scores 0, unless the verifier is remote
    or a plain function that was waiting rather than computing. Anything else is abandoned, and the verdict is
    undecided, since nobody knows whose fault it was.
    """

    def __init__(
        self, workers: int = 64, time_limit: float | None = None, memory_mb: int = 2048, concurrent: int = 64
    ) -> None:
        if workers < 1 or concurrent < 1:
            raise ValueError(f"a pool needs at least 1 worker and 1 slot, not {workers} and {concurrent}")
        if time_limit is not None and time_limit <= 0:
            raise ValueError(f"the time limit must be above 0 seconds, not {time_limit}")
        self.time_limit = time_limit
        self._closed = False
        self._owner = os.getpid()
        self._cache = VerdictCache()
        self._warned: set[str] = set()
        self._threads = Threads()
        self._worker_groups = WorkerGroups(memory_mb, most=workers)
        # Three counts: processes that wait may outnumber the cores, those that compute may not, and calls on threads
        # take no slot of a process.
        self._waiting_slots = asyncio.Semaphore(workers)
        self._computing_slots = asyncio.Semaphore(min(workers, cores()))
        self._thread_slots = asyncio.Semaphore(workers)
        self._async_slots = asyncio.Semaphore(concurrent)
        self._loop = LoopThread("verifier-pool")
        # Apart, so that a coroutine that blocks its loop stops no deadline.
        self._coroutines = LoopThread("verifier-async")
        atexit.register(self.close)

    async def verify(
        self,
        verifier: Verifier,
        task: Task,
        completion: str,
        rollout: Rollout | None = None,
        token_ids: list[int] | None = None,
    ) -> Verdict:
        """The verdict of `verifier` on one completion. `rollout`, or `token_ids` in its place, is for functions that
        ask for the ids of the sampled tokens."""
        if self._closed or not isinstance(completion, str):
            return Verdict.undecided(_CLOSED if self._closed else _no_text(completion))
        start = time.perf_counter()
        try:
            # On the caller's loop, without a thread: most verdicts of short answers cost less than handing them over.
            verdict = verifier.quick(task, completion)
        except Exception as error:  # a verifier's trouble costs a verdict, not the run
            verdict = Verdict.raised(f"{display_name(verifier)}.quick raised", error)
        if verdict:
            key = None
        else:
            key = self._cache.key(verifier, task, completion)
        if key is not None:
            verdict = self._cache.get(key)
        if verdict is not None:
            # The time of this call, not that of the verdict when it was first given.
            return replace(verdict, seconds=time.perf_counter() - start)
        if rollout is not None:
            token_ids = sampled_ids(rollout)
        verdicts = await self._on_loop(self._run(verifier, VerifierJob(task, (completion,), (token_ids,))))
        if not verdicts:
            return Verdict.undecided(_CLOSED)
        if key is not None:
            self._cache.put(key, verifier, verdicts[0])
        return verdicts[0]

    async def verify_group(
        self, verifier: Verifier, task: Task, completions: Sequence[str], rollouts: Sequence[Rollout] | None = None
    ) -> list[Verdict]:
        """The verdicts on the completions of one task, in one call where the verifier has `verify_group`."""
        if rollouts is None:
            ids: list[list[int] | None] = [None] * len(completions)
        else:
            ids = [sampled_ids(rollout) for rollout in rollouts]
        return await self._group_of(verifier, task, completions, ids)

    async def _group_of(
        self, verifier: Verifier, task: Task, completions: Sequence[str], ids: Sequence[list[int] | None]
    ) -> list[Verdict]:
        """The verdicts on a group, `ids` being those of the sampled tokens of each completion, None where unknown."""
        if verifier.verify_group is None:
            ones = zip(completions, ids, strict=True)
            return list(await asyncio.gather(*(self.verify(verifier, task, text, token_ids=own) for text, own in ones)))
        bad = [completion for completion in completions if not isinstance(completion, str)]
        if not completions or bad or self._closed:
            reason = _no_text(bad[0]) if bad else _CLOSED
            return [Verdict.undecided(reason)] * len(completions)
        verdicts = await self._on_loop(self._run(verifier, VerifierJob(task, tuple(completions), ids, group=True)))
        return verdicts or [Verdict.undecided(_CLOSED)] * len(completions)

    @property
    def processes(self) -> int:
        """Number of worker processes."""
        return self._worker_groups.alive

    def verify_many(self, verifier: Verifier, pairs: Iterable[tuple[Task, str]]) -> list[Verdict]:
        """The verdicts on (task, completion) pairs, in order; for code without an event loop of its own."""

        async def gather() -> list[Verdict]:
            return await asyncio.gather(*(self.verify(verifier, task, completion) for task, completion in pairs))

        if not self._closed:
            return self._loop.submit(gather()).result()
        return [Verdict.undecided(_CLOSED) for _ in pairs]

    def close(self) -> None:
        """End all processes and threads; verifications under way end undecided. Closing twice is fine."""
        # A fork of the program has neither our threads nor our processes.
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        # Otherwise `atexit` would keep the pool, and all that it holds, until the end of the program.
        atexit.unregister(self.close)
        # Processes first, on the loop that owns them; the loops after that, since closing needs them.
        self._loop.submit(self._worker_groups.close()).result()
        self._coroutines.stop()
        self._loop.stop()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work` on the pool's own loop; None when the pool was closed meanwhile."""
        # Verifications made of verifications (`compose`) already run there; a second hand-over would only cost time.
        if asyncio.get_running_loop() is self._loop.loop:
            return await work
        try:
            return await asyncio.wrap_future(self._loop.submit(work))
        except RuntimeError:  # closed since we looked
            return None
        except asyncio.CancelledError:
            # Two cases look the same here: the pool was closed and its loop cancelled what ran, or the caller itself is
            # cancelled, which has to be passed on.
            caller = asyncio.current_task()
            if self._closed and not (caller and caller.cancelling()):
                return None
            raise

    async def _run(self, verifier: Verifier, job: VerifierJob) -> list[Verdict]:
        """The verdicts on one job, wherever its verifier runs."""
        if self.time_limit is None:
            limit = verifier.time_limit
        else:
            limit = self.time_limit
        try:
            # It holds no slot itself: its parts take theirs, and could wait for ever for one that it kept.
            if verifier.compose_group is not None and job.group:
                return await self._composed_group(verifier, verifier.compose_group, job)
            if (compose := verifier.compose) is not None:
                return [await self._composed(verifier, compose, job)]
            # None as the answer means that the verifier cannot be sent to a process: then it goes on below, on a
            # thread.
            if verifier.needs.process or verifier.needs.sandbox:
                verdicts = await self._in_process(verifier, job, limit)
                if verdicts is not None:
                    return verdicts
            if _is_async(verifier, job.group):
                async with self._async_slots:
                    call = self._coroutines.submit(job.verdicts(verifier))
                    return await self._within(asyncio.wrap_future(call), limit, len(job.completions))
            async with self._thread_slots:
                # Becomes an undecided verdict below, like every exception.
                if self._threads.lost >= MAX_LOST:
                    raise RuntimeError(f"{self._threads.lost} earlier calls of verifiers never returned")
                return await self._within(job.verdicts(verifier, self._threads.call), limit, len(job.completions))
        except Exception as error:  # whatever we did not think of costs these verdicts only
            return [Verdict.raised("the verification failed:", error)] * len(job.completions)

    async def _in_process(self, verifier: Verifier, job: VerifierJob, limit: float) -> list[Verdict] | None:
        """The verdicts of a worker process; None when the verifier is to run on a thread."""
        worker_group = self._worker_groups.of(verifier)
        if isinstance(worker_group, WorkerGroup):
            try:
                async with self._slots(verifier):
                    return await worker_group.run(job, limit)
            except LoadError as error:
                name = display_name(verifier)
                needs = verifier.needs
                # A verifier that crashed its process would crash the trainer, too. A function of the user's that merely
                # cannot be imported elsewhere may run here.
                if error.crashed or needs.sandbox or not isinstance(verifier, FunctionVerifier):
                    failed = Verdict.undecided(f"{name} cannot be loaded: {error}", traceback=error.traceback)
                    return [failed] * len(job.completions)
                problem = f"cannot be loaded in a worker process ({error})"
            self._worker_groups.refuse(verifier, problem)
        else:
            problem = worker_group
        if verifier.needs.sandbox:
            return [Verdict.undecided(f"{display_name(verifier)} {problem}")] * len(job.completions)
        self._warn_once(
            f"{display_name(verifier)} {problem}; it runs on a thread of this process, where it cannot be killed"
        )
        return None

    def _slots(self, verifier: Verifier) -> asyncio.Semaphore:
        # A plain function may do anything, and mostly calls a service.
        waits = isinstance(verifier, FunctionVerifier) or verifier.needs.remote
        if waits:
            return self._waiting_slots
        return self._computing_slots

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    async def _composed(self, verifier: Verifier, compose: Any, job: VerifierJob) -> Verdict:
        """Return the verdict of a verifier that is made of others. It has no slot and no time limit: its parts have
        their own."""
        (completion,) = job.completions
        (token_ids,) = job.token_ids

        def verify(part: Verifier) -> Coroutine[Any, Any, Verdict]:
            return self.verify(part, job.task, completion, token_ids=token_ids)

        start = time.perf_counter()
        result = await asyncio.wrap_future(self._coroutines.submit(compose(job.task, completion, verify)))
        return timed(as_verdict(result, display_name(verifier)), start)

    async def _composed_group(self, verifier: Verifier, compose: Any, job: VerifierJob) -> list[Verdict]:
        """Return the verdicts on a group of a verifier that is made of others, as `_composed` returns one."""

        def verify(part: Verifier, members: Sequence[int]) -> Coroutine[Any, Any, list[Verdict]]:
            texts = [job.completions[member] for member in members]
            ids = [job.token_ids[member] for member in members]
            return self._group_of(part, job.task, texts, ids)

        start = time.perf_counter()
        result = await asyncio.wrap_future(self._coroutines.submit(compose(job.task, job.completions, verify)))
        return [timed(one, start) for one in as_verdicts(result, display_name(verifier), len(job.completions))]

    async def _within(self, work: Any, limit: float, count: int) -> list[Verdict]:
        """The verdicts of `work`, or undecided ones past the limit, without waiting for it to give up."""
        task = asyncio.ensure_future(work)
        try:
            async with Deadline(limit):
                await asyncio.wait({task})
        except TimeoutError:
            pass  # it may have finished all the same
        finally:
            finished = task.done()
            task.cancel()
        if not finished:
            return [Verdict.undecided(f"no verdict after {limit:g} s", VerdictStatus.TIMEOUT, seconds=limit)] * count
        try:
            # Cancelled by itself and not by the limit: `finished` was read before `task.cancel()`.
            return task.result()
        except asyncio.CancelledError:
            return [Verdict.undecided("the verifier cancelled itself")] * count


def _is_async(verifier: Verifier, group: bool) -> bool:
    if isinstance(verifier, FunctionVerifier):
        return is_coroutine(verifier.call.function)
    return is_coroutine(verifier.verify_group if group else verifier.verify)


_CLOSED = "the verifier pool is closed"


def _no_text(completion: Any) -> str:
    return f"the completion is {type(completion).__name__}, not a text"


class Verification:
    """Puts verdicts on rollouts. `verifier` (a Verifier, a function, or a component as configured) checks all tasks;
    with None each task has its own.

    `named` are further verifiers of all tasks, by the name that their verdicts have in a rollout. Their verdicts come
    after that of `verifier`, which stays `Rollout.verdict`. ConfigError where two would have one name.
    """

    def __init__(self, verifier: Any, pool: VerifierPool, named: Mapping[str, Any] | None = None) -> None:
        self.pool = pool
        self._default = None if verifier is None else _with_name(verifier)
        self._named = []
        for name, written in (named or {}).items():
            if isinstance(written, ComponentSpec):  # by its key, where `as_verifier` would name that of the main one
                refuse_words(f"verifiers.{name}", written.name)
            self._named.append((as_verifier(written), name))
        self._of_tasks: dict[str, tuple[Verifier, str]] = {}
        """The verifiers that tasks name."""
        self._models: RunModels | None = None

    def attach(self, models: RunModels) -> None:
        """Give the verifiers the run's models, now or when a task first names one. ConfigError where one does not
        fit."""
        self._models = models
        default = [] if self._default is None else [self._default]
        for verifier, _ in [*default, *self._of_tasks.values(), *self._named]:
            verifier.attach(models)

    def of(self, task: Task) -> Verifier:
        """The verifier of a task. DataError when nothing says which."""
        return self._verifier_of(task)[0]

    def _verifier_of(self, task: Task) -> tuple[Verifier, str]:
        """The verifier of a task, and the name that its verdicts have in a rollout."""
        # The verifier of the config holds for all tasks, whatever they name.
        if self._default is not None:
            return self._default
        if task.verifier is None:
            raise without_verifier(task)
        if task.verifier not in self._of_tasks:
            self._of_tasks[task.verifier] = _with_name(task.verifier)
            if self._models is not None:
                self._of_tasks[task.verifier][0].attach(self._models)
        return self._of_tasks[task.verifier]

    def _verifiers_of(self, task: Task) -> list[tuple[Verifier, str]]:
        """The task's own verifier and then those that judge by name. ConfigError where a name stands twice."""
        own = self._verifier_of(task)
        if own[1] in [name for _, name in self._named]:
            raise ConfigError(
                f"verifiers.{own[1]}: the verifier of the tasks has this name already, and a rollout has one verdict "
                "of a name: choose another"
            )
        return [own, *self._named]

    def problem(self, task: Task) -> str | None:
        """Return the reason why a verifier of the task cannot check it, or None."""
        (own, _), *named = self._verifiers_of(task)
        return problem_of(task, own, named)

    def check(self, tasks: Iterable[Task]) -> None:
        """DataError that names the first tasks which their verifiers cannot check, and counts them; ConfigError where a
        verifier needs a sandbox and there can be none."""
        tasks = list(tasks)
        needs = (verifier.needs for task in tasks for verifier, _ in self._verifiers_of(task))
        if any(one.sandbox for one in needs) and (problem := missing_sandbox()) is not None:
            raise ConfigError(problem)
        refuse_unverifiable([(task, problem) for task in tasks if (problem := self.problem(task)) is not None])

    def metrics(self) -> dict[str, float]:
        """The verifiers' own counts since the last call, as `verifier/NAME/COUNT`."""
        default = [] if self._default is None else [self._default]
        return {
            f"verifier/{name}/{count}": value
            for verifier, name in [*default, *self._of_tasks.values(), *self._named]
            if verifier.metrics is not None
            for count, value in verifier.metrics().items()
        }

    def by_group(self, task: Task) -> bool:
        """Return True if a verifier of a task wants the rollouts of a group together."""
        return any(
            # The part that judges the task need not want groups where the combination can.
            verifier.verify_group is not None and verifier.judge_of(task).verify_group is not None
            for verifier, _ in self._verifiers_of(task)
        )

    def gives_spans(self, task: Task, name: str | None = None) -> bool | None:
        """Return True if the verdicts on a task have spans, of its own verifier or of that which judges under `name`;
        None where that is not known."""
        verifiers = self._verifiers_of(task)
        judging = [verifier for verifier, its_name in verifiers if name in (None, its_name)]
        # A name that is no verifier's is of a verdict that the rollout plan adds.
        return judging[0].judge_of(task).gives_spans if judging else None

    def same_answer(self, task: Task, first: str, second: str) -> bool:
        """Return True if two extracted answers to a task are the same by the rule of its verifier."""
        return self.of(task).judge_of(task).same_answer(first, second)

    async def verify(self, rollout: Rollout) -> Rollout:
        """The rollout with its verdicts."""
        task = rollout.task
        verifiers = self._verifiers_of(task)
        verdicts = await asyncio.gather(
            *(self.pool.verify(verifier, task, rollout.text, rollout) for verifier, _ in verifiers)
        )
        return _with_verdicts(rollout, [name for _, name in verifiers], verdicts)

    async def verify_group(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Rollouts of one task with their verdicts, given in one call by each verifier that wants them together."""
        if not rollouts:
            return []
        task = rollouts[0].task
        verifiers = self._verifiers_of(task)
        texts = [rollout.text for rollout in rollouts]
        by_verifier = await asyncio.gather(
            *(self.pool.verify_group(verifier, task, texts, rollouts) for verifier, _ in verifiers)
        )
        names = [name for _, name in verifiers]
        return [
            _with_verdicts(rollout, names, verdicts) for rollout, *verdicts in zip(rollouts, *by_verifier, strict=True)
        ]


def _with_name(written: Any) -> tuple[Verifier, str]:
    verifier = as_verifier(written)
    return verifier, display_name(verifier)


def _with_verdicts(rollout: Rollout, names: Sequence[str], verdicts: Sequence[Verdict]) -> Rollout:
    rollout.verdicts.update(zip(names, verdicts, strict=True))
    # They are judged at the same time, so that the slowest one is what is waited for.
    rollout.timings["verify"] = max(verdict.seconds for verdict in verdicts)
    return rollout


async def verify_again(
    rollouts: Sequence[Rollout],
    by_group: Callable[[Task], bool],
    verify_group: Callable[[Sequence[Rollout]], Awaitable[Sequence[Rollout]]],
) -> None:
    """Put new verdicts in the place of those that rollouts have, group by group where their verifier wants that.

    What others are compared with is judged alone.
    """
    groups: dict[str, list[Rollout]] = {}
    for number, rollout in enumerate(rollouts):
        rollout.verdicts.clear()
        # A baseline rollout is compared with, not part of the group that is judged together.
        together = rollout.role != BASELINE and by_group(rollout.task)
        groups.setdefault(f"group {rollout.group}" if together else str(number), []).append(rollout)
    await asyncio.gather(*(verify_group(members) for members in groups.values()))
