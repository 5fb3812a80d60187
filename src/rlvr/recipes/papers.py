"""The published recipes: `FOLDER/SLUG.yaml` beside this file, each a configuration that trains, with facts about it.

A file's top-level key `recipe` describes it and holds its smoke data; everything else is the configuration, so
`python -m rlvr.train --config SLUG` takes the file as it is. A mechanism that only this paper uses lies in the same
folder. `out-of-scope.json` lists the papers without a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from rlvr.config import Config
from rlvr.config.config_loading import RECIPES, config_file, make_config, recipe_files
from rlvr.core.tree import read_mapping
from rlvr.core.validation_words import reason
from rlvr.errors import ConfigError


class Smoke(BaseModel):
    """Sizes of a few steps on a tiny policy."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tasks: list[dict[str, Any]]
    """Rows of the recipe's own kind of task, short ones."""
    shown: list[str]
    """Responses that the tiny policy is primed with by imitation, right ones and wrong ones, so that rewards differ.
    Each word between spaces becomes one token."""
    judge: dict[str, str] = {}
    """The judge at toy size: a regular expression -> the verdict on a response, or a step, in which it is found; the
    first that is found counts."""
    set: dict[str, Any] = {}
    """Laid over the small configuration."""
    stages: dict[str, dict[str, Any]] = {}
    """Laid over stages, by name (tasks of their own, for example)."""


class Recipe(BaseModel):
    """Facts about a recipe."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    title: str
    """The paper's title."""
    status: Literal["faithful", "part"]
    """faithful: the mechanism is all there, with numbers of the authors; part: `missing` says what is not."""
    taken: str
    """The parts taken from the paper, each with its place in it."""
    source: str = ""
    """The place where mechanism and numbers were read: repository, files and commit, or the paper or page; what could
    not be read."""
    differs: str
    """The differences from that source, sizes and data included; `nothing` where each was compared."""
    checked: str = ""
    """The formulas that were confirmed in the source, and those that were not."""
    missing: str = ""
    """The missing parts of a recipe in part."""
    effect: str
    """The results that the paper reports, to compare a run with."""
    tests: list[str]
    """Files of tests of its components."""
    smoke: Smoke


class Paper(BaseModel):
    """One file."""

    slug: str
    recipe: Recipe
    tree: dict[str, Any]
    """The configuration as written."""

    @property
    def config(self) -> Config:
        """The configuration, checked."""
        return make_config(self.tree, where=f"{self.slug}: ")

    def pieces(self) -> list[str]:
        """The settings that make the recipe, as `section: value`, without models, data and sizes."""
        return [text for tree in (self.tree, *self.tree.get("stages", [])) for text in _pieces(tree)]


def _pieces(tree: Mapping[str, Any]) -> Iterator[str]:
    kind = [tree["kind"]] if "kind" in tree else []
    rollout = {k: v for k, v in tree.get("rollout", {}).items() if k in ("plan", "dynamic_sampling", "staleness")}
    parts = {"rewards": tree.get("rewards"), **tree.get("algorithm", {}), **rollout, "verifier": tree.get("verifier")}
    own = {"loss": tree.get("loss"), "source_weights": tree.get("source_weights")}  # of an sft stage
    parts |= {name: value for name, value in own.items() if value is not None}
    texts = [f"{name} {_flow(value)}" for name, value in parts.items() if value is not None]
    if kind and not texts:
        yield f"stage {kind[0]}"
    # The first text of a stage carries its kind; the others follow without it.
    yield from ([f"stage {kind[0]}: {texts[0]}", *texts[1:]] if kind and texts else texts)


class _WithoutAliases(yaml.SafeDumper):
    """Writes a value out wherever it stands, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _flow(value: Any) -> str:
    form: dict[str, Any] = {"default_flow_style": True, "width": 10**9, "sort_keys": False, "allow_unicode": True}
    text: str = yaml.dump(value, Dumper=_WithoutAliases, **form)
    # PyYAML ends a document that is a bare scalar with the line `...`: `verdict\n...\n`, but not `{a: 1}\n`.
    return text.removesuffix("\n").removesuffix("...").strip()


def read_paper(path: Path) -> Paper:
    """The recipe in a file. ConfigError names in one line what is wrong in it, OSError where it cannot be read."""
    tree = read_mapping(path)
    if "recipe" not in tree:
        raise ConfigError(
            f"{path.name} is no recipe: it has no section `recipe` (rlvr.train takes a plain configuration)"
        )
    try:
        recipe = Recipe.model_validate(tree.pop("recipe"))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, ('recipe', *fault['loc'])))}: {reason(fault)}" for fault in error.errors()]
        raise ConfigError(f"{path.name} is no recipe: {'; '.join(faults)}") from error
    if (recipe.status == "part") != bool(recipe.missing):
        raise ConfigError(f"{path.name}: a recipe in part says what is `missing`, a faithful one does not")
    return Paper(slug=path.stem, recipe=recipe, tree=tree)


def read_papers() -> list[Paper]:
    """All recipes, by slug."""
    return [read_paper(path) for path in recipe_files().values()]


def find_paper(slug: str) -> Paper:
    """The recipe with this slug, or in the file with this path. ConfigError with the nearest slug where there is
    none."""
    return read_paper(config_file(slug))


def without_file() -> dict[str, list[dict[str, str]]]:
    """The papers without a file: `none`, which would be in reach, and `out`, which are no post-training of language
    models."""
    rows: dict[str, list[dict[str, str]]] = json.loads((RECIPES / "out-of-scope.json").read_text(encoding="utf-8"))
    return rows
