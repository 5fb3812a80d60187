"""The advantage matrix: a baseline times a scale, over the decided rewards of each group or of the batch.

Invariants: permuting rollouts changes no advantage, and adding other groups changes one only where the batch is asked
for by name (N4); a group whose decided rewards are all equal has advantages of exactly 0 under a baseline made of its
own rewards, whatever the floating-point mean; a group without spread is not divided by its standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlvr.components import Advantage
from rlvr.config import Config
from rlvr.core.schedules import Scalar, refuse_below
from rlvr.errors import ConfigError, nearest
from rlvr.records import Batch, Origin, Task
from rlvr.registry import register

AdvantageValues = np.ndarray | list[np.ndarray]
"""One number per rollout, float64 [B], or one array [T_b] per rollout with a number per token."""


def counts(groups: np.ndarray) -> np.ndarray:
    """int64 [G]: the members of each group."""
    return np.bincount(groups)


def means(values: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """float64 [G]: the mean of each group, weighted if asked; where all weights of a group are 0, the plain mean."""
    size = int(groups.max()) + 1 if len(groups) else 0
    if weights is None:
        # The maximum keeps 0 / 0 out for numbers of groups that have no member.
        return np.bincount(groups, values, minlength=size) / np.maximum(np.bincount(groups, minlength=size), 1)
    total = np.bincount(groups, weights, minlength=size)
    weighted = np.bincount(groups, weights * values, minlength=size) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, weighted, means(values, groups))


def stds(values: np.ndarray, groups: np.ndarray, unbiased: bool = False) -> np.ndarray:
    """float64 [G]: the standard deviation of each group; unbiased divides by n - 1 (a group of one has 0)."""
    size = np.bincount(groups)
    # The sum of squared deviations, not E[x^2] - E[x]^2, which cancels where the spread is small.
    squares = np.bincount(groups, (values - means(values, groups)[groups]) ** 2, minlength=len(size))
    return np.sqrt(squares / np.maximum(size - int(unbiased), 1))


def std(values: np.ndarray, weights: np.ndarray | None = None, unbiased: bool = False) -> float:
    """The standard deviation of all `values`, exactly 0 where they are all the same number (or there is none).

    `weights` counts each value so many times; unbiased divides by the total count minus 1.
    """
    weights = np.ones(len(values)) if weights is None else weights
    counted = values[weights > 0]
    # Decided by comparing, since the rounded mean of equal numbers may differ from them.
    if not len(counted) or counted.min() == counted.max():
        return 0.0
    mean = np.average(values, weights=weights)
    return float(np.sqrt((weights * (values - mean) ** 2).sum() / max(weights.sum() - int(unbiased), 1.0)))


def same(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """bool [G]: whether all values of a group are the same number; a group without members counts as one."""
    size = int(groups.max()) + 1 if len(groups) else 0
    low = np.full(size, np.inf)
    high = np.full(size, -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low >= high


def stds_of_others(values: np.ndarray, groups: np.ndarray, unbiased: bool = False) -> np.ndarray:
    """float64 [B]: the standard deviation of the other members of each one's group, exactly 0 where they are all equal.

    unbiased divides by their number minus 1. A member with at most one other has 0.
    """
    result = np.zeros(len(values))
    for positions in by_size(groups):
        size = positions.shape[1]
        # One member left out at a time. Its part taken from the group's sum of squares would cancel where it is the
        # only one that differs.
        for left_out in range(size if size > 2 else 0):
            others = values[np.delete(positions, left_out, axis=1)]
            equal = others.min(axis=1) == others.max(axis=1)
            result[positions[:, left_out]] = np.where(equal, 0.0, others.std(axis=1, ddof=int(unbiased)))
    return result


def by_size(groups: np.ndarray) -> Iterator[np.ndarray]:
    """The positions of the members, int64 [groups of that size, size], for each size of group, smallest size first."""
    order = np.argsort(groups, kind="stable")
    size = np.bincount(groups)
    starts = np.cumsum(size) - size
    # One [groups, n] array of positions for each size, so that callers compute on matrices and not group by group.
    for n in np.unique(size[size > 0]):
        yield order[starts[size == n][:, None] + np.arange(n)]


def decided(batch: Batch) -> np.ndarray:
    """bool [B]: the rollouts whose reward is a number."""
    return np.isfinite(batch.column("reward"))


@dataclass(frozen=True)
class FlatTokens:
    """All tokens of a batch's rollouts, one after the other: N of them."""

    sizes: np.ndarray
    """int64 [B], tokens of each rollout"""
    sampled: np.ndarray
    """bool [N], written by the policy"""

    @classmethod
    def of(cls, batch: Batch) -> FlatTokens:
        """The tokens of `batch`."""
        origins = [r.origin for r in batch.rollouts]
        sizes = np.fromiter(map(len, origins), dtype=np.int64, count=len(origins))
        return cls(sizes, np.concatenate(origins or [np.empty(0)]) == Origin.POLICY)

    @property
    def lengths(self) -> np.ndarray:
        """float64 [B]: tokens of each rollout that the policy wrote."""
        return self.sums(self.sampled.astype(np.float64))

    @property
    def rollout(self) -> np.ndarray:
        """int64 [N]: the rollout of each token."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[N] -> [B]: sums over each rollout."""
        return np.bincount(self.rollout, values, minlength=len(self.sizes))

    def flat(self, values: AdvantageValues) -> np.ndarray:
        """float64 [N]: a column, one number per rollout or one array per rollout, over all tokens."""
        if isinstance(values, list):
            return np.concatenate(values or [np.empty(0)]).astype(np.float64)
        return np.repeat(np.asarray(values, dtype=np.float64), self.sizes)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """[N] -> one array per rollout."""
        ends = np.cumsum(self.sizes).tolist()
        return [values[end - size : end] for end, size in zip(ends, self.sizes.tolist(), strict=True)]


