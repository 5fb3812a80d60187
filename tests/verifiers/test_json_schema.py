import json
import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers import JsonSchemaVerifier
from rlvr.verifiers.documents import DocumentError, find_document, matched_fields, read_json, same_json

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GOOD = '{"name": "Ada", "age": 36}'


def verify(completion, answer=None, schema=PERSON, **options):
    info = {} if schema is None else {"schema": schema}
    return JsonSchemaVerifier(**options).verify(Task("t", "p", answer, info=info), completion)


@pytest.mark.parametrize(
    ("where", "completion", "status"),
    [
        ("whole", GOOD, "correct"),
        ("whole", f"\n {GOOD} \n", "correct"),
        ("whole", f"<think>no {{</think>{GOOD}", "correct"),
        ("whole", f"```json\n{GOOD}\n```", "unparsable"),
        ("whole", f"Here: {GOOD}", "unparsable"),
        ("whole", f"{GOOD} and that is it", "unparsable"),
        ("whole", f"{GOOD}\n{GOOD}", "unparsable"),
        ("fenced", f"```json\n{GOOD}\n```", "correct"),
        ("fenced", f"Here:\n```JSON\n{GOOD}\n```\nDone.", "correct"),
        ("fenced", f"```\n{GOOD}\n```", "correct"),
        ("fenced", f"````\n{GOOD}\n````", "correct"),
        ("fenced", f"```python\nprint(1)\n```\n```json\n{GOOD}\n```", "correct"),
        ("fenced", GOOD, "unparsable"),
        ("fenced", f"```json\n{GOOD}", "unparsable"),
        ("fenced", f"```python\n{GOOD}\n```", "unparsable"),
        ("fenced", f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```", "unparsable"),
        ("fenced", f"```json\n{GOOD}\n{GOOD}\n```", "unparsable"),
        ("either", GOOD, "correct"),
        ("either", f"Here:\n```json\n{GOOD}\n```", "correct"),
        ("either", f"```json\n{GOOD}\n```\nor\n```json\n{GOOD}\n```", "unparsable"),
        ("either", f"```json\n{GOOD}\n```\nor\n```json\n{GOOD}", "unparsable"),
        ("either", f"{GOOD} or so", "unparsable"),
        ("either", f"<think>{GOOD}</think>", "unparsable"),
        ("either", f"<think>{GOOD}", "unparsable"),
        ("either", f"<think>```json\n{GOOD}\n```</think>I do not know", "unparsable"),
        ("either", "", "unparsable"),
        ("either", "```json\n```", "unparsable"),
    ],
)
def test_where_the_document_stands_is_a_policy(where, completion, status):
    verdict = verify(completion, where=where)
    assert (verdict.status, verdict.score) == (VerdictStatus(status), float(status == "correct"))


def test_a_template_that_opens_the_reasoning():
    assert verify(GOOD, think_opened_by_prompt=True).status is VerdictStatus.UNPARSABLE
    assert verify(f"hm</think>{GOOD}", think_opened_by_prompt=True).score == 1


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ('{"name": "Ada", "age": 1, "age": 36}', "'age' is given twice"),
        ('{"name": "Ada", "age": 36, "x": {"y": 1, "y": 1}}', "'y' is given twice"),
        ('{"name": "Ada", "age": NaN}', "NaN"),
        ('{"name": "Ada", "age": -Infinity}', "-Infinity"),
        ('{"name": "Ada", "age": 1e999}', "too large"),
        ('{"name": "Ada", "age": ' + "9" * 5000 + "}", "not JSON"),
        ('{"name": "Ada", "age": 036}', "not JSON"),
        ("{'name': 'Ada', 'age': 36}", "not JSON"),
        ('{"name": "Ada", "age": 36,}', "not JSON"),
        ('{"name": "Ada", /* c */ "age": 36}', "not JSON"),
        ('{"name": "A\nda", "age": 36}', "not JSON"),
        ("[" * 65 + "]" * 65, "more than 64 deep"),
        ("[" * 50_000, "more than 64 deep"),
        ('["' + "x" * 100_000 + '"]', "over the limit"),
        ("{" * 10, "not JSON"),
        ('"' + "\\" * 999, "not JSON"),
    ],
)
def test_a_document_that_is_not_read_alike_by_all_is_refused(document, says):
    verdict = verify(document)
    assert (verdict.status, verdict.score) == (VerdictStatus.UNPARSABLE, 0.0)
    assert says in verdict.reason
    assert JsonSchemaVerifier().quick(Task("t", "p", info={"schema": PERSON}), document) == verdict


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ('{"name": "Ada"}', "'age' is a required property"),
        ('{"name": "Ada", "age": "36"}', "$.age"),
        ('{"name": "Ada", "age": 36.5}', "$.age"),
        ('{"name": "Ada", "age": true}', "$.age"),
        ('{"name": "", "age": 36}', "$.name"),
        ('{"name": "Ada", "age": -1}', "$.age"),
        ('{"name": "Ada", "age": 36, "x": 1}', "'x' was unexpected"),
        ("[]", "is not of type 'object'"),
        ("null", "is not of type 'object'"),
    ],
)
def test_a_document_that_does_not_fit_says_where(document, place):
    verdict = verify(document)
    assert (verdict.status, verdict.score) == (VerdictStatus.WRONG, 0.0)
    assert place in verdict.reason
    assert len(verdict.reason) <= 200


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "2024-02-29T12:00:00Z", "2024-02-29 noon"),
        ("time", "12:00:00Z", "25:00:00Z"),
        ("email", "a@b.org", "a"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
        ("ipv6", "::1", ":::1"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("uri", "https://example.org/x", "not a uri"),
        ("hostname", "example.org", "-example-.org"),
        ("regex", "a+", "a("),
        ("json-pointer", "/a/0", "a/0"),
        ("duration", "P1D", "1 day"),
    ],
)
def test_formats_are_checked_offline(format, good, bad, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("no network"))
    schema = {"type": "string", "format": format}
    assert verify(json.dumps(good), schema=schema).score == 1
    assert verify(json.dumps(bad), schema=schema).score == 0
    assert verify(json.dumps(bad), schema=schema, formats=False).score == 1


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (None, "there is no schema"),
        ({"type": "strin"}, "not a JSON schema: $.type"),
        ({"pattern": "("}, "not a 'regex'"),
        ({"$ref": "https://example.org/schema.json"}, "nothing is fetched"),
        ({"properties": {"a": {"$ref": "other.json#/x"}}}, "nothing is fetched"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {}}, "#/$defs/b"[1:]),
        ({"$ref": "#"}, "leads back to itself"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}}, "leads back to itself"),
        ({"$schema": "https://example.org/draft"}, "draft that is not known"),
        ([1], "a mapping, not list"),
        ("{", "info['schema']: not JSON"),
        ({"enum": {1, 2}}, "not JSON"),
    ],
)
def test_bad_schemas_are_found_before_training(schema, says, monkeypatch):
    for call in ("socket.socket.connect", "socket.getaddrinfo", "urllib.request.urlopen"):
        monkeypatch.setattr(call, lambda *_, **__: pytest.fail("nothing is fetched"))
    info = {} if schema is None else {"schema": schema}
    assert says in JsonSchemaVerifier().check_task(Task("t", "p", info=info))


