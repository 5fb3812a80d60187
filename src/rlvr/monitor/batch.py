"""Metrics of a scored batch, and the sample rows that trackers show.

Invariants:
- Every function reads a `Batch` and changes nothing. The columns `reward`, `reward/<term>` and `advantage` may be
  missing.
- An undecided value (a score of None, a NaN in a column) is left out of every mean and never counts as 0.
- A mean, extreme or share over no values is None (but `policy/staleness_max` is 0); a count is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlvr.records import USUAL_ROLES, Batch, Origin, Rollout, StopReason, VerdictStatus

# Above the rounding error of sums of rewards near 1 in float64 (about 1e-16 a term), and far below any difference
# between rewards that is intended.
SAME = 1e-8
"""Rewards of a group that differ by less than this count as equal."""
# As the default of the `repetition` reward: shorter n-grams ("of the") repeat in ordinary text.
REPEATED = 4
"""Tokens of the n-grams that `completion/repetition` counts."""
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""The multiplier of the n-gram hash: 2^64 / golden ratio (Knuth, The Art of Computer Programming, 6.4)."""


def batch_metrics(batch: Batch) -> dict[str, float | None]:
    """Return the metrics `reward/*`, `explained/*`, `span/*`, `advantage/*`, `verdict/*`, `group/*`, `completion/*`,
    `tokens/sampled` and `entropy` of a scored batch; those of rollouts of a role that a plan made, apart from
    `tokens/sampled` and `entropy`, as `role/ROLE/...` and in no other."""
    return {
        **_by_role(batch, _metrics_of),
        "tokens/sampled": int(sum(int(rollout.sampled.sum()) for rollout in batch.rollouts)),
        "entropy": _entropy(batch),
    }


def advantage_metrics(batch: Batch) -> dict[str, float | None]:
    """Mean and standard deviation of the advantages, by role as in `batch_metrics`."""
    return _by_role(batch, _advantages)


def _by_role(batch: Batch, metrics: Callable[[Batch], dict[str, float | None]]) -> dict[str, float | None]:
    """The metrics of the rollouts of the usual roles, and with the prefix `role/ROLE/` those of each other role."""
    roles = np.asarray([rollout.role for rollout in batch.rollouts], dtype=object)
    made = sorted({str(role) for role in roles} - USUAL_ROLES)
    if not made:
        return metrics(batch)
    usual = metrics(batch.select(np.flatnonzero([role in USUAL_ROLES for role in roles])))
    for role in made:
        own = metrics(batch.select(np.flatnonzero(roles == role)))
        usual |= {f"role/{role}/{name}": value for name, value in own.items()}
    return usual


def _metrics_of(batch: Batch) -> dict[str, float | None]:
    by_name = {name: _mean(column) for name, column in batch.columns.items() if name.startswith("reward/")}
    reward = batch.columns.get("reward", np.empty(0))
    return {
        **by_name,
        "reward/mean": _mean(reward),
        "reward/std": _std(reward),
        "reward/undecided": _share(int(np.isnan(reward).sum()), len(reward)),
        **_explained(batch),
        **_spans(batch),
        **_advantages(batch),
        **_verdicts(batch),
        **_groups(batch),
        **_completions(batch),
    }


def _spans(batch: Batch) -> dict[str, float | None]:
    """The mean score of the spans of each term that scores parts, and the share of undecided ones; the share of decided
    responses without a span, of the term that leaves most of them without."""
    metrics: dict[str, float | None] = {}
    decided = np.isfinite(batch.columns.get("reward", np.empty(0)))
    for name in dict.fromkeys(name for rollout in batch.rollouts for name in rollout.spans):
        if decided.any():
            without = [name not in r.spans or not len(r.spans[name]) for r in batch.rollouts]
            share = float(np.asarray(without)[decided].mean())
            metrics["span/missing"] = max(metrics.get("span/missing") or 0.0, share)
        scores = np.concatenate([rollout.spans[name].score for rollout in batch.rollouts if name in rollout.spans])
        metrics[f"span/{name}"] = _mean(scores)
        metrics[f"span/{name}/undecided"] = _share(int(np.isnan(scores).sum()), len(scores))
    return metrics


