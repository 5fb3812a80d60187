"""From text to tool calls, in the formats that models are trained on.

A format is a policy: it says where calls stand and how they are written, as the program that would run them reads it.
Text that attempts a call and fails is an error, not "no call". Nothing is ever evaluated: Python-like calls are parsed,
and their arguments go through `ast.literal_eval`.

Invariants: the only error is CallError (or DocumentError, which reading JSON raises); time is linear in the text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlvr.verifiers.documents import DocumentError, find_document, read_json

Format = Literal["hermes", "json", "openai", "python"]

# Arbitrary, far above the calls of a task: pairing takes cubic time.
MAX_CALLS = 64
MAX_PYTHON = 20_000
"""Characters of Python-like calls: its parser is slower and less guarded than that of JSON."""

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
# Matches `[get_weather(`, `math.sqrt(`; not `The answer is`.
_PYTHON_CALL = re.compile(r"\s*\[?\s*[A-Za-z_][\w.]*\s*\(")


class CallError(ValueError):
    """An attempted call that cannot be read; the text says why."""


@dataclass(frozen=True)
class ToolCall:
    """One tool call: the tool's name, and its arguments as JSON values."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolSchema:
    """A tool as a task describes it: its parameters in order, and their defaults."""

    name: str
    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """The calls of a text in order, and whether it holds anything beside them."""

    calls: list[ToolCall]
    bare: bool


def read_calls(text: str, format: Format, tools: Mapping[str, ToolSchema] | None = None) -> Reading:
    """The calls in `text` (what comes after the reasoning); none where the text attempts none.

    - `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks; prose may stand around them.
      `parameters` may stand for `arguments`, and a block may hold several calls, one a line (ToolRL).
    - `json`: the text or its one fenced block is a JSON list of such objects, of `{"f": {"a": 1}}` (BFCL), or one
      object.
    - `openai`: as `json`, with `{"type": "function", "function": {"name": ..., "arguments": "{...}"}}`, the arguments
      being JSON text; also under the key `tool_calls` of a message.
    - `python`: the text or its one fenced block is `f(a=1)`, `[f(a=1), g.h(b="x")]`, or one call a line. Arguments
      without a name need the task's tool schemas.
    """
    if format == "hermes":
        reading = _read_hermes(text)
    elif format == "python":
        reading = _read_python(text, tools or {})
    else:
        reading = _read_document(text, format)
    if len(reading.calls) > MAX_CALLS:
        raise CallError(f"{len(reading.calls)} calls, over the limit of {MAX_CALLS}")
    return reading


def _read_hermes(text: str) -> Reading:
    prose, *blocks = text.split(_OPEN)
    if _CLOSE in prose:
        raise CallError(f"{_CLOSE} without {_OPEN}")
    calls = []
    for block in blocks:
        content, closed, rest = block.partition(_CLOSE)
        if not closed or _CLOSE in rest:
            raise CallError(f"{_OPEN} and {_CLOSE} do not pair up")
        prose += rest
        calls += [as_call(value, "flat") for value in _values(content)]
    return Reading(calls, not prose.strip())


def _values(content: str) -> list[Any]:
    """The JSON values of a block: one, or one a line."""
    lines = [line for line in content.splitlines() if line.strip()]
    try:
        return [read_json(content)]
    except DocumentError:
        if len(lines) < 2:
            raise
        return [read_json(line) for line in lines]


def _read_document(text: str, format: Format) -> Reading:
    try:
        document = find_document(text)
    except DocumentError as error:
        raise CallError(str(error)) from None
    # Prose: no call was attempted.
    if document[0] not in "[{":
        return Reading([], False)
    value = read_json(document)
    # A whole message of the assistant; `"tool_calls": null` stands for none.
    if format == "openai" and isinstance(value, dict) and "tool_calls" in value:
        value = value["tool_calls"] or []
    shape: Shape = "wrapped" if format == "openai" else "flat or keyed"
    calls = [as_call(item, shape) for item in (value if isinstance(value, list) else [value])]
    return Reading(calls, document == text.strip())


Shape = Literal["flat", "flat or keyed", "wrapped", "any"]


