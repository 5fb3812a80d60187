"""docs/curves/mechanisms: page and pictures are those of the kept numbers, the numbers are of the plan as it is, and
the intervals are computed once more."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from fractions import Fraction

import pytest
import yaml
from scipy import stats

FOLDER = "docs/curves/mechanisms"


@pytest.fixture(scope="module")
def mechanisms(script):
    """scripts/mechanism_curves.py as a module."""
    return script("mechanism_curves")


@pytest.fixture(scope="module")
def kept(root):
    return json.loads((root / FOLDER / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def plan(root):
    return yaml.safe_load((root / FOLDER / "plan.yaml").read_text(encoding="utf-8"))


def test_page_and_pictures_are_of_the_kept_numbers(root, mechanisms, kept, plan):
    assert (root / FOLDER / "README.md").read_text(encoding="utf-8") == mechanisms.page(kept)
    assert {path.stem for path in (root / FOLDER).glob("*.svg")} == set(plan["mechanisms"])
    for name in plan["mechanisms"]:
        assert (root / FOLDER / f"{name}.svg").read_text(encoding="utf-8") == mechanisms.picture(kept, name)
    assert all(path.stat().st_size < 1_000_000 for path in (root / FOLDER).iterdir())


def test_the_results_are_of_the_plan(kept, plan):
    assert kept["plan"] == plan
    wanted = {"dapo", "dr-grpo", "gspo", "cispo", "psr", "canon", "lite-ppo", "rover", "grpo-lambda", "tempo"}
    assert set(plan["mechanisms"]) == wanted
    for mechanism in plan["mechanisms"].values():
        assert mechanism["task"] in plan["tasks"]
        assert mechanism["measure"] in plan["measures"]
        assert mechanism["sign"] in ("+", "-")
    # Every run has the same number of responses, and none is there twice.
    rollout = plan["training"]["rollout"]
    samples = plan["training"]["run"]["steps"] * rollout["prompts_per_step"] * rollout["group_size"]
    assert {run["responses"] for run in kept["runs"]} == {samples}
    keys = [(run["task"], run["method"], run["seed"]) for run in kept["runs"]]
    expected = {
        (task, method, seed)
        for seed in plan["seeds"]
        for task in plan["tasks"]
        for method in ["grpo", *plan["mechanisms"]]
        if method == "grpo" or plan["mechanisms"][method]["task"] == task
    }
    assert len(keys) == len(set(keys)) and set(keys) <= expected


def test_a_configuration_is_the_task_and_the_sections_of_the_file(root, mechanisms, plan):
    for name, mechanism in plan["mechanisms"].items():
        config = mechanisms.config_of(plan, mechanism["task"], name)
        written = yaml.safe_load((root / mechanism["file"]).read_text(encoding="utf-8"))
        for section in mechanism["takes"]:
            if section in written:
                assert config[section] == written[section], (name, section)
        baseline = mechanisms.config_of(plan, mechanism["task"], "grpo")
        assert baseline["algorithm"] == {"preset": "grpo"}
        # Nothing differs but the sections that are taken.
        for section in set(config) | set(baseline):
            assert section in mechanism["takes"] or config[section] == baseline[section], (name, section)


def test_the_runs_were_made_with_the_sections_that_the_files_have(root, kept, plan):
    """A recipe whose numbers change after the runs needs new runs, or the page a sentence about it."""
    sources = {**plan["mechanisms"], "grpo": plan["baseline"]}
    for run in kept["runs"]:
        source = sources[run["method"]]
        written = yaml.safe_load((root / source["file"]).read_text(encoding="utf-8"))
        for name in source.get("without", []):
            del written["algorithm"][name]
        wanted = {section: written[section] for section in source["takes"] if section in written}
        assert run["settings"] and run["settings"] == wanted, run["method"]
    assert {run["method"] for run in kept["runs"]} == set(sources)


def rows_of(page):
    """Mechanism -> the cells of its row in the page's table."""
    found = {}
    for line in page.splitlines():
        row = re.fullmatch(r"\| \[([\w-]+)\]\(#[\w-]+\) \| (.*) \|", line)
        if row:
            found[row[1]] = row[2].split(" | ")
    return found


def test_the_table_says_what_the_runs_say(root, kept, plan):
    rows = rows_of((root / FOLDER / "README.md").read_text(encoding="utf-8"))
    assert set(rows) == set(plan["mechanisms"])
    for name, mechanism in plan["mechanisms"].items():
        task, measure, sign, *numbers, finding = rows[name]
        assert [task, measure, sign] == [mechanism["task"], mechanism["measure"], mechanism["sign"]]
        value = {
            (run["method"], run["seed"]): run["measures"][measure]
            for run in kept["runs"]
            if run["task"] == task and run["method"] in ("grpo", name)
        }
        pairs = [(value.get((name, seed)), value.get(("grpo", seed))) for seed in plan["seeds"]]
        if any(None in pair for pair in pairs):
            assert numbers == ["-", "-", "-"] and finding == "not run to its end with three seeds"
            continue
        ours, theirs = zip(*pairs, strict=True)
        test = stats.ttest_rel(ours, theirs)
        low, high = test.confidence_interval(0.95)
        mean = float(sum(Fraction(a) - Fraction(b) for a, b in pairs) / 3)
        shown = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", " ".join(numbers))]
        assert shown == pytest.approx([sum(theirs) / 3, sum(ours) / 3, mean, low, high], abs=6e-4)
        expected = "not separable from 0"
        if test.pvalue < 0.05:
            expected = "as expected" if (mean > 0) == (sign == "+") else "the opposite"
        assert finding == expected, name


