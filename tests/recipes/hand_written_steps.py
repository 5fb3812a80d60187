"""A step of a recipe's own stage on responses that were written by hand.

Everything is as the recipe ships it: its verifier judges the texts, and its stage gives rewards, selection, advantages,
token weights and objective. Two things are made up: the token ids of the responses, and the policy, which has one
logit per token whatever stands before it. Its gradient has a closed form, which the tests write down.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlvr import registry
from rlvr.components import SequenceLoss
from rlvr.config.config_loading import make_config
from rlvr.config.stage_plan import StagePlan, stage_plans
from rlvr.data import Draw, History
from rlvr.losses.objective import ObjectiveTerm
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import TokenBatch
from rlvr.recipes.papers import find_paper
from rlvr.recipes.stand_ins import with_stand_ins
from rlvr.records import Batch, Origin, Rollout, StopReason, Task, Verdict
from rlvr.rollout import Completion, Request, RolloutContext, Sampling, StepRollouts
from rlvr.run.loaded_models import LoadedModels
from rlvr.stages.grpo.demonstrations import demonstration
from rlvr.stages.stage_base import Stage, StageContext
from rlvr.verifiers.base import Verifier, as_verifier, judged, judged_group

PROMPT = 0
"""The token that stands for every prompt."""


@dataclass(frozen=True)
class Response:
    """A response: what the verifier reads, and the tokens that the policy of one logit per token wrote."""

    text: str
    ids: tuple[int, ...] = (1,)
    truncated: bool = False
    role: str = "policy"


def plan_of(slug: str, name: str = "grpo", models: Path | None = None, judge: str | None = None) -> StagePlan:
    """The recipe's stage of this name, with all its numbers. `models`: a folder for tiny ones in the place of its
    frozen models; `judge`: the url of its judge."""
    config = find_paper(slug).config
    if models is not None or judge is not None:
        config = make_config(with_stand_ins(find_paper(slug).tree, models or Path("unused"), judge))
    plans = {plan.name: plan for plan in stage_plans(config)}
    return plans[name]


@dataclass
class RecipeStep:
    """A stage of a recipe, opened for tasks that were written by hand."""

    plan: StagePlan
    stage: Stage
    tasks: list[Task]
    _verdicts: dict[tuple[str, str, str], Verdict] = field(default_factory=dict)
    """By verifier, task and text, since wide groups repeat a few texts."""
    _verifiers: dict[str, Verifier] = field(default_factory=dict)

    def score(self, groups: Sequence[Sequence[Response]], step: int = 0) -> Batch:
        """The batch that trains in step number `step`, made of one group of responses for each task."""
        rollouts = []
        for number, (task, responses) in enumerate(zip(self.tasks, groups, strict=True)):
            members = [self._rollout(task, f"g{number}", member, one) for member, one in enumerate(responses)]
            self._compare(task, members)
            rollouts += members
        batch, _ = self.stage.score(StepRollouts(rollouts, step=step))
        return batch

    def sample(self, members: int, written: Callable[[int, int], Response]) -> list[Rollout]:
        """The rollouts of a draw of the only task by the recipe's own plan: `written(member, turn)` is what the policy
        writes, both counted from 0. By member."""
        (task,) = self.tasks

        async def generate(request: Request) -> Completion:
            response = written(*divmod(request.seed, 1000))
            count = len(response.ids)
            stop = StopReason.LENGTH if response.truncated else StopReason.END
            ids, unknown = np.asarray(response.ids, dtype=np.int64), np.full(count, np.nan, dtype=np.float32)
            return Completion(ids, unknown, np.zeros(count, dtype=np.int32), stop, response.text, 0.0)

        async def verify(rollout: Rollout) -> Rollout:
            rollout.verdicts["verifier"] = await self._verdict(rollout.task, rollout.text)
            return rollout

        prompts: Any = _Prompts()
        engine: Any = SimpleNamespace(generate=generate)
        verification: Any = SimpleNamespace(verify=verify, by_group=lambda task: False)
        context = _NumberedContext(
            engine=engine,
            verification=verification,
            prompts=prompts,
            sampling=Sampling(1000),
            group_size=members,
            context=10_000,
            history=History(),
        )

        async def collected() -> list[Rollout]:
            plan = registry.build("plan", self.plan.config.rollout.plan)
            return [rollout async for rollout in plan(Draw(0, task), context)]

        return sorted(asyncio.run(collected()), key=lambda rollout: rollout.member)

    def batch_of(self, rollouts: Sequence[Rollout]) -> Batch:
        """The batch that trains, made of sampled rollouts."""
        batch, _ = self.stage.score(StepRollouts(list(rollouts), step=0))
        return batch

    def demonstrations(self) -> Batch:
        """The batch of a supervised step over all tasks."""
        rollouts = [demonstration(task, self.stage.context, str(number)) for number, task in enumerate(self.tasks)]
        batch, _ = self.stage.score(StepRollouts(rollouts))
        return batch

    def rewards(self, texts: Sequence[str]) -> list[float]:
        """The reward of each text as an answer to the only task."""
        (task,) = self.tasks
        rollouts = [self._rollout(task, "g0", member, Response(text)) for member, text in enumerate(texts)]
        stage: Any = self.stage
        batch = stage.scoring.score(rollouts, stage.context.policy, History(), (0, stage.steps))
        return [float(value) for value in batch.column("reward")]

    def gradient(
        self,
        batch: Batch,
        logits: Sequence[float],
        old: Sequence[float] | None = None,
        reference: Sequence[float] | None = None,
        engine: Sequence[float] | None = None,
        step: int = 0,
    ) -> np.ndarray:
        """d loss / d logits of the stage's objective in its step number `step`. `old`: the logits before the batch's
        first optimizer step, where an earlier one has moved the policy. `engine`: the logits of the engine that
        sampled, where they are others."""
        policy = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        objective = self.stage.objective().at(step, self.stage.steps)
        before = logits if old is None else old
        sampled = before if engine is None else engine
        # Later optimizer steps take their ratio to the policy before the first one, or to the one that sampled.
        proximal = before if old is None or objective.recalls_update else sampled
        total = torch.zeros((), dtype=torch.float64)
        for component in objective.components:
            if not any(own.any() for own in batch.tokens(f"weight/{component.weights}")):
                continue  # a term without a token adds nothing
            tokens = _tokens(batch, component.weights, policy, proximal, sampled, reference)
            if component.by_token:
                tokens = replace(tokens, factor=_at_trained(batch, component, f"factor/{component.name}"))
            if component.reads:
                read = {name: _at_trained(batch, component, name) for name in component.reads}
                tokens = replace(tokens, columns=read)
            if component.corrected and objective.correction is not None:
                tokens = replace(tokens, importance=objective.correction(tokens))
            if isinstance(component.loss, SequenceLoss):
                value = component.loss.sequence_losses(_sequences(batch, tokens)).sum()
            else:
                value = component.loss(tokens, objective.denominators(batch)[component.name]).value
            total = total + float(component.coef) * value
        (gradient,) = torch.autograd.grad(total, policy)
        return gradient.numpy()

    def after_the_updates(
        self, groups: Sequence[Sequence[Response]], logits: Sequence[float], rate: float
    ) -> np.ndarray:
        """The logits after all optimizer steps of a batch, by plain gradient descent; each takes its share of the
        groups."""
        batch = self.score(groups)
        optim = self.plan.config.optim
        index = batch.group_index()
        moved = np.asarray(logits, dtype=np.float64)
        shares = np.array_split(np.arange(len(groups)), optim.updates_per_batch) * optim.epochs_per_batch
        for number, share in enumerate(shares):
            part = batch.select(np.flatnonzero(np.isin(index, share)))
            moved = moved - rate * self.gradient(part, moved.tolist(), old=logits if number else None)
        return moved

    def _rollout(self, task: Task, group: str, member: int, response: Response) -> Rollout:
        ids = np.asarray([PROMPT, *response.ids], dtype=np.int64)
        origin = np.full(len(ids), Origin.POLICY, dtype=np.int8)
        origin[0] = Origin.PROMPT
        rollout = Rollout(
            id=f"{group}/{member}",
            task=task,
            group=group,
            member=member,
            token_ids=ids,
            origin=origin,
            behaviour_logprobs=np.full(len(ids), np.nan, dtype=np.float32),
            policy_version=np.where(origin == Origin.POLICY, 0, -1).astype(np.int32),
            stop=StopReason.LENGTH if response.truncated else StopReason.END,
            text=response.text,
            role=response.role,
        )
        if len(response.ids) == len(response.text):
            # A token for each character, so that spans of the text have tokens.
            rollout.char_ends = np.asarray([-1, *range(1, len(ids))], dtype=np.int64)
        for name in ("verifier", *self.plan.config.verifiers):
            rollout.verdicts[name] = asyncio.run(self._verdict(task, response.text, name))
        return rollout

    def _compare(self, task: Task, members: Sequence[Rollout]) -> None:
        """The verdicts of the verifiers that want the responses of a group together."""
        for name in ("verifier", *self.plan.config.verifiers):
            verifier = self._verifier(name)
            if verifier.verify_group is not None and verifier.judge_of(task).verify_group is not None:
                verdicts = asyncio.run(judged_group(verifier, task, [member.text for member in members]))
                for member, verdict in zip(members, verdicts, strict=True):
                    member.verdicts[name] = verdict

    async def _verdict(self, task: Task, text: str, name: str = "verifier") -> Verdict:
        if (name, task.id, text) not in self._verdicts:
            verifier = self._verifier(name)
            assert verifier.check_task(task) is None, verifier.check_task(task)
            self._verdicts[name, task.id, text] = await judged(verifier, task, text)
        return self._verdicts[name, task.id, text]

    def _verifier(self, name: str) -> Verifier:
        if name not in self._verifiers:
            config = self.plan.config
            verifier = as_verifier(config.verifier if name == "verifier" else config.verifiers[name])
            verifier.attach(LoadedModels(config.models))
            self._verifiers[name] = verifier
        return self._verifiers[name]


class _Prompts:
    """A prompt and a reply are one token each."""

    def __call__(self, task: Task) -> tuple[int, ...]:
        return (PROMPT,)

    def reply(self, task: Task, text: str, role: str, end: int | None) -> tuple[int, ...]:
        return (PROMPT,)


class _NumberedContext(RolloutContext):
    """Its seeds say which turn of which member a request is for."""

    def seed(self, draw: int, member: int, call: int) -> int:
        return 1000 * member + call


def _at_trained(batch: Batch, component: ObjectiveTerm, column: str) -> torch.Tensor:
    """A column of the batch at each token that the component trains, [T]."""
    marks = batch.tokens(f"weight/{component.weights}")
    values = batch.tokens(column)
    return torch.tensor(np.concatenate([v[own != 0] for v, own in zip(values, marks, strict=True)])).double()


def _tokens(
    batch: Batch,
    weights: str,
    policy: torch.Tensor,
    proximal: Sequence[float],
    sampled: Sequence[float],
    reference: Sequence[float] | None,
) -> TokenBatch:
    ids: list[int] = []
    sequence: list[int] = []
    weight: list[float] = []
    advantage: list[float] = []
    of_batch = batch.tokens("advantage") if batch.has("advantage") else [np.zeros(len(r)) for r in batch.rollouts]
    for number, (rollout, own) in enumerate(zip(batch.rollouts, batch.tokens(f"weight/{weights}"), strict=True)):
        for place in np.flatnonzero(own):
            ids.append(int(rollout.token_ids[place]))
            sequence.append(number)
            weight.append(float(own[place]))
            advantage.append(float(of_batch[number][place]))
    before = _statistics(torch.tensor(proximal, dtype=torch.float64), ids)
    models = {"current": _statistics(policy, ids), "proximal": before}
    if reference is not None:
        models["reference"] = _statistics(torch.tensor(reference, dtype=torch.float64), ids)
    return TokenBatch(
        sequence=torch.tensor(sequence),
        sequences=len(batch),
        weight=torch.tensor(weight, dtype=torch.float64),
        advantage=torch.tensor(advantage, dtype=torch.float64),
        proximal_logprobs=before["logprobs"],
        behaviour_logprobs=_statistics(torch.tensor(sampled, dtype=torch.float64), ids)["logprobs"],
        statistics={(name, model): values for model, all_ in models.items() for name, values in all_.items()},
    )


def _statistics(logits: torch.Tensor, ids: list[int]) -> dict[str, torch.Tensor]:
    """Each statistic at the tokens [T]; they depend on the token alone."""
    table = torch.log_softmax(logits, dim=0)
    entropy = -(table.exp() * table).sum()
    of_all = {"entropy": entropy, "mean_logit": logits.mean(), "logsumexp": logits.logsumexp(0)}
    return {"logprobs": table[torch.tensor(ids)]} | {name: value.expand(len(ids)) for name, value in of_all.items()}


def _sequences(batch: Batch, tokens: TokenBatch) -> SequenceBatch:
    """The responses with a trained token."""
    on = torch.unique(tokens.sequence)

    def sums(values: torch.Tensor) -> torch.Tensor:
        return tokens.sum_by_sequence(tokens.weight * values)[on]

    nothing = torch.full_like(tokens.weight, math.nan)
    length = sums(torch.ones_like(tokens.weight))
    return SequenceBatch(
        logprobs=sums(tokens.logprobs),
        proximal=sums(tokens.proximal_logprobs),
        reference=sums(tokens.statistics.get(("logprobs", "reference"), nothing)),
        length=length,
        group=torch.from_numpy(batch.group_index())[on],
        reward=torch.from_numpy(batch.column("reward"))[on],
        advantage=sums(tokens.advantage) / length,
    )


def open_step(policy: Any, plan: StagePlan, tasks: Sequence[Task]) -> RecipeStep:
    """The stage of a plan, opened for these tasks; `policy` lends its tokenizer for demonstrations."""

    def lengths(of: Sequence[Task], demonstrations: bool = False) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(of), dtype=np.int32), np.ones(len(of), dtype=np.int32)

    nothing: Any = None
    prompts: Any = _Prompts()
    verification: Any = SimpleNamespace(
        same_answer=lambda task, first, second: first == second,
        by_group=lambda task: False,
        gives_spans=lambda task, name: None,
    )
    rollout_context = RolloutContext(
        engine=nothing,
        verification=verification,
        prompts=prompts,
        sampling=Sampling(plan.config.rollout.max_new_tokens),
        group_size=plan.config.rollout.group_size,
        context=policy.context,
        history=History(),
    )
    context = StageContext(
        policy=policy,
        history=History(),
        prompt=lambda task: (PROMPT,),
        lengths=lengths,
        collector=nothing,
        rollout_context=rollout_context,
        longest_sequence=policy.context,
        # With weights of its own an engine is corrected for where the recipe leaves `correction` at auto.
        shares_weights=plan.config.rollout.engine.name != "vllm",
    )
    stage = registry.find("stage", plan.kind)(plan, context, list(tasks), 0, **plan.options)
    return RecipeStep(plan, stage, list(tasks))


# A policy of four tokens before and after some optimizer steps of a batch. The ratios are 5, beyond a dual clip of 3;
# 1.24 and 0.76, beyond clips of 0.2 and within 0.28; and 0.29. The engine that sampled is a third one.
BEFORE = tuple(math.log(p) for p in (0.06, 0.30, 0.30, 0.34))
MOVED = tuple(math.log(p) for p in (0.30, 0.372, 0.228, 0.10))
ENGINE = tuple(math.log(p) for p in (0.03, 0.37, 0.15, 0.45))


PROBES = (0.79, 0.81, 1.19, 1.21, 1.27, 1.29, 2.95, 3.05)
"""Ratios to the policy at the begin of the update, on both sides of the usual bounds: 0.8, 1.2, 1.28 and 3."""


def moved_policy(size: int) -> tuple[list[float], list[float]]:
    """(logits, those at the begin of the update) of `size` tokens, of which 1 to 8 have the ratios of PROBES."""
    before = np.full(size, 1e-9)
    before[1 : 1 + len(PROBES)] = 0.03
    now = before.copy()
    now[1 : 1 + len(PROBES)] *= PROBES
    for probabilities in (before, now):
        probabilities[0] = 1 - probabilities[1:].sum()
    return np.log(now).tolist(), np.log(before).tolist()


def probing_group(right: str, wrong: str) -> list[Response]:
    """Sixteen responses of one token: each token that has moved is written once in a right and once in a wrong one."""
    return [Response(text, (1 + number,)) for number in range(len(PROBES)) for text in (right, wrong)]


TWO_AND_TWO = [
    ("2 + 2 = 4. \\boxed{4}", True),
    ("\\boxed{4}", True),
    ("5? No: $\\boxed{4}$", True),
    ("so " * 100 + "\\boxed{4}", True),
    ("\\boxed{4.0}", True),
    ("2 + 2 = 5. \\boxed{5}", False),
    ("4? No: \\boxed{5}", False),
    ("2 + 2 makes 4", False),
    ("\\boxed{}", False),
    ("", False),
]
"""(text, right) of responses to "What is 2 + 2?", whose answer is the number in the last box."""


# What the tests compare with, from formulas and not from the library.


def softmax(logits: Sequence[float]) -> np.ndarray:
    """The probabilities."""
    raised = np.exp(np.asarray(logits, dtype=np.float64) - max(logits))
    return raised / raised.sum()


def score_function(ids: Sequence[int], logits: Sequence[float]) -> np.ndarray:
    """The sum over the tokens of d log pi(token) / d logits, which is one at the token minus the probabilities."""
    result = -len(ids) * softmax(logits)
    for token in ids:
        result[token] += 1
    return result


def policy_gradient(
    advantages: Sequence[float], responses: Sequence[Sequence[int]], logits: Sequence[float], by: str
) -> np.ndarray:
    """d loss / d logits of -A log pi where the ratio is 1: the mean over `sequences` of each one's mean, or the mean
    over all `tokens`."""
    result = np.zeros(len(logits))
    tokens = sum(len(ids) for ids in responses)
    for advantage, ids in zip(advantages, responses, strict=True):
        share = 1 / tokens if by == "tokens" else 1 / (len(responses) * len(ids))
        result -= share * advantage * score_function(ids, logits)
    return result


def clipped_gradient(
    advantages: Sequence[float | Sequence[float]],
    responses: Sequence[Sequence[int]],
    logits: Sequence[float],
    old: Sequence[float],
    by: str,
    clip: tuple[float, float] = (0.2, 0.2),
    cap: float | None = None,
    longest: int = 1,
) -> np.ndarray:
    """d loss / d logits of max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / old, and of no more than -A `cap` where
    A < 0 (PPO, and the dual clip of Ye et al. 2020). An advantage is one number, or one for each token. The mean is
    over all `tokens`, over `sequences` of each one's, or the sum over their number times `longest` ("constant")."""
    ratio = softmax(logits) / softmax(old)
    result = np.zeros(len(logits))
    divisor = {"tokens": sum(map(len, responses)), "sequences": len(responses), "constant": len(responses) * longest}
    for advantage, ids in zip(advantages, responses, strict=True):
        of_tokens = np.broadcast_to(np.asarray(advantage, dtype=np.float64), len(ids))
        for own, token in zip(of_tokens, ids, strict=True):
            r = ratio[token]
            clipped = r > 1 + clip[1] if own > 0 else r < 1 - clip[0] or (cap is not None and r > cap)
            if not clipped:
                share = divisor[by] * (len(ids) if by == "sequences" else 1)
                result -= own * r * score_function([token], logits) / share
    return result


