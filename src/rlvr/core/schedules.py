"""A scalar of the configuration: a constant, a schedule over steps, or a controller on a metric.

A component (loss, advantage, KL term ...) is a frozen dataclass whose numeric options may each be given in any of the
three ways. `at(component, step, steps)` returns the component with plain floats for one step, so components never see a
schedule.

Invariant: a schedule is a pure function of (step, steps); a controller is the only stateful scalar and owns its state.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from rlvr.core.component import Component


class Schedule(BaseModel):
    """A number that goes from `start` to `end` over the first `over` steps (all steps of the stage by default)."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    schedule: Literal["linear", "cosine"]
    """The shape of the way from start to end."""
    start: float
    """The value at step 0."""
    end: float
    """The value at and after step `over`."""
    over: int | None = Field(default=None, ge=1)
    """Steps from start to end; null: the whole stage."""

    def value(self, step: int, steps: int) -> float:
        # `max`, for a stage of 0 steps, whose schedules are still asked for their start.
        done = min(1.0, step / max(1, self.over or steps))
        if self.schedule == "cosine":
            # Half a cosine wave, from 0 to 1 with slope 0 at both ends.
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done


class StepSchedule(BaseModel):
    """A number that changes at given steps."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    at: dict[int, float]
    """Step -> value from that step on; step 0 must be there."""

    def model_post_init(self, _: Any) -> None:
        if 0 not in self.at:
            raise ValueError("a schedule given as `at` needs a value for step 0")

    def value(self, step: int, steps: int) -> float:
        return self.at[max(at for at in self.at if at <= step)]


class Controller(BaseModel):
    """A number driven by a metric: it rises while the metric is above its target and falls while below (gain > 0).

    The proportional controller of adaptive KL coefficients (Ziegler et al. 2019, eq. 4) with a clipped error: e =
    clip((metric - target) / target, -0.2, 0.2); value <- value * (1 + gain * e). With `delta` it moves by steps of one
    size instead, and may leave 0: the adaptive entropy coefficient of Skywork-OR1 (He et al. 2025, arXiv 2505.22312),
    which has a negative delta and `idle`.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    metric: str
    """The metric that drives the value, by its name in metrics.jsonl."""
    target: float = Field(gt=0)
    """The value at which the controller holds the metric."""
    value: float = Field(alias="initial")
    """The value at the start."""
    gain: float = 0.1
    """Change of the value in one step for an error of 1; negative when a larger value raises the metric."""
    delta: float | None = None
    """Added in each step in which the metric is above its target, and taken off otherwise, in place of `gain`; negative
    when a larger value raises the metric. Null: the proportional form."""
    idle: bool = False
    """With `delta`, 0 in place of the value while the metric, as last measured, is where it should be: below its target
    (above it where delta is negative)."""
    minimum: float = 0.0
    """The value never falls below this."""
    maximum: float = Field(default=math.inf, allow_inf_nan=True)
    """The value never rises above this."""
    _current: float | None = PrivateAttr(default=None)
    _needed: bool = PrivateAttr(default=True)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.delta == 0 or (self.idle and self.delta is None):
            raise ValueError("`delta` is the size of a step, not 0, and `idle` needs it: set delta, or leave idle out")
        if self.delta is not None and self.gain != type(self).model_fields["gain"].default:
            raise ValueError("`delta` and `gain` are two ways to move: leave one of them out")

    @property
    def current(self) -> float:
        """The present value."""
        return self._bounded if self._needed else 0.0

    @property
    def _bounded(self) -> float:
        # `initial` may lie outside of the bounds; they hold for it, too.
        return max(self.minimum, min(self.maximum, self.value if self._current is None else self._current))

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Move by what a step measured; a metric that was not computed changes nothing."""
        measured = metrics.get(self.metric)
        # For example the KL of a step in which no rollout was decided.
        if measured is None or not math.isfinite(measured):
            return
        if self.delta is None:
            # Ziegler et al. 2019, "Fine-tuning language models from human preferences": e_t = clip((KL_t - target) /
            # target, -0.2, 0.2) and beta_{t+1} = beta_t (1 + K_beta e_t), with K_beta = 0.1, here `gain`.
            error = max(-0.2, min(0.2, (measured - self.target) / self.target))
            moved = self._bounded * (1 + self.gain * error)
        else:
            above = measured > self.target
            # alpha <- alpha + delta where the entropy is below its target, and - delta otherwise; `delta` is negative
            # there, because `above` is the other way round.
            moved = self._bounded + (self.delta if above else -self.delta)
            # With delta > 0 the value is there to bring a metric down that is above its target; with delta < 0, to
            # raise one below.
            self._needed = not self.idle or above == (self.delta > 0)
        self._current = max(self.minimum, min(self.maximum, moved))

    def state_dict(self) -> dict[str, Any]:
        # Bounded, so that a checkpoint under other bounds goes on from a value that was used.
        return {"current": self._bounded, "needed": self._needed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._current = float(state["current"])
        # Checkpoints of earlier versions lack the key.
        self._needed = bool(state.get("needed", True))


AnyScalar = Annotated[float, Field(allow_inf_nan=False)] | Schedule | StepSchedule | Controller
"""A number as it may be written: constant, scheduled or driven."""
if TYPE_CHECKING:
    Scalar = float
else:
    Scalar = AnyScalar
"""The type of an option of a component that may be written so. The component is called as `at` returns it, with floats
alone, which is what a type checker knows."""


def least_value(scalar: AnyScalar) -> float:
    """Return a lower bound of what `scalar` may become, over all steps."""
    if isinstance(scalar, Controller):
        # An idle controller stands for 0, which `minimum` does not bound.
        if scalar.idle:
            return min(0.0, scalar.minimum)
        if scalar.delta is None and scalar.value > 0:
            # The proportional form multiplies by at least 1 - 0.2 |gain|: above 0, a positive value never comes to 0.
            if 0.2 * abs(scalar.gain) < 1:
                return max(scalar.minimum, sys.float_info.min)
            return scalar.minimum
        return min(scalar.minimum, scalar.value)
    if isinstance(scalar, Schedule):
        return min(scalar.start, scalar.end)
    if isinstance(scalar, StepSchedule):
        return min(scalar.at.values())
    return scalar


def most_value(scalar: AnyScalar) -> float:
    """Return an upper bound of what `scalar` may become, over all steps."""
    if isinstance(scalar, Controller):
        return max(0.0 if scalar.idle else -math.inf, scalar.maximum)
    if isinstance(scalar, Schedule):
        return max(scalar.start, scalar.end)
    if isinstance(scalar, StepSchedule):
        return max(scalar.at.values())
    return scalar


def refuse_below(name: str, scalar: AnyScalar | str | None, limit: float, above: bool = False) -> None:
    """ValueError where a number, or a schedule or controller of it, may fall below `limit` (with `above`: to `limit`).

    A word or None in the place of a number is left alone.
    """
    if scalar is None or isinstance(scalar, str):
        return
    # Before the run: a temperature that reaches 0 at step 900 is refused at step 0.
    least = least_value(scalar)
    if least < limit or (above and least == limit):
        if isinstance(scalar, (int, float)):
            reaches = "is"
        else:
            reaches = "goes down to"
        raise ValueError(f"{name} {reaches} {least:g}, and must be {'above' if above else 'at least'} {limit:g}")


def refuse_above(name: str, scalar: AnyScalar, limit: float) -> None:
    """ValueError where a number, or a schedule or controller of it, may rise above `limit`."""
    most = most_value(scalar)
    if most > limit:
        if isinstance(scalar, (int, float)):
            reaches = "is"
        else:
            reaches = "goes up to"
        if isinstance(scalar, Controller):
            fix = " (set `maximum`)"
        else:
            fix = ""
        raise ValueError(f"{name} {reaches} {most:g}, and must be at most {limit:g}{fix}")


def scalar_value(scalar: AnyScalar, step: int, steps: int) -> float:
    """The value of `scalar` at `step` of `steps`."""
    if isinstance(scalar, Controller):
        return scalar.current
    if isinstance(scalar, (Schedule, StepSchedule)):
        return scalar.value(step, steps)
    return scalar


def at(component: Any, step: int, steps: int) -> Any:
    """`component` (a dataclass instance) with every scheduled or driven option as the float it is at `step` of
    `steps`."""
    moving = {name: scalar_value(value, step, steps) for name, value in _moving(component).items()}
    return dataclasses.replace(component, **moving) if moving else component


def _moving(component: Any) -> dict[str, Schedule | StepSchedule | Controller]:
    """The options of a component that are no constants; none where it is no dataclass instance."""
    if not dataclasses.is_dataclass(component) or isinstance(component, type):
        return {}
    values = {f.name: getattr(component, f.name) for f in dataclasses.fields(component)}
    return {name: v for name, v in values.items() if isinstance(v, (Schedule, StepSchedule, Controller))}


def controllers(*components: Any) -> Iterator[Controller]:
    """The controllers among the options of `components`, in a fixed order."""
    for component in components:
        yield from (value for value in _moving(component).values() if isinstance(value, Controller))


class AdaptiveComponent(Component):
    """A component that may remember what earlier steps measured."""

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of a step that was trained. Called once for each such step."""

    def state_dict(self) -> Any:
        """Return the remembered state, as JSON; None where nothing is remembered. A checkpoint saves it."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Go on with what `state_dict` returned. Not called with None."""

    @property
    def remembers(self) -> bool:
        """Return True if the component takes in metrics."""
        return type(self).observe is not AdaptiveComponent.observe


