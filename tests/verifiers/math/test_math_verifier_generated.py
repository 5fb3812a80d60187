r"""Pairs of expressions whose truth is known by construction, and what may be added to an answer without changing it.

Trees are tuples; an equal pair is two renderings of one tree through identities applied at random places, an unequal
pair changes one leaf so that a value in exact fractions (no code of the verifier) differs. Whatever is added to a wrong
answer, a declaration, a unit, white space, a `\text{}`, another order of its terms, it stays wrong.
"""

import random
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.records import Task
from rlvr.verifiers import MathVerifier

NAMES = "xyzab"
POINTS = [{name: Fraction(p, q) for name, p, q in zip(NAMES, ps, (7, 11, 13, 17, 19), strict=True)} for ps in ((3, 5, 8, 2, 9), (10, 4, 15, 21, 6), (-5, 12, -9, 8, 31))]  # fmt: skip


def grown(rng, depth):
    if depth == 0 or rng.random() < 0.15:
        return ("sym", rng.choice(NAMES)) if rng.random() < 0.6 else ("int", rng.randint(2, 12))
    head = rng.choice(["+", "+", "*", "*", "-", "/", "^"])
    if head == "^":
        return ("^", grown(rng, depth - 1), rng.randint(2, 4))
    return (head, grown(rng, depth - 1), grown(rng, depth - 1))


def value(tree, point):
    match tree:
        case ("int", n):
            return Fraction(n)
        case ("sym", name):
            return point[name]
        case ("^", base, n):
            return value(base, point) ** n
        case ("/", one, other):
            return value(one, point) / value(other, point)
        case (head, one, other):
            a, b = value(one, point), value(other, point)
            return {"+": a + b, "-": a - b, "*": a * b}[head]
    raise AssertionError(tree)


def values(tree):
    try:
        result = [value(tree, point) for point in POINTS]
    except ZeroDivisionError:
        return None
    return result if all(abs(v) < 10**12 for v in result) else None


def rewritten(tree, rng):
    """An equal tree: commuted, distributed, with differences as sums and quotients as negative powers."""
    match tree:
        case ("int", _) | ("sym", _):
            return tree
        case ("^", base, n):
            base = rewritten(base, rng)
            return ("*", base, ("^", base, n - 1)) if n > 2 and rng.random() < 0.4 else ("^", base, n)
        case (head, one, other):
            one, other = rewritten(one, rng), rewritten(other, rng)
            if head in "+*" and rng.random() < 0.5:
                return (head, other, one)
            if head == "*" and other[0] in "+-" and rng.random() < 0.5:
                return (other[0], ("*", one, other[1]), ("*", one, other[2]))
            if head == "-" and rng.random() < 0.5:
                return ("+", ("*", ("int", -1), other), one)
            if head == "/" and rng.random() < 0.4:
                return ("*", one, ("^", other, -1))
            return (head, one, other)
    raise AssertionError(tree)


def changed(tree, rng):
    """The tree with one leaf changed."""
    match tree:
        case ("int", n):
            return ("int", n + rng.choice([-1, 1, 3]))
        case ("sym", name):
            return rng.choice(
                [("sym", rng.choice([other for other in NAMES if other != name])), ("+", tree, ("int", 1))]
            )
        case ("^", base, n):
            return ("^", base, n + 1) if rng.random() < 0.3 else ("^", changed(base, rng), n)
        case (head, one, other):
            return (head, changed(one, rng), other) if rng.random() < 0.5 else (head, one, changed(other, rng))
    raise AssertionError(tree)


def latex(tree, rng):
    match tree:
        case ("int", n):
            return str(n) if n >= 0 else f"({n})"
        case ("sym", name):
            return name
        case ("^", base, n):
            return f"{grouped(base, rng)}^{{{n}}}"
        case ("/", one, other):
            return (
                rf"\frac{{{latex(one, rng)}}}{{{latex(other, rng)}}}"
                if rng.random() < 0.7
                else f"{grouped(one, rng)}/{grouped(other, rng)}"
            )
        case ("*", one, other):
            return f"{grouped(one, rng)}{rng.choice([chr(92) + 'cdot ', '*', chr(92) + 'times '])}{grouped(other, rng)}"
        case (head, one, other):
            return f"{latex(one, rng)} {head} {grouped(other, rng)}"
    raise AssertionError(tree)


