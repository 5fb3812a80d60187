"""Tasks that a plan makes: rewards may name their sources, they leave no history, and their rollouts have metrics of
their own role."""

from __future__ import annotations

import pytest

from rlvr.errors import ConfigError

PLAN = '''
import dataclasses
from dataclasses import dataclass
from rlvr.records import Task
from rlvr.rollout.engine import Request
from rlvr.rollout.plans import RolloutPlan, make_rollout, side_by_side

@dataclass(frozen=True)
class Checks(RolloutPlan):
    """Each response, and one that judges it, as a task of the source `check` in a group of its own."""

    sources = ("check",)

    async def __call__(self, draw, context):
        async def member(number):
            request = Request(context.encode(draw.task), context.sampling, context.seed(draw.number, number, 0))
            return make_rollout(draw, number, request, await context.generate(request))

        async for rollout in side_by_side(draw, context, member):
            yield rollout
        for number in range(2):
            task = Task(id=f"check-{draw.number}", prompt="3=", answer="3", source="check")
            request = Request(context.encode(task), context.sampling, context.seed(draw.number, 100 + number, 0))
            made = make_rollout(dataclasses.replace(draw, task=task), number, request, await context.generate(request))
            yield await context.verify(
                dataclasses.replace(made, id=f"c{draw.number}/{number}", group=f"{draw.number}/check", role="checker")
            )

class Undeclared(Checks):
    sources = ()
'''


@pytest.fixture
def over(tmp_path):
    path = tmp_path / "plan.py"
    path.write_text(PLAN)
    rewards = [{"name": "verdict", "as": "own", "sources": ["sums"]}, {"name": "length", "sources": ["check"]}]
    data = tmp_path / "sums.jsonl"
    data.write_text(
        "".join(f'{{"id": "s{n}", "prompt": "{n}=?", "answer": "{n}", "source": "sums"}}\n' for n in range(4))
    )
    return {"data": {"train": str(data)}, "rollout": {"plan": f"{path}:Checks"}, "rewards": rewards}


def test_made_tasks_in_a_run(make_trainer, over):
    trainer = make_trainer(over)
    row, *_ = trainer.train(2)
    batch = trainer.batch
    made = [rollout for rollout in batch.rollouts if rollout.role == "checker"]
    own = [rollout for rollout in batch.rollouts if rollout.role == "policy"]
    assert len(made) == 4 and len(own) == 8
    assert set(trainer.rollouts.history) <= {f"s{n}" for n in range(4)}
    last = trainer.metrics[-1]
    reward = dict(zip([r.id for r in batch.rollouts], batch.column("reward").tolist(), strict=True))
    assert last["role/checker/reward/mean"] == pytest.approx(sum(reward[r.id] for r in made) / 4)
    assert last["reward/mean"] == pytest.approx(sum(reward[r.id] for r in own) / 8)
    assert (last["group/count"], last["role/checker/group/count"]) == (2, 2)
    assert last["tokens/sampled"] == sum(int(r.sampled.sum()) for r in batch.rollouts)
    assert row["grad_norm"] is not None


def test_a_source_that_the_plan_does_not_declare_is_refused(make_trainer, over):
    plan = over["rollout"]["plan"]
    with pytest.raises(ConfigError, match=r"no task is of the source 'check'.*`sources`"):
        make_trainer({**over, "rollout": {"plan": plan.replace("Checks", "Undeclared")}})
    with pytest.raises(ConfigError, match="source 'check' have no term"):
        make_trainer({**over, "rewards": over["rewards"][:1]}, "bare")