def _advantages(batch: Batch) -> dict[str, float | None]:
    advantage = batch.columns.get("advantage", np.empty(0))
    # One value for each sampled token where the estimator gave one for each token.
    if "advantage" in batch.token_columns:
        pairs = zip(batch.rollouts, batch.token_columns["advantage"], strict=True)
        advantage = np.concatenate([values[rollout.sampled] for rollout, values in pairs] or [np.empty(0)])
    metrics = {"advantage/mean": _mean(advantage), "advantage/std": _std(advantage)}
    if "no_spans" in batch.columns:  # of the verdicts, where an advantage reads them
        metrics["span/missing"] = _mean(batch.columns["no_spans"])
    return metrics


def _mean(values: np.ndarray) -> float | None:
    decided = values[~np.isnan(values)]
    return float(decided.mean()) if len(decided) else None


def _std(values: np.ndarray) -> float | None:
    decided = values[~np.isnan(values)]
    with np.errstate(invalid="ignore"):  # the deviation of infinite values is NaN
        return float(decided.std()) if len(decided) else None


def _share(count: int, total: int) -> float | None:
    return count / total if total else None


def _verdicts(batch: Batch) -> dict[str, float | None]:
    statuses = [verdict.status for r in batch.rollouts if (verdict := r.verdict)]
    total = len(batch) if statuses else 0
    return {f"verdict/{status}": _share(statuses.count(status), total) for status in VerdictStatus}


def _groups(batch: Batch) -> dict[str, float | None]:
    """The number of groups, and the shares of groups of each kind: if any rollout has a verdict, the shares
    `all_correct`, `all_wrong`, `mixed` and `undecided` partition the groups by their decided scores."""
    group = batch.group_index()
    verdicts = [r.verdict for r in batch.rollouts]
    total = int(group.max(initial=-1)) + 1
    score = np.asarray([v.score if v and v.decided else np.nan for v in verdicts], dtype=np.float64)
    # Members of each group with a decided score, a score of 1 and a score of 0; [G] each.
    decided, right, wrong = (
        np.bincount(group[mask], minlength=total) for mask in (~np.isnan(score), score == 1, score == 0)
    )
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
    """The share of groups that have a decided reward and whose decided rewards are all equal, of all groups."""
    if (reward := batch.columns.get("reward")) is None:
        return None
    decided = ~np.isnan(reward)
    # Minimum and maximum of each group, [G]. A group without a decided reward keeps low = inf > high = -inf, and is not
    # counted.
    low = np.full(total, np.inf)
    high = np.full(total, -np.inf)
    np.minimum.at(low, group[decided], reward[decided])
    np.maximum.at(high, group[decided], reward[decided])
    with np.errstate(invalid="ignore"):  # inf - inf is NaN: not equal
        return _share(int((high - low < SAME)[low <= high].sum()), total)


def _completions(batch: Batch) -> dict[str, float | None]:
    origin, row = _origins(batch)
    lengths = np.bincount(row[origin != Origin.PROMPT], minlength=len(batch))
    some = len(lengths) > 0
    sampled = [(r.group, r.text) for r in batch.rollouts if r.stop is not StopReason.GIVEN]
    return {
        "completion/length_mean": float(lengths.mean()) if some else None,
        "completion/length_max": int(lengths.max()) if some else None,
        "completion/length_min": int(lengths.min()) if some else None,
        "completion/truncated": _share(sum(r.stop.truncated for r in batch.rollouts), len(batch)),
        "completion/repetition": _repetition(batch, origin == Origin.POLICY, row),
        # Copies of the text of an earlier member of the group.
        "completion/duplicates": _share(len(sampled) - len(set(sampled)), len(sampled)),
    }


def _entropy(batch: Batch) -> float | None:
    """The negative mean of the behaviour log-probs of the sampled tokens, in nats: a Monte Carlo estimate of the mean
    entropy of the distributions that the tokens were sampled from, without a forward pass. None if no log-prob is
    known."""
    # H(p) = -E[log p(y)] with y sampled from p. [T]: all sampled tokens of the batch; NaN where the engine reported no
    # log-prob.
    logprobs = np.concatenate([r.behaviour_logprobs[r.sampled] for r in batch.rollouts] or [np.empty(0)])
    finite = logprobs[np.isfinite(logprobs)]
    if len(finite):
        return -float(finite.mean(dtype=np.float64))
    return None


