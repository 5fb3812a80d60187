"""The mathematics verifier: one extracted answer against one gold answer, or several of which any is right.

The stages, each only where the one before cannot decide:
1. extraction: which text is the answer (microseconds);
2. latex.clean and numeric.read_number: one spelling; plain numbers, exactly (microseconds);
3. compare: structure, exact values, numeric sampling (milliseconds, bounded);
4. symbolic.equal, only with `math_verify: true`: math-verify on LaTeX, for what is left (under a time limit of its
   own).

Invariants: stages 1 and 2 are `quick`, take linear time and evaluate nothing; the others run in a worker process;
whatever the answer causes scores 0; only a bad gold is undecided; nothing raises. `read_golds` never raises either: the
`problem` of a gold says what cannot be used.
"""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError, nearest
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers import answers
from rlvr.verifiers.answers import METHODS, Fallback, Method
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.math import symbolic
from rlvr.verifiers.math.answer_comparison import compare
from rlvr.verifiers.math.computation_deadline import OutOfTime
from rlvr.verifiers.math.latex import balanced, clean, spelling
from rlvr.verifiers.math.letters import (
    is_product,
    is_product_of_letters,
    read,
    variables_of,
    without_asked_noun,
    words_of,
)
from rlvr.verifiers.math.math_tokens import UnreadableError, starts_with_function
from rlvr.verifiers.math.numeric import PlainNumber, read_number
from rlvr.verifiers.math.restatement import restates
from rlvr.verifiers.math.rules import Percent, Rules, Units
from rlvr.verifiers.math.vocabulary import FUNCTIONS

# Below time_limit (1 s), which also covers the stages before: the pool kills a worker that is over it, which costs a
# restart.
SYMBOLIC_SECONDS = 0.6
"""Seconds of math-verify for one answer, over all golds; the pool's own limit is the second line."""
FLOAT_DIGITS = 12
"""Significant digits of a gold that is a float: 0.1 + 0.2 is meant to be 0.3."""

# Matches `no solution`, `blue`; not `x`, `cats and dogs`, `5 cats`.
_WORDS = re.compile(r"(?=[A-Za-z' ]*[A-Za-z]{3})(?!.*\b(?:and|or)\b)[A-Za-z]+(?: [A-Za-z']+)*")
# Matches `infinity`, `theta`, `all reals`; not `blue`.
_MATHEMATICAL = re.compile(
    r"inf(?:inity|ty)?|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi|psi|sin|cos|tan|log|exp|sqrt|none"
    r"|empty(?: set)?|undefined|all reals?(?: numbers)?|abcd?|xyz|pqr|rst|uvw",
    re.IGNORECASE,
)
"""Words that are mathematics too, or a product of letters: they are compared as such."""
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
# Matches `, `, ` meters and `; not `. Hence `.
_LOOSE_JOINT = re.compile(r"[^A-Za-z]*|[^.!?\n]*?\b(?:and|or)\b[^.!?\n]*")
# Matches `1,22`; not `1,234,567`.
_COMMA_OF_GOLD = re.compile(r"(?<![\d.,])(\d+),(\d+)(?![\d.,])")
# Matches `\boxed{5`; not `\boxed 5`.
_UNCLOSED_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(?!.*\\(?:boxed|fbox))", re.DOTALL)
_HEDGE = re.compile(
    r"\b(?:maybe|perhaps|possibly|either|alternatively|probably|not|isn't|wrong|incorrect)\b", re.IGNORECASE
)
_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])")
_DECIMAL_COMMA = re.compile(r"([-+]?\d+),(\d+)")
# Matches `x \in [0, 1]`, `(0, 1)`; not `x > 1`.
_SET = re.compile(r"\\in(?![A-Za-z])|[\[(].*,.*[\])]")
# Matches `x < 2`, `x \leq 2`; not `\left(x`.
_INEQUALITY = re.compile(r"[<>]|\\[lg](?:eq?|t)(?![A-Za-z])")
# Matches `a b c`, `a \cdot b`; not `abc`.
_SPELLED = re.compile(r"[A-Za-z](?:\s*(?:\\cdot|\\times|\*|\s)\s*[A-Za-z])+")
"""Single letters with spaces or signs between them: a product, whatever word they spell."""
_NO_SOLUTION = re.compile(r"no (?:real )?solutions?", re.IGNORECASE)
"""Words for the empty set, which signs may say too."""
_SYNONYMS = {"true": "yes", "false": "no", "dne": "does not exist"}