class ComponentList:
    """Components by name, in the order in which a checkpoint saves them.

    An item is a component or a dataclass beside it that holds its coefficient; both may have the same name. Every
    option of either may be a schedule or a controller. Saved state: one entry for each adaptive component, None where
    it remembers nothing.
    """

    def __init__(self, items: Iterable[tuple[str, Any]]) -> None:
        self._items = list(items)
        self._adaptive = [item for _, item in self._items if isinstance(item, AdaptiveComponent)]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._items)

    def at(self, step: int, steps: int) -> list[tuple[str, Any]]:
        """Return the names and the items, with every scheduled or driven option as the float that it is at `step` of
        `steps`."""
        return [(name, at(item, step, steps)) for name, item in self._items]

    def controllers(self) -> Iterator[Controller]:
        """Yield the controllers among the options."""
        return controllers(*(item for _, item in self._items))

    def scheduled(self, step: int, steps: int) -> dict[str, float]:
        """Return the options that are no constants, as `schedule/<name>.<option>` -> value at `step` of `steps`."""
        return {
            f"schedule/{name}.{option}": scalar_value(value, step, steps)
            for name, item in self._items
            for option, value in _moving(item).items()
        }

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Let the components take in the metrics of a step that was trained."""
        for component in self._adaptive:
            component.observe(metrics)

    def state_dict(self) -> list[Any]:
        """Return the remembered states of the components, in order."""
        return [component.state_dict() for component in self._adaptive]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Let the components go on with what they remembered."""
        for component, saved in zip(self._adaptive, state, strict=True):
            if saved is not None:
                component.load_state_dict(saved)
