"""Record the values of verl's policy losses on fixed tensors, by running verl's own code:
tests/losses/data/verl_losses.json.

    pip download verl --no-deps && unzip verl-*.whl -d FOLDER        (0.9.1 was used)
    python scripts/peers/verl_losses.py FOLDER                       (from the repository's root; needs torch)

Only verl's losses run; their other imports (omegaconf, tensordict, its configuration classes) are replaced by
empty stand-ins. The test that reads the file, tests/losses/test_losses_of_peers.py, needs no verl. The tensors are
those of tests/losses/data/trl_losses.json.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

BASE: dict[str, Any] = {
    "loss_mode": "vanilla",
    "agg": "token-mean",
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "policy_loss": {},
    "weighted": False,
}
CASES: list[dict[str, Any]] = [
    {},
    {"agg": "seq-mean-token-mean"},
    {"agg": "seq-mean-token-sum"},
    {"agg": "seq-mean-token-sum-norm"},
    {"clip_ratio_c": 1.5},
    {"weighted": True},
    {"loss_mode": "dppo_tv", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0},
    {"loss_mode": "dppo_tv", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.1},
    {"loss_mode": "dppo_kl", "clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 20.0},
    {"loss_mode": "gspo", "agg": "seq-mean-token-mean", "clip_ratio_low": 0.02, "clip_ratio_high": 0.04},
    {"loss_mode": "sapo", "agg": "seq-mean-token-mean"},
    {"loss_mode": "gpg"},
    {"loss_mode": "clip_cov", "policy_loss": {"clip_cov_ratio": 0.5, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0}},
    {"loss_mode": "kl_cov", "policy_loss": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}},
    {"loss_mode": "geo_mean", "clip_ratio_low": 0.3, "clip_ratio_high": 0.2},
    {"loss_mode": "dro", "policy_loss": {"dro_beta": 0.3}},
    {"loss_mode": "cispo"},
    {"loss_mode": "bypass_mode", "policy_loss": {"rollout_correction": {"loss_type": "ppo_clip"}}},
    {
        "loss_mode": "bypass_mode",
        "policy_loss": {
            "rollout_correction": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.3}
        },
    },
]
ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")


class Settings:
    """What a loss reads of verl's configuration, as attributes and by `get`."""

    def __init__(self, options: dict[str, Any]) -> None:
        vars(self).update(options)
        self.policy_loss = Fields(options["policy_loss"])
        self.global_batch_info: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Fields(dict):  # type: ignore[type-arg]
    """A mapping whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def load(folder: Path) -> Any:
    """verl's module of losses, with stand-ins for what it imports beside torch and its own functions."""
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    sys.modules["verl.utils"].as_torch_index = sys.modules["verl.utils"].group_mean_std = None  # type: ignore[attr-defined]
    for name in (
        "omegaconf",
        "tensordict",
        "transformers",
        "verl.utils.device",
        "verl.protocol",
        "verl.trainer.config",
        "verl.trainer.config.algorithm",
        "verl.workers",
        "verl.workers.config",
        "verl.workers.config.actor",
    ):
        sys.modules[name] = MagicMock()
    sys.modules["verl.workers.config"].ActorConfig = Settings  # type: ignore[attr-defined]
    sys.modules["verl.trainer.config"].AlgoConfig = type("AlgoConfig", (), {})  # type: ignore[attr-defined]
    sys.modules["verl.protocol"].DataProto.from_dict = lambda tensors: types.SimpleNamespace(batch=tensors)  # type: ignore[attr-defined]
    return importlib.import_module("verl.trainer.ppo.core_algos")


def padded(rows: list[list[float]], width: int) -> torch.Tensor:
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def main() -> None:
    algorithms = load(Path(sys.argv[1]))
    rows = json.loads(Path("tests/losses/data/trl_losses.json").read_text())["inputs"]
    width = max(map(len, rows["old"]))
    mask = padded([[1.0] * len(row) for row in rows["old"]], width)
    old, reference = padded(rows["old"], width), padded(rows["reference"], width)
    advantages = torch.tensor(rows["advantages"], dtype=torch.float64)[:, None].expand_as(mask)
    weights = torch.where(mask > 0, (old - padded(rows["sampling"], width)).exp().clamp_max(1.1), 1.0)

    def by_row(values: torch.Tensor) -> list[list[float]]:
        return [[float(f"{v:.9g}") for v in row[on > 0].tolist()] for row, on in zip(values, mask, strict=True)]

    recorded: dict[str, Any] = {"peer": "verl 0.9.1", "width": width, "cases": [], "kl": []}
    for case in CASES:
        options = BASE | case
        logprobs = padded(rows["logprobs"], width).requires_grad_()
        loss, _ = algorithms.get_policy_loss_fn(options["loss_mode"])(
            old_log_prob=old,
            log_prob=logprobs,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=options["agg"],
            config=Settings(options),
            rollout_is_weights=weights if options["weighted"] else None,
        )
        loss.backward()
        recorded["cases"].append({"options": options, "loss": loss.item(), "gradient": by_row(logprobs.grad)})
    for name in ESTIMATORS:
        logprobs = padded(rows["logprobs"], width).requires_grad_()
        value = (algorithms.kl_penalty(logprobs, reference, name) * mask).sum()
        value.backward()
        recorded["kl"].append({"name": name, "value": value.item(), "gradient": by_row(logprobs.grad)})
    path = Path("tests/losses/data/verl_losses.json")
    path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    print(f"{path}: {len(recorded['cases'])} cases, {path.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
