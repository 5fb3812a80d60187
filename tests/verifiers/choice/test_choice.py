import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.choice import ChoiceVerifier

CITIES = ["London", "Paris", "New York", "York"]
NUMBERS = ["3", "-3", "3.5", "1/3"]


def task(gold, options=CITIES, **info):
    return Task("t", "Which? A) London B) Paris C) New York D) York", gold, info={"options": options, **info})


def judge(completion, gold="B", options=CITIES, verifier=None, **info):
    return (verifier or ChoiceVerifier()).quick(task(gold, options, **info), completion)


@pytest.mark.parametrize(
    "answer",
    [
        "B", "b", "(B)", "[B]", "B.", "B)", "(b).", r"\text{B}", r"\text{(B)}", r"\textbf{(B) }", r"\mathrm{B}", r"\boxed{B}", r"$\boxed{\text{(B)}}$",
        "B) Paris", "B. Paris", "(B) Paris", "B: Paris", "B - Paris", "(B): Paris.", "Paris (B)", "Paris", "paris.", "\"Paris\"", "**Paris**", "**B**",
        "\uff22", "\uff08\uff22\uff09", "\u24b7", "\u249d", "Option B", "option (B)", "The answer is B", "The correct answer is (B).", "The correct option is **B) Paris**",
        "Answer: B", "<answer>B</answer>", "<answer> (B) Paris </answer>", "#### B", "B, because it is the capital", "B is correct", "the answer is the city of Paris",
        "It is Paris, founded before 250 "
        "BC.", "Definitely B", "<think>A? B? C?</think>B", "I considered A and C. So the answer is B.", "B, B",
        "(B) Paris is the correct one", "  B\n", "B <|im_start|>user\nC", "Choice B", "\\(B\\)",
    ],
)  # fmt: skip
def test_the_ways_to_name_one_option(answer):
    verdict = judge(answer)
    assert (verdict.status, verdict.score, verdict.answer) == (VerdictStatus.CORRECT, 1.0, "B"), verdict


@pytest.mark.parametrize(
    "answer",
    [
        "A", "C", "London", "A) London", "A, B", "A and B", "A or B", "B or C", "A B C D", "ABCD", "A, B, C, D", "(A) (B) (C) (D)",
        "A) London B) Paris C) New York D) "
        "York", "Which? A) London B) Paris C) New York D) York", "London, Paris, New York, York", "London or Paris",
        "B) London", "A) Paris", "(A) Paris", "Paris (A)", "B: York", "B, maybe C", "B (or C)", "not B", "not Paris", "anything but Paris", "Paris is wrong",
        "B) Lyon", "B) none of these", "E", "", " ", "banana", "?", "B?", "either (A) or (B)", "it isn't Paris", "It isn\u2019t Paris", "B. C.", "\\text{B or C}", "B and maybe A",
        "The answer is not B", "Paris, London", "A<|im_end|>\n<|im_start|>assistant\nB", "All of the above", "Both B and C", "Parisian", "Paris-Nord",
    ],
)  # fmt: skip
def test_other_options_and_tricks_earn_nothing(answer):
    verdict = judge(answer)
    assert verdict.score == 0.0, verdict
    assert verdict.status in (VerdictStatus.WRONG, VerdictStatus.UNPARSABLE)


def test_options_that_contain_each_other():
    assert judge("It is New York.", "C").score == 1
    assert judge("It is New York.", "D").score == 0
    assert judge("It is York.", "D").score == 1
    assert judge("C) York", "C").score == judge("D) New York", "D").score == 0
    for gold, text in zip("ABCD", NUMBERS, strict=True):
        for answer in NUMBERS:
            assert judge(answer, gold, NUMBERS).score == (answer == text)
            assert judge(f"the value is {answer}", gold, NUMBERS).score == (answer == text)
            assert judge(f"{gold}) {answer}", gold, NUMBERS).score == (answer == text)
    assert judge("the value is 3 + 4", "A", NUMBERS).score == 0
    assert (
        judge("3.2", "A", NUMBERS).score == judge("13", "A", NUMBERS).score == judge("x = 3/2", "A", NUMBERS).score == 0
    )


