"""Count kernel launches, bytes and FLOPs of an update at the sizes of real models, for rlvr and for its peers' heads.

    python scripts/benchmarks/launches.py --sources FOLDER [--output scripts/benchmarks/launches.json]

A micro-batch of 16,384 tokens: 8 rollouts, each a prompt of 512 tokens and a response of 1,536, which is trained;
weights, activations and gradients in bfloat16, no gradient checkpointing, log-probs with a gradient and entropies
without. Nothing is computed: tensors have shapes and no contents (dispatch_counts.py), so no GPU is needed and no
machine changes a number. The decoder of TRL's and verl's rows is the stock model of transformers with flash attention;
prime-rl has its own layers, which are not counted. rlvr's rows are counted on that decoder too (padded rows), and on
its own packed row, alone and with the prompt of all rollouts computed once. The heads of the peers are theirs: the
functions that PEERS names are taken from their files, which FOLDER has by the name of the repository (owner+name/path):

    git --git-dir CLONE show COMMIT:PATH > FOLDER/OWNER+NAME/PATH
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from decoder_counts import MODELS, decoder_counts, packed_counts
from dispatch_counts import Counting, Counts
from result_file import result_file, result_head

from rlvr.policy import fused_head, head_devices, head_kernels, head_tiles
from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.model import Head

ROLLOUTS = 8
PROMPT = 512
RESPONSE = 1536
TOKENS = ROLLOUTS * (PROMPT + RESPONSE)
TRAINED = ROLLOUTS * RESPONSE
BEFORE = "rlvr before: torch, 2,048 x 2,048"
TORCH = "rlvr without triton: 2,048 x 16,384"
OURS = "rlvr"
PACKED = {f"{OURS}, packed": False, f"{OURS}, packed, prompts shared": True}
"""The rows that stand packed, and whether the prompt of all rollouts is computed once."""
HEADS = {"Qwen2.5-0.5B": 896, "Qwen2.5-7B": 3584, "Qwen3-30B-A3B": 2048}
"""Widths of the heads, whose vocabulary is that of the model."""


@dataclass(frozen=True)
class Peer:
    """A peer's functions, and the file that they are in."""

    repository: str
    commit: str
    path: str
    names: tuple[str, ...]


PEERS = {
    "TRL": Peer(
        "huggingface+trl",
        "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        "trl/trainer/utils.py",
        ("selective_log_softmax", "entropy_from_logits"),
    ),
    "TRL, Liger loss": Peer(
        "linkedin+Liger-Kernel",
        "ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c",
        "src/liger_kernel/chunked_loss/fused_linear_ppo.py",
        (
            "_SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE",
            "_SELECTIVE_LOGPROB_SEQ_CHUNK_SIZE",
            "_selective_logprob_forward",
            "_selective_logprob_backward",
            "_ChunkedSelectiveLogProbFunction",
        ),
    ),
    "verl, fused kernels in torch": Peer(
        "volcengine+verl",
        "b178a3cd56f58b2d502255daba591e92833930a7",
        "verl/utils/experimental/torch_functional.py",
        ("_fused_linear_for_ppo_fwd", "_fused_linear_for_ppo_bwd", "FusedLinearForPPOFunction"),
    ),
    "prime-rl": Peer(
        "PrimeIntellect-ai+prime-rl",
        "559b44772e471d1538537b8805cc77f3824a5e64",
        "src/prime_rl/trainer/models/layers/lm_head.py",
        ("_online_logsumexp_and_weighted_update", "_SequenceChunkedLogProbEntropyFn"),
    ),
}


def functions(peer: Peer, folder: Path) -> dict[str, Any]:
    """The definitions `peer.names` of the peer's file, without the imports of the rest of it."""
    tree = ast.parse((folder / peer.repository / peer.path).read_text(encoding="utf-8"))

    def name(node: ast.stmt) -> str:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            return node.targets[0].id
        return node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ""

    wanted = [node for node in tree.body if name(node) in peer.names]
    future = ast.parse("from __future__ import annotations").body
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(ast.Module(future + wanted, []), peer.path, "exec"), space)
    return space


class Problem:
    """Hidden states of all tokens and of the trained ones, the weights of the head, token ids and temperatures."""

    def __init__(self, width: int, vocabulary: int, trained: int = TRAINED) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        self.hidden = empty(TOKENS, width).requires_grad_()
        self.trained = empty(trained, width).requires_grad_()
        self.weight = empty(vocabulary, width).requires_grad_()
        tokens = max(TOKENS, trained)
        self.ids = empty(tokens, dtype=torch.int64)
        self.temperature = empty(tokens, dtype=torch.float32)


