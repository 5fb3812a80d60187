"""Values cross as typed JSON: they come back with the same types, and hostile text takes linear time."""

import datetime
import math
import random
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.verifiers.code import values


def some_value(rng: random.Random, depth: int):
    plain = [
        None,
        True,
        rng.randint(-(2**80), 2**80),
        rng.uniform(-1e9, 1e9),
        -0.0,
        math.inf,
        "a\ud800\udc00b",
        b"\xff",
        2 - 1j,
    ]
    plain += ["".join(chr(rng.randrange(0x11000)) for _ in range(rng.randrange(5)))]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(plain)
    items = [some_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = [item for item in items if item.__hash__ and not isinstance(item, tuple)]
    return rng.choice([items, tuple(items), set(keys), frozenset(keys), dict(zip(keys, items, strict=False))])


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, (set, frozenset)):  # their order is their own
        return one == other and sorted(map(ordered, one)) == sorted(map(ordered, other))
    if isinstance(one, dict):
        one, other = [*one.items()], [*other.items()]
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def ordered(value):
    return "".join(sorted(repr(value)))


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_a_value_comes_back_with_the_same_types(seed):
    value = some_value(random.Random(seed), 4)
    assert same(values.decode(values.encode(value)), value)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0x1einftupleset dict', max_size=60).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_decoding_raises_nothing_but_value_error(data):
    try:
        value = values.decode(data)
    except ValueError:
        return
    assert type(value) in (type(None), bool, int, float, str, bytes, list, tuple, dict, set, frozenset, complex)


@pytest.mark.parametrize(
    "value",
    [object(), ..., len, sys, int, lambda: 1, datetime.datetime.now(datetime.UTC)],
)
def test_what_is_not_plain_is_refused_by_its_type(value):
    with pytest.raises(ValueError, match=f"not a plain value: {type(value).__name__}"):
        values.encode(value)


def test_a_rigged_subclass_arrives_as_what_it_is_a_kind_of():
    rigged = {
        "__eq__": lambda *_: True,
        "__hash__": lambda *_: 1,
        "__iter__": lambda _: iter([7]),
        "__index__": lambda _: 7,
    }
    plain = [1, 1.5, "a", b"a", (1, 2), [1, 2], {1, 2}, frozenset({1}), {1: 2}]
    for value in plain:
        result = values.decode(values.encode(type("Rigged", (type(value),), rigged)(value)))
        assert type(result) is type(value)
        assert result == value


def test_bounds_of_less_common_values():
    for data in (
        '{"range":[0,{"int":"0x10000000000000000"},1]}',
        '{"range":[0,"a",1]}',
        '{"range":[0]}',
        '[{"range":0}]',
        '{"range":[0,[[[]]],1]}',
        '{"range":[0,1,0]}',
        '{"Decimal":"1E+999999"}',
        '{"Decimal":"1E-999999999"}',
        '{"Decimal":"sNaN"}',
        '{"Decimal":"x"}',
        '{"Fraction":[1,0]}',
        f'{{"Fraction":[{{"int":"0x1{"0" * 4000}"}},3]}}',
        '{"date":[2000,13,1]}',
        '{"timedelta":[10000000000,0,0]}',
        '{"object":["A",[[1,2]],true]}',
        '{"object":["A",[["_instance",2]],true]}',
        '{"object":["A"]}',
        '{"items":[[1,2]]}',
        '{"keys":[[1]]}',
    ):
        with pytest.raises(ValueError, match=r"."):
            values.decode(data.encode())


def test_the_members_of_a_range_count_into_its_size():
    nested = [range(1, 101), {"a": (range(10), range(5, 0, -1))}, range(3, 3)]
    data = values.encode(nested)
    assert same(values.decode(data), nested)
    value, size = values.measured(data, values.MAX_SIZE)
    assert same(value, nested)
    assert size - len(data) >= sum(len(str(n)) for part in (range(1, 101), range(10), range(5, 0, -1)) for n in part)
    assert values.measured(data, size - 1) == (None, size)
    with pytest.raises(ValueError, match="over the limit"):
        values.decode(data, size - 1)
    with pytest.raises(ValueError, match="too large"):
        values.encode(nested, 200)
    for long in (range(2**20), range(10**30), range(1 << 30_000, (1 << 30_000) + 2**12)):
        with pytest.raises(ValueError, match="too large"):
            values.encode(long)
        parts = values.encode([long.start, long.stop, long.step])
        with pytest.raises(ValueError, match="over the limit"):
            values.decode(b'{"range":' + parts + b"}")


ALIKE = [f'{{"int":"{hex((2**61 - 1) * i)}"}}' for i in range(1, 200)]


@pytest.mark.parametrize("count", [60, 199])
@pytest.mark.parametrize("body", ["set", "frozenset", "keys", "dict", "items", "object"])
def test_members_that_share_their_hash_are_few(body, count):
    """Each of them is compared with all others: (2^61 - 1) i has the hash 0 for every i."""
    pairs = ",".join(f"[{one},1]" for one in ALIKE[:count])
    tuples = ",".join(f'{{"tuple":[{one},1]}}' for one in ALIKE[:count])
    bodies = {"dict": f"[{pairs}]", "items": f"[{tuples}]", "object": f'["A",[{pairs}],true]'}
    data = f'{{"{body}":{bodies.get(body, "[" + ",".join(ALIKE[:count]) + "]")}}}'
    if count < 100 and body != "object":  # the fields of an object are named by texts
        assert len(values.decode(data.encode())) == count
        return
    with pytest.raises(ValueError, match="share their hash" if count > 100 else "not named"):
        values.decode(data.encode())


def test_hostile_typed_json_takes_linear_time():
    alike = ",".join(f'{{"int":"{hex((2**61 - 1) * i)}"}}' for i in range(1, 40_000))
    start = time.process_time()
    for data in (f'{{"set":[{alike}]}}', "[" * 10**5, "9" * 10**5):
        with pytest.raises(ValueError, match=r"."):
            values.decode(data.encode())
    assert time.process_time() - start < 5
    nested = []
    for _ in range(90):
        nested = [nested] * 10
    with pytest.raises(ValueError, match="too large"):
        values.encode(nested)
