"""Count the kernel launches and the copies to the host of one decoding step of the embedded engine, without a GPU.

    python scripts/benchmarks/decode_launches.py [--before CHECKOUT] [--all-layers] [--output decode_launches.json]

The whole engine runs over a model of Qwen2.5-0.5B's shape (24 layers; sizes from its config.json on the Hugging Face
hub) whose tensors are fake: every operation is dispatched with its real shapes and types, nothing is computed. The
tensors are fake ones of a CPU, since torch's build for CPUs cannot index fake ones of a GPU, but the engine takes the
branches that a GPU takes (`by_parts`, `sums_in_float32`). Prompts have different lengths and no row ends before its
limit. A step's figures are those of a run of MORE tokens less those of a run of FEW, divided by the difference; the
copies by which the cache grew every 64 tokens before are not among them.

The layers are alike, so one and two of them are counted: what the second adds is a layer, the rest is counted once.
With `--all-layers` all 24 are run, which takes minutes and gives the same.

A launch is a call of an ATen operation that is no view and no allocation. Scaled dot-product attention and torch's RMS
norm are counted as one each (`aten::neg`), as their kernels on a GPU are; a GPU may need a second kernel where an
operation mixes types or pads. A product that is added to a matrix out of place is two: torch copies the matrix first.
A copy to the host is `Tensor.cpu` or an `_local_scalar_dense` (`item`, `bool`); the values that are read there are
zeros, and so no row ends early and no mask of transformers is left out. Copies to the device cannot be told from views
here. The bytes cast from float32 are those read, weights and activations.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from result_file import result_file
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
FORMAT = 2
"""Of the JSON file; a change of what a figure means is a new number."""
# Qwen/Qwen2.5-0.5B, config.json.
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
# config.json of google/gemma-2-9b and Qwen/Qwen3-30B-A3B: norms on both sides and soft-caps, and a mixture of experts.
FAMILIES = {
    "Gemma-2-9B": {
        "model_type": "gemma2",
        "attention": "eager",
        "vocab_size": 256_000,
        "hidden_size": 3584,
        "intermediate_size": 14_336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "bos_token_id": None,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
}
# transformers' grouped products of experts are not cast by autocast, and torch's take bfloat16 alone without values.
FAMILY_CASES = {"Gemma-2-9B": "bfloat16, weights in float32", "Qwen3-30B-A3B": "bfloat16, weights in bfloat16"}
ROWS = 64
PROMPTS = (96, 160)
"""Shortest and longest prompt, in tokens; the lengths of the rows are spread between them."""
FEW, MORE = 2, 4
"""Tokens sampled for each row in the two runs; no step between them clears slots of the cache."""
NO_LAUNCH = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::_unsafe_view",
}


@dataclass(frozen=True)
class Case:
    """A model's types, and what of it trains."""

    dtype: torch.dtype
    """What is computed in"""
    kept: torch.dtype
    """What the weights are kept in"""
    rank: int = 0
    """Of a LoRA adapter on all linear layers, in float32; 0: there is none, and all weights train"""
    frozen: bool = False
    """True: no weight trains"""


CASES = {
    "bfloat16, weights in float32": Case(torch.bfloat16, torch.float32),
    "bfloat16, weights in bfloat16": Case(torch.bfloat16, torch.bfloat16),
    "bfloat16, weights in bfloat16, frozen": Case(torch.bfloat16, torch.bfloat16, frozen=True),
    "bfloat16, LoRA": Case(torch.bfloat16, torch.bfloat16, rank=16),
    "float32": Case(torch.float32, torch.float32),
    "float32, frozen": Case(torch.float32, torch.float32, frozen=True),
}


