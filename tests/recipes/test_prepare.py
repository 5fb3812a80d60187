"""python -m rlvr.recipes prepare: the rows of each file from sets of the public form, nothing overwritten, errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rlvr import train
from rlvr.config.config_loading import recipe_files
from rlvr.data import load_tasks
from rlvr.recipes.__main__ import main
from rlvr.recipes.hub_schemas import hub_schemas
from rlvr.recipes.papers import find_paper
from rlvr.recipes.prepare import files_of

USER = [{"role": "user", "content": "Hi"}]
SETS = {
    "nvidia/HelpSteer3": [
        {"context": USER, "response1": "a", "response2": "b", "overall_preference": -3},
        {"context": USER, "response1": "a", "response2": "b", "overall_preference": 0},
        {
            "context": [*USER, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "1+1="}],
            "response1": "3",
            "response2": "2",
            "overall_preference": 1,
        },
    ],
    "Skywork/Skywork-Reward-Preference-80K-v0.2": [
        {
            "chosen": [*USER, {"role": "assistant", "content": "Hello"}],
            "rejected": [*USER, {"role": "assistant", "content": "No"}],
            "source": source,
        }
        for source in ("offsetbias", "magpie_ultra")
    ],
    "Vezora/Code-Preference-Pairs": [
        {"input": f"Write {n}.", "accepted": f"return {n}", "rejected": "return"} for n in range(8100)
    ],
    "xinlai/Math-Step-DPO-10K": [
        {"prompt": "2+2=", "initial_reason_steps": "Step 1. ", "full_chosen": "4", "full_rejected": "5"}
    ],
    "Chenlu123/numia_prompt_ppo": [
        {"problem": "3+3=", "reward_model": {"ground_truth": "6", "style": "rule"}, "ability": "math"},
        {"problem": "3+4=", "reward_model": {"ground_truth": "7", "style": "rule"}, "ability": "math"},
    ],
    "agentica-org/DeepScaleR-Preview-Dataset": [
        {"problem": "1+1=", "answer": "2", "solution": "2"},
        {"problem": "1+2=", "answer": "3", "solution": "3"},
    ],
    "Windy0822/ultrainteract_math_rollout": [
        {
            "prompt": "What is 3 + 4?",
            "completions": ["It is 7.", "It is 8.", "3 + 4 = 7."],
            "correctness": [True, False, True],
        }
    ],
    "DigitalLearningGmbH/MATH-lighteval": [
        {"problem": "Half of 1?", "solution": "It is \\boxed{\\frac{1}{2}}."},
        {"problem": "Root of 2?", "solution": "It is \\boxed{\\sqrt{2}}."},
    ],
    "openai/gsm8k": [
        {"question": "Two bikes at 600?", "answer": "2 * 600 = <<2*600=1200>>1,200\n#### 1,200"},
        {"question": "Half of 1?", "answer": "It is a half.\n#### 0.5"},
    ],
    "liuwenhan/reasonrank_data_rl": [
        {
            "prompt": [{"role": "system", "content": "Rank."}, {"role": "user", "content": "[1] a [2] b [3] c"}],
            "label": "[2] > [3] > [1]",
            "initial_list": ["d7", "d8", "d9"],
            "relevant_docids": ["d9", "d8"],
        }
    ],
}


@pytest.fixture
def prepared(monkeypatch, tmp_path, capsys):
    """`prepared(slug, *arguments)`: exit code, rows of the recipe's file (None where there is none), output, errors."""
    monkeypatch.chdir(tmp_path)
    sets = {name: [dict(row) for row in rows] for name, rows in SETS.items()}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config, split, revision: datasets.Dataset.from_list(sets[name])
    )

    def call(slug, *arguments):
        code = main(["prepare", slug, *arguments])
        (name,) = files_of(find_paper(slug).config)
        rows = None
        if Path(name).exists():
            rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
        return (code, rows, *capsys.readouterr())

    call.sets = sets
    return call


def test_each_problem_has_each_effort(prepared):
    code, rows, out, _ = prepared("e1")
    assert (code, out) == (0, "data/effort.jsonl: 8 rows written\n")
    assert [(row["answer"], row["info"]["effort"]) for row in rows] == [
        (answer, effort) for answer in ("2", "3") for effort in (0.25, 0.5, 0.75, 1.0)
    ]
    assert all(f"{row['info']['effort']:g}" in row["prompt"] for row in rows)


