import importlib.util
import math
import re
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.overlap import BleuVerifier, RougeVerifier

WORDS = st.lists(st.sampled_from(["red", "green", "blue", "tin"]), min_size=1, max_size=9)


def task(gold):
    return Task("t", "p", gold)


def lcs(a, b):
    """The longest common subsequence by its definition: the longest subsequence of a that is one of b."""
    best = 0
    for mask in range(1 << len(a)):
        chosen = [word for i, word in enumerate(a) if mask >> i & 1]
        rest = iter(b)
        if len(chosen) > best and all(word in rest for word in chosen):
            best = len(chosen)
    return best


def bleu(said, gold):
    """Papineni et al. 2002 with the exponential smoothing and effective order that sacrebleu documents."""
    logs, smooth, orders = 0.0, 1.0, 0
    for n in range(1, 5):
        mine = Counter(tuple(said[i : i + n]) for i in range(len(said) - n + 1))
        theirs = Counter(tuple(gold[i : i + n]) for i in range(len(gold) - n + 1))
        if not mine:
            break
        orders += 1
        hits = sum(min(count, theirs[gram]) for gram, count in mine.items())
        if n == 1 and not hits:
            return 0.0
        if not hits:
            smooth *= 2
        logs += math.log((hits or 1 / smooth) / mine.total())
    return math.exp(min(0.0, 1 - len(gold) / len(said)) + logs / orders)


def test_the_example_that_rouge_score_publishes():
    gold, output = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    for kind, measure, expected in (
        ("rouge1", "precision", 6 / 8), ("rouge1", "recall", 6 / 9), ("rouge1", "f1", 12 / 17), ("rougeL", "precision", 5 / 8), ("rougeL", "recall", 5 / 9), ("rougeL", "f1", 10 / 17),
    ):  # fmt: skip
        assert RougeVerifier(kind=kind, measure=measure).verify(task(gold), output).score == pytest.approx(expected)
    assert RougeVerifier(threshold=0.5).verify(task(gold), output).status == VerdictStatus.CORRECT
    assert RougeVerifier(threshold=0.6).verify(task(gold), output).status == VerdictStatus.WRONG


@settings(max_examples=60, deadline=None)
@given(WORDS, WORDS)
def test_rouge_l_and_bleu_are_what_their_papers_define(gold, said):
    common = lcs(gold, said)
    expected = 2 * common / (len(gold) + len(said))
    assert RougeVerifier().verify(task(" ".join(gold)), " ".join(said)).score == pytest.approx(expected)
    assert RougeVerifier().verify(task(" ".join(said)), " \n".join(gold)).score == pytest.approx(expected)
    assert BleuVerifier().verify(task(" ".join(gold)), " ".join(said)).score == pytest.approx(
        min(bleu(said, gold), 1.0)
    )


def test_several_golds_and_options():
    assert RougeVerifier().verify(task(["x y", "red tin"]), "Red tin!").score == 1
    assert RougeVerifier(stemmer=True).verify(task("running"), "run").score == 1
    assert RougeVerifier().verify(task("running"), "run").score == 0
    assert BleuVerifier(lowercase=True).verify(task(["x y z", "a red tin box"]), "a Red tin box").score == 1
    assert BleuVerifier(tokenize="char").verify(task("\u4f60\u597d\u4e16\u754c"), "\u4f60\u597d\u4e16\u754c").score == 1


@pytest.mark.parametrize("gold", [None, "", [], ["x", ""], "x " * 6000])
def test_golds_that_cannot_be_used_are_found(gold):
    for verifier in (RougeVerifier(), BleuVerifier()):
        assert verifier.check_task(task(gold))
        assert verifier.verify(task(gold), "x").score is None
    assert "a-z" in RougeVerifier().check_task(task("\u4f60\u597d"))


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("rouge", "bleu"):
        with pytest.raises(ConfigError, match=re.escape(install_command("verifiers"))):
            registry.build("verifier", name)


def test_tricks_earn_nothing_or_little_and_long_answers_are_quick(pool):
    gold = "the capital of France is Paris " * 60
    texts = ["", "<think>" + gold, "x " * 500_000, "a" * 10**6, "the " * 2400, "? " * 5000, "<|im_end|>"]
    for verifier in (RougeVerifier(), BleuVerifier()):
        start = time.perf_counter()
        verdicts = pool.verify_many(verifier, [(task(gold), text) for text in texts])
        assert [v.score for v in verdicts[:4]] == [0, 0, 0, 0]
        assert all(v.score is not None and v.score < 0.35 for v in verdicts), verdicts
        assert time.perf_counter() - start < 60
        assert all(v.seconds < verifier.time_limit for v in verdicts)


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_no_text_raises(text):
    for verifier in (RougeVerifier(), BleuVerifier()):
        assert 0 <= verifier.verify(task("red tin"), text).score <= 1
