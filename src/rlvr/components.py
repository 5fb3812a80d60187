"""The contracts of components: what the library asks of an advantage, a modifier, a reward, a selector, a loss and the others.

A component is a subclass of one of these classes. A required member is abstract; every other member has its default here, so no
code asks whether a component has it. Samplers, verifiers and engines have contracts beside what they work with:
`rlvr.data.Sampler`, `rlvr.verifiers.Verifier`, `rlvr.rollout.EngineFactory`.

A user may also write a component without a base class, as a function or as a plain class: the registry passes it through `adapted`,
which makes it one of its contract. A public member whose name is nearly that of a member of the contract is refused by
`refuse_misspelt`, since nothing would read it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlvr.errors import ConfigError

if TYPE_CHECKING:
    from builtins import property as declared

    import numpy as np
    import torch

    from rlvr.config import Config
    from rlvr.core.needs import Need
    from rlvr.data import Draw
    from rlvr.losses import Average, Denominators, LossTerm, SequenceBatch, TokenBatch
    from rlvr.records import Batch, Rollout, Task
    from rlvr.rewards import Setting
    from rlvr.rewards.likelihood import Continuation, Encode
    from rlvr.rollout import RolloutContext
else:

    class declared:  # noqa: N801 - a type checker takes it for `property`, whose name is written so
        """A member with a default: a subclass replaces it by a value, by a property or by an attribute of the instance.

        A property of Python would refuse the attribute of the instance, and a dataclass would take an inherited class attribute
        for the default of a field without one, so that the class itself does not have the member.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, component: Any, owner: type) -> Any:
            if component is None:
                raise AttributeError(f"{owner.__name__}.{self.name} is a member of its instances")
            return self.function(component)


class Component(ABC):  # noqa: B024 - what is required differs from kind to kind
    """A part of a run that is chosen by name in the configuration."""

    injected: ClassVar[tuple[str, ...]] = ()
    """Parameters of the constructor that the library gives; the others are options."""


class AdaptiveComponent(Component):
    """A component that may remember what earlier steps measured."""

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of a step that was trained. Called once for each such step."""

    def state_dict(self) -> Any:
        """Return what is remembered, as JSON; None where nothing is. A checkpoint saves it."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Go on with what `state_dict` returned. Not called with None."""

    @property
    def remembers(self) -> bool:
        """Tell whether the component takes in metrics."""
        return type(self).observe is not AdaptiveComponent.observe


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

    def check(self, config: Config, tasks: Sequence[Task]) -> None:
        """ConfigError where the rest of the configuration, or the tasks, contradict the component."""


class Advantage(AdvantageComponent):
    """An estimator of advantages: a pure function of a batch.

    It reads the column `reward`, float64 [B], NaN where undecided, and the token columns `STATISTIC/current` of what it needs.
    """

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


class RewardTerm(AdaptiveComponent):
    """A term of the reward: a function of the batch."""

    inner: ClassVar[tuple[str, ...]] = ()
    """Options that hold other terms: their values are given by these names, [B] each, a list of them where the option is a list."""

    @declared
    def needs(self) -> frozenset[Need]:
        """Statistics of the policy that are read, found in the token columns `STATISTIC/current`."""
        return frozenset()

    @declared
    def reads_characters(self) -> bool:
        """True where `Rollout.char_ends` is read."""
        return False

    def bind(self, setting: Setting) -> RewardTerm:
        """Return the term with what it takes from the run. ConfigError where the run contradicts it."""
        return self

    def asks(self, batch: Batch, encode: Encode) -> list[Continuation]:
        """Return continuations whose log-probs `__call__` is given as `scored`. Not called where a subclass does not write it."""
        return []

    @property
    def asks_continuations(self) -> bool:
        """Tell whether the log-probs of continuations are given."""
        return type(self).asks is not RewardTerm.asks

    @property
    def needs_policy(self) -> bool:
        """Tell whether a forward pass of the policy is needed."""
        return bool(self.needs) or self.asks_continuations

    @abstractmethod
    def __call__(self, batch: Batch, *_: Any, **given: Any) -> np.ndarray | Sequence[float]:
        """Return one number for each rollout, NaN where undecided. `given`: values of the options in `inner`, and `scored`."""


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

    def bind(self, setting: Setting) -> Selector:
        """Return the selector with what it takes from the run. ConfigError where the run contradicts it."""
        return self

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
        """What is averaged over. ConfigError where the loss does not say it."""
        raise _missing(self, "average")

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
        """Tell whether the loss chooses its tokens."""
        return type(self).weights is not LossComponent.weights