def entropy_gradient(logits: Sequence[float]) -> np.ndarray:
    """d H / d logits = -p (log p + H), the same at each token of a policy of one logit per token."""
    p = softmax(logits)
    return -p * (np.log(p) - np.sum(p * np.log(p)))


def of_the_group(rewards: Sequence[float], epsilon: float = 1e-4, unbiased: bool = False) -> list[float]:
    """GRPO's advantages (Shao et al. 2024, section 4.1.2), with TRL's 1e-4 beside the deviation; verl has 1e-6, and
    the unbiased deviation."""
    mean = math.fsum(rewards) / len(rewards)
    squares = math.fsum((reward - mean) ** 2 for reward in rewards)
    deviation = math.sqrt(squares / (len(rewards) - unbiased))
    return [(reward - mean) / (deviation + epsilon) for reward in rewards]


def k3_gradient(
    responses: Sequence[Sequence[int]],
    logits: Sequence[float],
    reference: Sequence[float],
    by: str = "sequences",
    longest: int = 1,
    bound: float = math.inf,
) -> np.ndarray:
    """d / d logits of the mean of exp(d) - 1 - d, d = log reference - log pi (Shao et al. 2024, eq. 4): each token's
    score function times 1 - exp(d), and 0 where the value is above `bound`. The mean is as in `clipped_gradient`."""
    ratio = softmax(reference) / softmax(logits)
    result = np.zeros(len(logits))
    divisor = {"tokens": sum(map(len, responses)), "sequences": len(responses), "constant": len(responses) * longest}
    for ids in responses:
        share = 1 / (divisor[by] * (len(ids) if by == "sequences" else 1))
        for token in ids:
            if ratio[token] - 1 - math.log(ratio[token]) <= bound:
                result += share * (1 - ratio[token]) * score_function([token], logits)
    return result
