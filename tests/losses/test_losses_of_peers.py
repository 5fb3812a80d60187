"""The policy losses of TRL and verl, recorded by running their code, against ours on the same tensors.

scripts/peers/{trl,verl}_losses.py made the files; both peers' losses and gradients are those of ours to 1e-5.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlvr.core.needs import CURRENT, REFERENCE
from rlvr.losses import (
    ClipCovLoss,
    ClippedPolicyLoss,
    Denominators,
    Divergence,
    EntropyBonus,
    GammaWeightedLoss,
    GeometricMeanLoss,
    KLCovLoss,
    KLPenalty,
    MaskNegatives,
    QuadraticPenaltyLoss,
    Reinforce,
    TokenBatch,
    TopEntropy,
    Truncate,
    absolute,
    k1,
    k2,
    k3,
)

DATA = Path(__file__).parent / "data"
TRL, VERL = (json.loads((DATA / f"{name}_losses.json").read_text()) for name in ("trl", "verl"))
INPUTS = TRL["inputs"]
LENGTHS = [len(row) for row in INPUTS["old"]]


def flat(rows):
    return torch.tensor([v for row in rows for v in row], dtype=torch.float64)


def batch():
    """The recorded tensors as a TokenBatch, log-probs and entropies with gradient."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    statistics = {
        ("logprobs", CURRENT): flat(INPUTS["logprobs"]).requires_grad_(),
        ("entropy", CURRENT): flat(INPUTS["entropies"]).requires_grad_(),
        ("logprobs", REFERENCE): flat(INPUTS["reference"]),
    }
    advantage = torch.tensor(INPUTS["advantages"], dtype=torch.float64)[sequence]
    weight = torch.ones(len(sequence), dtype=torch.float64)
    return TokenBatch(
        sequence=sequence,
        sequences=len(LENGTHS),
        weight=weight,
        advantage=advantage,
        proximal_logprobs=flat(INPUTS["old"]),
        behaviour_logprobs=flat(INPUTS["sampling"]),
        statistics=statistics,
    )


def over(constant=1.0):
    return Denominators(float(sum(LENGTHS)), float(len(LENGTHS)), constant)


def agrees(value, tokens, recorded):
    logprobs, entropy = tokens.logprobs, tokens.entropy
    value.backward()
    assert float(value.detach()) == pytest.approx(recorded["loss"], rel=1e-5, abs=1e-9)
    np.testing.assert_allclose(logprobs.grad.numpy(), flat(recorded["gradient"]).numpy(), rtol=1e-5, atol=1e-9)
    if recorded.get("entropy_gradient"):
        wanted = flat(recorded["entropy_gradient"]).numpy()
        np.testing.assert_allclose(entropy.grad.numpy(), wanted, rtol=1e-5, atol=1e-9)
    assert float(logprobs.grad.norm()) > 1e-3


# TRL


def ours_for_trl(o):
    """The loss that TRL's options write."""
    average = {"grpo": "sequences", "sapo": "sequences", "dr_grpo": "constant", "luspo": "constant"}
    by = average.get(o["loss_type"], "tokens")
    if o["loss_type"] == "vespo":
        powers = (o["vespo_k_pos"], o["vespo_lambda_pos"], o["vespo_k_neg"], o["vespo_lambda_neg"])
        return GammaWeightedLoss(*powers, average=by)
    options = {"average": by, "ratio": {"token": "token", "sequence": "geometric"}[o["importance_sampling_level"]]}
    if o["loss_type"] == "cispo":  # TRL has no lower bound, and the upper one itself
        return ClippedPolicyLoss(1.0, o["epsilon_high"] - 1, clip="detach", **options)
    if o["loss_type"] == "sapo":
        soft = {"soft_positive": o["sapo_temperature_pos"], "soft_negative": o["sapo_temperature_neg"]}
        return ClippedPolicyLoss(clip="soft", **soft, **options)
    return ClippedPolicyLoss(o["epsilon"], o["epsilon_high"], cap=o["delta"], **options)


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda c: f"{c['options']['loss_type']}")
def test_trl(case):
    o, plain = case["options"], batch()
    tokens = plain
    constant = {"dr_grpo": float(TRL["longest"])}.get(o["loss_type"], 1.0)
    if o["vllm_correction"]:
        tokens = replace(tokens, importance=Truncate(1.1)(tokens))
    if o["off_policy_mask_threshold"] is not None:
        tokens = replace(tokens, importance=MaskNegatives(o["off_policy_mask_threshold"], None)(tokens))
        assert 0 < int((tokens.importance == 0).sum()) < len(tokens.weight)
    if o["top_entropy_quantile"] < 1:
        tokens = replace(tokens, kept=TopEntropy(o["top_entropy_quantile"])(tokens).detach())
        assert 0 < int((tokens.kept == 0).sum()) < len(tokens.weight)
    loss = ours_for_trl(o)
    value = loss(tokens, over(constant)).value
    if o["beta"]:
        penalty = KLPenalty(Divergence(k3), loss.average, o["use_bias_correction_kl"])
        value = value + o["beta"] * penalty(plain, over(constant)).value
    if o["entropy_coef"]:
        value = value + o["entropy_coef"] * EntropyBonus("tokens")(plain, over()).value
    agrees(value, plain, case)


