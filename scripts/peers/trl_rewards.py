"""Train one step with TRL's GRPOTrainer on our verifiers as `reward_funcs`, and print the rewards that TRL logs.

Run it with the Python of an environment that has TRL (1.16.0 was used) and this package:
`python scripts/peers/trl_rewards.py`. It needs no network and no GPU. tests/verifiers/test_reward_functions.py makes
the same calls without TRL.

Its result, with a random model and one step: a loss near 0, `rewards/MathVerifier/mean` 0.06 and, for a plain
function that the pool runs in a worker process, `rewards/digits/mean` 0.84.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlvr.verifiers import MathVerifier
from rlvr.verifiers.reward_functions import trl_reward

PIECES = ["<pad>", "<eos>", "<unk>", *"0123456789=?+"]


def digits(completion: str) -> float:
    """The share of digits: a function that the pool runs in a worker process."""
    return sum(char.isdigit() for char in completion) / max(len(completion), 1)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    raw = Tokenizer(models.WordLevel({piece: at for at, piece in enumerate(PIECES)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, padding_side="left", **special)


def main() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(PIECES),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    any_digit = [str(n) for n in range(10)]  # a list of answers, of which a random model finds one now and then
    rows = [{"prompt": f"{n}+1=?", "solution": any_digit} for n in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=1,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        rewards = [trl_reward(MathVerifier(fallback="last_number"), answer="solution"), trl_reward(digits)]
        trainer = GRPOTrainer(
            model=Qwen2ForCausalLM(config),
            reward_funcs=rewards,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )
        trainer.train()
    logged: dict[str, Any] = next(row for row in trainer.state.log_history if "reward" in row)
    for name in ("loss", "reward", "rewards/MathVerifier/mean", "rewards/digits/mean"):
        print(f"{name}: {logged[name]:.4g}")
        assert math.isfinite(float(logged[name]))
    assert 0 < logged["rewards/MathVerifier/mean"] < 1
    assert 0 < logged["rewards/digits/mean"] < 1


if __name__ == "__main__":
    main()
