"""Seeds by path: what is random depends on a path of names and numbers, never on order, rank or world size (N7)."""

from __future__ import annotations

import hashlib


def seed_of(*path: int | str) -> int:
    """A 63-bit seed for `path`, for example (run seed, "rollout", draw, member, call); equal paths, equal seeds."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in path)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
