"""A scalar of the configuration: a constant, a schedule over steps, or a controller on a metric.

A piece (loss, advantage, KL term ...) is a frozen dataclass whose numeric options may each be given in any of the three
ways. `at(piece, step, steps)` returns the piece with plain floats for one step, so pieces never see a schedule.

Invariant: a schedule is a pure function of (step, steps); a controller is the only stateful scalar and owns its state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr


class Schedule(BaseModel):
    """A number that goes from `start` to `end` over the first `over` steps (all steps of the stage by default)."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    schedule: Literal["linear", "cosine"]
    """The shape of the way from start to end."""
    start: float
    """The value at step 0."""
    end: float
    """The value at and after step `over`."""
    over: int | None = Field(default=None, ge=1)
    """Steps from start to end; null: the whole stage."""

    def value(self, step: int, steps: int) -> float:
        done = min(1.0, step / max(1, self.over or steps))
        if self.schedule == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start + (self.end - self.start) * done


class StepSchedule(BaseModel):
    """A number that changes at given steps."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    at: dict[int, float]
    """Step -> value from that step on; step 0 must be there."""

    def model_post_init(self, _: Any) -> None:
        if 0 not in self.at:
            raise ValueError("a schedule given as `at` needs a value for step 0")

    def value(self, step: int, steps: int) -> float:
        return self.at[max(at for at in self.at if at <= step)]


class Controller(BaseModel):
    """A number driven by a metric: it rises while the metric is above its target and falls while below (gain > 0).

    The proportional controller of adaptive KL coefficients (Ziegler et al. 2019, eq. 4) with a clipped error:
    e = clip((metric - target) / target, -0.2, 0.2); value <- value * (1 + gain * e).
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    metric: str
    """The metric that drives the value, by its name in metrics.jsonl."""
    target: float = Field(gt=0)
    """Where the metric should be."""
    value: float = Field(alias="initial")
    """The value at the start."""
    gain: float = 0.1
    """How much an error of 1 changes the value in one step; negative when a larger value raises the metric."""
    minimum: float = 0.0
    """The value never falls below this."""
    maximum: float = math.inf
    """The value never rises above this."""
    _current: float | None = PrivateAttr(default=None)

    @property
    def current(self) -> float:
        return max(self.minimum, min(self.maximum, self.value if self._current is None else self._current))

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Move by what a step measured; a metric that was not computed changes nothing."""
        measured = metrics.get(self.metric)
        if measured is None or not math.isfinite(measured):
            return
        error = max(-0.2, min(0.2, (measured - self.target) / self.target))
        self._current = max(self.minimum, min(self.maximum, self.current * (1 + self.gain * error)))

    def state_dict(self) -> dict[str, float]:
        return {"current": self.current}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._current = float(state["current"])


Scalar = float | Schedule | StepSchedule | Controller
"""The type of a number that may be constant, scheduled or driven."""


def scalar_value(scalar: Scalar, step: int, steps: int) -> float:
    """The number that `scalar` stands for at `step` of `steps`."""
    if isinstance(scalar, Controller):
        return scalar.current
    if isinstance(scalar, (Schedule, StepSchedule)):
        return scalar.value(step, steps)
    return scalar


def at(piece: Any, step: int, steps: int) -> Any:
    """`piece` (a dataclass instance) with every scheduled or driven option as the float it is at `step` of `steps`."""
    if not dataclasses.is_dataclass(piece) or isinstance(piece, type):
        return piece
    moving = {
        f.name: scalar_value(value, step, steps)
        for f in dataclasses.fields(piece)
        if isinstance(value := getattr(piece, f.name), (Schedule, StepSchedule, Controller))
    }
    return dataclasses.replace(piece, **moving) if moving else piece


def moving_options(piece: Any, prefix: str, step: int, steps: int) -> dict[str, float]:
    """The options of `piece` that are no constants, as `prefix.option` -> the float that each is at `step` of `steps`."""
    if not dataclasses.is_dataclass(piece) or isinstance(piece, type):
        return {}
    values = {f.name: getattr(piece, f.name) for f in dataclasses.fields(piece)}
    moving = {name: v for name, v in values.items() if isinstance(v, (Schedule, StepSchedule, Controller))}
    return {f"{prefix}.{name}": scalar_value(v, step, steps) for name, v in moving.items()}


def controllers(*pieces: Any) -> Iterator[Controller]:
    """The controllers among the options of `pieces`, in a fixed order."""
    for piece in pieces:
        if dataclasses.is_dataclass(piece) and not isinstance(piece, type):
            values = (getattr(piece, f.name) for f in dataclasses.fields(piece))
            yield from (value for value in values if isinstance(value, Controller))
