import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.label import LabelVerifier, RatingVerifier

JUDGE = {"A": ["Response A", "Assistant A"], "B": ["Response B", "Assistant B"], "tie": ["C", "equally good"]}
SUPPORT = ["supported", "not supported", "not enough information"]


def judge(answer, gold="B", labels=JUDGE, **options):
    return LabelVerifier(labels=labels, **options).quick(Task("t", "Say [[A]], [[B]] or [[C]]", gold), answer)


@pytest.mark.parametrize(
    "answer",
    [
        "B", "[[B]]", "[B]", "(B)", "\\boxed{B}", "<answer>B</answer>", "**B**", "B is better", "Response B is better.", "Assistant B wins", "My verdict: [[B]]", "A is fine.\nB is better.",
        "First [[A]] seemed better.\nFinal verdict: "
        "[[B]]", "The better response is B.", "The answer is B", "A long look at "
                                                                 "both.\n\n[[B]]\n", "<think>A</think>B", "response b", "\\text{Response B}",
        "<answer>A</answer> no: <answer>B</answer>", "A tidy reply.\nB", "B\nThank you.",
    ],
)  # fmt: skip
def test_the_last_line_with_a_label_decides(answer):
    verdict = judge(answer)
    assert (verdict.status, verdict.score, verdict.answer) == (VerdictStatus.CORRECT, 1.0, "B"), verdict


@pytest.mark.parametrize(
    "answer",
    [
        "", "banana", "A", "[[A]]", "[[A]] [[B]]", "A, B", "A or B", "[[B]]\n[[A]]", "A is better than B", "B is better than A", "not B", "B?", "B isn't better", "either B", "[[A]], [[B]], [[C]]", "tie",
        "Say [[A]], [[B]] or [[C]]", "equally good", "b", "AB", "B2B", "Maybe B", "<think>B",
    ],
)  # fmt: skip
def test_other_labels_several_labels_and_doubt_earn_nothing(answer):
    assert judge(answer).score == 0.0


def test_labels_that_contain_each_other():
    for gold in SUPPORT:
        for said in SUPPORT:
            assert judge(f"Verdict: {said.title()}.", gold, SUPPORT).score == (said == gold)
    assert judge("It is not really supported", "supported", SUPPORT).score == 0
    yes = registry.build("verifier", {"name": "label", "labels": ["yes", "no"]})
    task = Task("t", "p", "yes")
    assert yes.quick(task, "Yes.").score == yes.quick(task, "No idea at first.\nyes").score == 1
    assert yes.quick(task, "yes and no").score == yes.quick(task, "yesterday").score == yes.quick(task, "no").score == 0


def test_labels_from_the_task_and_votes():
    task = Task("t", "p", "LEFT", info={"labels": ["left", "right"]})
    assert LabelVerifier().check_task(task) is None
    assert LabelVerifier().quick(task, "go left").score == 1
    assert LabelVerifier().same_answer("[B]".strip("[]"), " b ")
    assert judge("A tie", "A").score == 0
    assert judge("I prefer A", "A").score == judge("A is better", "A").score == judge("Assistant A", "A").score == 1
    assert judge("A good reply", "A").score == 0


@pytest.mark.parametrize(
    ("gold", "labels", "said"),
    [
        ("x", ["a", "b"], "none of"),
        (None, ["a", "b"], "none of"),
        ("a", None, "no labels"),
        ("a", ["a"], "at least two"),
        ("a", ["a", ""], "at least two"),
        ("a", {"a": ["x"], "b": ["X y", "x  y"], "c": ["x y"]}, "at least two"),
        pytest.param(10**5000, ["a", "b"], "huge", id="huge"),
        (["a"], ["a", "b"], "none of"),
    ],
)
def test_bad_tasks_are_found(gold, labels, said):
    task = Task("t", "p", gold, info={"labels": labels})
    assert said in LabelVerifier().check_task(task)
    assert LabelVerifier().quick(task, "a").score is None


def test_bad_labels_are_refused_when_built():
    with pytest.raises(ConfigError, match="at least two"):
        LabelVerifier(labels=("a",))
    with pytest.raises(ConfigError, match="quotes"):
        registry.build("verifier", {"name": "label", "labels": [True, False]})


# verbatim

TAGS = {"model_a": ["<answer>[[A]]</answer>"], "model_b": ["<answer>[[B]]</answer>"]}


@pytest.mark.parametrize(
    ("completion", "label"),
    [
        ("<answer>[[A]]</answer>", "model_a"),
        ("so <answer>[[A]]</answer>.", "model_a"),
        ("<think><answer>[[A]]</answer>", "model_a"),
        ("Not B != A or <answer>[[B]]</answer>?", "model_b"),
        ("<answer>[[A]]</answer> <answer>[[B]]</answer>", None),
        ("<answer>[[A]]</answer>\n<answer>[[B]]</answer>", None),
        ("<answer>[[a]]</answer>", None),
        ("<answer>[[A]] </answer>", None),
        ("[[A]]", None),
        ("model_a", None),
        ("", None),
    ],
)
def test_a_verbatim_label_is_the_exact_text_alone(completion, label):
    for gold in TAGS:
        verdict = judge(completion, gold, TAGS, verbatim=True)
        assert verdict.score == float(gold == label), verdict


