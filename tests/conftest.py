"""Fixtures that all tests share: tiny policies built from scratch, and rollouts sampled or made up for them."""

from __future__ import annotations

import copy
import gc
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

from pathlib import Path

import pytest
import torch

from small_run import TREE, overlaid, task_rows

pytest_plugins = ["batch_fixtures", "frozen_folders", "learner_steps", "trainer_fixtures"]

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Data beside the checkout, which a user's clone does not have."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that want the machine to themselves take long too: they belong to the gate."""
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker("gate")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A failure is told without a collection in the middle: Python 3.11.7 breaks off `ast.parse` with a SystemError
    when a finalizer that runs meanwhile parses too, as it does to print a traceback, and the failure is lost with the
    session."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if collects:
            gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests of tiny models are faster on one thread, and rounding does not depend on the machine's cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory) -> None:
    """What the library keeps between runs is kept between tests, and not in the cache of whoever runs them. The
    processes of scripts/test.sh share one."""
    os.environ["RLVR_CACHE"] = os.environ.get("RLVR_TEST_CACHE") or str(tmp_path_factory.mktemp("rlvr-cache"))


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The folder with the real GSM8K files; skips where it is not given."""
    folder = SHARED / "data" / "gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip("the GSM8K files (shared/data/gsm8k beside the checkout) are not here")
    return folder


@pytest.fixture(scope="session")
def make_policy():
    """A function that builds a tiny policy: `make_policy(seed=0, adapter=None, **scratch options)`."""
    from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
    from rlvr.policy import load_policy

    def make(seed: int = 0, adapter: dict | None = None, **options):
        scratch = {"hidden_size": 32, "layers": 2, "intermediate_size": 64, "context": 96, "init_std": 0.2, **options}
        lora = None if adapter is None else LoraConfig(**adapter)
        return load_policy(ModelConfig(scratch=ScratchConfig(**scratch), device="cpu", adapter=lora), seed)

    return make


@pytest.fixture
def policy(make_policy):
    """A tiny policy with random weights."""
    return make_policy()


@pytest.fixture
def forwards(monkeypatch):
    """(rollouts, whether with gradient) of every forward pass of the learner, in order."""
    import rlvr.learner.learner

    counted = []
    plain = rlvr.learner.learner.forward

    def forward(policy, rows, needs):
        counted.append((len(rows.index), torch.is_grad_enabled()))
        return plain(policy, rows, needs)

    monkeypatch.setattr(rlvr.learner.learner, "forward", forward)
    return counted


@pytest.fixture
def make_tree(tmp_path, pieces):
    """`make_tree({section: {...}}, name="run")`: the tree of a small run with these values laid over it. The verifier
    is `Evens` of the file that the fixture `pieces` gives, which needs no processes of its own."""

    def make(over=None, name="run"):
        data = tmp_path / "tasks.jsonl"
        if not data.exists():
            data.write_text("".join(json.dumps(row) + "\n" for row in task_rows()))
        base = copy.deepcopy(TREE)
        base["run"] |= {"dir": str(tmp_path / "runs"), "name": name}
        base["data"] = {"train": str(data)}
        base["verifier"] = f"{pieces}:Evens"
        return overlaid(base, over or {})

    return make