def elementwise(function: np.ufunc, advantage: AdvantageValues, *more: float) -> AdvantageValues:
    """`function(advantage, *more)` on every number, in the form that `advantage` has."""
    if isinstance(advantage, list):
        return [function(values, *more) for values in advantage]
    return function(advantage, *more)


Baseline = Literal["mean", "leave_one_out", "length_weighted", "batch_mean", "greedy", "reference", "history", "none"]
Scale = Literal["std", "others_std", "batch_std", "none"]

OF_THE_GROUP = ("mean", "leave_one_out", "length_weighted")
"""Baselines made of the group's own rewards: equal rewards have no advantage."""
GIVEN = {"greedy": "baseline", "reference": "baseline", "history": "history/mean"}
"""Baselines that another part of the run puts into a column of the batch."""


@register("advantage", "group")
@dataclass(frozen=True)
class GroupAdvantage(Advantage):
    """Reward minus a baseline, over a scale. One number per response.

    | method | baseline | scale | and |
    |---|---|---|---|
    | GRPO (Shao et al. 2024, section 4.1.2) | mean | std | |
    | Dr. GRPO (Liu et al. 2025, eq. 3) | mean | none | |
    | RLOO (Ahmadian et al. 2024, eq. 7) | leave_one_out | none | |
    | Lite PPO (Liu et al. 2025, arXiv 2508.08221) | mean | batch_std | |
    | OPO (Hao et al. 2025, arXiv 2505.23585) | length_weighted | none | |
    | ReMax (Li et al. 2023, arXiv 2310.10505) | greedy | none | `rollout.plan: {name: single_turn, baseline: greedy}` |
    | REINFORCE++ (Hu et al. 2025, arXiv 2501.03262) | none | none | `modifiers: [whiten]` |
    | REINFORCE++ with baseline | mean | none | `modifiers: [whiten]` |
    | BR-RM (NVIDIA NeMo-RL's leave-one-out baseline, normalized) | leave_one_out | others_std | `epsilon: 0` |
    | GPG (Chu et al. 2025, arXiv 2504.02546) | mean | none | `modifiers: [informative]` |
    | GDPO (Liu et al. 2026, arXiv 2601.05242) | mean | std | `per_reward`, `modifiers: [whiten]` |
    | PSR, NSR, W-REINFORCE (Zhu et al. 2025, arXiv 2506.01347) | 0.5 | 0.5 | `modifiers: [{name: signs, ...}]` |
    | backward noise correction (Cai et al. 2025, arXiv 2510.00915) | false positive rate | 1 - both rates | |
    | forward noise correction (same) | 1 - false negative rate | none | |

    Compared with code: OPO, REINFORCE++, ReMax (volcengine/verl, commit b178a3c, verl/trainer/ppo/core_algos.py), Lite
    PPO (alibaba/ROLL, commit 8eb27cc, roll/utils/functionals.py, `reward_norm`), PSR (TianHongZXY/RLVR-Decomposed,
    commit a5d4e7c, verl/trainer/ppo/core_algos.py), BR-RM (yzjiao/BR-RM, commit 34a58b2,
    nemo_rl/algorithms/utils.py, `calculate_baseline_and_std_per_prompt`, and grpo.py); from the abstract and the
    algebra of the noise channel: the last two; from memory: GDPO. A group with one decided member has nothing to
    compare: its advantage is 0 under a baseline of the group. Where a given baseline is undecided the response's
    advantage is 0.
    """

    baseline: Baseline | Scalar = "mean"
    """mean: of the group; leave_one_out: mean of the other members; length_weighted: mean of the group weighted by the
    lengths of the responses; batch_mean: mean of all decided rewards of the batch; greedy: reward of the draw's greedy
    response; reference: reward of the task's demonstration (both want the plan to add them: `rollout.plan`); history:
    mean score of the prompt's earlier draws, on its first draw the group's mean; a number: that constant; none: 0."""
    scale: Scale | Scalar = "std"
    """std: of the group's rewards; others_std: of the rewards of the other members, so that each response has its own;
    batch_std: of all rewards of the batch; a number above 0: that constant; none: 1. A deviation of 0 divides nothing:
    of a group in which one reward differs, others_std leaves that response's advantage as it is."""
    # TRL's value (GRPOTrainer); verl has 1e-6. It matters only where a group's deviation is as small.
    epsilon: float = 1e-4
    """Added to a standard deviation."""
    unbiased: bool = False
    """Standard deviations with n - 1, as torch.std has them (TRL, verl), instead of n."""
    per_reward: dict[str, float] | None = None
    """Reward terms, each with a weight: each is centred and scaled by itself before the weighted sum is taken (GDPO),
    so that a term with a small spread counts. null: the rewards are summed first."""

    def __post_init__(self) -> None:
        # These columns hold one number for the whole reward, which cannot be taken apart by term.
        if self.per_reward is not None and self.baseline in GIVEN:
            raise ValueError(
                f"per_reward normalises every term by itself, and baseline {self.baseline!r} is of their sum"
            )
        refuse_below("scale", self.scale, 0, above=True)

    @property
    def smallest_group(self) -> int:
        """The smallest group in which the estimator gives an advantage other than 0."""
        if self.baseline in OF_THE_GROUP or self.scale in ("std", "others_std"):
            return 2
        return 1

    def check(self, config: Config, tasks: Sequence[Task]) -> None:
        """ConfigError where the run does not give what the options want."""
        added = config.rollout.plan.options.get("baseline")
        if self.baseline in ("greedy", "reference") and added != self.baseline:
            raise ConfigError(
                f"algorithm.advantage: baseline {self.baseline!r} needs a response that the plan adds to every draw: "
                f"set rollout.plan to {{name: single_turn, baseline: {self.baseline}}}"
            )
        bare = [task.id for task in tasks if task.demonstration is None]
        if self.baseline == "reference" and bare:
            raise ConfigError(
                f"algorithm.advantage: baseline 'reference' is the reward of a task's demonstration, and {len(bare)} "
                f"of {len(tasks)} tasks have none, {bare[0]!r} first: give them one, or choose another baseline"
            )
        names = [term.column for term in config.rewards]
        check_terms(self.per_reward or (), names, "per_reward has")
        if self.baseline == "history" and (names != ["verdict"] or config.rewards[0].weight != 1.0):
            raise ConfigError(
                "algorithm.advantage: baseline 'history' is the mean of a prompt's verdicts, and `rewards` is not the "
                "verdict alone: set rewards to [verdict], or choose another baseline"
            )

    def __call__(self, batch: Batch) -> np.ndarray:
        groups = batch.group_index()
        baselines = None
        if self.baseline == "length_weighted":
            # Counted only for the baseline that weighs with them.
            lengths = FlatTokens.of(batch).lengths
        else:
            lengths = None
        if str(self.baseline) in GIVEN:
            baselines = batch.column(GIVEN[str(self.baseline)])
        options = (self.baseline, self.scale, self.epsilon, self.unbiased, lengths, baselines)
        if self.per_reward is None:
            return group_advantage(batch.column("reward"), groups, *options)
        decided = np.isfinite(batch.column("reward"))
        # A term may have a value where the sum of all is undecided: such rollouts stay out of every term's baseline.
        columns = {name: np.where(decided, batch.column(f"reward/{name}"), np.nan) for name in self.per_reward}
        return np.sum(
            [w * group_advantage(columns[name], groups, *options) for name, w in self.per_reward.items()], axis=0
        )