def as_call(value: Any, shape: Shape = "any") -> ToolCall:
    """The call that a JSON object writes. Shapes: flat `{"name", "arguments"}`, keyed `{name: arguments}` (BFCL),
    wrapped `{"function": {"name", "arguments": "<JSON text>"}}` (OpenAI)."""
    if not isinstance(value, dict):
        raise CallError(f"a call is an object, not {type(value).__name__}")
    if shape in ("wrapped", "any") and isinstance(value.get("function"), dict):
        inner = value["function"]
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            return _call(inner.get("name"), read_json(arguments))
        if shape == "wrapped":
            raise CallError("the arguments of an OpenAI call are JSON text")
        return _call(inner.get("name"), arguments)
    if shape == "wrapped":
        raise CallError("an OpenAI call has a function")
    # BFCL's golds: `{"get_weather": {"city": ["Oslo"]}}`.
    if "name" not in value and shape != "flat" and len(value) == 1:
        return _call(*next(iter(value.items())))
    if "arguments" in value and "parameters" in value:
        raise CallError("a call has arguments or parameters, not both")
    return _call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise CallError("a call has a name")
    if not isinstance(arguments, dict):
        raise CallError(f"the arguments of {name[:80]} are an object, not {type(arguments).__name__}")
    return ToolCall(name, arguments)


def _read_python(text: str, tools: Mapping[str, ToolSchema]) -> Reading:
    try:
        document = find_document(text, language="python")
    except DocumentError as error:
        raise CallError(str(error)) from None
    if document == "[]":
        return Reading([], True)
    if not _PYTHON_CALL.match(document):
        return Reading([], False)
    if len(document) > MAX_PYTHON:
        raise CallError(f"{len(document)} characters of Python calls, over the limit of {MAX_PYTHON}")
    try:
        statements = ast.parse(document).body
        calls = [_python_call(node, tools) for statement in statements for node in _call_nodes(statement)]
    except CallError:
        raise
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:  # all that ast is known to raise
        raise CallError(f"not Python calls: {type(error).__name__}") from None
    return Reading(calls, document == text.strip())


def _call_nodes(statement: ast.stmt) -> Sequence[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise CallError("a statement that is no call")
    if isinstance(statement.value, ast.List):
        return statement.value.elts
    return [statement.value]


def _python_call(node: ast.expr, tools: Mapping[str, ToolSchema]) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise CallError("an expression that is no call")
    name = _dotted(node.func)
    parameters = tools[name].parameters if name in tools else ()
    # Positional arguments can be named only by the tool's schema.
    if len(node.args) > len(parameters):
        raise CallError(f"{name[:80]} has arguments without a name")
    pairs = [*zip(parameters, node.args, strict=False), *((keyword.arg, keyword.value) for keyword in node.keywords)]
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        if key is None or key in arguments:
            raise CallError(f"{name[:80]} has ** or an argument given twice")
        arguments[key] = _plain(ast.literal_eval(value))
    return ToolCall(name, arguments)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    # `a.b.c(...)` from its end; a loop, so that depth costs no recursion.
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise CallError("a call of something that has no name")
    return ".".join([node.id, *reversed(parts)])


def _plain(value: Any) -> Any:
    """A Python literal as a JSON value; tuples are lists."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CallError(f"{type(value).__name__} is no argument that JSON can write")


def read_tools(value: Any) -> dict[str, ToolSchema]:
    """The tools of a task by name: OpenAI's list of `{"type": "function", "function": {...}}`, the inner objects alone,
    or either as JSON text."""
    entries = read_json(value) if isinstance(value, str) else value
    if not isinstance(entries, Sequence):
        raise CallError(f"info['tools'] is a list, not {type(entries).__name__}")
    tools: dict[str, ToolSchema] = {}
    for entry in entries:
        if isinstance(entry, Mapping):
            inner = entry.get("function", entry)
        else:
            inner = {}
        name = inner.get("name")
        schema = inner.get("parameters") or {}
        if isinstance(schema, Mapping):
            properties = schema.get("properties", {})
        else:
            properties = None
        if not isinstance(name, str) or not isinstance(properties, Mapping):
            raise CallError("an entry of info['tools'] has no name, or parameters that are no JSON schema")
        defaults = {key: p["default"] for key, p in properties.items() if isinstance(p, Mapping) and "default" in p}
        tools[name] = ToolSchema(name, tuple(properties), defaults)
    return tools
