"""Memory plans: what a run needs of each device's memory, part by part, before any weight is loaded."""

from rlvr.planner.estimate import STATE, advice, device_memory, lengths, parts
from rlvr.planner.meta_model import shape_of
from rlvr.planner.micro_batch import micro_batch_bytes
from rlvr.planner.shape import Shape

__all__ = ["STATE", "Shape", "advice", "device_memory", "lengths", "micro_batch_bytes", "parts", "shape_of"]
