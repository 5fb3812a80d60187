import importlib.util
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.puzzles.gym import ReasoningGymVerifier, harmless

reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra gym) is not installed")

NAMES = [
    "advanced_geometry", "basic_arithmetic", "binary_matrix", "circuit_logic", "coin_flip", "countdown", "emoji_mystery", "game_of_life_halting", "knights_knaves", "leg_counting", "n_queens",
    "number_sorting", "palindrome_generation", "polynomial_multiplication", "prime_factorization", "puzzle24", "rectangle_count", "sentence_reordering", "simple_integration", "spell_backward",
    "spiral_matrix", "string_insertion", "sudoku", "tsumego",
]  # fmt: skip
JUNK = ["junk", "I don't know", "()", "nothing 12345.678", "?", "the answer", "[[]]"]


def entry(name, seed=3):
    item = reasoning_gym.create_dataset(name, size=1, seed=seed)[0]
    return Task("t", item["question"], item["answer"], info={"dataset": name, "metadata": item["metadata"]})


@pytest.mark.parametrize("name", NAMES)
def test_the_gold_earns_1_and_junk_nothing(name):
    task, verifier = entry(name), ReasoningGymVerifier(max_length=5000)
    assert verifier.check_task(task) is None
    verdict = verifier.verify(task, f"<answer>{task.answer}</answer>")
    assert (verdict.status, verdict.score) == (VerdictStatus.CORRECT, 1.0), verdict
    for junk in JUNK:
        assert verifier.verify(task, f"<answer>{junk}</answer>").score == 0, junk
        assert ReasoningGymVerifier(threshold=None).verify(task, f"<answer>{junk}</answer>").score < 0.25, junk
    assert verifier.verify(task, f"<answer>{task.prompt[:4000]}</answer>").score == 0


def test_other_right_answers_and_partial_scores():
    task = Task(
        "t",
        "p",
        None,
        info={"dataset": "countdown", "metadata": {"numbers": [3, 4, 5], "target": 17, "expression": "3*4+5"}},
    )
    assert ReasoningGymVerifier().verify(task, "<answer>5 + 4*3</answer>").score == 1
    assert ReasoningGymVerifier().verify(task, "<answer>5 + 4 + 3</answer>").score == 0
    near = Task("t", "p", "olleh", info={"dataset": "spell_backward", "metadata": {"word": "hello"}})
    assert ReasoningGymVerifier().verify(near, "<answer>ollex</answer>").score == 0
    assert 0.5 < ReasoningGymVerifier(threshold=None).verify(near, "<answer>ollex</answer>").score < 1


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os')", "open(chr(97))", "eval(1)", "exec(1)", "().__class__", "x.func", "(lambda: 1)()", "print(3*4+5)", "exit(0)", "[c for c in (1)]", "f'{1}'", "9**9**9**9**9**9**9**9**9**9",
        "9" * 400, "1 if 1 else 2", "getattr(x, y)", "3*4+5 # 'x'", "globals()", "1;2", "(x:=3)",
    ],
)  # fmt: skip
def test_code_does_not_reach_a_scorer_that_evaluates(answer):
    assert not harmless(answer)
    task = Task("t", "p", None, info={"dataset": "countdown", "metadata": {"numbers": [3, 4, 5], "target": 17}})
    assert ReasoningGymVerifier().verify(task, f"<answer>{answer}</answer>").score == 0


def test_arithmetic_does():
    for text in ("3*4 + 5", "x**2/2 + sin(x) + C", "[[0, 1], [1, 0]]", "6*x**3*y - 2.5", "exp(-x)*log(x) + C."):
        assert harmless(text), text


@settings(deadline=None)
@given(st.text())
def test_no_text_raises(text):
    task = Task("t", "p", "HH", info={"dataset": "spell_backward", "metadata": {}})
    assert ReasoningGymVerifier().verify(task, f"<answer>{text}</answer>").score in (0.0, 1.0)
    harmless(text)


def test_bad_tasks_are_undecided():
    verifier = ReasoningGymVerifier()
    assert "dataset" in verifier.check_task(Task("t", "p", "x"))
    assert "metadata" in verifier.check_task(Task("t", "p", "x", info={"dataset": "sudoku", "metadata": 1}))
    assert "text" in verifier.check_task(Task("t", "p", 5, info={"dataset": "sudoku"}))
    assert verifier.verify(Task("t", "p", "x", info={"dataset": "no_such"}), "x").score is None
    wrong_gold = Task("t", "p", "1 + 2", info=entry("countdown").info)
    assert "scores its own answer" in verifier.verify(wrong_gold, "1 + 2").reason


@pytest.mark.gate
def test_a_scorer_that_hangs_costs_the_answer_and_not_the_pool(pool):
    verifier = ReasoningGymVerifier(time_limit=4.0)
    task = Task("t", "p", None, info={"dataset": "puzzle24", "metadata": {"numbers": [9, 9, 9, 9]}})
    good = Task("t", "p", "olleh", info={"dataset": "spell_backward", "metadata": {"word": "hello"}})
    start = time.perf_counter()
    slow, fine, long = pool.verify_many(
        verifier, [(task, "<answer>9**9**9**9</answer>"), (good, "<answer>olleh</answer>"), (good, "x" * 10**6)]
    )
    assert slow.score == 0 and fine.score == 1 and long.score == 0
    assert time.perf_counter() - start < 90


def test_the_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("gym"))):
        registry.build("verifier", "reasoning_gym")
