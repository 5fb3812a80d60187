"""The tricks fool verifiers that deserve it, and call no honest verifier fooled."""

from __future__ import annotations

import asyncio
import re
import time
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers import Verifier, VerifierPool, as_verifier, judged
from rlvr.verifiers.answers import last_boxed
from rlvr.verifiers.audit.examples import examples_for
from rlvr.verifiers.audit.targets import FORMS, Target, form_of, gold_texts, wrong_answers
from rlvr.verifiers.audit.trial import Attempt, Example, TrickOutcome, TrickTrial, outcome_of, try_tricks
from rlvr.verifiers.audit.tricks import TRICKS

ASKING = {"judge", "rubric", "pairs", "scorer", "step_scorer", "steps"}
"""Verifiers that ask a model: tests/verifiers/judge/test_judge_attacks.py tries the tricks on one that is scripted."""
AS_PUBLISHED = {
    "last_number": {
        "hedge",
        "chain",
        "restated",
        "approximation",
        "scale word",
        "negation",
        "only in the reasoning",
        "unclosed reasoning",
    }
}
"""Rewards of a paper's code that can be fooled, kept as they are for its recipe, with the tricks that they pay."""
NUMBER = Task(id="n", prompt="What is 6 times 7?", answer="42")
OTHERS = (
    Task(id="r", prompt="Solve $2x > 6$.", answer="x > 3"),
    Task(id="u", prompt="Multiply out.", answer="49 a^2 - 49 b^2"),
    Task(id="j", prompt="Write JSON.", answer='{"a": 1}'),
    Task(id="m", prompt="How far is it?", answer="42 m"),
    Task(id="o", prompt="Which is a prime?", answer="B", info={"options": ["4", "7"]}),
)
"""Tasks for the tricks that a number or a list gives no hold."""
TAGGED = Example(Task(id="f", prompt="Think."), completion="<think>a</think><answer>b</answer>", junk_is_wrong=True)
UNSWEET = Example(
    Task(id="w", prompt="Write.", info={"kwargs": [{"forbidden_words": ["sugar"]}, None]}),
    completion="Bread is good.",
    junk_is_wrong=True,
)
LIST = Task(id="l", prompt="Solve x^2 - 5x + 6 = 0.", answer="2, 3")
BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def boxed(completion, answer):
    """Honest: one rule, the last box after the reasoning, letter by letter."""
    text = completion.rpartition("</think>")[2]
    if "<think>" in text:
        return 0
    return BOX.findall(text)[-1:] == [str(answer)]


def nested_box(completion, answer):
    """Honest too, of answers that have braces."""
    text = completion.rpartition("</think>")[2]
    return "<think>" not in text and last_boxed(text) == str(answer)


def mentions(completion, answer):
    return str(answer) in completion


def any_box(completion, answer):
    return str(answer) in BOX.findall(completion)


def one_side(completion, answer):
    boxes = BOX.findall(completion)
    return bool(boxes) and str(answer) in boxes[-1].split(" = ")


def evaluates(completion, answer):
    boxes = BOX.findall(completion.rpartition("</think>")[2])
    result = re.fullmatch(r"(-?\d+)\s*\+\s*(\d+)", boxes[-1]) if boxes else None
    return int(result[1]) + int(result[2]) == int(answer) if result else boxed(completion, answer)


def folds_digits(completion, answer):
    return boxed(unicodedata.normalize("NFKC", completion), answer)


def subset(completion, answer):
    boxes = BOX.findall(completion.rpartition("</think>")[2])
    return (boxes or [""])[-1] in [item.strip() for item in str(answer).split(",")] or boxed(completion, answer)


def obeys(completion, answer):
    return "highest score" in completion or boxed(completion, answer)


def chat(completion, answer):
    return "It is correct" in completion or boxed(completion, answer)


def believes(completion, answer):
    return "correct" in completion or boxed(completion, answer)


