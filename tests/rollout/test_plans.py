"""Collecting: order, failures, deadlines, interruptions, custom plans, overlap with verification."""

import asyncio
import dataclasses
import gc
import logging
import threading
import time
import warnings

import numpy as np
import pytest
from engine_helpers import PATIENCE, DrawOf, alphabet_chain, chain, context_of, ids_of, recomputed, shake, small

from rlvr import registry
from rlvr.core.seeding import seed_of
from rlvr.errors import ConfigError, WaitTimeoutError
from rlvr.records import Origin, Rollout, StopReason, Task, Verdict
from rlvr.rollout import (
    Activity,
    CollectionInterruptedError,
    Collector,
    Completion,
    HFEngine,
    HFEngineOptions,
    Request,
    Sampling,
    make_rollout,
    single_turn,
)

DEADLINE = 60.0


def draws_of(count, prompts=("abc", "kj", "fghij")):
    return [DrawOf(n, Task(f"task-{n % len(prompts)}", prompts[n % len(prompts)])) for n in range(count)]


async def marked(rollout):
    rollout.verdicts["here"] = Verdict.from_score(len(rollout.text) % 2)
    return rollout


async def numbered(request):
    """A completion at once: three tokens that tell the seed."""
    ids = np.asarray([request.seed % 7, request.seed % 11, 1])
    return Completion(ids, np.zeros(3, np.float32), np.zeros(3, np.int32), StopReason.END, "abc", 0.0)


def context_with(generate=numbered, verify=marked, policy=None, run_seed=0, **more):
    """With a policy, its own prompts and context."""
    if policy:
        more |= {"encode": lambda task: ids_of(policy, task.prompt), "context": policy.context}
    return context_of(generate, verify, seed_path=(run_seed, "rollout"), **more)


def left_over(collector):
    """Tasks still on the collector's loop, after giving them the time to end."""

    async def others():
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    until = time.monotonic() + 5
    while (tasks := collector.submit(others()).result(timeout=PATIENCE)) and time.monotonic() < until:
        time.sleep(0.01)
    return tasks


@pytest.fixture
def policy():
    return small()


@pytest.fixture
def plan_called():
    """Register a plan for one test: `plan_called(name)` is register_plan(name)."""
    mine = []

    def register(name):
        mine.append(name)
        return registry.register_plan(name)

    yield register
    for name in mine:
        registry._components["plan"].pop(name, None)


# Order and randomness


def test_results_are_in_order_however_they_finish(collector):
    finished = []

    async def verify(rollout):
        await asyncio.sleep(0.002 * ((7 * int(rollout.group) + 5 * rollout.member) % 13))
        finished.append((int(rollout.group), rollout.member))
        return await marked(rollout)

    rollouts = collector.collect(draws_of(12), single_turn, context_with(verify=verify), DEADLINE)
    places = [(int(r.group), r.member) for r in rollouts]
    assert places == [(d, m) for d in range(12) for m in range(4)]
    assert sorted(finished) == places
    assert finished != places
    assert len({r.id for r in rollouts}) == 48


def test_a_context_counts_what_was_asked_for_and_what_failed(collector):
    activity = Activity()

    async def generate(request):
        if request.seed % 2:
            raise ValueError("the engine is gone")
        return await numbered(request)

    async def plan(draw, context):
        for seed in range(5):
            try:
                completion = await context.generate(Request((1,), context.sampling, seed))
            except ValueError:
                continue
            yield await context.verify(make_rollout(draw, seed, Request((1,), context.sampling, seed), completion))

    context = context_with(generate, activity=activity)
    begun = context.sampled_at
    assert len(collector.collect(draws_of(2), plan, context, DEADLINE)) == 6
    assert activity.counts() == {"sampling": (10, 10), "verifying": (6, 6)}
    assert context.sampled_at > begun
    assert dataclasses.replace(context, group_size=1).sampled_at > context.sampled_at