def check_terms(written: Iterable[str], names: Sequence[str], what: str) -> None:
    """ConfigError where one of the reward terms that an advantage was `written` with is not among `names`; `what` says
    how it uses them."""
    for name in written:
        if name not in names:
            raise ConfigError(
                f"algorithm.advantage: {what} {name!r}, and there is no such term in `rewards`{nearest(name, names)}"
            )


def group_advantage(
    rewards: np.ndarray,
    groups: np.ndarray,
    baseline: Baseline | Scalar = "mean",
    scale: Scale | Scalar = "std",
    epsilon: float = 1e-4,
    unbiased: bool = False,
    lengths: np.ndarray | None = None,
    given: np.ndarray | None = None,
) -> np.ndarray:
    """Advantages, float64 [B], of `rewards` [B] (NaN undecided) whose groups are numbered by `groups` int [B].

    `lengths` [B] are what `length_weighted` weighs with; `given` [B] are the baselines greedy, reference and history.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    result = np.zeros(len(rewards))
    decided = np.isfinite(rewards)
    if baseline in ("greedy", "reference"):
        assert given is not None, f"the baseline {baseline!r} is not given"
        # Of `history` an unknown value is replaced by the group's mean instead, see `_centred`.
        decided &= np.isfinite(given)
    if not decided.any():
        return result
    r = rewards[decided]
    g = groups[decided]
    advantage = _centred(r, g, baseline, *(None if x is None else x[decided] for x in (lengths, given)))
    if scale == "std":
        # [G]. Equal rewards have a deviation of 0: 1 instead leaves their advantage at 0 exactly, whatever epsilon is.
        flat = same(r, g)
        advantage /= np.where(flat, 1.0, stds(r, g, unbiased) + epsilon)[g]
    elif scale == "others_std":
        # [decided members], one deviation for each response.
        of_others = stds_of_others(r, g, unbiased)
        advantage /= np.where(of_others > 0, of_others + epsilon, 1.0)
    elif scale == "batch_std":
        spread = std(r, unbiased=unbiased)
        advantage /= spread + epsilon if spread > 0 else 1.0
    elif scale != "none":
        advantage /= float(scale)
    result[decided] = advantage
    return result


def _centred(
    r: np.ndarray, g: np.ndarray, baseline: Any, lengths: np.ndarray | None, baselines: np.ndarray | None
) -> np.ndarray:
    """Decided rewards minus their baseline."""
    if baseline == "none":
        return r.copy()
    if baseline == "batch_mean":
        # Equal rewards give exactly 0, which a rounded mean may not.
        if r.min() < r.max():
            return r - r.mean()
        return np.zeros(len(r))
    if baseline in ("greedy", "reference"):
        return r - baselines
    if baseline not in (*OF_THE_GROUP, "history"):
        return r - float(baseline)
    advantage = r - means(r, g, lengths if baseline == "length_weighted" else None)[g]
    if baseline == "leave_one_out":
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        size = counts(g)
        advantage *= (size / np.maximum(size - 1, 1))[g]
    # The mean of equal numbers may be off in the last bit, and a deviation of that size would be scaled up to 1.
    advantage[same(r, g)[g]] = 0.0
    if baselines is None:
        return advantage
    # history: a prompt that was never drawn has no mean yet and takes its group's.
    return np.where(np.isfinite(baselines), r - baselines, advantage)
