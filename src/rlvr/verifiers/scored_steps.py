"""Verdicts of verifiers that score the steps of a response."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.core.splitters import Split, Splitter
from rlvr.errors import ConfigError


def splitter_of_text(verifier: str, split: Split, most: int) -> Splitter:
    """The splitter of a verifier, which sees a text. ConfigError for what does not cut one."""
    try:
        splitter = Splitter(split, most)
        splitter.of_text("")
    except ValueError as error:
        advice = "; with rollout.plan `judge: each` a verifier is shown each turn by itself" if split == "turn" else ""
        raise ConfigError(f"{verifier}: {error}{advice}") from error
    return splitter


def fused_scores(scores: Sequence[float], wrong: Sequence[bool]) -> dict[str, float]:
    """The scores of a response by those of its steps, at least one. `before_error` is the share of steps before the
    first that is wrong, `steps` their number."""
    before = next((place for place, is_wrong in enumerate(wrong) if is_wrong), len(scores))
    return {
        "mean": sum(scores) / len(scores),
        "min": min(scores),
        "last": scores[-1],
        "before_error": before / len(scores),
        "steps": float(len(scores)),
    }
