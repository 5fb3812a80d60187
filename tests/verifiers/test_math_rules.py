r"""The rules of docs/verifiers.md by which `math` decides, each with cases of our own: accepted, then refused.

Each case is (gold, answer). A refused answer scores 0, never None.
"""

import pytest

from rlvr.records import Task
from rlvr.verifiers import MathVerifier


def score(gold, answer, prompt="What is it?", **options):
    return MathVerifier(**options).verify(Task("t", prompt, gold), f"So it is \\boxed{{{answer}}}.").score


DECLARATIONS_ACCEPTED = [
    (r"x+1", r"x+1, x \in \mathbb{Z}"),
    (r"x+1", r"1+x, x \in \mathbb{R}"),
    (r"x+1", r"1+x, \quad k \in \mathbb{Z}"),
    (r"5", r"5, n \in \mathbb{Z}"),
    (r"\frac{1}{2}", r"\frac{1}{2}, n \in \mathbb{N}"),
    (r"2k, k \in \mathbb{Z}", r"2k"),
    (r"2k, k \in \mathbb{Z}", r"2n, n \in \mathbb{Z}"),
    (r"2k, k \in \mathbb{Z}", r"2k + 2, k \in \mathbb{Z}"),
    (r"2k, k \in \mathbb{Z}", r"-2k, k \in \mathbb{Z}"),
    (r"2k \text{ where } k \text{ is an integer}", r"2n, n \in \mathbb{Z}"),
    (r"2k, k \in \mathbb{Z}", r"2n \text{ for any integer } n"),
    (r"\{2k \mid k \in \mathbb{Z}\}", r"2n, n \in \mathbb{Z}"),
    (r"k\pi, k \in \mathbb{Z}", r"n\pi"),
    (r"k\pi", r"n\pi, n \in \mathbb{Z}"),
    (r"\frac{\pi}{4} + k\pi", r"\frac{5\pi}{4} + k\pi, k \in \mathbb{Z}"),
    (r"k\pi \ (k \in \mathbb{Z})", r"k \pi, k \in \mathbb{Z}"),
    (r"x = 2k, k \in \mathbb{Z}", r"x = 2n + 4, n \in \mathbb{Z}"),
    (r"n^2, n \in \mathbb{N}", r"m^2, m \in \mathbb{N}"),
    (r"x > 2, x \in \mathbb{Z}", r"x > 2, x \in \mathbb{Z}"),
    (r"x > 2", r"x > 2, x \in \mathbb{R}"),
    (r"\mathbb{Z}", r"x \in \mathbb{Z}"),
    (r"x \in \mathbb{R}", r"\mathbb{R}"),
]
DECLARATIONS_REFUSED = [
    (r"x+1", r"x+5, x \in \mathbb{Z}"),
    (r"x+1", r"x+5, k \in \mathbb{Z}"),
    (r"x+1", r"y+1, y \in \mathbb{Z}"),
    (r"x+1", r"y+1, x \in \mathbb{Z}"),
    (r"2k", r"2k+2, k \in \mathbb{Z}"),
    (r"2k+1", r"2k+3 \text{ where } k \text{ is an integer}"),
    (r"n^2", r"m^2, m \in \mathbb{N}"),
    (r"5", r"x \in \mathbb{Z}"),
    (r"5", r"4, n \in \mathbb{Z}"),
    (r"5", r"5k, k \in \mathbb{Z}"),
    (r"2k, k \in \mathbb{Z}", r"2k+1, k \in \mathbb{Z}"),
    (r"2k, k \in \mathbb{Z}", r"4k, k \in \mathbb{Z}"),
    (r"2k, k \in \mathbb{Z}", r"2k, k \in \mathbb{N}"),
    (r"2k, k \in \mathbb{N}", r"2k+2, k \in \mathbb{N}"),
    (r"2k, k \in \mathbb{N}", r"2k, k \in \mathbb{Z}"),
    (r"ak, k \in \mathbb{Z}", r"bk, b \in \mathbb{Z}, k \in \mathbb{Z}"),
    (r"x > 2", r"x > 2, x \in \mathbb{Z}"),
    (r"x > 2, x \in \mathbb{Z}", r"x > 2"),
    (r"k\pi", r"\frac{k\pi}{2}, k \in \mathbb{Z}"),
    (r"\mathbb{Z}", r"x \in \mathbb{N}"),
    (r"\mathbb{R}", r"x \in \mathbb{Z}"),
]

