import contextlib
import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers import ToolCallVerifier
from rlvr.verifiers.tool_calls.pairing import align, assign
from rlvr.verifiers.tool_calls.reading import CallError, read_calls

WEATHER = {"name": "weather", "arguments": {"city": "Paris", "days": 3}}
TIME = {"name": "clock.time", "arguments": {"zone": "CET"}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": "string", "default": "C"}}}}},
    {"name": "clock.time", "parameters": {"type": "object", "properties": {"zone": {"type": "string", "default": "UTC"}}}},
]  # fmt: skip


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def verify(completion, answer, tools=None, **options):
    task = Task("t", "p", answer, info={} if tools is None else {"tools": tools})
    verifier = ToolCallVerifier(**options)
    assert verifier.check_task(task) is None
    return verifier.verify(task, completion)


OPENAI = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris", "days": 3}'}}]


@pytest.mark.parametrize(
    ("format", "completion"),
    [
        ("hermes", hermes(WEATHER)),
        ("hermes", "<think>weather(</think>I look it up.\n" + hermes(WEATHER)),
        ("hermes", '<tool_call>{"name": "weather", "parameters": {"days": 3, "city": "Paris"}}</tool_call>'),
        ("json", json.dumps([WEATHER])),
        ("json", json.dumps(WEATHER)),
        ("json", f"Here:\n```json\n{json.dumps([WEATHER])}\n```"),
        ("json", '[{"weather": {"city": "Paris", "days": 3}}]'),
        ("openai", json.dumps(OPENAI)),
        ("openai", json.dumps({"role": "assistant", "content": None, "tool_calls": OPENAI})),
        ("python", "weather(city='Paris', days=3)"),
        ("python", '[weather(days=3, city="Paris")]'),
        ("python", "```python\nweather(city='Paris', days=3)\n```"),
    ],
)
@pytest.mark.parametrize(
    "gold", [[WEATHER], WEATHER, json.dumps([WEATHER]), OPENAI, [{"weather": WEATHER["arguments"]}]]
)
def test_the_same_call_in_every_format(format, completion, gold):
    if format == "python" and isinstance(gold, str):
        gold = "weather(city='Paris', days=3)"
    verdict = verify(completion, gold, format=format)
    assert (verdict.status, verdict.score) == (VerdictStatus.CORRECT, 1.0)


