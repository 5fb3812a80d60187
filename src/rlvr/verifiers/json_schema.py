"""The JSON verifier: one document that fits a schema, and perhaps equals an expected one.

Invariants: where the document stands is a stated policy; no reference leaves the schema (nothing is ever fetched); the
check runs in a worker process. The library jsonschema does it, with the keywords of rlvr.verifiers.schema_keywords in
place of those of its own that take exponential or quadratic time on a hostile text.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import after_reasoning
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.documents import (
    MAX_DEPTH,
    MAX_LENGTH,
    DocumentError,
    Where,
    find_document,
    matched_fields,
    read_json,
    same_json,
)
from rlvr.verifiers.schema_keywords import BOUNDED, PATTERN_SECONDS, references_followed_once

Compare = Literal["none", "equal", "fields"]

# A value of each JSON type, so that the keywords of each type are run once before training: a bad pattern or a dead
# reference shows there.
_PROBES: tuple[Any, ...] = (None, True, 0, "", [], {}, [0], {"": 0})
_DYNAMIC = ('"$dynamicRef"', '"$dynamicAnchor"', '"$recursiveRef"')
"""Keywords by which a schema means something else where it is reached by another way."""
_SHOWN = 200
"""Characters of a document or of an error that a verdict repeats."""


@register_verifier("json_schema")
@dataclass
class JsonSchemaVerifier(Verifier):
    """The completion holds one JSON document that fits a JSON schema.

    The schema is `task.info["schema"]` or else the option `schema`: a mapping, or JSON text. It may be left out where
    the document is compared with `task.answer` (a mapping, a list, or JSON text). Score 1 when it fits (and equals the
    answer), 0 when it does not; with `compare: fields` the share of equal fields, in [0, 1].
    """

    schema: dict[str, Any] | None = None
    """The JSON schema (draft 2020-12, or the draft that its `$schema` names) of tasks that bring none."""
    where: Where = "either"
    """Place of the document: the `whole` text after the reasoning, in a `fenced` block, or `either`."""
    compare: Compare = "none"
    """With `task.answer`: not at all, `equal` as JSON values (1 equals 1.0), or `fields`, the share of equal fields."""
    ignored: tuple[str, ...] = ()
    """Fields of the outermost object that are not compared: a rationale, say."""
    formats: bool = True
    """Check `format` (email, date-time, uuid ...); formats that the drafts do not name are annotations and pass."""
    max_length: int = MAX_LENGTH
    """Characters of a document; a longer one is unparsable."""
    max_depth: int = MAX_DEPTH
    """Levels of nesting, at most 64; a deeper document is unparsable."""
    think_opened_by_prompt: bool = False
    """The prompt's template ends in `<think>`: a completion without `</think>` has no answer yet."""
    time_limit: float = 5.0
    """Seconds for one document; one that takes longer scores 0, as does one on which a pattern backtracks for 0.2 s."""

    needs: ClassVar[Needs] = Needs(process=True)

    def __post_init__(self) -> None:
        missing = [
            name for name in ("jsonschema", "rfc3339_validator", "regex") if importlib.util.find_spec(name) is None
        ]
        if missing:
            raise ConfigError(f"the verifier json_schema needs {' and '.join(missing)}: {install_command('verifiers')}")
        if self.max_depth > MAX_DEPTH:
            raise ConfigError(
                f"json_schema: max_depth={self.max_depth} is over {MAX_DEPTH}, the most that can be compared"
            )
        if self.schema is not None and (problem := _schema_problem(self.schema, self.formats)):
            raise ConfigError(f"json_schema: the option schema: {problem}")

    def prepare(self) -> None:
        import jsonschema  # noqa: F401

    def quick(self, task: Task, completion: str) -> Verdict | None:
        """The verdict where there is no document to check, else None."""
        document = self._read(completion)
        return document if isinstance(document, Verdict) else None

    def verify(self, task: Task, completion: str) -> Verdict:
        """The verdict; a `pattern` may take any time, so the pool runs it in a process."""
        reading = self._read(completion)
        if isinstance(reading, Verdict):
            return reading
        text, document = reading
        schema, problem = self._schema(task)
        if problem is None and self.compare != "none" and task.answer is None:
            problem = "there is no answer to compare with"
        if problem:
            return Verdict.undecided(f"bad task: {problem}")
        from referencing.exceptions import Unresolvable

        try:
            misfit = _misfit(schema, self.formats, document)
        except Unresolvable as error:
            return Verdict.undecided(f"bad task: {_dead(error)}")
        except TimeoutError:
            reason = f"a pattern of the schema takes over {PATTERN_SECONDS} s on this document"
            return Verdict(VerdictStatus.TIMEOUT, 0.0, reason=reason, answer=text[:_SHOWN])
        if misfit:
            return Verdict(VerdictStatus.WRONG, 0.0, reason=misfit, answer=text[:_SHOWN])
        return self._compared(task.answer, document, text)

    def check_task(self, task: Task) -> str | None:
        schema, problem = self._schema(task)
        if problem or self.compare == "none":
            return problem
        try:
            expected = _as_json(task.answer)
        except DocumentError as error:
            return f"the answer: {error}"
        try:
            misfit = _misfit(schema, self.formats, expected)
        except TimeoutError:
            return "a pattern of the schema takes too long on the answer itself"
        if misfit:
            return f"the answer does not fit the schema: {misfit}"
        return None

    def same_answer(self, first: str, second: str) -> bool:
        try:
            return same_json(read_json(first), read_json(second))
        except DocumentError:
            return first.strip() == second.strip()

    def _read(self, completion: str) -> tuple[str, Any] | Verdict:
        text = after_reasoning(completion, self.think_opened_by_prompt)
        if text is None:
            return Verdict(VerdictStatus.UNPARSABLE, 0.0, reason="the reasoning never ended")
        try:
            document = find_document(text, self.where)
            return document, read_json(document, self.max_length, self.max_depth)
        except DocumentError as error:
            return Verdict(VerdictStatus.UNPARSABLE, 0.0, reason=str(error)[:_SHOWN])

    def _schema(self, task: Task) -> tuple[Any, str | None]:
        """The task's schema, and what is wrong with it."""
        schema = task.info.get("schema", self.schema)
        if schema is None and self.compare == "none":
            return None, "there is no schema: give info['schema'] or the option schema"
        try:
            schema = read_json(schema) if isinstance(schema, str) else schema
        except DocumentError as error:
            return None, f"info['schema']: {error}"
        return schema, None if schema is None else _schema_problem(schema, self.formats)

    def _compared(self, answer: Any, document: Any, text: str) -> Verdict:
        if self.compare == "none":
            return Verdict(VerdictStatus.CORRECT, 1.0, answer=text)
        try:
            expected = _as_json(answer)
        except DocumentError as error:
            return Verdict.undecided(f"bad gold: {error}")
        document, expected = (self._of_comparison(value) for value in (document, expected))
        fields = matched_fields(document, expected)
        equal = same_json(document, expected)
        if self.compare == "fields" and not equal:
            score = fields
        else:
            score = float(equal)
        return Verdict.from_score(score, answer=text, scores={"fields": fields})

    def _of_comparison(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: one for name, one in value.items() if name not in self.ignored}
        return value


