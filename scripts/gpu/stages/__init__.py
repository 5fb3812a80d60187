"""The stages of the GPU kit: each answers one question about a GPU, and runs in a process of its own.

    python -m stages NUMBER --device cuda --until TIME --results FILE

is one stage (scripts/gpu and src on PYTHONPATH); scripts/gpu/evidence.py runs several, with limits. This file imports
only Python's standard library, so that the runner starts on a machine where the library cannot be imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage: a module of this package with a function `run(context)`."""

    number: int
    name: str
    """The module's name."""
    minutes: float
    """Its share of the time on a GPU."""
    question: str
    """What it answers, as a heading of docs/gpu.md."""


STAGES = (
    Stage(1, "environment", 3, "What the machine is and reaches, and the tests of tests/gpu"),
    Stage(2, "attention", 4, "Attention: time and memory by length, and the constants of packing"),
    Stage(3, "head", 2, "LM head: time, memory and kernel launches"),
    Stage(4, "update", 6, "A whole update: peak memory against the plan, and model FLOPs utilization"),
    Stage(5, "zero", 4, "DeepSpeed ZeRO 1 to 3 with one rank against the plain backend"),
    Stage(6, "rollouts", 12, "vLLM beside the trainer, and the hf engine"),
    Stage(7, "learning", 4, "A run in bfloat16 that learns arithmetic"),
)
"""In the order of their worth. The minutes add up to 35; each stage fits ten."""
