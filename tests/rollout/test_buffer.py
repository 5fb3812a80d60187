"""The buffer of groups: the window that bounds their age, dynamic sampling, and that no draw is lost or trained
twice."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import numpy as np
import pytest
from engine_helpers import PATIENCE, context_of, ids_of, recomputed, shake, small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.config import DynamicSamplingConfig, RolloutConfig
from rlvr.core.seeding import seed_of
from rlvr.data import Draw, TaskPool
from rlvr.errors import WaitTimeoutError
from rlvr.records import StopReason, Task, Verdict
from rlvr.rollout import Completion, HFEngine, HFEngineOptions, RolloutBuffer, Sampling, single_turn

TASKS = [Task(f"t{n}", "abcdefghijkl"[n % 12]) for n in range(7)]


class FakeEngine:
    """Answers with the weights' version; `delay(request)` in seconds."""

    def __init__(self, delay=lambda request: 0.0):
        self.version, self.delay = 0, delay
        self.asked = []

    async def generate(self, request):
        version = self.version
        self.asked.append(request)
        await asyncio.sleep(self.delay(request))
        ids = np.asarray([request.seed % 7, 1])
        return Completion(ids, np.zeros(2, np.float32), np.full(2, version, np.int32), StopReason.END, "ab", 0.0)


def make_supply(collector, generate, last=100, useful=lambda task: True, score=None, group_size=2, **rollout):
    """(supply, its sampler): tasks in order; a group of task t has rewards that differ where `useful(t)`."""

    async def verify(rollout_):
        value = rollout_.member == 0 if useful(rollout_.task) else 0.0
        rollout_.verdicts["here"] = Verdict.from_score(float(value))
        return rollout_

    def contexts(step):
        return context_of(
            generate, verify, encode=lambda task: (5, 6), seed_path=(0,), sampling=Sampling(4), group_size=group_size
        )

    sampler = registry.build("sampler", "sequential").bind(TaskPool(TASKS), seed=0)
    config = RolloutConfig(**{"prompts_per_step": 3, "deadline": 30.0, **rollout})
    return RolloutBuffer(sampler, collector, single_turn, contexts, config, last, differ)


async def differ(rollouts):
    return len({r.verdict.score for r in rollouts}) > 1


def draws(rollouts):
    return sorted({int(r.group) for r in rollouts})


def groups(rollouts):
    """As the buffer keeps them."""
    tasks = {int(r.group): r.task for r in rollouts}
    return [(Draw(n, task), [r for r in rollouts if int(r.group) == n]) for n, task in sorted(tasks.items())]


# The window ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_ages_are_bounded_and_every_draw_is_trained_once_in_order(collector, staleness):
    engine = FakeEngine(lambda request: 0.001 * (request.seed % 5))
    supply = make_supply(collector, engine.generate, last=12, staleness=staleness)
    seen, ages = [], []
    for step in range(12):
        collected = supply.next(step)
        assert draws(collected.rollouts) == [3 * step, 3 * step + 1, 3 * step + 2]
        seen += [r.id for r in collected.rollouts]
        ages += [step - int(r.policy_version.max()) for r in collected.rollouts]
        engine.version = step + 1  # the update
        time.sleep(0.002)
    assert len(seen) == len(set(seen)) == 12 * 6
    assert max(ages) == min(staleness, 11) and min(ages) >= 0
    assert len(engine.asked) == 12 * 6  # nothing is drawn past the last step


def test_without_staleness_nothing_is_sampled_ahead(collector):
    engine = FakeEngine()
    supply = make_supply(collector, engine.generate)
    assert supply.next(0).ready == 0
    time.sleep(0.05)
    assert len(engine.asked) == 6


def test_sampling_goes_on_while_the_trainer_works(collector):
    engine = FakeEngine()
    supply = make_supply(collector, engine.generate, staleness=2)
    supply.next(0)
    time.sleep(0.2)
    assert len(engine.asked) == 18
    assert supply.next(1).ready >= 3


# Giving back ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_is_given_back_is_drawn_again_with_the_same_seeds(collector, staleness):
    engine = FakeEngine()
    supply = make_supply(collector, engine.generate, staleness=staleness)
    first = supply.next(0)
    second = supply.next(1)
    supply.roll_back()
    again = supply.next(1)
    assert [r.id for r in again.rollouts] == [r.id for r in second.rollouts]
    assert [r.token_ids.tolist() for r in again.rollouts] == [r.token_ids.tolist() for r in second.rollouts]
    assert draws(first.rollouts) == [0, 1, 2]
    assert [draws(supply.next(step).rollouts) for step in (2, 3)] == [[6, 7, 8], [9, 10, 11]]


