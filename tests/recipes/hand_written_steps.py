"""A step of a recipe's own stage on responses that were written by hand.

Everything is as the recipe ships it: its verifier judges the texts, and its stage gives rewards, selection, advantages,
token weights and objective. Two things are made up: the token ids of the responses, and the policy, which has one
logit per token whatever stands before it. Its gradient has a closed form, which the tests write down.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlvr import registry
from rlvr.components import SequenceLoss
from rlvr.config.stage_plan import StagePlan, stage_plans
from rlvr.data import Draw, History
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import TokenBatch
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Origin, Rollout, StopReason, Task, Verdict
from rlvr.rollout import Completion, Request, RolloutContext, Sampling, StepRollouts
from rlvr.stages.grpo.demonstrations import demonstration
from rlvr.stages.stage_base import Stage, StageContext
from rlvr.verifiers.base import as_verifier, judged

PROMPT = 0
"""The token that stands for every prompt."""


@dataclass(frozen=True)
class Response:
    """A response: what the verifier reads, and the tokens that the policy of one logit per token wrote."""

    text: str
    ids: tuple[int, ...] = (1,)
    truncated: bool = False


def plan_of(slug: str, name: str = "grpo") -> StagePlan:
    """The recipe's stage of this name, with all its numbers."""
    plans = {plan.name: plan for plan in stage_plans(find_paper(slug).config)}
    return plans[name]


@dataclass
class RecipeStep:
    """A stage of a recipe, opened for tasks that were written by hand."""

    plan: StagePlan
    stage: Stage
    tasks: list[Task]
    _verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    """By task and text, since wide groups repeat a few texts."""

    def score(self, groups: Sequence[Sequence[Response]], step: int = 0) -> Batch:
        """The batch that trains in step number `step`, made of one group of responses for each task."""
        rollouts = [
            self._rollout(task, f"g{number}", member, response)
            for number, (task, responses) in enumerate(zip(self.tasks, groups, strict=True))
            for member, response in enumerate(responses)
        ]
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
        """d loss / d logits of the stage's objective in its step number `step`. `old`: the logits at the begin of the
        update, where an earlier optimizer step of the batch has moved the policy. `engine`: those that sampled, where
        an engine computes others than the trainer."""
        policy = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        objective = self.stage.objective().at(step, self.stage.steps)
        if engine is not None and old is not None and not objective.recalls_update:
            old = engine  # ratios are to the policy that sampled
        policies = _Policies(policy, old, reference, engine)
        total = torch.zeros((), dtype=torch.float64)
        for component in objective.components:
            if not any(own.any() for own in batch.tokens(f"weight/{component.weights}")):
                continue  # a term without a token adds nothing
            if isinstance(component.loss, SequenceLoss):
                value = component.loss.sequence_losses(_sequences(batch, component.weights, policies)).sum()
            else:
                over = objective.denominators(batch)[component.name]
                tokens = _tokens(batch, component.weights, policies)
                if component.by_token:
                    factor = _at_tokens(batch, component.weights, batch.tokens(f"factor/{component.name}"))
                    tokens = dataclasses.replace(tokens, factor=torch.tensor(factor, dtype=torch.float64))
                if component.corrected and objective.correction is not None:
                    tokens = dataclasses.replace(tokens, importance=objective.correction(tokens))
                value = component.loss(tokens, over).value
            total = total + float(component.coef) * value
        (gradient,) = torch.autograd.grad(total, policy)
        return gradient.numpy()

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
        )
        rollout.verdicts["verifier"] = asyncio.run(self._verdict(task, response.text))
        return rollout

    async def _verdict(self, task: Task, text: str) -> Verdict:
        if (task.id, text) not in self._verdicts:
            verifier = as_verifier(self.plan.config.verifier)
            assert verifier.check_task(task) is None, verifier.check_task(task)
            self._verdicts[task.id, text] = await judged(verifier, task, text)
        return self._verdicts[task.id, text]


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


