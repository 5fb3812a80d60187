"""docs/extending.md: its examples are short, pass their own tests, train two steps of the real trainer each, and are
refused where a member is misspelt."""

from __future__ import annotations

import inspect
import math
import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest
import yaml

from rlvr import GRPOTrainer, Origin, Verdict, Verifier, registry
from rlvr.config.config_loading import load_config
from rlvr.core.tree import merge
from rlvr.errors import ConfigError
from rlvr.monitor.recording import read_rollouts

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|yaml)\n# ([\w.]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {(kind, name): text for kind, name, text in BLOCK.findall(PAGE)}
EXAMPLES = [name for kind, name in BLOCKS if kind == "python" and not name.startswith("test_")]
SLIP = re.compile(r"^\| `([\w.]+)` \| `(\w+)` \| `(\w+)` \| (.+) \|$", re.MULTILINE)

TINY = {
    "run": {"name": "example", "steps": 2},
    "model": {
        "scratch": {
            "alphabet": "0123456789 ,:inoplacedwhrs",
            "hidden_size": 16,
            "layers": 1,
            "intermediate_size": 32,
            "context": 96,
        },
        "device": "cpu",
    },
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
    "optim": {"lr": 1.0e-3},
    "logging": {"console": "off"},
}
LENGTHS = {"3 m": 1, "300 cm": 1, "3000 mm": 1, "0.003 km": 1, "3.0 m": 1, "3 km": 0, "4 m": 0}
# A policy whose tokens are whole answers, so that some are right before anything is learned.
OF_ONE_WORD = {"model": {"scratch": {"alphabet": "0", "words": [*LENGTHS]}}, "rollout": {"max_new_tokens": 1}}
KINDS = {
    "length.py": "verifier",
    "overlong.py": "reward",
    "quantile.py": "advantage",
    "asymmetric.py": "loss",
    "best_and_worst.py": "selector",
    "second_draft.py": "plan",
    "code_breaker.py": "environment",
}


