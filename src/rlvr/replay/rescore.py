"""Going through a run's recorded rollouts with another verifier or other rewards, in the verifier pool that training
uses; and the changes by scoring anew, in counts and sums that add up from steps to a run.

Invariants: one step is in memory at a time; what was recorded is not changed; verdicts are given again only where a
verifier is asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.components import Advantage
from rlvr.config import Config
from rlvr.config.config_loading import load_config, with_imports
from rlvr.core.schedules import at
from rlvr.core.tree import as_tree
from rlvr.errors import ConfigError, DataError
from rlvr.monitor.batch import SAME
from rlvr.monitor.recording import Recorded, columns_of, ranges, read_recorded, recorded_config, recorded_steps
from rlvr.records import BASELINE, Batch, Task, Verdict
from rlvr.rewards import RewardContext, Term, at_step, bind, build_terms, score, walk
from rlvr.verifiers import VerifierPool
from rlvr.verifiers.pool import Verification, verify_again

SECTIONS = ("verifier", "verifiers", "rewards", "verification", "algorithm")
"""Sections of the configuration that decide the score of a rollout."""


@dataclass
class Rescored:
    """One step, before and after."""

    step: int
    uses: list[str]
    before: Batch
    after: Batch
    change: ScoreChange


class Replay:
    """A run to be scored again. `overrides` (`key.path=value`) are laid over its configuration, `imports` are files
    that register components of it. ConfigError, DataError."""

    def __init__(
        self,
        run: str | Path,
        overrides: Sequence[str],
        first: int = 1,
        last: int | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.run = Path(run)
        self.notes = list[str]()
        steps = recorded_steps(run)
        self.files = {n: path for n, path in steps.items() if n >= first and (last is None or n <= last)}
        if not self.files:
            raise ConfigError(f"--steps: none of these steps of {run} was recorded; there are {ranges(list(steps))}")
        roots = [next(iter(as_tree(override))) for override in overrides]
        for root in roots:
            if root not in SECTIONS:
                raise ConfigError(
                    f"--rescore {root}: only {', '.join(SECTIONS)} change the score of a recorded rollout"
                )
        self.config = self._config(overrides, imports)
        # Without an override the run's own verifier judges again; with other rewards alone the recorded verdicts stay.
        self.verifies = not {"verifier", "verifiers"}.isdisjoint(roots) or "rewards" not in roots
        self.terms = build_terms(self.config.rewards)
        self._refuse_what_needs_the_policy()
        self._choose_estimator()

    def _config(self, overrides: Sequence[str], imports: Sequence[str]) -> Config:
        tree = recorded_config(self.run)
        if imports:
            tree = with_imports(tree, imports)
        if not tree:
            self.notes.append(f"{self.run / 'config.yaml'} is missing: the defaults are used")
        for stage in tree.get("stages") or []:
            if own := [key for key in SECTIONS[:3] if isinstance(stage, dict) and key in stage]:
                self.notes.append(f"a stage has {' and '.join(own)} of its own: those of the whole run are used")
        try:
            return load_config(tree, overrides)
        except ConfigError:
            # A key that this version refuses is in some other section more often than not.
            config = load_config({key: tree[key] for key in (*SECTIONS[:4], "models") if key in tree}, overrides)
            self.notes.append(
                f"{self.run / 'config.yaml'} is of another version: its {', '.join(SECTIONS[:4])} are used"
            )
            return config

    def _refuse_what_needs_the_policy(self) -> None:
        for term in walk(self.terms):
            if term.function.needs_policy:
                raise ConfigError(
                    f"rewards: {term.name!r} needs a forward pass of the policy, which a replay does not make: give "
                    "the other terms with --rescore rewards='[...]'"
                )
            if term.function.remembers:
                self.notes.append(f"the reward {term.name!r} adapts during a run; here it stays as at the start")

    def _choose_estimator(self) -> None:
        self.estimator: Advantage = registry.build("advantage", self.config.algorithm.advantage)
        wanted = self.estimator
        if wanted.needs or wanted.per_token or wanted.reads_characters or wanted.remembers:
            self._fall_back("it needs more than rewards")

    def _fall_back(self, why: str) -> None:
        name = self.config.algorithm.advantage.name
        self.notes.append(f"advantages are not those of {name!r} ({why}) but of `group`")
        self.estimator = registry.build("advantage", "group")

    async def steps(self) -> AsyncIterator[Rescored]:
        """The steps in order, each scored again. Steps without a verdict (of an sft stage) are passed over."""
        checks = self.config.verification
        with VerifierPool(checks.workers, checks.time_limit, checks.memory_mb, checks.concurrent) as pool:
            verification = Verification(self.config.verifier, pool, self.config.verifiers)
            if self.verifies:
                from rlvr.run.loaded_models import LoadedModels  # it loads torch

                verification.attach(LoadedModels(self.config.models))
            any_verdict = False
            for step, path in self.files.items():
                rows = [row for row in read_recorded(path, self.notes) if row.use != "added" and row.rollout.verdicts]
                if not rows:
                    continue
                if not any_verdict:
                    self._begin(rows, verification)
                any_verdict = True
                yield await self._rescored(step, rows, verification)
        if not any_verdict:
            raise DataError(f"the recorded rollouts of {self.run} have no verdicts: there is nothing to score again")

    def _begin(self, rows: Sequence[Recorded], verification: Verification) -> None:
        """DataError where no task of the first step can be verified; let the terms take what they need from the run."""
        tasks = _tasks(rows)
        if self.verifies:
            bad = [(task.id, problem) for task in tasks if (problem := verification.problem(task))]
            if len(bad) == len(tasks):
                raise DataError(f"this verifier can check no task of the first step: {bad[0][0]}: {bad[0][1]}")
        # Checked against the sources of all steps: the first step need not have drawn from each.
        if any(term.sources is not None for term in self.terms):
            tasks = [task for path in self.files.values() for task in _tasks(read_recorded(path, []))]
        self.terms = bind(self.terms, RewardContext(self.config, tasks, verification.same_answer))

    async def _rescored(self, step: int, rows: list[Recorded], verification: Verification) -> Rescored:
        # Copies: verdicts are added to the rollout, and the recorded one is compared with it.
        fresh = [dataclasses.replace(row.rollout, verdicts=dict(row.rollout.verdicts)) for row in rows]
        if self.verifies:
            await verify_again(fresh, verification.by_group, verification.verify_group)
        then = columns_of([row.scored for row in rows])
        # A column that the run computed from its history, not from this step.
        now = {name: values for name, values in then.items() if name == "history/mean"}
        steps = max(self.files)
        terms: list[Term] = at_step(self.terms, step - 1, steps)
        scored = score(Batch(fresh, now), terms)
        # Baseline rollouts are scored with the rest and then leave the batch, as in training.
        plain = np.asarray([row.rollout.role != BASELINE for row in rows])
        then.setdefault("reward", np.full(len(rows), np.nan))
        recorded = Batch([row.rollout for row in rows], then)
        before, after = (_with_baseline(batch, plain) for batch in (recorded, scored))
        both = np.isfinite(before.column("reward")) & np.isfinite(after.column("reward"))
        advantages = self._advantages(before, step)[both], self._advantages(after, step)[both]
        uses = [row.use for row, on in zip(rows, plain, strict=True) if on]
        return Rescored(step, uses, before, after, change(before, after, advantages))

    def _advantages(self, batch: Batch, step: int) -> np.ndarray:
        try:
            return np.asarray(at(self.estimator, step - 1, max(self.files))(batch), dtype=np.float64)
        # Estimators read columns by name; one that training computed (a value, an entropy) is not in the files.
        except KeyError as error:  # a column that is not recorded
            self._fall_back(str(error.args[0]))
            return np.asarray(self.estimator(batch), dtype=np.float64)


def _with_baseline(batch: Batch, plain: np.ndarray) -> Batch:
    """The rollouts that are no baseline, with the reward of their draw's as the column `baseline` where there is
    one."""
    kept = batch.select(np.flatnonzero(plain))
    compared = batch.select(np.flatnonzero(~plain))
    if len(compared):
        of = dict(zip((r.group for r in compared.rollouts), compared.column("reward").tolist(), strict=True))
        kept.columns[BASELINE] = np.asarray([of.get(r.group, np.nan) for r in kept.rollouts], dtype=np.float64)
    return kept


def _tasks(rows: Any) -> list[Task]:
    return list({row.rollout.task.id: row.rollout.task for row in rows}.values())


def row_of(rescored: Rescored, place: int) -> Mapping[str, Any]:
    """One rollout before and after, in JSON types."""
    before = rescored.before
    after = rescored.after
    rollout = before.rollouts[place]

    def side(batch: Batch) -> dict[str, Any]:
        verdicts = {name: verdict.to_json() for name, verdict in batch.rollouts[place].verdicts.items()}
        columns = {n: float(v[place]) for n, v in batch.columns.items() if n == "reward" or n.startswith("reward/")}
        return {"verdicts": verdicts, "columns": {n: v if np.isfinite(v) else None for n, v in columns.items()}}

    named = {"id": rollout.id, "task": rollout.task.id, "group": rollout.group, "member": rollout.member}
    use = {"step": rescored.step, "use": rescored.uses[place]}
    return {**use, **named, "before": side(before), "after": side(after)}


FLIPS = ("right -> wrong", "wrong -> right", "-> undecided", "undecided ->", "other score")
"""Kinds of change of a verdict; right is a score of 1 or more, wrong any other score."""


def flip(before: Verdict | None, after: Verdict | None) -> str | None:
    """Return the one of `FLIPS` that a change of verdict is; None where the score is the same."""
    then = before.score if before else None
    now = after.score if after else None
    if then == now:
        return None
    # Before the comparison of scores: None has no order.
    if now is None or then is None:
        return FLIPS[2] if now is None else FLIPS[3]
    # Scores that differ on the same side of right: 0.2 and 0.7, or 1 and 2.
    if (then >= 1) == (now >= 1):
        return FLIPS[4]
    return FLIPS[0] if then >= 1 else FLIPS[1]


@dataclass
class ScoreChange:
    """Counts and sums over rollouts; of two sets of rollouts they add."""

    rollouts: int = 0
    flips: np.ndarray = field(default_factory=lambda: np.zeros(len(FLIPS), dtype=np.int64))
    """int64 [5]: how many verdicts changed, by `FLIPS`."""
    decided: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    """int64 [2]: rollouts with a reward, before and after."""
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(2))
    """float64 [2]: the sum of their rewards."""
    groups: int = 0
    same: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    """int64 [2]: groups whose decided rewards are all the same, before and after."""
    compared: int = 0
    """Rollouts with an advantage before and after."""
    opposed: int = 0
    """Of these, those whose advantages have opposite signs."""
    moments: np.ndarray = field(default_factory=lambda: np.zeros(5))
    """float64 [5]: the sums of a, b, aa, bb and ab over the pairs of advantages."""

    def __add__(self, other: ScoreChange) -> ScoreChange:
        return ScoreChange(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def mean_rewards(self) -> list[float | None]:
        """Before and after."""
        pairs = zip(self.rewards.tolist(), self.decided.tolist(), strict=True)
        return [total / count if count else None for total, count in pairs]

    @property
    def correlation(self) -> float | None:
        """Pearson's, of the advantages before and after; None where one of them does not vary."""
        count = self.compared
        (a, b, aa, bb, ab) = self.moments.tolist()
        if not count:
            return None
        # var = E[a^2] - E[a]^2, which rounding may make negative.
        spread = max(0.0, aa / count - (a / count) ** 2), max(0.0, bb / count - (b / count) ** 2)
        # Advantages are of order 1: below this variance they are constant up to rounding, and the quotient would be
        # noise.
        if min(spread) < 1e-12:
            return None
        # Pearson: (E[ab] - E[a] E[b]) / sqrt(var a var b), from sums, so that steps add up without keeping a rollout.
        return float((ab / count - a * b / count**2) / math.sqrt(spread[0] * spread[1]))


