"""docs/curves: every shipped example has a curve or a reason for none, and the pictures show the numbers that are
kept."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from rlvr.config.config_loading import load_config

SHOWN = ("calculator", "code-smoke", "quickstart")


@pytest.fixture(scope="module")
def curves(script):
    """scripts/curves.py as a module."""
    return script("curves")


def test_every_example_has_a_curve_or_a_reason(root, curves):
    page = (root / "docs/curves/README.md").read_text(encoding="utf-8")
    assert page == curves.page()
    examples = {path.stem for path in (root / "configs").glob("*.yaml")}
    assert {path.stem for path in (root / "docs/curves").glob("*.svg")} == set(SHOWN)
    assert examples == {*SHOWN, *curves.LEFT_OUT} and not set(SHOWN) & set(curves.LEFT_OUT)
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == sorted(examples)


@pytest.mark.parametrize("name", SHOWN)
def test_a_curve_is_of_the_example_as_it_is(root, name):
    kept = json.loads((root / f"docs/curves/{name}.json").read_text())
    config = load_config(root / f"configs/{name}.yaml")
    assert kept["command"].endswith(f"--config configs/{name}.yaml") and kept["seed"] == config.run.seed
    sft, grpo = (stage["steps"] for stage in config.stages)
    assert kept["first_stage"] == ["sft", sft]
    assert [step for step, _ in kept["reward"]] == list(range(sft + 1, sft + grpo + 1))
    for scores in (kept["greedy"], kept["sampled"]):
        assert scores[0][0] == 0 and scores[-1][0] == sft + grpo
        assert all(0 <= score <= 1 for _, score in scores)
    after_sft = next(score for step, score in kept["sampled"] if step == sft)
    assert kept["sampled"][-1][1] > after_sft + 0.2  # what reinforcement adds


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_shows_the_numbers(root, curves, name):
    path = root / f"docs/curves/{name}.svg"
    kept = json.loads(path.with_suffix(".json").read_text())
    assert path.read_text() == curves.picture(kept) and path.stat().st_size < 60_000
    drawn = ElementTree.parse(path).getroot()
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in drawn.iter("{http://www.w3.org/2000/svg}circle")]
    steps, scores = zip(*kept["greedy"], strict=True)
    slope = (dots[-1][0] - dots[0][0]) / steps[-1]
    assert [round((x - dots[0][0]) / slope) for x, _ in dots] == list(steps)
    top, bottom = (float(text.get("y")) for text in labels(drawn, "1", "0"))
    assert [(bottom - 4 - y) / (bottom - top) for _, y in dots] == pytest.approx(scores, abs=0.006)


def labels(drawn, *wanted):
    """The texts at the left of the picture that say these numbers."""
    texts = [text for text in drawn.iter("{http://www.w3.org/2000/svg}text") if text.get("text-anchor") == "end"]
    return [next(text for text in texts if text.text == one) for one in wanted]


def test_a_run_folder_is_read(curves, tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "CURVES", tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {"step": n, "run/stage": "sft" if n < 3 else "grpo", "reward/mean": None if n < 3 else 0.5} for n in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "evaluations.jsonl").write_text('{"step": 0, "eval/greedy": 0.25, "eval/mean": 0.125}\n')
    (run / "config.yaml").write_text("run: {name: small, seed: 3}\n")
    curves.keep(run)
    kept = json.loads((tmp_path / "small.json").read_text())
    assert kept.pop("command").endswith("configs/small.yaml")
    assert kept == {
        "seed": 3,
        "first_stage": ["sft", 2],
        "reward": [[3, 0.5]],
        "greedy": [[0, 0.25]],
        "sampled": [[0, 0.125]],
    }
