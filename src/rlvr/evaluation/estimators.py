"""Estimators of evaluation: pure functions of scores and answers per task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlvr.core.seeding import seed_of

SUBSETS = 64
"""Random subsets that maj@k averages over when k is below the number of samples."""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate of the chance that one of `k` samples is correct, from `correct` of `samples`.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating large language models trained on code", eq. 1), as a
    product that does not overflow. ValueError when k is above the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples")
    if samples - correct < k:
        return 1.0
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
    right = {c for c, ok in zip(label, correct, strict=True) if ok and c is not None}
    if k == len(answers):
        return _vote(label, right)
    random = np.random.default_rng(seed_of("majority", seed, len(answers), k))
    subsets = [random.choice(len(answers), size=k, replace=False) for _ in range(SUBSETS)]
    return float(np.mean([_vote([label[i] for i in subset], right) for subset in subsets]))


def clusters(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> list[int | None]:
    """A number for each answer, equal for answers that are the same."""
    kinds: list[str] = []
    labels: list[int | None] = []
    known: dict[str, int] = {}
    for answer in answers:
        if answer is None:
            labels.append(None)
            continue
        if answer not in known:
            number = next((i for i, kind in enumerate(kinds) if same(kind, answer)), len(kinds))
            if number == len(kinds):
                kinds.append(answer)
            known[answer] = number
        labels.append(known[answer])
    return labels


def _vote(labels: Sequence[int | None], right: set[int]) -> float:
    votes = [label for label in labels if label is not None]
    if not votes:
        return 0.0
    counts = np.bincount(votes)
    winners = np.flatnonzero(counts == counts.max())
    return float(np.mean([int(w) in right for w in winners]))
