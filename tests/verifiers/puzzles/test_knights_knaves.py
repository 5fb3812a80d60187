import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.puzzles.knights_knaves import KnightsAndKnavesVerifier

ROLES = {"Zoey": "knight", "Jack": "knave", "Mary Ann": "knight"}


def judge(answer, assignment=ROLES, **options):
    task = Task("t", "Zoey says: Jack is a knave.", info={"assignment": assignment})
    return KnightsAndKnavesVerifier(**options).quick(task, f"<think>hm</think><answer>{answer}</answer>")


@pytest.mark.parametrize(
    "answer",
    [
        "Zoey is a knight, Jack is a knave, Mary Ann is a "
        "knight", "(1) Zoey is a knight\n(2) Jack is a knave\n(3) Mary Ann is a "
                  "knight.", "zoey: KNIGHT; jack: knave; mary ann: knight",
        "Zoey and Mary Ann are knights, while Jack is a "
        "knave.", "**Zoey** is a knight, and \\text{Jack} is a knave, and Mary Ann is the "
                  "knight", "Jack = knave, Zoey = knight, Mary Ann = knight",
        "- Zoey -> knight\n- Jack -> knave\n- Mary  Ann -> "
        "knight", "Zoey is a knight, Zoey is a knight, Jack is a knave, Mary Ann is a knight",
    ],
)  # fmt: skip
def test_right_answers(answer):
    verdict = judge(answer)
    assert (verdict.status, verdict.score) == (VerdictStatus.CORRECT, 1.0), verdict


@pytest.mark.parametrize(
    "answer",
    [
        "", "banana", "Zoey is a knight", "Zoey is a knave, Jack is a knave, Mary Ann is a "
                                          "knight", "Zoey is a knight, Zoey is a knave, Jack is a knave, Mary Ann is "
                                                    "a knight",
        "Zoey is a knight or a knave, Jack is a knave, Mary Ann is a "
        "knight", "Zoey is not a knave, Jack is a knave, Mary Ann is a "
                  "knight", "Zoey, Jack and Mary Ann are knights and knaves",
        "Zoey is a knight, Jack is a knave, Mary is a "
        "knight", "Zoey is a knight, Jack is a knave, Mary "
                  "Ann", "knight knave knight", "Zoey is a knight, Jack is a knave, Mary Ann is a knight, Bob is a "
                                                "knave",
        "Zoey is a knightly, Jack is a knave, Mary Ann is a "
        "knight", "Zoey is a knight, Jack is a knave, Mary Ann is a knight if Zoey "
                  "is", "Zoey is a knight knave, Jack is a knave, Mary Ann is a knight",
    ],
)  # fmt: skip
def test_wrong_and_hedged_answers(answer):
    assert judge(answer).score == 0.0


def test_partial_credit_and_several_solutions():
    half = "Zoey is a knave, Jack is a knave, Mary Ann is a knight"
    assert judge(half, partial_credit=True).score == pytest.approx(2 / 3)
    assert judge("Jack is a knave", partial_credit=True).score == 0
    both = [{"A": "knight", "B": "knave"}, {"A": "knave", "B": "knight"}]
    assert (
        judge("A is a knave and B is a knight", both).score == judge("A is a knight and B is a knave", both).score == 1
    )
    assert judge("A and B are knights", both).score == 0
    spies = Task("t", "p", info={"assignment": {"A": "spy", "B": "knight"}, "roles": ["knight", "knave", "spy"]})
    assert KnightsAndKnavesVerifier().quick(spies, "<answer>A is a spy, B is a knight</answer>").score == 1
    assert KnightsAndKnavesVerifier().same_answer("A: **knight**", "a: Knight")


@pytest.mark.parametrize(
    "assignment",
    [
        None,
        {},
        [],
        "x",
        [{}],
        [{"A": "knight"}, {"B": "knight"}],
        {"knight": "knave"},
        [{"A": "knight"}, 3],
        {"a": "knight", "A": "knave"},
    ],
)
def test_bad_tasks_are_found(assignment):
    task = Task("t", "p", info={"assignment": assignment})
    assert KnightsAndKnavesVerifier().check_task(task)
    assert KnightsAndKnavesVerifier().quick(task, "A is a knight").score is None


@settings(deadline=None)
@given(st.permutations(list(ROLES.items())), st.lists(st.booleans(), min_size=3, max_size=3))
def test_the_order_of_the_names_does_not_matter_and_every_role_does(order, flipped):
    other = {"knight": "knave", "knave": "knight"}
    output = [f"{name} is a {other[role] if flip else role}" for (name, role), flip in zip(order, flipped, strict=True)]
    assert judge(", ".join(output)).score == (not any(flipped))
    assert judge("\n".join(output), partial_credit=True).score == pytest.approx(1 - sum(flipped) / 3)


@settings(deadline=None)
@given(
    st.text()
    | st.lists(st.sampled_from(["Zoey", "Jack", "Mary Ann", "knight", "knaves", "is a", ",", "and", "not", "."])).map(
        " ".join
    )
)
def test_no_text_raises(text):
    assert judge(text).score in (0.0, 1.0)


@pytest.mark.parametrize("text", ["Zoey is a knight, " * 60_000, "(" * 10**6, "Zoey " * 390, "." * 1900, " " * 10**6])
def test_long_answers_are_refused_at_once(text):
    start = time.process_time()
    assert judge(text).score == 0
    assert time.process_time() - start < 1
