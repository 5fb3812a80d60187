"""Seeds by path: what is random depends on a path of names and numbers, never on order, rank or world size (N7)."""

from __future__ import annotations

import hashlib


def seed_of(*path: int | str) -> int:
    """A 63-bit seed for `path`, for example (run seed, "rollout", draw, member, call); equal paths, equal seeds."""
    # The type is part of the text, so that 1 and "1" differ, and no name is expected to hold the separator, so that
    # ("a", "b") and ("ab",) differ. Not Python's `hash`, which differs from process to process for texts.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in path)
    # 63 bits, so that the seed fits a signed 64-bit integer wherever it is passed on.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
