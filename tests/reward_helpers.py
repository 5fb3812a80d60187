"""Made-up batches: responses with given scores, lengths, texts and answers, in given groups."""

from __future__ import annotations

import numpy as np

from rlvr import rewards
from rlvr.config import Config
from rlvr.records import Batch, Origin, Rollout, StopReason, Task, Verdict, VerdictStatus

PROMPT = 2


def make_rollout(group, member, length, score=1.0, text="", answer=None, task=None, ids=None):
    """`score` None: undecided; "none": no verdict."""
    ids = np.concatenate([[1, 2], np.arange(length) % 7 + 3 if ids is None else ids]).astype(np.int64)
    origin = np.full(len(ids), Origin.POLICY, dtype=np.int8)
    origin[:PROMPT] = Origin.PROMPT
    rollout = Rollout(
        id=f"{group}/{member}",
        task=task or Task(id=f"task-{group}", prompt="?", answer="4"),
        group=str(group),
        member=member,
        token_ids=ids,
        origin=origin,
        behaviour_logprobs=np.full(len(ids), np.nan, dtype=np.float32),
        policy_version=np.where(origin == Origin.POLICY, 0, -1).astype(np.int32),
        stop=StopReason.END,
        text=text,
    )
    if score is None or (isinstance(score, float) and np.isnan(score)):
        rollout.verdicts["v"] = Verdict.undecided("down")
    elif score != "none":
        rollout.verdicts["v"] = Verdict.from_score(score, answer=answer)
    return rollout


def make_batch(scores, lengths=None, groups=None, texts=None, answers=None, tasks=None):
    """One rollout per score; `groups` names each one's group (one group by default)."""
    lengths = [3] * len(scores) if lengths is None else lengths
    groups = ["g"] * len(scores) if groups is None else groups
    seen: dict = {}
    rollouts = []
    for i, (score, length, group) in enumerate(zip(scores, lengths, groups, strict=True)):
        member = seen[group] = seen.get(group, -1) + 1
        rollouts.append(
            make_rollout(
                group,
                member,
                length,
                score,
                "" if texts is None else texts[i],
                None if answers is None else answers[i],
                None if tasks is None else tasks[group],
            )
        )
    return Batch(rollouts)


def random_batch(seed, groups=4, largest=6):
    """Ragged groups of random responses, some undecided, with the token columns that terms may need."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for g in range(groups):
        task = Task(id=f"t{g}", prompt="?", answer="4", info={"partner": f"t{g ^ 1}", "budget": 5}, source=f"s{g % 2}")
        for m in range(int(rng.integers(1, largest + 1))):
            answer = str(rng.integers(3)) if rng.random() < 0.8 else None
            score = [0.0, 1.0, 1.0, 0.5, None][int(rng.integers(5))]
            words = " ".join(
                rng.choice(["<think>", "</think>", "<answer>", "</answer>", "a", "b"], int(rng.integers(9)))
            )
            ids = rng.integers(3, 9, int(rng.integers(0, 12)))
            rollout = make_rollout(f"g{g}", m, len(ids), score, words, answer, task, ids)
            ends = np.full(len(rollout), -1)
            ends[PROMPT:] = np.linspace(0, len(words), len(ids)).astype(int)
            rollout.char_ends = ends
            rollouts.append(rollout)
    batch = Batch(rollouts)
    for name in ("entropy", "logsumexp", "mean_logit"):
        values = [rng.random(len(r)).astype(np.float32) + (name == "logsumexp") * 3 for r in rollouts]
        batch.token_columns[f"{name}/current"] = [
            np.where(r.sampled, v, np.nan) for r, v in zip(rollouts, values, strict=True)
        ]
    batch.columns["history/mean"] = np.full(len(batch), np.nan)
    return batch


def reward_of(batch, *specs, config=None):
    """The reward of the batch under these terms, bound to a run with that config."""
    terms = rewards.build_terms(list(specs))
    tasks = list({r.task.id: r.task for r in batch.rollouts}.values())
    context = rewards.RewardContext(Config.model_validate(config or {}), tasks)
    return rewards.score(batch, rewards.bind(terms, context)).column("reward")


UNPARSABLE = Verdict(VerdictStatus.UNPARSABLE, 0.0)
