"""Advantages per token reach the gradient, or are refused by name before training."""

from __future__ import annotations

import pytest

from rlvr.errors import ConfigError

GSPO = {"preset": "gspo"}
GMPO = {"preset": "gmpo"}
SEQUENCE = {"loss": {"name": "clip", "ratio": "sequence"}}
RESPONSES = {"preset": "copg"}


@pytest.mark.parametrize("loss", [GSPO, GMPO, SEQUENCE, RESPONSES], ids=["gspo", "gmpo", "sequence", "copg"])
@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        ({"advantage": "prefix_tree"}, "prefix_tree"),
        ({"advantage": "spans"}, "spans"),
        ({"advantage": "optimal_token"}, "optimal_token"),
        ({"modifiers": ["surprise"]}, "surprise"),
        ({"modifiers": ["entropy"]}, "entropy"),
        ({"modifiers": ["confidence"]}, "confidence"),
    ],
)
def test_an_advantage_per_token_is_refused_where_a_loss_has_one_ratio_per_response(
    make_trainer, loss, algorithm, named
):
    with pytest.raises(ConfigError, match=rf"'{named}' gives an advantage per token.*gspo_token"):
        make_trainer({"algorithm": {**loss, **algorithm}})


def test_a_penalty_in_the_advantage_is_one_per_token(make_trainer):
    penalty = {"kl": {"coef": 0.1, "where": "advantage"}}
    with pytest.raises(ConfigError, match=r"'kl.where: advantage' gives an advantage per token.*gspo_token"):
        make_trainer({"algorithm": {**GSPO, **penalty}})
    over = {"algorithm": {"preset": "gspo_token", **penalty, "modifiers": ["surprise"]}, "run": {"steps": 1}}
    with make_trainer(over, "tokens") as trainer:
        (row,) = trainer.train()
    assert row["grad_norm"] > 0


def test_a_piece_that_does_not_say_so_is_refused_when_it_gives_tokens(make_trainer, pieces):
    pieces.write_text(
        pieces.read_text()
        + "\ndef undeclared(batch, advantage):\n    return [np.zeros(len(r)) for r in batch.rollouts]\n"
    )
    trainer = make_trainer({"algorithm": {**GSPO, "modifiers": [f"{pieces}:undeclared"]}, "run": {"steps": 1}})
    with pytest.raises(ConfigError, match=r"undeclared.*gives an advantage per token.*gspo_token"):
        trainer.train()
