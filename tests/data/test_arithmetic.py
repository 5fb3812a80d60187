"""The generated additions: right, different, and never on both sides of the split."""

import re

import pytest

from rlvr.data import load_tasks
from rlvr.errors import ConfigError
from rlvr.verifiers import MathVerifier, judged


def tasks(**options):
    return load_tasks({"name": "arithmetic", **options})


def question(task):
    return task.prompt[0]["content"]


def test_training_never_sees_an_evaluation_question():
    train, held_out = tasks(count=20000, digits=[3]), tasks(count=2000, split="eval", digits=[3])
    assert len({question(t) for t in train}) == 20000
    assert not {question(t) for t in train} & {question(t) for t in held_out}
    assert not {t.id for t in train} & {t.id for t in held_out}


@pytest.mark.gate
def test_no_digit_pair_is_held_out():
    """The split is by a hash of the question: every column of the addition table occurs on both sides."""

    def pairs(of):
        numbers = [re.match(r"(\d+)\+(\d+)=\?", question(t)).groups() for t in of]
        return {pair for a, b in numbers for pair in zip(a[1:], b[1:], strict=True)}

    assert pairs(tasks(count=5000, digits=[3])) == pairs(tasks(count=5000, split="eval", digits=[3]))
    assert len(pairs(tasks(count=5000, digits=[3]))) == 100


def test_the_worked_answer_is_right():
    for task in tasks(count=500):
        a, b = map(int, re.match(r"(\d+)\+(\d+)=\?", question(task)).groups())
        assert task.answer == str(a + b)
        columns, _, final = task.demonstration.partition(" #### ")
        assert final == task.answer
        carry = 0
        for column in columns.split(","):
            x, y, c, total = map(int, re.match(r"(\d)\+(\d)\+(\d)=(\d\d)", column).groups())
            assert (c, total) == (carry, x + y + c)
            carry = total // 10
        assert len(columns.split(",")) == len(str(a)) == len(str(b))


def test_the_math_verifier_takes_the_worked_answer():
    import asyncio

    for task in tasks(count=20):
        assert asyncio.run(judged(MathVerifier(), task, task.demonstration)).score == 1.0
        assert asyncio.run(judged(MathVerifier(), task, task.demonstration + "1")).score == 0.0


def test_a_smaller_count_is_the_start_of_a_larger_one():
    assert tasks(count=10) == tasks(count=50)[:10]
    assert tasks(count=10) != tasks(count=10, seed=1)


def test_too_many_are_refused():
    with pytest.raises(ConfigError, match="at most"):
        tasks(count=8000, digits=[2])
