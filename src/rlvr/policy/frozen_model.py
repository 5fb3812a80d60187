"""Frozen models beside the policy: loaded once, never trained, and asked for scores of texts.

Rows are padded on the right and cut into passes of at most so many tokens, those of similar length together. A score
depends on its own row, up to rounding: padding is masked, and each number is read at a token of the row.

What a sequence classifier scores is its own forward pass (transformers 5.19, `GenericForSequenceClassification` in
modeling_layers.py: the logits at the rightmost token that is not the configuration's pad token).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.utils import cached_file

from rlvr.config import FrozenModelConfig
from rlvr.core.hub_retries import without_retry_lines
from rlvr.errors import ConfigError
from rlvr.policy.foreign import foreign
from rlvr.policy.loading import device_of, dtype_of, located
from rlvr.policy.model import Policy

Head = Literal["sequence", "token", "causal", "none"]
"""The output of a model that is read: the scores of a sequence, of each token, next-token logits, or hidden states."""
Pooling = Literal["mean", "last", "cls"]

HEADS: dict[Head, Any] = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "causal": AutoModelForCausalLM,
    "none": AutoModel,
}
LOGITS = 1 << 24
"""Logits that are computed at once, in float32 64 MiB: those of 512 positions at a vocabulary of 32,768."""


@dataclass(frozen=True)
class EncodedText:
    """Token ids of one text, and where a tokenizer of two texts says so, the type of each (BERT's segments)."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """A model that is loaded and does not train. Calls of several threads take turns."""

    name: str
    config: FrozenModelConfig
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    config_hash: str
    """The SHA-256 of its configuration file."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it computes or its tokenizer is used, which keeps the arguments of a call."""

    @cached_property
    def context(self) -> int:
        """The longest row in tokens: what the model has positions for, and no more than its tokenizer says."""
        text = self.model.config.get_text_config()
        longest = int(foreign(text, "max_position_embeddings", 0) or 1 << 30)
        positions = foreign(foreign(self.model.base_model, "embeddings"), "position_embeddings")
        padding = foreign(positions, "padding_idx")
        if padding is not None:
            # RoBERTa's positions begin behind that of its pad token.
            longest -= padding + 1
        return min(longest, int(min(self.tokenizer.model_max_length, 1 << 30)))

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's outputs, in their order."""
        config = self.model.config
        return [str(config.id2label[number]) for number in range(int(config.num_labels))]

    @property
    def pad_id(self) -> int | None:
        """The token that rows are padded with; None where there is none, and each row is a pass by itself."""
        text = self.model.config.get_text_config()
        own = foreign(text, "pad_token_id")
        return self.tokenizer.pad_token_id if own is None else int(own)

    @cached_property
    def policy(self) -> Policy:
        """The model as one that is sampled from; of a causal LM alone."""
        return Policy(self.model, self.tokenizer, self.dtype, home=self.device)

    @property
    def has_chat_template(self) -> bool:
        """True if its tokenizer has a chat template."""
        return bool(foreign(self.tokenizer, "chat_template"))

    def row(self, ids: Sequence[int]) -> EncodedText:
        """A row of token ids."""
        return EncodedText(ids)

    def encoded(self, text: str, special: bool = True) -> EncodedText:
        """A text by itself; `special`: with the tokens that the tokenizer puts round one."""
        return _row(self.tokenizer(text, add_special_tokens=special))

    def encoded_pair(self, first: str, second: str) -> EncodedText:
        """Two texts as one row, in the tokenizer's own form of a pair."""
        return _row(self.tokenizer(first, second))

    def encoded_chat(self, messages: Sequence[Mapping[str, Any]], opened: bool = False) -> EncodedText:
        """A chat by the tokenizer's chat template; `opened`: with the begin of the assistant's next turn."""
        options = {"tokenize": True, "return_dict": False, "add_generation_prompt": opened}
        return EncodedText(self.tokenizer.apply_chat_template(list(messages), **options))

    def class_logits(self, rows: Sequence[EncodedText]) -> np.ndarray:
        """float64 [N, C]: the logits of a sequence classifier with C outputs."""
        result = np.empty((len(rows), int(self.model.config.num_labels)))
        for places, inputs in self._passes(rows):
            result[places] = self.model(**inputs).logits.double().cpu().numpy()
        return result

    def token_logits(self, rows: Sequence[EncodedText]) -> list[np.ndarray]:
        """float64 [T, C] of each row: the logits of a token classifier at each of its T tokens."""
        result: list[np.ndarray] = [np.empty(0)] * len(rows)
        for places, inputs in self._passes(rows):
            logits = self.model(**inputs).logits.double().cpu().numpy()
            for place, of_row in zip(places, logits, strict=True):
                result[place] = of_row[: len(rows[place].ids)]
        return result

    def embeddings(self, rows: Sequence[EncodedText], pooling: Pooling) -> np.ndarray:
        """float64 [N, H]: the last hidden states of each row's tokens, their mean, or that of the last or first
        token."""
        result: list[np.ndarray] = [np.empty(0)] * len(rows)
        for places, inputs in self._passes(rows):
            hidden = self.model(**inputs).last_hidden_state.double()
            for place, of_row in zip(places, hidden, strict=True):
                own = of_row[: len(rows[place].ids)]
                match pooling:
                    case "mean":
                        pooled = own.mean(0)
                    case "last":
                        pooled = own[-1]
                    case "cls":
                        pooled = own[0]
                result[place] = pooled.cpu().numpy()
        return np.stack(result)

    def log_probs_at(
        self, rows: Sequence[EncodedText], places: Sequence[Sequence[int]], ids: Sequence[int]
    ) -> list[np.ndarray]:
        """float64 [K, M] of each row: the log-probs that the token after each of its K `places` is one of M `ids`."""
        wanted = torch.as_tensor(list(ids), device=self.device)
        result: list[np.ndarray] = []
        for hidden, own in zip(self._hidden(rows), places, strict=True):
            chosen = hidden[torch.as_tensor(list(own), dtype=torch.int64, device=self.device)]
            log_probs = self.policy.logits(chosen).log_softmax(-1).index_select(-1, wanted)
            result.append(log_probs.double().cpu().numpy())
        return result

    def token_log_probs(self, rows: Sequence[EncodedText], starts: Sequence[int]) -> list[np.ndarray]:
        """float64 [T - s] of each row: the log-probs of its tokens from the one at `starts` on, each given those
        before it. A start is at least 1."""
        result: list[np.ndarray] = []
        for hidden, row, start in zip(self._hidden(rows), rows, starts, strict=True):
            targets = torch.as_tensor(list(row.ids[start:]), dtype=torch.int64, device=hidden.device)
            before = hidden[start - 1 : len(row.ids) - 1]
            at_once = max(1, LOGITS // int(self.model.config.get_text_config().vocab_size))
            parts = [
                self.policy.logits(before[first : first + at_once])
                .log_softmax(-1)
                .gather(-1, targets[first : first + at_once, None])[:, 0]
                for first in range(0, len(targets), at_once)
            ]
            result.append(torch.cat(parts).double().cpu().numpy() if parts else np.empty(0))
        return result

    def _hidden(self, rows: Sequence[EncodedText]) -> list[torch.Tensor]:
        """The last hidden states [T, H] of each row, which are kept for all rows of a call."""
        if not self.policy.head_is_enough:
            raise ConfigError(
                f"models.{self.name}: the model does more after its LM head than is known, so that its probabilities "
                "cannot be read: ask it by a server (a judge with read: probability)"
            )
        result: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        for places, inputs in self._passes(rows):
            hidden = self.policy.causal_lm.base_model(**inputs, use_cache=False).last_hidden_state
            for place, of_row in zip(places, hidden, strict=True):
                result[place] = of_row[: len(rows[place].ids)]
        return result

    def _passes(self, rows: Sequence[EncodedText]) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
        """The rows in passes: their places, and the model's inputs."""
        pad = self.pad_id
        with torch.inference_mode():
            for places in batches([len(row.ids) for row in rows], self.config.batch_tokens if pad is not None else 1):
                yield places, self._inputs([rows[place] for place in places], pad or 0)

    def _inputs(self, rows: Sequence[EncodedText], pad: int) -> dict[str, torch.Tensor]:
        longest = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(ids)
        types = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.as_tensor(list(row.ids))
            mask[number, : len(row.ids)] = 1
            if row.types is not None:
                types[number, : len(row.ids)] = torch.as_tensor(list(row.types))
        inputs = {"input_ids": ids, "attention_mask": mask}
        if rows[0].types is not None:
            inputs["token_type_ids"] = types
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}


def _row(encoding: Any) -> EncodedText:
    return EncodedText(encoding["input_ids"], encoding.get("token_type_ids"))


def batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """The places of rows in passes of at most `most` tokens with padding, the longest first; a longer row is alone.

    The cut depends on the lengths only, so that the same rows give the same numbers.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    result: list[list[int]] = []
    for place in order:
        if result and lengths[result[-1][0]] * (len(result[-1]) + 1) <= most:
            result[-1].append(place)
        else:
            result.append([place])
    return result


def check_frozen(models: Mapping[str, FrozenModelConfig]) -> None:
    """ConfigError names the first frozen model that cannot be had: a path without a model, a device that is not there,
    a key that is not set. Nothing is loaded."""
    for name, config in models.items():
        if config.path is not None:
            located(f"models.{name}.path", config.path)
            device_of(config, f"models.{name}")
        elif config.key is not None and not os.environ.get(config.key):
            raise ConfigError(f"models.{name}.key: the environment variable {config.key} is not set")


@without_retry_lines()
def load_frozen(name: str, config: FrozenModelConfig, head: Head) -> FrozenModel:
    """The model under `models.NAME`, with the part on top that `head` names, in evaluation mode and without gradients.

    ConfigError, with the key, for a path without a model, one that lacks the weights of `head`, a tokenizer with more
    tokens than the model, and a device that is not there.
    """
    key = f"models.{name}"
    device = device_of(config, key)
    dtype = dtype_of(config)
    where, local = located(f"{key}.path", str(config.path))
    more = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, "local_files_only": local}
    try:
        described = cached_file(where, "config.json", revision=config.revision, local_files_only=local)
        digest = hashlib.sha256(Path(str(described)).read_bytes()).hexdigest()
        tokenizer = AutoTokenizer.from_pretrained(where, **more)
        if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
            raise ValueError("it has no tokenizer files")  # transformers then makes an empty tokenizer
        model, loaded = HEADS[head].from_pretrained(
            where, dtype=dtype, attn_implementation=config.attention, output_loading_info=True, **more
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        kind = "folder" if local else "hub model"
        raise ConfigError(f"{key}.path: the {kind} {config.path!r} cannot be loaded: {error}") from error
    # A pooler that nothing here reads is often not saved.
    missing = sorted(one for one in loaded["missing_keys"] if not (head == "none" and one.startswith("pooler.")))
    if missing:
        shown = ", ".join(missing[:3])
        raise ConfigError(
            f"{key}.path: {config.path!r} has no weights for {shown}{' ...' if len(missing) > 3 else ''}, which "
            f"{type(model).__name__} needs: it was not trained for this"
        )
    embedded = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedded:
        raise ConfigError(
            f"{key}.path: the tokenizer has {len(tokenizer)} tokens and the model's embedding only {embedded}: they do "
            "not belong together"
        )
    text = model.config.get_text_config()
    if head == "sequence" and foreign(text, "pad_token_id") is None:
        # A decoder's classifier reads its score at the last token that is no padding, and has to know which that is.
        text.pad_token_id = tokenizer.pad_token_id
    return FrozenModel(name, config, model.to(device).requires_grad_(False).eval(), tokenizer, device, dtype, digest)