@pytest.mark.parametrize(
    ("format", "completion", "status"),
    [
        ("hermes", "", "unparsable"),
        ("hermes", f"<think>{hermes(WEATHER)}", "unparsable"),
        ("hermes", f"<think>{hermes(WEATHER)}</think>", "unparsable"),
        ("hermes", f"<think>{hermes(WEATHER)}</think>done", "wrong"),
        ("hermes", json.dumps(WEATHER), "wrong"),
        ("hermes", "<tool_call>" + json.dumps(WEATHER), "unparsable"),
        ("hermes", json.dumps(WEATHER) + "</tool_call>", "unparsable"),
        ("hermes", "<tool_call>" + hermes(WEATHER) + "</tool_call>", "unparsable"),
        ("hermes", hermes(WEATHER) + "</tool_call>", "unparsable"),
        ("hermes", "<tool_call>weather(city='Paris', days=3)</tool_call>", "unparsable"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "city": "Paris", "days": '
                   '3}}</tool_call>', "unparsable"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 3}, "parameters": '
                   '{}}</tool_call>', "unparsable"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>', "unparsable"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": '
                   'NaN}}</tool_call>', "unparsable"),
        ("hermes", hermes({"weather": WEATHER["arguments"]}), "unparsable"),
        ("hermes", hermes(WEATHER, WEATHER), "wrong"),
        ("hermes", hermes(WEATHER, TIME), "wrong"),
        ("hermes", hermes({**WEATHER, "name": "Weather"}), "wrong"),
        ("hermes", hermes(*[WEATHER] * 65), "unparsable"),
        ("json", hermes(WEATHER), "wrong"),
        ("json", json.dumps([WEATHER]) + json.dumps([WEATHER]), "unparsable"),
        ("json", f"```json\n{json.dumps([WEATHER])}\n```\n```json\n[]\n```", "unparsable"),
        ("json", "[1]", "unparsable"),
        ("openai", json.dumps([WEATHER]), "unparsable"),
        ("openai", json.dumps([{"function": WEATHER}]), "unparsable"),
        ("openai", '[{"function": {"name": "weather", "arguments": "{"}}]', "unparsable"),
        ("python", "weather('Paris', 3)", "unparsable"),
        ("python", "weather(city='Paris', days=1+2)", "unparsable"),
        ("python", "weather(city='Paris', days=int('3'))", "unparsable"),
        ("python", "weather(**{'city': 'Paris', 'days': 3})", "unparsable"),
        ("python", "weather(city='Paris', days=3, days=3)", "unparsable"),
        ("python", "x = weather(city='Paris', days=3)", "wrong"),
        ("python", "weather(city='Paris', days=3) if True else 0", "unparsable"),
        ("python", "__import__('os').system('true')", "unparsable"),
        ("python", "weather(city={'Paris'}, days=3)", "unparsable"),
        ("python", "weather(city=b'Paris', days=3)", "unparsable"),
        ("python", "weather(city='Paris', days=3", "unparsable"),
        ("python", "weather(city='Paris', days=03)", "unparsable"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_or_is_no_call_earns_nothing(format, completion, status):
    gold = "weather(city='Paris', days=3)" if format == "python" else [WEATHER]
    for credit in ("none", "toolrl"):
        verdict = verify(completion, gold, format=format, credit=credit)
        if status == "unparsable":
            assert (verdict.status, verdict.score) == (VerdictStatus.UNPARSABLE, -3.0 if credit == "toolrl" else 0.0)
        elif credit == "none":
            assert (verdict.status, verdict.score) == (VerdictStatus.WRONG, 0.0)


@pytest.mark.parametrize(
    ("found", "wanted", "options", "same"),
    [
        (1, 1.0, {}, True), (1, 1.0, {"int_is_float": False}, False), (1, 1, {"int_is_float": False}, True),
        ("1", 1, {}, False), ("1", 1, {"number_is_text": True}, True), ("1.0", 1, {"number_is_text": True}, True),
        (1, "1", {"number_is_text": True}, True), ("one", 1, {"number_is_text": True}, False), ("1", None, {"number_is_text": True}, False),
        (True, 1, {}, False), (True, 1, {"number_is_text": True}, False), (True, True, {}, True), ("true", True, {"number_is_text": True}, False),
        (None, "", {}, False), (None, None, {}, True), ([1, 2], [2, 1], {}, False), ([1], [1, 2], {}, False), ([1, 2], [1], {}, False), ([1, 2.0], [1.0, 2], {}, True),
        ({"a": [1]}, {"a": [1.0]}, {}, True), ({"a": 1}, {"a": 1, "b": 2}, {}, False), ([], {}, {}, False),
        ("New York", "new-york", {}, False), ("New York", "new-york", {"text": "bfcl"}, True), ("it's", 'it"s', {"text": "bfcl"}, True),
        ("a", "b", {"text": "bfcl"}, False), ("Paris ", "Paris", {}, False), (["A b"], ["ab"], {"text": "bfcl"}, True),
    ],
)  # fmt: skip
def test_values_are_compared_by_type(found, wanted, options, same):
    verdict = verify(
        hermes({"name": "f", "arguments": {"x": found}}), [{"name": "f", "arguments": {"x": wanted}}], **options
    )
    assert verdict.score == float(same)


@pytest.mark.parametrize(
    ("calls", "score", "ordered"),
    [
        ([WEATHER, TIME], 1, 1), ([TIME, WEATHER], 1, 0), ([WEATHER], 0, 0), ([WEATHER, WEATHER], 0, 0),
        ([WEATHER, TIME, TIME], 0, 0), ([], 0, 0),
    ],
)  # fmt: skip
def test_calls_are_a_multiset_unless_ordered(calls, score, ordered):
    text = hermes(*calls) or "none"
    assert verify(text, [WEATHER, TIME]).score == score
    assert verify(text, [WEATHER, TIME], ordered=True).score == ordered


def test_where_no_call_is_right():
    assert verify("I cannot help with that.", []).score == 1
    assert verify("I cannot help with that.", "[]").score == 1
    assert verify(hermes(WEATHER), []).score == 0
    assert verify("<tool_call>{</tool_call>", []).score == 0
    assert verify("", []).score == 0
    assert verify("<think>x</think>\n", []).score == 0
    assert verify("[]", [], format="json").score == 1
    assert verify("It is 3 (three).", [], format="python").score == 1
    assert verify("clock.time(", [], format="python").score == 0
    assert verify("<think>x</think>No.", [], credit="toolrl").score == 4
    assert verify("No.", [], credit="toolrl").score == 3
    assert verify(hermes(WEATHER), [], credit="toolrl").score == -3


def test_defaults_may_be_written_or_left_out_where_the_schemas_are_known():
    written = {"name": "weather", "arguments": {**WEATHER["arguments"], "unit": "C"}}
    other = {"name": "weather", "arguments": {**WEATHER["arguments"], "unit": "F"}}
    for tools in (TOOLS, json.dumps(TOOLS)):
        assert verify(hermes(written), [WEATHER], tools).score == 1
        assert verify(hermes(WEATHER), [written], tools).score == 1
        assert verify(hermes(other), [WEATHER], tools).score == 0
        assert verify(hermes(WEATHER), [other], tools).score == 0
    assert verify(hermes(written), [WEATHER]).score == 0
    assert (
        verify(hermes({"name": "clock.time"}), [{"name": "clock.time", "arguments": {"zone": "UTC"}}], TOOLS).score == 1
    )


def test_python_calls_may_leave_out_names_where_the_schemas_are_known():
    gold = "weather('Paris', days=3)"
    assert verify("weather('Paris', 3)", gold, TOOLS, format="python").score == 1
    assert (
        verify(
            "weather(city='Paris', days=3, unit='C')\nclock.time('CET')", [WEATHER, TIME], TOOLS, format="python"
        ).score
        == 1
    )
    assert verify("weather('Paris', 3, 'C', 4)", gold, TOOLS, format="python").status is VerdictStatus.UNPARSABLE
    assert (
        verify("weather('Paris', city='Paris', days=3)", gold, TOOLS, format="python").status
        is VerdictStatus.UNPARSABLE
    )
    assert verify("weather(3, 'Paris')", gold, TOOLS, format="python").score == 0


@pytest.mark.parametrize(
    ("arguments", "score"),
    [
        ({"city": "Paris", "days": 3}, 1), ({"city": "Paris, France", "days": 3, "unit": "C"}, 1), ({"city": "Paris", "days": 4}, 0),
        ({"city": "Rome", "days": 3}, 0), ({"city": "Paris"}, 0), ({"city": "Paris", "days": 3, "unit": "F"}, 0),
        ({"city": "Paris", "days": 3, "x": 1}, 0), ({"city": ["Paris"], "days": 3}, 0),
    ],
)  # fmt: skip
def test_a_gold_with_several_acceptable_values(arguments, score):
    gold = [{"weather": {"city": ["Paris", "Paris, France"], "days": [3], "unit": ["C", ""]}}]
    assert verify(hermes({"name": "weather", "arguments": arguments}), gold, acceptable_values=True).score == score


def test_acceptable_values_go_into_mappings_and_lists():
    gold = [{"f": {"x": [{"a": [1, 2], "b": ["", "z"]}], "y": [[1, 2], [3]]}}]
    for x, y, score in [
        ({"a": 1}, [3], 1), ({"a": 2, "b": "z"}, [1, 2], 1), ({"a": 3}, [3], 0), ({"b": "z"}, [3], 0),
        ({"a": 1, "c": 1}, [3], 0), ({"a": 1}, [2, 1], 0), ({"a": 1}, 3, 0), (1, [3], 0),
    ]:  # fmt: skip
        result = hermes({"name": "f", "arguments": {"x": x, "y": y}})
        assert verify(result, gold, acceptable_values=True).score == score, (x, y)


def test_two_calls_of_one_tool_are_paired_as_best_fits_both():
    gold = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]
    for pair in itertools.permutations([{"f": {"x": 1}}, {"f": {"x": 2}}]):
        assert verify(json.dumps(pair), gold, format="json", acceptable_values=True).score == 1


@pytest.mark.parametrize(
    ("calls", "total"),
    [
        # S_max = 1 + 2 calls + 3 parameters = 6
        ([WEATHER, TIME], 6 / 6),
        ([WEATHER], (1 / 2 + 1 + 2) / 6),
        ([TIME], (1 / 2 + 1 + 1) / 6),
        ([{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, TIME], (1 + 2 + 2) / 6),
        ([{"name": "weather", "arguments": {"city": "Paris"}}, TIME], (1 + 1 / 2 + 1 + 2) / 6),
        ([{"name": "weather", "arguments": {"city": "Paris", "days": 3, "x": 1}}, TIME], (1 + 2 / 3 + 2 + 2) / 6),
        ([{"name": "weather", "arguments": {}}, {"name": "other", "arguments": {"zone": "CET"}}], (1 / 3) / 6),
        ([{"name": "other", "arguments": WEATHER["arguments"]}], 0),
        ([], 0),
    ],
)
def test_toolrl_by_hand(calls, total):
    text = hermes(*calls) or "none"
    reward = verify(text, [WEATHER, TIME], credit="toolrl", extra_calls_cost=False)
    assert reward.score == pytest.approx(6 * total - 3)
    assert reward.scores["total"] == pytest.approx(total)
    thinking = verify(f"<think>hm</think>\n{text}", [WEATHER, TIME], credit="toolrl", extra_calls_cost=False)
    assert thinking.score == pytest.approx(6 * total - 3 + 1)
    fraction = verify(text, [WEATHER, TIME], credit="fraction")
    assert fraction.score == pytest.approx(total)
    assert fraction.status == {0: VerdictStatus.WRONG, 1: VerdictStatus.CORRECT}.get(total, VerdictStatus.PARTIAL)
    assert verify(text, [WEATHER, TIME]).score == float(total == 1)


def test_extra_calls_cost_more_than_in_the_paper():
    guesses = [
        {"name": "weather", "arguments": {"city": city, "days": 3}} for city in ("Rome", "Oslo", "Bonn", "Paris")
    ]
    # one right call among four guesses: names 1/4, S_max = 1 + 1 + 2 = 4; stretched, 1 + 3 * 4 = 13
    paper = verify(hermes(*guesses), [WEATHER], credit="fraction", extra_calls_cost=False)
    ours = verify(hermes(*guesses), [WEATHER], credit="fraction")
    assert paper.score == pytest.approx((1 / 4 + 3) / 4)
    assert ours.score == pytest.approx((1 / 4 + 3) / 13)
    assert ours.score < verify(hermes(guesses[0]), [WEATHER], credit="fraction").score
    assert verify(hermes(*guesses), [WEATHER]).score == 0


@pytest.mark.parametrize(
    ("completion", "format"),
    [
        (f"<think>a</think>\n{hermes(WEATHER)}", 1),
        (hermes(WEATHER), 0),
        (f"<think>a</think>So:\n{hermes(WEATHER)}", 0),
        (f"<think>a</think>{hermes(WEATHER)} done", 0),
        (f"x<think>a</think>{hermes(WEATHER)}", 0),
        (f"<think>a</think>b</think>{hermes(WEATHER)}", 0),
        (f"<think>a<think>b</think>{hermes(WEATHER)}", 0),
        (f"<think>a</think><think>b</think>{hermes(WEATHER)}", 0),
    ],
)
def test_the_format_of_toolrl(completion, format):
    verdict = verify(completion, [WEATHER], credit="toolrl")
    assert (verdict.score, verdict.scores["format"]) == (3 + format, format)


def test_the_gold_of_toolrls_data_is_read():
    gold = "<think> </think>\n<tool_call>\n" + "\n".join(
        json.dumps({"name": call["name"], "parameters": call["arguments"]}) for call in (WEATHER, TIME)
    ) + "\n</tool_call>"  # fmt: skip
    assert verify(f"<think>a</think>\n{hermes(TIME, WEATHER)}", gold, credit="toolrl").score == 4


@pytest.mark.parametrize(
    ("answer", "tools", "options", "says"),
    [
        (None, None, {}, "the answer is a list of calls, not NoneType"),
        (3, None, {}, "not int"),
        ([3], None, {}, "a call is an object, not int"),
        ([{"name": "f", "arguments": [1]}], None, {}, "the arguments of f are an object, not list"),
        ([{"arguments": {}, "id": 1}], None, {}, "a call has a name"),
        ("no call here", None, {}, "holds no call in the format hermes"),
        ("[{", None, {}, "not JSON"),
        ([WEATHER], [{"name": "wether"}], {}, "the answer calls 'weather', which info['tools'] does not have"),
        ([WEATHER], [{}], {}, "has no name"),
        ([WEATHER], 3, {}, "info['tools'] is a list"),
        ([WEATHER], None, {"acceptable_values": True}, "weather.city of the answer is a list of acceptable values"),
        ([{"f": {"x": []}}], None, {"acceptable_values": True}, "f.x of the answer"),
        ([{"f": {"x": [{"a": 1}]}}], None, {"acceptable_values": True}, "f.x.a of the answer"),
        ([WEATHER] * 65, None, {}, "over the limit of 64"),
    ],
)
def test_bad_golds_are_found_before_training_and_undecided_after(answer, tools, options, says):
    task, verifier = Task("t", "p", answer, info={"tools": tools}), ToolCallVerifier(**options)
    assert says in verifier.check_task(task)
    if "does not have" not in says:
        assert verifier.verify(task, hermes(WEATHER)).score is None


TABLES = st.integers(1, 4).flatmap(
    lambda columns: st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0]), min_size=columns, max_size=columns), min_size=1, max_size=4
    )
)


