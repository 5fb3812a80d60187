"""The gradient of an optimizer step: the same however the batch is cut, and that of an independent float64
objective."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from number_oracles import double, gap, gradient_of, group_advantages, objective, token_statistics
from rlvr.config import OptimConfig
from rlvr.distributed import World
from rlvr.distributed.plain import PlainBackend
from rlvr.distributed.shares import load_reference, saved_reference
from rlvr.errors import TrainingError
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, EntropyBonus, KLPenalty, LikelihoodLoss, Objective, ObjectiveTerm, k1, k2, k3
from rlvr.losses.objective import GATE
from rlvr.policy import Snapshot
from rlvr.records import Batch, Origin

AVERAGES = ("tokens", "sequences", "constant")
KL = {"k1": k1, "k2": k2, "k3": k3}
CUTS = [
    {},
    *({"micro_batch_size": n} for n in (1, 2, 3, 100)),
    *({"micro_batch_tokens": n} for n in (1, 9, 40, 10_000)),
]


def make_objective(average="sequences", kl=None, entropy=0.0, skip=True, low=0.2, high=0.2, constant=11.0):
    components = [ObjectiveTerm("policy", ClippedPolicyLoss(low, high, average), "policy", zero_without_advantage=skip)]
    if kl is not None:
        components.append(ObjectiveTerm("kl", KLPenalty(KL[kl[0]], average), "policy", kl[1]))
    if entropy:
        components.append(ObjectiveTerm("entropy", EntropyBonus(average), "policy", entropy))
    return Objective(tuple(components), constant)


def config(**options):
    return OptimConfig(**{"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 1e9, **options})


def moved(policy, seed=0, size=0.02):
    """Move the weights a little, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(size * torch.randn(p.shape, generator=generator))


