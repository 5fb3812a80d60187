"""The contracts of components: what the library asks of an advantage, a modifier, a reward, a selector, a loss and the others.

A component is a subclass of one of these classes, or a function. Every member that a component need not have has its default here, so
no code asks whether it is there. `adapted` makes a component of what a user wrote without a base class: a function becomes the
`__call__` of one, and a class gets the members that it lacks. A public member whose name is nearly that of a member here is refused:
nothing would read it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlvr.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rlvr.config import Config
    from rlvr.core.needs import Need
    from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
    from rlvr.records import Batch, Task
    from rlvr.rewards.terms import Setting

    declared = property
else:

    class declared:  # noqa: N801 - as `property`, which a type checker takes it for
        """A default that a subclass replaces by a value, a property or, unlike a property's, an attribute of the instance."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = function
            self.__doc__ = function.__doc__

        def __get__(self, component: Any, owner: type) -> Any:
            return self if component is None else self.function(component)


SIMILAR = 0.88
"""Likeness of two names, by difflib's ratio, from which one is taken to be a slip for the other: `smallest_groups` is 0.97 like
`smallest_group`, and `needed` 0.73 like `needs`."""


class Component:
    """A component that may remember what earlier steps measured."""

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of a step that was trained."""

    def state_dict(self) -> Any:
        """What is remembered, as JSON; None where there is nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Go on with what was remembered."""

    @declared
    def needs(self) -> frozenset[Need]:
        """Statistics of the policy that are read."""
        return frozenset()

    @declared
    def smallest_group(self) -> int:
        """Members that a group has to have."""
        return 1


class Advantage(Component):
    """An estimator of advantages: a pure function of a batch.

    It reads the column `reward`, float64 [B], NaN where undecided, and `STATISTIC/current` for what it needs. It returns float64 [B], or
    a list of one array [T_b] for each rollout; 0 for undecided rollouts, which also stay out of every baseline and scale.
    """

    @declared
    def per_token(self) -> bool:
        """Whether the result is a number for each token."""
        return False

    @declared
    def per_response(self) -> bool:
        """Whether one number for each response is needed."""
        return False

    @declared
    def reads_characters(self) -> bool:
        """Whether `Rollout.char_ends` is read."""
        return False

    def check(self, config: Config, tasks: Sequence[Task]) -> None:
        """ConfigError where the rest of the configuration contradicts the component."""

    def __call__(self, batch: Batch) -> np.ndarray | list[np.ndarray]:
        raise NotImplementedError


class Modifier(Advantage):
    """A change of the advantages that an estimator gave, of the same shapes."""

    def __call__(self, batch: Batch, advantage: Any = None) -> Any:
        raise NotImplementedError


class Selector(Component):
    """A choice of the rollouts that train: their positions, or a bool for each."""

    @declared
    def after(self) -> bool:
        """Whether the column `advantage` is read, so that `algorithm.select_after` has to be set."""
        return False

    def bind(self, setting: Setting) -> Selector:
        """The selector with what it takes from the run. ConfigError where the run contradicts it."""
        return self

    def __call__(self, batch: Batch) -> np.ndarray:
        raise NotImplementedError


class Loss(Component):
    """A pure function of the statistics that it needs, for the tokens of a micro-batch."""

    @declared
    def average(self) -> Average:
        """What is averaged over."""
        raise NotImplementedError

    @declared
    def constant(self) -> float | None:
        """The length that the constant average divides by; None: the longest response."""
        return None

    @declared
    def zero_without_advantage(self) -> bool:
        """Whether a token whose advantage is 0 adds nothing to the gradient."""
        return False

    @declared
    def per_response(self) -> bool:
        """Whether one advantage for each response is taken."""
        return False

    @declared
    def chooses_by(self) -> frozenset[Need]:
        """Statistics of the whole optimizer step that `choose` reads; none: it is not called."""
        return frozenset()

    def choose(self, tokens: TokenBatch) -> torch.Tensor:
        """[T]: what the loss finds in `tokens.chosen` of each micro-batch, chosen from all tokens of the optimizer step."""
        raise NotImplementedError

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        raise NotImplementedError


CONTRACTS: dict[str, type[Component]] = {
    "advantage": Advantage,
    "modifier": Modifier,
    "selector": Selector,
    "loss": Loss,
}
"""Kind of component -> its contract."""


def members(contract: type[Component]) -> set[str]:
    """The public members of a contract."""
    return {name for name in dir(contract) if not name.startswith("_")}


def adapted(kind: str, component: Any) -> Any:
    """A class or function that a user wrote for `kind`, as a class of that contract. ConfigError for a member that looks like a slip."""
    contract = CONTRACTS[kind]
    if not inspect.isclass(component):
        return functools.partial(_Called.of, contract, component)
    check_members(contract, component)
    if issubclass(component, contract):
        return component
    names = {"__module__": component.__module__, "__qualname__": component.__qualname__, "__doc__": component.__doc__}
    return type(component.__name__, (component, contract), names)


class _Called:
    """Make components of functions."""

    @staticmethod
    def of(contract: type[Component], function: Callable[..., Any], **options: Any) -> Component:
        """A component of the contract that calls `function` with these options."""
        bound = functools.partial(function, **options) if options else function

        def call(self: Any, *arguments: Any, **more: Any) -> Any:
            return bound(*arguments, **more)

        made = type(
            getattr(function, "__name__", "function"), (contract,), {"__call__": call, "__doc__": function.__doc__}
        )
        return made()


def check_members(contract: type[Component], component: type) -> None:
    """ConfigError where a public member of the class is nearly called like one of its contract."""
    known = members(contract)
    options = {field.name for field in dataclasses.fields(component)} if dataclasses.is_dataclass(component) else set()
    own = {name for base in component.__mro__ if base not in contract.__mro__ for name in vars(base)}
    for name in sorted(own - known - options):
        near = difflib.get_close_matches(name, known, 1, SIMILAR) if not name.startswith("_") else []
        if near:
            raise ConfigError(
                f"{component.__module__}.{component.__qualname__} has the member {name!r}, which nothing reads: is it {near[0]!r}? "
                f"Rename it, or begin its name with an underscore. Members of {contract.__name__}: {', '.join(sorted(known))}"
            )
