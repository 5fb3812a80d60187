"""Contracts of components: what a type checker finds, what registration refuses, and what is adapted."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlvr import registry
from rlvr.components import Advantage, Selector, SequenceLoss
from rlvr.core.component import CONTRACTS, adapted, called_as
from rlvr.core.component_checks import check_members, refuse_misspelt
from rlvr.core.schedules import ComponentList, Schedule
from rlvr.errors import ConfigError

ROOT = Path(__file__).parents[2]

USERS_FILE = """
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from rlvr.components import Advantage, Loss
from rlvr.core.needs import Need
from rlvr.losses import Average, Denominators, LossTerm, TokenBatch
from rlvr.records import Batch


class Mine(Loss):
    {needs}: frozenset[Need] = frozenset({{Need("logprobs", grad=True)}})
    average: Average = "tokens"

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        return LossTerm(tokens.average(tokens.logprobs, self.average, over))


class Centred(Advantage):
    smallest_group{of_type} = {smallest}

    @override
    def {observe}(self, metrics: Mapping[str, Any]) -> None:
        pass

    def __call__(self, batch: Batch) -> np.ndarray:
        return batch.column("reward")


loss = Mine()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # a cold run of mypy over the library takes minutes on a busy machine
def test_mypy_finds_a_misspelt_member_and_a_wrong_type(tmp_path):
    right = {"needs": "needs", "of_type": "", "smallest": "2", "observe": "observe"}
    wrong = {
        "right": ({}, None),
        "required": ({"needs": "need"}, 'Cannot instantiate abstract class "Mine" with abstract attribute "needs"'),
        "override": ({"observe": "observes"}, 'Method "observes" is marked as an override'),
        "type": ({"of_type": ": str", "smallest": "'two'"}, "Incompatible types in assignment"),
    }
    files = {name: tmp_path / f"{name}_file.py" for name in wrong}
    for name, (change, _) in wrong.items():
        files[name].write_text(USERS_FILE.format(**(right | change)))
    # What the contracts name of other libraries is of no matter here, and takes a type checker minutes.
    skipped = [
        "torch",
        "transformers",
        "pydantic",
        "numpy",
        "pydantic_core",
        "safetensors",
        "tokenizers",
        "datasets",
        "vllm",
    ]
    sections = [f"[mypy-{name}.*]\nfollow_imports = skip" for name in skipped]
    plain = "[mypy]\nfollow_imports = silent\nignore_missing_imports = true\npython_version = 3.11"
    (tmp_path / "mypy.ini").write_text("\n".join([plain, f"mypy_path = {ROOT / 'src'}", *sections]))
    options = [
        "--config-file",
        str(tmp_path / "mypy.ini"),
        "--cache-dir",
        str(tmp_path / "cache"),
        "--no-error-summary",
    ]
    command = [sys.executable, "-m", "mypy", *options, *map(str, files.values())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    for name, (_, message) in wrong.items():
        errors = [line for line in done.stdout.splitlines() if f"{name}_file.py" in line and ": error: " in line]
        if message is None:
            assert errors == []
        else:
            assert len(errors) == 1 and message in errors[0], (name, done.stdout, done.stderr)


def test_a_misspelt_member_is_refused_when_it_is_registered():
    class Base(Advantage):
        smallest_groups = 2

        def __call__(self, batch):
            return batch.column("reward")

    class Plain:
        def __call__(self, tokens, over): ...

        def chose(self, tokens): ...

    class Late:
        def __init__(self):
            self.smallest_groups = 2

        def __call__(self, batch): ...

    def function(batch): ...

    function.afters = True
    with pytest.raises(
        ConfigError, match=r"advantage .*Base: nothing reads its member 'smallest_groups'; is 'smallest_group'"
    ):
        registry.register("advantage", "misspelt")(Base)
    with pytest.raises(ConfigError, match=r"loss .*Plain: .*'chose'; is 'choose'"):
        registry.register("loss", "misspelt")(Plain)
    with pytest.raises(ConfigError, match=r"selector .*function: .*'afters'; is 'after'"):
        registry.register("selector", "misspelt")(function)
    with pytest.raises(ConfigError, match=r"advantage .*Late: .*'smallest_groups'"):
        refuse_misspelt("advantage", Late())


def test_options_private_and_other_names_are_no_slips():
    @dataclasses.dataclass
    class Mine:
        smallest_groups: int = 2
        needing: int = 0
        weight: float = 1.0

        def __post_init__(self):
            self._observes = 0
            self.seen = 0

        def __call__(self, batch):
            return self.weight * self.smallest_groups

    refuse_misspelt("advantage", Mine)
    refuse_misspelt("advantage", Mine())
    refuse_misspelt("loss", Mine)


@pytest.mark.parametrize(
    ("kind", "members", "near"),
    [
        ("advantage", {"stateDict": lambda self: {}}, "state_dict"),
        ("advantage", {"smallest_group_size": 4}, "smallest_group"),
        ("advantage", {"SmallestGroup": 4}, "smallest_group"),
        ("advantage", {"is_per_token": True}, "per_token"),
        ("advantage", {"Observe": lambda self, metrics: None}, "observe"),
        ("reward", {"ask": lambda self, batch, encode: []}, "asks"),
        ("correction", {"caps": 2.0}, "cap"),
        ("correction", {"Cap": 2.0}, "cap"),
        ("loss", {"chooses": lambda self, tokens: None}, "choose"),
        ("plan", {"answer_character": 10}, "answer_characters"),
        ("plan", {"independant": True}, "independent"),
        ("sampler", {"orders": lambda self, epoch, size: []}, "order"),
        ("verifier", {"check_tasks": lambda self, task: None}, "check_task"),
    ],
)
def test_slips_that_are_refused(kind, members, near):
    importlib.import_module(registry.PACKAGES[kind])
    with pytest.raises(ConfigError, match=f"is '{near}' meant"):
        refuse_misspelt(kind, type("Mine", (), members))


def test_an_option_that_nothing_reads_is_a_slip_too():
    @dataclasses.dataclass(frozen=True)
    class Field(Advantage):
        smallest_groups: int = 100

        def __call__(self, batch): ...

    class Parameter(Advantage):
        def __init__(self, smallest_groups=100):
            self.smallest_groups = smallest_groups

        def __call__(self, batch): ...

    with pytest.raises(ConfigError, match="'smallest_group' meant"):
        refuse_misspelt("advantage", Field)
    with pytest.raises(ConfigError, match="'smallest_group' meant"):
        refuse_misspelt("advantage", Parameter())


def test_the_members_that_a_refusal_lists_are_those_of_the_contract_that_is_meant():
    with pytest.raises(ConfigError, match=r"Members of Loss: .*choose") as refused:
        refuse_misspelt("loss", type("Mine", (), {"chooses": None}))
    assert "has_weights" not in str(refused.value) and "injected" not in str(refused.value)


def test_a_loss_that_wants_to_observe_is_refused():
    with pytest.raises(ConfigError, match=r"loss .*Mine: nothing calls its member 'observe'"):
        refuse_misspelt("loss", type("Mine", (), {"observe": lambda self, metrics: None}))


@pytest.mark.gate
def test_a_registered_component_is_checked_whatever_was_imported_before(tmp_path):
    code = (
        "from rlvr import register_plan\n"
        "@register_plan('mine')\n"
        "class Mine:\n"
        "    independant = True\n"
        "    async def __call__(self, draw, context): yield None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is 'independent' meant" in done.stderr


@pytest.mark.parametrize(
    ("kind", "members", "message"),
    [
        ("advantage", {"smallest_group": "two"}, "`smallest_group` is 'two', not a value of type int"),
        ("advantage", {"smallest_group": lambda self: 2}, "`smallest_group` is a method"),
        ("advantage", {"needs": {"entropy"}}, "`needs` holds 'entropy'"),
        ("advantage", {"needs": "entropy"}, "`needs` holds 'entropy'"),
        ("selector", {"after": 1}, "`after` is 1, not a value of type bool"),
    ],
)
def test_values_of_another_type_are_refused_with_the_name_of_the_component(kind, members, message):
    (contract,) = CONTRACTS[kind]
    made = type("Mine", (contract,), {"__call__": lambda self, batch: None, **members})()
    with pytest.raises(ConfigError, match=f"{kind} 'mine.py:Mine': its member {message}"):
        check_members(kind, "mine.py:Mine", made)


def test_a_property_is_a_value():
    made = type(
        "Mine", (Advantage,), {"__call__": lambda self, batch: None, "smallest_group": property(lambda self: 3)}
    )()
    check_members("advantage", "mine", made)


FILE = """
class Both:
    needs = frozenset()
    average = "tokens"
    def __call__(self, tokens, over): ...
    def sequence_losses(self, sequences): ...

class Meta(type): ...

class WithMetaclass(metaclass=Meta):
    def __call__(self, batch): ...

def function(tokens, over): ...

instance = Both()
"""


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("loss", "Both", r"mine\.py:Both has `.*` and `.*`, of which one would not be called"),
        ("advantage", "WithMetaclass", r"mine\.py:WithMetaclass cannot be made a Advantage .*: make it a subclass of"),
        ("loss", "instance", r"loss 'mine\.py:instance' is a Both: name a class, with its options, or a function"),
    ],
)
def test_what_cannot_be_a_component_is_refused_by_name(kind, name, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        registry.build(kind, f"mine.py:{name}")


def test_a_function_that_lacks_what_a_loss_says_is_named(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"the loss 'mine\.py:function' does not say its `needs`"):
        _ = registry.build("loss", "mine.py:function").needs


def test_an_object_with_slots_keeps_what_it_holds():
    class Slotted:
        __slots__ = ("scale",)

        def __init__(self, scale):
            self.scale = scale

        def __call__(self, batch):
            return self.scale

    made = called_as(Advantage, Slotted(3.0))
    assert made(None) == 3.0 and made.smallest_group == 1


def test_a_helper_beside_the_member_that_it_is_like_is_no_slip():
    class Both(Advantage):
        def __call__(self, batch): ...

        def observe(self, metrics): ...

        def observed(self): ...

    class Helper(Advantage):
        def __call__(self, batch): ...

        def observed(self): ...

    refuse_misspelt("advantage", Both)
    with pytest.raises(ConfigError, match="'observed'; is 'observe' meant"):
        refuse_misspelt("advantage", Helper)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("hf", {"copy_weights": True}),
        ({"name": "recorded", "path": "x"}, {"copy_weights": True}),
        ("vllm", {"max_model_len": 64, "merge_adapter": True}),
        ({"name": "vllm", "max_model_len": 32}, {"max_model_len": 32, "merge_adapter": True}),
        ("vllm-server", {"max_model_len": 64, "merge_adapter": True, "stall_timeout": 5.0}),
        (
            {"name": "vllm-server", "stall_timeout": 9.0},
            {"max_model_len": 64, "merge_adapter": True, "stall_timeout": 9.0},
        ),
    ],
)
def test_an_engine_takes_from_the_run_what_its_options_leave_open(written, expected):
    options = registry.build("engine", written)
    changed = dataclasses.asdict(options.for_run(longest=64, partitions=True, heartbeat_timeout=5.0))
    assert {name: changed[name] for name, value in dataclasses.asdict(options).items() if changed[name] != value} | {
        name: changed[name] for name in expected
    } == expected
    alone = dataclasses.asdict(options.for_run(longest=None, partitions=False, heartbeat_timeout=None))
    assert alone == dataclasses.asdict(options)