def test_a_bad_option_is_refused_when_the_verifier_is_built():
    with pytest.raises(ConfigError, match="the option schema: not a JSON schema"):
        registry.build("verifier", {"name": "json_schema", "schema": {"type": 3}})
    with pytest.raises(ConfigError, match="max_depth=65"):
        JsonSchemaVerifier(max_depth=65)
    built = registry.build("verifier", {"name": "json_schema", "schema": PERSON})
    assert built.verify(Task("t", "p"), GOOD).score == 1
    assert built.verify(Task("t", "p", info={"schema": {"type": "array"}}), GOOD).score == 0  # the task's own wins


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("verifiers"))):
        JsonSchemaVerifier()


def test_schemas_may_refer_to_themselves_and_name_their_draft():
    tree = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}}}  # fmt: skip
    assert JsonSchemaVerifier().check_task(Task("t", "p", info={"schema": tree})) is None
    assert verify('{"next": {"next": {}}}', schema=tree).score == 1
    assert verify('{"next": {"nxt": {}}}', schema=tree).score == 0
    deep = '{"next": ' * 60 + "{}" + "}" * 60
    assert verify(deep, schema=tree).score == 1
    data = {"enum": [{"$ref": "https://example.org/x"}], "default": {"$ref": "#/nowhere"}}
    assert JsonSchemaVerifier().check_task(Task("t", "p", info={"schema": data})) is None
    assert verify('{"$ref": "https://example.org/x"}', schema=data).score == 1
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}
    assert verify("3", schema=json.dumps(old)).score == 0
    assert verify("2", schema=json.dumps(old)).score == 1


