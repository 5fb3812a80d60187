"""Samplers: epochs of permutations that batch sizes, kills and growth do not disturb."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.data import Draw, Sampler, Sequential, Shuffle, TaskPool
from rlvr.errors import CheckpointError, DataError
from rlvr.records import Task
from rlvr.registry import build, names

sizes, seeds = st.integers(1, 12), st.integers(0, 2**40)


def pool_of(size):
    return TaskPool(Task(f"t{i}", f"prompt {i}") for i in range(size))


def shuffled(size, seed=0):
    return Shuffle().bind(pool_of(size), seed=seed)


def drawn(draws):
    return [(draw.number, draw.task.id) for draw in draws]


def test_the_samplers_are_registered():
    assert {"shuffle", "sequential"} <= set(names("sampler"))
    assert isinstance(build("sampler", "shuffle"), Shuffle)


@given(sizes, seeds, st.integers(1, 4))
def test_every_epoch_is_a_permutation_of_the_pool(size, seed, epochs):
    draws = shuffled(size, seed).next(size * epochs)
    assert [draw.number for draw in draws] == list(range(size * epochs))
    for epoch in range(epochs):
        seen = [draw.task.id for draw in draws[epoch * size : (epoch + 1) * size]]
        assert sorted(seen) == sorted(f"t{i}" for i in range(size))


@given(sizes, seeds, st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_draws_do_not_depend_on_how_many_are_asked_for(size, seed, counts):
    sampler = shuffled(size, seed)
    assert [d for count in counts for d in sampler.next(count)] == shuffled(size, seed).next(sum(counts))


@given(sizes, seeds, st.integers(0, 30), st.integers(1, 30))
def test_a_resumed_sampler_goes_on_as_if_never_stopped(size, seed, before, after):
    sampler = shuffled(size, seed)
    if before:
        sampler.next(before)
    resumed = shuffled(size, seed)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert (resumed.next(after), resumed.epoch) == (sampler.next(after), sampler.epoch)


@given(sizes, seeds, st.integers(1, 20), st.integers(1, 5), st.integers(0, 20))
def test_a_resumed_sampler_agrees_when_the_pool_grew_meanwhile(size, seed, before, added, between):
    sampler = shuffled(size, seed)
    sampler.next(before)
    for i in range(added):
        sampler.pool.add(Task(f"new{i}", "new"))
    if between:
        sampler.next(between)
    pool = pool_of(size)
    pool.load_state_dict(json.loads(json.dumps(sampler.pool.state_dict())))
    resumed = Shuffle().bind(pool, seed=seed)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert resumed.next(40) == sampler.next(40)


def test_epochs_and_seeds_have_orders_of_their_own():
    def orders(seed):
        sampler = shuffled(20, seed)
        return [[d.task.id for d in sampler.next(20)] for _ in range(3)]

    assert orders(1) == orders(1)
    assert len({tuple(order) for order in orders(1) + orders(2)}) == 6


def test_a_batch_larger_than_the_pool_goes_on_into_the_next_epochs():
    sampler = Sequential().bind(pool_of(2), seed=0)
    assert drawn(sampler.next(5)) == [(0, "t0"), (1, "t1"), (2, "t0"), (3, "t1"), (4, "t0")]


def test_added_tasks_are_drawn_from_the_next_epoch_on():
    sampler = Sequential().bind(pool_of(2), seed=0)
    sampler.next(1)
    sampler.pool.add(Task("new", "new"))
    assert [d.task.id for d in sampler.next(4)] == ["t1", "t0", "t1", "new"]


def test_a_rewritten_task_is_drawn_as_rewritten():
    sampler = Sequential().bind(pool_of(2), seed=0)
    sampler.pool.replace(Task("t0", "rewritten"))
    assert sampler.next(1) == [Draw(0, Task("t0", "rewritten"))]


def test_the_epoch_counts():
    sampler = shuffled(2)
    epochs = [sampler.epoch]
    for _ in range(4):
        sampler.next(1)
        epochs.append(sampler.epoch)
    assert epochs == [0, 0, 1, 1, 2]


def test_a_sampler_of_ones_own_is_one_method():
    class Backwards(Sampler):
        def order(self, epoch, size):
            return range(size - 1, -1, -1)

    assert [d.task.id for d in Backwards().bind(pool_of(3), seed=0).next(4)] == ["t2", "t1", "t0", "t2"]


def test_refusals():
    with pytest.raises(DataError, match="no tasks"):
        shuffled(0)
    with pytest.raises(ValueError, match="not 0"):
        shuffled(1).next(0)
    with pytest.raises(CheckpointError, match="saved with 5 tasks, but the pool now holds 3"):
        shuffled(3).load_state_dict(shuffled(5).state_dict())
