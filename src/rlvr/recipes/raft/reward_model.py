"""A trained reward model as a term of the reward: RAFT and SuperHF rank their samples by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rlvr.components import RewardTerm
from rlvr.errors import ConfigError
from rlvr.recipes.raft.clean_reply import own_turn
from rlvr.records import Batch, Rollout
from rlvr.rewards.terms import TermSpec

COLUMN = "reward_model"
"""The name under which a score is kept with its rollout."""

Scorer = Callable[[Sequence[str]], Sequence[float]]
"""From texts to scores, in their order."""


def load_scorer(path: str, device: str, max_tokens: int, batch_size: int) -> Scorer:
    """The first logit of a sequence classifier in Hugging Face format for each text, without an activation.

    As the reward pipeline of OptimalScale/LMFlow, commit f3597db, examples/raft_align.py (`function_to_apply="none"`,
    the first of all scores); texts are cut to `max_tokens` on the right.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForSequenceClassification.from_pretrained(path).to(device).eval()
    # A classifier of a decoder reads the last token that is no padding, for which it has to know the padding's id.
    model.config.pad_token_id = tokenizer.pad_token_id

    @torch.no_grad()
    def score(texts: Sequence[str]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(texts), batch_size):
            part = list(texts[start : start + batch_size])
            inputs = tokenizer(part, return_tensors="pt", padding=True, truncation=True, max_length=max_tokens)
            scores += model(**inputs.to(device)).logits[:, 0].float().tolist()
        return scores

    return score


@dataclass
class RewardModelScore(RewardTerm):
    """The score that a reward model gives to the prompt with the reply; NaN for a discarded reply.

    A rollout with NaN is not ranked and does not train. A score is computed once for each rollout and kept with it. The
    model is loaded when the first reply is scored, once on each rank.
    """

    path: str
    """A folder or hub name of a sequence classifier in Hugging Face format, with its tokenizer."""
    device: str = "cpu"
    """The device that it computes on, such as `cuda:0`."""
    max_tokens: int = 1024
    """Tokens of prompt and reply; what is longer is cut on the right."""
    batch_size: int = 8
    """Texts in one forward pass, at least 1."""
    turn: str = "Human:"
    """A regular expression: what begins the other side's turn in a reply. It and what follows are not scored."""
    of: TermSpec = "verdict"
    """The term that says which replies are kept: those with a value above 0."""
    inner: ClassVar = ("of",)

    _scorer: Scorer | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"the reward RewardModelScore: batch_size is {self.batch_size}: it must be at least 1")

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        # `> 0` is false for NaN: an undecided reply is not kept either.
        kept = [rollout for rollout, value in zip(batch.rollouts, of, strict=True) if value > 0]
        unscored = [rollout for rollout in kept if COLUMN not in rollout.term_values]
        if unscored:
            if self._scorer is None:
                self._scorer = load_scorer(self.path, self.device, self.max_tokens, self.batch_size)
            for rollout, score in zip(unscored, self._scorer([self.text(r) for r in unscored]), strict=True):
                rollout.term_values[COLUMN] = float(score)
        return np.asarray(
            [r.term_values[COLUMN] if value > 0 else np.nan for r, value in zip(batch.rollouts, of, strict=True)],
            dtype=np.float64,
        )

    def text(self, rollout: Rollout) -> str:
        """The text that is scored: the prompt as the data have it, and the reply without white space around it."""
        prompt = rollout.task.prompt
        if not isinstance(prompt, str):
            prompt = "\n\n".join(str(message["content"]) for message in prompt)
        return f"{prompt} {own_turn(rollout.text, self.turn)}"