@given(TABLES)
@settings(deadline=None)
def test_the_pairings_are_the_best_there_are(scores):
    rows, columns = len(scores), len(scores[0])

    def value(pairs):
        return sum(scores[i][j] for i, j in pairs)

    size = min(rows, columns)
    every = [
        list(zip(chosen, order, strict=True))
        for chosen in itertools.permutations(range(rows), size)
        for order in itertools.combinations(range(columns), size)
    ]
    result = assign(scores)
    assert len({i for i, _ in result}) == len({j for _, j in result}) == len(result) == size
    assert value(result) == max(map(value, every))

    rising = [
        list(zip(r, c, strict=True))
        for k in range(size + 1)
        for r in itertools.combinations(range(rows), k)
        for c in itertools.combinations(range(columns), k)
    ]
    result = align(scores)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(result))
    assert value(result) == max(map(value, rising))


CALLS = st.lists(
    st.builds(
        lambda name, arguments: {"name": name, "arguments": arguments},
        st.sampled_from(["f", "g"]),
        st.dictionaries(st.sampled_from("xyz"), st.sampled_from([1, 2, "1", None, True, [1]]), max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@given(CALLS, st.randoms())
@settings(deadline=None)
def test_a_gold_equals_itself_in_any_order(calls, random):
    shuffled = random.sample(calls, len(calls))
    for credit, best in (("none", 1), ("fraction", 1), ("toolrl", 3)):
        assert verify(hermes(*shuffled), calls, credit=credit).score == best
    assert verify(hermes(*calls), calls, ordered=True, credit="fraction").score == 1


@given(CALLS, CALLS)
@settings(deadline=None)
def test_full_credit_means_equal_and_no_score_leaves_its_range(calls, gold):
    equal = sorted(map(repr, map(_sorted, calls))) == sorted(map(repr, map(_sorted, gold)))
    for cost in (True, False):
        fraction = verify(hermes(*calls), gold, credit="fraction", extra_calls_cost=cost).score
        assert 0 <= fraction <= 1
        assert (fraction == 1) == equal
        assert (verify(hermes(*calls), gold, credit="fraction", extra_calls_cost=cost, ordered=True).score == 1) == (calls == gold and list(map(repr, map(_sorted, calls))) == list(map(repr, map(_sorted, gold))))  # fmt: skip
    assert (verify(hermes(*calls), gold).score == 1) == equal


def _sorted(call):
    return call["name"], sorted(call["arguments"].items(), key=lambda item: item[0])


@given(st.text(st.characters(), max_size=200) | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"f"', ",", "[", "]", "f(", "x=1", ")", "```", "\n", "**", "-", "lambda:", "'"]), max_size=30).map("".join))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_no_text_makes_it_raise(text):
    for format in ("hermes", "json", "openai", "python"):
        gold = [WEATHER]
        assert verify(text, gold, TOOLS, format=format, credit="toolrl").score <= 1


@pytest.mark.parametrize(
    "text",
    ["f(" * 9000, "f(x=" + "-" * 19_000 + "1)", "f(x=" + "(" * 9000 + ")" * 9000 + ")", "f(x=" + "[" * 9000 + "]" * 9000 + ")", "f(x=" + "1+" * 9000 + "1)", "f" + ".a" * 9000 + "()", "f(x=" + "9" * 10_000 + ")", "f(x=9**9**9**9)", "f(x='" + "a" * 19_000 + "')", "f(x=f'{1}')", "f(" + "not " * 4000 + "1)", "f(x=" + "{1:" * 6000 + "1" + "}" * 6000 + ")"],
)  # fmt: skip
def test_hostile_python_is_refused_or_harmless_at_once(text):
    start = time.process_time()
    with contextlib.suppress(CallError):
        (call,) = read_calls(text, "python").calls
        assert call.arguments["x"] == "a" * 19_000 or set(call.name) == set("f.a")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "piece", ["<tool_call>", "</tool_call>", "<tool_call>{}</tool_call>", "```\n", "f(", "[", '{"name":', "\n", '"']
)
@pytest.mark.parametrize("format", ["hermes", "json", "openai", "python"])
def test_1_mb_is_refused_fast(piece, format):
    start = time.process_time()
    for size in (100_000, 1_000_000):
        assert verify(piece * (size // len(piece)), [WEATHER], format=format).score == 0
    assert time.process_time() - start < 2


def test_64_calls_of_one_tool_are_paired_in_little_time():
    gold = [{"name": "f", "arguments": {"x": i, "y": i % 7}} for i in range(64)]
    start = time.process_time()
    assert verify(hermes(*reversed(gold)), gold, credit="fraction").score == 1
    assert time.process_time() - start < 5


def test_the_parser_of_python_runs_in_a_worker_process(pool):
    verifier = ToolCallVerifier(format="python")
    assert verifier.needs.process
    assert not ToolCallVerifier().needs.process
    texts = ["weather(city='Paris', days=3)", "weather(" * 2000]
    task = Task("t", "p", [WEATHER])
    assert [verdict.score for verdict in pool.verify_many(verifier, [(task, text) for text in texts])] == [1, 0]


def test_it_is_registered():
    built = registry.build("verifier", {"name": "tool_calls", "format": "python", "credit": "toolrl"})
    assert isinstance(built, ToolCallVerifier)
