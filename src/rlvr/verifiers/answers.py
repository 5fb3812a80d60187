r"""Answers in a completion, and the verifiers that judge one by a rule; the simplest of them, `exact`.

Where in a completion the final answer stands is an explicit policy, the same for every verifier:

1. The completion's own turn: what follows an end-of-turn or role token was not said by the assistant.
2. After the last closed reasoning block; an unclosed one means that there is no answer yet.
3. In that text several methods are tried in order, and the first that finds something wins; each takes its last
   occurrence. Boxes joined by a bare "," or "and" are one answer of several parts: `\boxed{1} and \boxed{2}`.
4. A fallback, when nothing was found.

So a completion cannot be paid for several guesses: there is always exactly one answer, or none.

Invariants: every function that looks for the answer takes time linear in the text, and none raises on any string. A
gold that cannot be used is undecided, whatever the completion says; a completion without an answer, or with one that is
too long, scores 0 before anything that takes more than linear time sees it.
"""

from __future__ import annotations

import importlib.util
import math
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.math_in_text import CJK, last_math

Method = Literal["boxed", "hash", "tag", "phrase"]
Fallback = Literal["none", "last_formula", "last_number", "whole"]

METHODS: tuple[Method, ...] = ("boxed", "hash", "tag", "phrase")
"""`\\boxed{}` or `\\fbox{}`, then a `####` line (GSM8K), then `<answer>...</answer>`, then "the answer is ..."."""

# A cheap test of substrings before the regular expressions below: nearly no completion has any of these.
_TURN_MARKS = ("<|", "<\uff5c", "</s>", "_of_turn>", "INST]")
# Matches `<|im_end|>`, `</s>`, `<end_of_turn>`; not `<|tool|>`, `<start>`. The tokens of ChatML, Llama 3, DeepSeek,
# Mistral, Gemma and Harmony.
_TURN = re.compile(
    r"<[|\uff5c](?:im_(?:start|end)|endoftext|end_of_text|begin_of_text|eo[tm]_id|start_header_id|end|return"
    r"|user|assistant|system|User|Assistant|end\u2581of\u2581sentence)[|\uff5c]>"
    r"|</s>|<(?:start|end)_of_turn>|\[/?INST\]"
)
# Matches `<|im_start|>assistant`, `<start_of_turn>model`; not `<|im_start|>user`. A completion that repeats its own
# header has not ended with it.
_HEADER = re.compile(
    r"\s*(?:<\|im_start\|>\s*assistant\b|<\|start_header_id\|>\s*assistant\s*<\|end_header_id\|>"
    r"|<start_of_turn>\s*model\b|<[|\uff5c][Aa]ssistant[|\uff5c]>|\[/INST\])"
)
_REASONING = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning")),
    ("[THINK]", "[/THINK]"),
)
# The bound keeps the search cheap where a completion is a megabyte of repetitions. It is arbitrary: a final answer of a
# real completion is near its end.
TAIL = 200_000
"""Characters at the end of a completion in which its answer is looked for."""

