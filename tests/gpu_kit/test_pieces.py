"""The pieces that are carried to a GPU machine, from an index that is a folder of made-up wheels: no network."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from gpu_kit_paths import KIT

TAG = "cp312-cp312-manylinux_2_28_x86_64"


def made_up_wheel(folder, name, version, files, tag="py3-none-any"):
    """A wheel that pip can download."""
    name = name.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path):
    """A folder with wheels of what vLLM needs, of the base piece and of vLLM, but nothing of DeepSpeed."""
    folder = tmp_path / "index"
    folder.mkdir()
    noise = np.random.default_rng(0).bytes(250_000)
    made_up_wheel(folder, "pydantic", "2.99.0", {"pydantic/__init__.py": "NUMBER = 1\n"})
    made_up_wheel(folder, "orjson", "3.99.0", {"orjson/orjson.so": noise, "orjson-3.99.0.data/scripts/x": "no"}, TAG)
    made_up_wheel(folder, "liger_kernel", "0.99.0", {"liger_kernel/__init__.py": ""})
    own = (
        "_C_stable_libtorch.abi3.so",
        "_moe_C_stable_libtorch.abi3.so",
        "cumem_allocator.abi3.so",
        "_qutlass_C.abi3.so",
    )
    files = {f"vllm/{name}": noise[:1000] for name in (*own, "vllm-rs", "__init__.py")}
    files |= {f"vllm/vllm_flash_attn/_vllm_fa{n}_C.abi3.so": noise[:1000] for n in (2, 3)}
    files["vllm/third_party/deep_gemm/include/a.hpp"] = "//"
    made_up_wheel(folder, "vllm", "0.32.0", files, "cp38-abi3-manylinux_2_28_x86_64")
    needs = re.search(r"^VLLM_NEEDS = \((.*?)^\)", (KIT / "pieces.py").read_text(), re.MULTILINE | re.DOTALL)[1]
    for name, version in re.findall(r'"([\w-]+)(?:[=>]=([\d.]+))?', needs):
        made_up_wheel(folder, name, version or "1.0", {f"{name.replace('-', '_')}.py": ""})
    return folder


@pytest.fixture
def pieces(index):
    """`pieces(*arguments)`: the command, with pip's index replaced."""

    def run(*arguments):
        own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        command = [sys.executable, str(KIT / "pieces.py"), *map(str, arguments)]
        done = subprocess.run(command, env={**kept, **own}, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.gate
def test_pieces_are_made_once_and_unpacked_where_they_were_carried(pieces, index, tmp_path):
    out, site = tmp_path / "out", tmp_path / "site"
    code, output = pieces("pack", "--out", out, "--limit-mib", 0.1)
    assert code == 1 and "deepspeed: could not be made: pip" in output and output.count("could not be made") == 1
    manifest = json.loads((out / "manifest.json").read_text())
    assert list(manifest) == ["base", "vllm-1", "vllm-2", "vllm-3", "vllm-4"]
    assert [file["file"] for file in manifest["base"]["files"]] == [f"base.tar.xz.{n}-of-3" for n in (1, 2, 3)]
    assert all(file["bytes"] <= 0.1 * 2**20 for piece in manifest.values() for file in piece["files"])
    assert manifest["base"]["packages"] == ["liger_kernel-0.99.0", "orjson-3.99.0", "pydantic-2.99.0"]
    assert {piece["for"] for piece in manifest.values()} == {"3.12-x86_64"}
    assert not list(out.glob("*.unfinished"))
    made_up_wheel(out / "wheels/3.12-x86_64/vllm", "msgspec", "0.1", {})
    (out / "vllm-3.tar.xz").unlink()
    code, output = pieces("pack", "--out", out, "--pieces", "vllm")
    assert (
        code == 1
        and "vllm-2: made before" in output
        and "vllm-3: could not be made" in output
        and "two versions of msgspec" in output
    )

    for wheel in index.iterdir():  # what is made is not asked for again; what is damaged is made from the wheels
        wheel.unlink()
    whole = (out / "vllm-2.tar.xz").read_bytes()
    (out / "vllm-2.tar.xz").write_bytes(whole[:-1] + b"?")
    code, output = pieces("pack", "--out", out, "--pieces", "base")
    assert (code, output) == (0, "base: made before\n")
    code, output = pieces("unpack", out, site)
    assert code == 2 and "vllm-2.tar.xz is damaged" in output and not site.exists()
    (out / "vllm-2.tar.xz").write_bytes(whole)
    code, output = pieces("unpack", out, site)
    assert code == 0, output
    assert (site / "pydantic/__init__.py").read_text() == "NUMBER = 1\n"
    assert (site / "orjson/orjson.so").read_bytes() == np.random.default_rng(0).bytes(250_000)
    assert (site / "orjson-3.99.0.dist-info/METADATA").exists() and not list(site.glob("*.data"))
    there = {str(path.relative_to(site)) for path in (site / "vllm").rglob("*") if path.is_file()}
    names = (
        "__init__.py",
        "_C_stable_libtorch.abi3.so",
        "cumem_allocator.abi3.so",
    )  # without vllm-3, which was removed
    flash = [f"vllm_flash_attn/_vllm_fa{n}_C.abi3.so" for n in (2, 3)]
    assert there == {f"vllm/{name}" for name in (*names, *flash)}
    assert (site / "msgspec.py").exists()

    carried = tmp_path / "carried"
    carried.mkdir()
    for name in ("manifest.json", *(f"base.tar.xz.{n}-of-3" for n in (1, 3))):
        shutil.copy(out / name, carried)
    code, output = pieces("unpack", carried, tmp_path / "second")
    assert code == 2 and "base.tar.xz.2-of-3 is missing" in output
    shutil.copy(out / "base.tar.xz.2-of-3", carried)
    code, output = pieces("unpack", carried, tmp_path / "second")
    assert code == 0 and "not here: vllm-1, vllm-2" in output and (tmp_path / "second/pydantic").exists()
    here = f"{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
    foreign = f"warning: base was made for 3.12-x86_64, and this Python is {here}"
    assert (foreign in output) == (here != "3.12-x86_64")
    manifest["base"]["for"] = here
    (carried / "manifest.json").write_text(json.dumps(manifest))
    code, output = pieces("unpack", carried, tmp_path / "second")
    assert code == 0 and "warning" not in output

    (tmp_path / "third").mkdir()
    (tmp_path / "third/mine.txt").write_text("mine")
    code, output = pieces("unpack", carried, tmp_path / "third")
    assert code == 2 and "holds other files" in output
    assert [path.name for path in (tmp_path / "third").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "arguments",
    [["pack", "--out", "x", "--pieces", "torch"], ["pack", "--out", "x", "--limit-mib", 0], ["unpack", "x", "y"]],
)
def test_bad_arguments_are_refused(arguments, pieces, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output = pieces(*arguments)
    assert code == 2 and "error: " in output and [path.name for path in tmp_path.iterdir()] == ["index"]