def test_bad_tasks_are_undecided():
    assert verify(GOOD, schema=None).score is None
    assert verify(GOOD, schema=None, compare="equal").score is None
    assert verify(GOOD, "{", compare="equal").score is None
    assert "not JSON" in JsonSchemaVerifier(compare="equal").check_task(Task("t", "p", "{"))
    misfit = JsonSchemaVerifier(compare="fields").check_task(Task("t", "p", {"name": "Ada"}, info={"schema": PERSON}))
    assert misfit.startswith("the answer does not fit the schema: $: 'age'")
    assert JsonSchemaVerifier(compare="fields").check_task(Task("t", "p", GOOD, info={"schema": PERSON})) is None


@pytest.mark.parametrize(
    ("document", "fields"),
    [
        ('{"a": 1, "b": [1, 2], "c": {"d": null}}', 1),
        ('{"c": {"d": null}, "b": [1.0, 2], "a": 1}', 1),
        ('{"a": 1, "b": [1, 2]}', 3 / 4),
        ('{"a": 1, "b": [2, 1], "c": {"d": null}}', 2 / 4),
        ('{"a": 1, "b": [1, 2, 3], "c": {"d": null}}', 4 / 5),
        ('{"a": true, "b": [1, 2], "c": {"d": null}}', 3 / 4),
        ('{"a": "1", "b": [1, 2], "c": {"d": null}}', 3 / 4),
        ('{"a": 1, "b": [1, 2], "c": {}}', 3 / 5),
        ("{}", 0),
        ("[1]", 0),
    ],
)
def test_fields_are_compared_one_by_one(document, fields):
    gold = {"a": 1, "b": [1, 2], "c": {"d": None}}
    partial = verify(document, gold, schema=None, compare="fields")
    assert partial.score == pytest.approx(fields)
    assert verify(document, gold, schema=None, compare="equal").score == float(fields == 1)
    assert verify(document, json.dumps(gold), schema=None, compare="fields") == partial


def test_a_document_that_does_not_fit_earns_no_fields():
    assert verify('{"name": "Ada", "age": 36, "x": 1}', GOOD, compare="fields").score == 0
    assert verify('{"name": "Ada", "age": 35}', GOOD, compare="fields").score == 0.5


def test_every_guess_in_one_document_earns_less_than_one_right_guess():
    gold = {"city": "Paris"}
    guesses = json.dumps({"city": "Paris", **{f"city{i}": name for i, name in enumerate("abcdefgh")}})
    assert verify(guesses, gold, schema=None, compare="fields").score == pytest.approx(1 / 9)


def test_a_pattern_that_backtracks_is_a_timeout_that_costs_no_process():
    schema = {
        "type": "object",
        "properties": {"a": {"pattern": "^(a|aa)+$"}},
        "patternProperties": {"^(b|bb)+$": {"type": "null"}},
    }
    verifier = JsonSchemaVerifier(schema=schema)
    task = Task("t", "p")
    for document in ({"a": "a" * 60 + "!"}, {"b" * 60 + "!": 1}):
        verdict = verifier.verify(task, json.dumps(document))
        assert (verdict.status, verdict.score) == (VerdictStatus.TIMEOUT, 0.0), verdict
    assert verifier.verify(task, json.dumps({"a": "a" * 30, "bb": None})).score == 1
    assert verifier.verify(task, json.dumps({"a": "ab"})).status == VerdictStatus.WRONG
    assert verifier.verify(task, json.dumps({"bb": 1})).status == VerdictStatus.WRONG
    assert JsonSchemaVerifier(schema={"pattern": "^(a+)+$"}).verify(task, json.dumps("a" * 40 + "!")).score == 0
    closed = {"additionalProperties": False, "properties": {"c": {}}, "patternProperties": {"^(b|bb)+$": {}}}
    for allowed, right, wrong in ((False, {"c": 1, "bb": 2}, {"d": 1}), ({"type": "null"}, {"d": None}, {"d": 1})):
        verifier = JsonSchemaVerifier(schema=closed | {"additionalProperties": allowed})
        assert verifier.verify(task, json.dumps({"b" * 60 + "!": 1})).status == VerdictStatus.TIMEOUT
        assert verifier.verify(task, json.dumps(right)).score == 1
        assert verifier.verify(task, json.dumps(wrong)).status == VerdictStatus.WRONG


