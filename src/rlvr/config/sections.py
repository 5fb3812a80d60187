"""The parts that sections are made of: the strict base, and fields that hold components checked against the registry.

Invariant: a component (verifier, reward, loss ...) is parsed and checked against its own options when the tree is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from rlvr import registry
from rlvr.core.schedules import Scalar
from rlvr.core.specs import ComponentSpec, SpecLike, WrittenSpec
from rlvr.core.validation_words import reason
from rlvr.errors import ConfigError

# Two adapters: a weight that is text ("1") or true is refused as a slip, while a `coef` is converted.
_SCALAR: TypeAdapter[Scalar] = TypeAdapter(Scalar)
_STRICT_SCALAR: TypeAdapter[Scalar] = TypeAdapter(Scalar, config=ConfigDict(strict=True))


@dataclass(frozen=True)
class RewardSpec(ComponentSpec):
    """A term of the reward: a reward with its weight in the sum, its column and the sources of the tasks that have
    it."""

    extra_keys = ("weight", "as", "sources")

    def __post_init__(self) -> None:
        # Read for their errors, when the configuration is made.
        _ = self.weight, self.sources

    @cached_property
    def weight(self) -> Scalar:
        """The weight in the sum. ConfigError when it is no finite number and no schedule."""
        written = self.extra.get("weight", 1.0)
        try:
            # It refuses `.nan` and `.inf` of YAML, too: a weight of NaN would leave every reward undecided.
            return _STRICT_SCALAR.validate_python(written)
        except ValidationError as error:
            raise ConfigError(f"the weight of {self.column!r} is {written!r}, not a number") from error

    @property
    def column(self) -> str:
        """The name of the term, whose column is `reward/NAME`."""
        alias = self.extra.get("as")
        if alias is None:
            return self.short_name
        return str(alias)

    @property
    def sources(self) -> tuple[str, ...] | None:
        """The sources of the tasks that have the term; None: all tasks. ConfigError when they are no names."""
        written = self.extra.get("sources")
        if written is None:
            return None
        if isinstance(written, str):
            return (written,)
        if not isinstance(written, list) or not written or not all(isinstance(s, str) for s in written):
            raise ConfigError(f"the sources of {self.column!r} are {written!r}, not a list of names")
        return tuple(written)


@dataclass(frozen=True)
class AuxiliarySpec(ComponentSpec):
    """A further term of the loss: an auxiliary loss with its coefficient."""

    extra_keys = ("coef",)

    def __post_init__(self) -> None:
        # Read for its error, when the configuration is made.
        _ = self.coef

    @cached_property
    def coef(self) -> Scalar:
        """The coefficient. ConfigError when it is no scalar."""
        written = self.extra.get("coef", 1.0)
        try:
            return _SCALAR.validate_python(written)
        except ValidationError as error:
            raise ConfigError(f"coef={written!r}: {reason(error.errors()[0])}") from error


@dataclass(frozen=True)
class OfKind:
    """Marks a config field as the spec of a component of this kind, which is checked against the registry.

    The generated reference page links the kind.
    """

    kind: str
    words: tuple[str, ...] = ()
    """Names that the field takes beside those of components."""

    def __get_pydantic_core_schema__(self, source: type[ComponentSpec], handler: GetCoreSchemaHandler) -> CoreSchema:
        def parsed(written: WrittenSpec) -> ComponentSpec:
            try:
                spec = source.parse(written)
                self._check(spec)
            except ConfigError as error:
                raise ValueError(str(error)) from error
            return spec

        # First to the written form (a spec may be given in Python), then the check of a name or a mapping, which words
        # the error, then the component's own options.
        return core_schema.chain_schema(
            [
                core_schema.no_info_plain_validator_function(_as_written),
                handler.generate_schema(WrittenSpec),
                core_schema.no_info_plain_validator_function(parsed),
            ],
            serialization=core_schema.plain_serializer_function_ser_schema(_as_written),
        )

    def _check(self, spec: ComponentSpec) -> None:
        # `auto`, say. A word has no options, so that one with options is looked up and refused.
        is_word = spec.name in self.words or registry.is_in_words(spec.name)  # the latter is refused where it is used
        if spec.options or not is_word:
            registry.check_options(self.kind, spec)


def _as_written(spec: SpecLike) -> Any:
    if isinstance(spec, ComponentSpec):
        return spec.written
    return spec


class Section(BaseModel):
    """Base of every section: strict keys, docstrings as descriptions."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_assignment=True, allow_inf_nan=False
    )
