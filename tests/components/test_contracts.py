"""Contracts of components: what a type checker finds, what registration refuses, and what is adapted."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlvr import registry
from rlvr.components import Advantage, Selector, SequenceLoss
from rlvr.core.component import CONTRACTS, adapted, refuse_misspelt
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

        def __post_init__(self):
            self._observes = 0
            self.seen = 0

        def __call__(self, batch): ...

    refuse_misspelt("advantage", Mine)
    refuse_misspelt("advantage", Mine())


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
    responses = adapted("loss", type("Pairs", (), {"shares": lambda self, sequences: sequences}))()
    assert isinstance(responses, SequenceLoss) and responses.per_response
    with pytest.raises(ConfigError, match="'Pairs' does not say its `average`"):
        _ = responses.average
    with pytest.raises(ConfigError, match=r"loss .*Nothing has no `shares` or `__call__`"):
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
