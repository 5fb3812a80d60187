"""Score responses with verl's own reward managers and our verifiers as `compute_score`.

    pip install --no-deps --target FOLDER verl tensordict omegaconf codetiming pyvers orjson ray (verl 0.9.1 was used)
    python scripts/peers/verl_rewards.py FOLDER (from the repository's root; needs torch and transformers)

`naive`, `batch`, `prime` (a pool of processes) and the reward loop's `naive` (threads) run on a verl DataProto. The
loop's `remote` manager is left out, since it needs a Ray cluster; it sends the function to a Ray actor, pickled. No
network, no GPU. tests/verifiers/test_reward_functions.py makes the same calls without verl.

All four gave the expected scores (1, 1, 0, 1).
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy
import torch

from rlvr.verifiers import MathVerifier
from rlvr.verifiers.reward_functions import verl_batch_score, verl_score

ANSWERS = ["42", "(x+1)^2", "42", "1/2"]
RESPONSES = [r"\boxed{42}", r"\boxed{x^2+2x+1}", r"\boxed{41}", r"\boxed{0.5}"]
EXPECTED = [1.0, 1.0, 0.0, 1.0]
LONGEST = max(map(len, RESPONSES))


class Characters:
    """A tokenizer with one token for each character: its code point."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
        """The text of a row of tokens."""
        return "".join(chr(int(token)) for token in ids if token)

    def batch_decode(self, rows: torch.Tensor, skip_special_tokens: bool = True) -> list[str]:
        """The texts of a batch of tokens."""
        return [self.decode(row) for row in rows]


def batch() -> Any:
    """The batch as verl's trainer hands it to a reward manager: prompts left-padded, responses right-padded."""
    from verl import DataProto

    prompts = torch.tensor([[0, ord("?")]] * len(ANSWERS))  # (rows, 2)
    responses = torch.tensor(
        [[ord(char) for char in text.ljust(LONGEST, "\0")] for text in RESPONSES]
    )  # (rows, LONGEST)
    mask = torch.cat([prompts != 0, responses != 0], dim=1).long()
    golds: list[Any] = [{"ground_truth": answer} for answer in ANSWERS]
    golds[0] = {"ground_truth": numpy.array(["42", "42.0"], dtype=object)}  # as a parquet file with lists is read
    return DataProto.from_dict(
        tensors={"prompts": prompts, "responses": responses, "attention_mask": mask},
        non_tensors={
            "reward_model": numpy.array(golds, dtype=object),
            "data_source": numpy.array(["made"] * len(ANSWERS), dtype=object),
            "extra_info": numpy.array([{"index": at} for at in range(len(ANSWERS))], dtype=object),
        },
    )


def show(name: str, scores: list[float]) -> None:
    """Print the scores and compare them with the expected ones."""
    print(f"{name}: {scores}")
    assert scores == EXPECTED, name


def main(folder: str) -> None:
    """Score the batch with each manager. `folder` holds verl."""
    sys.path.append(folder)
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls as loop_manager
    from verl.workers.reward_manager import get_reward_manager_cls as manager

    tokenizer = Characters()
    compute_score = verl_score(MathVerifier())
    for name, function in (
        ("naive", compute_score),
        ("batch", verl_batch_score(MathVerifier())),
        ("prime", compute_score),
    ):
        rewards = manager(name)(tokenizer=tokenizer, num_examine=0, compute_score=function)(batch())
        show(name, rewards.sum(dim=1).tolist())

    async def loop_scores() -> list[float]:
        rewards = loop_manager("naive")(None, tokenizer, compute_score)
        rows = batch()
        found = await asyncio.gather(*(rewards.run_single(rows[at : at + 1]) for at in range(len(ANSWERS))))
        return [one["reward_score"] for one in found]

    show("reward loop", asyncio.run(loop_scores()))


if __name__ == "__main__":
    main(sys.argv[1])
