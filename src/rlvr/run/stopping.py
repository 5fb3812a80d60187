"""The end of a run by a signal, an error or hopeless steps, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rlvr.core.waits import StopRequest
from rlvr.distributed import World
from rlvr.errors import TrainingError, UserCodeError, user_traceback
from rlvr.monitor.console import Level
from rlvr.monitor.health import Finding
from rlvr.records import cut
from rlvr.run.train_state import TrainState

STOPPING = "stopping as soon as this step can be left, with a checkpoint; Ctrl-C once more stops at once"


class RunStop(StopRequest):
    """A request to stop the run, which may come to any rank: a signal, or a callback's. `replies`: the first signal is
    answered in words."""

    def __init__(self, world: World, replies: bool) -> None:
        super().__init__(STOPPING if replies else "")
        self._world = world
        self._asked: str | None = None

    def __enter__(self) -> RunStop:
        super().__enter__()
        self._asked = None
        return self

    def ask(self, reason: str) -> None:
        """Stop before the next step; what is left of this one (its evaluation, say) is not interrupted."""
        self._asked = self._asked or reason

    def on_any_rank(self) -> bool:
        """Return True if any rank was asked to stop; the same answer on every rank, each of which notes the signal or
        the reason."""
        self.reason = self.reason or self._asked
        if self._world.size > 1:
            # A launcher may send the signal to some ranks only, or to each at its own time. All have to leave at the
            # same step, since the next one is collective.
            requests = self._world.gather((self.signal, self.reason), "whether to go on")
            self.signal = self.signal or next((number for number, _ in requests if number), None)
            self.reason = self.reason or next((reason for _, reason in requests if reason), None)
            return any(number or reason for number, reason in requests)
        return bool(self)


@contextlib.contextmanager
def failing_together(world: World) -> Iterator[None]:
    """Tell the other ranks of an error inside the block, which is raised. A SystemExit becomes a UserCodeError."""
    try:
        yield
    except SystemExit as error:  # from a user's component, in a call that does not catch it: the run is not done
        problem = f"code that the run called asked Python to exit ({error.code})"
        stopped = UserCodeError(problem, cut(user_traceback(error)))
        world.fail(stopped)
        raise stopped from error
    # KeyboardInterrupt, too: the other ranks wait at a barrier until they learn of it.
    except BaseException as error:
        world.fail(error)
        raise


def stop_when_hopeless(
    state: TrainState,
    most: int,
    finding: Finding | None,
    save: Callable[[], Path],
    report: Callable[[str, Level], None],
) -> None:
    """TrainingError, after a checkpoint by `save`, when `most` steps in a row had to be skipped or a monitor is told to
    stop.

    `report` is told, as (text, level), of a step that was skipped; `finding` is that of a monitor which stops the run.
    """
    if state.nonfinite:
        report(f"step {state.step}: the loss or gradient was not finite; its update was skipped", "warning")
    if state.nonfinite >= most:
        raise TrainingError(
            f"the loss or gradient was not finite for {state.nonfinite} steps in a row; stopped with the checkpoint "
            f"{save()}. Lower optim.lr, or look at the rewards and log-probs of the last rollouts"
        )
    if finding is not None:
        raise TrainingError(f"health.{finding}. Stopped with the checkpoint {save()}")
