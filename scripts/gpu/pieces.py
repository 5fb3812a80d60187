"""Packages for a GPU machine without a network, in pieces that can be carried: collected by pip where there is one,
unpacked there.

    python scripts/gpu/pieces.py pack --out FOLDER [--pieces base,deepspeed,vllm] [--limit-mib 64] [--python 3.12]
    python scripts/gpu/pieces.py unpack FOLDER SITE

A piece is a tar of what its wheels install, compressed by xz, in files of at most the limit; FOLDER/manifest.json has
their sizes and sha256. Each piece is of use by itself. What is downloaded stays in FOLDER/wheels, and pieces that the
manifest has are not made again, so that an interrupted call can be repeated. This file needs Python's own library and,
to pack, pip.

Exit codes: 0 done, 1 a piece could not be made, 2 bad input or a damaged piece.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import lzma
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MARK = ".from-pieces"
"""In the folder that pieces are unpacked to: it is ours, and more may go there."""
MIB = 1 << 20
HERE = f"{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
"""The Python that runs this, as pieces say what they are for."""
LIBRARIES = ("manylinux_2_17", "manylinux2014", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28", "manylinux_2_31")
NEWER = ("manylinux_2_34", "manylinux_2_35", "manylinux1")
"""Tags of platforms; pip takes none but those that it is given."""
PRESET = 6
"""Of xz: higher ones take twice the time for a few per cent."""

VLLM = "vllm==0.32.0"
VLLM_NEEDS = (
    *(
        "apache-tvm-ffi==0.1.11",
        "cachetools",
        "cbor2",
        "fastapi>=0.133,<0.137",
        "httpcore2",
        "httpx2",
        "llguidance>=1.7,<1.8",
    ),
    *("msgspec", "openai>=2.25", "oss-harmony>=0.0.11", "partial-json-parser", "pybase64", "pydantic-extra-types"),
    *("python-multipart", "pyzmq>=25", "sniffio", "starlette>=1.0.1", "truststore", "xgrammar==0.2.8"),
)
"""What vLLM imports to sample in one process, as seen there, less what a machine with torch and transformers has. Its
own list of needs has a hundred packages of several GB, torch among them."""
LARGE = {
    "core": "vllm/_C_stable_libtorch*.so",
    "experts": "vllm/_moe_C_stable_libtorch*.so",
    "attention before Hopper": "vllm/vllm_flash_attn/_vllm_fa2_C*.so",
}
"""Extensions that make a piece of their own each."""
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/*/include/*",
    "vllm/third_party/*.so",
    *(f"vllm/_{name}*.so" for name in ("flashkda", "deepselect", "flashmla", "qutlass")),
    "vllm/entrypoints/serve/instrumentator/static/*",
)
"""Of vLLM: a server in another language, headers, and kernels of single models and of types other than bfloat16."""


@dataclass(frozen=True)
class Piece:
    """What goes into one archive."""

    name: str
    download: Callable[[Pip, Path], None]
    """Puts wheels into a folder."""
    takes: Callable[[str], bool] = lambda path: True
    """Whether a file of them, by its path, belongs to the piece."""
    folder: str = ""
    """Of the wheels; pieces that share it share what is downloaded."""


class PieceError(Exception):
    """A piece cannot be made or used; the message says which and why."""


class Pip:
    """pip, told for which machine wheels are to be."""

    def __init__(self, python: str, machine: str) -> None:
        self.made_for = f"{python}-{machine}"
        self.target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
        for tag in (*LIBRARIES, *NEWER):
            self.target += ["--platform", f"{tag}_{machine}"]

    def download(self, folder: Path, packages: Iterable[str], needs: bool) -> None:
        """Wheels of packages, with what they need or without."""
        self._run("download", *([] if needs else ["--no-deps"]), *self.target, "-d", str(folder), *packages)

    def build(self, folder: Path, package: str) -> None:
        """A wheel of pure Python from a source distribution, with the packages that are installed here."""
        self._run("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), package)

    def _run(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--quiet"]
        done = subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            raise PieceError(f"pip {arguments[0]}: {' '.join(errors[-2:])}")


def base(pip: Pip, folder: Path) -> None:
    """What the library needs beside torch, transformers, accelerate and peft, and Liger's kernels."""
    pip.download(folder, ["pydantic>=2.12", "orjson>=3.11"], needs=True)
    pip.download(folder, ["liger-kernel>=0.8"], needs=False)


