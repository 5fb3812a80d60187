"""Presets of policy losses: one published loss each, with the advantages that its paper uses."""

from __future__ import annotations

from typing import Any

from rlvr.registry import register

GROUP: dict[str, Any] = {"name": "group", "baseline": "mean", "scale": "std"}
CENTRED: dict[str, Any] = {"name": "group", "baseline": "mean", "scale": "none"}


def _preset(loss: dict[str, Any], advantage: dict[str, Any] = GROUP, **more: Any) -> dict[str, Any]:
    return {"advantage": dict(advantage), "loss": loss, **more}


@register("preset", "dapo")
def dapo() -> dict[str, Any]:
    """DAPO (Yu et al. 2025, eq. 8): a higher upper clip and the mean over all tokens. Its dynamic sampling is
    `rollout.dynamic_sampling`, its soft punishment of long responses a reward term, both outside of this section."""
    # The ratio is clipped to [1 - 0.2, 1 + 0.28].
    return _preset({"name": "clip", "clip_low": 0.2, "clip_high": 0.28, "average": "tokens"})


@register("preset", "bnpo")
def bnpo() -> dict[str, Any]:
    """The mean over all tokens with GRPO's clip, as TRL's loss_type bnpo; there of a micro-batch, here of the step."""
    return _preset({"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "tokens"})


@register("preset", "gspo")
def gspo() -> dict[str, Any]:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071): the geometric mean of a response's ratios, clipped tightly."""
    # A mean over hundreds of tokens moves far less than one of them, hence bounds a thousand times tighter than 0.2.
    return _preset({"name": "clip", "ratio": "geometric", "clip_low": 3e-4, "clip_high": 4e-4, "average": "sequences"})


@register("preset", "gspo_token")
def gspo_token() -> dict[str, Any]:
    """GSPO-token (Zheng et al. 2025, arXiv 2507.18071): GSPO for advantages that differ within a response."""
    return _preset(
        {"name": "clip", "ratio": "geometric_token", "clip_low": 3e-4, "clip_high": 4e-4, "average": "sequences"}
    )


@register("preset", "luspo")
def luspo() -> dict[str, Any]:
    """LUSPO (Liu et al. 2026, arXiv 2602.05261): GSPO with every response times its length, a sum over its tokens."""
    return _preset(
        {
            "name": "clip",
            "ratio": "geometric",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            # A sum over the tokens of a response, divided by the number of responses only.
            "average": "constant",
            "constant": 1,
        }
    )


@register("preset", "cispo")
def cispo() -> dict[str, Any]:
    """CISPO (MiniMax-M1 2025, arXiv 2506.13585): the clipped ratio as a constant weight, without a lower bound; the
    upper one is ScaleRL's (Khatri et al. 2025, arXiv 2510.13786): ratios up to 5."""
    # [1 - 1.0, 1 + 4.0]: ratios are not negative, so 0 is no bound.
    return _preset({"name": "clip", "clip": "detach", "clip_low": 1.0, "clip_high": 4.0, "average": "tokens"})


@register("preset", "sapo")
def sapo() -> dict[str, Any]:
    """SAPO (arXiv 2511.20347): a sigmoid gate in the place of the clip."""
    # The temperatures of the gate for positive and negative advantages; the latter falls off faster.
    return _preset(
        {"name": "clip", "clip": "soft", "soft_positive": 1.0, "soft_negative": 1.05, "average": "sequences"}
    )


# `dppo` alone, the name of the method, stands for the form with total variation.
@register("preset", "dppo")
@register("preset", "dppo_tv")
def dppo_tv() -> dict[str, Any]:
    """DPPO-Binary-TV (Qi et al. 2026, arXiv 2602.04879): a token is masked when its probability has moved by 0.15,
    the bound of verl's DPPO scripts."""
    return _preset(
        {"name": "clip", "clip": "tv", "clip_low": 0.15, "clip_high": 0.15, "cap": 20.0, "average": "tokens"}
    )


@register("preset", "dppo_kl")
def dppo_kl() -> dict[str, Any]:
    """DPPO-Binary-KL (Qi et al. 2026, arXiv 2602.04879): a token is masked when its binary divergence is over 0.05,
    the bound of verl's DPPO scripts."""
    return _preset(
        {"name": "clip", "clip": "kl", "clip_low": 0.05, "clip_high": 0.05, "cap": 20.0, "average": "tokens"}
    )


@register("preset", "gmpo")
def gmpo() -> dict[str, Any]:
    """GMPO (Zhao et al. 2025, arXiv 2507.20673): the geometric mean of ratios clipped to (e^-0.4, e^0.4)."""
    return _preset({"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4})


@register("preset", "vespo")
def vespo() -> dict[str, Any]:
    """VESPO (Shen et al. 2026, arXiv 2602.10693), with TRL's defaults: a gamma-shaped weight of the response's
    ratio."""
    return _preset({"name": "vespo"})


@register("preset", "clip_cov")
def clip_cov() -> dict[str, Any]:
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): no gradient at 2 in 10,000 tokens, of those with a high
    covariance."""
    # `least` and `most` bound the covariance of the tokens that are drawn from, as verl's clip_cov_lb and clip_cov_ub.
    return _preset({"name": "clip_cov", "share": 2e-4, "least": 1.0, "most": 5.0})


@register("preset", "kl_cov")
def kl_cov() -> dict[str, Any]:
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): a penalty at the 2 in 1,000 tokens with the highest covariance."""
    return _preset({"name": "kl_cov", "share": 2e-3, "coef": 1.0})


@register("preset", "gpg")
def gpg() -> dict[str, Any]:
    """GPG (Chu et al. 2025, arXiv 2504.02546): REINFORCE with centred rewards, scaled up for the groups without a
    signal; no ratio, no clip."""
    return _preset({"name": "reinforce", "average": "tokens"}, CENTRED, modifiers=["informative"])


@register("preset", "dro")
def dro() -> dict[str, Any]:
    """DRO (Richemond et al. 2024, arXiv 2405.19107) in its token form: centred rewards and a quadratic penalty."""
    return _preset({"name": "dro", "beta": 0.1}, CENTRED)


@register("preset", "topr")
def topr() -> dict[str, Any]:
    """TOPR (Le Roux et al. 2025, arXiv 2503.14286): centred rewards; punished responses weigh their ratio, at most
    1."""
    return _preset({"name": "topr"}, CENTRED, correction=None)


@register("preset", "m2po")
def m2po() -> dict[str, Any]:
    """M2PO (Zheng et al. 2025, arXiv 2510.01161): the largest log-ratios are left out until their mean square is
    0.04."""
    return _preset({"name": "m2po", "moment": 0.04})


@register("preset", "pacs")
def pacs() -> dict[str, Any]:
    """PACS (Li et al. 2025, arXiv 2509.02522): predict the reward from the log-ratio; rewards within [0, 1]."""
    return _preset({"name": "pacs"}, CENTRED)


@register("preset", "rover")
def rover() -> dict[str, Any]:
    """ROVER (He et al. 2025, arXiv 2509.24981): fit the log-ratio to the value of a uniformly random policy."""
    return _preset({"name": "rover"}, CENTRED)


@register("preset", "copg")
def copg() -> dict[str, Any]:
    """CoPG (Flet-Berliac et al. 2024, arXiv 2406.19185): contrast the responses of a group, held by the reference."""
    return _preset({"name": "copg", "beta": 0.1}, CENTRED)


@register("preset", "stable_reinforce")
def stable_reinforce() -> dict[str, Any]:
    """StableReinforce (Zhang et al. 2025, R1-Reward, arXiv 2505.02835): log-ratios clamped before the exponential,
    advantages normalised over the batch and left out beyond 3 standard deviations. The bound of a factor 1000 is the
    authors' (yfzhang114/r1_reward, commit 3693413, openrlhf/models/loss.py), where the loss is the mean of each
    response's mean, as in the recipe r1-reward."""
    # ln 1000 = 6.9: no ratio beyond a factor of 1000 either way.
    return _preset(
        {"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "bound": 6.9, "average": "tokens"},
        # Raw rewards: `whiten` subtracts the mean of the batch and divides by its standard deviation.
        {"name": "group", "baseline": "none", "scale": "none"},
        modifiers=["whiten", {"name": "outliers"}],
    )
