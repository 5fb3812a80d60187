"""The package's types reach a user's script: mypy knows the keywords of GRPOTrainer, its results and its callbacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
from rlvr import Callback, Config, GRPOTrainer, MathVerifier, RunView
from rlvr.config import OptimConfig

def correct(completion: str, answer: str) -> float:
    return float(answer in completion)

class Stops(Callback):
    def on_step(self, run: RunView, metrics) -> bool | None:
        return run.step + 1 > 3

config = Config(optim=OptimConfig(lr=1e-6))
trainer = GRPOTrainer("m", [{"prompt": "x"}], [correct, (MathVerifier(), 0.2)], config, learning_rate=1e-6)
GRPOTrainer("m", train_dataset=[{"prompt": "x"}], reward_funcs=correct, args={"run": {"steps": 1}}, callbacks=[Stops()])
step: int = trainer.step
rows: list[dict[str, object]] = trainer.train()
trainer.step.nothing  # wrong
GRPOTrainer("m", learning_rate="fast")  # wrong
GRPOTrainer("m", learning_rat=1e-6)  # wrong
GRPOTrainer("m", verifier=[(correct, "0.2")])  # wrong
OptimConfig(lr=1e-6, schedule="cosines")  # wrong
"""


@pytest.mark.slow
def test_mypy_knows_the_types_of_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # What the package itself imports is checked by its own run.
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=1200
    )
    wrong = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")]
    reported = [int(number) for number in re.findall(r"^.*train\.py:(\d+): error", done.stdout, re.MULTILINE)]
    assert reported == wrong, done.stdout
