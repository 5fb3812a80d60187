"""Imports point to lower layers: the layers that docs/architecture.md lists hold for every import in the library."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator

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


@pytest.fixture(scope="module")
def trees(modules):
    """Module name -> its syntax tree, without `rlvr` itself, which imports public names when they are first used."""
    return {name: ast.parse(path.read_text()) for name, path in modules.items() if name != "rlvr"}


def test_every_package_is_in_a_layer_and_in_the_table(root, layers, modules):
    packages = {name.split(".")[1] for name in modules if name != "rlvr"}
    assert set(layers) == packages
    page = (root / "docs/architecture.md").read_text().split("## Packages")[1].split("## Records")[0]
    assert {
        name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    } == packages


def test_no_import_points_up_or_to_its_own_layer(layers, modules, trees):
    wrong = [
        f"{name} imports {target}"
        for name, tree in trees.items()
        for target in imports(running(tree), modules)
        if (mine := name.split(".")[1]) != (theirs := target.split(".")[1]) and layers[theirs] >= layers[mine]
    ]
    assert not wrong


def test_no_files_import_each_other_in_a_circle(modules, trees):
    """Imports for the type checker count too: a reader follows them as any other."""
    graph = {name: imports(ast.walk(tree), modules) - {name} for name, tree in trees.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_imports_of_public_names_are_followed_and_relative_ones_refused(modules):
    def of(source):
        return imports(ast.walk(ast.parse(source)), modules)

    assert of("from rlvr import GRPOTrainer, registry") == {"rlvr.trainer", "rlvr.registry"}
    assert of("from rlvr.records import Task\nimport rlvr.errors") == {"rlvr.records", "rlvr.errors"}
    with pytest.raises(AssertionError, match="a relative import"):
        of("from ..trainer import GRPOTrainer")


def test_imports_for_the_type_checker_are_told_apart(modules):
    source = "if TYPE_CHECKING:\n    import rlvr.trainer\nelse:\n    import rlvr.records\nimport rlvr.errors\n"
    assert imports(running(ast.parse(source)), modules) == {"rlvr.errors"}
    assert imports(ast.walk(ast.parse(source)), modules) == {"rlvr.trainer", "rlvr.records", "rlvr.errors"}


def running(tree) -> Iterator[ast.AST]:
    """The nodes of a tree without what only a type checker reads."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        nodes.extend(ast.iter_child_nodes(node))


def imports(nodes: Iterable[ast.AST], modules) -> set[str]:
    """The modules of the library that these nodes import."""
    result = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import, which this test does not follow: {ast.unparse(node)}"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                public = public_names().get(alias.name) if node.module == "rlvr" else None
                result.add(name if name in modules else public or str(node.module))
    return {name for name in result if name.startswith("rlvr.")}
