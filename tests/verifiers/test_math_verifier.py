import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr import registry
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers import MathVerifier
from rlvr.verifiers.math.latex import clean
from rlvr.verifiers.math.numeric import read_number

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def task(gold):
    return Task("t", "What is it?", gold)


def quick(gold, answer, **options):
    return MathVerifier(**options).quick(task(gold), f"So it is \\boxed{{{answer}}}.")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "42"), ("42", "42.0"), ("42", "042"), ("42", "+42"), ("42", "42."), (42, "42"), (0.5, "1/2"),
        ("-3", "\N{MINUS SIGN}3"), ("-3", "- 3"), ("42", "\uff14\uff12"), ("42", "٤٢"),
        ("1000", "1,000"), ("1000", "1{,}000"), ("1000", "1\\,000"), ("4200", "4 200"), ("32349", "32,\\! 349"),
        ("1/2", "\\frac{1}{2}"), ("\\frac12", "0.5"), ("1/2", "\\dfrac12"), ("1/2", "\\tfrac{2}{4}"), ("-1/2", "\\frac{-1}{2}"),
        ("-1/2", "-\\frac{1}{2}"), ("1.5", "1 1/2"), ("3/2", "1\\frac{1}{2}"), ("4.5", "4½"), ("1/3", "0.\\overline{3}"),
        ("28%", "28"), ("28", "28\\%"), ("0.28", "28\\%"), ("28\\%", "28 percent"), ("28\\%", "0.28"),
        ("5", "\\$5"), ("5", "$5.00"), ("-5", "-\\$5"), ("5", "5 dollars"), ("5", "€5"),
        ("90", "90^\\circ"), ("90", "90^{\\circ}"), ("90", "90°"), ("90^\\circ", "90"), ("90", "90\\text{ degrees}"),
        ("12", "12\\text{ months}"), ("12", "12 months"), ("12", "12\\,\\mathrm{cm}^2"), ("12", "12 cm"), ("60", "60 miles per hour"),
        ("12", "\\text{12}"), ("12", "{12}"), ("12", "\\boxed{12}"), ("12", "\\mathbf{12}"), ("12", "(12)"),
        ("10", "x=10"), ("10", "f(3) = 10"), ("x = 10", "10"), ("10", "a_{1} = 10"),
        ("1e-30", "10^{-30}"), ("3e8", "3 \\times 10^{8}"), ("1.5e3", "1.5 \\cdot 10^3"), ("1500", "1.5e3"),
        ("5", "5 million"), ("5000000", "5 million"),
        ("... so 72.\n#### 72", "72"), ("the sum is \\boxed{72}", "72"),
        ("Even", "\\text{even}"), ("(A)", "(A)"), ("\\sqrt{2}", "\\sqrt{ 2 }"), ("(1,2)", "\\left(1,\\ 2\\right)"),
    ],
)  # fmt: skip
def test_equal_answers_are_correct_without_a_process(gold, answer):
    verdict = quick(gold, answer)
    assert verdict is not None
    assert (verdict.status, verdict.score) == (VerdictStatus.CORRECT, 1.0), verdict
    assert verdict.answer == answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "41"), ("42", "-42"), ("42", "4.2"), ("42", "4 2"), ("42", "4,2"), ("42", "4²"), ("16", "4²"), ("1.5", "11/2"),
        ("11/2", "1 1/2"), ("1e-30", "1e-31"), ("28", "0.28"), ("28\\%", "0.28\\%"), ("1/3", "0.333333"), ("1/2", "1/0"),
        ("42", "41 = 42"), ("42", "42 = 42"), ("42", "x = 41 = 42"), ("42", "6 \\cdot 7"), ("42", "40 + 2"), ("42", "84/2"),
        ("42", "42 (or maybe 41)"), ("42", "42 or 41"), ("42", "42, 41"), ("42", "42 \\text{ or } 41"), ("42", "41 \\boxed{42}"),
        ("42", "\\text{42 or 41}"), ("42", "42; 41"), ("42", "\\{41, 42\\}"), ("42", "\\pm 42"), ("42", "42 minus one"),
        ("2", "2 \\pi"), ("2", "2 pi"), ("2", "2\\mathrm{i}"), ("42", "42/"), ("42", "42 -"), ("2", "2x"), ("2", "2 \\sqrt{3}"), ("3", "3 fifths"), ("42", "banana"), ("42", "not 42"),
        ("42", "9^9^9"), ("42", "9^{9^{9^9}}"), ("42", "1e999999999"), ("42", "10^{999999999}"), ("42", "9" * 1900),
        ("42", "2^{5.3923}"), ("42", "\\int_0^{42} dx"), ("42", "__import__('os').getpid()"), ("Even", "Odd"),
        ("\\sqrt{2}", "\\sqrt{2} or maybe 1"),
    ],
)  # fmt: skip
def test_tricks_and_other_answers_are_wrong_without_a_process(gold, answer):
    verdict = quick(gold, answer)
    assert verdict is not None
    assert (verdict.status, verdict.score) == (VerdictStatus.WRONG, 0.0), verdict