def test_a_probe_samples_only_where_the_greedy_response_fails(collector):
    """Right, wrong, and a verdict that nobody could give: no group, and two whole ones."""
    requests = []

    async def generate(request):
        requests.append(request.sampling.temperature)
        return await numbered(request)

    async def verify(rollout):
        undecided = Verdict.undecided("down")
        rollout.verdicts["here"] = [Verdict.from_score(1.0), Verdict.from_score(0.0), undecided][int(rollout.group)]
        return rollout

    plan = registry.build("plan", {"name": "single_turn", "baseline": "greedy", "probe": True})
    assert not plan.independent
    rollouts = collector.collect(draws_of(3), plan, context_with(generate, verify), DEADLINE)
    assert [(r.group, r.member, r.role) for r in rollouts if r.group == "0"] == [("0", 4, "baseline")]
    for group in "12":
        assert [r.member for r in rollouts if r.group == group and r.role == "policy"] == [0, 1, 2, 3]
        assert sum(r.role == "baseline" for r in rollouts if r.group == group) == 1
    assert sorted(requests) == [0.0] * 3 + [1.0] * 8
    with pytest.raises(ConfigError, match="set baseline to greedy"):
        registry.build("plan", {"name": "single_turn", "probe": True})


def test_nothing_drawn_is_nothing_collected(collector):
    assert collector.collect([], single_turn, context_with(), DEADLINE) == []


def test_a_task_drawn_twice_gets_two_different_groups(collector, policy):
    context = context_with(HFEngine(policy).generate, policy=policy)
    draws = [DrawOf(3, Task("same", "abc")), DrawOf(8, Task("same", "abc"))]
    rollouts = collector.collect(draws, single_turn, context, DEADLINE)
    groups = {g: [tuple(r.token_ids.tolist()) for r in rollouts if r.group == g] for g in ("3", "8")}
    assert len(groups["3"]) == len(groups["8"]) == 4
    assert not set(groups["3"]) & set(groups["8"])
    assert len(set(groups["3"])) > 1

    again = collector.collect(draws[::-1], single_turn, context, DEADLINE)
    assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in rollouts]
    alone = collector.collect(draws[1:], single_turn, context, DEADLINE)
    assert [tuple(r.token_ids.tolist()) for r in alone] == groups["8"]
    context = context_with(HFEngine(policy).generate, policy=policy, run_seed=1)
    other = collector.collect(draws, single_turn, context, DEADLINE)
    assert [r.token_ids.tolist() for r in other] != [r.token_ids.tolist() for r in rollouts]


def test_a_rollout_is_the_flat_record_of_what_was_sampled(collector, policy):
    engine = HFEngine(policy)
    engine.publish(4, lambda: iter(()))
    sampling = Sampling(12, temperature=0.7)
    for rollout in collector.collect(
        draws_of(3), single_turn, context_with(engine.generate, policy=policy, sampling=sampling), DEADLINE
    ):
        prompt = ids_of(policy, rollout.task.prompt)
        n = len(prompt)
        assert tuple(rollout.token_ids[:n].tolist()) == prompt
        assert rollout.origin.tolist() == [Origin.PROMPT] * n + [Origin.POLICY] * (len(rollout) - n)
        assert np.isnan(rollout.behaviour_logprobs[:n]).all()
        assert np.isfinite(rollout.behaviour_logprobs[n:]).all()
        assert rollout.policy_version.tolist() == [-1] * n + [4] * (len(rollout) - n)
        assert rollout.temperature == 0.7
        assert [(s.kind, s.start, s.end) for s in rollout.segments] == [("turn", n, len(rollout))]
        assert rollout.text == policy.tokenizer.decode(rollout.token_ids[n:], skip_special_tokens=True)
        assert rollout.verdict is not None
        assert Rollout.from_json(rollout.to_json()).token_ids.tolist() == rollout.token_ids.tolist()


