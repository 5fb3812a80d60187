"""Labels by majority vote: a response is right when most of its group agree with it. No reference answer is read.

Invariants: responses without an extracted answer do not vote and are worth 0; undecided ones (the verifier failed)
have no value; nothing depends on the order of a group's members, except which spelling of an answer is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlvr.components import RewardContext, RewardTerm
from rlvr.config import Config
from rlvr.errors import ConfigError
from rlvr.records import Batch, Rollout, Task
from rlvr.registry import register


@register("reward", "majority_vote")
@dataclass
class MajorityVote(RewardTerm):
    """1 where the extracted answer is the group's most frequent one, else 0; tied answers share.

    TTRL (Zuo et al. 2025, arXiv 2504.16084). Which answers are the same is the verifier's own `same_answer`.
    `of: partner` takes the vote of another group, that of the task which `info.partner` names, as Co-Reward does with a
    question and its paraphrase (Zhang et al. 2025, arXiv 2508.00410); where the batch has no such group the rollouts
    are undecided. `of: share` pays each answer the share of the voters that gave it, a soft label.
    """

    of: Literal["group", "partner", "share"] = "group"
    """Whose vote, and whether it is the winner or the share that pays."""
    at_least: float = 0.0
    """Groups whose winner has a smaller share of the voters are undecided: their label is not to be trusted."""
    _same: Callable[[Task, str, str], bool] = field(default=RewardContext.same_answer, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.at_least <= 1:
            raise ValueError(f"at_least is {self.at_least}: it is a share, 0 to 1")

    def check_config(self, config: Config) -> None:
        """ConfigError where a group is one response."""
        if config.rollout.group_size < 2:
            raise ConfigError(
                "rewards: majority_vote makes a label of a group's answers, and rollout.group_size is 1: set it to 2 "
                "or more"
            )

    def bind(self, setting: RewardContext) -> MajorityVote:
        """With the verifier's `same_answer`."""
        if self.of == "partner":
            ids = {task.id for task in setting.tasks}
            bad = [task for task in setting.tasks if task.info.get("partner") not in ids]
            if bad:
                raise ConfigError(
                    "rewards: majority_vote with `of: partner` needs info.partner, the id of another task; "
                    f"{bad[0].named} has none among the tasks of this run ({len(bad)} such tasks)"
                )
        bound = dataclasses.replace(self)
        bound._same = setting.same_answer
        return bound

    def __call__(self, batch: Batch) -> np.ndarray:
        answers = [None if r.verdict is None else r.verdict.answer for r in batch.rollouts]
        result = np.full(len(batch), np.nan)
        groups = list(batch.groups())
        polls = {id(g): self._poll(g.rollouts, [answers[i] for i in g.index]) for g in groups}
        of_task: dict[str, list[tuple[str, float]]] = {}
        for group in groups:
            # A task may be drawn twice in a step; its first group votes for partners.
            of_task.setdefault(group.rollouts[0].task.id, polls[id(group)])
        for group in groups:
            task = group.rollouts[0].task
            if self.of == "partner":
                poll = of_task.get(task.info.get("partner", ""))
            else:
                poll = polls[id(group)]
            for i in group.index:
                verdict = batch.rollouts[i].verdict
                if poll and verdict is not None and verdict.answer is not None:
                    result[i] = self._value(task, str(verdict.answer), poll)
                elif poll and verdict is not None and verdict.decided:
                    result[i] = 0.0
        return result

    def _poll(self, members: Sequence[Rollout], answers: Sequence[str | None]) -> list[tuple[str, float]]:
        """(answer, share of the voters) of each different answer, empty without a trusted winner."""
        kinds: list[list[str]] = []
        task = members[0].task
        # Sorted, so that the first spelling of each kind does not depend on the order of sampling. `same_answer` need
        # not be transitive; an answer joins the first kind that it equals.
        for answer in sorted(a for a in answers if a is not None):
            home = next((kind for kind in kinds if kind[0] == answer or self._same(task, kind[0], answer)), None)
            if home is None:
                kinds.append([answer])
            else:
                home.append(answer)
        voters = sum(map(len, kinds))
        poll = [(kind[0], len(kind) / voters) for kind in kinds]
        if poll and max(share for _, share in poll) >= self.at_least:
            return poll
        return []

    def _value(self, task: Task, answer: str, poll: Sequence[tuple[str, float]]) -> float:
        share = next((s for kind, s in poll if kind == answer or self._same(task, kind, answer)), 0.0)
        if self.of == "share":
            return share
        most = max(s for _, s in poll)
        if share == most:
            # k answers tied for the first place have 1 / k each. Shares of one group have one denominator, so `==` is
            # exact.
            return 1 / sum(s == most for _, s in poll)
        return 0.0
