r"""Parts that are one answer together: a measure in two units (`5 h 30 min`), alternatives joined by a sign
(`x < 1 \lor x > 2`)."""

from __future__ import annotations

from rlvr.verifiers.math.expression import Apply, Bracket, Node, Number, Quantity, Relation
from rlvr.verifiers.math.math_tokens import Token
from rlvr.verifiers.math.units import conversion, dimension

CONNECTIVES = {"vee": "or", "wedge": "and"}
"""Signs between relations -> the words that they stand for; between anything else they are operations."""


def compound(first: Node, second: Node) -> Quantity | None:
    """The sum of two measures of one kind, the second in a smaller unit and less than one of the first; else None."""
    match first, second:
        case Quantity(Number(whole, 0), unit), Quantity(Number(rest, 0), small):
            if dimension(unit) is None or dimension(small) is None:
                return None
            factor = conversion(unit, small)
            if factor is not None and factor < 1 and rest * factor < 1:
                return Quantity(Number(whole + rest * factor), unit)
    return None


def ratio(left: Node, right: Node, last: Token) -> Node:
    """`3 : 1`, or a time of day where `last`, the last token of the right side, has a leading zero (`6:05`): no ratio
    is written so."""
    is_time = isinstance(right, Number) and len(last.text) == 2 and last.text[0] == "0"
    if isinstance(left, Apply) and left.head in (":", "time"):
        return Apply("time" if is_time else left.head, (*left.args, right))
    return Apply("time" if is_time else ":", (left, right))


def alternatives(node: Node) -> list[Node]:
    r"""The relations that `(x < 1) \lor (x > 2)` joins; anything else as it is."""
    match node:
        case Apply("vee", args):
            parts = [part for arg in args for part in alternatives(arg)]
            if all(isinstance(part, Relation) for part in parts):
                return parts
            return [node]
        case Bracket("(", ")", (Relation() as relation,)):
            return [relation]
    return [node]