class Counter(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: collections.Counter[str] = collections.Counter()
        self.to_host = 0
        self.cast_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            self.to_host += 1
            return False if args[0].dtype == torch.bool else 0
        # In inference mode composite operations (linear, to, reshape) come whole: what they are made of is counted.
        if name.startswith("aten::"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if any(_is_fake(value) for value in [*_flat(args), *_flat((result,))]):
            self._count(func, args, result)
        return result

    def _count(self, func: Any, args: Any, result: Any) -> None:
        name = func._schema.name
        if func.is_view or name in NO_LAUNCH or not name.startswith("aten::"):
            return
        if name in ("aten::_to_copy", "aten::copy_", "aten::lift_fresh_copy"):
            source = args[1] if name == "aten::copy_" else args[0]
            if source.dtype == torch.float32 and result.dtype != torch.float32:
                self.cast_bytes += source.numel() * 4
        self.launches[name] += 1
        # On a GPU what a product is added to is copied to the result first; a vector may be added by the product.
        if name in ("aten::addmm", "aten::baddbmm") and args[0].dim() > 1:
            self.launches["aten::copy_"] += 1


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute is `value`, if there is one."""
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def fake_policy(case: Case, shape: dict[str, Any]) -> Any:
    """A policy of a shape, without values."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from rlvr.config import LoraConfig
    from rlvr.policy import Policy
    from rlvr.policy.adapters import add_adapter

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), eos_token="<eos>", pad_token="<eos>")
    sizes = {"model_type": "qwen2", "attention": "sdpa", **shape}
    attention = sizes.pop("attention")
    config = AutoConfig.for_model(**sizes, eos_token_id=1)
    config._attn_implementation = attention
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=case.kept).eval().requires_grad_(not case.frozen)
        if case.rank:
            model = add_adapter(model, LoraConfig(r=case.rank), 0).eval()
    put_on_cpu(model)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == config.tie_word_embeddings
    policy = Policy(model, tokenizer, case.dtype)
    # Both are found by trials that read values, of which fake tensors have none.
    policy.__dict__["head_is_enough"] = True
    return policy


def put_on_cpu(model: Any) -> None:
    """Tensors of a CPU, without values, in place of those of the meta device, which peft can put an adapter on."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in made:
                values = torch.empty(weight.shape, dtype=weight.dtype)
                made[id(weight)] = torch.nn.Parameter(values, requires_grad=weight.requires_grad)
            setattr(module, name, made[id(weight)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, "a"))


def one_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """Attention as one operation, counted as `aten::neg`. Its output lies as that of torch's kernels for a GPU does:
    [R, tokens, heads, D] in memory."""
    return torch.ops.aten.neg(query.new_empty(query.transpose(1, 2).shape)).transpose(1, 2)


def one_norm(x: Any, *_: Any, **__: Any) -> Any:
    """torch's fused norm, counted as `aten::neg`."""
    return torch.ops.aten.neg(x)


def rms_form(norm: Any) -> tuple[float, float]:
    """Epsilon and offset of an RMS norm, by its class: Gemma's weights are offsets from 1."""
    return 1e-6, float("Gemma" in type(norm).__name__)