def test_every_loss_type_of_trl_was_recorded_at_both_levels():
    seen = {(c["options"]["loss_type"], c["options"]["importance_sampling_level"]) for c in TRL["cases"]}
    types = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    assert seen == {(name, level) for name in types for level in ("token", "sequence")}


# verl

AVERAGES = {
    "token-mean": ("tokens", 1.0),
    "seq-mean-token-mean": ("sequences", 1.0),
    "seq-mean-token-sum": ("constant", 1.0),
    "seq-mean-token-sum-norm": ("constant", float(VERL["width"])),
}


def ours_for_verl(o):
    """The loss that verl's options write."""
    low, high, mode = o["clip_ratio_low"], o["clip_ratio_high"], o["loss_mode"]
    by, _ = AVERAGES[o["agg"]]
    more = o["policy_loss"]
    if mode == "bypass_mode":
        mode = more["rollout_correction"]["loss_type"]
        if mode == "reinforce":  # -sg[min(rho, threshold)] A log pi
            most = more["rollout_correction"]["rollout_is_threshold"] - 1
            return ClippedPolicyLoss(1.0, most, by, clip="detach")
    return {
        "vanilla": lambda: ClippedPolicyLoss(low, high, by, cap=o["clip_ratio_c"]),
        "ppo_clip": lambda: ClippedPolicyLoss(low, high, by, cap=o["clip_ratio_c"]),
        "dppo_tv": lambda: ClippedPolicyLoss(low, high, by, clip="tv", cap=o["clip_ratio_c"]),
        "dppo_kl": lambda: ClippedPolicyLoss(low, high, by, clip="kl", cap=o["clip_ratio_c"]),
        "gspo": lambda: ClippedPolicyLoss(low, high, by, ratio="geometric_token"),
        "sapo": lambda: ClippedPolicyLoss(
            average=by, clip="soft", soft_positive=o["tau_pos"], soft_negative=o["tau_neg"]
        ),
        "cispo": lambda: ClippedPolicyLoss(low, high, by, clip="detach"),
        "gpg": lambda: Reinforce(average=by),
        "clip_cov": lambda: ClipCovLoss(
            more["clip_cov_ratio"], more["clip_cov_lb"], more["clip_cov_ub"], low, high, average=by
        ),
        "kl_cov": lambda: KLCovLoss(more["kl_cov_ratio"], more["ppo_kl_coef"], average=by),
        "geo_mean": lambda: GeometricMeanLoss(low, high),
        "dro": lambda: QuadraticPenaltyLoss(more["dro_beta"], average=by),
    }[mode]()


@pytest.mark.parametrize("case", VERL["cases"], ids=lambda c: c["options"]["loss_mode"])
def test_verl(case):
    o, tokens = case["options"], batch()
    if o["weighted"]:
        tokens = replace(tokens, importance=Truncate(1.1)(tokens))
    loss = ours_for_verl(o)
    if loss.chooses_by:
        tokens = replace(tokens, chosen=loss.choose(tokens).detach())
        assert 0 < float(tokens.chosen.sum()) < len(tokens.weight)
    agrees(loss(tokens, over(AVERAGES[o["agg"]][1])).value, tokens, case)


def test_every_policy_loss_of_verl_was_recorded():
    names = "vanilla dppo_tv dppo_kl gspo sapo gpg clip_cov kl_cov geo_mean dro cispo bypass_mode"
    assert {c["options"]["loss_mode"] for c in VERL["cases"]} == set(names.split())


@pytest.mark.parametrize("recorded", VERL["kl"], ids=lambda c: c["name"])
def test_the_kl_estimators_of_verl(recorded):
    """A name with + takes the gradient of k2; verl's k3 is clamped."""
    name = recorded["name"]
    estimator = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}[name.removesuffix("+")]
    divergence = Divergence(estimator, k2 if name.endswith("+") else None, 10.0 if name.startswith("k3") else None)
    tokens = batch()
    value = divergence(tokens.logprobs, tokens.reference_logprobs).sum()
    value.backward()
    assert float(value.detach()) == pytest.approx(recorded["value"], rel=1e-5)
    np.testing.assert_allclose(tokens.logprobs.grad.numpy(), flat(recorded["gradient"]).numpy(), rtol=1e-5, atol=1e-9)
