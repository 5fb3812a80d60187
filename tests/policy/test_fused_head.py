"""The fused head against the plain formulas on a whole [tokens, vocabulary] matrix in float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from number_oracles import finite_differences
from rlvr.policy import head_tiles
from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.model import Head

BENCHMARK = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "fused_head.py"
ALL = ("logprobs", "entropy", "logsumexp", "mean_logit", "sum_squared_probs")


def table(inputs, weights, temperature, scale=1.0, cap=None):
    """All logits, tempered and capped, in float64."""
    logits = (
        inputs[0].double()
        if not weights
        else sum(x.double() @ w.double().T for x, w in zip(inputs, weights, strict=True))
    )
    logits = logits * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return logits / temperature.double()[:, None]


def plain(logits, ids):
    """The statistics of a table of logits, as their names say."""
    probs = torch.softmax(logits, -1)
    logprobs = torch.log_softmax(logits, -1)
    return {
        "logprobs": logprobs[torch.arange(len(logits)), ids],
        "entropy": -torch.where(probs > 0, probs * logprobs, 0.0).sum(-1),
        "logsumexp": torch.logsumexp(logits, -1),
        "mean_logit": logits.mean(-1),
        "sum_squared_probs": (probs**2).sum(-1),
    }


class Case:
    """A head of one or more terms with random numbers, upstream gradients included."""

    def __init__(self, seed, tokens=5, vocabulary=11, width=4, terms=1, hot=True, dtype=torch.float32, **head):
        make = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

        self.head = head
        self.inputs = tuple(normal(tokens, width + i).requires_grad_() for i in range(terms))
        self.weights = tuple(normal(vocabulary, width + i).requires_grad_() for i in range(terms))
        self.temperature = torch.rand(tokens, generator=make) * 2 + 0.3 if hot else torch.ones(tokens)
        self.ids = torch.randint(0, vocabulary, (tokens,), generator=make)
        self.upstream = {name: normal(tokens).double() for name in ALL}

    def ours(self, asked):
        return fused_statistics(Head(self.inputs, self.weights, **self.head), self.temperature, asked, self.ids)

    def total(self, values, asked):
        return sum((values[name] * self.upstream[name]).sum() for name, grad in asked.items() if grad)

    def gradients(self, total, leaves=None):
        return torch.autograd.grad(total, leaves or [*self.inputs, *self.weights])

    def check(self, asked, tolerance=1e-5):
        """Values and gradients, each relative to its size."""
        ours = self.ours(asked)
        want = plain(table(self.inputs, self.weights, self.temperature, **self.head), self.ids)
        for name in asked:
            assert ours[name].requires_grad == asked[name], name
            close(ours[name], want[name], tolerance)
        if any(asked.values()):
            got = self.gradients(self.total(ours, asked))
            for mine, right in zip(got, self.gradients(self.total(want, asked)), strict=True):
                assert mine.dtype == right.dtype
                close(mine, right, tolerance)


def close(got, want, tolerance):
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape
    assert float((got - want).norm()) <= tolerance * max(1.0, float(want.norm()))


@pytest.fixture
def tiles(monkeypatch):
    """`tiles(t, v)`: tiles of t tokens and v vocabulary entries, nothing kept."""

    def small(tokens, columns):
        monkeypatch.setattr(head_tiles, "COLUMNS", columns)
        monkeypatch.setattr(head_tiles, "TILE", tokens * columns)
        monkeypatch.setattr(head_tiles, "KEEP", 0)

    return small


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    vocabulary=st.integers(1, 40),
    terms=st.integers(1, 3),
    shape=st.none() | st.tuples(st.integers(1, 4), st.integers(1, 17)),
    hot=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, 4.0]),
    cap=st.none() | st.floats(0.5, 5.0),
    data=st.data(),
)
def test_any_statistics_of_any_head(seed, tokens, vocabulary, terms, shape, hot, scale, cap, data):
    names = data.draw(st.sets(st.sampled_from(ALL), min_size=1))
    asked = {name: data.draw(st.booleans()) for name in sorted(names)}
    case = Case(seed, tokens, vocabulary, terms=terms, hot=hot, scale=scale, cap=cap)
    with pytest.MonkeyPatch.context() as patch:
        if shape is not None:
            patch.setattr(head_tiles, "COLUMNS", shape[1])
            patch.setattr(head_tiles, "TILE", shape[0] * shape[1])
            patch.setattr(head_tiles, "KEEP", 0)
        case.check(asked)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [None, (2, 4)])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_each_gradient_is_that_of_finite_differences(name, shape, cap, tiles):
    if shape:
        tiles(*shape)
    case = Case(3, terms=2, dtype=torch.float64, cap=cap, scale=0.7)
    asked = {name: True}
    leaves = [*case.inputs, *case.weights]
    ours = torch.cat([g.flatten() for g in case.gradients(case.total(case.ours(asked), asked))])

    def value(flat):
        parts = torch.from_numpy(flat).split([leaf.numel() for leaf in leaves])
        parts = [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]
        logits = table(parts[:2], parts[2:], case.temperature, **case.head)
        return float(case.total(plain(logits, case.ids), asked))

    point = torch.cat([leaf.detach().flatten() for leaf in leaves]).numpy()
    np.testing.assert_allclose(ours.numpy(), finite_differences(value, point), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [None, (3, 7)])
def test_logits_themselves(shape, tiles):
    if shape:
        tiles(*shape)
    logits = (3 * torch.randn(8, 40, generator=torch.Generator().manual_seed(0))).requires_grad_()
    temperature, ids = torch.linspace(0.5, 2, 8), torch.arange(8)
    asked = dict.fromkeys(ALL, True)
    ours = fused_statistics(Head((logits,)), temperature, asked, ids)
    want = plain(logits.double() / temperature[:, None], ids)
    for name in ALL:
        close(ours[name], want[name], 1e-5)
    weights = torch.linspace(-1, 1, 8)
    sums = [sum((weights * values[name]).sum() for name in ALL) for values in (ours, want)]
    close(*(torch.autograd.grad(total, logits)[0] for total in sums), 1e-5)


def test_frozen_parts_get_no_gradient_and_the_others_the_same():
    asked = {"logprobs": True, "entropy": True}
    case = Case(2, terms=2)
    whole = case.gradients(case.total(case.ours(asked), asked))
    leaves = [*case.inputs, *case.weights]
    for on in range(4):
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i == on)
        total = case.total(case.ours(asked), asked)
        assert torch.equal(torch.autograd.grad(total, leaves[on])[0], whole[on])


def test_a_tied_weight_gets_both_gradients():
    """The embedding looks rows up in the same weight that the head multiplies with."""
    weight = torch.randn(13, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids = torch.tensor([1, 5, 5, 12])
    ours = fused_statistics(Head((weight[ids],), (weight,)), torch.ones(4), {"logprobs": True}, ids)
    want = plain(weight.double()[ids] @ weight.double().T, ids)
    got, right = (torch.autograd.grad(v["logprobs"].sum(), weight)[0] for v in (ours, want))
    close(got, right, 1e-6)


@pytest.mark.parametrize("keep", [0, 1 << 22])
def test_the_same_bits_every_time_and_a_second_backward_of_a_kept_graph(keep, monkeypatch):
    monkeypatch.setattr(head_tiles, "KEEP", keep)
    asked = dict.fromkeys(ALL, True)
    case = Case(4, tokens=50, vocabulary=300)
    runs = []
    for _ in range(2):
        total = case.total(case.ours(asked), asked)
        leaves = [*case.inputs, *case.weights]
        runs += [torch.autograd.grad(total, leaves, retain_graph=True), torch.autograd.grad(total, leaves)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_second_derivatives_are_refused_by_name():
    case = Case(5)
    total = case.ours({"entropy": True})["entropy"].sum()
    with pytest.raises(NotImplementedError, match="fused LM head has no second derivatives"):
        torch.autograd.grad(total, case.inputs, create_graph=True)


def test_ids_beyond_the_head_are_refused():
    case = Case(6)
    for bad in (-1, 11):
        case.ids[2] = bad
        with pytest.raises(ValueError, match=f"token id {bad} is outside the LM head, which has 11 rows"):
            case.ours({"logprobs": True})


@pytest.mark.parametrize("shape", [None, (2, 4)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_spoils_itself_only(bad, shape, tiles):
    if shape:
        tiles(*shape)
    asked = dict.fromkeys(ALL, True)
    good, case = Case(7), Case(7)
    with torch.no_grad():
        case.inputs[0][2] = bad
    got, want = case.ours(asked), good.ours(asked)
    others = [0, 1, 3, 4]
    for name in ALL:
        assert torch.equal(got[name][others], want[name][others])
    for name in ("logprobs", "entropy", "sum_squared_probs"):
        assert bool(got[name][2].isnan().all())
    gradients, clean = (c.gradients(c.total(v, asked)) for c, v in ((case, got), (good, want)))
    assert torch.equal(gradients[0][others], clean[0][others])
    assert bool(gradients[1].isnan().any())


@pytest.mark.parametrize("shape", [None, (3, 4)])
def test_a_masked_vocabulary_entry_has_no_probability(shape, tiles):
    """A bias of minus infinity, also over a whole tile of the vocabulary, the first or a later one."""
    if shape:
        tiles(*shape)
    names = ("logprobs", "entropy", "sum_squared_probs", "logsumexp")
    for masked in (slice(0, 5), slice(4, 8), slice(9, 11)):
        case = Case(8, tokens=6)
        bias = torch.zeros(11, 1)
        bias[masked] = -torch.inf
        live = [v for v in range(11) if v not in range(11)[masked]]
        case.ids = torch.tensor(live)[case.ids % len(live)]
        inputs, weights = (*case.inputs, torch.ones(6, 1)), (*case.weights, bias)
        asked = dict.fromkeys(names, True)
        ours = fused_statistics(Head(inputs, weights), case.temperature, asked, case.ids)
        places = torch.tensor([live.index(i) for i in case.ids])
        want = plain(table(case.inputs, (case.weights[0][live],), case.temperature), places)
        for name in names:
            close(ours[name], want[name], 1e-5)
        for mine, right in zip(*(case.gradients(case.total(v, asked)) for v in (ours, want)), strict=True):
            close(mine, right, 1e-5)


@pytest.mark.parametrize("shape", [None, (64, 16)])
@pytest.mark.parametrize(
    ("offset", "temperature"), [(100.0, 1.0), (-100.0, 1.0), (0.0, 0.05), (20.0, 0.1), (0.0, 1e-3)]
)
def test_large_logits_lose_no_precision(offset, temperature, shape, tiles):
    if shape:
        tiles(*shape)
    logits = 3 * torch.randn(200, 100, generator=torch.Generator().manual_seed(0)) + offset
    ids, at = torch.zeros(200, dtype=torch.long), torch.full((200,), temperature)
    ours = fused_statistics(Head((logits,)), at, {"logprobs": False, "entropy": False}, ids)
    want = plain(logits.double() / at.double()[:, None], ids)
    assert float(ours["entropy"].min()) >= -1e-6
    torch.testing.assert_close(
        ours["entropy"].double(), want["entropy"], rtol=1e-5, atol=2e-5 if temperature > 0.01 else 1e-3
    )
    size = float(logits.abs().max()) / temperature
    torch.testing.assert_close(ours["logprobs"].double(), want["logprobs"], rtol=2e-7, atol=5e-7 * size)


@pytest.mark.parametrize("shape", [None, (3, 7)])
def test_bf16_products_with_float32_statistics(shape, tiles):
    """Exact but for the rounding of the products: the oracle starts from the same bfloat16 logits."""
    if shape:
        tiles(*shape)
    case = Case(9, tokens=8, vocabulary=40, width=16, dtype=torch.bfloat16)
    asked = dict.fromkeys(("logprobs", "entropy", "logsumexp"), True)
    ours = case.ours(asked)
    products = (case.inputs[0] @ case.weights[0].T).detach().double().requires_grad_()
    want = plain(products / case.temperature.double()[:, None], case.ids)
    for name in asked:
        assert ours[name].dtype == torch.float32
        close(ours[name], want[name], 1e-6)
    dz = torch.autograd.grad(case.total(want, asked), products)[0]
    by_hand = (dz @ case.weights[0].double(), dz.T @ case.inputs[0].double())
    for mine, right in zip(case.gradients(case.total(ours, asked)), by_hand, strict=True):
        assert mine.dtype == torch.bfloat16
        close(mine, right, 1e-2)


def test_float32_weights_under_bf16_products():
    case = Case(10, tokens=8, vocabulary=40, width=16)
    low = tuple(x.to(torch.bfloat16) for x in case.inputs)
    asked = {"logprobs": True}
    ours = fused_statistics(Head(low, case.weights), case.temperature, asked, case.ids)
    want = plain(table(case.inputs, case.weights, case.temperature), case.ids)
    close(ours["logprobs"], want["logprobs"], 2e-2)
    got = case.gradients(case.total(ours, asked))
    assert got[1].dtype == torch.float32
    for mine, right in zip(got, case.gradients(case.total(want, asked)), strict=True):
        close(mine, right, 2e-2)


@pytest.mark.gate
@pytest.mark.parametrize("vocabulary", [32_000, pytest.param(152_000, marks=pytest.mark.slow)])
def test_peak_memory_beyond_hidden_states_and_gradients(vocabulary):
    """At most 64 MiB at 8,192 tokens; the logits would be 1.0 and 4.6 GiB."""
    command = [sys.executable, str(BENCHMARK), "--peak", "fused", "8192", str(vocabulary), "16"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    assert 0 < float(ran.stdout) <= 64