# Matches `\boxed{1}`, `\fbox {1}`; not `\boxed 1`.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Matches `\boxed{`, `{`, `\{`; not `\frac`. An escaped brace is consumed as one token, so that it neither opens nor
# closes.
_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\(?:[^A-Za-z\\]|\\(?!boxed|fbox))|[{}]", re.DOTALL)
# Matches `\boxed{5\}$.`; not `\boxed{5}`, `\boxed{5\} is the answer`. Models sometimes escape the brace that closes the
# box. Only at the very end, where nothing else can follow.
_BOX_CLOSED_BADLY = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\\\}[\s$.]*\Z")
# Matches `$ and $`, `, `, `$, $y = `; not ` so `, `. Then `. Begins behind the brace of one box and ends before the
# next box.
_JOINT = re.compile(
    r"(?:[\s$~&]|\\[\s\[\]();,!:]|\\q?quad)*"
    r"(?:(?:\\text\s*\{)?\s*(?:for part \(?\w\)?)?\s*(?P<word>,|;|,?\s*\band\b|,?\s*\bor\b)\s*\}?)"
    r"(?:[\s$~&]|\\[\s\[\]();,!:]|\\q?quad)*(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\(\w\))?\s*=\s*)?"
)
# Characters between two boxes of one answer. It bounds the backtracking of _JOINT, in which three groups may each take
# the same spaces.
_JOINT_LENGTH = 80
# Matches ` Step 2: add`, ` **Answer**`, ` 3. Check`; not ` 72`, ` 3.5`.
_HEADING = re.compile(
    r"[\s*]*(?:\d+\.\s|(?:step|part|case|final|answer|solution|conclusion|explanation|verification|summary)\b)",
    re.IGNORECASE,
)
# Matches `The answer is: 5`, `Final answer: 5`; not `The answer is correct`. The possessive `*+` gives no space back,
# so that the lookahead cannot be evaded by backtracking.
_PHRASE = re.compile(r"\banswer[\s*]*(?:is\b[\s*:]*+(?!(?:in)?correct\b|right\b|wrong\b)|:[\s*]*)", re.IGNORECASE)
# Matches `5. So it is`, `$$a. b$$ is it`. A full stop ends a sentence before white space only: `3.5` and `...` go on,
# and so does a display formula.
_SENTENCE = re.compile(r"(?:\$\$.*?\$\$|\\\[.*?\\\])?.*?(?=(?<!\.)\.\s|\.?\Z|\.?\n)", re.DOTALL)
LEAST = (
    r"(?:least|less) "
    r"(?:likely|plausible|probable|suitable|appropriate|accurate|correct|convincing|attractive|good)|worst"
    r"|second[- ]best"
)
"""Words that name what is not the answer, unless the prompt asks for it."""
# Matches `a tempting `, `It is false that the `, `If the `; not `Thus the `, `I think the final `. Searched in the 80
# characters before the phrase: enough for the longest alternative.
_NOT_SAID = re.compile(
    rf"(?:\b(?:{LEAST}|tempting|na[i\u00ef]ve|mistaken|erroneous)"
    r"|\b(?:false|untrue|wrong|incorrect|not true|not the case|doubt(?:s|ful)?|unlikely|impossible|(?:do "
    r"not|don't|don\u2019t) (?:think|believe)"
    r"|(?:some|many|most|others?|people|they)(?: people)? (?:say|think|claim|believe)s?|used to think)(?: that)?"
    r"|\b(?:if|whether|unless|suppos(?:e|ing)|assum(?:e|ing))(?: that)?)(?: (?:the|my|correct|right|final))* ?\Z",
    re.IGNORECASE,
)
"""Text before "the answer is" that makes it no claim: a denial, a hypothesis, the opinion of others."""
# Matches `No, wait, 5`, `scratch that: 5`, `actually 5`; not `5 is no prime`.
RETRACTION = re.compile(
    r"\b(?:(?:oh,? |but )?(?:no,? )?wait(?:,? no)?|no(?=[,.:])|on second thoughts?|scratch "
    r"that|correction|sorry|actually)\b[\s,.:;!-]*",
    re.IGNORECASE,
)
"""Words that take back what was said before them."""
# Matches `. Wait, it is 7`, `. Sorry, the answer is 7`; not `. It is 7`.
_NEXT_RETRACTS = re.compile(rf"[.\s]*(?:{RETRACTION.pattern})(?:(?:it|that|the answer) is\b\s*)?", re.IGNORECASE)
# Matches `the largest n is 5`, `An upper bound is 5`; not `5 is it`, `x is 5`. The words between "the answer is" and
# the value, which are no part of the value.
_PROSE = re.compile(r"(?:[A-Za-z]{3,} |A (?!is\b|are\b)|An )[^\n]*?\b(?:is|are)\b", re.IGNORECASE)
# Matches `apples`, `5 apples`; not `\frac12`, `\text{apples}`, `xy`. Three letters or more outside of a command: prose.
_WORD = re.compile(r"(?<![\\A-Za-z{\d])[A-Za-z]{3,}(?![A-Za-z])")
# Matches `it is 5`; not `xy = 5`.
_PLAIN_WORD = re.compile(r"\b(?:an|as|at|be|by|he|if|in|is|it|my|no|of|on|so|to|up|we)\b", re.IGNORECASE)
# Matches `答案5`, `да 5`; not `α + β`.
_OTHER_SCRIPT = re.compile(rf"[{CJK}]|[^\W\d_A-Za-z\u0370-\u03ff]{{2,}}")
"""Words that are not Latin; a few Greek letters are mathematics."""


def extract_answer(
    completion: str,
    methods: Sequence[Method] = METHODS,
    fallback: Fallback = "none",
    think_opened_by_prompt: bool = False,
) -> str | None:
    """The final answer as the completion writes it, stripped, or None when there is none.

    `fallback` says what to do when no method finds anything: give up (`none`), take the last formula between math
    delimiters (`last_formula`), that or the last number, whichever comes later (`last_number`), or the whole text after
    the reasoning (`whole`). With `think_opened_by_prompt` a completion without `</think>` is still reasoning.
    """
    text = final_text(completion, think_opened_by_prompt)
    if text is None:
        return None
    return find_answer(text, methods, fallback)


