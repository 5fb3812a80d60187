"""Memory plans: what a run needs of each device's memory, part by part, before any weight is loaded."""

from rlvr.planner.meta_model import shape_of
from rlvr.planner.micro_batch import micro_batch_bytes
from rlvr.planner.plan import Plan, plan_stage
from rlvr.planner.planned_devices import Devices, own_devices, parse_devices
from rlvr.planner.planner import Planner
from rlvr.planner.run_plan import RunPlan, automatic_keys, engine_of_run, plan_for, plan_resumed, plan_run, put_values
from rlvr.planner.shape import Shape
from rlvr.planner.trainer_memory import STATE

__all__ = [
    "STATE",
    "Devices",
    "Plan",
    "Planner",
    "RunPlan",
    "Shape",
    "automatic_keys",
    "engine_of_run",
    "micro_batch_bytes",
    "own_devices",
    "parse_devices",
    "plan_for",
    "plan_resumed",
    "plan_run",
    "plan_stage",
    "put_values",
    "shape_of",
]