def grouped(tree, rng):
    inner = latex(tree, rng)
    return (
        inner if tree[0] in ("int", "sym") else rng.choice([f"({inner})", rf"\left({inner}\right)", f"{{({inner})}}"])
    )


def pair(seed):
    """(gold, equal answer, other answer), or None where the numbers do not tell."""
    rng = random.Random(seed)
    gold = grown(rng, rng.randint(1, 4))
    equal, other = rewritten(gold, rng), changed(gold, rng)
    here, there = values(gold), values(other)
    if (
        here is None
        or there is None
        or here == there
        or values(equal) != here
        or not set(NAMES) & set(latex(gold, rng))
    ):
        return None
    return latex(gold, rng), latex(equal, rng), latex(other, rng)


def score(gold, answer):
    return MathVerifier().verify(Task("t", "", gold), f"\\boxed{{{answer}}}").score


@pytest.mark.slow
def test_generated_pairs_are_judged_by_their_truth():
    pairs = [result for seed in range(3000) if (result := pair(seed)) is not None][:1000]
    assert len(pairs) == 1000
    wrong = [(gold, other) for gold, _, other in pairs if score(gold, other) != 0]
    missed = [(gold, equal) for gold, equal, _ in pairs if score(gold, equal) != 1]
    assert wrong == []
    assert len(missed) <= 10, missed  # values too large to tell


ADDITIONS = [
    r"{}, x \in \mathbb{{Z}}", r"{}, k \in \mathbb{{Z}}", r"{} \text{{ where }} n \text{{ is an "
                                                          r"integer}}", r"{}, x \in \mathbb{{R}}", r"{} \text{{ cm}}", "{} cm", "{} m",
    r"{}\,\mathrm{{kg}}", r"\text{{}}{}", r"{}\text{{}}", r"  {}  ", r"\ {}\quad", r"\left({}\right)", r"{} \text{{ units}}", r"\boxed{{{}}}", r"{}.", r"y = {}", r"\mathrm{{Area}} = {}", r"\text{{Answer: }} {}",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(ADDITIONS))
def test_what_is_added_to_a_wrong_answer_does_not_make_it_right(seed, addition):
    result = pair(seed)
    if result is not None:
        gold, _, other = result
        assert score(gold, addition.format(other)) == 0, (gold, addition.format(other))


@settings(max_examples=150, deadline=None)
@given(st.integers(-99, 99), st.integers(-99, 99), st.sampled_from(ADDITIONS))
def test_what_is_added_to_a_wrong_number_does_not_make_it_right(gold, other, addition):
    if gold != other:
        assert score(str(gold), addition.format(other)) == 0
        assert score(str(gold), rf"{other} \approx {gold}") == 0
        assert score(str(gold), rf"{gold} \approx {other}") == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_a_permutation_makes_no_wrong_list_right(numbers, rng):
    shuffled = rng.sample(numbers, len(numbers))
    gold, tuple_gold = ", ".join(map(str, numbers)), "(" + ", ".join(map(str, numbers)) + ")"
    assert score(gold, ", ".join(map(str, shuffled))) == 1
    assert score(gold, ", ".join(map(str, [*shuffled[1:], 77]))) == 0
    assert score(tuple_gold, "(" + ", ".join(map(str, shuffled)) + ")") == float(shuffled == numbers)