def change(before: Batch, after: Batch, advantages: tuple[np.ndarray, np.ndarray]) -> ScoreChange:
    """Return the differences between two scorings of the same rollouts, both with the column `reward`."""
    verdicts = [flip(one.verdict, other.verdict) for one, other in zip(before.rollouts, after.rollouts, strict=True)]
    rewards = [before.column("reward"), after.column("reward")]
    a, b = advantages
    return ScoreChange(
        rollouts=len(before),
        flips=np.asarray([verdicts.count(kind) for kind in FLIPS]),
        decided=np.asarray([int(np.isfinite(values).sum()) for values in rewards]),
        rewards=np.asarray([float(np.nansum(values)) for values in rewards]),
        groups=sum(1 for _ in before.groups()),
        same=np.asarray([_same(before, values) for values in rewards]),
        compared=len(a),
        opposed=int((a * b < 0).sum()),
        moments=np.asarray([a.sum(), b.sum(), a @ a, b @ b, a @ b], dtype=np.float64),
    )


def _same(batch: Batch, reward: np.ndarray) -> int:
    """Groups whose decided rewards are all the same."""
    decided = [reward[group.index][np.isfinite(reward[group.index])] for group in batch.groups()]
    return sum(bool(len(values)) and bool(np.ptp(values) < SAME) for values in decided)