def weights_of(policy):
    return {name: p.detach().clone() for name, p in policy.trainable().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def flat(weights):
    return torch.cat([w.double().flatten() for w in weights.values()])


def one_gradient(recording, policy, batch, target, reference=None, **options):
    """(gradient, metrics) of one optimizer step that leaves the policy as it is."""
    backend = recording(policy, moves=False)
    metrics = Learner(backend, reference).update(batch, target, config(**options), 1.0)
    (gradient,) = backend.gradients
    return gradient, metrics


@pytest.fixture
def behind(make_policy):
    """(policy, its reference, a float64 model of the reference): the policy has moved away from the reference."""
    policy = make_policy()
    reference, model = Snapshot(policy), double(policy)
    moved(policy)
    return policy, reference, model


# N1 ------------------------------------------------------------------------------------------------------------------


def test_an_entropy_bonus_may_be_the_whole_objective(policy, make_batch, recording):
    batch, model = make_batch(policy), double(policy)
    _, values = objective(model, batch, "tokens", entropy=0.3, constant=11.0)
    want = gradient_of(model, 0.3 * values["entropy"])
    target = Objective((ObjectiveTerm("entropy", EntropyBonus("tokens"), "policy", 0.3),), 11.0)
    gradient, metrics = one_gradient(recording, policy, batch, target)
    assert gap(gradient, want) < 1e-5
    assert metrics["loss/total"] == pytest.approx(0.3 * float(values["entropy"].detach()), rel=1e-4)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(("kl", "entropy"), [(None, 0.0), (("k3", 0.5), 0.3)])
def test_the_gradient_is_that_of_the_float64_objective_however_it_is_cut(
    behind, make_batch, recording, average, kl, entropy
):
    policy, reference, reference_model = behind
    batch = make_batch(policy)
    model = double(policy)
    total, values = objective(model, batch, average, kl=kl, entropy=entropy, reference=reference_model, constant=11.0)
    want = gradient_of(model, total)
    target = make_objective(average, kl, entropy)
    gradients = []
    for options in CUTS:
        gradient, metrics = one_gradient(recording, policy, batch, target, reference, **options)
        gradients.append(gradient)
        assert gap(gradient, want) < 1e-5, options
        assert gap(gradient, gradients[0]) < 1e-5, options
        assert metrics["loss/total"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-6)
        for name, value in values.items():
            assert metrics[f"loss/{name}"] == pytest.approx(float(value.detach()), rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(float(want.norm()), rel=1e-4)


@pytest.mark.parametrize("name", ["k1", "k2"])
def test_the_other_kl_estimators(behind, make_batch, recording, name):
    policy, reference, reference_model = behind
    batch, model = make_batch(policy, seed=1), double(policy)
    total, _ = objective(model, batch, "tokens", kl=(name, 0.7), reference=reference_model)
    got, _ = one_gradient(
        recording, policy, batch, make_objective("tokens", (name, 0.7)), reference, micro_batch_size=3
    )
    assert gap(got, gradient_of(model, total)) < 1e-5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("average", AVERAGES)
def test_random_ragged_batches(policy, make_batch, recording, seed, average):
    rng = np.random.default_rng(seed)
    rewards = tuple(
        tuple(rng.choice([0.0, 1.0, 0.3, np.nan], rng.integers(1, 6))) for _ in range(int(rng.integers(2, 5)))
    )
    batch, model = make_batch(policy, seed, rewards=((1.0, 0.0), *rewards)), double(policy)
    want = gradient_of(model, objective(model, batch, average, constant=11.0)[0])
    for options in ({}, {"micro_batch_size": 2}, {"micro_batch_tokens": 20}):
        assert gap(one_gradient(recording, policy, batch, make_objective(average), **options)[0], want) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_other_architectures(make_policy, make_batch, recording, architecture):
    policy = make_policy(architecture=architecture, tie_word_embeddings=architecture == "gemma2")
    batch, model = make_batch(policy), double(policy)
    want = gradient_of(model, objective(model, batch, "tokens", entropy=0.1)[0])
    for size in (None, 1, 4):
        got, _ = one_gradient(recording, policy, batch, make_objective("tokens", entropy=0.1), micro_batch_size=size)
        assert gap(got, want) < 1e-5


def test_gradient_checkpointing_and_chunks_change_nothing(make_policy, make_batch, recording, monkeypatch):
    policy = make_policy()
    batch = make_batch(policy)
    plain, _ = one_gradient(recording, policy, batch, make_objective(entropy=0.1))
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    monkeypatch.setattr("rlvr.policy.head_tiles.KEEP", 0)
    monkeypatch.setattr("rlvr.policy.head_tiles.TILE", 5 * policy.causal_lm.config.vocab_size)
    again, _ = one_gradient(recording, policy, batch, make_objective(entropy=0.1), micro_batch_size=3)
    assert gap(again, plain) < 1e-6
    assert not policy.model.training


@pytest.mark.parametrize("average", AVERAGES)
def test_skipping_zero_variance_rollouts_changes_nothing(policy, make_batch, recording, average):
    batch = make_batch(policy)
    skipped, fewer = one_gradient(recording, policy, batch, make_objective(average), micro_batch_size=1)
    full, all_ = one_gradient(recording, policy, batch, make_objective(average, skip=False), micro_batch_size=1)
    assert gap(skipped, full) < 1e-6
    assert fewer["tokens/trained"] < all_["tokens/trained"]
    assert fewer["loss/policy"] == pytest.approx(all_["loss/policy"], rel=1e-5, abs=1e-7)


def test_skipped_rollouts_cost_no_pass(policy, make_batch, recording):
    batch = make_batch(policy)
    backend = recording(policy, moves=False)
    Learner(backend).update(batch, make_objective(), config(micro_batch_size=1), 1.0)
    live = (batch.columns["advantage"] != 0) & np.isfinite(batch.columns["reward"])
    assert backend.passes == live.sum() < len(batch)


def test_an_sgd_step_moves_by_minus_lr_times_the_gradient(make_policy, make_batch, recording):
    policy = make_policy()
    batch, before = make_batch(policy), flat(weights_of(policy))
    backend = recording(policy)
    Learner(backend).update(batch, make_objective(), config(), 0.25)
    step = flat(weights_of(policy)) - before
    assert gap(step, -0.25 * backend.gradients[0]) < 1e-4


# N4 ------------------------------------------------------------------------------------------------------------------


def test_order_and_weightless_company_change_nothing(behind, make_batch, make_rollout, recording):
    policy, reference, _ = behind
    batch = make_batch(policy)
    target = make_objective("tokens", ("k3", 0.2), 0.1)
    want, metrics = one_gradient(recording, policy, batch, target, reference)
    order = np.random.default_rng(3).permutation(len(batch))
    shuffled, again = one_gradient(recording, policy, batch.select(order), target, reference)
    cut, in_pieces = one_gradient(recording, policy, batch.select(order), target, reference, micro_batch_size=2)
    assert max(gap(shuffled, want), gap(cut, want)) < 1e-5
    for name, value in metrics.items():
        assert again[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        # the mismatch of rollouts without a gradient is measured on one micro-batch of them, so it depends on its size
        if not name.startswith("mismatch/"):
            assert in_pieces[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    # a long rollout that is undecided: more padding, no weight
    long = make_rollout(np.arange(80) % 50 + 10, prompt=2, group="far")
    more = Batch(
        [long, *batch.rollouts],
        {
            name: np.concatenate([[fill], batch.columns[name]])
            for name, fill in (("reward", np.nan), ("advantage", 0.0))
        },
        {"weight/policy": [np.zeros(80, dtype=np.float32), *batch.token_columns["weight/policy"]]},
    )
    assert gap(one_gradient(recording, policy, more, target, reference)[0], want) < 1e-5


def test_another_group_scales_the_average_and_adds_its_own_share(policy, make_batch, recording):
    """With the mean over sequences, gradients of two halves weigh as their numbers of sequences."""
    batch = make_batch(policy, rewards=((1.0, 0.0, 0.5), (0.0, 1.0)))
    halves = [batch.select([0, 1, 2]), batch.select([3, 4])]
    parts = [one_gradient(recording, policy, half, make_objective("sequences"))[0] for half in halves]
    whole, _ = one_gradient(recording, policy, batch, make_objective("sequences"))
    assert gap(whole, (3 * parts[0] + 2 * parts[1]) / 5) < 1e-5


# N2 ------------------------------------------------------------------------------------------------------------------


def test_on_the_first_step_the_ratio_is_one_and_the_mismatch_is_measured(policy, make_batch, recording):
    batch = make_batch(policy)
    _, metrics = one_gradient(recording, policy, batch, make_objective(skip=False))
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1.0
    assert metrics["ratio/clipped_low"] == metrics["ratio/clipped_high"] == 0.0
    model, gaps = double(policy), []
    for rollout, weight in zip(batch.rollouts, batch.token_columns["weight/policy"], strict=True):
        with torch.no_grad():
            logprobs = token_statistics(model, rollout)[0].numpy()
        counts = weight > 0 if (weight > 0).any() else rollout.sampled  # without a gradient: all that was sampled
        gaps.extend((logprobs - rollout.behaviour_logprobs[1:])[counts[1:]])
    gaps = np.abs(gaps)
    assert metrics["mismatch/mean"] == pytest.approx(gaps.mean(), rel=1e-5)
    assert metrics["mismatch/max"] == pytest.approx(gaps.max(), rel=1e-5)
    assert metrics["mismatch/share_over"] == pytest.approx((gaps > GATE).mean())


@pytest.mark.parametrize("options", CUTS)
@pytest.mark.parametrize("name", list(KL))
def test_kl_is_exactly_zero_while_the_policy_is_the_reference(policy, make_batch, recording, name, options):
    target = make_objective(kl=(name, 0.5))
    _, metrics = one_gradient(recording, policy, make_batch(policy), target, Snapshot(policy), **options)
    assert metrics["kl/ref"] == 0.0
    assert metrics["loss/kl"] == 0.0


def test_kl_of_the_metrics_is_that_to_the_snapshot(behind, make_batch, recording):
    policy, reference, reference_model = behind
    batch = make_batch(policy)
    _, metrics = one_gradient(recording, policy, batch, make_objective(kl=("k3", 0.5)), reference)
    model, values = double(policy), []
    for rollout, weight in zip(batch.rollouts, batch.token_columns["weight/policy"], strict=True):
        with torch.no_grad():
            d = (token_statistics(reference_model, rollout)[0] - token_statistics(model, rollout)[0]).numpy()
        values.extend((np.exp(d) - 1 - d)[weight[1:] > 0])
    assert metrics["kl/ref"] == pytest.approx(np.mean(values), rel=1e-3)


def with_behaviour(policy, batch, noise=0.1, seed=0):
    """The batch with behaviour log-probs near the policy's own, so that ratios fall inside and outside the clip."""
    rng, model = np.random.default_rng(seed), double(policy)
    for rollout in batch.rollouts:
        with torch.no_grad():
            own = token_statistics(model, rollout)[0].numpy()
        noisy = np.concatenate([[np.nan], own + rng.normal(0, noise, len(own))]).astype(np.float32)
        rollout.behaviour_logprobs = np.where(rollout.sampled, noisy, np.nan).astype(np.float32)
    return batch


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("moments", ["epochs", "updates"])
def test_later_steps_take_the_ratio_to_the_behaviour(make_policy, make_batch, recording, average, moments):
    policy = make_policy()
    batch = with_behaviour(policy, make_batch(policy))
    reference, reference_model = Snapshot(policy), double(policy)
    target = make_objective(average, ("k3", 0.4), 0.05, low=0.1, high=0.15)
    options = {"epochs_per_batch": 2} if moments == "epochs" else {"updates_per_batch": 2}
    parts = [np.arange(len(batch))] * 2 if moments == "epochs" else [np.arange(10), np.arange(10, len(batch))]
    before = copy.deepcopy(policy.model)
    backend = recording(policy)
    Learner(backend, reference).update(batch, target, config(micro_batch_size=3, **options), 0.02)
    assert len(backend.gradients) == 2
    # the oracle takes the same two steps
    model = before.double()
    for number, part in enumerate(parts):
        total, _ = objective(
            model,
            batch.select(part),
            average,
            low=0.1,
            high=0.15,
            first=number == 0,
            kl=("k3", 0.4),
            entropy=0.05,
            reference=reference_model,
            constant=11.0,
        )
        want = gradient_of(model, total)
        assert gap(backend.gradients[number], want) < 3e-5, number
        start = 0
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.02 * want[start : start + p.numel()].view_as(p))
                start += p.numel()


def test_updates_are_cut_by_whole_groups_and_none_is_empty(make_policy, make_batch, recording):
    policy = make_policy()
    batch = make_batch(policy, rewards=((1.0, 0.0), (0.0, 1.0), (0.5, 1.0)))
    interleaved = batch.select([0, 2, 4, 1, 3, 5])
    for updates, epochs, want in ((1, 1, 1), (2, 1, 2), (3, 2, 6), (9, 1, 3)):
        backend = recording(policy, moves=False)
        Learner(backend).update(
            interleaved, make_objective(), config(updates_per_batch=updates, epochs_per_batch=epochs), 1.0
        )
        assert len(backend.gradients) == want
    one, _ = one_gradient(recording, policy, batch.select([0, 1]), make_objective())
    backend = recording(policy, moves=False)
    Learner(backend).update(interleaved, make_objective(), config(updates_per_batch=3), 1.0)
    assert gap(backend.gradients[0], one) < 1e-5


def test_unknown_behaviour_is_taken_on_the_first_step_and_refused_later(make_policy, make_batch, recording):
    policy = make_policy()
    known, unknown = make_batch(policy), make_batch(policy, known=False)
    want, _ = one_gradient(recording, policy, known, make_objective())
    got, metrics = one_gradient(recording, policy, unknown, make_objective())
    assert torch.equal(got, want)
    assert metrics["ratio/mean"] == 1.0
    assert "mismatch/mean" not in metrics
    for options in ({"epochs_per_batch": 2}, {"updates_per_batch": 2}):
        with pytest.raises(TrainingError, match="behaviour log-probs"):
            Learner(recording(policy, moves=False)).update(unknown, make_objective(), config(**options), 1.0)


def test_unknown_behaviour_is_refused_without_the_skip_too(make_policy, make_batch, recording):
    policy = make_policy()
    unknown = make_batch(policy, known=False)
    with pytest.raises(TrainingError, match="behaviour log-probs"):
        Learner(recording(policy, moves=False)).update(
            unknown, make_objective(skip=False), config(epochs_per_batch=2), 1.0
        )


@pytest.fixture
def mixed(make_policy, make_batch, make_rollout):
    """A policy with a batch of sampled rollouts and one demonstration, under a policy and a likelihood component."""
    policy = make_policy()
    batch = with_behaviour(policy, make_batch(policy, rewards=((1.0, 0.0, 0.2),)))
    shown = make_rollout([5, 6, 7, 8, 9, 10], prompt=2, group="shown")
    shown.origin[2:] = Origin.DEMONSTRATION
    rollouts = [*batch.rollouts, shown]
    joined = Batch(
        rollouts,
        {name: np.append(batch.columns[name], fill) for name, fill in (("reward", np.nan), ("advantage", 0.0))},
        {
            "weight/policy": [*batch.token_columns["weight/policy"], np.zeros(6, dtype=np.float32)],
            "weight/likelihood": [(r.origin == Origin.DEMONSTRATION).astype(np.float32) for r in rollouts],
        },
    )
    target = Objective(
        (*make_objective("tokens").components, ObjectiveTerm("likelihood", LikelihoodLoss(), "likelihood", 0.3))
    )
    return policy, joined, target


def mixed_gradient(model, batch, first):
    """The float64 gradient of 1 x clip over the sampled rollouts and 0.3 x cross-entropy of the demonstration."""
    clip, _ = objective(model, batch.select([0, 1, 2]), "tokens", first=first)
    logprobs, _ = token_statistics(model, batch.rollouts[3])
    return gradient_of(model, clip - 0.3 * logprobs[1:].mean())


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 1}, {"micro_batch_size": 2}])
def test_two_components_with_their_own_tokens(mixed, recording, options):
    policy, batch, target = mixed
    got, metrics = one_gradient(recording, policy, batch, target, **options)
    assert gap(got, mixed_gradient(double(policy), batch, first=True)) < 1e-5
    assert metrics["ratio/mean"] == 1.0
    assert metrics["tokens/trained"] == sum(int(r.sampled.sum()) for r in batch.rollouts[:3]) + 4