@register_verifier("math")
@dataclass
class MathVerifier(Verifier):
    r"""Checks the final answer of a completion against `task.answer`.

    The gold is a number or a text (a bare answer in LaTeX, or a solution that ends in `#### 72` or `\boxed{72}`), a
    list of which any one is right, or `{"all": [...]}`, of which all are asked for.
    """

    methods: tuple[Method, ...] = METHODS
    """Places to look for the answer, in order of precedence: `boxed`, `hash` (`#### 72`), `tag` (`<answer>`),
    `phrase`."""
    fallback: Fallback = "none"
    """When none of the methods finds anything: `none`, the `last_formula` between math delimiters, that or the
    `last_number`, or the `whole` text after the reasoning."""
    percent: Percent = "either"
    """Values that 28% equals: `either` of 28 and 0.28, the `number` 28, or the `fraction` 0.28."""
    units: Units = "checked"
    """`checked`: a unit may be left out, but where both sides state one, 3 hours are 180 minutes and 5 cm are not 5 m;
    `ignored`; or `required` where the gold has one."""
    ordered: bool = False
    """Accept several answers (`1, 2`) in the gold's order only. Tuples always have an order, sets never."""
    require_simplified: bool = True
    r"""A gold that is a plain number wants a plain number, and what the prompt already says is no answer: `6 \cdot 7`
    for 42 restates the problem and is wrong. `6 \cdot 7 = 42` is right."""
    relation_for_set: bool = True
    r"""Accept an inequality where the gold is a set: `-2 \le x \le 7` for `x \in [-2, 7]`."""
    decimal_comma: bool = False
    """The gold writes decimals with a comma: 1,22 is 1.22, not 1 and 22."""
    tolerance: float = 0.0
    """Relative error allowed between numbers; 0 compares exactly. Even then a decimal of 12 or more significant digits
    equals the exact number that it is the rounding of, or whose double it is (`1.4142135623730951`)."""
    math_verify: bool = False
    """Ask the package math-verify (SymPy) about what the comparison here cannot decide. It adds few right answers, some
    wrong ones, and most of the slow verdicts; needs the extra `math-verify`
    (docs/installation.md)."""
    max_boxes: int = 8
    r"""Different `\boxed{}` that the final text may contain. The last one decides; more than this is listing
    candidates."""
    think_opened_by_prompt: bool = False
    """The prompt's template ends in `<think>`: a completion without `</think>` has no answer yet."""
    max_length: int = 2000
    """Characters of an answer; a longer one is unparsable."""
    time_limit: float = 1.0
    """Seconds for one answer; one that takes longer scores 0. Ordinary ones take milliseconds."""

    needs: ClassVar[Needs] = Needs(process=True)

    def __post_init__(self) -> None:
        for option, value, choices in (
            ("fallback", self.fallback, get_args(Fallback)),
            ("percent", self.percent, get_args(Percent)),
            ("units", self.units, get_args(Units)),
            *(("methods", method, METHODS) for method in self.methods),
        ):
            if value not in choices:
                raise ConfigError(f"verifier 'math': {option} {value!r} is not known{nearest(str(value), choices)}")
        for option, low in (("tolerance", 0), ("max_boxes", 1), ("max_length", 1)):
            if not getattr(self, option) >= low:
                raise ConfigError(f"verifier 'math': {option} must be at least {low}, not {getattr(self, option)}")
        if self.math_verify and not symbolic.is_installed():
            raise ConfigError(f"verifier 'math': math_verify needs math-verify: {install_command('math-verify')}")
        if not self.time_limit > 0:
            raise ConfigError(f"verifier 'math': time_limit must be above 0 seconds, not {self.time_limit}")

    def prepare(self) -> None:
        if self.math_verify:
            symbolic.load()
        # Imports mpmath and fills the caches before the time limit of the first answer starts.
        compare("x^2-1", "(x-1)(x+1)")

    def quick(self, task: Task, completion: str) -> Verdict | None:
        """The verdict where reading numbers and texts is enough, else None."""
        golds = read_golds(task.answer, self.decimal_comma)
        if golds[0].problem:
            return Verdict.undecided(f"bad gold: {golds[0].problem}")
        extracted = self._find(completion)
        if isinstance(extracted, Verdict):
            return extracted
        answer = clean(extracted)
        if not answer or not balanced(answer):
            return answers.unparsable("the answer is empty or its braces do not balance", extracted)
        number = read_number(answer)
        wrong = []
        for gold in golds:
            reason = self._decide(task, gold, answer, number)
            if reason == "":
                return Verdict.from_score(1.0, answer=extracted)
            wrong.append(reason)
        # One gold that only the later stages can decide keeps the question open, whatever the others said.
        if None in wrong:
            return None
        return answers.wrong(wrong[0] or "", extracted)

    def verify(self, task: Task, completion: str) -> Verdict:
        """The verdict, through all stages. Bounded in time, but tens of milliseconds long: it belongs in the pool."""
        verdict = self.quick(task, completion)
        if verdict is not None:
            return verdict
        extracted = self._find(completion)
        assert isinstance(extracted, str)  # quick said so
        answer = clean(extracted)
        golds = read_golds(task.answer, self.decimal_comma)
        number = read_number(answer)
        verdicts = []
        seconds = min(SYMBOLIC_SECONDS, self.time_limit) / len(golds)
        for gold in golds:
            if self._decide(task, gold, answer, number) is None:
                verdict = self._compare(task, gold, answer, extracted, seconds)
                if verdict.score == 1:
                    return verdict
                verdicts.append(verdict)
        return verdicts[0]

    def cache_key(self, task: Task, completion: str) -> Hashable | None:
        extracted = self._find(completion)
        if isinstance(extracted, Verdict):
            return None
        return (repr(task.answer), _last_message(task.prompt), extracted)

    def check_task(self, task: Task) -> str | None:
        return next((gold.problem for gold in read_golds(task.answer, self.decimal_comma) if gold.problem), None)

    def same_answer(self, first: str, second: str) -> bool:
        """Return True if two answers are the same; bounded in time, microseconds for numbers and equal texts."""
        one = clean(first[: self.max_length])
        other = clean(second[: self.max_length])
        if spelling(one) == spelling(other):
            return True
        a = read_number(one)
        b = read_number(other)
        if a and b:
            return a.equals(b, self._rules())
        return compare(one, other, replace(self._rules(), require_simplified=False)).equal is True

    def _rules(self, variables: frozenset[str] = frozenset(), nouns: frozenset[str] = frozenset()) -> Rules:
        return Rules(self.ordered, self.require_simplified, self.tolerance, variables, nouns, self.percent, self.units)

    def _find(self, completion: Any) -> str | Verdict:
        """The answer as the completion writes it, or the verdict where there is none."""
        if not isinstance(completion, str):
            return answers.unparsable(f"the completion is {type(completion).__name__}, not a text", None)
        text = answers.final_text(completion, self.think_opened_by_prompt)
        extracted = None if text is None else answers.find_answer(text, self.methods, self.fallback)
        if text is None or extracted is None:
            return answers.unparsable("no final answer found", None)
        if len(extracted) > self.max_length:
            reason = f"the answer has {len(extracted)} characters, over the limit of {self.max_length}"
            return answers.unparsable(reason, extracted[: self.max_length])
        if text.count("\\boxed") > self.max_boxes:
            candidates = len({text[start:end] for _, start, end in answers.boxes(text)})
            if candidates > self.max_boxes:
                reason = f"{candidates} different boxes, over the limit of {self.max_boxes}"
                return answers.wrong(reason, extracted)
        return extracted

    def _decide(self, task: Task, gold: Gold, answer: str, number: PlainNumber | None) -> str | None:
        """Decide by numbers and texts: "" if the answer is right, else why it is wrong; None if undecided."""
        prompt = _last_message(task.prompt)
        if gold.number is not None and not gold.number.unit and gold.number.scale == 1:
            bare = without_asked_noun(answer, prompt)
            number = number if bare == answer else read_number(bare)
        # `5m` is read as a number with a unit only where the gold has one: alone it may be a product.
        if gold.number is not None and number is None and gold.number.unit:
            number = read_number(answer, letters=True)
        if gold.number is not None and number is not None:
            if any(unit and is_product(unit, prompt) for unit in (gold.number.unit, number.unit)):
                return None  # only the tree tells `5cm` from `5 \text{cm}`
            if gold.number.label and number.label and gold.number.label != number.label:
                return None
            nouns = words_of(prompt) if number.unit and not gold.number.unit else frozenset()
            if not gold.number.equals(number, self._rules(nouns=nouns)):
                return "another number"
            integer = gold.number.value.denominator == 1 and gold.number.scale == 1 and not gold.number.is_fraction
            restated = number.is_fraction and integer
            if restated and self.require_simplified:
                return "equal, but a fraction where the gold is an integer"
            return ""
        if spelling(answer) == spelling(gold.text):
            return ""
        if gold.is_words and _normalised(answer) == _normalised(gold.text):
            return ""
        if gold.is_words and not (
            _SPELLED.fullmatch(answer)
            or _NO_SOLUTION.fullmatch(gold.text)
            or is_product_of_letters(gold.text, variables_of(prompt), words_of(prompt))
        ):
            return "other words"
        if gold.number is not None:
            comma = _DECIMAL_COMMA.fullmatch(answer)
            # A gold with decimals, and an answer that writes them with a comma: `1,22` for 1.22.
            if comma and (decimal := read_number(f"{comma[1]}.{comma[2]}")) and gold.number.places:
                if gold.number.equals(decimal, self._rules()):
                    return ""
                return "another number"
            # `42 or 41`: two guesses.
            if _OR.search(answer):
                return "several alternatives where the gold has one answer"
        if (
            not self.relation_for_set
            and _SET.search(gold.text)
            and not _SET.search(answer)
            and _INEQUALITY.search(answer)
        ):
            return "an inequality where the gold is a set"
        if _HEDGE.search(answer) and not _HEDGE.search(gold.text):
            return "a hedged answer"
        return None

    def _compare(self, task: Task, gold: Gold, answer: str, extracted: str, seconds: float) -> Verdict:
        """The stages behind `quick`, for one gold."""
        prompt = _last_message(task.prompt)
        comparison = compare(gold.text, answer, self._rules(variables_of(prompt), words_of(prompt)))
        equal = comparison.equal is True
        if comparison.equal is False:
            status = VerdictStatus.WRONG
        else:
            status = VerdictStatus.UNPARSABLE
        reason = comparison.reason
        if comparison.equal is None and self.math_verify:
            equal, status, reason = _by_math_verify(gold.text, answer, seconds, reason)
        if equal and self.require_simplified and restates(prompt, gold.text, answer):
            return answers.wrong("the problem restated", extracted)
        if equal:
            return Verdict.from_score(1.0, answer=extracted)
        if not is_readable(gold):
            reason = f"the gold {gold.text[:200]!r} cannot be read as mathematics: only its own spelling is right"
        return Verdict(status, 0.0, reason=reason, answer=extracted)


