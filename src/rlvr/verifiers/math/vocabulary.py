"""The words of mathematical notation: commands, names, signs and brackets, each with its one name here."""

# ruff: noqa: RUF001 - characters that look like ASCII are part of what is read here

from __future__ import annotations

import re

FUNCTIONS: dict[str, str] = {
    **{name: name for name in ("exp", "ln", "log", "gcd", "lcm", "max", "min", "det")},
    **{name + h: name + h for name in ("sin", "cos", "tan", "cot", "sec", "csc") for h in ("", "h")},
    **{f"{arc}{name}": f"a{name}" for arc in ("a", "arc") for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"{arc}{name}h": f"a{name}h" for arc in ("a", "ar", "arc") for name in ("sin", "cos", "tan", "cot")}, "lg": "lg",
    "cosec": "csc", "tg": "tan", "ctg": "cot", "sgn": "sgn", "sign": "sgn", "Re": "re", "Im": "im", "arg": "arg",
    "sqrt": "sqrt", "abs": "abs", "floor": "floor", "ceil": "ceil", "cbrt": "cbrt", "Gamma": "gamma",
}  # fmt: skip
"""Names of functions -> the name used here."""

_GREEK = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho sigma tau upsilon phi chi
    psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar nabla
""".split()  # noqa: SIM905

NAMES: dict[str, str] = {
    **{name: name for name in _GREEK},
    **{f"var{name}": name for name in ("epsilon", "theta", "phi", "rho", "sigma", "kappa")}, "pi": "pi",
    "infty": "infinity", "infinity": "infinity", "inf": "infinity", "oo": "infinity", "imath": "i",
    "emptyset": "emptyset", "varnothing": "emptyset", "ldots": "...", "cdots": "...", "dots": "...", "dotsc": "...",
    "dotsb": "...", "vdots": "...", "top": "top", "intercal": "top", "R": "Reals", "infin": "infinity",
}  # fmt: skip

SETS = {"R": "Reals", "Z": "Integers", "N": "Naturals", "Q": "Rationals", "C": "Complexes"}

RELATIONS = {
    "=": "=", "==": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "=<": "<=", "!=": "!=", "\\ne": "!=",
    "\\neq": "!=", "\\leq": "<=", "\\le": "<=", "\\leqslant": "<=", "\\leqq": "<=", "\\geq": ">=", "\\ge": ">=",
    "\\geqslant": ">=", "\\geqq": ">=", "\\lt": "<", "\\gt": ">", "\\approx": "~", "\\simeq": "~", "\\cong": "cong",
    "\\sim": "sim", "\\in": "in", "\\notin": "notin", "\\equiv": "equiv", "\\to": "to", "\\rightarrow": "to",
    "\\longrightarrow": "to", "\\Rightarrow": "to", "\\Longrightarrow": "to", "\\subset": "subset",
    "\\subseteq": "subseteq", "\\mid": "mid", "\\vert": "|", "\\propto": "propto", "\\doteq": "~", "\\perp": "perp",
    "\\nmid": "nmid", "\\parallel": "parallel", "\\iff": "iff", "\\Leftrightarrow": "iff", "\\implies": "to",
    "\\mapsto": "mapsto", ":=": "=", "\\coloneqq": "=", "\\ge\\ ": ">=",
}  # fmt: skip

OPERATORS = {
    "\\cdot": "*", "\\times": "times", "\\ast": "*", "*": "*", "\\div": "/", "/": "/", "+": "+", "-": "-", "^": "^",
    "**": "^", "_": "_", "\\pm": "pm", "\\mp": "mp", "+-": "pm", "+/-": "pm", "\\cup": "cup", "\\bigcup": "cup",
    "\\cap": "cap", "\\setminus": "minus", "\\backslash": "minus", "!": "!", "'": "'", "\\prime": "prime", "|": "|",
    "\\|": "|", "\\Vert": "|", ":": ":", "\\colon": ":", "\\%": "%", "%": "%", "&": "&", "\\circ": "circ",
    "\\vee": "vee", "\\wedge": "wedge", "\\lor": "vee", "\\land": "wedge",
}  # fmt: skip

BRACKETS = {
    "(": "(", "[": "[", "{": "group", "\\{": "{", "\\lbrace": "{", "\\lbrack": "[", "\\langle": "<",
    "\\lfloor": "floor", "\\lceil": "ceil", "\\lVert": "bars",
}  # fmt: skip

CLOSING = {
    ")": ")", "]": "]", "}": "group", "\\}": "}", "\\rbrace": "}", "\\rbrack": "]", "\\rangle": ">",
    "\\rfloor": "floor", "\\rceil": "ceil", "\\rVert": "bars",
}  # fmt: skip

COMMANDS = frozenset(
    """
    frac binom tbinom dbinom int iint oint sum prod lim overline bar vec hat tilde widehat overrightarrow dot ddot
    underbrace overset angle triangle pmod bmod mod partial choose over not
    """.split()  # noqa: SIM905
)

IGNORED = frozenset(
    """
    limits nolimits displaystyle textstyle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr left right middle quad
    qquad medspace thickspace thinspace negthinspace negmedspace negthickspace hline hfill rm mathstrut strut
    smallskip nonumber
    """.split()  # noqa: SIM905
)

CURRENCIES = {
    "$": "dollar", "USD": "dollar", "€": "euro", "EUR": "euro", "euro": "euro", "£": "pound", "pounds": "pound",
    "¥": "yen", "₹": "rupee", "Rs": "rupee",
}  # fmt: skip
CONDITIONS = frozenset(["for all", "for any", "for every", "for each", "for some", "as long as", "such that"]).union(
    "where for if when with provided".split()  # noqa: SIM905
)
"""Words before a condition on what was said."""

MATRICES = re.compile(r"(?!.*(.).*\1)[A-DF-HJ-NP-Z]{2,3}")
"""Letters in one bold face that are a product of matrices (`\\mathbf{AB}`): words and numerals (NO, DNE, III) have an
E, I or O or repeat."""

_CHARACTERS = """
    →to ⇒to ∖setminus ≈approx …ldots ⋯cdots ⌊lfloor ⌋rfloor ⌈lceil ⌉rceil ∫int ∑sum ∏prod ⟨langle ⟩rangle ≡equiv ∓mp
    ∣mid ⩽leq ⩾geq ∉notin ∠angle ∂partial ∛cbrt ⊂subset ⊆subseteq ∧wedge ∨vee ≅cong ϕphi φphi εepsilon μmu σsigma
    ωomega δdelta ρrho τtau ψpsi ηeta ΔDelta ΩOmega ΓGamma ΣSigma ξxi νnu κkappa χchi ζzeta ΦPhi ΘTheta ΛLambda ⊤top
    ∙cdot •cdot
""".split()  # noqa: SIM905
"""A character and the command that it stands for."""

UNICODE = str.maketrans(
    {
        **{entry[0]: f"\\{entry[1:]} " for entry in _CHARACTERS},
        "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "ℝ": "\\mathbb{R}", "∗": "*",
        "∶": ":", "″": "''", "ᵀ": "^\\top ", "≪": "<", "−": "-",
        **{char: f"_{digit}" for digit, char in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    }
)  # fmt: skip