class Loss(LossComponent):
    """A pure function of the statistics that it needs, for the tokens of a micro-batch."""

    @declared
    def chooses_by(self) -> frozenset[Need]:
        """Statistics of the whole optimizer step that `choose` reads."""
        return frozenset()

    def choose(self, tokens: TokenBatch) -> torch.Tensor | None:
        """Return [T]: what the loss finds in `tokens.chosen` of each micro-batch, chosen from all tokens of the optimizer step."""
        return None

    @abstractmethod
    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        """Return this micro-batch's share of the loss of the optimizer step."""


class SequenceLoss(LossComponent):
    """A loss of the whole responses of an optimizer step. It needs log-probs alone: of the current, proximal or reference policy."""

    @declared
    def per_response(self) -> bool:
        """True: a response has one advantage."""
        return True

    @abstractmethod
    def shares(self, sequences: SequenceBatch) -> torch.Tensor:
        """Return [S]: what each response adds to the loss of the step, which is their sum."""


class TokenSelector(Component):
    """A factor of each token's loss, from all tokens of an optimizer step."""

    @declared
    def needs(self) -> frozenset[Need]:
        """Statistics of the current policy that are read; one extra pass gives them."""
        return frozenset()

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


class RolloutPlan(Component):
    """The way from a draw of a task to a group of verified rollouts."""

    @declared
    def independent(self) -> bool:
        """True where the plan makes `group_size` independent rollouts of every draw, so that evaluation may sample with it."""
        return False

    @declared
    def one_group(self) -> bool:
        """True where a draw never makes more than one group."""
        return self.independent

    @declared
    def turns(self) -> int | None:
        """Most turns of the policy in a rollout; None where the plan does not say."""
        return None

    @declared
    def answer_characters(self) -> int:
        """Characters of a task's best answer that are read from the history; 0: answers are not kept."""
        return 0

    def check(self, context: RolloutContext, task: Task) -> None:
        """ConfigError where the run contradicts the plan; `task` is one of the run's."""

    @abstractmethod
    def __call__(self, draw: Draw, context: RolloutContext) -> AsyncIterator[Rollout]:
        """Yield the verified rollouts of a draw as they finish."""


class Environment(Component):
    """An environment that remembers: the policy talks with an episode of it. Its methods may be coroutine functions."""

    @abstractmethod
    def begin(self, task: Task) -> Episode | Awaitable[Episode]:
        """Return a new episode for one rollout of the task."""


class Episode(ABC):
    """One rollout's talk with an environment. Its methods may be coroutine functions."""

    @abstractmethod
    def reply(self, text: str) -> str | Awaitable[str | None] | None:
        """Return what the environment answers to a turn of the policy; None when the rollout is over."""

    def close(self) -> Awaitable[None] | None:
        """Give back what the episode holds. Called once, also where the rollout is given up."""
        return None


class Tool(Component):
    """A function that answers a turn of the policy, without memory. It may be a coroutine function."""

    @abstractmethod
    def __call__(self, text: str, task: Task) -> str | Awaitable[str | None] | None:
        """Return what the tool answers to a turn's text; None when the rollout is over."""


def _missing(loss: LossComponent, member: str) -> ConfigError:
    return ConfigError(
        f"the loss {type(loss).__qualname__!r} does not say its `{member}`: a loss is a class with "
        "`needs` (what it reads of a forward pass) and `average` (what it averages over)"
    )


CONTRACTS: dict[str, tuple[ABCMeta, ...]] = {
    "advantage": (Advantage,),
    "modifier": (Modifier,),
    "reward": (RewardTerm,),
    "selector": (Selector,),
    "loss": (SequenceLoss, Loss),
    "auxiliary": (SequenceLoss, Loss),
    "token_selector": (TokenSelector,),
    "correction": (Correction,),
    "plan": (RolloutPlan,),
    "environment": (Environment, Tool),
}
"""Kind of component -> its contracts; the packages that own further contracts add them. Of several, a class has the first whose
abstract methods it has."""