def _by_math_verify(gold: str, answer: str, seconds: float, reason: str) -> tuple[bool, VerdictStatus, str]:
    """Return True if math-verify finds the two equal, and the status and the reason of the answer if it does not."""
    if symbolic.fit(gold) and symbolic.fit(answer):
        try:
            return symbolic.equal(gold, answer, seconds), VerdictStatus.UNPARSABLE, reason
        except OutOfTime:
            return False, VerdictStatus.TIMEOUT, "reading the answer takes too long"
        except MemoryError:  # the pool finds out whether it is the answer's doing
            raise
        except Exception as error:  # the library was written for honest texts: it may raise anything
            return False, VerdictStatus.UNPARSABLE, f"{type(error).__name__} while reading the answer"
    return False, VerdictStatus.UNPARSABLE, reason


def _normalised(text: str) -> str:
    words = spelling(text).casefold().strip("()")
    return _SYNONYMS.get(words, words)


def _last_message(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else ""


@dataclass(frozen=True)
class Gold:
    """One gold answer: its cleaned text, its number if it is one, what is wrong with it."""

    text: str
    number: PlainNumber | None = None
    is_words: bool = False
    """Words, not mathematics: compared as text."""
    problem: str | None = None


def read_golds(answer: Any, decimal_comma: bool = False) -> tuple[Gold, ...]:
    """The gold answers of a task, any of which is right; where one of them cannot be used, that one alone."""
    if type(answer) is str:
        return (_read(answer, decimal_comma),)
    if hasattr(answer, "tolist"):  # numpy, as a parquet file gives it
        answer = answer.tolist()
    if isinstance(answer, Mapping):
        return (_read_all(answer, decimal_comma),)
    if not isinstance(answer, (list, tuple)):
        return (_read_one(answer, decimal_comma),)
    golds = tuple(_read_one(item, decimal_comma) for item in answer)
    bad = next((gold for gold in golds if gold.problem), None)
    if bad:
        return (bad,)
    return golds or (_bad("the list of answers is empty"),)


@functools.lru_cache(maxsize=8192)
def is_readable(gold: Gold) -> bool:
    """Return True if the gold is a number, a formula or a text with a word in it; nothing is evaluated."""
    if gold.number is not None or gold.is_words or _WORD.search(gold.text):
        return True
    try:
        read(gold.text)
    except (UnreadableError, RecursionError):
        return False
    return True


def _read_one(answer: Any, decimal_comma: bool) -> Gold:
    try:
        return _read(_text_of(answer), decimal_comma)
    except ValueError as error:
        return _bad(str(error))


def _text_of(answer: Any) -> str:
    """A gold that is a text or a number, as text; ValueError for anything else."""
    if isinstance(answer, str):
        return str(answer)
    if isinstance(answer, bool) or not isinstance(answer, numbers.Real):
        raise ValueError(f"the answer is {type(answer).__name__}, not a text or a number")
    if isinstance(answer, float):
        if not math.isfinite(answer):
            raise ValueError(f"the answer is {answer}")
        if answer.is_integer():
            return repr(answer)
        return f"{answer:.{FLOAT_DIGITS}g}"
    try:
        return str(answer)
    except ValueError:  # an integer of more digits than Python converts
        raise ValueError("the answer has too many digits") from None


def _read_all(answer: Mapping[str, Any], decimal_comma: bool) -> Gold:
    parts = answer.get("all")
    if set(answer) != {"all"} or not isinstance(parts, (list, tuple)) or not parts:
        return _bad('the answer is a mapping: write {"all": [one, another]} where every part is asked for')
    golds = [_read_one(part, decimal_comma) for part in parts]
    bad = next((gold for gold in golds if gold.problem), None)
    joined = ", ".join(gold.text for gold in golds)
    return bad or (golds[0] if len(golds) == 1 else Gold(joined))


def _bad(problem: str) -> Gold:
    return Gold("", problem=problem)


@functools.lru_cache(maxsize=8192)
def _read(raw: str, decimal_comma: bool) -> Gold:
    bare = _final(raw)
    text = clean(bare)
    if decimal_comma:
        text = _COMMA_OF_GOLD.sub(r"\1.\2", text)
    if not text:
        return Gold(text, problem="the answer is empty")
    if not balanced(text):
        return Gold(text, problem=f"the braces of the answer {text[:200]!r} do not balance")
    return Gold(text, read_number(text), _is_words(text))


def _is_words(text: str) -> bool:
    if _MATHEMATICAL.fullmatch(text) is not None or is_product_of_letters(text, frozenset()):
        return False
    return text.lower() == "no" or (_WORDS.fullmatch(text) is not None and not _is_call(text))


def _is_call(text: str) -> bool:
    """Return True if words are named functions with letters for arguments: `csc x`, `sin x cos y`, `cscx`."""
    words = text.split()
    if text in FUNCTIONS:
        return False
    return all(len(word) <= 2 or starts_with_function(word) for word in words) and any(len(word) > 2 for word in words)


def _final(raw: str) -> str:
    """The answer in a gold text. A gold is to be trusted: boxes next to each other are one answer, and a last box need
    not close."""
    if "####" in raw:
        return answers.after_hashes(raw) or raw
    spans = answers.boxes(raw)
    if spans:
        parts = [raw[spans[-1][1] : spans[-1][2]]]
        next_start = spans[-1][0]
        for start, content, end in spans[-2::-1]:
            gap = raw[end + 1 : next_start]
            if len(gap) > 40 or not _LOOSE_JOINT.fullmatch(gap) or "\n" in gap.strip():
                break
            parts.append(raw[content:end])
            next_start = start
        return ", ".join(reversed(parts))
    unclosed = _UNCLOSED_BOX.search(raw)
    if unclosed:
        return raw[unclosed.end() :]
    phrase = answers.after_phrase(raw)
    # A phrase inside `\text{}` is a label: it takes no brace along.
    return phrase if phrase and balanced(phrase) else raw
