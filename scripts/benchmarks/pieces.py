"""Measure what each component of an algorithm adds to a step of W1, beyond the forward passes that it needs itself.

    python scripts/benchmarks/pieces.py [--rounds 8] [--only loss,modifier] [--out pieces.json]

One process, one thread, on the CPU. The base is GRPO on W1 (speed_workloads.py). The same recorded rollouts are scored
and learned from (one optimizer step, learning rate 1e-12) by the base and by a run that differs in one component, in
turns. The result is the median over the rounds of the difference in CPU time, minus the component's passes without
gradient. It is a share of a whole step of the base, sampling and verification included.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from result_file import result_file
from speed_workloads import WORKLOADS, Workload, prompts, score, write_model

from rlvr import GRPOTrainer, registry
from rlvr.core.tree import merge
from rlvr.learner import Learner
from rlvr.stages.grpo import reference_penalty, scoring

ASKED: dict[str, dict[str, Any]] = {"blend": {"of": "verdict"}, "last_token": {"token": "-"}}
"""Options without which a component does nothing here."""
KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "loss": lambda piece: {"algorithm": {"loss": piece}},
    "advantage": lambda piece: {"algorithm": {"advantage": piece}},
    "modifier": lambda piece: {"algorithm": {"modifiers": [piece]}},
    "selector": lambda piece: {"algorithm": {"select": [piece]}},
    "token_selector": lambda piece: {"algorithm": {"token_select": [piece]}},
    "reward": lambda piece: {"rewards": ["verdict", {"weight": 0.1, **piece}]},
    "kl": lambda piece: {"algorithm": {"kl": {"estimator": piece, "coef": 0.01}}},
    "correction": lambda piece: {"algorithm": {"correction": piece}},
    "auxiliary": lambda piece: {"algorithm": {"auxiliary": [{"coef": 0.1, **piece}]}},
}
passes = 0.0
"""CPU seconds in passes without gradient so far."""


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose time counts as passes."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        global passes
        start = time.process_time()
        try:
            return function(*arguments, **options)
        finally:
            passes += time.process_time() - start

    return call


def even(prompt: str, completion: str, token_ids: list[int]) -> float:
    """The reward of W1."""
    return score(WORKLOADS["W1"], prompt, completion, token_ids)


class Side:
    """One configuration of W1, ready to learn from recorded rollouts."""

    def __init__(self, model: str, folder: str, name: str, over: dict[str, Any], workload: Workload) -> None:
        tree = {
            "run": {"dir": folder, "name": name, "steps": workload.steps},
            "model": {"device": "cpu"},
            "rollout": {
                "prompts_per_step": workload.prompts,
                "group_size": workload.group,
                "max_new_tokens": workload.new_tokens,
            },
            "algorithm": {"loss": {"name": "clip", "average": "tokens"}},
            "optim": {"lr": workload.learning_rate},
            "logging": {"console": "off", "rollouts": 0},
        }
        tasks = [{"prompt": text, "answer": "0", "demonstration": "02468"} for text in prompts(workload)]
        self.trainer = GRPOTrainer(model, tasks, even, merge(tree, over))

    def step(self, collected: Any) -> tuple[float, float]:
        """(CPU seconds to score and learn, those of them in passes without gradient)."""
        stage, given = self.trainer.stages[0], copy.deepcopy(collected)
        before, start = passes, time.process_time()
        batch, _ = stage.score(given)
        self.trainer.training.learner.update(batch, stage.objective().at(0, stage.steps), stage.config.optim, 1e-12)
        return time.process_time() - start, passes - before


def pieces(kinds: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(kind, name, what it lays over the base)."""
    for kind in kinds:
        for name in registry.names(kind):
            plain = kind == "kl" or (kind in ("loss",) and name == "clip")
            piece = name if plain else {"name": name, **ASKED.get(name, {})}
            if not (
                kind == "reward" and name in ("verdict", "majority_vote")
            ):  # the base has the one; W1 has no answers
                yield kind, name, KEYS[kind](piece)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default=",".join(KEYS), help="kinds of component")
    parser.add_argument(
        "--out", type=result_file("step_seconds", "rounds", "pieces"), default=str(Path(__file__).with_suffix(".json"))
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module, name in (
        (scoring, "add_statistics"),
        (scoring, "continuation_logprobs"),
        (reference_penalty, "add_statistics"),
        (Learner, "_statistics"),
    ):
        setattr(module, name, timed(getattr(module, name)))
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        workload = WORKLOADS["W1"]
        write_model(workload, Path(folder) / "model")
        model = str(Path(folder) / "model")
        base = Side(model, folder, "base", {}, workload)
        base.trainer.train(3)
        start = time.process_time()
        base.trainer.train(8)
        whole = (time.process_time() - start) / 8
        collected = base.trainer.stages[0].collect(11)
        for number, (kind, name, over) in enumerate(pieces(options.only.split(","))):
            found.setdefault(kind, {})[name] = compare(
                base, collected, model, folder, f"{number}", over, whole, options.rounds
            )
            share, own = found[kind][name]["share"], found[kind][name]["passes"]
            print(f"{kind:14} {name:24} {100 * share:+6.1f} %   passes {100 * own:5.1f} %", flush=True)
        base.trainer.close()
    result = {
        "step_seconds": round(whole, 4),
        "rounds": options.rounds,
        "processor": platform.machine(),
        "pieces": found,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(found))


def table(found: dict[str, dict[str, Any]]) -> str:
    """A Markdown table: for each kind its components over 3 %, and the median of all."""
    lines = ["| kind | components | median | over 3 % of a step |", "|---|---|---|---|"]
    for kind, by_name in found.items():
        shares = {name: 100 * values["share"] for name, values in by_name.items()}
        over = ", ".join(f"`{name}` {share:.1f} %" for name, share in shares.items() if share > 3) or "none"
        lines.append(f"| {kind} | {len(shares)} | {statistics.median(shares.values()):.1f} % | {over} |")
    return "\n".join(lines)


def compare(
    base: Side, collected: Any, model: str, folder: str, name: str, over: dict[str, Any], whole: float, rounds: int
) -> dict[str, float]:
    """What the component adds, and what its passes take, as shares of a whole step of the base."""
    side, differences, own = Side(model, folder, name, over, WORKLOADS["W1"]), [], []
    try:
        side.trainer.policy.model.load_state_dict(base.trainer.policy.model.state_dict())
        side.trainer.enter(0)
        for round_number in range(rounds + 1):
            plain, _ = base.step(collected)
            taken, in_passes = side.step(collected)
            if round_number:  # the first does not count
                differences.append(taken - in_passes - plain)
                own.append(in_passes)
    finally:
        side.trainer.close()
    return {
        "share": round(statistics.median(differences) / whole, 4),
        "passes": round(statistics.median(own) / whole, 4),
    }


if __name__ == "__main__":
    main()
