"""Cleaning of LaTeX answers: one spelling for what only looks different.

`clean` changes how an answer is written, never what it says: unicode becomes ASCII or LaTeX, spacing commands,
delimiters and wrappers go. Nothing is evaluated.

Invariant: `clean` takes time linear in its text and never raises.
"""

# ruff: noqa: RUF001 - characters that look like ASCII are what this file is about

from __future__ import annotations

import re
import unicodedata

from rlvr.verifiers.math.vocabulary import MATRICES

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
# Matches `√2`, `√ x`; not `√(2)`. `√(2)` becomes `\sqrt (2)` by the table of characters.
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_COMMAND = re.compile(
    r"\\\\"  # a line break, kept: its second backslash starts no command
    r"|\\!\s*|\\[,;:>\s()\[\]]|~|\{,\}|(?<!\\)\$"
    r"|\\(?:left|right)(?![A-Za-z])\.?"
    r"|\\(?:quad|qquad|thinspace|displaystyle|dfrac|tfrac|cfrac|lvert|rvert|degree|neq|le|ge)(?![A-Za-z])"
)
_REPLACEMENTS = {
    "\\\\": "\\\\",
    "\\!": "",
    "{,}": ",",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\lvert": "|",
    "\\rvert": "|",
    "\\degree": "^\\circ",
    "\\neq": "\\ne",
    "\\le": "\\leq",
    "\\ge": "\\geq",
    **dict.fromkeys(["$", "\\(", "\\)", "\\[", "\\]", "\\left", "\\right", "\\left.", "\\right."], ""),
}
# Matches `1{,}000`, `1{ , }000`; not `f{,}g`. TeX for a comma without a space behind it: a separator of thousands.
_BRACED_COMMA = re.compile(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d)")
# Matches `\text{5}`, `{5}`, `\boxed{5}`; not `\frac{1}{2}`.
_WRAPPER = re.compile(
    r"(?:\\(?:boxed|fbox|text|textbf|textit|textrm|textsf|textnormal|emph|mathrm|mathbf|mathit|mathsf|mbox|hbox"
    r"|boldsymbol|bm|underline)\s*)?\{"
)
# Matches `\mathbf{AB}`; not `\mathbfx`, `\mathrm{AB}`.
_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm)(?![A-Za-z])")
# Matches `{`, `\{`; not `x`. Escaped characters are consumed whole, and counted as neither brace.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Matches `\\frac{1}{2}`, `\\pi`; not `1 \\ 2`, `\\\frac12`. Text that was JSON-encoded twice. Before anything but a
# known command, two backslashes are the line break of a matrix.
_ESCAPED_TWICE = re.compile(
    r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|left|right|text|mathrm|pi|infty|leq?|geq?|cdot|times|pm|quad|boxed)(?![A-Za-z]))"
)
# Matches `2or3`, `x=1and-1`; not `for 3`, `(a)order`. Values that a joining word touches.
_GLUED = re.compile(r"(?<=[\d)}])(or|and)(?=[A-Z(\d\\-])")
# Matches `0.\dot{3}`, `0.1\dot{2}3\dot{4}`; not `\dot{x}`.
_DOTTED = re.compile(r"(\.\d*)\\dot\s*(?:\{\s*(\d)\s*\}|(\d))(?:(\d*)\\dot\s*(?:\{\s*(\d)\s*\}|(\d)))?")
"""A repeating decimal with dots over the first and the last digit of its cycle."""
# Matches `\color{red}`, `\large`; not `\larger`.
_STYLE = re.compile(
    r"\\(?:text)?color\s*\{[A-Za-z!\d]+\}|\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge"
    r"|Huge)(?![A-Za-z])"
)
# Matches `5 \Omega`, `5kΩ`, `5 \text{k}\Omega`; not `2\Omega x`. Behind a number and at the end of a value only:
# elsewhere Omega is a letter.
_OHM = re.compile(
    r"(?<=[\d}])\s*(?:\\(?:text|mathrm)\s*\{\s*([kMm]?)\s*(?:\\Omega|[\u03a9\u2126])\s*\}|(?:\\(?:text"
    r"|mathrm)\s*\{\s*([kMm])\s*\}|([kM]))?\s*(?:\\Omega(?![A-Za-z])|[\u03a9\u2126]))"
    r"(?=\s*(?:\Z|[,;.)$}]))"
)
# Matches `\mu\text{m}`, `\text{μm}`; not `\mu m`. `\mu m` without an upright letter is a product.
_MICRO = re.compile(
    r"(?:\\mu(?![A-Za-z])|[\u03bc\u00b5])\s*\\(?:text|mathrm)\s*\{\s*([A-Za-z]+)\s*\}|\\(?:text"
    r"|mathrm)\s*\{\s*(?:\\mu(?![A-Za-z])|[\u03bc\u00b5])\s*([A-Za-z]+)\s*\}"
)
_PREFIX = {"": "", "k": "kilo", "M": "mega", "m": "milli"}
_SYMBOLS = {
    **dict.fromkeys("−–—‐‑﹣", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **dict.fromkeys("’′", "'"),
    "×": "\\times ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "٫": ".",
    "٬": ",",
    "、": ",",
    "÷": "/",
    "⁄": "/",
    "∕": "/",
    "°": "^\\circ ",
    "π": "\\pi ",
    "∞": "\\infty ",
    "√": "\\sqrt ",
    "±": "\\pm ",
    "≤": "\\leq ",
    "≥": "\\geq ",
    "≠": "\\ne ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "∅": "\\emptyset ",
    "ℝ": "\\mathbb{R}",
    "θ": "\\theta ",
    "α": "\\alpha ",
    "β": "\\beta ",
    "γ": "\\gamma ",
    "λ": "\\lambda ",
}


class _Characters(dict[int, str]):
    """code point -> how it is written here, worked out on first use."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if code < 128:
            new = char
        elif char in _SYMBOLS:
            new = _SYMBOLS[char]
        # Full-width forms repeat ASCII 0x21 to 0x7E in the same order, 0xFEE0 higher (Unicode, Halfwidth and Fullwidth
        # Forms).
        elif 0xFF01 <= code <= 0xFF5E:  # full-width forms of ASCII
            new = chr(code - 0xFEE0)
        elif char.isdecimal():
            new = str(unicodedata.decimal(char))
        elif char.isspace():
            new = " "
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
    """`text` in one spelling: ASCII digits and signs, no spacing commands, math delimiters, wrappers or final
    period."""
    if not text.isascii():
        text = _SUPERSCRIPT_RUN.sub(_raised, text)
        text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_CHARACTERS)
    # Each substitution runs only where a character that it needs occurs: most answers are plain numbers, and `clean`
    # runs in the trainer's thread.
    if "\\\\" in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
    if "{" in text:
        text = _BRACED_COMMA.sub(",", text)
    if "\\" in text or "$" in text or "~" in text or "{,}" in text:
        text = _COMMAND.sub(lambda command: _REPLACEMENTS.get(command[0].rstrip() or "~", " "), text)
    if "\\" in text or not text.isascii():
        text = _restyled(text)
    if "\\dot" in text:
        text = _DOTTED.sub(_overlined, text)
    if "or" in text or "and" in text:
        text = _GLUED.sub(r" \1 ", text)
    text = _strip(text)
    for _ in range(4):  # a few wrappers are honest; hundreds are a way to make this quadratic
        inner = _unwrapped(text)
        if inner is None:
            break
        text = _strip(inner)
    return text


def _restyled(text: str) -> str:
    r"""`text` without colours and sizes of letters; ohms and micro-units in words that units.py knows."""
    text = _STYLE.sub(" ", text)
    text = _OHM.sub(lambda unit: rf" \text{{{_PREFIX[unit[1] or unit[2] or unit[3] or '']}ohm}}", text)
    return _MICRO.sub(lambda unit: rf"\text{{u{unit[1] or unit[2]}}}", text)


def _overlined(decimal: re.Match[str]) -> str:
    return f"{decimal[1]}\\overline{{{''.join(digit or '' for digit in decimal.groups()[1:])}}}"


def _raised(run: re.Match[str]) -> str:
    """Superscript characters as a power."""
    power = run[0].translate(_SUPERSCRIPTS)
    if len(power) == 1:
        return f"^{power}"
    return f"^{{{power}}}"


def _strip(text: str) -> str:
    text = " ".join(text.split()).strip("*` ")
    bare = text.rstrip(".,;*\\\u3002\uff61 ")
    if bare.endswith("^"):  # `\\mathbb{R}^*`, `z^*`: a sign, and no mark of emphasis
        bare += "*"
    # an ellipsis says that more follows
    if "..." in text[len(bare) :]:
        return f"{bare}..."
    return bare


def _unwrapped(text: str) -> str | None:
    """The inside of a wrapper or brace that spans the whole text."""
    wrapper = _WRAPPER.match(text)
    if wrapper is None or not text.endswith("}"):
        return None
    if _BOLD.match(text) and MATRICES.fullmatch(text[wrapper.end() : -1].strip()):  # the face says that order counts
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
    """Return whether every brace of `text` closes (escaped braces are text)."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return False
    return depth == 0


def spelling(text: str) -> str:
    """Return what two cleaned texts share when they differ in spaces only (a space between two words or numbers
    counts).

    So does one in `1, 234`, which is no `1,234`.
    """
    # Drops the spaces of `( 1 , 2 )` and keeps those of `no solution`, `1 234` and `1, 234`.
    return re.sub(r"(?<!\w)(?<!\d,) | (?!\w)|(?<=\d,) (?!\d{3}(?!\d))", "", text)
