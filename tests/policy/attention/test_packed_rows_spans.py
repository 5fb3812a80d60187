"""The calls, blocks and indices of packed rows against what each token sees."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_rows import some_spans, visible
from rlvr.policy.attention.calls import repeats_of
from rlvr.policy.microbatch import call_pairs


def seen_by(part, tokens):
    """int [N, N]: how often a call computes each pair of the row."""
    counts = np.zeros((tokens, tokens), dtype=int)
    queries = np.arange(tokens) if part.queries is None else part.queries
    keys = np.arange(tokens) if part.keys is None else part.keys
    first_query = first_key = 0
    for own, all_keys in zip(part.query_length, part.key_length, strict=True):
        for i in range(own):
            last = all_keys - own + i if part.causal else all_keys - 1
            lowest = 0 if part.window is None else max(last - part.window + 1, 0)
            counts[queries[first_query + i], keys[first_key + lowest : first_key + last + 1]] += 1
        first_query += own
        first_key += all_keys
    return counts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 1, 4, 9, 1000]))
def test_the_calls_of_a_row_compute_each_visible_pair_once(seed, window):
    spans = some_spans(np.random.default_rng(seed))
    tokens = int(spans.length.sum())
    parts = spans.segments(window)
    counts = sum(seen_by(part, tokens) for part in parts)
    np.testing.assert_array_equal(counts, visible(spans, window).astype(int))
    assert sum(call_pairs(part) for part in parts) == counts.sum()
    assert parts[0].queries is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 4]))
def test_blocks_hold_each_query_and_key_at_its_place(seed, window):
    spans = some_spans(np.random.default_rng(seed))
    for part in spans.segments(window):
        first_key = np.cumsum(part.key_length) - part.key_length
        slots = np.concatenate([block.take_queries.numpy() for block in part.blocks.blocks])
        np.testing.assert_array_equal(slots[part.blocks.places.numpy()], np.arange(part.query_length.sum()))
        assert sorted(s for members in part.members for s in members) == list(range(len(part.query_length)))
        for block, members in zip(part.blocks.blocks, part.members, strict=True):
            keys = block.take_keys.numpy().reshape(block.rows, -1)
            real = block.real.numpy()
            for r, s in enumerate(members):
                own = part.key_length[s]
                np.testing.assert_array_equal(keys[r, :own], first_key[s] + np.arange(own))
                assert real[r].sum() == part.query_length[s]
                # A causal kernel aligns the last slot of queries with the last of keys: padding must keep that.
                assert not part.causal or block.keys - block.queries == own - part.query_length[s]
                assert part.causal or block.keys == own


def test_positions_go_on_from_what_a_run_continues():
    spans = some_spans(None, lengths=[3, 2, 2, 4, 1], contexts=[-1, 0, 1, 1, -1])
    assert spans.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 0]
    assert spans.chain(3) == [1, 0]


def test_all_that_continues_a_run_asks_it_in_one_call():
    """A prompt, a trunk that three responses share, one response without it: each level is one call."""
    spans = some_spans(None, lengths=[10, 5, 3, 3, 3, 4], contexts=[-1, 0, 1, 1, 1, 0])
    own, prompt, trunk = spans.segments(None)
    assert own.causal and own.query_length.tolist() == [10, 5, 3, 3, 3, 4]
    # The trunk's own tokens are below the prompt, as are the responses' on the first level of those without a trunk.
    assert not prompt.causal and prompt.key_length.tolist() == [10, 5]
    assert prompt.query_length.tolist() == [5 + 4, 3 + 3 + 3]
    assert trunk.key_length.tolist() == [10] and trunk.query_length.tolist() == [9]


def test_repeated_places_are_ordered_and_counted():
    assert repeats_of(np.asarray([4, 2, 9])) is None
    order, places, counts = repeats_of(np.asarray([4, 2, 4, 9, 4, 2]))
    assert (order.tolist(), places.tolist(), counts.tolist()) == ([1, 5, 0, 2, 4, 3], [2, 4, 9], [2, 3, 1])