# Failures


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("where", ["generate", "verify", "plan"])
def test_what_a_plan_raises_is_raised_and_no_task_is_left(collector, where):
    async def generate(request):
        if where == "generate" and request.seed == seed_of(0, "rollout", 2, 1, 0):
            raise BrokenError("the third draw")
        await asyncio.sleep(0 if where == "generate" else 0.01)
        return await numbered(request)

    async def verify(rollout):
        if where == "verify" and rollout.group == "2":
            raise BrokenError("the third draw")
        await asyncio.sleep(3600)
        return rollout

    async def plan(draw, context):
        if where == "plan" and draw.number == 2:
            raise BrokenError("the third draw")
        async for rollout in single_turn(draw, context):
            yield rollout

    with pytest.raises(BrokenError, match="the third draw"):
        collector.collect(draws_of(6), plan, context_with(generate, verify), DEADLINE)
    assert left_over(collector) == []
    assert len(collector.collect(draws_of(2), single_turn, context_with(), DEADLINE)) == 8


def test_a_failing_engine_is_said_once_and_not_by_every_member(collector, caplog):
    """No "Task exception was never retrieved" for each of the other members."""

    async def generate(request):
        raise BrokenError("out of memory")

    with caplog.at_level(logging.ERROR), pytest.raises(BrokenError):
        collector.collect(draws_of(5), single_turn, context_with(generate), DEADLINE)
    assert left_over(collector) == []
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


def test_a_deadline_names_what_was_awaited(collector):
    async def verify(rollout):
        if rollout.group in ("1", "2"):
            await asyncio.sleep(3600)
        return rollout

    start = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"rollouts \(2 of 3 groups open\).*deadline"):
        collector.collect(draws_of(3), single_turn, context_with(verify=verify), 0.5)
    assert time.monotonic() - start < PATIENCE
    assert left_over(collector) == []
    assert len(collector.collect(draws_of(2), single_turn, context_with(), DEADLINE)) == 8


def test_half_of_a_deadline_is_said_in_the_log(collector, caplog):
    async def verify(rollout):
        await asyncio.sleep(3600)

    with caplog.at_level(logging.WARNING), pytest.raises(WaitTimeoutError):
        collector.collect(draws_of(1), single_turn, context_with(verify=verify), 0.6)
    assert any("still waiting for rollouts (1 of 1 groups open)" in r.getMessage() for r in caplog.records)


def test_an_interrupted_collection_is_given_up_and_the_engine_goes_on(policy, monkeypatch):
    want = threading.Event()
    collector = Collector(want.is_set)
    try:
        engine = HFEngine(policy, HFEngineOptions(max_rows=16))
        context = context_with(engine.generate, policy=policy)
        expected = [r.token_ids.tolist() for r in collector.collect(draws_of(6), single_turn, context, DEADLINE)]

        real, calls = engine._decoder.read, []

        def slow(*inputs, **options):
            calls.append(0)
            if len(calls) == 5:
                want.set()
            time.sleep(0.05 if len(calls) < 12 else 0)
            return real(*inputs, **options)

        monkeypatch.setattr(engine._decoder, "read", slow)
        with pytest.raises(CollectionInterruptedError):
            collector.collect(draws_of(20), single_turn, context_with(engine.generate, policy=policy), DEADLINE)
        assert left_over(collector) == []
        calls_then = len(calls)
        want.clear()
        time.sleep(0.05)
        assert len(calls) == calls_then  # nothing is decoded on for nobody

        again = collector.collect(draws_of(6), single_turn, context, DEADLINE)
        assert [r.token_ids.tolist() for r in again] == expected
    finally:
        collector.close()