class StartsWithDigit(Verifier):
    """Judges where the example is no verifier: about a third of what an untrained policy writes."""

    def verify(self, task, completion):
        return Verdict.from_score(completion[:1].isdigit())


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The examples and their tests, in the working directory."""
    for (kind, name), text in BLOCKS.items():
        if kind == "python":
            (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in EXAMPLES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_every_example_has_its_yaml_and_its_test():
    assert EXAMPLES == [*KINDS] == [*CHECKS]
    assert set(BLOCKS) == {
        *(("python", name) for name in EXAMPLES),
        *(("python", f"test_{name}") for name in EXAMPLES),
        *(("yaml", name) for name in EXAMPLES),
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_trains(name, files):
    code = BLOCKS["python", name]
    assert sum(bool(line.strip()) for line in code.splitlines()) < 25
    assert max(len(line) for line in code.splitlines()) <= 120
    is_verifier = name == "length.py"
    tree = merge(merge(TINY, OF_ONE_WORD) if is_verifier else TINY, yaml.safe_load(BLOCKS["yaml", name]))
    config = load_config(tree)
    if is_verifier:
        tasks = [{"prompt": "0" * length, "answer": "3 m"} for length in range(1, 11)]
    else:
        tasks = [{"prompt": digit, "answer": "12"} for digit in "0123456789"]
    with GRPOTrainer(tasks=tasks, verifier=None if is_verifier else StartsWithDigit(), config=config) as trainer:
        metrics = trainer.train()
        assert [row["step"] for row in metrics] == [1, 2]
        assert all(math.isfinite(row[key]) for row in metrics for key in ("reward/mean", "loss/policy", "grad_norm"))
        assert all(row["skipped/nonfinite"] == 0 for row in metrics)
        assert max(row["grad_norm"] for row in metrics) > 0
        files = sorted((trainer.folder.path / "rollouts").iterdir())
        CHECKS[name](trainer, [rollout for file in files for rollout in read_rollouts(file)[0]])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes_its_own_test(name, files):
    functions = runpy.run_path(f"test_{name}")
    test = functions[f"test_{name.removesuffix('.py')}"]
    test(*[files] * len(inspect.signature(test).parameters))


@pytest.mark.parametrize("row", SLIP.findall(PAGE), ids=lambda row: row[0])
def test_a_misspelt_member_is_refused_as_the_page_says(row, files):
    name, written, meant, message = row
    code = BLOCKS["python", name]
    assert f"'{written}'; is '{meant}' meant?" in message
    component = re.search(rf"{re.escape(name)}:(\w+)", BLOCKS["yaml", name])[1]
    if re.search(rf"\b{meant}\b", code):
        code = re.sub(rf"\b{meant}\b", written, code)
    elif f"class {component}" in code:
        code = code.replace("    free: float = 1.5\n", f"    free: float = 1.5\n    {written} = True\n")
    else:
        code += f"\n\n{component}.{written} = True\n"
    (files / f"misspelt_{name}").write_text(code, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)):
        registry.build(KINDS[name], f"misspelt_{name}:{component}")


def test_every_example_has_a_misspelt_member():
    assert [row[0] for row in SLIP.findall(PAGE)] == EXAMPLES


def length(trainer, rollouts):
    for rollout in rollouts:
        assert rollout.verdict.score == LENGTHS.get(rollout.text, 0)
        assert (rollout.verdict.status == "unparsable") == (rollout.text not in LENGTHS)
    assert {rollout.verdict.score for rollout in rollouts} == {0.0, 1.0}


def overlong(trainer, rollouts):
    batch = trainer.batch
    for group in batch.groups():
        right = [r.completion_length for r in group.rollouts if r.verdict.score == 1]
        for position, rollout in zip(group.index, group.rollouts, strict=True):
            share = rollout.completion_length / (1.2 * statistics.median(right)) if right else 0
            wanted = -min(max(share - 1, 0), 1)
            assert batch.column("reward/Overlong")[position] == pytest.approx(wanted)
            assert batch.column("reward")[position] == pytest.approx(rollout.verdict.score + 0.5 * wanted)


def quantile(trainer, rollouts):
    batch = trainer.batch
    for group in batch.groups():
        rewards = batch.column("reward")[group.index]
        # Of four sorted values the quantile 0.75 lies at 0.75 x 3 = 2.25, between the third and the fourth.
        third, fourth = sorted(rewards)[2:]
        assert batch.column("advantage")[group.index] == pytest.approx(rewards - (0.75 * third + 0.25 * fourth))


def asymmetric(trainer, rollouts):
    # The second of two optimizer steps is off the sampled policy by more than the narrow bound of the YAML.
    assert max(row["ratio/clipped_high"] for row in trainer.metrics) > 0
    assert trainer.metrics[0]["ratio/clipped_low"] is None  # the clip loss did not run


def best_and_worst(trainer, rollouts):
    batch = trainer.batch
    assert [len(group.index) for group in batch.groups()] == [2] * 4
    scores = {}
    for rollout in rollouts:
        scores.setdefault(rollout.group, []).append(rollout.verdict.score)
    for group in batch.groups():
        assert sorted(batch.column("reward")[group.index]) == [min(scores[group.key]), max(scores[group.key])]


def second_draft(trainer, rollouts):
    critiques = 0
    for rollout in rollouts:
        drafts = [segment for segment in rollout.segments if segment.kind == "turn"]
        replies = [segment for segment in rollout.segments if segment.kind == "tool"]
        assert len(replies) == len(drafts) - 1 <= 1
        for segment in replies:
            assert set(rollout.origin[segment.start : segment.end]) == {Origin.TOOL}
            decoded = trainer.policy.tokenizer.decode(rollout.token_ids[segment.start : segment.end])
            assert decoded.startswith("no: ")
            critiques += 1
    assert 0 < critiques < len(rollouts)


def code_breaker(trainer, rollouts):
    replied = 0
    for rollout in rollouts:
        spans = {"turn": [], "tool": []}
        for segment in rollout.segments:
            ids = rollout.token_ids[segment.start : segment.end]
            spans[segment.kind].append(trainer.policy.tokenizer.decode(ids, skip_special_tokens=True))
        assert len(spans["turn"]) <= 2
        for turn, reply in zip(spans["turn"], spans["tool"], strict=False):
            guess = turn.strip()
            placed = sum(guess[i : i + 1] == symbol for i, symbol in enumerate("12"))
            common = sum(symbol in guess for symbol in "12")
            assert reply == f"{placed} in place, {common - placed} elsewhere"
            replied += 1
    assert replied


CHECKS = {
    "length.py": length,
    "overlong.py": overlong,
    "quantile.py": quantile,
    "asymmetric.py": asymmetric,
    "best_and_worst.py": best_and_worst,
    "second_draft.py": second_draft,
    "code_breaker.py": code_breaker,
}
