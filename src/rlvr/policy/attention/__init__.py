"""Attention of packed rows: which tokens see which and stock models that attend so (`packed_rows`), the calls of which
it consists (`calls`), their kernels (`kernels`, `padded`, `tiles`) and the merging of their outputs (`merged`)."""

from rlvr.policy.attention.calls import Segments
from rlvr.policy.attention.packed_rows import PREFIX, Spans, attending, hook, unhook
from rlvr.policy.attention.packing_trial import Packing, try_packing

__all__ = ["PREFIX", "Packing", "Segments", "Spans", "attending", "hook", "try_packing", "unhook"]
