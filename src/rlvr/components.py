"""The contracts of components: what the library asks of an advantage, a modifier, a reward, a selector, a loss and the
others.

A component is a subclass of one of these classes. A required member is abstract; every other member has its default
here, so no code asks whether a component has it. The others have contracts beside what they work with:
`rlvr.data.Sampler`, `rlvr.verifiers.Verifier`, `rlvr.rollout.RolloutPlan`, `rlvr.rollout.engine.EngineFactory`,
`rlvr.distributed.BackendFactory`, `rlvr.stages.Stage`. Sources, KL estimators, optimizers and presets are functions
without further members.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlvr.core.component import CONTRACTS, Component, declared, written_name
from rlvr.core.schedules import AdaptiveComponent
from rlvr.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rlvr.config import Config
    from rlvr.core.needs import Need
    from rlvr.core.span_rewards import SpanRewards
    from rlvr.losses.sequences import SequenceBatch
    from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
    from rlvr.records import Batch, Task


class AdvantageComponent(AdaptiveComponent):
    """Members of estimators of advantages and of their modifiers."""

    @declared
    def smallest_group(self) -> int:
        """Members that a group has to have."""
        return 1

    @declared
    def needs(self) -> frozenset[Need]:
        """Statistics of the policy before the update that are read."""
        return frozenset()

    @declared
    def per_token(self) -> bool:
        """True where the result is a number for each token."""
        return False

    @declared
    def per_response(self) -> bool:
        """True where one advantage for each response has to be given."""
        return False

    @declared
    def reads_characters(self) -> bool:
        """True where `Rollout.char_ends` is read."""
        return False

    @declared
    def reads_verdict_spans(self) -> bool:
        """True where `Verdict.spans` of the task's own verdict is read, so that its verifier has to give spans."""
        return False

    @declared
    def reads_behaviour_logprobs(self) -> bool:
        """True where `Rollout.behaviour_logprobs` is read, which `algorithm.truncated_sampling` then refuses."""
        return False

    def check(self, config: Config, tasks: Sequence[Task]) -> None:
        """ConfigError where the rest of the configuration, or the tasks, contradict the component."""


class Advantage(AdvantageComponent):
    """An estimator of advantages: a pure function of a batch.

    It reads the column `reward`, float64 [B], NaN where undecided, and the token columns `STATISTIC/current` of what it
    needs.
    """

    @declared
    def makes(self) -> tuple[str, ...]:
        """Columns `advantage/NAME` that each call adds to the batch, float64 [B] or [T_b]: parts of its result, for
        losses that read them."""
        return ()

    @abstractmethod
    def __call__(self, batch: Batch) -> np.ndarray | list[np.ndarray]:
        """Return float64 [B], or a list of one array [T_b] for each rollout.

        Undecided rollouts get 0, and stay out of every baseline and scale.
        """


class Modifier(AdvantageComponent):
    """A change of the advantages that an estimator gave."""

    @abstractmethod
    def __call__(self, batch: Batch, advantage: Any) -> Any:
        """Return the changed advantages, of the shape that they were given in, or one array [T_b] for each rollout."""


@dataclass(frozen=True)
class RewardContext:
    """Parts of the run that a component may read."""

    config: Config
    tasks: Sequence[Task]
    same_answer: Callable[[Task, str, str], bool] = lambda task, first, second: first.strip() == second.strip()
    """True if two extracted answers to a task are the same, as its verifier sees it."""
    made_sources: tuple[str, ...] = ()
    """Sources of tasks that the rollout plan makes."""
    adds_verdicts: bool = True
    """False where rollouts have the verdicts of the configuration's verifiers and no others."""
    gives_spans: Callable[[Task, str | None], bool | None] = lambda task, name: None
    """True if the verdicts on a task have spans, those of the verifier of this name, or of the task's own (None); None
    where that is not known."""

    def check_spans(self, who: str, verifier: str | None = None) -> None:
        """ConfigError where no task has a verifier of this name (None: its own) that gives the spans which `who`
        reads."""
        if self.tasks and all(self.gives_spans(task, verifier) is False for task in self.tasks):
            named = "the verifier of the tasks" if verifier is None else f"verifiers.{verifier}"
            raise ConfigError(
                f"{who} reads scores of spans (Verdict.spans), and {named} gives none: choose a verifier that does, "
                "such as `steps` or `step_scorer`; one of your own says so by `gives_spans = True`"
            )


Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Continuation:
    """A text to score: `target` after `context`, both token ids and not empty."""

    rollout: int
    """The position in the batch of the rollout that it is for."""
    context: Sequence[int]
    target: Sequence[int]
    temperature: float = 1.0
    model: Literal["current", "reference"] = "current"
    """The policy that scores it: as it is before the update, or as it was at the start of the stage. A term that asks
    for the second sets `needs_reference`."""


