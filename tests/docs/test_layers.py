"""Imports point to lower layers: the layers that docs/architecture.md lists hold for every import in the library."""

from __future__ import annotations

import ast
import graphlib
import re

import pytest
from public_names import public_names


@pytest.fixture(scope="module")
def layers(root):
    """Package -> layer, from 0."""
    page = (root / "docs/architecture.md").read_text()
    (block,) = re.findall(r"```layers\n(.*?)```", page, re.DOTALL)
    return {name: number for number, line in enumerate(block.splitlines()) for name in line.split()}


@pytest.fixture(scope="module")
def modules(root):
    """Module name -> path."""
    source = root / "src"
    return {
        ".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): p for p in source.rglob("*.py")
    }


def test_every_package_is_in_a_layer_and_in_the_table(root, layers, modules):
    packages = {name.split(".")[1] for name in modules if name != "rlvr"}
    assert set(layers) == packages
    page = (root / "docs/architecture.md").read_text().split("## Packages")[1].split("## Records")[0]
    assert {
        name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    } == packages


def test_no_import_points_up_or_to_its_own_layer(layers, modules):
    wrong = [
        f"{name} imports {target}"
        for name, path in modules.items()
        if name != "rlvr"
        for target in imported(path, modules)
        if (mine := name.split(".")[1]) != (theirs := target.split(".")[1]) and layers[theirs] >= layers[mine]
    ]
    assert not wrong


def test_no_files_import_each_other_in_a_circle(modules):
    """Imports for the type checker count too: a reader follows them as any other."""
    graph = {name: every_import(path.read_text(), modules) - {name} for name, path in modules.items() if name != "rlvr"}
    graphlib.TopologicalSorter(graph).prepare()


def test_imports_of_public_names_are_followed_and_relative_ones_refused(modules):
    assert every_import("from rlvr import GRPOTrainer, registry", modules) == {"rlvr.trainer", "rlvr.registry"}
    assert every_import("from rlvr.records import Task\nimport rlvr.errors", modules) == {"rlvr.records", "rlvr.errors"}
    with pytest.raises(AssertionError, match="a relative import"):
        every_import("from ..trainer import GRPOTrainer", modules)


class Running(ast.NodeTransformer):
    """Leaves out what only a type checker reads."""

    def visit_If(self, node):
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imported(path, modules) -> set[str]:
    """The modules of the library that a file imports, anywhere in it but for the type checker."""
    return every_import(ast.unparse(Running().visit(ast.parse(path.read_text()))), modules)


def every_import(source, modules) -> set[str]:
    """The modules of the library that a file imports, anywhere in its source."""
    result = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import, which this test does not follow: {ast.unparse(node)}"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                public = public_names().get(alias.name) if node.module == "rlvr" else None
                result.add(name if name in modules else public or str(node.module))
    return {name for name in result if name.startswith("rlvr.")}