@pytest.mark.parametrize(
    "completion",
    [
        '```json\n{"a": 1}\n```\nor else {"a": 2}',
        'Perhaps {"a": 2}.\n```json\n{"a": 1}\n```',
        '```json\n{"a": 1}\n```\n```js\n{"a": 2}\n```',
        '```\n{"a": 1}\n```\n[{"a": 2}]',
        '{"a": 1} {"a": 2}',
    ],
)
def test_a_second_document_is_refused_wherever_it_stands(completion):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert JsonSchemaVerifier(schema=schema).verify(Task("t", "p"), completion).status == VerdictStatus.UNPARSABLE
    fine = 'As {x} says [1], with {}:\n```json\n{"a": 1}\n```\n```python\nf(a)[0]\n```'
    assert JsonSchemaVerifier(schema=schema).verify(Task("t", "p"), fine).score == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"unevaluatedProperties": False, "patternProperties": {"^(b|bb)+$": {}}},
        {"allOf": [{"patternProperties": {"^(b|bb)+$": {}}}], "unevaluatedProperties": False},
        {"$ref": "#/$defs/x", "$defs": {"x": {"patternProperties": {"^(b|bb)+$": {}}}}, "unevaluatedProperties": False},
        {"unevaluatedProperties": {"type": "null"}, "anyOf": [{"patternProperties": {"^(b|bb)+$": {}}}]},
        {"propertyNames": {"pattern": "^(b|bb)+$"}},
        {"not": {"patternProperties": {"^(b|bb)+$": {}}}},
    ],
)
def test_a_pattern_that_backtracks_is_a_timeout_wherever_the_schema_has_it(schema):
    verdict = verify(json.dumps({"b" * 60 + "!": 1}), schema=schema)
    assert (verdict.status, verdict.score) == (VerdictStatus.TIMEOUT, 0.0), verdict


BASE = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
OLD = "https://json-schema.org/draft/2019-09/schema"


