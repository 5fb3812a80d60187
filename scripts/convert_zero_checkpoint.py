"""Hugging Face files from a checkpoint that DeepSpeed itself wrote (`save_checkpoint`), in this library's runs or in
others'.

    python scripts/convert_zero_checkpoint.py FOLDER --base MODEL --out OUT [--tag global_step100] [--dtype bfloat16]

FOLDER holds `latest` and `global_step*/`. MODEL, a folder or hub name, gives the architecture and the tokenizer.
Our own checkpoints need no conversion: their `model/` has the Hugging Face files, whatever the backend.

DeepSpeed's format is pickled: reading it RUNS CODE that it contains. Convert only checkpoints that you trust.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlvr.core.own_files import check_new_folder
from rlvr.errors import command


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hugging Face files from a checkpoint that DeepSpeed wrote.")
    parser.add_argument("folder", type=Path, help="the folder that DeepSpeed's save_checkpoint was given")
    parser.add_argument("--base", required=True, help="folder or hub name of the model that was trained")
    parser.add_argument("--out", required=True, type=Path, help="folder for the model, new or empty")
    parser.add_argument("--tag", help="which checkpoint of the folder; default: what its file `latest` says")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="type of the written weights"
    )
    options = parser.parse_args(arguments)
    check_new_folder(options.out, "the model")
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError:
        print("this needs DeepSpeed: bash scripts/environment.sh deepspeed", file=sys.stderr)
        return 2
    if not (options.folder / (options.tag or "latest")).exists():
        print(
            f"there is no DeepSpeed checkpoint in {options.folder}: {options.tag or 'latest'} is missing",
            file=sys.stderr,
        )
        return 2
    print("reading (this runs code that the checkpoint contains)")
    weights = get_fp32_state_dict_from_zero_checkpoint(str(options.folder), tag=options.tag)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    weights = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        print(
            f"the checkpoint is not of {options.base}: missing {missing[:5]}, not known {unexpected[:5]}",
            file=sys.stderr,
        )
        return 2
    model.tie_weights()
    model.to(getattr(torch, options.dtype)).save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.base).save_pretrained(options.out)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