BY_SIGNATURE = frozenset({"reward"})
"""Kinds whose functions have several forms, which are told apart by their signatures where they are called."""

BASE_CLASS_NEEDED = frozenset({"verifier", "sampler"})
"""Kinds whose plain classes are not made components: what is no subclass of the contract is called as a function, or refused."""

SIMILAR = 0.88
"""Likeness of two names, by difflib's ratio, from which one is taken for a slip of the other: `smallest_groups` is 0.97 like
`smallest_group`, `needed` 0.73 like `needs`."""


def adapted(kind: str, component: Any) -> Any:
    """Return a user's class, or a function with its options bound, as one of the contract of its kind.

    Classes that have the contract are returned as they are, and so is everything of a kind without one.
    """
    contracts = CONTRACTS.get(kind, ())
    if not contracts or kind in BASE_CLASS_NEEDED or (inspect.isclass(component) and issubclass(component, contracts)):
        return component
    if inspect.isclass(component):
        own = set(dir(component))
        for contract in contracts:
            if contract.__abstractmethods__ <= own:
                return _with_contract(component, contract)
        required = " or ".join(f"`{name}`" for contract in contracts for name in sorted(contract.__abstractmethods__))
        raise ConfigError(f"{kind} {component.__module__}.{component.__qualname__} has no {required}: write it")
    if isinstance(component, contracts) or kind in BY_SIGNATURE:
        return component
    return called_as(next(one for one in contracts if one.__abstractmethods__ == {"__call__"}), component)


def called_as(contract: type, function: Callable[..., Any]) -> Any:
    """Return a component of the contract that calls `function`: a function, or an object that is called like one.

    Of an object the members remain, and its attributes are shared with the component.
    """
    if isinstance(function, contract):
        return function
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return _with_contract(FunctionComponent, contract)(function)
    made = _with_contract(type(function), contract)
    component: Any = object.__new__(made)
    component.__dict__ = vars(function)
    return component


class FunctionComponent:
    """A function as a component. Attributes of the function are members of the component."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # A partial holds the function's options, and has its attributes and name only in `func`.
        written = function.func if isinstance(function, functools.partial) else function
        functools.update_wrapper(self, written)
        self.__wrapped__ = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.__wrapped__(*arguments, **options)


_made: dict[tuple[type, type], type] = {}
"""(class, contract) -> the class made of both, so that one class gives one component class however often it is built."""


def _with_contract(component: type, contract: type) -> type:
    """A class with the members of `component`, and those of `contract` that it lacks."""
    key = (component, contract)
    if key not in _made:
        names = {name: getattr(component, name) for name in ("__module__", "__qualname__", "__doc__")}
        _made[key] = types.new_class(component.__name__, key, exec_body=lambda namespace: namespace.update(names))
    return _made[key]


def refuse_misspelt(kind: str, component: Any) -> None:
    """ConfigError where a public member of a user's class, function or instance is nearly called like one of its contract."""
    contracts = CONTRACTS.get(kind, ())
    known = {name for contract in contracts for name in dir(contract) if not name.startswith("_")}
    for name in sorted(_own_members(component) - known):
        near = difflib.get_close_matches(name, known, 1, SIMILAR)
        if near and not name.startswith("_"):
            written = component if inspect.isclass(component) or inspect.isfunction(component) else type(component)
            raise ConfigError(
                f"{kind} {written.__module__}.{written.__qualname__}: nothing reads its member {name!r}; is {near[0]!r} meant? "
                f"Rename it, or begin its name with an underscore. Members of {contracts[0].__name__}: {', '.join(sorted(known))}"
            )


def _own_members(component: Any) -> set[str]:
    """Names of members that a user wrote, without the options of a class."""
    if inspect.isfunction(component):
        return set(vars(component))
    owner = component if inspect.isclass(component) else type(component)
    written = [base for base in owner.__mro__ if base is not object and not base.__module__.startswith("rlvr.")]
    names = {name for base in written for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    if owner is not component and written:
        names |= set(vars(component))
    return names - set(inspect.signature(owner).parameters) if names else names