@pytest.mark.parametrize("answer", ["1" * 3000, "", "\\frac{1}{", "}{", "."])
def test_what_cannot_be_read_is_unparsable(answer):
    verdict = MathVerifier(methods=("tag",)).quick(task("42"), f"<answer>{answer}</answer>")
    assert verdict is not None
    assert (verdict.status, verdict.score) == (VerdictStatus.UNPARSABLE, 0.0)


@pytest.mark.parametrize(
    "gold", [None, "", " ", True, [1], "\\frac{1}{", "{", {"a": 1}, pytest.param(10**5000, id="huge")]
)
def test_a_bad_gold_is_undecided_and_said_before_training(gold):
    verdict = quick(gold, "42")
    reason = MathVerifier().check_task(task(gold))
    assert verdict is not None
    assert verdict.score is None
    assert "bad gold" in verdict.reason
    assert reason


def test_options():
    assert quick("1/3", "0.3333", tolerance=1e-3).score == 1
    assert quick("1/3", "0.33", tolerance=1e-3).score == 0
    assert quick("42", "84/2", require_simplified=False).score == 1
    assert quick("42", "6 \\cdot 7", require_simplified=False) is None
    built = registry.build("verifier", {"name": "math", "fallback": "last_number", "methods": ["tag"], "time_limit": 3})
    assert built == MathVerifier(methods=("tag",), fallback="last_number", time_limit=3.0)
    assert registry.build("verifier", "exact").verify(task("Yes"), "<think>hm</think> Yes\n").score == 1
    assert registry.build("verifier", "exact").verify(task("Yes"), "yes").score == 0
    assert registry.build("verifier", {"name": "exact", "casefold": True}).verify(task("Yes"), "yes").score == 1


def test_votes_compare_numbers_and_texts():
    same = MathVerifier().same_answer
    assert same("0.5", "\\frac{1}{2}")
    assert same("x+1", "x + 1")
    assert not same("11/2", "1 1/2")


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        ("x+1", "1 + x", 1), ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}", 1), ("2^{10}", "1024", 1), ("(1,2)", "(2,1)", 0),
        ("\\{1,2\\}", "\\{2, 1\\}", 1), ("x+1", "x+2", 0), ("[0, 1)", "[0,1]", 0), ("\\sqrt{2}", "\\foo{", 0),
        ("\\sqrt{2}", "1 = \\sqrt{2}", 0), ("\\sqrt{2}", "x = 1 = \\sqrt{2}", 0), ("\\sqrt{2}", "\\sqrt{2}, 1", 0),
        ("\\sqrt{2}", "\\sin\\theta = \\frac{2}{\\sqrt{2}} = \\sqrt{2}", 1), ("x+1", "f(x) = 1 + x", 1), ("y = 2x", "2x", 1), ("x+1", "@@@", 0),
    ],
)  # fmt: skip
def test_symbolic_answers_go_to_a_worker(pool, gold, answer, score):
    completion = f"<answer>{answer}</answer>"
    assert pool.verify_many(MathVerifier(methods=("tag",)), [(task(gold), completion)])[0].score == score