Way = Callable[[Problem, dict[str, Any]], torch.Tensor]


def ours(problem: Problem, _: dict[str, Any]) -> torch.Tensor:
    head = Head((problem.trained,), (problem.weight,))
    asked = {"logprobs": True, "entropy": False}
    trained = len(problem.trained)
    # What the learner knows on the host: one temperature for all tokens, and the range of the ids.
    values = fused_statistics(
        head, problem.temperature[:trained], asked, problem.ids[:trained], id_range=(0, 1), common_temperature=1.0
    )
    return values["logprobs"].sum()


def trl(problem: Problem, theirs: dict[str, Any]) -> torch.Tensor:
    """grpo_trainer.py: _get_per_token_logps_and_entropies."""
    rows = problem.hidden.unflatten(0, (ROLLOUTS, -1))[:, -(RESPONSE + 1) :]
    logits = torch.nn.functional.linear(rows, problem.weight)[:, :-1][:, -RESPONSE:]
    logits.div_(1.0)
    logprobs = theirs["selective_log_softmax"](logits, problem.ids[:TRAINED].view(ROLLOUTS, -1))
    with torch.no_grad():
        theirs["entropy_from_logits"](logits)
    return logprobs.sum()


def trl_liger(problem: Problem, theirs: dict[str, Any]) -> torch.Tensor:
    """fused_linear_ppo.py: one sequence at a time, forward and backward, the gradient of the weights added up."""
    added = torch.zeros_like(problem.weight)
    for rows in problem.trained.detach().split(RESPONSE):
        with torch.enable_grad():
            rows = rows.requires_grad_()
            weight = problem.weight.detach().requires_grad_()
            function = theirs["_ChunkedSelectiveLogProbFunction"]
            size = theirs["_SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE"]
            logprobs = function.apply(rows, weight, problem.ids[:RESPONSE], None, 1.0, size)
            of_weight = torch.autograd.grad(logprobs.sum(), [rows, weight])[1]
        added.add_(of_weight)
    # The gradients are there already, and are multiplied by that of the loss.
    return (problem.trained.sum() + problem.weight.sum()) * 0


def verl_torch(problem: Problem, theirs: dict[str, Any]) -> torch.Tensor:
    """dense_common.py: forward_with_torch_backend, over all tokens of the packed row, chunks of 512."""
    apply = theirs["FusedLinearForPPOFunction"].apply
    return apply(problem.hidden, problem.weight, problem.ids, 1.0, 512)[0].sum()


def prime_rl(problem: Problem, theirs: dict[str, Any]) -> torch.Tensor:
    """FusedOutputLinear.forward, over all tokens of the packed row, chunks of 8,192 (configs/trainer.py)."""
    apply = theirs["_SequenceChunkedLogProbEntropyFn"].apply
    return apply(problem.hidden, problem.weight, problem.ids, 1.0 / problem.temperature, 8192)[0].sum()


PEER_WAYS: dict[str, Way] = {
    "TRL": trl,
    "TRL, Liger loss": trl_liger,
    "verl, fused kernels in torch": verl_torch,
    "prime-rl": prime_rl,
}


def counted(
    way: Way, problem: Problem, theirs: dict[str, Any], kernels: bool = False, wide_sums: bool = True
) -> dict[str, Counts]:
    """The forward and the backward pass of a head."""
    with Counting() as mode:

        def launch(kernel: Any, grid: Any, tile: torch.Tensor, *arguments: Any, **constants: Any) -> None:
            # The backward kernel has the tile twice: it reads the products and writes the gradients.
            mode.counts.kernel([tile, *(a for a in arguments if isinstance(a, torch.Tensor))])

        with (
            mock.patch.object(head_kernels, "_launch", launch),
            mock.patch.object(fused_head, "INTERPRETED", kernels),
            # True on a GPU of compute capability 8 and above.
            mock.patch.object(fused_head, "sums_wide", return_value=wide_sums),
        ):
            total = way(problem, theirs)
            forward = mode.counts
            mode.counts = Counts()
            if total.requires_grad:
                total.backward()
    return {"forward": forward, "backward": mode.counts}


def narrow(device: torch.device) -> head_devices.TileSize:
    """The tiles that a GPU had before there were kernels: 2,048 tokens by 2,048 entries."""
    return head_devices.TileSize(2048, 1 << 22)


