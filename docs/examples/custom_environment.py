"""An environment of your own: a walk on a board of 4 x 4 fields, one step a turn, to a goal that the prompt names.

    python docs/examples/custom_environment.py

A real model: GRPOTrainer("Qwen/Qwen2.5-1.5B-Instruct", ...), and an environment whose replies are what your game, shell
or browser returns; the methods may be coroutines, and `close` ends what an episode has started.
"""

from rlvr import GRPOTrainer, Task
from rlvr.components import Environment, Episode

SIZE = 4
MOVES = {"r": (1, 0), "l": (-1, 0), "d": (0, 1), "u": (0, -1)}
TASKS = [
    {"prompt": [{"role": "user", "content": f"{x}{y}>{a}{b}"}], "start": [x, y], "goal": [a, b]}
    for x, y, a, b in [(0, 0, 2, 1), (3, 3, 1, 2), (0, 3, 1, 1), (3, 0, 3, 3), (1, 1, 3, 2), (2, 2, 0, 1)]
]


class Board(Environment):
    """Each episode is a walk of its own."""

    def begin(self, task: Task) -> Episode:
        """A walk from the task's start."""
        return Walk(task.info["start"], task.info["goal"])


class Walk(Episode):
    """The field where the walk is; a turn that is no move leaves it there."""

    def __init__(self, start: list[int], goal: list[int]) -> None:
        self.field = list(start)
        self.goal = list(goal)

    def reply(self, text: str) -> str | None:
        """The field after the move; None at the goal."""
        step = MOVES.get(text, (0, 0))
        self.field = [min(max(one + by, 0), SIZE - 1) for one, by in zip(self.field, step, strict=True)]
        return None if self.field == self.goal else "{}{}".format(*self.field)


def arrived(completion, start, goal):
    """1 at the goal, else less with the distance that is left. The moves, one a line, are made again."""
    walk = Walk(start, goal)
    for move in completion.split("\n"):
        walk.reply(move)
    distance = sum(abs(one - other) for one, other in zip(walk.field, goal, strict=True))
    return 1.0 if distance == 0 else 0.3 * (1 - distance / 6)


CONFIG = {
    "run": {"name": "custom_environment", "seed": 0, "steps": 60},
    "model": {
        "device": "cpu",
        "scratch": {"init_std": 0.1, "hidden_size": 64, "layers": 1, "context": 64, "alphabet": "0123>rlud"},
    },
    "rollout": {
        "plan": {"name": "turns", "environment": "docs/examples/custom_environment.py:Board", "turns": 5},
        "prompts_per_step": 6,
        "group_size": 16,
        "max_new_tokens": 8,
        "stop": list(MOVES),  # a letter is a whole move, and ends the turn
    },
    "optim": {"lr": 3e-3},
}


def main() -> None:
    """Train."""
    with GRPOTrainer(tasks=TASKS, verifier=arrived, config=CONFIG) as trainer:
        trainer.train()


if __name__ == "__main__":
    main()
