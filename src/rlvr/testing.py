"""Checks that the library's own components pass, for components of your own.

    from rlvr.testing import check_advantage, check_trains

    def test_my_advantage(tmp_path):
        check_advantage("my_ideas.py:median")
        check_trains(tmp_path, advantage="my_ideas.py:median")

Each check takes a component as YAML writes it (a name, `FILE.py:Name`, or a mapping with options) or the function
itself, tries it on made-up batches or texts, and raises AssertionError with the rule that it breaks. Made-up batches
come from a seed: a failure repeats.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlvr import registry
from rlvr.components import Environment
from rlvr.core.component import adapted
from rlvr.core.needs import CURRENT, PROXIMAL, REFERENCE
from rlvr.core.tree import merge
from rlvr.losses import Denominators, TokenBatch
from rlvr.losses.tokens import AVERAGES
from rlvr.monitor.recording import read_rollouts
from rlvr.records import Batch, Origin, Rollout, StopReason, Task, Verdict
from rlvr.rollout.environments import Closable
from rlvr.verifiers import Verifier, VerifierPool, as_verifier
from rlvr.verifiers.judge.stub_judge import StubJudge as StubJudge
from rlvr.verifiers.judge.stub_judge import StubRequest as StubRequest

if TYPE_CHECKING:
    from rlvr.trainer import GRPOTrainer

ComponentLike = str | Mapping[str, Any] | Callable[..., Any]

# A choice: enough for ragged groups of every size to meet undecided members; a check of an advantage takes well under a
# second.
TRIES = 30
"""Made-up batches of a check."""
PROMPT = 2
"""Tokens of a made-up prompt."""
STRANGE_TEXTS = ("", " \n", "\x00\ufffd\u202e", "9" * 100_000, "([{<" * 10_000, "\\boxed{" * 10_000)
"""Turns that a policy may write and that no verifier or environment may fail on."""


def make_batch(rewards: Sequence[Sequence[float | None]], lengths: Sequence[Sequence[int]] | None = None) -> Batch:
    """A batch with a group for each list of rewards; None is undecided. Column `reward` and the verdicts hold them.

    `lengths` are the completions' tokens (3 for all by default); the texts are letters.
    """
    rollouts = []
    column = []
    for group, of_group in enumerate(rewards):
        task = Task(id=f"task{group}", prompt="?", answer="1")
        for member, reward in enumerate(of_group):
            size = 3 if lengths is None else lengths[group][member]
            rollouts.append(_rollout(task, group, member, size, reward))
            column.append(np.nan if reward is None else reward)
    values = np.asarray(column, dtype=np.float64)
    return Batch(rollouts, {"reward": values, "reward/verdict": values.copy()})


def _rollout(task: Task, group: int, member: int, size: int, reward: float | None) -> Rollout:
    total = PROMPT + size
    origin = np.where(np.arange(total) < PROMPT, Origin.PROMPT, Origin.POLICY).astype(np.int8)
    # Any rule that gives members different texts; 23 keeps the letters within the alphabet.
    ids = (7 * np.arange(total) + 3 * member + group) % 23
    letters = "".join(chr(ord("a") + i) for i in ids[PROMPT:])
    rollout = Rollout(
        id=f"{group}/{member}",
        task=task,
        group=str(group),
        member=member,
        token_ids=ids.astype(np.int64),
        origin=origin,
        behaviour_logprobs=np.where(origin == Origin.POLICY, -1.5, np.nan).astype(np.float32),
        policy_version=np.where(origin == Origin.POLICY, 0, -1).astype(np.int32),
        stop=StopReason.END if size else StopReason.LENGTH,
        text=letters,
        char_ends=np.where(np.arange(total) < PROMPT, -1, np.arange(total) - PROMPT + 1),
    )
    rollout.verdicts["made up"] = Verdict.from_score(reward, answer=letters[:1] or None)
    return rollout


def made_up_batches(seed: int = 0, tries: int = TRIES) -> Iterator[Batch]:
    """Ragged batches, and then the edge cases: one rollout, equal rewards, none decided, one decided, empty
    completions, hundreds of members."""
    random = np.random.default_rng(seed)
    levels: list[float | None] = [0.0, 1.0, 0.5, 0.1, -1.0, None]
    for _ in range(tries):
        sizes = random.integers(1, 7, size=random.integers(1, 5))
        rewards = [[levels[i] for i in random.integers(0, len(levels), size=size)] for size in sizes]
        yield make_batch(rewards, [random.integers(1, 9, size=size).tolist() for size in sizes])
    # The edge cases: 0.1, which sums with rounding (a mean of three 0.1 is not 0.1), empty completions, a group of 400.
    yield make_batch([[1.0]])
    yield make_batch([[0.1, 0.1, 0.1], [1.0, 1.0]])
    yield make_batch([[None, None], [None]])
    yield make_batch([[None, 1.0, None], [0.0, 1.0]])
    yield make_batch([[0.0, 1.0, 1.0]], [[0, 4, 0]])
    yield make_batch([(np.arange(400) % 3 / 2).tolist()])


def check_advantage(component: ComponentLike, *, by_group: bool = True, zero_when_equal: bool = True) -> None:
    """An estimator: one finite number per rollout (or per token), 0 where undecided; it follows the rollouts when they
    are shuffled (N4).

    `by_group`: what other groups there are changes nothing (false for one that looks at the whole batch).
    `zero_when_equal`: a group of equal rewards gets advantages of 0 (false for one without a group baseline).
    """
    estimate = _built("advantage", component)
    for number, batch in enumerate(made_up_batches()):
        values = _per_rollout(estimate(batch), batch, "an advantage")
        reward = batch.column("reward")
        for i, value in enumerate(values):
            assert np.isfinite(value).all(), f"rollout {i} gets {value}: advantages must be finite"
            assert np.isfinite(reward[i]) or not np.any(value), (
                f"rollout {i} is undecided and gets {value}: it must get 0"
            )
        _check_positions(lambda b: _per_rollout(estimate(b), b, "an advantage"), batch, number, by_group, "advantages")
        if zero_when_equal:
            for group in batch.groups():
                decided = reward[group.index][np.isfinite(reward[group.index])]
                if len(set(decided.tolist())) == 1:
                    assert not any(np.any(values[i]) for i in group.index), (
                        f"a group of equal rewards {decided.tolist()} gets an advantage that is not 0"
                    )


def check_modifier(component: ComponentLike, *, by_group: bool = True) -> None:
    """A modifier: finite, in the form that it was given or per token, and it follows the rollouts when they are
    shuffled."""
    modify = _built("modifier", component)

    def modified(batch: Batch) -> list[np.ndarray]:
        # Any advantage will do; 0.3 makes it differ in sign and size from the reward.
        plain = np.where(np.isfinite(batch.column("reward")), batch.column("reward") - 0.3, 0.0)
        return _per_rollout(modify(batch, plain), batch, "a modified advantage")

    for number, batch in enumerate(made_up_batches()):
        assert all(np.isfinite(value).all() for value in modified(batch)), "a modified advantage is not finite"
        _check_positions(modified, batch, number, by_group, "advantages")


def check_reward(component: ComponentLike, *, by_group: bool = True) -> None:
    """A reward term: one number per rollout (NaN: undecided, never infinite), on any text; it follows the rollouts. Of
    a term that scores parts, the sums of these scores."""
    from rlvr.core.span_rewards import SpanRewards
    from rlvr.rewards import build_terms

    # By the path that a run takes, which also accepts a plain function of one completion.
    [term] = build_terms([dict(component) if isinstance(component, Mapping) else component])

    def values_of(batch: Batch) -> np.ndarray:
        values = term.function(batch)
        if not isinstance(values, SpanRewards):
            return np.asarray(values, dtype=np.float64)
        for rollout, scores in zip(batch.rollouts, values.spans, strict=True):
            assert int(scores.end.max(initial=0)) <= len(rollout), f"a span is past the end of rollout {rollout.id}"
        return values.column

    for number, batch in enumerate(made_up_batches()):
        values = values_of(batch)
        assert values.shape == (len(batch),), f"{values.shape} for {len(batch)} rollouts: one number each is needed"
        assert not np.isinf(values).any(), "a reward is infinite"
        _check_positions(values_of, batch, number, by_group, "rewards")


def _check_positions(values_of: Callable[[Batch], Any], batch: Batch, number: int, by_group: bool, noun: str) -> None:
    """The values follow the rollouts when they are shuffled, and with `by_group` they depend on no other group."""
    values = values_of(batch)
    order = np.random.default_rng(number).permutation(len(batch))
    _same(values_of(batch.select(order)), [values[i] for i in order], f"shuffling the rollouts changes their {noun}")
    if by_group:
        more = _joined(batch, make_batch([[5.0, -3.0, None], [0.0, 1.0]]))
        _same(values_of(more)[: len(batch)], values, f"groups that were added change the {noun} of the others")


def check_selector(component: ComponentLike, *, by_group: bool = True) -> None:
    """A selector: positions that exist, none twice (or a mask); the same rollouts whatever their order."""
    select = _built("selector", component)

    def kept(batch: Batch) -> list[str]:
        chosen = np.asarray(select(batch))
        if chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)
        else:
            chosen = chosen.astype(np.int64)
        assert len(set(chosen.tolist())) == len(chosen), "a rollout is selected twice"
        assert all(0 <= i < len(batch) for i in chosen), "a position is selected that the batch does not have"
        return [batch.rollouts[i].id for i in chosen]

    for number, batch in enumerate(made_up_batches()):
        whole = set(kept(batch))
        # The order in which rollouts are listed is an accident of sampling.
        order = np.random.default_rng(number).permutation(len(batch))
        if by_group:
            more = _joined(batch, make_batch([[1.0, 0.0], [1.0, 1.0]]))
            mine = {rollout.id for rollout in batch.rollouts}
            assert {i for i in kept(more) if i in mine} == whole, "groups that were added change what is selected"
        assert len(kept(batch.select(order))) == len(whole), "shuffling the rollouts changes how many are selected"


def check_loss(component: ComponentLike, *, smooth: bool = True) -> None:
    """A loss of tokens: the sum of its shares over any cut into micro-batches is the whole (N1); tokens of weight 0
    have no part; where it says `zero_without_advantage`, an advantage of 0 gives no gradient; everything is finite.

    `smooth`: its gradient is that of its value, by finite differences in float64 (false where a gradient is stopped or
    estimated, as in CISPO or a straight-through KL).
    """
    loss = _built("loss", component)
    assert isinstance(loss.needs, frozenset), f"`needs` is {loss.needs!r}, not a frozenset of Need"
    assert loss.average in AVERAGES, f"`average` is {loss.average!r}, not one of {', '.join(AVERAGES)}"
    for seed in range(TRIES):
        random = np.random.default_rng(seed)
        # 12 tokens of at most 4 responses, which stand one after the other, as in a micro-batch.
        sequence = np.sort(random.integers(0, 4, size=12))
        values = _made_up_tokens(random, sequence)
        # Of the whole: token weights, 4 responses, constant length 16. Both parts below are given the same ones (N1).
        over = Denominators(float(values["weight"].sum()), 4.0, 16.0)
        whole, gradient = _value_and_gradient(loss, values, sequence, over)
        assert np.isfinite(whole) and np.isfinite(gradient).all(), "the loss or its gradient is not finite"
        assert not gradient[values["weight"] == 0].any(), "a token of weight 0 has a gradient"
        if loss.zero_without_advantage:
            assert not gradient[values["advantage"] == 0].any(), "a token of advantage 0 has a gradient"
        # Cut between responses, as micro-batches are.
        parts = [sequence < 2, sequence >= 2]
        shares = [_value_and_gradient(loss, {k: v[p] for k, v in values.items()}, sequence[p], over) for p in parts]
        assert np.isclose(sum(share for share, _ in shares), whole, rtol=1e-6, atol=1e-9), (
            "the shares of two micro-batches do not add up to the loss: does it divide by a sum over what it sees?"
        )
        cut = np.concatenate([g for _, g in shares])
        assert np.allclose(cut, gradient, rtol=1e-6, atol=1e-9), "the gradient depends on the cut into micro-batches"
        if smooth:
            _check_gradient(loss, values, sequence, over, gradient)


def _made_up_tokens(random: np.random.Generator, sequence: np.ndarray) -> dict[str, np.ndarray]:
    size = len(sequence)
    proximal = random.normal(-1.0, 0.5, size)
    return {
        "weight": (random.random(size) > 0.2).astype(np.float64),
        "advantage": random.choice([-1.0, 0.0, 0.7], size=4)[sequence],
        "proximal": proximal,
        "behaviour": proximal + random.normal(0, 0.05, size),
        # Log-ratios on both sides of every usual clip range (0.2, 0.28) and near 0, none of them exactly on a kink.
        "logprobs": proximal + random.choice([-0.5, -0.05, 0.04, 0.6], size) + random.normal(0, 0.005, size),
        "reference": proximal + random.normal(0, 0.2, size),
        "entropy": random.random(size) * 3,
    }


def _value_and_gradient(
    loss: Any, values: Mapping[str, np.ndarray], sequence: np.ndarray, over: Denominators
) -> tuple[float, np.ndarray]:
    tensors = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    logprobs = tensors["logprobs"].requires_grad_()
    tokens = TokenBatch(
        sequence=torch.as_tensor(sequence),
        sequences=int(sequence.max(initial=-1)) + 1,
        weight=tensors["weight"],
        advantage=tensors["advantage"],
        proximal_logprobs=tensors["proximal"],
        behaviour_logprobs=tensors["behaviour"],
        statistics={
            ("logprobs", CURRENT): logprobs,
            ("logprobs", PROXIMAL): tensors["proximal"],
            ("logprobs", REFERENCE): tensors["reference"],
            ("entropy", CURRENT): tensors["entropy"],
        },
        # Of tokens that the policy wrote, with a number in every other column.
        columns={name: torch.full_like(logprobs, Origin.POLICY, requires_grad=False) for name in loss.reads},
    )
    # allow_unused: a loss may not depend on these log-probs at all, and its gradient is 0 then.
    value = loss(tokens, over).value
    if value.requires_grad:
        gradient = torch.autograd.grad(value, logprobs, allow_unused=True)[0]
    else:
        gradient = None
    return float(value.detach()), np.zeros(len(sequence)) if gradient is None else gradient.numpy()


def _check_gradient(
    loss: Any, values: Mapping[str, np.ndarray], sequence: np.ndarray, over: Denominators, gradient: np.ndarray
) -> None:
    for i in range(len(sequence)):
        moved = []
        for step in (1e-6, -1e-6):
            logprobs = values["logprobs"].copy()
            logprobs[i] += step
            moved.append(_value_and_gradient(loss, {**values, "logprobs": logprobs}, sequence, over)[0])
        # Central differences, [f(x + h) - f(x - h)] / 2h with h = 1e-6: in float64 both the truncation, O(h^2), and the
        # cancellation, about 1e-16 / h, stay below the tolerance.
        slope = (moved[0] - moved[1]) / 2e-6
        assert np.isclose(slope, gradient[i], rtol=1e-4, atol=1e-7), (
            f"the gradient of token {i} is {gradient[i]:.6g}, finite differences give {slope:.6g}"
        )


def check_verifier(component: ComponentLike, task: Task, *, right: Sequence[str], wrong: Sequence[str]) -> None:
    """A verifier: it accepts the task, every completion of `right` scores 1 and every one of `wrong` less; no text, of
    `STRANGE_TEXTS` either, leaves it undecided; the same text gets the same score again; one whose verdicts have spans
    says so by `gives_spans`.

    It runs in a pool as in a run: in a worker process where it needs one, and within its time limit.
    """
    verifier = as_verifier(dict(component) if isinstance(component, Mapping) else component)
    problem = verifier.check_task(task)
    assert problem is None, f"`check_task` refuses the task: {problem}"
    pairs = [(task, text) for text in (*right, *wrong, *STRANGE_TEXTS)]
    with VerifierPool(workers=1) as pool:
        verdicts = pool.verify_many(verifier, pairs)
        again = pool.verify_many(verifier, pairs)
    for number, ((_, text), verdict, second) in enumerate(zip(pairs, verdicts, again, strict=True)):
        shown = ascii(text[:60])
        assert verdict.score is not None, f"the verdict on {shown} is undecided: {verdict.reason}"
        assert not verdict.spans or verifier.gives_spans is not False, (
            f"the verdict on {shown} has spans, and `gives_spans` is False: nothing would ask for them"
        )
        assert second.score == verdict.score, f"{shown} scores {verdict.score}, and {second.score} the second time"
        if number < len(right):
            assert verdict.score == 1, f"the right answer {shown} scores {verdict.score}: {verdict.reason}"
        elif number < len(right) + len(wrong):
            assert verdict.score < 1, f"the wrong answer {shown} scores {verdict.score}"


def check_environment(component: ComponentLike, task: Task, turns: Sequence[str]) -> None:
    """An environment or a tool: the replies to `turns`, and to each of `STRANGE_TEXTS`, are texts, or None at the end;
    two episodes beside each other get the replies that each gets alone."""
    environment = _built("environment", component)
    for texts in (turns, *([text] for text in STRANGE_TEXTS)):
        alone = asyncio.run(_replies(environment, task, texts, 1))
        together = asyncio.run(_replies(environment, task, texts, 2))
        assert together == 2 * alone, f"two episodes reply {together}, one alone {alone}: they share a state, or chance"


async def _replies(environment: Any, task: Task, turns: Sequence[str], episodes: int) -> list[list[str | None]]:
    """The replies of so many episodes, which are begun together and are told each turn one after the other."""
    remembers = isinstance(environment, Environment)
    states: list[Any] = [await _awaited(environment.begin(task)) if remembers else None for _ in range(episodes)]
    replies: list[list[str | None]] = [[] for _ in states]
    for turn in turns:
        for state, received in zip(states, replies, strict=True):
            if None in received:  # the rollout is over
                continue
            reply = await _awaited(state.reply(turn) if remembers else environment(turn, task))
            assert reply is None or isinstance(reply, str), f"the reply to {turn[:60]!a} is {reply!r}, not text"
            received.append(reply)
    for state in states:
        if isinstance(state, Closable):
            await _awaited(state.close())
    return replies


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def check_plan(folder: Path, component: str | Mapping[str, Any]) -> list[Rollout]:
    """A plan: the rollouts of a step of the real trainer have different ids, verdicts, and log-probs at every token
    that the policy wrote; a second run with the same seed makes the same ones.

    `folder` is where the run folders go. Returns the rollouts.
    """
    first, second = ({rollout.id: rollout for rollout in _rollouts(folder, component)} for _ in range(2))
    assert first.keys() == second.keys(), f"one run makes the rollouts {[*first]}, the next one {[*second]}"
    for name, rollout in first.items():
        assert rollout.verdict is not None, f"rollout {name} has no verdict: yield what `context.verify` returns"
        known = np.isfinite(rollout.behaviour_logprobs)
        assert known[rollout.sampled].all(), f"rollout {name}: a token of the policy has no log-prob"
        assert np.array_equal(rollout.token_ids, second[name].token_ids), (
            f"rollout {name} differs between two runs of one seed: are its seeds of `context.seed`?"
        )
    return list(first.values())


def _rollouts(folder: Path, plan: str | Mapping[str, Any]) -> list[Rollout]:
    with _small_trainer(folder, {"rollout": {"plan": plan}, "run": {"steps": 1}}) as trainer:
        trainer.train()
    files = sorted((trainer.folder.path / "rollouts").iterdir())
    rollouts = [rollout for file in files for rollout in read_rollouts(file)[0]]
    assert len({rollout.id for rollout in rollouts}) == len(rollouts), "two rollouts have the same id"
    return rollouts


def check_trains(
    folder: Path, *, steps: int = 2, rewards: Sequence[Any] = ("verdict",), **algorithm: Any
) -> list[dict[str, Any]]:
    """Run the real trainer on a tiny policy with these settings of `algorithm`: finite metrics and weights that
    changed.

    `folder` is where the run folder goes. Returns the metrics, one record per step.
    """
    config = {"run": {"steps": steps}, "rewards": list(rewards), "algorithm": dict(algorithm)}
    with _small_trainer(folder, config) as trainer:
        before = {name: p.detach().clone() for name, p in trainer.policy.trainable().items()}
        rows = trainer.train()
        # An update that was skipped at every step would have finite metrics, too.
        moved = [name for name, p in trainer.policy.trainable().items() if not torch.equal(p, before[name])]
    assert moved, "no weight changed in the whole run"
    for row in rows:
        bad = [name for name, value in row.items() if isinstance(value, float) and not np.isfinite(value)]
        assert not bad, f"step {row['step']}: {', '.join(bad)} are not finite"
        assert not row["skipped/nonfinite"], (
            f"step {row['step']}: the update was skipped, its loss or gradient is not finite"
        )
    return rows


def _small_trainer(folder: Path, over: Mapping[str, Any]) -> GRPOTrainer:
    """A trainer of a tiny policy on six sums, with `over` laid over its settings."""
    from rlvr import GRPOTrainer

    config = {
        "run": {"dir": str(folder), "name": "check", "overwrite": True},
        "model": {"scratch": {"hidden_size": 32, "layers": 1, "context": 96}, "device": "cpu"},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6},
        "optim": {"lr": 1e-2, "updates_per_batch": 2},
        "logging": {"console": "off"},
    }
    tasks = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(6)]
    return GRPOTrainer(None, tasks, _Spread(), merge(config, over))


# A class, which runs in the trainer's process: a worker for a function of this module would import torch first.
class _Spread(Verifier):
    """The share of different characters: a reward that varies before anything is learned."""

    def verify(self, task: Task, completion: str) -> Verdict:
        return Verdict.from_score(len(set(completion)) / max(1, len(completion)))


def _built(kind: str, component: ComponentLike) -> Any:
    if isinstance(component, (str, Mapping)):
        return registry.build(kind, component if isinstance(component, str) else dict(component))
    component = adapted(kind, component)
    if isinstance(component, type):
        return component()
    return component


def _per_rollout(values: Any, batch: Batch, what: str) -> list[np.ndarray]:
    """One array for each rollout: a number, or one per token."""
    if isinstance(values, list):
        shapes = [np.shape(v) for v in values]
        assert shapes == [(len(r),) for r in batch.rollouts], f"{what} per token has the shapes {shapes}"
        return [np.asarray(v, dtype=np.float64) for v in values]
    array = np.asarray(values, dtype=np.float64)
    assert array.shape == (len(batch),), f"{what} has shape {array.shape} for {len(batch)} rollouts"
    return list(array)


def _same(actual: Sequence[Any], wanted: Sequence[Any], otherwise: str) -> None:
    # Not bit for bit: sums over a group may be taken in another order.
    for mine, theirs in zip(actual, wanted, strict=True):
        assert np.allclose(mine, theirs, rtol=1e-7, atol=1e-9, equal_nan=True), f"{otherwise}: {mine} and {theirs}"


def _joined(first: Batch, second: Batch) -> Batch:
    """Both batches, the second one's groups and rollouts under other names."""
    for rollout in second.rollouts:
        rollout.group = f"more{rollout.group}"
        rollout.id = f"more{rollout.id}"
    columns = {name: np.concatenate([first.columns[name], second.columns[name]]) for name in first.columns}
    return Batch([*first.rollouts, *second.rollouts], columns)
