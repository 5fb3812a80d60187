"""Components as configurations write them: parsed once, and written as they were."""

from __future__ import annotations

import pytest

from rlvr import registry
from rlvr.core.specs import ComponentSpec
from rlvr.errors import ConfigError


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
    with pytest.raises(ConfigError, match="a piece written as a mapping needs a `name`"):
        ComponentSpec.parse({"tolerance": 1})


def test_the_registry_takes_specs_names_and_mappings():
    spec = ComponentSpec("math", {"tolerance": 0.5})
    built = [registry.build("verifier", given) for given in (spec, spec.written)]
    assert [verifier.tolerance for verifier in built] == [0.5, 0.5]
    assert type(registry.build("verifier", ComponentSpec("math"))) is type(registry.build("verifier", "math"))
