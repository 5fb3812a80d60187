"""Small runs and what they measure, to the last bit: `python tests/regression/small_runs.py` records them in
small_runs.json.

A change that only moves or renames code leaves the file as it is. One that changes what is computed records it anew,
and its commit message says why the numbers changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from rlvr import train

RECORDED = Path(__file__).with_suffix(".json")

PIECES = '''
import itertools, pathlib, time

VERDICTS = pathlib.Path(__file__).with_name("verdicts")
step = itertools.count(1)

def digits(completion):
    """The share of even digits: it varies before anything is learned."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def rarely(completion):
    """Pays few completions, so that groups without a signal are sampled anew."""
    return float(completion[:1] in tuple("02"))

def counted(completion):
    with VERDICTS.open("ab") as file:
        file.write(b"x")
    return digits(completion)

def after_all_are_sampled(batch):
    """Keep all, when the 16 completions of the next step are sampled too: with those weights that this step updates."""
    wanted = 16 * min(next(step) + 1, 5)
    deadline = time.monotonic() + 60
    while VERDICTS.stat().st_size < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return [True] * len(batch)

def seven(text, task):
    """A tool: 7 to any text."""
    return "7=?"
'''

SCRATCH = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate_size": 64,
    "context": 64,
    "alphabet": "0123456789+-*/=?,# ",
    "init_std": 0.2,
}

BASE: dict[str, Any] = {
    "run": {"seed": 0, "name": "run", "steps": 5},
    "model": {"device": "cpu", "scratch": SCRATCH, "gradient_checkpointing": False},
    "data": {"train": {"name": "arithmetic", "count": 64, "digits": [2]}},
    "verifier": "{folder}/pieces.py:digits",
    "rollout": {"engine": "hf", "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
    "optim": {"lr": 3.0e-3, "micro_batch_size": 8},
    "logging": {"console": "off"},
}

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"preset": "grpo", "kl": {"coef": 0.05}}},
    "dapo": {
        "verifier": "{folder}/pieces.py:rarely",
        "algorithm": {"preset": "dapo"},
        "rollout": {"dynamic_sampling": {}},
    },
    "dapo ahead": {
        "verifier": "{folder}/pieces.py:counted",
        "algorithm": {"preset": "dapo", "select": ["{folder}/pieces.py:after_all_are_sampled"]},
        "rollout": {"staleness": 1},
    },
    "gspo": {"algorithm": {"preset": "gspo"}, "optim": {"updates_per_batch": 4, "micro_batch_size": 4}},
    "sft then grpo": {
        "run": {"steps": None},
        "data": {
            "train": {"name": "products", "count": 64, "demonstrate": ["answer"], "digits": None},
            "eval": {"name": "products", "count": 8, "split": "eval"},
        },
        "model": {"scratch": {"alphabet": "0123456789+-*/=?,#()[]:.'abcdefghijklmnopqrstuvwxyz "}},
        "evaluation": {"every": 3, "samples": 2},
        "stages": [{"kind": "sft", "steps": 3}, {"kind": "grpo", "steps": 3}],
    },
    "turns with a tool": {
        "rollout": {
            "plan": {"name": "turns", "environment": "{folder}/pieces.py:seven", "turns": 3},
            "stop": ["4"],
            "max_new_tokens": 16,
        },
    },
    "two ranks": {"optim": {"updates_per_batch": 2}, "algorithm": {"kl": {"coef": 0.05}}},
}


BATCHED_BY_TIME = {"dapo", "dapo ahead"}
"""Which completions are decoded in one batch depends on when others end, and the last bits of log-probs on the
batch."""


def over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, mappings key by key; None removes a key."""
    result = {**base}
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            value = over(base[key], value)
        result[key] = value
    return {key: value for key, value in result.items() if value is not None}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train the run in `folder`; its metrics, rollouts and last weights."""
    (folder / "pieces.py").write_text(PIECES)
    tree = over(BASE, RUNS[name])
    tree["run"] |= {"dir": str(folder)}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(tree).replace("{folder}", str(folder)))
    if name == "two ranks":
        train_on_two_ranks(config)
    else:
        torch.set_num_threads(1)
        assert train.main(["--config", str(config)]) == 0, name
    return results(folder / "run")


def train_on_two_ranks(config: Path) -> None:
    """Start a process for each rank, with the environment variables that a launcher sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "rlvr.train", "--config", str(config)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed


def results(run: Path) -> dict[str, Any]:
    """What a finished run left, without what the clock and the machine's memory say."""
    return {
        "metrics": [untimed(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "evaluations": [untimed(json.loads(line)) for line in lines(run / "evaluations.jsonl")],
        "rollouts": digest(sampled(run)),
        **weights(run),
    }


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


TIMED = ("time/", "memory/", "gpu/", "mfu/", "publish/", "rollout/ready")
"""What begins so depends on the machine's speed or memory."""


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """The metrics that do not depend on the machine's speed."""
    return {key: value for key, value in row.items() if not key.startswith(TIMED)}


def sampled(run: Path) -> list[Any]:
    """The tokens of every recorded rollout, in order."""
    rows = (json.loads(line) for path in sorted((run / "rollouts").iterdir()) for line in lines(path))
    return [(row["id"], row["token_ids"], row["columns"].get("reward")) for row in rows]


def weights(run: Path) -> dict[str, Any]:
    """A hash of the last checkpoint's trained weights, and the norm of each in float64."""
    last = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    tensors = dict(sorted(load_file(last / "model" / "model.safetensors").items()))
    whole = hashlib.sha256()
    for name, tensor in tensors.items():
        whole.update(name.encode())
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    norms = {name: float(tensor.double().norm()) for name, tensor in tensors.items()}
    return {"weights": whole.hexdigest(), "norms": norms}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def machine() -> dict[str, str]:
    """What rounding depends on: the processor's model and torch."""
    model = platform.processor()
    for line in lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"processor": f"{model}, {torch.backends.cpu.get_cpu_capability()}", "torch": torch.__version__}


def main() -> None:
    recorded: dict[str, Any] = {"machine": machine(), "runs": {}}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            recorded["runs"][name] = measure(name, Path(folder))
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
