from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlvr.records import Rollout, StopReason, Task, Verdict


@pytest.fixture
def rollout() -> Callable[..., Rollout]:
    """A maker of rollouts with three prompt tokens; `score` None is an undecided verdict, "none" no verdict at all."""

    def make(
        group: str = "g0",
        member: int = 0,
        score: float | str | None = 1.0,
        tokens: int = 4,
        text: str = "4",
        stop: StopReason = StopReason.END,
        **task: object,
    ) -> Rollout:
        verdict = Verdict.undecided("service down") if score is None else None
        if isinstance(score, float):
            verdict = Verdict.from_score(score, reason="compared")
        total = 3 + tokens
        return Rollout(
            id=f"{group}-{member}",
            task=Task(**{"id": f"task-{group}", "prompt": "2+2?", "answer": "4", **task}),  # type: ignore[arg-type]
            group=group,
            member=member,
            token_ids=np.arange(total),
            origin=np.asarray([0] * 3 + [1] * tokens, dtype=np.int8),
            behaviour_logprobs=np.asarray([np.nan] * 3 + [-0.5] * tokens, dtype=np.float32),
            policy_version=np.asarray([-1] * 3 + [7] * tokens, dtype=np.int32),
            stop=stop,
            text=text,
            verdicts={"math": verdict} if verdict else {},
        )

    return make
