"""Attention of packed rows: which tokens see which (`spans`), the kernels (`kernels`), their merging (`merged`), and
stock Hugging Face models that compute it (`hook`)."""

from rlvr.policy.attention.hook import PREFIX, Packing, attending, hook, try_packing, unhook
from rlvr.policy.attention.spans import Segments, Spans

__all__ = ["PREFIX", "Packing", "Segments", "Spans", "attending", "hook", "try_packing", "unhook"]