@pytest.mark.parametrize(
    "size",
    [
        1,
        4,
    ],
)
def test_tokens_of_another_component_do_not_poison_a_later_ratio(mixed, recording, size):
    policy, batch, target = mixed
    want = mixed_gradient(double(policy), batch, first=False)
    backend = recording(policy, moves=False)
    metrics = Learner(backend).update(batch, target, config(epochs_per_batch=2, micro_batch_size=size), 1.0)
    assert metrics["skipped/nonfinite"] == 0.0
    assert gap(backend.gradients[1], want) < 1e-5


# Failures ------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_skips_its_step(make_policy, make_batch, recording):
    policy = make_policy()
    batch, before = make_batch(policy), weights_of(policy)
    batch.columns["advantage"][0] = np.inf
    backend = recording(policy, {"name": "sgd", "momentum": 0.9})
    metrics = Learner(backend).update(batch, make_objective(), config(micro_batch_size=1), 1.0)
    assert metrics["skipped/nonfinite"] == 1.0
    assert backend.gradients == []
    assert same(weights_of(policy), before)
    assert backend.optimizer.state_dict()["state"] == {}
    # the same learner goes on with a good batch as if nothing had been
    good = make_batch(policy)
    want, _ = one_gradient(recording, policy, good, make_objective())
    again = Learner(backend).update(good, make_objective(), config(), 1.0)
    assert again["skipped/nonfinite"] == 0.0
    assert gap(backend.gradients[0], want) < 1e-6


