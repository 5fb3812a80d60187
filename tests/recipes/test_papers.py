"""Every published recipe: its file is whole, dry-runs, and trains at toy size; the command that lists and compares
them."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlvr import registry
from rlvr.config.config_loading import RECIPES, load_config, recipe_files
from rlvr.config.stage_plan import stage_plans
from rlvr.errors import ConfigError, TrainingError
from rlvr.recipes.__main__ import main
from rlvr.recipes.papers import find_paper, read_paper, read_papers, without_file
from rlvr.recipes.recipes_page import papers_page
from rlvr.recipes.smoke import against_grpo, smoke
from rlvr.run.dry_run import plan_lines
from rlvr.train import main as train
from rlvr.trainer import GRPOTrainer

ROOT = Path(__file__).resolve().parents[2]
SLUGS = sorted(recipe_files())
SAMPLE = ("chord", "co-reward", "pacs", "reasonrank", "toolrl")
"""Run in the default set: one of each kind of task, loss, reward, stages."""
NO_POLICY_STAGE = ("a-lol", "openchat", "one-shot-cft", "scalable-irl", "implicit-prm")
"""Recipes of supervised learning alone."""


@pytest.mark.parametrize("slug", SLUGS)
def test_a_recipe_is_whole_and_says_what_it_is(slug):
    paper = find_paper(slug)
    plans = stage_plans(paper.config)
    assert plan_lines(paper.config, plans, paper.config.folder)
    assert paper.config.run.name == slug
    assert paper.recipe.tests
    for test in paper.recipe.tests:
        assert (ROOT / test).is_file(), test
    first, second = recipe_files()[slug].read_text().splitlines()[:2]
    assert paper.recipe.title in first
    assert second == f"#   python -m rlvr.train --config {slug}"
    assert paper.config.rollout.engine.name == "vllm"
    assert paper.config.distributed.backend.name == "deepspeed"
    if slug not in NO_POLICY_STAGE:
        assert paper.pieces()
        assert any(plan.kind == "grpo" for plan in plans)


@pytest.mark.slow
def test_a_recipe_is_a_config_for_the_train_command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert train(["--config", "psr", "--dry-run", "run.steps=2"]) == 0
    output = capsys.readouterr().out
    assert "baseline: 0.5" in output and "2 steps, each of 1024 prompts x 8" in output
    assert "smoke" not in output


def test_a_file_goes_before_a_recipe_of_the_same_name_and_a_folder_does_not(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = load_config("psr")
    (tmp_path / "psr").mkdir()
    assert load_config("psr") == recipe
    (tmp_path / "psr").rmdir()
    (tmp_path / "psr").write_text("run: {name: mine}")
    assert load_config("psr").run.name == "mine"
    with pytest.raises(ConfigError, match=r"no config file prs .*; did you mean 'psr'"):
        load_config("prs")


def test_recipes_are_in_the_wheel():
    """Everything in the package that git does not ignore is in the wheel."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = build.pop("targets").pop("wheel")
    assert not build and wheel.keys() == {"packages", "shared-data"} and wheel["packages"] == ["src/rlvr"]
    assert len(SLUGS) == 83
    assert ROOT / "src/rlvr/recipes" == RECIPES
    files = [
        str(path) for path in [*recipe_files().values(), RECIPES / "out-of-scope.json", RECIPES / "hub_schemas.json"]
    ]
    assert subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize(
    "slug", [pytest.param(slug, marks=[] if slug in SAMPLE else [pytest.mark.slow]) for slug in SLUGS]
)
def test_a_recipe_trains_at_toy_size(slug):
    paper = find_paper(slug)
    rows = smoke(paper)
    assert len(rows) == 2 * len(stage_plans(paper.config))
    for row in rows:
        assert row["skipped/nonfinite"] in (0.0, None)
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["verdict/error"] in (None, 0.0)


@pytest.mark.parametrize(
    "slug",
    [pytest.param(slug, marks=[] if slug in SAMPLE[1:3] else [pytest.mark.slow]) for slug in SLUGS],
)
def test_a_recipe_is_not_plain_grpo(slug):
    """Its gradient differs on the same rollouts, unless what it changes is data, stages or sizes. Of one without
    reinforcement: from the plain likelihood's."""
    apart = against_grpo(find_paper(slug))
    changed = max(one.relative for one in apart.values())
    if slug in PLAIN:
        assert changed < 0.05
    else:
        assert changed > 1e-5  # rounding is below 1e-6; pear's bonus is small at this size


