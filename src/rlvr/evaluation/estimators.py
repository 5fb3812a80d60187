"""Estimators of evaluation: pure functions of scores and answers per task."""

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
