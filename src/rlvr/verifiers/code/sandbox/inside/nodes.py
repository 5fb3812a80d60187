"""LeetCode's linked lists and binary trees: a task writes them as lists, the program's function takes and returns
nodes.

A list is made into nodes where the function's annotation says `ListNode` or `TreeNode` and the program has that class;
a tree's list goes level by level with None for a missing child, as LeetCode writes it. Nodes in a result become lists,
and None where the annotation of the result says node becomes the empty list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIST = "ListNode"
TREE = "TreeNode"
# The most items that typed JSON takes (`values.MAX_ITEMS`): longer lists could not be sent anyway.
MOST = 2**19
"""Nodes of one list or tree; a list that never ends has more."""


def with_nodes(
    function: Callable[..., Any], names: Mapping[str, Any], argument: int | None = None
) -> Callable[..., Any]:
    """The function, between lists where it is annotated with nodes; with `argument`, what that one holds after the call
    is its result."""
    # As texts: an annotation may be a string already (`from __future__ import annotations`) or a type, and
    # `Optional[ListNode]` holds the name in both.
    notes = {name: str(note) for name, note in getattr(function, "__annotations__", {}).items()}
    if not any(kind in note for kind in (LIST, TREE) for note in notes.values()):
        if argument is None:
            return function
        return _changing(function, argument)
    code = getattr(function, "__code__", None)
    # The first `co_argcount` names of the local variables are the positional parameters.
    parameters = code.co_varnames[: code.co_argcount] if code else ()
    if hasattr(function, "__self__"):  # a method's own object is no argument of the call
        parameters = parameters[1:]

    def called(*args: Any, **kwargs: Any) -> Any:
        positional = [_built(notes.get(name, ""), arg, names) for name, arg in zip(parameters, args, strict=False)]
        named = {name: _built(notes.get(name, ""), arg, names) for name, arg in kwargs.items()}
        result = function(*positional, *args[len(positional) :], **named)
        # A function that changes its argument in place (`result_argument`), such as LeetCode's `reorderList`.
        if argument is not None:
            after = [*positional, *args[len(positional) :]][argument]
            return [] if after is None else _listed(after)
        returned = notes.get("return", "")
        # LeetCode writes an empty list or tree as []; a list of nodes that is None stays None.
        if result is None and not _of_several(returned) and (LIST in returned or TREE in returned):
            return []
        return _listed(result)

    return called


def _changing(function: Callable[..., Any], argument: int) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        return args[argument]

    return called


def _of_several(note: str) -> bool:
    """Return True if an annotation is that of a list of nodes."""
    return "list[" in note.lower()


def _built(note: str, value: Any, names: Mapping[str, Any]) -> Any:
    kind = LIST if LIST in note else TREE if TREE in note else None
    if kind is None or kind not in names or not isinstance(value, list):
        return value
    build = _linked if kind == LIST else _tree
    if _of_several(note):
        return [build(item, names[kind]) if isinstance(item, list) else item for item in value]
    return build(value, names[kind])


def _linked(values: Sequence[Any], node: Callable[[Any], Any]) -> Any:
    head = None
    # From the end, so that each node is made after the one that it points to.
    for value in reversed(values):
        one = node(value)
        one.next = head
        head = one
    return head


def _tree(values: Sequence[Any], node: Callable[[Any], Any]) -> Any:
    if not values or values[0] is None:
        return None
    root = node(values[0])
    # LeetCode's order: children of each node that exists, from left to right, level by level; nodes that are None have
    # no children in the list.
    parents = deque([root])
    rest = deque(values[1:])
    while rest and parents:
        parent = parents.popleft()
        for side in ("left", "right"):
            value = rest.popleft() if rest else None
            if value is not None:
                child = node(value)
                setattr(parent, side, child)
                parents.append(child)
    return root


def _listed(value: Any) -> Any:
    kind = type(value).__name__
    if kind == LIST:
        return _values(value)
    if kind == TREE:
        return _levels(value)
    if type(value) is list and any(type(item).__name__ in (LIST, TREE) for item in value):
        return [[] if item is None else _listed(item) for item in value]
    return value


def _values(node: Any) -> list[Any]:
    items: list[Any] = []
    while node is not None:
        # A list may end in a cycle, which has no end.
        if len(items) == MOST:
            raise ValueError(f"a linked list of more than {MOST} nodes, or one that never ends")
        items.append(node.val)
        node = node.next
    return items


def _levels(root: Any) -> list[Any]:
    items: list[Any] = []
    queue = deque([root])
    while queue:
        node = queue.popleft()
        if len(items) > MOST:
            raise ValueError(f"a tree of more than {MOST} nodes, or one that never ends")
        items.append(None if node is None else node.val)
        if node is not None:
            queue += (node.left, node.right)
    # LeetCode leaves out the missing children at the end.
    while items and items[-1] is None:
        items.pop()
    return items
