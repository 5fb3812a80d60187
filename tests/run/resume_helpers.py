"""Runs in processes of their own that can be killed, and comparisons of what two runs left.

Processes are forked from a server that has imported everything once, so that one costs a fraction of a second. What a
process is at is seen from outside: the user's verifier and loss of the test leave marks, and the run its own files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

PIECES = '''
import os, time
from dataclasses import dataclass
from rlvr.losses import LossTerm
from rlvr.core.needs import Need

MARKS = {marks!r}

def mark(name):
    with open(os.path.join(MARKS, name), "ab") as file:
        file.write(b"x")

def evens(completion, task):
    """The share of even digits; takes a while."""
    mark("evaluating" if task.id.startswith("e") else "verifying")
    time.sleep({pause})
    return sum(c in "02468" for c in completion) / max(1, len(completion))

@dataclass(frozen=True)
class Reinforce:
    average = "tokens"
    needs = frozenset({{Need("logprobs", grad=True)}})

    def __call__(self, tokens, over):
        mark("updating")
        time.sleep(min({pause}, 0.02) / 4)
        return LossTerm(-tokens.average(tokens.advantage * tokens.logprobs, self.average, over))
'''


def rows(prefix: str, count: int) -> str:
    lines = [
        {"id": f"{prefix}{n}", "prompt": f"{n}=?", "answer": str(n), "demonstration": f"{n}{n}"} for n in range(count)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def make_tree(folder: Path, name: str, pause: float = 0.02, **over) -> dict:
    """The configuration of a small run with two stages, a driven penalty, evaluations and checkpoints."""
    marks = folder / "marks" / name
    marks.mkdir(parents=True, exist_ok=True)
    pieces = folder / f"{name}_pieces.py"
    if not pieces.exists():
        pieces.write_text(PIECES.format(marks=str(marks), pause=pause))
    for kind, prefix, count in (("train", "t", 6), ("eval", "e", 2)):
        file = folder / "data" / f"{kind}.jsonl"  # the folder's name is the source of the tasks
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(rows(prefix, count))
    scratch = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 64, "context": 64}
    tree = {
        "run": {"seed": 0, "dir": str(folder / "runs"), "name": name},
        "model": {"device": "cpu", "scratch": {**scratch, "alphabet": "0123456789=? ", "init_std": 0.2}},
        "data": {"train": str(folder / "data" / "train.jsonl"), "eval": str(folder / "data" / "eval.jsonl")},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6},
        "verifier": f"{pieces}:evens",
        "verification": {"workers": 4},
        "algorithm": {
            "loss": f"{pieces}:Reinforce",
            "kl": {"coef": {"metric": "kl/ref", "target": 0.01, "initial": 0.2}},
        },
        "optim": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "updates_per_batch": 2},
        "evaluation": {"every": 3, "samples": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "logging": {"console": "plain"},
        "stages": [{"kind": "sft", "steps": 2}, {"kind": "grpo", "steps": 18}],
    }
    return merged(tree, over)


def merged(tree: dict, over: dict) -> dict:
    both = {key: merged(tree[key], value) for key, value in over.items() if isinstance(tree.get(key), dict) and value}
    return {**tree, **over, **both}


def train_here(tree: dict, resume: str | None, output: str, limit: int | None) -> None:
    """What a started process does: train, print to `output`, exit as the command does. `limit`: bytes that a file may
    have."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    import torch
    import yaml

    from rlvr import train

    torch.set_num_threads(1)
    # As in a terminal: the server of processes may have been started under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    path = Path(output).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree))
    code = train.main(["--config", str(path), *(["--resume", resume] if resume else [])])
    sys.stdout.flush()
    os._exit(code)


def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["resume_helpers", "rlvr.trainer", "rlvr.train", "rlvr.distributed.deepspeed"])
    return context