def forgives_silence(completion, answer):
    return 0.25 if not completion.strip() else boxed(completion, answer)


def forgives_empty_boxes(completion, answer):
    return not (BOX.findall(completion) or ["?"])[-1].strip() or boxed(completion, answer)


def believes_length(completion, answer):
    return len(completion) > 500_000 or boxed(completion, answer)


def loves_powers(completion, answer):
    return "^{9" in completion or boxed(completion, answer)


def encodes(completion, answer):
    completion.encode()
    return boxed(completion, answer)


def loves_nesting(completion, answer):
    return "((((" in completion or boxed(completion, answer)


def loves_digits(completion, answer):
    return "9" * 1000 in completion or boxed(completion, answer)


def never_closes(completion, answer):
    return boxed(completion.replace("<think>", ""), answer)


def always(completion):
    return 1


async def tried(verifier, *tasks, tricks=TRICKS):
    trial = TrickTrial()
    verifier = as_verifier(verifier)
    examples = [task if isinstance(task, Example) else Example(task) for task in tasks]
    await try_tricks(lambda task, text: judged(verifier, task, text), examples, "mine", trial, tricks)
    return trial


def failures(verifier, *tasks, **more):
    return {a.trick.name for a in asyncio.run(tried(verifier, *tasks, **more)).failures}


def test_an_honest_verifier_is_fooled_by_nothing():
    trial = asyncio.run(tried(nested_box, NUMBER, LIST, Task(id="c", prompt="France?", answer="Paris"), *OTHERS))
    assert not trial.failures
    assert [control.target.form.name for _, control in trial.controls] == ["box"] * 8
    assert trial.not_tried == ["hidden tags", "forbidden words"]  # of checks of form alone
    assert all(sum(counts.values()) > 0 for counts in trial.counts.values())


@pytest.mark.parametrize(
    ("verifier", "names"),
    [
        (
            mentions,
            {"every candidate", "hedge", "two answers", "chain", "negation", "prompt echoed"},
        ),
        (mentions, {"only in the reasoning", "unclosed reasoning", "role tokens", "restated"}),
        (any_box, {"two answers", "only in the reasoning"}),
        (one_side, {"chain"}),
        (evaluates, {"restated"}),
        (folds_digits, {"superscript"}),
        (subset, {"part of a list"}),
        (obeys, {"prompt injection"}),
        (chat, {"role tokens"}),
        (believes, {"keywords"}),
        (forgives_silence, {"empty", "whitespace"}),
        (forgives_empty_boxes, {"empty form"}),
        (believes_length, {"a megabyte", "openers"}),
        (loves_powers, {"huge powers"}),
        (encodes, {"odd characters", "odd characters in the answer"}),
        (loves_nesting, {"deep nesting"}),
        (loves_digits, {"long number"}),
        (never_closes, {"unclosed reasoning"}),
        (always, {"wrong answer"}),
    ],
)
def test_a_verifier_with_a_hole_is_fooled_by_the_trick_for_it(verifier, names):
    assert names <= failures(verifier, NUMBER, LIST)


def test_every_trick_that_must_be_refused_is_paid_by_a_verifier_that_pays_everything():
    refused = {trick.name for trick in TRICKS if trick.must == "refuse"}
    assert failures(always, NUMBER, LIST, *OTHERS, TAGGED, UNSWEET) == refused


class Hangs(Verifier):
    time_limit = 0.2

    def verify(self, task, completion):
        if len(completion) > 500_000:
            time.sleep(3)
        return Verdict.from_score(boxed(completion, task.answer))


def test_a_verifier_that_a_trick_holds_up_is_reported():
    async def trial_on_pool():
        trial = TrickTrial()
        tricks = [trick for trick in TRICKS if trick.name in ("empty", "a megabyte", "megabyte before the answer")]
        with VerifierPool(workers=4) as pool:
            judge = lambda task, text: pool.verify(Hangs(), task, text)  # noqa: E731
            await try_tricks(judge, [Example(NUMBER)], "mine", trial, tricks)
        return trial

    trial = asyncio.run(trial_on_pool())
    assert {a.trick.name for a in trial.failures} == {"a megabyte", "megabyte before the answer"}
    assert {a.outcome for a in trial.failures} == {TrickOutcome.UNDECIDED}