def test_a_failed_or_late_step_can_be_tried_again(collector):
    engine, patient = FakeEngine(), threading.Event()

    async def generate(request):
        if not patient.is_set():
            await asyncio.sleep(3600)
        return await engine.generate(request)

    supply = make_supply(collector, generate, staleness=1, deadline=0.4)
    with pytest.raises(WaitTimeoutError, match=r"rollouts \(3 of 3 groups open\)"):
        supply.next(0)
    supply.roll_back()
    patient.set()
    assert draws(supply.next(0).rollouts) == [0, 1, 2]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_state_names_the_draws_that_are_under_way(collector, staleness):
    engine = FakeEngine(lambda request: 0.001)
    supply = make_supply(collector, engine.generate, staleness=staleness)
    for step in range(3):
        supply.next(step)
    state = supply.state_dict()
    expected = [[r.token_ids.tolist() for r in supply.next(step).rollouts] for step in (3, 4, 5)]
    other = make_supply(collector, engine.generate, staleness=staleness)
    other.load_state_dict(state)
    assert len(state["owed"]) <= 3 * staleness
    assert [[r.token_ids.tolist() for r in other.next(step).rollouts] for step in (3, 4, 5)] == expected


# Refilling -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    good=st.sets(st.sampled_from([t.id for t in TASKS]), min_size=2),
    staleness=st.sampled_from([0, 1]),
)
def test_dynamic_sampling_trains_on_the_shortest_run_of_draws_with_enough_useful_groups(
    collector, seed, good, staleness
):
    """Whatever finishes first."""
    order = random.Random(seed)
    engine = FakeEngine(lambda request: 0.0005 * order.randrange(6))
    options = {"dynamic_sampling": {"attempts": 9}, "staleness": staleness}
    supply = make_supply(collector, engine.generate, useful=lambda task: task.id in good, last=3, **options)
    taken, dropped = [], []
    for step in range(3):
        collected = supply.next(step)
        taken.append(draws(collected.rollouts))
        dropped.append(draws(collected.dropped))
    useful = [n for n in range(200) if TASKS[n % 7].id in good]
    if staleness == 0:
        assert taken == [useful[:3], useful[3:6], useful[6:9]]
        last = -1
        for kept, left in zip(taken, dropped, strict=True):
            assert left == [n for n in range(last + 1, kept[-1]) if n not in useful]
            last = kept[-1]
    seen = sorted(n for group in (*taken, *dropped) for n in group)
    assert len(seen) == len(set(seen))
    assert all(n in useful for group in taken for n in group)


def test_the_attempts_are_bounded_and_the_step_is_as_large_as_ever(collector):
    engine = FakeEngine()
    useful = lambda task: task.id == "t4"  # noqa: E731
    supply = make_supply(collector, engine.generate, useful=useful, dynamic_sampling={"attempts": 2})
    collected = supply.next(0)
    assert draws(collected.rollouts) == [0, 1, 4]
    assert draws(collected.dropped) == [2, 3, 5]
    assert draws(supply.next(1).rollouts + supply.next(2).rollouts)[0] == 6


def test_what_over_sampling_leaves_is_kept_and_what_is_unfinished_is_drawn_again(collector):
    """Draw 1 is slow: the step goes on without it; 3 and 4, not needed, are the next step's."""
    slow = {seed_of(0, 1, member, 0) for member in (0, 1)}
    engine = FakeEngine(lambda request: 60.0 if request.seed in slow else 0.0)
    supply = make_supply(collector, engine.generate, dynamic_sampling={"oversample": 1.7})  # 6 open at first
    start = time.monotonic()
    assert draws(supply.next(0).rollouts) == [0, 2, 3]
    assert time.monotonic() - start < 30
    state = supply.state_dict()
    assert [number for number, _ in state["owed"]] == [1, 4, 5]
    slow.clear()
    assert draws(supply.next(1).rollouts) == [1, 4, 5]
    assert draws(supply.next(2).rollouts) == [6, 7, 8]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), staleness=st.sampled_from([0, 1, 2]), oversample=st.floats(1, 2))