APPROXIMATIONS_ACCEPTED = [
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.41"),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.414 \approx 1.41"),
    (r"\sqrt{2}", r"1.414 \approx \sqrt{2}"),
    (r"\sqrt{2}", r"x = \sqrt{2} \approx 1.4"),
    (r"1.41", r"\sqrt{2} \approx 1.41"),
    (r"3.14", r"\pi \approx 3.14"),
    (r"\frac{1}{3}", r"\frac{1}{3} \approx 0.33"),
    (r"\frac{1}{3}", r"\frac13 \approx 33.3\%"),
    (r"0.33", r"\frac{1}{3} \approx 0.33"),
    (r"42", r"x \approx 42"),
    (r"42", r"\approx 42"),
    (r"\approx 42", r"42"),
    (r"42", r"42.3 \approx 42"),
    (r"42.3", r"42.3 \approx 42"),
    (r"\sqrt{2} \approx 1.414", r"1.414"),
    (r"\sqrt{2} \approx 1.414", r"\sqrt{2}"),
    (r"2^{40} + \sqrt{2}", r"2^{40} + \sqrt{2} \approx 1.1 \times 10^{12}"),
    (r"-\sqrt{2}", r"-\sqrt{2} \approx -1.41"),
    (r"10\sqrt{2} \text{ cm}", r"10\sqrt{2} \text{ cm} \approx 14.1 \text{ cm}"),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.41 = \frac{141}{100}"),
]
APPROXIMATIONS_REFUSED = [
    (r"41", r"41 \approx 42"),
    (r"42", r"41 \approx 42"),
    (r"42", r"x = 41 \approx 42"),
    (r"1000", r"999 \approx 1000"),
    (r"999", r"999 \approx 1000"),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.5"),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.42"),
    (r"\sqrt{2}", r"1.5 \approx \sqrt{2}"),
    (r"3.15", r"\pi \approx 3.15"),
    (r"\pi", r"\pi \approx \frac{22}{7}"),
    (r"\frac{22}{7}", r"\frac{22}{7} \approx \pi"),
    (r"0", r"0.4 \approx 0"),
    (r"0.4", r"0.4 \approx 0"),
    (r"\sqrt{2}", r"\sqrt{3} \approx 1.41"),
    (r"1.41", r"\sqrt{3} \approx 1.41"),
    (r"\frac{1}{3}", r"\frac13 \approx 0.34"),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.41 = \frac{142}{100}"),
    (r"\sqrt{2} \approx 1.414", r"1.415"),
    (r"42", r"\approx 42.3"),
    (r"41", r"41 \approx 41.6 \approx 42"),
    (r"1.1 \times 10^{12}", r"2^{41} \approx 1.1 \times 10^{12}"),
]

UNITS_ACCEPTED = [
    (r"49 a^2 - 49 b^2", r"49(a+b)(a-b)"),
    (r"49(a-b)(a+b)", r"49 a^2 - 49 b^2"),
    (r"49 b^2", r"49b^2"),
    (r"12 s^2", r"12s^2"),
    (r"5", r"5 m"),
    (r"5 m", r"5"),
    (r"5 m", r"5 \text{ m}"),
    (r"5 \text{ m}", r"5 m"),
    (r"5 m", r"500 cm"),
    (r"5m", r"5 m"),
    (r"2 m n", r"2mn"),
    (r"\frac{1}{8 m^4n^7}", r"\frac{1}{8m^4 n^7}"),
    (r"3 m^2 - 5 m", r"m(3m - 5)"),
    (r"25 m^2", r"25 \text{ m}^2"),
    (r"x = 5 m", r"5"),
    (r"3, 4", r"3\text{ cm}, 4\text{ cm}"),
    (r"3\text{ kg}, 4\text{ kg}", r"3, 4"),
    (r"3 kg, 4 kg", r"4000 g, 3 kg"),
    (r"(3\text{ cm}, 4\text{ cm})", r"(3, 4)"),
    (r"\{3 \text{ cm}, 4\text{ cm}\}", r"\{4, 3\}"),
    (r"3 \text{ and } 4", r"3 \text{ cm and } 4 \text{ cm}"),
    (r"5", r"5 h", "How long is it?"),
    (r"5\text{ m}", r"5 m", "A mass $m$ is lifted."),
]
UNITS_REFUSED = [
    (r"49 a^2 - 49 b^2", r"49 a^2 - 49"),
    (r"49 a^2 - 49", r"49 a^2 - 49 b^2"),
    (r"49", r"49 b^2"),
    (r"49 b^2", r"49"),
    (r"2 m n", r"2 m"),
    (r"12 s^2", r"12"),
    (r"3 m^2 - 5 m", r"-2"),
    (r"x + 1", r"x + 1 m"),
    (r"x + 3 m", r"x + 3"),
    (r"5 m", r"5 s"),
    (r"5 m", r"5 cm"),
    (r"5 kg", r"5 g"),
    (r"25 m^2", r"25 m"),
    (r"5 h", r"5", "Write it with $h$."),
    (r"5", r"5 h", "Write it with $h$."),
    (r"5 n", r"5"),
    (r"5", r"5 x"),
    (r"3\text{ cm}, 4\text{ cm}", r"3\text{ m}, 4\text{ m}"),
    (r"3\text{ cm}, 4\text{ cm}", r"3\text{ cm}"),
    (r"3, 4", r"3 \text{ cm and } 5 \text{ cm}"),
    (r"(3\text{ cm}, 4\text{ cm})", r"(4, 3)"),
]