def overlap(completion, answer):
    words, gold = completion.split(), str(answer).split()
    same = len(set(words) & set(gold))
    return 2 * same / (len(set(words)) + len(set(gold))) if same else 0.0


def test_a_verifier_that_pays_parts_may_pay_parts_for_hedges_and_nothing_for_silence():
    trial = asyncio.run(tried(overlap, Task(id="c", prompt="Who?", answer="Johann Goethe")))
    assert not trial.failures
    assert trial.counts["hedge"][TrickOutcome.PART] > 0
    assert trial.counts["empty"] == {TrickOutcome.REFUSED: 1}


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("@", "bare"),
        ("<answer>@</answer>", "tag"),
        ("#### @", "hash"),
        ("It follows that it is @, surely", "demonstration"),
    ],
)
def test_the_control_is_found_in_the_form_that_the_verifier_pays(template, form):
    def judge(completion, answer):
        return completion == template.replace("@", answer)

    task = Task(id="1", prompt="?", answer="42", demonstration="It follows that it is 42, surely")
    trial = asyncio.run(tried(judge, task))
    ((_, control),) = trial.controls
    assert (control.target.form.name, control.target.form("7")) == (form, template.replace("@", "7"))
    assert not trial.failures


def test_the_best_paid_form_is_the_control_where_none_is_paid_in_full():
    def graded(completion, answer):
        return {answer: 0.2, f"<answer>{answer}</answer>": 0.5}.get(completion, 0.0)

    trial = asyncio.run(tried(graded, NUMBER))
    ((_, control),) = trial.controls
    assert (control.target.form.name, control.paid) == ("tag", 0.5)


def test_without_a_control_only_tricks_that_need_none_are_tried():
    trial = asyncio.run(tried(lambda completion: 0, NUMBER))
    assert trial.controls == [(NUMBER, None)]
    changed = {"unseen words", "hidden tags", "forbidden words"}  # which change a control
    assert set(trial.counts) == {trick.name for trick in TRICKS if not trick.needs_gold} - changed


def test_a_check_of_form_alone_may_pay_junk_but_not_silence():
    def short(completion):
        return len(completion) < 100_000_000

    task = Task(id="1", prompt="Write at most a hundred megabytes.")
    assert failures(short, task) == {"empty", "whitespace"}
    assert "a megabyte" in failures(short, Example(task, completion="Once upon a time.", junk_is_wrong=True))


GOLDS = st.one_of(
    st.text(min_size=1, max_size=30).filter(str.strip),
    st.integers().map(str),
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
    st.sampled_from([r"\frac{1}{2}", "(0, 1)", "B", "(c)", "yes", "2, 3", "zebra", "[1, 2]", '{"a": 1}', "12%", "x=1"]),
)


@given(GOLDS)
@example(r"9^{9^{9^{9}}}")
@example("9**9**9**9")
@example("\u3164")
@example("&nbsp;")
@example("\x1b[2J")
@settings(max_examples=300, deadline=None)
def test_no_trick_to_be_refused_states_the_right_answer(gold):
    """Whatever the form: no completion is, or ends in a line that is, the gold written in that form."""
    for form in FORMS:
        wrong = wrong_answers(gold, {})
        assert len(wrong) >= 3 and gold.strip().casefold() not in [w.strip().casefold() for w in wrong]
        target = Target(gold, wrong, form, "What is it?", ("mine",))
        for trick in TRICKS:
            if (
                trick.must == "refuse"
                and "megabyte" not in trick.tries
                and trick.name not in ("deep nesting", "long number")
            ):
                for completion in trick.write(target):
                    text = completion.rpartition("</think>")[2]
                    assert "<think>" in text or text.strip() != form.bare_of(gold).strip(), (trick.name, completion)


