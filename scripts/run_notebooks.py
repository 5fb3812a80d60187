"""Run the notebooks of docs/notebooks from their first cell to their last, and keep their outputs in them.

    OMP_NUM_THREADS=1 python scripts/run_notebooks.py [NAME ...]       all, where none is named; under a minute each

It needs the extra `dev`. The run folders are made in a temporary folder. No time of execution and no version is kept.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "docs/notebooks"


def main(names: list[str]) -> int:
    """Run the command; the exit code."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        tidy(notebook)
        nbformat.write(notebook, path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
    return 0


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in `folder`, with the kernel of this interpreter, whatever kernels the machine knows."""
    specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    client = NotebookClient(
        notebook, km=manager, timeout=600, resources={"metadata": {"path": str(folder)}}, record_timing=False
    )
    client.owns_km = True  # it ends the kernel, which a given manager would keep
    client.execute()


def tidy(notebook: Any) -> None:
    """Join what a cell printed in pieces, and leave out what differs between machines."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs of a cell, with neighbouring texts of one stream as one."""
    result: list[Any] = []
    for output in outputs:
        if "TqdmWarning" in output.get("text", ""):  # of a missing widget library, with a path of this machine
            continue
        if output.output_type == "stream" and result and result[-1].get("name") == output.name:
            result[-1].text += output.text
        else:
            result.append(output)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
