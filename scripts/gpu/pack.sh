#!/usr/bin/env bash
# Collect the packages that a GPU machine without a network lacks, in pieces of at most 64 MiB; docs/gpu.md has the rest.
#   bash scripts/gpu/pack.sh --out FOLDER [--pieces base,deepspeed,vllm] [--limit-mib 64] [--python 3.12] [--machine x86_64]
# Repeat it after an interruption: finished pieces are not made again.
set -euo pipefail
here="$(dirname "$0")"
python="${PYTHON:-$here/../../.venv/bin/python}"  # DeepSpeed's wheel is built with the torch of the environment
[ -x "$python" ] || python=python3
exec "$python" "$here/pieces.py" pack "$@"