SURDS = {2: r"\sqrt{2}", 3: r"\sqrt{3}", 7: r"\sqrt{7}"}


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 999),
    st.integers(1, 999),
    st.sampled_from([1, *SURDS]),
    st.integers(12, 30),
    st.sampled_from(["{}", "({}, 2)", r"\{{{}, -5\}}", "[-9, {})", r"\begin{{pmatrix}} {} & 1 \end{{pmatrix}}"]),
)
def test_a_decimal_of_twelve_digits_is_right_where_they_are(p, q, radicand, digits, place):
    """Decimals by `decimal`, from the rule alone: rounded, cut off, one unit of the last place too large, and too
    short."""
    with localcontext() as context:
        context.prec = 80
        exact = Decimal(p) / Decimal(q) * Decimal(radicand).sqrt()
        if exact == round(exact, 25):  # it has an end: every decimal of it is exact or wrong
            return
        unit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
        short = Decimal(1).scaleb(exact.adjusted() - 9)
        rounded, cut = exact.quantize(unit, ROUND_HALF_EVEN), exact.quantize(unit, ROUND_DOWN)
        wrong = [rounded + unit, cut - unit, exact.quantize(short)]
    gold = place.format(rf"\frac{{{p}}}{{{q}}}" + SURDS.get(radicand, ""))
    assert score(gold, place.format(f"{rounded:f}")) == 1
    assert score(gold, place.format(f"{cut:f}")) == 1
    assert score(gold, place.format(repr(float(exact)))) == 1
    doubles = (Decimal(repr(float(exact))), Decimal(f"{float(exact):.17g}"))
    assert [score(gold, place.format(f"{other:f}")) for other in wrong if other not in doubles] == [
        0 for other in wrong if other not in doubles
    ]


FUNCTIONS = [r"\sqrt{%s}", r"\sin(%s)", r"e^{%s}", r"\ln(%s)", r"\pi(%s)", r"\frac{\sqrt{3}}{%s}", r"(%s)^{1/3}", r"\arctan(%s)", r"2^{%s}"]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FUNCTIONS), st.integers(2, 9), st.sampled_from(["", "+x", "+x^2", "+xy"]), st.integers(20, 380))
def test_a_part_too_small_for_the_precision_is_not_lost(function, start, rest, power):
    """f(a) and f(a + 10^-n) differ, whatever the precision, and a sum may be written in either order."""
    gold, small = f"{start}{rest}", rf"10^{{-{power}}}"
    assert score(function % gold, function % f"{gold}+{small}") == 0
    assert score(function % f"{gold}+{small}", function % gold) == 0
    assert score(function % f"{gold}+{small}", function % f"{small}+{gold}") == 1


CORNERS = st.integers(-(10**9), 10**9)
SLOPES = st.integers(-50, 50).filter(bool)


@pytest.mark.gate
@settings(max_examples=100, deadline=None)
@given(SLOPES, CORNERS, SLOPES, CORNERS)
def test_piecewise_lines_are_equal_where_all_of_their_pieces_are(a, b, c, d):
    """|ax + b| is one line on each side of -b/a, and max(ax + b, cx + d) of two lines is one where they are the
    same."""
    one, other = f"{a}x+({b})", f"{c}x+({d})"
    assert score(f"|{one}|", f"|-({one})|") == 1
    assert score(f"|{one}|", one) == 0
    assert score(f"|{one}|", f"-({one})") == 0
    assert score(f"|{one}|", f"|{one}+10^{{-9}}|") == 0
    assert score(rf"\max({one}, {other})", rf"\frac{{({one})+({other})+|({one})-({other})|}}{{2}}") == 1
    if a != c:
        assert score(rf"\max({one}, {other})", one) == 0
        assert score(rf"\max({one}, {other})", other) == 0
        assert score(rf"\max({one}, {other})", rf"\min({one}, {other})") == 0
    assert (
        score(rf"\lfloor \frac{{x}}{{{abs(c)}}} + {b} \rfloor", rf"\lfloor \frac{{x}}{{{abs(c)}}} \rfloor + {b}") == 1
    )
    assert score(rf"\lfloor {one} \rfloor", rf"\lfloor {one} + 10^{{-6}} \rfloor") == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 10**6), st.integers(2, 60))
def test_integer_functions_are_compared_at_multiples_of_their_constants(modulus, other):
    assert score(rf"\gcd(n, {modulus})", "1") == 0
    assert score(rf"\gcd(n, {modulus})", rf"\gcd(n + {modulus}, {modulus})") == 1
    assert score(rf"\gcd(n, {modulus})", rf"\gcd(n, {modulus * other})") == 0
    assert score(rf"n \bmod {modulus}", "n") == 0
    assert score(rf"\gcd(n, n + {other})", "1") == 0
    assert score(rf"\gcd(n, n + {other})", rf"\gcd({other}, n)") == 1