def find_answer(text: str, methods: Sequence[Method] = METHODS, fallback: Fallback = "none") -> str | None:
    """Like `extract_answer`, in a text without reasoning."""
    for method in methods:
        answer = _FINDERS[method](text)
        if answer and (answer := answer.strip()):
            # "the answer is probably about 12 apples": a sentence of prose behind the phrase is reduced to its last
            # formula or number where the fallback allows that.
            if method == "phrase" and fallback.startswith("last") and _WORD.match(answer):
                return last_math(answer, numbers=True) or answer
            return answer
    if fallback == "none":
        return None
    text = text.strip()
    if fallback == "whole" or (text and _is_bare(text)):
        return text or None
    return last_math(text, numbers=fallback == "last_number")


def final_text(completion: str, think_opened_by_prompt: bool = False) -> str | None:
    """Return the text of the assistant's own turn after its reasoning; None if it is still thinking."""
    text = after_reasoning(own_turn(completion), think_opened_by_prompt)
    return text if text is None else text[-TAIL:]


def own_turn(completion: str) -> str:
    """The completion up to the first token that ends a turn or opens another one."""
    if not any(mark in completion for mark in _TURN_MARKS):
        return completion
    header = _HEADER.match(completion)
    start = header.end() if header else 0
    end = _TURN.search(completion, start)
    if end:
        return completion[start : end.start()]
    return completion[start:]


def after_reasoning(completion: str, think_opened_by_prompt: bool = False) -> str | None:
    """Return the text after the last closed reasoning block; None if the completion is still thinking."""
    opened = max(completion.rfind(mark) for mark, _ in _REASONING)
    closed, end = max((completion.rfind(mark), len(mark)) for _, mark in _REASONING)
    # The second case: the prompt wrote `<think>`, so that the completion is reasoning from its first character.
    if opened > closed or (think_opened_by_prompt and closed < 0):
        return None
    if closed >= 0:
        return completion[closed + end :]
    return completion


def boxes(text: str) -> list[tuple[int, int, int]]:
    r"""All balanced `\boxed{}` and `\fbox{}`, of nested ones the outermost: where it begins, its content begins and
    ends."""
    first = _BOX.search(text)
    if first is None:
        return []
    spans: list[tuple[int, int, int]] = []
    open_braces: list[tuple[int, int]] = []  # of each open brace: where a box and its content begin, or -1
    for token in _BRACE.finditer(text, first.start()):
        if token[1] or token[0] == "{":
            open_braces.append((token.start(), token.end()) if token[1] else (-1, -1))
        elif token[0] == "}" and open_braces:
            start, content = open_braces.pop()
            if start >= 0:
                # Boxes end before the box around them: those that began inside the one that ends now are part of its
                # content.
                while spans and spans[-1][0] > start:
                    spans.pop()
                spans.append((start, content, token.start()))
    return spans


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{}` or `\fbox{}`; of boxes joined to it too, as a list."""
    spans = boxes(text)
    if not spans:
        # Only where no box balances: a balanced box before a damaged one is the answer that the model completed.
        badly = _BOX_CLOSED_BADLY.search(text)
        return badly[1] if badly else None
    next_start, content, end = spans[-1]
    parts = [text[content:end]]
    # From the last box backwards, as long as nothing but a separator stands between a box and the next one.
    for start, content, end in spans[-2::-1]:
        joint = None
        if next_start - end <= _JOINT_LENGTH:
            joint = _JOINT.fullmatch(text, end + 1, next_start)
        if joint is None:
            break
        parts += [" or " if joint["word"].endswith("or") else ", ", text[content:end]]
        next_start = start
    return "".join(reversed(parts))


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`, unless it is a heading (`#### Step 2: ...`)."""
    _, mark, rest = text.rpartition("####")
    line = rest.partition("\n")[0]
    if mark and not _HEADING.match(line):
        return line
    return None


def last_tag(text: str) -> str | None:
    """The content of the last closed `<answer>...</answer>`."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer if closed and opened else None