def _origins(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The origin of each token of the batch, all rollouts concatenated, and the row of its rollout in the batch; [N]
    each."""
    origin = np.concatenate([r.origin for r in batch.rollouts] or [np.empty(0, dtype=np.int8)])
    return origin, np.repeat(np.arange(len(batch)), [len(r.origin) for r in batch.rollouts])


def _repetition(batch: Batch, sampled: np.ndarray, row: np.ndarray) -> float | None:
    """The share of n-grams of `REPEATED` sampled tokens that occurred earlier in the same completion.

    `sampled` and `row` are [N], as `_origins` gives them. Two n-grams count as equal if their 64-bit hashes are equal.
    """
    # The sampled tokens of all completions, concatenated. An n-gram starts at each of the first `count`.
    row = row[sampled]
    ids = np.concatenate([r.token_ids for r in batch.rollouts] or [row])[sampled].astype(np.uint64)
    count = max(0, len(row) - REPEATED + 1)
    # False for n-grams that begin in one completion and end in another.
    whole = row[len(row) - count :] == row[:count]
    # A polynomial hash modulo 2^64 (uint64 wraps around). It begins with the row of the rollout, so that equal n-grams
    # of different completions get different hashes.
    key = row[:count].astype(np.uint64)
    for place in range(REPEATED):
        key = key * _HASH_FACTOR + ids[place : place + count]
    key = key[whole]
    if len(key):
        return (len(key) - len(np.unique(key))) / len(key)
    return None


def _explained(batch: Batch) -> dict[str, float | None]:
    """The squared correlation of each reward term with the reward within groups; empty if there is only one term.

    0 for a term that does not vary within groups; None if the reward does not vary within groups.
    """
    terms = {name.removeprefix("reward/"): c for name, c in batch.columns.items() if name.startswith("reward/")}
    if len(terms) < 2 or "reward" not in batch.columns:
        return {}
    group = batch.group_index()
    reward = batch.columns["reward"]
    # The squared correlation of term x and reward y after their group means are subtracted: the share of the variance
    # of y within groups that a linear function of x explains. Group means are subtracted as in a group baseline.
    return {f"explained/{name}": _squared_correlation(group, values, reward) for name, values in terms.items()}


def _squared_correlation(group: np.ndarray, first: np.ndarray, second: np.ndarray) -> float | None:
    """The squared correlation of two columns after subtraction of their group means, over rows where both are
    finite."""
    finite = np.isfinite(first) & np.isfinite(second)
    group = group[finite]
    size = np.maximum(np.bincount(group), 1) if finite.any() else np.ones(1)

    def centred_by_group(values: np.ndarray) -> np.ndarray:
        kept = values[finite]
        centred: np.ndarray = kept
        if len(kept):
            centred = kept - (np.bincount(group, weights=kept) / size)[group]
        # Centring a constant column leaves rounding errors in proportion to its values. Without setting them to 0, a
        # constant term could correlate with a constant reward.
        return np.where(np.abs(centred) > SAME * (1 + np.abs(kept)), centred, 0.0)

    x = centred_by_group(first)
    y = centred_by_group(second)
    if not y.any():
        return None
    if x.any():
        return float((x @ y) ** 2 / ((x @ x) * (y @ y)))
    return 0.0


def staleness_metrics(batch: Batch, version: int) -> dict[str, float | None]:
    """Mean and maximum age of the sampled tokens in policy versions: `version`, the one that is trained, minus the one
    that sampled the token. Without sampled tokens the mean is None and the maximum 0."""
    origin, _ = _origins(batch)
    versions = np.concatenate([r.policy_version for r in batch.rollouts] or [np.empty(0)])
    ages = version - versions[origin == Origin.POLICY]
    return {
        "policy/staleness_mean": float(ages.mean()) if len(ages) else None,
        "policy/staleness_max": int(ages.max()) if len(ages) else 0,
    }


def sample_rows(batch: Batch, limit: int = 32) -> list[dict[str, Any]]:
    """The first `limit` rollouts in order of their groups, as flat rows of text and numbers for a tracker's table. The
    limit may cut the last group."""
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
