"""The options of a multiple-choice task as its prompt showed them, and which of them a text names.

Invariants: a text names a set of options or none, never a guess: a letter and a text that disagree, or a hedge, name
nothing. rlvr.verifiers.choice.choice_statements decides which options a sentence affirms. Options are numbered as
`info["options"]` stores them, whatever order the prompt showed.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.verifiers.answers import RETRACTION, bare
from rlvr.verifiers.choice.choice_statements import MARK, PLACE, doubts, read_statement
from rlvr.verifiers.text import read_one_number

# Matches `So the correct answer is option `, `My final choice: `; not `B`, `I think the answer is `.
_LEAD = re.compile(
    r"(?:so |thus |therefore |hence )?,?\s*(?:(?:the|my) )?(?:(?:correct|right|best|final) )*"
    r"(?:(?:answer|option|choice|letter)s? )?(?:(?:is|are|would be|must be) |: ?)?"
    r"(?:(?:the )?(?:correct )?(?:option|choice|answer|letter)s?:? )?",
    re.IGNORECASE,
)
# Matches `答案是B`, `正解はBです`; not `B`.
_LEAD_CJK = re.compile(
    r"(?:(?:所以|因此|综上)\s*,?\s*)?(?:(?:(?:正确|最终)的?)?(?:答案|选项|選項|正解|答え|정답|답)\s*(?:应该?|應該?)?(?:是|为|為|は|은|는|:)|应?[选選][择擇]?)"
    r"\s*(?P<option>[^\u3005-\uffff]*?)\s*(?:です|である|입니다|이다|项|項)?[\u3002.]?"
)
"""A whole answer in Chinese, Japanese or Korean that says nothing but an option."""
# Matches `Hmm, B`, `Well, B`, `oh B`; not `B is well done`.
_FILLER = re.compile(r",?\s*\b(?:h+m+|u+h*m+|uh+|oh|well(?=,))\b[\s,.:;!\u2026-]*", re.IGNORECASE)
# Matches `, `, ` and `, `/`; not ` or `.
_SEPARATOR = re.compile(r"\s*(?:[,;/&+]|\band\b)\s*|\s+", re.IGNORECASE)
# Matches `because it is blue`, `is definitely the best`; not `not because`.
_EXPLAINS = re.compile(
    r"(?:because|since|as|for sure|no doubt|without (?:a )?doubt|(?:is )?(?:definitely |certainly )?(?:the )?"
    r"(?:correct|right|best)\b)",
    re.IGNORECASE,
)
# Matches `is wrong`, `but not`; not `blue`.
_PREDICATE = re.compile(r"(?:is|was|but|or|though|although)\b", re.IGNORECASE)
"""Words that make a letter before them part of a sentence, rather than the label of the text behind it."""
_NAMED_BY_LETTER = (
    "plan|vitamin|hepatitis|grade|type|exhibit|appendix|team|group|class|category|league|series|influenza|tier"
)
"""Nouns that a letter may be the name of, which is no option: plan B."""
_CONJUNCTION = "and|or|nor|but|because|since|so|as|not|rather|instead|therefore|thus|hence|though|although"
_VERB = "is|was|are|can|cannot|could|must|would|should|seems|looks|fits|works|fails|does|has to|isn|wasn|can't|doesn"
# Matches `2x`, `a_1`; not `blue`. A formula round the text of an option makes another value of it, unless the text is a
# word.
_FORMULA = re.compile(r"[0-9=+*/^\\<>_{}]")
# Matches `blue`; not `x2`, `3.5`.
_WORDY = re.compile(r"[^\W\d_]{3}")
_EDGES = " \t.;,:!\"'\u201c\u201d\u2018\u2019"


@dataclass(frozen=True)
class Options:
    """`labels[i]` and `texts[i]` of stored option i (no texts: only letters are known), and the letters as shown."""

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    shown: tuple[tuple[str, int], ...]
    """(label in the prompt, stored option), in the order of the prompt."""

    @functools.cached_property
    def by_label(self) -> dict[str, int]:
        """Label in the prompt, in capitals -> stored option."""
        return {label.upper(): index for label, index in self.shown}

    @functools.cached_property
    def by_text(self) -> dict[str, int]:
        """Squashed text -> stored option."""
        return {squash(text): index for index, text in enumerate(self.texts)}

    @functools.cached_property
    def stored(self) -> Options:
        """The same options in the order in which they are stored, which is the one that a gold refers to."""
        return Options(self.labels, self.texts, tuple((label, index) for index, label in enumerate(self.labels)))

    @functools.cached_property
    def _label(self) -> str:
        return "(?:" + "|".join(re.escape(label) for label in sorted(self.by_label, key=len, reverse=True)) + ")"

    @functools.cached_property
    def _leading(self) -> re.Pattern[str]:
        wrapped = rf"[(\[{{] ?({self._label}) ?[)\]}}][.:,]?"
        plain = rf"({self._label})(?: ?[).:,=]| [-\u2013\u2014](?= )|(?= (?:because|since|is|as)\b))"
        return re.compile(rf"(?:{wrapped}|{plain})(?!\w)\s*", re.IGNORECASE)

    @functools.cached_property
    def _trailing(self) -> re.Pattern[str]:
        return re.compile(rf"\s*[(\[{{] ?({self._label}) ?[)\]}}]\Z", re.IGNORECASE)

    @functools.cached_property
    def _named(self) -> re.Pattern[str]:
        """A label in running text: in brackets, after "option", before a bracket, or a capital that is no English word.

        `A` is no article before a verb, a conjunction or the end of a clause; `I` is no pronoun before "is", nor behind
        "is" or "not" where the clause ends.
        """
        capitals = "|".join(re.escape(label) for label in self.by_label if label not in ("A", "I")) or "(?!)"
        article = "A" if "A" in self.by_label else "(?!)"
        pronoun = "I" if "I" in self.by_label else "(?!)"
        start = r"(?<![\w'\u2019])"
        end = r"(?![\w'\u2019])"
        return re.compile(
            rf"\b(?i:{_NAMED_BY_LETTER}):? [A-Z](?!\w)"
            r"|(?<!\w)[A-Z](?:\+(?!\s*[A-Z]\b)| (?:minus|plus)\b)"
            rf"|[(\[{{] ?((?i:{self._label})) ?[)\]}}]|\b(?i:option|choice|answer|letter) ((?i:{self._label}))(?!\w)"
            rf"|{start}({self._label})(?=\)|[.:] )|{start}({capitals}){end}"
            rf"|{start}({article})(?=[.,;:!?]|\s*\Z| (?:{_CONJUNCTION}|{_VERB})\b)"
            rf"|{start}({pronoun})(?= (?:is|was|isn['\u2019]t|wasn['\u2019]t)\b)"
            rf"|(?:(?<=\bnot )|(?<=\bis )|(?<='s )|(?<=\u2019s ))({pronoun})(?=[.,;:!]|\Z)"
        )

    @functools.cached_property
    def _mention(self) -> re.Pattern[str]:
        """The text of an option as whole words, the longest that fits (New York, not York)."""
        texts = sorted((re.escape(text) for text in self.texts if text), key=len, reverse=True)
        if not texts:
            return re.compile("(?!)")
        before, after = r"(?<![^\s\"'\u201c\u2018(\[;,:])", r"(?=[.,;:!?]*(?:[\s\"'\u201d\u2019)\]]|\Z))"
        return re.compile(f"{before}(?:{'|'.join(texts)}){after}", re.IGNORECASE)

    def named_by(self, answer: str) -> frozenset[int] | str:
        """The options that `answer` names, at least one; else in words why it names none."""
        text = _FILLER.sub(" ", bare(answer)).strip(_EDGES)
        if (foreign := _LEAD_CJK.fullmatch(text)) is not None:
            text = foreign["option"].strip(_EDGES)
        # `B. No, wait, C`: what was named before a retraction does not count, if it named anything.
        for taken_back in reversed(list(RETRACTION.finditer(text))):
            if isinstance(self.named_by(text[: taken_back.start()]), frozenset):
                return self.named_by(text[taken_back.end() :])
        whole = self.by_text.get(squash(text))
        if whole is not None:
            return frozenset({whole})
        lead = _LEAD.match(text)
        rest = text[lead.end() :].strip(_EDGES) if lead else text
        for candidate in (text, rest):
            listed = self._list(candidate)
            if listed:
                return listed
        whole = self.by_text.get(squash(rest))
        if whole is not None:
            return frozenset({whole})
        leading = self._leading.match(rest)
        trailing = self._trailing.search(rest)
        subject = leading and (
            _PREDICATE.match(rest[leading.end() :]) or (leading[0].rstrip().endswith(",") and self._named.match(rest))
        )
        if not (leading or trailing) or (subject and doubts(rest)) or (trailing and not self.texts):
            return self._mentioned(rest)
        if leading:
            one = self._with_text(leading[1] or leading[2], rest[leading.end() :])
        elif trailing:
            one = self._with_text(trailing[1], rest[: trailing.start()])
        else:
            one = NOTHING
        several = self._mentioned(rest) if isinstance(one, str) else one
        if isinstance(several, frozenset) and (len(several) > 1 or one == NEGATES):
            return several
        return one

    def _list(self, text: str) -> frozenset[int] | None:
        """`B`, `(B)`, `A, C`, `A and C`, `AC`: nothing but labels."""
        items = [item.strip("()[]{}.:*\"'") for item in _SEPARATOR.split(text)]
        if all(item.upper() in self.by_label for item in items):
            return frozenset(self.by_label[item.upper()] for item in items)
        letters = set(text)
        # `AC`: a run of different labels.
        if len(text) == len(letters) > 1 and all(c.isupper() and c in self.by_label for c in letters):
            return frozenset(self.by_label[c] for c in letters)
        return None

    def _with_text(self, label: str, text: str) -> frozenset[int] | str:
        """A label beside a text: the text is that option's own, or an explanation that names no other option."""
        index = self.by_label[label.upper()]
        text = text.strip(_EDGES)
        if not text or (self.texts and squash(text) == squash(self.texts[index])) or self._number(text) == index:
            return frozenset({index})
        named, denied = self._read_sentence(text)
        if isinstance(named, str) and named != NOTHING:
            return named
        # `B: not blue`: the text behind the letter denies the option itself.
        if index in denied:
            return NEGATES
        if named == frozenset({index}):
            return frozenset({index})
        if named == NOTHING and (denied or not self.texts or _EXPLAINS.match(text)):
            return frozenset({index})
        return DISAGREE

    def _number(self, text: str) -> int | None:
        """The only option whose text is the number that `text` is, written otherwise (0.50 and 0.5)."""
        if squash(text) in self.by_text:
            number = None
        else:
            number = read_one_number(text)
        # Equal numbers in different writing, where exactly one option is that number.
        equal = [i for i, one in enumerate(self.texts) if number is not None and read_one_number(one) == number]
        return equal[0] if len(equal) == 1 else None

    def _mentioned(self, text: str) -> frozenset[int] | str:
        """The options named somewhere in a sentence, by text or by label."""
        named, denied = self._read_sentence(text)
        if named == NOTHING and denied:
            return NEGATES
        return named

    def _read_sentence(self, text: str) -> tuple[frozenset[int] | str, frozenset[int]]:
        """The options that a sentence names, or in words why it names none; and those that it denies."""
        mentions: list[tuple[int, bool, str]] = []  # (option, by its text, as written)

        def mark(match: re.Match[str], by_text: bool) -> str:
            label = next(filter(None, match.groups()), "")
            if not (by_text or label):
                return match[0]
            if by_text:
                index = self.by_text[squash(match[0])]
            else:
                index = self.by_label[label.upper()]
            mentions.append((index, by_text, match[0]))
            return f" {MARK}{len(mentions) - 1}{MARK} "

        marked = self._mention.sub(lambda match: mark(match, True), text)
        # re.split with a group gives text, number, text, number ...: odd places are numbers of mentions.
        pieces = PLACE.split(marked)  # what was marked is not searched for labels again
        marked = "".join(
            f"{MARK}{piece}{MARK}" if at % 2 else self._named.sub(lambda match: mark(match, False), piece)
            for at, piece in enumerate(pieces)
        )
        if not mentions:
            return NOTHING, frozenset()
        statement = read_statement(marked)
        denied = frozenset(mentions[place][0] for place in statement.denied)
        named = [mentions[place] for place in statement.affirmed]
        # `blue, or maybe red`.
        if statement.doubted or denied & {index for index, *_ in named}:
            return NEGATES, denied
        # `not blue`: something is denied and nothing is affirmed.
        if not named:
            return NOTHING, denied
        if _FORMULA.search(statement.rest) and not all(
            _WORDY.search(written) for _, by_text, written in named if by_text
        ):
            return "a formula around an option", denied
        texts, labels = ([index for index, by_text, _ in named if by_text is kind] for kind in (True, False))
        # `Option B, which is red`: the letter and the text name different options.
        if texts and labels and [*dict.fromkeys(texts)] != [*dict.fromkeys(labels)]:
            return DISAGREE, denied
        return frozenset(texts + labels), denied


