"""docs/algorithms.md: its file of ideas is loaded, proved by its own test, and trained with by its YAML."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

from rlvr import GRPOTrainer
from rlvr.config.config_loading import load_config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```(?:python|yaml)\n# ([\w.]+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.gate
def test_the_ideas_of_the_page_are_proved_and_train(tmp_path, monkeypatch):
    assert set(BLOCKS) == {"ideas.py", "ideas.yaml", "test_ideas.py"}
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("test_ideas.py")["test_my_ideas"](tmp_path)
    config = {
        **yaml.safe_load(BLOCKS["ideas.yaml"]),
        "run": {"steps": 2, "dir": str(tmp_path)},
        "model": {"scratch": {"hidden_size": 32, "layers": 1, "context": 32}, "device": "cpu"},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6},
        "logging": {"console": "off"},
    }
    with GRPOTrainer(
        None, [{"prompt": "a"}, {"prompt": "b"}], lambda completion: len(set(completion)) / 6, config
    ) as trainer:
        assert len(trainer.train()) == 2
        assert len(trainer.batch) == 4  # half of each group


def test_the_examples_of_algorithms_are_configurations():
    written = re.findall(r"^```yaml\n(algorithm:.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    first, second = (load_config({**yaml.safe_load(text), "run": {"steps": 1}}).algorithm for text in written)
    assert first.loss.options["clip_high"] == 0.28 and first.advantage.options["scale"] == "none"
    assert second.kl.scale.by == "turn" and second.kl.scale.factors == {"1": 10}


def test_each_idea_is_short():
    for code in re.split(r"^(?=def |@dataclass)", BLOCKS["ideas.py"], flags=re.MULTILINE)[1:]:
        assert sum(bool(line.strip()) for line in code.splitlines()) <= 15