def test_a_problem_has_its_graded_answer(prepared):
    code, rows, _, _ = prepared("prof")
    assert (code, rows) == (0, [{"prompt": "3+3=", "answer": "6"}, {"prompt": "3+4=", "answer": "7"}])


def test_every_puzzle_has_a_solution(prepared):
    _, rows, _, _ = prepared("for")
    assert len({tuple(row["info"]["numbers"]) for row in rows}) == len(rows) == 15
    for row in rows:
        assert any(expressions_make_24(numbers) for numbers in itertools.permutations(row["info"]["numbers"]))


def expressions_make_24(numbers):
    """Return True if one of the five bracketings of four numbers in this order makes 24, in floating point."""
    a, b, c, d = numbers
    for p, q, r in itertools.product("+-*/", repeat=3):
        forms = (
            f"(({a}{p}{b}){q}{c}){r}{d}",
            f"({a}{p}({b}{q}{c})){r}{d}",
            f"({a}{p}{b}){q}({c}{r}{d})",
            f"{a}{p}(({b}{q}{c}){r}{d})",
            f"{a}{p}({b}{q}({c}{r}{d}))",
        )
        for form in forms:
            try:
                if abs(eval(form) - 24) < 1e-9:
                    return True
            except ZeroDivisionError:
                pass
    return False


def test_each_response_has_its_label(prepared):
    _, rows, _, _ = prepared("implicit-prm")
    assert rows == [
        {"prompt": "What is 3 + 4?", "demonstration": "It is 7.", "label": 1},
        {"prompt": "What is 3 + 4?", "demonstration": "It is 8.", "label": 0},
        {"prompt": "What is 3 + 4?", "demonstration": "3 + 4 = 7.", "label": 1},
    ]


def test_the_pairs_of_a_judge_are_those_of_the_authors(prepared):
    """dataset/preprocess_data.py of yzjiao/BR-RM, commit 34a58b2."""
    _, rows, _, _ = prepared("br-rm")
    # Without the tie and without magpie_ultra.
    assert rows[0] == {"prompt": "User: Hi", "chosen": "a", "rejected": "b", "source": "helpsteer3"}
    assert rows[1]["prompt"] == "User: Hi\nAssistant: Yes?\nUser: 1+1="
    assert (rows[1]["chosen"], rows[1]["rejected"]) == ("2", "3")
    assert rows[2] == {"prompt": "User: Hi", "chosen": "Hello", "rejected": "No", "source": "skywork"}
    # `shuffle(seed=42).select(range(8000))`
    code = datasets.Dataset.from_list(SETS["Vezora/Code-Preference-Pairs"]).shuffle(seed=42).select(range(8000))
    assert [row["chosen"] for row in rows[3:-1]] == code["accepted"][:]
    assert rows[-1] == {
        "prompt": "User: 2+2=",
        "chosen": "Step 1. 4",
        "rejected": "Step 1. 5",
        "source": "mathematics",
    }


def test_relevant_passages_have_grade_1(prepared):
    _, rows, _, _ = prepared("reasonrank")
    (row,) = rows
    assert row["answer"] == {"1": 0, "2": 1, "3": 1}
    assert row["info"] == {"ranking": ["2", "3", "1"]}
    assert row["prompt"][1]["content"] == "[1] a [2] b [3] c"


def of_openr1(problem, answer, **other):
    row = {"problem": problem, "answer": answer, "solution": "so", "question_type": "math-word-problem"}
    return row | {"correctness_math_verify": [False, True]} | other


def test_problems_with_a_number_as_answer(prepared):
    """SAR: other answers, other kinds of questions, links, problems that R1 never solved and repeated ones are left
    out; 8 % of OpenR1 are the authors' test rows."""
    prepared.sets["open-r1/OpenR1-Math-220k"] = [
        *(of_openr1(f"p{number}", str(number)) for number in range(25)),
        of_openr1("a formula", "x + 1"),
        of_openr1("a long number", "1" * 21),
        of_openr1("no digit", "()"),
        of_openr1("an option", "3", question_type="MCQ"),
        of_openr1("unsolved", "3", correctness_math_verify=[False, False]),
        of_openr1("a picture: http://a.b", "3"),
        of_openr1("a picture", "3", solution="http://a.b"),
    ]
    _, rows, _, _ = prepared("sar")
    answers = {row["prompt"]: row["answer"] for row in rows}
    assert len(answers) == len(rows)
    assert answers.pop("Half of 1?") == "\\frac{1}{2}" and answers.pop("Two bikes at 600?") == "1,200"
    split = datasets.Dataset.from_dict({"n": list(range(25))}).train_test_split(test_size=0.08, seed=42)
    assert answers == {f"p{number}": str(number) for number in split["train"]["n"]}


