"""The package that is installed has types: a program outside the repository is checked against the wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from rlvr import GRPOTrainer, Verdict, Verifier
from rlvr.components import Advantage


class Even(Verifier):
    def verify(self, task, completion):
        return Verdict.from_score(completion.strip().endswith(tuple("02468")))


with GRPOTrainer("model", [{"prompt": "1"}], Even()) as trainer:
    reveal_type(trainer)
    reveal_type(trainer.train())
reveal_type(Even().verify)
Advantage()
Verdict.from_score("right")
"""
ARGUMENTS = """
from rlvr import Callback, GRPOTrainer, MathVerifier, RunView

def correct(completion: str, answer: str) -> float:
    return float(answer in completion)

class Stops(Callback):
    def on_step(self, run: RunView, metrics) -> bool | None:
        return run.step + 1 > 3

trainer = GRPOTrainer("m", [{"prompt": "x"}], [correct, (MathVerifier(), 0.2)], learning_rate=1e-6, callbacks=[Stops()])
GRPOTrainer("m", train_dataset=[{"prompt": "x"}], reward_funcs=correct, args={"run": {"steps": 1}})
step: int = trainer.step
trainer.step.nothing  # wrong
GRPOTrainer("m", learning_rate="fast")  # wrong
GRPOTrainer("m", learning_rat=1e-6)  # wrong
GRPOTrainer("m", verifier=[(correct, "0.2")])  # wrong
"""
SKIPPED = ("torch", "transformers", "pydantic", "numpy", "safetensors", "tokenizers", "datasets", "vllm")
"""What the contracts name of other libraries is of no matter here, and takes a type checker minutes."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment with the wheel, and with the other packages of this one."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=200)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    # As paths of their own, whose .pth files (of the editable install) are not read.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others), encoding="utf-8")
    return folder / "env/bin/python"


def checked(installed, folder, names):
    """What mypy prints of these files, by file. As under `--strict`, a name has to be public where it is imported."""
    settings = ["[mypy]", "follow_imports = silent", "implicit_reexport = false"]
    settings += [f"[mypy-{name}.*]\nfollow_imports = skip" for name in SKIPPED]
    (folder / "mypy.ini").write_text("\n".join(settings), encoding="utf-8")
    options = ["--config-file", "mypy.ini", "--cache-dir", str(installed.parent / "cache"), "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed), *options, *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=800)
    assert not done.stderr
    return {name: [line for line in done.stdout.splitlines() if line.startswith(f"{name}:")] for name in names}


def test_the_wheel_has_the_marker_of_types_and_all_modules(installed):
    package = next((installed.parents[1] / "lib").glob("python*/site-packages")) / "rlvr"
    assert (package / "py.typed").is_file()
    modules = set()
    for pattern in ("*.py", "*.pyi"):
        modules |= {path.relative_to(ROOT / "src/rlvr") for path in (ROOT / "src/rlvr").rglob(pattern)}
        modules -= {path.relative_to(package) for path in package.rglob(pattern)}
    assert not modules


@pytest.mark.slow
@pytest.mark.timeout(900)  # a cold run of mypy over the library takes minutes on a busy machine
def test_a_program_and_the_examples_of_the_page_are_checked_against_the_wheel(installed, tmp_path):
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n# (?!test_)(\w+\.py)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name, text in [("program.py", PROGRAM), ("arguments.py", ARGUMENTS), *examples]:
        (tmp_path / name).write_text(text, encoding="utf-8")
    output = checked(installed, tmp_path, ["program.py", "arguments.py", *(name for name, _ in examples)])
    program = "\n".join(output.pop("program.py"))
    wrong = [number for number, line in enumerate(ARGUMENTS.splitlines(), 1) if line.endswith("# wrong")]
    errors = [int(line.split(":")[1]) for line in output.pop("arguments.py") if ": error:" in line]
    assert errors == wrong
    assert len(output) == 7 and [lines for lines in output.values() if lines] == []
    assert 'Revealed type is "rlvr.trainer.GRPOTrainer"' in program
    assert re.search(r'Revealed type is ".*list\[.*dict\[.*str, Any\]\]"', program)
    assert 'Cannot instantiate abstract class "Advantage" with abstract attribute "__call__"' in program
    assert re.search(r'Argument 1 to "from_score" of "Verdict" has incompatible type "str"', program)
    assert program.count("error:") == 2
