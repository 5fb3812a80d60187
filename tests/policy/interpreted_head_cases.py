"""The Triton kernels of the fused head in Triton's interpreter, against plain formulas on all logits in float64.

Not collected by itself: `test_head_kernels.py` runs it in a process of its own, since TRITON_INTERPRET has to be set
before triton is imported.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlvr.policy import head_kernels, head_tiles
from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.model import Head

ALL = ("logprobs", "entropy", "logsumexp", "mean_logit", "sum_squared_probs")
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


def statistics_of(logits, ids):
    """The statistics of a float64 table of logits, by their definitions."""
    logprobs = logits - logits.logsumexp(1, keepdim=True)
    probs = logprobs.exp()
    return {
        "logprobs": logprobs.gather(1, ids[:, None])[:, 0],
        "entropy": -(probs * logprobs.clamp(min=-1e300)).sum(1),
        "logsumexp": logits.logsumexp(1),
        "mean_logit": logits.mean(1),
        "sum_squared_probs": probs.square().sum(1),
    }


def dense(inputs, weights, temperature, scale=1.0, cap=None):
    """All logits in float64; with inputs of bfloat16, of the products as the head rounds them."""
    logits = inputs[0].double() if not weights else 0.0
    for x, w in zip(inputs, weights, strict=False):
        logits = logits + x.double() @ w.double().T
    logits = logits * scale
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    return logits / temperature.double()[:, None]


class Problem:
    """A head with random numbers, and random gradients of its statistics."""

    def __init__(self, seed, tokens=5, vocabulary=37, terms=1, dtype=torch.float32, **head):
        make = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

        self.head = head
        self.dtype = dtype
        self.inputs = tuple(normal(tokens, 3 + i).requires_grad_() for i in range(terms))
        self.weights = tuple(normal(vocabulary, 3 + i).requires_grad_() for i in range(terms))
        self.temperature = torch.rand(tokens, generator=make, dtype=torch.float64) + 0.5
        self.ids = torch.randint(0, vocabulary, (tokens,), generator=make)
        self.upstream = {name: normal(tokens).double() for name in ALL}

    @property
    def leaves(self):
        return [*self.inputs, *self.weights]

    def ours(self, asked):
        head = Head(self.inputs, self.weights, **self.head)
        return fused_statistics(head, self.temperature, asked, self.ids)

    def wanted(self):
        return statistics_of(dense(self.inputs, self.weights, self.temperature, **self.head), self.ids)

    def gradients(self, values, asked):
        total = sum((values[name] * self.upstream[name]).sum() for name, on in asked.items() if on)
        return torch.autograd.grad(total, self.leaves, retain_graph=True)

    def check(self, asked):
        tolerance = EXACT[self.dtype]
        ours = self.ours(asked)
        wanted = self.wanted()
        assert set(ours) == set(asked)
        for name in asked:
            close(ours[name], wanted[name], tolerance)
        if any(asked.values()):
            for mine, right in zip(self.gradients(ours, asked), self.gradients(wanted, asked), strict=True):
                close(mine, right, tolerance)


def close(got, want, tolerance):
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape
    assert float((got - want).norm()) <= tolerance * max(1.0, float(want.norm()))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles of 4 tokens by 16 entries, read 8 at a time: 5 tokens and 37 entries fill neither the last tile nor the
    last read."""
    sizes(monkeypatch, 4, 16, 8)


def sizes(patch, tokens, entries, block):
    patch.setattr(head_tiles, "COLUMNS", entries)
    patch.setattr(head_tiles, "TILE", tokens * entries)
    patch.setattr(head_kernels, "SUM_BLOCK", block)
    patch.setattr(head_kernels, "GRADIENT_BLOCK", block)


@pytest.fixture
def launched(monkeypatch):
    """The kernels that are launched, each with its tile and its other arguments."""
    seen = []
    real = head_kernels._launch

    def launch(kernel, grid, tile, *arguments, **constants):
        seen.append((kernel, tile.shape, arguments))
        real(kernel, grid, tile, *arguments, **constants)

    monkeypatch.setattr(head_kernels, "_launch", launch)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("terms", [1, 2])