def test_at_most_ten_thousand_problems_of_a_set(prepared, monkeypatch):
    """The draw of pandas.DataFrame.sample(n, random_state=42), which is that of RandomState.choice."""
    monkeypatch.setattr("rlvr.recipes.sar.numeric_rows.LARGEST", 3)
    prepared.sets["openai/gsm8k"] = [{"question": f"q{number}", "answer": f"#### {number}"} for number in range(8)]
    prepared.sets["open-r1/OpenR1-Math-220k"] = [of_openr1("p", "1")]
    _, rows, _, _ = prepared("sar")
    drawn = np.random.RandomState(42).choice(8, size=3, replace=False)
    assert [row["prompt"] for row in rows] == ["Half of 1?", "p", *(f"q{number}" for number in drawn)]


def test_a_question_stands_beside_its_paraphrase(prepared):
    code, rows, _, err = prepared("co-reward")
    assert (code, rows) == (2, None)
    assert "git clone https://github.com/tmlr-group/Co-rewarding" in err
    folder = Path("data/Co-rewarding/Co-rewarding-I/data/math")
    folder.mkdir(parents=True)
    for file, texts in (("train_original", ["a?", "b?"]), ("train_rewrite_Qwen3-32B", ["A?", "B?"])):
        table = [
            {
                "prompt": [{"role": "system", "content": "Box it."}, {"role": "user", "content": text}],
                "reward_model": {"ground_truth": str(number), "style": "rule"},
            }
            for number, text in enumerate(texts)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / f"{file}.parquet")
    _, rows, _, _ = prepared("co-reward")
    assert [(row["id"], row["info"]["partner"], row["prompt"], row["answer"]) for row in rows] == [
        ("0a", "0b", "a?", "0"),
        ("0b", "0a", "A?", "0"),
        ("1a", "1b", "b?", "1"),
        ("1b", "1a", "B?", "1"),
    ]


def test_each_response_of_a_conversation_has_the_turns_before_it(prepared):
    Path("data/openchat").mkdir(parents=True)
    items = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
    conversation = {"items": [{"role": role, "content": text} for role, text in items], "system": "Be kind."}
    lines = [json.dumps(conversation | {"condition": condition}) + "\n" for condition in ("GPT4", "GPT3")]
    Path("data/openchat/train.jsonl").write_text("".join(lines))
    _, rows, _, _ = prepared("openchat")
    assert [row["source"] for row in rows] == ["expert", "expert", "other", "other"]
    assert rows[1]["prompt"] == (
        "Be kind.<|end_of_turn|>GPT4 User: Hi<|end_of_turn|>GPT4 Assistant: Hello<|end_of_turn|>"
        "GPT4 User: Bye<|end_of_turn|>GPT4 Assistant:"
    )
    assert rows[1]["demonstration"] == " See you"
    assert rows[2]["prompt"] == "Be kind.<|end_of_turn|>GPT3 User: Hi<|end_of_turn|>GPT3 Assistant:"


TINY = (
    "model={path: null, scratch: {hidden_size: 16, layers: 1, intermediate_size: 16, context: 512}, device: cpu}",
    "rollout={engine: hf, max_new_tokens: 4}",
    'data.template="{prompt}"',
)


def test_the_model_samples_its_own_demonstrations(prepared, tmp_path):
    """A verifier that takes the answer 2 for right whatever is written gives only its tasks a demonstration."""
    Path("two.py").write_text("def two(completion, answer):\n    return float(answer == '2')\n")
    code, rows, _, err = prepared("self", *TINY, f"verifier={tmp_path / 'two.py'}:two")
    assert (code, "2/2 tasks sampled" in err) == (0, True)
    assert [row["answer"] for row in rows] == ["2", "3"]
    assert ["demonstration" in row for row in rows] == [True, False]