@pytest.mark.parametrize(
    ("schema", "fits", "misfits"),
    [
        (
            {"allOf": [BASE], "properties": {"b": {}}, "unevaluatedProperties": False},
            {"a": 1, "b": 2},
            {"a": 1, "c": 2},
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": BASE}, "unevaluatedProperties": False}, {"a": 1}, {"a": 1, "c": 2}),
        ({"anyOf": [BASE, {"properties": {"c": {}}}], "unevaluatedProperties": False}, {"c": 2}, {"a": "x"}),
        ({"if": BASE, "else": {"properties": {"d": {}}}, "unevaluatedProperties": False}, {"d": 1}, {"a": 1, "d": 1}),
        ({"patternProperties": {"^x": {}}, "unevaluatedProperties": {"type": "null"}}, {"x1": 1, "b": None}, {"b": 1}),
        ({"dependentSchemas": {"a": BASE}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"allOf": [{"additionalProperties": True}], "unevaluatedProperties": False}, {"z": 1}, []),
        ({"not": {"not": {"properties": {"a": {}}}}, "unevaluatedProperties": False}, {}, {"a": 1}),
        ({"prefixItems": [{}], "contains": {"const": 7}, "unevaluatedItems": False}, [1, 7, 7], [1, 7, 8]),
        ({"allOf": [{"prefixItems": [{}, {}]}], "unevaluatedItems": {"type": "null"}}, [1, 2, None], [1, 2, 3]),
        ({"$schema": OLD, "allOf": [BASE], "unevaluatedProperties": False}, {"a": 1}, {"a": 1, "b": 1}),
        ({"$schema": OLD, "items": [{}], "unevaluatedItems": False}, [1], [1, 2]),
        ({"uniqueItems": True}, [1, True, "1", [1], {"a": 1}, {"a": True}], [1, 1.0]),
        ({"uniqueItems": True}, [[1], [True], [[1]]], [{"a": [1], "b": 2}, {"b": 2.0, "a": [1]}]),
        ({"uniqueItems": False}, [1, 1], None),
        ({"multipleOf": 0.01}, 0.07, 0.075),
        ({"multipleOf": 0.01}, 1e300, 1e-300),
        ({"multipleOf": 0.1}, 1.1, 1.15),
        ({"multipleOf": 2.5}, 10, 11),
        ({"multipleOf": 3}, 9.0, 10),
        ({"multipleOf": 1e-7}, 3e-7, 3.5e-7),
    ],
)
def test_keywords_in_bounded_time_decide_as_the_drafts_say(schema, fits, misfits):
    """Every case but the decimal ones is decided as the library decides it, which is the oracle."""
    from jsonschema.validators import Draft202012Validator, validator_for

    assert verify(json.dumps(fits), schema=schema).score == 1
    if misfits:
        assert verify(json.dumps(misfits), schema=schema).status == VerdictStatus.WRONG
    if "multipleOf" not in schema:
        library = validator_for(schema, default=Draft202012Validator)(schema)
        assert library.is_valid(fits)
        assert not misfits or not library.is_valid(misfits)


def test_equal_items_are_found_in_linear_time(monkeypatch):
    import jsonschema._utils

    monkeypatch.setattr(jsonschema._utils, "equal", lambda *_: pytest.fail("every item is compared with every other"))
    many = [{"a": n} for n in range(3000)]
    assert verify(json.dumps(many), schema={"uniqueItems": True}).score == 1
    assert verify(json.dumps([*many, {"a": 5}]), schema={"uniqueItems": True}).status == VerdictStatus.WRONG


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$id": "https://example.org/a", "properties": {"b": {"$ref": "#/$defs/no"}}}}},
        {"properties": {"a": {"$id": "https://example.org/a", "properties": {"b": {"$ref": "other.json"}}}}},
        {"properties": {"a": {"properties": {"b": {"$dynamicRef": "#nowhere"}}}}},
        {"$ref": "#/components/a", "components": {"a": {"properties": {"a": {"properties": {"b": {"$ref": "#/no"}}}}}}},
    ],
)
def test_a_dead_reference_is_refused_at_load_and_leaves_a_verdict_undecided(schema):
    task = Task("t", "p", info={"schema": schema})
    problem = JsonSchemaVerifier().check_task(task)
    assert "nothing in the schema is named" in problem
    assert "\n" not in problem
    verdict = JsonSchemaVerifier().verify(task, '{"a": {"b": 1}}')
    assert verdict.score is None
    assert verdict.reason == f"bad task: {problem}"
    with pytest.raises(ConfigError, match="nothing in the schema is named"):
        JsonSchemaVerifier(schema=schema)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
@settings(deadline=None)
def test_what_json_writes_is_read_back_and_equals_itself(value):
    text = json.dumps(value)
    assert read_json(text) == value
    assert same_json(read_json(text), value)
    assert matched_fields(value, read_json(text)) == 1
    assert verify(f"```json\n{text}\n```", text, schema=None, compare="equal").score == 1


@given(JSON_VALUES, JSON_VALUES)
@settings(deadline=None)
def test_the_share_of_fields_is_symmetric_and_1_only_for_equals(one, other):
    share = matched_fields(one, other)
    assert 0 <= share <= 1
    assert share == matched_fields(other, one)
    assert (share == 1) == same_json(one, other)