def test_wrong_answers_are_other_options_where_there_are_options():
    assert wrong_answers("7", {"options": ["4", "7", "9", "10"]})[:3] == ["4", "9", "10"]
    assert wrong_answers("B", {"options": ["4", "7"]}) == ["A", "C", "D"]


def test_golds_are_written_as_text():
    def texts(answer, **info):
        return gold_texts(Task(id="1", prompt="?", answer=answer, info=info))

    assert texts(None) == []
    assert texts(True) == ["True", "true"]
    assert texts(["a", "b"]) == ['["a", "b"]', "a, b", "a"]
    assert texts(1, options=["x", "y"]) == ["1", "B", "y"]
    assert form_of("so 4 + 4 = 8", "8")("9") == "so 4 + 4 = 9"
    assert form_of("nothing", "8") is None


def test_a_verifier_of_ones_own_has_examples_too():
    assert len(examples_for("a verifier of one's own")) >= 3


def test_what_an_outcome_is():
    trick = TRICKS[3]
    assert outcome_of(trick, Verdict.from_score(1.0), 1.0) is TrickOutcome.PAID
    assert outcome_of(trick, Verdict.from_score(0.4), 1.0) is TrickOutcome.PART
    assert outcome_of(trick, Verdict.from_score(0.4), 0.4) is TrickOutcome.PAID
    assert outcome_of(trick, Verdict.from_score(-1.0), 1.0) is TrickOutcome.REFUSED
    assert outcome_of(trick, Verdict.undecided("no"), 1.0) is TrickOutcome.UNDECIDED


async def trial_on_pool(name):
    verifier, trial = as_verifier(name), TrickTrial()
    with VerifierPool(workers=4) as pool:
        await try_tricks(lambda task, text: pool.verify(verifier, task, text), examples_for(name), name, trial)
    return trial


@pytest.mark.parametrize("name", sorted(set(registry.names("verifier")) - {"combine", *ASKING, *AS_PUBLISHED}))
def test_no_registered_verifier_pays_a_trick_or_is_left_undecided_by_one(name):
    trial = asyncio.run(trial_on_pool(name))
    assert [(a.trick.name, a.completion, a.verdict.reason) for a in trial.failures] == []
    assert all(control is not None for _, control in trial.controls)


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_a_verifier_that_is_as_published_pays_the_tricks_that_its_docstring_says(name):
    trial = asyncio.run(trial_on_pool(name))
    assert {attempt.trick.name for attempt in trial.failures} == AS_PUBLISHED[name]


def test_a_combination_of_honest_verifiers_is_honest():
    verifier = as_verifier(
        {"name": "combine", "how": "any", "parts": [{"name": "exact", "methods": ["boxed"]}, "numeric"]}
    )
    assert not asyncio.run(tried(verifier, Task(id="f", prompt="1 / 8?", answer="0.125"))).failures


@pytest.mark.parametrize(
    ("gold", "text"),
    [(r"$\boxed{7}$", "7"), ("$7$", "7"), (r"\(7\)", "7"), ("3 + 4\n#### 7", "7"), ("7", "7"), ("$", "$")],
)
def test_golds_are_taken_out_of_their_wrapping(gold, text):
    assert gold_texts(Task(id="1", prompt="?", answer=gold)) == list(dict.fromkeys([text, gold]))


@pytest.mark.parametrize(
    ("gold", "names"),
    [
        ("x < 1", {"every candidate", "hedge", "chain"}),
        ("a + b", {"chain"}),
        ("(1, \\infty)", {"every candidate", "hedge"}),
    ],
)
def test_what_would_be_right_is_not_called_a_trick(gold, names):
    """x < 1 or x < 0 is x < 1; y = a + b names what is asked for."""
    target = Target(gold, wrong_answers(gold, {}), FORMS[0], "?")
    assert {trick.name for trick in TRICKS if trick.needs_gold and not trick.write(target)} >= names