NOTHING = "none of the options is named"
NEGATES = "the answer hedges or negates"
DISAGREE = "the letter and the text disagree"


def squash(text: str) -> str:
    """The key that two writings of one text share: no spaces, no case, no closing full stop."""
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return "".join(bare(text).strip(_EDGES).casefold().split())


def read_options(listed: Any, order: Any, letters: str) -> Options | str:
    """The options of a task, or what is wrong with them.

    `listed` is `info["options"]`: a list, a mapping of labels to texts, or None, then `letters` are the options.
    `order` is `info["order"]`: for each place in the prompt the index or the label of the stored option that stood
    there.
    """
    if listed is None:
        if not letters:
            return 'info has no "options"; list them, or set the verifier\'s `letters`'
        listed = dict.fromkeys(letters, "")
    if isinstance(listed, Mapping):
        labels = [str(key) for key in listed]
        texts = list(listed.values())
    elif isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)):
        # At most 26; more texts than labels are refused below.
        labels = list(string.ascii_uppercase[: len(listed)])
        texts = list(listed)
    else:
        return f'info["options"] is {type(listed).__name__}, not a list or a mapping of labels to texts'
    if not 2 <= len(texts) == len(labels):
        return f"{len(texts)} options: there must be at least 2, and more than 26 need a mapping with their labels"
    shown = _shown(labels, order)
    if isinstance(shown, str):
        return shown
    return _options(tuple(labels), tuple(bare(str(text)) for text in texts), shown)


def _shown(labels: list[str], order: Any) -> tuple[int, ...] | str:
    # The prompt showed the options as they are stored.
    if order is None:
        return tuple(range(len(labels)))
    places = list(order) if isinstance(order, Sequence) else []
    indices = [labels.index(place) if place in labels else place for place in places]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in indices) or sorted(indices) != [*range(len(labels))]:
        return f'info["order"]={order!r} is no permutation of the {len(labels)} options'
    return tuple(indices)


@functools.lru_cache(maxsize=1024)
def _options(labels: tuple[str, ...], texts: tuple[str, ...], shown: tuple[int, ...]) -> Options | str:
    options = Options(labels, texts if any(texts) else (), tuple(zip(labels, shown, strict=True)))
    # `a` and `A` are one label to a reader.
    if len(options.by_label) < len(labels) or not all(label.strip() for label in labels):
        return f"the labels {', '.join(labels)} are not distinct"
    if options.texts and (len(options.by_text) < len(texts) or "" in options.by_text):
        return "two options have the same text, or one has none"
    for label, index in options.by_label.items():
        if options.by_text.get(squash(label), index) != index:
            return f"the text of an option is {label!r}, the label of another"
    return options