@pytest.mark.parametrize(
    ("kind", "base"), [("sampler", "rlvr.data.samplers.Sampler"), ("stage", "rlvr.stages.stage_base.Stage")]
)
def test_a_kind_whose_base_class_holds_what_it_works_with_needs_it(kind, base, tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text("class Plain:\n    def order(self, epoch, size): ...\n\n\ndef function(): ...\n")
    monkeypatch.chdir(tmp_path)
    for name in ("Plain", "function"):
        with pytest.raises(ConfigError, match=rf"{kind} 'plain.py:{name}': make it a subclass of {base}"):
            registry.check_options(kind, f"plain.py:{name}")


def test_every_kind_has_a_contract_or_is_a_function():
    functions = {"kl", "optimizer", "preset", "source"}
    for kind in registry.PACKAGES:
        importlib.import_module(registry.PACKAGES[kind])
    assert set(CONTRACTS) == set(registry.PACKAGES) - functions


def test_an_engine_without_the_base_class_has_its_defaults():
    @dataclasses.dataclass(frozen=True)
    class Mine:
        rows: int = 1

        def open(self, policy, in_flight=None): ...

    options = adapted("engine", Mine)(rows=2)
    assert options.per_rank and options.rows == 2 and options.for_run(64, True, None) is options
    with pytest.raises(ConfigError, match=r"engine .* has no `open`"):
        adapted("engine", dataclasses.make_dataclass("Empty", []))


def test_members_of_the_librarys_own_components_are_no_slips():
    # the check passes over the library's own classes, so here it is shown them as a user's
    for kind in list(CONTRACTS):
        for name in registry.names(kind):
            component = registry.find(kind, name)
            if isinstance(component, type):
                copy = type(component.__name__, (component,), {**vars(component), "__module__": "users"})
                refuse_misspelt(kind, copy)


def test_a_plain_class_and_a_function_get_the_defaults_and_keep_what_they_have():
    class Mine:
        def __init__(self, size=3):
            self.smallest_group = size

        def __call__(self, batch):
            return np.zeros(2)

    def function(batch):
        return [0]

    function.after = True
    made = adapted("advantage", Mine)(4)
    assert isinstance(made, Advantage) and isinstance(made, Mine)
    assert (made.smallest_group, made.needs, made.remembers, made.state_dict()) == (4, frozenset(), False, None)
    selector = adapted("selector", function)
    assert isinstance(selector, Selector) and selector.after and selector(None) == [0]
    responses = adapted("loss", type("Pairs", (), {"sequence_losses": lambda self, sequences: sequences}))()
    assert isinstance(responses, SequenceLoss) and responses.per_response
    with pytest.raises(ConfigError, match=r"'test_component_checks\.Pairs' does not say its `average`"):
        _ = responses.average
    with pytest.raises(ConfigError, match=r"loss .*Nothing has no `sequence_losses` or `__call__`"):
        adapted("loss", type("Nothing", (), {}))


def test_a_list_of_components_schedules_observes_and_saves_itself():
    @dataclasses.dataclass
    class Remembers(Advantage):
        weight: float = 1.0

        def __post_init__(self):
            self.seen = 0

        def observe(self, metrics):
            self.seen += metrics["n"]

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

        def __call__(self, batch):
            return self.weight

    moving = Schedule(schedule="linear", start=0.0, end=1.0)
    forgets = adapted("advantage", lambda batch: 0)
    components = ComponentList([("one", Remembers(moving)), ("two", forgets)])
    assert [(name, component(None)) for name, component in components.at(5, 10)] == [("one", 0.5), ("two", 0)]
    assert components.scheduled(5, 10) == {"schedule/one.weight": 0.5}
    components.observe({"n": 3})
    assert components.state_dict() == [{"seen": 3}, None]
    again = ComponentList([("one", Remembers()), ("two", forgets)])
    again.load_state_dict(components.state_dict())
    assert again.state_dict() == [{"seen": 3}, None]