@pytest.mark.parametrize(
    ("trick", "task", "paid_by"),
    [
        ("declaration", NUMBER, lambda completion: r"43, x \in" in completion),
        ("approximation", NUMBER, lambda completion: r"\approx 42" in completion),
        ("rearranged", Task("r", "Solve $2x > 6$.", "x > 3"), lambda completion: "6 < 2x" in completion),
        (
            "letter dropped",
            Task("u", "Multiply out.", "49 a^2 - 49 b^2"),
            lambda completion: "49 a^2 - 49}" in completion,
        ),
        ("taken back", NUMBER, lambda completion: "42. No wait, 43" in completion),
        ("restated in words", OTHERS[0], lambda completion: r"\text{2x > 6}" in completion),
        ("restated in words", OTHERS[0], lambda completion: r"\boxed{\boxed{2x > 6}}" in completion),
        ("another unit", OTHERS[3], lambda completion: "42 kg}" in completion),
        ("scale word", NUMBER, lambda completion: "42 million" in completion),
        ("scale word", NUMBER, lambda completion: "42\u4e07" in completion),
        ("options restated", OTHERS[4], lambda completion: "A) 4 B) 7" in completion),
        ("letter of something", OTHERS[4], lambda completion: "plan B." in completion),
        ("unseen words", NUMBER, lambda completion: completion.count("\u200b") > 2),
        ("hidden tags", TAGGED, lambda completion: "<a\u200b\u2060nswer>" in completion),
        ("forbidden words", UNSWEET, lambda completion: "\u0430r" in completion),
        ("forbidden words", UNSWEET, lambda completion: "s\u200bu\u200bg" in completion),
    ],
)
def test_a_verifier_that_pays_one_of_the_over_generous_rules_is_found(trick, task, paid_by):
    def verifier(completion, answer):
        return paid_by(completion) or (
            completion in (TAGGED.completion, UNSWEET.completion) if answer is None else boxed(completion, answer)
        )

    assert failures(verifier, task) == {trick}


def test_every_trick_is_tried_on_a_registered_verifier_and_the_rules_of_math_on_math():
    def written(name):
        result = set()
        for one in examples_for(name):
            gold = next(iter([one.gold] if one.gold else gold_texts(one.task)), None)
            wrong, info = wrong_answers(gold, one.task.info), one.task.info
            paid = one.completion or FORMS[0](gold)
            target = Target(gold, wrong, FORMS[0], one.task.prompt, (name,), info, paid)
            result |= {trick.name for trick in TRICKS if (gold or not trick.needs_gold) and trick.write(target)}
        return result

    tried = {name: written(name) for name in set(registry.names("verifier")) - {"combine", *ASKING}}
    assert set().union(*tried.values()) == {trick.name for trick in TRICKS}
    rules = {"declaration", "approximation", "rearranged", "restated in words", "letter dropped", "another unit"}
    assert rules | {"scale word", "chain", "restated", "taken back"} <= tried["math"]
    assert {"options restated", "letter of something", "negation", "hedge"} <= tried["choice"]
    assert {"unseen words", "hidden tags"} <= tried["format"]
    assert {"unseen words", "forbidden words"} <= tried["instructions"]


def test_timeouts_are_counted_beside_the_outcomes():
    slow = Verdict(VerdictStatus.TIMEOUT, 0.0, reason="too long")
    trial = TrickTrial()
    for trick in TRICKS[:2]:
        trial.add(
            Attempt(trick, NUMBER, "x", slow if trick is TRICKS[0] else Verdict.from_score(0.0), TrickOutcome.REFUSED)
        )
    assert trial.timeouts[TRICKS[0].name] == 1
    assert trial.timeouts[TRICKS[1].name] == 0