def test_all_statistics_and_gradients(dtype, cap, terms):
    Problem(1, dtype=dtype, cap=cap, terms=terms, scale=0.7).check(dict.fromkeys(ALL, True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 7),
    vocabulary=st.integers(1, 50),
    terms=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 20), st.sampled_from([1, 4, 16])),
    scale=st.sampled_from([1.0, 0.3, 4.0]),
    cap=st.none() | st.floats(0.5, 5.0),
    data=st.data(),
)
def test_any_statistics_of_any_head(seed, tokens, vocabulary, terms, dtype, shape, scale, cap, data):
    names = data.draw(st.sets(st.sampled_from(ALL), min_size=1))
    asked = {name: data.draw(st.booleans()) for name in sorted(names)}
    with pytest.MonkeyPatch.context() as patch:
        sizes(patch, *shape)
        Problem(seed, tokens, vocabulary, terms, dtype, scale=scale, cap=cap).check(asked)


@pytest.mark.parametrize("stride", [2, 0])
def test_ids_need_not_lie_next_to_each_other(stride):
    """A column of a table of ids, and one id for all tokens."""
    problem = Problem(2)
    problem.ids = torch.stack([problem.ids, 36 - problem.ids], 1)[:, 0] if stride else torch.tensor(7).expand(5)
    assert problem.ids.stride() == (stride,)
    problem.check({"logprobs": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits(dtype):
    """Rows of +-1e4, one logit far above all, all far below zero: exact to the rounding of the logits themselves."""
    logits = torch.randn(5, 37, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    logits[0] = 1e4 * torch.where(torch.arange(37) % 2 == 0, 1, -1)
    logits[1, 30] = 1e4
    logits[2] -= 1e4
    logits[3] *= 1e4
    logits.requires_grad_()
    ids = torch.tensor([1, 30, 5, 7, 9])
    asked = dict.fromkeys(ALL, True)
    ours = fused_statistics(Head((logits,)), torch.ones(5), asked, ids)
    wanted = statistics_of(logits.double(), ids)
    eps = torch.finfo(dtype).eps
    for name in ALL:
        torch.testing.assert_close(ours[name].double(), wanted[name], rtol=4 * eps, atol=1e4 * eps)
    assert ours["entropy"][0].item() == pytest.approx(math.log(19), rel=1e-6)
    assert ours["logprobs"][0].item() == pytest.approx(-2e4 - math.log(19), rel=1e-6)
    mine, right = (torch.autograd.grad(sum(v[name].sum() for name in ALL), logits)[0] for v in (ours, wanted))
    torch.testing.assert_close(mine.double(), right.double(), rtol=1e4 * eps, atol=1e4 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_logits(dtype):
    """All equal, and two largest in different tiles: each shares the probability."""
    logits = torch.full((2, 37), 3.0, dtype=dtype)
    logits[1] = -50.0
    logits[1, 2] = logits[1, 36] = 7.0
    logits.requires_grad_()
    ids = torch.tensor([36, 36])
    values = fused_statistics(Head((logits,)), torch.ones(2), {"logprobs": True, "entropy": True}, ids)
    want = torch.tensor([math.log(37), math.log(2)], dtype=torch.float64)
    close(values["entropy"], want, EXACT[dtype])
    close(values["logprobs"], -want, EXACT[dtype])
    slope = torch.autograd.grad(values["logprobs"].sum(), logits)[0].double()
    expected = torch.zeros(2, 37, dtype=torch.float64)
    expected[0] = -1 / 37
    expected[0, 36] += 1
    expected[1, 2], expected[1, 36] = -0.5, 0.5
    close(slope, expected, EXACT[dtype])


@pytest.mark.parametrize("masked", [slice(0, 16), slice(16, 32), slice(33, 37), slice(3, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_vocabulary_entries_have_no_probability(masked, dtype):
    """A bias of minus infinity, also over a whole tile, the first or a later one."""
    problem = Problem(2, dtype=dtype)
    live = [v for v in range(37) if v not in range(37)[masked]]
    problem.ids = torch.tensor(live)[problem.ids % len(live)]
    bias = torch.zeros(37, 1, dtype=dtype)
    bias[masked] = -torch.inf
    names = ("logprobs", "entropy", "logsumexp", "sum_squared_probs")
    asked = dict.fromkeys(names, True)
    inputs, weights = (*problem.inputs, torch.ones(5, 1, dtype=dtype)), (*problem.weights, bias)
    ours = fused_statistics(Head(inputs, weights), problem.temperature, asked, problem.ids)
    places = torch.tensor([live.index(i) for i in problem.ids])
    wanted = statistics_of(dense(problem.inputs, (problem.weights[0][live],), problem.temperature), places)
    for name in names:
        close(ours[name], wanted[name], EXACT[dtype])
    for mine, right in zip(problem.gradients(ours, asked), problem.gradients(wanted, asked), strict=True):
        close(mine, right, EXACT[dtype])


def test_tokens_whose_gradient_is_zero_add_nothing():
    """Untrained tokens of a loss, whose weight is 0."""
    problem = Problem(3)
    for upstream in problem.upstream.values():
        upstream[1::2] = 0
    asked = dict.fromkeys(ALL, True)
    hidden, weight = problem.gradients(problem.ours(asked), asked)
    assert bool((hidden[1::2] == 0).all()) and bool((hidden[::2] != 0).all())
    close(weight, problem.gradients(problem.wanted(), asked)[1], 1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_spoils_itself_only(bad):
    asked = dict.fromkeys(ALL, True)
    good, spoilt = Problem(4), Problem(4)
    with torch.no_grad():
        spoilt.inputs[0][2] = bad
    got, want = spoilt.ours(asked), good.ours(asked)
    others = [0, 1, 3, 4]
    for name in ALL:
        assert torch.equal(got[name][others], want[name][others])
    for name in ("logprobs", "entropy", "sum_squared_probs"):
        assert bool(got[name][2].isnan())
    gradients = spoilt.gradients(got, asked)
    assert torch.equal(gradients[0][others], good.gradients(want, asked)[0][others])
    assert bool(gradients[1].isnan().any())


def test_frozen_parts_get_no_gradient_and_the_others_the_same():
    asked = {"logprobs": True, "entropy": True}
    problem = Problem(5, terms=2)
    whole = problem.gradients(problem.ours(asked), asked)
    for on, leaf in enumerate(problem.leaves):
        for other in problem.leaves:
            other.requires_grad_(other is leaf)
        values = problem.ours(asked)
        total = sum((values[name] * problem.upstream[name]).sum() for name in asked)
        assert torch.equal(torch.autograd.grad(total, leaf)[0], whole[on])
        for other in problem.leaves:
            other.requires_grad_()


def test_the_same_bits_every_time_and_in_a_second_backward_pass():
    asked = dict.fromkeys(ALL, True)
    problem = Problem(6)
    first, second = problem.ours(asked), problem.ours(asked)
    runs = [problem.gradients(first, asked), problem.gradients(first, asked), problem.gradients(second, asked)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_bfloat16_products_with_float32_statistics():
    """The oracle starts from the same rounded products; the kernels only read and write bfloat16."""
    problem = Problem(7, dtype=torch.bfloat16)
    asked = dict.fromkeys(("logprobs", "entropy"), True)
    ours = problem.ours(asked)
    products = (problem.inputs[0] @ problem.weights[0].T).detach().double().requires_grad_()
    wanted = statistics_of(products / problem.temperature[:, None], problem.ids)
    for name in asked:
        assert ours[name].dtype == torch.float32
        close(ours[name], wanted[name], 1e-6)
    total = sum((wanted[name] * problem.upstream[name]).sum() for name in asked)
    slope = torch.autograd.grad(total, products)[0]
    by_hand = (slope @ problem.weights[0].double(), slope.T @ problem.inputs[0].double())
    for mine, right in zip(problem.gradients(ours, asked), by_hand, strict=True):
        assert mine.dtype == torch.bfloat16
        close(mine, right, 1e-2)


@pytest.mark.parametrize("entropy", [True, False])
def test_one_kernel_a_tile_and_entropy_only_where_it_is_asked_for(entropy, launched):
    problem = Problem(8)
    asked = {"logprobs": True} | ({"entropy": False} if entropy else {})
    values = problem.ours(asked)
    tiles = [(rows, columns) for columns in (16, 16, 5) for rows in (4, 1)]
    assert [tuple(shape) for _, shape, _ in launched] == tiles
    # arguments after the tile: factor, ids, maximum, mass, entropy, squares, total, chosen ...
    assert all((arguments[4] is not None) == entropy for _, _, arguments in launched)
    assert ("entropy" in values) == entropy
    launched.clear()
    values["logprobs"].sum().backward()
    assert [tuple(shape) for _, shape, _ in launched] == tiles
    # gradients, factor, anchor, log_mass, ids, a, b (entropy's) ...
    assert all(arguments[6] is None for _, _, arguments in launched)


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return made


def test_no_table_of_all_logits_is_made(monkeypatch):
    sizes(monkeypatch, 8, 16, 16)
    problem = Problem(9, tokens=64, vocabulary=200)
    with Largest() as largest:
        values = problem.ours({"logprobs": True, "entropy": True})
        (values["logprobs"].sum() + values["entropy"].sum()).backward()
    # The gradient of the weights is [200, 3]; all logits would be 12,800 numbers.
    assert largest.numbers <= 600
