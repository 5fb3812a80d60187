"""Tasks: read, adapt, render, draw, remember. Works without torch.

Importing this package registers its samplers and sources.
"""

from rlvr.data.arithmetic import arithmetic
from rlvr.data.functions import functions
from rlvr.data.history import History, TaskHistory
from rlvr.data.preferences import preferences
from rlvr.data.products import products
from rlvr.data.prompts import Prompts
from rlvr.data.row_adapters import to_task
from rlvr.data.samplers import Draw, Sampler, Sequential, Shuffle, TaskPool
from rlvr.data.sources import TaskSource, load_tasks
from rlvr.data.splits import in_split
from rlvr.data.templates import Template, render_demonstration, render_prompt

__all__ = [
    "Draw",
    "History",
    "Prompts",
    "Sampler",
    "Sequential",
    "Shuffle",
    "TaskHistory",
    "TaskPool",
    "TaskSource",
    "Template",
    "arithmetic",
    "functions",
    "in_split",
    "load_tasks",
    "preferences",
    "products",
    "render_demonstration",
    "render_prompt",
    "to_task",
]