def test_a_gradient_that_is_not_finite_skips_its_step(make_policy, make_batch, recording):
    policy = make_policy()
    batch, before = make_batch(policy), weights_of(policy)
    first = next(iter(policy.trainable().values()))
    handle = first.register_hook(lambda gradient: gradient * float("nan"))
    backend = recording(policy, "adamw")
    metrics = Learner(backend).update(batch, make_objective(), config(optimizer="adamw"), 1.0)
    handle.remove()
    assert metrics["skipped/nonfinite"] == 1.0
    assert "grad_norm" not in metrics
    assert same(weights_of(policy), before)
    assert backend.optimizer.state_dict()["state"] == {}


def test_one_bad_step_of_two_is_half_skipped(make_policy, make_batch, recording):
    policy = make_policy()
    batch = make_batch(policy, rewards=((1.0, 0.0), (0.0, 1.0)))
    batch.columns["advantage"][0] = np.nan
    backend = recording(policy)
    metrics = Learner(backend).update(batch, make_objective(), config(updates_per_batch=2), 1e-3)
    assert metrics["skipped/nonfinite"] == 0.5
    assert len(backend.gradients) == 1


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}])
def test_a_batch_without_any_advantage_still_moves_by_its_momentum(make_policy, make_batch, optimizer):
    results = []
    for skip in (True, False):
        policy = make_policy()
        learner = Learner(PlainBackend(policy, optimizer))
        learner.update(make_batch(policy), make_objective(skip=skip), config(), 1e-2)
        between = weights_of(policy)
        flat_batch = make_batch(policy, seed=4, rewards=((1.0, 1.0), (0.0, 0.0, 0.0)))
        metrics = learner.update(flat_batch, make_objective(skip=skip), config(), 1e-2)
        assert metrics["skipped/nonfinite"] == 0.0
        assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-12)
        assert not same(weights_of(policy), between)
        results.append(flat(weights_of(policy)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_a_batch_without_any_decided_rollout_is_no_error(make_policy, make_batch, recording):
    policy = make_policy()
    batch, before = make_batch(policy, rewards=((np.nan, np.nan),)), weights_of(policy)
    backend = recording(policy)
    target = make_objective("tokens", ("k3", 0.1), 0.1)
    metrics = Learner(backend, Snapshot(policy)).update(batch, target, config(), 1.0)
    assert metrics["tokens/trained"] == 0
    assert metrics["skipped/nonfinite"] == 0.0
    assert same(weights_of(policy), before)


def test_gradients_are_clipped_to_the_norm(make_policy, make_batch, recording):
    policy = make_policy()
    batch, before = make_batch(policy), flat(weights_of(policy))
    backend = recording(policy)
    metrics = Learner(backend).update(batch, make_objective(), config(max_grad_norm=1e-2), 1.0)
    gradient = backend.gradients[0]
    assert metrics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert float(gradient.norm()) > 1e-2
    step = flat(weights_of(policy)) - before
    assert float(step.norm()) == pytest.approx(1e-2, rel=1e-2)
    assert gap(step, -gradient * 1e-2 / gradient.norm()) < 1e-2
    # under the limit nothing is scaled
    policy_free = make_policy()
    Learner(recording(policy_free)).update(batch, make_objective(), config(max_grad_norm=1e9), 1e-2)
    assert gap(flat(weights_of(policy_free)) - before, -1e-2 * gradient) < 1e-3


# Snapshot ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [None, {"r": 4, "alpha": 8.0}])
def test_a_snapshot_is_put_in_place_and_taken_out_exactly(make_policy, adapter):
    policy = make_policy(adapter=adapter)
    ids = torch.arange(5, 12)[None]

    def logits():
        with torch.no_grad():
            return policy.model(input_ids=ids).logits

    start, start_logits = weights_of(policy), logits()
    snapshot = Snapshot(policy)
    moved(policy, size=0.1)
    now, now_logits = weights_of(policy), logits()
    assert not torch.equal(now_logits, start_logits)
    parameters = policy.trainable()
    with snapshot.in_place():
        assert same(weights_of(policy), start)
        assert torch.equal(logits(), start_logits)
    assert same(weights_of(policy), now)
    assert torch.equal(logits(), now_logits)
    with pytest.raises(RuntimeError), snapshot.in_place():
        raise RuntimeError
    assert same(weights_of(policy), now)
    assert all(parameters[name] is p for name, p in policy.trainable().items())
    assert snapshot.weights.keys() == start.keys()
    assert same(snapshot.weights, start)


def test_the_reference_stays_while_the_policy_trains(make_policy, make_batch):
    policy = make_policy()
    reference, model = Snapshot(policy), double(policy)
    learner = Learner(PlainBackend(policy, "adamw"), reference)
    target = make_objective("tokens", ("k3", 0.1))
    for step in range(3):
        batch = make_batch(policy, seed=step)
        metrics = learner.update(batch, target, config(optimizer="adamw", micro_batch_size=3), 1e-2)
        assert (metrics["kl/ref"] == 0.0) == (step == 0)
        column = batch.token_columns["logprobs/reference"]
        for rollout, weight, got in zip(batch.rollouts, batch.token_columns["weight/policy"], column, strict=True):
            with torch.no_grad():
                want = token_statistics(model, rollout)[0].numpy()
            np.testing.assert_allclose(got[1:][weight[1:] > 0], want[weight[1:] > 0], rtol=1e-5, atol=2e-5)
            assert np.isnan(got[weight == 0]).all()


def test_a_saved_reference_comes_back(make_policy):
    policy = make_policy()
    snapshot = Snapshot(policy)
    saved = saved_reference(snapshot, World())
    moved(policy)
    other = Snapshot(policy)
    load_reference(other, saved)
    assert same(saved_reference(other, World()), saved)


def test_lora_trains_the_adapter_alone_and_its_reference_is_the_base(make_policy, make_batch, recording):
    base, policy = make_policy(), make_policy(adapter={"r": 4, "alpha": 8.0})
    names = {name for name, _ in policy.model.named_parameters()}
    trained = set(policy.trainable())
    assert trained
    assert all("lora" in name for name in trained)
    frozen = {n: p.detach().clone() for n, p in policy.model.named_parameters() if n not in trained}
    assert len(frozen) == len(names) - len(trained)
    start = weights_of(policy)
    reference, base_model = Snapshot(policy), double(base)
    target = make_objective("tokens", ("k3", 0.3))
    learner = Learner(PlainBackend(policy, "adamw"), reference)
    for step in range(2):
        batch = make_batch(policy, seed=step)
        model = double(policy)
        want = gradient_of(model, objective(model, batch, "tokens", kl=("k3", 0.3), reference=base_model)[0])
        for size in (None, 2):
            got, metrics = one_gradient(recording, policy, batch, target, reference, micro_batch_size=size)
            assert gap(got, want) < 1e-5
        assert (metrics["kl/ref"] == 0.0) == (step == 0)
        learner.update(batch, target, config(optimizer="adamw"), 1e-2)
    now = dict(policy.model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())
    assert not same(weights_of(policy), start)


def test_advantages_per_token(policy, make_batch, recording):
    """A token column of advantages is read instead of the rollout column."""
    batch = make_batch(policy, rewards=((1.0, 0.0, 0.5),))
    want, _ = one_gradient(recording, policy, batch, make_objective("tokens"))
    spread = batch.select(range(3))
    spread.token_columns["advantage"] = [
        np.full(len(r), a) for r, a in zip(spread.rollouts, spread.columns.pop("advantage"), strict=True)
    ]
    assert torch.equal(one_gradient(recording, policy, spread, make_objective("tokens"))[0], want)


def test_the_mean_advantage_oracle_feeds_these_tests():
    """The batches here have what they claim: zero-variance, undecided and mixed groups."""
    got = group_advantages([1.0, 1.0, np.nan, 1.0, 0.0], ["a", "a", "a", "b", "b"], "mean", "none", 0.0)
    assert got == [0.0, 0.0, 0.0, 0.5, -0.5]