@dataclass(frozen=True)
class Monitoring:
    """A sample of a stage's tasks that the policy answers now and then, as it is in that step; nothing is trained on
    the responses. ValueError for a number below 1."""

    every: int
    """Steps from one time to the next, the first before the first step of the stage."""
    tasks: int
    """Tasks, drawn once for the stage; all where it has fewer."""
    samples: int
    """Responses to each."""

    def __post_init__(self) -> None:
        if min(self.every, self.tasks, self.samples) < 1:
            raise ValueError("the steps, tasks and responses of a monitoring must be at least 1")


class RewardTerm(AdaptiveComponent):
    """A term of the reward: a function of the batch."""

    inner: ClassVar[tuple[str, ...]] = ()
    """Options that hold other terms: their values are given by these names, [B] each, a list of them where the option
    is a list."""

    @declared
    def needs(self) -> frozenset[Need]:
        """Statistics of the policy that are read, found in the token columns `STATISTIC/current`."""
        return frozenset()

    @declared
    def reads_characters(self) -> bool:
        """True where `Rollout.char_ends` is read."""
        return False

    @declared
    def reads_behaviour_logprobs(self) -> bool:
        """True where `Rollout.behaviour_logprobs` is read, which `algorithm.truncated_sampling` then refuses."""
        return False

    @declared
    def by_element(self) -> bool:
        """True where a value depends on the values of what the term is made of at the same place alone, so that the
        term may be called for spans as for responses."""
        return False

    @declared
    def needs_reference(self) -> bool:
        """True where continuations are scored by the reference, of which the stage then keeps a copy."""
        return False

    @declared
    def monitoring(self) -> Monitoring | None:
        """The responses that `monitored` is shown; None: none. Read after `bind`."""
        return None

    def monitored(self, batch: Batch, **given: Any) -> None:
        """Take in the responses of a monitoring, one group for each task, before the rewards of the step; `given` as of
        `__call__`. All ranks are shown the same."""

    def check_config(self, config: Config) -> None:
        """ConfigError where the rest of the configuration contradicts the term, whatever the tasks are: called before
        the model is loaded, and by a dry run."""

    def bind(self, setting: RewardContext) -> RewardTerm:
        """Return the term with what it takes from the run. ConfigError where the run contradicts it."""
        return self

    def asks(self, batch: Batch, encode: Encode) -> list[Continuation]:
        """Return continuations whose log-probs `__call__` is given as `scored`. Not called where a subclass does not
        write it."""
        return []

    @property
    def asks_continuations(self) -> bool:
        """Return True if the log-probs of continuations are given."""
        # Whether a subclass wrote the method: asking for continuations costs a forward pass even where the list is
        # empty.
        return type(self).asks is not RewardTerm.asks

    @property
    def needs_policy(self) -> bool:
        """Return True if a forward pass of the policy is needed."""
        return bool(self.needs) or self.asks_continuations

    @abstractmethod
    def __call__(self, batch: Batch, *_: Any, **given: Any) -> np.ndarray | Sequence[float] | SpanRewards:
        """Return one number for each rollout, NaN where undecided, or scores of parts of the rollouts. `given`: values
        of the options in `inner`, and `scored`."""


class Selector(AdaptiveComponent):
    """A choice of the rollouts that train."""

    @declared
    def smallest_group(self) -> int:
        """Members that a group has to have."""
        return 1

    @declared
    def after(self) -> bool:
        """True where the column `advantage` is read, so that `algorithm.select_after` has to be set."""
        return False

    def bind(self, setting: RewardContext) -> Selector:
        """Return the selector with what it takes from the run. ConfigError where the run contradicts it."""
        return self

    def sampled(self, batch: Batch) -> None:
        """Take in all that was sampled for the step, with its rewards and what dynamic sampling dropped, before the
        choice. All ranks are shown the same."""

    @abstractmethod
    def __call__(self, batch: Batch) -> np.ndarray | Sequence[int]:
        """Return the positions that stay, int [K], or a bool for each rollout, [B]."""


