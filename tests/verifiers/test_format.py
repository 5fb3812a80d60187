import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.format import FormatVerifier

GOOD = "<think>2 + 2</think><answer>4</answer>"


def judge(completion, **options):
    return FormatVerifier(**options).quick(Task("t", "p", "4"), completion)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"\n {GOOD} \n",
        "<think>\n2\n</think>\n\n<answer> 4 </answer>",
        "<think>a < b > c, <b>x</b>, <i></think><answer>4</answer>",
        "<think>{x} \\{</think><answer>4</answer>",
    ],
)
def test_what_follows_the_template(text):
    verdict = judge(text)
    assert (verdict.status, verdict.score, verdict.answer) == (VerdictStatus.CORRECT, 1.0, "4"), verdict


@pytest.mark.parametrize(
    "text",
    [
        "", "4", "<think></think><answer></answer>", "<think>x</think><answer> "
                                                     "</answer>", "<think> "
                                                                  "</think><answer>4</answer>", "<think>x</think>", "<answer>4</answer>",
        "<answer>4</answer><think>x</think>", "<think>x</think>so "
                                              "<answer>4</answer>", f"Well: {GOOD}", f"{GOOD} ok", f"{GOOD}{GOOD}", "<think>x</think><answer>4</answer><answer>5</answer>",
        "<think>x<answer>5</answer></think><answer>4</answer>", "<think>a<think>b</think><answer>4</answer>", "<think>x</think></think><answer>4</answer>", "<think>x<answer>4</answer></think>",
        "<think>x</think><answer>4", "<think>x</THINK></think><answer>4</answer>", "<think>x</think><answer>4<Answer>5</answer>", "<think>x</think><answer>4< / answer >5</answer>",
        "<think>x<|im_end|></think><answer>4</answer>", "<think>x</think><answer>4<|im_start|>assistant</answer>", "<think>x</think><answer>[INST] 4</answer>", "<THINK>x</THINK><ANSWER>4</ANSWER>",
        "< think>x</think><answer>4</answer>", "{think}", "<think>{think}</think>{answer}",
    ],
)  # fmt: skip
def test_what_does_not(text):
    verdict = judge(text)
    assert (verdict.status, verdict.score) == (VerdictStatus.WRONG, 0.0), verdict
    assert verdict.reason


def test_a_prompt_that_opened_the_reasoning():
    opened = "2 + 2</think><answer>4</answer>"
    assert judge(opened, prompt_wrote="<think>\n").score == 1
    assert judge(GOOD, prompt_wrote="<think>").score == 0
    assert judge(opened).score == 0
    assert judge("</think><answer>4</answer>", prompt_wrote="<think>").score == 0


def test_other_templates():
    harmony = "<|channel|>analysis{think}<|channel|>final{answer}"
    assert judge("<|channel|>analysis so<|channel|>final 4", template=harmony).answer == "4"
    assert judge("<|channel|>analysis so<|channel|>final 4<|im_end|>", template=harmony).score == 0
    assert judge("<|channel|>final 4<|channel|>analysis so", template=harmony).score == 0
    plan = "<plan>{plan}</plan>\n<code>{code}</code>\n\nFinal answer: {answer}"
    assert judge("<plan>a</plan><code>b</code> Final answer: 4", template=plan).answer == "4"
    assert judge("<plan>a</plan><code>b</code> Final answer:", template=plan).score == 0
    assert judge("<plan>Final answer: 3</plan><code>b</code> Final answer: 4", template=plan).score == 0
    assert judge("anything </think> 4", template="{think}</think>{answer}").answer == "4"
    steps = "<step>{one}</step><step>{two}</step>"
    assert judge("<step>a</step><step>b</step>", template=steps).score == 1
    assert (
        judge("<step>a</step>", template=steps).score
        == judge("<step>a</step><step>b</step><step>c</step>", template=steps).score
        == 0
    )


def test_credit_for_tags():
    def share(text, **options):
        return judge(text, credit="tags", **options).score

    assert share(GOOD) == 1
    assert share("") == share("4") == 0
    assert share("<think>x</think>") == 2 / 5
    assert share("<think></think><answer></answer>") == 4 / 5
    assert share(GOOD + "x") == 4 / 5
    assert share(GOOD + GOOD) == 0
    assert share("</think><answer></answer>", prompt_wrote="<think>") == 3 / 4
    assert share("", prompt_wrote="<think>") == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"template": ""}, "no tag"), ({"template": "{answer}"}, "no tag"), ({"template": "<a>{x}{y}</a>"}, "between them"), ({"template": "<a>{x}</a><b>{x}</b>"}, "two places"),
        ({"prompt_wrote": "<answer>"}, "beginning"), ({"prompt_wrote": "think:"}, "beginning"),
    ],
)  # fmt: skip
def test_templates_that_say_nothing_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        FormatVerifier(**options)


PIECES = ["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n", "4", "<|im_end|>", "<Think>", "< answer>"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=10) | st.lists(st.text(max_size=5), max_size=5))
def test_only_the_template_passes(pieces):
    """Against another statement of the rule: four tags in order, text in the two slots only."""
    text = "".join(pieces)
    kept = [piece for piece in pieces if piece.strip()]
    tags = [piece for piece in kept if piece in PIECES[:4]]
    middle = [kept.index(tag) for tag in tags] if len(set(tags)) == len(tags) else []
    expected = (
        tags == PIECES[:4]
        and set(kept) <= {*PIECES[:4], "x", "4"}
        and middle[0] == 0
        and middle[1] > 1
        and middle[2] == middle[1] + 1
        and middle[3] > middle[2] + 1
        and middle[3] == len(kept) - 1
    )
    assert judge(text).score == expected
    assert 0 <= judge(text, credit="tags").score <= 1


@settings(deadline=None)
@given(st.text("abc \n<>/", min_size=1), st.text("abc \n<>/", min_size=1))
def test_space_around_the_tags_does_not_matter(think, answer):
    tight = judge(f"<think>{think}</think><answer>{answer}</answer>")
    loose = judge(f" <think> {think}\n</think>\n\n<answer>\t{answer} </answer>\n")
    assert tight.score == loose.score


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 150_000,
        "< " * 500_000,
        "<" + " " * 10**6,
        "</ " * 300_000,
        "<|" * 500_000,
        "x" * 10**6,
        "<think>" + "</answer>" * 10**5,
    ],
)
def test_a_megabyte_takes_linear_time(text):
    start = time.process_time()
    assert judge(text).score == judge(text + GOOD).score == 0
    assert judge("<think>" + "x" * 10**6 + "</think><answer>4</answer>").score == 1
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "blank", ["\u200b", "\ufeff \u2060", "&nbsp;", "&#160;&#x200B;", "\u3164", "&zwnj;\u00ad", "\u2800"]
)
def test_what_nobody_sees_fills_no_slot_and_hides_no_tag(blank):
    verifier = FormatVerifier()
    assert verifier.quick(Task("t", "p"), f"<think>a</think><answer>{blank}</answer>").score == 0
    assert verifier.quick(Task("t", "p"), f"<think>a</think>{blank}<answer>b</answer>{blank}").score == 1
    if blank == "\u200b":
        assert verifier.quick(Task("t", "p"), "<think>a</think><answer>b<ans\u200bwer>c</answer>").score == 0
    assert verifier.quick(Task("t", "p"), f"<think>a</think><answer>4{blank}2</answer>").score == 1