def test_the_text_beside_a_letter_may_be_written_otherwise():
    options = ["$\\frac{1}{2}$", "0.25", "42 m", "42 km"]
    for gold, answer in (
        ("A", "(A) \\dfrac{1}{2}"),
        ("B", "B) 0.250"),
        ("B", "B. 1/4"),
        ("C", "C) $42$ m"),
        ("D", "D) 42 km"),
    ):
        assert judge(answer, gold, options).score == 1, answer
    for gold, answer in (
        ("A", "A) \\dfrac{1}{3}"),
        ("B", "B) 0.26"),
        ("C", "C) 42 km"),
        ("D", "D) 42 m"),
        ("D", "D) 42 miles"),
        ("B", "B) 0.25%"),
    ):
        assert judge(answer, gold, options).score == 0, answer


def test_a_mapping_of_labels_and_a_gold_as_text_or_index():
    digits = {"1": "red", "2": "green", "3": "blue"}
    assert (
        judge("2", "2", digits).score
        == judge("green", "2", digits).score
        == judge("(2) green", "green", digits).score
        == 1
    )
    assert judge("2", 1, digits).score == 1
    assert (
        judge("B", 1).score
        == judge("B", "Paris").score
        == judge("B", "(B)").score
        == judge("B", "\\boxed{B}").score
        == 1
    )
    assert judge("B", 0).score == 0


@settings(deadline=None)
@given(st.permutations(range(4)), st.sampled_from(range(4)), st.booleans())
def test_the_order_of_the_prompt_moves_the_letters_and_not_the_texts(order, gold, by_label):
    place = order.index(gold)
    shown = ["ABCD"[i] for i in order] if by_label else order
    for label_at in range(4):
        verdict = judge("ABCD"[label_at], gold, order=shown)
        assert verdict.score == (label_at == place)
        assert verdict.answer == "ABCD"[order[label_at]]
        assert judge(f"{'ABCD'[label_at]}) {CITIES[order[label_at]]}", gold, order=shown).score == (label_at == place)
    for index, city in enumerate(CITIES):
        assert judge(city, gold, order=shown).score == (index == gold)


def test_several_right_options():
    for gold in (["A", "C"], "A, C", "AC", [0, 2], ["London", "New York"], "A and C"):
        for answer in (
            "A, C",
            "C, A",
            "AC",
            "A and C",
            "(A), (C)",
            "A) London, C) New York",
            "London and New York",
            "A; C",
            "\\boxed{\\text{A, C}}",
        ):
            assert judge(answer, gold).score == 1, (gold, answer)
        for answer in ("A", "C", "A, B", "A, B, C", "ABCD", "A or C", "B"):
            assert judge(answer, gold).score == 0, (gold, answer)
    partly = ChoiceVerifier(partial_credit=True)
    assert judge("A", "AC", verifier=partly).score == 0.5
    assert judge("A", "AC", verifier=partly).status == VerdictStatus.PARTIAL
    assert judge("AB", "AC", verifier=partly).score == judge("ABCD", "AC", verifier=partly).score == 0
    assert judge("A, C", "AC", verifier=partly).score == 1
    assert judge("ABCD", "ABCD").score == 1


@pytest.mark.parametrize(
    ("gold", "options", "said"),
    [
        ("E", CITIES, "E"), ("Lyon", CITIES, "Lyon"), (4, CITIES, "index"), (-1, CITIES, "index"), (True, CITIES, "True"), (None, CITIES, "None"), ("", CITIES, "label"),
        (1.0, CITIES, "1.0"), ([], CITIES, "empty"), (["A", "E"], CITIES, "E"), ("A or B", CITIES, "A or B"), ("B) London", CITIES, "disagree"), ("A", ["x"], "at least 2"),
        ("A", ["x", "x"], "same text"), ("A", ["x", "X."], "same text"), ("A", ["x", ""], "has none"), ("A", ["B", "A"], "label of another"), ("A", "xy", "str"),
        ("A", None, "letters"), ("A", {"a": "x", "A": "y"}, "distinct"), ("A", {"1": "2", "2": "1"}, "label of another"), ("A", [f"o{i}" for i in range(27)], "26"),
    ],
)  # fmt: skip
def test_a_gold_or_options_that_cannot_be_used_are_found_before_training(gold, options, said):
    problem = ChoiceVerifier().check_task(task(gold, options))
    assert problem and said in problem
    verdict = judge("A", gold, options)
    assert verdict.score is None and "bad gold" in verdict.reason