@dataclass(frozen=True)
class _Policies:
    """Policies of one logit per token."""

    current: torch.Tensor
    """The only one with a gradient."""
    old: Sequence[float] | None
    reference: Sequence[float] | None
    engine: Sequence[float] | None

    @staticmethod
    def _of(logits: Sequence[float], ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=0)[ids]

    def statistics(self, ids: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
        """[T] each."""
        table = torch.log_softmax(self.current, dim=0)
        entropy = -(table.exp() * table).sum()
        result = {
            ("logprobs", "current"): table[ids],
            ("entropy", "current"): entropy.expand(len(ids)),
            ("logsumexp", "current"): self.current.logsumexp(0).expand(len(ids)),
        }
        if self.reference is not None:
            result["logprobs", "reference"] = self._of(self.reference, ids)
        return result

    def proximal(self, ids: torch.Tensor) -> torch.Tensor:
        """[T]: the log-probs that ratios are taken to."""
        if self.old is not None:
            return self._of(self.old, ids)
        return torch.log_softmax(self.current.detach(), dim=0)[ids]

    def behaviour(self, ids: torch.Tensor) -> torch.Tensor:
        """[T]: the log-probs that sampled."""
        return self.proximal(ids) if self.engine is None else self._of(self.engine, ids)


def _at_tokens(batch: Batch, weights: str, columns: Sequence[np.ndarray]) -> np.ndarray:
    """The values of a token column at the tokens that a term trains, one response after the other."""
    marks = batch.tokens(f"weight/{weights}")
    return np.concatenate([column[own != 0] for column, own in zip(columns, marks, strict=True)])


def _tokens(batch: Batch, weights: str, policies: _Policies) -> TokenBatch:
    def column(values: Sequence[np.ndarray], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(_at_tokens(batch, weights, values), dtype=dtype)

    nothing = [np.zeros(len(rollout)) for rollout in batch.rollouts]
    tokens = column([rollout.token_ids for rollout in batch.rollouts], torch.int64)
    return TokenBatch(
        sequence=column([number + zeros for number, zeros in enumerate(nothing)], torch.int64),
        sequences=len(batch),
        weight=column(batch.tokens(f"weight/{weights}")),
        advantage=column(batch.tokens("advantage") if batch.has("advantage") else nothing),
        proximal_logprobs=policies.proximal(tokens),
        behaviour_logprobs=policies.behaviour(tokens),
        statistics=policies.statistics(tokens),
    )


def _sequences(batch: Batch, weights: str, policies: _Policies) -> SequenceBatch:
    marks = batch.tokens(f"weight/{weights}")
    index = np.flatnonzero([bool(own.any()) for own in marks])
    part = batch.select(index)
    logprobs, proximal, reference, length = [], [], [], []
    for rollout, own in zip(part.rollouts, part.tokens(f"weight/{weights}"), strict=True):
        places = np.flatnonzero(own)
        ids = torch.tensor(rollout.token_ids[places])
        of_tokens = policies.statistics(ids)
        factor = torch.tensor(own[places], dtype=torch.float64)
        logprobs.append((factor * of_tokens["logprobs", "current"]).sum())
        proximal.append((factor * policies.proximal(ids)).sum())
        reference.append((factor * of_tokens.get(("logprobs", "reference"), torch.full((), torch.nan))).sum())
        length.append(factor.sum())
    return SequenceBatch(
        logprobs=torch.stack(logprobs),
        proximal=torch.stack(proximal),
        reference=torch.stack(reference),
        length=torch.stack(length),
        group=torch.from_numpy(part.group_index()),
        reward=torch.from_numpy(part.column("reward")),
        advantage=torch.zeros(len(part), dtype=torch.float64),
    )


def open_step(policy: Any, plan: StagePlan, tasks: Sequence[Task]) -> RecipeStep:
    """The stage of a plan, opened for these tasks; `policy` lends its tokenizer for demonstrations."""

    def lengths(of: Sequence[Task], demonstrations: bool = False) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(of), dtype=np.int32), np.ones(len(of), dtype=np.int32)

    nothing: Any = None
    prompts: Any = _Prompts()
    verification: Any = SimpleNamespace(
        same_answer=lambda task, first, second: first == second, by_group=lambda task: False
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
        shares_weights=False,  # the engine is vLLM
    )
    stage = registry.find("stage", plan.kind)(plan, context, list(tasks), 0, **plan.options)
    return RecipeStep(plan, stage, list(tasks))


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


def share_of_token(by: str, ids: Sequence[int], responses: Sequence[Sequence[int]], constant: float) -> float:
    """The weight of each token of a response in the mean over `responses` of each one's mean (by `sequences`), over all
    `tokens`, or over responses of the sum divided by a `constant` length."""
    tokens = sum(map(len, responses))
    return {
        "tokens": 1 / tokens,
        "sequences": 1 / (len(responses) * len(ids)),
        "constant": 1 / (len(responses) * constant),
    }[by]


def clipped_gradient(
    advantages: Sequence[float] | Sequence[Sequence[float]],
    responses: Sequence[Sequence[int]],
    logits: Sequence[float],
    old: Sequence[float],
    by: str,
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = math.inf,
    constant: float = 1.0,
) -> np.ndarray:
    """d loss / d logits of -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = pi / pi_old (Schulman et al. 2017, eq.
    7), which for A < 0 is at most -cap A (Ye et al. 2020, dual clip). An advantage for each response, or for each token
    of each."""
    ratio = softmax(logits) / softmax(old)
    result = np.zeros(len(logits))
    for of_response, ids in zip(advantages, responses, strict=True):
        share = share_of_token(by, ids, responses, constant)
        for advantage, token in zip(np.broadcast_to(of_response, len(ids)), ids, strict=True):
            rho = ratio[token]
            clipped = rho > 1 + high if advantage > 0 else (rho < 1 - low or rho > cap)
            if not clipped:
                result -= share * advantage * rho * score_function([token], logits)
    return result


def entropy_gradient(coef: float, logits: Sequence[float], weight: float = 1.0) -> np.ndarray:
    """d / d logits of -coef x weight x H: d H / d logit_i = -p_i (log p_i + H)."""
    p = softmax(logits)
    entropy = -(p * np.log(p)).sum()
    return coef * weight * p * (np.log(p) + entropy)


def policy_gradient(
    advantages: Sequence[float], responses: Sequence[Sequence[int]], logits: Sequence[float], by: str
) -> np.ndarray:
    """d loss / d logits of -A log pi where the ratio is 1: the mean over `sequences` of each one's mean, or the mean
    over all `tokens`."""
    return clipped_gradient(advantages, responses, logits, logits, by)


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
    constant: float = 1.0,
) -> np.ndarray:
    """d / d logits of the mean of exp(d) - 1 - d, d = log reference - log pi (Shao et al. 2024, eq. 4): each token's
    score function times 1 - exp(d). The mean is as in `share_of_token`."""
    ratio = softmax(reference) / softmax(logits)
    result = np.zeros(len(logits))
    for ids in responses:
        share = share_of_token(by, ids, responses, constant)
        for token in ids:
            result += share * (1 - ratio[token]) * score_function([token], logits)
    return result
