r"""The tokens of a mathematical text: LaTeX, plain ASCII (`sqrt(2)`, `x^2`, `pi`) or unicode.

What only differs in writing becomes one token here: `\leqslant`, `<=` and `≤`; `\operatorname{arcsin}`, `\sin^{-1}` is
left to the parser. A run of letters is a known name, a word, or a product of one-letter symbols.

Invariant: linear in the text; `tokenize` raises `UnreadableError` for a character or a command it does not know.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rlvr.verifiers.math.units import dimension
from rlvr.verifiers.math.vocabulary import (
    BRACKETS,
    CLOSING,
    COMMANDS,
    FUNCTIONS,
    IGNORED,
    MATRICES,
    NAMES,
    OPERATORS,
    RELATIONS,
    SETS,
    UNICODE,
)

# The parser is linear in the tokens, but the evaluation is not in the tree: longer texts are left to no verifier. The
# value is arbitrary, far above any answer (2,000 characters).
MAX_TOKENS = 1500
"""Tokens of a text; a longer one is unreadable."""
# As many as numeric.MAX_DIGITS, so that both readers refuse the same literals.
MAX_DIGITS = 1000
"""Digits of one literal."""


class UnreadableError(ValueError):
    """The text is not mathematics that is understood here."""


class Token(NamedTuple):
    """`kind` is one of number, symbol, function, words, relation, separator, open, close, operator, currency, command,
    environment, end."""

    kind: str
    text: str
    spaced: bool = False
    """True if white space stands before it."""


END = Token("end", "")


_STYLES = (
    "text|textrm|textbf|textit|textnormal|textsf|mbox|hbox|mathrm|mathbf|mathit|mathsf|mathcal|mathbb|mathfrak"
    "|mathtt|operatorname\\*?|boldsymbol|bm|underline|boxed|fbox"
)


_BOLD = frozenset({"mathbf", "boldsymbol", "bm"})
# Matches `12.5e3`, `\text{cm}^2`, `<=`. Alternatives are tried in this order: `1..2` is a number and dots, `a.m.` is no
# product of letters, `\mathbf x` is a letter.
_TOKEN = re.compile(
    rf"""(?P<space>\s+)
    |(?P<number>\d+(?:\.(?!\.)\d*)?(?:[eE][+-]?\d+(?![\w.]))?|\.\d+)
    |(?P<dots>\.\.\.+)
    |\\(?P<style>{_STYLES})\s*\{{(?P<inner>[^{{}}]*(?:\^\{{[^{{}}]*\}}[^{{}}]*)*)\}}
    |\\(?P<face>math[a-z]+|text[a-z]*|boldsymbol|bm)\s+(?P<letter>[A-Za-z](?![A-Za-z]))
    |(?P<begin>\\(?:begin|end)\s*\{{[a-zA-Z*]+\}}(?:\s*\{{[lcr|\s]*\}})?)
    |(?P<noon>[AaPp]\.\s?[Mm]\b\.?)
    |(?P<letters>[A-Za-z]+)
    |(?P<foreign>[^\W\d_a-zA-Z]+)
    |(?P<command>\\(?:[A-Za-z]+|[^A-Za-z\s]|\\))
    |(?P<sign><=|>=|=<|!=|==|:=|\*\*|\+/-|[^\s\w]|_)""",
    re.VERBOSE,
)
# Matches `sinx`, `arctan`, `cosh`; not `sinxy`, `sinus`. A name with at most one letter behind it, which is its
# argument.
_SPLIT_NAME = re.compile(r"(arc(?:sin|cos|tan)|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|sqrt|pi)([a-zA-Z]?)$")
_VOWEL = re.compile(r"[aeiouyAEIOUY]")
_SHORT_UNITS = frozenset(
    """
    cm mm km kg ft yd lb lbs oz hr hrs min mins sec secs mph kph cal sq pts pct st nd rd th am pm AM PM deg Hz kHz
    MHz kW kWh kN
    """.split()  # noqa: SIM905
)
"""Words straight after a number that would otherwise be products of letters."""
# Matches `km`, `ms`, `kPa`; not `ab`, `kX`.
_SYMBOL = re.compile(
    r"[kMGTmn]?(?:m|g|s|L|l|N|W|J|V|A|K|Pa|eV|Wh|mol|rad)|[cd](?:m|L|l)|hPa|[kMGT][Bb]|h|in|mi|min|F|C"
)
"""Symbols of units, which need nothing but an end or another unit behind them."""
LONGEST_SYMBOL = 3
"""Letters of a symbol that may be a product of variables too."""
# Matches `^2`, ` ^ {3`; not `^x`.
_RAISED = re.compile(r"\s*\^\s*\{?\s*\d")
"""A power of a unit; of bare letters only lengths have one (`5 s^2` is a product)."""
# Matches ``, `, 3`, ` 30 min`, `^2`; not ` + 3`, ` x`. Behind a unit the value ends, or the next one begins.
_AFTER_UNIT = re.compile(r"\s*(?:$|\d+(?:\.\d+)?\s*[A-Za-z\\]|[,;})/=<>]|\^\s*\{?-?[1-3](?!\d)|(?:and|or|per)\b|\\)")
_SHORT_WORDS = frozenset(
    """
    yes odd all the not for any are has one two six ten was you but its per day days hour year cups foot feet inch
    men
    """.split()  # noqa: SIM905
)
_PROSE = frozenset("no is of in to if at by an as so we it be on a I m cm s".split())  # noqa: SIM905
"""Short words in the company of longer ones."""
# Matches ` apples`; not ` x y`.
_NEXT_WORD = re.compile(r"\s+[a-zA-Z]*[aeiouyAEIOUY][a-zA-Z]*[A-Za-z]{2}")
_BEFORE_NOUN = re.compile(r"\s+[A-Za-z]")
"""Text behind an article; behind the letter `a` stands a sign instead (`where a > 0`)."""
# Matches `5^{\text{th}}`, `21^{st}`; not `x^{th}`.
_ORDINAL = re.compile(
    r"(?<=\d)\s*\^\s*(?:\{\s*(?:\\(?:text|mathrm|textrm)\s*\{)?\s*(th|st|nd|rd)\s*\}?\s*\}|\\(?:text|mathrm"
    r"|textrm)\s*\{\s*(th|st|nd|rd)\s*\})"
)
# Matches `5 \frac{\text{m}}{\text{s}^2}`; not `\frac{m}{s}`. Rewritten before the tokens are made, since a token of
# words has no structure.
_RATIO_OF_UNITS = re.compile(
    r"(?<=[\d)}\s;,])\\[dt]?frac\s*\{\s*\\(?:text|mathrm|textrm)\s*\{([^{}]*)\}(\^\d)?\s*\}"
    r"\s*\{\s*\\(?:text|mathrm|textrm)\s*\{([^{}]*)\}(\^\d|\^\{\d\})?\s*\}"
)
"""A unit as a fraction: `5 \\frac{\\text{m}}{\\text{s}^2}`."""
# Matches `cm and`, `and cm or`, `cm,`; not `cm`, `black and white`.
_JOINED_WORDS = re.compile(r"(?:(and|or)\s+)?([A-Za-z]+(?:\s[A-Za-z]+)*?)(?:\s+(and|or)|\s*(?=[,;])([,;]))")
"""Words with what joins them to the next value."""
# Matches `3.5 + 2`, `1,000`; not `3 cm`. Mathematics set in a text command.
_NUMERIC_TEXT = re.compile(r"[\s\d.,+\-*/()=<>^]*\d[\s\d.,+\-*/()=<>^]*")


def tokenize(text: str, bare_units: bool = True, variables: frozenset[str] = frozenset()) -> list[Token]:
    """The tokens of `text`, without an end mark; raises UnreadableError.

    With `bare_units` letters behind a number may be a unit (`5 cm`, `5 m`), unless all of them are `variables`;
    without, they are variables.
    """
    if not text.isascii():
        text = text.translate(UNICODE)
    text = _ORDINAL.sub(r" \\text{\1\2}", text)
    text = _RATIO_OF_UNITS.sub(_ratio_of_units, text)
    tokens: list[Token] = []
    at = 0
    spaced = False
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) > MAX_TOKENS:
            raise UnreadableError(f"{text[at : at + 20]!r} is not understood" if match is None else "too many tokens")
        at = match.end()
        kind = match.lastgroup
        if kind == "space":
            spaced = True
            continue
        before = len(tokens)
        if kind == "inner":
            _styled(match["style"], match["inner"], spaced, tokens)
        elif kind == "letter":
            _styled(match["face"], match["letter"], spaced, tokens)
        elif kind == "letters":
            run = match[0]
            # Letters are a product of variables, not a unit; nobody writes a square of one as `mm`.
            is_product = len(set(run)) == len(run) and variables.issuperset(run)
            _letters(run, spaced, tokens, text[at : at + 20], bare_units and not is_product)
        else:
            _READERS[kind or ""](match[0], spaced, tokens)
        spaced = spaced and len(tokens) == before
    return _thousands(tokens)


def _ratio_of_units(fraction: re.Match[str]) -> str:
    """The fraction as one unit, or as it is where its words are no units (`\\frac{\\text{red}}{\\text{blue}}`)."""
    above, power, below, power_below = (part or "" for part in fraction.groups())
    unit = f"{above}{power}/{below}{power_below}"
    if dimension(unit) is None:
        return fraction[0]
    return rf" \text{{{unit}}}"


def _number(text: str, spaced: bool, tokens: list[Token]) -> None:
    if len(text) > MAX_DIGITS or len(text.lower().partition("e")[2]) > 4:  # 1e99999 has as many digits
        raise UnreadableError("a literal of too many digits")
    tokens.append(Token("number", text, spaced))


def _styled(style: str, inner: str, spaced: bool, tokens: list[Token]) -> None:
    r"""`\text{...}`, `\mathrm{...}` and their kind: a name, words, or mathematics."""
    name = inner.strip()
    if not name:
        return
    if (edges := _JOINED_WORDS.fullmatch(name)) is not None:  # `3 \text{ cm and } 4 \text{ cm}`
        before, words, *after_words = edges.groups()
        after = after_words[0] or after_words[1]
        tokens.extend([Token("separator", before, spaced)] if before else [])
        tokens.append(Token("words", " ".join(words.split()), spaced))
        tokens.extend([Token("separator", after, True)] if after else [])
        return
    # `\mathbb{Z}` is the set of integers, `\mathbb{F}` a symbol.
    if style == "mathbb":
        tokens.append(Token("symbol", SETS.get(name, name), spaced))
    elif name in ("and", "or", ",", ";"):
        tokens.append(Token("separator", name, spaced))
    elif name in ("mod", "modulo"):
        tokens.append(Token("command", "mod", spaced))
    elif name in ("gcd", "lcm"):
        tokens.append(Token("function", name, spaced))
    # `3 \text{ to } 1` is the ratio `3:1`.
    elif name == "to" and _may_be_ratio(tokens):
        tokens.append(Token("operator", ":", spaced))
    elif style.startswith("operator") and (name in FUNCTIONS or name.isalpha()):
        _letters(name, spaced, tokens) if name in FUNCTIONS or name in NAMES else tokens.append(
            Token("words", name, spaced)
        )
    elif (
        style in ("boxed", "fbox", "underline")
        or _NUMERIC_TEXT.fullmatch(inner)
        or (len(name) == 1 and not name.isalnum())
    ):
        tokens.extend(tokenize(inner))
    elif len(name) == 1 and _follows_value_or_unit(tokens, style in _BOLD) and _SYMBOL.fullmatch(name):
        tokens.append(Token("words", name, spaced))
    elif style in _BOLD and ((len(name) == 1 and name.isalpha()) or MATRICES.fullmatch(name)):
        tokens.extend(Token("symbol", f"bold {letter}", spaced and not at) for at, letter in enumerate(name))
    elif (
        len(name) == 1
        or (name in FUNCTIONS and not style.startswith("text"))
        or (style in ("mathbf", "mathcal", "mathfrak", "boldsymbol", "bm") and name.isalpha())
    ):
        _letters(name, spaced, tokens)
    else:
        tokens.append(Token("words", " ".join(name.replace("\\cdot", "*").replace("\\", " ").split()), spaced))


def _follows_value_or_unit(tokens: list[Token], is_bold: bool) -> bool:
    r"""Return True if an upright letter is a unit behind these tokens: behind a number or, if it is not bold
    (`\mathbf{B}^{-1}\mathbf{A}`), a bracket, or joined to a unit (`\text{m} \cdot \text{s}`)."""
    return _joins_unit(tokens) or (bool(tokens) and tokens[-1].kind in ({"number"} if is_bold else {"number", "close"}))


def _joins_unit(tokens: list[Token]) -> bool:
    """Return True if the last token joins a unit to the next one (`m /`, `m^2 /`)."""
    if not tokens or tokens[-1].text not in ("*", "/"):
        return False
    # Behind `m /` the unit is two tokens back; behind `m ^ 2 /` it is four.
    raised = len(tokens) > 3 and tokens[-3].text == "^"
    return len(tokens) > 1 and tokens[-4 if raised else -2].kind == "words"


def starts_with_function(word: str) -> bool:
    """Return True if a word is the name of a function, with at most one letter behind it (`csc`, `cscx`)."""
    return word in FUNCTIONS or _SPLIT_NAME.match(word) is not None


def _may_be_ratio(tokens: list[Token]) -> bool:
    """Return True if `to` after these tokens makes a ratio (`3 to 1`)."""
    return bool(tokens) and tokens[-1].kind == "number"


def _letters(run: str, spaced: bool, tokens: list[Token], following: str = "", bare_units: bool = True) -> None:
    is_minutes = run == "min" and tokens[-1:] != [] and tokens[-1].kind == "number" and bare_units
    if run == "DNE" or (is_minutes and _AFTER_UNIT.match(following)):
        _word(run, spaced, tokens)
    elif run in FUNCTIONS:
        tokens.append(Token("function", FUNCTIONS[run], spaced))
    # `R` alone is a variable, unlike `\mathbb{R}`.
    elif run in NAMES and len(run) > 1:
        tokens.append(Token("symbol", NAMES[run], spaced))
    elif run.lower() in ("and", "or"):
        tokens.append(Token("separator", run.lower(), spaced))
    # `3 to 1`; elsewhere `to` is a word.
    elif run == "to" and _may_be_ratio(tokens):
        tokens.append(Token("operator", ":", spaced))
    elif run.lower() == "mod":
        tokens.append(Token("command", "mod", spaced))
    # `(1, 2) U (3, 4)`: a union in plain ASCII.
    elif run == "U" and spaced and tokens and tokens[-1].kind == "close":
        tokens.append(Token("operator", "cup", spaced))
    elif _is_word(run, spaced, tokens, following, bare_units):
        _word(run, spaced, tokens)
    # `lnx` is ln of x: without the split it would be a product of three letters.
    elif len(run) > 1 and (split := _SPLIT_NAME.match(run)):
        _letters(split[1], spaced, tokens)
        _letters(split[2], False, tokens)
    else:
        tokens.extend(Token("symbol", letter, spaced and not at) for at, letter in enumerate(run))


def _is_word(run: str, spaced: bool, tokens: list[Token], following: str, bare_units: bool) -> bool:
    """Return True if a run of letters is a word, not a product: by its length, or by the company it is in."""
    if (len(run) > 3 and _VOWEL.search(run) and not run.isupper()) or run.lower() in _SHORT_WORDS:
        return True
    previous = tokens[-1].kind if tokens else "end"
    if previous == "words" and spaced and (len(run) > 1 or (run == "a" and _BEFORE_NOUN.match(following))):
        return True
    if previous == "number" and spaced and run == "is":
        return True
    joined = _joins_unit(tokens)
    raised = len(tokens) > 2 and tokens[-2].text == "^" and tokens[-3].kind == "symbol"  # R^2 h is a product
    if (
        bare_units
        and (joined or (previous == "number" and not raised))
        and (joined or run.endswith(("m", "ft", "in")) or not _RAISED.match(following))
        and (run in _SHORT_UNITS or (_SYMBOL.fullmatch(run) and _AFTER_UNIT.match(following)))
    ):
        return True
    return (
        run.lower() in _PROSE
        and (spaced or previous == "end")
        and len(run) > 1
        and previous != "operator"
        and _NEXT_WORD.match(following) is not None
    )


def _word(run: str, spaced: bool, tokens: list[Token]) -> None:
    if tokens and tokens[-1].kind == "words":
        tokens[-1] = Token("words", f"{tokens[-1].text} {run}", tokens[-1].spaced)
    else:
        tokens.append(Token("words", run, spaced))


def _from_tables(text: str, spaced: bool) -> Token | None:
    """A relation, an operator or a bracket, which commands and single signs write alike."""
    for kind, table in (("relation", RELATIONS), ("operator", OPERATORS), ("open", BRACKETS), ("close", CLOSING)):
        if text in table:
            return Token(kind, table[text], spaced)
    return None


def _command(text: str, spaced: bool, tokens: list[Token]) -> None:
    name = text[1:]
    if text == "\\\\":
        tokens.append(Token("separator", "\\\\", spaced))
    elif (token := _from_tables(text, spaced)) is not None:
        tokens.append(token)
    elif name in COMMANDS:
        tokens.append(Token("command", name, spaced))
    elif name in NAMES and name != "R":
        tokens.append(Token("symbol", NAMES[name], spaced))
    elif name in FUNCTIONS:
        tokens.append(Token("function", FUNCTIONS[name], spaced))
    # `\quadand`: models forget the space behind the command.
    elif name.startswith("quad") and name not in IGNORED:
        _letters(name.removeprefix("q").removeprefix("quad").removeprefix("uad"), True, tokens)
    elif name in ("$", "pounds", "euro"):
        tokens.append(Token("currency", name, spaced))
    elif name not in IGNORED and name not in (" ", ",", ";", ":", "!"):
        raise UnreadableError(f"{text} is not understood")


def _sign(text: str, spaced: bool, tokens: list[Token]) -> None:
    # Kept as separators: `_thousands` decides below which commas belong to a number.
    if text in ",;":
        tokens.append(Token("separator", text, spaced))
    elif (token := _from_tables(text, spaced)) is not None:
        tokens.append(token)
    elif text in "€£¥₹$":
        tokens.append(Token("currency", text, spaced))
    elif text != "~":
        raise UnreadableError(f"{text!r} is not understood")


_READERS = {
    "number": _number,
    "command": _command,
    "sign": _sign,
    "foreign": _word,
    "noon": lambda text, spaced, tokens: _word(text[0].lower() + "m", spaced, tokens),
    "dots": lambda text, spaced, tokens: tokens.append(Token("symbol", "...", spaced)),
    "begin": lambda text, spaced, tokens: tokens.append(
        Token("environment", "".join(text.split()).lstrip("\\").split("}")[0].replace("{", " "), spaced)
    ),
}


def _thousands(tokens: list[Token]) -> list[Token]:
    """`1,000` as one number: where no bracket is open, or where the bracket's other commas are followed by a space."""
    spaced_levels = set()
    levels = []
    stack = [0]
    count = 0
    for at, token in enumerate(tokens):
        if token.kind == "open":
            count += 1
            stack.append(count)
        elif token.kind == "close" and len(stack) > 1:
            stack.pop()
        levels.append(stack[-1])
        if token.text == "," and at + 1 < len(tokens) and tokens[at + 1].spaced:
            spaced_levels.add(stack[-1])
    merged: list[Token] = []
    at = 0
    while at < len(tokens):
        end = at + 1
        if tokens[at].kind == "number" and (levels[at] == 0 or levels[at] in spaced_levels):
            while _comma_group(tokens, end):
                end += 2
        digits = [tokens[place].text for place in range(at, end, 2)]
        if (
            end > at + 1
            and _is_thousands(digits)
            and not (end + 1 < len(tokens) and tokens[end].text == "," and not tokens[end + 1].spaced)
        ):
            merged.append(Token("number", "".join(digits), tokens[at].spaced))
        else:
            merged.extend(tokens[at:end])
        at = end
    return merged


def _comma_group(tokens: list[Token], at: int) -> bool:
    return (
        at + 1 < len(tokens)
        and tokens[at].text == ","
        and not tokens[at].spaced
        and tokens[at + 1].kind == "number"
        and not tokens[at + 1].spaced
    )


def _is_thousands(groups: list[str]) -> bool:
    first, *rest = groups
    return (
        first.isdecimal()
        and 1 <= len(first) <= 3
        and first[0] != "0"
        and all(len(g.split(".")[0]) == 3 for g in rest)
        and all(g.isdecimal() for g in rest[:-1])
    )