VALUES_ACCEPTED = [
    (r"e^{x^{50}}", r"e^{x^{25} x^{25}}"),
    (r"(x+1)^{100}", r"(1+x)^{100}"),
    (r"\frac{1}{8m^4n^7}", r"\frac{1}{8} m^{-4} n^{-7}"),
    (r"x^{-50} y^{-3}", r"\frac{1}{x^{50} y^3}"),
    (r"2^{-x^{50}}", r"\frac{1}{2^{x^{50}}}"),
    (r"\frac{x^{60}-1}{x-1}", r"\frac{1-x^{60}}{1-x}"),
    (r"x^{1000}", r"x^{400} x^{600}"),
    (r"\tanh(50+x^2)", r"\frac{\sinh(50+x^2)}{\cosh(50+x^2)}"),
    (r"\sqrt{x^2}", r"|x|"),
    (r"|x|^2", r"x^2"),
    (r"(-1)^n", r"\cos(n\pi)"),
    (r"||x||y||", r"|xy|"),
    (r"1.2345678901234567", r"1.2345678901234567"),
    (r"\frac{1}{3}", r"0.3333333333333333"),
]
VALUES_REFUSED = [
    (r"e^{x^{50}}", r"e^{x^{51}}"),
    (r"e^{x^{-50}}", r"e^{x^{-51}}"),
    (r"1", r"\tanh(50+x^2)"),
    (r"\tanh(50+x^2)", r"1"),
    (r"\coth(50+x^2)", r"1"),
    (r"\tanh(100x)", r"1"),
    (r"x + e^{-100-x^2}", r"x"),
    (r"x", r"x + e^{-100-x^2}"),
    (r"1 + e^{-200}", r"1"),
    (r"\sqrt{2} + e^{-300}", r"\sqrt{2}"),
    (r"x + 10^{-60}", r"x"),
    (r"x + 10^{-70}\sqrt{2}", r"x"),
    (r"y = x", r"y = x + 10^{-25}"),
    (r"y = e^{x^{50}}", r"y = e^{x^{51}}"),
    (r"x^{-50}", r"x^{-51}"),
    (r"x^{1000}", r"x^{999}"),
    (r"\frac{1}{(1+x)^{1000}}", r"\frac{1}{(1+x)^{1001}}"),
    (r"2^{-x^{20}}", r"2^{-x^{22}}"),
    (r"\frac{1}{8m^4n^7}", r"\frac{1}{8m^4n^8}"),
    (r"\arctan(10^{60}x)", r"\frac{\pi}{2}"),
    (r"\cos(10^{-60}x)", r"1"),
    (r"e^{10^{-60}x}", r"1"),
    (r"\max(x, -100)", r"x"),
    (r"|x+100|", r"x+100"),
    (r"x", r"|x|"),
    (r"1.2345678901234567", r"1.2345678901234568"),
    (r"\frac{1}{3}", r"0.333333333"),
]