def test_over_sampling_loses_nothing_and_its_age_is_bounded(collector, seed, staleness, oversample):
    order = random.Random(seed)
    engine = FakeEngine(lambda request: 0.0005 * order.randrange(6))
    dynamic_sampling = {"oversample": oversample, "attempts": 5}
    supply = make_supply(
        collector,
        engine.generate,
        useful=lambda t: t.id != "t3",
        dynamic_sampling=dynamic_sampling,
        staleness=staleness,
    )
    seen = []
    for step in range(6):
        collected = supply.next(step)
        assert len(collected.rollouts) == 6
        seen += draws(collected.rollouts + collected.dropped)
        assert step - min(int(r.policy_version[r.sampled].min()) for r in collected.rollouts) <= 2 * staleness + 1
        engine.version = step + 1
    owed = [number for number, _ in supply.state_dict()["owed"]]
    assert sorted(seen + owed) == list(range(len(seen) + len(owed)))
    supply.roll_back()


def test_a_group_that_was_left_over_too_long_is_sampled_again(collector):
    """Steps that end out of order may leave more groups than the next one needs."""
    engine = FakeEngine()
    supply = make_supply(collector, engine.generate, dynamic_sampling={})
    old = groups(supply.next(0).rollouts)
    engine.version = 1
    supply.next(1)
    supply._surplus = old
    engine.version = 2
    collected = supply.next(2)
    assert draws(collected.rollouts) == [0, 1, 2]
    assert {int(r.policy_version.max()) for r in collected.rollouts} == {2}


def test_a_step_that_has_its_groups_does_not_wait_for_more(collector):
    """Three groups are left over while step 1 finds its draw 3 useless; its draws 4 and 5 never end."""
    endless = {seed_of(0, number, member, 0) for number in (4, 5) for member in (0, 1)}
    engine = FakeEngine(lambda request: 3600.0 if request.seed in endless else 0.0)

    def useful(task):
        if task.id == "t3":
            supply._surplus = first
        return task.id != "t3"

    supply = make_supply(collector, engine.generate, useful=useful, dynamic_sampling={}, deadline=PATIENCE)
    first = groups(supply.next(0).rollouts)
    assert draws(supply.next(1).rollouts) == [0, 1, 2]
    assert [number for number, _ in supply.state_dict()["owed"]] == [4, 5]


def test_options_of_dynamic_sampling_are_checked():
    assert RolloutConfig(dynamic_sampling={}).dynamic_sampling == DynamicSamplingConfig()
    with pytest.raises(ValueError, match="oversample"):
        RolloutConfig(dynamic_sampling={"oversample": 3})


# With the real engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_weights_published_under_way(collector, in_flight):
    """finish: each response is of one version, and of its weights; continue: versions change within responses."""
    policy = small(context=96)
    engine = HFEngine(policy, HFEngineOptions(max_rows=8), in_flight)
    assert not engine.shares_weights
    request = [collector.submit(engine.generate(_request(policy, seed, 80 if seed % 2 else 40))) for seed in range(12)]
    weights = {0: {n: p.detach().clone() for n, p in policy.trainable().items()}}
    for version in (1, 2, 3):
        time.sleep(0.02)
        shake(policy, version, 0.05)
        weights[version] = {n: p.detach().clone() for n, p in policy.trainable().items()}
        engine.publish(version, lambda: [list(policy.causal_lm.named_parameters(remove_duplicate=False))])
        assert engine.version == version
    completions = [future.result(timeout=PATIENCE) for future in request]
    versions = [sorted(set(c.versions.tolist())) for c in completions]
    assert {v for of_one in versions for v in of_one} - {0}
    assert all((np.diff(c.versions) >= 0).all() for c in completions)
    if in_flight == "continue":
        assert any(len(of_one) > 1 for of_one in versions)
        return
    assert all(len(of_one) == 1 for of_one in versions)
    for number, completion in enumerate(completions):
        for name, parameter in policy.trainable().items():
            parameter.data.copy_(weights[int(completion.versions[0])][name])
        rollout = _rollout(policy, number, completion)
        assert np.abs(recomputed(policy, [rollout])[0] - completion.logprobs).max() < 1e-4


def _request(policy, seed, length):
    from rlvr.rollout import Request

    return Request(ids_of(policy, "abc"), Sampling(length, ignore_eos=True), seed)


def _rollout(policy, number, completion):
    from rlvr.rollout import make_rollout

    return make_rollout(Draw(number, TASKS[0]), 0, _request(policy, number, 80), completion)
