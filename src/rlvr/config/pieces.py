"""What sections are made of: the strict base, and fields that hold a piece checked against the registry.

Invariant: a piece (verifier, reward, loss ...) is checked against its own options when the tree is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from rlvr import registry
from rlvr.core.schedules import Scalar
from rlvr.errors import ConfigError

Piece = str | dict[str, Any]


TERM_KEYS = ("weight", "as", "sources")
"""What a term of the reward may be written with beside the options of its piece: its weight in the sum (a Scalar), the name
of its column, and the sources of the tasks that have it."""


def bare_term(spec: Piece) -> Piece:
    """A term of the reward as written, without what is not the piece's own."""
    return {key: value for key, value in spec.items() if key not in TERM_KEYS} if isinstance(spec, dict) else spec


def term_name(spec: Piece) -> str:
    """The name of a term of the reward, whose column is `reward/NAME`."""
    given = spec.get("as") if isinstance(spec, dict) else None
    return str(given) if given is not None else registry.split(bare_term(spec))[0].rpartition(":")[2]


def bare_auxiliary(spec: Piece) -> Piece:
    """A further term of the loss as written, without its coefficient."""
    return {key: value for key, value in spec.items() if key != "coef"} if isinstance(spec, dict) else spec


def coefficient(spec: Piece) -> Scalar:
    """The coefficient of a further term of the loss. ConfigError when it is no scalar."""
    written = spec.get("coef", 1.0) if isinstance(spec, dict) else 1.0
    try:
        return TypeAdapter(Scalar).validate_python(written)
    except ValidationError as error:
        raise ConfigError(f"coef={written!r}: {error.errors()[0]['msg']}") from error


@dataclass(frozen=True)
class OfKind:
    """Marks a config field as holding a piece of this kind; the generated reference page links it."""

    kind: str


def piece_of(kind: str, *words: str) -> Any:
    """The annotation of a config field that holds a piece of `kind`, checked against the registry, or one of `words`."""

    def check(spec: Piece) -> Piece:
        if spec in words or registry.is_in_words(spec):  # the latter is refused where it is used
            return spec
        try:
            if kind == "auxiliary":
                coefficient(spec)
            bare = {"reward": bare_term, "auxiliary": bare_auxiliary}.get(kind)
            registry.check_options(kind, bare(spec) if bare else spec)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return spec

    return Annotated[Piece, AfterValidator(check), OfKind(kind)]


class Section(BaseModel):
    """Base of every section: strict keys, docstrings as descriptions."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_assignment=True, allow_inf_nan=False
    )
