"""Every policy loss against loops in Python floats and finite differences of those, and at its neutral setting."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import loss_oracles as oracle
from loss_cases import Case, check, same_sign, value_and_gradient
from rlvr.core.needs import CURRENT
from rlvr.losses import (
    ClipCovLoss,
    ClippedPolicyLoss,
    Denominators,
    GammaWeightedLoss,
    GeometricMeanLoss,
    KLCovLoss,
    QuadraticPenaltyLoss,
    Reinforce,
    SecondMomentLoss,
    TokenBatch,
    TopEntropy,
    WeightedLikelihood,
)
from rlvr.recipes.topr.topr import TaperedLoss

AVERAGES = ("tokens", "sequences", "constant")
NOT_PLAIN_CLIPS = [
    {"clip": "hard", "cap": 1.6},
    {"clip": "hard", "ratio": "sequence"},
    {"clip": "hard", "ratio": "geometric"},
    {"clip": "soft", "soft_positive": 2.0, "soft_negative": 3.0},
    {"clip": "soft", "ratio": "geometric"},
    {"clip": "none"},
    {"clip": "none", "ratio": "sequence"},
    {"clip": "hard", "bound": 0.4},
]


def expected(case, function, average):
    """The averaged loss as a function of the flat log-probs, from a function of rows."""

    def loss(logprobs):
        rows, flat = function(case.rows(logprobs)), np.zeros(len(logprobs))
        for s in range(case.S):
            flat[np.flatnonzero(case.sequence == s)] = rows[s]
        return case.average(flat, average)

    return loss


def far_from(case, level, *edges):
    """The tokens whose log-ratio is not near an edge, where a loss has no derivative."""
    gaps = oracle.level(oracle.gaps(case.rows(case.logprobs), case), level)
    flat = np.zeros(len(case.sequence))
    for s in range(case.S):
        flat[np.flatnonzero(case.sequence == s)] = gaps[s]
    return np.min([np.abs(flat - edge) for edge in edges], axis=0) > 1e-4 if edges else np.ones(len(flat), dtype=bool)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("options", NOT_PLAIN_CLIPS, ids=str)
def test_forms_of_the_clip(options, average):
    case = same_sign(Case(3, spread=0.6))
    level, cap, bound = options.get("ratio", "token"), options.get("cap"), options.get("bound", math.inf)

    def rows(x):
        clamped = [[min(max(g, -bound), bound) for g in row] for row in oracle.gaps(x, case)]
        result = []
        for gaps, advantages in zip(oracle.level(clamped, level), case.rows(case.advantage), strict=True):
            pairs = [(math.exp(g), a) for g, a in zip(gaps, advantages, strict=True)]
            if options["clip"] == "hard":
                result.append([oracle.hard(r, a, 0.2, 0.3, cap) for r, a in pairs])
            elif options["clip"] == "soft":
                taus = options.get("soft_positive", 1.0), options.get("soft_negative", 1.05)
                result.append([oracle.soft(r, a, *taus) for r, a in pairs])
            else:
                result.append([-r * a for r, a in pairs])
        return result

    edges = (math.log(0.8), math.log(1.3), math.log(1.6), -0.4, 0.4)
    smooth = far_from(case, level, *edges)
    assert smooth.sum() > 8
    check(ClippedPolicyLoss(0.2, 0.3, average, **options), case, expected(case, rows, average), smooth)


@pytest.mark.parametrize("seed", range(3))
def test_the_token_form_of_the_geometric_ratio(seed):
    """Its value is the geometric one; its gradient puts sg[s] A grad log pi at each token, clipped by s."""
    case = Case(seed, spread=0.4)  # advantages differ within a response
    tokens = case.batch()
    value, gradient = value_and_gradient(ClippedPolicyLoss(0.2, 0.3, ratio="geometric_token"), tokens, case.over())
    plain, _ = value_and_gradient(ClippedPolicyLoss(0.2, 0.3, ratio="geometric"), case.batch(), case.over())
    assert value == pytest.approx(plain, rel=1e-12)
    live = [s for s in range(case.S) if case.weight[case.sequence == s].sum() > 0]
    for s in live:
        where = np.flatnonzero(case.sequence == s)
        ratio = math.exp(np.mean(case.logprobs[where] - case.proximal[where]))
        for t in where:
            a = case.advantage[t]
            free = not ((a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.8))
            share = case.weight[t] / case.weight[where].sum() / len(live)
            assert gradient[t] == pytest.approx(-share * ratio * a * free, abs=1e-12)


@pytest.mark.parametrize("average", AVERAGES)
def test_the_detached_clip(average):
    case = Case(4, spread=0.6)

    def value(x):
        return expected(
            case,
            lambda rows: oracle.per_token(rows, case, lambda g, a, x, q: -min(max(math.exp(g), 0.7), 1.4) * a * x),
            average,
        )(x)

    weights = np.clip(np.exp(case.logprobs - case.proximal), 0.7, 1.4)
    loss = ClippedPolicyLoss(0.3, 0.4, average, clip="detach")
    check(loss, case, value, point=lambda x: case.average(-weights * case.advantage * x, average))


@pytest.mark.parametrize("by", ["tv", "kl"])
@pytest.mark.parametrize("average", AVERAGES)
def test_the_divergence_masks(by, average):
    case = Case(5, (4, 6, 3, 2, 7), spread=0.6)
    case.proximal, case.logprobs = -np.abs(case.proximal) - 0.05, -np.abs(case.logprobs) - 0.05
    low, high, cap = (0.03, 0.06, 1.2) if by == "tv" else (0.005, 0.01, 1.2)
    masked = [
        oracle.diverged(x, q, a, by, low, high)
        for x, q, a in zip(case.logprobs, case.proximal, case.advantage, strict=True)
    ]
    assert 0 < sum(masked) < len(masked)
    ratio = np.minimum(np.exp(case.logprobs - case.proximal), cap)

    def wanted(x):
        return case.average(-ratio * ~np.asarray(masked) * case.advantage * x, average)

    check(ClippedPolicyLoss(low, high, average, clip=by, cap=cap), case, wanted)


@pytest.mark.parametrize("average", AVERAGES)
def test_reinforce_and_dro_and_weighted_likelihood(average):
    case = Case(6)
    check(Reinforce(average=average), case, lambda x: case.average(-case.advantage * x, average))

    def dro(x):
        return case.average(-(case.advantage * x - 0.5 * 0.7 * (x - case.proximal) ** 2), average)

    check(QuadraticPenaltyLoss(0.7, average=average), case, dro)
    weights = [min(math.exp(a / 0.5), 3.0) for a in case.advantage]
    assert 0 < sum(w == 3.0 for w in weights) < len(weights)
    check(
        WeightedLikelihood(0.5, 3.0, average=average),
        case,
        lambda x: case.average(-np.asarray(weights) * x, average),
    )


@pytest.mark.parametrize("seed", range(3))
def test_gmpo(seed):
    case = same_sign(Case(seed, spread=0.5))
    wanted = expected(case, lambda rows: oracle.gmpo(rows, case, 0.3, 0.2), "sequences")
    check(GeometricMeanLoss(0.3, 0.2), case, wanted, far_from(case, "token", -0.3, 0.2))


@pytest.mark.parametrize("average", AVERAGES)
def test_vespo(average):
    case = same_sign(Case(7, spread=0.3))
    weights = oracle.vespo_weights(case.rows(case.logprobs), case)
    flat = np.zeros(len(case.sequence))
    for s in range(case.S):
        flat[np.flatnonzero(case.sequence == s)] = weights[s]
    check(GammaWeightedLoss(average=average), case, lambda x: case.average(-flat * case.advantage * x, average))


def test_m2po():
    case = Case(10, (6, 3, 5, 4), spread=0.5)
    case.advantage = np.random.default_rng(0).normal(0, 1, len(case.sequence))
    out = oracle.beyond_moment(case, range(len(case.sequence)), 0.04)
    assert 0 < len(out) < len(case.sequence)
    loss = SecondMomentLoss(0.04)
    chosen = loss.choose(case.batch())
    assert chosen.nonzero()[:, 0].tolist() == sorted(out)
    on = np.isin(np.arange(len(case.sequence)), out, invert=True)

    def wanted(x):
        return case.average(-1.0 * on * np.exp(x - case.proximal) * case.advantage, "tokens")

    check(loss, case, wanted, chosen=chosen)
    assert SecondMomentLoss(1e-12).choose(case.batch()).sum() == len(case.sequence)


def test_clip_cov():
    case = Case(11, (6, 5, 7), spread=0.4)
    covariance = oracle.covariances(case, range(len(case.sequence)))
    ratio, a = np.exp(case.logprobs - case.proximal), case.advantage
    clipped = ((ratio < 0.8) & (a < 0)) | ((ratio > 1.2) & (a > 0))
    least, most = np.quantile(list(covariance.values()), [0.3, 0.9])
    candidates = {t for t, c in covariance.items() if least < c < most and not clipped[t]}
    assert len(candidates) > 3
    loss = ClipCovLoss(0.12, float(least), float(most))
    chosen = loss.choose(case.batch())
    assert int(chosen.sum()) == int(0.12 * len(covariance)) == 2
    assert set(chosen.nonzero()[:, 0].tolist()) <= candidates
    on = 1 - chosen.numpy()

    def wanted(x):
        rows = [oracle.hard(math.exp(v - q), d, 0.2, 0.2) for v, q, d in zip(x, case.proximal, a, strict=True)]
        return case.average(np.asarray(rows) * on, "tokens")

    check(loss, case, wanted, far_from(case, "token", math.log(0.8), math.log(1.2)), chosen=chosen)
    all_of_them = ClipCovLoss(1.0, float(least), float(most)).choose(case.batch())
    assert set(all_of_them.nonzero()[:, 0].tolist()) == candidates


def test_kl_cov():
    case = Case(12, (6, 5, 7), spread=0.4)
    covariance = oracle.covariances(case, range(len(case.sequence)))
    highest = sorted(covariance, key=covariance.get)[-3:]
    loss = KLCovLoss(0.2, 0.7)
    chosen = loss.choose(case.batch())
    assert chosen.nonzero()[:, 0].tolist() == sorted(highest)
    on = chosen.numpy()

    def wanted(x):
        gap = x - case.proximal
        return case.average(-np.exp(gap) * case.advantage + 0.7 * on * np.abs(gap), "tokens")

    check(loss, case, wanted, chosen=chosen)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 1.0])
def test_top_entropy(share):
    case = Case(13, (6, 5, 7, 2))
    ordered = sorted(case.entropy)
    place = (1 - share) * (len(ordered) - 1)
    low = int(place)
    bound = ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
    kept = TopEntropy(share)(case.batch()).detach().numpy()
    assert kept.tolist() == [float(e >= bound) for e in case.entropy]
    assert kept.all() == (share == 1.0)


# neutral settings: each equals the method that it generalises


def gradients(*losses, case=None, chosen=None):
    result = []
    for loss in losses:
        tokens = (case or Case(1, spread=0.4)).batch()
        tokens = replace(tokens, chosen=None if chosen is None else torch.full_like(tokens.weight, chosen))
        result.append(value_and_gradient(loss, tokens, (case or Case(1, spread=0.4)).over())[1])
    return result


def one_token_each():
    return same_sign(Case(1, (1, 1, 1, 1, 1), spread=0.5))


NEUTRAL = {
    "geometric of one token": (
        ClippedPolicyLoss(ratio="geometric"),
        ClippedPolicyLoss(),
        one_token_each(),
    ),
    "sequence of one token": (ClippedPolicyLoss(ratio="sequence"), ClippedPolicyLoss(), one_token_each()),
    "geometric_token of one token": (
        ClippedPolicyLoss(ratio="geometric_token"),
        ClippedPolicyLoss(),
        one_token_each(),
    ),
    "gmpo without clip is gspo without clip": (
        GeometricMeanLoss(1e9, 1e9),
        ClippedPolicyLoss(ratio="geometric", clip="none"),
        same_sign(Case(2, spread=0.4)),
    ),
    "a wide clip is none": (ClippedPolicyLoss(1.0, 1e9), ClippedPolicyLoss(clip="none"), None),
    "a wide detached clip is none": (
        ClippedPolicyLoss(1.0, 1e9, clip="detach"),
        ClippedPolicyLoss(clip="none"),
        None,
    ),
    "a wide tv mask is none": (ClippedPolicyLoss(1.0, 1.0, clip="tv"), ClippedPolicyLoss(clip="none"), None),
    "a wide kl mask is none": (ClippedPolicyLoss(1e9, 1e9, clip="kl"), ClippedPolicyLoss(clip="none"), None),
    "a far cap is no cap": (ClippedPolicyLoss(cap=1e9), ClippedPolicyLoss(), None),
    "a far bound is no bound": (ClippedPolicyLoss(bound=1e9), ClippedPolicyLoss(), None),
    "dro without penalty": (QuadraticPenaltyLoss(0.0), Reinforce(), None),
    "topr clipped at 1": (TaperedLoss(1.0, 1.0, 1.0, 1.0, "tokens"), Reinforce(), None),
    "a flat vespo": (GammaWeightedLoss(0.0, 0.0001, 0.0, 0.0001), Reinforce(), None),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral(name):
    left, right, case = NEUTRAL[name]
    case = case or Case(1, spread=0.4)
    case.proximal, case.logprobs = -np.abs(case.proximal) - 0.05, -np.abs(case.logprobs) - 0.05
    a, b = gradients(left, right, case=case)
    np.testing.assert_allclose(a, b, rtol=2e-3 if "vespo" in name else 1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (ClipCovLoss(0.0), ClippedPolicyLoss(average="tokens")),
        (KLCovLoss(0.0), ClippedPolicyLoss(clip="none", average="tokens")),
        (SecondMomentLoss(1e9), ClippedPolicyLoss(clip="none", average="tokens")),
    ],
    ids=["clip_cov", "kl_cov", "m2po"],
)
def test_losses_that_choose_nothing(left, right):
    case = Case(1, spread=0.4)
    assert left.choose(case.batch()).sum() == 0
    a, b = gradients(left, right, case=case, chosen=0.0)
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def every_loss():
    forms = [
        *(ClippedPolicyLoss(clip=c, average="tokens") for c in ("hard", "soft", "detach", "none", "tv", "kl")),
        *(ClippedPolicyLoss(ratio=r, average="tokens") for r in ("sequence", "geometric", "geometric_token")),
        ClipCovLoss(),
        KLCovLoss(coef=0.0),
        SecondMomentLoss(),
        QuadraticPenaltyLoss(),
        Reinforce(),
        GammaWeightedLoss(),
        TaperedLoss(average="tokens"),
    ]
    for loss in forms:
        options = [f"{k}={v}" for k, v in vars(loss).items() if k in ("clip", "ratio") and v not in ("hard", "token")]
        yield pytest.param(loss, id="-".join([type(loss).__name__, *options]))


def row(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def batch_of(logprobs, proximal, advantage, dtype=torch.float64):
    """One response."""
    current = row(logprobs, dtype).requires_grad_()
    one = torch.ones(len(logprobs), dtype=dtype)
    q = row(proximal, dtype)
    sequence = torch.zeros(len(logprobs), dtype=torch.int64)
    tokens = TokenBatch(
        sequence=sequence,
        sequences=1,
        weight=one,
        advantage=row(advantage, dtype),
        proximal_logprobs=q,
        behaviour_logprobs=q,
        statistics={("logprobs", CURRENT): current},
    )
    return tokens, Denominators(len(logprobs), 1, 1)


@pytest.mark.parametrize("loss", every_loss())
def test_on_policy_every_loss_is_the_policy_gradient(loss):
    """At ratio 1 the gradient is that of -A log pi, whatever the form; a response has one advantage."""
    tokens, over = batch_of([-1.0, -0.5, -3.0], [-1.0, -0.5, -3.0], [0.7] * 3)
    if loss.chooses_by:
        tokens = replace(tokens, chosen=torch.zeros(3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss(tokens, over).value, tokens.logprobs)
    scale = 3.0 if getattr(loss, "ratio", "") == "sequence" else 1.0  # each token carries the whole response's gradient
    np.testing.assert_allclose(gradient.numpy(), [-0.7 / 3 * scale] * 3, rtol=1e-9)


BOUNDED = [
    ClippedPolicyLoss(clip="soft", average="tokens"),
    ClippedPolicyLoss(clip="detach", average="tokens"),
    ClippedPolicyLoss(clip="tv", average="tokens", cap=20.0),
    ClippedPolicyLoss(clip="kl", average="tokens", cap=20.0),
    ClippedPolicyLoss(cap=3.0, average="tokens"),
    ClippedPolicyLoss(bound=20.0, average="tokens"),
    GammaWeightedLoss(),
    TaperedLoss(average="tokens"),
    Reinforce(),
    GeometricMeanLoss(),
    SecondMomentLoss(),
]


@pytest.mark.parametrize(
    ("loss", "gap", "advantage"),
    [
        pytest.param(loss, gap, a, id=f"{type(loss).__name__}-{getattr(loss, 'clip', '')}-{gap}-{a}")
        for loss in BOUNDED
        for gap in (200.0, -200.0)
        for a in (1.0, -1.0, 0.0)
        # GMPO clips only the side that the advantage pushes to, as PPO does; such a step is skipped
        if not (isinstance(loss, GeometricMeanLoss) and gap * a < 0)
    ],
)
def test_a_huge_log_ratio_is_no_infinity(loss, gap, advantage):
    """In float32, where exp(89) overflows."""
    now, before = (-0.1, -0.1 - gap) if gap > 0 else (-0.1 + gap, -0.1)
    logprobs, proximal = [now, -1.0], [before, -1.0]
    tokens, over = batch_of(logprobs, proximal, [advantage] * 2, torch.float32)
    if loss.chooses_by:
        tokens = replace(tokens, chosen=loss.choose(tokens).detach())
    value = loss(tokens, over).value
    (gradient,) = torch.autograd.grad(value, tokens.logprobs)
    assert math.isfinite(float(value.detach()))
    assert bool(gradient.isfinite().all())
    if advantage == 0.0:
        assert not gradient.any()


@pytest.mark.parametrize("loss", [p for p in every_loss() if getattr(p.values[0], "zero_without_advantage", False)])
def test_zero_advantage_has_no_gradient_where_a_loss_says_so(loss):
    tokens, over = batch_of([-1.0, -0.5], [-1.5, -0.1], [0.0, 0.0])
    (gradient,) = torch.autograd.grad(loss(tokens, over).value, tokens.logprobs)
    assert not gradient.any()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ClippedPolicyLoss(clip="tv", ratio="geometric"), "masks single tokens"),
        (lambda: ClippedPolicyLoss(clip="soft", cap=3.0), "has no use for it"),
        (lambda: ClippedPolicyLoss(cap=1.1), "above 1 \\+ clip_high"),
        (lambda: ClippedPolicyLoss(bound=0.0), "bound is 0, and must be above 0"),
        (lambda: ClippedPolicyLoss(clip="soft", soft_positive=-1.0), "soft_positive is -1, and must be above 0"),
        (lambda: WeightedLikelihood(temperature=0.0), "temperature is .*, and must be above 0"),
        (lambda: TopEntropy(0.0), "share is 0, and must be above 0"),
    ],
)
def test_contradictions(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()