def test_a_monstrous_symbolic_answer_costs_its_time_limit_and_scores_0(pool):
    verifier = MathVerifier(time_limit=3.0)
    verdicts = pool.verify_many(
        verifier, [(task("\\sqrt{2}"), "\\boxed{9^{9^{9^{9}}} + \\sqrt{2}}"), (task("x+1"), "\\boxed{1+x}")]
    )
    assert verdicts[0].score == 0
    assert verdicts[1].score == 1


def test_symbolic_golds_are_checked():
    assert MathVerifier().check_task(task("\\frac{x}{2}")) is None
    assert MathVerifier().check_task(task("hyperbola")) is None
    assert "cannot be read" in MathVerifier().check_task(task("\\frac"))


def test_every_gsm8k_gold_equals_itself():
    files = sorted(GSM8K.glob("*.jsonl"))
    if not files:
        pytest.skip(f"GSM8K is not at {GSM8K}")
    verifier = MathVerifier()
    for file in files:
        for line in file.read_text().splitlines():
            solution = json.loads(line)["answer"]
            number = solution.rpartition("####")[2].strip()
            assert read_number(clean(number)) is not None, number
            for gold in (number, solution):
                assert verifier.check_task(task(gold)) is None
                assert verifier.quick(task(gold), f"#### {number}").score == 1
                assert verifier.quick(task(gold), f"\\boxed{{{number}1}}").score == 0


@given(st.fractions(), st.fractions())
def test_numbers_compare_like_fractions(a, b):
    def latex(x):
        return f"\\frac{{{x.numerator}}}{{{x.denominator}}}"

    assert read_number(clean(latex(a))).value == a
    assert quick(str(a), latex(b), require_simplified=False).score == (a == b)
    assert read_number(f"{float(Fraction(a.numerator % 10**6, 8))}").value == Fraction(a.numerator % 10**6, 8)


PIECES = [
    "\\frac",
    "{",
    "}",
    "\\boxed{",
    "^",
    "9",
    "1e9",
    ",",
    " ",
    "\\",
    "$",
    "½",
    "²",
    "\\text{",
    "x",
    "=",
    "(",
    "\x00",
    "\ud800",
]


@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join),
    st.sampled_from(["42", "x+1", "\\frac{1}{2}"]),
)
def test_no_text_raises_in_the_quick_stages(text, gold):
    verifier = MathVerifier(fallback="whole")
    verdict = verifier.quick(task(gold), text)
    assert verdict is None or verdict.score in (0, 1)
    as_gold = verifier.quick(task(text), "\\boxed{42}")
    assert as_gold is None or as_gold.score in (None, 0, 1)
    assert verifier.same_answer(text, text)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10**6,
        "{" * 10**6,
        "\\boxed{" * 10**5,
        "\\boxed{" + "{" * 10**6,
        "1,000" * 10**5,
        "\\text{" * 10**5,
        " " * 10**6,
    ],
)
def test_a_megabyte_costs_little(text):
    start = time.perf_counter()
    for completion in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        verdict = MathVerifier(fallback="whole", max_length=10**7).quick(task("42"), completion)
        assert verdict is not None
        assert verdict.score == 0
    assert time.perf_counter() - start < 30


def test_random_text_never_breaks_the_symbolic_stage(pool):
    texts = [
        "\\frac{",
        "\x00\x01",
        "a" * 1500,
        "(" * 500,
        "\\begin{matrix}",
        "\ud800",
        "x^" * 300 + "x",
        "\\sqrt" * 200,
        "@",
        "1/0",
    ]
    verifier = MathVerifier(fallback="whole", time_limit=5.0)
    for verdict in pool.verify_many(verifier, [(task("x+1"), text) for text in texts]):
        assert verdict.score == 0, verdict


def test_the_room_imports_no_heavy_library():
    code = "import sys, rlvr.verifiers; print([m for m in ('torch', 'sympy', 'math_verify', 'transformers') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_verdicts_survive_json():
    verdict = quick("42", "41")
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict
