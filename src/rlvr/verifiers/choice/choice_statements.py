"""The one rule of how a sentence about options affirms, denies or doubts them.

The sentence is read clause by clause. A clause ends at a full stop, comma, semicolon or line break, at a conjunction
(because, so, but ...), and before "not B", "instead of B", "rather than B".

1. A clause with a word of denial (not, wrong, can't, doubt, instead of, at first ...) denies the options in it; so does
   one that only reports (`some say B`), and "than" the options that are compared by it.
2. A clause with a word of doubt (or, either, maybe, could, a question mark ...) makes the whole sentence doubtful.
3. Any other clause affirms the options in it.
4. A clause without options that denies or doubts speaks of what was affirmed before it, and makes that doubtful
   (`B. Maybe.`). Before any option it makes the sentence doubtful, unless what follows overcomes it with "but", "so",
   "still" ... (`I am not sure, but B`). Behind "because", "since", "while" ... it is about something else, and does
   nothing.
5. Options behind "because", "since", "while", "although" ... are spoken of in passing (`While A looks tempting, B`),
   unless the clause says that they are right. Those behind "if" are a hypothesis, on which what follows depends
   (`If not A, then B`), unless it overcomes it with "so", "but" ...

Emphasis is no denial (`no doubt`, `either way`), and `not only A but B` is `A and B`. Denials do not cancel each other:
`B is not wrong` affirms nothing. Only English words are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# NUL does not occur in decoded text of models; as a control character it is no word character, so that \b and \w work
# beside it.
MARK = "\x00"
"""Encloses the number of a mention in a marked sentence."""
PLACE = re.compile(f"{MARK}(\\d+){MARK}")

# Matches `not B`, `can't be B`, `some people say`; not `B is right`, `nothing`.
_DENIAL = re.compile(
    r"\b(?:not|no|never|neither|nor|none|except|instead|rather|unlike|wrong|incorrect|false|untrue|invalid|mistaken"
    r"|impossible|unlikely|hardly|cannot|doubt(?:s|ed|ful)?|disagree|disproved?|reject(?:s|ed)?|exclud(?:e[sd]?|ing)"
    r"|dismiss(?:ed)?"
    r"|discard(?:ed)?|eliminat(?:es?|ed|ing)|rul(?:es?|ed|ing) out|fails?|(?:any|every)thing but|all but|far from|worse"
    r"|less (?:likely|plausible|probable|suitable|appropriate|accurate|convincing)"
    r"|at first|initially|first thought|used to"
    r"|(?:some|many|most|few|several|others?|people|they|one|you)(?: \w+)? (?:might |may |could |would "
    r")?(?:say|think|claim|believe|argue|suggest)s?"
    r")\b|n't\b|n\u2019t\b",
    re.IGNORECASE,
)
# Matches `B or C`, `maybe B`, `B?`; not `B for sure`.
_DOUBT = re.compile(
    r"\b(?:or|either|both|all|any|maybe|perhaps|possibly|could|might|may (?:well )?be|unless|un(?:sure|certain)"
    r"|but)\b|\?",
    re.IGNORECASE,
)
# Matches `There is no doubt that B`, `Either way`; not `I doubt B`. Taken out before the search for denials and doubts,
# whose words it uses.
_EMPHASIS = re.compile(
    r"\b(?:(?:there is |there's )?(?:no|without (?:a |any )?|beyond (?:a |any )?) ?doubt(?: that)?|either way|in any "
    r"case|after all"
    r"|at all)\b",
    re.IGNORECASE,
)
_COMPARED = re.compile(rf"\bthan\s+(?:the )?(?:(?:answer|option|choice|letter)\s+)?{MARK}", re.IGNORECASE)
# Matches `B is correct`, `I choose B`; not `B is blue`.
_CLAIM = re.compile(r"\b(?:correct|right|true|best|answer|choice|choose|pick|select)\b", re.IGNORECASE)
"""Words by which a clause says of an option that it is the answer."""
_LAST_PLACE = re.compile(rf"{MARK}\s*\Z")
# Matches `not only A but also B`; not `not A but B`.
_NOT_ONLY = re.compile(r"\bnot (?:only|just|merely)\b(.*?)\bbut(?: also)?\b", re.IGNORECASE | re.DOTALL)
_ENUMERATED = re.compile(
    rf"(?<={MARK})\s*,\s*(?=(?:{MARK}\d+{MARK}\s*,?\s*)*(?:and|or|nor)\s*{MARK})|(?<={MARK})\s*,\s*(?=(?:and|or"
    rf"|nor)\s*{MARK})",
    re.IGNORECASE,
)
"""The commas of a list of options (`A, B and C`), which end no clause."""
# Matches `B. `, `A, but B`, `because`; not `anything but B`. `anything but` and `all but` are denials, no conjunctions.
_END = re.compile(
    r"[.;!,\n]|\b(?P<opens>because|since|so|while|whereas|as|although|though|therefore|thus|hence|however|still|yet"
    r"|leav(?:es?|ing)|if|suppos(?:e|ing)|assum(?:e|ing)|(?<!thing )(?<!all )but)\b"
    rf"|(?=\b(?:not|instead of|rather than)\s+(?:the )?(?:(?:answer|option|choice|letter)\s+)?{MARK})",
    re.IGNORECASE,
)
_OVERCOMES = frozenset(
    {"but", "so", "therefore", "thus", "hence", "however", "still", "yet", "leave", "leaves", "leaving"}
)
_EXPLAINS = frozenset({"because", "since", "as", "while", "whereas", "although", "though"})
_SUPPOSES = frozenset({"if", "suppose", "supposing", "assume", "assuming"})


@dataclass
class ChoiceStatement:
    """The mentions, by number, that a sentence affirms and denies, and whether it leaves open what it says."""

    affirmed: list[int] = field(default_factory=list)
    denied: list[int] = field(default_factory=list)
    doubted: bool = False
    rest: str = ""
    """The words of the clauses that deny nothing, without the mentions."""


def read_statement(marked: str) -> ChoiceStatement:
    """A sentence in which each mention of an option is `MARK number MARK`."""
    statement = ChoiceStatement()
    overcome = True  # nothing has been doubted that the next affirmation has to overcome
    kept = []
    joined = _ENUMERATED.sub(" ", _NOT_ONLY.sub(r"\1 and ", _EMPHASIS.sub(" ", marked)))
    for opener, clause in _clauses(joined):
        mentions = [int(number) for number in PLACE.findall(clause)]
        words = PLACE.sub(" ", clause)
        denies = _DENIAL.search(words) is not None or _COMPARED.search(clause) is not None
        doubtful = _DOUBT.search(words) is not None
        # Rule 5: a hypothesis; what was affirmed before it depends on it.
        if mentions and opener in _SUPPOSES:
            statement.doubted |= bool(statement.affirmed)
            overcome = False
        # Rule 5: options behind "because" are spoken of in passing.
        elif (
            mentions
            and opener in _EXPLAINS
            and not denies
            # The clause does not say that its options are right; `as good as B` compares.
            and not (_CLAIM.search(clause) or (opener == "as" and _LAST_PLACE.search(clause)))
        ):
            continue
        # Rule 1.
        elif mentions and denies:
            statement.denied += mentions
        elif mentions:
            statement.affirmed += mentions
            statement.doubted |= doubtful or not (overcome or opener in _OVERCOMES)
            overcome = True
            kept.append(words)
        elif opener in _EXPLAINS:
            continue
        # Rule 4: `B. Maybe.` makes B doubtful; before any option the next one has to overcome it.
        elif denies or doubtful:
            statement.doubted |= bool(statement.affirmed)
            overcome = False
        else:
            kept.append(words)
    statement.doubted |= not overcome
    statement.rest = " ".join(kept)
    return statement


def doubts(text: str) -> bool:
    """Return True if a text has any word that denies or doubts."""
    plain = _EMPHASIS.sub(" ", text)
    return _DENIAL.search(plain) is not None or _DOUBT.search(plain) is not None


def _clauses(text: str) -> Iterator[tuple[str, str]]:
    """(conjunction that it opens with, or "", the clause) in order, without empty ones."""
    opener = ""
    start = 0
    for end in _END.finditer(text):
        clause = text[start : end.start()]
        if clause.strip():
            yield opener, clause
            opener = opener if opener in _SUPPOSES and not end[0] else ""  # `if it is` goes on in `not A`
        if end["opens"] and not (opener in _EXPLAINS and end["opens"].lower() in _SUPPOSES):  # `because if A ...`
            opener = end["opens"].lower()
        start = end.end()
    if text[start:].strip():
        yield opener, text[start:]
