"""Tasks with packages: arrays cross between a test, its candidate and the trainer, and a sealed process has all of its
packages."""

from __future__ import annotations

import asyncio

import pytest

from rlvr.records import Task
from rlvr.verifiers import judged
from rlvr.verifiers.code import CodeVerifier, values
from rlvr.verifiers.code.sandbox.inside import arrays
from rlvr.verifiers.code.sandbox.opening import problem_of
from rlvr.verifiers.code.sandbox.tiers import TIERS

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def _sandboxed():
    if (problem := problem_of(TIERS[0])) is not None:
        pytest.skip(f"no full sandbox here: {problem}")


def scored(task, *programs):
    """The score and reason of each program."""
    verifier = CodeVerifier(case_time=20.0)

    async def together():
        return await asyncio.gather(*(judged(verifier, task, program) for program in programs))

    return [(verdict.score, verdict.reason) for verdict in asyncio.run(together())]


def asserted(*tests):
    info = {"kind": "asserts", "entry_point": "f", "setup": "import numpy as np", "packages": ["numpy"]}
    return Task("t", "?", info={**info, "tests": list(tests)})


ARRAYS = """
assert np.array_equal(f(3), np.arange(3) * 2)
assert np.allclose(f(3), [0.0, 2.0, 4.0]) and f(4).shape == (4,) and f(3).dtype == np.int64
assert f(np.array([1, 2, 3])).sum() == 12
a = np.ones((2, 3))
assert (f(a) == 2 * a).all() and f(a).shape == (2, 3) and f(a).dtype == np.float64
assert f(np.array([True, False])).dtype == np.int64 and f(np.zeros((0, 3))).shape == (0, 3)
np.testing.assert_allclose(f(np.array([1 + 2j, 5])), [2 + 4j, 10])
assert f(np.float32(3))[1] == 2 and isinstance(f(2), np.ndarray)
"""
RIGHT = """
import numpy as np
def f(x):
    if isinstance(x, np.ndarray):
        assert x.flags.writeable
        return x * 2
    return 2 * np.arange(int(x))
"""
LATER = """
x = f(3)
assert np.random.default_rng(0).random() < 2 and np.linalg.norm(x) > 0
assert np.ma.array(x).sum() == 6 and len(np.fft.fft(x)) == 3 and np.polynomial.Polynomial([1, 2])(1) == 3
import numpy.typing, numpy.testing
assert np.vectorize(lambda one: one + 1)(x)[0] == 1
"""
PLAIN = (
    "assert len(f(3)) == 3",
    "assert sum(f(3)) == 6 and f(3)[1] == 2",
    "assert list(f(3)) == [0, 2, 4] and f(3).shape == (3,)",
)


def test_arrays_arrive_as_arrays_and_what_numpy_imports_late_may_run():
    task = asserted(ARRAYS, LATER, *PLAIN)
    wrong = [
        RIGHT.replace("x * 2", "x + x + 1e-3"),
        RIGHT.replace("return 2 *", "return"),
        "def f(x): return [0, 2, 4]",
    ]
    right, *others = scored(task, RIGHT, *wrong)
    assert right == (1, "")
    assert [score for score, _ in others] == [0, 0, 0]


CHECKER = """
import numpy as np
def check(input, output):
    return bool(np.allclose(np.array([float(x) for x in output.split()]), np.linspace(0, 1, 5)))
"""
SCRIPT = """
import json, sys
import numpy as np
from numpy.polynomial import Polynomial
given = json.load(sys.stdin)
sys.exit(not np.isclose(float(given["output"].split()[0]), 0))
"""


@pytest.mark.parametrize("checker", [CHECKER, SCRIPT])
def test_a_checker_has_the_packages_of_its_task(checker):
    info = {"kind": "checker", "checker": checker, "cases": [{"input": ""}], "packages": ["numpy"]}
    right, wrong = scored(Task("t", "?", info=info), "print(0, .25, .5, .75, 1)", "print(1)")
    assert right == (1, "")
    assert wrong[0] == 0


SAMPLES = [
    np.arange(6).reshape(2, 3),
    np.arange(6, dtype=np.uint8).reshape(3, 2).T,
    np.array([0.1, np.nan, -0.0, np.inf], np.float32),
    np.array([[True], [False]]),
    np.array(["a", "long text", "\ud800"]),
    np.array([b"a", b"bc"]),
    np.array([1j, 2], np.complex64),
    np.array(2.5),
    np.zeros((0, 3)),
    np.zeros((3, 0), np.int16),
    np.array([[1, None], ["a", [2, 3]]], object),
]


@pytest.mark.parametrize("array", SAMPLES, ids=lambda array: f"{array.dtype.str}{array.shape}")
def test_an_array_crosses_with_its_type_and_shape(array, monkeypatch):
    data = values.encode([array])
    (result,) = values.decode(data)
    assert type(result) is values.Array
    assert (result.dtype, result.shape) == (array.dtype.str, array.shape)
    assert values.encode([result]) == data  # an array that the trainer passes on
    if array.ndim:
        assert len(result) == len(array)
        rows = [row.items if type(row) is values.Array else row for row in result]
        assert repr(rows) == repr(array.tolist() if array.ndim == 1 else [row.ravel().tolist() for row in array])
    monkeypatch.setattr(values, "make_array", arrays.made)
    (again,) = values.decode(data)
    assert type(again) is np.ndarray
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert repr(again.tolist()) == repr(array.tolist())


HOSTILE = [
    '["<f8",[3],[1]]',
    '["<f8",[1000000000,0],[]]',
    '["<f8",[-1],[]]',
    '["<f8",[true],[1]]',
    '["<f8",[1.0],[1]]',
    '["<M8[ns]",[1],[1]]',
    '["<U99999999",[1],["a"]]',
    '["|V8",[1],[1]]',
    '["<f8",1,[1]]',
    '["<f8",[1],{"set":[1]}]',
    "[8,[1],[1]]",
    '["<f8",[1]]',
    '["<f8",[' + "1," * 40 + "1],[1]]",
]
UNFIT = ['["<i8",[1],["a"]]', '["|u1",[1],[300]]', '["<f8",[1],[[1,2]]]', '["<f8",[2],[[],[1]]]']


def test_a_forged_array_is_refused(monkeypatch):
    for body in HOSTILE:
        with pytest.raises(ValueError, match=r"."):
            values.decode(f'{{"array":{body}}}'.encode())
    monkeypatch.setattr(values, "make_array", arrays.made)
    for body in (*HOSTILE, *UNFIT):
        with pytest.raises(ValueError, match=r"."):
            values.decode(f'{{"array":{body}}}'.encode())