PLAIN = (
    "vmr",
    "j1-7b",
    "one-shot-cft",
    "vb-vs-vf",
    "sasr",
    "rlbff",
    "rubicon",
    "libra",
    "spark",
    "pairwise-rl",
    "ssr-zero",
)
"""GRPO's own loss, reward up to a scale, and advantage (or the plain likelihood): the paper is about data, stages,
judges or, as sasr, about which steps are of imitation: those of reinforcement are GRPO's."""


def test_the_list_the_search_and_the_difference(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def said(*arguments):
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    assert len(said().splitlines()) == len(SLUGS)
    assert said("list") == said()
    result = said("search", "Length", "PENALTY")
    assert "grpo-lambda" in result and "pacs " not in result
    shown = said("show", "psr")
    assert shown.startswith("The Surprising Effectiveness") and "status: faithful" in shown and "positive: 0.1" in shown
    shutil.copy(said("path", "psr").strip(), "mine.yaml")
    assert said("show", "mine.yaml") == shown
    diff = said("show", "psr", "--diff", "grpo")
    assert "+    positive: 0.1" in diff and "-    baseline: mean" in diff and "Qwen" not in diff


def test_show_says_which_correction_the_engine_switches_on(capsys, monkeypatch, tmp_path):
    """`auto` weighs tokens where the engine has weights of its own; not with those of the trainer, and not beside a
    loss that weighs by the behaviour policy itself."""
    monkeypatch.chdir(tmp_path)

    def told(slug):
        assert main(["show", slug]) == 0
        return [
            " ".join(line.split()) for line in re.findall(r"^correction:.*(?:\n  .*)*", capsys.readouterr().out, re.M)
        ]

    (line,) = told("libra")
    # Of two stages the second is reinforcement.
    assert "the engine vllm," in line and "(grpo: Truncate(cap=2.0, level='token'))" in line
    assert not told("prof") and not told("topr") and not told("openchat")
    text = recipe_files()["capo"].read_text()
    Path("own.yaml").write_text(text.replace("engine: vllm", "engine: hf"))
    assert not told("own.yaml")
    Path("stale.yaml").write_text(text.replace("engine: vllm", "engine: hf, staleness: 1"))
    assert len(told("stale.yaml")) == 1


@pytest.mark.gate
def test_a_smoke_run_by_the_command(capsys):
    assert main(["smoke", "copg", "--against", "grpo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "copg",
        "copg",
        "copg against grpo, on-policy",
        "copg against grpo, moved",
    ]
    assert "grad_norm" in lines[0] and "cosine" in lines[2]


def test_what_is_wrong_is_named(tmp_path, capsys):
    assert main(["show", "grpo-lamda"]) == 2
    assert "did you mean 'grpo-lambda'" in capsys.readouterr().err
    text = recipe_files()["psr"].read_text()
    for change, message in (
        (("status: faithful", "status: part"), "says what is `missing`"),
        (("  effect:", "  efect:"), "psr.yaml is no recipe"),
        (("recipe:", "recipes:"), "psr.yaml is no recipe"),
    ):
        (tmp_path / "psr.yaml").write_text(text.replace(*change, 1))
        with pytest.raises(ConfigError, match=message):
            read_paper(tmp_path / "psr.yaml")
    (tmp_path / "psr.yaml").write_text(text.replace("positive: 0.1", "positive: -1"))
    with pytest.raises(ConfigError, match="the weights must be at least 0"):
        smoke(read_paper(tmp_path / "psr.yaml"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"run: {name: mine}\n", "has no section `recipe` (rlvr.train takes a plain configuration)"),
        (b"", "is empty"),
        (b"- a\n", "not list"),
        (b"run: {name: mine\n", "it is not YAML"),
        (b"run: {name: \xff\xfe}\n", "no UTF-8 text"),
        (b"recipe: {title: a}\n", "recipe.status: a value is needed; recipe.taken: a value is needed"),
        (b"recipe: 3\n", "is no recipe: recipe: a mapping of keys to values is needed"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(capsys, tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert main(["show", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and message in said and "mine.yaml" in said


def test_a_search_without_a_hit_says_so_in_one_line(capsys):
    assert main(["search", "quantum", "chromodynamics"]) == 0
    assert capsys.readouterr().out == "no recipe has all of these words: quantum chromodynamics\n"


def test_the_columns_of_the_list_are_aligned(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = {line.index(find_paper(line.split()[0]).recipe.title) for line in lines}
    assert len(starts) == 1
    assert {line[: min(starts)].split()[1] for line in lines} == {"faithful", "part"}


@pytest.mark.parametrize("limit", ["x", "0", "-1", "1.5"])
def test_a_limit_that_is_no_number_of_rows_is_refused(capsys, limit):
    with pytest.raises(SystemExit) as ended:
        main(["prepare", "reasonrank", f"--limit={limit}"])
    assert ended.value.code == 2
    assert f"a whole number of 1 or more, not '{limit}'" in capsys.readouterr().err


def test_a_run_without_a_gradient_fails(tmp_path):
    text = recipe_files()["psr"].read_text().replace("signs, positive: 0.1", "signs, positive: 0, negative: 0")
    text = text.replace("entropy: 1.0e-3", "entropy: 0")
    (tmp_path / "psr.yaml").write_text(text)
    with pytest.raises(TrainingError, match="no step had a gradient"):
        smoke(read_paper(tmp_path / "psr.yaml"))


def test_a_run_that_a_signal_stops_says_so(monkeypatch):
    """The trainer ends well at a signal, with the steps before it: here with one of the priming, without a gradient of
    the recipe. A process whose time is over gets one."""
    record = GRPOTrainer._record

    def recorded(self, *arguments):
        record(self, *arguments)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(GRPOTrainer, "_record", recorded)
    with pytest.raises(TrainingError, match=r"^rl-plus: SIGTERM stopped it after 1 steps$"):
        smoke(find_paper("rl-plus"))


def test_the_page_has_every_recipe_and_every_paper_without_one():
    page, papers, others = papers_page(), read_papers(), without_file()
    for paper in papers:
        assert (
            f"| [{paper.slug}](../src/rlvr/recipes/{recipe_files()[paper.slug].relative_to(RECIPES)}) "
            f"| {paper.recipe.title} | {paper.recipe.status} |" in page
        )
    assert len(others["out"]) == 22
    assert all(f"| {row['slug']} |" in page for rows in others.values() for row in rows)
    assert not {row["slug"] for rows in others.values() for row in rows} & set(SLUGS)
    assert json.dumps(others)


def test_the_readme_counts_the_recipes_as_they_are():
    """The same numbers as in the files, read without the library."""
    counts = {
        status: sum(f"\n  status: {status}\n" in path.read_text() for path in RECIPES.glob("*/*.yaml"))
        for status in ("faithful", "part")
    }
    said = re.search(r"\| (\d+), installed .*: (\d+) faithful, (\d+) partial", (ROOT / "README.md").read_text())
    assert [int(number) for number in said.groups()] == [len(SLUGS), counts["faithful"], counts["part"]]
    assert sum(counts.values()) == len(SLUGS)


def test_a_paper_s_components_are_in_the_registry_s_table_and_are_imported_when_they_are_named():
    files = {
        path: re.findall(r'^@register\("(\w+)", "(\w+)"\)', path.read_text(), re.M) for path in RECIPES.glob("*/*.py")
    }
    listed = [
        (kind, name, RECIPES.joinpath(*module.split(".")).with_suffix(".py"))
        for kind, modules in registry.RECIPES.items()
        for name, module in modules.items()
    ]
    assert sorted(listed) == sorted((kind, name, path) for path, found in files.items() for kind, name in found)
    program = (
        "import sys; from rlvr import registry; registry.find('advantage', 'group'); registry.find('loss', 'topr'); "
        "print(*(name for name in sys.modules if name.startswith('rlvr.recipes.')))"
    )
    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert imported.split() == ["rlvr.recipes.loss_presets", "rlvr.recipes.topr", "rlvr.recipes.topr.topr"]


def test_a_name_of_a_paper_s_component_is_taken():
    with pytest.raises(ConfigError, match=r"the loss 'copg' is taken by rlvr\.recipes\.copg\.copg\.ContrastiveLoss"):
        registry.register_loss("copg")(type("Mine", (), {"__module__": "users"}))


COMPONENTS = ("advantages", "losses", "rewards", "selection", "recipes")


def test_no_component_calls_a_formula_confirmed_in_the_place_of_its_source():
    """A docstring names the file at a commit or the equation that was opened, or says that it is from memory."""
    source = Path(registry.__file__).parent
    said = [
        file.relative_to(source)
        for folder in COMPONENTS
        for file in sorted((source / folder).rglob("*.py"))
        if file.stem not in ("papers", "recipes_page")  # the column `checked` of the page has this title
        and re.search(r"\bconfirmed\b", file.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert not said
