"""Metrics of a scored batch, and the sample rows that trackers show.

Invariants:
- Pure functions of a `Batch`; they read the columns `reward`, `reward/<name>` and `advantage` where there are any.
- Undecided (a score of None, a NaN in a column) is left out of every mean and never counted as 0.
- A metric of nothing is None: an empty batch, no decided reward, no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr.records import Batch, Origin, Rollout, StopReason, VerdictStatus

# Above the rounding of sums of rewards near 1 in float64 (about 1e-16 a term), far below any difference that a verifier
# means.
SAME = 1e-8
"""Rewards of a group closer than this are the same: what is left is rounding."""
# Four, as the `repetition` reward has it by default: shorter runs ("of the") come again in ordinary text.
REPEATED = 4
"""Tokens of a run whose return within a completion is a repetition."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Of the hash of a run: 2^64 over the golden ratio (Knuth, The Art of Computer Programming, 6.4)."""


def batch_metrics(batch: Batch) -> dict[str, float | None]:
    """The `reward`, `advantage`, `verdict`, `group`, `completion` metrics, `entropy` and `tokens/sampled` of a scored
    batch."""
    by_name = {name: _mean(column) for name, column in batch.columns.items() if name.startswith("reward/")}
    reward = batch.columns.get("reward", np.empty(0))
    return {
        **by_name,
        "reward/mean": _mean(reward),
        "reward/std": _std(reward),
        "reward/undecided": _share(int(np.isnan(reward).sum()), len(reward)),
        **_explained(batch),
        **advantage_metrics(batch),
        **_verdicts(batch),
        **_groups(batch),
        **_completions(batch),
        "entropy": _entropy(batch),
    }


def advantage_metrics(batch: Batch) -> dict[str, float | None]:
    """Mean and standard deviation of the advantages."""
    advantage = _advantages(batch)
    return {"advantage/mean": _mean(advantage), "advantage/std": _std(advantage)}


def _mean(values: np.ndarray) -> float | None:
    decided = values[~np.isnan(values)]
    return float(decided.mean()) if len(decided) else None


def _std(values: np.ndarray) -> float | None:
    decided = values[~np.isnan(values)]
    with np.errstate(invalid="ignore"):  # an infinite reward has no deviation; the step that it spoils says so itself
        return float(decided.std()) if len(decided) else None


def _share(count: int, total: int) -> float | None:
    return count / total if total else None


def _advantages(batch: Batch) -> np.ndarray:
    """One per rollout, or one per sampled token where the estimator gave them per token."""
    if "advantage" in batch.token_columns:
        pairs = zip(batch.rollouts, batch.token_columns["advantage"], strict=True)
        return np.concatenate([values[rollout.sampled] for rollout, values in pairs] or [np.empty(0)])
    return batch.columns.get("advantage", np.empty(0))


def _verdicts(batch: Batch) -> dict[str, float | None]:
    statuses = [verdict.status for r in batch.rollouts if (verdict := r.verdict)]
    if not statuses:
        return {f"verdict/{status}": None for status in VerdictStatus}
    return {f"verdict/{status}": statuses.count(status) / len(batch) for status in VerdictStatus}


def _groups(batch: Batch) -> dict[str, float | None]:
    """Shares of groups. All correct, all wrong, mixed and undecided sum to 1 when any rollout has a verdict."""
    group = batch.group_index()
    verdicts = [r.verdict for r in batch.rollouts]
    total = int(group.max(initial=-1)) + 1
    score = np.asarray([v.score if v and v.decided else np.nan for v in verdicts], dtype=np.float64)
    # Counts per group; `score == score` is False for NaN, the undecided.
    decided, right, wrong = (np.bincount(group[of], minlength=total) for of in (score == score, score == 1, score == 0))
    some = decided > 0
    kinds = {
        "all_correct": some & (right == decided),
        "all_wrong": some & (wrong == decided),
        "mixed": some & (right < decided) & (wrong < decided),
        "undecided": ~some,
    }
    judged = total if any(verdicts) else 0
    return {
        "group/count": total,
        **{f"group/{kind}": _share(int(groups.sum()), judged) for kind, groups in kinds.items()},
        "group/zero_variance": _zero_variance(batch, group, total),
    }


def _zero_variance(batch: Batch, group: np.ndarray, total: int) -> float | None:
    """The share of the groups whose decided rewards are all the same."""
    if (reward := batch.columns.get("reward")) is None:
        return None
    decided = ~np.isnan(reward)
    # Minimum and maximum by group in one pass, [G]; a group without a decided reward keeps inf and -inf.
    low = np.full(total, np.inf)
    high = np.full(total, -np.inf)
    np.minimum.at(low, group[decided], reward[decided])
    np.maximum.at(high, group[decided], reward[decided])
    with np.errstate(invalid="ignore"):  # infinite rewards
        return _share(int((high - low < SAME)[low <= high].sum()), total)


def _completions(batch: Batch) -> dict[str, float | None]:
    origin, row = _origins(batch)
    lengths = np.bincount(row[origin != Origin.PROMPT], minlength=len(batch))
    some = len(lengths) > 0
    return {
        "completion/length_mean": float(lengths.mean()) if some else None,
        "completion/length_max": int(lengths.max()) if some else None,
        "completion/length_min": int(lengths.min()) if some else None,
        "completion/truncated": _share(sum(r.stop.truncated for r in batch.rollouts), len(batch)),
        "completion/repetition": _repetition(batch, origin == Origin.POLICY, row),
        "completion/duplicates": _duplicates(batch.rollouts),
        "tokens/sampled": int((origin == Origin.POLICY).sum()),
    }