def _as_json(answer: Any) -> Any:
    """A gold as a JSON value: JSON text is read, and so is what can be written as JSON."""
    if answer is None:
        raise DocumentError("there is no answer to compare with")
    try:
        return read_json(answer if isinstance(answer, str) else json.dumps(answer))
    except (TypeError, RecursionError) as error:
        raise DocumentError(f"not a JSON value: {error}") from None


def _misfit(schema: Any, formats: bool, document: Any) -> str | None:
    """Return the place and the reason of the document's first violation of the (checked) schema, or None; None too
    without a schema."""
    from referencing.exceptions import Unresolvable

    if schema is None:
        return None
    try:
        with references_followed_once(), warnings.catch_warnings():
            # Python warns of odd regular expressions that a document holds (format: regex)
            warnings.simplefilter("ignore")
            # The first error is enough; a hostile document may have many.
            error = next(_validator(json.dumps(schema), formats).iter_errors(document), None)
    except (Unresolvable, TimeoutError, MemoryError):  # the schema's fault, a slow pattern; the pool judges the last
        raise
    except Exception as raised:  # the schema was probed before training: what goes wrong now is the document's doing
        return f"{type(raised).__name__} while the document was checked"
    if error is None:
        return None
    return f"{error.json_path}: {error.message}"[:_SHOWN]