def own_heads(width: int, vocabulary: int, trained: int = TRAINED) -> dict[str, dict[str, Counts]]:
    """The counts of the library's head as it was, without triton and with it."""
    found = {}
    with mock.patch.object(head_tiles, "gpu_tile", narrow):
        found[BEFORE] = counted(ours, Problem(width, vocabulary, trained), {}, wide_sums=False)
    found[TORCH] = counted(ours, Problem(width, vocabulary, trained), {})
    found[OURS] = counted(ours, Problem(width, vocabulary, trained), {}, kernels=True)
    return found


def heads(folder: Path | None, width: int, vocabulary: int) -> dict[str, dict[str, Counts]]:
    """Each way's counts, by its name."""
    found = own_heads(width, vocabulary)
    for name, way in PEER_WAYS.items() if folder else ():
        assert folder is not None
        found[name] = counted(way, Problem(width, vocabulary), functions(PEERS[name], folder))
    return found


def tiles(trained: int, vocabulary: int, columns: int) -> int:
    """Tiles of 2,048 tokens."""
    return -(-trained // 2048) * -(-vocabulary // columns)


def own_launches(width: int, vocabulary: int) -> dict[str, Any]:
    """Launches of the library's head for 16,384 trained tokens, and for each of their tiles."""
    table = {}
    for name, passes in own_heads(width, vocabulary, TOKENS).items():
        count = tiles(TOKENS, vocabulary, 2048 if name == BEFORE else head_devices.COLUMNS)
        table[name] = {"tiles": count} | {
            key: {"launches": counts.launches, "a tile": round(counts.launches / count, 2)}
            for key, counts in passes.items()
        }
    return table


def row(counts: Counts, tokens: int) -> dict[str, float]:
    """Launches, and bytes and FLOPs for each token of the micro-batch."""
    return {
        "launches": counts.launches,
        "bytes a token": round(counts.bytes / tokens),
        "flops a token": round(counts.flops / tokens),
    }


def result(folder: Path | None, models: list[str]) -> dict[str, Any]:
    """All counts, as they are written."""
    table: dict[str, Any] = {}
    for model in models:
        width = HEADS[model]
        vocabulary = MODELS[model]["vocab_size"]
        ways = heads(folder, width, vocabulary)
        decoder = decoder_counts(model, ROLLOUTS, PROMPT, RESPONSE)
        packed = {name: packed_counts(model, ROLLOUTS, PROMPT, RESPONSE, shared) for name, shared in PACKED.items()}
        of_head = ways[OURS]["forward"] + ways[OURS]["backward"]
        # Needed of the head: logits once, and two products for the gradients.
        head_needed = 6 * TRAINED * vocabulary * width
        recomputed = 2 * TRAINED * vocabulary * width
        table[model] = {
            "hidden size": width,
            "vocabulary": vocabulary,
            "head of 16,384 trained tokens": own_launches(width, vocabulary),
            "heads": {name: {k: row(c, TOKENS) for k, c in passes.items()} for name, passes in ways.items()},
            "decoder": row(decoder.executed, TOKENS),
            "packed decoder": {name: row(counts, TOKENS) for name, counts in packed.items()},
            "update": {
                name: row(decoder.executed + passes["forward"] + passes["backward"], TOKENS)
                for name, passes in ways.items()
            }
            | {name: row(counts + of_head, TOKENS) for name, counts in packed.items()},
            "executed over needed flops": {
                "needed flops a token": round((decoder.needed + head_needed) / TOKENS),
                "without the head's second logits": round(
                    (decoder.executed.flops + of_head.flops - recomputed) / (decoder.needed + head_needed), 4
                ),
                "all": round((decoder.executed.flops + of_head.flops) / (decoder.needed + head_needed), 4),
            },
        }
    return table


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Launches, bytes and FLOPs of an update, counted without a GPU.")
    parser.add_argument("--sources", type=Path, help="folder with the files of the peers; without it they are left out")
    parser.add_argument("--models", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--output", type=result_file("command", "micro-batch", "peers"), help="also write JSON here")
    arguments = parser.parse_args()
    results = {
        **result_head("launches.py --sources FOLDER --output scripts/benchmarks/launches.json", "transformers"),
        "micro-batch": {"rollouts": ROLLOUTS, "prompt": PROMPT, "response": RESPONSE, "tokens": TOKENS},
        "peers": {name: asdict(peer) for name, peer in PEERS.items()},
        "models": result(arguments.sources, arguments.models),
    }
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