def test_closing_with_work_open_ends_it_quietly(policy, caplog):
    """The engine's own task too: another collector can use the engine afterwards."""
    engine, collector = HFEngine(policy), Collector()
    request = Request((5, 6), Sampling(90, ignore_eos=True), 0)
    with caplog.at_level(logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("error")
        open_request = collector.submit(engine.generate(request))
        while engine._active is None:
            time.sleep(0.001)
        collector.close()
        assert not collector._thread.is_alive()
        collector.close()  # twice is fine
        assert open_request.cancelled()
        del open_request
        gc.collect()
    assert [r.getMessage() for r in caplog.records] == []

    other = Collector()
    try:
        assert len(other.submit(engine.generate(request)).result(timeout=PATIENCE).token_ids) == 90
    finally:
        other.close()


def test_it_works_where_a_loop_is_running(collector, policy):
    """In a notebook, say."""

    async def main():
        return collector.collect(
            draws_of(3), single_turn, context_with(HFEngine(policy).generate, policy=policy), DEADLINE
        )

    assert len(asyncio.run(main())) == 12


# Plans


def test_a_plan_of_ones_own_may_ask_as_often_as_it_likes(collector, policy, plan_called):
    """Retry with a hint: the first answer is kept; where it is wrong, a second one follows the hint in one context."""
    shake(policy, 1)

    @plan_called("retry_with_hint_for_this_test")
    async def retry(draw, context, *, hint="j1\n"):
        prompt = context.encode(draw.task)
        for member in range(context.group_size):
            request = Request(prompt, context.sampling, context.seed(draw.number, member, 0))
            first = await context.verify(make_rollout(draw, member, request, await context.generate(request)))
            if first.verdict.score == 1:
                yield first
                continue
            hinted = (*first.token_ids.tolist(), *ids_of(policy, hint))
            request = Request(hinted, context.sampling, context.seed(draw.number, member, 1))
            second = make_rollout(draw, member, request, await context.generate(request))
            told = len(first)
            second.origin[:told] = first.origin
            second.behaviour_logprobs[:told] = first.behaviour_logprobs
            second.policy_version[:told] = first.policy_version
            second.origin[told : len(hinted)] = Origin.HINT
            yield await context.verify(second)

    plan = registry.build("plan", {"name": "retry_with_hint_for_this_test", "hint": "k0\n"})
    context = context_with(HFEngine(policy).generate, policy=policy)
    rollouts = collector.collect(draws_of(4), plan, context, DEADLINE)
    assert [(int(r.group), r.member) for r in rollouts] == [(d, m) for d in range(4) for m in range(4)]
    hinted = [r for r in rollouts if (r.origin == Origin.HINT).any()]
    assert 0 < len(hinted) < len(rollouts)
    for rollout in hinted:
        at = rollout.origin == Origin.HINT
        assert rollout.token_ids[at].tolist() == list(ids_of(policy, "k0\n"))
        assert np.isnan(rollout.behaviour_logprobs[at]).all()
        assert np.flatnonzero(rollout.sampled)[0] < np.flatnonzero(at)[0] < np.flatnonzero(rollout.sampled)[-1]
    for rollout, logprobs in zip(rollouts, recomputed(policy, rollouts), strict=True):  # N3, over both turns
        assert np.abs(rollout.behaviour_logprobs[rollout.sampled] - logprobs).max() < 1e-4


def test_groups_may_be_ragged_and_empty(collector):
    async def plan(draw, context):
        for member in range(draw.number):
            request = Request((1,), context.sampling, member)
            yield make_rollout(draw, member, request, await context.generate(request))

    rollouts = collector.collect(draws_of(4), plan, context_with(), DEADLINE)
    assert [(r.group, r.member) for r in rollouts] == [(str(d), m) for d in range(4) for m in range(d)]


# Overlap


def test_verification_overlaps_sampling(collector, policy, monkeypatch):
    """What ended early is verified, in a thread that sleeps, while the rest is being sampled."""
    policy = small(context=700)
    chain(monkeypatch, policy, alphabet_chain(policy, "abc"))
    engine, sampled, verified = HFEngine(policy), {}, {}

    async def plan(draw, context):
        request = Request(ids_of(policy, "abca"), Sampling(1 if draw.number else 600), 0)
        rollout = make_rollout(draw, 0, request, await context.generate(request))
        sampled[draw.number] = time.monotonic()
        yield await context.verify(rollout)

    async def verify(rollout):
        await asyncio.to_thread(time.sleep, 0.02)
        verified[int(rollout.group)] = time.monotonic()
        return rollout

    collector.collect(draws_of(4), plan, context_with(engine.generate, verify, policy), DEADLINE)
    assert max(verified[n] for n in (1, 2, 3)) < sampled[0]


def test_slow_verifiers_of_a_batch_run_side_by_side(collector):
    async def verify(rollout):
        await asyncio.sleep(0.2)
        return rollout

    start = time.monotonic()
    collector.collect(draws_of(20), single_turn, context_with(verify=verify), DEADLINE)
    assert time.monotonic() - start < 8  # one after the other: 16 s