@pytest.mark.parametrize(
    "order", [[0, 1, 2], [0, 0, 1, 2], "ABCD", 5, ["A", "B", "C", "E"], [True, 0, 2, 3], [1, 2, 3, 4]]
)
def test_an_order_that_is_no_permutation_is_refused(order):
    problem = ChoiceVerifier().check_task(task("B", order=order))
    assert problem is None if order == "ABCD" else "permutation" in problem


def test_letters_without_texts():
    verifier = registry.build("verifier", {"name": "choice", "letters": "ABCD", "fallback": "none"})
    bare = Task("t", "p", "B")
    assert verifier.check_task(bare) is None
    assert verifier.quick(bare, "The answer is (B) something.").score == 1
    assert verifier.quick(bare, "\\boxed{B}").score == 1
    assert verifier.quick(bare, "B").status == VerdictStatus.UNPARSABLE
    assert verifier.quick(bare, "\\boxed{B or C}").score == verifier.quick(bare, "\\boxed{BC}").score == 0
    with pytest.raises(ConfigError, match="letters"):
        ChoiceVerifier(letters="AA")


def test_votes():
    assert ChoiceVerifier().same_answer("B", " b.")
    assert not ChoiceVerifier().same_answer("B", "C")


def test_two_boxes_count_the_last():
    assert judge("\\boxed{B} \\boxed{C}").score == 0
    assert judge("\\boxed{C} \\boxed{B}").score == 1


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("ABCD()[]{}.,:; \\$orand?-London Paris York", max_size=60))
def test_any_text_gets_a_verdict_and_spaces_around_it_do_not_matter(text):
    verdict = judge(text)
    assert verdict.score in (0.0, 1.0)
    assert judge(f" \n{text}\n ").score == verdict.score


@settings(max_examples=200, deadline=None)
@given(st.text("ABCD()., orand-LondonParisYork", max_size=40))
def test_no_answer_is_right_for_two_golds(text):
    assert sum(judge(text, gold).score for gold in "ABCD") <= 1


@pytest.mark.parametrize(
    "text",
    ["B " * 500_000, "(" * 1_000_000, "\\text{" * 170_000, "<answer>" + "B" * 10**6 + "</answer>", " " * 10**6 + "C"],
)
def test_a_megabyte_is_refused_at_once(text):
    start = time.process_time()
    assert judge(text).score == 0
    assert judge("the answer is " + "A" * 1900).score == 0
    assert time.process_time() - start < 2


