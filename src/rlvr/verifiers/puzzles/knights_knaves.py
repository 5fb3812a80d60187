"""Knights and knaves, and other puzzles whose answer gives each name a role."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, bare, unparsable

# Words and signs that only join: `Zoey is a knight, and Jack -> knave`. `not` is none of them, so that a negation
# cannot be read.
_FILLER = re.compile(
    r"(?:is|are|was|an?|the|and|both|all|while|but|whereas|so|therefore|thus|[0-9]+|[-=:;,.()*\u2013\u2014\u2192>])",
    re.IGNORECASE,
)


@register_verifier("knights_and_knaves")
@dataclass
class KnightsAndKnavesVerifier(AnswerVerifier):
    """The answer gives every name of `info["assignment"]` (a mapping of names to roles) its role, once.

    Where the statements allow several solutions `info["assignment"]` is a list of mappings. The answer is a list such
    as `Zoey is a knight, Jack is a knave` or `Zoey and Jack: knights`; a name with two roles, a missing name, a
    negation or any other word makes it unreadable. Roles are those of the assignment and of `info["roles"]` (default:
    knight, knave).
    """

    partial_credit: bool = False
    """The share of names with the right role instead of all or nothing."""

    def check_task(self, task: Task) -> str | None:
        solutions = _solutions(task)
        if not solutions:
            return 'info["assignment"] is no mapping of names to roles, nor a list of such mappings'
        names = {name.casefold() for name in solutions[0]}
        if any({name.casefold() for name in one} != names or len(one) != len(names) for one in solutions):
            return 'the solutions of info["assignment"] do not have the same names'
        if names & self._roles(task).keys():
            return "a name is also a role"
        return None

    def judge(self, task: Task, answer: str) -> Verdict:
        solutions = _solutions(task)
        assignment = read_assignment(bare(answer), [*solutions[0]], self._roles(task))
        if isinstance(assignment, str):
            return unparsable(assignment, answer)
        missing = [name for name in solutions[0] if name.casefold() not in assignment]
        if missing:
            return unparsable(f"no role for {', '.join(missing)}", answer)
        right = max(
            sum(assignment[name.casefold()] == role.casefold() for name, role in one.items()) for one in solutions
        )
        share = right / len(assignment)
        return Verdict.from_score(share if self.partial_credit else share == 1.0, answer=answer)

    def same_answer(self, first: str, second: str) -> bool:
        return bare(first).casefold() == bare(second).casefold()

    def _roles(self, task: Task) -> dict[str, str]:
        """Spelling -> role, in small letters, plurals included."""
        role_names = task.info.get("roles") or ("knight", "knave")
        roles = {str(role).casefold() for role in (*role_names, *(r for one in _solutions(task) for r in one.values()))}
        return {spelling: role for role in roles for spelling in (role, f"{role}s")}


def _solutions(task: Task) -> list[dict[str, str]]:
    listed = task.info.get("assignment")
    each = [listed] if isinstance(listed, Mapping) else listed if isinstance(listed, (list, tuple)) else []
    if not all(isinstance(one, Mapping) and one for one in each):
        return []
    return [{" ".join(str(name).split()): str(role) for name, role in one.items()} for one in each]


def read_assignment(text: str, names: Sequence[str], roles: Mapping[str, str]) -> dict[str, str] | str:
    """Name in small letters -> role, as `text` gives them; else in words why it cannot be read.

    Case does not matter, except in a name that is also a joining word (A).
    """
    # A person may be called A, which is also an article: such a name is matched in its own case only.
    exact = {name for name in names if _FILLER.fullmatch(name)}
    # Longest first: of `Ann` and `Ann Lee` the second must be tried first.
    ordered = sorted([*names, *roles], key=len, reverse=True)
    words = "|".join(f"(?-i:{re.escape(word)})" if word in exact else re.escape(word) for word in ordered)
    token = re.compile(rf"\s*(?:({words})(?!\w)|{_FILLER.pattern}(?:(?<=\W)|(?!\w)))", re.IGNORECASE)
    assignment: dict[str, str] = {}
    waiting: list[str] = []
    end = 0
    text = text.strip()
    while end < len(text):
        match = token.match(text, end)
        if match is None:
            return f"{text[end : end + 20].strip()!r} is no name, role or joining word"
        word = (match[1] or "").casefold()
        if word in roles:
            if not waiting:
                return "a role without a name"
            for name in waiting:
                # The same role twice is a repetition, another one a contradiction.
                if assignment.setdefault(name, roles[word]) != roles[word]:
                    return f"two roles for {name}"
            waiting = []
        elif word:
            waiting.append(word)
        end = match.end()
    if waiting:
        return f"no role for {', '.join(waiting)}"
    return assignment
