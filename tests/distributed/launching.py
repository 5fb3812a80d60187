"""Starting a run on several ranks, as a launcher would: one process for each, told by environment variables."""

import json
import os
import socket
from pathlib import Path

import yaml

from warm_process import WarmProcess

DEADLINE = 240
"""Seconds for a whole run, on a busy machine."""

CONFIG = {
    "run": {"name": "run", "steps": 3},
    "model": {
        "scratch": {"hidden_size": 32, "layers": 2, "context": 64, "alphabet": "0123456789+=,? ", "words": ["#### "]},
        "device": "cpu",
    },
    "data": {
        "train": {"name": "arithmetic", "count": 64, "digits": [2]},
        "eval": {"name": "arithmetic", "count": 8, "split": "eval", "digits": [2]},
    },
    "rollout": {"prompts_per_step": 5, "group_size": 3, "max_new_tokens": 12},
    "optim": {"lr": 1.0e-3, "updates_per_batch": 2, "micro_batch_size": 4},
    "algorithm": {"kl": {"coef": 0.05}},
    "evaluation": {"samples": 2},
    "logging": {"console": "plain"},
}
"""A run of seconds. Its verifier, `digits` of the file below, pays untrained answers too."""

VERIFIER = '''
def digits(completion):
    """The share of digits: a reward that varies before anything is learned."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
'''


def configured(folder: Path, **sections) -> Path:
    """A YAML file in `folder` with the settings above; `sections` go over them, key by key."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits.py").write_text(VERIFIER)
    tree = {**CONFIG, "verifier": f"{folder / 'digits.py'}:digits"}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    tree["run"] = {**tree["run"], "dir": str(folder)}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(ranks: int, *arguments: str) -> list[WarmProcess]:
    """`python *arguments` on so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(WarmProcess(arguments, environment))
    return processes


def ended(processes: list[WarmProcess], deadline: float = DEADLINE) -> list[tuple[int, str]]:
    """(exit status, what it printed) of each; however it ends, none is left."""
    try:
        output = [process.communicate(timeout=deadline)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, output, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def trained(ranks: int, config: Path, *more: str) -> list[tuple[int, str]]:
    """Run the training command on so many ranks."""
    return ended(start(ranks, "-m", "rlvr.train", "--config", str(config), *more))


def rows(folder: Path) -> list[dict]:
    """The metrics of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def sampled(folder: Path) -> list:
    """The rollouts of a run, step by step: who, and which tokens."""
    result = []
    for path in sorted((folder / "rollouts").glob("step-*.jsonl")):
        of_step = [json.loads(line) for line in path.read_text().splitlines()]
        result.append([(r["group"], r["member"], r["token_ids"]) for r in of_step])
    return result
