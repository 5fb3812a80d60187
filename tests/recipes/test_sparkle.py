"""SPARKLE: the reward of hand-written responses, hard problems with parts of their solution, problems with help."""

from __future__ import annotations

import json

import datasets
import pytest

from rlvr.data import load_tasks
from rlvr.errors import ConfigError, DataError
from rlvr.recipes.papers import find_paper
from rlvr.recipes.sparkle.hard_rows import parts_of, rows
from rlvr.records import Task

FORM = "<think>It is 6 * 7.</think><answer>So \\boxed{{{}}}.</answer>"
REWARDS = {
    # spk_h in verl/verl/trainer/main_ppo.py of sparkle-reasoning/sparkle@c3581c9: right and in the form 2, right 1,
    # wrong -1, in the form or not.
    FORM.format(42): 2.0,
    "So \\boxed{42}.": 1.0,
    "<think>It is 6 * 7.</think> So \\boxed{42}.": 1.0,
    FORM.format(41): -1.0,
    "So \\boxed{41}.": -1.0,
    "I do not know.": -1.0,
}


@pytest.mark.parametrize("stage", ["broad", "hard"])
def test_a_right_answer_is_worth_1_and_the_form_1_more(stage, recipe_step):
    step = recipe_step("sparkle", [Task(id="t", prompt="What is 6 * 7?", answer="42")], stage)
    assert step.rewards(list(REWARDS)) == pytest.approx(list(REWARDS.values()))


def test_the_stages_have_the_authors_two_kl_coefficients(recipe_step):
    task = [Task(id="t", prompt="What is 6 * 7?", answer="42")]
    coefs = [recipe_step("sparkle", task, stage).plan.config.algorithm.kl.coef for stage in ("broad", "hard")]
    assert coefs == [1e-3, 1e-2]


@pytest.mark.parametrize(
    ("solution", "parts"),
    [
        ("a\n\nb\n\nc\n\nd", ["a", "b", "c", "d"]),
        # Six paragraphs in four shares: from int(0), int(1.5), int(3) and int(4.5) on.
        ("a\n\nb\n\nc\n\nd\n\ne\n\nf", ["a", "b\n\nc", "d", "e\n\nf"]),
        # Two paragraphs are too few: sentences, of which 3.5 ends none.
        (
            "It is 3.5 wide. It is 2 high.\n\nSo it is 7! Right?",
            ["It is 3.5 wide.", "It is 2 high.", "So it is 7!", "Right?"],
        ),
        ("One sentence.", ["One sentence."]),
        ("", []),
    ],
)
def test_a_solution_in_four_parts(solution, parts):
    assert parts_of(solution) == parts


def test_a_hard_problem_stands_alone_and_with_each_beginning_of_its_solution(monkeypatch):
    hub = [
        {"problem": "What is {part}?", "answer": "7", "CoT": "a\n\nb\n\nc\n\nd", "solution": "other"},
        {"problem": "And this?", "answer": "8", "CoT": None, "solution": "x. y."},
        {"problem": "And that?", "answer": "9", "CoT": None, "solution": None},
    ]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(hub))
    made = [row for _, row in rows(find_paper("sparkle").config)]
    assert [row["info"]["parts"] for row in made] == [0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert made[0]["prompt"] == "What is {part}?"
    assert made[2]["prompt"] == "What is {part}?\n\nA solution may begin as follows:\na\nb"
    assert made[7]["prompt"].endswith("\nx.\ny.") and made[7]["answer"] == "8"


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [{"prompt": "What is {help}?", "answer": "7", "planning": "Add {prompt}.", "difficulty": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_help_is_put_into_the_prompt_and_the_problem_keeps_its_id(problems):
    (plain,) = load_tasks(problems)
    (helped,) = load_tasks({"name": "helped_problems", "data": problems, "column": "planning"})
    assert helped.id == plain.id and helped.answer == "7" and helped.info["difficulty"] == 3
    # Braces in the problem and in the help are text.
    assert helped.prompt == "What is {help}?\n\nA plan that you may follow or change:\nAdd {prompt}."
    own = {"name": "helped_problems", "data": problems, "column": "planning", "text": "{help} First. {prompt}"}
    assert load_tasks(own)[0].prompt == "Add {prompt}. First. What is {help}?"


def test_what_cannot_help_is_refused(problems, tmp_path):
    with pytest.raises(DataError, match="has no text in the column 'knowledge'"):
        load_tasks({"name": "helped_problems", "data": problems, "column": "knowledge"})
    with pytest.raises(ConfigError, match="give `text` with the slots"):
        load_tasks({"name": "helped_problems", "data": problems, "column": "hint"})
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", "planning": "Add."}))
    with pytest.raises(DataError, match="the prompt is a chat"):
        load_tasks({"name": "helped_problems", "data": str(chat), "column": "planning"})
