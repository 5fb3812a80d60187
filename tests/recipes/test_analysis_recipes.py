"""The commands of docs/analysis.md: each is accepted as it stands, and they make their tables on a tiny model."""

from __future__ import annotations

import collections
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hand_written_steps import plan_of

from rlvr import analysis, evaluate
from rlvr.config.config_loading import load_config
from rlvr.data.sources import limited
from rlvr.recipes.papers import find_paper
from rlvr.recipes.smoke import smoke_config
from rlvr.records import Task
from rlvr.testing import StubJudge
from rlvr.trainer import GRPOTrainer

PAGE = Path(__file__).resolve().parents[2] / "docs/analysis.md"
SLUGS = ("invisible-leash", "sparkle", "vb-vs-vf", "clipping-entropy-and-spurious-reward", "kl-as-bayes")
VARIABLES = {
    "$model": "org/model",
    "$name": "name",
    "$tokens": "512",
    "$run": "vb",
    "$help": "planning",
    "$recipe": "clipping-entropy-and-spurious-reward",
    "$(basename org/model)": "model",
}
"""The variables of the page's loops, in the order in which they are filled in."""


def commands():
    """The commands of the papers' sections, by module, with the loops' variables filled in."""
    sections = PAGE.read_text().split("## The tiny run")[0]
    found = []
    for block in re.findall(r"```bash\n(.*?)```", sections, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for name, value in VARIABLES.items():
                line = line.replace(name, value)
            # A pattern of the shell stands for several files.
            words = [w for word in shlex.split(line, comments=True) for w in ([word, word] if "*" in word else [word])]
            if words[:2] == ["python", "-m"]:
                found.append((words[2].removeprefix("rlvr."), words[3:]))
    return found


COMMANDS = commands()


def test_the_page_has_a_training_and_a_table_for_each_of_the_five_papers():
    for slug in SLUGS:
        assert any(words[:2] == ["--config", slug] for module, words in COMMANDS if module == "train")
    tables = [words[0] for module, words in COMMANDS if module == "analysis"]
    assert set(tables) == {"support", "ability", "budget", "runs", "posterior"}


@pytest.mark.parametrize(("module", "words"), [c for c in COMMANDS if c[0] == "train"])
def test_a_training_command_is_a_valid_configuration_other_than_the_recipe(module, words):
    config = load_config(words[1], [word for word in words[2:] if "=" in word])
    plain = load_config(words[1])
    assert (config == plain) == (len(words) == 2)


@pytest.mark.parametrize(("module", "words"), [c for c in COMMANDS if c[0] in ("analysis", "evaluate")])
def test_a_command_of_tables_and_evaluations_is_understood(module, words):
    """Options exist, and overrides are valid settings of the recipe."""
    parser = {"analysis": analysis.make_parser, "evaluate": evaluate.make_parser}[module]()
    options = parser.parse_args(words) if module == "analysis" else parser.parse_intermixed_args(words)
    if module == "evaluate" and options.config not in (None, "hybrid.yaml"):
        load_config(options.config, options.overrides)


def test_the_commands_on_verifiers_run_with_a_judge_that_is_lenient(tmp_path, monkeypatch):
    """Rules miss the right answer in words, which the judge accepts, with a wrong one beside it."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": "1/2?", "answer": "0.5", "completion": r"\boxed{0.5}", "expected": True},
        {"prompt": "1/2?", "answer": "0.5", "completion": "a half", "expected": True},
        {"prompt": "1/2?", "answer": "0.5", "completion": "a third", "expected": False},
        {"prompt": "1/2?", "answer": "0.5", "completion": r"\boxed{3}", "expected": False},
    ]
    for name in ("answers.jsonl", "solutions.jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [words for module, words in COMMANDS if module == "evaluate" and "--responses" in words]
    assert len(evaluations) == 3
    with StubJudge(lambda r: r.verdict("yes" if r.fenced["response"].startswith("a ") else "no")) as stub:
        (block,) = re.findall(r"```yaml\n# hybrid.yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
        Path("hybrid.yaml").write_text(block.replace("http://localhost:8000/v1", stub.url))
        for words in evaluations:
            assert evaluate.main([word.replace("http://localhost:8000/v1", stub.url) for word in words]) == 0
        assert not any("0.5" in request.fenced.get("answer", "") for request in stub.requests[-16:])
    results = {name: json.loads(Path(f"{name}.json").read_text()) for name in ("rules", "hybrid", "libra")}
    assert results["rules"]["results"]["false_negative_rate"] == 0.5
    assert results["rules"]["results"]["false_positive_rate"] == 0
    change = results["hybrid"]["comparison"]["differences"]
    assert change["false_negative_rate"]["after"] == 0 and change["false_positive_rate"]["difference"] == 0.5
    assert results["libra"]["results"]["accuracy"] == 0.5 and results["libra"]["threshold"] == 0.5


@pytest.fixture
def tiny(tmp_path):
    """`tiny(slug, *overrides, steps=2)`: a run of the recipe at toy size with evaluations; the path of its folder."""

    def make(slug, *overrides, steps=2, name=None):
        config = smoke_config(find_paper(slug), str(tmp_path))
        tree = config.dump()
        tasks = find_paper(slug).recipe.smoke.tasks
        path = tmp_path / "tree.yaml"
        for number, stage in enumerate(tree["stages"]):
            stage["steps"] = steps if number else 60
        rows = [{**task, "id": f"t{number}", "level": number} for number, task in enumerate(tasks)]
        tree["data"]["eval"] = rows
        tree["evaluation"] = {"at_start": True, "samples": 8, "k": [1, 8], "difficulty": "level"}
        tree["run"]["name"] = name or slug
        path.write_text(yaml.safe_dump(tree))
        with GRPOTrainer(config=load_config(str(path), overrides)) as trainer:
            trainer.train()
        return tmp_path / (name or slug)

    return make


def table(capsys, *words):
    capsys.readouterr()
    assert analysis.main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_the_leash_s_table_of_a_run_s_own_evaluations(tiny, capsys):
    run = tiny("invisible-leash")
    files = sorted((run / "evaluations").glob("step-*.json"))
    rows = table(capsys, "support", *files)
    first = [json.loads(file.read_text())["by_task"] for file in files]
    for number, task_results in enumerate(first[1:]):
        row = rows[number * 3]  # all, and two levels of difficulty
        pairs = list(zip(first[0], task_results, strict=True))
        assert row["tasks"] == 2 and row["P"] + row["E"] + row["S"] + row["O"] == 2
        assert row["S"] == sum(a["correct"] > 0 and not b["correct"] for a, b in pairs)
        assert row["mean tuned"] == pytest.approx(sum(b["score"] for _, b in pairs) / 2)


def test_cloning_trains_right_responses_alone_and_budgets_are_compared(tiny, tmp_path, capsys, monkeypatch):
    (clone,) = [c for c in COMMANDS if c[0] == "train" and "run.name=vf" in c[1]]
    overrides = [word for word in clone[1][2:] if "run.name" not in word]
    runs = {"free": tiny("vb-vs-vf", *overrides, name="free"), "based": tiny("vb-vs-vf", name="based")}
    metrics = [json.loads(line) for line in (runs["free"] / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if row["reward/mean"] is not None]
    # The only gradient is that of right responses: a step without one has none.
    assert all(bool(row["grad_norm"]) == bool(row["reward/mean"]) for row in steps)
    files = {"free": [], "based": []}
    for side, run in runs.items():
        for tokens in (4, 8):
            output = tmp_path / f"{side}-{tokens}.json"
            words = [
                "--model",
                str(run),
                "--no-greedy",
                "--max-new-tokens",
                str(tokens),
                "--samples",
                "4",
                "--k",
                "1,4",
            ]
            assert evaluate.main([*words, "--output", str(output)]) == 0
            files[side].append(output)
    rows = table(capsys, "budget", "--free", *files["free"], "--based", *files["based"])
    assert [(row["budget"], row["k"]) for row in rows] == [(4, 1), (8, 1), (16, 4), (32, 4)]
    written = json.loads(files["based"][1].read_text())["results"]
    assert rows[1]["based"] == pytest.approx(written["mean"]) and rows[3]["based"] == pytest.approx(written["maj@4"])


def test_help_in_the_prompt_by_the_documented_source(tiny, tmp_path, capsys):
    run = tiny("vb-vs-vf")
    tasks = [{"prompt": f"1+{n}=", "answer": str(1 + n), "planning": "so", "level": n} for n in (1, 2)]
    path = tmp_path / "annotated.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    for name, spec in (("plain", path), ("plan", f"{{name: helped_problems, data: {path}, column: planning}}")):
        words = ["--model", str(run), "--samples", "4", "--no-greedy", f"evaluation.data={spec}"]
        assert evaluate.main([*words, "--output", str(tmp_path / f"{name}.json"), "data.template=null"]) == 0
    rows = table(capsys, "ability", f"m/plain={tmp_path}/plain.json", f"m/plan={tmp_path}/plan.json")
    assert [row["tasks of"] for row in rows[::2]] == ["all", "difficulty/1", "difficulty/2"]
    means = {name: json.loads((tmp_path / f"{name}.json").read_text())["results"]["mean"] for name in ("plain", "plan")}
    assert rows[1]["change"] == pytest.approx(means["plan"] - means["plain"])


def test_the_coin_s_rewards_do_not_depend_on_the_response(recipe_step):
    step = recipe_step("clipping-entropy-and-spurious-reward", [Task(id="t", prompt="What is 6 * 7?", answer="42")])
    right = step.rewards(["It is \\boxed{42}."] * 200)
    assert right == step.rewards(["It is \\boxed{41}."] * 200)
    # Half of 200 within four standard deviations of a fair coin's count.
    assert abs(sum(right) - 100) < 4 * 50**0.5


def test_vb_vs_vf_is_evaluated_over_all_subjects_of_a_set_that_is_sorted_by_subject():
    """500 of the 5,000 test problems of MATH, whose first 1,187 are of algebra."""
    evaluation = plan_of("vb-vs-vf").config.evaluation
    assert (evaluation.limit, evaluation.limit_seed) == (500, 0)
    subjects = [Task(id=str(n), prompt="?", info={"type": n // 715}) for n in range(5000)]
    drawn = collections.Counter(task.info["type"] for task in limited(subjects, 500, evaluation.limit_seed))
    # Of each seventh 71 on average, with a deviation of 7.4.
    assert len(drawn) == 7 and min(drawn.values()) > 71 - 4 * 7.4
