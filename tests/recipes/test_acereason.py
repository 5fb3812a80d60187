"""AceReason-Nemotron 1.1: the stages differ as the paper's do, and the temperature keeps the entropy at 0.3."""

from __future__ import annotations

import math

import pytest

from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper

LENGTHS = {
    "maths-8k": 8192,
    "maths-16k": 16384,
    "maths-24k": 24576,
    "code-24k": 24576,
    "code-32k": 32768,
    "maths-32k": 32768,
}


def reinforced():
    return [plan for plan in stage_plans(find_paper("acereason-nemotron-1-1").config) if plan.kind == "grpo"]


def test_maths_then_code_then_maths_with_growing_lengths():
    plans = reinforced()
    assert {plan.name: plan.config.rollout.max_new_tokens for plan in plans} == LENGTHS
    assert [plan.name for plan in plans] == list(LENGTHS)
    for plan in plans:
        code = plan.name.startswith("code")
        assert plan.config.verifier.name == ("code" if code else "math")
        # One update a batch, without KL: strictly on-policy.
        assert plan.config.optim.updates_per_batch == plan.config.optim.epochs_per_batch == 1
        assert plan.config.algorithm.kl is None


def test_truncated_answers_are_left_out_where_lengths_are_short():
    masked = [plan.name for plan in reinforced() if plan.config.algorithm.mask_truncated]
    assert masked == ["maths-8k", "maths-16k"]


def entropy(logits, temperature):
    """In nats, of the softmax of logits / temperature."""
    scaled = [logit / temperature for logit in logits]
    total = math.log(math.fsum(math.exp(x) for x in scaled))
    return -math.fsum(math.exp(x - total) * (x - total) for x in scaled)


@pytest.mark.parametrize(("logits", "initially"), [([2.5, 0.0, 0.0], "above"), ([4.0, 0.5, 0.0], "below")])
def test_the_temperature_keeps_the_entropy_near_its_target(logits, initially):
    """A policy whose entropy at the first temperature is above or below 0.3, and that does not change otherwise."""
    for plan in reinforced():
        # Each stage has a controller of its own in the run; one is driven here.
        temperature = plan.config.rollout.temperature.model_copy(deep=True)
        first = entropy(logits, temperature.current)
        assert abs(first - 0.3) > 0.02
        assert (first > 0.3) == (initially == "above")
        for _ in range(300):
            temperature.observe({"entropy": entropy(logits, temperature.current)})
        assert entropy(logits, temperature.current) == pytest.approx(0.3, abs=0.01)