def run(policy: Any, tokens: int) -> Counter:
    """Sample `tokens` tokens for every row and count."""
    from rlvr.rollout import HFEngine, Request, Sampling, decoder, hf, rows

    # Modules in which the library has, or had, what is replaced.
    decoding = [decoder]
    for name in ("decoder_parts", "decoder_products"):
        with contextlib.suppress(ModuleNotFoundError):
            decoding.append(importlib.import_module(f"rlvr.rollout.{name}"))

    shortest, longest = PROMPTS
    lengths = [shortest + (longest - shortest) * row // (ROWS - 1) for row in range(ROWS)]
    requests = [Request((2,) * length, Sampling(tokens, ignore_eos=True), seed) for seed, length in enumerate(lengths)]
    counter = Counter()

    def uniforms(seed: int, count: int) -> Any:
        return SimpleNamespace(numpy=lambda: np.zeros(count))

    def host_copy(tensor: Any, *_: Any, **__: Any) -> Any:
        counter.to_host += 1
        values = np.zeros(tuple(tensor.shape), np.int64 if tensor.dtype == torch.int64 else np.float32)
        return SimpleNamespace(numpy=lambda: values)

    async def ask(engine: Any) -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    # The trial of the short way reads values too; it was called by another module before.
    caller = decoder if hasattr(decoder, "proven") else hf
    with contextlib.ExitStack() as stack:
        for module in decoding:
            for name in ("rms_epsilon", "_rms_epsilon"):
                stack.enter_context(replaced(module, name, lambda norm: 1e-6))
            stack.enter_context(replaced(module, "_rms_form", rms_form))
            stack.enter_context(replaced(module, "by_parts", lambda device, dtype: False))
            stack.enter_context(replaced(module, "sums_in_float32", lambda device, dtype: True))
        for change in (
            replaced(caller, "proven", lambda policy: decoder.Steps(policy)),
            replaced(rows, "uniforms", uniforms),
            replaced(torch.Tensor, "cpu", host_copy),
            replaced(torch.nn.functional, "scaled_dot_product_attention", one_attention),
            replaced(torch.nn.functional, "rms_norm", one_norm),
        ):
            stack.enter_context(change)
        stack.enter_context(counter)
        asyncio.run(ask(HFEngine(policy)))
    return counter


def step_of(case: Case, shape: dict[str, Any]) -> dict[str, Any]:
    """Figures of a step of a model of `shape`."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = fake_policy(case, shape)
        run(policy, 1)  # what is made once
        few, more = run(policy, FEW), run(policy, MORE)
    steps = MORE - FEW
    launches = more.launches - few.launches
    return {
        "launches": round(launches.total() / steps, 1),
        "copies_to_host": round((more.to_host - few.to_host) / steps, 2),
        "mib_cast_from_float32": round((more.cast_bytes - few.cast_bytes) / steps / 2**20, 2),
        "by_operation": {op: round(count / steps, 2) for op, count in launches.most_common()},
    }


def of_layers(one: dict[str, Any], two: dict[str, Any], layers: int) -> dict[str, Any]:
    """The figures of a model of `layers` layers from those of models of one and of two."""

    def line(first: float, second: float) -> float:
        return round(first + (layers - 1) * (second - first), 2)

    names = dict.fromkeys([*two["by_operation"], *one["by_operation"]])
    by_operation = {name: [figures["by_operation"].get(name, 0.0) for figures in (one, two)] for name in names}
    whole = {name: line(*pair) for name, pair in by_operation.items()}
    return {
        **{name: line(one[name], two[name]) for name in one if name != "by_operation"},
        "launches_a_layer": two["launches"] - one["launches"],
        "by_operation": dict(sorted(whole.items(), key=lambda item: -item[1])),
        "a_layer": {name: second - first for name, (first, second) in by_operation.items() if second != first},
    }


def measure(all_layers: bool = False) -> dict[str, Any]:
    """Figures of a step of Qwen2.5-0.5B by case, and of the other families."""
    if all_layers:
        return {name: step_of(case, SHAPE) for name, case in CASES.items()}
    found = {name: by_layers(case, SHAPE) for name, case in CASES.items()}
    for name, shape in FAMILIES.items():
        found[name] = by_layers(CASES[FAMILY_CASES[name]], shape)
    return found


def by_layers(case: Case, shape: dict[str, Any]) -> dict[str, Any]:
    """Figures of a step, from models of one and of two layers."""
    return of_layers(*(step_of(case, shape | {"num_hidden_layers": n}) for n in (1, 2)), shape["num_hidden_layers"])


def measured_in(checkout: Path, all_layers: bool) -> dict[str, Any]:
    """`measure` with the library of another checkout, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, __file__, "--inner", *(["--all-layers"] if all_layers else [])]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the library as it was before")
    parser.add_argument("--output", type=result_file("format", "command", "shape", "step"))
    parser.add_argument("--all-layers", action="store_true", help="run all 24 layers instead of one and two")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inner:
        print(json.dumps(measure(given.all_layers)))
        return
    checkouts = {"after": HERE.parents[1]}
    if given.before is not None:
        checkouts = {"before": given.before.resolve(), **checkouts}
    step = {side: measured_in(checkout, given.all_layers) for side, checkout in checkouts.items()}
    for side, cases in step.items():
        for name, figures in cases.items():
            print(side, name, {key: value for key, value in figures.items() if key != "by_operation"})
    result = {
        "format": FORMAT,
        "command": "python scripts/benchmarks/decode_launches.py --before CHECKOUT",
        "shape": SHAPE | {"rows": ROWS, "prompts": PROMPTS},
        "families": FAMILIES,
        "step": step,
    }
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
