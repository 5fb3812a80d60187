"""Estimators of evaluation: pure functions of a task's scores and answers, and the uncertainty of a mean over tasks.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (rliable): intervals by
resampling, the interquartile mean in place of the median, paired comparison. Resampled are tasks; several runs (seeds)
of the same tasks are resampled run by run within each task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlvr.core.seeding import seed_of

# A choice. The standard error that it adds to a task's maj@k is at most 0.5 / sqrt(64) = 0.06, and over T tasks that
# divided by sqrt(T).
SUBSETS = 64
"""Random subsets that maj@k averages over when k is below the number of samples."""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate of the chance that one of `k` samples is correct, from `correct` of `samples`.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating large language models trained on code", eq. 1), as a
    product that does not overflow. ValueError when k is above the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples")
    # Fewer wrong samples than k: every subset of k holds a right one. The product below would have a factor of 0 or
    # less.
    if samples - correct < k:
        return 1.0
    # C(n - c, k) / C(n, k) = prod over i from n - c + 1 to n of (1 - k / i).
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def majority_at_k(
    answers: Sequence[str | None],
    correct: Sequence[bool],
    k: int,
    same: Callable[[str, str], bool] = str.__eq__,
    seed: int = 0,
) -> float:
    """The chance that the most frequent answer among `k` samples is correct; ties count by their share of correct
    answers.

    Samples without an answer do not vote. With k below the number of samples, the mean over fixed random subsets.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} cannot be estimated from {len(answers)} samples")
    label = clusters(answers, same)
    # The verifier's word on any answer of a cluster holds for the cluster.
    right = {c for c, ok in zip(label, correct, strict=True) if ok and c is not None}
    if k == len(answers):
        return _vote(label, right)
    # Fixed subsets: the estimate does not change when an evaluation is read again.
    random = np.random.default_rng(seed_of("majority", seed, len(answers), k))
    subsets = [random.choice(len(answers), size=k, replace=False) for _ in range(SUBSETS)]
    return float(np.mean([_vote([label[i] for i in subset], right) for subset in subsets]))


def clusters(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> list[int | None]:
    """A number for each answer, equal for answers that are the same."""
    kinds: list[str] = []
    labels: list[int | None] = []
    label_of: dict[str, int] = {}
    for answer in answers:
        if answer is None:
            labels.append(None)
            continue
        # Equal texts are asked about once: `same` may run a computer algebra system.
        if answer not in label_of:
            # Compared with the first answer of each cluster, so clusters follow the order where `same` is not
            # transitive.
            number = next((i for i, kind in enumerate(kinds) if same(kind, answer)), len(kinds))
            if number == len(kinds):
                kinds.append(answer)
            label_of[answer] = number
        labels.append(label_of[answer])
    return labels


def _vote(labels: Sequence[int | None], right: set[int]) -> float:
    votes = [label for label in labels if label is not None]
    if not votes:
        return 0.0
    counts = np.bincount(votes)
    # Several may have the most votes. One of them is chosen at random, so the expected score is the share that is
    # right.
    winners = np.flatnonzero(counts == counts.max())
    return float(np.mean([int(w) in right for w in winners]))


def best_of_k(ranking: np.ndarray, scores: Sequence[float], k: int) -> float:
    """Return the unbiased estimate, from n samples, of the verifier's score of the sample that the scorer ranks first
    among `k`.

    `ranking` is the scorer's number for each sample, [n] (NaN ranks last); `scores` are the verifier's, [n]. The
    estimate is the mean over all subsets of k: the sample of rank i, from the lowest, is the best of C(i - 1, k - 1) of
    the C(n, k) subsets. Samples of equal rank share their scores, which is a choice among them at random. Raises
    ValueError when k is above n.
    """
    count = len(scores)
    if not 1 <= k <= count:
        raise ValueError(f"best@{k} cannot be estimated from {count} samples")
    ranks = np.asarray(ranking, dtype=np.float64)
    # `kind` numbers the distinct ranks from the lowest; `shared` has for each sample, in order of rank, the mean score
    # of its kind.
    _, kind = np.unique(np.where(np.isnan(ranks), -np.inf, ranks), return_inverse=True)
    sums = np.bincount(kind, weights=np.asarray(scores, dtype=np.float64))
    sizes = np.bincount(kind)
    shared = (sums / sizes)[np.sort(kind)]
    return float(shared @ _chances(count, k))


def _chances(count: int, k: int) -> np.ndarray:
    """[n]: for each rank from the lowest, the share of the subsets of k in which it is the highest."""
    # The chance of rank i is C(i-1, k-1) / C(n, k). For i = n that is k / n, and from i + 1 to i it is multiplied by (i
    # - k + 1) / i, which never overflows.
    ranks = np.arange(count - 1, k - 1, -1)
    falling = np.concatenate([[k / count], k / count * np.cumprod((ranks - k + 1) / ranks)])
    return np.concatenate([np.zeros(k - 1), falling[::-1]])


# The ends of a 95 % interval are then its 50th values from below and above. rliable takes 50,000 by default.
RESAMPLES = 2000
LEVEL = 0.95
# 16 MB of float64: a matrix of all resamples of many tasks would take gigabytes.
CHUNK = 2_000_000
"""Numbers drawn at a time."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""[.., T] -> [..]"""


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """The mean of the middle half along the last axis: a quarter of the values, rounded down, is cut off at each
    end."""
    count = values.shape[-1]
    # As scipy.stats.trim_mean(values, 0.25), which rliable calls.
    cut = count // 4
    return np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1)