def after_phrase(text: str) -> str | None:
    """The rest of the sentence after the last "the answer is", "final answer: the largest n is" and the like."""
    end = -1
    for match in _PHRASE.finditer(text):
        if not _NOT_SAID.search(text[max(0, match.start() - 80) : match.start()]):
            end = match.end()
    sentence = _SENTENCE.match(text, end) if end >= 0 else None
    if sentence is None:
        return None
    while (taken_back := _NEXT_RETRACTS.match(text, sentence.end())) is not None:
        following = _SENTENCE.match(text, taken_back.end())
        if following is None or not following[0].strip():
            break
        sentence = following
    prose = _PROSE.match(sentence[0])
    if prose and sentence[0][prose.end() :].strip():
        return sentence[0][prose.end() :]
    return sentence[0]


def _is_bare(text: str) -> bool:
    """Return True if the text is a formula or a number without delimiters: one short line without words."""
    delimited = "$" in text.strip("$") or "\\[" in text or "\\(" in text
    return (
        len(text) <= 200
        and "\n" not in text
        and not delimited
        and not any(words.search(text) for words in (_WORD, _PLAIN_WORD, _OTHER_SCRIPT))
    )


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "boxed": last_boxed,
    "hash": after_hashes,
    "tag": last_tag,
    "phrase": after_phrase,
}


def read_texts(answer: Any) -> tuple[str, ...] | str:
    """The texts that are right, at least one, none empty; else in words why the gold cannot be used."""
    texts = answer
    if not isinstance(answer, (list, tuple)):
        texts = [answer]
    if not texts:
        return "the list of answers is empty"
    for text in texts:
        # A bool is an int, but as a gold it is a mistake of the data: `True` as text equals nothing that a model
        # writes.
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            if text is None:
                return "the task has no answer"
            return f"the answer {text!r} is not a text or a number"
        # Python refuses to convert integers of more than 4,300 digits to text (sys.set_int_max_str_digits), and `str`
        # below would raise.
        if isinstance(text, int) and abs(text) >= 10**1000:
            return "the answer has too many digits"
        if not str(text).strip():
            return "the answer is empty"
    return tuple(str(text) for text in texts)


# Matches `\text{yes}`, `\mathrm{ B }`; not `\frac{1}{2}`, `\text{a{b}}`.
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathsf|mathit|mbox|emph|operatorname)\s*\{([^{}]*)\}"
)
# Matches `\ne 5`, `x != 5`, `≠ 5`, `~5`; not `\nu`, `5!`. An answer that says what it is not would otherwise be read as
# the value behind the sign.
_NEGATES = re.compile(r"\\n(?:eq|e|eg|ot)(?![A-Za-z])|\\lnot(?![A-Za-z])|[\u2260\u00ac\u0338]|!=|\A[\s$({\[]*[~!]")
# Matches `4²`, `xⁿ`; not `42`.
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]+")
# Matches `\(5\)`, `$5$`, `**B**`, `\left(`; not `\frac{1}{2}`.
_DELIMITER = re.compile(r"\\[()\[\]]|\\(?:left|right)\b|\\[ ,;:!]|\*\*|__|[$`~]")


@dataclass
class AnswerVerifier(Verifier):
    """Base of verifiers that extract one answer and judge it by a rule: `judge`, and for golds that are no texts
    `check_task`."""

    methods: tuple[Method, ...] = METHODS
    """Places to look for the answer, in order of precedence: `boxed`, `hash` (`#### 72`), `tag` (`<answer>`),
    `phrase`."""
    fallback: Fallback = "whole"
    """When none of the methods finds anything: `none`, the `last_formula`, the `last_number`, or the `whole` text after
    the reasoning."""
    think_opened_by_prompt: bool = False
    """The prompt's template ends in `<think>`: a completion without `</think>` has no answer yet."""
    max_length: int = 2000
    """Characters of an answer; a longer one is unparsable."""

    @abstractmethod
    def judge(self, task: Task, answer: str) -> Verdict:
        """The verdict on an extracted answer to a task that `check_task` has passed."""

    def check_task(self, task: Task) -> str | None:
        golds = read_texts(task.answer)
        if isinstance(golds, str):
            return golds
        return next(filter(None, map(self.check_gold, golds)), None)

    def check_gold(self, gold: str) -> str | None:
        """Return the reason why one of the texts that are right cannot be used, or None."""
        return None

    def quick(self, task: Task, completion: str) -> Verdict | None:
        answer = self._find(task, completion)
        if isinstance(answer, Verdict):
            return answer
        # The rule of a subclass with `needs` may take long or crash, so that only the extraction may run in the
        # caller's thread.
        if self.needs.process:
            return None
        return self.judge(task, answer)

    def verify(self, task: Task, completion: str) -> Verdict:
        answer = self._find(task, completion)
        if isinstance(answer, Verdict):
            return answer
        return self.judge(task, answer)

    def _find(self, task: Task, completion: str) -> str | Verdict:
        """The extracted answer, or the verdict where there is nothing to judge."""
        problem = self.check_task(task)
        if problem is not None:
            return Verdict.undecided(f"bad gold: {problem}")
        answer = extract_answer(completion, self.methods, self.fallback, self.think_opened_by_prompt)
        if answer is None:
            return unparsable("no final answer found")
        if len(answer) > self.max_length:
            reason = f"the answer has {len(answer)} characters, over the limit of {self.max_length}"
            return unparsable(reason, answer[: self.max_length])
        # A gold that negates itself (`x \ne 1`) expects the sign, so that the answer is judged by the rule.
        if _NEGATES.search(answer) and not _NEGATES.search(str(task.answer)):
            return wrong("the answer says what it is not", answer)
        return answer