class LossComponent(Component):
    """Members of every loss, of tokens and of whole responses."""

    @declared
    @abstractmethod
    def needs(self) -> frozenset[Need]:
        """Statistics that are read. ConfigError where the loss does not say them."""
        raise _missing(self, "needs")

    @declared
    @abstractmethod
    def average(self) -> Average:
        """Return the unit that the loss averages over (`rlvr.losses.tokens.Average`). ConfigError where the loss does
        not set it."""
        raise _missing(self, "average")

    @declared
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch that are found in `tokens.columns`, by the names of `Batch.tokens`: `origin`,
        `source/NAME`, `note/NAME`, `span/NAME`, `advantage/NAME` (which the estimator has to list in `makes`) or any
        other. A loss of whole responses reads none."""
        return ()

    @declared
    def constant(self) -> float | None:
        """The length that the constant average divides by; None: `rollout.max_new_tokens`."""
        return None

    @declared
    def smallest_group(self) -> int:
        """Members that a group has to have."""
        return 1

    @declared
    def per_response(self) -> bool:
        """True where one advantage for each response is taken: a number for each token is refused."""
        return False

    @declared
    def zero_without_advantage(self) -> bool:
        """True where a token whose advantage is 0 adds nothing to the gradient, so that its rollout may be skipped."""
        return False

    @declared
    def degenerate_on_policy(self) -> bool:
        """True where the loss is of the log-ratio to the proximal policy itself: in the first optimizer step of a batch
        that is 0, and another loss (`reinforce`, say) is what trains. One such step per batch is refused."""
        return False

    @declared
    def shows_demonstrations(self) -> bool:
        """True where the tasks' demonstrations are put into the batch."""
        return False

    @declared
    def appends(self) -> str | None:
        """A token that is put after every response; None: none is."""
        return None

    def weights(self, batch: Batch) -> list[np.ndarray]:
        """Return the weight of each token, float32 [T_b] each, where a further term of the loss chooses its tokens.

        A subclass that does not write it learns from the tokens of the policy loss.
        """
        return batch.tokens("weight/policy")

    @property
    def has_weights(self) -> bool:
        """Return True if the loss chooses its tokens."""
        return type(self).weights is not LossComponent.weights


class Loss(LossComponent):
    """A pure function of the statistics that it needs, for the tokens of a micro-batch."""

    @declared
    def chooses_by(self) -> frozenset[Need]:
        """Statistics of the whole optimizer step that `choose` reads."""
        return frozenset()

    def choose(self, tokens: TokenBatch) -> torch.Tensor | None:
        """Return [T]: what the loss finds in `tokens.chosen` of each micro-batch, chosen from all tokens of the
        optimizer step."""
        return None

    @abstractmethod
    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        """Return this micro-batch's share of the loss of the optimizer step."""


class SequenceLoss(LossComponent):
    """A loss of the whole responses of an optimizer step. It needs log-probs alone: of the current, proximal or
    reference policy."""

    @declared
    def per_response(self) -> bool:
        """True: a response has one advantage."""
        return True

    @abstractmethod
    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """Return [S]: what each response adds to the loss of the step, which is their sum."""


class TokenSelector(Component):
    """A factor of each token's loss, from all tokens of an optimizer step."""

    @declared
    def needs(self) -> frozenset[Need]:
        """Statistics of the current policy that are read; one extra pass gives them."""
        return frozenset()

    @declared
    def reads_advantage(self) -> bool:
        """True where `tokens.advantage` is read: an sft stage has none and refuses the selector."""
        return False

    @abstractmethod
    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        """Return float [T], at least 0: the factor of each token's loss."""


class Correction(Component):
    """A weight of each token's loss, for tokens that another distribution sampled."""

    @declared
    def cap(self) -> float | None:
        """The largest weight; None: weights are no ratios."""
        return float("inf")

    @declared
    def level(self) -> Literal["token", "sequence"]:
        """`token` where the ratio of each token weighs it, `sequence` where that of its response does."""
        return "token"

    @abstractmethod
    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        """Return float [T], detached, at least 0."""


class Environment(Component):
    """An environment with state: the policy exchanges turns with an episode of it.

    Its methods may be coroutine functions.
    """

    @abstractmethod
    def begin(self, task: Task) -> Episode | Awaitable[Episode]:
        """Return a new episode for one rollout of the task."""


class Episode(ABC):
    """One rollout's conversation with an environment. Its methods may be coroutine functions."""

    @abstractmethod
    def reply(self, text: str) -> str | Awaitable[str | None] | None:
        """Return the environment's answer to a turn of the policy; None when the rollout is over."""

    def close(self) -> Awaitable[None] | None:
        """Give back what the episode holds. Called once, also where the rollout is given up."""
        return None


class Tool(Component):
    """A function that answers a turn of the policy, without memory. It may be a coroutine function."""

    @abstractmethod
    def __call__(self, text: str, task: Task) -> str | Awaitable[str | None] | None:
        """Return the tool's answer to a turn's text; None when the rollout is over."""


def _missing(loss: LossComponent, member: str) -> ConfigError:
    return ConfigError(
        f"the loss {written_name(loss)!r} does not say its `{member}`: a loss is a class with "
        "`needs` (what it reads of a forward pass) and `average` (what it averages over)"
    )


CONTRACTS |= {
    "advantage": (Advantage,),
    "modifier": (Modifier,),
    "reward": (RewardTerm,),
    "selector": (Selector,),
    # The more special contract first: a class with `sequence_losses` is a SequenceLoss. A plain
    # function as an environment becomes a `Tool`, whose one required member is `__call__`.
    "loss": (SequenceLoss, Loss),
    "auxiliary": (SequenceLoss, Loss),
    "token_selector": (TokenSelector,),
    "correction": (Correction,),
    "environment": (Environment, Tool),
}