def test_inherited_options_are_checked_and_converted():
    built = registry.build("verifier", {"name": "choice", "methods": ["tag"], "max_length": "50"})
    assert (built.methods, built.max_length) == (("tag",), 50)
    for bad in ({"methods": ["tags"]}, {"fallback": "first"}, {"max_length": "many"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            registry.build("verifier", {"name": "choice", **bad})


PRIMES = ["4", "7", "9", "10"]
LANDS = ["Sweden", "Norway", "Denmark"]


@pytest.mark.parametrize(
    ("gold", "answer", "options", "score"),
    [
        ("B", "B, because A is not prime.", PRIMES, 1),
        ("B", "B, not A", PRIMES, 1),
        ("B", "B not A", PRIMES, 1),
        ("B", "It is not A; it is B.", PRIMES, 1),
        ("A", "B, not A", PRIMES, 0),
        ("A", "It is not A; it is B.", PRIMES, 0),
        ("C", "B. No wait, C.", PRIMES, 1),
        ("B", "B. No wait, C.", PRIMES, 0),
        ("C", "The answer is B. No wait, C.", PRIMES, 1),
        ("B", "The answer is B. No wait, C.", PRIMES, 0),
        ("C", "The answer is B. Wait, no, it is C.", PRIMES, 1),
        ("B", "not B", PRIMES, 0),
        ("B", "B is wrong", PRIMES, 0),
        ("B", "B is not the answer", PRIMES, 0),
        ("B", "A is wrong, so B", PRIMES, 1),
        ("B", "The answer is B since A, C and D are not prime", PRIMES, 1),
        ("B", "B or C", PRIMES, 0),
        ("B", "B. Maybe.", PRIMES, 0),
        ("B", "B?", PRIMES, 0),
        ("B", "Norway, not Sweden", LANDS, 1),
        ("B", "Not Sweden but Norway", LANDS, 1),
        ("A", "Not Sweden but Norway", LANDS, 0),
        ("B", "Norway rather than Sweden", LANDS, 1),
        ("A", "Norway rather than Sweden", LANDS, 0),
        ("B", "Sweden is incorrect. The answer is Norway.", LANDS, 1),
        ("B", "neither A nor C; B", LANDS, 1),
        ("B", "neither A nor B", LANDS, 0),
        ("B", "B, B is not right", LANDS, 0),
        ("B", "B. That is wrong.", LANDS, 0),
        ("B", "A. Actually, B.", LANDS, 1),
        ("B", "everything but B", LANDS, 0),
        ("B", "all except B", LANDS, 0),
        ("B", "(B) because (A) is false", LANDS, 1),
        ("A", "(B) because (A) is false", LANDS, 0),
        ("B", "I don't think it's A. B.", LANDS, 1),
        ("B", "I don't think it's B.", LANDS, 0),
        ("B", "B, no doubt", LANDS, 1),
        ("B", "B. Sorry, I do not know.", LANDS, 0),
    ],
)
def test_a_negation_denies_the_options_of_its_clause_and_what_is_taken_back_was_not_said(gold, answer, options, score):
    verdict = judge(answer, gold, options)
    assert verdict.score == score, verdict


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("B. No wait, C.", "C"),
        ("The answer is not B", ""),
        ("A or B", ""),
        ("Either A or B", ""),
        ("Either A...", ""),
        ("Either way, B", "B"),
        ("It can't be A, so B", "B"),
        ("It cannot be A, therefore B", "B"),
        ("A is wrong, B is right", "B"),
        ("B is false; therefore A", "A"),
        ("B is false, so the answer is C", "C"),
        ("B isn't right; A is", "A"),
        ("(B) is false; therefore (A)", "A"),
        ("not A but B", "B"),
        ("not B but A", "A"),
        ("It's not A, it's B.", "B"),
        ("I doubt B", ""),
        ("I doubt A, so B", "B"),
        ("I doubt that it is B", ""),
        ("There is no doubt that it is B", "B"),
        ("I am not sure, but B", "B"),
        ("I'm not certain, but I think B", "B"),
        ("I am not sure. B?", ""),
        ("I am not sure about B", ""),
        ("B, but I am not sure", ""),
        ("Maybe. B", ""),
        ("definitely B", "B"),
        ("It must be B", "B"),
        ("It could be B", ""),
        ("It might be B", ""),
        ("not only A", ""),
        ("not only A but also B", "A, B"),
        ("not just A but B", "A, B"),
        ("Not A, B or C", ""),
        ("It is not A, C or D; it is B", "B"),
        ("A, C, and D are wrong; B", "B"),
        ("A and C are ruled out, so B", "B"),
        ("I reject A; B", "B"),
        ("I would eliminate B", ""),
        ("Unlike A, B is prime", "B"),
        ("At first I thought A, but it is B", "B"),
        ("B rather than A", "B"),
        ("A instead of B", "A"),
        ("B fails because it is even, so C", "C"),
        ("B because no other number works", "B"),
        ("I choose B since no other number works", "B"),
        ("I choose B, or perhaps C", ""),
        ("B is not wrong", ""),
        ("All but B", ""),
        ("A is close but B", "A, B"),
        ("B (not A)", "B"),
        ("I have a plan B.", ""),
        ("Take vitamin B, so C", "C"),
        ("Nothing fits, but B is closest", "B"),
        ("A could be right, but B is", ""),
        ("Option A is incorrect. Option B is correct.", "B"),
        ("A is not the answer and neither is C; B is", "B"),
    ],
)
def test_a_sentence_affirms_denies_or_doubts_its_options(answer, named):
    """Each case with the texts known and with letters alone; no text of an option occurs in an answer."""
    for options, verifier in ((LETTERED, ChoiceVerifier()), (None, ChoiceVerifier(letters="ABCD"))):
        for gold in "ABCD":
            info = {} if options is None else {"options": options}
            verdict = verifier.quick(Task("t", "Which?", gold, info=info), f"\\boxed{{{answer}}}")
            assert verdict.score == float(named == gold), (gold, verdict)
    both = ChoiceVerifier().quick(Task("t", "Which?", ["A", "B"], info={"options": LETTERED}), f"\\boxed{{{answer}}}")
    assert both.score == float(named == "A, B"), both


