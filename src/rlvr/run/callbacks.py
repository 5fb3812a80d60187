"""Callbacks: a user's code that is called at the events of a run, and may stop it.

Invariants: rank 0 alone calls them; what they decide is taken over by all ranks at the same step. A callback that
raises ends the run as an error of the user's code, with its own traceback.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.errors import USER_CODE_ERRORS, ConfigError, UserCodeError, nearest, user_traceback
from rlvr.records import cut
from rlvr.run.run_view import RunView
from rlvr.run.stopping import RunStop


class Callback:
    """Base of callbacks: override the events that you need.

        class GoodEnough(Callback):
            def on_evaluation(self, run, results):
                return results["eval/greedy"] >= 0.95

        GRPOTrainer(..., callbacks=[GoodEnough()])

    An event that returns True stops the run after the step, with a checkpoint: `train` returns, and `train(resume=...)`
    goes on. All are called on rank 0, in the thread of the loop, which waits for them.
    """

    def on_start(self, run: RunView) -> bool | None:
        """A call of `train` begins; the run folder is there, and a checkpoint to resume from was loaded."""
        return None

    def on_step(self, run: RunView, metrics: Mapping[str, Any]) -> bool | None:
        """A step is done; `metrics` is its line of metrics.jsonl (docs/metrics.md), without the results of an
        evaluation, which comes after the step."""
        return None

    def on_evaluation(self, run: RunView, results: Mapping[str, Any]) -> bool | None:
        """An evaluation that the run makes by itself is done, that at the start included; `results` by metric name."""
        return None

    def on_save(self, run: RunView, checkpoint: Path) -> bool | None:
        """A checkpoint is whole on the disk; `checkpoint` is its folder, whose `model/` has the Hugging Face files.

        A checkpoint is written while training goes on, so that this may be called some steps after it was begun.
        """
        return None

    def on_end(self, run: RunView) -> None:
        """A call of `train` ends after its last checkpoint; not where it raises."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as JSON types; none by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, before `on_start` of a run that is resumed."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def _saved(run: RunView, path: Path, callback: Callback) -> bool | None:
    return callback.on_save(run, path)


class Callbacks:
    """The callbacks of a run, saved and called as one."""

    def __init__(self, callbacks: Sequence[Callback], run: RunView, stop: RunStop, is_main: bool) -> None:
        if not isinstance(callbacks, list | tuple):
            kind = type(callbacks).__name__
            raise ConfigError(f"GRPOTrainer: callbacks is a list of objects of subclasses of rlvr.Callback, not {kind}")
        for one in callbacks:
            if isinstance(one, type) or not isinstance(one, Callback):
                kind = one.__name__ if isinstance(one, type) else type(one).__name__
                raise ConfigError(
                    f"GRPOTrainer: the callback {kind} is not an object of a subclass of rlvr.Callback (the events of "
                    "transformers.TrainerCallback have other names and arguments: docs/python.md)"
                )
            for event in dir(one):
                if event.startswith("on_") and event not in EVENTS:  # it would never be called
                    raise ConfigError(
                        f"GRPOTrainer: the callback {type(one).__name__} has {event}, which is no event"
                        f"{nearest(event, EVENTS)}"
                    )
        self._callbacks = list(callbacks)
        self._run = run
        self._stop = stop
        self._is_main = is_main

    def on_start(self) -> None:
        """Call `on_start` of all."""
        self._each("on_start", lambda one: one.on_start(self._run))

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Call `on_step` of all."""
        self._each("on_step", lambda one: one.on_step(self._run, metrics))

    def on_evaluation(self, results: Mapping[str, Any]) -> None:
        """Call `on_evaluation` of all."""
        self._each("on_evaluation", lambda one: one.on_evaluation(self._run, results))

    def on_save(self, saved: Sequence[Path]) -> None:
        """Call `on_save` of all for each of these checkpoints."""
        for path in saved:
            self._each("on_save", functools.partial(_saved, self._run, path))

    def on_end(self, saved: Sequence[Path]) -> None:
        """Call `on_save` for the last checkpoints, and `on_end`."""
        self.on_save(saved)
        self._each("on_end", lambda one: one.on_end(self._run))

    def _each(self, event: str, call: Callable[[Callback], object]) -> None:
        """Call one event of all. UserCodeError where one raises."""
        if not self._is_main:
            return
        for one in self._callbacks:
            name = type(one).__name__
            try:
                wants = call(one)
            except USER_CODE_ERRORS as error:
                raise UserCodeError(f"{event} of the callback {name} raised", cut(user_traceback(error))) from error
            # A comparison of metrics may be a bool of NumPy; a number that an event returns is no request.
            if isinstance(wants, (bool, np.bool_)) and wants:
                self._stop.ask(f"the callback {name} asked for it")

    def state_dict(self) -> list[dict[str, Any]]:
        """The states of those that have one, each with the class it is of. ConfigError for one that is no JSON."""
        states = []
        for one in self._callbacks:
            name = type(one).__qualname__
            try:
                state = one.state_dict()
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"state_dict of the callback {name} gives no JSON types: {error}") from error
            if state:
                states.append({"class": name, "state": state})
        return states

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Give each callback the state of its class; those without one, or given anew, begin afresh."""
        waiting = list(state)
        for one in self._callbacks:
            for saved in waiting:
                if saved["class"] == type(one).__qualname__:
                    one.load_state_dict(saved["state"])
                    waiting.remove(saved)
                    break
