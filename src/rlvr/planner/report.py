"""Memory plans in words, and the refusal of a run that cannot fit."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.config.stage_plan import StagePlan
from rlvr.planner.fixes import fixes
from rlvr.planner.plan import Phase, Plan
from rlvr.planner.planner import Planner

GIB = 1 << 30


def gib(size: float) -> str:
    """Bytes in words."""
    # From a tenth of a GiB on, so that the plans of tiny models are not all 0.0 GiB.
    if size >= GIB / 10:
        return f"{size / GIB:.1f} GiB"
    return f"{size / (1 << 20):.1f} MiB"


def plan_lines(stages: Sequence[StagePlan], plans: Sequence[Plan]) -> list[str]:
    """For each stage the phase that takes most, the assumed lengths, and every phase part by part."""
    lines = []
    for number, (stage, plan) in enumerate(zip(stages, plans, strict=True), 1):
        worst = plan.worst
        if stage.config.data.max_prompt_tokens:
            bound = "data.max_prompt_tokens"
        else:
            bound = "data.max_prompt_tokens is not set"
        if stage.config.model.checkpoints_activations:
            recomputed = "with"
        else:
            recomputed = "without"
        if plan.ranks < plan.devices.count:
            trained_on = f", {plan.ranks} of them trained on"
        else:
            trained_on = ""
        lines += [
            f"memory of stage {number} ({stage.name}) on {plan.devices}{trained_on}: at most about {gib(worst.total)} "
            f"of {gib(worst.available)}, in: {worst.name}",
            f"  for prompts of {plan.prompt} tokens ({bound}) and {plan.length} tokens in all, micro-batches of at "
            f"most {plan.tokens} tokens, {recomputed} gradient checkpointing",
            *_evaluation(plan),
            *(f"  {_phase(phase)}" for phase in plan.phases),
        ]
    return lines


def _evaluation(plan: Plan) -> list[str]:
    if plan.evaluated is None:
        return []
    return [
        f"  for evaluations of {plan.evaluated.length} tokens in all, up to {plan.evaluated.responses} responses at "
        "a time"
    ]


def _phase(phase: Phase) -> str:
    parts = ", ".join(f"{name} {gib(size)}" for name, size in phase.parts.items())
    return f"{phase.name}: {gib(phase.total)} ({parts})"


def refusal(planner: Planner, stages: Sequence[StagePlan], plans: Sequence[Plan]) -> str | None:
    """The reason why a run cannot fit and what would make it fit, the smallest change first; None where it fits."""
    short = [(plan.worst.share_left, number) for number, plan in enumerate(plans) if not plan.fits()]
    if not short:
        return None
    _, number = min(short)
    worst = plans[number].worst
    largest = max(worst.parts, key=lambda name: worst.parts[name])
    return (
        f"does not fit: stage {number + 1} ({stages[number].name}) needs {gib(worst.total)} of {gib(worst.available)} "
        f"in: {worst.name}, where the largest part is {largest} with {gib(worst.parts[largest])}. "
        f"{_ways_out(planner, list(stages))}"
    )


def _ways_out(planner: Planner, stages: list[StagePlan]) -> str:
    ways = fixes(planner, stages)
    texts = []
    for number, fix in enumerate(ways, 1):
        enough = "" if fix.enough else ", not enough by itself"
        texts.append(f"({number}) {fix.text} ({gib(fix.needed)}{enough})")
    if ways and ways[0].enough:
        return f"What makes it fit, the smallest change first: {'; '.join(texts)}"
    if texts:
        other = f". What needs less: {'; '.join(texts)}"
    else:
        other = ""
    return f"Nothing that was tried makes it fit: take a smaller model{other}"
