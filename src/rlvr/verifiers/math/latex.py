"""Normalisation of LaTeX answers: answers that differ only in notation get the same spelling.

`clean` changes the notation of an answer, not its meaning: it writes Unicode characters as ASCII or LaTeX and removes
spacing commands, delimiters and wrappers. It evaluates nothing.

Invariant: `clean` takes time linear in the length of its text and never raises.
"""

# ruff: noqa: RUF001 - this file maps characters that look like ASCII

from __future__ import annotations

import re
import unicodedata

from rlvr.verifiers.math.vocabulary import MATRICES

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
# Matches `√2`, `√ x`; not `√(2)`, which `_SYMBOLS` turns into `\sqrt (2)`.
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_COMMAND = re.compile(
    r"\\\\"  # a line break; it is kept, and matched so that its second backslash does not start a command
    r"|\\!\s*|\\[,;:>\s()\[\]]|~|\{,\}|(?<!\\)\$"
    r"|\\(?:left|right)(?![A-Za-z])\.?"
    r"|\\(?:quad|qquad|thinspace|displaystyle|dfrac|tfrac|cfrac|lvert|rvert|degree|neq|le|ge)(?![A-Za-z])"
)
_REPLACEMENTS = {
    "\\\\": "\\\\", "\\!": "", "{,}": ",", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac",
    "\\lvert": "|", "\\rvert": "|", "\\degree": "^\\circ", "\\neq": "\\ne", "\\le": "\\leq", "\\ge": "\\geq",
    **dict.fromkeys(["$", "\\(", "\\)", "\\[", "\\]", "\\left", "\\right", "\\left.", "\\right."], ""),
}  # fmt: skip
# Matches `1{,}000`, `1{ , }000`; not `f{,}g`. TeX sets no space after `{,}`, so it is used as a thousands separator.
_BRACED_COMMA = re.compile(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d)")
# Matches `\text{5}`, `{5}`, `\boxed{5}`; not `\frac{1}{2}`.
_WRAPPER = re.compile(
    r"(?:\\(?:boxed|fbox|text|textbf|textit|textrm|textsf|textnormal|emph|mathrm|mathbf|mathit|mathsf|mbox|hbox"
    r"|boldsymbol|bm|underline)\s*)?\{"
)
# Matches `\mathbf{AB}`; not `\mathbfx`, `\mathrm{AB}`.
_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm)(?![A-Za-z])")
# Matches `{`, `\{`; not `x`. It consumes an escaped character whole, so that `\{` is not counted as a brace.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Matches `\\frac{1}{2}`, `\\pi`; not `1 \\ 2`, `\\\frac12`. Text that was JSON-encoded twice has two backslashes before
# a command. Two backslashes before anything else are the line break of a matrix.
_ESCAPED_TWICE = re.compile(
    r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|left|right|text|mathrm|pi|infty|leq?|geq?|cdot|times|pm|quad|boxed)(?![A-Za-z]))"
)
# Matches `2or3`, `x=1and-1`; not `for 3`, `(a)order`. The word between two values, written without spaces.
_GLUED = re.compile(r"(?<=[\d)}])(or|and)(?=[A-Z(\d\\-])")
# Matches `0.\dot{3}`, `0.1\dot{2}3\dot{4}`; not `\dot{x}`.
_DOTTED = re.compile(r"(\.\d*)\\dot\s*(?:\{\s*(\d)\s*\}|(\d))(?:(\d*)\\dot\s*(?:\{\s*(\d)\s*\}|(\d)))?")
"""A repeating decimal with dots over the first and the last digit of its cycle."""
# Matches `\color{red}`, `\large`; not `\larger`.
_STYLE = re.compile(
    r"\\(?:text)?color\s*\{[A-Za-z!\d]+\}|\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge"
    r"|Huge)(?![A-Za-z])"
)
# Matches `5 \Omega`, `5kΩ`, `5 \text{k}\Omega`; not `2\Omega x`. Omega is the unit ohm only after a number or a closing
# brace and at the end of a value; elsewhere it is a letter.
_OHM = re.compile(
    r"(?<=[\d}])\s*(?:\\(?:text|mathrm)\s*\{\s*([kMm]?)\s*(?:\\Omega|[\u03a9\u2126])\s*\}|(?:\\(?:text"
    r"|mathrm)\s*\{\s*([kMm])\s*\}|([kM]))?\s*(?:\\Omega(?![A-Za-z])|[\u03a9\u2126]))"
    r"(?=\s*(?:\Z|[,;.)$}]))"
)
# Matches `\mu\text{m}`, `\text{μm}`; not `\mu m`, where the letter is not upright: that is a product.
_MICRO = re.compile(
    r"(?:\\mu(?![A-Za-z])|[\u03bc\u00b5])\s*\\(?:text|mathrm)\s*\{\s*([A-Za-z]+)\s*\}|\\(?:text"
    r"|mathrm)\s*\{\s*(?:\\mu(?![A-Za-z])|[\u03bc\u00b5])\s*([A-Za-z]+)\s*\}"
)
_PREFIX = {"": "", "k": "kilo", "M": "mega", "m": "milli"}
_SYMBOLS = {
    **dict.fromkeys("−–—‐‑﹣", "-"), **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""), **dict.fromkeys("’′", "'"),
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "٫": ".", "٬": ",", "、": ",", "÷": "/", "⁄": "/", "∕": "/",
    "°": "^\\circ ", "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "±": "\\pm ", "≤": "\\leq ", "≥": "\\geq ",
    "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "θ": "\\theta ",
    "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ",
}  # fmt: skip