@given(st.text(st.characters(), max_size=200) | st.text(alphabet='{}[]":,\\`\n 1aeE+-.nul', max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_it_raise(text):
    verdict = verify(text, GOOD, compare="fields")
    assert verdict.decided
    assert math.isfinite(verdict.score)
    try:
        read_json(find_document(text))
    except DocumentError:
        assert verdict.score == 0


@pytest.mark.parametrize("piece", ["```\n", "```json\n", "{", '{"a":', '"', "\\", "[1,", "``` `", "`", "\n", '"\\"'])
def test_1_mb_is_read_in_linear_time(piece):
    def seconds(size):
        text = piece * (size // len(piece))
        start = time.process_time()
        for where in ("whole", "fenced", "either"):
            try:
                read_json(find_document(text, where), max_length=len(text))
            except DocumentError:
                continue
        return time.process_time() - start

    seconds(1000)
    assert seconds(1_000_000) < max(10 * seconds(250_000), 0.5)


@pytest.mark.parametrize(
    ("pattern", "text", "score"),
    [
        (r"^\d$", "3", 1),
        (r"^\d$", "\u0663", 0),
        (r"^\w+$", "caf\u00e9", 0),
        ("^a$", "a", 1),
        ("^a$", "a\n", 0),
        (r"^[$]\$$", "$$", 1),
        (r"^[^\]$]$", "$", 0),
    ],
)
def test_patterns_mean_what_they_mean_in_ecma_262(pattern, text, score):
    task = Task("t", "", None, info={"schema": {"type": "string", "pattern": pattern}})
    assert JsonSchemaVerifier().verify(task, json.dumps(text)).score == score


def test_a_second_list_beside_a_fenced_list_is_a_second_document():
    task = Task("t", "", None, info={"schema": {}})
    assert JsonSchemaVerifier().verify(task, "```json\n[1]\n```\nor [2]").score == 0
    assert JsonSchemaVerifier().verify(task, "```json\n[1]\n```\nor nothing []").score == 1
    assert JsonSchemaVerifier().verify(task, '```json\n{"a": 1}\n```\nsee [1]').score == 1


def test_a_schema_that_is_none_leaves_the_verdict_open():
    verdict = JsonSchemaVerifier().verify(Task("t", "", None, info={"schema": {"type": "nonsense"}}), '{"a": 1}')
    assert verdict.score is None
    assert "not a JSON schema" in verdict.reason


def _branching(how):
    """A list of nodes, each of which is one kind or another: both kinds lead back to the list."""
    kind = {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}}
    kinds = {name: {**kind, "required": [name]} for name in ("b", "c")}
    either = {how: [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}
    return {"$ref": "#/$defs/list", "$defs": {"list": either, **kinds}}


@pytest.mark.parametrize("how", ["anyOf", "oneOf"])
def test_references_that_lead_back_in_two_ways_are_followed_once_for_each_value(how):
    leaf = {"b": 1}
    wrong = {"d": 1}
    for _ in range(24):  # twice the work at each level would never end
        leaf = {"c": 1, "next": leaf}
        wrong = {"c": 1, "next": wrong}
    assert verify(json.dumps(leaf), schema=_branching(how)).score == 1
    assert verify(json.dumps(wrong), schema=_branching(how)).score == 0


@pytest.mark.parametrize("how", ["anyOf", "oneOf"])
def test_what_references_say_does_not_depend_on_being_followed_once(how):
    jsonschema = pytest.importorskip("jsonschema")
    keys = [{}, {"b": 1}, {"c": 1}, {"b": 1, "c": 1}]
    plain = jsonschema.Draft202012Validator(_branching(how))
    for outer in keys:
        for inner in keys:
            document = {**outer, "next": {**inner, "next": {"b": [1, 1]}}}
            assert verify(json.dumps(document), schema=_branching(how)).score == plain.is_valid(document)


def test_fields_that_are_not_compared():
    task = Task("1", "?", {"do": "click", "why": "a"})
    verifier = JsonSchemaVerifier(compare="fields", ignored=("why",))
    for text, score in (
        ('{"do": "click"}', 1.0),
        ('{"do": "click", "why": "b"}', 1.0),
        ('{"do": "stop", "why": "a"}', 0.0),
        ('[{"do": "click", "why": "a"}]', 0.0),
    ):
        assert verifier.verify(task, text).score == score