LINE = "Write $2x + 3y = 6$ solved for y."
MORE = "Solve $2x > 6$."
ROOTS = "Find the roots of $x^2 - 5x + 6 = 0$."
SQUARE = "Factor $x^2 + 2x + 1$."
RESTATEMENTS_ACCEPTED = [
    (r"y = 2 - \frac{2x}{3}", r"y = 2 - \frac{2x}{3}", LINE),
    (r"y = 2 - \frac{2x}{3}", r"y = -\frac{2}{3}x + 2", LINE),
    (r"y = 2 - \frac{2x}{3}", r"2 - \frac{2}{3}x", LINE),
    (r"y = 2 - \frac{2x}{3}", r"\frac{6-2x}{3} = y", LINE),
    (r"x > 3", r"x > 3", MORE),
    (r"x > 3", r"3 < x", MORE),
    (r"x > 3", r"(3, \infty)", MORE),
    (r"x = 2, x = 3", r"x = 3 \text{ or } x = 2", ROOTS),
    (r"2, 3", r"x \in \{2, 3\}", ROOTS),
    (r"(x+1)^2", r"(1+x)^2", SQUARE),
    (r"(x+1)^2", r"(x+1)(x+1)", SQUARE),
    (r"2x - y + 1 = 0", r"y = 2x + 1", "Find the line through (0, 1) with slope 2."),
    (r"y = 2x + 1", r"2x - y + 1 = 0", "Find the line through (0, 1) with slope 2."),
    (r"x^2 + y^2 = 25", r"y^2 + x^2 = 25", "Which curve has distance 5 from the origin?"),
    (r"x^2 + y^2 = 25", r"x^2 + y^2 = 25", "Is $x^2 + y^2 = 25$ or $x^2 + y^2 = 5$ the circle of radius 5?"),
    (r"x = 3", r"x = 3", "Solve 2x = 6."),
    (r"x = 3", r"3", "Solve 2x = 6."),
    (r"2\sqrt{3}", r"\sqrt{4 \cdot 3}", r"Simplify $\sqrt{12}$."),
]
RESTATEMENTS_REFUSED = [
    (r"y = 2 - \frac{2x}{3}", r"2x + 3y = 6", LINE),
    (r"y = 2 - \frac{2x}{3}", r"3y = 6 - 2x", LINE),
    (r"y = 2 - \frac{2x}{3}", r"6 = 3y + 2x", LINE),
    (r"y = 2 - \frac{2x}{3}", r"4x + 6y = 12", LINE),
    (r"y = 2 - \frac{2x}{3}", r"x = 3 - \frac{3y}{2}", LINE),
    (r"x > 3", r"2x > 6", MORE),
    (r"x > 3", r"6 < 2x", MORE),
    (r"x > 3", r"2x - 6 > 0", MORE),
    (r"x > 3", r"x - 3 > 0", MORE),
    (r"x > 3", r"4x > 12", "Find all x."),
    (r"x = 3", r"2x = 6", "Solve $2x = 6$."),
    (r"x = 3", r"2x - 6 = 0", "Solve $2x = 6$."),
    (r"x = 3", r"x - 3 = 0", "Solve $2x = 6$."),
    (r"3", r"2x = 6", "Solve $2x = 6$."),
    (r"2, 3", r"x^2 = 5x - 6", ROOTS),
    (r"x = 2, x = 3", r"(x-2)(x-3) = 0", ROOTS),
    (r"(x+1)^2", r"x^2 + 2x + 1", SQUARE),
    (r"(x+1)^2", r"1 + 2x + x^2", SQUARE),
    (r"(x+1)^2", r"2x + x^2 + 1", SQUARE),
    (r"(x+1)^2", r"x^2 + x \cdot 2 + 1", SQUARE),
    (r"y = 2x + 1", r"2x - y + 1 = 0", "Write $2x - y + 1 = 0$ in slope-intercept form."),
    (r"y = 2x + 1", r"y - 2x = 1", "Write $2x - y + 1 = 0$ in slope-intercept form."),
    (r"2\sqrt{3}", r"\sqrt{12}", r"Simplify $\sqrt{12}$."),
]

RULES = {
    "restatements": (RESTATEMENTS_ACCEPTED, RESTATEMENTS_REFUSED),
    "values": (VALUES_ACCEPTED, VALUES_REFUSED),
    "units": (UNITS_ACCEPTED, UNITS_REFUSED),
    "declarations": (DECLARATIONS_ACCEPTED, DECLARATIONS_REFUSED),
    "approximations": (APPROXIMATIONS_ACCEPTED, APPROXIMATIONS_REFUSED),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_accepts_and_what_it_refuses(rule):
    accepted, refused = RULES[rule]
    assert len(accepted) + len(refused) >= 30
    assert len(set(accepted + refused)) == len(accepted + refused)
    assert [case for case in accepted if score(*case) != 1] == []
    assert [case for case in refused if score(*case) != 0] == []
