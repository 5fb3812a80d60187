"""Record the values of TRL's GRPO losses on fixed tensors, by running TRL's own code:
tests/losses/data/trl_losses.json.

Run it with the Python of an environment that has TRL (1.16.0 was used), from the repository's root:
`python scripts/peers/trl_losses.py`. The test that reads the file, tests/losses/test_losses_of_peers.py, needs no TRL.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

B, T, LONGEST = 8, 9, 12
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
DEFAULTS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "vllm_correction": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


def cases() -> list[dict[str, Any]]:
    """The options of each case, as far as they differ from DEFAULTS."""
    levels = [{"loss_type": t, "importance_sampling_level": level} for t in TYPES for level in ("token", "sequence")]
    for case in levels:
        if case["loss_type"] == "cispo":
            case["epsilon_high"] = 1.5  # TRL's is the bound itself, not its distance from 1
    options: list[dict[str, Any]] = [
        {"delta": 1.5},
        {"delta": 1.5, "importance_sampling_level": "sequence"},
        {"beta": 0.3},
        {"beta": 0.3, "use_bias_correction_kl": True},
        {"top_entropy_quantile": 0.4},
        {"top_entropy_quantile": 0.25, "loss_type": "dapo"},
        {"off_policy_mask_threshold": 0.05},
        {"vllm_correction": True, "loss_type": "dapo"},
        {"vllm_correction": True, "loss_type": "vespo"},
        {"entropy_coef": 0.2, "loss_type": "bnpo"},
    ]
    return levels + options


class Stub(GRPOTrainer):
    """A trainer that was never set up: only what `_compute_loss` reads."""

    def __init__(self, options: dict[str, Any], logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        self.args = SimpleNamespace(**options, steps_per_generation=1)
        for name in ("loss_type", "importance_sampling_level", "beta", "top_entropy_quantile", "entropy_coef"):
            setattr(self, name, options[name])
        self.epsilon_low, self.epsilon_high = options["epsilon"], options["epsilon_high"]
        self.off_policy_mask_threshold = options["off_policy_mask_threshold"]
        self.use_vllm = self.vllm_importance_sampling_correction = options["vllm_correction"]
        self.max_completion_length, self.current_gradient_accumulation_steps = LONGEST, 1
        self.aux_loss_enabled = self.use_adaptive_entropy = False
        self._entropy_bonus_enabled = options["entropy_coef"] != 0
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(
            gather=lambda x: x,
            reduce=lambda x, reduction="sum": x,
            pad_across_processes=lambda x, dim, pad_index: x,
            num_processes=1,
            sync_gradients=True,
        )
        self._found = logprobs, entropies

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return *self._found, None


def tensors() -> dict[str, torch.Tensor]:
    """Ragged responses whose ratios fall on both sides of every bound."""
    draw = torch.Generator().manual_seed(8)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    lengths = torch.tensor([9, 3, 5, 1, 7, 9, 2, 6])
    mask = (torch.arange(T) < lengths[:, None]).double()
    logprobs = (-normal(B, T).abs() - 0.05) * mask
    old = (logprobs - 0.35 * normal(B, T)).clamp_max(-1e-3) * mask
    return {
        "mask": mask,
        "logprobs": logprobs,
        "old": old,
        "sampling": (old + 0.1 * normal(B, T)).clamp_max(-1e-3) * mask,
        "reference": (logprobs + 0.4 * normal(B, T)).clamp_max(-1e-3) * mask,
        "entropies": normal(B, T).abs() * mask,
        "advantages": torch.tensor([1.3, -0.7, -0.4, -1.1, 0.9, 0.2, -0.6, 1.2], dtype=torch.float64),
    }


def run(options: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """TRL's loss and its gradients in the log-probs and entropies."""
    logprobs, entropies = (given[name].clone().requires_grad_() for name in ("logprobs", "entropies"))
    ids = torch.zeros(B, T, dtype=torch.int64)
    ratio = (given["old"] - given["sampling"]).exp().clamp_max(1.1)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": ids,
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": given["mask"].sum(),
    }
    if options["off_policy_mask_threshold"] is not None or options["vllm_correction"]:
        inputs["sampling_per_token_logps"] = given["sampling"]
    if options["vllm_correction"]:
        inputs["importance_sampling_ratio"] = torch.where(given["mask"] > 0, ratio, 1.0)
    loss = Stub(options, logprobs, entropies)._compute_loss(None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    by_entropy = None if entropies.grad is None or not entropies.grad.any() else entropies.grad
    return {
        "loss": float(loss),
        "gradient": _rows(logprobs.grad, given["mask"]),
        "entropy_gradient": None if by_entropy is None else _rows(by_entropy, given["mask"]),
    }


def _rows(values: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    return [[float(f"{v:.9g}") for v in row[on > 0].tolist()] for row, on in zip(values, mask, strict=True)]


def main() -> None:
    given = tensors()
    recorded = {
        "peer": f"trl {trl.__version__}",
        "longest": LONGEST,
        "inputs": {
            name: v.tolist() if v.dim() == 1 else _rows(v, given["mask"]) for name, v in given.items() if name != "mask"
        },
        "cases": [],
    }
    given = {
        name: v if name in ("mask", "advantages") else _padded(recorded["inputs"][name]) for name, v in given.items()
    }  # the rounded numbers
    for case in cases():
        options = DEFAULTS | case
        recorded["cases"].append({"options": options, **run(options, given)})
    path = Path("tests/losses/data/trl_losses.json")
    path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    print(f"{path}: {len(recorded['cases'])} cases, {path.stat().st_size} bytes", file=sys.stderr)


def _padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([row + [0.0] * (T - len(row)) for row in rows], dtype=torch.float64)


if __name__ == "__main__":
    main()