def deepspeed(pip: Pip, folder: Path) -> None:
    """DeepSpeed, of which there are only sources, and what it needs beside them."""
    pip.download(folder, ["hjson"], needs=False)
    if not any(folder.glob("deepspeed-*.whl")):
        pip.build(folder, "deepspeed==0.19.8")


def vllm(pip: Pip, folder: Path) -> None:
    """vLLM, and the packages that it imports."""
    pip.download(folder, [VLLM, *VLLM_NEEDS], needs=False)


def of_vllm_1(path: str) -> bool:
    """Whether a file belongs to what every use of vLLM needs."""
    return not any(fnmatch.fnmatch(path, pattern) for pattern in (*LARGE.values(), *LEFT_OUT))


def pieces() -> list[Piece]:
    """All of them, in the order of their worth."""
    found = [Piece("base", base), Piece("deepspeed", deepspeed), Piece("vllm-1", vllm, of_vllm_1, "vllm")]
    for number, pattern in enumerate(LARGE.values(), 2):
        found.append(Piece(f"vllm-{number}", vllm, lambda path, p=pattern: fnmatch.fnmatch(path, p), "vllm"))
    return found


# to pack


def pack(out: Path, names: Sequence[str], limit: int, pip: Pip) -> int:
    """Make the pieces whose names begin with one of `names`; the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(out) if (out / MANIFEST).exists() else {}
    failed = False
    downloaded: set[Path] = set()
    for piece in pieces():
        if piece.name.partition("-")[0] not in names:
            continue
        before = manifest.get(piece.name)
        if before and before["for"] == pip.made_for and all(_is_whole(out, file) for file in before["files"]):
            print(f"{piece.name}: made before")
            continue
        wheels = out / "wheels" / pip.made_for / (piece.folder or piece.name)
        wheels.mkdir(parents=True, exist_ok=True)
        try:
            if wheels not in downloaded:
                piece.download(pip, wheels)
                downloaded.add(wheels)
            manifest[piece.name] = {"for": pip.made_for, **make(piece, wheels, out, limit)}
        except (PieceError, OSError, zipfile.BadZipFile) as error:
            print(f"{piece.name}: could not be made: {error}", file=sys.stderr)
            failed = True
            continue
        _write_whole(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        size = sum(file["bytes"] for file in manifest[piece.name]["files"])
        print(f"{piece.name}: {size / MIB:.1f} MiB in {len(manifest[piece.name]['files'])} files")
    return 1 if failed else 0


def make(piece: Piece, wheels: Path, out: Path, limit: int) -> dict[str, Any]:
    """Write a piece's archive; what the manifest has of it."""
    _refuse_two_versions(wheels)
    archive = out / f"{piece.name}.tar.xz.unfinished"
    packages = []
    with lzma.open(archive, "wb", preset=PRESET) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as opened:
                if _add(opened, tar, piece.takes):
                    packages.append("-".join(wheel.name.split("-")[:2]))
    if not packages:
        archive.unlink()
        raise PieceError(f"none of the {len(list(wheels.glob('*.whl')))} wheels in {wheels} has files of it")
    return {"files": list(_split(archive, out, piece.name, limit)), "packages": packages}


def _refuse_two_versions(wheels: Path) -> None:
    """PieceError where a call before this one got another version of a package than this one did."""
    found: dict[str, str] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        if name in found:
            raise PieceError(f"{wheels} has two versions of {name}, {found[name]} and {wheel.name}: remove one")
        found[name] = wheel.name


def _add(wheel: zipfile.ZipFile, tar: tarfile.TarFile, takes: Callable[[str], bool]) -> int:
    """Add what a wheel installs to the archive; how many files. Times and owners are left out: same wheels, same
    bytes."""
    count = 0
    for entry in wheel.infolist():
        path = entry.filename
        top, _, rest = path.partition("/")
        if top.endswith(".data"):  # a wheel's files for other folders: only those for packages are needed
            kind, _, path = rest.partition("/")
            if kind not in ("purelib", "platlib"):
                continue
        if entry.is_dir() or not takes(path):
            continue
        member = tarfile.TarInfo(path)
        member.size, member.mode = entry.file_size, 0o644
        with wheel.open(entry) as content:
            tar.addfile(member, content)
        count += 1
    return count


