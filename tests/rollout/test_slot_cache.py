"""The cache of keys and values moves where a request is longer than any before, and keeps what it has."""

from __future__ import annotations

import pytest
import torch

from rlvr.rollout.rows import GROWTH, CachePlan, LayerShape, SlotCache

SHAPES = [LayerShape(2, 4), LayerShape(1, 4)]


def arrived(rows, prompt, slots):
    """The cache of some requests whose prompt was read; numbers say which is which."""
    cache = SlotCache(SHAPES, CachePlan(rows, slots), torch.float32, torch.device("cpu"), prompt)
    for number, shape in enumerate(SHAPES):
        values = torch.randn(rows, 2, shape.heads, prompt, shape.size)
        cache.place(number, values, torch.arange(rows))
    cache.placed(rows, prompt)
    return cache


def contents(cache, rows, slots):
    return [tensor[rows, :, :slots].clone() for number in range(len(SHAPES)) for tensor in cache.used(number, slots)]


@pytest.mark.parametrize(
    ("lengths", "moves"),
    [
        ([80, 120, 160, 200], 4),  # turns of one episode, each longer than the one before
        ([80, 80, 80, 80], 1),
        ([40, 50, 60, 70], 0),  # within what was planned
        ([200, 160, 120, 80], 1),
    ],
)
def test_rows_that_reach_further_than_any_before_move_the_cache_once(lengths, moves):
    torch.manual_seed(0)
    first = arrived(2, 30, 70)
    cache = SlotCache(SHAPES, CachePlan(16, 70), torch.float32, torch.device("cpu"), 70)
    cache.placed(0, 0)
    cache.join(first)
    places = [layer.data_ptr() for layer in cache.layers]
    known = [(slice(0, 2), 30, contents(first, slice(None), 30))]
    moved = 0
    for slots in lengths:
        other = arrived(2, slots - 20, slots)
        before = cache.rows
        cache.join(other)
        now = [layer.data_ptr() for layer in cache.layers]
        moved += now != places
        places = now
        known.append((slice(before, before + 2), slots - 20, contents(other, slice(None), slots - 20)))
    assert moved == moves
    assert cache.slots == max(70, *lengths)
    for rows, slots, want in known:
        assert all(map(torch.equal, contents(cache, rows, slots), want))


def test_rows_beyond_the_plan_leave_spare_ones():
    """A row that arrives alone does not move the cache each time."""
    cache = SlotCache(SHAPES, CachePlan(8, 64), torch.float32, torch.device("cpu"), 64)
    cache.placed(0, 0)
    places, moved = None, 0
    for _ in range(32):
        cache.join(arrived(1, 10, 64))
        now = [layer.data_ptr() for layer in cache.layers]
        moved += places is not None and now != places
        places = now
    # From 9 to 11 rows, 12 to 15, 16 to 20, 21 to 26, 27 to 33.
    assert moved == 5
    assert cache.cleared <= 10 + GROWTH