def test_without_texts_what_stands_behind_a_label_may_be_its_text():
    letters = ChoiceVerifier(letters="ABCD")
    for answer in ("B. It cannot be determined", "B) None of the above", "(B) 3 or 4 days"):
        assert letters.quick(Task("t", "Which?", "B"), answer).score == 1, answer
        assert judge(answer, "B", LETTERED).score == 0, answer
    assert judge("B. That cannot be right.", "B", LETTERED).score == 0


LETTERED = ["eleven", "twelve", "thirteen", "fourteen"]


@given(st.sampled_from("ABCD"), st.sampled_from(["not {}", "I doubt {}", "{} is wrong", "maybe {}", "{} or {}", "{}?"]))
def test_what_denies_or_doubts_the_gold_never_pays_it(gold, form):
    other = "B" if gold == "A" else "A"
    answer = form.format(gold, other)
    assert judge(f"\\boxed{{{answer}}}", gold, LETTERED).score == 0
    assert judge(f"\\boxed{{{answer}, because I say so}}", gold, LETTERED).score == 0


def said_whole(answer, gold="B", prompt="Which?"):
    options = ["London", "Paris", "Rome", "Berlin"]
    return ChoiceVerifier(fallback="whole").verify(Task("t", prompt, gold, info={"options": options}), answer).score


NAMES_B = [
    "B is the right choice because A is too brittle.",
    "While A looks tempting, B is correct.",
    "Although D is close, B is the best answer.",
    "Eliminating A, C, and D leaves B.",
    "答案是B",
    "答案是B。",
    "答案: B",
    "选B",
    "正解はBです",
    "정답은 B입니다",
    "Ответ: B",
    "B is more likely than A.",
    "B is better than A",
    "Though A is tempting, the answer is B",
    "B, since C is too small",
    "Ruling out A and C leaves B",
    "The most plausible option is B.",
    "B is correct, while A is incorrect",
    "Excluding A, C and D, B remains.",
    "Not A, so B.",
    "As A is false, B.",
    "I think the answer is B",
    "Ruling out A, it must be B.",
    "B, hmm, yes",
]
DOES_NOT_NAME_B = [
    "If it is not A, then it is B.",
    "It is false that the answer is B.",
    "The least plausible option is B.",
    "B, hmm, no: C.",
    "Some say B.",
    "B minus",
    "Grade: B",
    "Team B wins",
    "The answer is: B... or maybe C.",
    "The answer is: A is more likely than B.",
    "If B is right, then A is wrong.",
    "The worst option is B.",
    "I used to think B.",
    "Many people think B.",
    "It is untrue that B is right.",
    "It is not the case that the answer is B",
    "Group B",
    "B+",
    "Class B",
    "B is less likely than C",
    "B is worse than C.",
    "Assuming B",
    "Suppose it is B.",
    "B is the least plausible.",
    "The least likely answer is (B).",
    "The second-best answer is (B).",
    "The less plausible answer is B.",
    "The tempting answer is (B).",
    "The incorrect answer is (B).",
    "The answer is C. The least likely answer is B.",
    "B... or C",
    "B, hmm, no, C",
    "Others claim B",
    "答案不是B",
    "B不对",
    "答案是A或B",
    "It is false that the answer is (B).",
]


@pytest.mark.parametrize("answer", NAMES_B)
def test_options_in_passing_and_leads_of_other_scripts_leave_the_answer(answer):
    assert said_whole(answer) == 1
    assert said_whole(answer, "A") == 0


@pytest.mark.parametrize("answer", DOES_NOT_NAME_B)
def test_hypotheses_reports_comparisons_and_grades_name_nothing(answer):
    assert said_whole(answer) == 0


def test_the_least_likely_option_is_right_where_the_prompt_asks_for_it():
    assert said_whole("The least plausible option is B.", prompt="Which is the least plausible?") == 1
    assert said_whole("The least likely answer is (B).", prompt="Which is the least likely?") == 1
    assert said_whole("The incorrect answer is (B).", prompt="Which of these answers is incorrect?") == 1
    assert said_whole("The incorrect answer is (B).", "C", prompt="Which of these answers is incorrect?") == 0
    assert said_whole("The answer is B. The least likely answer is C.") == 1
    assert said_whole("Option A is the wrong choice, so B.") == 1
    assert said_whole("B, hmm, no: C.", "C") == 1