def plain_mean(values: np.ndarray) -> np.ndarray:
    """The mean along the last axis."""
    return values.mean(axis=-1)


def interval(
    values: np.ndarray, statistic: Statistic = plain_mean, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of `statistic` over tasks; None of no task.

    `values` is [T], or [R, T] for R runs on the same tasks; NaN (of a [T]) is left out.
    """
    if values.ndim == 1:
        values = values[~np.isnan(values)]
    runs, count = (1, len(values)) if values.ndim == 1 else values.shape
    if count == 0:
        return None
    # The seed depends on the shape alone, so that metrics of the same tasks are resampled alike.
    random = np.random.default_rng(seed_of("bootstrap", seed, count, runs))
    statistics = []
    size = max(1, CHUNK // (count * runs))
    for begin in range(0, resamples, size):
        number = min(size, resamples - begin)
        if values.ndim == 1:
            chosen = values[random.integers(count, size=(number, count))]
        else:
            # Stratified: for each task (last axis) the runs are drawn anew with replacement; the tasks stay. [number,
            # R, T]
            which = random.integers(runs, size=(number, runs, count))
            chosen = np.take_along_axis(values[None], which, axis=1).reshape(number, runs * count)
        statistics.append(statistic(chosen))
    low, high = np.quantile(np.concatenate(statistics), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def resampled_sums(columns: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """[C, resamples]: the sums of `columns` [C, T] over T rows that are drawn with replacement, the same for all
    columns.

    For statistics that are no means of one column: ratios of sums, and what is made of them.
    """
    count = columns.shape[1]
    random = np.random.default_rng(seed_of("bootstrap sums", seed, count))
    sums = []
    size = max(1, CHUNK // max(count, 1))
    for begin in range(0, resamples, size):
        # [number, T]: how often each row is drawn.
        drawn = random.multinomial(count, np.full(count, 1 / count), size=min(size, resamples - begin))
        sums.append(columns @ drawn.T)
    return np.concatenate(sums, axis=1)


def percentile_interval(values: np.ndarray) -> tuple[float, float] | None:
    """The 95 % interval of resampled values [resamples]; NaN, where a resample has no value, is left out. None where
    none has one."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
