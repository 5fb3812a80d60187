"""Losses that read parts of the advantage, the columns `advantage/NAME`: made by the estimator, or refused at the
start."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlvr.errors import ConfigError

USER = """
from dataclasses import dataclass
import numpy as np
from rlvr.core.needs import Need
from rlvr.losses import LossTerm

class Halves:
    \"\"\"GRPO without a scale, and a quarter of it and the rest as columns.\"\"\"
    makes = ("advantage/quarter", "advantage/rest")

    def __call__(self, batch):
        from rlvr.advantages import group_advantage
        values = group_advantage(batch.column("reward"), batch.group_index(), scale="none")
        batch.columns["advantage/quarter"] = values / 4
        # By token: a part may have either form.
        batch.token_columns["advantage/rest"] = [
            np.full(len(r), 3 * v / 4) for r, v in zip(batch.rollouts, values, strict=True)
        ]
        return values

class Forgets(Halves):
    makes = ("advantage/quarter", "advantage/rest", "advantage/third")

@dataclass(frozen=True)
class Sum:
    average = "tokens"
    needs = frozenset({Need("logprobs", grad=True)})
    reads = ("advantage/quarter", "advantage/rest")

    def __call__(self, tokens, over):
        parts = tokens.columns["advantage/quarter"] + tokens.columns["advantage/rest"]
        return LossTerm(-tokens.average(parts * tokens.logprobs, self.average, over))

class Whole(Sum):
    reads = ()

    def __call__(self, tokens, over):
        return LossTerm(-tokens.average(tokens.advantage * tokens.logprobs, self.average, over))
"""
LEARNED = {"auxiliary": [{"name": "likelihood", "on": "demonstrations"}]}


@pytest.fixture
def user(tmp_path):
    """`user(NAME)`: a component of the file above."""
    path = tmp_path / "user.py"
    path.write_text(USER)
    return lambda name: f"{path}:{name}"


@pytest.mark.parametrize(
    "beside",
    [{}, LEARNED, {**LEARNED, "demonstrations": "sampled"}, {**LEARNED, "supervised_steps": {"warmup": 1, "gamma": 1}}],
    ids=["sampled alone", "demonstrations", "demonstrations of all draws", "supervised steps"],
)
def test_the_parts_sum_to_the_advantage_whatever_is_learned_beside_them(make_trainer, user, beside):
    """The same steps by the sum of the parts and by the advantage itself."""
    rows = {}
    for loss in ("Sum", "Whole"):
        algorithm = {"loss": user(loss), "advantage": user("Halves"), "correction": None, **beside}
        rows[loss] = make_trainer({"run": {"steps": 4}, "algorithm": algorithm}, loss).train()
    norms = {loss: [row["grad_norm"] for row in of_loss] for loss, of_loss in rows.items()}
    assert all(math.isfinite(norm) for norm in norms["Sum"]) and any(norm > 0 for norm in norms["Sum"])
    np.testing.assert_allclose(norms["Sum"], norms["Whole"], rtol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"advantage": "group"},
            r"the loss .*:Sum' reads the column 'advantage/quarter', which the advantage 'group' does not make: no "
            "advantage does; an estimator lists its columns in `makes`",
        ),
        ({"advantage": "consistency"}, "'advantage/quarter', which the advantage 'consistency' does not make"),
        ({"modifiers": ["whiten"]}, "which algorithm.modifiers does not change"),
        ({"kl": {"coef": 0.1, "where": "advantage"}}, "which algorithm.kl.where: advantage does not change"),
        ({"advantage": "Forgets"}, "says that it makes 'advantage/third', and added no such column"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused(make_trainer, user, algorithm, message):
    written = {"loss": user("Sum"), "advantage": user("Halves"), "correction": None, **algorithm}
    if written["advantage"] == "Forgets":
        written["advantage"] = user("Forgets")
    with pytest.raises(ConfigError, match=message) as refused:
        make_trainer({"algorithm": written}).train(1)
    assert "\n" not in str(refused.value)


def test_a_term_of_the_loss_is_refused_like_the_loss(make_trainer, user):
    with pytest.raises(ConfigError, match=r"the auxiliary loss 'Sum' reads the column 'advantage/quarter', which the"):
        make_trainer({"algorithm": {"auxiliary": [{"name": user("Sum")}]}})


def test_a_stage_of_demonstrations_has_no_parts(make_trainer, user):
    with pytest.raises(ConfigError, match="reads the column 'advantage/quarter', and the demonstrations of an sft"):
        make_trainer({"stages": [{"kind": "sft", "steps": 1, "loss": user("Sum")}]})