def unparsable(reason: str, answer: str | None = None) -> Verdict:
    """Score 0 for what cannot be read as an answer."""
    return Verdict(VerdictStatus.UNPARSABLE, 0.0, reason=reason, answer=answer)


def wrong(reason: str, answer: str) -> Verdict:
    """Score 0 for an answer that was read and is not right."""
    return Verdict(VerdictStatus.WRONG, 0.0, reason=reason, answer=answer)


def graded(score: float, answer: str, threshold: float | None = None, **scores: float) -> Verdict:
    """The verdict of a score in [0, 1]: itself, or with a `threshold` 1 from there on and else 0.

    The score before the threshold stays readable in `Verdict.scores`, next to the further named `scores`.
    """
    score = min(max(score, 0.0), 1.0)
    scores = {"score": score, **scores}
    decided = score
    if threshold is not None:
        decided = float(score >= threshold)
    return Verdict.from_score(decided, answer=answer, scores=scores)


def check_threshold(name: str, threshold: float | None) -> None:
    """ConfigError for a threshold that every answer or no answer reaches."""
    if threshold is not None and not 0.0 < threshold <= 1.0:
        raise ConfigError(f"{name}: threshold={threshold} is not in (0, 1]")


def check_not_negative(name: str, **options: float) -> None:
    """ConfigError for an option that is negative or not finite."""
    for option, value in options.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}: {option}={value} is not a number of 0 or more")


def require(module: str, extra: str, name: str) -> None:
    """ConfigError where the library behind the verifier `name` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{name} needs the library {module}: {install_command(extra)}")


def bare(text: str) -> str:
    r"""`text` without what only dresses it: LaTeX text commands and delimiters, Markdown marks, wide and circled
    letters.

    Whitespace is collapsed. Up to three nested LaTeX commands are unwrapped. Raised digits stay raised: 4 to the 2 is
    not 42.
    """
    text = _RAISED.sub(lambda run: f"^{{{run[0]}}}", text)
    text = unicodedata.normalize("NFKC", text)
    # Bounded: each pass takes linear time, and hundreds of nested commands would make the whole quadratic.
    for _ in range(3):
        text, count = _WRAPPER.subn(r"\1", text)
        if not count:
            break
    return " ".join(_DELIMITER.sub(" ", text).split())


@register_verifier("exact")
@dataclass
class ExactVerifier(AnswerVerifier):
    """The answer equals `task.answer`, or one of them where it is a list. By default it is all of the text after the
    reasoning block, and only the space around it does not matter.
    """

    methods: tuple[Method, ...] = ()
    max_length: int = 100_000
    casefold: bool = False
    """Ignore case."""
    ignore_space: bool = False
    """Any run of white space is one space."""
    ignore_punctuation: bool = False
    """Leave out punctuation (Unicode categories P)."""
    unicode: bool = False
    """Compare after NFKC normalisation: full-width letters, ligatures and composed accents do not matter."""

    def check_gold(self, gold: str) -> str | None:
        if self._key(gold):
            return None
        return f"nothing is left of the answer {gold!r} after normalisation"

    def judge(self, task: Task, answer: str) -> Verdict:
        is_right = any(self.same_answer(answer, gold) for gold in read_texts(task.answer))
        return Verdict.from_score(is_right, answer=answer)

    def same_answer(self, first: str, second: str) -> bool:
        return self._key(first) == self._key(second)

    def _key(self, text: str) -> str:
        """Return a key that is the same for equal answers."""
        if self.unicode:
            text = unicodedata.normalize("NFKC", text)
        if self.casefold:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        if self.ignore_space:
            return " ".join(text.split())
        return text.strip()