def test_the_tail_is_counted_in_characters():
    tag = TAGS["model_a"][0]
    assert len(tag) == 22
    for after in range(20):
        score = judge(tag + "x" * after, "model_a", TAGS, verbatim=True, tail=30).score
        assert score == float(after <= 8)
    # What stands before the tail names nothing.
    text = TAGS["model_b"][0] + "x" * 20 + tag
    assert judge(text, "model_a", TAGS, verbatim=True, tail=30).score == 1
    assert judge(text, "model_a", TAGS, verbatim=True).score == 0
    # No bound on the length of a completion that is read as it is.
    assert judge("x" * 5000 + tag, "model_a", TAGS, verbatim=True).score == 1


def test_verbatim_labels_without_spellings_are_their_own():
    assert judge("the verdict is yes", "yes", ["yes", "no"], verbatim=True).score == 1
    assert judge("the verdict is Yes", "yes", ["yes", "no"], verbatim=True).score == 0
    assert judge("I know: yes", "yes", ["yes", "no"], verbatim=True).score == 0


def test_bad_verbatim_options_are_refused():
    with pytest.raises(ConfigError, match="needs `verbatim"):
        LabelVerifier(labels=JUDGE, tail=80)
    with pytest.raises(ConfigError, match="1 or more"):
        LabelVerifier(labels=JUDGE, verbatim=True, tail=0)
    with pytest.raises(ConfigError, match="supported is a part of one of not supported"):
        LabelVerifier(labels=SUPPORT, verbatim=True)
    task = Task("t", "p", "supported", info={"labels": SUPPORT})
    assert "is a part of" in LabelVerifier(verbatim=True).check_task(task)


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["A", "B", "[[A]]", "[[B]]", "tie", "is better", ".", "\n", "\n", "x", "not", "the"]),
        max_size=10,
    ),
    st.sampled_from(["A", "B", "tie"]),
)
def test_an_answer_is_right_for_one_label_at_most_and_padding_does_not_matter(pieces, gold):
    text = " ".join(pieces)
    scores = {label: judge(text, label).score for label in ("A", "B", "tie")}
    assert sum(scores.values()) <= 1
    assert judge(f"Some thoughts.\n\n  {text}  \n\n", gold).score == scores[gold]


# ratings


def rate(answer, gold=7, **options):
    return RatingVerifier(**options).quick(Task("t", "p", gold), answer)


@pytest.mark.parametrize(
    "answer",
    [
        "7",
        "7/10",
        "7 / 10",
        "7 out of 10",
        "[[7]]",
        "Rating: [[7]]",
        "Score: 7",
        "**7**",
        "\\boxed{7}",
        "7.0",
        "<answer>7</answer>",
        "I saw 3 flaws.\nRating: 7",
        "The answer is 7/10.",
        "Rating: 7 points",
    ],
)
def test_ratings_are_read(answer):
    assert rate(answer).score == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "x",
        "8",
        "7 or 8",
        "7, 8",
        "1 2 3 4 5 6 7 8 9 10",
        "70",
        "-7",
        "7/5",
        "7/100",
        "7%",
        "between 7",
        "7-8",
        "not 7",
        "0.7",
        "7\n8",
        "seven",
        "7e400",
        "7/10/10",
        "\u0667 8",
    ],
)
def test_what_is_no_rating_of_7(answer):
    assert rate(answer).score == 0.0


def test_rating_options():
    assert rate("8", tolerance=1).score == 1 and rate("8.1", tolerance=1).score == 0
    assert rate("10", partial_credit=True).score == pytest.approx(1 - 3 / 9)
    assert (
        rate("3", 3, low=1, high=5).score == 1
        and rate("7", 3, low=1, high=5).score == 0
        and rate("3/5", 3, low=1, high=5).score == 1
    )
    for gold in (None, "x", 11, 0, True, "7 or 8", 10**5000, [7], float("nan")):
        assert RatingVerifier().check_task(Task("t", "p", gold)), gold
        assert rate("7", gold).score is None
    for bad in ({"low": 5, "high": 5}, {"tolerance": -1}, {"tolerance": 9}):
        with pytest.raises(ConfigError, match="rating"):
            RatingVerifier(**bad)
    assert (
        RatingVerifier().same_answer("7/10", "7.0")
        and not RatingVerifier().same_answer("7", "8")
        and RatingVerifier().same_answer("x ", "x")
    )


@settings(deadline=None)
@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 8))
def test_ratings_within_the_tolerance_are_right(gold, said, tolerance):
    assert (
        rate(f"Rating: {said}", gold, tolerance=tolerance).score
        == rate(f"{said}/10", str(gold), tolerance=tolerance).score
        == (abs(gold - said) <= tolerance)
    )


@settings(deadline=None)
@given(st.text() | st.text("AB[]()7/10. \nisnot", max_size=40))
def test_no_text_raises(text):
    assert judge(text).score in (0.0, 1.0)
    assert rate(text).score in (0.0, 1.0)


@pytest.mark.parametrize(
    "text", ["B " * 500_000, "[" * 10**6, "\n" * 10**6, "7 " * 500_000, "[[" * 990, "A " * 990, "7" * 1900, "<" * 10**6]
)
def test_long_answers_are_refused_at_once(text):
    start = time.process_time()
    assert judge(text).score == rate(text).score == 0
    assert time.process_time() - start < 2