class Run:
    """A run in a process of its own. Ends with the block."""

    def __init__(self, tree: dict, resume: str | None = "auto", limit: int | None = None) -> None:
        self.folder = Path(tree["run"]["dir"]) / tree["run"]["name"]
        self.marks = self.folder.parents[1] / "marks" / tree["run"]["name"]
        self.output = self.folder.parents[1] / f"{tree['run']['name']}.out"
        self._before = {path.name: path.stat().st_size for path in self.marks.iterdir()}
        self._lines = self.lines()
        self.process = server().Process(target=train_here, args=(tree, resume, str(self.output), limit))
        self.process.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> int | None:
        self.process.kill()
        self.process.join(30)
        return self.process.exitcode

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 60) -> int | None:
        """Wait for the end; the exit code. None when it did not come."""
        self.process.join(seconds)
        return self.process.exitcode

    def marked(self, name: str) -> int:
        """How often the process has left a mark since it was started."""
        path = self.marks / name
        return (path.stat().st_size if path.exists() else 0) - self._before.get(name, 0)

    def lines(self) -> int:
        """Steps in metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saving(self) -> bool:
        return any((self.folder / "checkpoints").glob(".step-*.partial"))

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, condition, seconds: float = 60) -> bool:
        """Whether the condition came to hold while the process ran."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if not self.process.is_alive():
                return False
            time.sleep(0.0005)
        raise AssertionError(f"nothing happened in {seconds} s:\n{self.said()}")


def is_at(run: Run, phase: str, count: int):
    """A condition: the run is in this phase for the `count`-th time since it was started."""
    if phase == "saving":
        return run.saving
    if phase == "sampling":  # right after the lines of some steps
        first = run.lines()
        return lambda: run.lines() >= min(first, run._lines) + count and run.lines() != first
    if phase == "publishing":  # right after an update
        return lambda: run.marked("updating") >= count
    return lambda: run.marked(phase) >= count


def kill_at(run: Run, phase: str, count: int, delay: float) -> None:
    """Kill the run `delay` seconds after it came to a phase."""
    came = run.wait(is_at(run, phase, count))
    time.sleep(delay)
    assert run.process.is_alive(), f"the run ended before it could be killed while {phase}:\n{run.said()}"
    assert came
    assert run.kill() == -signal.SIGKILL


def timeless(path: Path) -> list[dict]:
    """The records of a file, if there is one, without what the clock says."""
    return (
        []
        if not path.exists()
        else [
            {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
            for line in path.read_text().splitlines()
        ]
    )


def sampled(folder: Path) -> dict[str, list]:
    """What was sampled and scored at each step."""
    return {
        path.name: [
            (row["id"], row["token_ids"], row.get("policy_version"), row["columns"])
            for row in map(json.loads, path.read_text().splitlines())
        ]
        for path in sorted((folder / "rollouts").iterdir())
    }


def assert_same(first: Path, second: Path, by_clock: bool = False) -> None:
    """Two run folders hold the same run: metrics, evaluations, rollouts, and everything in their last checkpoints.

    `by_clock`: the clock decided when checkpoints were saved, and so if the last one is from before the evaluation or
    after it.
    """
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert timeless(first / name) == timeless(second / name)
    assert sampled(first) == sampled(second)
    ends = [max((f / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:])) for f in (first, second)]
    assert ends[0].name == ends[1].name
    tensors = [load_file(end / "tensors-0.safetensors") for end in ends]
    assert tensors[0].keys() == tensors[1].keys()
    assert {name for name, tensor in tensors[0].items() if not tensor.equal(tensors[1][name])} == set()
    states = [json.loads((end / "state.json").read_text()) for end in ends]
    for state in states:
        del state["config"], state["recorded"]  # they have the run's name and folder
        if by_clock:
            del state["owes_evaluation"]
    assert {name for name in states[0] | states[1] if states[0].get(name) != states[1].get(name)} == set()


SHORT = {
    "stages": [],
    "run": {"steps": 4},
    "evaluation": {"at_start": False, "at_end": False, "every": 0},
    "verification": {"workers": 1},
}
"""A run of four steps that is not evaluated."""


def short_tree(folder: Path, pause: float = 0.0, **over) -> dict:
    """The configuration of such a run, called `run`, with `over` put over it."""
    return merged(make_tree(folder, "run", pause, **SHORT), over)