@functools.lru_cache(maxsize=256)
def _validator(schema: str, formats: bool) -> Any:
    """A validator that knows the schema and the drafts' own schemas, and fetches nothing."""
    import jsonschema
    from jsonschema_specifications import REGISTRY

    loaded = json.loads(schema)
    draft = jsonschema.validators.validator_for(loaded, default=jsonschema.Draft202012Validator)
    bounded = {keyword: check for keyword, check in BOUNDED.items() if keyword in draft.VALIDATORS}
    if draft is not jsonschema.Draft202012Validator:  # which items count as evaluated is another rule in 2019-09
        bounded.pop("unevaluatedItems", None)
    # A target then depends on the way that leads to it, so that one result for each target and value would be wrong.
    if any(keyword in schema for keyword in _DYNAMIC):
        bounded.pop("$ref", None)
    draft = jsonschema.validators.extend(draft, bounded)
    return draft(loaded, registry=REGISTRY, format_checker=draft.FORMAT_CHECKER if formats else None)


def _schema_problem(schema: Any, formats: bool) -> str | None:
    """Return the reason why a schema cannot be used, or None; found before training."""
    if not isinstance(schema, (dict, bool)):
        return f"a JSON schema is a mapping, not {type(schema).__name__}"
    try:
        return _cached_schema_problem(json.dumps(schema, sort_keys=True), formats)
    except (TypeError, ValueError, RecursionError) as error:
        return f"the schema is not JSON: {error}"


@functools.lru_cache(maxsize=256)
def _cached_schema_problem(schema: str, formats: bool) -> str | None:
    import jsonschema
    from referencing.exceptions import Unresolvable

    loaded = json.loads(schema)
    validator = _validator(schema, formats)
    draft = loaded.get("$schema") if isinstance(loaded, dict) else None
    if draft is not None and jsonschema.validators.validator_for(loaded, default=None) is None:
        return f"the schema names a draft that is not known: {draft!r}"
    try:
        validator.check_schema(loaded, format_checker=validator.FORMAT_CHECKER)
        for target in (validator, *_targets(validator, loaded)):
            for probe in _PROBES:
                next(target.iter_errors(probe), None)
    except jsonschema.SchemaError as error:
        return f"not a JSON schema: {error.json_path}: {error.message}"[:_SHOWN]
    except Unresolvable as error:
        return _dead(error)
    except RecursionError:
        return "a reference of the schema leads back to itself"
    return None


def _dead(error: Any) -> str:
    return f"nothing in the schema is named {error.ref!r}, and nothing is fetched: copy what is meant into $defs"


def _targets(validator: Any, schema: Any) -> Iterator[Any]:
    """A validator of each schema that a `$ref` or `$dynamicRef` in `schema` leads to; raises Unresolvable for a dead
    one.

    Each reference is looked up from the resource that it stands in (`$id` gives a resource its own address).
    """
    from jsonschema_specifications import REGISTRY
    from referencing.jsonschema import DRAFT202012, specification_with

    specification = DRAFT202012
    if isinstance(schema, dict) and schema.get("$schema") is not None:
        specification = specification_with(schema["$schema"])
    root = specification.create_resource(schema)
    waiting = [(root, REGISTRY.resolver_with_root(root))]
    seen: set[int] = set()
    while waiting:
        resource, resolver = waiting.pop()
        if id(resource.contents) in seen:
            continue
        seen.add(id(resource.contents))
        waiting += [(inner, resolver.in_subresource(inner)) for inner in resource.subresources()]
        if not isinstance(resource.contents, dict):
            continue
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(reference := resource.contents.get(keyword), str):
                target = resolver.lookup(reference)
                waiting.append((specification.create_resource(target.contents), target.resolver))
                yield validator.evolve(schema=target.contents, _resolver=target.resolver)
