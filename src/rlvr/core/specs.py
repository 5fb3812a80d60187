"""A component as a configuration writes it: its name and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from rlvr.errors import ConfigError

WrittenSpec = str | dict[str, Any]
"""A component in YAML: a name, or `{name: ..., option: value}`."""


@dataclass(frozen=True)
class ComponentSpec:
    """The name and options of a component, as a configuration gives them: `registry.build(kind, spec)` builds it."""

    name: str
    """A registered name, `FILE.py:Name` or `module:Name`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Option -> value, as written: the component's own signature converts them when it is built."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Those of `extra_keys` that were written, with their values."""

    extra_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the mapping that are no options of the component but of its place, such as the `weight` of a reward."""

    @classmethod
    def parse(cls, written: SpecLike) -> Self:
        """Return the spec that `written` gives. ConfigError for a mapping without a `name`."""
        if isinstance(written, cls):
            return written
        if isinstance(written, ComponentSpec):
            written = written.written
        if isinstance(written, str):
            return cls(written)
        options = dict(written)
        # Keys of the place, such as the `weight` of a reward, which the component's own signature does not know.
        extra = {key: options.pop(key) for key in written if key in cls.extra_keys}
        if "name" not in options:
            # Its keys alone: a value may be a key of a service.
            keys = ", ".join(map(str, options)) or "nothing"
            raise ConfigError(f"a component written as a mapping needs a `name` (it has {keys})")
        return cls(options.pop("name"), options, extra)

    @property
    def written(self) -> WrittenSpec:
        """The component as YAML has it: its name alone where it has no options."""
        # One form for one meaning, so that a checkpoint's configuration compares equal to the present one.
        if not self.options and not self.extra:
            return self.name
        return {"name": self.name, **self.options, **self.extra}

    @property
    def short_name(self) -> str:
        """The name without the file or module in front of it."""
        return self.name.rpartition(":")[2]

    def with_options(self, **options: Any) -> Self:
        """Return the spec with these options over its own."""
        return type(self)(self.name, {**self.options, **options}, self.extra)


SpecLike = ComponentSpec | str | Mapping[str, Any]
"""A component as Python code may give it."""
