"""The public suites of mathematical answers, GSM8K's golds, and the benchmark that compares with math-verify."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rlvr.records import Task
from rlvr.verifiers import MathVerifier
from rlvr.verifiers.math.latex import clean
from rlvr.verifiers.math.math_verifier import read_golds
from rlvr.verifiers.math.numeric import read_number

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
SUITES = SHARED / "suites"
GSM8K = SHARED / "data" / "gsm8k"


def module(name):
    """A script of scripts/benchmarks as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/benchmarks/{name}.py")
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


module("result_file")
suites, benchmark = module("math_suites"), module("math_verifier")


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch):
    """What is judged here is right or wrong, not how fast: a pause of a large test process must not end a
    comparison."""
    monkeypatch.setattr("rlvr.verifiers.math.math_verifier.SYMBOLIC_SECONDS", 10.0)


def cases(name):
    path = SUITES / f"math_{name}.jsonl"
    if not path.exists():
        pytest.skip(f"the suite is not at {path}")
    return list(suites.read_suite(path))


def misjudged(cases, options_of):
    """The false rejections and the false acceptances among `cases`, by id."""
    rejected, accepted = [], []
    for case in cases:
        score = (
            MathVerifier(**{"time_limit": 10.0, **options_of(case)})
            .verify(Task(case.id, "", case.gold), case.completion)
            .score
        )
        if (score == 1) != case.expected:
            (rejected if case.expected else accepted).append(case.id)
    return rejected, accepted


@pytest.mark.parametrize("name", ["mathverify", "nemoskills", "sympy_latex"])
def test_every_case_of_a_suite_is_judged_as_expected_but_those_that_pay_a_trick(name):
    rejected, accepted = misjudged(cases(name), suites.options_of)
    assert set(rejected) == {case.id for case in cases(name) if not case.is_ours}
    assert accepted == []


@pytest.mark.parametrize("name", ["nemoskills", "sympy_latex"])
def test_bare_answers_are_judged_alike_in_a_box_and_as_a_whole_text(name):
    for case in cases(name):
        bare = MathVerifier(methods=(), fallback="whole").verify(Task(case.id, "", case.gold), case.answer)
        assert (bare.score == 1) == case.expected, case


def test_the_listed_cases_exist_and_have_reasons():
    known = {case.id for name in ("mathverify", "nemoskills", "sympy_latex") for case in cases(name)}
    assert set(suites.REFUSED) <= known
    assert all(len(reason) > 20 for reason in suites.REFUSED.values())


@pytest.mark.parametrize("name", ["mathverify", "nemoskills", "sympy_latex"])
def test_every_gold_of_a_suite_is_readable_and_equals_itself(name):
    for case in cases(name):
        bare = case.mode == "pair"
        verifier = MathVerifier(methods=() if bare else MathVerifier.methods, fallback="whole", max_length=20_000)
        task = Task(case.id, "", case.gold)
        assert verifier.check_task(task) is None, case
        whole = case.gold if bare else f"\\boxed{{{read_golds(case.gold)[0].text}}}"
        assert verifier.verify(task, whole).score == 1, case


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
                assert verifier.check_task(Task("t", "", gold)) is None
                assert verifier.quick(Task("t", "", gold), f"#### {number}").score == 1
            wrong = verifier.quick(Task("t", "", number), f"\\boxed{{{number.replace(',', '')}1}}")
            assert wrong.score == 0


@pytest.mark.parametrize("trick", benchmark.TRICKS)
def test_no_trick_of_the_benchmark_is_paid(trick):
    assert MathVerifier().verify(Task("t", "What is six times seven?", "42"), benchmark.TRICKS[trick]).score == 0


def test_hostile_answers_are_decided_by_the_verifier_itself(pool):
    """None of them needs to be killed."""
    work = [(Task("t", "", "\\frac{x+1}{\\sqrt{2}}"), f"\\boxed{{{answer}}}") for answer in benchmark.HOSTILE]
    for verdict in pool.verify_many(MathVerifier(), work):
        assert verdict.score == 0
        assert verdict.status != "timeout"


def test_the_results_file_is_of_this_benchmark_and_names_no_machine():
    path = ROOT / "scripts/benchmarks/math_verifier.json"
    result = json.loads(path.read_text())
    assert result["tricks"]["tried"] == len(benchmark.TRICKS)
    assert "/" not in result["command"].replace("scripts/benchmarks/math_verifier.py", "")
