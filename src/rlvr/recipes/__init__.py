"""Presets: the settings of a published recipe by name, put under what the user writes in `algorithm`.

A preset is a function that returns a part of the `algorithm` section. Every default of GRPO that papers disagree on is
written out, so that a preset says what it is without reading the defaults.
"""

from __future__ import annotations

from typing import Any

from rlvr.recipes import loss_presets as loss_presets  # registers the presets of single losses
from rlvr.registry import register


@register("preset", "grpo")
def grpo() -> dict[str, Any]:
    """GRPO (Shao et al. 2024, DeepSeekMath, eq. 3-4): group mean and std, token ratio clipped at 0.2, mean over each
    response and then over responses; without the KL term, which DeepSeekMath has at 0.04 (set `algorithm.kl.coef`)."""
    # A_i = (r_i - mean(r)) / std(r).
    return {
        "advantage": {"name": "group", "baseline": "mean", "scale": "std"},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "sequences"},
    }


@register("preset", "dr_grpo")
def dr_grpo() -> dict[str, Any]:
    """Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-like training"): no std, and a constant denominator, so that
    neither hard prompts nor long wrong answers are weighted differently. The constant is sequences x max_new_tokens."""
    return {
        "advantage": {"name": "group", "baseline": "mean", "scale": "none"},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "constant"},
    }


@register("preset", "rloo")
def rloo() -> dict[str, Any]:
    """RLOO (Ahmadian et al. 2024, "Back to basics"): the baseline is the mean of the other responses; no std.
    The paper sums log-probs over a response; the constant average is that sum up to a fixed factor."""
    # A_i = r_i - mean of r_j over j != i.
    return {
        "advantage": {"name": "group", "baseline": "leave_one_out", "scale": "none"},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "constant"},
    }
