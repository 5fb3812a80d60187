"""Components as configurations write them: parsed once, and written as they were."""

from __future__ import annotations

import pytest

from rlvr import registry
from rlvr.config import AuxiliarySpec, Config, RewardSpec
from rlvr.config.config_loading import load_config
from rlvr.config.stage_plan import stage_plans
from rlvr.core.schedules import Schedule
from rlvr.core.specs import ComponentSpec
from rlvr.errors import ConfigError
from rlvr.run.run_folder import differences


@pytest.mark.parametrize(
    "written", ["math", {"name": "math", "tolerance": 0.5}, {"name": "checks.py:Odd", "weight": 2}]
)
def test_a_spec_is_written_as_it_was_read(written):
    spec = ComponentSpec.parse(written)
    assert spec.written == written
    assert ComponentSpec.parse(spec) is spec
    assert ComponentSpec.parse(spec.written) == spec


def test_a_mapping_without_options_is_a_name():
    assert ComponentSpec.parse({"name": "math"}) == ComponentSpec("math")
    assert ComponentSpec.parse({"name": "math"}).written == "math"


def test_options_go_over_those_that_were_there():
    spec = ComponentSpec("math", {"tolerance": 0.5, "ordered": True})
    assert spec.with_options(tolerance=0.1).options == {"tolerance": 0.1, "ordered": True}
    assert spec.options["tolerance"] == 0.5


def test_the_short_name_is_the_last_part():
    assert [ComponentSpec(name).short_name for name in ("math", "checks.py:Odd", "mine.checks:Odd")] == [
        "math",
        "Odd",
        "Odd",
    ]


def test_a_mapping_needs_a_name():
    with pytest.raises(ConfigError, match="a component written as a mapping needs a `name`"):
        ComponentSpec.parse({"tolerance": 1})


def test_the_registry_takes_specs_names_and_mappings():
    spec = ComponentSpec("math", {"tolerance": 0.5})
    built = [registry.build("verifier", given) for given in (spec, spec.written)]
    assert [verifier.tolerance for verifier in built] == [0.5, 0.5]
    assert type(registry.build("verifier", ComponentSpec("math"))) is type(registry.build("verifier", "math"))


def test_sections_hold_specs_and_write_what_they_read():
    tree = {
        "verifier": {"name": "math", "tolerance": 0.5},
        "rewards": ["verdict", {"name": "format", "template": "<a>{x}</a>", "weight": 2, "as": "form"}],
        "rollout": {"engine": "auto", "plan": {"name": "single_turn", "baseline": "greedy"}},
        "algorithm": {"auxiliary": [{"name": "dpo", "coef": {"schedule": "linear", "start": 1, "end": 0}}]},
    }
    config = load_config(tree)
    assert config.verifier == ComponentSpec("math", {"tolerance": 0.5})
    assert [type(term) for term in config.rewards] == [RewardSpec, RewardSpec]
    assert config.rollout.engine.name == "auto"
    dumped = config.dump()
    for section in ("verifier", "rewards"):
        assert dumped[section] == tree[section]
    assert {key: dumped["rollout"][key] for key in tree["rollout"]} == tree["rollout"]
    assert dumped["algorithm"]["auxiliary"] == tree["algorithm"]["auxiliary"]
    assert load_config(dumped) == config
    assert Config(verifier=config.verifier, rewards=config.rewards).rewards == config.rewards


def test_the_defaults_are_specs():
    config = Config()
    assert config.rewards == [RewardSpec("verdict")]
    assert (config.rollout.engine.written, config.optim.optimizer.written) == ("hf", "adamw")
    assert config.algorithm.correction == ComponentSpec("auto")


def test_a_term_of_the_reward_knows_its_weight_column_and_sources():
    term = RewardSpec.parse({"name": "mine.py:Form", "size": 3, "weight": 2, "sources": ["gsm8k"]})
    assert (term.name, term.options, term.weight, term.column) == ("mine.py:Form", {"size": 3}, 2.0, "Form")
    assert term.sources == ("gsm8k",)
    assert RewardSpec.parse({"name": "format", "as": "form"}).column == "form"
    assert (RewardSpec("verdict").weight, RewardSpec("verdict").sources) == (1.0, None)


def test_an_auxiliary_term_knows_its_coefficient():
    scheduled = {"schedule": "linear", "start": 1, "end": 0}
    term = AuxiliarySpec.parse({"name": "dpo", "beta": 0.2, "coef": scheduled})
    assert term.options == {"beta": 0.2}
    assert term.coef == Schedule(**scheduled)
    assert AuxiliarySpec("dpo").coef == 1.0
    with pytest.raises(ConfigError, match="coef='much'"):
        AuxiliarySpec.parse({"name": "dpo", "coef": "much"})


def test_a_checkpoint_that_wrote_a_mapping_without_options_is_of_the_same_run():
    """Older versions saved `verifier.name=math` as `{name: math}`."""
    assert list(differences({"verifier": {"name": "math"}}, {"verifier": "math"})) == []
    assert list(differences({"verifier": {"name": "exact"}}, {"verifier": "math"})) == [
        "verifier: {'name': 'exact'} -> 'math'"
    ]


def test_the_loss_of_an_sft_stage_takes_no_coefficient():
    stage = {"kind": "sft", "steps": 1, "loss": {"name": "outcome_classifier", "coef": 2}}
    with pytest.raises(ConfigError, match="auxiliary 'outcome_classifier' has no option 'coef'"):
        stage_plans(load_config({"stages": [stage]}))