class _Characters(dict[int, str]):
    """The table for `str.translate`: code point -> replacement, computed on first use."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if code < 128:
            new = char
        elif char in _SYMBOLS:
            new = _SYMBOLS[char]
        # Full-width forms repeat ASCII 0x21 to 0x7E in the same order, 0xFEE0 higher (Unicode, Halfwidth and Fullwidth
        # Forms).
        elif 0xFF01 <= code <= 0xFF5E:
            new = chr(code - 0xFEE0)
        elif char.isdecimal():
            new = str(unicodedata.decimal(char))
        elif char.isspace():
            new = " "
        # Vulgar fractions such as ½, but not ⅟, which has no denominator.
        elif (
            unicodedata.decomposition(char).startswith("<fraction>") and unicodedata.normalize("NFKC", char)[-1] != "⁄"
        ):
            above, _, below = unicodedata.normalize("NFKC", char).partition("⁄")
            new = f"\\frac{{{above}}}{{{below}}}"
        else:
            new = char
        self[code] = new
        return new


_CHARACTERS = _Characters()


def clean(text: str) -> str:
    """Return `text` in its normal spelling: ASCII digits and signs; no spacing commands, math delimiters or wrappers;
    no punctuation at the end except `...`."""
    if not text.isascii():
        text = _SUPERSCRIPT_RUN.sub(_as_power, text)
        text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_CHARACTERS)
    # Each substitution runs only where a character that it needs occurs: most answers are plain numbers, and `clean`
    # runs in the trainer's thread.
    if "\\\\" in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
    if "{" in text:
        text = _BRACED_COMMA.sub(",", text)
    if "\\" in text or "$" in text or "~" in text or "{,}" in text:
        # `rstrip` removes the spaces that `\!` matches with it. A command without a replacement becomes a space.
        text = _COMMAND.sub(lambda command: _REPLACEMENTS.get(command[0].rstrip(), " "), text)
    if "\\" in text or not text.isascii():
        # Colours and sizes go; ohms and micro-units get names that units.py knows.
        text = _STYLE.sub(" ", text)
        text = _OHM.sub(lambda unit: rf" \text{{{_PREFIX[unit[1] or unit[2] or unit[3] or '']}ohm}}", text)
        text = _MICRO.sub(lambda unit: rf"\text{{u{unit[1] or unit[2]}}}", text)
    if "\\dot" in text:
        digits = r"\1\\overline{\2\3\4\5\6}"  # the cycle under a line in place of dots
        text = _DOTTED.sub(digits, text)
    if "or" in text or "and" in text:
        text = _GLUED.sub(r" \1 ", text)
    text = _strip(text)
    for _ in range(4):  # bounded, since hundreds of nested wrappers would take quadratic time
        inner = _unwrapped(text)
        if inner is None:
            break
        text = _strip(inner)
    return text


def _as_power(run: re.Match[str]) -> str:
    """Superscript characters as a power."""
    power = run[0].translate(_SUPERSCRIPTS)
    if len(power) == 1:
        return f"^{power}"
    return f"^{{{power}}}"


def _strip(text: str) -> str:
    text = " ".join(text.split()).strip("*` ")
    bare = text.rstrip(".,;*\\\u3002\uff61 ")
    # The star of `\mathbb{R}^*` or `z^*` was stripped as if it were Markdown emphasis.
    if bare.endswith("^"):
        bare += "*"
    # An ellipsis has a meaning (the list goes on), so it stays.
    if "..." in text[len(bare) :]:
        return f"{bare}..."
    return bare


def _unwrapped(text: str) -> str | None:
    """Return the content of the wrapper or pair of braces that encloses the whole text; None where there is none."""
    wrapper = _WRAPPER.match(text)
    if wrapper is None or not text.endswith("}"):
        return None
    # Bold letters stay wrapped: they are a product of matrices, in which the order matters.
    if _BOLD.match(text) and MATRICES.fullmatch(text[wrapper.end() : -1].strip()):
        return None
    depth = 0
    for brace in _BRACE.finditer(text, wrapper.end() - 1):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            if brace.end() == len(text):
                return text[wrapper.end() : -1]
            return None
    return None


def balanced(text: str) -> bool:
    """Return True if the braces of `text` match in pairs. Escaped braces are not counted."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return False
    return depth == 0


def spelling(text: str) -> str:
    """Return the cleaned `text` without meaningless spaces, so that texts that differ only in these become equal.

    A space between two words or numbers has a meaning. So has the space in `1, 234`, a list, unlike `1,234`, a number.
    """
    # Removes the spaces of `( 1 , 2 )` and keeps those of `no solution`, `1 234` and `1, 234`.
    return re.sub(r"(?<!\w)(?<!\d,) | (?!\w)|(?<=\d,) (?!\d{3}(?!\d))", "", text)