def _entropy(batch: Batch) -> float | None:
    """Minus the mean log-prob of the sampled tokens, in nats: an unbiased estimate of the mean entropy of the
    distributions that they were drawn from, without a forward pass. None where no log-prob is known."""
    # H = -E[log p(y)] over y from p, so the mean over sampled tokens estimates the mean entropy at their positions. All
    # tokens of the batch, [T]; NaN where an engine reported none.
    logprobs = np.concatenate([r.behaviour_logprobs[r.sampled] for r in batch.rollouts] or [np.empty(0)])
    finite = logprobs[np.isfinite(logprobs)]
    if len(finite):
        return -float(finite.mean(dtype=np.float64))
    return None


def _origins(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The origin of every token of all rollouts in a row, and the number of the rollout that it is of; [N] each."""
    origin = np.concatenate([r.origin for r in batch.rollouts] or [np.empty(0, dtype=np.int8)])
    return origin, np.repeat(np.arange(len(batch)), [len(r.origin) for r in batch.rollouts])


def _repetition(batch: Batch, sampled: np.ndarray, row: np.ndarray) -> float | None:
    """Runs of `REPEATED` sampled tokens that occurred earlier in their completion, over all such runs.

    Two runs are taken to be equal where their hashes of 64 bits are.
    """
    # [N] tokens of all completions in a row, and the runs of REPEATED tokens that start at each of the first `count`.
    row = row[sampled]
    ids = np.concatenate([r.token_ids for r in batch.rollouts] or [row])[sampled].astype(np.uint64)
    count = max(0, len(row) - REPEATED + 1)
    # A run that begins in one completion and ends in the next is no run.
    whole = row[len(row) - count :] == row[:count]
    # A polynomial hash modulo 2^64 (uint64 wraps around). It begins with the number of the rollout, so that equal runs
    # of different completions differ.
    key = row[:count].astype(np.uint64)
    for place in range(REPEATED):
        key = key * _FACTOR + ids[place : place + count]
    key = key[whole]
    if len(key):
        return (len(key) - len(np.unique(key))) / len(key)
    return None


def _duplicates(rollouts: Sequence[Rollout]) -> float | None:
    """Sampled completions that another of their group wrote before, word for word, over all."""
    written = [(r.group, r.text) for r in rollouts if r.stop is not StopReason.GIVEN]
    return _share(len(written) - len(set(written)), len(written))


def _explained(batch: Batch) -> dict[str, float | None]:
    """The squared correlation of each reward term with the reward within groups, where there is more than one term.

    A term that does not vary within groups explains nothing; None where the reward does not vary.
    """
    terms = {name.removeprefix("reward/"): c for name, c in batch.columns.items() if name.startswith("reward/")}
    if len(terms) < 2 or "reward" not in batch.columns:
        return {}
    group = batch.group_index()
    reward = batch.columns["reward"]
    # corr^2 of term x and reward y after the group means are subtracted: the share of the variance of y within groups
    # that a linear function of x has. Group means are left out since a baseline of the group removes them from the
    # advantage.
    return {f"explained/{name}": _squared_correlation(group, values, reward) for name, values in terms.items()}


def _squared_correlation(group: np.ndarray, first: np.ndarray, second: np.ndarray) -> float | None:
    """Of what is left of two columns when their means in each group are taken away, where both are finite."""
    finite = np.isfinite(first) & np.isfinite(second)
    group = group[finite]
    size = np.maximum(np.bincount(group), 1) if finite.any() else np.ones(1)

    def within(values: np.ndarray) -> np.ndarray:
        kept = values[finite]
        if len(kept):
            rest: np.ndarray = kept - (np.bincount(group, weights=kept) / size)[group]
        else:
            rest = kept
        # What is left of a constant column after its mean is subtracted is rounding, in proportion to its size. Without
        # this a constant term would explain all of a constant reward.
        return np.where(np.abs(rest) > SAME * (1 + np.abs(kept)), rest, 0.0)

    x = within(first)
    y = within(second)
    if not y.any():
        return None
    if x.any():
        return float((x @ y) ** 2 / ((x @ x) * (y @ y)))
    return 0.0


def staleness_metrics(batch: Batch, version: int) -> dict[str, float | None]:
    """Mean and maximum age of the sampled tokens: `version`, which trains, minus the version that sampled."""
    origin, _ = _origins(batch)
    versions = np.concatenate([r.policy_version for r in batch.rollouts] or [np.empty(0)])
    ages = version - versions[origin == Origin.POLICY]
    return {
        "policy/staleness_mean": float(ages.mean()) if len(ages) else None,
        "policy/staleness_max": int(ages.max()) if len(ages) else 0,
    }


def sample_rows(batch: Batch, limit: int = 32) -> list[dict[str, Any]]:
    """At most `limit` rollouts as flat rows of text and numbers, whole groups first to last, for a tracker's table."""
    reward = batch.columns.get("reward", np.full(len(batch), np.nan))
    order = np.argsort(batch.group_index(), kind="stable")[:limit]
    return [_row(batch.rollouts[i], float(reward[i])) for i in order]


def _row(rollout: Rollout, reward: float) -> dict[str, Any]:
    verdict = rollout.verdict
    return {
        "task": rollout.task.id,
        "member": rollout.member,
        "prompt": prompt_text(rollout.task.prompt),
        "completion": rollout.text,
        "gold": None if rollout.task.answer is None else str(rollout.task.answer),
        "answer": verdict.answer if verdict else None,
        "status": str(verdict.status) if verdict else None,
        "score": verdict.score if verdict else None,
        "reason": verdict.reason if verdict else None,
        "reward": None if np.isnan(reward) else reward,
        "tokens": rollout.completion_length,
        "stop": str(rollout.stop),
    }


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """A task's prompt as one text: a string as it is, chat messages as `role: content` lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)