def test_the_model_answers_each_prompt_before_it_is_trained(prepared):
    """One response under the recipe's sampling, of the likeliest token alone whatever the temperature; the reward model
    is not opened."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    prepared.sets["HuggingFaceH4/ultrafeedback_binarized"] = [
        {"prompt": prompt, "chosen": turns, "rejected": turns} for prompt in ("Name 2.", "Name 3.", "Name 4.")
    ]
    answers = []
    for top_k, temperature in ((1, 0.9), (1, 5.0), (50, 5.0)):
        settings = (*TINY, f"rollout.top_k={top_k}", f"rollout.temperature={temperature}")
        code, rows, _, err = prepared("par", *settings)
        assert code == 0, err
        assert [row["prompt"] for row in rows] == ["Name 2.", "Name 3.", "Name 4."]
        assert all(set(row) == {"prompt", "answer"} and row["answer"] for row in rows)
        answers.append([row["answer"] for row in rows])
        Path("data/par.jsonl").unlink()
    assert answers[0] == answers[1] != answers[2]


def test_a_judgement_that_comes_to_the_verdict_is_the_demonstration(prepared, tmp_path):
    """A verifier that takes every judgement of a right solution for right leaves the other solutions out."""
    Path("right.py").write_text("def right(completion, answer):\n    return float(answer == 'correct')\n")
    code, rows, _, _ = prepared("libra", *TINY, "stages=[]", "run.steps=1", f"verifier={tmp_path / 'right.py'}:right")
    assert (code, [row["answer"] for row in rows]) == (0, ["correct", "correct"])
    for row, solution in zip(rows, ("It is 7.", "3 + 4 = 7."), strict=True):
        assert "What is 3 + 4?" in row["prompt"] and solution in row["prompt"]
        assert row["prompt"].endswith("correct or incorrect.") and row["demonstration"]


def test_every_row_is_a_task_of_the_recipe(prepared):
    """Read as the recipe reads it, from its own file."""
    for slug in ("br-rm", "e1", "for", "implicit-prm", "reasonrank"):
        _, rows, _, _ = prepared(slug)
        (name,) = files_of(find_paper(slug).config)
        assert len(load_tasks(name)) == len(rows)
        # As the schema has it, which the recipe is opened against.
        assert set(rows[0]) == set(hub_schemas()["files"][name]["rows"][0])


def test_a_file_that_is_there_is_left_as_it_is(prepared):
    Path("data").mkdir()
    Path("data/effort.jsonl").write_text('{"prompt": "mine"}\n')
    code, rows, out, _ = prepared("e1")
    assert (code, rows) == (0, [{"prompt": "mine"}])
    assert out == "data/effort.jsonl is there, and is left as it is\n"


def test_a_limit_of_rows(prepared):
    assert len(prepared("e1", "--limit", "3")[1]) == 3


def test_a_set_that_has_changed_leaves_no_file(prepared):
    for row in prepared.sets["agentica-org/DeepScaleR-Preview-Dataset"]:
        row["question"] = row.pop("problem")
    code, rows, _, err = prepared("e1")
    assert (code, rows) == (2, None)
    assert (
        "DeepScaleR-Preview-Dataset:train" in err and "no column 'problem' (it has answer, question, solution)" in err
    )
    assert list(Path("data").iterdir()) == []


def test_a_file_of_the_user_is_described(prepared):
    code, rows, _, err = prepared("shop-r1")
    assert (code, rows) == (2, None)
    assert err.startswith("error: data/shop.jsonl is not there and is yours to make") and err.count("\n") == 1
    assert json.dumps(hub_schemas()["files"]["data/shop.jsonl"]["rows"][0]) in err


def test_a_recipe_of_public_sets_needs_nothing(capsys):
    assert main(["prepare", "lite-ppo"]) == 0
    assert "nothing has to be prepared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("slug", "message"), [("e1", "`python -m rlvr.recipes prepare e1` makes it"), ("shop-r1", "A row of it")]
)
def test_training_without_the_file_ends_in_one_line(slug, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--config", slug]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_file_is_named_by_a_recipe():
    named = {name for slug in recipe_files() for name in files_of(find_paper(slug).config)}
    assert set(hub_schemas()["files"]) <= named