def _split(archive: Path, out: Path, name: str, limit: int) -> Iterator[dict[str, Any]]:
    """Cut an archive into files of at most `limit` bytes."""
    total = archive.stat().st_size
    count = -(-total // limit)
    with archive.open("rb") as content:
        for number in range(1, count + 1):
            file = f"{name}.tar.xz" if count == 1 else f"{name}.tar.xz.{number}-of-{count}"
            data = content.read(limit)
            (out / file).write_bytes(data)
            yield {"file": file, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    archive.unlink()


# to unpack


def unpack(folder: Path, site: Path) -> int:
    """Check the pieces that are in `folder` and put them into `site`; the exit code."""
    manifest = read_manifest(folder)
    if site.exists() and any(site.iterdir()) and not (site / MARK).exists():
        raise PieceError(f"{site} holds other files: name a folder that is empty or new")
    found = {
        name: piece for name, piece in manifest.items() if any((folder / f["file"]).exists() for f in piece["files"])
    }
    for name, piece in found.items():
        for file in piece["files"]:
            _check(folder, name, file)
    if not found:
        raise PieceError(f"{folder} has none of the pieces that its {MANIFEST} names: {', '.join(manifest)}")
    site.mkdir(parents=True, exist_ok=True)
    (site / MARK).touch()
    for name, piece in found.items():
        joined = _Joined(folder / file["file"] for file in piece["files"])
        with lzma.open(joined) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            tar.extractall(site, filter="data")
        print(f"{name}, for {piece['for']}: {', '.join(piece['packages'])}")
        if piece["for"] != HERE:
            text = (
                f"{name} was made for {piece['for']}, and this Python is {HERE}: it cannot import what is "
                "compiled in it"
            )
            print(f"warning: {text} (pack.sh has --python and --machine)", file=sys.stderr)
    if missing := [name for name in manifest if name not in found]:
        print(f"not here: {', '.join(missing)}")
    return 0


def _check(folder: Path, name: str, file: dict[str, Any]) -> None:
    """PieceError where a file of a piece is missing or other than it was made."""
    path = folder / file["file"]
    if not path.exists():
        raise PieceError(f"the piece {name} is not whole: {file['file']} is missing")
    if not _is_whole(folder, file):
        raise PieceError(f"{path} is damaged: its size or sha256 is not that of {MANIFEST}. Carry it again")


def _is_whole(folder: Path, file: dict[str, Any]) -> bool:
    path = folder / file["file"]
    if not path.exists() or path.stat().st_size != file["bytes"]:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]


class _Joined:
    """Files read as one, for lzma."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._file = self._paths.pop(0).open("rb")

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; none at the end of the last file."""
        while not (data := self._file.read(size)) and self._paths:
            self._file.close()
            self._file = self._paths.pop(0).open("rb")
        return data


def read_manifest(folder: Path) -> dict[str, Any]:
    """The pieces by name. PieceError where there is no manifest."""
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise PieceError(f"{folder / MANIFEST} cannot be read: {error}") from error


def _write_whole(path: Path, text: str) -> None:
    """Write aside and rename, so that an interrupted call leaves the manifest as it was."""
    aside = path.with_name(f"{path.name}.unfinished")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description="Packages for a GPU machine without a network, in pieces.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="collect wheels by pip and make the pieces")
    packing.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    packing.add_argument("--pieces", default="base,deepspeed,vllm", help="some of base, deepspeed, vllm")
    packing.add_argument("--limit-mib", type=float, default=64, help="size of a file at most")
    packing.add_argument("--python", default="3.12", help="the GPU machine's version of Python")
    packing.add_argument("--machine", default="x86_64", help="its processor")
    unpacking = commands.add_parser("unpack", help="check pieces and unpack them for PYTHONPATH")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "unpack":
            return unpack(options.folder, options.site)
        names = options.pieces.split(",")
        if unknown := set(names) - {piece.name.partition("-")[0] for piece in pieces()}:
            parser.error(f"--pieces: there are base, deepspeed and vllm, and not {', '.join(sorted(unknown))}")
        if options.limit_mib <= 0:
            parser.error("--limit-mib: a number above 0")
        return pack(options.out, names, int(options.limit_mib * MIB), Pip(options.python, options.machine))
    except (PieceError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
