"""Where the GPU kit is."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "scripts/gpu"
