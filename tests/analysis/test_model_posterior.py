"""Training with the KL term goes to the posterior: a real run of the trainer, and the command on its folder."""

from __future__ import annotations

import json

import pytest
import yaml

from rlvr.analysis import main
from rlvr.trainer import GRPOTrainer

BETA = 0.4


@pytest.fixture
def trained(make_tree, tmp_path):
    """`trained(**algorithm)`: a run on the small run's tasks; the path of its folder and that of its configuration."""

    def train(name, kl):
        algorithm = {
            "advantage": {"name": "group", "baseline": "leave_one_out", "scale": "none"},
            "loss": {"name": "clip", "clip": "none", "average": "constant"},
            "kl": kl,
        }
        over = {
            "run": {"steps": 80},
            "rollout": {"prompts_per_step": 6, "group_size": 16, "max_new_tokens": 2},
            "algorithm": algorithm,
            "optim": {"lr": 5e-3},
            "logging": {"rollouts": 0},
        }
        tree = make_tree(over, name)
        with GRPOTrainer(config=tree) as trainer:
            trainer.train()
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return f"{tree['run']['dir']}/{name}", str(path)

    return train


@pytest.mark.slow
def test_the_kl_term_leads_to_the_posterior_and_its_absence_away(trained, capsys):
    penalised, config = trained("penalised", {"estimator": "k1", "coef": BETA, "where": "reward"})
    plain, _ = trained("plain", None)
    capsys.readouterr()
    assert main(["posterior", penalised, plain, "--config", config, "--limit", "6", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    base, kept, collapsed, posterior = table["rows"]
    assert "beta = 0.4; means over 6 prompts" in table["notes"][0]
    assert max(row["largest error"] for row in table["rows"]) < 1e-5
    # Reinforcement with the term closes most of the gap to the posterior; without it the policy passes it by.
    assert kept["KL to posterior"] < 0.5 * base["KL to posterior"]
    assert kept["KL to posterior"] < collapsed["KL to posterior"]
    assert base["J"] < kept["J"] < posterior["J"] and collapsed["J"] < kept["J"]
    assert collapsed["E[r]"] > kept["E[r]"] > base["E[r]"]
    assert collapsed["entropy"] < kept["entropy"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.temperature=0.7", "leave rollout.temperature"),
        ("rewards=[verdict, length]", "set rewards to [verdict]"),
        ("algorithm.kl=null", "give --beta"),
        ("data.train=null", "there are no tasks"),
    ],
)
def test_what_cannot_be_enumerated_is_refused(setting, message, make_tree, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(make_tree({"algorithm": {"kl": {"coef": 0.1}}})))
    assert main(["posterior", "nowhere", "--config", str(path), "--set", setting]) == 2
    assert message in capsys.readouterr().err
