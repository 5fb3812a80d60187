"""Components of one kind, which resolve their schedules, take in metrics and save themselves together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlvr.components import AdaptiveComponent
from rlvr.core.schedules import Controller, at, controllers, moving_options


class ComponentList:
    """Components by name, in the order in which a checkpoint saves them.

    An item is a component or a dataclass beside it that holds its coefficient; both may have the same name. Every option of either
    may be a schedule or a controller. Saved state: one entry for each adaptive component, None where it remembers nothing.
    """

    def __init__(self, items: Iterable[tuple[str, Any]]) -> None:
        self._items = list(items)
        self._adaptive = [item for _, item in self._items if isinstance(item, AdaptiveComponent)]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._items)

    def at(self, step: int, steps: int) -> list[tuple[str, Any]]:
        """Return the names and the items, with every scheduled or driven option as the float that it is at `step` of `steps`."""
        return [(name, at(item, step, steps)) for name, item in self._items]

    def controllers(self) -> Iterator[Controller]:
        """Yield the controllers among the options."""
        return controllers(*(item for _, item in self._items))

    def scheduled(self, step: int, steps: int) -> dict[str, float]:
        """Return the options that are no constants, as `schedule/<name>.<option>` -> value at `step` of `steps`."""
        moving: dict[str, float] = {}
        for name, item in self._items:
            moving |= moving_options(item, f"schedule/{name}", step, steps)
        return moving

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Let the components take in the metrics of a step that was trained."""
        for component in self._adaptive:
            component.observe(metrics)

    def state_dict(self) -> list[Any]:
        """Return what the components remember."""
        return [component.state_dict() for component in self._adaptive]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Let the components go on with what they remembered."""
        for component, saved in zip(self._adaptive, state, strict=True):
            if saved is not None:
                component.load_state_dict(saved)
