"""New places of attributes that GRPOTrainer had in the version before."""

from __future__ import annotations

from rlvr.core.moved import MovedAttributes


class MovedTrainerAttributes(MovedAttributes):
    """Base class of the trainer that finds them. Warns with a FutureWarning."""

    moved_attributes = {  # noqa: RUF012 - never changed
        "activity": "rollouts.activity",
        "backend": "training.backend",
        "collector": "rollouts.collector",
        "console": "reporting.console",
        "context": "rollouts.context",
        "engine": "rollouts.engine",
        "engine_reason": "resolved.engine_reason",
        "evaluation_tasks": "tasks.evaluation",
        "health": "reporting.health",
        "history": "rollouts.history",
        "learner": "training.learner",
        "memory_plan": "resolved.memory_plan",
        "nonfinite": "state.nonfinite",
        "phases": "meters.phases",
        "plans": "resolved.plans",
        "pool": "rollouts.pool",
        "profiler": "reporting.profiler",
        "prompts": "tasks.prompts",
        "rollout_log": "reporting.rollout_log",
        "saver": "checkpointer",
        "seed": "config.run.seed",
        "stage_number": "state.stage_number",
        "stage_step": "state.stage_step",
        "trackers": "reporting.trackers",
        "verifications": "rollouts.verifications",
        "version": "state.version",
    }
    """Old name -> path of attributes from the trainer."""