@pytest.mark.parametrize(
    ("differences", "sign", "finding"),
    [
        ([0.10, 0.11, 0.12], "+", "as expected"),
        ([0.10, 0.11, 0.12], "-", "the opposite"),
        ([-0.10, -0.11, -0.12], "-", "as expected"),
        ([0.10, -0.05, 0.12], "+", "not separable from 0"),
    ],
)
def test_findings(mechanisms, differences, sign, finding):
    results = made_up(differences, sign)
    one = mechanisms.comparison(results, "new")
    assert one["finding"] == finding
    low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert one["interval"] == pytest.approx((low, high), rel=1e-6)
    # A seed without its partner leaves no pair.
    results["runs"].pop()
    assert mechanisms.comparison(results, "new") == {
        "seeds": [0, 1],
        "finding": "not run to its end with three seeds",
    }


def made_up(differences, sign):
    """Results of a mechanism `new` with these differences of its measure from GRPO."""
    runs = []
    for method in ("grpo", "new"):
        for seed, difference in enumerate(differences):
            value = 0.3 * (seed + 1) + (difference if method == "new" else 0)
            runs.append({"task": "sums", "method": method, "seed": seed, "measures": {"accuracy": value}})
    mechanism = {"task": "sums", "measure": "accuracy", "sign": sign}
    return {"plan": {"mechanisms": {"new": mechanism}}, "runs": runs}


def test_a_picture_shows_every_run(root, kept, plan):
    for name, mechanism in plan["mechanisms"].items():
        drawn = ElementTree.parse(root / FOLDER / f"{name}.svg").getroot()
        lines = list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))
        runs = [
            run
            for method in ("grpo", name)
            for run in kept["runs"]
            if (run["task"], run["method"]) == (mechanism["task"], method)
        ]
        # One line for each run, GRPO's first, and the two means.
        assert len(lines) == len(runs) + 2
        measure = mechanism["measure"]
        series = [run["series"].get(measure, run["series"]["learning"]) for run in runs]
        heights = [[float(point.split(",")[1]) for point in line.get("points").split()] for line in lines]
        # The highest point of all is the largest number, the lowest one the smallest.
        numbers = [number for line in series for number in line if number is not None]
        thin = [line for line, element in zip(heights, lines, strict=True) if element.get("stroke-width") == "0.7"]
        assert [len(line) for line in thin] == [sum(number is not None for number in line) for line in series]
        top, bottom = min(map(min, thin)), max(map(max, thin))
        for line, points in zip(series, thin, strict=True):
            shares = [(bottom - y) / (bottom - top) for y in points]
            wanted = [(n - min(numbers)) / (max(numbers) - min(numbers)) for n in line if n is not None]
            assert shares == pytest.approx(wanted, abs=0.002)


def test_the_numbers_of_a_run_folder(mechanisms, tmp_path):
    (tmp_path / "rollouts").mkdir()
    steps = {1: [(1, 3), (0, 8)], 2: [(0, 6), (0, 4)], 3: [(1, 5), (0, 9)]}
    rows = []
    for step, responses in steps.items():
        rows.append({"step": step, "verdict/correct": 0.5 if step != 2 else 0.0, "entropy": 0.1 * step})
        lines = [
            json.dumps({"origin": [0, 0] + [1] * length, "verdicts": {"MathVerifier": {"score": float(score)}}})
            for score, length in responses
        ]
        (tmp_path / f"rollouts/step-{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    evaluation = {"eval/mean": 0.25, "eval/pass@16": 0.75, "eval/greedy": 0.5}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    found = mechanisms.numbers(tmp_path, window=2)
    assert found["responses"] == 6
    assert found["measures"] == pytest.approx(
        {
            "accuracy": 0.25,
            "pass_16": 0.75,
            "greedy": 0.5,
            "learning": 1 / 3,
            "entropy": 0.25,
            "wrong_length": (6 + 4 + 9) / 3,
            "right_length": 5,
        }
    )
    assert found["series"]["right_length"] == [3, None, 5]
    assert found["series"]["wrong_length"] == [8, 5, 9]


def test_the_verifier_that_errs(mechanisms):
    from mechanisms.padded_sums import one_in_ten_wrong, padded_sums

    tasks = list(padded_sums(count=400, split="train"))
    counts = {task.demonstration.count("so ") for task in tasks}
    assert counts == set(range(7))
    answers = [task.demonstration for task in tasks]
    rewards = [one_in_ten_wrong(text, task.answer, task.prompt) for text, task in zip(answers, tasks, strict=True)]
    # 400 right answers, of which a tenth gets 0: three standard deviations of a binomial are 18.
    assert abs(rewards.count(0.0) - 40) < 18
    again = [one_in_ten_wrong(text, task.answer, task.prompt) for text, task in zip(answers, tasks, strict=True)]
    assert again == rewards
    wrong = [one_in_ten_wrong("1 #### 0", task.answer, task.prompt) for task in tasks]
    assert abs(wrong.count(1.0) - 40) < 18
