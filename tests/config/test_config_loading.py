"""The configuration: strict keys, overrides, presets, stages, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from rlvr.config import Config, RewardSpec, Section
from rlvr.config.config_loading import config_file, config_tree, load_config, make_config, recipe_files
from rlvr.config.stage_plan import stage_plans
from rlvr.core.tree import merge, read_yaml
from rlvr.errors import ConfigError
from small_pieces import PIECES

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("**/*.yaml"))
CONFIGS = [path for path in CONFIGS if path.parent.name != "accelerate"]  # those are accelerate's own
CONFIGS += recipe_files().values()


def refusal(tree=None, overrides=(), stages=False) -> str:
    with pytest.raises(ConfigError) as caught:
        stage_plans(load_config(tree, overrides)) if stages else load_config(tree, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tree", "place", "meant"),
    [
        ({"rollouts": {}}, "rollouts", "rollout"),
        ({"rollout": {"group_sise": 4}}, "rollout.group_sise", "group_size"),
        ({"rollout": {"group-size": 4}}, "rollout.group-size", "group_size"),
        ({"model": {"scratch": {"layer": 2}}}, "model.scratch.layer", "layers"),
        ({"model": {"adapter": {"rank": 2, "alfa": 3}}}, "model.adapter.alfa", "alpha"),
        ({"models": {"rm": {"pth": "x"}}}, "models.rm.pth", "path"),
        ({"algorithm": {"kl": {"coeff": 0.1}}}, "algorithm.kl.coeff", "coef"),
        ({"algorithm": {"entropy": {"schedule": "linear", "start": 0, "ned": 1}}}, "algorithm.entropy.ned", "end"),
        ({"logging": {"wandb": {"projct": "x"}}}, "logging.wandb.projct", "project"),
    ],
)
def test_unknown_keys_suggest_the_nearest_name(tree, place, meant):
    message = refusal(tree)
    assert f"  {place}: unknown key; did you mean {meant!r}?" in message


@pytest.mark.parametrize(
    ("tree", "place", "value"),
    [
        ({"run": {"steps": "many"}}, "run.steps", "'many'"),
        ({"run": 3}, "run", "3"),
        ({"rollout": {"temperature": "hot"}}, "rollout.temperature", "'hot'"),
        ({"rollout": {"top_p": 1.5}}, "rollout.top_p", "1.5"),
        ({"optim": {"lr": -1}}, "optim.lr", "-1"),
        ({"optim": {"schedule": "square"}}, "optim.schedule", "'square'"),
        ({"model": {"adapter": {"target_modules": 3}}}, "model.adapter.target_modules", "3"),
        ({"logging": {"wandb": "perhaps"}}, "logging.wandb", "'perhaps'"),
        ({"evaluation": {"k": [1, "two"]}}, "evaluation.k[1]", "'two'"),
        ({"verifier": 3}, "verifier", "3"),
        ({"rewards": ["verdict", 3]}, "rewards[1]", "3"),
        ({"stages": [3]}, "stages[0]", "3"),
    ],
)
def test_ill_typed_values_are_named_once_with_key_and_value(tree, place, value):
    lines = refusal(tree).splitlines()[1:]
    assert len(lines) == 1
    assert lines[0].startswith(f"  {place}: ")
    assert lines[0].endswith(f"not {value}")


def test_all_problems_are_listed():
    message = refusal(
        {"rollout": {"group_size": 0}, "optim": {"lr": "x"}, "run": {"nme": "a"}, "algorithm": {"preset": "grop"}}
    )
    for part in (
        "rollout.group_size",
        "optim.lr",
        "run.nme",
        "algorithm.preset: there is no preset 'grop'; did you mean 'grpo'?",
    ):
        assert part in message


def test_exclusive_options_are_refused():
    assert "exclude each other" in refusal({"optim": {"micro_batch_size": 1, "micro_batch_tokens": 9}})
    assert "exclude each other" in refusal({"model": {"path": "a", "scratch": {}}})
    assert "pass@8" in refusal({"evaluation": {"samples": 4, "k": [1, 8]}})


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=1e-6", "optim.lr", 1e-6),
        ("optim.lr=1.5e0", "optim.lr", 1.5),
        ("optim.lr=2.5e-4", "optim.lr", 2.5e-4),
        ("rollout.group_size=16", "rollout.group_size", 16),
        ("run.steps=null", "run.steps", None),
        ("model.attention=", "model.attention", ""),
        ("run.name='a=b.c'", "run.name", "a=b.c"),
        ("rollout.stop=[a, b]", "rollout.stop", ["a", "b"]),
        ("logging.wandb=true", "logging.wandb", True),
        ("logging.console=off", "logging.console", "off"),
        ("run.overwrite=yes", "run.overwrite", True),
        ("evaluation.k=[1, 2]", "evaluation.k", [1, 2]),
        ("rewards=[{name: length, weight: -1e-3}]", "rewards", [RewardSpec("length", {}, {"weight": -1e-3})]),
        ("data.train={path: x.jsonl, limit: 3}", "data.train", {"path": "x.jsonl", "limit": 3}),
    ],
)
def test_overrides_are_yaml(override, key, value):
    result = load_config({"run": {"steps": 3}}, [override])
    for part in key.split("."):
        result = getattr(result, part)
    assert result == value


@pytest.mark.parametrize("override", ["run.steps", "=3", "optim.lr=[", "  =1"])
def test_malformed_overrides_are_refused(override):
    assert "override" in refusal(None, [override]) or "not YAML" in refusal(None, [override])


def test_overrides_reach_into_lists(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "stages: [{kind: sft, steps: 2}, {kind: grpo, steps: 5}]\nrewards: [verdict, {name: format, weight: 1}]"
    )
    config = load_config(
        file, ["stages.1.steps=7", "stages.1.optim.lr=0.5", "rewards.1.weight=2", "rewards.0=constant"]
    )
    assert config.stages == [{"kind": "sft", "steps": 2}, {"kind": "grpo", "steps": 7, "optim": {"lr": 0.5}}]
    assert [term.written for term in config.rewards] == ["constant", {"name": "format", "weight": 2}]
    with pytest.raises(ConfigError, match=r"stages.2: there are 2 items, numbered from 0"):
        load_config(file, ["stages.2.steps=1"])


def test_pieces_are_overridden_whole_or_by_option():
    tree = {"verifier": {"name": "math", "tolerance": 0.5}, "data": {"sampler": "shuffle"}}
    assert load_config(tree, ["verifier=exact"]).verifier.name == "exact"
    assert load_config(tree, ["verifier.tolerance=0.1"]).verifier.written == {"name": "math", "tolerance": 0.1}
    assert load_config(tree, ["verifier.name=math"]).verifier.written == {"name": "math", "tolerance": 0.5}
    assert load_config(tree, ["verifier={name: exact, casefold: true}"]).verifier.written == {
        "name": "exact",
        "casefold": True,
    }
    assert load_config({"verifier": "exact"}, ["verifier.casefold=true"]).verifier.written == {
        "name": "exact",
        "casefold": True,
    }
    assert load_config({"optim": {"optimizer": "sgd"}}, ["optim.optimizer.momentum=0.9"]).optim.optimizer.written == {
        "name": "sgd",
        "momentum": 0.9,
    }


def test_a_section_with_a_name_is_no_piece():
    run = load_config({"run": {"name": "a", "steps": 7, "dir": "d"}}, ["run.name=b"]).run
    assert (run.name, run.steps, run.dir) == ("b", 7, "d")


@pytest.mark.parametrize("kind", ["mapping", "name"])
def test_merge_leaves_its_arguments_alone(kind):
    base, over = {"a": {"b": [1]}, "p": "x"}, {"a": {"b": [2]}, "p": {"q": 1}}
    assert merge(base, over) == {"a": {"b": [2]}, "p": {"name": "x", "q": 1}}
    assert base == {"a": {"b": [1]}, "p": "x"}


def test_presets_lie_under_what_is_written():
    plain = load_config({}).algorithm
    assert plain.preset == "grpo"
    assert plain.loss.written == {"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "sequences"}
    mine = load_config({"algorithm": {"loss": {"clip_high": 0.28}}}, ["algorithm.preset=dr_grpo"]).algorithm
    assert mine.loss.written == {"name": "clip", "clip_low": 0.2, "clip_high": 0.28, "average": "constant"}
    assert mine.advantage.options["scale"] == "none"
    assert load_config({"algorithm": {"preset": "rloo", "advantage": "group"}}).algorithm.advantage.written == "group"


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"algorithm": {"preset": "rloo", "kl": {"coef": {"metric": "kl/ref", "target": 0.1, "initial": 0.2}}}},
        {"rollout": {"temperature": {"at": {0: 1.0, 5: 0.5}}}, "model": {"path": "x"}},
        {
            "algorithm": {"entropy": {"schedule": "cosine", "start": 0.1, "end": 0}},
            "rewards": [{"name": "length", "per": 5}],
        },
        {"model": {"scratch": {"words": ["#### "]}, "adapter": {"r": 4}}, "stages": [{"kind": "sft", "steps": 3}]},
    ],
)
def test_a_dumped_tree_loads_as_itself(tree, tmp_path):
    config = load_config(tree)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.dump(), sort_keys=False))
    again = load_config(tmp_path / "c.yaml")
    assert again.dump() == config.dump()
    assert again == config


def test_a_configuration_that_an_earlier_run_wrote_is_read():
    assert load_config({"models": {}, "model": {"path": "p"}}) == load_config({"model": {"path": "p"}})


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            {"verifier": {"name": "math", "tolerence": 1}},
            "verifier: verifier 'math' has no option 'tolerence'; did you mean 'tolerance'?",
        ),
        ({"verifier": {"name": "math", "tolerance": "much"}}, "tolerance='much'"),
        ({"verifier": "mth"}, "there is no verifier 'mth'; did you mean 'math'?"),
        ({"verifier": {"name": 3}}, "a verifier is written as a name, not 3"),
        (
            {"rewards": [{"name": "length", "pr": 3}]},
            "rewards[0]: reward 'length' has no option 'pr'; did you mean 'per'?",
        ),
        ({"rewards": [{"weight": 3}]}, "rewards[0]: a component written as a mapping needs a `name`"),
        (
            {"algorithm": {"loss": {"clip_lw": 0.1}}},
            "algorithm.loss: loss 'clip' has no option 'clip_lw'; did you mean 'clip_low'?",
        ),
        ({"algorithm": {"advantage": {"baseline": "median"}}}, "baseline='median'"),
        (
            {"algorithm": {"select": ["mixd_groups"]}},
            "algorithm.select[0]: there is no selector 'mixd_groups'; did you mean 'mixed_groups'?",
        ),
        ({"algorithm": {"kl": {"estimator": "k4"}}}, "algorithm.kl.estimator: there is no kl 'k4'"),
        ({"optim": {"optimizer": {"name": "adamw", "betas": 3}}}, "betas=3"),
        ({"data": {"sampler": "shufle"}}, "did you mean 'shuffle'?"),
        ({"rollout": {"engine": {"name": "hf", "max_row": 3}}}, "did you mean 'max_rows'?"),
    ],
)
def test_pieces_are_checked_by_their_own_options(tree, said):
    assert said in refusal(tree)


def test_options_of_a_users_piece_are_checked(tmp_path):
    (tmp_path / "p.py").write_text(PIECES)
    assert load_config({"verifier": {"name": f"{tmp_path}/p.py:Odd", "weight": "0.5"}}).verifier
    assert "has no option 'wieght'; did you mean 'weight'?" in refusal(
        {"verifier": {"name": f"{tmp_path}/p.py:Odd", "wieght": 1}}
    )
    assert "weight='heavy'" in refusal({"verifier": {"name": f"{tmp_path}/p.py:Odd", "weight": "heavy"}})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_parses(path):
    plans = stage_plans(load_config(path))
    assert all(plan.steps for plan in plans)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: [", "is not YAML"),
        ("- a\n- b\n", "a config is a mapping of sections, not list"),
        (b"\xff\xfe", "is not YAML"),
    ],
)
def test_files_that_are_no_config_are_refused(tmp_path, text, said):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said in refusal(path)
    assert str(path) in refusal(path)


def test_an_absent_file_says_where_it_was_looked_for(tmp_path):
    assert str(Path.cwd()) in refusal(tmp_path / "none.yaml")


# stages


def test_stage_overrides_lie_over_the_tree():
    config = load_config(
        {
            "run": {"seed": 3},
            "optim": {"lr": 1e-3, "warmup_steps": 4},
            "verifier": {"name": "math", "tolerance": 0.1},
            "stages": [
                {"kind": "sft", "steps": 2, "optim": {"lr": 1e-2}, "average": "sequences", "name": "warm"},
                {
                    "kind": "grpo",
                    "steps": 3,
                    "verifier": "exact",
                    "algorithm": {"preset": "dr_grpo", "loss": {"clip_high": 0.3}},
                },
            ],
        }
    )
    first, second = stage_plans(config)
    assert (first.name, first.kind, first.steps, first.options) == ("warm", "sft", 2, {"average": "sequences"})
    assert (first.config.optim.lr, first.config.optim.warmup_steps, first.config.run.seed) == (1e-2, 4, 3)
    assert first.config.verifier.written == {"name": "math", "tolerance": 0.1}
    assert (second.name, second.config.optim.lr, second.config.verifier.name) == ("grpo", 1e-3, "exact")
    assert second.config.algorithm.loss.written == {
        "name": "clip",
        "clip_low": 0.2,
        "clip_high": 0.3,
        "average": "constant",
    }
    assert config.algorithm.loss.options["average"] == "sequences"


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"steps": 3}, "stages[0]: a stage needs a `kind`: one of grpo, sft"),
        ({"kind": "sftt", "steps": 3}, "stages[0]: there is no stage 'sftt'; did you mean 'sft'?"),
        ({"kind": 3, "steps": 3}, "stages[0].kind is a name, not 3"),
        ({"kind": "sft", "steps": "three"}, "stages[0].steps: a whole number is needed, not 'three'"),
        ({"kind": "sft", "steps": -1}, "stages[0].steps: it must be greater than or equal to 0"),
        ({"kind": "sft", "steps": 1, "name": 3}, "stages[0].name: text is needed"),
        ({"kind": "sft", "steps": 1, "run": {"seed": 1}}, "stages[0].run: this section holds for the whole run"),
        ({"kind": "sft", "steps": 1, "model": {}}, "stages[0].model: this section holds for the whole run"),
        ({"kind": "sft", "steps": 1, "logging": {}}, "stages[0].logging: this section holds for the whole run"),
        ({"kind": "sft", "steps": 1, "checkpoint": {}}, "stages[0].checkpoint: this section holds for the whole run"),
        (
            {"kind": "sft", "steps": 1, "averag": "tokens"},
            "stage 'sft' has no option 'averag'; did you mean 'average'?",
        ),
        ({"kind": "sft", "steps": 1, "average": "words"}, "average='words'"),
        ({"kind": "sft", "steps": 1, "optim": {"lrr": 1}}, "stages[0].optim.lrr: unknown key; did you mean 'lr'?"),
        ({"kind": "grpo", "steps": 1, "rollout": {"engine": {"max_rows": 3}}}, "stages[0].rollout.engine: one engine"),
        ({"kind": "grpo"}, "stage 'grpo' has no number of steps: set run.steps, run.epochs or the stage's `steps`"),
    ],
)
def test_wrong_stages_are_refused_by_number_and_key(stage, said):
    assert said in refusal({"stages": [stage]}, stages=True)


@pytest.mark.parametrize(
    ("cap", "steps", "shares", "allowed"),
    [
        (None, (2, 3), [2, 3], [2, 3]),
        (10, (2, 3), [2, 3], [2, 3]),
        (4, (2, 3), [2, 3], [2, 2]),
        (1, (2, 3), [2, 3], [1, 0]),
        (7, (2, None), [2, 5], [2, 5]),
        (7, (None,), [7], [7]),
        (0, (2, 3), [2, 3], [0, 0]),
    ],
)
def test_run_steps_cap_the_stages_shares(cap, steps, shares, allowed):
    stages = [{"kind": "grpo", **({} if n is None else {"steps": n})} for n in steps]
    plans = stage_plans(load_config({"run": {"steps": cap}, "stages": stages}))
    assert [plan.steps for plan in plans] == shares
    assert [plan.allowed for plan in plans] == allowed


# docstrings


def sections(model: type[BaseModel], seen: dict | None = None) -> dict[str, type[BaseModel]]:
    seen = {} if seen is None else seen
    seen[model.__name__] = model
    for field in model.model_fields.values():
        for one in _models_in(field.annotation):
            if one.__name__ not in seen:
                sections(one, seen)
    return seen


def _models_in(hint):
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for argument in getattr(hint, "__args__", ()):
        yield from _models_in(argument)


def test_every_field_says_what_it_is():
    result = sections(Config)
    assert {"RunConfig", "LoraConfig", "ScratchConfig", "KLConfig", "Schedule", "Controller", "WandbConfig"} <= set(
        result
    )
    silent = [
        f"{name}.{key}"
        for name, model in result.items()
        for key, field in model.model_fields.items()
        if not (field.description or "").strip()
    ]
    assert silent == []
    assert [name for name, model in result.items() if issubclass(model, Section) and not model.__doc__] == []


def test_assignment_is_checked_too():
    config = make_config({})
    with pytest.raises(ValueError, match="lr"):
        config.optim.lr = -1


def test_words_that_begin_like_a_truth_value_or_a_number_are_words():
    text = "{false_negative: 0.1, a: true_north, b: 1e-6, c: 1e6th, d: false, e: off}"
    assert read_yaml(text, "text") == {
        "false_negative": 0.1,
        "a": "true_north",
        "b": 1e-6,
        "c": "1e6th",
        "d": False,
        "e": "off",
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {name: a}\noptim: {lr: 1}\nrun: {steps: 3}\n", 3),
        ("run:\n  name: a\n  name: a\n", 3),
        ("run: {name: a, name: b}\n", 1),
        ("rewards:\n  - verdict\n  - {name: gate, by: format, by: verdict}\n", 3),
        ("run: &run {name: a}\nother: *run\nstages: [{kind: sft, 'kind': grpo}]\n", 3),
    ],
)
def test_a_key_that_is_written_twice_is_refused(tmp_path, text, line):
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"twice\.yaml, line {line}, .*is written twice, first in line \d: keep one"):
        config_tree(path)


def test_merged_and_shared_mappings_have_each_key_once():
    text = "base: &base {a: 1, b: 2}\nmore: &more {c: 3}\nboth: {<<: *base, b: 4}\nall: {<<: [*base, *more]}\n"
    text += "1: x\n'1': y\n"
    read = read_yaml(text, "text")
    assert read["both"] == {"a": 1, "b": 4}
    assert read["all"] == {"a": 1, "b": 2, "c": 3}
    assert (read[1], read["1"]) == ("x", "y")  # a number and a text
    with pytest.raises(
        ConfigError, match=r"the value in 'rollout=\{top_k: 1, top_k: 2\}' is not YAML: .*'top_k' is written twice"
    ):
        load_config({}, ["rollout={top_k: 1, top_k: 2}"])


def test_what_a_published_recipe_says_of_itself_is_no_setting():
    assert load_config({"recipe": {"title": "x"}, "run": {"steps": 2}}).run.steps == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("configs/mine.yaml", r"there is no config file configs/mine\.yaml \(looked in [^)]*\)$"),
        ("mine.yaml", r"there is no config file mine\.yaml \(looked in [^)]*\)$"),
        ("folder", "^folder is a folder: give a YAML file"),
        ("psrr", "no published recipe of this name; did you mean 'psr'"),
        ("something-else-entirely", r"no published recipe of this name; `\S.*recipes` lists them$"),
    ],
)
def test_a_configuration_that_is_not_there_is_answered_in_one_short_line(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=said) as raised:
        config_file(name)
    assert len(str(raised.value)) < 250 + len(str(tmp_path))


def test_the_run_folder_may_be_below_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config({"run": {"dir": "~/runs", "name": "first"}}).folder == tmp_path / "runs" / "first"
